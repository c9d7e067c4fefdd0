"""Compiles the device once for each version of torch, of Python and of the sources, for all processes of all runs."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "fake_gpu_native"
CLOCKS = "clocks.cpp"
SOURCES = (CLOCKS, "device.cpp", "operations.cpp", "process_group.cpp")
HEADERS = ("fake_gpu.h", "clocks.h")
REQUIRED = (2, 13)
"""The release of torch on which the device must compile if there is a compiler. On others its tests are skipped."""
RETRY_S = 600
"""After a failure: it may have been for lack of memory."""
FOLDER = Path(__file__).parent


class CannotBuild(RuntimeError):
    """There is no compiler, or it does not know this torch's headers."""


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None or sys.platform == "win32":
        raise CannotBuild("the fake GPU needs a C++ compiler: c++, g++, clang++ or $CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise CannotBuild("the fake GPU needs Python's headers")
    return found


def _path(compiler: str) -> Path:
    """Where the library for these sources, this torch and this compiler is or will be."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS, "build.py"):
        digest.update((FOLDER / name).read_bytes())
    for text in (torch.__version__, torch.__file__, sys.version, compiler):
        digest.update(text.encode())
    cache = Path(os.environ.get("FSDP2_TEST_CACHE") or Path(tempfile.gettempdir()) / f"fsdp2-tests-{os.getuid()}")
    return cache / f"{NAME}-{digest.hexdigest()[:16]}.so"


def _command(compiler: str, sources: list[Path], output: Path) -> list[str]:
    try:
        from torch.utils.cpp_extension import include_paths, library_paths
    except ImportError as error:
        raise CannotBuild(f"the fake GPU needs torch.utils.cpp_extension: {error}") from error
    standard = "-std=c++20" if _release() >= (2, 12) else "-std=c++17"
    command = [compiler, standard, "-O0", "-w", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for path in (*include_paths(), sysconfig.get_path("include")):
        command += ["-isystem", path]
    command += [*map(str, sources), "-o", str(output)]
    command += [f"-L{path}" for path in library_paths()]
    return [*command, *(f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python"))]


def _build(compiler: str, path: Path) -> None:
    """Compiles the clocks alone, with optimization, and all other sources as one file: torch's headers take most of the
    time. Unoptimized clocks would take a third of the time of training that they judge.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        source, clocks, output = Path(name) / "all.cpp", Path(name) / "clocks.o", Path(name) / path.name
        source.write_text("".join(f'#include "{FOLDER / each}"\n' for each in SOURCES if each != CLOCKS))
        optimized = [compiler, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-c", str(FOLDER / CLOCKS)]
        for command in ([*optimized, "-o", str(clocks)], _command(compiler, [source, clocks], output)):
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                problem = f"the fake GPU does not compile with torch {torch.__version__}:\n{done.stderr[:4000]}"
                raise CannotBuild(problem)
        os.replace(output, path)


def _release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def build() -> Path:
    """The library. Built by the first process that asks; the others wait.

    Raises:
        CannotBuild: it can't be.
    """
    compiler = _compiler()
    path = _path(compiler)
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    failure = path.with_suffix(".failed")
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failure.exists() and time.time() - failure.stat().st_mtime < RETRY_S:
            raise CannotBuild(failure.read_text())
        if not path.exists():
            try:
                _build(compiler, path)
            except CannotBuild as error:
                failure.write_text(str(error))
                raise
    return path


@functools.cache
def _built() -> Path | CannotBuild:
    try:
        return build()
    except CannotBuild as error:
        return error


def built() -> Path:
    """The library, before ranks are forked that `load` it. Skips the test if it can't be built where it need not."""
    path = _built()
    if isinstance(path, CannotBuild):
        if _release() == REQUIRED and "does not compile" in str(path):
            pytest.fail(str(path))
        pytest.skip(str(path))
    return path


def load() -> Any:
    """Its module, in a process that is to have the device."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module
