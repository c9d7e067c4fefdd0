"""Compares the exact bits of training between two commits: losses and parameters of every example, step by step.

    OMP_NUM_THREADS=1 python tests/run_bits.py --save before.json      at one commit
    OMP_NUM_THREADS=1 python tests/run_bits.py --compare before.json   at the other one, on the same machine

It runs 20 steps of `train_gpt.py --tiny` (in float32, bfloat16 and with Muon) and each short example, for one seed, on
ranks over gloo. After each optimizer step every rank adds to its record the hash of its shards of all parameters, and
for each backward the bits of the loss; the printed lines with numbers of losses are kept as text. `--compare` says for
each program which rank differs first, at which step and in what, and exits with 1 if any differs.

Bits depend on the processor and on the build of torch, so this is a script and no test.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from programs import run_forked  # noqa: E402

TINY = ("train_gpt.py", 2, "--tiny", "--steps", "20", "--save", "{folder}")
PROGRAMS: dict[str, tuple[Any, ...]] = {  # name -> script, ranks, options; {folder}: an empty folder
    "train_gpt": TINY,
    "train_gpt on 3 ranks": ("train_gpt.py", 3, *TINY[2:]),
    "train_gpt in bf16": (*TINY, "--bf16"),
    "train_gpt with muon": (*TINY, "--optimizer", "muon"),
    "checkpoint_compile": ("checkpoint_compile.py", 2),
    "cpu_offload": ("cpu_offload.py", 2),
    "generate": ("generate.py", 2),
    "hsdp": ("hsdp.py", 4),
    "lora": ("lora.py", 2),
    "pipeline": ("pipeline.py", 4),
    "resume_elsewhere": ("resume_elsewhere.py", 2, "--steps", "20", "--folder", "{folder}"),
    "rollout": ("rollout.py", 2),
    "tensor_parallel": ("tensor_parallel.py", 4),
}
PRINTED = re.compile(r"^.*(?:loss|reward|bits per byte)[ :].*$", re.MULTILINE)
SPEED = re.compile(r"[\d,.]+ tokens/s|\d+(?:\.\d+)? s\b")
Record = dict[str, list[str]]  # rank, or "printed" -> what it has seen, in order


def hash_of(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(f"{local.dtype} {tuple(local.shape)}".encode())
        digest.update(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def watch(folder: Path, rank: int) -> None:
    """Writes what this rank sees to a file, one line for each backward and each optimizer step."""
    log = (folder / f"rank {rank}").open("w", buffering=1)
    backward = Tensor.backward

    def note_loss(self: Tensor, *args: Any, **kwargs: Any) -> None:
        log.write(f"loss {hash_of([self])}\n")
        backward(self, *args, **kwargs)

    def note_parameters(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            log.write(f"parameters {hash_of(parameters)}\n")

    Tensor.backward = note_loss  # type: ignore[method-assign]
    register_optimizer_step_post_hook(note_parameters)


def run(script: str, ranks: int, *options: str) -> Record:
    with tempfile.TemporaryDirectory() as name:
        seen, empty = Path(name) / "seen", Path(name) / "empty"
        seen.mkdir()
        given = [option.format(folder=empty) for option in options]
        output = run_forked(script, ranks, *given, before=partial(watch, seen), timeout=1200)
        lines = PRINTED.findall(output.replace("\r", "\n"))
        # A progress bar prints when it likes: its lines are not those of the program.
        printed = [SPEED.sub("", line).strip() for line in lines if "%|" not in line]
        record = {path.name: path.read_text().splitlines() for path in sorted(seen.iterdir())}
    if not all(any(line.startswith("parameters") for line in lines) for lines in record.values()):
        raise RuntimeError(f"{script}: expected optimizer steps on {ranks} ranks, got {record}")
    return {**record, "printed": printed}


def difference(before: Record, after: Record) -> str | None:
    """Returns where two records differ first, or None."""
    for who in dict.fromkeys([*before, *after]):
        old, new = before.get(who, []), after.get(who, [])
        for index in range(max(len(old), len(new))):
            was, is_now = (each[index] if index < len(each) else "nothing" for each in (old, new))
            if was != is_now:
                step = sum(line.startswith("parameters") for line in old[:index])
                where = who if who == "printed" else f"{who}, after {step} optimizer steps"
                return f"{where}, line {index + 1}: was {was!r}, is {is_now!r}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=Path, metavar="FILE", help="run, and write what was seen")
    what.add_argument("--compare", type=Path, metavar="FILE", help="run, and compare with what was written")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="NAME", help=f"of {', '.join(PROGRAMS)}")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: with other numbers of threads sums have other bits")
    before = json.loads(args.compare.read_text()) if args.compare else {}
    after: dict[str, Record] = {}
    differ = 0
    for name in args.only or PROGRAMS:
        if args.compare and name not in before:
            print(f"{name}: not in {args.compare}")
            continue
        after[name] = run(*PROGRAMS[name])
        count = sum(len(lines) for lines in after[name].values())
        if not args.compare:
            print(f"{name}: {count} lines", flush=True)
        elif found := difference(before[name], after[name]):
            differ += 1
            print(f"{name}: DIFFERS. {found}", flush=True)
        else:
            print(f"{name}: equal, {count} lines", flush=True)
    if args.save:
        args.save.write_text(json.dumps(after, indent=1) + "\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
