"""FSDPModule: what a user may call on a sharded module. Extensions add further methods, see Strategies."""

from __future__ import annotations

from typing import Any

from .policy import Hold
from .state import groups_below, groups_of
from .user_code import hides_modes

__all__ = ["FSDPModule", "UnshardHandle"]


class FSDPModule:
    """The methods that `fully_shard` of the core adds to the class of a module; `fsdp2.FSDPModule` has more.

    Call each method on every rank, with the same arguments, between steps. A method acts on the groups of this module;
    with `recurse=True` also on those of all sharded modules inside it.
    """

    @hides_modes
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's own groups and registers the unsharded ones in its modules.

        Unsharded parameters are plain tensors in the policy's `param_dtype`. They stay until `reshard` is called, or
        until a forward with grad or a backward that reshards has ended. Forwards without grad use them, however many
        there are; they gather again, once, after a weight has changed. What you write to unsharded parameters is lost:
        write inside `full_params(module, writeback=True)`. Every rank must call it.

        Args:
            async_op: True returns at once, with a handle. `wait` of the handle, or the next forward of this module,
                finishes the all-gather. If a forward finishes it, the parameters stay no longer than after an
                all-gather of its own.

        Returns:
            An UnshardHandle with `async_op=True`, else None.

        Example:
            `block.unshard(async_op=True)` begins the all-gather of a block before other work.
        """
        check_bool("async_op", async_op)
        groups = groups_of(self)
        for group in groups:
            group.reshard_stale()
            group.hold = max(group.hold, Hold.NEXT_PASS)
            group.start_unshard()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    @hides_modes
    def reshard(self) -> None:
        """Frees the unsharded parameters of this module's own groups and registers the sharded ones.

        The sharded parameters take the `requires_grad` that the unsharded ones have been given. It does not
        communicate.

        Raises:
            RuntimeError: an unsharded parameter was written to, or its `.data` was assigned; the change is lost.
        """
        groups = groups_of(self)
        try:
            for group in groups:
                group.parameters.take_requires_grad()
                for notify in group.events.before_reshard:
                    notify(group)
        finally:
            for group in groups:
                group.hold = min(group.hold, Hold.NEXT_PASS)
                group.reshard_if_idle()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Chooses whether the backward passes that follow reduce gradients over the ranks.

        While it is False, unsharded gradients accumulate on each rank, in the reduce dtype. `.grad` then holds a
        placeholder that raises when it is used, except by `zero_grad`. The next backward that reduces includes the
        accumulated gradients. Every rank must call it. Unsharded gradients need as much memory as all parameters in the
        reduce dtype.

        Args:
            requires_gradient_sync: False for all backward passes of an accumulation but the last. The default is True.
            recurse: True, the default, also sets it for the sharded modules inside this one.

        Example:
            `model.set_requires_gradient_sync(i == last)` before each backward of an accumulation.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        set_groups(self, recurse, reduce_gradients=requires_gradient_sync, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Chooses whether the backward passes that follow sum gradients over replicas (HSDP, `replicate`).

        While it is False, each replica reduce-scatters its own gradients, and each rank accumulates its sharded ones.
        `.grad` then holds a placeholder that raises when it is used, except by `zero_grad`. The next backward with True
        sums all of them. Where there are no replicas (a mesh of one axis that shards, one rank), gradients are complete
        at once. Every rank must call it.

        Args:
            requires_all_reduce: False for all backward passes of an accumulation but the last. The default is True.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        set_groups(self, recurse, all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Chooses whether forward frees the unsharded parameters, so that backward gathers them again.

        It replaces what `fully_shard` was given, also an int. It has no effect where a rank holds whole parameters (one
        rank, or replicas only) in the dtype in which they compute: modules then compute with these themselves. Every
        rank must call it.

        Args:
            reshard_after_forward: True frees them: less memory, one more all-gather. False keeps them until backward
                ends.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        set_groups(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Chooses whether backward frees the unsharded parameters.

        While it is False, the next forward uses them without an all-gather, for example in gradient accumulation,
        unless a parameter has changed. A step of any torch optimizer and any operation in place are noticed. Call
        `reshard` after a change that is not: by a collective of your own, or through the `.data` of a local tensor. It
        has no effect where a rank holds whole parameters. Every rank must call it.

        Args:
            reshard_after_backward: True, the default, frees them. False keeps them.
            recurse: True, the default, also sets it for the sharded modules inside this one.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        set_groups(self, recurse, reshard_after_backward=reshard_after_backward)


class UnshardHandle:
    """An all-gather in flight, started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = groups

    @hides_modes
    def wait(self) -> None:
        """Finishes the all-gather and registers the unsharded parameters. Further calls do nothing. The next forward of
        the module waits by itself.
        """
        groups, self._groups = self._groups, []
        for group in groups:
            if group.hold < Hold.NEXT_PASS:  # a forward, or reshard(), has given it up since
                continue
            group.unshard(for_backward=group.root.backward is not None)
            group.root.use(group)
            group.hold = Hold.USER
            group.root.settle_transfers()


def chosen_groups(module: Any, recurse: bool) -> list[Any]:
    """Returns the groups that a method with `recurse` acts on."""
    check_bool("recurse", recurse)
    return groups_below(module) if recurse else groups_of(module)


def set_groups(module: Any, recurse: bool, **changes: Any) -> list[Any]:
    """Changes settings of the groups that a method acts on, and returns these."""
    groups = chosen_groups(module, recurse)
    for group in groups:
        group.set(**changes)
    return groups


def check_bool(name: str, value: object) -> None:
    """Raises TypeError if `value` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")
