"""Moves the buckets of `stream_full_params`: packs this rank's rows, gathers them, and lays out whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..shards.dtensors import cuts_of
from ..shards.gathers import place_chunks
from ..shards.protocol import Cut, ShardGroup, ShardParam, Shards
from ..shards.ranks import Work, all_gather_now, backend_name, comm_over, gather_to_one, moves_data
from ..shards.tensors import RANK_ALIGNMENT, align, bits_of, copy_all, group_copies, local_of

_GATHER_TO_ONE = ("gloo", "nccl")
"""Backends that can send to one rank alone."""


# What changes when a parameter is written to or replaced: the registered one, its local tensor, their versions.
Mark = tuple[Tensor, Tensor, int]


def is_same(one: Mark, other: Mark) -> bool:
    """Returns True if a parameter was neither written to nor replaced between two marks."""
    return one[0] is other[0] and one[1] is other[1] and one[2] == other[2]


@dataclass(frozen=True, eq=False)
class Source:
    """Describes one distinct parameter: its value is that of `tensor`'s rows, gathered in one stage, two or none.

    `names`: all of its FQNs. `shape`, `dtype`: of the whole value that is delivered. `param`, `group`: None for a
    parameter that no fully_shard call manages.
    """

    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: tuple[Cut, ...]
    param: ShardParam | None = None
    group: ShardGroup | None = None

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the whole value, padded to equal chunks; the same on all ranks."""
        cut = self.stages[-1] if self.stages else None
        return (self.numel if cut is None else cut.chunk_numel * cut.size) * self.dtype.itemsize

    def local(self) -> Tensor:
        """Returns this rank's rows, a plain tensor."""
        return self.param.local if self.param is not None else _local(self.tensor)

    def mark(self) -> Mark:
        """Returns what changes when the parameter is written to or replaced."""
        now = registered = self.tensor
        if self.param is not None:
            now, registered = self.param.parameter, self.param.registered
        local = local_of(now) if isinstance(now, DTensor) else now
        return registered, local, sum(0 if each.is_inference() else each._version for each in (now, local))


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor.detach()) if isinstance(tensor, DTensor) else tensor.detach()


def find_groups(shards: Shards, named: Iterable[tuple[str, Tensor]]) -> list[ShardGroup]:
    """Returns the groups that manage these parameters."""
    return list(dict.fromkeys(param.group for _, tensor in named if (param := shards.find(tensor)) is not None))


