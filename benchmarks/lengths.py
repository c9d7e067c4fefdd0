"""Measures what micro-batches of unequal lengths cost on real ranks (gloo), and what each way to train saves of that.

    python -m benchmarks.lengths                   2 and 4 ranks; about 10 minutes
    python -m benchmarks.lengths --quick

A step has several micro-batches, of one sequence each. Blocks sleep as long as their sequence has tokens, in backward
twice as long, so that ranks do not take each other's cores. Lengths are log-normal, of median 300 tokens and sigma 1,
cut at 8,192: the long tail of instruction data (mean 470, one in ten above 1,080). Attention would make it longer: its
cost grows with the square of the length.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .jobs import ROOT
from .meters import AllocationMeter
from .report import Row, describe_machine, format_table

HERE = Path(__file__).resolve().parent
BLOCKS, DIM, ROWS = 4, 256, 1  # 256 KiB a block, and next to nothing to compute
FOR_MEMORY = {"blocks": 24, "dim": 512}
MEDIAN, SIGMA, LONGEST = 300, 1.0, 8192
SECONDS_OF_A_TOKEN = 40e-6  # of a block's forward; its backward takes twice that
MICRO_BATCHES = (1, 4, 16)

Sequences = list[list[int]]
"""The lengths of the micro-batches of each rank."""


# ---- what is trained


class _Busy(torch.autograd.Function):
    """Is an identity that takes `seconds` in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        return torch.tanh(_Busy.apply(self.matrix(x), tokens * SECONDS_OF_A_TOKEN))


class Sleepers(nn.Module):
    """Holds equal blocks, and no parameters in the root."""

    def __init__(self, blocks: int = BLOCKS, dim: int = DIM) -> None:
        super().__init__()
        self.blocks, self.dim = nn.ModuleList(_Block(dim) for _ in range(blocks)), dim

    def forward(self, x: Tensor, tokens: int) -> Tensor:
        for block in self.blocks:
            x = block(x, tokens)
        return x


def _loss_sum(model: Any, tokens: int) -> Tensor:
    x = torch.randn(ROWS, model.dim, generator=torch.Generator().manual_seed(tokens))
    loss: Tensor = model(x, tokens).square().mean() * tokens
    return loss


# ---- ways to train: each makes a model, and returns its step


Step = Callable[[Sequence[int]], object]


