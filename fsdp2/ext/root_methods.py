"""What a user may call on the root, the outermost sharded module, for all that is sharded below it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..module import GradientReductionHandle
from ..core.user_code import hides_modes
from ..core.state import FSDPState, require_state
from ..stepper import Stepper


class RootMethods:
    """A part of FSDPModule."""

    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """Bound what is gathered ahead, in forward and in backward: as many of the groups that follow as have at most
        `nbytes` of full parameters together, in compute dtypes, besides the group that runs. On the root only.

        Args:
            nbytes: 0 gathers nothing ahead. None, the default: the next group whatever its size, and more only while
                they are together no larger than a typical one.

        Where ranks hold whole parameters, in the dtype in which they compute, nothing is gathered: any bound is met.

        Raises:
            RuntimeError: not the root.
            ValueError: less than 0.
        """
        if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool)):
            raise TypeError(f"nbytes: expected an int or None, got {nbytes!r}")
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"nbytes: expected at least 0, got {nbytes}")
        _root(self, "set_prefetch_budget").context.prefetcher.budget = nbytes

    def set_saved_tensor_hooks(self, enabled: bool) -> None:
        """Choose how backward finds out that it needs a group's full parameters. On the root only.

        Args:
            enabled: True, the default: every weight that autograd has saved is watched, and gathered when backward
                reads it, whatever way the gradient came. False: gradients must enter each sharded module through a
                tensor that it returned, as torch's FSDP2 expects. That saves about a third of the host time; a gradient
                that comes another way, from a tensor that a forward hook has kept say, is refused by autograd:
                "one of the variables needed for gradient computation has been modified by an inplace operation".
                What a function saves of a weight's `.data` is not watched then: keep the hooks for such functions.

        Raises:
            RuntimeError: not the root, or during a forward or backward.
        """
        check_bool("enabled", enabled)
        context = _root(self, "set_saved_tensor_hooks").context
        if context.running or context.is_in_backward():
            raise RuntimeError("saved-tensor hooks can't be switched while a forward or backward runs")
        context.notice_saved_tensors(enabled)

    def set_running_stats_averaging(self, enabled: bool) -> None:
        """Choose whether the ranks average what BatchNorm and its like keep for evaluation, `running_mean` and
        `running_var`, once per step, in one all-reduce of them all. On the root only; on every rank.

        Args:
            enabled: True, the default. False: each rank keeps those of its own rows. On one rank both are the same.

        Raises:
            RuntimeError: not the root.
        """
        check_bool("enabled", enabled)
        _root(self, "set_running_stats_averaging").context.rank_guard.stats.are_averaged = enabled

    def set_debug_level(self, level: int) -> None:
        """Choose what ranks verify of each other while they train. On the root only; on every rank, between steps.

        Args:
            level: 1: before each collective of any group below the root, on any backend, ranks compare which group it
                is, what is done with it (also forward or backward) and the sizes of its tensors: if they differ, all
                raise, before anything is sent. When a rank does not answer in time, or has died, the errors of others
                list where each process was. Ranks wait for each other at each collective. Before the next forward of
                the root, `check` looks at the model, and the first rank logs what it finds. 0: none of this; on gloo,
                group, kind and sizes are compared all the same. One rank has nobody to compare with, but `check` looks.
                The default is that of the environment variable FSDP2_DEBUG when `fully_shard` is called, else 0.

        Raises:
            ValueError: another level.
            RuntimeError: not the root, or during a forward or backward.
        """
        if level not in (0, 1) or isinstance(level, bool):
            raise ValueError(f"level: expected 0 or 1, got {level!r}")
        context = _root(self, "set_debug_level").context
        if context.running or context.is_in_backward():
            raise RuntimeError("set_debug_level: call it between steps, not during a forward or backward")
        for state in context.states:
            state.group.choose_comms(checked=level == 1)
        context.audits_next_pass = level == 1

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Announce further backward passes through the forwards that have run: the record of these is kept, so that
        they are gathered ahead in those passes, too. For all modules under the root, whichever it is called on. Where
        nothing is gathered, no order is needed.
        """
        check_bool("is_last_backward", is_last_backward)
        require_state(self).context.is_last_backward = is_last_backward

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward of the root wait for `event` (a torch.Event), once, besides what the current stream has
        been given to do. For an optimizer that steps on a stream of its own. It may be called on any module under the
        root. None: wait for none.

        Raises:
            TypeError: `event` has no method `wait`.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"event: expected a torch.Event or None, got {event!r}")
        require_state(self).context.post_optim_event = event

    @hides_modes
    def set_optimizer_in_backward(self, optimizer: Optimizer | None) -> None:
        """Have backward passes step `optimizer`, on a few parameters at a time, as soon as their gradients are reduced,
        and clear these: then only few gradients exist at once. On the root only.

        With CPUOffloadPolicy the steps run on another thread while backward goes on, and hooks of the parameters, too:
        neither may communicate. When backward returns (manual finalization: when that does) all are done.

        A pass whose gradients wait (`set_requires_gradient_sync`, `set_requires_all_reduce`) does not step; the one
        that reduces them steps once. After a step, `.grad` holds a stand-in that refuses to be used: clipping by norm
        and GradScaler need all gradients before the first step. A backward that raises may have stepped on some.

        Args:
            optimizer: one that keeps its state per parameter, as those of torch.optim do. None: step by hand again.

        Raises:
            TypeError: neither an optimizer nor None.
            ValueError: it needs a closure, or has parameters that are not sharded here.
            RuntimeError: not the root, or during a backward pass. Later, in backward: a second gradient of a parameter
                that was stepped on in the same pass (reentrant checkpointing).
        """
        context = _root(self, "set_optimizer_in_backward").context
        if context.is_in_backward():
            raise RuntimeError("set_optimizer_in_backward: call it between backward passes, not during one")
        for state in context.states:
            state.group.adopt_replacements()
        params = [param.sharded for state in context.states for param in state.group.params]
        stepper = None if optimizer is None else Stepper(optimizer, params, context.root.group.mesh.device)
        context.finalize()  # what is under way belongs to the one before
        for state in context.states:
            state.group.gradients.steps.stepper = stepper

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave reductions in flight at the end of backward, until `finalize_backward` is called. On the root only. So
        it is on one rank, too: `.grad` shows what there is when that is called.

        Raises:
            RuntimeError: not the root, or during a backward pass.
        """
        check_bool("enabled", enabled)
        context = _root(self, "set_manual_backward_finalization").context
        if context.is_in_backward():
            raise RuntimeError("set_manual_backward_finalization: call it between backward passes, not during one")
        context.finalizes_by_itself = not enabled

    @hides_modes
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finish the reductions of all backward passes since the last call; then `.grad` is there. On the root only.

        Gradients that wait, of passes without synchronisation, are reduced now, if that has been switched on again
        (`set_requires_gradient_sync`) since.

        Args:
            async_op: return a handle, whose `wait` does it: before gradients are used, or work on this root begins.
        """
        check_bool("async_op", async_op)
        context = _root(self, "finalize_backward").context
        context.synchronise_waiting()
        handle = GradientReductionHandle(context)
        if async_op:
            return handle
        handle.wait()
        return None

    @hides_modes
    def reset_iter_state(self) -> None:
        """Drop what an exception in forward or backward left half done: gathered parameters, gradients on their way and
        those that wait unsynchronised. On the root only. After a failed backward it is done by itself, except that
        gradients of earlier, complete passes stay.
        """
        _root(self, "reset_iter_state").context.reset()


def _root(module: Any, what: str) -> FSDPState:
    state = require_state(module)
    is_root: bool = state.context.root is state
    if not is_root:
        raise RuntimeError(f"{what}: expected the root, the outermost sharded module, got {state}")
    return state


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
