"""Refuses tensors without values: memory that `to_empty` gave to tensors on the meta device, buffers still on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..engine.compare_ranks import ComparedNumbers, Comparison, compare, groups_by_mesh
from ..engine.empty_memory import is_marked
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.parameter import fqn
from ..engine.parameter_methods import buffers_on_meta
from ..engine.state import names_below
from .due import ForwardCheck, RankCheck

_MOST_NAMES = 1 << 32  # more than any group has


class EmptyMemory(RankCheck):
    """Refuses to train with memory that nobody has initialised, the first time, and the first after loading."""

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
    params = [param.name for param in group.empty.unwritten_params() if is_marked(param.local)]
    empty = {id(buffer) for buffer in group.empty.unwritten_buffers()}
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
