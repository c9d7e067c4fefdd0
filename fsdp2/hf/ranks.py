"""Brings the ranks of a model together: one error for all, values of the first, broadcasts between replicas."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.comm import Purpose
from ..ext.meshes import default_mesh
from ..ext.rank_facts import all_reduce_over, broadcast_over, gather_objects

T = TypeVar("T")
_ERRORS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    OSError,
    NotImplementedError,
    ValueError,
    TypeError,
)


class Ranks:
    """The ranks that hold one model, each a part of it: those of the largest mesh of its parameters.

    `groups`: one process group for each axis of that mesh on which there are other ranks; none without a process group.
    `index`: the number of this rank among the `size` ranks. `places`: for each of these, its rank in each group.
    """

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        mesh: DeviceMesh | None = max(meshes, key=lambda each: each.mesh.numel(), default=None)
        if mesh is None and dist.is_initialized():
            mesh = default_mesh()
        axes = [] if mesh is None else [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        self.groups = [mesh.get_group(axis) for axis in axes] if mesh is not None else []
        kind = "cpu" if mesh is None or mesh.device_type == "meta" else mesh.device_type
        current = () if kind == "cpu" else (torch.get_device_module(kind).current_device(),)
        self.device = torch.device(kind, *current)
        self.places = [*itertools.product(*(range(group.size()) for group in self.groups))]
        self.index = self.places.index(tuple(group.rank() for group in self.groups))
        self.size = len(self.places)

    @property
    def is_first(self) -> bool:
        """True on the rank that does what one rank must do: read headers, write indices."""
        return self.index == 0

    def agree(self, error: Exception | None, doing: str) -> None:
        """Raises the error of one rank on all of them. All must call it. `doing`: what they have done, for errors."""
        failed = torch.tensor([int(error is not None)], device=self.device)
        all_reduce_over(failed, self.groups, largest=True, purpose=Purpose(doing))
        if not int(failed):
            return
        errors = sorted(gather_objects((self.index, _described(error)), self.groups, self.device))
        if error is not None:
            raise error
        index, (kind, text) = next((index, each) for index, each in errors if each is not None)
        raise _ERRORS_BY_NAME.get(kind, RuntimeError)(f"rank {index}: {text}")

    def all(self, value: bool) -> bool:
        """Returns True if `value` is True on all ranks."""
        lacks = torch.tensor([int(not value)], device=self.device)
        all_reduce_over(lacks, self.groups, largest=True, purpose=Purpose("comparing what ranks can do"))
        return not int(lacks)

    def run(self, function: Callable[[], T], doing: str) -> T:
        """Returns `function()`; what it raises on any rank is raised on all of them."""
        failed: Exception | None = None
        value: Any = None
        try:
            value = function()
        except Exception as raised:
            failed = raised
        self.agree(failed, doing)
        return value  # type: ignore[no-any-return]

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns what `make()` returns on the first rank, or raises what it raises there."""
        data = b""
        if self.is_first:
            try:
                data = pickle.dumps((None, make()))
            except Exception as error:
                if not self.groups:
                    raise
                data = pickle.dumps((_described(error), None))
        failed, value = pickle.loads(self.broadcast_bytes(data, 0))
        if failed is not None:
            raise _ERRORS_BY_NAME.get(failed[0], RuntimeError)(failed[1])
        return value  # type: ignore[no-any-return]

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        """Returns `data` of the rank `source`."""
        if not self.groups:
            return data
        length = torch.tensor([len(data)], device=self.device)
        broadcast_over(length, self.groups, self.places[source])
        sent = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if data and self.index == source:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sent = sent.to(self.device)
        if sent.numel():
            broadcast_over(sent, self.groups, self.places[source])
        received = bytearray(sent.numel())
        if received:
            torch.frombuffer(received, dtype=torch.uint8).copy_(sent)
        return bytes(received)


_ERRORS_BY_NAME = {each.__name__: each for each in _ERRORS}


def _described(error: Exception | None) -> tuple[str, str] | None:
    """Returns the class and the text of an error, which can be sent whatever its class is."""
    if error is None:
        return None
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS_BY_NAME), "RuntimeError")
    return kind, str(error)


class Replicas:
    """The ranks that hold the same part of a tensor as this one. They take turns: each reads, or writes, some pieces.

    `groups`: one process group for each axis of the mesh along which the tensor is replicated.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._places = [*itertools.product(*(range(group.size()) for group in groups))]
        self.size, self.index = len(self._places), self._places.index(tuple(group.rank() for group in groups))

    def broadcast(self, tensor: Tensor, number: int) -> None:
        """Fills `tensor`, which is piece `number`, with the values of the rank whose turn it is."""
        broadcast_over(tensor, self._groups, self._places[number % self.size])
