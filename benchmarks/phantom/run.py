"""Runs Python on the phantom GPU:

    PYTHONPATH=tests:. python -m benchmarks.phantom.run SCRIPT ARGUMENTS
    PYTHONPATH=tests:. python -m benchmarks.phantom.run -m MODULE ARGUMENTS

$FSDP2_ROOT: the folder of the fsdp2 to run with, by default this repository. With Python 3.10 it must also be the
current one.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import install

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a program on the phantom."""
    root = os.environ.get("FSDP2_ROOT") or str(ROOT)
    if root != str(ROOT):
        more["PYTHONSAFEPATH"] = "1"  # from Python 3.11 on; else -m would prefer the current folder
    libraries = [str(install.home() / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    paths = [root, f"{ROOT}/tests", str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # They compare ranks, of which there is one, whose messages nobody answers.
        "FSDP2_CHECKS": os.environ.get("FSDP2_CHECKS", "off"),
        **more,
    }


def run(arguments: Sequence[str], seconds: float, *, stdin: str | None = None, **more: str) -> str:
    """Runs Python with these arguments on the phantom, and returns its standard output.

    Args:
        stdin: what its standard input has.
        more: variables of the environment.

    Raises:
        RuntimeError: it fails, or takes longer. The message has the end of its output.
    """
    command = [str(install.python()), *arguments]
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "input": stdin}
    done = subprocess.run(command, cwd=ROOT, env=environment(**more), timeout=seconds, **pipes)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    install.install()
    os.execve(install.python(), [str(install.python()), *sys.argv[1:]], environment())
