"""Predicts what gathers and reductions in two hops (`shard_across`) gain, by `fsdp2.plan` and by the timeline.

    python -m phantom.two_hops --out FOLDER   (with any Python; it records what FOLDER lacks, and prints a table)

A plan runs the engine around a recording without values; the timeline replays the calls of CUDA and NCCL that a step on
the phantom has issued. Both have the same prices, by where the ranks of a collective are; nothing was measured. Torch
2.11, which the phantom has, sorts the ranks of process groups: `record.py` says what stands in for their order.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fsdp2
from fsdp2.planning.network import NCCL_LATENCY, Latency, Network, Ranks

from . import models, timeline
from .agree import LAYERS, SECONDS, TOKENS, _loss, read_out
from .prices import Machine, Ring
from .run import run

CASES = (("1B", 64, 8), ("1B", 512, 8), ("8B", 64, 8), ("8B", 512, 8), ("8B", 64, 1))
CASES += (("moe", 64, 8), ("moe", 64, 1), ("moe", 512, 8))
# What the plain model reaches in a whole step of the timeline: benchmarks/results/2026-11-27-plan-agrees.md.
FLOPS = {"1B": 546e12, "8B": 631e12, "moe": 446e12}
FIELDS: dict[str, dict[str, Any]] = {"one hop": {}, "k=8": {"reshard_after_forward": 8}}
SETTINGS = (*FIELDS, "two hops", "two hops, k=8")
# Slow rails: a ring with one rank on each machine takes 2.4 times the latency, and reaches 0.84 of the bandwidth.
PRICES = {"half": 0.5, "as is": 1.0, "double": 2.0, "slow rails": 1.0}
SLOW_LATENCY, SLOW_BYTES = 2.4, 1 / 0.84


@contextmanager
def slow_rails() -> Iterator[None]:
    """Context: rings with one rank on each machine are slower, in both models."""
    seconds, between, latency, busy = Latency.seconds, Network._between, Ring.latency, Ring.busy

    def slower(is_rail: bool, value: float, factor: float) -> float:
        return value * factor if is_rail else value

    def busy_of(ring: Ring, *args: Any) -> dict[str, float]:
        is_rail = ring.local == 1 and ring.machines > 1
        return {link: slower(is_rail, time, SLOW_BYTES) for link, time in busy(ring, *args).items()}

    def is_rail(ranks: Ranks) -> bool:
        return ranks.on_each == 1 and ranks.machines > 1

    patches = (
        (Latency, "seconds", lambda of, ranks, *a: slower(is_rail(ranks), seconds(of, ranks, *a), SLOW_LATENCY)),
        (Network, "_between", lambda of, nbytes, ranks: slower(is_rail(ranks), between(of, nbytes, ranks), SLOW_BYTES)),
        (Ring, "latency", lambda of, *a: slower(of.local == 1 and of.machines > 1, latency(of, *a), SLOW_LATENCY)),
        (Ring, "busy", busy_of),
    )
    started = [mock.patch.object(*patch) for patch in patches]
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        for patch in started:
            patch.stop()


# ---- the timeline


def path_of(out: Path, model: str, ranks: int, setting: str) -> Path:
    return out / f"{model} {ranks} {setting}" / "fsdp2.json"


def record(out: Path) -> None:
    """Records a step of each case and setting into `out`; what lies there is kept."""

    def start(wanted: tuple[str, int, str]) -> None:
        model, ranks, setting = wanted
        path = path_of(out, model, ranks, setting)
        path.parent.mkdir(parents=True, exist_ok=True)
        sizes = {"--ranks": ranks, "--tokens": TOKENS, "--steps": 1, "--layers": LAYERS.get(model, 0)}
        sizes |= {"--reshard": 8} if "k=8" in setting else {}
        sizes |= {"--machines": ranks // 8} if "two hops" in setting else {}
        sizes |= {"--shard-dim": 1} if (model, ranks) == ("moe", 512) else {}  # it has 64 experts
        options = ["--model", model, *(str(each) for size in sizes.items() for each in size), path.stem]
        run(
            ["-W", "ignore", "-m", "phantom.record", "--out", str(path.parent), *options, "--turns"],
            SECONDS,
            stdin="\n",
        )

    wanted = {(model, ranks, setting): None for model, ranks, _ in CASES for setting in SETTINGS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(start, [each for each in wanted if not path_of(out, *each).exists()]))


def replayed(out: Path, model: str, ranks: int, cards: int, latency: float) -> dict[str, float]:
    """Returns setting -> ms of a step in the timeline, with a host that takes no time."""
    machine = timeline.without_host(Machine(cards=cards, latency=latency))
    records = {setting: json.loads(path_of(out, model, ranks, setting).read_text()) for setting in SETTINGS}
    return {setting: timeline.replay(each, machine)["step"] / 1e3 for setting, each in records.items()}


# ---- plan


def predicted(model: str, ranks: int, cards: int, latency: float) -> dict[str, fsdp2.Prediction]:
    """Returns setting -> what `fsdp2.plan` predicts."""
    machine, hops = Machine(), {"machines": ranks // 8}
    fields = FIELDS | {f"two hops{', k=8' if each else ''}": {**each, **hops} for each in FIELDS.values()}
    times = replace(NCCL_LATENCY, **{name: latency * value for name, value in vars(NCCL_LATENCY).items()})
    if (model, ranks) == ("moe", 512):
        fields = {name: {**each, "cheapest_dims": True} for name, each in fields.items()}
    plan = fsdp2.plan(
        models.make(model, LAYERS.get(model, 0))[0],
        ranks=ranks,
        batch=lambda: torch.zeros(1, TOKENS, dtype=torch.long, device="meta"),
        loss=_loss,
        policy=models.Block,
        mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        settings=list(fields.values()),
        link=machine.card * 1e9,
        machine_link=machine.nvlink * 1e9,
        cards_per_machine=cards,
        latency=(times.base, times.inside, times.between),
        flops=FLOPS[model],
    )
    rows = {row.setting: row.prediction for row in plan.rows}
    return {name: rows[fsdp2.Setting(ranks, **each)] for name, each in fields.items()}


def seconds(model: str, ranks: int, cards: int, latency: float) -> dict[str, float]:
    """Returns setting -> the time of a step."""
    return {name: each.time or 0.0 for name, each in predicted(model, ranks, cards, latency).items()}


def main() -> None:
    out = read_out(__doc__)
    record(out)
    print("| model | ranks | cards | latency | one hop, ms | k=8 | two hops | two hops, k=8 |\n|" + "---|" * 8)
    for model, ranks, cards in CASES:
        for name, factor in PRICES.items():
            with slow_rails() if name == "slow rails" else mock.MagicMock():
                by_plan = {k: v * 1e3 for k, v in seconds(model, ranks, cards, factor).items()}
                by_timeline = replayed(out, model, ranks, cards, factor)
            bases = [times["one hop"] for times in (by_plan, by_timeline)]
            ratios = [
                f"{by_plan[each] / bases[0]:.2f}, {by_timeline[each] / bases[1]:.2f}"
                for each in SETTINGS
                if each != "one hop"
            ]
            print(
                f"| {model} | {ranks} | {cards} | {name} | {bases[0]:.0f}, {bases[1]:.0f} | {' | '.join(ratios)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
