"""Training that may be stopped at any moment and goes on from its last checkpoint, on any number of ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/resume_elsewhere.py --steps 20
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 3 examples/resume_elsewhere.py --steps 30

The second run starts with step 21, and its losses are those of a run that was never stopped. A checkpoint is written
under another name and renamed when it is complete: whatever has the name of a checkpoint can be loaded.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny_text import DOCUMENTATION, LEARNING_RATE, Text, join_ranks, make_gpt, report, say
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard

SAVE_EVERY = 5


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank writes its own shards. Every rank must call it."""
    partial = folder / "partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run has left
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if dist.get_rank() == 0:  # it returns from dcp.save when all ranks have written
        partial.rename(folder / f"step-{step:06}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, written by however many ranks, and return its step; 0: there is none."""
    checkpoints = sorted(folder.glob("step-*"))
    if not checkpoints:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoints[-1])
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(checkpoints[-1].name.removeprefix("step-"))


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

    first = resume(args.folder, model, optimizer) + 1
    say(f"{world_size} rank(s), steps {first} to {args.steps}")
    for step in range(first, args.steps + 1):
        loss = model(*text.batch(step, rank, world_size))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
        if step % SAVE_EVERY == 0:
            save(args.folder, step, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
