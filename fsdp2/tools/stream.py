"""Delivers whole parameters in buckets of bounded size: `for bucket in stream_full_params(model)`."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..shards.find import shards_of
from ..shards.protocol import ShardGroup
from ..shards.ranks import CommLabel, all_reduce_over, gather_objects
from ..shards.runs import in_runs
from ..shards.tensors import hides_modes, some_of
from .stream_buckets import (
    ChangedBucket,
    Route,
    Routes,
    Source,
    StreamVersion,
    WholeBucket,
    count_changes,
    find_groups,
    find_sources,
    index_dtype,
    is_same,
)

__all__ = ["ParamBucket", "ParamStream", "StreamVersion", "stream_full_params"]


class FreedTensor(Tensor):
    """Is the class of a bucket's tensors when its memory is freed: a read raises, instead of ending the process.

    `text`: what the error says.
    """

    text: str

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.untyped_storage, Tensor.size, Tensor.shape.__get__):  # type: ignore[attr-defined]
            return super().__torch_function__(function, types, args, kwargs)
        text = _first_freed([args, kwargs]).text
        if function in (Tensor.__repr__, Tensor.__format__):
            return f"<tensor of {text}>"
        raise RuntimeError(text)


def _first_freed(value: Any) -> Any:
    """Returns the first FreedTensor in `value`, or None."""
    if isinstance(value, (list, tuple, dict)):
        inside = map(_first_freed, value.values() if isinstance(value, dict) else value)
        return next((each for each in inside if each is not None), None)
    return value if isinstance(value, FreedTensor) else None


@dataclass(frozen=True, eq=False, repr=False)
class ParamBucket:
    """Holds some whole parameters of a model, or what has changed of them. Tensors have no data once the next bucket is
    asked for, and raise when they are read then: copy what you keep.

    Args:
        names: the FQN of each parameter, as in `named_parameters`; of a tied one, the first.
        all_names: all FQNs of each parameter: several of a tied one.
        shapes: the shape of each whole parameter.
        dtype: the dtype of all values.
        flat: the values of all parameters, one behind the other, on the device of the mesh. None on ranks that get
            nothing (`ranks=`).
        indices: None: `flat` has the whole parameters. Else `flat` has the elements that have changed, and this tensor
            says where each lies in its flattened parameter: int32, or int64 in parameters of 2**31 elements or more.
        counts: how many elements of `flat` belong to each parameter.
    """

    names: tuple[str, ...]
    all_names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flat: Tensor | None
    indices: Tensor | None
    counts: tuple[int, ...]
    _views: list[weakref.ref[Tensor]] = field(default_factory=list, init=False)

    def __repr__(self) -> str:
        kind = "whole" if self.indices is None else "changes of"
        return f"<ParamBucket: {kind} {some_of(self.names)}, {sum(self.counts)} elements in {self.dtype}>"

    def _flat_with_data(self) -> Tensor:
        assert self.flat is not None, "this rank gets values"
        if isinstance(self.flat, FreedTensor):
            raise RuntimeError(self.flat.text)
        return self.flat

    def _free(self) -> None:
        """Frees the memory, whoever refers to it."""
        text = (
            f"{self}: its memory was freed when the next bucket was asked for, or the stream was closed. Use each "
            "bucket inside the loop, and copy what you keep."
        )
        delivered = [self.flat, self.indices, *[view() for view in self._views]]
        for tensor in delivered:
            if tensor is not None:
                tensor.untyped_storage().resize_(0)
        for tensor in delivered:
            if tensor is not None:
                tensor.__class__ = FreedTensor
                tensor.text = text  # type: ignore[attr-defined]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Views of `flat` under all names: whole parameters in their shapes, or changed values. Empty on ranks that
        get nothing.
        """
        if self.flat is None:
            return {}
        parts: Sequence[Tensor] = self._flat_with_data().split(self.counts)
        if self.indices is None:
            parts = [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
        self._views.extend(map(weakref.ref, parts))
        return {name: part for names, part in zip(self.all_names, parts, strict=True) for name in names}

    def write_to(self, targets: Mapping[str, Tensor]) -> None:
        """Writes the values into tensors of the whole shapes, in place: the parameters of a plain model, for example.

        Args:
            targets: contiguous tensors by name, in any dtype; those of other parameters are left alone. One is enough
                for a tied parameter. `dict(engine.named_parameters())` of a plain copy of the model is right.

        Raises:
            KeyError: no name of a parameter is in `targets`.
        """
        if self.flat is None:
            return
        flat = self._flat_with_data()
        places = [None] * len(self.names) if self.indices is None else self.indices.split(self.counts)
        with torch.no_grad():
            for names, shape, part, place in zip(
                self.all_names, self.shapes, flat.split(self.counts), places, strict=True
            ):
                found = {id(targets[name]): targets[name] for name in names if name in targets}
                if not found:
                    raise KeyError(f"{names[0]}: expected a tensor of that name in targets")
                for target in found.values():
                    if place is None:
                        target.copy_(part.view(shape))
                    else:
                        target.view(-1)[place.to(target.device, torch.int64)] = part.to(target)


@hides_modes
def stream_full_params(
    model: nn.Module,
    *,
    bucket_bytes: int = 256 * 1024 * 1024,
    dtype: torch.dtype | None = None,
    ranks: Collection[int] | None = None,
    since: StreamVersion | None = None,
) -> ParamStream:
    """Returns an iterator over the whole parameters of a model, in buckets: for an inference engine, or an export.

    Every rank must call it and iterate to the same bucket, between passes; also between the micro-batches of an
    accumulation. Each bucket takes one collective, however many parameters it has, and is gathered while you work on
    the one before; parameters of tensor parallelism take one more. A first all-reduce of three numbers finds out
    whether ranks stream the same parameters. A bucket has parameters of one dtype, which the same ranks share, in the
    order of the model; a tied parameter comes once. The memory is that of two buckets: `bucket_bytes` of values, and
    as much that is being gathered. `len()` of the iterator is the number of buckets, so that `tqdm` shows progress.
    Replicas (HSDP) gather each for themselves.

    The stream is consistent: all values are those of the call. If a parameter is written to or replaced meanwhile, on
    any rank, all ranks that share it raise at the next bucket, or at the one behind that.

    Args:
        model: any module with sharded parameters. Parameters that no fully_shard call manages come, too, as this rank
            has them.
        bucket_bytes: the greatest size of a bucket, with the padding of parameters that don't divide evenly. A larger
            parameter is a bucket of its own.
        dtype: the dtype of floating-point parameters. None: that in which they are stored.
        ranks: the global ranks that get values; the others take part in the collectives, and get buckets without
            tensors. Where one rank of a shard group gets values, the others only send theirs (gloo, NCCL), and need
            memory for those alone. Replicas without such a rank send nothing. None: all ranks.
        since: deliver only the elements whose bits in `dtype` differ from those of the last stream with this
            StreamVersion, as indices and values. Parameters that take fewer bytes whole come whole, unchanged ones not
            at all; those of tensor parallelism always come whole. Ranks compare the numbers of changes first, in one
            all-gather for each group of ranks. For weights in bfloat16 that pays below a third of all elements.

    Raises:
        TypeError, ValueError: a wrong argument, or `model` has no sharded parameter, or ranks stream different
            parameters. The latter is raised on all ranks.
        NotImplementedError: a parameter has `fsdp_pre_all_gather`, or is a DTensor with a placement that is neither
            Shard nor Replicate. It is raised on all ranks.
        RuntimeError: a forward, a backward or full_params runs, or a parameter is on meta, on any rank; it is raised on
            all ranks. While iterating: a parameter was written to.

    Example:
        ```python
        for bucket in fsdp2.stream_full_params(model, dtype=torch.bfloat16):
            engine.load_weights(bucket.tensors.items())
        ```
    """
    _check_arguments(model, bucket_bytes, dtype, ranks, since)
    shards = shards_of(model)
    groups = find_groups(shards, model.named_parameters(remove_duplicate=False))
    if not groups:
        raise ValueError(f"model: expected a module with sharded parameters, {type(model).__name__} has none")
    sources: list[Source] = []
    problem: Exception | None = None
    try:
        _settle(groups)
        sources = find_sources(shards_of(model), [*model.named_parameters(remove_duplicate=False)], dtype)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        problem = error
    settings = f"bucket_bytes={bucket_bytes}, ranks={ranks and sorted(ranks)}, since={type(since).__name__}"
    knows_nothing = since is not None and not since._is_complete
    if _compare(groups, sources, settings, problem, knows_nothing) and since is not None:
        since.clear()
    return ParamStream(groups[0].ranks.device, sources, bucket_bytes, ranks, since)


def _check_arguments(model: Any, bucket_bytes: Any, dtype: Any, ranks: Any, since: Any) -> None:
    def expect(holds: bool, kind: type[Exception], name: str, what: str, got: object) -> None:
        if not holds:
            raise kind(f"{name}: expected {what}, got {got}")

    expect(isinstance(model, nn.Module), TypeError, "model", "an nn.Module", type(model).__name__)
    expect(type(bucket_bytes) is int, TypeError, "bucket_bytes", "an int", repr(bucket_bytes))
    expect(bucket_bytes > 0, ValueError, "bucket_bytes", "1 or more", bucket_bytes)
    expect(dtype is None or isinstance(dtype, torch.dtype), TypeError, "dtype", "a torch.dtype or None", repr(dtype))
    expect(dtype is None or dtype.is_floating_point, ValueError, "dtype", "a floating-point dtype", dtype)
    expect(since is None or isinstance(since, StreamVersion), TypeError, "since", "an fsdp2.StreamVersion", repr(since))
    if ranks is not None:
        are_numbers = isinstance(ranks, Collection) and all(type(rank) is int for rank in ranks)
        expect(are_numbers, TypeError, "ranks", "global ranks or None", repr(ranks))
        size = dist.get_world_size()
        are_there = bool(ranks) and all(0 <= rank < size for rank in ranks)
        expect(are_there, ValueError, "ranks", f"some of 0 to {size - 1}", repr(ranks))


def _settle(groups: Sequence[ShardGroup]) -> None:
    """Adopts what users have registered in place of parameters."""
    for group in groups:
        if group.in_use is not None:
            raise RuntimeError(
                f"{group}: a forward, a backward or a block of full_params uses its parameters. Call "
                "stream_full_params between passes."
            )
        group.settle(reshard=False)


def _compare(
    groups: Sequence[ShardGroup],
    sources: Sequence[Source],
    settings: str,
    problem: Exception | None,
    knows_nothing: bool,
) -> bool:
    """Raises the error of one rank on all ranks. Returns True if any rank `knows_nothing`.

    Raises:
        ValueError: ranks stream different parameters.
    """
    described = [f"{source.names} of shape {source.shape} in {source.dtype}" for source in sources]
    checksum, device = zlib.crc32(repr((described, settings)).encode()), groups[0].ranks.device
    numbers = torch.tensor([checksum, -checksum, problem is not None, knows_nothing], dtype=torch.int64, device=device)
    comm_label = CommLabel("what stream_full_params is to deliver")
    all_reduce_over(numbers, _process_groups(groups), largest=True, comm_label=comm_label)
    most, least, any_problem, any_knows_nothing = numbers.tolist()
    if any_problem:
        problems = gather_objects((dist.get_rank(), problem), groups[0].ranks.axis_groups, device)
        if problem is not None:
            raise problem
        found = [(rank, error) for rank, error in problems if error is not None]
        rank, error = found[0] if found else ("of another shard group", RuntimeError("it can't stream its parameters"))
        raise type(error)(f"rank {rank}: {error}")
    if most != -least:
        raise ValueError(
            f"stream_full_params: ranks stream different parameters, or pass different arguments. Rank "
            f"{dist.get_rank()} has {len(described)} parameters, the first is {described[0]}, and passes {settings}. "
            "Build the same model on all ranks, and pass the same arguments."
        )
    return bool(any_knows_nothing)


def _process_groups(groups: Sequence[ShardGroup]) -> list[dist.ProcessGroup]:
    """Returns the process groups, one for each axis, of all ranks that share the parameters, by tensor parallelism,
    too.
    """
    found = {each.group_name: each for group in groups for each in group.ranks.axis_groups}
    for param in (param for group in groups for param in group.params):
        found |= {each.group_name: each for each in (*(cut.group for cut in param.cuts), *param.replicas)}
    return [*found.values()]


class ParamStream:
    """Is an iterator over ParamBuckets, see `stream_full_params`. `len` is the number of all buckets.

    To stop early, leave the loop on all ranks at the same bucket, and call `close`, or drop it.
    """

    def __init__(
        self, device: torch.device, sources: Sequence[Source], bucket_bytes: int, ranks: Any, since: Any
    ) -> None:
        self._device, self._sources = device, sources
        self._version: StreamVersion | None = since
        self._marks = [source.mark() for source in sources]
        self._receives = ranks is None or dist.get_rank() in ranks
        to = None if ranks is None else frozenset(ranks)
        route = cache(partial(Route, self._device))
        # Of two stages, all ranks need the values of the first.
        self._route_of: Routes = lambda stage, is_only=True: route(stage.group, to if is_only else None)
        self._buckets = self._plan(bucket_bytes)
        self._position, self._is_closed = 0, False
        self._pending: Any = None
        self._delivered: ParamBucket | None = None

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[ParamBucket]:
        return self

    def __next__(self) -> ParamBucket:
        bucket = self._next()
        if bucket is None:
            raise StopIteration
        return bucket

    @hides_modes
    def _next(self) -> ParamBucket | None:
        self._free()
        if self._is_closed:
            return None
        if self._pending is None:
            self._start(self._find_write())
        bucket, self._pending = self._pending, None
        if bucket is None:
            self._is_closed = True
            if self._version is not None:
                self._version._is_complete = True
            return None
        written = self._find_write()
        with torch.inference_mode(False), torch.no_grad():
            filled = bucket.finish()
        if not filled.problem:
            self._start(written)
        if written or filled.problem:
            self._fail(written or filled.problem)
        sources = bucket.sources
        self._delivered = ParamBucket(
            names=tuple(source.names[0] for source in sources),
            all_names=tuple(source.names for source in sources),
            shapes=tuple(source.shape for source in sources),
            dtype=sources[0].dtype,
            flat=filled.flat,
            indices=filled.indices,
            counts=tuple(filled.counts),
        )
        return self._delivered

    @hides_modes
    def close(self) -> None:
        """Ends the stream: waits for the bucket that is being gathered, and frees all memory. It may be called again.

        Every rank must call it behind the same bucket. Unless the stream was iterated to its end, the next one with the
        same StreamVersion delivers everything.
        """
        pending, self._pending, self._is_closed = self._pending, None, True
        with torch.inference_mode(False), torch.no_grad():
            if pending is not None:
                pending.finish()
        self._free()

    # ---- the plan

    def _plan(self, bucket_bytes: int) -> list[WholeBucket | ChangedBucket]:
        """Returns the buckets: parameters of one dtype and one way of gathering, in order, as many as there is room."""
        version, changes = self._version, {}
        if version is not None:
            version._is_complete = False
            with torch.inference_mode(False), torch.no_grad():
                changes = count_changes(self._sources, version, self._route_of)
        alike: dict[Any, list[tuple[Source, int]]] = {}
        for source in self._sources:
            counts, nbytes = changes.get(source), source.padded_nbytes
            if counts is None or any(counts):
                itemsize = source.dtype.itemsize + index_dtype(source).itemsize
                changed = nbytes if counts is None else len(counts) * max(counts) * itemsize
                kind = index_dtype(source) if changed < nbytes else None
                key = (kind, *[stage.group for stage in source.stages], source.dtype)
                alike.setdefault(key, []).append((source, min(changed, nbytes)))
        buckets: list[WholeBucket | ChangedBucket] = []
        for (kind, *_), sized in alike.items():
            for each in in_runs(sized, bucket_bytes):
                if kind is None:
                    buckets.append(WholeBucket(each, self._route_of, self._receives))
                else:
                    assert version is not None, "changes are counted"
                    counts_of = [changes[source] for source in each]
                    buckets.append(ChangedBucket(each, self._route_of, self._receives, counts_of, version))
        return buckets

    # ---- one bucket

    def _start(self, number: int) -> None:
        """Begins to gather the next bucket, if there is one. `number`: not 0 if this rank is about to raise."""
        if self._position >= len(self._buckets):
            return
        bucket = self._buckets[self._position]
        self._position += 1
        for group in dict.fromkeys(source.group for source in bucket.sources if source.group is not None):
            group.before_read()
        with torch.inference_mode(False), torch.no_grad():
            bucket.start(number, self._device, self._keep)
        self._pending = bucket

    def _keep(self, source: Source, rows: Tensor) -> None:
        if self._version is not None and len(source.stages) < 2:
            self._version._keep(source, rows)

    def _find_write(self) -> int:
        """Returns 0, or 1 + the index of a parameter that was written to since the call."""
        pairs = enumerate(zip(self._marks, self._sources, strict=True), 1)
        return next((i for i, (mark, source) in pairs if not is_same(mark, source.mark())), 0)

    def _fail(self, number: int) -> None:
        self.close()
        raise RuntimeError(
            f"{self._sources[number - 1].names[0]}: it was written to or replaced, on this rank or another, while "
            "stream_full_params was iterated: its buckets would be of different steps. Finish the stream before "
            "optimizer.step()."
        )

    def _free(self) -> None:
        """Frees the bucket that was delivered last."""
        delivered, self._delivered = self._delivered, None
        if delivered is not None:
            delivered._free()
