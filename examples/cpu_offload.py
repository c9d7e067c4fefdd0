"""Keeps weights, gradients and optimizer state on the CPU; the GPU holds only the parameters that it computes with.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/cpu_offload.py

With one GPU per rank, the device's memory holds two blocks at a time besides the activations. Without GPUs the program
runs, too, and everything is on the CPU.
"""

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, report, say
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, fully_shard


def describe(what: str, tensors: list[Tensor]) -> None:
    """Prints where the tensors of this rank are, and how much memory they take."""
    devices = " and ".join(sorted({str(tensor.device) for tensor in tensors}))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    say(f"{what}: {size:,} bytes on {devices}")


def describe_gathered(block: nn.Module, *_: object) -> None:
    describe("full parameters while a block computes", [parameter.data for parameter in block.parameters()])


def main() -> None:
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = make_gpt(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)  # on the CPU, like the parameters it is given
    text = Text(DOCUMENTATION, device)
    hook = model.blocks[0].register_forward_hook(describe_gathered)
    for step in range(1, STEPS + 1):
        loss = model(*text.batch(step, rank, world_size))
        loss.backward()
        optimizer.step()
        if step == 1:
            hook.remove()
            describe("shards of all parameters", [parameter.to_local() for parameter in model.parameters()])
            describe("shards of all gradients", [parameter.grad.to_local() for parameter in model.parameters()])
            moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            describe("shards of AdamW's moments", [moment.to_local() for moment in moments])
        optimizer.zero_grad()
        report(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
