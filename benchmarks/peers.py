"""Defines torch's other ways to train on several ranks, FSDP1 and DDP, and reads the gradients of any library."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .simple_fsdp import Dtypes


def shard_by_fsdp1(model: nn.Module, mesh: DeviceMesh, mixed: Dtypes | None = None) -> nn.Module:
    policy = MixedPrecision(param_dtype=mixed[0], reduce_dtype=mixed[1]) if mixed else None

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module, device_mesh=mesh, mixed_precision=policy, use_orig_params=True, device_id=torch.device("cpu")
        )

    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return wrap(model)


def shard_by_ddp(model: nn.Module, mesh: DeviceMesh, mixed: Dtypes | None = None) -> nn.Module:
    """Wraps in DDP, which shards nothing, and so has neither groups nor gathers. All ranks hold the same parameters."""
    if mixed is not None:
        raise NotImplementedError("DDP's mixed precision needs streams and events, which the CPU has not.")
    parallel = DistributedDataParallel(model, process_group=mesh.get_group(), init_sync=False)
    if dist.get_backend() != "gloo":
        parallel.register_comm_hook(mesh.get_group(), _sum_of_bucket)
    return parallel


def _sum_of_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums as DDP does by itself, for simulated process groups, whose works have no future that holds a sum."""
    summed = bucket.buffer().div_(group.size())
    dist.all_reduce(summed, group=group)
    future: Future[Tensor] = Future()
    future.set_result(summed)
    return future


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns gradients by the names of the plain model, for any library. Every rank must call it."""
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if is_fsdp1 else nullcontext():
        return {_plain_name(name): _full_gradient(name, param) for name, param in model.named_parameters()}


def _plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def _full_gradient(name: str, param: nn.Parameter) -> Tensor:
    if param.grad is None:
        raise RuntimeError(f"{name}: no gradient after backward.")
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad.clone()
