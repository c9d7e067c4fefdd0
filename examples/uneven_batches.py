"""Trains on micro-batches of different sizes, with the gradient of the mean over all of their tokens.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/uneven_batches.py

Each step cuts the rows of a batch anywhere, and each rank gets three parts. All parts together have the loss, and the
gradient, of the whole batch. `--each` reduces gradients with each micro-batch, which needs less memory.
"""

import argparse

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, LEARNING_RATE, ROWS, STEPS, Text, join_ranks, make_gpt, say
from torch import Tensor

import fsdp2

MICRO_BATCHES = 3


def own_parts(batch: Tensor, step: int) -> tuple[Tensor, ...]:
    """Returns the micro-batches of this rank: at least one row each. All ranks cut at the same places."""
    rank, parts = dist.get_rank(), MICRO_BATCHES * dist.get_world_size()
    cuts = 1 + torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(step))[: parts - 1]
    return batch.tensor_split(cuts.sort().values)[MICRO_BATCHES * rank :][:MICRO_BATCHES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="reduce gradients with each micro-batch")
    sync = "each" if parser.parse_args().each else "last"
    device = join_ranks()
    model = make_gpt(device)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        inputs, targets = (own_parts(each, step) for each in text.batch(step))
        with fsdp2.accumulate(model, sync=sync, num_batches=MICRO_BATCHES) as acc:
            for tokens, next_tokens in zip(inputs, targets, strict=True):
                mean = model(tokens, next_tokens)  # over the tokens of this micro-batch
                acc.backward(mean * tokens.numel(), weight=tokens.numel())
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step:2}: loss {acc.mean_loss:.5f}, a mean over {acc.total_weight:.0f} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
