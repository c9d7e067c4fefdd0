"""Runs a program whose comparisons look at shapes and dtypes only, because kernels of the phantom compute nothing. For
the same reason optimizers are tried on the CPU before they are flattened, and each rank gets as many rows of an
embedding from each as it would on the average.

PYTHONPATH=tests:. python -m phantom.run -m phantom.unchecked tests/one_of_many.py cuda
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import helpers
from fsdp2.features import row_embedding
from fsdp2.optim import steps


def assert_same_kind(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float, name: str) -> None:
    """Stands in for `helpers.assert_same`."""
    del rtol, atol
    found, wanted = _kind(actual), _kind(expected)
    if found != wanted:
        raise AssertionError(f"{name}: expected {wanted}, got {found}")


def _kind(tensor: Any) -> Any:
    # A DTensor has the shape of the whole.
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape))


def _try_on_cpu() -> None:
    probe = steps.probe

    def probe_on_cpu(optimizer: Any, cls: Any, options: Any, like: Tensor) -> Any:
        return probe(optimizer, cls, options, like.cpu())

    steps.probe = probe_on_cpu


def _send_rows_evenly() -> None:
    find, exchange, sizes = row_embedding._find_route, row_embedding.exchange_counts, list[int]()

    def find_route(group: Any, param: Any, ids: Tensor) -> Any:
        sizes[:] = [len(part) for part in torch.empty(ids.numel()).tensor_split(group.mesh.size)]
        return find(group, param, ids)

    def exchange_counts(counts: Tensor, process_group: Any) -> tuple[list[int], list[int]]:
        exchange(counts, process_group)  # the host waits as it does on a device
        return [*sizes], [*sizes]

    row_embedding._find_route = find_route
    row_embedding.exchange_counts = exchange_counts


def main(arguments: list[str]) -> None:
    helpers.assert_same = assert_same_kind  # type: ignore[assignment]
    _try_on_cpu()
    _send_rows_evenly()
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
