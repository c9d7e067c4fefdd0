"""Tests what `fsdp2.plan` takes for the time of collectives and of the optimizer, and the settings that it prefers so.

The order of settings on ten cases is that of another simulation of the same steps, by hand: by groups, without this
library. All prices are a model's; none was measured on a GPU.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from fsdp2.planning.clocks import Clocks, Machine
from fsdp2.planning.network import NCCL_LATENCY, Latency, Network
from phantom import models

WIDTH, DEPTH = 64, 4
INFINITE = 1e30
FREE: dict[str, Any] = {"flops": INFINITE, "memory_link": INFINITE}
BF16 = torch.bfloat16


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def predict(model: nn.Module | None = None, **arguments: Any) -> fsdp2.Prediction:
    """Returns the prediction for one setting of a small stack; its collectives alone take time, unless said."""
    given = {"ranks": 8, "batch": lambda: torch.ones(2, WIDTH), "settings": [{}], **FREE, **arguments}
    return fsdp2.plan(stack() if model is None else model, **given).best.prediction


# ---- latency


@pytest.mark.parametrize(
    ("ranks", "span", "microseconds"),
    [(2, 2, 13.6), (8, 8, 29.2), (16, 16, 54.9), (64, 64, 209.1), (512, 512, 1648.3), (8, 64, 63.5), (64, 512, 483.5)],
)
def test_latency_of_a_ring_grows_with_its_hops(ranks: int, span: int, microseconds: float) -> None:
    """With machines of 8 ranks; the last two have one rank on each."""
    place = Network(50e9).place(ranks, span)
    assert NCCL_LATENCY.seconds(place) == pytest.approx(microseconds * 1e-6, rel=1e-3)


@pytest.mark.parametrize(("ranks", "on_each", "latency"), [(2, 8, 13.6e-6), (8, 8, 29.2e-6), (8, 1, 63.5e-6)])
def test_each_launch_takes_the_latency(ranks: int, on_each: int, latency: float) -> None:
    """Of bytes that take no time, so that collectives alone follow one another."""
    taken = predict(ranks=ranks, ranks_per_machine=on_each, link=INFINITE)
    assert taken.launched == {"all_gather": 2 * DEPTH - 2, "reduce_scatter": DEPTH}
    assert taken.time == pytest.approx(sum(taken.launched.values()) * latency)


@pytest.mark.parametrize(("given", "each"), [("20us", 20e-6), (1e-3, 1e-3), (("5us", 1e-6, 1), 12e-6), ([0, 0, 0], 0)])
def test_latency_can_be_chosen(given: Any, each: float) -> None:
    taken = predict(link=INFINITE, latency=given)
    assert taken.time == pytest.approx(sum(taken.launched.values()) * each, abs=1e-12)


def test_on_cpus_and_over_gloo_latency_is_left_out_unless_it_is_given() -> None:
    for arguments in ({"device": "cpu"}, {"backend": "gloo"}, {"device": "cpu", "backend": "nccl"}):
        assert predict(link=INFINITE, **arguments).time == pytest.approx(0, abs=1e-12)
        assert predict(link=INFINITE, latency=1e-3, **arguments).time == pytest.approx(1e-3 * (3 * DEPTH - 2))


@pytest.mark.parametrize("given", ["20 miles", [1e-6, 2e-6], "", -1, None])
def test_what_is_no_latency_is_refused(given: Any) -> None:
    if given is None:
        with pytest.raises(TypeError, match='latency: expected a number of seconds or a text like "20us", got bool'):
            predict(latency=True)
        return
    with pytest.raises(ValueError, match="latency: expected"):
        predict(latency=given)


@pytest.mark.parametrize("name", ["ranks_per_machine", "cards_per_machine"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_numbers_of_a_machine_are_whole(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected an int of 1 or more"):
        predict(**{name: value})


def test_a_collective_of_many_tensors_is_several_launches() -> None:
    """Each of at most 16 operations. An exchange launches each tensor on its own."""
    block = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(40)])
    model = nn.Sequential(block)
    given: dict[str, Any] = {"batch": lambda: torch.ones(2, 512), "policy": nn.Sequential, "link": INFINITE}
    taken = predict(model, **given)
    assert taken.launched["all_gather"] == 3
    wide = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    sent = predict(model, **given, mp_policy=wide, settings=[{"wire_dtype": BF16}])
    assert sent.launched["reduce_scatter"] == 40
    assert sent.time > 40 * 29e-6  # type: ignore[operator]


# ---- bytes


def network(**arguments: Any) -> Network:
    return Network(**{"link": 50e9, "machine_link": 370e9, **arguments})


@pytest.mark.parametrize(
    ("arguments", "number", "span", "speed"),
    [
        ({}, 8, 8, 370e9),  # inside a machine
        ({}, 16, 16, 370e9),  # 8 cards of 50 GB/s, of which a ring reaches 95 %, are faster than NVLink
        ({}, 64, 64, 8 * 50e9 * 0.85),
        ({}, 512, 512, 8 * 50e9 * 0.7),
        ({"cards_per_machine": 1}, 64, 64, 50e9 * 0.85),
        ({"cards_per_machine": 4}, 512, 512, 4 * 50e9 * 0.7),
        ({}, 8, 64, 50e9 * 0.85),  # replicas on 8 machines: one card of each
        ({"cards_per_machine": 1}, 8, 64, 50e9 / 8 * 0.85),  # which eight such rings share
        ({}, 16, 64, 2 * 50e9 * 0.85),  # two ranks of each machine
        ({"machine_link": None}, 64, 64, 50e9),  # a rank never sends more than `link`
        ({"ranks_per_machine": 4}, 64, 64, 4 * 50e9 * 0.8),
    ],
)
def test_a_ring_uses_all_cards_of_its_ranks(arguments: dict[str, Any], number: int, span: int, speed: float) -> None:
    wire = network(**arguments)
    assert 1e9 / max(wire.ring_seconds(1e9, wire.place(number, span))) == pytest.approx(speed)


def test_an_exchange_uses_a_card_for_each_rank() -> None:
    """Of 63 other ranks, 56 are on other machines."""
    wire = network()
    assert wire.exchange_seconds(63e9, wire.place(64, 64)) == pytest.approx((7e9 / 370e9, 56e9 / (50e9 * 0.85)))
    assert wire.exchange_seconds(7e9, wire.place(8, 8)) == pytest.approx((7e9 / 370e9, 0))


def test_bytes_between_machines_and_inside() -> None:
    """Two machines of four: a ring enters each by four cards; a sum between replicas takes one."""
    arguments: dict[str, Any] = {"link": 1e6, "machine_link": 1e9, "ranks_per_machine": 4, "latency": 0}
    flat = predict(**arguments)
    assert flat.time == pytest.approx(flat.sent / (4e6 * 0.95))
    hybrid = predict(**arguments, settings=[{"replicas": 2}])
    between = hybrid.moved["all_reduce"]  # of two replicas, each sends as many bytes as it sums
    assert hybrid.time == pytest.approx(between / (1e6 * 0.95), rel=0.01)  # all else is beside it, and soon there


def test_communicators_share_links_but_not_latencies() -> None:
    """The all-reduce of one group runs beside the collectives of others, over the cards; these, inside the machine."""
    arguments: dict[str, Any] = {"ranks": 16, "settings": [{"replicas": 2}], "latency": [1e-3, 0, 0]}
    taken = predict(link=INFINITE, **arguments)
    gathers, reductions, sums = (taken.launched[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    assert taken.time == pytest.approx(1e-3 * (gathers + reductions + 1))  # the last all-reduce is exposed
    assert sums == reductions


def test_reductions_on_a_communicator_of_their_own_share_the_links() -> None:
    """Their latencies pass beside those of gathers, their bytes do not."""

    def seconds(are_apart: bool, latency: float, link: float) -> float:
        clocks = Clocks(Machine("cuda", "nccl", link=link, latency=Latency(latency)))
        kinds = ("all_gather", "reduce_scatter") * 3
        for end in [clocks.communicate(kind, 1000, 64, communicator=kind if are_apart else None) for kind in kinds]:
            clocks.wait(end)
        return clocks.seconds

    assert seconds(False, 1.0, INFINITE) == pytest.approx(6)
    assert seconds(True, 1.0, INFINITE) == pytest.approx(3)
    assert seconds(True, 0.0, 1000) == pytest.approx(seconds(False, 0.0, 1000))


def test_a_plan_knows_where_the_engine_reduces_on_a_communicator_of_its_own() -> None:
    """On devices over NCCL, beyond the ranks of a machine: the last reduction is exposed, the others beside gathers."""
    for ranks, arguments, is_apart in ((8, {}, False), (16, {}, True), (16, {"device": "cpu"}, False)):
        taken = predict(ranks=ranks, link=INFINITE, latency=1e-3, ranks_per_machine=16, **arguments)
        both = 1e-3 * sum(taken.launched.values())
        assert taken.time == pytest.approx(both) or is_apart
        assert taken.time < 0.99 * both or not is_apart


# ---- the optimizer


@pytest.mark.parametrize(("optimizer", "nbytes"), [("adamw", 28), ("momentum", 20), ("sgd", 12), (None, 12), (2, 16)])
def test_the_step_of_an_optimizer_reads_and_writes_memory(optimizer: Any, nbytes: int) -> None:
    """It reads gradients, and reads and writes parameters and states, of this rank's shards."""
    shard = DEPTH * WIDTH * WIDTH // 8
    taken = predict(link=INFINITE, latency=0, optimizer=optimizer, memory_link="1MB/s")
    assert taken.optimizer_time == pytest.approx(nbytes * shard / 1e6)
    assert taken.time == pytest.approx(taken.optimizer_time)
    assert taken.exposed_time == pytest.approx(0, abs=1e-9)
    offloaded = predict(
        link=INFINITE,
        latency=0,
        optimizer=optimizer,
        settings=[{"offload": True}],
        memory_link="1MB/s",
        host_memory_link="4MB/s",
    )
    assert offloaded.optimizer_time == pytest.approx(8 * nbytes * shard / 4e6), "8 ranks share the CPU's memory"
    on_cpu = fsdp2.plan(stack(), ranks=8, settings=[{}], device="cpu", link=INFINITE, flops=1)
    assert on_cpu.best.prediction.optimizer_time == 0


