"""Registers unsharded parameters outside of their modules' own forwards, as a forward does: differentiable ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..calls.user_code import hidden
from ..checks.due import NO_NUMBERS, is_check_time, read_all
from ..checks.lost_writes import UnshardedContent, take_moved
from ..engine.group import FSDPParamGroup
from ..engine.policy import Ending, KeepUntil
from ..engine.state import FSDPState
from ..features.large_submodules import is_read_outside
from ..torch_private.internals import graph_task

__all__ = ["refuse_written", "registered"]


@contextmanager
def registered(groups: Sequence[FSDPParamGroup], unsharded_of: Callable[[Any], Any]) -> Iterator[Callable[[Any], Any]]:
    """Context: registers the unsharded parameters of `groups`, and yields `unsharded_of`. Saved-tensor hooks note the
    ones that autograd saves.

    Raises:
        RuntimeError: at the end, a parameter was written to.
    """
    in_backward = graph_task() != -1  # checkpointing runs the block once more
    inside = {group.root for group in groups if group.root.running}
    used: dict[FSDPState, _Use] = {}
    write_checks: list[_WriteCheck] = []
    has_begun = False
    states = dict.fromkeys(state for group in groups for state in (group.state, *group.sharing_states))
    modules = dict.fromkeys(module for state in states for module in state.modules)
    handles = [module.register_state_dict_pre_hook(_refuse_state_dict) for module in modules]
    try:
        with hidden():
            for group in groups:
                was_kept = group.keep_until in (KeepUntil.BACKWARD, KeepUntil.NEXT_PASS)
                if not in_backward and group.root not in inside:
                    group.reshard_stale()
                if group.state not in used:
                    used[group.state] = _Use(group.state)
                    group.root.enter(group.state, is_forward=False)
                used[group.state].add(group, was_kept)
                group.start_unshard(for_backward=in_backward)
            for group in groups:
                group.pre_forward(in_backward)
                if not in_backward and group.root in inside:
                    for ahead in group.root.prefetcher.in_forward(group):
                        ahead.start_unshard()
            write_checks = [_WriteCheck(group) for group in groups if not in_backward]
        for group in groups:
            group.unsharded.forget_references()  # the user gets some
        has_begun = True
        yield unsharded_of
    finally:
        with hidden():
            for handle in handles:
                handle.remove()
            for group in groups:
                group.unsharded.forget_references()
            written = _written(write_checks)
            # An error of the user's code changes nothing: it may come on one rank only.
            failed = bool(written) or not has_begun
            for state in reversed(used):
                if not in_backward:
                    used[state].settle(failed)
                state.root.leave(used[state].num_running, used[state].depth)
            for use in used.values() if not in_backward else ():
                use.settle_shared(failed)
    refuse_written(written)


class _Use:
    """The groups of one state that a block uses."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state
        self.num_running, self.depth = len(state.root.running), state.root.depth
        self._groups: list[FSDPParamGroup] = []
        self._was_kept = False

    def add(self, group: FSDPParamGroup, was_kept: bool) -> None:
        """Adds a group. `was_kept`: an earlier forward has left it unsharded for backward, or for the next pass."""
        self._groups.append(group)
        self._was_kept |= was_kept

    def settle(self, failed: bool) -> None:
        """Reshards the groups, or keeps them for backward, unless a forward around the block still uses them.

        `failed`: they could not be gathered, or were written to, so that none of them may stay.
        """
        state, ending = self._state, self._ending(failed)
        if state.running > 1 or state in state.root.forward.unfinished:
            return
        left = [group for group in self._groups if not (is_read_outside(group) or group.sharing_states)]
        if len(left) == len(state.used):
            state.post_forward(ending)
        else:
            for group in left:
                group.post_forward(ending)

    def settle_shared(self, failed: bool) -> None:
        """Does the same with groups that several states use (tied weights), when the block has left all states."""
        for group in self._groups:
            if group.sharing_states and not (group.num_running or is_read_outside(group)):
                group.post_forward(self._ending(failed))

    def _ending(self, failed: bool) -> Ending:
        if failed:
            return Ending.FAILED
        return Ending.TRAINING if self._was_kept or torch.is_grad_enabled() else Ending.EVALUATION


class _WriteCheck:
    """Detects writes to the unsharded parameters of `group` in a block.

    Their content is compared in the group's 1st, 2nd, 4th, ... block only. If a forward runs around the block, the
    checks of that forward compare it.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._content: UnshardedContent | None = None
        self._versions: tuple[int, ...] = ()
        self._moved: list[str] = []
        if group.num_running == 1 and is_check_time(group.count_block()):
            self._content, self._versions = UnshardedContent(group), group.shard_versions()

    def changes(self) -> Tensor:
        """Returns the numbers of `UnshardedContent.changes`. Moves all parameters back into the group's memory."""
        self._moved = take_moved(self._group) if self._group.is_unsharded else []
        # Unsharded parameters may share the memory of shards, to which an optimizer may have written.
        if not self._group.is_unsharded or self._group.shard_versions() != self._versions:
            self._content = None
        return NO_NUMBERS if self._content is None else self._content.changes()

    def written(self, changes: Sequence[int]) -> list[str]:
        """Returns the names of parameters that were written to. `changes`: the numbers of `changes()`, on the host."""
        written = self._group.unsharded.written()
        return self._moved or written or ([] if self._content is None else self._content.named(changes))


def _written(write_checks: Sequence[_WriteCheck]) -> list[str]:
    """Returns the names of all parameters that were written to. The host reads the device once."""
    changes = read_all([each.changes() for each in write_checks])
    return [name for each, flags in zip(write_checks, changes, strict=True) for name in each.written(flags)]


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"{type(module).__name__}: a state dict taken here would hold tensors that have no data after full_params. "
        "Pass offload_to_cpu=True for copies, which stay valid."
    )


def refuse_written(names: Iterable[str]) -> None:
    written = ", ".join(names)
    if written:
        raise RuntimeError(
            f"{written}: modified inside full_params. Write `with fsdp2.full_params(module, writeback=True):` to "
            "change the sharded parameters, too."
        )
