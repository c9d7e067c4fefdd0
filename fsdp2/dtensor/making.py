"""Makes DTensors of the class of sharded parameters: of local tensors, of full tensors, and of partial sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ..engine.events import extensions
from ..torch_private import rare_internals
from ..torch_private.dtensor import DTensorSpec, redistribute_local_tensor, spec_of
from ..torch_private.internals import local_of, new_dtensor


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor of the class of sharded parameters, without a copy, a check or an autograd node."""
    return new_dtensor(extensions().tensor_class, local, spec)


def cut(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns this rank's shard of a tensor that all ranks have, without communication."""
    return rare_internals.cut(full, mesh, placements, extensions().tensor_class)


def reduced(tensor: DTensor) -> DTensor:
    """Returns `tensor` with Replicate in place of its Partial placements. Every rank must call it."""
    spec, local = spec_of(tensor), local_of(tensor)
    placements = tuple(Replicate() if each.is_partial() else each for each in spec.placements)
    replicated = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    summable = local.int() if local.dtype == torch.bool else local  # gloo's sum of two bools is a byte of 2
    return dtensor(redistribute_local_tensor(summable, spec, replicated).to(local.dtype), replicated)
