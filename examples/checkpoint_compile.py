"""Saves memory and kernels: each block is recomputed in backward, and compiled.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/checkpoint_compile.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/checkpoint_compile.py --backend inductor

The order matters: checkpoint, compile, shard. Then all communication stays outside the compiled graphs. Inductor needs
a C++ compiler, or Triton on a GPU; the default backend captures the same graphs, and runs them as they are.
"""

import argparse

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, report, say
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default: %(default)s)")
    args = parser.parse_args()
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = make_gpt(device)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        model.blocks[i].compile(backend=args.backend, fullgraph=True)
        fully_shard(model.blocks[i], mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        loss = model(*text.batch(step, rank, world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    say(f"graphs compiled by {args.backend} for {len(model.blocks)} blocks: {counters['stats']['unique_graphs']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
