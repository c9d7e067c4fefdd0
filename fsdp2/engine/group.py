"""Unshards and reshards a group at each step of forward and backward, and reduces the gradients that are left."""

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
    """Adds to ParamGroup the steps of forward and backward, which hooks (state.py, autograd.py) and Root call.

    `state`: the FSDPState of the modules that it belongs to. `versions`: version counters of the shards when they were
    last gathered for a forward, or when backward last reached the group; SavedTensors compares saved weights with them.
    `reached_by`: the BackwardPass that has reached the group, until it reshards; else None. `needs_no_input_hooks`: the
    last backward resharded the group as soon as all gradients had been counted.
    """

    state: Any

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], mesh: DataMesh, settings: GroupSettings
    ) -> None:
        super().__init__(modules, params, mesh, settings)
        self.versions: tuple[int, ...] = ()
        self.reached_by: object = None
        self.needs_no_input_hooks = not params
        # Dicts of backward hooks: of the modules that the state owns, and torch's global one; found in backward.
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
        if self.parameters.references is None:
            self.parameters.are_kept()  # counts references for the first time

    def before_unpack(self) -> None:
        """Calls `pre_backward` unless backward has reached the group: a saved weight is about to be unpacked."""
        if self.reached_by is None:
            self.pre_backward()

    def pre_backward(self, recomputes: bool = False) -> None:
        """Unshards when backward reaches the group, needs a weight of it, or runs its forward again (checkpointing)."""
        if runs_transform() or ((num_dispatch_modes() or num_function_modes()) and are_in_force()):
            with outside():
                return self.pre_backward(recomputes)
        root = self.root
        root.enter_backward(recomputes)
        if self.reached_by is None:
            self.reached_by = root.backward
            if root.settings.saved_tensor_hooks:
                now = self.shard_versions()
                if now != self.versions:
                    self.versions = now
            self.unshard(for_backward=root.backward is not None)
            root.use(self)
            for ahead in root.prefetcher.in_backward(self):
                ahead.start_unshard(for_backward=True)

    def first_gradient(self) -> None:
        """Begins the backward pass of the root, unless it has begun: the first gradient of a bucket has arrived."""
        if self.reached_by is None:
            enter = self.root.enter_backward
            if (num_dispatch_modes() or num_function_modes()) and are_in_force():
                run_hidden(enter)
            else:
                enter()

    def last_gradient(self) -> None:
        """Reshards when the gradients of all buckets have arrived, and notes whether inputs need hooks.

        It leaves that to a later hook if a parameter is frozen, a module has full backward hooks, or another backward
        runs inside this one.
        """
        # Frozen weights may be needed after the last gradient of the others, and parameters by other checkpointed
        # regions (reentrant checkpointing runs a backward inside the one that began).
        if all(self.parameters.trainable) and self.root.backward.task == compat.graph_task():
            # A full backward hook of a module comes later, with the gradients of the module's inputs.
            has_hooks = any(self.backward_hooks or self._find_backward_hooks())
            self.needs_no_input_hooks = not (has_hooks or self.settings.reduce_unused)
            if not has_hooks:
                self.finish_backward()

    def _find_backward_hooks(self) -> list[dict[int, Any]]:
        own = [module._backward_hooks for module in self.state.own_modules()]
        self.backward_hooks = [*own, compat.hooks_of_all_modules]
        return self.backward_hooks

    # ---- after use

    def post_forward(
        self, backward_follows: bool, failed: bool = False, keeps: bool = False, has_run: bool = False
    ) -> None:
        """Reshards after a forward, or keeps the unsharded parameters or secondary shards, by `hold` and settings.

        Without a backward, they stay until a weight changes if the user wants that: each token that a model generates
        would take a gather of each group otherwise. `failed`: the forward has raised, perhaps after writing to them.
        `keeps`: keep them for backward if the user has not set `reshard_after_forward`. `has_run`: a module's own code
        has run. If it has left one where something else can read it in backward (`ctx.weight = weight` in an autograd
        function, hooks of a user's own for saved tensors, a list), their memory stays as it is until then: nothing
        would gather for such a reader. Ranks communicate as ever, since others may have left none.
        """
        choice = self.settings.reshard_after_forward
        if not backward_follows and not failed and (self.hold is Hold.USER or choice is False):
            if self.hold is not Hold.USER:
                self.hold = Hold.NEXT_PASS
                self.unregister()
            return
        if choice is None:
            keeps = keeps or self.root.group is self or self in self.root.prefetcher.first_in_backward
        else:
            keeps = choice is False
        if backward_follows and keeps:
            stays = Hold.BACKWARD if self.settings.reshard_after_backward else Hold.NEXT_PASS
            self.hold = max(self.hold, stays)
            self.unregister()
            return
        is_kept = has_run and backward_follows and self.parameters.are_kept() and not self.frees_viewed_storage
        if is_kept:
            self.root.kept.add(self)
            for notify in self.events.memory_kept:
                notify(self)
        frees = self.root.frees_memory and not is_kept
        if backward_follows and self.comms.post_forward is not None and self.is_unsharded and self.root.frees_memory:
            self.hold = Hold.BACKWARD
            self.shrink(frees)
        else:
            self.hold = Hold.NOTHING
            self.reshard(frees)

    def reshard_if_idle(self) -> None:
        """Reshards and clears `hold`, unless a forward or a full_params block uses the group."""
        self.reached_by = None
        if self.state.running:
            self.hold = Hold.NOTHING if self.hold is Hold.BACKWARD else self.hold
        else:
            self.hold = Hold.NOTHING
            self.reshard(free=self.root.frees_memory)

    def finish_backward(self) -> None:
        """Reshards, or keeps the data for the next pass if the setting `reshard_after_backward` is False."""
        if self.settings.reshard_after_backward or self.state.running or not self.is_unsharded:
            if self.hold is Hold.USER:
                self.hold = Hold.NEXT_PASS
            self.reshard_if_idle()
        else:
            self.reached_by = None
            self.hold = max(self.hold, Hold.NEXT_PASS)
            self.unregister()

    def reshard_stale(self) -> None:
        """Reshards, between passes, unless `hold` is NEXT_PASS or more and nothing has changed. Keeps Hold.USER."""
        self.root.is_in_backward()  # one that has failed is over
        hold = self.hold
        if hold is not Hold.NOTHING and not (hold >= Hold.NEXT_PASS and self.is_up_to_date()):
            self.reshard_if_idle()
            self.hold = hold if hold is Hold.USER else self.hold

    def post_backward(self) -> None:
        """Reduces what buckets have left, and reshards. It is called only if forward has hooked the inputs."""
        self.gradients.flush()
        self.finish_backward()
