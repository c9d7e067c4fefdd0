"""Tests that padding is counted chunk by chunk, a multiple of 16 bytes, and least along the chosen dim."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.alignment import BLOCKS, EXPERTS
from fsdp2 import DataParallelMeshDims, cheapest_placement
from fsdp2.engine.buckets import (
    MAX_BUCKETS_OF_COPIES,
    MAX_PIECES,
    MIN_PIECE_BYTES,
    cuts_for,
    find_buckets,
    split_pieces,
)
from fsdp2.engine.codec import AS_IS, Cast
from fsdp2.engine.layout import ParamSpec, bucket_layout, gather_layout
from fsdp2.shards.ours import gathered_nbytes
from fsdp2.tools.padding import COPY_COST, LINE_NBYTES, cheapest_dim, gather_cost
from helpers import NIGHTLY, fake_world

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = BLOCKS | EXPERTS
WORLDS = [*range(1, 65), *range(65, 513, 1 if NIGHTLY else 7), 96, 128, 256, 512]
CPU = torch.device("cpu")
DIRECT_MIN_BYTES = (1024, 512 * 1024)


def specs_of(name: str, world_size: int, stored: torch.dtype = F32) -> list[ParamSpec]:
    return [ParamSpec(shape, stored, BF16, world_size) for shape in SHAPES[name]]


def reductions(specs: Sequence[ParamSpec], direct_min_bytes: int, wire: torch.dtype | None) -> Iterator:
    codecs = [AS_IS if wire in (None, F32) else Cast(wire)] * len(specs)
    cuts = cuts_for(specs, CPU)
    for indices in find_buckets(specs, [F32] * len(specs), codecs, range(len(specs)), cuts):
        yield bucket_layout(specs, indices, F32, direct_min_bytes, wire)


@pytest.mark.parametrize("name", SHAPES)
def test_every_payload_is_a_multiple_of_16_bytes(name: str) -> None:
    """At any world size: NCCL copies element by element otherwise. Payloads are counted one by one."""
    for world_size, direct_min_bytes in itertools.product(WORLDS[1:], DIRECT_MIN_BYTES):
        specs = specs_of(name, world_size)
        gather = gather_layout(tuple(specs), world_size, direct_min_bytes)
        payloads = [*(specs[i].compute_nbytes for i in gather.direct), gather.packed_nbytes]
        assert gathered_nbytes(gather) == sum(payloads)
        for wire in (F32, BF16):
            for bucket in reductions(specs, direct_min_bytes, wire):
                sent = [*(specs[i].shard_numel * wire.itemsize for i in bucket.direct)]
                sent.append(bucket.packed_numel * wire.itemsize)
                assert bucket.payload_nbytes == sum(sent)
                pieces = split_pieces(bucket.shard_numel, world_size, wire.itemsize, MAX_PIECES, MIN_PIECE_BYTES)
                payloads += [*sent, *((last - first) * wire.itemsize for first, last in pieces)]
        assert not [payload for payload in payloads if payload % 16], (world_size, direct_min_bytes)


@cache
def chunk_rows(rows: int, world_size: int) -> list[int]:
    """What torch.chunk, and so DTensor, gives each rank."""
    return [chunk.shape[0] for chunk in torch.empty(rows, 0).chunk(world_size)]


@pytest.mark.parametrize("name", SHAPES)
def test_payloads_are_the_largest_chunks(name: str) -> None:
    """Counted from what the first rank, which has most rows, holds of each parameter; 16 bytes are full at most once
    per collective.
    """
    for world_size in (2, 3, 7, 16, 48, 96, 100, 128, 255, 256, 500, 512):
        for itemsize, payload in payloads(name, world_size):
            held = 0
            for shape in SHAPES[name]:
                rows = chunk_rows(shape[0], world_size)
                assert sum(rows) == shape[0]
                assert max(rows) == rows[0]
                held += rows[0] * torch.Size(shape[1:]).numel() * itemsize
            assert 0 <= payload - held < 16 * (1 if itemsize == 2 else MAX_BUCKETS_OF_COPIES)


def payloads(name: str, world_size: int) -> Iterator[tuple[int, int]]:
    """Item size and payload of a gather in bf16 and of a reduction in fp32."""
    specs = specs_of(name, world_size)
    yield 2, gathered_nbytes(gather_layout(tuple(specs), world_size, DIRECT_MIN_BYTES[0]))
    yield 4, sum(bucket.payload_nbytes for bucket in reductions(specs, DIRECT_MIN_BYTES[0], None))


@pytest.mark.parametrize(("wire", "parts"), [(F32, 8), (BF16, 4)])
def test_gradients_that_are_cast_are_sent_in_smaller_chunks(wire: torch.dtype, parts: int) -> None:
    """Of twelve equal matrices that compute in bf16; sent as they come, three at a time, else one by one."""
    specs = [ParamSpec((1024, 1024), F32, BF16, 8)] * 12
    codecs, cuts = [AS_IS if wire == F32 else Cast(wire)] * 12, cuts_for(specs, CPU)
    buckets = find_buckets(specs, [F32] * 12, codecs, range(12), cuts)
    assert {len(bucket) for bucket in buckets} == {12 // parts}
    assert [i for bucket in buckets for i in bucket] == [*reversed(range(12))]


def test_one_rank_gathers_nothing() -> None:
    assert gathered_nbytes(gather_layout(tuple(specs_of("Llama-3-8B", 1)), 1, 0)) == 0


def test_known_factors() -> None:
    """Of the experts, along dim 0: twice and four times their bytes where there are fewer of them than ranks."""
    for world_size, factor in ((8, 1), (64, 1), (96, 1.5), (128, 1), (256, 2), (512, 4)):
        for experts in (specs_of(name, world_size)[0] for name in EXPERTS):
            assert world_size * experts.compute_nbytes / experts.nbytes == factor


# ---- the cheapest dim


def count_lines(spec: ParamSpec) -> int:
    """Cache lines that the copies touch, element by element: a run goes on while the rank stays the same."""
    owners = (torch.arange(spec.num_rows) // spec.chunk_rows).view(-1, *[1] * (len(spec.shape) - 1 - spec.dim))
    outer = torch.arange(torch.Size(spec.shape[: spec.dim]).numel()).view(-1, *[1] * owners.dim())
    runs = (outer * spec.world_size + owners).expand(-1, -1, *spec.shape[spec.dim + 1 :]).flatten()
    _, lengths = runs.unique_consecutive(return_counts=True)
    # All but the last rank's runs are of one length, to which that is rounded up.
    nbytes = int(lengths.max()) * spec.compute_dtype.itemsize
    return len(lengths) * -(-nbytes // LINE_NBYTES)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_cost_is_padded_bytes_and_lines_copied(dtype: torch.dtype) -> None:
    for shape, world_size in itertools.product([(3, 40, 7), (5, 6), (2, 9, 130), (4,)], (1, 2, 3, 5, 16)):
        for dim in range(len(shape)):
            spec = ParamSpec(shape, dtype, dtype, world_size, dim)
            largest = torch.empty(shape).chunk(world_size, dim)[0].numel() * dtype.itemsize
            copied = count_lines(spec) * LINE_NBYTES if dim else 0
            assert gather_cost(spec) == largest * world_size + COPY_COST * copied


def test_the_cheapest_dim_of_common_parameters() -> None:
    """Experts are cut within each expert where they are too few; what divides, or nearly so, stays at dim 0."""
    for world_size, dim in ((2, 0), (7, 0), (8, 0), (64, 0), (96, 1), (128, 0), (192, 1), (256, 1), (512, 1)):
        for shape in ((128, 2880, 5760), (128, 2048, 768)):
            assert cheapest_dim(shape, BF16, world_size) == dim, (shape, world_size)
    assert cheapest_dim((128, 4096), BF16, 192) == 0, "runs of 44 bytes, copied as 128, cost more than a half saves"
    for shapes in (BLOCKS["Llama-3-8B"], BLOCKS["Qwen3-4B"], BLOCKS["Qwen2.5-7B"]):
        assert {cheapest_dim(shape, BF16, n) for shape in shapes for n in (2, 3, 8, 64, 96, 256, 512)} == {0}


@pytest.mark.parametrize("name", SHAPES)
def test_another_dim_saves_a_quarter_of_the_bytes(name: str) -> None:
    for world_size, shape in itertools.product(WORLDS, set(SHAPES[name])):
        dim = cheapest_dim(shape, BF16, world_size)
        here, there = (ParamSpec(shape, BF16, BF16, world_size, each) for each in (0, dim))
        saved = world_size * (here.compute_nbytes - there.compute_nbytes)
        assert dim == 0 or saved >= here.nbytes / 4, (shape, world_size)


def test_unsharded_parameters_along_another_dim_need_no_memory_for_padding() -> None:
    specs = [ParamSpec((3, 5, 64), F32, F32, 4, dim=1), ParamSpec((3, 64), F32, F32, 4)]
    layout = gather_layout(tuple(specs), 4, 1 << 30)
    assert layout.unsharded_offsets == (0, 3 * 5 * 64 * 4)
    assert layout.packed_start == 3 * 5 * 64 * 4 + 4 * 64 * 4


# ---- the planner


def choose(place: Callable[[nn.Parameter], Shard | None], param: nn.Parameter) -> int:
    placement = place(param)
    return 0 if placement is None else placement.dim


def test_only_the_ranks_that_shard_count() -> None:
    """Replicas hold whole copies: only the others count."""
    with fake_world(256):
        every, halves = cheapest_placement(), cheapest_placement(init_device_mesh("cpu", (2, 128)))
        mesh = init_device_mesh("cpu", (2, 128), mesh_dim_names=("a", "b"))
        by_name = [cheapest_placement(mesh, DataParallelMeshDims(*names)) for names in (("b", "a"), (("a", "b"),))]
    experts = nn.Parameter(torch.empty(128, 2048, 768, device="meta"))
    assert [choose(place, experts) for place in (every, halves, *by_name)] == [1, 0, 0, 1]


def test_parameters_without_another_dim_stay() -> None:
    with fake_world(256):
        place = cheapest_placement()
        assert place(nn.Parameter(torch.ones(()))) is None
        assert place(nn.Parameter(torch.ones(3))) is None

        class Own(Tensor):
            pass

        assert place(nn.Parameter(torch.ones(1, 4096))) == Shard(1)
        equal = nn.Parameter(torch.empty(1, 1 << 14, 1 << 14, device="meta"))
        assert place(equal) == Shard(1), "the first of equal ones"
        assert place(nn.Parameter(torch.ones(1, 4096).as_subclass(Own))) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_tensor_parallelism_compute_the_same(rank: int) -> None:
    """The first has 33 of 65 rows, the other 32, which divide by the number of ranks."""
    with fake_world(64, rank):
        mesh = init_device_mesh("cpu", (32, 2), mesh_dim_names=("dp", "tp"))
        place = cheapest_placement(mesh["dp"])
        for placement, rows, dim in ((Shard(0), 65, 1), (Shard(0), 64, 0), (Replicate(), 64, 0)):
            param = nn.Parameter(distribute_tensor(torch.empty(rows, 4096), mesh["tp"], [placement]))
            assert choose(place, param) == dim


def test_several_axes_must_cut_a_dtensor_evenly() -> None:
    with fake_world(16):
        mesh = init_device_mesh("cpu", (4, 2, 2), mesh_dim_names=("a", "b", "tp"))
        place = cheapest_placement(mesh, DataParallelMeshDims(("a", "b")))
        for shape, dim in (((3, 100, 64), 2), ((3, 96, 100), 1), ((3, 100, 100), 0), ((8, 96), 0)):
            param = nn.Parameter(distribute_tensor(torch.empty(shape), mesh, [Replicate()] * 3))
            assert choose(place, param) == dim, shape


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"):
        cheapest_placement(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass the mesh"):
        cheapest_placement(None, DataParallelMeshDims("a"))
