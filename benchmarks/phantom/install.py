"""Makes the phantom GPU from nothing: an environment with torch's CUDA build, and the stub libraries under it.

    PYTHONPATH=tests:. python -m benchmarks.phantom.install

It is made in $PHANTOM_HOME, by default ~/.cache/fsdp2-phantom, of the Python that runs this. What is there already is
kept, and the stubs are built again when their sources have changed. It takes 0.5 GB of download and 1.4 GB of disk.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TORCH = "2.11.0"
CUDA = "13.0"  # of the headers: the version of CUDA that this torch is built for
PYTHONS = ((3, 10), (3, 13))
# torch without its dependencies: these are the CUDA libraries, 2.5 GB, whose place the stubs take.
NEEDED = ("filelock", "typing-extensions>=4.10", "setuptools<82", "sympy", "networkx", "jinja2", "fsspec", "numpy")
# An old pytest: tests/cuda must run where there is no newer one. tqdm: an example is a part of the session.
TESTING = ("pytest<9", "tqdm")


class UnavailableError(RuntimeError):
    """The phantom GPU can't be had here. The message says why."""


def home() -> Path:
    return Path(os.environ.get("PHANTOM_HOME") or Path.home() / ".cache" / "fsdp2-phantom")


def python() -> Path:
    """Returns the Python of the environment."""
    return home() / "venv" / "bin" / "python"


def install() -> Path:
    """Makes everything that is not there yet, and returns the folder.

    Raises:
        UnavailableError: the machine can't have it, or a package could not be fetched.
    """
    _check_machine()
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted, made = _digest(), folder / "made"
        if not made.exists() or made.read_text() != wanted:
            _make(folder)
            made.write_text(wanted)
    return folder


def _check_machine() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise UnavailableError(f"needs Linux on x86-64, got {platform.system()} on {platform.machine()}")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise UnavailableError(f"torch {TORCH} is built for Python 3.10 to 3.13, got {platform.python_version()}")
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"needs {tool}: apt-get install g++ binutils")


def _digest() -> str:
    digest = hashlib.sha256(f"{TORCH} {CUDA} {NEEDED} {TESTING}".encode())
    for path in (FOLDER / "build.py", *sorted((FOLDER / "stubs").iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make(folder: Path) -> None:
    if not python().exists():
        # Not of an environment: its Python may be a link that goes with it.
        _run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(folder / "venv")])
    _pip("install", "--no-deps", f"torch==={TORCH}")  # three "=": no other build of this version, as for CPUs
    _pip("install", *NEEDED, *TESTING)
    headers = folder / "headers"
    if not headers.exists():
        packages = (f"nvidia-cuda-runtime=={CUDA}.*", f"nvidia-cuda-crt=={CUDA}.*")
        _pip("install", "--no-deps", "--target", str(headers), *packages)
    found = _run([str(python()), "-c", "import importlib.util as u; print(u.find_spec('torch').origin)"])
    libraries = Path(found.strip().splitlines()[-1]).parent / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        raise UnavailableError(f"the torch {TORCH} that pip found is not built for CUDA: set PIP_INDEX_URL")
    includes = ":".join(map(str, headers.rglob("include")))
    _run([str(python()), str(FOLDER / "build.py"), str(libraries), includes, str(folder / "lib")])


def _pip(*arguments: str) -> None:
    _run([str(python()), "-m", "pip", "--disable-pip-version-check", "-q", *arguments])


def _run(command: list[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"{' '.join(command)[:200]}: {' | '.join(lines[-3:])[:600]}")
    return done.stdout


if __name__ == "__main__":
    print(install())
