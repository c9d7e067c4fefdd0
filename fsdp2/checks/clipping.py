"""Compares what ranks give to `fsdp2.clip_grad_norm_`: each scales its part of every gradient by a factor of its own.

The all-reduce of norms is one number, whatever it is the norm of. So other parameters, or another limit, on one rank
make no error and no mismatch.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import by_ranks, sharded_owner, some_of
from ..engine.root import Root
from ..ranks.compare_ranks import ComparedNumbers, Comparison
from .due import RankCheck, alike

_MOST_CALLS = 4096


class ClippedParameters(NamedTuple):
    """Names the sharded parameters of one root that a call clips. `group`: a group of the root."""

    group: weakref.ref[FSDPParamGroup]
    names: tuple[str, ...]
    checksum: int


def clipped_parameters(parameters: Iterable[Any]) -> list[ClippedParameters]:
    """Returns the sharded parameters among `parameters`, by their roots. Their order makes no difference."""
    groups: dict[Root, FSDPParamGroup] = {}
    names: dict[Root, list[str]] = {}
    for owned in (sharded_owner(each) for each in parameters if isinstance(each, DTensor)):
        if owned is not None:
            groups.setdefault(owned.group.root, owned.group)
            names.setdefault(owned.group.root, []).append(owned.param.name)
    of_roots = {root: tuple(sorted(each)) for root, each in names.items()}
    return [
        ClippedParameters(weakref.ref(groups[root]), each, zlib.crc32(repr(each).encode()))
        for root, each in of_roots.items()
    ]


def note_clipping(clipped: Iterable[ClippedParameters], max_norm: float, norm_type: float, exact: bool) -> None:
    """Notes a call of clip_grad_norm_, which ranks compare the next time.

    Raises:
        RuntimeError: the bits of gradients do not depend on the number of ranks, and those of this norm would.
    """
    for each in clipped:
        group = each.group()
        if group is not None and group.gradients.unsynchronized.in_tree and not exact:
            raise RuntimeError(
                f"{each.names[0]}: expected clip_grad_norm_(..., exact=True), because accumulate(global_batches=) has "
                "made its gradient, and the bits of other norms depend on the number of ranks"
            )
        check = None if group is None else group.root.events.of(Clipping)
        if check is not None and len(check.calls) < _MOST_CALLS:
            check.calls.append((each.checksum, max_norm, norm_type))
            check.names[each.checksum] = each.names


class Clipping(RankCheck):
    """Compares the calls of clip_grad_norm_ since ranks last compared them.

    `calls`: for each call a checksum of the parameters' names, max_norm and norm_type. `names`: checksum -> names.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, float, float]] = []
        self.names: dict[int, tuple[str, ...]] = {}

    def out_of_step(self, root: Root) -> None:
        self.calls, self.names = [], {}

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        mesh = comparison.mesh
        if mesh is None or mesh.num_ranks == 1:
            return
        # Six digits: a limit that each rank computes may differ in its last bits, which changes nothing.
        own = [(each, f"{limit:.6g}", f"{order:.6g}") for each, limit, order in self.calls], self.names
        self.calls, self.names = [], {}
        yield alike("clipping", mesh, lambda: own, _difference, [zlib.crc32(repr(own[0]).encode())])


_Calls = tuple[list[tuple[int, str, str]], dict[int, tuple[str, ...]]]


def _difference(of_ranks: Mapping[int, _Calls]) -> str:
    """Returns what differs between ranks, in their first calls that do. `of_ranks`: rank -> its calls and names."""
    most = max(len(calls) for calls, _ in of_ranks.values())
    of_calls = ({rank: dict(enumerate(calls)).get(i) for rank, (calls, _) in of_ranks.items()} for i in range(most))
    number, found = next((i, each) for i, each in enumerate(of_calls, 1) if len({*each.values()}) > 1)
    names = {rank: of_ranks[rank][1].get(call[0], ()) for rank, call in found.items() if call is not None}
    texts: dict[int, str] = {}
    for rank, call in found.items():
        text = "no call"
        if call is not None:
            text = f"{some_of(names[rank], 2)} with max_norm={call[1]}, norm_type={call[2]}"
        texts[rank] = text
    everywhere = set.intersection(*map(set, names.values()))
    apart = sorted({name for each in names.values() for name in each} - everywhere)
    what = f"; {some_of(apart)}: not on all ranks" if apart else ""
    return (
        f"clip_grad_norm_ got other arguments on some ranks, in call {number} since they compared: "
        f"{by_ranks(texts)}{what}. Each rank has scaled its part of gradients by another factor. Pass the same "
        "parameters, max_norm and norm_type on all ranks; parameters without gradients may be among them. Load a "
        "checkpoint of before."
    )
