"""Saves memory and kernels: each block is recomputed in backward, and compiled.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/checkpoint_compile.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/checkpoint_compile.py --backend inductor

The order matters: checkpoint, compile, shard. Then all communication stays outside the compiled graphs. Inductor needs
a C++ compiler, or Triton on a GPU; the default backend captures the same graphs, and runs them as they are.
"""

import argparse

import torch
import torch.distributed as dist
from tiny_text import CONTEXT, DOCUMENTATION, LEARNING_RATE, ROWS, STEPS, WIDTH, Text, join_ranks, make_gpt, report, say
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard


def count_saved(block: nn.Module, stream: Tensor) -> int:
    """Returns the bytes of the tensors besides weights that a forward of `block` saves for backward."""
    weights, found = {each.data_ptr() for each in block.parameters()}, dict[int, int]()

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        block(stream)
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile (default: %(default)s)")
    args = parser.parse_args()
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = make_gpt(device)
    stream = torch.randn(ROWS // world_size, CONTEXT, WIDTH, device=device, requires_grad=True)
    saved = count_saved(model.blocks[0], stream)
    say(f"a block saves {saved:,} bytes for backward; recomputed, its input alone: {stream.nbytes:,} bytes")
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
    graphs = counters["stats"]["unique_graphs"]
    say(f"graphs compiled by {args.backend} for {len(model.blocks)} blocks: {graphs} (equal blocks share one)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
