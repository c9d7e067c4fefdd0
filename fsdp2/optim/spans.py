"""Spans: runs of parameters that lie side by side in a group's shard buffer, as one flat tensor.

A span has one dtype and one entry of an optimizer's `param_groups`. Between its parameters there may be padding, which
is zero and stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..shards.find import place_of
from ..shards.tensors import copy_all, local_of, view_bytes
from ..torch_private.optimizers import flatten


class Place(NamedTuple):
    """Says where a sharded parameter lies.

    Args:
        shards: the memory of its group's shards, in bytes.
        offset: its first byte there.
        rank: how many parameters lie before it there.
        is_current: () -> False once that is not the memory of the shards any more.
    """

    parameter: Tensor
    local: Tensor
    shards: Tensor
    offset: int
    rank: int
    is_current: Callable[[], bool]

    def is_valid(self) -> bool:
        """Returns True if the parameter still lies there."""
        return self.is_current() and local_of(self.parameter) is self.local

    def touches(self, following: Place) -> bool:
        """Returns True if `following` has the same dtype and begins where this one ends, without padding between."""
        is_alike = self.shards is following.shards and self.local.dtype == following.local.dtype
        return is_alike and self.offset + self.local.nbytes == following.offset


class Places:
    """Finds where sharded parameters lie. It remembers the order of each buffer while it is in use."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def find(self, parameter: Tensor) -> Place | None:
        """Returns where a parameter lies, or None if it can't be stepped on as a part of a flat tensor."""
        found = place_of(parameter, self._known)
        if found is None:
            return None
        local = local_of(parameter)
        if type(local) is not Tensor or local.is_inference() or not local.is_floating_point() or local.is_meta:
            return None
        return Place(parameter, local, found.memory, found.offset, found.order, found.is_current)


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


class Extent:
    """Says how parameters lie beside each other in one shard buffer. It holds numbers, and keeps no memory alive.

    `begin`, `numel`: the first byte there, and the elements from the first to the last of those that are not empty.
    `num_filled`: how many are not empty. `starts`: of each parameter, its first element. `gaps`: (first element, number
    of elements) of padding between them.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        filled = [place for place in places if place.local.numel()]
        itemsize = places[0].local.dtype.itemsize
        self.begin, self.num_filled = filled[0].offset if filled else 0, len(filled)
        end = filled[-1].offset + filled[-1].local.nbytes if filled else 0
        self.numel = (end - self.begin) // itemsize
        self.nbytes = end - self.begin
        self.starts = [min(max(place.offset - self.begin, 0) // itemsize, self.numel) for place in places]
        # Bytes between the first parameter that is not empty and each such one.
        self._offsets = [place.offset - self.begin for place in filled]
        self.gaps: list[tuple[int, int]] = []
        reached = 0
        for place, start in zip(places, self.starts, strict=True):
            if place.local.numel():
                if start > reached:
                    self.gaps.append((reached, start - reached))
                reached = start + place.local.numel()

    def find_flat(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> Tensor | None:
        """Returns the gradients of the parameters that are not empty as one tensor over their memory, if they lie in
        one storage as the parameters do. `addresses`: where their memory begins.
        """
        if not addresses or self.gaps:  # gradients of padding are not zero
            return None
        base, first = addresses[0], gradients[0]
        if [address - base for address in addresses] != self._offsets:
            return None
        storage = first.untyped_storage()
        # What lies between the ends of one storage lies in it: no two allocations share memory.
        if base + self.nbytes > storage.data_ptr() + storage.nbytes():
            return None
        return first.as_strided((self.numel,), (1,), first.storage_offset())


class Run(Extent):
    """Parameters side by side in one shard buffer, and their memory."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(places)
        self.places, self.shards = places, places[0].shards

    def view(self) -> Tensor:
        """Returns the memory of all of it, as one tensor."""
        return view_bytes(self.shards, self.begin, self.numel, self.places[0].local.dtype)


