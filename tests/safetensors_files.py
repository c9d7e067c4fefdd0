"""Makes the bytes of a safetensors file from plain tensors, where the package safetensors need not be installed, and
counts the bytes that are read and written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp2.hf.files import FileTensor, plan_files


def file_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Returns what `safetensors.torch.save` returns with metadata={"format": "pt"}."""
    new = [FileTensor(name, each.dtype, tuple(each.shape), "", 0) for name, each in tensors.items()]
    checkpoint, headers, _ = plan_files(new, "x", None)
    data = bytearray(headers["x.safetensors"].ljust(checkpoint.sizes["x.safetensors"], b"\0"))
    for name, each in tensors.items():
        raw = bytes(each.contiguous().view(-1).view(torch.uint8).tolist()) if each.numel() else b""
        start = checkpoint.tensors[name].start
        data[start : start + len(raw)] = raw
    return bytes(data)


@contextmanager
def calls_of(name: str) -> Iterator[list[int]]:
    """Context: yields the bytes of each call of `os.preadv` or `os.pwrite`."""
    function, sizes = getattr(os, name), []

    def call(*args: Any) -> int:
        sizes.append(function(*args))
        return sizes[-1]

    with mock.patch.object(os, name, call):
        yield sizes
