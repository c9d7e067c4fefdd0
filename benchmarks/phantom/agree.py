"""Compares `fsdp2.plan` with the timeline: which setting each takes for the fastest, in eighteen cases.

    python -m benchmarks.phantom.agree --out FOLDER   (any Python; it records what FOLDER lacks, and prints a table)

Both are models with the same prices, and no collective was measured on a GPU. A plan counts what the engine computes
and sends, and puts that into a formula; the timeline replays, one by one, the calls of CUDA and NCCL that a step on the
phantom has issued. The host takes no time in either: a plan knows none. Nor does a plan know what other kernels than
matrix products take. It is told by `flops`: what the plain model reaches in a whole step of the timeline.
"""

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fsdp2
from fsdp2.compression import Compression
from fsdp2.planning.prediction import PlanRow

from . import models, timeline
from .prices import Machine
from .run import run

TOKENS, FEW_TOKENS = 4096, 512
LAYERS = {"8B": 8, "moe": 8}  # of 32 and 16; the 1B model has all
CLOSE = 1.012  # two settings whose times differ by less than that are as fast
SIMILAR = 1.15  # how far ratios to the default may be apart
SECONDS = 600
COLLECTIVES = ("gather", "reduce", "collective")  # kinds that the timeline counts
DEFAULT, KEEP, FEW, HSDP = "default", "keep", "k=8", "HSDP"
WIRE, BF16 = "wire bf16", "reduce bf16"
OPTIONS = {
    DEFAULT: (),
    KEEP: ("--keep",),
    FEW: ("--reshard", "8"),
    HSDP: (),
    WIRE: ("--wire-bf16",),
    BF16: ("--reduce-bf16",),
}


@dataclass(frozen=True)
class Case:
    """Describes a model, how many ranks train it on machines of eight, the cards of each, and settings to choose from.

    The settings have the default among them.
    """

    model: str
    ranks: int
    cards: int
    settings: tuple[str, ...]
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        tokens = f", {self.tokens} tokens" if self.tokens != TOKENS else ""
        return f"{self.model}, N={self.ranks}, {self.cards} card{'s' * (self.cards > 1)}{tokens}"


CASES = (
    Case("1B", 8, 8, (DEFAULT, KEEP, WIRE, BF16)),
    Case("1B", 64, 8, (DEFAULT, FEW, HSDP, WIRE)),
    Case("1B", 64, 1, (DEFAULT, FEW, HSDP, WIRE)),
    Case("1B", 512, 8, (DEFAULT, KEEP, HSDP, WIRE)),
    Case("8B", 8, 8, (DEFAULT, WIRE, BF16)),
    Case("8B", 64, 8, (DEFAULT, HSDP, WIRE)),
    Case("8B", 64, 1, (DEFAULT, KEEP, FEW, HSDP)),
    Case("moe", 8, 8, (DEFAULT, WIRE)),
    Case("moe", 64, 8, (DEFAULT, FEW, HSDP, WIRE)),
    Case("moe", 64, 1, (DEFAULT, KEEP, FEW, HSDP)),
    Case("1B", 512, 1, (DEFAULT, HSDP)),
    Case("8B", 512, 8, (DEFAULT, HSDP)),
    Case("1B", 8, 8, (DEFAULT, KEEP), FEW_TOKENS),
    Case("1B", 512, 8, (DEFAULT, HSDP), FEW_TOKENS),
    Case("8B", 8, 8, (DEFAULT, KEEP), FEW_TOKENS),
    Case("8B", 64, 8, (DEFAULT, KEEP), FEW_TOKENS),
    Case("8B", 512, 8, (DEFAULT, HSDP), FEW_TOKENS),
    Case("moe", 64, 8, (DEFAULT, KEEP, FEW), FEW_TOKENS),
)


# ---- the timeline


def options_of(case: Case, setting: str) -> list[str]:
    """Returns the options of `phantom.record`."""
    shards = 8 if setting == HSDP else case.ranks
    sizes = {"--ranks": shards, "--replicas": case.ranks // shards, "--tokens": case.tokens, "--steps": 1}
    sizes["--layers"] = LAYERS.get(case.model, 0)
    return ["--model", case.model, *(str(each) for size in sizes.items() for each in size), *OPTIONS[setting]]


def path_of(out: Path, case: Case, setting: str) -> Path:
    return out / f"{case.model} {case.ranks} {setting} {case.tokens}" / "fsdp2.json"


def path_of_plain(out: Path, case: Case) -> Path:
    return out / f"{case.model} {case.tokens}" / "plain.json"


def record(out: Path, cases: Iterable[Case]) -> None:
    """Records a step of each setting of the cases into `out`, several at a time; what lies there is kept."""
    wanted = {path_of(out, case, setting): options_of(case, setting) for case in cases for setting in case.settings}
    wanted |= {path_of_plain(out, case): options_of(case, DEFAULT) for case in cases}
    missing = [path for path in wanted if not path.exists()]

    def start(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        options = [
            "-W",
            "ignore",
            "-m",
            "benchmarks.phantom.record",
            "--out",
            str(path.parent),
            *wanted[path],
            path.stem,
        ]
        run([*options, "--turns"], SECONDS, stdin="\n")  # one turn, for one step

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(start, missing))


def compute_ms(out: Path, case: Case) -> float:
    """Returns how long the plain model computes in the timeline, without an optimizer."""
    text = path_of_plain(out, case).read_text()
    machine = replace(timeline.without_host(Machine()), optimizer=0.0)
    return float(timeline.replay(json.loads(text), machine)["step"]) / 1e3


def replayed(out: Path, case: Case) -> dict[str, dict[str, Any]]:
    """Returns setting -> what `timeline.replay` returns, with a host that takes no time."""
    machine = timeline.without_host(replace(Machine(), cards=case.cards))
    records = {setting: json.loads(path_of(out, case, setting).read_text()) for setting in case.settings}
    return {setting: timeline.replay(each, machine) for setting, each in records.items()}


# ---- plan


def _loss(logits: Tensor) -> Tensor:
    """The loss of `record.run_step`."""
    tokens = torch.zeros(logits.shape[:2].numel(), dtype=torch.long)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens)


