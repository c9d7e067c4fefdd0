"""Trains by hybrid sharding: two replicas of the model, each sharded over two ranks, with gradient accumulation.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/hsdp.py

On machines of many GPUs, a replica per machine keeps the gathers on its fast links; only gradients cross the network,
and with accumulation only once per step: until the last micro-batch, each replica sums its own.
"""

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, report, say
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard

REPLICAS, ACCUMULATED = 2, 2


def main() -> None:
    device = join_ranks(multiple_of=2 * REPLICAS)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh_shape = (REPLICAS, world_size // REPLICAS)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard"))

    model = make_gpt(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weight = model.head.weight
    say(f"head.weight is {tuple(weight.shape)}, on this rank {tuple(weight.to_local().shape)}: {weight.placements}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        losses = []
        for i in range(ACCUMULATED):
            model.set_requires_all_reduce(i == ACCUMULATED - 1)
            loss = model(*text.batch(step, rank * ACCUMULATED + i, world_size * ACCUMULATED))
            (loss / ACCUMULATED).backward()  # gradients are averaged over ranks, but summed over backward passes
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        report(step, torch.stack(losses).mean())

    every_shard = [torch.empty_like(weight.to_local()) for _ in range(REPLICAS)]
    dist.all_gather(every_shard, weight.to_local().detach(), group=mesh.get_group("replicate"))
    say(f"replicas hold equal weights: {all(torch.equal(shard, every_shard[0]) for shard in every_shard)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
