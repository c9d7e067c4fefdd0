"""Tests how instructions are counted, without a phantom."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.phantom.instructions import DUMP_STATS, OWNERS, START, STOP, Callgrind, by_owner

PROGRAM = f"""
import os
from benchmarks.phantom.instructions import Callgrind
callgrind = Callgrind()
sum(range(300_000))
callgrind.ask({START})
sum(range(100_000))
callgrind.ask({DUMP_STATS})
callgrind.ask({STOP})
os._exit(0)
"""

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the call of valgrind's is code for x86-64")


def test_a_program_goes_on_without_valgrind() -> None:
    Callgrind().ask(START)


@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_what_runs_between_requests_is_counted(tmp_path: Path) -> None:
    tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={tmp_path}/counts"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{root}/tests", root])}
    done = subprocess.run([*tool, sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (total,) = re.findall(r"^totals: (\d+)", (tmp_path / "counts.1").read_text(), re.M)
    assert 1_000_000 < int(total) < 20_000_000, "of one sum, not of the one before, nor of the start"
    assert by_owner(tmp_path / "counts.1") == dict.fromkeys(OWNERS, 0)