def find_sources(shards: Shards, named: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> list[Source]:
    """Returns each distinct parameter once.

    Raises:
        NotImplementedError, RuntimeError: see `stream_full_params`.
    """
    names: dict[Any, list[str]] = {}
    tensors: dict[Any, tuple[Tensor, ShardParam | None]] = {}
    for name, tensor in named:
        param = shards.find(tensor)
        key = id(tensor) if param is None else param
        names.setdefault(key, []).append(name)
        tensors[key] = tensor, param
    return [_source(tuple(names[key]), tensor, param, dtype) for key, (tensor, param) in tensors.items()]


def _source(names: tuple[str, ...], tensor: Tensor, param: ShardParam | None, dtype: torch.dtype | None) -> Source:
    local = _local(tensor) if param is None else param.local
    if local.is_meta:
        raise RuntimeError(f"{names[0]} is on meta: it has no values. Call model.to_empty(device=...), and initialise.")
    if param is not None and param.gathers_itself:
        raise NotImplementedError(
            f"{names[0]} has fsdp_pre_all_gather: stream_full_params can't gather its stored form. Use full_params."
        )
    delivered = dtype if dtype is not None and local.dtype.is_floating_point else local.dtype
    if param is not None:
        return Source(names, tensor, param.shape, delivered, tuple(param.cuts), param, param.group)
    shape = tuple(tensor.shape)
    cuts = cuts_of(names[0], tensor.device_mesh, tensor.placements, shape) if isinstance(tensor, DTensor) else ()
    return Source(names, tensor, shape, delivered, cuts)


# ---- one collective


class Route:
    """Sends one segment of bytes of each rank of a process group to all of its ranks, to one of them, or to none.

    Segments end with a number of each rank, which all ranks get, also those that get no segments. `receives`: True if
    this rank gets the segments.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, ranks: Collection[int] | None) -> None:
        self.group, self.device, self.rank, self.size = group, device, group.rank(), group.size()
        self.comm = comm_over(group, device, "the parameters of stream_full_params")
        members = dist.get_process_group_ranks(group)
        wanted = [i for i, rank in enumerate(members) if ranks is None or rank in ranks]
        to_one = len(wanted) == 1 and backend_name(group, device) in _GATHER_TO_ONE
        self.to = wanted[0] if to_one else None
        self.to_nobody = not wanted
        self.receives = self.rank in wanted
        # A simulated backend leaves memory as it is.
        self.moves_data = moves_data([group], device)


class Routes(Protocol):
    """Returns the route of a stage. `is_only`: there is no other stage."""

    def __call__(self, stage: Cut, is_only: bool = True) -> Route: ...


class Segments:
    """Is one collective: this rank's segment, `own`, and after `wait` those of all ranks, as the rows of `rows`."""

    def __init__(self, route: Route, nbytes: int) -> None:
        self._route, self._payload = route, align(nbytes, RANK_ALIGNMENT)
        self._work: list[Work] = []
        size, self._joint = self._payload + RANK_ALIGNMENT, route.to is None and not route.to_nobody
        rows = route.size if self._joint or route.receives else 1
        memory = torch.empty(rows, size, dtype=torch.uint8, device=route.device)
        self.rows = memory if self._joint or route.receives else None
        self._segment = memory[route.rank if rows > 1 else 0]
        self.own = self._segment[: self._payload]
        self._numbers = memory if self._joint else memory.new_empty(route.size, RANK_ALIGNMENT)

    def start(self, number: int) -> None:
        """Begins to send. Every rank of the group must call it, in the same order."""
        route = self._route
        self._segment[self._payload :].view(torch.int64).fill_(number)
        own = self._segment
        if not self._joint:
            own = self._numbers[route.rank].copy_(self._segment[self._payload :])
        self._work.append(route.comm.all_gather([self._numbers.view(-1)], [own]))
        if route.to is not None:
            rows = None if self.rows is None else [*self.rows]
            self._work.append(gather_to_one(self._segment, rows, route.group, route.to, route.device))

    def wait(self) -> int:
        """Waits until the segments are there. Returns the greatest number of all ranks."""
        works, self._work = self._work, []
        for work in works:
            work.wait()
        numbers = self._numbers if self._route.moves_data else self._segment[None]
        return int(numbers[:, -RANK_ALIGNMENT:].contiguous().view(torch.int64).max())


class StageGather:
    """Gathers values that are cut alike by the ranks of one route."""

    def __init__(self, route: Route, cuts: Sequence[Cut], dtype: torch.dtype) -> None:
        self._cuts, self._dtype = cuts, dtype
        self._offsets = [0]
        for cut in cuts:
            self._offsets.append(self._offsets[-1] + cut.chunk_numel)
        self.segments = Segments(route, self._offsets[-1] * dtype.itemsize)
        self._rank = route.rank

    def slots(self) -> list[Tensor]:
        """Returns the memory of this rank's rows."""
        own, shapes = self.segments.own.view(self._dtype), [cut.chunk_shape(self._rank) for cut in self._cuts]
        places = zip(self._offsets, shapes, strict=False)
        return [own[start : start + torch.Size(shape).numel()].view(shape) for start, shape in places]

    def unpack(self, wholes: Sequence[Tensor]) -> None:
        """Copies all ranks' rows to their places in `wholes`, contiguous tensors of the whole shapes."""
        rows, copies = self.segments.rows, list[tuple[Tensor, Tensor]]()
        assert rows is not None, "this rank receives"
        typed = rows[:, : self.segments.own.numel()].view(self._dtype)
        for cut, start, whole in zip(self._cuts, self._offsets, wholes, strict=False):
            copies += place_chunks(whole, cut, typed[:, start : start + cut.chunk_numel])
        copy(copies)


def copy(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies sources to targets; not asynchronously from the CPU, since users may write to shards next."""
    copies = [(target, source) for target, source in copies if target.numel()]
    if all(target.device == source.device for target, source in copies):
        for group in group_copies(copies):
            copy_all(*group)
    else:
        for target, source in copies:
            target.copy_(source)


# ---- whole parameters


class Filled(NamedTuple):
    """Holds what a bucket has become on this rank. `flat`: None on ranks that get nothing. `problem`: the greatest
    number that a rank has sent along.
    """

    flat: Tensor | None
    indices: Tensor | None
    counts: list[int]
    problem: int


class WholeBucket:
    """Gathers whole parameters of one dtype, which the same ranks share, by one collective for each stage.

    `flat` is the concatenation of the parameters' values, without padding. The collective needs another padded copy,
    until it is unpacked; on one rank there is none.
    """

    def __init__(self, sources: Sequence[Source], routes: Routes, receives: bool) -> None:
        self.sources, self._receives = sources, receives
        self._routes = [routes(stage, len(sources[0].stages) == 1) for stage in sources[0].stages]
        self._dtype, self._number = sources[0].dtype, 0
        self._gather: StageGather | None = None
        self._flat: Tensor | None = None

    def start(self, number: int, device: torch.device, keep: Callable[[Source, Tensor], None]) -> None:
        """Packs this rank's rows, and begins to gather. `keep` is called with the packed rows of each parameter."""
        self._number, self._device = number, device
        if self._routes:
            self._gather = StageGather(self._routes[0], [source.stages[0] for source in self.sources], self._dtype)
            slots = self._gather.slots()
        else:
            self._flat = self._new_flat()
            slots = self._values_in(self._flat)
        copy(zip(slots, [source.local() for source in self.sources], strict=True))
        for source, slot in zip(self.sources, slots, strict=True):
            keep(source, slot)
        if self._gather is not None:
            self._gather.segments.start(number)

    def finish(self) -> Filled:
        """Waits, and returns the values."""
        problem, gather = self._number, self._gather
        for stage in range(1, len(self._routes)):
            assert gather is not None, "begun"
            problem = gather.segments.wait()
            cuts = [source.stages[stage] for source in self.sources]
            following = StageGather(self._routes[stage], cuts, self._dtype)
            gather.unpack(following.slots())
            gather = following
            gather.segments.start(problem)
        if gather is not None:
            problem = gather.segments.wait()
            if self._receives:
                self._flat = self._new_flat()
                gather.unpack(self._values_in(self._flat))
        self._gather = None
        flat, self._flat = self._flat, None
        return Filled(flat if self._receives else None, None, [source.numel for source in self.sources], problem)

    def _new_flat(self) -> Tensor:
        return torch.empty(sum(source.numel for source in self.sources), dtype=self._dtype, device=self._device)

    def _values_in(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([source.numel for source in self.sources])
        return [part.view(source.shape) for part, source in zip(parts, self.sources, strict=True)]


# ---- changed elements


class StreamVersion:
    """Remembers which values streams have delivered: pass it as `since`, and a stream delivers only what has changed.

    It holds a copy of this rank's rows in the dtype that was delivered: 2 bytes for each parameter in bfloat16,
    divided by the number of ranks that share them. A new one knows of no values, so that the first stream delivers
    everything. A stream updates it; one that was not iterated to its end, or has raised, clears it. Use one for each
    receiver, and `clear` it when the receiver has lost its weights.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}
        # The last stream was iterated to its end on this rank.
        self._is_complete = False

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that it holds on this rank."""
        return sum(each.nbytes for each in self._rows.values())

    def clear(self) -> None:
        """Forgets all values: the next stream delivers everything, on all ranks."""
        self._rows.clear()
        self._is_complete = False

    def _known(self, source: Source) -> Tensor | None:
        known, local = self._rows.get(source.names[0]), source.local()
        is_same = known is not None and (known.dtype, known.shape) == (source.dtype, local.shape)
        return known if is_same and len(source.stages) < 2 else None

    def _changed(self, source: Source) -> Tensor:
        """Returns which elements of this rank's rows have other bits than those that were delivered."""
        known = self._rows[source.names[0]]
        return bits_of(source.local().to(known)) != bits_of(known)

    def _keep(self, source: Source, rows: Tensor) -> None:
        known = self._known(source)
        if known is not None:
            known.copy_(rows)
        else:
            self._rows[source.names[0]] = rows.to(source.local().device, copy=True)


class ChangedBucket:
    """Gathers the changed elements of parameters: one collective of indices and values.

    `counts`: how many elements have changed on each rank of the group, for each parameter.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        routes: Routes,
        receives: bool,
        counts: Sequence[Sequence[int]],
        version: StreamVersion,
    ) -> None:
        self.sources, self._counts, self._version, self._receives = sources, counts, version, receives
        self._dtype, self._index_dtype = sources[0].dtype, index_dtype(sources[0])
        self._route = routes(sources[0].stages[0]) if sources[0].stages else None
        total = max(map(sum, zip(*counts, strict=True)))
        self._index_nbytes = align(total * self._index_dtype.itemsize, RANK_ALIGNMENT)
        self._nbytes = self._index_nbytes + total * self._dtype.itemsize
        self._number = 0
        self._segments: Segments | None = None
        # The indices and values of each rank.
        self._own: list[tuple[Tensor, Tensor]] = []

    def start(self, number: int, device: torch.device, keep: Callable[[Source, Tensor], None]) -> None:
        """Packs this rank's changes, and begins to gather."""
        indices, values = [], []
        rank = 0 if self._route is None else self._route.rank
        for source, counts in zip(self.sources, self._counts, strict=True):
            changed, rows = self._version._changed(source), source.local().to(source.dtype)
            places = changed.nonzero().view(-1)
            if len(places) != counts[rank]:
                raise RuntimeError(f"{source.names[0]}: its values have changed while stream_full_params was iterated")
            values.append(rows.reshape(-1)[places].to(device))
            indices.append(_indices_in_whole(source, places).to(device, self._index_dtype))
            keep(source, rows)
        own, self._number = (torch.cat(indices), torch.cat(values)), number
        if self._route is None:
            self._own = [own]
            return
        self._segments = Segments(self._route, self._nbytes)
        for part, flat in zip(self._parts(self._segments.own), own, strict=True):
            part[: len(flat)].copy_(flat)
        self._segments.start(number)

    def finish(self) -> Filled:
        """Waits, and returns the indices and values."""
        problem, totals = self._number, [sum(each) for each in self._counts]
        if self._segments is not None:
            problem, rows = self._segments.wait(), self._segments.rows
            self._own = [] if rows is None else [self._parts(row) for row in rows]
        flat = indices = None
        if self._receives:
            indices, flat = (torch.cat(self._by_parameter([own[k] for own in self._own])) for k in (0, 1))
        self._segments, self._own = None, []
        return Filled(flat, indices, totals, problem)

    def _parts(self, segment: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices and the values of a segment."""
        indices, values = segment[: self._index_nbytes], segment[self._index_nbytes : self._nbytes]
        return indices.view(self._index_dtype), values.view(self._dtype)

    def _by_parameter(self, of_ranks: Sequence[Tensor]) -> list[Tensor]:
        parts = [
            each[: sum(counts)].split(counts)
            for each, counts in zip(of_ranks, map(list, zip(*self._counts, strict=True)), strict=True)
        ]
        return [part for of_param in zip(*parts, strict=True) for part in of_param]


def index_dtype(source: Source) -> torch.dtype:
    """Returns the dtype of indices into a whole parameter."""
    return torch.int32 if source.numel < 2**31 else torch.int64


def _indices_in_whole(source: Source, places: Tensor) -> Tensor:
    """Returns where elements of this rank's rows lie in the whole parameter."""
    if not source.stages:
        return places
    cut = source.stages[0]
    first, end = cut.bounds()
    inner = torch.Size(cut.shape[cut.dim + 1 :]).numel()
    own_rows = max(1, end - first)
    outer, row = places // (own_rows * inner), places // inner % own_rows
    return (outer * cut.shape[cut.dim] + row + first) * inner + places % inner


def count_changes(sources: Sequence[Source], version: StreamVersion, routes: Routes) -> dict[Source, list[int]]:
    """Returns, for each parameter of which `version` knows values, how many elements of each rank have changed. Every
    rank must call it.
    """
    known = [source for source in sources if version._known(source) is not None]
    numbers = [version._changed(source).sum().cpu() for source in known]
    own = dict(zip(known, torch.stack(numbers).tolist() if numbers else (), strict=True))
    found: dict[Source, list[int]] = {source: [count] for source, count in own.items() if not source.stages}
    of_group: dict[Any, list[Source]] = {}
    for source in own:
        if source.stages:
            of_group.setdefault(source.stages[0].group, []).append(source)
    for members in of_group.values():
        route = routes(members[0].stages[0])
        sent = b"".join(own[source].to_bytes(8, "little") for source in members)
        of_all = all_gather_now(sent, route.comm, route.device)
        of_all = of_all if route.moves_data else [sent] * route.size
        for i, source in enumerate(members):
            found[source] = [int.from_bytes(each[8 * i : 8 * i + 8], "little") for each in of_all]
    return found
