"""Tests gather.start and reduce.start over gloo, on plain tensors with a layout, without parameters or modules."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine import buckets, gather, pack, reduce
from fsdp2.engine import layout as layouts
from fsdp2.engine.buckets import split_buckets
from fsdp2.engine.codec import AsIs, Cast, Encoder
from fsdp2.engine.comm import TORCH_MEMORY, CommLabel, Work
from fsdp2.engine.gather import GatherPlan, view_bytes
from fsdp2.engine.layout import ParamSpec, bucket_layout, gather_layout
from fsdp2.engine.pack import ReducePlan
from fsdp2.engine.reduce import Reduction
from helpers import own_rows, run_checks, world_sizes
from known_memory import KnownMemory

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
ALL_PACKED, ALL_DIRECT = 1 << 40, 0


@dataclasses.dataclass(frozen=True)
class Case:
    """A group: (shape, stored dtype, compute dtype) of each parameter."""

    name: str
    params: tuple[tuple[tuple[int, ...], torch.dtype, torch.dtype], ...]
    direct_min_bytes: int = ALL_PACKED
    reduce_dtype: torch.dtype = F32
    wire_dtype: torch.dtype | None = None

    def specs(self, world_size: int) -> tuple[ParamSpec, ...]:
        return tuple(ParamSpec(*param[:3], world_size, *param[3:]) for param in self.params)

    def whole(self, i: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Values of parameter i (or of a rank's gradient of it), the same on every rank for the same seed."""
        generator = torch.Generator().manual_seed(seed * 100 + i)
        shape = self.params[i][0]
        if not dtype.is_floating_point:
            return torch.randint(0, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def same(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype, torch.dtype], ...]:
    return tuple((shape, dtype, dtype) for shape in shapes)


def cast(*shapes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype, torch.dtype], ...]:
    return tuple((shape, F32, BF16) for shape in shapes)


def along(dim: int, params: Any) -> Any:
    """Returns parameters that are cut along another dim."""
    return tuple((*param, dim) for param in params)


EVEN = ((12, 4), (24,), (12, 2, 8))
UNEVEN = ((7, 5), (3,), (1, 9), (5, 3, 2), (2,), (13, 4))
CASES = [
    Case("even, packed", same(F32, *EVEN)),
    Case("even, direct", same(F32, *EVEN), ALL_DIRECT),
    Case("even, some direct", same(F32, *EVEN), 100),
    Case("uneven, packed", same(F32, *UNEVEN)),
    Case("uneven, direct where it is aligned", same(F32, *UNEVEN, (7, 4), (2, 16)), ALL_DIRECT),
    Case("no rows, no columns", same(F32, (0, 3), (4, 0), (5,))),
    Case("only empty ones", same(F32, (0, 3))),
    Case("cast", cast(*EVEN, *UNEVEN), 100, BF16),
    Case("cast, reduced in fp32", cast(*EVEN, *UNEVEN), 100),
    Case("cast, all direct", cast((16, 8), (8, 8)), ALL_DIRECT, BF16),
    Case("some cast", (*cast((6, 4), (5,)), *same(F32, (7, 3), (8, 8))), 64),
    Case("stored and computed in bf16, reduced in fp32", same(BF16, *EVEN, *UNEVEN), 64),
    Case("cast, sent in bf16 and reduced in fp32", cast(*EVEN, *UNEVEN), 100, F32, BF16),
    Case("cast, sent as they are and reduced in fp32, all direct", cast((16, 8), (8, 8)), ALL_DIRECT, F32, BF16),
    Case("sent in bf16, reduced in fp32", same(F32, *EVEN, *UNEVEN), 100, F32, BF16),
    Case("sent in bf16, no rows, no columns", same(F32, (0, 3), (4, 0), (5,)), wire_dtype=BF16),
    Case("sent in fp16, reduced in fp64", (*same(F16, *EVEN), *same(F64, *UNEVEN)), 64, F64, F16),
    Case("fp16", same(F16, *EVEN, *UNEVEN), 64, F16),
    Case("fp64", same(F64, *UNEVEN), 64, F64),
    Case("mixed dtypes", (*same(BF16, (3,), (5, 5)), *same(F64, (3, 3)), *same(F32, (5,)), *same(torch.uint8, (7,)))),
    Case("the second dim", along(1, same(F32, (5, 12), (2, 6, 4), (3, 24)))),
    Case("other dims, cast", (*along(1, cast((4, 12, 8))), *along(2, cast((2, 3, 6))), *cast((12, 4), (7,)))),
    Case("other dims, some uneven", (*along(1, cast((4, 7, 8), (4, 12))), *cast((12, 4)))),
    Case("the second dim of one row, and a vector", (*along(1, same(F32, (1, 12))), *same(F32, (3,)))),
    Case("the second dim, sent in bf16", along(1, cast((2, 12), (3, 6, 2))), wire_dtype=BF16),
    Case("bool and int64", (*same(torch.bool, (5,), (3, 3)), *same(torch.int64, (3,)), *same(F32, (7, 2)))),
]


