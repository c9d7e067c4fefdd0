"""Runs a program that was written for torch's FSDP2 with fsdp2, unedited:

    python -m fsdp2 script.py ARGUMENTS
    python -m fsdp2 -m package.module ARGUMENTS
    torchrun --nproc-per-node 2 -m fsdp2 script.py ARGUMENTS
    python -m fsdp2 -m torch.distributed.run --nproc-per-node 2 script.py ARGUMENTS


Predicts memory, communication and time of training a model, without ranks:

    python -m fsdp2 plan package.module:Model --ranks 8 --memory 24GB --sequence-length 4096

Writes a checkpoint of torch.distributed.checkpoint as safetensors files, without ranks:

    python -m fsdp2 merge checkpoints/step-1000 trained --dtype bfloat16

Says where the digests of two runs differ first (`fsdp2.DigestLog`), or those of the ranks of one run:

    python -m fsdp2 diff run1 run2

Runs a program that is written for torchrun on many ranks in one process, one at a time:

    python -m fsdp2 simulate --ranks 16 script.py ARGUMENTS

Prints releases, devices, variables and switches, for reports of bugs:

    python -m fsdp2 env

`python -m fsdp2 COMMAND --help` says more about a command; `--version` prints the releases in use.

Otherwise the words after `-m fsdp2` are a command line of Python: this process becomes `python script.py ARGUMENTS`,
with the folder `bridge/startup` first in PYTHONPATH. Python runs the `sitecustomize.py` of that folder before any
program. It calls `patch_torch()` as soon as torch.distributed.fsdp is imported.

The program starts in a fresh interpreter, so that it can set environment variables before it imports torch, and it is
the true `__main__`. Processes that it starts (multiprocessing, subprocess, torchrun) inherit the environment, and need
nothing else. The cost is one more import of torch at the start of the first process.
"""

from __future__ import annotations

import difflib
import os
import platform
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


def _plan(arguments: list[str]) -> None:
    from .planning.command import main

    raise SystemExit(main(arguments))


def _merge(arguments: list[str]) -> None:
    from .hf.merge import main

    raise SystemExit(main(arguments))


def _diff(arguments: list[str]) -> None:
    from .checks.digest_files import main

    raise SystemExit(main(arguments))


def _simulate(arguments: list[str]) -> None:
    from .simulate.command import main

    raise SystemExit(main(arguments))


def _env(arguments: list[str]) -> None:
    from . import __version__
    from .environment import main

    main(arguments, __version__)


def _help(_: list[str]) -> None:
    print(__doc__)


def _version(_: list[str]) -> None:
    import torch

    from . import __version__

    print(f"fsdp2 {__version__}, torch {torch.__version__}, Python {platform.python_version()}")


COMMANDS = {
    "plan": _plan,
    "merge": _merge,
    "diff": _diff,
    "simulate": _simulate,
    "env": _env,
    "help": _help,
    "--help": _help,
    "-h": _help,
    "--version": _version,
    "-V": _version,
}


def main() -> None:
    """Runs a command, or replaces this process by the program on the command line.

    Raises:
        SystemExit: 1, without arguments; 2, if the first one is neither a command nor a file.
    """
    arguments = sys.argv[1:]
    if not arguments:
        raise SystemExit(__doc__)
    first, *others = arguments
    if first in COMMANDS:
        try:
            COMMANDS[first](others)
            sys.stdout.flush()
        except BrokenPipeError:  # of `python -m fsdp2 env | head`: what else there is to print, nobody reads
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if not first.startswith("-") and not os.path.exists(first):
        _refuse(first)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, inherited] if inherited else [STARTUP])
    os.execv(sys.executable, [sys.executable, *python_options(sys.orig_argv, arguments), *arguments])


def _refuse(word: str) -> None:
    """Ends the process with what may have been meant by a word that is neither a command nor a file."""
    commands = [each for each in COMMANDS if not each.startswith("-")]
    close = difflib.get_close_matches(word, commands, n=1)
    meant = f" Did you mean `python -m fsdp2 {close[0]}`?" if close else ""
    print(
        f"python -m fsdp2: expected a script, or one of {', '.join(commands)}; got {word!r}, which is no file.{meant} "
        "`python -m fsdp2 --help` says more.",
        file=sys.stderr,
    )
    raise SystemExit(2)


if __name__ == "__main__":
    main()
