"""Finds unsharded parameters that do not lie in their group's memory, as gathers and reductions assume.

Users can assign `.data` of an unsharded parameter, which no version counter shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.compat import local_if_any
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.parameter import FSDPParam


class UnshardedPlaces:
    """Holds the addresses and shapes that the unsharded parameters of one group must have.

    `tensors`: those with elements, but for those that say themselves how they are gathered. `base`: the address of
    `storage` when `pointers`, the addresses of the tensors, were computed.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        buffers = group.parameters.buffers
        assert buffers is not None, "the group is unsharded"
        rows = zip(group.parameters.plain, buffers.layout.unsharded_offsets, strict=True)
        found = [(param, offset) for param, offset in rows if param.unsharded.numel()]
        self.params, self.offsets = [param for param, _ in found], [offset for _, offset in found]
        self.tensors: list[Tensor] = [param.unsharded for param in self.params]
        self.are_distributed = DTensor in map(type, self.tensors)
        self.shapes = [tensor.shape for tensor in self.find_tensors()]
        self.numels = [*map(torch.Size.numel, self.shapes)]
        self.storage = buffers.storage
        self.base, self.pointers = 0, self.offsets

    def find_tensors(self) -> list[Tensor]:
        """Returns the local tensors of those that are DTensors, and the others themselves."""
        return [*map(local_if_any, self.tensors)] if self.are_distributed else self.tensors

    def find_moved(self) -> dict[FSDPParam, tuple[int, ...] | None]:
        """Returns the parameters that lie elsewhere, with the shapes of those that have another shape."""
        found: dict[FSDPParam, tuple[int, ...] | None] = {}
        base = self.storage.data_ptr()
        rows = zip(self.params, self.find_tensors(), self.offsets, self.shapes, strict=True)
        for param, tensor, offset, shape in rows:
            if tensor.shape != shape:
                found[param] = tuple(tensor.shape)
            elif tensor.data_ptr() != base + offset or not tensor.is_contiguous():
                found[param] = None
        return found


def put_back(group: FSDPParamGroup, places: UnshardedPlaces) -> list[str]:
    """Puts unsharded parameters that lie elsewhere back into the group's memory, in their shapes. Returns their names,
    and shapes that were wrong. The group must be unsharded.
    """
    moved, parameters = places.find_moved(), group.parameters
    if not moved:
        return []
    parameters.move_unsharded()
    reshaped = [param for param, shape in moved.items() if shape is not None]
    if reshaped:
        _renew(group, reshaped)
    return [
        param.name if shape is None else f"{param.name} (expected shape {param.gathered_shape}, got {shape})"
        for param, shape in moved.items()
    ]


def _renew(group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
    """Makes other unsharded parameters: graphs of the present ones expect gradients of another shape."""
    buffers, was_registered = group.parameters.buffers, group.phase is UNSHARDED
    assert buffers is not None, "they are there"
    group.unregister()
    with torch.inference_mode(False), torch.no_grad():
        for param, memory in zip(group.parameters.plain, buffers.unsharded_parameters(), strict=True):
            if param in params:
                param.build_unsharded(memory, renew=True)
        group.parameters.follow()
    if was_registered:
        group.register()


def refuse_lost(names: Sequence[str]) -> None:
    """Raises RuntimeError if there are any unsharded parameters that a user has changed before `reshard`."""
    if names:
        raise RuntimeError(
            f"{', '.join(dict.fromkeys(names))}: modified, or `.data` assigned, between unshard() and reshard(), which "
            "is lost. Write inside `with fsdp2.full_params(module, writeback=True):`, or to the sharded parameter; "
            "change a shape (resize an embedding) before fully_shard."
        )


def refuse_moved(names: Sequence[str]) -> NoReturn:
    """Raises RuntimeError: `names` were put back into the group's memory."""
    raise RuntimeError(
        f"{', '.join(names)}: the unsharded parameter does not lie in its group's memory any more, because `.data` was "
        "assigned, or it was resized or transposed in place, while it was unsharded. The next gather would not reach "
        "it, and no optimizer would train it. What was assigned is dropped. Write inside `with fsdp2.full_params("
        "module, writeback=True):`; change a shape (resize an embedding) before fully_shard."
    )
