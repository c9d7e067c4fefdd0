"""Shards by DTensors alone, in the manner of SimpleFSDP, without compilation. It is a reference, not a library.

Every parameter is a DTensor, cut along dim 0; a read gathers it. Autograd keeps the gathered parameters until backward,
so nothing is gathered again, nothing is freed after forward, and each parameter communicates by itself.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

Dtypes = tuple[torch.dtype, torch.dtype]


def shard_by_dtensors(model: nn.Module, mesh: DeviceMesh, mixed: Dtypes | None = None) -> nn.Module:
    """Shards `model` in place. It does not communicate: all ranks hold the same parameters."""
    for module in list(model.modules()):
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            module._parameters[name] = _shard(param, mesh)
        if own:
            # Found before nn.Module.__getattr__, which would return the shard.
            reads: dict[str, Any] = {name: property(partial(_read, name=name, mixed=mixed)) for name in own}
            module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), reads)
    return model


def _shard(param: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    sharded = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None))
    sharded.register_hook(partial(_divide, by=mesh.size()))  # gloo sums, but has no mean
    return sharded


def _read(module: nn.Module, *, name: str, mixed: Dtypes | None) -> Tensor:
    """Returns the unsharded parameter, whose gradient is reduced in backward."""
    sharded = module._parameters[name]
    compute, reduce = mixed or (None, None)
    full = sharded.redistribute(placements=[Replicate()], forward_dtype=compute, backward_dtype=reduce)
    return full.to_local(grad_placements=[Partial()])


@torch.no_grad()
def _divide(gradient: DTensor, by: int) -> None:
    gradient.to_local().div_(by)
