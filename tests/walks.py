"""Counts what a reader of the engine meets: which statements a plain training runs, and through which files each part
of it walks.

    python tests/walks.py            # prints both tables; takes half a minute
    python tests/walks.py --files    # and each file of engine/

The training is what most users write: three blocks and a model, bf16 compute, gradients of two micro-batches, clipping
of the norm, AdamW, a state dict that is saved and loaded; on 2 ranks of gloo, of which rank 0 is counted. Statements
are those inside functions: what stands at the top of a file runs at its import, whoever reads it.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

PACKAGE = Path(__file__).resolve().parent.parent / "fsdp2"
DIM, BLOCKS = 16, 3


class Block(nn.Module):
    """Six parameters, as a block of a transformer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def statements(path: Path) -> dict[int, int]:
    """Returns the first line of each statement inside functions, with its last line before its body."""
    found: dict[int, int] = {}
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for each in ast.walk(function):
            is_docstring = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
            if isinstance(each, ast.stmt) and each is not function and not is_docstring:
                if isinstance(each, (ast.Pass, ast.Global, ast.Nonlocal)):
                    continue
                body = getattr(each, "body", None)
                last = body[0].lineno - 1 if isinstance(body, list) and body else each.end_lineno or each.lineno
                found[each.lineno] = max(last, each.lineno)
    return found


class Lines:
    """Notes which lines of the package run, and each call of a function of it, while it is in force."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.calls: list[tuple[str, str]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context: notes what this thread and threads that it starts run."""
        root = f"{PACKAGE}{os.sep}"

        def trace(frame: Any, event: str, _: Any) -> Any:
            name = frame.f_code.co_filename
            if not name.startswith(root):
                return None
            if event == "call":
                self.calls.append(
                    (name, frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)
                )
            self.lines.add((name, frame.f_lineno))
            return trace

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]


Walks = dict[str, list[tuple[str, str]]]


def train(note: Callable[[str], Any]) -> None:
    """Trains as the module says. `note(walk)`: context in which a walk is noted."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    from fsdp2 import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(DIM, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i in range(BLOCKS):
        with note(("first", "second", "third")[i] + " fully_shard(block)"):
            fully_shard(model[i], mp_policy=policy)
    with note("fully_shard(model)"):
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, DIM)
    for step in range(6):
        steady = step == 4
        for is_last in (False, True) if step == 5 else (True,):
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            with note("steady forward" if steady else "first forward" if step == 0 else ""):
                loss = model(x).float().square().mean()
            with note("steady backward" if steady else "first backward" if step == 0 else ""):
                loss.backward()
        with note("steady AdamW.step" if steady else ""):
            if step == 5:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with note(""):
        set_model_state_dict(model, get_model_state_dict(model))
        model(x).sum().backward()


def _rank(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    lines, walks = Lines(), {}

    @contextmanager
    def note(walk: str) -> Iterator[None]:
        if rank:
            yield
            return
        lines.calls = []
        with lines.noting():
            yield
        if walk:
            walks[walk] = lines.calls

    train(note)
    if rank == 0:
        torch.save((lines.lines, walks), results)
    dist.destroy_process_group()


def run() -> tuple[set[tuple[str, int]], Walks]:
    """Trains on two processes. Returns the lines that ran, as (file, line), and the calls of each walk."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (f"{folder}/store", f"{folder}/results"), nprocs=2)
        found: tuple[set[tuple[str, int]], Walks] = torch.load(f"{folder}/results", weights_only=False)
    return found


def coverage(lines: set[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Returns, by file of the package ("engine/step.py"), how many statements ran and how many there are."""
    ran: dict[str, set[int]] = {}
    for name, line in lines:
        ran.setdefault(name, set()).add(line)
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        rows, here = statements(path), ran.get(str(path), set())
        num = sum(any(line in here for line in range(first, last + 1)) for first, last in rows.items())
        found[str(path.relative_to(PACKAGE))] = num, len(rows)
    return found


def by_folder(found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int, int]]:
    """Returns, by folder, how many statements ran, how many there are, and how many files."""
    sums: dict[str, tuple[int, int, int]] = {}
    for name, (num, of) in found.items():
        folder = name.split("/")[0] if "/" in name else "(top)"
        before = sums.get(folder, (0, 0, 0))
        sums[folder] = before[0] + num, before[1] + of, before[2] + 1
    return sums


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="Counts what a reader of the engine meets in a plain training.")
    parser.add_argument("--files", action="store_true", help="also print each file of engine/")
    wanted = parser.parse_args()
    lines, walks = run()
    found = coverage(lines)
    print("Statements inside functions that a plain training runs:")
    for folder, (num, of, files) in by_folder(found).items():
        print(f"  {folder:16} {num:5} of {of:5}  {num / max(of, 1):4.0%}   {files:3} files")
    if wanted.files:
        for name, (num, of) in found.items():
            if name.startswith("engine/"):
                print(f"    {name:40} {num:4} of {of:4}  {num / max(of, 1):4.0%}")
    print(f"{'Walk':28} calls  functions  files")
    for walk, calls in walks.items():
        print(f"  {walk:26} {len(calls):5}  {len({*calls}):5}  {len({name for name, _ in calls}):5}")


if __name__ == "__main__":
    main()
