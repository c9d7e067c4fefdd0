"""A GPT over bytes that computes keys and values of new bytes only, and keeps those of earlier ones in a cache.

Its parameters have the names of those of train_gpt.py, so that it loads checkpoints of that program. generate.py shards
it, and then has it loaded or trained here.
"""

import codecs
import io
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpointing import find_last
from tiny_text import CONTEXT, LEARNING_RATE, Text, report
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from train_gpt import GPT, Block

with redirect_stdout(io.StringIO()):
    import this  # prints the text that it holds
ZEN = codecs.decode(this.s, "rot13")
SMALL = {"width": 64, "layers": 4, "heads": 4, "context": CONTEXT}
STEPS = 200

Cache = list[Tensor]  # keys and values of one block; empty before the first forward


class CachedBlock(Block):
    """A block of train_gpt.py that is given the new tokens only."""

    def forward(self, stream: Tensor, cache: Cache) -> Tensor:
        """Adds the keys and values of the new tokens to those of earlier ones, which `cache` holds."""
        heads = self.query_key_value(self.attention_norm(stream)).unflatten(-1, (3, self.heads, -1))
        query, *new = heads.permute(2, 0, 3, 1, 4)  # 3, batch, head, time, feature
        cache[:] = [torch.cat(parts, dim=2) for parts in zip(cache, new, strict=True)] if cache else new
        # Either all tokens are new, or one is, which attends to all.
        mixed = F.scaled_dot_product_attention(query, *cache, is_causal=query.shape == cache[0].shape)
        stream = stream + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return stream + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))


class CachedGPT(GPT):
    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__(width, layers, heads, context)
        self.blocks = nn.ModuleList(CachedBlock(width, heads) for _ in range(layers))

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Returns logits for what follows each of `tokens`, which themselves follow those in the caches."""
        caches = caches or [[] for _ in self.blocks]
        start = caches[0][0].shape[2] if caches[0] else 0
        stream = self.byte_embedding(tokens) + self.position_embedding.weight[start : start + tokens.shape[1]]
        for block, cache in zip(self.blocks, caches, strict=True):
            stream = block(stream, cache)
        return self.head(self.norm(stream))


def find_checkpoint(folder: Path, heads: int) -> tuple[Path, dict[str, int]]:
    """Returns the last checkpoint there, and the arguments of CachedGPT for its model."""
    checkpoint = find_last(folder)
    if checkpoint is None:
        raise ValueError(f"--checkpoint {folder}: expected a file .metadata there, or folders named step-*")
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    layers = sum(name.startswith("model.") and name.endswith(".query_key_value.weight") for name in entries)
    if not layers:
        raise ValueError(f"--checkpoint {folder}: expected a model of train_gpt.py, got another one")
    context, width = entries["model.position_embedding.weight"].size
    if heads < 1 or width % heads:
        raise ValueError(f"--heads {heads}: expected a divisor of the width of the model, {width}")
    return checkpoint, {"width": width, "layers": layers, "heads": heads, "context": context}


def load(model: CachedGPT, checkpoint: Path) -> None:
    """Every rank must call it, behind fully_shard."""
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=checkpoint)
    set_model_state_dict(model, state["model"])


def train_quickly(model: CachedGPT, device: torch.device) -> None:
    """Learns a short text nearly by heart. Every rank must call it, behind fully_shard."""
    with torch.no_grad():
        for embedding in (model.byte_embedding, model.position_embedding):
            embedding.weight.mul_(15)  # larger than for long training: it is to learn in seconds
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), Text(ZEN, device)
    for step in range(1, STEPS + 1):
        inputs, targets = text.batch(step, dist.get_rank(), dist.get_world_size())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, STEPS):
            report(step, loss)
