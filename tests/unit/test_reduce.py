"""Tests reductions for many random groups and numbers of ranks, all of which are simulated in this process."""

import ast
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks.launches import LaunchMeter
from fsdp2 import fully_shard
from fsdp2.codecs.int8 import Int8
from fsdp2.engine import buckets, reduce
from fsdp2.engine.buckets import split_pieces
from fsdp2.engine.codec import Cast, Encoder, Sums
from fsdp2.engine.comm import TORCH_MEMORY, CommLabel, SoloComm
from fsdp2.engine.layout import ParamSpec, bucket_layout
from fsdp2.engine.pack import Concatenation, Pieces, ReducePlan, Segments
from fsdp2.engine.reduce import Reduction
from helpers import fake_world, own_rows

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CPU = torch.device("cpu")


class Exchange:
    """What the ranks' collectives have in common: a reduction is complete when every rank has called it."""

    def __init__(self, size: int) -> None:
        self.comms = [RankComm(self, rank, size) for rank in range(size)]

    def complete(self) -> None:
        """Every rank's outputs := the mean, in rank order, of its slices of all ranks' inputs: once, for then these may
        be freed.
        """
        for comm in self.comms:
            for call, output in enumerate(comm.outputs):
                total = torch.zeros_like(output, dtype=F64)
                for other in self.comms:
                    total += other.inputs[call].view(len(self.comms), -1)[comm.rank]
                output.copy_(total / len(self.comms))
            comm.outputs = []