def random_cases() -> Iterator[Case]:
    rng = random.Random(3)
    for number in range(25):
        params = tuple(
            (
                tuple(rng.choice((1, 2, 3, 5, 8, 12, 17)) for _ in range(rng.randint(1, 3))),
                *rng.choice(((F32, F32), (F32, BF16), (BF16, BF16), (F64, F32), (BF16, F32))),
            )
            for _ in range(rng.randint(1, 9))
        )
        dtypes = rng.choice(((F32, None), (BF16, None), (F64, None), (F32, BF16), (F64, BF16), (F64, F32)))
        yield Case(f"random {number}", params, rng.choice((0, 64, 256)), *dtypes)


class Comm(NamedPairwiseComm):
    def __init__(self, direct_min_bytes: int, memory: Any = TORCH_MEMORY) -> None:
        super().__init__(dist.group.WORLD, CommLabel())
        self.direct_min_bytes, self.memory = direct_min_bytes, memory

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        self._require_known(outputs, inputs)
        return super().all_gather(outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        self._require_known(outputs, inputs)
        return super().reduce_scatter(outputs, inputs, divisor, what)

    def _require_known(self, *tensors: Sequence[Tensor]) -> None:
        if isinstance(self.memory, KnownMemory):
            assert all(self.memory.has(each) for some in tensors for each in some if each.numel())


def own_part(whole: Tensor, spec: ParamSpec, rank: int) -> Tensor:
    return own_rows(whole.movedim(spec.dim, 0), rank, spec.world_size).movedim(0, spec.dim).contiguous()


def check_gather(case: Case, rank: int, world_size: int) -> None:
    """As on CPU, and as on a device that copies packed parameters out by one kernel; from memory of their own, too."""
    check_gather_once(case, rank, world_size)
    with mock.patch.object(gather, "costs_launches", return_value=True):
        check_gather_once(case, rank, world_size)
        with mock.patch.object(layouts, "APART_BYTES", 1):
            check_gather_once(case, rank, world_size)
    with mock.patch.object(layouts, "APART_BYTES", 1):
        check_gather_once(case, rank, world_size)
        check_gather_once(case, rank, world_size, KnownMemory())
    check_gather_once(case, rank, world_size, KnownMemory())


def check_gather_once(case: Case, rank: int, world_size: int, memory: Any = TORCH_MEMORY) -> None:
    """Twice with one plan, as in training: new values, and a full buffer that holds the old ones."""
    specs, comm = case.specs(world_size), Comm(case.direct_min_bytes, memory)
    layout = gather_layout.__wrapped__(specs, world_size, case.direct_min_bytes)
    shards = torch.zeros(layout.shard_nbytes, dtype=torch.uint8)
    full = shards if layout.aliased else memory.empty(layout.unsharded_nbytes, dtype=torch.uint8).fill_(255)
    plan = GatherPlan(layout, rank, shards, full, memory)
    for seed in (1, 2):
        for i, spec in enumerate(specs):
            rows = own_part(case.whole(i, spec.storage_dtype, seed), spec, rank)
            view_bytes(shards, layout.shard_offsets[i], rows.numel(), spec.storage_dtype).copy_(rows.reshape(-1))
        at_rest = shards.clone()
        work = plan.start(comm)
        if work is not None:
            work.wait()
        plan.finish()
        if plan.has_memory:
            plan.free()
        assert torch.equal(shards, at_rest), "the shards at rest must not change"
        for i, spec in enumerate(specs):
            expected = case.whole(i, spec.storage_dtype, seed).to(spec.compute_dtype)
            got = view_bytes(full, layout.unsharded_offsets[i], expected.numel(), spec.compute_dtype).view(spec.shape)
            assert torch.equal(got, expected), f"parameter {i}: {spec}"


def expected_mean(case: Case, i: int, spec: ParamSpec, reduce_dtype: torch.dtype) -> Tensor:
    """Cast to the reduce dtype, added in rank order, divided: each step rounded to it (fp16: only the result).

    Before that, each rank's is rounded to the wire dtype.
    """
    sent = [
        case.whole(i, spec.compute_dtype, rank).to(case.wire_dtype or reduce_dtype) for rank in range(spec.world_size)
    ]
    parts = [part.to(reduce_dtype) for part in sent]
    total = parts[0].float() if reduce_dtype == F16 else parts[0].clone()
    for part in parts[1:]:
        total += part
    total = (total / len(parts)).to(reduce_dtype)
    return total.to(spec.storage_dtype)


def check_reduce(case: Case, rank: int, world_size: int) -> None:
    """As on CPU, and as on a device that packs by few kernels."""
    check_reduce_once(case, rank, world_size)
    with (
        mock.patch.object(buckets, "costs_launches", return_value=True),
        mock.patch.object(pack, "costs_launches", return_value=True),
    ):
        check_reduce_once(case, rank, world_size)
    check_reduce_once(dataclasses.replace(case, direct_min_bytes=ALL_PACKED), rank, world_size, KnownMemory())


def check_reduce_once(case: Case, rank: int, world_size: int, memory: Any = TORCH_MEMORY) -> None:
    """All buckets of the group are in flight at the same time, and finished out of order."""
    specs, comm = case.specs(world_size), Comm(case.direct_min_bytes, memory)
    trainable = [i for i, spec in enumerate(specs) if spec.compute_dtype.is_floating_point]
    dtypes = [case.reduce_dtype] * len(specs)
    pending = []
    for bucket in split_buckets(specs, dtypes, dtypes, reversed(trainable), 4, 64):
        gradients = {i: case.whole(i, specs[i].compute_dtype, rank) for i in bucket}
        layout = bucket_layout(specs, bucket, case.reduce_dtype, case.direct_min_bytes, case.wire_dtype)
        codec = AsIs() if case.wire_dtype is None else Cast(case.wire_dtype)
        plan = ReducePlan(layout, specs, comm.size, torch.device("cpu"), Encoder(codec))
        pending.append((bucket, reduce.start(gradients, plan, Reduction(comm), {})))
    for bucket, each in reversed(pending):
        shards = each.finish()
        assert set(shards) == set(bucket)
        for i, (flat, offset) in shards.items():
            whole = expected_mean(case, i, specs[i], case.reduce_dtype)
            expected = own_part(whole, specs[i], rank) if whole.shape[0] else whole
            assert flat.dtype == specs[i].storage_dtype
            stride = torch.empty(expected.shape, device="meta").stride()
            assert torch.equal(flat.as_strided(expected.shape, stride, offset), expected), f"gradient {i}: {specs[i]}"


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=(1, 2, 4)))
def test_gather_and_reduce_move_every_element(world_size: int) -> None:
    """Bitwise: against the whole tensors, their chunks, and means that are added up in rank order."""

    def checked(check: Callable[[Any, int, int], None], case: Any) -> Callable[[], None]:
        return lambda: check(case, dist.get_rank(), world_size)

    run_checks(
        world_size,
        [
            (f"{check.__name__} [{case.name}]", checked(check, case))
            for case in (*CASES, *random_cases())
            for check in (check_gather, check_reduce)
        ],
    )
