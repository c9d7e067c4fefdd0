"""Tests the replay of recorded calls on records whose times can be worked out by hand."""

from typing import Any

import pytest
import torch

from phantom import timeline, unchecked

ABOUT = {"model": "1B", "tokens": 1, "rows": 1, "fp32": False, "ranks": 8, "replicas": 1}
FREE_HOST = {"host_scale": 0.0, "launch_us": 0.0, "event_us": 0.0, "nccl_us": 0.0, "nccl_op_us": 0.0}
MACHINE = timeline.Machine(**FREE_HOST, flops=1e12, memory=1e12, floor_us=1.0, latency_us=10.0, bandwidth=1.0)


def call(kind: str, stream: int = 0, *numbers: int, name: str = "") -> list[Any]:
    return [0, 1, kind, stream, *(numbers + (0,) * 5)[:5], name]


def gemm(us: int) -> list[Any]:
    """A matrix product of as many microseconds: 2 m n k / 1e12 flops, with few bytes."""
    return call("gemm", 0, 100, 100, us * 50, 1, 2)


def gather(kilobytes: int, stream: int = 7) -> list[Any]:
    """Seven peers send so many kilobytes of bf16 each: 7 us each at 1 GB/s, and 10 of latency."""
    return call("ncclAllGather", stream, 500 * kilobytes, 9, -1, 1, 8)


def replay(*calls: list[Any]) -> dict[str, Any]:
    """Returns a step in which streams 7 and 8 begin when the last step has ended."""
    begin = [call("cudaEventRecord", 0, 9), *(call("cudaStreamWaitEvent", stream, 9) for stream in (7, 8))]
    return timeline.replay({"about": ABOUT, "calls": [*begin, *calls]}, MACHINE)


def test_work_of_a_stream_is_in_order() -> None:
    result = replay(gemm(30), gemm(20))
    assert result["step"] == pytest.approx(50)
    assert result["busy"] == pytest.approx(50)


def test_a_collective_beside_compute_is_hidden_and_what_waits_for_it_shows_the_rest() -> None:
    """It takes 10 + 7 us. The second product waits for it, and the first one has taken 5."""
    record = (gather(1), call("cudaEventRecord", 7, 1), gemm(5), call("cudaStreamWaitEvent", 0, 1, 7), gemm(4))
    result = replay(*record)
    assert result["step"] == pytest.approx(5 + 12 + 4)
    assert result["exposed gather"] == pytest.approx(12)


def test_a_group_of_collectives_has_one_latency() -> None:
    together = [call("ncclGroupStart"), gather(1), gather(1), call("ncclGroupEnd")]
    wait = [call("cudaEventRecord", 7, 1), call("cudaStreamWaitEvent", 0, 1, 7), gemm(1)]
    assert replay(*together, *wait)["step"] == pytest.approx(10 + 14 + 1)
    assert replay(gather(1), gather(1), *wait)["step"] == pytest.approx(20 + 14 + 1)


def test_one_collective_of_a_communicator_runs_at_a_time() -> None:
    """On whatever streams."""
    waits = [call("cudaEventRecord", 8, 1), call("cudaStreamWaitEvent", 0, 1, 8), gemm(1)]
    assert replay(gather(1, 7), gather(1, 8), *waits)["step"] == pytest.approx(2 * 17 + 1)


@pytest.mark.parametrize(
    ("kind", "kilobytes"),
    [
        ("ncclAllGather", 7),  # of 1 KB of each rank
        ("ncclReduceScatter", 7),
        ("ncclAlltoAll", 7),  # 1 KB for each other rank
        ("ncclSend", 1),
        ("ncclRecv", 0),  # what comes passes what goes
        ("ncclAllReduce", 2 * 7 / 8),
    ],
)
def test_bytes_of_collectives(kind: str, kilobytes: float) -> None:
    prices = timeline.Prices(MACHINE, ABOUT)
    assert prices.collective(kind, 500, 9, 8) == pytest.approx(kilobytes)
    assert prices.collective(kind, 500, 9, 1) == 0


def test_where_values_are_not_compared_shapes_and_dtypes_are() -> None:
    same = unchecked.assert_same_kind
    same(torch.zeros(2), torch.ones(2), 0, 0, "w")
    same(None, None, 0, 0, "w")
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int64), None):
        with pytest.raises(AssertionError, match="w: expected"):
            same(torch.zeros(2), other, 0, 0, "w")
