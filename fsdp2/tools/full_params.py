"""Makes unsharded parameters available outside their module's own forward: `with full_params(...)`.

Without options a block does to its groups what a forward does: their unsharded parameters are registered, and their
gradients are reduced as usual. With any option it registers copies of the stored parameters, which get no gradients:
see unsharded_copies.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..checks.check_times import is_check_time
from ..checks.observers import take_moved
from ..checks.reads import NO_NUMBERS, read_all
from ..checks.unsharded_content import UnshardedContent
from ..engine.collectives import choice_of
from ..engine.compat import graph_task, untraced
from ..engine.group import COPIED, FSDPParamGroup, Hold
from ..engine.parameter import FSDPParam
from ..engine.rank_facts import is_first
from ..engine.state import FSDPState
from ..engine.subclasses import gathers_itself
from ..engine.unsharded_versions import UnshardedVersions
from ..engine.user_code import hidden
from ..features.large_submodules import is_read_outside
from .given_params import GivenParams
from .unsharded_copies import UnshardedCopies


@overload
def full_params(
    module_or_params: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
) -> AbstractContextManager[dict[str, nn.Parameter]]: ...


@overload
def full_params(
    module_or_params: Tensor,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
) -> AbstractContextManager[nn.Parameter]: ...


@overload
def full_params(
    module_or_params: Iterable[Tensor],
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
) -> AbstractContextManager[list[nn.Parameter]]: ...


@untraced
def full_params(
    module_or_params: nn.Module | Tensor | Iterable[Tensor],
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
) -> AbstractContextManager[Any]:
    """Returns a context that yields unsharded parameters, and registers them in their modules.

    Every rank must enter and leave it alike. When it ends, also by an exception, the sharded parameters are registered
    again.

    Without options it yields the unsharded parameters that forwards compute with, in the policy's `param_dtype`.
    Results computed from them are differentiable, inside a forward or outside of any. Their gradients are reduced, or
    accumulated, with those of the modules' own forwards, in a backward inside the block or after it, for which they are
    gathered again. They have no data after the block: `clone` what you keep. Whole groups are gathered and registered.
    A function that activation checkpointing runs again must have the block inside it. With
    `set_saved_tensor_hooks(False)` a backward after the block is refused.

    With any option except `recurse` it yields copies in the dtype in which the parameters are stored, which get no
    gradients. They stay valid after the block. Inside it, modules can't compute with sharded parameters of these
    groups.

    Args:
        module_or_params: for a module, the context yields {FQN: parameter} of all its parameters, and leaves those that
            are not sharded as they are; for a sharded parameter the unsharded one; for an iterable of them a list.
        recurse: include the parameters of sharded modules inside the module.
        writeback: at the end, write the values of the copies into the sharded parameters. They must have been changed
            (in place, by assignment or by `load_state_dict`) on all ranks alike, and under all names of a tied one. An
            optimizer's state stays; its steps belong before the block or after it. After an exception nothing is
            written.
        rank0_only: only the first rank of each group's mesh gets data; on others the copies are on meta.
        offload_to_cpu: copies are on the CPU. Only one group at a time is unsharded on the device.
        dtype: the dtype of copies of floating-point parameters.

    Raises:
        TypeError, ValueError: a wrong argument; no parameter that was passed is sharded; or, at the end, copies that
            differ between ranks, or between the names of one parameter, or whose shape or dtype has changed. The latter
            are raised on every rank, before any parameter is written.
        NotImplementedError: copies of parameters with `fsdp_pre_all_gather`; or `writeback` with `rank0_only`.
        RuntimeError: without `writeback`, a parameter was written to; or, for copies, a backward, a forward of the same
            groups, or another block runs. Without options, writes through `.data` are detected in a group's 1st, 2nd,
            4th, ... block, and in each block at the debug level.
    """
    _check(recurse, writeback, rank0_only, offload_to_cpu, dtype)
    given = GivenParams.of(module_or_params, recurse)
    if writeback or rank0_only or offload_to_cpu or dtype is not None:
        return _copied(given, writeback, rank0_only, offload_to_cpu, dtype)
    return _in_use(given)


def _check(recurse: Any, writeback: Any, rank0_only: Any, offload_to_cpu: Any, dtype: Any) -> None:
    flags = {"recurse": recurse, "writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {value!r}")
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, got {dtype}")
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback with rank0_only is not supported. Leave rank0_only out, and change the parameters on every rank "
            "alike: broadcast values that only one rank has."
        )
    if writeback and dtype is not None:
        raise ValueError(f"dtype: expected None with writeback, which would round the stored values, got {dtype}")


# ---- without options: the unsharded parameters themselves


@contextmanager
def _in_use(given: GivenParams) -> Iterator[Any]:
    """Context: registers the unsharded parameters. Saved-tensor hooks note the ones that autograd saves."""
    groups = list(given.by_group())
    in_backward = graph_task() != -1  # checkpointing runs the block once more
    inside = {group.root for group in groups if group.root.running}
    used: dict[FSDPState, _Use] = {}
    write_checks: list[_WriteCheck] = []
    failed = True
    modules = dict.fromkeys(module for group in groups for module in group.modules)
    handles = [module.register_state_dict_pre_hook(_refuse_state_dict) for module in modules]
    try:
        with hidden():
            for group in groups:
                was_kept = group.hold in (Hold.BACKWARD, Hold.NEXT_PASS)
                if not in_backward and group.root not in inside:
                    group.reshard_stale()
                if group.state not in used:
                    group.root.enter(group.state)
                    used[group.state] = _Use(group.state)
                used[group.state].add(group, was_kept)
                group.start_unshard(for_backward=in_backward)
            for group in groups:
                group.pre_forward(in_backward)
                if not in_backward and group.root in inside:
                    for ahead in group.root.prefetcher.in_forward(group):
                        ahead.start_unshard()
            write_checks = [_WriteCheck(group) for group in groups if not in_backward]
        for group in groups:
            group.parameters.references = None  # the user gets some
        yield given.yielded(lambda param: param.unsharded)
        failed = False
    finally:
        with hidden():
            for handle in handles:
                handle.remove()
            for group in groups:
                group.parameters.references = None
            written = _written(write_checks)
            for state in reversed(used):
                if not in_backward:
                    used[state].settle(failed or bool(written))
                state.root.leave()
    _refuse_written(written)


class _Use:
    """Holds the groups of one state that a block uses."""

    def __init__(self, state: FSDPState) -> None:
        self._state = state
        self._groups: list[FSDPParamGroup] = []
        self._was_kept = False

    def add(self, group: FSDPParamGroup, was_kept: bool) -> None:
        """Adds a group. `was_kept`: an earlier forward has left it unsharded for backward, or for the next pass."""
        self._groups.append(group)
        self._was_kept |= was_kept

    def settle(self, failed: bool) -> None:
        """Reshards the groups, or keeps them for backward, unless a forward around the block still uses them."""
        state, backward_follows = self._state, self._was_kept or torch.is_grad_enabled()
        if state.running > 1 or state in state.root.forward.unfinished:
            return
        left = [group for group in self._groups if not is_read_outside(group)]
        if len(left) == len(state.groups):
            state.post_forward(backward_follows, failed)
        else:
            for group in left:
                group.post_forward(backward_follows, failed)


# Group -> the number of blocks that have used it outside of forwards.
_num_blocks: WeakKeyDictionary[FSDPParamGroup, int] = WeakKeyDictionary()


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
        if group.state.running == 1:
            number = _num_blocks[group] = _num_blocks.get(group, 0) + 1
            if is_check_time(number, always=choice_of(group).checked):
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
        versions = self._group.root.events.of(UnshardedVersions)
        written = [] if versions is None else versions.of(self._group).take_written()
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


def _refuse_written(names: Iterable[str]) -> None:
    written = ", ".join(names)
    if written:
        raise RuntimeError(
            f"{written}: modified inside full_params. Write `with fsdp2.full_params(module, writeback=True):` to "
            "change the sharded parameters, too."
        )


# ---- with options: copies


@contextmanager
def _copied(
    given: GivenParams, writeback: bool, rank0_only: bool, offload_to_cpu: bool, dtype: torch.dtype | None
) -> Iterator[Any]:
    """Context: registers copies, and writes them back at the end if `writeback` is True."""
    wanted = given.by_group()
    for group, params in wanted.items():
        _check_can_copy(group, params)
    copied = [UnshardedCopies(group, params) for group, params in wanted.items()]
    copies_of: dict[FSDPParam, Tensor] = {}
    try:
        with hidden():
            for group, copies in zip(wanted, copied, strict=True):
                group.reshard_stale()
                group.reshard_if_idle()
                device = torch.device("cpu") if offload_to_cpu else group.mesh.device
                copies_of.update(copies.register(dtype, device, has_data=is_first(group.mesh) or not rank0_only))
        yield given.yielded(copies_of.__getitem__)
    finally:
        for copies in copied:
            copies.unregister()
    with hidden():
        if not writeback:
            _refuse_written(name for copies in copied for name in copies.written())
            return
        for copies in copied:
            copies.find_changes()
        for copies in copied:
            copies.write_back()


def _check_can_copy(group: FSDPParamGroup, params: Iterable[FSDPParam]) -> None:
    if graph_task() != -1 or group.root.is_in_backward():
        raise RuntimeError(f"{group}: full_params can't copy parameters during a backward pass")
    if group.state.running or is_read_outside(group) or group.phase is COPIED:
        raise RuntimeError(
            f"{group}: full_params can't copy parameters while a forward, or another full_params, uses the same group. "
            "Without options it can be used there."
        )
    for param in params:
        if gathers_itself(param.local):
            raise NotImplementedError(
                f"{param.name} has fsdp_pre_all_gather: full_params can't copy its stored form. Use it without options."
            )
