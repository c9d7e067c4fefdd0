"""Finds frozen parameters that some ranks have written to, and others not: each rank holds rows of another model then.

Optimizers step on trainable parameters, and step_history.py compares that. A frozen parameter should change on all
ranks or on none, which its version counter shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from ..engine.compare_ranks import ComparedNumbers, Comparison, groups_by_mesh
from ..engine.compat import no_torch_function
from ..engine.group import FSDPParamGroup
from ..engine.group_parameters import version_if_counted
from ..engine.mesh import DataMesh
from ..engine.owners import some_of
from ..engine.parameter import FSDPParam
from ..engine.rank_facts import gather_by_rank
from .due import RankCheck


class FrozenParameters(RankCheck):
    """Compares between ranks which frozen parameters have been written to since ranks last compared them."""

    def __init__(self) -> None:
        # The identity of the sharded parameter, and its version, then. torch swaps no tensor that has a weak reference.
        self._seen: WeakKeyDictionary[FSDPParam, tuple[int, int]] = WeakKeyDictionary()

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        for mesh, groups in groups_by_mesh(comparison.root.groups).items():
            if comparison.is_anew:
                self._see(groups)
            elif mesh.num_ranks > 1:
                yield mesh, self._numbers_of(mesh, groups)

    def _numbers_of(self, mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> ComparedNumbers:
        written = self.find_written(groups)

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            ((least, most),) = bounds
            if least != most:
                apart = written_by_some(gather_by_rank(written, mesh.axis_groups, mesh.device))
                if apart:
                    raise RuntimeError(_written(apart))
            self._see(groups)

        number = zlib.crc32(repr([name for name, yes in written.items() if yes]).encode())
        return ComparedNumbers("frozen parameters", [number], judge)

    def find_written(self, groups: Iterable[FSDPParamGroup]) -> dict[str, bool]:
        """Returns the name of each frozen parameter of which all ranks have rows -> True if this rank has written to it
        since ranks last compared it.
        """
        with no_torch_function():
            return {
                param.name: self._is_written(param)
                for group in groups
                for param in group.params
                if not param.sharded.requires_grad and _is_on_all(param)
            }

    def _is_written(self, param: FSDPParam) -> bool:
        seen = self._seen.get(param)
        return seen is not None and seen != (id(param.sharded), version_if_counted(param.sharded))

    def _see(self, groups: Iterable[FSDPParamGroup]) -> None:
        with no_torch_function():
            for param in (param for group in groups for param in group.params):
                self._seen[param] = id(param.sharded), version_if_counted(param.sharded)


def find_written(groups: Sequence[FSDPParamGroup]) -> dict[str, bool]:
    """Returns what `FrozenParameters.find_written` does, of groups under any roots; nothing where the check is off."""
    found: dict[str, bool] = {}
    of_roots: dict[Any, list[FSDPParamGroup]] = {}
    for group in groups:
        of_roots.setdefault(group.root, []).append(group)
    for root, members in of_roots.items():
        check = root.events.of(FrozenParameters)
        found.update(check.find_written(members) if check is not None else {})
    return found


def written_by_some(of_ranks: Mapping[int, Mapping[str, bool]]) -> dict[str, list[int]]:
    """Returns the names of parameters that some ranks have written to and others not -> the ranks that have.

    `of_ranks`: rank -> what it has found.
    """
    names = dict.fromkeys(name for found in of_ranks.values() for name in found)
    apart = {}
    for name in names:
        flags = {rank: found[name] for rank, found in of_ranks.items() if name in found}
        if len({*flags.values()}) > 1:
            apart[name] = [rank for rank, flag in flags.items() if flag]
    return apart


def _is_on_all(param: FSDPParam) -> bool:
    """Returns True if each rank has rows of it. One that has none may leave out what it does with its own rows."""
    size = param.mesh.size
    rows = 1 if param.is_scalar else param.gathered_shape[param.dim]
    return param.is_scalar or rows > (size - 1) * -(-rows // size)


def _written(apart: Mapping[str, Sequence[int]]) -> str:
    ranks = next(iter(apart.values()))
    return (
        f"{some_of(apart)}: only rank {some_of(map(str, ranks))} has written to this frozen parameter since ranks last "
        "compared it, so each rank's part is of another model now. Load a checkpoint of before, and write to the "
        "parameter on all ranks alike."
    )
