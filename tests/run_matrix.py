"""Runs the tests on several releases of torch and of Python, each in its own environment, and prints a table.

    python tests/run_matrix.py
    python tests/run_matrix.py --torch 2.11.0 2.15.0 -- tests/unit -x
    python tests/run_matrix.py --python 3.10 3.12 --torch 2.13.0 2.15.0 -- tests/unit

The arguments after `--` go to pytest. Environments are kept, and used again by the next run. On Linux, PyPI's torch
brings several GB of CUDA packages, which the tests do not need. `PIP_EXTRA_INDEX_URL` may name an index of CPU builds.
A Python that is not there, or a torch that has no build for it, is a line of the table that says so.
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASES = ("2.11.0", "2.13.0", "2.15.0")


@dataclass(frozen=True)
class Outcome:
    """Holds the outcome of one run of pytest. `note`: what went wrong besides failing tests."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.note


def main() -> int:
    options = parse()
    outcomes = {
        (python, release): run(python, release, options) for python in options.python for release in options.torch
    }
    print("\n" + table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests on several releases of torch and Python.")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", nargs="+", default=(own,), metavar="3.Y", help="the versions (%(default)s)")
    parser.add_argument("--torch", nargs="+", default=RELEASES, metavar="X.Y.Z", help="the releases (%(default)s)")
    parser.add_argument(
        "--environments",
        type=lambda text: Path(text).absolute(),
        default=ROOT / ".venv-matrix",
        metavar="FOLDER",
        help="where to keep them, one folder for each release (%(default)s)",
    )
    parser.add_argument("--as-they-are", action="store_true", help="install nothing, and use what is in FOLDER")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S", help="for one run of pytest (%(default)s)")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="for pytest, after --")
    return parser.parse_args()


def run(version: str, release: str, options: argparse.Namespace) -> Outcome:
    """Makes the environment, unless it exists, and runs pytest in it."""
    folder = options.environments / f"python-{version}-torch-{release}"
    print(f"== Python {version}, torch {release}", flush=True)
    if options.as_they_are:
        python = python_of(folder)
        if not python.exists():
            return Outcome(note="not run: there is no such environment")
    else:
        try:
            python = environment(version, release, folder)
        except FileNotFoundError:
            return Outcome(note="not run: there is no such Python")
        except subprocess.CalledProcessError as error:
            return Outcome(note=f"not installed: {' '.join(map(str, error.cmd[1:3]))} failed")
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", f"--junitxml={report}", *options.pytest]
    began = time.monotonic()
    try:
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=options.timeout
        ).returncode
    except subprocess.TimeoutExpired:
        return Outcome(seconds=time.monotonic() - began, note=f"not done within {options.timeout:g} s")
    if not report.exists():
        return Outcome(seconds=time.monotonic() - began, note=f"pytest left with {code} and no report")
    return read(report, code)


def python_of(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def environment(version: str, release: str, folder: Path) -> Path:
    """Returns the Python of an environment with these releases, this project and the packages of its tests.

    Raises:
        FileNotFoundError: there is no such Python.
        subprocess.CalledProcessError: pip could not install them.
    """
    python = python_of(folder)
    if not python.exists():
        is_own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
        subprocess.run([sys.executable if is_own else f"python{version}", "-m", "venv", folder], check=True)
    # Each time: it is quick where nothing is missing, and completes what an interrupted run has left.
    # torch is named first, so that pip does not take a newer one with the project.
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={release}", "-e", f"{ROOT}[test]"], check=True)
    return python


def read(report: Path, code: int) -> Outcome:
    """Reads the output of pytest; `code` is its exit status."""
    suite = next(xml.etree.ElementTree.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
    # 0: all passed; 1: some failed. Anything else ends the run early.
    note = "" if code in (0, 1) else f"pytest left with {code}"
    failed = failures + errors
    return Outcome(tests - failed - skipped, failed, skipped, float(suite.get("time", 0)), note)


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = ["| Python | torch | passed | failed | skipped | seconds | |", "|---|---|---|---|---|---|---|"]
    for (version, release), o in outcomes.items():
        lines.append(f"| {version} | {release} | {o.passed} | {o.failed} | {o.skipped} | {o.seconds:.0f} | {o.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
