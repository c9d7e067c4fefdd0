"""Finds tensors without values: memory that `to_empty` gave to tensors on the meta device, buffers still on it.

Such memory is marked, so that what nobody initialises is told from what somebody has, also by a collective or through
`.data`, which count nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.checksum import values_of
from ..engine.compare_ranks import ComparedNumbers, Comparison, compare, groups_by_mesh
from ..engine.compat import no_torch_function
from ..engine.group import FSDPParamGroup
from ..engine.group_parameters import version_if_counted
from ..engine.mesh import DataMesh
from ..engine.parameter import FSDPParam, fqn
from ..engine.parameter_methods import buffers_on_meta
from ..engine.state import names_below
from .check_times import ForwardCheck, RankCheck

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MOST_NAMES = 1 << 32  # more than any group has


# ---- marks


def mark(tensor: Tensor) -> None:
    """Fills `tensor` with what no initialisation leaves, which no version counter shows. Bools have no such value."""
    for part in values_of(tensor):
        value = _mark_of(part.dtype)
        if value is not None:
            part.data.fill_(value)


def is_marked(tensor: Tensor) -> bool:
    """Returns True if that is all that `tensor` holds on this rank, which has some of it."""
    parts = [part for part in values_of(tensor) if part.numel() and _mark_of(part.dtype) is not None]
    return bool(parts) and all(map(_holds_mark, parts))


def _mark_of(dtype: torch.dtype) -> float | None:
    if dtype.is_complex or (dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2):  # which torch can't fill
        return float("nan")
    return torch.iinfo(dtype).max if dtype in _INTEGERS else None


def _holds_mark(part: Tensor) -> bool:
    holds = part.eq(torch.iinfo(part.dtype).max) if part.dtype in _INTEGERS else part.isnan()
    return bool(holds.all())


# ---- what was given memory without values


class _Empty:
    """Parameters and buffers of one group that were given memory without values, and their versions then.

    It holds them by weak references: a parameter holds its modules, and these hold the group, which would never be
    freed.
    """

    def __init__(self) -> None:
        self.params: list[tuple[weakref.ref[FSDPParam], weakref.ref[Tensor], int]] = []
        self.buffers: list[tuple[weakref.ref[Tensor], int]] = []


_empty: weakref.WeakKeyDictionary[FSDPParamGroup, _Empty] = weakref.WeakKeyDictionary()


def note_parameters(group: FSDPParamGroup, params: Iterable[FSDPParam]) -> None:
    """Notes that these parameters of the group, which were on the meta device, have just been given memory."""
    with no_torch_function():
        found = [(weakref.ref(param), weakref.ref(param.local), version_if_counted(param.sharded)) for param in params]
    if found:
        _empty.setdefault(group, _Empty()).params.extend(found)


def note_buffers(group: FSDPParamGroup, buffers: Iterable[Tensor]) -> None:
    """Marks buffers below modules of the group, which have just been given memory without values, and notes them."""
    for buffer in buffers:
        mark(buffer)
        noted = (weakref.ref(buffer), version_if_counted(buffer))
        _empty.setdefault(group, _Empty()).buffers.append(noted)


def unwritten_params(group: FSDPParamGroup) -> list[FSDPParam]:
    """Returns those of the group's parameters that no in-place operation has written to since, and nobody has replaced,
    as far as version counters tell: collectives don't count.
    """
    found = _empty.get(group)
    if found is None:
        return []
    left = []
    with no_torch_function():
        for each in found.params:
            param, local, version = each[0](), each[1](), each[2]
            if param is not None and local is param.local and version_if_counted(param.sharded) == version:
                left.append((param, each))
    found.params = [each for _, each in left]
    return [param for param, _ in left]


def unwritten_buffers(group: FSDPParamGroup) -> list[Tensor]:
    """Returns those buffers that nobody has written to since. They need not be registered any more."""
    found = _empty.get(group)
    if found is None:
        return []
    alive = [(tensor, version) for reference, version in found.buffers if (tensor := reference()) is not None]
    left = [(tensor, version) for tensor, version in alive if version_if_counted(tensor) == version]
    found.buffers = [(weakref.ref(tensor), version) for tensor, version in left]
    return [tensor for tensor, _ in left if is_marked(tensor)]


def find_unwritten(groups: Iterable[FSDPParamGroup]) -> set[FSDPParam | Tensor]:
    """Returns the parameters and buffers that `unwritten_params` and `unwritten_buffers` find."""
    found: set[FSDPParam | Tensor] = set()
    for group in groups:
        found.update(unwritten_params(group), unwritten_buffers(group))
    return found


class EmptyMemory(RankCheck):
    """Refuses to train with memory that nobody has initialised, the first time, and the first after loading."""

    def given_memory(
        self, group: FSDPParamGroup, params: Sequence[FSDPParam], buffers: Sequence[Tensor], are_empty: bool
    ) -> None:
        if not are_empty:  # a function of a user's own may have given them values, too
            note_parameters(group, params)
            return
        for param in params:
            mark(param.local)
        note_buffers(group, buffers)

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        if comparison.is_anew:
            yield from _numbers_by_mesh(comparison.root.groups)


def refuse_empty_memory(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises RuntimeError, on all ranks, if nobody has initialised memory of `groups`. All ranks of the groups' meshes
    must call it.
    """
    for mesh, numbers in _numbers_by_mesh(groups):
        compare(mesh, [numbers])


