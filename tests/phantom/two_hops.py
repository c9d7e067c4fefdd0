"""Predicts by `fsdp2.plan` what gathers and reductions in two hops (`shard_across`) gain, and prints a table.

    python -m phantom.two_hops      (with any Python; it needs no phantom)

A plan runs the engine around a recording without values; its prices of collectives are NCCL's own table by where their
ranks are (fsdp2/planning/network.py). Nothing was measured. The phantom has torch 2.11, which sorts the ranks of
process groups, so that two hops can't be recorded there.
"""

from dataclasses import replace
from typing import Any

import torch

import fsdp2
from fsdp2.planning.network import NCCL_LATENCY

from . import models
from .agree import LAYERS, TOKENS, _loss
from .prices import Machine

CASES = (("1B", 64, 8), ("1B", 512, 8), ("8B", 64, 8), ("8B", 64, 1), ("moe", 64, 8), ("moe", 64, 1))
# What the plain model reaches in a whole step of the timeline: benchmarks/results/2026-11-26-plan-agrees.md.
FLOPS = {"1B": 546e12, "8B": 631e12, "moe": 446e12}
FIELDS: dict[str, dict[str, Any]] = {"one hop": {}, "k=8": {"reshard_after_forward": 8}}
LATENCIES = {"half": 0.5, "as is": 1.0, "double": 2.0}


def seconds(model: str, ranks: int, cards: int, latency: float) -> dict[str, float]:
    """Returns setting -> the time of a step."""
    machine, hops = Machine(), {"machines": ranks // 8}
    fields = FIELDS | {f"two hops{', k=8' if each else ''}": {**each, **hops} for each in FIELDS.values()}
    times = replace(NCCL_LATENCY, **{name: latency * value for name, value in vars(NCCL_LATENCY).items()})
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
    rows = {row.setting: row.prediction.time for row in plan.rows}
    return {name: rows[fsdp2.Setting(ranks, **each)] or 0.0 for name, each in fields.items()}


def main() -> None:
    print("| model | ranks | cards | latency | one hop, ms | k=8 | two hops | two hops, k=8 |\n|" + "---|" * 8)
    for model, ranks, cards in CASES:
        for name, factor in LATENCIES.items():
            found = seconds(model, ranks, cards, factor)
            base = found["one hop"]
            ratios = " | ".join(f"{value / base:.3f}" for value in list(found.values())[1:])
            print(f"| {model} | {ranks} | {cards} | {name} | {base * 1e3:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
