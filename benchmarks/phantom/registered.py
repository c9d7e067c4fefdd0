"""Trains with memory that communicators register, as rank 0 of eight over torch's ProcessGroupNCCL, and prints a line
for each way: how many gathers, reduce-scatters and all-reduces a step has, how many of each touch registered memory
only, and how many segments were registered in all steps:

    python -m benchmarks.phantom.run -m benchmarks.phantom.registered
    python -m benchmarks.phantom.run -m benchmarks.phantom.registered --end ORDER    how a program may end: see `end`

The phantom's NCCL keeps the registered ranges of each communicator. Symmetric memory needs other ranks, which would
answer; a stand-in for torch's module notes which storages ranks would meet for.
"""

import gc
import os
import sys
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import FSDPModule, MixedPrecisionPolicy
from fsdp2.collectives import comm_memory
from models import mean_loss
from one_of_many import Way

from .over_nccl import BF16, MORE, RANKS, build, bytes_left, train

KINDS = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce")


class SymmetricMemory:
    """Stands in for `torch.distributed._symmetric_memory`: a pool whose segments are never split."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.meetings = 0

    def set_backend(self, name: str) -> None:
        assert name == "NCCL"

    def get_mem_pool(self, device: torch.device) -> Any:
        if self.pool is None:
            world: Any = dist.group.WORLD
            world.allreduce([torch.zeros(1, device=device)]).wait()  # then there is a communicator
            backend = world._get_backend(device)
            self.pool = torch.cuda.MemPool(backend.mem_allocator, use_on_oom=False, no_split=True)
            backend.register_mem_pool(self.pool)
        return self.pool

    def rendezvous(self, tensor: torch.Tensor, group: str) -> None:
        """Refuses, as torch does, what is not a segment of the pool."""
        address = tensor.untyped_storage().data_ptr()
        assert any(each["address"] == address for each in self.pool.snapshot()), "it is not in the pool"
        assert group == dist.group.WORLD.group_name  # type: ignore[union-attr]
        self.meetings += 1


def symmetrically(model: Any) -> None:
    model.set_requires_gradient_sync(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()


def and_summing(model: Any) -> None:
    symmetrically(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


WAYS = {name: way for name, way in MORE.items() if name.startswith("registered")}
WAYS |= {
    "symmetric memory": Way({"mp_policy": BF16}, after=symmetrically),
    "symmetric memory, only sums": Way({"mp_policy": BF16}, after=and_summing),
    "symmetric memory, only sums, fp16": Way(
        {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}, after=and_summing
    ),
}


def end(order: str) -> None:
    """Trains, and ends in one of three orders: the model is deleted while there is a communicator ("deleted"), after it
    is gone ("late"), or never ("kept"). Freed memory that a communicator had registered would end the process, if that
    is gone.
    """
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)
    models = [build(WAYS["registered memory"])]
    for _ in range(2):
        mean_loss(models[0](models[0].example(rows=2, seed=0).cuda())).backward()
    if order == "late":
        dist.destroy_process_group()
    if order != "kept":
        model = weakref.ref(models.pop())
        print(f"{order}: {bytes_left(model)} bytes are allocated, {torch.cuda.memory_reserved()} reserved")
    if order != "late":
        dist.destroy_process_group()
    print("ended", flush=True)


def main() -> None:
    for name, way in WAYS.items():
        stand_in = SymmetricMemory()
        comm_memory.symmetric_memory = lambda stand_in=stand_in: stand_in  # type: ignore[misc]
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)
        _, result = train(way)
        gc.collect()  # the next model gets a pool of its own
        calls = Counter(call[2] for call in result["calls"])
        registered = Counter(call[9] for call in result["calls"] if call[2] == "registered")
        found = ", ".join(f"{kind} {registered[kind]} of {calls[kind]}" for kind in KINDS)
        memory = result["memory"]
        print(f"{name}: {found}; met {stand_in.meetings} times; reserved {memory['reserved']}", flush=True)
        if stand_in.pool is not None:
            dist.group.WORLD._get_backend(torch.device("cuda", 0)).deregister_mem_pool(stand_in.pool)  # type: ignore[union-attr]
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--end"]:
        end(sys.argv[2])
    else:
        main()
        os._exit(0)
