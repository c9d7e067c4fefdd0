"""Tests the formula by which `fsdp2.plan` predicts the time of a step, with numbers that were computed by hand.

All prices are a model's; none was measured on a GPU. Where the ranking of settings agrees with another model:
benchmarks/results/2026-11-28-plan-formula.md.
"""

from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.planning.prediction import PlanRow
from fsdp2.planning.times import HOST_MEMORY, MEMORY, Machine, Times, message_of

WIDTH, DEPTH, RANKS = 64, 4, 8
BLOCK = WIDTH * WIDTH
INFINITE = 1e30


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def predict(machine: dict[str, Any], **arguments: Any) -> tuple[PlanRow, Times]:
    """Returns the row of one setting of a small stack, and its times."""
    given = {"ranks": RANKS, "batch": lambda: torch.ones(2, WIDTH), "settings": [{}], **arguments}
    row = fsdp2.plan(stack(), machine=Machine(**machine), **given).best
    assert row.times is not None
    return row, row.times


# ---- one collective


@pytest.mark.parametrize(
    ("ranks", "span", "microseconds"),
    [(2, 2, 13.6), (8, 8, 29.2), (16, 16, 54.9), (64, 64, 209.1), (512, 512, 1648.3), (8, 64, 63.5), (64, 512, 483.5)],
)
def test_latency_of_a_ring_grows_with_its_hops(ranks: int, span: int, microseconds: float) -> None:
    """With machines of 8 ranks; the last two have one rank on each."""
    machine = Machine(link=1, network=1, flops=1)
    assert message_of(machine, 1.0, ranks, span).latency == pytest.approx(microseconds * 1e-6, rel=1e-3)
    for other in ({"device": "cpu"}, {"backend": "gloo"}):
        assert message_of(Machine(link=1, network=1, flops=1, **other), 1.0, ranks, span).latency == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "number", "span", "speed"),
    [
        ({}, 8, 8, 370e9),  # inside a machine
        ({}, 16, 16, 370e9),  # 8 cards of 50 GB/s, of which a ring reaches 95 %, are faster than NVLink
        ({}, 64, 64, 8 * 50e9 * 0.85),
        ({}, 512, 512, 8 * 50e9 * 0.7),
        ({"network": 50e9 / 8}, 64, 64, 50e9 * 0.85),  # one card for eight ranks
        ({}, 8, 64, 50e9 * 0.85),  # replicas on 8 machines: one rank of each
        ({"network": 50e9 / 8}, 8, 64, 50e9 / 8 * 0.85),
        ({}, 16, 64, 2 * 50e9 * 0.85),  # two ranks of each machine
        ({"network": None, "ranks_per_machine": 64}, 64, 64, 370e9),
        ({"ranks_per_machine": 4}, 64, 64, 4 * 50e9 * 0.8),
    ],
)
def test_a_ring_uses_all_cards_of_its_ranks(arguments: dict[str, Any], number: int, span: int, speed: float) -> None:
    machine = Machine(**{"link": "370GB/s", "network": "50GB/s", **arguments})
    assert 1e9 / max(message_of(machine, 1e9, number, span).seconds_on.values()) == pytest.approx(speed)


def test_an_exchange_uses_a_card_for_each_rank() -> None:
    """Of 63 other ranks, 56 are on other machines."""
    machine = Machine(link="370GB/s", network="50GB/s")
    between = message_of(machine, 63e9, 64, 64, is_ring=False).seconds_on
    assert between == pytest.approx({"inside": 7e9 / 370e9, "between": 56e9 / (50e9 * 0.85)})
    inside = message_of(machine, 7e9, 8, 8, is_ring=False).seconds_on
    assert inside == pytest.approx({"inside": 7e9 / 370e9, "between": 0})


# ---- a step


def test_computation_alone() -> None:
    row, times = predict({"flops": 1e9, "link": INFINITE, "device": "cpu"})
    products = 2 * 2 * BLOCK  # operations of one: two rows
    assert row.flops == products * (3 * DEPTH - 1)  # the batch needs no gradient
    assert times.forward.compute == pytest.approx(DEPTH * products / 1e9)
    assert times.backward.compute == pytest.approx((2 * DEPTH - 1) * products / 1e9)
    assert times.total == pytest.approx(row.flops / 1e9)
    assert times.exposed == pytest.approx(0, abs=1e-12)


def test_communication_alone() -> None:
    """Its addends are all that a rank sends."""
    row, times = predict({"flops": INFINITE, "link": "1MB/s", "device": "cpu", "backend": "nccl"})
    block = 4 * BLOCK * (RANKS - 1) / RANKS / 1e6
    assert times.first == pytest.approx(block)
    assert times.forward.communication == pytest.approx((DEPTH - 1) * block)
    assert times.backward.communication == pytest.approx((DEPTH - 2 + DEPTH - 1) * block)
    assert times.last == pytest.approx(block)
    assert times.total == pytest.approx(row.sent / 1e6)


def test_longer_computation_hides_communication() -> None:
    """All but the first gather and the last reduction."""
    _, times = predict({"flops": 1e6, "link": "1GB/s", "device": "cpu", "backend": "nccl"})
    assert times.exposed == pytest.approx(2 * 4 * BLOCK * (RANKS - 1) / RANKS / 1e9)


