"""Gathers a few bytes of each rank, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.comm import Comm


def all_gather_now(own: bytes | bytearray, comm: Comm, device: torch.device) -> list[bytes]:
    """Returns `own` of each rank of `comm`, in rank order. All of these must call it, with as many bytes."""
    if comm.size == 1:
        return [bytes(own)]
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    of_all = mine.new_empty(comm.size, mine.numel())
    comm.all_gather([of_all.view(-1)], [mine]).wait()
    return [_bytes(each) for each in of_all]


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())  # numpy, which could do that, need not be there
    torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)
