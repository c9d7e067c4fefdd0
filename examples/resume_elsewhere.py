"""Trains with stops at any time, and resumes from the last checkpoint on any number of ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/resume_elsewhere.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 examples/resume_elsewhere.py

The first run trains 10 steps. The second continues with step 11, on three ranks, and its losses are those of a run that
was never stopped. After kill -9 during a save, the checkpoint before it remains; at SIGTERM a run saves one.
checkpointing.py has the code.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from checkpointing import StopSignal, find_last, resume, save
from tiny_text import DOCUMENTATION, LEARNING_RATE, Text, join_ranks, make_gpt, report, say
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard

SAVE_EVERY, MORE_STEPS = 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help=f"where training ends (default: after {MORE_STEPS} more)")
    parser.add_argument(
        "--folder", type=Path, default=Path("checkpoints/resume_elsewhere"), help="(default: %(default)s)"
    )
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
    end = args.steps or first - 1 + MORE_STEPS
    say(f"{f'Resumed from {last}' if last else 'A new run'}: {world_size} rank(s), steps {first} to {end}")
    for step in range(first, end + 1):
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
    saved = find_last(args.folder)
    if saved:
        others = world_size + 1 if world_size < 3 else 2
        say(f"Saved {saved}. To continue from it on another number of ranks, here {others}:")
        folder = "" if args.folder == parser.get_default("folder") else f" --folder {args.folder}"
        say(f"  torchrun --standalone --nproc-per-node {others} examples/resume_elsewhere.py{folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
