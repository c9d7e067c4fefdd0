"""Has the methods of FSDPModule on the root that are not part of the core."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..features.optimizer_in_backward import use_in_backward
from ..tools.audit import AuditAtDebugLevel
from . import collectives
from .module import check_bool
from .passes import finalize, reduce_unsynchronized, reset, wait_for
from .state import require_state
from .user_code import hides_modes

__all__ = ["GradientReductionHandle", "RootMethods"]


class RootMethods:
    """Has the methods of FSDPModule that act on a whole model. Call them on every rank alike, between steps."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Chooses whether a backward ends the forwards that have run, or further backward passes go through them.

        With several backward passes through the same forwards (`retain_graph=True`, a loss for each output), pass False
        before all but the last. Then the record of the forwards is kept, so that their groups are gathered ahead in
        each of these passes. Where ranks hold whole parameters nothing is gathered. Numbers are right in any case. It
        may be called on any module under the root, and acts on the whole model.

        Args:
            is_last_backward: True, the default: no backward comes back to the forwards that have run. False: one does.
        """
        check_bool("is_last_backward", is_last_backward)
        require_state(self).root.set(is_last_backward=is_last_backward)

    @hides_modes
    def reset_iter_state(self) -> None:
        """Drops what an exception in forward or backward has left half done. On the root only.

        That is: unsharded parameters, gradients on their way, and unsynchronized gradients. After a failed backward
        this happens by itself, but then the gradients of earlier, complete passes stay. Every rank must call it.

        Raises:
            RuntimeError: not the root.
        """
        reset(root_of(self, "reset_iter_state"))

    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """Bounds the bytes of unsharded parameters that are gathered ahead, in forward and backward. On the root only.

        Besides the group that runs, as many of the groups that follow are gathered as have at most `nbytes` together,
        in their compute dtypes. The same bound says how many groups stay unsharded behind the last one of a forward.
        Where ranks hold whole parameters in the dtype in which they compute, nothing is gathered. Every rank must call
        it.

        Args:
            nbytes: 0 gathers nothing ahead. None, the default: the next group whatever its size, and more only while
                they are together no larger than a typical group.

        Raises:
            TypeError: neither an int nor None.
            RuntimeError: not the root.
            ValueError: less than 0.

        Example:
            `model.set_prefetch_budget(2 * bytes_of_a_block)` gathers two blocks ahead.
        """
        if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool)):
            raise TypeError(f"nbytes: expected an int or None, got {nbytes!r}")
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"nbytes: expected at least 0, got {nbytes}")
        root_of(self, "set_prefetch_budget").set(prefetch_budget=nbytes)

    def set_saved_tensor_hooks(self, enabled: bool) -> None:
        """Chooses how backward finds out that it needs the unsharded parameters of a group. On the root only.

        Args:
            enabled: True, the default: each weight that autograd has saved is watched, and gathered when backward reads
                it, whatever way the gradient came. False: gradients must enter each sharded module through a tensor
                that it returned, as torch's FSDP2 expects. That saves about a third of the host time. Autograd refuses
                a gradient that comes another way, for example from a tensor that a forward hook has kept: "one of the
                variables needed for gradient computation has been modified by an inplace operation". Keep the hooks for
                functions that save a weight's `.data`, which is not watched then.

        Raises:
            RuntimeError: not the root, or during a forward or backward.
        """
        check_bool("enabled", enabled)
        root = root_of(self, "set_saved_tensor_hooks")
        if root.running or root.is_in_backward():
            raise RuntimeError("saved-tensor hooks can't be switched while a forward or backward runs")
        root.set(saved_tensor_hooks=enabled)
        for group in root.groups:
            group.versions = ()  # what earlier graphs have saved is refused
        if not enabled:
            root.note_unseen()

    def set_running_stats_averaging(self, enabled: bool) -> None:
        """Chooses whether ranks average `running_mean` and `running_var` of BatchNorm and the like. On the root only.

        They are averaged, all in one all-reduce, when a forward in training mode ends, so they are right whenever they
        are read; where checkpointing runs a BatchNorm again in backward, when that is over. BatchNorm still normalises
        with the statistics of each rank's own rows. Every rank must call it.

        Args:
            enabled: True, the default. False: each rank keeps those of its own rows. On one rank both are the same.

        Raises:
            RuntimeError: not the root.
        """
        check_bool("enabled", enabled)
        root = root_of(self, "set_running_stats_averaging")
        root.set(extras={**root.settings.extras, "average_running_stats": enabled})

    def set_debug_level(self, level: int) -> None:
        """Chooses what ranks verify of each other while they train. On the root only, on every rank.

        Args:
            level: 1: before each collective of any group below the root, on any backend, ranks compare which group it
                is, what is done with it (also forward or backward), and the sizes of its tensors. If they differ, all
                raise before anything is sent. If a rank does not answer in time, or has died, the errors of the others
                list where each process was. Before the next forward of the root, the first rank logs what `check`
                finds. Ranks wait for each other at each collective, so training is slower. On one rank nothing is
                compared. 0: none of this; on gloo, group, kind and sizes are compared all the same. The default is that
                of the environment variable FSDP2_DEBUG when `fully_shard` is called, else 0.

        Raises:
            ValueError: another level.
            RuntimeError: not the root, or during a forward or backward.
        """
        if level not in (0, 1) or isinstance(level, bool):
            raise ValueError(f"level: expected 0 or 1, got {level!r}")
        root = root_of(self, "set_debug_level")
        if root.running or root.is_in_backward():
            raise RuntimeError("set_debug_level: call it between steps, not during a forward or backward")
        for group in root.groups:
            collectives.choose(group, checked=level == 1)
        root.events.of(AuditAtDebugLevel).ask(root, level == 1)

    def set_post_optim_event(self, event: Any) -> None:
        """Has the next forward of the root wait for `event`, once, before it reads the parameters.

        It is for an optimizer that steps on a stream of its own: the forward waits for the event in addition to what
        the current stream has been given to do. It may be called on any module under the root.

        Args:
            event: a torch.Event that was recorded behind the step. None: wait for none.

        Raises:
            TypeError: `event` has no method `wait`.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"event: expected a torch.Event or None, got {event!r}")
        wait_for(require_state(self).root, event)

    @hides_modes
    def set_optimizer_in_backward(self, optimizer: Optimizer | None) -> None:
        """Has backward step `optimizer` on gradients as soon as they are reduced, and clear them. On the root only.

        Few gradients then exist at once. Do not call `optimizer.step()` yourself. When backward returns, all steps are
        done (with `set_manual_backward_finalization`, when that is finished). With CPUOffloadPolicy the steps, and
        hooks of parameters, run on another thread while backward goes on: neither may communicate.

        A pass without synchronisation (`set_requires_gradient_sync`, `set_requires_all_reduce`) does not step; the one
        that reduces its gradients steps once. After a step, `.grad` holds a placeholder that raises when it is used:
        clipping by norm and GradScaler need all gradients before the first step. A backward that raises may have
        stepped on some parameters. Every rank must call it.

        Args:
            optimizer: one that keeps its state per parameter, as those of torch.optim do. None: you step again.

        Raises:
            TypeError: neither an optimizer nor None.
            ValueError: it needs a closure, or has parameters that are not sharded here.
            RuntimeError: not the root, or during a backward pass. Later, in backward: a second gradient of a parameter
                that was stepped on in the same pass (reentrant checkpointing).
        """
        root = root_of(self, "set_optimizer_in_backward")
        if root.is_in_backward():
            raise RuntimeError("set_optimizer_in_backward: call it between backward passes, not during one")
        use_in_backward(root, optimizer)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Chooses whether reductions may be in flight after backward, until `finalize_backward`. On the root only.

        Args:
            enabled: True: `.grad` is complete only after `finalize_backward`, also on one rank. Call it before you clip
                or step. False, the default: `.grad` is complete when backward returns.

        Raises:
            RuntimeError: not the root, or during a backward pass.
        """
        check_bool("enabled", enabled)
        root = root_of(self, "set_manual_backward_finalization")
        if root.is_in_backward():
            raise RuntimeError("set_manual_backward_finalization: call it between backward passes, not during one")
        root.set(finalize_backward=not enabled)

    @hides_modes
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finishes the reductions of all backward passes since the last call, and sets `.grad`. On the root only.

        It also reduces unsynchronized gradients of earlier passes, if synchronisation has been switched on again since
        (`set_requires_gradient_sync`). Every rank must call it.

        Args:
            async_op: True returns a handle whose `wait` finishes the work. Call `wait` before gradients are used, and
                before other work on this root begins.

        Returns:
            A GradientReductionHandle with `async_op=True`, else None.

        Raises:
            RuntimeError: not the root.
        """
        check_bool("async_op", async_op)
        root = root_of(self, "finalize_backward")
        reduce_unsynchronized(root)
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None


class GradientReductionHandle:
    """Reductions in flight, which `FSDPModule.finalize_backward(async_op=True)` leaves to be finished."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resets = root.num_resets

    @hides_modes
    def wait(self) -> None:
        """Finishes them. Further calls do nothing.

        Raises:
            RuntimeError: `reset_iter_state` was called since.
        """
        root, self._root = self._root, None
        if root is None:
            return
        if root.num_resets != self._resets:
            raise RuntimeError("the reductions this handle waits for were dropped by reset_iter_state")
        finalize(root)


def root_of(module: Any, what: str) -> Any:
    """Returns the Root of a module that must be the outermost sharded one; `what` is the method that asks.

    Raises:
        RuntimeError: it is not.
    """
    state = require_state(module)
    if state.root.state is not state:
        raise RuntimeError(f"{what}: expected the root, the outermost sharded module, got {state}")
    return state.root
