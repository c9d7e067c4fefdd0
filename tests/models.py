"""Defines tiny unusual models, each named after what it exercises, and a tensor class.

Every model takes one tensor whose dim 0 is the batch and returns one tensor with the same dim 0, in which no row
depends on another row: so any equal split of a batch over ranks computes the same function. `example` makes such a
batch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class TinyModel(nn.Module):
    """Is a model that can make its own batches: floats of `row_shape`, or token ids below `vocab`."""

    row_shape: tuple[int, ...] = (5,)
    vocab: int | None = None

    def example(self, *, rows: int, seed: int) -> Tensor:
        """Returns the batch number `seed`, the same on every rank, whatever the random state."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocab is not None:
            return torch.randint(self.vocab, (rows, *self.row_shape), generator=generator)
        return torch.randn(rows, *self.row_shape, generator=generator)

    def before_step(self, step: int) -> None:
        """Changes something from step to step; it is called for the sharded and the plain model alike."""


def mean_loss(output: Tensor) -> Tensor:
    """Returns a mean over all elements, in at least fp32: the average over equal slices is the value for the whole
    batch.
    """
    return (output.to(torch.promote_types(output.dtype, torch.float32)) - 0.5).square().mean()


class OddMLP(TinyModel):
    """Has layers of 7, 3, 1 and 5 rows with biases: none divides evenly, and 1 and 3 leave some of 4 ranks without a
    row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.narrow = nn.Linear(7, 3)
        self.single = nn.Linear(3, 1)
        self.back = nn.Linear(1, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.narrow(torch.tanh(self.wide(x))))
        return self.back(self.single(hidden)) + x


class CausalBlock(nn.Module):
    """Is a pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(TinyModel):
    """Has embedding, blocks, norm and head; no rank count divides the vocabulary; `tied` shares embedding and head."""

    row_shape = (4,)
    vocab = 23

    def __init__(self, *, dim: int = 6, heads: int = 2, depth: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocab, dim)
        self.blocks = nn.ModuleList(CausalBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SharedModule(TinyModel):
    """Has one module that runs three times in a forward, and is registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.repeated = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
        self.alias = self.repeated

    def forward(self, x: Tensor) -> Tensor:
        x = self.repeated(torch.tanh(self.first(x)))
        x = torch.tanh(self.first(self.repeated(x)))
        return self.alias(x)


class SkippedModule(TinyModel):
    """Has a branch that runs in every other step, a module and a parameter that never run, an unused output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.branch = nn.Linear(7, 7)
        self.never = nn.Linear(3, 3)
        self.ignored_output = nn.Linear(7, 2)
        self.last = nn.Linear(7, 5)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.use_branch = True

    def before_step(self, step: int) -> None:
        self.use_branch = step % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.ignored_output(x)
        if self.use_branch:
            x = x + torch.tanh(self.branch(x))
        return self.last(x)


class LoRALinear(nn.Module):
    """Has a frozen base weight and two trainable factors, in one module and so in one group."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(out_features, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class FrozenMix(TinyModel):
    """Has frozen and trainable parameters together, and one module that is frozen entirely between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = LoRALinear(5, 7, rank=2)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = LoRALinear(7, 5, rank=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class TinyLSTM(TinyModel):
    """Has an nn.LSTM, which keeps a second list of its weights (`_flat_weights`) that must follow every swap."""

    row_shape = (3, 5)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 3, num_layers=2, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class ConvNet(TinyModel):
    """Has 4-d weights with 5 and 3 rows, a transposed convolution (dim 0 is its input), a group norm."""

    row_shape = (2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.GroupNorm(2, 6)
        self.mix = nn.Conv2d(6, 3, 1, bias=False)
        self.grow = nn.ConvTranspose2d(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.grow(self.mix(torch.tanh(self.norm(self.conv(x)))))


class Experts(TinyModel):
    """Has a 3-d parameter (3 experts), a 1-row one and a parameter of the root itself, used without any nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 5, 7) * 0.3)
        self.down = nn.Parameter(torch.randn(3, 7, 5) * 0.3)
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("bi,eih->beh", x, self.up))
        outputs = torch.einsum("beh,eho->beo", hidden, self.down)
        return (outputs * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1) * self.scale


class MixedDtypes(TinyModel):
    """Has fp32 and bf16 parameters in one group, each computed and stored in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.low = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.low_scale = nn.Parameter(torch.ones(1, 3, dtype=torch.bfloat16))
        self.last = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(torch.tanh(self.first(x)).bfloat16()) * self.low_scale
        return self.last(torch.tanh(low).float())


class ConvStack(TinyModel):
    """Has weights of 1, 2 and 3 dims that are uneven along each, and even ones that are large enough to go direct."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.split = nn.Conv1d(1, 6, 3)
        self.mix = nn.Conv1d(6, 3, 2)
        self.even = nn.Linear(12, 24)
        self.down = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.split(torch.tanh(self.up(x * self.scale)).unsqueeze(1)))
        return self.down(torch.tanh(self.even(self.mix(hidden).flatten(1))))


class FewExperts(TinyModel):
    """Has three experts and one that all tokens go through: fewer rows than most numbers of ranks, but many columns."""

    row_shape = (32,)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3)
        self.up = nn.Parameter(torch.randn(3, 32, 40) * 0.2)
        self.down = nn.Parameter(torch.randn(3, 40, 32) * 0.2)
        self.shared = nn.Parameter(torch.randn(1, 32, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(torch.einsum("bi,eih->beh", x, self.up))
        outputs = torch.einsum("beh,eho->beo", hidden, self.down)
        mixed = (outputs * self.gate(x).softmax(-1).unsqueeze(-1)).sum(1)
        return mixed + torch.tanh(x @ self.shared[0])


class Odd(TinyModel):
    """Has even, uneven and one-row matrices, a vector and a scalar; a forward may use the left or the right alone."""

    row_shape = (16,)

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 24, bias=False), nn.Linear(16, 7, bias=False)
        self.out = nn.Linear(31, 5, bias=False)
        self.shift, self.scale = nn.Parameter(torch.randn(24)), nn.Parameter(torch.tensor(1.5))
        self.short = nn.Parameter(torch.ones(1, 5))
        self.use = "lr"

    def before_step(self, step: int) -> None:
        self.use = ("lr", "l", "r")[step % 3]

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x) + self.shift if "l" in self.use else x.new_zeros(len(x), 24)
        right = self.right(x) if "r" in self.use else x.new_zeros(len(x), 7)
        return self.out(torch.tanh(torch.cat([left, right], 1)).to(x.dtype)) * self.scale * self.short


class Strided(TinyModel):
    """Has parameters that are not contiguous: a transposed matrix, channels last, a part of a larger tensor."""

    row_shape = (48,)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(4, 5).T)
        self.part = nn.Parameter(torch.randn(8, 4)[::2])

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.conv(images)).mean((2, 3)) @ self.matrix @ self.part


class Scaled(TinyModel):
    """Has scalars, as CLIP does: one that is trained, beside others, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * torch.tanh(self.layer(x)) / self.fixed + self.shift


class Nothing(nn.Module):
    """Has a weight without elements, trained or frozen."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 5), trained)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x @ self.weight.T], 1)


class WithNothing(TinyModel):
    """Has groups that hold no elements, in front of one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.frozen = Nothing(True), Nothing(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.empty(x)))


class Normed(TinyModel):
    """Has each norm without statistics over the batch, between layers."""

    row_shape = (2, 7)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv1d(2, 6, 3), nn.Linear(5, 3)
        self.group, self.layer = nn.GroupNorm(3, 6), nn.LayerNorm((6, 5))
        self.instance, self.rms = nn.InstanceNorm1d(6, affine=True), nn.RMSNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(self.group(self.conv(x))))
        return self.last(self.rms(torch.tanh(self.instance(x))))


class DoRALinear(LoRALinear):
    """Computes m * (W + B A) / |W + B A| x, row by row: a norm over frozen and trained weights; m is trained."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__(in_features, out_features, rank)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1, keepdim=True).detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.merged(), self.base.bias)

    def merged(self) -> Tensor:
        direction = self.base.weight + self.up @ self.down
        return self.magnitude * direction / direction.norm(dim=1, keepdim=True).detach()


class Adapted(FrozenMix):
    """Has a layer with a DoRA adapter around one that is frozen altogether, and one with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = DoRALinear(5, 7, rank=2), LoRALinear(7, 5, rank=2)


class TanhBlock(nn.Module):
    """Is a residual block of two Linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class NormedBlock(nn.Module):
    """Is a norm and a residual of two Linear layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Wrapper(Tensor):
    """Holds its values in another tensor, `inner`, and does not say how it is gathered."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


def build(make: Callable[[], TinyModel] = OddMLP) -> Any:
    """Returns a model in fp64, the same on each rank."""
    torch.manual_seed(1)
    return make().double()
