"""Runs a program that was written for torch's FSDP2 with ours, unedited:

    python -m fsdp2 script.py ARGUMENTS
    python -m fsdp2 -m package.module ARGUMENTS
    torchrun --nproc-per-node 2 -m fsdp2 script.py ARGUMENTS
    python -m fsdp2 -m torch.distributed.run --nproc-per-node 2 script.py ARGUMENTS

Prints the fixes for sharded parameters, what each does, and which are in force:

    python -m fsdp2 fixes

Prints the checks, what each finds and costs, and which are in force:

    python -m fsdp2 checks

Predicts memory, communication and time of training a model, without ranks; see `python -m fsdp2 plan --help`:

    python -m fsdp2 plan package.module:Model --ranks 8 --memory 24GB --sequence-length 4096

Otherwise the words after `-m fsdp2` are a command line of Python: this process becomes `python script.py ARGUMENTS`,
with the folder `bridge/startup` first in PYTHONPATH. Python runs the `sitecustomize.py` of that folder before any
program. It calls `patch_torch()` as soon as torch.distributed.fsdp is imported.

The program starts in a fresh interpreter, so that it can set environment variables before it imports torch, and it is
the true `__main__`. Processes that it starts (multiprocessing, subprocess, torchrun) inherit the environment, and need
nothing else. The cost is one more import of torch at the start of the first process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STARTUP = str(Path(__file__).resolve().parent / "bridge" / "startup")


def python_options(command: list[str], arguments: list[str]) -> list[str]:
    """Returns the options of Python before `-m fsdp2` in this process's command line, which ends with `arguments`.

    Raises:
        SystemExit: the process was started in another way.
    """
    before = command[1 : len(command) - len(arguments)]
    name = before.pop() if before else ""
    if name == __package__ and before:
        name = before.pop() + name
    if not name.startswith("-") or not name.endswith(f"m{__package__}"):
        raise SystemExit(f"expected to be started as python -m {__package__}")
    flags = name.removesuffix(f"m{__package__}")
    return [*before, flags] if flags != "-" else before


def main() -> None:
    """Prints a table or a plan, or replaces this process by the program on the command line."""
    arguments = sys.argv[1:]
    if not arguments:
        raise SystemExit(__doc__)
    if arguments == ["fixes"]:
        from .dtensor.fixes import describe_fixes

        print(describe_fixes())
        return
    if arguments == ["checks"]:
        from .checks.table import describe_checks

        print(describe_checks())
        return
    if arguments[0] == "plan":
        from .planning.command import main as plan

        raise SystemExit(plan(arguments[1:]))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, inherited] if inherited else [STARTUP])
    os.execv(sys.executable, [sys.executable, *python_options(sys.orig_argv, arguments), *arguments])


if __name__ == "__main__":
    main()
