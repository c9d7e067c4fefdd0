"""Trains on sequences that pairs of ranks share: each computes half of the positions, and weights are sharded over all.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/context_parallel.py

Attention alone needs other positions: each rank gathers the keys and values of its pair, and attends with its own
queries. Everything else, `fully_shard` included, takes the axis of positions as one more axis of data. The loss of a
rank is a sum over its positions, which `accumulate` divides by the number of all. On GPUs, torch's `context_parallel`
(torch.distributed.tensor.experimental) replaces `attend`, and moves the keys around a ring instead.
"""

from typing import Any

import tiny_text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, say
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import DataParallelMeshDims, accumulate, check_same_batch, clip_grad_norm_, fully_shard

CONTEXT_PARALLEL = 2


class GatherPositions(torch.autograd.Function):
    """Gathers all positions, along dim 2, from the ranks of a group, and sums their gradients where they came from."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), dim=2)[ctx.group.rank()], None


def attend(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns causal attention of this rank's positions to those of all ranks of `group`."""
    keys, values = (GatherPositions.apply(each, group) for each in (key, value))
    own, whole = query.shape[2], keys.shape[2]
    is_before = torch.ones(own, whole, dtype=torch.bool, device=query.device).tril(diagonal=group.rank() * own)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=is_before)


def sum_of_losses(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(inputs, targets) * targets.numel()


def main() -> None:
    device = join_ranks(multiple_of=CONTEXT_PARALLEL)
    shape = (dist.get_world_size() // CONTEXT_PARALLEL, CONTEXT_PARALLEL)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
    data, context = mesh["data"], mesh["context"]
    group, place = context.get_group(), context.get_local_rank()
    tiny_text.attend = lambda query, key, value: attend(query, key, value, group)

    model = make_gpt(device)
    positions = torch.arange(tiny_text.CONTEXT, device=device).chunk(CONTEXT_PARALLEL)[place]
    model.positions = positions
    dims = DataParallelMeshDims(shard=("data", "context"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    say(f"each rank computes {len(positions)} of {tiny_text.CONTEXT} positions")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        # By the rank along "data" alone: ranks of one sequence need the same rows, and dropout seeds by position.
        batch = text.batch(step, data.get_local_rank(), data.size())
        check_same_batch(mesh, "context", *batch)
        inputs, targets = (each.chunk(CONTEXT_PARALLEL, dim=1)[place] for each in batch)
        with accumulate(model, num_batches=1) as acc:
            acc.backward(sum_of_losses(model, inputs, targets), weight=targets.numel())
        clip_grad_norm_(model.parameters(), max_norm=100.0)
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step:2}: loss {acc.mean_loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
