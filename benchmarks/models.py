"""Defines one transformer-like model, the same for every library, plain or sharded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .libraries import Library

# precision name -> (compute dtype, dtype in which gradients are reduced)
PRECISIONS = {"fp32": (torch.float32, torch.float32), "bf16/fp32": (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Shape:
    """Holds the sizes of a model and of its batch.

    `vocab=0`: no embedding and no head, so all groups but the root are equal. `hidden=0`: a block is one matrix.
    """

    blocks: int
    dim: int
    hidden: int
    tokens: int
    vocab: int = 0

    @property
    def block_numel(self) -> int:
        return 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim if self.hidden else self.dim**2

    @property
    def root_numel(self) -> int:
        return self.dim + 2 * self.vocab * self.dim

    @property
    def numel(self) -> int:
        return self.blocks * self.block_numel + self.root_numel

    @property
    def gathered_twice(self) -> float:
        """Returns the share of the parameters that backward must gather: the root and the last two blocks can stay from
        forward.
        """
        return (self.blocks - 2) * self.block_numel / self.numel

    @property
    def groups(self) -> int:
        return self.blocks + 1


# Equal blocks whose parameters dwarf the activations, and whose rows divide by every world size up to 512.
BYTES_SHAPE = Shape(blocks=8, dim=512, hidden=1536, tokens=1)
# Embedding and head of 4.8 blocks together.
HEAVY_ROOT_SHAPE = Shape(blocks=6, dim=512, hidden=1536, tokens=1, vocab=15872)


class Block(nn.Module):
    """Is attention with one head, then a gated MLP: nine parameters, two of them one-dimensional."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, hidden = shape.dim, shape.hidden
        self.attention_norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        scores = self.query(normed) @ self.key(normed).transpose(-2, -1)
        x = x + self.out(torch.softmax(scores, dim=-1) @ self.value(normed))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class OneMatrix(nn.Module):
    """Is the smallest block: one parameter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.matrix = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.matrix(x)


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim) if shape.vocab else None
        make_block = Block if shape.hidden else OneMatrix
        self.blocks = nn.ModuleList(make_block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False) if shape.vocab else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if self.head is None else self.head(x)


def build_plain(shape: Shape, precision: str) -> nn.Module:
    """Builds the model without any library, in the compute dtype, to measure its own forward and backward."""
    torch.manual_seed(0)
    return Stack(shape).to(PRECISIONS[precision][0])


def build_sharded(
    shape: Shape, precision: str, library: Library, mesh: DeviceMesh, **options: torch.dtype
) -> nn.Module:
    torch.manual_seed(0)
    mixed = PRECISIONS[precision] if is_mixed(precision) else None
    return library.shard(Stack(shape), mesh, mixed, **options)


def is_mixed(precision: str) -> bool:
    compute, reduce = PRECISIONS[precision]
    return compute != reduce


def able(libraries: Sequence[Library], precision: str) -> list[Library]:
    """Returns the libraries that can compute in this precision."""
    return [library for library in libraries if library.can_cast or not is_mixed(precision)]


def make_batch(shape: Shape, precision: str, seed: int = 1) -> Tensor:
    """Returns token ids, or activations. As in nearly all training, they require no gradient."""
    generator = torch.Generator().manual_seed(seed)
    if shape.vocab:
        return torch.randint(shape.vocab, (1, shape.tokens), generator=generator)
    batch = torch.randn(1, shape.tokens, shape.dim, generator=generator)
    return batch.to(PRECISIONS[precision][0])


def make_vectors(dim: int) -> Tensor:
    """Returns one vector of activations."""
    return torch.ones(1, dim)


def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def run_step(model: nn.Module, batch: Tensor) -> None:
    """Runs forward, backward and zero_grad, without an optimizer, whose cost is not the library's."""
    compute_loss(model, batch).backward()
    model.zero_grad(set_to_none=True)
    batch.grad = None
