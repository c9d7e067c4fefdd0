"""Measures loads and saves of Hugging Face files compared with dd, torch's HuggingFaceStorageReader and transformers.

    python -m benchmarks.hugging_face                # two ranks; four rounds; prints the tables of a report
    python -m benchmarks.hugging_face --ranks 4

Gloo ranks hold a Llama of --width in bf16, fully sharded. In each round all ways take turns on one disk, so that each
meets the same disturbances. `dd`: each rank reads, or writes and syncs, an equal part of the bytes, in pieces of
16 MiB, from and to one piece of memory; "to new memory" needs new pages for each, as a model does. Loads run twice: the
first time the files were dropped from the page cache (as far as posix_fadvise does that; what a host behind a virtual
disk keeps, nobody here can drop), then they are in it. Times are wall seconds of all ranks and CPU seconds of
the first, from the files to a sharded model.
Memory is the peak of what a rank has over the time before the call, counted in a round that is not timed: `anonymous`
without mapped pages of files. Bytes from the disk are those of all ranks in the cold load.

It needs transformers and safetensors. `transformers` loads the whole model on each rank and shards it then; it saves
the whole model, gathered, on the first rank, without a sync.
"""

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp2 import fully_shard, hf
from fsdp2.checkpoint.parts import bytes_in

from .disk_ranks import run_on_disk

PIECE = 16 << 20