def test_each_launch_takes_the_latency() -> None:
    row, times = predict({"flops": INFINITE, "link": INFINITE}, optimizer=0)
    assert row.launched == {"all_gather": 2 * DEPTH - 2, "reduce_scatter": DEPTH}
    collectives = times.total - times.optimizer
    assert collectives == pytest.approx(sum(row.launched.values()) * 29.2e-6)


def test_communicators_share_links_but_not_latencies() -> None:
    """Beyond a machine, reductions have a communicator of their own: bytes of both pass the links, latencies do not add
    up.
    """
    row, latencies = predict({"flops": INFINITE, "link": INFINITE, "network": INFINITE}, ranks=16)
    gathers, reductions = (row.launched[kind] for kind in ("all_gather", "reduce_scatter"))
    hidden = max(gathers // 2 - 1, reductions - 1)  # of backward
    assert latencies.backward.communication == pytest.approx(hidden * 54.9e-6, rel=1e-3)
    row, transfers = predict({"flops": INFINITE, "link": 1e6, "ranks_per_machine": 16}, ranks=16)
    latency = sum(row.launched.values()) * 54.9e-6
    assert transfers.total == pytest.approx(row.sent / 1e6, abs=2 * latency)


def test_replicas_sum_over_the_network() -> None:
    """Each of two replicas on a machine of four ranks sends as many bytes as it sums."""
    machine = {"flops": INFINITE, "link": INFINITE, "network": 1e6, "ranks_per_machine": 4}
    row, times = predict({**machine, "device": "cpu", "backend": "nccl"}, settings=[{"replicas": 2}])
    assert times.total == pytest.approx(row.moved["all_reduce"] / (1e6 * 0.95))


def test_copies_of_offload_pass_in_each_direction() -> None:
    row, times = predict({"flops": 1e30, "link": INFINITE, "host_link": 1e6}, settings=[{"offload": True}])
    block = 4 * BLOCK / RANKS
    assert row.moved["transfer"] == block * (DEPTH + DEPTH - 2 + DEPTH)
    assert times.backward.communication == pytest.approx((DEPTH - 2) * block / 1e6, rel=0.01)
    assert times.last == pytest.approx((DEPTH - 1) * block / 1e6, rel=0.01), "reductions end late"


@pytest.mark.parametrize(("optimizer", "nbytes"), [("adamw", 28), ("momentum", 20), ("sgd", 12), (None, 12), (2, 16)])
def test_the_step_of_an_optimizer_reads_and_writes_memory(optimizer: Any, nbytes: int) -> None:
    """It reads gradients, and reads and writes parameters and states, of this rank's shards."""
    speeds: dict[str, Any] = {"flops": INFINITE, "link": INFINITE}
    shard = DEPTH * BLOCK // RANKS
    assert predict(speeds, optimizer=optimizer)[1].optimizer == pytest.approx(nbytes * shard / MEMORY)
    _, offloaded = predict(speeds, optimizer=optimizer, settings=[{"offload": True}])
    assert offloaded.optimizer == pytest.approx(8 * nbytes * shard / HOST_MEMORY), "8 ranks share the CPU's memory"
    assert predict({**speeds, "device": "cpu"}, optimizer=optimizer)[1].optimizer == 0


def test_without_speeds_or_activations_there_is_no_time() -> None:
    for machine, batch in (({}, stack), ({"flops": 1e9}, stack), ({"link": 1e9, "flops": 1e9}, None)):
        given: Any = {"batch": None if batch is None else lambda: torch.ones(2, WIDTH)}
        assert fsdp2.plan(stack(), ranks=8, machine=Machine(**machine), **given).best.time is None  # type: ignore[arg-type]


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"memory": "much"}, ValueError, 'memory: expected a number of bytes or a text like "24GB"'),
        ({"link": -1}, ValueError, "link: expected more than 0, got -1"),
        ({"flops": True}, TypeError, "flops: expected a number"),
        ({"ranks_per_machine": 0}, ValueError, "ranks_per_machine: expected an int of 1 or more, got 0"),
        ({"ranks_per_machine": 2.0}, ValueError, "ranks_per_machine: expected an int of 1 or more"),
        ({"headroom": 1}, ValueError, "headroom: expected a share of the memory from 0 to 1, got 1"),
        ({"headroom": "10%"}, TypeError, "headroom: expected a share of the memory, 0.1 for example, got '10%'"),
        ({"device": 1}, TypeError, "device: expected the type of a device"),
        ({"backend": "mpi"}, ValueError, 'backend: expected "nccl", "gloo" or None, got \'mpi\''),
    ],
)
def test_wrong_fields_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Machine(**arguments)


def test_ranks_on_several_machines_need_a_network() -> None:
    speeds: dict[str, Any] = {"link": 1e9, "flops": 1e9}
    with pytest.raises(
        ValueError, match=r"machine: expected network=, .* since 16 ranks are on machines of 8; got link="
    ):
        predict(speeds, ranks=[8, 16])
    for known in ({"network": 1e9}, {"ranks_per_machine": 16}):
        predict({**speeds, **known}, ranks=16)


def test_a_machine_is_a_machine() -> None:
    with pytest.raises(TypeError, match=r"machine: expected a fsdp2.Machine or None, got dict"):
        fsdp2.plan(stack(), ranks=8, machine={"memory": "80GB"})  # type: ignore[arg-type]
