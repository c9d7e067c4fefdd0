"""Decides when a group is unsharded, resharded and reduced, in forward and in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from . import compat
from .compat import num_dispatch_modes, num_function_modes, runs_transform
from .mesh import DataMesh
from .param_group import ParamGroup
from .parameter import FSDPParam
from .policy import COPIED, GATHERED, GATHERING, SHARDED, UNSHARDED, GroupSettings, Hold, Phase
from .user_code import are_in_force, outside, run_hidden

__all__ = ["COPIED", "GATHERED", "GATHERING", "SHARDED", "UNSHARDED", "FSDPParamGroup", "Hold", "Phase"]


class FSDPParamGroup(ParamGroup):
    """Runs a group of parameters in forward and backward.

    `state`: the FSDPState of the modules that it belongs to. `versions`: those of the shards of which its unsharded
    parameters were made when they were last gathered on purpose; saved weights are compared with that.
    `ready_in`: the backward pass for which it is unsharded, if any. `counting_is_enough`: in the last backward, the
    last gradient came when the group could be resharded; no hook on inputs is needed.
    """

    state: Any

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], mesh: DataMesh, settings: GroupSettings
    ) -> None:
        super().__init__(modules, params, mesh, settings)
        self.versions: tuple[int, ...] = ()
        self.ready_in: object = None
        self.counting_is_enough = not params
        # The dicts of full backward hooks of each of the group's modules; empty until a backward asks.
        self.backward_hooks: list[dict[int, Any]] = []

    # ---- use

    def pre_forward(self, in_backward: bool) -> None:
        """Unshards and registers for a forward. `in_backward`: checkpointing runs it again."""
        root = self.root
        if in_backward:
            self.pre_backward(recomputes=True)  # gradients follow at once
        self.unshard(for_backward=root.backward is not None)
        root.use(self)
        if not in_backward and root.settings.saved_tensor_hooks and self.gathered_at != self.versions:
            assert self.gathered_at is not None, "noted at each gather for a forward"
            self.versions = self.gathered_at  # else the same object: no time to compare

    def use_in_backward(self) -> None:
        """Unshards, unless that is done: backward is about to read a weight."""
        if self.ready_in is None:
            self.pre_backward()

    def pre_backward(self, recomputes: bool = False) -> None:
        """Unshards when backward reaches the group, needs a weight of it, or runs its forward again (checkpointing)."""
        if runs_transform() or ((num_dispatch_modes() or num_function_modes()) and are_in_force()):
            with outside():
                return self.pre_backward(recomputes)
        root = self.root
        root.enter_backward(recomputes)
        if self.ready_in is None:
            self.ready_in = root.backward
            if root.settings.saved_tensor_hooks:
                now = self.shard_versions()
                if now != self.versions:
                    self.versions = now
            self.unshard(for_backward=root.backward is not None)
            root.use(self)
            for ahead in root.prefetcher.in_backward(self):
                ahead.start_unshard(for_backward=True)

    def first_gradient(self) -> None:
        """Notes that backward has come to the group: the first gradient of a bucket is complete."""
        if self.ready_in is None:
            enter = self.root.enter_backward
            if (num_dispatch_modes() or num_function_modes()) and are_in_force():
                run_hidden(enter)
            else:
                enter()

    def last_gradient(self) -> None:
        """Reshards, when the gradients of all trainable parameters are complete, unless something else is to come."""
        # Frozen weights may be needed after the last gradient of the others, and parameters by other checkpointed
        # regions (reentrant checkpointing runs a backward inside the one that began).
        if all(self.parameters.trainable) and self.root.backward.task == compat.graph_task():
            # A full backward hook of a module comes later, with the gradients of the module's inputs.
            has_hooks = any(self.backward_hooks or self._find_backward_hooks())
            self.counting_is_enough = not (has_hooks or self.settings.reduce_unused)
            if not has_hooks:
                self.reshard_after_backward()

    def _find_backward_hooks(self) -> list[dict[int, Any]]:
        own = [module._backward_hooks for module in self.state.own_modules()]
        self.backward_hooks = [*own, compat.hooks_of_all_modules]
        return self.backward_hooks

    # ---- after use

    def post_forward(self, backward_follows: bool, failed: bool = False, keeps: bool = False) -> None:
        """Registers the sharded parameters after a forward, and frees the unsharded ones' data, or keeps some of it.

        Without a backward, they stay until a weight changes if the user wants that: each token that a model generates
        would take a gather of each group otherwise. `failed`: the forward has raised, perhaps after writing to them.
        `keeps`: backward needs them at once.
        """
        choice = self.settings.reshard_after_forward
        if not backward_follows and not failed and (self.hold is Hold.USER or choice is False):
            if self.hold is not Hold.USER:
                self.hold = Hold.NEXT_PASS
                self.unregister()
            return
        if choice is None:
            keeps = keeps or self.root.group is self or self in self.root.prefetcher.needed_at_once
        else:
            keeps = choice is False
        if backward_follows and keeps:
            stays = Hold.BACKWARD if self.settings.reshard_after_backward else Hold.NEXT_PASS
            self.hold = max(self.hold, stays)
            self.unregister()
        elif backward_follows and self.comms.post_forward is not None and self.is_unsharded and self.root.frees_memory:
            self.hold = Hold.BACKWARD
            self.shrink()
        else:
            self.reshard_anyway()

    def reshard_if_idle(self) -> None:
        """Reshards, unless a forward of the group runs (a backward may run inside it)."""
        self.ready_in = None
        if self.state.running:
            self.hold = Hold.NOTHING if self.hold is Hold.BACKWARD else self.hold
        else:
            self.reshard_anyway()

    def reshard_after_backward(self) -> None:
        """Reshards, or keeps the unsharded parameters' data for the next pass if the user wants that."""
        if self.settings.reshard_after_backward or self.state.running or not self.is_unsharded:
            if self.hold is Hold.USER:
                self.hold = Hold.NEXT_PASS
            self.reshard_if_idle()
        else:
            self.ready_in = None
            self.hold = max(self.hold, Hold.NEXT_PASS)
            self.unregister()

    def reshard_stale(self) -> None:
        """Frees, between passes, what earlier passes have left, unless another one may use it. What the user holds
        stays held: the next forward gathers it anew.
        """
        self.root.is_in_backward()  # one that has failed is over
        hold = self.hold
        if hold is not Hold.NOTHING and not (hold >= Hold.NEXT_PASS and self.is_up_to_date()):
            self.reshard_if_idle()
            self.hold = hold if hold is Hold.USER else self.hold

    def reshard_anyway(self) -> None:
        """Reshards, whatever holds the unsharded parameters."""
        self.hold = Hold.NOTHING
        self.reshard(free=self.root.frees_memory)

    def post_backward(self) -> None:
        """Reduces and reshards what is left of one forward, when the gradients of all its inputs are computed."""
        self.gradients.flush()
        self.reshard_after_backward()
