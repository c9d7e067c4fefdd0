"""FSDPModule: what a user may call on a sharded module. Extensions add further methods: see Strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .group import Hold
from .state import groups_below, groups_of, require_state
from .user_code import hides_modes


class FSDPModule:
    """Base class of every module that `fully_shard` was applied to, besides the module's own class.

    Setters act on this module's own groups and, with `recurse`, on those of the sharded modules inside it, too. Call
    them on every rank alike, between steps. The default of `recurse` is torch's: False where torch has no such argument.
    """

    @hides_modes
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own groups and registers the unsharded parameters, in the policy's `param_dtype`.

        Every rank must call it. They stay until `reshard` is called, or a forward with grad, or a backward, ends that
        reshards. Forwards without grad use them, however many; after a weight has changed they gather once more. What
        is written to unsharded parameters is lost. A step of an optimizer gathers them anew.

        Args:
            async_op: return at once, with a handle whose `wait` finishes the work. If a forward finishes it instead,
                the parameters stay no longer than after a gather of its own.
        """
        check_bool("async_op", async_op)
        groups = groups_of(self)
        for group in groups:
            group.root.forget_stale([group])
            group.hold = max(group.hold, Hold.NEXT_PASS)
            group.start_unshard()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    @hides_modes
    def reshard(self) -> None:
        """Frees the unsharded parameters of this module's own groups and registers the sharded ones, with the
        `requires_grad` that they have been given.
        """
        for group in groups_of(self):
            group.parameters.keep_requires_grad()
            group.hold = min(group.hold, Hold.NEXT_PASS)
            group.release()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Chooses whether the next backward passes reduce gradients between ranks.

        Without, unsharded gradients accumulate on each rank in the reduce dtype, and the next backward that reduces
        includes them.

        Args:
            requires_gradient_sync: False for all but the last backward of an accumulation.
            recurse: also for sharded modules inside.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        _set(self, recurse, reduce_gradients=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Chooses whether the next backward passes sum gradients between replicas, too (HSDP, `replicate`).

        Without, each rank accumulates its shard of its own replica's gradients. Where there are no replicas to sum
        between (one axis that shards, one rank), gradients are complete at once.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        _set(self, recurse, all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Chooses whether the unsharded parameters are freed after forward (and gathered again in backward). This
        replaces an int given to `fully_shard`. Where a rank holds whole parameters (one rank, replicas), in the dtype
        in which they compute, modules compute with these themselves: there is nothing to free.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        for group in _set(self, recurse, reshard_after_forward=reshard_after_forward):
            if group.comms.post_forward is not None:
                group.use_comms(group.comms._replace(post_forward=None))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Chooses whether the unsharded parameters are freed after backward.

        Without, the next forward uses them (in gradient accumulation, for example) unless a parameter has changed:
        after a step of any torch optimizer, or an operation in place, they are gathered anew. Call `reshard` after
        changes that no version counter shows: by a collective, or through the `.data` of a local tensor. Where a rank
        holds whole parameters there is nothing to free, as above.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        _set(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Chooses whether the unsharded parameters are gathered when backward reaches the module.

        Without (an embedding's backward doesn't read its weight), they are gathered only if something needs them. Where
        a rank holds whole parameters they are there in any case.
        """
        check_bool("unshard_in_backward", unshard_in_backward)
        _set(self, recurse, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers exactly the groups of `modules` ahead when this module's forward begins, instead of the recorded order.

        Modules under another root stay gathered until that runs. Where ranks hold whole parameters there is nothing to
        gather. An empty list gathers nothing ahead.
        """
        _set(self, False, forward_prefetch=_groups_of("modules", modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers exactly the groups of `modules` ahead when backward reaches this module: see
        `set_modules_to_forward_prefetch`.
        """
        _set(self, False, backward_prefetch=_groups_of("modules", modules))

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Chooses whether zeros are reduced for parameters that got no gradient on this rank: they may have one on other
        ranks.

        Gradients then are reduced when backward leaves the module, not before. A parameter that no rank uses gets a
        gradient of zeros instead of None: on one rank, too.
        """
        check_bool("enable", enable)
        for group in _set(self, recurse, reduce_unused=enable):
            group.counting_is_enough = False

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Chooses how many reductions may be in flight while the next is packed (default 1); each holds its input.

        There may be more if they are small: up to a quarter of a typical group's gradients, and for each one above 1
        all of them. The largest number set below the root counts, from the next forward on. On one rank no reduction
        needs time.

        Raises:
            ValueError: less than 1.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {max_input_buffers}")
        _set(self, recurse, max_reductions=max_input_buffers)

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divides the sum of all ranks' gradients by `factor` instead of the number of ranks.

        On a root, `recurse=True` reaches all groups; by default, only the root's own. All groups of a model on one mesh
        must divide by the same number. Groups on another mesh (experts) may divide by another.

        Raises:
            ValueError: not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor: expected a positive number, got {factor!r}")
        _set(self, recurse, divide_factor=float(factor))

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None, *, recurse: bool = False) -> None:
        """Calls `hook(reduced)` with each flat tensor of reduced shards, before it becomes gradients.

        The tensor has the reduce dtype. The hook may change it in place, for a reduction over further ranks, for
        example. On a mesh that replicates it is called after the all-reduce. On one rank it is called, too, with that
        rank's gradients. None removes it.

        Raises:
            TypeError: `hook` is neither a function nor None.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook: expected a function or None, got {hook!r}")
        _set(self, recurse, reduce_hook=hook)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Chooses whether the memory of the unsharded parameters is kept when they are resharded, so that pointers into
        it stay valid: from the first gather on, and until a parameter is replaced by one of another dtype.

        For CUDA graphs of a part of a module, captured while it is unsharded: replay them where it is unsharded again.
        A graph of whole steps, collectives included, needs no setting, since its memory is its own: capture it behind
        three eager steps and with `.grad` None, without `set_reshard_after_backward(False)`, which may leave the
        gathers out, and leave the optimizer's `zero_grad` out of the loop that replays. Where a rank holds whole
        parameters, in the dtype in which they compute, pointers stay valid anyway.
        """
        check_bool("keep", keep)
        _set(self, recurse, keep_storage=keep)

    # ---- on the root only

    def set_prefetch_budget(self, nbytes: int | None) -> None:
        """Bounds what is gathered ahead, in forward and in backward: as many of the groups that follow as have at most
        `nbytes` of unsharded parameters together, in compute dtypes, besides the group that runs. On the root only.

        Args:
            nbytes: 0 gathers nothing ahead. None, the default: the next group whatever its size, and more only while
                they are together no larger than a typical one.

        Raises:
            RuntimeError: not the root.
            ValueError: less than 0.
        """
        if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool)):
            raise TypeError(f"nbytes: expected an int or None, got {nbytes!r}")
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"nbytes: expected at least 0, got {nbytes}")
        root_of(self, "set_prefetch_budget").set(prefetch_budget=nbytes)

    def set_saved_tensor_hooks(self, enabled: bool) -> None:
        """Chooses how backward finds out that it needs a group's unsharded parameters. On the root only.

        Args:
            enabled: True, the default: every weight that autograd has saved is watched, and gathered when backward
                reads it, whatever way the gradient came. False: gradients must enter each sharded module through a
                tensor that it returned, as torch's FSDP2 expects. That saves about a third of the host time; a gradient
                that comes another way, from a tensor that a forward hook has kept for example, is refused by autograd:
                "one of the variables needed for gradient computation has been modified by an inplace operation".
                What a function saves of a weight's `.data` is not watched then: keep the hooks for such functions.

        Raises:
            RuntimeError: not the root, or during a forward or backward.
        """
        check_bool("enabled", enabled)
        root = root_of(self, "set_saved_tensor_hooks")
        if root.running or root.is_in_backward():
            raise RuntimeError("saved-tensor hooks can't be switched while a forward or backward runs")
        root.set(saved_tensor_hooks=enabled)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Chooses whether the forwards that have run are forgotten when a backward ends (True, the default). False
        announces further backward passes through the same forwards, and gathers ahead in those, too. It acts on all
        modules under the root, whichever it is called on.
        """
        check_bool("is_last_backward", is_last_backward)
        require_state(self).root.set(is_last_backward=is_last_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """Has the next forward of the root wait for `event` (a torch.Event), once, besides what the current stream has
        been given to do: for an optimizer that steps on a stream of its own. It may be called on any module under the
        root. None: wait for none.

        Raises:
            TypeError: `event` has no method `wait`.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"event: expected a torch.Event or None, got {event!r}")
        require_state(self).root.post_optim_event = event

    @hides_modes
    def reset_iter_state(self) -> None:
        """Drops what an exception in forward or backward left half done: gathered parameters, gradients in flight and
        unsynchronized ones. On the root only. After a failed backward it is done by itself, except that gradients of
        earlier, complete passes stay.
        """
        root_of(self, "reset_iter_state").reset()


