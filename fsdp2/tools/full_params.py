"""Parameters as whole tensors outside their module's own forward: `with full_params(...)`.

Without options a block is to its groups what a forward is: their full parameters are there, gradients take their usual
way. With any option it lends whole copies of what is stored, of which nothing is differentiated: see full_copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import hooks, torch_compat
from ..checks.full_content import FullContent
from ..checks.looks import is_time_to_look
from ..checks.reads import NO_NUMBERS, read_all
from ..core.user_code import hidden
from ..ext.owners import Owned, owners_by_id
from ..core.parameter import FSDPParam
from ..core.state import FSDPState, state_of
from .full_copies import FullCopies


@torch_compat.untraced
def full_params(
    module_or_params: nn.Module | Tensor | Iterable[Tensor],
    *,
    recurse: bool = True,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    dtype: torch.dtype | None = None,
) -> AbstractContextManager[Any]:
    """Context in which parameters are whole: those that are yielded, and those that their modules have.

    Every rank must enter and leave it, alike. At its end, also by an exception, the sharded ones are registered again.

    Without options: the full parameters that forwards compute with, in the policy's `param_dtype`. What is computed of
    them is differentiable, inside a forward or outside of any; their gradients are reduced, or accumulated, with those
    of the modules' own forwards, in a backward inside the block or after it, for which they are gathered again.
    They have no data after the block: `clone` what is to stay. Whole groups are gathered, and registered. A function
    that activation checkpointing runs again must have the block inside it. With `set_saved_tensor_hooks(False)` a
    backward after the block is refused.

    With any option but `recurse`: copies in the dtype in which the parameters are stored, of which no gradient is
    computed. They stay valid after the block. Meanwhile modules can't compute with sharded parameters of these groups.

    Args:
        module_or_params: a module, for {name: parameter} of it, of which those that are not sharded stay what they are;
            a sharded parameter, for the whole one; an iterable of them, for a list.
        recurse: also the parameters of sharded modules inside the module.
        writeback: at the end, have the sharded parameters take the values of the copies, which must have been changed
            (in place, by assignment or by `load_state_dict`) on all ranks alike, and under all names of a tied one. An
            optimizer's state stays; its steps belong before the block or after it. After an exception nothing is
            written.
        rank0_only: only the first rank of each group's mesh gets data; on others the copies are on meta.
        offload_to_cpu: copies on the CPU; one group at a time is on the device, the copies never are.
        dtype: of copies of floating-point parameters.

    Raises:
        TypeError, ValueError: a wrong argument; nothing that is given is sharded; or, at the end, copies that differ
            between ranks, or between the names of one parameter, or that parameters can't take, on every rank, before
            any is written.
        NotImplementedError: copies of parameters with `fsdp_pre_all_gather`; or `writeback` with `rank0_only`.
        RuntimeError: without `writeback`, something was written to; or a wrong moment: for copies, a backward, a
            forward of the same groups, or another block. Without options, writes through `.data` are looked for in
            a group's 1st, 2nd, 4th, ... block, and in each at the debug level.
    """
    _check(recurse, writeback, rank0_only, offload_to_cpu, dtype)
    given = _Given.of(module_or_params, recurse)
    if writeback or rank0_only or offload_to_cpu or dtype is not None:
        return _lent(given, writeback, rank0_only, offload_to_cpu, dtype)
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
            "alike: broadcast what only one has."
        )
    if writeback and dtype is not None:
        raise ValueError(f"dtype: expected None with writeback, which would round what is stored, got {dtype}")


# ---- what is given ---------------------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What the user has named. `names`: of a module's parameters; None: parameters were given."""

    tensors: list[Tensor]
    owned: list[Owned | None]
    names: list[str] | None
    is_one: bool

    @classmethod
    def of(cls, module_or_params: Any, recurse: bool) -> _Given:
        if isinstance(module_or_params, nn.Module):
            named = list(_named_parameters(module_or_params, recurse))
            given = cls._find([tensor for _, tensor in named], [name for name, _ in named])
            if not any(given.owned):
                kind = type(module_or_params).__name__
                raise ValueError(f"module_or_params: expected a module with sharded parameters, {kind} has none")
            return given
        if not recurse:
            raise ValueError("recurse: expected True with parameters, got False")
        is_one = isinstance(module_or_params, Tensor)
        given = cls._find(_as_list(module_or_params), None, is_one)
        for tensor, owned in zip(given.tensors, given.owned, strict=True):
            if owned is None:
                raise ValueError(
                    f"module_or_params: expected parameters that fully_shard manages, got a {type(tensor).__name__} of "
                    f"shape {tuple(tensor.shape)} that isn't one"
                )
        return given

    @classmethod
    def _find(cls, tensors: list[Tensor], names: list[str] | None, is_one: bool = False) -> _Given:
        owners = owners_by_id()
        return cls(tensors, [owners.get(id(tensor)) for tensor in tensors], names, is_one)

    def by_state(self) -> dict[FSDPState, list[FSDPParam]]:
        """The parameters that each state has of these, in the order in which they are given."""
        found: dict[FSDPState, dict[FSDPParam, None]] = {}
        for state, param in filter(None, self.owned):
            found.setdefault(state, {})[param] = None
        return {state: list(params) for state, params in found.items()}

    def show(self, face_of: Callable[[FSDPParam], Tensor]) -> Any:
        faces = [
            face_of(owned.param) if owned else tensor for tensor, owned in zip(self.tensors, self.owned, strict=True)
        ]
        if self.names is not None:
            return dict(zip(self.names, faces, strict=True))
        return faces[0] if self.is_one else faces


def _as_list(params: Any) -> list[Tensor]:
    tensors = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else [params]
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(f"module_or_params: expected a module or parameters, got {type(each).__name__}")
    if not tensors:
        raise ValueError("module_or_params: expected at least one parameter, got none")
    return tensors


