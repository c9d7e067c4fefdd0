"""Spans: runs of parameters that lie side by side in a group's shard buffer, as one flat tensor.

A span has one dtype and one entry of an optimizer's `param_groups`. Between its parameters there may be padding, which
is zero and stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.compat import local_of
from ..core.gather import view_bytes
from ..core.group import FSDPParamGroup
from ..core.parameter import FSDPParam
from ..ext.owners import sharded_owner


class Place(NamedTuple):
    """Says where a sharded parameter lies.

    Args:
        shards: the shard buffer of its group, in bytes.
        offset: its first byte there.
        rank: how many parameters lie before it there.
    """

    group: FSDPParamGroup
    param: FSDPParam
    parameter: Tensor
    local: Tensor
    shards: Tensor
    offset: int
    rank: int

    def is_valid(self) -> bool:
        """Returns True if the parameter still lies there."""
        buffers = self.group.parameters.buffers
        return buffers is not None and buffers.shards is self.shards and local_of(self.parameter) is self.local


class Places:
    """Finds where sharded parameters lie. It remembers the order of each buffer while it is in use."""

    def __init__(self) -> None:
        self._ranks: dict[FSDPParamGroup, dict[FSDPParam, tuple[int, int]]] = {}

    def find(self, parameter: Tensor) -> Place | None:
        """Returns where a parameter lies, or None if it can't be stepped on as a part of a flat tensor."""
        owned = sharded_owner(parameter) if isinstance(parameter, DTensor) else None
        if owned is None or owned.group.parameters.buffers is None:
            return None
        ranks = self._ranks.get(owned.group)
        if ranks is None:
            ranks = self._ranks[owned.group] = _ranks_of(owned.group)
        local, shards = owned.param.local, owned.group.parameters.buffers.shards
        if owned.param not in ranks or type(local) is not Tensor or local.is_inference():
            return None
        offset, rank = ranks[owned.param]
        is_there = not local.numel() or (local.data_ptr() == shards.data_ptr() + offset and local.is_contiguous())
        if not is_there or not local.is_floating_point() or local.device.type == "meta":
            return None
        return Place(owned.group, owned.param, parameter, local, shards, offset, rank)


def _ranks_of(group: FSDPParamGroup) -> dict[FSDPParam, tuple[int, int]]:
    """Returns each parameter in the buffers -> its first byte, and how many lie before it."""
    assert group.parameters.buffers is not None, "there are places"
    offsets, params = group.parameters.buffers.layout.shard_offsets, group.parameters.plain
    order = sorted(range(len(params)), key=lambda i: (offsets[i], i))
    return {params[i]: (offsets[i], rank) for rank, i in enumerate(order)}


class Member(NamedTuple):
    """One parameter of a span. `start`: its first element in the flat tensor."""

    place: Place
    start: int

    @property
    def parameter(self) -> Tensor:
        return self.place.parameter

    @property
    def numel(self) -> int:
        return self.place.local.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Returns its elements in a tensor that is laid out like the span."""
        return flat.narrow(0, self.start, self.numel)

    def part_of(self, flat: Tensor) -> Tensor:
        """Returns the same in the shape of the parameter's local tensor."""
        return self.of(flat).view(self.place.local.shape)


class Span:
    """Parameters that are stepped on as one tensor, `flat`, over their memory.

    `entry`: index of their entry in `param_groups`. `begin`: the first byte in the shard buffer. `offsets`: bytes
    between the first parameter that is not empty and each other such one. `gaps`: (first element, number of elements)
    of the padding between them. `writes_gradients`, `keeps_zeros`: what is known of the optimizer's step, see Verdict.
    """

    writes_gradients, keeps_zeros = False, True

    def __init__(self, places: Sequence[Place], entry: int) -> None:
        first, filled = places[0], [place for place in places if place.local.numel()]
        begin, itemsize = (filled or places)[0].offset, first.local.dtype.itemsize
        end = filled[-1].offset + filled[-1].local.nbytes if filled else begin
        numel = (end - begin) // itemsize
        self.begin, self.entry, self.group = begin, entry, first.group
        self.dtype, self.device = first.local.dtype, first.local.device
        starts = [min(max(place.offset - begin, 0) // itemsize, numel) for place in places]
        self.members = [Member(place, start) for place, start in zip(places, starts, strict=True)]
        self.offsets = [place.offset - begin for place in filled]
        self.gaps: list[tuple[int, int]] = []
        reached = 0
        for member in self.members:
            if member.numel:
                if member.start > reached:
                    self.gaps.append((reached, member.start - reached))
                reached = member.start + member.numel
        with torch.inference_mode(False), torch.no_grad():
            self.flat = nn.Parameter(view_bytes(first.shards, begin if numel else 0, numel, self.dtype))
            self.padding = [self.flat.detach().narrow(0, *gap) for gap in self.gaps]
            self._zeros = [torch.zeros(count, dtype=self.dtype, device=self.device) for _, count in self.gaps]

    def is_valid(self) -> bool:
        """Returns True if all parameters still lie there."""
        return all(member.place.is_valid() for member in self.members)

    def find_flat(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> Tensor | None:
        """Returns the gradients of the members that are not empty as one tensor over their memory, if they lie in one
        storage as the parameters do.
        """
        if not addresses:
            return torch.empty_like(self.flat, requires_grad=False)
        if self.gaps and not getattr(self.group.gradients, "padding_is_zero", False):
            return None
        base, first = addresses[0], gradients[0]
        if [address - base for address in addresses] != self.offsets:
            return None
        storage = first.untyped_storage()
        # What lies between the ends of one storage lies in it: no two allocations share memory.
        if base + self.flat.nbytes > storage.data_ptr() + storage.nbytes():
            return None
        return first.as_strided((self.flat.numel(),), (1,), first.storage_offset())

    def copy_flat(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns a copy of the gradients of the members that are not empty, as one tensor, with zeros as padding."""
        if not gradients:
            return torch.empty_like(self.flat, requires_grad=False)
        parts = [gradient.reshape(-1) for gradient in gradients]
        if self.gaps:
            ends = {start: zeros for (start, _), zeros in zip(self.gaps, self._zeros, strict=True)}
            padded, reached = [], 0
            for part in parts:
                if reached in ends:
                    padded.append(ends[reached])
                    reached += ends[reached].numel()
                padded.append(part)
                reached += part.numel()
            parts = padded
        return torch.cat(parts)

    def write_back(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Copies what a step has left in a copy of the gradients back into these."""
        filled = [member for member in self.members if member.numel]
        for member, gradient in zip(filled, gradients, strict=True):
            gradient.copy_(member.of(flat).view(gradient.shape))


def runs(places: Sequence[tuple[Place, Any]]) -> Iterator[tuple[list[Place], Any]]:
    """Yields the longest runs of places that lie side by side, with equal labels that are not None: (places, label).

    `places`: (place, label), in any order. Places with the label None are no part of any run.
    """
    groups: dict[FSDPParamGroup, list[tuple[Place, Any]]] = {}
    for place, label in places:
        if label is not None:
            groups.setdefault(place.group, []).append((place, label))
    for found in groups.values():
        found.sort(key=lambda pair: pair[0].rank)
        run: list[Place] = []
        last: Any = None
        for place, label in found:
            is_next = run and run[-1].rank + 1 == place.rank and run[-1].local.dtype == place.local.dtype
            if run and not (is_next and label == last):
                yield run, last
                run = []
            run.append(place)
            last = label
        if run:
            yield run, last
