"""Runs an unchanged program on simulated ranks: `python -m fsdp2 simulate`."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, ModuleType

import torch

from .memory import PeakMemory
from .turns import OutOfStep, Rank, Turns
from .world import simulate

_DESCRIPTION = """Runs a program that is written for torchrun on N ranks in this process, one rank at a time: with real
numbers, gloo's semantics, and a debugger, profiler or coverage that sees all ranks. Ranks that wait for each other in
vain are named at once. The exit code is 0, or 1 if a rank fails, as torchrun's."""

_KEEP_THEIR_RANK = ("accelerate",)
"""Packages that keep the rank in a variable of a module, which ranks of one process must not share."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command, prints what each rank has done, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2 simulate", description=_DESCRIPTION)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many ranks to simulate")
    parser.add_argument("--memory", action="store_true", help="count the peak of each rank's tensors, which takes time")
    parser.add_argument("--own", action="append", default=[], metavar="PACKAGE", help="each rank imports it for itself")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as for python -m")
    parser.add_argument("program", help="the script, or the name of the module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        parser.error(f"expected one rank or more, got --ranks {given.ranks}")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    before = {*sys.modules}
    try:
        code, file, package = _module(given.program) if given.module else _script(given.program)
    except (OSError, ImportError) as error:
        parser.error(str(error))
    for name in sys.modules.keys() - before:
        del sys.modules[name]  # packages around the module, of which each rank needs its own
    sys.argv = [file, *given.arguments]
    folder = Path.cwd() if given.module else Path(file).resolve().parent
    sys.path[0] = str(folder)

    memory: dict[Rank, PeakMemory] = {}

    def run(rank: Rank) -> None:
        main_module = ModuleType("__main__")
        main_module.__dict__.update(__file__=file, __package__=package, __builtins__=__builtins__)
        sys.modules["__main__"] = main_module
        try:
            with memory.setdefault(rank, PeakMemory(rank)) if given.memory else nullcontext():
                exec(code, main_module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    turns = simulate(run, given.ranks, _print_error, folder, [*_KEEP_THEIR_RANK, *given.own])
    print(_table(turns, memory), file=sys.stderr)
    return 1 if turns.failed is not None else 0


def _script(path: str) -> tuple[CodeType, str, str | None]:
    return compile(Path(path).read_bytes(), path, "exec"), path, None


def _module(name: str) -> tuple[CodeType, str, str | None]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    loader = None if spec is None else spec.loader
    code = loader.get_code(name) if isinstance(loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None or spec.origin is None:
        raise ImportError(f"expected the name of a module, got {name!r}, which is none")
    return code, spec.origin, spec.parent


def _print_error(failed: Rank) -> None:
    """Prints why the first rank has failed, from its program on, and where the others are."""
    error = failed.error
    assert error is not None, "it has failed"
    place = error.__traceback__ if not isinstance(error, SystemExit) else None
    while place is not None and place.tb_frame.f_code.co_filename.startswith(str(Path(__file__).parent)):
        place = place.tb_next
    traceback.print_exception(type(error), error, place)
    where = "" if isinstance(error, OutOfStep) else f" Where the ranks are:\n{failed.turns.report()}"
    print(f"rank {failed.number} has failed, and ends the program.{where}", file=sys.stderr)


def _table(turns: Turns, memory: Mapping[Rank, PeakMemory]) -> str:
    """Returns what each rank has done, a line for each."""
    lines = ["rank  collectives  messages      MB sent  CPU seconds" + "      peak MB" * bool(memory)]
    for rank in turns.ranks:
        cells = f"{rank.number:4}  {rank.num_collectives:11,}  {rank.num_messages:8,}  {rank.num_bytes / 1e6:11,.3f}"
        peak = f"  {memory[rank].peak / 1e6:11,.3f}" if rank in memory else ""
        ended = "  failed" if rank is turns.failed else "  stopped" if rank.is_stopped else ""
        lines.append(f"{cells}  {rank.seconds:11.2f}{peak}{ended}")
    return "\n".join(lines)
