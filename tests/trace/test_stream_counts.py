"""Counts the collectives and the memory of `stream_full_params`."""

import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.meters import AllocationMeter
from fsdp2 import StreamVersion, fully_shard, stream_full_params
from fsdp2.collectives.coalesced import CoalescedComm
from helpers import fake_world

RANKS, BLOCKS, DIM = 8, 6, 512
MATRIX = DIM * DIM * 4
BUCKET = 4 * MATRIX
NUMBER = BLOCKS * 4 // 3  # with biases, three matrices fit
SLACK = 0.03 * BUCKET


def sharded() -> nn.Module:
    model = nn.Sequential(*[nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(4)]) for _ in range(BLOCKS)])
    for block in model:
        fully_shard(block)
    return fully_shard(model)


class Calls:
    def __init__(self) -> None:
        self.gathers: list[int] = []
        self.reductions = 0


def counted(model: nn.Module, **options: Any) -> tuple[Calls, int]:
    """Returns the collectives of a stream, and the number of its buckets."""
    calls = Calls()
    gather, reduce = CoalescedComm.all_gather, dist.distributed_c10d.ProcessGroup.allreduce

    def all_gather(comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        calls.gathers += [each.nbytes for each in outputs]
        return gather(comm, outputs, inputs)

    def all_reduce(group: Any, *arguments: Any) -> Any:
        calls.reductions += 1
        return reduce(group, *arguments)

    with (
        mock.patch.object(CoalescedComm, "all_gather", all_gather),
        mock.patch.object(dist.distributed_c10d.ProcessGroup, "allreduce", all_reduce),
    ):
        stream = stream_full_params(model, **options)
        number = sum(1 for _ in stream)
        assert number == len(stream)
    return calls, number


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_bucket_is_a_collective(dtype: torch.dtype | None) -> None:
    """However many parameters and groups it has. Before them, one all-reduce compares what ranks are to deliver."""
    with fake_world(RANKS):
        model = sharded()
        nbytes = sum(param.numel() for param in model.parameters()) * (dtype or torch.float32).itemsize
        for size in (BUCKET, 10 * BUCKET, 1 << 30):
            calls, number = counted(model, bucket_bytes=size, dtype=dtype)
            assert calls.reductions == 1
            assert len(calls.gathers) == number
            assert nbytes / size <= number <= 1 + nbytes / (size - MATRIX)
            assert nbytes <= sum(calls.gathers) <= nbytes + number * 32 * RANKS


def test_unchanged_parameters_need_one_gather_of_counts() -> None:
    with fake_world(RANKS):
        model, version = sharded(), StreamVersion()
        counted(model, since=version)
        calls, number = counted(model, since=version)
        assert number == 0
        assert calls.gathers == [8 * RANKS * len([*model.parameters()])]
        assert version.nbytes == sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[attr-defined]


def test_the_memory_is_that_of_two_buckets() -> None:
    """The one that is used, or being unpacked, and the one that is being gathered; also if all are kept in a list."""
    with fake_world(RANKS), AllocationMeter() as meter:
        model = sharded()
        gc.collect()
        kept = []
        with meter.region("stream"):
            for bucket in stream_full_params(model, bucket_bytes=BUCKET):
                kept.append(bucket)  # without its memory, once the next one is asked for
        gc.collect()
        with meter.region("after"):
            pass
    before = meter.allocated_before("stream")
    assert BUCKET < meter.peak_during("stream") - before <= 2 * BUCKET + SLACK
    assert meter.allocated_before("after") - before <= SLACK
    assert len(kept) == NUMBER
    assert repr(kept[0]).startswith("<ParamBucket: whole 0.0.weight, 0.0.bias, 0.1.weight and ")
    del model


def test_on_one_rank_nothing_is_gathered() -> None:
    with fake_world(1):
        calls, number = counted(sharded(), bucket_bytes=BUCKET)
        assert calls.gathers == []
        assert number == NUMBER
