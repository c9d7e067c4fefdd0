"""Provides the short examples with a text cut into batches, a small GPT over bytes, and functions to join other ranks.

A batch depends on its step alone, and the ranks divide it. So all examples that train this model on the documentation
print the same losses up to rounding, on any number of ranks.
"""

import os
import sys
from pathlib import Path
from pydoc_data.topics import topics  # what help("for") prints: half a megabyte of English

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEAD_WIDTH, LAYERS = 256, 64, 16, 2  # one token per byte
ROWS, CONTEXT = 24, 64  # of a batch; 24 rows divide evenly over 1, 2, 3, 4, 6 and 8 parts
STEPS, LEARNING_RATE = 20, 5e-3
DOCUMENTATION = "\n".join(topics[name] for name in sorted(topics))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns causal attention. Tensors are (rows, heads, positions, features)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Is attention and an MLP, each with a norm before it and added to the stream: one group of `fully_shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.attention_norm(stream)
        projected = (self.query(normed), self.key(normed), self.value(normed))
        # As many heads as there are features: under tensor parallelism, a rank computes only some.
        query, key, value = (each.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for each in projected)
        mixed = attend(query, key, value)
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))


class GPT(nn.Module):
    """Returns the mean loss when it is called with bytes and the bytes that follow them."""

    def __init__(self) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.positions: slice | Tensor = slice(None)  # those of the inputs

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        stream = self.byte_embedding(inputs) + self.position_embedding.weight[self.positions]
        for block in self.blocks:
            stream = block(stream)
        return F.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), targets.flatten())


def make_gpt(device: torch.device) -> GPT:
    """Returns a GPT with the same weights on every rank."""
    torch.manual_seed(0)
    return GPT().to(device)


class Text:
    """Makes batches of random windows of a text."""

    def __init__(self, text: str, device: torch.device) -> None:
        self.data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device, torch.long)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Returns part `part` of `parts` of the batch of this step: bytes, and the bytes that follow them."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.data) - CONTEXT, (ROWS,), generator=generator).chunk(parts)[part]
        windows = self.data[(starts[:, None] + torch.arange(CONTEXT + 1)).to(self.data.device)]
        return windows[:, :-1], windows[:, 1:]


def join_ranks(multiple_of: int = 1) -> torch.device:
    """Joins the other processes that torchrun has started; without torchrun, this process is the only rank.

    Returns this rank's GPU if there is one for each rank of the machine, else the CPU. Ends the program if the number
    of ranks is no multiple of `multiple_of`.
    """
    ranks, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if ranks % multiple_of:
        name = Path(sys.argv[0]).name
        how = f"torchrun --standalone --nproc-per-node {multiple_of} examples/{name}"
        message = f"{name}: expected {multiple_of} ranks or a multiple of that, got {ranks}. Start it by: {how}"
        sys.exit(message if local_rank == 0 else 1)  # once on each machine
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def report(step: int, loss: Tensor) -> None:
    """Prints the loss of the whole batch, of which each rank has an equal part. Every rank must call it."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    say(f"step {step:2}: loss {mean.item():.5f}")