def _numbers_by_mesh(groups: Iterable[FSDPParamGroup]) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
    return ((mesh, _numbers_of(members)) for mesh, members in groups_by_mesh(groups).items())


def _numbers_of(groups: Sequence[FSDPParamGroup]) -> ComparedNumbers:
    """Returns one number, whatever groups a rank has: 0, or which tensor is as `to_empty` left it."""
    found = [i * _MOST_NAMES + index for i, index in enumerate(map(_last_unwritten, groups)) if index]

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        ((_, unwritten),) = bounds
        if unwritten:
            i, index = divmod(unwritten, _MOST_NAMES)
            raise RuntimeError(
                f"{_names_in(groups[i])[index - 1]}: to_empty gave it memory, and nobody has initialised it since. "
                "Initialise or load it before the first forward; a buffer that no state dict holds, too."
            )

    return ComparedNumbers("empty memory", [max(found, default=0)], judge)


def _last_unwritten(group: FSDPParamGroup) -> int:
    """Returns one more than the index, in `_names_in`, of a tensor that is as `to_empty` left it, or 0."""
    params = [param.name for param in unwritten_params(group) if is_marked(param.local)]
    empty = {id(buffer) for buffer in unwritten_buffers(group)}
    buffers = [name for name, buffer in _buffers_in(group) if id(buffer) in empty] if empty else []
    indices = [_names_in(group).index(name) + 1 for name in params + buffers]
    return max(indices, default=0)


def _names_in(group: FSDPParamGroup) -> list[str]:
    """Returns the names of its parameters, and of all buffers below its modules: the same on all ranks."""
    return [*(param.name for param in group.params), *(name for name, _ in _buffers_in(group))]


def _buffers_in(group: FSDPParamGroup) -> Iterator[tuple[str, Tensor]]:
    prefix = "" if group.name == "root" else group.name
    for module in group.modules:
        yield from module.named_buffers(prefix)


# ---- what has no memory


class BuffersOnMeta(ForwardCheck):
    """Refuses a first forward with buffers on the meta device: torch may read as indices what is no memory."""

    def __init__(self) -> None:
        self._passed: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_forward(self, group: FSDPParamGroup, is_first: bool, is_thorough: bool) -> None:
        if group in self._passed and not self.always:
            return
        device = group.mesh.device
        found = buffers_on_meta(group.state.own_modules())
        if found and device.type != "meta":
            below = names_below(group.root.state.modules)
            names = [f"{fqn(below[module], name)} on meta" for module, name in found]
            raise RuntimeError(
                f"expected buffers on {device}, got {', '.join(names)}. Materialise the model before its first "
                f"forward: model.to_empty(device={device.type!r}), then initialise or load; or assign what the state "
                "dict that was loaded lacks."
            )
        self._passed.add(group)
