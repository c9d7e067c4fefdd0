"""Measures what starting costs among more and more ranks: every `fully_shard` call, and the first forward.

    python -m benchmarks.start_up                     # writes a table and a picture to benchmarks/results
    python -m benchmarks.start_up torch 4096 768      # one measurement, or with --profile where its time goes
    python -m benchmarks.start_up --check             # both libraries cut parameters alike among 4,096 ranks

Each library runs in a process of its own, one number of ranks and one model at a time. Models are wrapped as torchtitan
wraps them: the embedding is a group, [norm, head] is a group, each block is one, and the rest is the root's. Tensors
are on the CPU, the ranks are simulated (`quiet_group.py`), and no bytes move. A number is CPU time of the process, the
median of the rounds; the first round is dropped where there are several.
"""

import argparse
import cProfile
import gc
import importlib
import json
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .libraries import MODULES
from .quiet_group import start_quiet_group

RESULTS = Path(__file__).parent / "results"
WORLDS, LIBRARIES = (8, 64, 512, 4096, 65536), ("fsdp2", "torch")
DIM, VOCAB, TOKENS = 16, 256, 8
# Parameters in blocks -> blocks, and parameters in each.
MODELS = {96: (6, 16), 768: (48, 16), 19968: (26, 768)}
MEASURED = (768, 19968)
# CPU seconds after which a process is ended.
LIMIT = 240
ROUNDS, MOST_SECONDS = 7, 12.0


