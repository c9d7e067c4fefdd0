"""Records steps on the phantom GPU of tests/phantom: torch's CUDA build over libraries that compute nothing."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from .places import Place, UnavailableError
from .recipe import MODULES

TESTS = Path(__file__).resolve().parents[1] / "tests"
PLAIN = "plain"
SECONDS = 1500

Record = dict[str, Any]


def load() -> Any:
    """Imports the package `phantom`, which lies beside the tests."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    import phantom.install
    import phantom.run
    import phantom.timeline

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


def record(libraries: Sequence[str], expandable: bool = False, **options: Any) -> Mapping[str, Record]:
    """Records a step of the plain model and of each library by the protocol, in processes that take turns.

    Args:
        expandable: if True, the caching allocator has expandable segments.
        options: those of `phantom.record`.
    """
    arguments = ["-W", "ignore", "-m", "phantom.record", "--wrapping", "protocol"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        arguments += [option] * (value is True) if isinstance(value, bool) else [option, str(value)]
    names = [name for name in libraries if name in MODULES]
    segments = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with tempfile.TemporaryDirectory() as folder:
        load().run.run([*arguments, "--out", folder, PLAIN, *names], SECONDS, **segments)
        return {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in (PLAIN, *names)}