# ---- ten cases whose order is known

# A token chooses as many weights as with 64 experts, in experts that 512 ranks share without padding.
models.SHAPES["experts"] = replace(models.SHAPES["moe"], experts=512, hidden=128, chosen=64)
LAYERS = dict.fromkeys(("1B", "8B", "experts"), 4)  # of 16, 32 and 16: the order of settings is the same
PRECISION = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
DEFAULT: dict[str, Any] = {}
FEW, KEEP, WIRE = {"reshard_after_forward": 8}, {"reshard_after_forward": False}, {"wire_dtype": BF16}
PAIRS, FOURS = {"blocks_per_call": 2}, {"blocks_per_call": 4}
HSDP = "a replica on each machine"


def token_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), torch.zeros(logits.shape[:2].numel(), dtype=torch.long))


@functools.cache
def rows_of(model: str, cards: int, *ranks: int) -> tuple[fsdp2.PlanRow, ...]:
    """Returns the rows of all settings: cards of 50 GB/s, NVLink, matrix products at 60 % of an H100's peak."""
    settings = [
        fsdp2.Setting(n, **each)
        for n in ranks
        for each in (DEFAULT, KEEP, WIRE, PAIRS, FOURS, *((FEW, {"replicas": n // 8}) if n > 8 else ()))
    ]
    plan = fsdp2.plan(
        models.make(model, LAYERS[model])[0],
        ranks=[*ranks],
        batch=lambda: torch.zeros(1, 4096, dtype=torch.long, device="meta"),
        loss=token_loss,
        policy=models.Block,
        mp_policy=PRECISION,
        settings=settings,
        link="50GB/s",
        machine_link="370GB/s",
        cards_per_machine=cards,
        flops=0.6 * 989e12,
    )
    return plan.rows


RANKS_OF = {"1B": (8, 64, 512), "8B": (8, 64), "experts": (8, 64, 512)}


def star(model: str, ranks: int, cards: int, among: list[Any]) -> Any:
    """Returns which of these settings is the best."""
    fields = {fsdp2.Setting(ranks, **({"replicas": ranks // 8} if each is HSDP else each)): each for each in among}
    rows = rows_of(model, cards, *(RANKS_OF[model] if cards == 8 else (ranks,)))
    return fields[next(row.setting for row in rows if row.setting in fields)]


@pytest.mark.parametrize(
    ("model", "ranks", "cards", "among", "best"),
    [
        ("1B", 512, 8, [DEFAULT, KEEP, FEW, HSDP, WIRE], HSDP),  # a small model, on many machines
        ("1B", 64, 8, [DEFAULT, WIRE], DEFAULT),
        ("1B", 512, 8, [DEFAULT, WIRE], DEFAULT),
        ("8B", 8, 8, [DEFAULT, WIRE], WIRE),  # inside one machine
        ("8B", 64, 8, [DEFAULT, HSDP, WIRE], DEFAULT),
        ("8B", 64, 1, [DEFAULT, FEW, HSDP, WIRE], FEW),  # one card a machine; keeping all would not fit
        ("8B", 64, 1, [DEFAULT, KEEP, FEW, HSDP, WIRE], KEEP),
        ("8B", 64, 1, [DEFAULT, WIRE], DEFAULT),
        ("experts", 8, 8, [DEFAULT, WIRE], WIRE),
        ("experts", 64, 8, [DEFAULT, FEW, HSDP, WIRE], FEW),
        ("experts", 64, 8, [DEFAULT, KEEP, FEW, HSDP, WIRE], KEEP),
        ("experts", 512, 8, [DEFAULT, KEEP, FEW, HSDP, WIRE], KEEP),
        ("1B", 512, 8, [DEFAULT, PAIRS], PAIRS),  # ranks are many: fewer, larger collectives
        ("1B", 512, 8, [DEFAULT, FOURS], FOURS),
    ],
)
def test_the_star_is_that_of_the_order_by_hand(model: str, ranks: int, cards: int, among: list[Any], best: Any) -> None:
    assert star(model, ranks, cards, among) == best
