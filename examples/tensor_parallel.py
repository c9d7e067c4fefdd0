"""Trains in two dimensions: pairs of ranks split every layer's computation, and weights are sharded across the pairs.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

torch's `parallelize_module` cuts attention into heads and the MLP into features; `fully_shard` then cuts each rank's
part of a weight along the other axis of the mesh. Parameters stay DTensors, now over both axes.
"""

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, report, say
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import clip_grad_norm_, fully_shard

TENSOR_PARALLEL = 2


def main() -> None:
    device = join_ranks(multiple_of=2 * TENSOR_PARALLEL)
    mesh_shape = (dist.get_world_size() // TENSOR_PARALLEL, TENSOR_PARALLEL)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("data", "tensor"))

    model = make_gpt(device)
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value", "mlp_in")}
        plan |= {name: RowwiseParallel() for name in ("attention_out", "mlp_out")}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    for name in ("mlp_norm", "mlp_in", "mlp_out"):
        weight = model.blocks[0].get_parameter(f"{name}.weight")
        axes = weight.device_mesh.mesh_dim_names
        say(f"{name}.weight is {tuple(weight.shape)}, on this rank {tuple(weight.to_local().shape)}: cut by {axes}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    data = mesh["data"]
    for step in range(1, STEPS + 1):
        # Ranks that share a layer's computation need the same part of the batch.
        loss = model(*text.batch(step, data.get_local_rank(), data.size()))
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=100.0)  # over both axes; torch's own takes one mesh
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
