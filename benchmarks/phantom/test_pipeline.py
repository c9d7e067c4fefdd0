"""Tests the replay of a pipeline on records whose times can be worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.phantom import pipeline, stages, timeline

from .test_replay import ABOUT, MACHINE, call, gather, gemm, waits

# A message, of 4,096 bytes, takes 10 us of latency and 5 us on a card of its own.
SENDS = replace(MACHINE, card=0.8192, decay=0.0)
FREE_SENDS = replace(MACHINE, base_us=0.0, card=1e9)


def exchange(*messages: str) -> list[list[Any]]:
    """A batch of sends and receives that the compute stream waits for."""
    return [call("mark", name=" ".join(("p2p", verb, *messages))) for verb in ("begin", "wait")] if messages else []


def rank_of_1f1b(place: int, ranks: int, micro_batches: int, forward_us: int, backward_us: int) -> list[list[Any]]:
    """The calls of one rank. As in torch's schedule, a send and the next receive are one batch."""
    first = [("F", i) for i in range(min(micro_batches, ranks - place))]
    pairs = [[("B", i), ("F", i + len(first))] for i in range(micro_batches)]
    actions = first + [(kind, i) for pair in pairs for kind, i in pair if i < micro_batches]
    calls, send = [], list[str]()
    for kind, i in actions:
        before, after = (place - 1, place + 1) if kind == "F" else (place + 1, place - 1)
        receive = [f"<{kind}{before}.{i}"] if 0 <= before < ranks else []
        calls += [*exchange(*send, *receive), gemm(forward_us if kind == "F" else backward_us)]
        send = [f">{kind}{place}.{i}"] if 0 <= after < ranks else []
    return calls + exchange(*send)


def replay(*ranks: list[list[Any]], machine: Any = SENDS, **more: Any) -> dict[str, Any]:
    return pipeline.replay([{"about": ABOUT, "calls": calls, **more} for calls in ranks], machine)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 32])
def test_equal_stages_idle_as_the_formula_of_1f1b_says(ranks: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of a step are bubbles, on each rank."""
    calls = [rank_of_1f1b(place, ranks, micro_batches, 30, 60) for place in range(ranks)]
    result = replay(*calls, machine=FREE_SENDS)
    assert result["step"] == pytest.approx((micro_batches + ranks - 1) * 90)
    for parts in result["ranks"]:
        assert parts["busy"] == pytest.approx(micro_batches * 90)
        assert parts["exposed other"] == pytest.approx((ranks - 1) * 90)


def test_the_slowest_stage_sets_the_pace() -> None:
    """The last of four takes 180 us a micro-batch instead of 90, between three forwards and three backwards."""
    calls = [rank_of_1f1b(place, 4, 8, *((60, 120) if place == 3 else (30, 60))) for place in range(4)]
    assert replay(*calls, machine=FREE_SENDS)["step"] == pytest.approx(3 * 30 + 8 * 180 + 3 * 60)


def test_messages_take_latency_and_bytes() -> None:
    """Two ranks, one micro-batch: forward, message, forward and backward, message, backward."""
    calls = [rank_of_1f1b(place, 2, 1, 30, 60) for place in range(2)]
    assert replay(*calls)["step"] == pytest.approx(30 + 15 + 90 + 15 + 60)
    assert timeline.replay({"about": ABOUT, "calls": calls[0]}, SENDS)["step"] == pytest.approx(90), "alone"


def test_batches_of_a_rank_are_in_order() -> None:
    """The second rank receives after 100 us of its own, and its last 7 us wait for the second message."""
    sender = [*exchange(">F0.0")[:1], *exchange(">F0.1")]
    receiver = [gemm(100), *exchange("<F0.0")[:1], *exchange("<F0.1"), gemm(7)]
    assert replay(sender, receiver)["step"] == pytest.approx(100 + 15 + 15 + 7)
    together = [gemm(100), *exchange("<F0.0", "<F0.1"), gemm(7)]  # both share the sender's card
    assert replay(exchange(">F0.0", ">F0.1"), together)["step"] == pytest.approx(100 + 10 + 10 + 7)


def test_a_gather_beside_a_bubble_is_hidden_unless_it_is_behind_the_wait() -> None:
    """It takes 17 us, and the second rank idles for more."""
    first, (receive, wait, *rest) = (rank_of_1f1b(place, 2, 1, 30, 60) for place in range(2))
    gathers = [call("cudaEventRecord", 0, 9), call("cudaStreamWaitEvent", 7, 9), gather(1)]
    assert replay(first, [*gathers, receive, wait, *waits(7), *rest])["step"] == pytest.approx(210)
    assert replay(first, [receive, wait, *gathers, *waits(7), *rest])["step"] == pytest.approx(227)


def test_messages_share_the_card_with_collectives_of_the_sender() -> None:
    """The first rank gathers when it sends, by the same card. Each has 5 us of bytes, which then take 10."""
    first, second = (rank_of_1f1b(place, 2, 1, 30, 60) for place in range(2))
    beside = [
        call("cudaEventRecord", 0, 9),
        call("cudaStreamWaitEvent", 7, 9),
        call("ncclAllGather", 7, 2048, 9, -1, 1, 2),
    ]
    assert replay([first[0], *beside, *first[1:]], second, comms={"1": [0, 8]})["step"] == pytest.approx(215)
    own = replace(SENDS, own_links=True)
    assert replay([first[0], *beside, *first[1:]], second, comms={"1": [0, 8]}, machine=own)["step"] == pytest.approx(
        210
    )


def test_ranks_that_wait_for_each_other_are_named() -> None:
    sends = [[*exchange(">F0.0"), *exchange("<B1.0")], [*exchange(">B1.0"), *exchange("<F0.0")]]
    with pytest.raises(RuntimeError, match=r"wait for each other: \{0: 'step 0: >F0.0', 1: 'step 0: >B1.0'\}"):
        replay(*sends)


@pytest.mark.parametrize(
    ("layers", "count", "ends", "sizes"),
    [
        (16, 4, (0, 0), [4, 4, 4, 4]),
        (16, 4, (2, 4), [4, 6, 5, 1]),  # 22 of 4 stages: 6, 6, 5, 5, less 2 and 4 at the ends
        (32, 8, (1, 3), [4, 5, 5, 5, 4, 4, 4, 1]),
    ],
)
def test_blocks_of_stages(layers: int, count: int, ends: tuple[int, int], sizes: list[int]) -> None:
    assert stages.count_blocks(layers, count, *ends) == sizes


def test_each_stage_has_a_block() -> None:
    with pytest.raises(ValueError, match=r"stages of \[4, 5, 5, 0\] blocks"):
        stages.count_blocks(14, 4, 1, 5)
