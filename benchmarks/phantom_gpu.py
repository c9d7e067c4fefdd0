"""Records steps on the phantom GPU of benchmarks/phantom: torch's CUDA build over libraries that compute nothing."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from .places import Place, UnavailableError
from .recipe import MODULES

TESTS = Path(__file__).resolve().parents[1] / "tests"
PLAIN = "plain"
SECONDS = 1500

Record = dict[str, Any]


def load() -> Any:
    """Imports the package `benchmarks.phantom`, which uses modules of tests/, and returns it."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from . import phantom

    for name in ("install", "run", "timeline"):
        import_module(f"{phantom.__name__}.{name}")
    return phantom


def open_phantom() -> AbstractContextManager[Sequence[Place]]:
    """Makes the phantom, if it is not there yet, and yields a place for a job.

    Raises:
        UnavailableError: it can't be had here.
    """
    phantom = load()
    try:
        phantom.install.install()
    except phantom.install.UnavailableError as error:
        raise UnavailableError(f"no phantom GPU: {error}") from None
    return nullcontext([Place()])


def record(libraries: Sequence[str], **options: Any) -> Mapping[str, Record]:
    """Records a step of the plain model and of each library by the protocol, in processes that take turns.

    Args:
        options: those of `phantom.record`.
    """
    names = [PLAIN, *(name for name in libraries if name in MODULES)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-m", "benchmarks.phantom.record", *_written(options), "--out", folder, *names]
        load().run.run(["-W", "ignore", *arguments], SECONDS)
        return {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in names}


def count_memory(name: str, is_expandable: bool, **options: Any) -> dict[str, list[float]]:
    """Returns what `phantom.memory` prints of one library.

    Args:
        is_expandable: if True, the caching allocator has expandable segments.
        options: those of `phantom.memory`.
    """
    segments = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{is_expandable}"}
    printed = load().run.run(
        ["-W", "ignore", "-m", "benchmarks.phantom.memory", *_written(options), name], SECONDS, **segments
    )
    found: dict[str, list[float]] = json.loads(printed.splitlines()[-1])
    return found


def _written(options: Mapping[str, Any]) -> list[str]:
    """Returns options as they are written, and the one for the groups of the protocol."""
    arguments = ["--wrapping", "protocol"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        arguments += [option] * (value is True) if isinstance(value, bool) else [option, str(value)]
    return arguments
