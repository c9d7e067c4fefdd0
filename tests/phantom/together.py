"""Replays steps with several schedules at once, beside torch's FSDP2 at its defaults, and plans them.

    python -m phantom.together --out FOLDER     (with any Python; it records what FOLDER lacks, and prints tables)

A combination is a tuple of parts, each of which is something that a user can write. All are recorded on the phantom
with fused AdamW, and replayed with a host that takes no time. Nothing was measured: README.md has the prices.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsdp2

from . import models, timeline
from .agree import TOKENS, _loss, read_out
from .prices import Machine
from .run import run
from .two_hops import FLOPS

SECONDS = 1800
MODELS = {"1B": "Llama 1B", "8B": "Llama 8B", "moe": "experts 7B"}
CASES = tuple((model, ranks) for model in MODELS for ranks in (8, 64, 512))
LATE, ROWS = "late", "rows"
TWO, KEEP, FEW, HOPS, AHEAD = "two blocks", "keep", "k=8", "hops", "2 ahead"
Parts = tuple[str, ...]
DEFAULT: Parts = ()
BOTH: Parts = (LATE, ROWS)
TORCH: Parts = ("torch",)
# What is recorded of each case in addition to both.
MORE: dict[tuple[str, int], tuple[Parts, ...]] = {
    ("1B", 8): ((KEEP,),),
    ("1B", 64): ((KEEP,), (HOPS,)),
    ("1B", 512): ((TWO,), (HOPS,), (HOPS, TWO)),
    ("8B", 8): ((KEEP,),),
    ("8B", 64): ((KEEP,), (HOPS,)),
    ("8B", 512): ((TWO,), (HOPS,)),
    ("moe", 8): ((KEEP,), (AHEAD,)),
    ("moe", 64): ((KEEP,), (HOPS,), (HOPS, FEW), (HOPS, KEEP)),
    ("moe", 512): ((KEEP,), (HOPS,), (HOPS, FEW), (HOPS, KEEP)),
}
PRICES: dict[str, dict[str, float]] = {
    "as is": {},
    "half the latency": {"latency": 0.5},
    "twice the latency": {"latency": 2.0},
    "beside for 0.3": {"copy_contention": 0.3},
    "beside for nothing": {"copy_contention": 0.0},
    "NCCL takes 10 %": {"contention": 0.1},
}
PLANNED = (("1B", 8), ("1B", 512), ("8B", 64), ("moe", 64))
MEMORY = ("allocated", "reserved")


def combinations(model: str, ranks: int) -> tuple[Parts, ...]:
    """Returns what is recorded of a case: torch's default, the default, one part after the other, and what is more."""
    return (TORCH, DEFAULT, (LATE,), BOTH, *(BOTH + each for each in MORE[model, ranks]))


def name_of(parts: Parts) -> str:
    return ", ".join(parts) or "default"


# ---- the timeline


def options_of(model: str, ranks: int, parts: Parts) -> list[str]:
    """Returns the options of `phantom.record`."""
    sizes: dict[str, Any] = {"--model": model, "--ranks": ranks, "--tokens": TOKENS, "--steps": 1}
    sizes |= {"--blocks": 2} if TWO in parts else {}
    sizes |= {"--reshard": 8} if FEW in parts else {}
    sizes |= {"--machines": ranks // 8} if HOPS in parts else {}
    sizes |= {"--prefetch-mib": 2 * 803} if AHEAD in parts else {}  # two blocks of experts in bf16
    sizes |= {"--shard-dim": 1} if (model, ranks) == ("moe", 512) else {}  # as cheapest_placement: it has 64 experts
    flags = {LATE: "--beside-forward", ROWS: "--embed-by-rows", KEEP: "--keep"}
    chosen = [flags[each] for each in parts if each in flags]
    return [*(str(each) for size in sizes.items() for each in size), "--optimizer", *chosen]


def path_of(out: Path, model: str, ranks: int, parts: Parts) -> Path:
    name = "torch" if parts == TORCH else "fsdp2"
    return out / f"{model} {ranks} {name_of(parts)}" / f"{name}.json"


def record(out: Path, wanted: Iterable[tuple[str, int, Parts]]) -> None:
    """Records a step of each combination into `out`; what lies there is kept."""

    def start(each: tuple[str, int, Parts]) -> None:
        path = path_of(out, *each)
        path.parent.mkdir(parents=True, exist_ok=True)
        options = ["-W", "ignore", "-m", "phantom.record", "--out", str(path.parent), *options_of(*each), path.stem]
        run([*options, "--turns"], SECONDS, stdin="\n")  # one turn, for one step

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(start, [each for each in wanted if not path_of(out, *each).exists()]))


def recorded(out: Path, model: str, ranks: int, parts: Parts) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path_of(out, model, ranks, parts).read_text())
    return found