FIELDS: dict[str, dict[str, Any]] = {KEEP: {"reshard_after_forward": False}, FEW: {"reshard_after_forward": 8}}


def predictions(case: Case, flops: float) -> dict[str, PlanRow]:
    """Returns setting -> what `fsdp2.plan` predicts. `flops`: operations per second that a rank reaches."""
    machine, found = Machine(), {}
    for name in case.settings:
        plan = fsdp2.plan(
            models.make(case.model, LAYERS.get(case.model, 0))[0],
            ranks=case.ranks,
            batch=lambda: torch.zeros(1, case.tokens, dtype=torch.long, device="meta"),
            loss=_loss,
            policy=models.Block,
            mp_policy=fsdp2.MixedPrecisionPolicy(
                torch.bfloat16,
                torch.bfloat16 if name == BF16 else torch.float32,
                compression=Compression(reduce_scatter=torch.bfloat16 if name == WIRE else None),
            ),
            settings=[{"replicas": case.ranks // 8} if name == HSDP else FIELDS.get(name, {})],
            machine=fsdp2.Machine(link=machine.nvlink * 1e9, network=machine.card * 1e9 * case.cards / 8, flops=flops),
        )
        found[name] = plan.best
    return found


# ---- both


@dataclass(frozen=True)
class Result:
    """Holds ms of a step by setting: plan's, and the timeline's; and how many collectives plan predicts, and how many
    were recorded.
    """

    case: Case
    by_plan: Mapping[str, float]
    by_timeline: Mapping[str, float]
    launches: Mapping[str, tuple[int, int]]

    @property
    def agrees(self) -> bool:
        """True if plan's star is the fastest in the timeline, or as fast."""
        return self.by_timeline[star(self.by_plan)] <= CLOSE * min(self.by_timeline.values())

    def off_by(self, setting: str) -> float:
        """Returns plan's ratio to the default in that of the timeline."""
        return ratio(self.by_plan, setting) / ratio(self.by_timeline, setting)


def star(times: Mapping[str, float]) -> str:
    return min(times, key=times.__getitem__)


def ratio(times: Mapping[str, float], setting: str) -> float:
    return times[setting] / times[DEFAULT]


def compare(out: Path, case: Case) -> Result:
    """Returns the times of one case, which is recorded in `out`."""
    default = predictions(Case(case.model, case.ranks, case.cards, (DEFAULT,), case.tokens), Machine().flops)[DEFAULT]
    found = predictions(case, default.flops / compute_ms(out, case) * 1e3)
    by_plan = {name: (each.time or 0.0) * 1e3 for name, each in found.items()}
    recorded = replayed(out, case)
    counts = {name: sum(each["counts"].get(kind, 0) for kind in COLLECTIVES) for name, each in recorded.items()}
    launches = {name: (sum(found[name].launched.values()), count) for name, count in counts.items()}
    return Result(case, by_plan, {name: each["step"] / 1e3 for name, each in recorded.items()}, launches)


def table(results: Sequence[Result]) -> str:
    """Returns a line for each case and setting: ratios to the default, and the ms of the default. Stars are bold."""
    lines = [
        "| case | setting | plan | timeline |",
        "|---|---|---|---|",
    ]
    for each in results:
        columns = (each.by_plan, each.by_timeline)
        for name in each.case.settings:
            cells = []
            for times in columns:
                cell = f"{times[name]:.1f} ms" if name == DEFAULT else f"{ratio(times, name):.2f}x"
                cells.append(f"**{cell}**" if name == star(times) else cell)
            lines.append(f"| {each.case.name} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_out(description: str | None) -> Path:
    """Returns the folder for recordings that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings, which are kept")
    out: Path = parser.parse_args().out
    return out


def main() -> None:
    out = read_out(__doc__)
    record(out, CASES)
    results = [compare(out, case) for case in CASES]
    print(table(results))
    for each in results:
        if not each.agrees:
            print(f"{each.case.name}: plan takes {star(each.by_plan)}, the timeline {star(each.by_timeline)}")


if __name__ == "__main__":
    main()
