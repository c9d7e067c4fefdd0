"""Tests the offsets of parameters and gradients in buffers, for many random groups, and for a few simple cases."""

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import pytest
import torch

from fsdp2.engine import layout as layouts
from fsdp2.engine.buckets import split_buckets
from fsdp2.engine.layout import (
    LARGE_SHARD_BYTES,
    MAX_OPERATIONS,
    PARAM_ALIGNMENT,
    RANK_ALIGNMENT,
    BucketLayout,
    GatherLayout,
    ParamSpec,
    bucket_layout,
    gather_layout,
    param_spec,
)

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
STORED = (F32, F32, F32, F64, BF16, torch.float16, torch.uint8, torch.bool, torch.int64)
GROUPS = 600
"""Random groups per test; all of them take well under a second."""


def random_specs(rng: random.Random, world_size: int) -> list[ParamSpec]:
    """1 to 8 parameters of 1 to 3 dims; few rows and many, no rows, no columns; some are cast for compute."""
    specs = []
    for _ in range(rng.randint(1, 8)):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 8, 16, 33)) for _ in range(rng.randint(1, 3)))
        stored = rng.choice(STORED)
        compute = rng.choice((F32, BF16)) if stored.is_floating_point and rng.random() < 0.5 else stored
        specs.append(ParamSpec(shape, stored, compute, world_size))
    return specs


def random_groups() -> Iterator[tuple[list[ParamSpec], int, int]]:
    """(specs, world size, direct_min_bytes)"""
    rng = random.Random(0)
    for _ in range(GROUPS):
        world_size = rng.choice((1, 2, 3, 4, 5, 8, 64))
        yield random_specs(rng, world_size), world_size, rng.choice((0, 16, 256, 1 << 30))


def assert_disjoint(regions: Sequence[tuple[int, int]], end: int) -> None:
    """The (offset, size) lie in [0, end) and none covers a part of another. Empty ones may lie anywhere inside."""
    assert all(0 <= offset <= offset + size <= end for offset, size in regions), (regions, end)
    for (offset, size), (following, _) in pairwise(sorted(region for region in regions if region[1])):
        assert offset + size <= following, regions


# ---- one parameter


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_rows_are_those_of_torch_chunk(world_size: int) -> None:
    """DTensor, checkpoints and optimizers expect torch.chunk's cut, which leaves the last ranks less, or nothing."""
    for rows in range(20):
        spec = ParamSpec((rows, 3), F32, F32, world_size)
        whole = torch.arange(rows * 3).view(rows, 3)
        chunks = [chunk for chunk in whole.chunk(world_size) if rows]
        for rank in range(world_size):
            first, last = spec.rows(rank)
            expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert torch.equal(whole[first:last], expected)
            assert spec.local_shape(rank) == tuple(expected.shape)


