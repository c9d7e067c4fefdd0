"""Runs a program whose comparisons look at shapes and dtypes only, because kernels of the phantom compute nothing (see
also without_numbers.py):

PYTHONPATH=tests:. python -m benchmarks.phantom.run -m benchmarks.phantom.unchecked tests/one_of_many.py cuda
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

import helpers

from .without_numbers import send_rows_evenly, try_optimizers_on_cpu


def assert_same_kind(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float, name: str) -> None:
    """Stands in for `helpers.assert_same`."""
    del rtol, atol
    found, wanted = _kind(actual), _kind(expected)
    if found != wanted:
        raise AssertionError(f"{name}: expected {wanted}, got {found}")


def _kind(tensor: Any) -> Any:
    # A DTensor has the shape of the whole.
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape))


def main(arguments: list[str]) -> None:
    helpers.assert_same = assert_same_kind  # type: ignore[assignment]
    try_optimizers_on_cpu()
    send_rows_evenly()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, "")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
