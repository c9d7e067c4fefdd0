"""Trains with stops at any time, and resumes from the last checkpoint on any number of ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/resume_elsewhere.py --steps 20
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 examples/resume_elsewhere.py --steps 30

The second run starts with step 21, and its losses are those of a run that was never stopped. After kill -9 during a
save, the checkpoint before it remains; at SIGTERM a run saves one. checkpointing.py has the code.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from checkpointing import StopSignal, find_last, resume, save
from tiny_text import DOCUMENTATION, LEARNING_RATE, Text, join_ranks, make_gpt, report, say
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard

SAVE_EVERY = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="where training ends (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default="checkpoints/resume_elsewhere", help="(default: %(default)s)")
    args = parser.parse_args()
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = make_gpt(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)

    last, stop_signal = find_last(args.folder), StopSignal()
    first = 1 + (resume(last, model, optimizer) if last else 0)
    say(f"{world_size} rank(s), steps {first} to {args.steps}")
    for step in range(first, args.steps + 1):
        loss = model(*text.batch(step, rank, world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        stops = stop_signal.agreed(device)
        if stops or step % SAVE_EVERY == 0:
            save(args.folder, step, model, optimizer)
        if stops:
            say(f"stopped by SIGTERM after step {step}")
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
