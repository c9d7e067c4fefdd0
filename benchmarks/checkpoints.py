"""Measures how long checkpoints take to save and load, and what the steps around a save cost, compared with DCP and dd.

    python -m benchmarks.checkpoints                  # two ranks; four rounds; prints the tables of a report
    python -m benchmarks.checkpoints --plan           # layout and index among 64 to 4,096 ranks, and DCP's planning

Two gloo ranks hold a model of --width with AdamW in fp32. In each round `dd` (each rank writes as many bytes as its
shards have, and syncs), torch.distributed.checkpoint and fsdp2 take turns on one disk, so that each meets the same
disturbances. Times are wall seconds and CPU seconds of a rank, the median of all rounds but the first.
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint.layout import Entry, Kind, Layout, Mesh
from fsdp2.checkpoint.parts import lengths_around
from fsdp2.checkpoint.pickled import metadata_chunks

from .disk_ranks import run_on_disk

STEPS_AFTER = 10
Times = dict[str, list[tuple[float, float]]]


class Clock:
    """Notes wall and CPU seconds of a rank by name. All ranks begin together."""

    def __init__(self) -> None:
        self.times: Times = defaultdict(list)

    def __call__(self, name: str, run: Callable[[], Any]) -> Any:
        gc.collect()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        self.times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        return result


def make(width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def write_like_dd(path: Path, nbytes: int) -> None:
    """Writes and syncs in pieces of 16 MiB, as `dd bs=16M conv=fsync` does, and waits for the other ranks."""
    piece = os.urandom(16 << 20)
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, len(piece)):
            file.write(piece[: nbytes - start])
        os.fsync(file.fileno())
    dist.barrier()


def work(rank: int, ranks: int, args: argparse.Namespace, store: str, folder: Path, queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    model, optimizer = make(args.width, args.layers)
    torch.manual_seed(rank)
    rows = torch.randn(args.rows, args.width)

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}

    def load_by_dcp(path: Path) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    step()
    shards = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.dim())]
    nbytes = sum(each.to_local().nbytes for each in shards)
    clock = Clock()
    beside = dist.new_group(backend="gloo")  # over that of training, async_save's thread and a step wait for each other
    for i in range(args.rounds):
        here = folder / f"round-{i}"
        if rank == 0:
            here.mkdir()
        dist.barrier()
        clock("dd", lambda: write_like_dd(here / f"dd-{rank}", nbytes))  # noqa: B023
        clock("save, DCP", lambda: dcp.save(state(), checkpoint_id=here / "dcp"))  # noqa: B023
        clock("save, fsdp2", lambda: checkpoint.save(here / "ours", model, optimizer))  # noqa: B023
        in_memory = clock(
            "save in memory, fsdp2",
            lambda: checkpoint.save(here / "x", model, optimizer, in_memory=True),  # noqa: B023
        )
        clock("load from memory, fsdp2", lambda: checkpoint.load(in_memory.path, model, optimizer))  # noqa: B023
        clock("load, DCP", lambda: load_by_dcp(here / "dcp"))  # noqa: B023
        clock("load, fsdp2", lambda: checkpoint.load(here / "ours", model, optimizer))  # noqa: B023
        clock("load of DCP's, fsdp2", lambda: checkpoint.load(here / "dcp", model, optimizer))  # noqa: B023
        for _ in range(2):
            clock("usual step", step)
        future = clock(
            "stall, DCP async_save",
            lambda: dcp.async_save(state(), checkpoint_id=here / "dcp-async", process_group=beside),  # noqa: B023
        )
        for number in range(STEPS_AFTER):
            clock(f"step {number + 1} after DCP", step)
        clock("rest of DCP async_save", future.result)
        saving = clock(
            "stall, fsdp2 wait=False",
            lambda: checkpoint.save(here / "ours-async", model, optimizer, wait=False),  # noqa: B023
        )
        for number in range(STEPS_AFTER):
            clock(f"step {number + 1} after fsdp2", step)
        clock("rest of fsdp2 wait=False", saving.wait)
        clock.times["step waited for the snapshot"].append((saving.step_waited_s, 0.0))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(here)
            shutil.rmtree(in_memory.path.parent)
        dist.barrier()
    queue.put((nbytes, dict(clock.times)))
    dist.barrier()
    dist.destroy_process_group()


def llama_8b(ranks: int) -> Kind:
    """Returns what each rank of a fully sharded Llama 8B with AdamW holds."""
    width, hidden, keys = 4096, 14336, 1024
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, width), "head": (128256, width), "norm": (width,)}
    for layer in range(32):
        rows = {"q": width, "k": keys, "v": keys, "o": width, "w1": hidden, "w3": hidden}
        shapes |= {f"{layer}.{name}": (count, width) for name, count in rows.items()}
        shapes |= {f"{layer}.w2": (width, hidden), f"{layer}.n1": (width,), f"{layer}.n2": (width,)}
    entries = [Entry(f"model.{name}", "float32", shape, 0, ((0, 0),)) for name, shape in shapes.items()]
    for name, shape in shapes.items():
        entries.append(Entry(f"optimizer.state.{name}.step", "float32", (), -1, ()))
        entries += [Entry(f"optimizer.state.{name}.{m}", "float32", shape, 0, ((0, 0),)) for m in ("m", "v")]
    return Kind((Mesh((ranks,), tuple(range(ranks))),), tuple(entries), ())


def plan(ranks: int, most_for_dcp: int) -> str:
    """Returns a row: CPU seconds of one process."""
    began = time.process_time()
    layout = Layout([(range(ranks), llama_8b(ranks))])
    layout.places_of(ranks // 2)
    known = time.process_time()
    nbytes = sum(map(len, metadata_chunks(layout.tensors, layout.offsets, lengths_around(layout.tensors), {}, {}, "")))
    indexed = time.process_time()
    cells = [f"{known - began:.2f}", f"{indexed - known:.2f}", f"{nbytes / 1e6:,.0f}"]
    return f"| {ranks:,} | {' | '.join(cells)} | {_plan_by_dcp(layout, ranks) if ranks <= most_for_dcp else '-'} |"


def _plan_by_dcp(layout: Layout, ranks: int) -> str:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    items: dict[int, list[Any]] = defaultdict(list)
    for name, parts in layout.tensors.items():
        rows = zip(parts.starts.tolist(), parts.sizes.tolist(), parts.writers.tolist(), strict=True)
        properties = TensorProperties(dtype=parts.dtype)
        for start, size, writer in rows:
            chunk = ChunkStorageMetadata(torch.Size(start), torch.Size(size))
            data = TensorWriteData(chunk, properties, torch.Size(parts.shape))
            items[writer].append(
                WriteItem(MetadataIndex(name, torch.Size(start)), WriteItemType.SHARD, tensor_data=data)
            )
    plans = [SavePlan(items[rank], planner_data={}) for rank in range(ranks)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    began = time.process_time()
    planner.create_global_plan(plans)
    return f"{time.process_time() - began:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=4)
    add("--width", type=int, default=2048)
    add("--layers", type=int, default=24)
    add("--rows", type=int, default=256, help="of a batch, on each rank")
    add("--folder", type=Path, help="on the disk that is measured (default: one for temporary files)")
    add("--plan", action="store_true")
    add("--most-for-dcp", type=int, default=256, help="ranks for which DCP plans (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plan:
        print("| ranks | layout, s | index, s | index, MB | DCP's `create_global_plan`, s |\n|---|---|---|---|---|")
        for ranks in (64, 256, 512, 1024, 4096):
            print(plan(ranks, args.most_for_dcp), flush=True)
        return
    found, loads = run_on_disk(work, args)
    nbytes = found[0][0]
    print(f"{args.ranks} ranks, {nbytes / 1e6:,.0f} MB a rank, {args.rounds - 1} rounds, {loads}")
    print("| what | wall s, median (least to most) | MB/s a rank | CPU s a rank |\n|---|---|---|---|")
    for name in found[0][1]:
        per_round = len(found[0][1][name]) // args.rounds
        rows = [row for _, times in found for row in times[name][per_round:]]
        wall, cpu = [row[0] for row in rows], statistics.median(row[1] for row in rows)
        median = statistics.median(wall)
        speed = f"{nbytes / 1e6 / median:,.0f}" if name.startswith(("dd", "save", "load")) else ""
        print(f"| {name} | {median:.2f} ({min(wall):.2f} to {max(wall):.2f}) | {speed} | {cpu:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