def ms_of(record: dict[str, Any], prices: Mapping[str, float]) -> float:
    """Returns the ms of a step in the timeline, with a host that takes no time."""
    machine = timeline.without_host(replace(Machine(), **prices))  # type: ignore[arg-type]
    return float(timeline.replay(record, machine)["step"]) / 1e3


def memory_of(record: dict[str, Any]) -> list[float]:
    """Returns the peaks allocated and reserved, in GiB."""
    return [record["memory"][name] / 2**30 for name in MEMORY]


def steps_of(out: Path, model: str, ranks: int) -> dict[Parts, tuple[float, list[float]]]:
    """Returns combination -> ms of a step, and its memory."""
    found = {parts: recorded(out, model, ranks, parts) for parts in combinations(model, ranks)}
    return {parts: (ms_of(record, {}), memory_of(record)) for parts, record in found.items()}


def best_of(steps: Mapping[Parts, tuple[float, list[float]]]) -> tuple[Parts, Parts]:
    """Returns the fastest combination that gathers again for backward, and the fastest of all."""
    own = [parts for parts in steps if parts != TORCH]

    def fastest(among: Sequence[Parts]) -> Parts:
        return min(among, key=lambda parts: steps[parts][0])

    return fastest([parts for parts in own if KEEP not in parts]), fastest(own)


# ---- plan


def predicted(model: str, ranks: int) -> dict[Parts, float]:
    """Returns combination -> ms of a step by `fsdp2.plan`."""
    machine, fields = Machine(), dict[Parts, dict[str, Any]]()
    meanings: dict[str, dict[str, Any]] = {
        LATE: {"beside_forward": True},
        ROWS: {"by_rows": ("embedding",)},
        TWO: {"blocks_per_call": 2},
        KEEP: {"reshard_after_forward": False},
        FEW: {"reshard_after_forward": 8},
        HOPS: {"machines": ranks // 8},
    }
    for parts in combinations(model, ranks):
        if parts != TORCH and AHEAD not in parts:
            fields[parts] = {name: value for part in parts for name, value in meanings[part].items()}
    plan = fsdp2.plan(
        models.make(model)[0],
        ranks=ranks,
        batch=lambda: torch.zeros(1, TOKENS, dtype=torch.long, device="meta"),
        loss=_loss,
        policy=models.Block,
        mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        settings=[*fields.values()],
        link=machine.card * 1e9,
        machine_link=machine.nvlink * 1e9,
        cards_per_machine=machine.cards,
        flops=FLOPS[model],
    )
    rows = {row.setting: row.prediction for row in plan.rows}
    return {parts: (rows[fsdp2.Setting(ranks, **each)].time or 0.0) * 1e3 for parts, each in fields.items()}


# ---- report


def table_of_steps(out: Path) -> str:
    """Returns a line for each combination: ms, share of torch's step, memory."""
    lines = ["| case | combination | ms | of torch's | allocated, reserved, GiB |", "|---" * 5 + "|"]
    for model, ranks in CASES:
        steps = steps_of(out, model, ranks)
        best = best_of(steps)
        for parts, (ms, memory) in steps.items():
            ratio = f"{ms / steps[TORCH][0]:.3f}x"
            ratio = f"**{ratio}**" if parts in best else ratio
            sizes = ", ".join(f"{each:.2f}" for each in memory)
            lines.append(f"| {MODELS[model]}, {ranks} | {name_of(parts)} | {ms:.1f} | {ratio} | {sizes} |")
    return "\n".join(lines)


def table_of_prices(out: Path) -> str:
    """Returns the share of torch's step under all prices: the default, and the fastest combination without `keep`."""
    lines = ["| case | combination | " + " | ".join(PRICES) + " |", "|---" * (2 + len(PRICES)) + "|"]
    for model, ranks in CASES:
        best, _ = best_of(steps_of(out, model, ranks))
        base = recorded(out, model, ranks, TORCH)
        theirs = [ms_of(base, prices) for prices in PRICES.values()]
        for parts in (DEFAULT, best):
            own = recorded(out, model, ranks, parts)
            cells = [f"{ms_of(own, p) / t:.3f}x" for p, t in zip(PRICES.values(), theirs, strict=True)]
            lines.append(f"| {MODELS[model]}, {ranks} | {name_of(parts)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_plans(out: Path) -> str:
    """Returns what plan and the timeline say, in relation to the default."""
    lines = ["| case | combination | plan | timeline |", "|---" * 4 + "|"]
    for model, ranks in PLANNED:
        by_plan = predicted(model, ranks)
        steps = steps_of(out, model, ranks)
        for parts, ms in by_plan.items():
            ratios = f"{ms / by_plan[DEFAULT]:.3f}x | {steps[parts][0] / steps[DEFAULT][0]:.3f}x"
            lines.append(f"| {MODELS[model]}, {ranks} | {name_of(parts)} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    out = read_out(__doc__)
    record(out, [(*case, parts) for case in CASES for parts in combinations(*case)])
    for table in (table_of_steps, table_of_prices, table_of_plans):
        print(table(out), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