def _shard(library: Any, sizes: dict[str, int], **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Sleepers(**sizes)
    for block in model.blocks:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def _of_fsdp2(model: Any, on_demand: bool = False, counts: bool = True) -> Step:
    import fsdp2

    def step(lengths: Sequence[int]) -> None:
        with fsdp2.accumulate(model, num_batches=len(lengths) if counts else None, on_demand=on_demand) as acc:
            for tokens in lengths:
                acc.backward(_loss_sum(model, tokens), weight=tokens)

    return step


def _of_torch(model: Any, keeps: bool = False) -> Step:
    def step(lengths: Sequence[int]) -> None:
        total = torch.tensor(float(sum(lengths)))
        dist.all_reduce(total)
        for i, tokens in enumerate(lengths):
            is_last = i == len(lengths) - 1
            model.set_requires_gradient_sync(is_last)
            if keeps:
                model.set_reshard_after_backward(is_last)
            (_loss_sum(model, tokens) * (dist.get_world_size() / total)).backward()

    return step


def make_ways(**sizes: int) -> dict[str, tuple[Any, Step]]:
    """Returns name -> the model and its step, which takes the lengths of this rank's micro-batches."""
    from torch.distributed import fsdp as torch_fsdp

    import fsdp2

    ways: dict[str, tuple[Any, Step]] = {}
    model = _shard(fsdp2, sizes)
    ways["fsdp2"] = model, _of_fsdp2(model)
    model = _shard(fsdp2, sizes, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    ways["kept"] = model, _of_fsdp2(model, counts=False)
    model = _shard(fsdp2, sizes, reshard_after_forward=False)
    for block in [*model.blocks][::2]:
        block.set_reshard_after_backward(False)
    for block in [*model.blocks][1::2]:
        block.set_reshard_after_forward(True)
    ways["half kept"] = model, _of_fsdp2(model, counts=False)
    model = _shard(fsdp2, sizes)
    ways["on demand"] = model, _of_fsdp2(model, on_demand=True, counts=False)
    if dist.get_world_size() == 4:
        model = _shard(fsdp2, sizes, mesh=init_device_mesh("cpu", (2, 2)))
        ways["replicas"] = model, _of_fsdp2(model)
    model = _shard(torch_fsdp, sizes)
    ways["torch"] = model, _of_torch(model)
    model = _shard(torch_fsdp, sizes, reshard_after_forward=False)
    ways["torch kept"] = model, _of_torch(model, keeps=True)
    return ways


# How the lengths are dealt -> the ways that are measured so, if not all.
MEASURED = {"balanced micro-batches": ("fsdp2", "kept", "on demand", "torch"), "balanced sums": ("kept", "on demand")}


# ---- which sequences each rank gets


def draw(source: random.Random, ranks: int, number: int) -> Sequences:
    """Returns `number` lengths for each rank, as they come."""
    return [
        [min(LONGEST, max(8, int(MEDIAN * source.lognormvariate(0, SIGMA)))) for _ in range(number)]
        for _ in range(ranks)
    ]


def deal(drawn: Sequences, together: bool) -> Sequences:
    """Returns the same lengths, dealt by fsdp2.balance."""
    import fsdp2

    flat = [tokens for own in drawn for tokens in own]
    dealt = fsdp2.balance(flat, len(drawn), num_batches=len(drawn[0]) if together else None)
    return [[flat[i] for batch in own for i in batch] for own in dealt]


DEALS: dict[str, Callable[[Sequences], Sequences]] = {
    "as drawn": lambda drawn: drawn,
    "balanced micro-batches": lambda drawn: deal(drawn, together=True),
    "balanced sums": lambda drawn: deal(drawn, together=False),
}


def seconds_of(tokens: float) -> float:
    """Returns how long a rank sleeps for so many tokens."""
    return 3 * BLOCKS * SECONDS_OF_A_TOKEN * tokens


def by_lengths(steps: int = 1000) -> str:
    """Returns a table of what the lengths alone make of steps that cost nothing besides: how many times as fast as with
    a meeting in each micro-batch.
    """
    lines = [
        "| ranks, micro-batches | meets once | balanced micro-batches | meets once, balanced sums | no waits at all |"
    ]
    lines.append("|---|---|---|---|---|")
    for ranks in (2, 4):
        for number in (1, 4, 8, 16):
            source, sums = random.Random(1), [0.0] * 5
            for _ in range(steps):
                drawn = draw(source, ranks, number)
                together, once = (deal(drawn, together=each) for each in (True, False))
                found = [sum(map(max, zip(*each, strict=True))) for each in (drawn, together)]
                found += [max(map(sum, each)) for each in (drawn, once)] + [sum(map(sum, drawn)) / ranks]
                sums = [a + b for a, b in zip(sums, found, strict=True)]
            as_it_is, balanced, meets_once, balanced_once, least = sums
            ways = (meets_once, balanced, balanced_once, least)
            lines.append(f"| {ranks}, {number} | {' | '.join(f'{as_it_is / each:.2f}x' for each in ways)} |")
    return "\n".join(lines)


# ---- on each rank


def measure(rank: int, ranks: int, quick: bool) -> list[Row]:
    """Returns the same rows on every rank. All ranks must call it."""
    ways, source, turns = make_ways(), random.Random(ranks), random.Random(0)
    rows = [_compare_bits(ways, draw(source, ranks, 3)[rank], ranks)]
    for number in MICRO_BATCHES[1:2] if quick else MICRO_BATCHES:
        times: dict[str, dict[str, list[float]]] = {name: {} for name in DEALS}
        bounds: dict[str, list[tuple[float, float]]] = {name: [] for name in DEALS}
        for _ in range(2 if quick else 3):
            drawn = draw(source, ranks, number)
            for name, choose in DEALS.items():
                dealt = choose(drawn)
                sums = [seconds_of(sum(own)) for own in dealt]
                bounds[name].append((statistics.mean(sums), max(sums)))
                for way in turns.sample([*ways], len(ways)):
                    if way in MEASURED.get(name, ways):
                        seconds = _time(ways[way][0], lambda: ways[way][1](dealt[rank]))  # noqa: B023
                        times[name].setdefault(way, []).append(seconds)
        for name, of_way in times.items():
            if name != "as drawn":  # a ratio compares with fsdp2 as it is, on the same lengths as they were drawn
                of_way["as it is"] = times["as drawn"]["fsdp2"]
            else:
                of_way["as it is"] = of_way["fsdp2"]
            means = {way: statistics.mean(each) * 1e3 for way, each in of_way.items()}
            limit, slowest = (statistics.mean(each) * 1e3 for each in zip(*bounds[name], strict=True))
            setting = f"{ranks} ranks, {number} micro-batches, {name}"
            rows.append(Row("lengths", "step ms", setting, means, of_way, slowest, limit))
    rows.append(_measure_memory([1] * 3, ranks))
    return rows


def _time(model: nn.Module, step: Callable[[], object]) -> float:
    """Returns the seconds of the slower rank. Every rank must call it."""
    dist.barrier()
    start = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0)  # weights change: what is kept is gathered again
    model.zero_grad()
    return float(elapsed)


def _compare_bits(ways: dict[str, tuple[Any, Step]], lengths: Sequence[int], ranks: int) -> Row:
    """Returns how many elements of the gradients differ in bits from those of fsdp2 as it is."""
    gradients = {}
    for name, (model, step) in ways.items():
        step(lengths)
        gradients[name] = torch.cat([param.grad.to_local().flatten() for param in model.parameters()])
        model.zero_grad()
    ours, differ = gradients["fsdp2"], {}
    for name, theirs in gradients.items():
        if "torch" in name or name == "replicas":  # which divide or sum in another order
            continue
        count = (ours.view(torch.int32) != theirs.view(torch.int32)).sum()
        dist.all_reduce(count)
        differ[name] = float(count)
    assert bool(ours.any()), "there are gradients"
    return Row("lengths", "elements of gradients with other bits", f"{ranks} ranks, 3 micro-batches", differ)


def _measure_memory(lengths: Sequence[int], ranks: int) -> Row:
    """Returns the peak of each way, in its second step, above the shards."""
    from fsdp2.engine.state import require_state
    from fsdp2.features.on_demand import OnDemandGathers

    whole, peaks = FOR_MEMORY["blocks"] * FOR_MEMORY["dim"] ** 2 * 4, {}
    for name in make_ways():
        model, step = make_ways(**FOR_MEMORY)[name]
        step(lengths)
        model.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.0)
        with AllocationMeter() as meter, meter.region("step"):
            step(lengths)
        shared = 0
        if name == "on demand":
            shared = require_state(model).root.events.of(OnDemandGathers).nbytes
        peaks[name] = (meter.peak_during("step") - meter.allocated_before("step") + shared) / whole
        del model, step
    quantity = "peak of a step above the resting shards, in units of all weights; shared memory counts"
    return Row("lengths", quantity, f"{ranks} ranks, 3 micro-batches", peaks)


