"""Marks the shards that torch.save writes, so that no other rank takes them for its own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..torch_private.internals import spec_of

# The attribute of a pickled DTensor that says where on its mesh the rank is that has written it.
_MARK = "_fsdp2_saved_at"
_DEPTH = 24


def mark(tensor: DTensor) -> None:
    """Notes on `tensor`, which is about to be pickled, whose shard it has. Warns if torch.save writes it on the first
    rank, which is perhaps alone.
    """
    if not dist.is_initialized():  # any more: whose shard it is can't be told
        return
    place = _place(tensor)
    vars(tensor)[_MARK] = place
    if place and not any(place) and _is_saved():
        warnings.warn(
            "torch.save of sharded tensors: the file has the shards of this rank alone. If the other ranks write no "
            "files of their own, call torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and save what the first "
            "one gets; for an optimizer, get_optimizer_state_dict.",
            stacklevel=2,
        )


def refuse_others(named: Iterable[tuple[str, Any]]) -> None:
    """Refuses shards that another rank has saved.

    Raises:
        RuntimeError: there are some among the values of `named`.
    """
    for name, value in named:
        if isinstance(value, DTensor):
            saved_at, here = vars(value).get(_MARK), _place(value)
            if saved_at is not None and saved_at != here:
                raise RuntimeError(
                    f"{name}: expected the shard of this rank, which is at {here} on the axes that shard, got that of "
                    f"the rank at {saved_at}: torch.save writes the shards of one rank. Let each rank read its own "
                    "file; or save a full state dict, of torch.distributed.checkpoint.state_dict.get_model_state_dict("
                    "model, options=StateDictOptions(full_state_dict=True)), or by torch.distributed.checkpoint.save."
                )


def _place(tensor: DTensor) -> tuple[int, ...]:
    """Returns this rank's coordinates on the axes that cut the tensor; none if ranks hold the same.

    A mesh that was unpickled has the coordinates of the rank that has pickled it.
    """
    spec: Any = spec_of(tensor)
    found = (spec.mesh.mesh == dist.get_rank()).nonzero().tolist()
    coordinates = found[0] if found else [-1] * spec.mesh.ndim
    cuts = [not placement.is_replicate() and spec.mesh.size(i) > 1 for i, placement in enumerate(spec.placements)]
    return tuple(int(at) for at, is_cut in zip(coordinates, cuts, strict=True) if is_cut)


def _is_saved() -> bool:
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__") == "torch.serialization":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