class RankComm:
    """A Comm of one simulated rank."""

    direct_min_bytes, memory = 64, TORCH_MEMORY
    # Of what it is given, and of what it is to fill.
    dtypes = (F32, F32)

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, size
        self.comm_label = CommLabel()
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> "RankComm":
        assert divisor == self.size
        for output, tensor in zip(outputs, inputs, strict=True):
            assert output.is_contiguous()
            assert tensor.is_contiguous()
            assert tensor.dim() == output.dim() == 1
            assert tensor.numel() == output.numel() * self.size
            assert (tensor.dtype, output.dtype) == self.dtypes
        self.outputs, self.inputs = list(outputs), list(inputs)
        return self

    def wait(self) -> None:
        self.exchange.complete()


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values whose sums and means over up to 8 ranks are exact in every dtype here: any difference is an error."""
    return torch.randint(-4, 5, shape).mul(8).to(dtype)


def random_cases() -> Iterator[tuple[int, tuple[ParamSpec, ...], list[int], torch.dtype, torch.dtype]]:
    """(world size, specs, indices in the bucket, wire dtype, reduce dtype)"""
    rng = random.Random(0)
    for _ in range(150):
        world_size = rng.choice((1, 2, 4, 8))
        specs = tuple(
            ParamSpec(
                tuple(rng.choice((0, 1, 2, 3, 7, 8, 16, 24)) for _ in range(rng.randint(1, 3))),
                F32,
                rng.choice((F32, F32, BF16)),
                world_size,
            )
            for _ in range(rng.randint(1, 6))
        )
        indices = rng.sample(range(len(specs)), rng.randint(1, len(specs)))
        yield world_size, specs, indices, *rng.choice(((F32, F32), (BF16, BF16), (BF16, F32)))


def test_every_rank_gets_its_rows_of_the_mean() -> None:
    """Padding, segments, direct and packed, a cast before and one after: an offset that is wrong moves a value."""
    for world_size, specs, indices, *dtypes in random_cases():
        # Some that have waited for a synchronised backward come in the reduce dtype.
        come_in = {i: random.Random(i).choice((specs[i].compute_dtype, dtypes[1])) for i in indices}
        gradients = [{i: whole_numbers(specs[i].shape, come_in[i]) for i in indices} for _ in range(world_size)]
        means = {i: sum(each[i].double() for each in gradients) / world_size for i in indices}
        exchange = Exchange(world_size)
        for comm in exchange.comms:
            comm.dtypes = (dtypes[0], dtypes[1])
        layout = bucket_layout(specs, indices, dtypes[1], RankComm.direct_min_bytes, dtypes[0])
        pending = [
            reduce.start(gradients[comm.rank], ReducePlan(layout, specs, world_size, CPU), Reduction(comm), {})  # type: ignore[arg-type]
            for comm in exchange.comms
        ]
        for rank, each in enumerate(pending):
            shards = each.finish()
            assert set(shards) == set(indices)
            for i, (flat, offset) in shards.items():
                expected = own_rows(means[i], rank, world_size) if means[i].shape[0] else means[i]
                got = flat.as_strided(expected.shape, torch.empty(expected.shape, device="meta").stride(), offset)
                assert got.dtype == F32
                assert torch.equal(got.double(), expected), (world_size, specs[i], indices, dtypes)


def test_gradients_need_not_be_contiguous() -> None:
    """Autograd hands out transposed and expanded gradients."""
    specs = tuple(ParamSpec(shape, F32, F32, 2) for shape in ((4, 6), (8, 16), (3, 2)))
    gradients = {0: whole_numbers((6, 4), F32).T, 1: torch.full((1, 1), 8.0).expand(8, 16), 2: torch.ones(2, 3).T * 8}
    layout = bucket_layout(specs, range(3), F32, RankComm.direct_min_bytes)
    assert layout.direct == (1,)
    exchange = Exchange(2)
    plans = [ReducePlan(layout, specs, 2, CPU) for _ in exchange.comms]
    pending = [reduce.start(gradients, p, Reduction(c), {}) for p, c in zip(plans, exchange.comms, strict=True)]  # type: ignore[arg-type]
    for rank, each in enumerate(pending):
        for i, (flat, offset) in each.finish().items():
            expected = own_rows(gradients[i], rank, 2)
            assert torch.equal(flat[offset : offset + expected.numel()].view(expected.shape), expected)


class Replicas:
    """A Comm of which only the calls are seen."""

    size = 2

    def __init__(self) -> None:
        self.comm_label, self.called = CommLabel(), list[Tensor]()

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> "Replicas":
        self.called.append(tensor)
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("shape", [(4, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_one_rank_that_shards_sums_its_gradient_at_once(shape: tuple[int, int], is_shared: bool) -> None:
    """Where it lies, if it needs no padding and nobody else looks there; on its way while backward computes more."""
    spec, replicas = ParamSpec(shape, F32, F32, 1), Replicas()
    layout, (comm,) = bucket_layout([spec], [0], F32, RankComm.direct_min_bytes), Exchange(1).comms
    gradient = torch.rand(shape)
    other = gradient.view(-1) if is_shared else None
    pending = reduce.start({0: gradient}, ReducePlan(layout, (spec,), 1, CPU), Reduction(comm, replicas), {})  # type: ignore[arg-type]
    (summed,) = replicas.called
    in_place = summed.data_ptr() == gradient.data_ptr()
    assert in_place == (other is None and spec.numel % 4 == 0)
    flat, offset = pending.finish()[0]
    assert torch.equal(flat[offset : offset + spec.numel].view(shape), gradient)
    assert len(replicas.called) == 1


@pytest.mark.parametrize("is_flattened", [False, True])
@pytest.mark.parametrize(("wire_dtype", "reduce_dtype"), [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_one_rank_rounds_as_many_do(wire_dtype: torch.dtype, reduce_dtype: torch.dtype, is_flattened: bool) -> None:
    """A run on one rank must not be more precise than the policy says: it is what users compare with."""
    spec = ParamSpec((3, 2), F32, F32, 1)
    gradient = torch.rand(3, 2)
    layout = bucket_layout([spec], [0], reduce_dtype, RankComm.direct_min_bytes, wire_dtype)
    (comm,) = Exchange(1).comms
    reduction = Reduction(comm, hook=(lambda reduced: None) if is_flattened else None)  # type: ignore[arg-type]
    encoder = None if wire_dtype == reduce_dtype else Encoder(Cast(wire_dtype))
    plan = ReducePlan(layout, (spec,), 1, CPU, encoder)
    flat, offset = reduce.start({0: gradient}, plan, reduction, {}).finish()[0]
    assert torch.equal(flat.as_strided((3, 2), (2, 1), offset), gradient.to(wire_dtype).float())


def test_feedback_on_one_rank_leaves_the_memory_of_a_gradient_alone() -> None:
    """Another part of the graph, whose backward is still to come, may have a view of it."""
    spec, gradient, (comm,) = ParamSpec((3, 2), F32, F32, 1), torch.rand(3, 2), Exchange(1).comms
    layout, before = bucket_layout([spec], [0], F32, RankComm.direct_min_bytes), gradient.clone()
    plan = ReducePlan(layout, (spec,), 1, CPU, Encoder(Int8(feedback=True)))
    for _ in range(2):
        reduce.start({0: gradient}, plan, Reduction(comm), {}).finish()  # type: ignore[arg-type]
    assert torch.equal(gradient, before)


def test_one_rank_delivers_no_memory_of_which_something_else_has_a_view() -> None:
    """Later gradients are added to what is delivered."""
    spec, gradient, (comm,) = ParamSpec((3, 2), F32, F32, 1), torch.rand(3, 2), Exchange(1).comms
    view, before = gradient.view(-1), gradient.clone()
    layout = bucket_layout([spec], [0], F32, RankComm.direct_min_bytes)
    flat, _ = reduce.start({0: gradient}, ReducePlan(layout, (spec,), 1, CPU), Reduction(comm), {}).finish()[0]  # type: ignore[arg-type]
    flat.add_(1)
    assert torch.equal(view, before.view(-1))


def test_abandoned_reduction_waits_before_it_frees_its_buffers() -> None:
    """After an error the ranks still write into them."""

    class Waited(RankComm):
        count = 0

        def wait(self) -> None:
            self.count += 1

    specs = (ParamSpec((4, 2), F32, F32, 2),)
    comm = Waited(Exchange(2), 0, 2)
    layout = bucket_layout(specs, [0], F32, 0)
    reduce.start({0: torch.ones(4, 2)}, ReducePlan(layout, specs, 2, CPU), Reduction(comm), {}).abandon()  # type: ignore[arg-type]
    assert comm.count == 1


def test_gradients_without_a_reduce_scatter_are_summed_between_replicas_at_once() -> None:
    """Not only when the next bucket is packed: with parameters on every rank, that is all the communication."""

    class Replicas(RankComm):
        def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> "Replicas":
            self.outputs.append(tensor)
            return self

    specs, replicas = (ParamSpec((4, 2), F32, F32, 1),), Replicas(Exchange(2), 0, 2)
    layout = bucket_layout(specs, [0], F32, 0)
    reduction = Reduction(SoloComm(), replicas)  # type: ignore[arg-type]
    reduce.start({0: torch.ones(4, 2)}, ReducePlan(layout, specs, 1, CPU), reduction, {})
    assert [tensor.sum() for tensor in replicas.outputs] == [8]


def test_an_unsynchronized_and_a_new_gradient_together() -> None:
    """In the reduce dtype beside the wire dtype: torch's one operation that packs many at once takes equal dtypes."""
    specs = tuple(ParamSpec(shape, F32, BF16, 2) for shape in ((4, 2), (8,)))
    layout = bucket_layout(specs, range(2), F32, RankComm.direct_min_bytes, BF16)
    plan = ReducePlan(layout, specs, 2, CPU)
    assert isinstance(getattr(plan._fill, "__self__", None), Concatenation)
    waited, fresh = torch.rand(4, 2), torch.rand(8).bfloat16()
    segments = plan.take_segments(CPU)
    plan.pack({0: waited, 1: fresh}, segments)
    for rank in range(2):
        expected = torch.cat([own_rows(waited, rank, 2).bfloat16().flatten(), own_rows(fresh, rank, 2)])
        assert torch.equal(segments.of_ranks[rank], expected)