class Block(nn.Module):
    """Has many small layers, as a block of experts that are not fused. Two of them run."""

    def __init__(self, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Model(nn.Module):
    """`parameters`: how many there are in all blocks together."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        blocks, each = MODELS[parameters]
        self.embedding, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        has_bias = each < 100
        self.blocks = nn.ModuleList(Block(each // 2 if has_bias else each, has_bias) for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def shard(library: str, model: Model, mesh: dist.DeviceMesh) -> Any:
    """Shards a model by torchtitan's recipe. Nothing is resharded after the forward of [norm, head], which backward
    needs first.
    """
    fully_shard: Callable[..., Any] = importlib.import_module(MODULES[library]).fully_shard
    fully_shard(model.embedding, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def measure(library: str, world_size: int, parameters: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Returns ms of sharding and of the first forward, and how many rounds there were."""
    start_quiet_group(world_size)
    mesh, ids = dist.init_device_mesh("cpu", (world_size,)), torch.zeros(1, TOKENS, dtype=torch.long)
    sharding, forward, spent = [], [], 0.0
    for _ in range(rounds):
        model = Model(parameters)
        gc.collect()
        gc.freeze()
        times = [time.process_time()]
        sharded = shard(library, model, mesh)
        times.append(time.process_time())
        sharded(ids)
        times.append(time.process_time())
        gc.unfreeze()
        sharding.append((times[1] - times[0]) * 1e3)
        forward.append((times[2] - times[1]) * 1e3)
        spent += times[2] - times[0]
        if spent > MOST_SECONDS:
            break
    warm = 1 if len(sharding) > 1 else 0
    both = [a + b for a, b in zip(sharding[warm:], forward[warm:], strict=True)]
    return {
        "sharding": statistics.median(sharding[warm:]),
        "forward": statistics.median(forward[warm:]),
        "both": statistics.median(both),
        "least": min(both),
        "most": max(both),
        "rounds": len(both),
    }


def profile(library: str, world_size: int, parameters: int) -> None:
    """Prints where the time goes, and how many functions are called: Python's own, and of torch's C++ code."""
    start_quiet_group(world_size)
    mesh, ids = dist.init_device_mesh("cpu", (world_size,)), torch.zeros(1, TOKENS, dtype=torch.long)
    shard(library, Model(parameters), mesh)(ids)
    model = Model(parameters)
    with cProfile.Profile() as found:
        shard(library, model, mesh)(ids)
    pstats.Stats(found).sort_stats("tottime").print_stats(12)


def check(world_size: int = 4096, ranks: Sequence[int] = (0, 7, 15, 16, 255, 4095)) -> None:
    """Prints whether both libraries give each of these ranks the same rows: a flat time is of use only then."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh, shards = dist.init_device_mesh("cpu", (world_size,)), []
        for library in LIBRARIES:
            torch.manual_seed(0)
            params = shard(library, Model(96), mesh).named_parameters()
            shards.append({name: (p.shape, p.placements, p.to_local().detach().clone()) for name, p in params})
        dist.destroy_process_group()
        ours, theirs = shards
        same = [
            name
            for name, (shape, placements, local) in ours.items()
            if (shape, placements) == theirs[name][:2] and torch.equal(local, theirs[name][2])
        ]
        rows = sum(len(local) for _, _, local in ours.values())
        print(f"rank {rank} of {world_size}: {len(same)} of {len(theirs)} shards are equal; they have {rows} rows")


def in_a_process(library: str, world_size: int, parameters: int) -> dict[str, float] | None:
    """Returns what a process of its own has measured; None if it took longer than LIMIT seconds of CPU time."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_CPU, ({LIMIT}, {LIMIT}))"
    run = "from benchmarks import start_up; start_up.main()"
    command = [sys.executable, "-W", "ignore", "-c", f"{limit}; {run}", library, str(world_size), str(parameters)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode < 0:
        return None
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(results: dict[tuple[str, int, int], dict[str, float] | None]) -> str:
    """Returns the lines of a table: a row for each model and number of ranks."""
    lines = [
        "| parameters | ranks | fsdp2 ms (least to most; rounds) | of it `fully_shard` | torch ms (least to most; "
        "rounds) | of it `fully_shard` | fsdp2 / torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for parameters in MEASURED:
        for world_size in WORLDS:
            keys = [(library, world_size, parameters) for library in LIBRARIES]
            if not any(key in results for key in keys):
                continue
            pair = [results.get(key) for key in keys]
            cells = []
            for key, each in zip(keys, pair, strict=True):
                if each is None:
                    cells += [f"more than {LIMIT} s" if key in results else "not measured", "-"]
                else:
                    spread = f"{each['least']:,.0f} to {each['most']:,.0f}; {each['rounds']}"
                    cells += [f"{each['both']:,.0f} ({spread})", f"{each['sharding']:,.0f}"]
            ours, theirs = pair
            ratio = f"{ours['both'] / theirs['both']:.3f}x" if ours and theirs else "-"
            lines.append(f"| {parameters:,} | {world_size:,} | {' | '.join([*cells, ratio])} |")
    return "\n".join(lines)


def draw(results: dict[tuple[str, int, int], dict[str, float] | None], path: Path) -> None:
    """Draws ms by the number of ranks, a panel for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MEASURED), figsize=(10, 4), constrained_layout=True)
    for axis, parameters in zip(panels, MEASURED, strict=True):
        for library, colour in (("fsdp2", "tab:blue"), ("torch", "tab:red")):
            found = {n: each["both"] for n in WORLDS if (each := results.get((library, n, parameters))) is not None}
            label = "fsdp2" if library == "fsdp2" else f"torch {torch.__version__.partition('+')[0]}'s FSDP2"
            axis.plot([*found], [*found.values()], marker="o", color=colour, label=label)
            for n, ms in found.items():
                above = 7 if library == "torch" else -14
                axis.annotate(f"{ms:,.0f}", (n, ms), (0, above), textcoords="offset points", ha="center", fontsize=8)
        axis.set(
            xscale="log", yscale="log", xlabel="ranks", ylabel="ms of CPU time", title=f"{parameters:,} parameters"
        )
        axis.set_ylim(axis.get_ylim()[0] / 2, axis.get_ylim()[1] * 6)
        axis.set_xticks(WORLDS, [f"{n:,}" for n in WORLDS])
        axis.minorticks_off()
        axis.legend(loc="upper left")
    figure.suptitle("fully_shard and the first forward: CPU tensors, simulated ranks")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("ranks", nargs="?", type=int)
    parser.add_argument("parameters", nargs="?", type=int, choices=MODELS)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--check", action="store_true", help="compare the shards of both")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-start-up")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.check:
        check()
    elif given.library is not None and given.profile:
        profile(given.library, given.ranks, given.parameters)
    elif given.library is not None:
        print(json.dumps(measure(given.library, given.ranks, given.parameters)))
    else:
        results: dict[tuple[str, int, int], dict[str, float] | None] = {}
        for parameters in MEASURED:
            for library in LIBRARIES:
                for world_size in WORLDS:
                    # Among 65,536 ranks, parameters of 16 rows are padded so far that a block of experts takes 3 GiB.
                    if parameters > 1000 and world_size > 4096:
                        continue
                    results[library, world_size, parameters] = in_a_process(library, world_size, parameters)
                    print(library, world_size, parameters, results[library, world_size, parameters], flush=True)
        print(table(results))
        draw(results, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