def _named_parameters(module: nn.Module, recurse: bool, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All, under each of their names; without `recurse` those that no other sharded module inside has."""
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, child in module._modules.items():
        if child is not None and (recurse or state_of(child) is None):
            yield from _named_parameters(child, recurse, f"{prefix}{name}.")


# ---- the full parameters themselves ----------------------------------------------------------------------------------


@contextmanager
def _in_use(given: _Given) -> Iterator[Any]:
    """The full parameters are there, and what autograd saves of them is noticed."""
    states = list(given.by_state())
    in_backward = torch_compat.graph_task() != -1  # checkpointing runs the block once more
    joined: list[tuple[FSDPState, bool]] = []
    inside = {state.context for state in states if state.context.running}
    looks: list[_Look] = []
    failed = True
    handles = [module.register_state_dict_pre_hook(_refuse_state_dict) for state in states for module in state.modules]
    try:
        with hidden():
            for state in states:
                was_kept = state.kept
                if not in_backward and state.context not in inside:
                    state.context.forget_stale([state])
                state.context.join(state)
                joined.append((state, was_kept))
                state.group.start_unshard(for_backward=in_backward)
            for state in states:
                hooks.use_in_forward(state, in_backward)
                if not in_backward and state.context in inside:
                    state.context.prefetcher.in_forward(state)
            looks = [_Look(state) for state in states if not in_backward]
        yield given.show(lambda param: param.full)
        failed = False
    finally:
        with hidden():
            for handle in handles:
                handle.remove()
            written = _written(looks)
            for state, was_kept in reversed(joined):
                if not in_backward:
                    _settle(state, was_kept or torch.is_grad_enabled(), failed or bool(written))
                state.context.leave()
    _refuse_written(written)


class _Look:
    """At what the full parameters of `state` hold, from now on: in its 1st, 2nd, 4th, ... block. If a forward runs
    around the block, it looks.
    """

    def __init__(self, state: FSDPState) -> None:
        self._group = state.group
        self._content: FullContent | None = None
        self._versions: tuple[int, ...] = ()
        if state.running == 1:
            state.blocks += 1
            if is_time_to_look(state.blocks, always=state.group.is_checked):
                self._content, self._versions = state.group.adopted.note_content(every=1), state.group.shard_versions()

    def changes(self) -> Tensor:
        """Returns what `FullContent.changes` does. All have their own memory again."""
        self._moved = self._group.adopted.take_moved() if self._group.is_unsharded else []
        # Full parameters may lie where shards do, to which an optimizer may have written.
        if not self._group.is_unsharded or self._group.shard_versions() != self._versions:
            self._content = None
        return NO_NUMBERS if self._content is None else self._content.changes()

    def written(self, changes: Sequence[int]) -> list[str]:
        """Names of those that were written to. `changes`: as the host has read them."""
        written = self._group.versions.take_written()
        return self._moved or written or ([] if self._content is None else self._content.named(changes))


def _written(looks: Sequence[_Look]) -> list[str]:
    """Names of all that were written to: the host reads the device once."""
    changes = read_all([look.changes() for look in looks])
    return [name for look, flags in zip(looks, changes, strict=True) for name in look.written(flags)]


def _settle(state: FSDPState, backward_follows: bool, failed: bool) -> None:
    """Give the full parameters up, unless what surrounds the block goes on with them."""
    if state.running == 1 and not state.read_outside and state not in state.context.unfinished:
        state.settle(backward_follows, failed)


def _refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise RuntimeError(
        f"{type(module).__name__}: a state dict taken here would hold tensors that have no data after full_params. "
        "Pass offload_to_cpu=True for copies, which stay."
    )


def _refuse_written(names: Iterable[str]) -> None:
    written = ", ".join(names)
    if written:
        raise RuntimeError(
            f"{written}: modified inside full_params. Pass writeback=True to change the sharded parameters, too."
        )


# ---- copies ----------------------------------------------------------------------------------------------------------


@contextmanager
def _lent(
    given: _Given, writeback: bool, rank0_only: bool, offload_to_cpu: bool, dtype: torch.dtype | None
) -> Iterator[Any]:
    """Copies are registered, and written back if that is asked for."""
    wanted = given.by_state()
    for state, params in wanted.items():
        _check_lendable(state, params)
    lent = [FullCopies(state.group, params) for state, params in wanted.items()]
    faces: dict[FSDPParam, Tensor] = {}
    try:
        with hidden():
            for state, copies in zip(wanted, lent, strict=True):
                state.context.forget_stale([state])
                state.release()
                device = torch.device("cpu") if offload_to_cpu else state.group.mesh.device
                faces.update(copies.lend(dtype, device, has_data=state.group.mesh.is_first or not rank0_only))
        yield given.show(faces.__getitem__)
    finally:
        for copies in lent:
            copies.take_back()
    with hidden():
        if not writeback:
            _refuse_written(name for copies in lent for name in copies.written())
            return
        for copies in lent:
            copies.agree()
        for copies in lent:
            copies.write_back()


def _check_lendable(state: FSDPState, params: Iterable[FSDPParam]) -> None:
    if torch_compat.graph_task() != -1 or state.context.is_in_backward():
        raise RuntimeError(f"{state}: full_params can't copy parameters during a backward pass")
    if state.running or state.read_outside or state.group.is_lent:
        raise RuntimeError(
            f"{state}: full_params can't copy parameters while a forward, or another full_params, uses the same group. "
            "Without options it can be used there."
        )
    for param in params:
        if param.is_extended:
            raise NotImplementedError(
                f"{param.name} has fsdp_pre_all_gather: full_params can't copy what it stores. Use it without options."
            )