@pytest.mark.parametrize("rows", [(9, 2, 8, 5), (4, 8, 12), (4, 1, 3)], ids=["uneven", "even", "single"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_operation_packs_the_same_as_many(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """Also where it casts and pads: rows that don't divide, fewer than ranks, and a tail."""
    specs = tuple(ParamSpec((each, columns), F32, dtype, 4) for columns, each in enumerate(rows, start=1))
    layout = bucket_layout(specs, range(len(rows)), F32, 1 << 40)
    gradients = {i: torch.rand(spec.shape).to(dtype) for i, spec in enumerate(specs)}
    packed = []
    for is_one in (True, False):
        segments = ReducePlan(layout, specs, 4, CPU).take_segments(CPU)
        segments.flat.zero_()
        fill = Concatenation(specs, layout, 4, casts=False, copies_to_cast=True).fill if is_one else Segments.fill
        fill(segments, [gradients[i] for i in layout.packed])
        packed.append(segments.of_ranks)
    assert torch.equal(*packed)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "expected"),
    [
        (8, 4, F32, True),
        (8, 4, BF16, True),
        (9, 4, F32, True),
        (9, 4, BF16, True),
        (8, 4096, F32, True),
        (8, 4096, BF16, False),
        (9, 4096, F32, False),
        (4, 4, F32, False),
    ],
)
def test_gradients_that_one_operation_packs_on_a_cpu(
    rows: int, columns: int, dtype: torch.dtype, expected: bool
) -> None:
    """Where it pads or casts it copies twice: only what is little. Gradients of a row for each rank need no views."""
    specs = (ParamSpec((rows, columns), F32, dtype, 4),) * 2
    plan = ReducePlan(bucket_layout(specs, range(2), F32, 1 << 40), specs, 4, CPU)
    segments = plan.take_segments(CPU)
    with LaunchMeter() as meter:
        plan.pack({i: torch.empty(rows, columns, dtype=dtype) for i in range(2)}, segments)
    assert (meter.launches["aten._chunk_cat"] > 0) is expected


def test_segments_are_used_again_when_they_have_been_read() -> None:
    """Not while they travel; their memory is given up in between; and whoever made the first."""
    specs = (ParamSpec((3, 5), F32, F32, 4),)
    plan = ReducePlan(bucket_layout(specs, [0], F32, 1 << 40), specs, 4, CPU)
    with torch.inference_mode():  # a user reduces what waits, say
        first, second = plan.take_segments(CPU), plan.take_segments(CPU)
    for segments, value in ((first, 1.0), (second, 2.0)):
        plan.pack({0: torch.full((3, 5), value)}, segments)
    assert [segments.of_ranks[:3, :5].unique().item() for segments in (first, second)] == [1, 2]
    plan.return_segments(first)
    assert first.flat.untyped_storage().nbytes() == 0
    assert plan.take_segments(CPU) is first
    plan.pack({0: torch.full((3, 5), 3.0)}, first)
    assert [segments.of_ranks[:3, :5].unique().item() for segments in (first, second)] == [3, 2]


def test_segments_are_released_once() -> None:
    """A reduction that is abandoned behind its end does not take them from the next, which travels in them."""

    class Alone(RankComm):
        def wait(self) -> None:
            pass

    specs = (ParamSpec((3, 5), F32, F32, 4),)
    plan = ReducePlan(bucket_layout(specs, [0], F32, 1 << 40), specs, 4, CPU)
    comm = Alone(Exchange(4), 0, 4)
    first, second = torch.zeros(3, 5), torch.rand(3, 5)
    ended = reduce.start({0: first}, plan, Reduction(comm), {})  # type: ignore[arg-type]
    ended.abandon()
    running = reduce.start({0: second}, plan, Reduction(comm), {})  # type: ignore[arg-type]
    ended.abandon()
    (sent,) = comm.inputs
    assert sent.untyped_storage().nbytes() == sent.nbytes, "it still travels"
    assert torch.equal(sent.view(4, -1)[:3, :5], second)
    running.abandon()


def test_padding_that_a_hook_sees_is_zero() -> None:
    """Whatever memory that is used again held before."""
    specs = (ParamSpec((3, 5), F32, F32, 4),)
    plan = ReducePlan(bucket_layout(specs, [0], F32, 1 << 40), specs, 4, CPU)
    segments = plan.take_segments(CPU)
    segments.flat.fill_(7)
    plan._spare = segments
    comm = Exchange(4).comms[0]
    reduce.start({0: torch.ones(3, 5)}, plan, Reduction(comm, hook=lambda _: None), {})  # type: ignore[arg-type]
    (sent,) = comm.inputs
    assert torch.equal(sent.view(4, -1), torch.nn.functional.pad(torch.ones(3, 5), (0, 3, 0, 1)))


def test_chunks_are_the_padded_gradient_cut_across_all_ranks() -> None:
    """Whatever the rows: even, uneven, fewer than ranks; and each piece is a multiple of 16 bytes."""
    for rows, columns, ranks, count in itertools.product((1, 5, 8, 33), (1, 8, 12), (2, 3, 8), (1, 3, 16)):
        spec = ParamSpec((rows, columns), F32, BF16, ranks)
        layout = bucket_layout([spec], [0], F32, 1 << 40)
        gradient = torch.randn(rows, columns, dtype=BF16)
        padded = torch.full((ranks, layout.packed_numel), 7.0)
        flat = torch.full((ranks * spec.shard_numel,), 7.0)
        flat[: gradient.numel()] = gradient.reshape(-1)
        padded[:, : spec.shard_numel] = flat.view(ranks, -1)
        pieces = split_pieces(layout.packed_numel, ranks, F32.itemsize, count, 1)
        assert 1 <= len(pieces) <= count
        assert [first for first, _ in pieces] == [0, *(last for _, last in pieces[:-1])]
        assert pieces[-1][1] == layout.packed_numel
        for first, last in pieces:
            assert first * F32.itemsize % 16 == 0
            packed = torch.full((ranks, last - first), 7.0)
            Pieces(0, spec, pieces, zeroes_padding=False, unbinds=False).pack(gradient, first, last, packed)
            assert torch.equal(packed, padded[:, first:last])


def test_chunks_are_not_too_small() -> None:
    assert split_pieces(1024, 4, 4, 16, 4096) == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert split_pieces(1024, 4, 4, 16, 1 << 20) == [(0, 1024)]


@pytest.mark.parametrize("shape", [(5, 3), (8, 3), (1, 7), (16, 16)], ids=str)
def test_a_codec_sees_zeros_as_padding(shape: tuple[int, int]) -> None:
    """Packed together, alone, and piece by piece: what padding held would change the scale of a whole block."""
    specs = ParamSpec(shape, F32, BF16, 4), ParamSpec((3,), F32, BF16, 4)
    for indices in ([0], [0, 1]):
        layout = bucket_layout(specs, indices, F32, 1 << 40)
        plan = ReducePlan(layout, specs, 4, CPU, Encoder(Int8()))
        segments = plan.take_segments(CPU)
        segments.flat.fill_(torch.nan)
        plan.pack({i: torch.ones(specs[i].shape, dtype=BF16) for i in indices}, segments)
        assert segments.flat.sum() == sum(specs[i].numel for i in indices)
    with mock.patch.object(buckets, "MIN_PIECE_BYTES", 1):
        pieces = ReducePlan(bucket_layout(specs[:1], [0], F32, 1 << 40), specs[:1], 4, CPU, Encoder(Int8())).pieces
    assert pieces is not None
    packed = [torch.full((4, last - first), torch.nan) for first, last in pieces.bounds]
    for (first, last), piece in zip(pieces.bounds, packed, strict=True):
        pieces.pack(torch.ones(shape, dtype=BF16), first, last, piece)
    assert sum(piece.sum() for piece in packed) == specs[0].numel


class Steps:
    """A sum between replicas in three collectives, of which one may fail."""

    nbytes = 0

    def __init__(self, failing: int | None) -> None:
        self.failing, self.done = failing, 0

    def holds_for(self, spec: ParamSpec) -> bool:
        return True

    def steps(self, sums: Sums, comm: Replicas, divisor: float, what: str) -> Iterator[Replicas]:
        for i in range(3):
            if i == self.failing:
                raise RuntimeError("a peer is gone")
            sums.flat.mul_(2)
            yield comm
            self.done += 1


@pytest.mark.parametrize("failing", [None, 2])
def test_an_incomplete_sum_between_replicas_is_not_delivered(failing: int | None) -> None:
    """After an error another pass's reductions are finished: one whose own step has raised must raise again."""
    spec, summing = ParamSpec((4, 2), F32, F32, 1), Steps(failing)
    layout, (comm,) = bucket_layout([spec], [0], F32, RankComm.direct_min_bytes), Exchange(1).comms
    plan = ReducePlan(layout, (spec,), 1, CPU, summing=summing)  # type: ignore[arg-type]
    pending = reduce.start({0: torch.ones(4, 2)}, plan, Reduction(comm, Replicas()), {})  # type: ignore[arg-type]
    if failing is None:
        flat, offset = pending.finish()[0]
        assert torch.equal(flat[offset : offset + 8], torch.full((8,), 8.0))
        assert (summing.done, pending.is_summing) == (3, False)
        return
    pending.advance()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.finish()
    with pytest.raises(RuntimeError, match="has failed before"):
        pending.finish()


def test_a_failed_reduce_scatter_is_not_delivered() -> None:
    """A second wait for it may return at once."""

    class Gone(RankComm):
        waits = 0

        def wait(self) -> None:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("a peer is gone")

    specs, comm = (ParamSpec((4, 2), F32, F32, 2),), Gone(Exchange(2), 0, 2)
    plan = ReducePlan(bucket_layout(specs, [0], F32, 0), specs, 2, CPU)
    pending = reduce.start({0: torch.ones(4, 2)}, plan, Reduction(comm), {})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.finish()
    with pytest.raises(RuntimeError, match="has failed before"):
        pending.finish()
    pending.abandon()
    assert comm.waits == 2


def yields_inside_with(tree: ast.AST) -> list[str]:
    """Returns the generators that yield inside a `with`, but for context managers."""
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if any("contextmanager" in ast.unparse(each) for each in function.decorator_list):
            continue
        blocks = [node for node in ast.walk(function) if isinstance(node, ast.With)]
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for block in blocks for node in ast.walk(block)):
            found.append(function.name)
    return found


def test_no_sum_yields_inside_a_with() -> None:
    """Its caller would go on inside that: on another stream, or without grad."""
    engine = Path(reduce.__file__).parent
    paths = [engine / "reduce.py", *(engine.parent / "codecs").glob("*.py")]
    assert [name for path in paths for name in yields_inside_with(ast.parse(path.read_text()))] == []
    assert yields_inside_with(ast.parse("def f():\n    with a:\n        yield")) == ["f"]


def test_a_failing_reduction_is_named_by_the_module_that_was_sharded_last() -> None:
    """FQNs begin at the root, which may be another one in the next step."""
    with fake_world(2):
        inner = fully_shard(nn.Linear(2, 2))
        inner(torch.ones(1, 2)).sum().backward()
        outer = fully_shard(nn.Sequential(inner))
        failing = mock.patch.object(reduce, "start", side_effect=RuntimeError("on purpose"))
        with failing, pytest.raises(RuntimeError, match=r"reducing the gradients of 0\.bias, 0\.weight"):
            outer(torch.ones(1, 2)).sum().backward()
