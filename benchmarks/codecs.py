"""Defines fsdp2 with codecs, sharded and replicated, to measure the bytes and the time that they save on a slow link.

    python -m benchmarks gloo-1gbit --libraries fsdp2 torch ddp int8 int8-float8 replicate replicate-bf16 \
        replicate-int8 replicate-power-sgd --name codecs
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .simple_fsdp import Dtypes

# name -> (the function of fsdp2 that shards, the compression of its policy, made of the module fsdp2.compression)
CODECS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int8": ("fully_shard", lambda codecs: codecs.Compression(reduce_scatter=codecs.Int8())),
    "int8-float8": ("fully_shard", lambda codecs: codecs.Compression(codecs.Float8(), codecs.Int8())),
    "replicate": ("replicate", lambda codecs: codecs.Compression()),
    "replicate-bf16": ("replicate", lambda codecs: codecs.Compression(all_reduce=torch.bfloat16)),
    "replicate-int8": ("replicate", lambda codecs: codecs.Compression(all_reduce=codecs.Int8())),
    "replicate-power-sgd": (
        "replicate",
        lambda codecs: codecs.Compression(all_reduce=codecs.PowerSGD(rank=4, start=0)),
    ),
}


def shard_by_codec(name: str, model: nn.Module, mesh: DeviceMesh, mixed: Dtypes | None = None) -> nn.Module:
    """Shards, or replicates, as the standard recipe does, with the codecs of that name."""
    import fsdp2
    import fsdp2.compression

    function, choose = CODECS[name]
    policy = fsdp2.MixedPrecisionPolicy(*(mixed or ()), compression=choose(fsdp2.compression))
    shard: Callable[..., Any] = getattr(fsdp2, function)
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=policy)
    sharded: nn.Module = shard(model, mesh=mesh, mp_policy=policy)
    return sharded