def work(rank: int, ranks: int, store: str, quick: bool, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    rows = measure(rank, ranks, quick)
    if rank == 0:
        out.write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks


def run(ranks: int, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.lengths", "--ranks", str(ranks), "--out", str(out)]
        command += ["--store", str(Path(folder) / "store"), *(["--quick"] if quick else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started = [subprocess.Popen([*command, "--rank", str(i)], cwd=ROOT, env=environment) for i in range(ranks)]
        if sum(process.wait() != 0 for process in started):  # all are waited for
            raise RuntimeError(f"a rank of {ranks} has failed")
        return [Row(**row) for row in json.loads(out.read_text())]


NOTES = """\
"as it is" is fsdp2 with the lengths as they were drawn: `accumulate(num_batches=...)`, in which every group is gathered
in each forward and backward, a meeting of all ranks. A ratio says how many times as fast as that a way is: medians of
steps (least to largest). "fsdp2" is the same with the lengths dealt as the row says. "kept": weights stay unsharded
over the step (`reshard_after_forward=False`, `set_reshard_after_backward(False)`); "half kept": of every other block.
"replicas": HSDP, two replicas of two ranks. "on demand": `accumulate(on_demand=True)`. "kept" and "on demand" meet once
a step. "torch" and "torch kept" are torch's FSDP2 with `set_requires_gradient_sync` for the last micro-batch. Limit:
the mean over ranks of what they sleep. Bare: the slowest rank's sum, which a step takes that meets once. "balanced
micro-batches": `fsdp2.balance(..., num_batches=...)`, so that micro-batch i of all ranks is about as long; "balanced
sums": `fsdp2.balance(...)`, so that ranks have about as many tokens in all, in different numbers of micro-batches."""


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.lengths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer micro-batches and rounds, two ranks only")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the dated report")
    for name in ("--rank", "--ranks", "--store"):
        parser.add_argument(name, type=str if name == "--store" else int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.ranks, arguments.store, arguments.quick, arguments.out)
        return
    facts, start = list(describe_machine()), time.monotonic()
    rows = [row for ranks in ((2,) if arguments.quick else (2, 4)) for row in run(ranks, arguments.quick)]
    names = ["as it is", "fsdp2", "half kept", "replicas", "kept", "on demand", "torch", "torch kept"]
    command = " ".join(["python -m benchmarks.lengths", *sys.argv[1:]])
    lines = [f"# Micro-batches of unequal lengths, {datetime.date.today().isoformat()}", ""]
    lines += [*(f"- {fact}" for fact in facts), f"- command `{command}`, {time.monotonic() - start:.0f} s", ""]
    lines += [NOTES, "", *(__doc__ or "").splitlines()[5:], "", format_table(rows, names), ""]
    lines += ["By the lengths alone, over 1,000 steps, if nothing else took time:", "", by_lengths(), ""]
    report = "\n".join(lines)
    (arguments.out / f"{datetime.date.today().isoformat()}-lengths.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
