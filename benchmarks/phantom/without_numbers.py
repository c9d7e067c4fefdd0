"""Has fsdp2 do without the numbers that the phantom's kernels do not compute, where it would read some."""

from typing import Any

import torch
from torch import Tensor

from fsdp2.features import vocab_parallel
from fsdp2.optim import steps


def try_optimizers_on_cpu() -> None:
    """Optimizers are tried there before they are flattened."""
    probe = steps.probe

    def probe_on_cpu(optimizer: Any, cls: Any, options: Any, like: Tensor) -> Any:
        return probe(optimizer, cls, options, like.cpu())

    steps.probe = probe_on_cpu


def send_rows_evenly() -> None:
    """Each rank gets as many rows of an embedding from each rank as it would on the average."""
    find, exchange, sizes = vocab_parallel._find_route, vocab_parallel.exchange_counts, list[int]()

    def find_route(group: Any, param: Any, ids: Tensor) -> Any:
        sizes[:] = [len(part) for part in torch.empty(ids.numel()).tensor_split(group.mesh.size)]
        return find(group, param, ids)

    def exchange_counts(counts: Tensor, process_group: Any) -> tuple[list[int], list[int]]:
        exchange(counts, process_group)  # the host waits as it does on a device
        return [*sizes], [*sizes]

    vocab_parallel._find_route = find_route
    vocab_parallel.exchange_counts = exchange_counts