def test_shards_are_padded_to_one_size() -> None:
    spec = ParamSpec((7, 5), BF16, F32, world_size=4)
    assert (spec.chunk_rows, spec.row_numel, spec.shard_numel) == (2, 5, 10)
    assert (spec.storage_nbytes, spec.compute_nbytes, spec.is_even) == (20, 40, False)
    assert [spec.rows(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_a_scalar_has_no_layout() -> None:
    with pytest.raises(ValueError, match="scalar"):
        ParamSpec((), F32, F32, 2)


# ---- gather


def packed_regions(layout: GatherLayout) -> list[tuple[int, int]]:
    return [(layout.packed_offsets[i], layout.specs[i].compute_nbytes) for i in layout.packed]


@pytest.fixture(params=[False, True], ids=["inside", "apart"])
def _where_segments_lie(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small groups have their packed segments in the full storage, large ones apart."""
    if request.param:
        monkeypatch.setattr(layouts, "APART_BYTES", 1)
    gather_layout.cache_clear()
    yield
    gather_layout.cache_clear()


@pytest.mark.usefixtures("_where_segments_lie")
def test_gather_regions_do_not_overlap() -> None:
    """Two parameters that share a byte train on each other's values."""
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        stored = [(o, spec.storage_nbytes) for o, spec in zip(layout.shard_offsets, specs, strict=True)]
        full = [(o, spec.compute_nbytes * world_size) for o, spec in zip(layout.unsharded_offsets, specs, strict=True)]
        segments = (layout.packed_start, layout.packed_nbytes * world_size)
        tails = (sum(segments), layout.tail_nbytes * world_size)
        assert_disjoint(stored, layout.shard_nbytes)
        if layout.packs_apart:
            assert_disjoint(full, layout.unsharded_nbytes)
            segments, tails = (0, segments[1]), (segments[1], tails[1])
            assert_disjoint([segments, tails], layout.segments_nbytes)
        else:
            # So none of the copies out of the segments, one after the other, overwrites what another reads.
            assert_disjoint([*full, segments, tails], layout.unsharded_nbytes)
        assert sum(specs[i].compute_nbytes for i in layout.packed) + layout.tail_nbytes == layout.packed_nbytes
        assert_disjoint(packed_regions(layout), layout.packed_nbytes)


def test_packed_segments_lie_apart_if_they_are_large_and_much_of_their_group() -> None:
    """Norms beside large weights do not; what travels packed altogether does, from 256 KiB on."""

    def lies_apart(*shapes: tuple[int, ...], world_size: int = 8, direct_min_bytes: int = 512 * 1024) -> bool:
        specs = tuple(param_spec(shape, torch.float32, torch.bfloat16, world_size, 0, False) for shape in shapes)
        return gather_layout(specs, world_size, direct_min_bytes).packs_apart

    assert not lies_apart((4096, 4096), (4096,), (4096,), direct_min_bytes=1024)
    assert not lies_apart((4096, 4096), (1024, 256))
    assert lies_apart((1024, 1024), (1024, 256))
    assert lies_apart((512, 256))
    assert not lies_apart((504, 256))
    assert not lies_apart((512, 256), world_size=1)


def test_gather_regions_are_aligned() -> None:
    """A view needs a multiple of its item size, kernels like more, and NCCL is slow on a rank's odd byte counts."""
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        for i, spec in enumerate(specs):
            assert layout.shard_offsets[i] % spec.storage_dtype.itemsize == 0
            assert layout.unsharded_offsets[i] % PARAM_ALIGNMENT == 0
            if i in layout.packed:
                assert layout.packed_offsets[i] % spec.compute_dtype.itemsize == 0
        assert layout.packed_nbytes % RANK_ALIGNMENT == 0
        assert layout.packed_start % PARAM_ALIGNMENT == 0
        if world_size > 1:
            assert all(specs[i].compute_nbytes % RANK_ALIGNMENT == 0 for i in layout.direct)
            assert all(layout.shard_offsets[i] % RANK_ALIGNMENT == 0 for i in layout.direct)


def test_gather_is_direct_or_packed() -> None:
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        assert sorted((*layout.direct, *layout.packed)) == list(range(len(specs)))
        for i in layout.direct:
            assert world_size == 1 or specs[i].compute_nbytes >= direct_min_bytes
        assert world_size > 1 or not layout.packed


def test_few_parameters_are_operations_of_their_own_unless_they_are_large() -> None:
    """NCCL works through hundreds in one call one after the other. The smaller ones are packed, in gathers and in
    reductions, of whichever numbers and sizes there are; all are, if these are most of the bytes.
    """
    sizes = {"small": 1024, "large": LARGE_SHARD_BYTES // 4}  # elements of a rank's part
    for few, many in ((0, 40), (3, 40), (20, 3), (40, 0), (0, 15), (0, 16)):
        specs = tuple(param_spec((4 * sizes["large"],), F32, F32, 4) for _ in range(few))
        specs += tuple(param_spec((4 * sizes["small"] + 4 * (i % 3) * 8,), F32, F32, 4) for i in range(many))
        gathered = gather_layout(specs, 4, 4 * sizes["small"])
        reduced = bucket_layout(specs, reversed(range(len(specs))), F32, 4 * sizes["small"])
        for direct in (gathered.direct, reduced.direct):
            largest = sorted(range(few + many), key=lambda i: -specs[i].numel)[: max(few, MAX_OPERATIONS - 1)]
            are_most = 2 * sum(specs[i].numel for i in largest) >= sum(spec.numel for spec in specs)
            assert len(direct) == (len(largest) if are_most else 0)
            assert not direct or set(range(few)) <= set(direct)
        smallest = min((specs[i].numel for i in gathered.direct), default=sys.maxsize)
        assert all(specs[i].numel <= smallest for i in gathered.packed)


def test_gradients_that_need_no_cast_are_the_segment_to_send() -> None:
    """Then the shard buffer is the collective's input: its packed part must look exactly like a segment."""
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        if layout.casts or not layout.packed:
            continue
        first = layout.shard_offsets[layout.packed[0]]
        assert first % RANK_ALIGNMENT == 0
        assert first + layout.packed_nbytes <= layout.shard_nbytes
        for i in layout.packed:
            assert layout.shard_offsets[i] - first == layout.packed_offsets[i]
            assert specs[i].storage_dtype == specs[i].compute_dtype


def test_casts_cover_the_packed_parameters_once() -> None:
    """Each parameter lies in one cast, as many elements into it as it lies into its source, in its own dtypes."""
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        if not layout.casts:
            assert all(specs[i].storage_dtype == specs[i].compute_dtype for i in layout.packed)
            continue
        assert sum(run.numel for run in layout.casts) == sum(specs[i].shard_numel for i in layout.packed)
        for i in layout.packed:
            spec = specs[i]
            places = {
                ((layout.shard_offsets[i] - run.storage_offset) / spec.storage_dtype.itemsize,
                 (layout.packed_offsets[i] - run.packed_offset) / spec.compute_dtype.itemsize)
                for run in layout.casts
                if (run.storage_dtype, run.compute_dtype) == (spec.storage_dtype, spec.compute_dtype)
            }  # fmt: skip
            assert len(places) == 1
            assert all(to == source and to.is_integer() and to >= 0 for to, source in places)


def test_aliased_means_shards_are_the_full_storage() -> None:
    for specs, world_size, direct_min_bytes in random_groups():
        layout = gather_layout(tuple(specs), world_size, direct_min_bytes)
        no_cast = all(spec.storage_dtype == spec.compute_dtype for spec in specs)
        assert layout.aliased == (world_size == 1 and no_cast)
        if layout.aliased:
            assert layout.shard_offsets == layout.unsharded_offsets
            assert layout.shard_nbytes == layout.unsharded_nbytes


# ---- reduce


def random_buckets() -> Iterator[tuple[list[ParamSpec], BucketLayout, int]]:
    """(specs, layout, direct_min_bytes); as in a group, the members of a bucket share one storage dtype."""
    rng = random.Random(1)
    for specs, _, direct_min_bytes in random_groups():
        stored = specs[0].storage_dtype
        members = [i for i, spec in enumerate(specs) if spec.storage_dtype == stored]
        members = rng.sample(members, rng.randint(1, len(members)))
        reduce_dtype, wire_dtype = rng.choice(((F32, None), (BF16, None), (F64, None), (F32, BF16), (F64, F32)))
        yield specs, bucket_layout(specs, members, reduce_dtype, direct_min_bytes, wire_dtype), direct_min_bytes


def test_bucket_regions_do_not_overlap_and_are_aligned() -> None:
    for specs, layout, _ in random_buckets():
        assert_disjoint([(layout.offsets[i], specs[i].shard_numel) for i in layout.indices], layout.shard_numel)
        itemsize = layout.wire_dtype.itemsize
        assert layout.packed_numel * itemsize % RANK_ALIGNMENT == 0
        assert layout.packed_start * itemsize % RANK_ALIGNMENT == 0
        assert layout.packed_start + layout.packed_numel == layout.shard_numel
        for i in layout.direct:
            assert layout.offsets[i] * itemsize % RANK_ALIGNMENT == 0
            assert specs[i].shard_numel * itemsize % RANK_ALIGNMENT == 0


def test_packed_gradients_lie_side_by_side() -> None:
    for specs, layout, _ in random_buckets():
        position = layout.packed_start
        for i in layout.packed:
            assert layout.offsets[i] == position
            position += specs[i].shard_numel
        assert 0 <= layout.shard_numel - position < RANK_ALIGNMENT


def test_bucket_direct_gradients_need_neither_cast_nor_padding() -> None:
    """Their gradient itself is what the collective reads, one slice per rank."""
    for specs, layout, direct_min_bytes in random_buckets():
        assert sorted((*layout.direct, *layout.packed)) == sorted(layout.indices)
        for i in layout.direct:
            assert specs[i].is_even
            assert specs[i].compute_dtype == layout.wire_dtype
            assert specs[i].compute_nbytes >= direct_min_bytes


def test_layouts_by_pencil_and_paper() -> None:
    """Two ranks: 'a' (4 x 8 fp32: 64 bytes a shard) goes direct; 'b' (3 fp32) and 'c' (2 bf16) share 16 bytes."""
    specs = [ParamSpec((4, 8), F32, F32, 2), ParamSpec((2,), BF16, BF16, 2), ParamSpec((3,), F32, F32, 2)]
    layout = gather_layout(tuple(specs), 2, direct_min_bytes=64)
    assert (layout.direct, layout.packed) == ((0,), (2, 1))
    assert layout.packed_offsets == {2: 0, 1: 8}
    assert (layout.packed_nbytes, layout.tail_nbytes, layout.shard_nbytes) == (16, 6, 80)
    assert layout.shard_offsets == (0, 72, 64)
    assert layout.unsharded_offsets == (0, 128, 256)
    assert (layout.packed_start, layout.unsharded_nbytes) == (384, 432)

    bucket = bucket_layout(specs, [2, 0], F32, direct_min_bytes=64)
    assert (bucket.direct, bucket.packed, bucket.offsets) == ((0,), (2,), {0: 0, 2: 16})
    assert (bucket.packed_start, bucket.packed_numel, bucket.shard_numel) == (16, 4, 20)

    bucket = bucket_layout(specs, [2, 0], F32, direct_min_bytes=64, wire_dtype=BF16)
    assert (bucket.direct, bucket.packed, bucket.offsets) == ((), (2, 0), {2: 0, 0: 2})
    assert (bucket.packed_start, bucket.packed_numel, bucket.shard_numel) == (0, 24, 24)


# ---- buckets


Kind = tuple[torch.dtype, ...]


def random_splits() -> Iterator[tuple[list[ParamSpec], list[Kind], list[int], int, int, list[tuple[int, ...]]]]:
    """Also of what kind each parameter is: its dtypes of reduction, wire and storage."""
    rng = random.Random(2)
    for specs, _, _ in random_groups():
        reduce_dtypes = [rng.choice((F32, BF16)) for _ in specs]
        wire_dtypes = [rng.choice((dtype, BF16)) for dtype in reduce_dtypes]
        kinds = [*zip(reduce_dtypes, wire_dtypes, (spec.storage_dtype for spec in specs), strict=True)]
        indices = rng.sample(range(len(specs)), rng.randint(0, len(specs)))
        max_buckets, min_bytes = rng.choice((1, 2, 4)), rng.choice((0, 100, 4000))
        buckets = split_buckets(specs, reduce_dtypes, wire_dtypes, indices, max_buckets, min_bytes)
        yield specs, kinds, indices, max_buckets, min_bytes, buckets


def test_buckets_hold_every_gradient_once_in_order() -> None:
    """One in two buckets is reduced twice; one in none never."""
    for _, kinds, indices, _, _, buckets in random_splits():
        assert sorted(chain.from_iterable(buckets)) == sorted(indices)
        assert all(buckets)
        for kind in {kinds[i] for i in indices}:
            of_kind = [i for i in indices if kinds[i] == kind]
            assert [i for bucket in buckets for i in bucket if i in of_kind] == of_kind


def test_a_bucket_holds_one_kind() -> None:
    for _, kinds, _, _, _, buckets in random_splits():
        for bucket in buckets:
            assert len({kinds[i] for i in bucket}) == 1


def test_buckets_are_neither_too_many_nor_too_small() -> None:
    """Below `min_bytes` a collective costs more in latency than it saves: only all of one kind may be so small."""
    for specs, kinds, _, max_buckets, min_bytes, buckets in random_splits():
        by_kind: dict[object, list[int]] = {}
        for bucket in buckets:
            kind = kinds[bucket[0]]
            by_kind.setdefault(kind, []).append(
                sum(specs[i].shard_numel * specs[i].world_size * kind[0].itemsize for i in bucket)
            )
        for sizes in by_kind.values():
            assert len(sizes) <= 2 * max_buckets
            assert len(sizes) == 1 or min(sizes) >= min_bytes, (sizes, min_bytes)


@pytest.mark.parametrize(
    ("rows", "max_buckets", "min_bytes", "expected"),
    [
        ([4, 4, 4, 4], 4, 0, [(0,), (1,), (2,), (3,)]),
        ([4, 4, 4, 4], 2, 0, [(0, 1), (2, 3)]),
        ([4, 4, 4, 4], 4, 1 << 20, [(0, 1, 2, 3)]),
        ([4, 4, 4, 4], 1, 0, [(0, 1, 2, 3)]),
        ([12, 2, 2], 2, 0, [(0,), (1, 2)]),
        ([12, 2], 2, 128, [(0, 1)]),
        ([12, 2, 4, 1], 4, 128, [(0,), (1, 2, 3)]),
        ([], 4, 0, []),
    ],
)
def test_buckets_by_pencil_and_paper(
    rows: list[int], max_buckets: int, min_bytes: int, expected: list[tuple[int, ...]]
) -> None:
    specs = [ParamSpec((r, 8), F32, F32, 2) for r in rows]
    dtypes = [F32] * len(rows)
    assert split_buckets(specs, dtypes, dtypes, range(len(rows)), max_buckets, min_bytes) == expected