class UnshardHandle:
    """A gather in flight, started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    @hides_modes
    def wait(self) -> None:
        """Finishes the gather and registers the unsharded parameters. Further calls do nothing. The next forward of the
        module waits by itself.
        """
        groups, self._groups = self._groups, []
        for group in groups:
            if group.hold < Hold.NEXT_PASS:  # a forward, or reshard(), has given it up since
                continue
            group.unshard(for_backward=group.root.backward is not None)
            group.root.use(group)
            group.hold = Hold.USER
            group.root.settle_transfers()


def _groups_of(name: str, modules: Any) -> tuple[Any, ...]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{name}: expected modules that fully_shard was applied to, got {type(module).__name__}")
    return tuple(group for module in modules for group in groups_of(module))


def chosen_groups(module: Any, recurse: bool) -> list[Any]:
    """Returns the groups that a setter with `recurse` acts on."""
    check_bool("recurse", recurse)
    return groups_below(module) if recurse else groups_of(module)


def _set(module: Any, recurse: bool, **changes: Any) -> list[Any]:
    groups = chosen_groups(module, recurse)
    for group in groups:
        group.set(**changes)
    return groups


def root_of(module: Any, what: str) -> Any:
    """Returns the Root of a module that must be the outermost sharded one; `what` is the method that asks."""
    state = require_state(module)
    if state.root.state is not state:
        raise RuntimeError(f"{what}: expected the root, the outermost sharded module, got {state}")
    return state.root


def check_bool(name: str, value: object) -> None:
    """Raises TypeError if `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
