"""Defines a model of real sizes for a GPU: Llama, without rotary embeddings."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaShape:
    """Holds the sizes of a model; `tokens` is the length of its one sequence."""

    blocks: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    tokens: int

    @property
    def block_numel(self) -> int:
        return self.dim * (2 * self.dim + 2 * self.kv_heads * (self.dim // self.heads) + 3 * self.hidden + 2)

    @property
    def groups(self) -> int:
        return self.blocks + 1


# Llama-3.2-1B (whose embedding and head are one parameter there) and Llama-3.1-8B.
LLAMAS = {
    "Llama 1B": LlamaShape(16, 2048, 32, 8, 8192, 128256, 4096),
    "Llama 8B": LlamaShape(32, 4096, 32, 8, 14336, 128256, 4096),
}


class LlamaBlock(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        dim, head = shape.dim, shape.dim // shape.heads
        self.head = head
        self.attention_norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, shape.kv_heads * head, bias=False)
        self.value = nn.Linear(dim, shape.kv_heads * head, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, shape.hidden, bias=False)
        self.up = nn.Linear(dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """`recomputes`: blocks are computed again in backward."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.recomputes = False
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x))


def make_ids(vocab: int, rows: int, tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab, (rows, tokens), generator=generator).to(device)


def run_lm_step(model: nn.Module, ids: Tensor, keeps_gradients: bool = False) -> None:
    """Runs forward, cross entropy in fp32, and backward; it drops the gradients, unless they are to be kept."""
    logits = model(ids)
    F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    if not keeps_gradients:
        model.zero_grad(set_to_none=True)