def make(folder: Path | None, config: Any, is_meta: bool) -> Any:
    """Returns a sharded Llama: on meta, or loaded by `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        with torch.device("meta" if is_meta else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def read_like_dd(files: list[Path], rank: int, ranks: int, keeps: bool) -> None:
    """Reads an equal part of each file; `keeps`: into new memory, of which each page must be made once."""
    memory = None
    for path in files:
        descriptor, size = os.open(path, os.O_RDONLY), path.stat().st_size
        at, end = size * rank // ranks, size * (rank + 1) // ranks
        kept = []
        while at < end:
            if keeps or memory is None:
                memory = torch.empty(PIECE, dtype=torch.uint8)
            kept.append(memory)
            at += os.preadv(descriptor, [bytes_in(memory)[: end - at]], at)
        os.close(descriptor)


def write_like_dd(path: Path, nbytes: int) -> None:
    piece = memoryview(os.urandom(PIECE))
    with path.open("wb", buffering=0) as file:
        for start in range(0, nbytes, PIECE):
            file.write(piece[: nbytes - start])
        os.fsync(file.fileno())


def load_by_torch(model: Any, folder: Path) -> None:
    model.to_empty(device="cpu")
    dcp.load(get_model_state_dict(model), storage_reader=HuggingFaceStorageReader(str(folder)))


def save_by_torch(model: Any, folder: Path) -> None:
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(get_model_state_dict(model), storage_writer=writer)


def save_by_transformers(model: Any, folder: Path) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()


def drop(files: list[Path]) -> None:
    """Has the kernel forget the pages of files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def status(key: str) -> int:
    """Returns bytes of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def io_count(key: str) -> int:
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


@contextmanager
def peaks(found: dict[str, int]) -> Iterator[None]:
    """Notes by how many bytes the resident and the anonymous memory of this process has grown at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, resident, most, done = status("RssAnon"), status("VmRSS"), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], status("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found |= {"anonymous": most[0] - before, "resident": status("VmHWM") - resident}


def work(rank: int, ranks: int, args: argparse.Namespace, store: str, folder: Path, queue: Any) -> None:
    from transformers import LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    source = folder / "source"
    torch.manual_seed(0)
    model = make(None, config, is_meta=False)
    hf.save_model(model, source, max_shard_size="200MB")
    expected = [each.to_local().clone() for each in model.parameters()]
    shard_nbytes = sum(each.nbytes for each in expected)
    files = sorted(source.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    memory: dict[str, dict[str, int]] = defaultdict(dict)

    def load_by_fsdp2(model: Any) -> None:
        report = hf.load_model(model, source)
        memory["load, fsdp2"]["read"] = report.bytes_read

    def check(loaded: nn.Module) -> None:
        same = all(torch.equal(a.to_local(), b) for a, b in zip(loaded.parameters(), expected, strict=True))
        assert same, "other values"

    def run(name: str, call: Callable[[], Any], round_number: int) -> Any:
        gc.collect()
        is_memory = round_number == 0
        dist.barrier()
        read, began, cpu = io_count("read_bytes"), time.perf_counter(), time.process_time()
        if is_memory:
            with peaks(memory[name]):
                result = call()
        else:
            result = call()
        cpu = time.process_time() - cpu
        dist.barrier()
        if not is_memory:
            times[name].append((time.perf_counter() - began, cpu))
        elif name.endswith("cold"):
            memory[name]["disk"] = io_count("read_bytes") - read
        return result

    loads: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "dd": (lambda: None, lambda _: read_like_dd(files, rank, ranks, keeps=False)),
        "dd to new memory": (lambda: None, lambda _: read_like_dd(files, rank, ranks, keeps=True)),
        "fsdp2": (lambda: make(None, config, is_meta=True), load_by_fsdp2),
        "torch": (lambda: make(None, config, is_meta=True), lambda model: load_by_torch(model, source)),
        "transformers": (lambda: None, lambda _: make(source, config, is_meta=False)),
    }
    saves: dict[str, Callable[[Path], Any]] = {
        "dd": lambda path: write_like_dd(path.with_name(f"dd-{rank}"), shard_nbytes),
        "fsdp2": lambda path: hf.save_model(model, path, max_shard_size="200MB"),
        "torch": lambda path: save_by_torch(model, path),
        "transformers": lambda path: save_by_transformers(model, path),
    }
    for number in range(args.rounds + 1):
        for heat in ("cold", "warm"):
            for name, (prepare, load) in loads.items():
                prepared = prepare()
                gc.collect()  # pages that a process has mapped are not dropped
                dist.barrier()
                if rank == 0 and heat == "cold":
                    drop(files)
                result = run(f"load, {name}, {heat}", partial(load, prepared), number)
                if not name.startswith("dd"):
                    check(prepared if prepared is not None else result)
                prepared = result = None
        for name, save in saves.items():
            here = folder / f"{number}-{name}"
            here.mkdir(exist_ok=True)
            run(f"save, {name}", partial(save, here / "files"), number)
            if rank == 0:
                shutil.rmtree(here)
            dist.barrier()
    queue.put((rank, nbytes, shard_nbytes, dict(times), {name: dict(each) for name, each in memory.items()}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=4)
    add("--width", type=int, default=2048)
    add("--layers", type=int, default=4)
    add("--folder", type=Path, help="on the disk that is measured (default: one for temporary files)")
    args = parser.parse_args()
    found, loads = run_on_disk(work, args)
    found.sort()
    _, nbytes, shard, times, _ = found[0]
    print(
        f"{args.ranks} ranks, {nbytes / 1e6:,.0f} MB of files, {shard / 1e6:,.0f} MB a rank, {args.rounds} rounds, "
        f"{loads}\n"
    )
    print(
        "| what | wall s, median (least to most) | CPU s a rank | MB/s | of dd | read from the disk, of the files "
        "| peak, anonymous, of the shard | peak, resident |\n|---|---|---|---|---|---|---|---|"
    )
    for name, pairs in times.items():
        walls, cpu = [wall for wall, _ in pairs], statistics.median(cpu for _, cpu in pairs)
        median = statistics.median(walls)
        kind, _, rest = name.partition(", ")
        heat = next((f", {each}" for each in ("cold", "warm") if each in rest), "")
        dd = statistics.median(wall for wall, _ in times[f"{kind}, dd{heat}"])
        memories = [memory[name] for *_, memory in found]
        disk = f"{sum(each['disk'] for each in memories) / nbytes:.2f}" if "disk" in memories[0] else ""
        speed = nbytes / 1e6 / median
        peak = [f"{max(each[key] for each in memories) / shard:.2f}" for key in ("anonymous", "resident")]
        print(
            f"| {name} | {median:.2f} ({min(walls):.2f} to {max(walls):.2f}) | {cpu:.2f} | {speed:,.0f} "
            f"| {dd / median:.2f}x | {disk} | {' | '.join(peak)} |"
        )
    read = [memory["load, fsdp2"]["read"] for *_, memory in found]
    print(f"\nfsdp2 has read {sum(read) / (shard * args.ranks):.4f} of the bytes of all shards")


if __name__ == "__main__":
    sys.exit(main())
