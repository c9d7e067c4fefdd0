"""Wraps a model by each library on a GPU, real or simulated: in blocks, unless a recipe says otherwise."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .recipe import MODULES

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Recipe:
    """Holds the options of a library.

    Args:
        reshard_after_forward: if True, the unsharded parameters are freed between forward and backward, where possible.
        offload: if True, parameters, gradients and the optimizer's state are on the CPU.
        casts: if True, the model computes in bf16, and gradients are reduced in fp32. Else all is in fp32.
        units: returns the modules of a model that become groups of their own, inner ones first.
    """

    reshard_after_forward: bool | None = None
    offload: bool = False
    casts: bool = True
    units: Callable[[Any], Iterable[nn.Module]] = attrgetter("blocks")


def wrap_by_fully_shard(name: str, model: nn.Module, mesh: DeviceMesh, recipe: Recipe) -> nn.Module:
    library = importlib.import_module(MODULES[name])
    options: dict[str, Any] = {"mesh": mesh}
    if recipe.casts:
        options["mp_policy"] = library.MixedPrecisionPolicy(BF16, FP32)
    if recipe.reshard_after_forward is not None:
        options["reshard_after_forward"] = recipe.reshard_after_forward
    if recipe.offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in recipe.units(model):
        library.fully_shard(unit, **options)
    return library.fully_shard(model, **options)


def wrap_by_fsdp1(_: str, model: nn.Module, mesh: DeviceMesh, recipe: Recipe) -> nn.Module:
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import CustomPolicy

    keeps, units = recipe.reshard_after_forward is False, set(recipe.units(model))
    return fsdp.FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP if keeps else fsdp.ShardingStrategy.FULL_SHARD,
        cpu_offload=fsdp.CPUOffload(offload_params=recipe.offload),
        auto_wrap_policy=CustomPolicy(units.__contains__),
        mixed_precision=fsdp.MixedPrecision(param_dtype=BF16, reduce_dtype=FP32) if recipe.casts else None,
        device_id=_device_of(mesh),
        use_orig_params=True,
    )


class _Autocast(nn.Module):
    """Casts weights where they are used, because DDP casts nothing."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        super().__init__()
        self.model, self.device_type = model, device_type

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast(self.device_type, BF16):
            return self.model(ids)


def wrap_by_ddp(_: str, model: nn.Module, mesh: DeviceMesh, recipe: Recipe) -> nn.Module:
    # There is nobody whose parameters to compare with.
    ddp = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)
    device = _device_of(mesh)
    ddp.register_comm_hook([device] if device.type == "cuda" else [], _finish_at_once)
    return _Autocast(ddp, mesh.device_type) if recipe.casts else ddp


def _finish_at_once(devices: list[torch.device], bucket: dist.GradBucket) -> Future[Tensor]:
    """Replaces an all-reduce: the Work of a fake process group has no result, which DDP needs."""
    finished: Future[Tensor] = Future(devices=devices)
    finished.set_result(bucket.buffer())
    return finished


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device(mesh.device_type, 0)


WRAPPINGS: dict[str, Callable[[str, nn.Module, DeviceMesh, Recipe], nn.Module]] = {
    **dict.fromkeys(MODULES, wrap_by_fully_shard),
    "fsdp1": wrap_by_fsdp1,
    "ddp": wrap_by_ddp,
}


def wrap(name: str, model: nn.Module, mesh: DeviceMesh, recipe: Recipe | None = None) -> nn.Module:
    return WRAPPINGS[name](name, model, mesh, recipe or Recipe())


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Gives a model that was built on meta, sharded or not, small random weights on `device`."""
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.normal_(std=0.02)
    return model


def step_beside_forward(optimizer: Any) -> Any:
    """Returns an optimizer of fsdp2's parameters that steps beside the next forward. Before torch 2.13 nothing tells of
    writes to gradients, for which it asks. So it is for programs that do not write to them.
    """
    importlib.import_module("fsdp2.engine.write_notices").notices.sees_operations = True
    return importlib.import_module("fsdp2").flatten_optimizer(optimizer, beside_forward=True)
