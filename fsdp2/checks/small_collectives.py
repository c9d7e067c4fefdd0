"""Collectives of fsdp2's own besides those of parameters and gradients: each says what it is, for ranks to compare."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import group_compat
from .rollcall import Rollcall, are_checked
from ..core.comm import PairwiseComm, all_gather_now, all_reduce_now, make_comm
from .headers import Label

_DOING = "all-reducing"


def all_reduce_over(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup], *, largest: bool, label: Label | None = None
) -> None:
    """tensor := its sum, or its largest values, over the ranks of a mesh that has these groups, one for each axis.

    Raises:
        RuntimeError: gloo, or the debug level, and ranks are out of step; on all of them. `label` says what it was.
    """
    label = label or Label()
    for group in groups:
        if are_checked(group):
            Rollcall(group, tensor.device).answer(label.header(_DOING, [tensor]))
        elif group_compat.backend_name(group, tensor.device) == "gloo":
            PairwiseComm(group, label).compare(_DOING, tensor)
        try:
            all_reduce_now(tensor, group, largest=largest)
        except RuntimeError as error:  # a peer is gone, say
            label.locate(error, f"{_DOING} {label.name}")
            raise


def gather_objects(value: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """`value` of every rank of a mesh that has these groups, one for each of its axes; in one order on all ranks.

    All of these ranks must call it. What can be pickled crosses as bytes on `device`; torch's own function needs numpy.
    """
    found = [value]
    for group in groups:
        data = pickle.dumps(found)
        nbytes = torch.tensor([len(data)], device=device)
        all_reduce_over(nbytes, [group], largest=True)
        # What follows a pickle is not read.
        of_all = all_gather_now(data.ljust(int(nbytes), b"\0"), make_comm(group, device), device)
        found = [each for theirs in of_all for each in pickle.loads(theirs)]
    return found
