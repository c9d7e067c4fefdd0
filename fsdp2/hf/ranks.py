"""Brings the ranks of a model together: one error for all, values of the first, turns between replicas."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.ranks import attempt, portable, require_same
from ..shards.ranks import CommLabel, all_reduce_over, broadcast_over, default_mesh, gather_objects

T = TypeVar("T")


class Replicas:
    """The ranks that hold the same part of a tensor as this one. They take turns: each reads, or writes, some pieces.

    `groups`: one process group for each axis of the mesh along which the tensor is replicated.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.places = [*itertools.product(*(range(group.size()) for group in groups))]
        self.size, self.index = len(self.places), self.places.index(tuple(group.rank() for group in groups))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fills `tensor` with the values of rank `source` among these."""
        broadcast_over(tensor, self.groups, self.places[source])


class Ranks(Replicas):
    """The ranks that hold one model, each a part of it: those of the largest of `meshes`; without one, all ranks; of
    None, this process alone.

    `index`: the number of this rank among the `size` ranks. `device`: where they communicate.
    """

    def __init__(self, meshes: Sequence[DeviceMesh] | None) -> None:
        mesh: DeviceMesh | None = max(meshes or (), key=lambda each: each.mesh.numel(), default=None)
        if meshes is not None and mesh is None and dist.is_initialized():
            mesh = default_mesh()
        axes = [] if mesh is None else [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        super().__init__([mesh.get_group(axis) for axis in axes] if mesh is not None else [])
        kind = "cpu" if mesh is None or mesh.device_type == "meta" else mesh.device_type
        current = () if kind == "cpu" else (torch.get_device_module(kind).current_device(),)
        self.device = torch.device(kind, *current)

    @property
    def is_first(self) -> bool:
        """True on the rank that does what one rank must do: read headers, write indices."""
        return self.index == 0

    def all(self, value: bool, doing: str) -> bool:
        """Returns True if `value` is True on all ranks. All must call it. `doing`: what they do, for errors."""
        lacks = torch.tensor([int(not value)], device=self.device)
        all_reduce_over(lacks, self.groups, largest=True, comm_label=CommLabel(doing))
        return not int(lacks)

    def gather(self, value: Any) -> list[Any]:
        """Returns `value` of each rank, in their order."""
        found = gather_objects((self.index, value), self.groups, self.device)
        return [value for _, value in sorted(found, key=lambda each: each[0])]

    def require_same(self, function: str, arguments: Mapping[str, Any]) -> None:
        """Compares arguments of a function between the ranks. All must call it.

        Raises:
            ValueError: one of them differs, on all ranks.
        """
        require_same(function, self.gather(dict(arguments)))

    def run(self, function: Callable[[], T], doing: str) -> T:
        """Returns `function()`; what it raises on any rank is raised on all of them."""
        value, failed = attempt(function)
        if not self.all(failed is None, doing):
            errors = self.gather(None if failed is None else portable(failed))
            if failed is not None:
                raise failed
            index, (kind, text) = next((i, each) for i, each in enumerate(errors) if each is not None)
            raise kind(f"rank {index}: {text}")
        return value  # type: ignore[return-value]

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns what `make()` returns on the first rank, or raises what it raises there."""
        value, failed = attempt(make) if self.is_first else (None, None)
        data = pickle.dumps((None if failed is None else portable(failed), value))
        failed, value = pickle.loads(self.broadcast_bytes(data, 0))
        if failed is not None:
            kind, text = failed
            raise kind(text)
        return value  # type: ignore[no-any-return]

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        """Returns `data` of the rank `source`."""
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast(length, source)
        received = bytearray(data if self.index == source else int(length))
        if received:
            memory = torch.frombuffer(received, dtype=torch.uint8)
            sent = memory.to(self.device)
            self.broadcast(sent, source)
            memory.copy_(sent)
        return bytes(received)