class Runs:
    """Several runs, whose gradients are looked up together: nothing in Python for each parameter.

    `num_filled`: how many of their parameters are not empty.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents, self._slices, self.num_filled = extents, list[slice](), 0
        for extent in extents:
            self._slices.append(slice(self.num_filled, self.num_filled + extent.num_filled))
            self.num_filled += extent.num_filled

    def join(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> list[Tensor]:
        """Returns the gradients: of each run one tensor, if they lie in one storage as the parameters do, else each.

        Args:
            gradients: plain tensors, of the parameters that are not empty, run by run.
            addresses: where their memory begins.
        """
        parts: list[Tensor] = []
        for extent, some in zip(self._extents, self._slices, strict=True):
            own = gradients[some]
            flat = extent.find_flat(own, addresses[some]) if extent.num_filled > 1 else None
            parts += own if flat is None else [flat]
        return parts


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks items by their indices, as a list or a tuple; no loop in Python."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda items: [items[i] for i in indices]


class Span:
    """Parameters that are stepped on as one tensor, `flat`: here, a run over whose memory it lies.

    `entry`: index of their entry in `param_groups`. `padding`: what lies between the parameters in `flat`.
    `writes_gradients`, `keeps_zeros`: what is known of the optimizer's step, see Verdict.
    """

    writes_gradients, keeps_zeros = False, True

    def __init__(self, places: Sequence[Place], entry: int) -> None:
        self.entry, self.dtype, self.device = entry, places[0].local.dtype, places[0].local.device
        with torch.inference_mode(False), torch.no_grad():
            self._build(places)

    def _build(self, places: Sequence[Place]) -> None:
        self.run = Run(places)
        self.members = [Member(place, start) for place, start in zip(places, self.run.starts, strict=True)]
        self.flat = nn.Parameter(self.run.view())
        self.padding = [self.flat.detach().narrow(0, *gap) for gap in self.run.gaps]
        self._zeros = {first: self.flat.new_zeros(count) for first, count in self.run.gaps}

    @property
    def num_filled(self) -> int:
        """Number of parameters that are not empty."""
        return sum(1 for member in self.members if member.numel)

    def is_valid(self) -> bool:
        """Returns True if all parameters still lie there."""
        return all(member.place.is_valid() for member in self.members)

    def find_gradient(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> tuple[Tensor, bool]:
        """Returns the gradients as one tensor like `flat`, and True if that is a copy.

        Args:
            gradients: those of the parameters that are not empty, plain tensors.
            addresses: where their memory begins.
        """
        flat = self.run.find_flat(gradients, addresses)
        return (self._copy(gradients), True) if flat is None else (flat, False)

    def _copy(self, gradients: Sequence[Tensor]) -> Tensor:
        if not gradients:
            return torch.zeros_like(self.flat, requires_grad=False)
        parts, reached = [], 0
        for gradient in gradients:
            if reached in self._zeros:
                parts.append(self._zeros[reached])
                reached += self._zeros[reached].numel()
            parts.append(gradient)
            reached += gradient.numel()
        return flatten(parts)

    def write_back(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Copies what a step has left in a copy of the gradients back into these."""
        filled = [member for member in self.members if member.numel]
        for member, gradient in zip(filled, gradients, strict=True):
            gradient.copy_(member.of(flat).view(gradient.shape))

    def open(self) -> None:
        """Prepares `flat` for a step."""

    def close(self) -> None:
        """Gives the parameters what a step has left in `flat`."""


class Packed(Span):
    """Small runs, of several groups, whose parameters are copied to `flat` for each step, and back.

    Its memory is there during a step only. It has no padding.
    """

    def _build(self, places: Sequence[Place]) -> None:
        filled = [place for place in places if place.local.numel()]
        found: list[Run] = []
        begin = 0
        for i in range(1, len(filled) + 1):
            if i == len(filled) or not filled[i - 1].touches(filled[i]):
                found.append(Run(filled[begin:i]))
                begin = i
        self._runs = Runs(found)
        self._memory = [run.view() for run in found]
        self.members, start = [], 0
        for place in places:
            self.members.append(Member(place, start))
            start += place.local.numel()
        self._values = torch.empty(start, dtype=self.dtype, device=self.device)
        self.flat, self.padding = nn.Parameter(self._values), []
        self._parts = [*self._values.split([run.numel for run in found])]
        self._storage, self._nbytes = self._values.untyped_storage(), self._values.nbytes
        self._storage.resize_(0)

    def find_gradient(self, gradients: Sequence[Tensor], addresses: Sequence[int]) -> tuple[Tensor, bool]:
        parts = self._runs.join(gradients, addresses)
        return (flatten(parts) if parts else torch.zeros_like(self._values)), True

    def open(self) -> None:
        if self._memory:
            self._storage.resize_(self._nbytes)
            torch.cat(self._memory, out=self._values)

    def close(self) -> None:
        if self._memory and self._storage.nbytes():  # an error may have come before it was opened
            copy_all(self._memory, self._parts)
            self._storage.resize_(0)


def make_span(places: Sequence[Place], entry: int) -> Span:
    """Returns a span of these parameters: of one run, or of several, which are packed."""
    if len([*runs([(place, 0) for place in places])]) == 1:
        return Span(sorted(places, key=lambda place: place.rank), entry)
    return Packed(places, entry)


def runs(places: Sequence[tuple[Place, Any]]) -> Iterator[tuple[list[Place], Any]]:
    """Yields the longest runs of places that lie side by side, with equal labels that are not None: (places, label).

    `places`: (place, label), in any order. Places with the label None are no part of any run.
    """
    groups: dict[int, list[tuple[Place, Any]]] = {}
    for place, label in places:
        if label is not None:
            groups.setdefault(id(place.shards), []).append((place, label))
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
