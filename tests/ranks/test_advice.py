"""Tests that the advice of errors is right: each error is provoked, its advice is followed, and training is exact.

The fault in question: an error whose advice leads to another error.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import full_params, fully_shard
from helpers import assert_same, full, run_checks, shard_batch

# ---- parameters of another size --------------------------------------------------------------------------------------


class Words(nn.Module):
    """As Hugging Face's models: a body that embeds, a head that may be tied to it."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(10, 4)
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.body.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.body.embed(tokens)))

    def resize_token_embeddings(self, size: int) -> None:
        """In the way of transformers: a new module is filled, and its memory put into the old one."""
        old = self.body.embed
        new = nn.Embedding(size, 4)
        new.weight.data[:10, :] = old.weight.data[:10, :]
        old.weight.data = new.weight.data
        old.num_embeddings = size


def assign_memory(model: Words) -> None:
    model.body.embed.weight.data = torch.zeros(12, 4)


def assign_parameter(model: Words) -> None:
    model.body.embed.weight = nn.Parameter(torch.zeros(12, 4))


def assign_module(model: Words) -> None:
    new = nn.Embedding(12, 4)
    with full_params(model):
        new.weight.data[:10] = model.body.embed.weight.data
    model.body.embed = new


def assign_tied_module(model: Words) -> None:
    assign_module(model)
    model.head.weight = model.body.embed.weight


def assign_module_of_equal_size(model: Words) -> None:
    model.head = nn.Linear(4, 10, bias=False)


RESIZED: tuple[Callable[[Words], None], ...] = (
    lambda model: model.resize_token_embeddings(12),
    assign_memory,
    assign_parameter,
    assign_module,
    assign_tied_module,
    assign_module_of_equal_size,
)


def resizing_is_refused_at_once() -> None:
    """By one error, of the change itself or of the next forward, that says to do it before fully_shard."""
    tokens = torch.tensor([[1, 2, 3]])
    for tied in (False, True):
        for change in RESIZED:
            model = Words(tied)
            for module in (model.block, model):
                fully_shard(module)
            with pytest.raises((RuntimeError, TypeError, ValueError), match="before fully_shard"):
                [change(model), model(tokens)]


def resized_before_it_trains() -> None:
    torch.manual_seed(0)
    model = Words()
    model.resize_token_embeddings(12)
    plain = copy.deepcopy(model)
    for module in (model.block, model):
        fully_shard(module)
    tokens = torch.arange(12).view(4, 3)
    model(shard_batch(tokens, dist.get_rank(), 2)).square().mean().backward()
    plain(tokens).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(p.grad), q.grad, 1e-5, 1e-6, name)


def modules_may_be_taken_out() -> None:
    """A head that is replaced by nothing to train; a module that is sharded by itself."""
    model = Words()
    for module in (model.block, model):
        fully_shard(module)
    tokens = torch.tensor([[1, 2, 3]])
    model.head = nn.Identity()
    model(tokens).sum().backward()
    model.block = fully_shard(nn.Linear(4, 4))
    model(tokens).sum().backward()


# ---- layers that take over parameters of others ---------------------------------------------------------------------


class Faster(nn.Module):
    """Takes over the parameters of a Linear."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class FasterBlock(nn.Module):
    """Takes over the modules inside a sharded one, as `from_float` of a fused block does."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.first, self.last = old[0], old[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def net() -> Any:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(5, 5), block, nn.BatchNorm1d(5), nn.Linear(5, 2))


def swap_in_evaluation(model: Any) -> None:
    """SyncBatchNorm's forward in training needs a device."""
    nn.SyncBatchNorm.convert_sync_batchnorm(model).eval()


def swap_layer(model: Any) -> None:
    model[0] = Faster(model[0])


def swap_in_block(model: Any) -> None:
    model[1][2] = Faster(model[1][2])


def swap_block(model: Any) -> None:
    model[1] = FasterBlock(model[1])


def swap_copy(model: Any) -> None:
    model[3] = copy.deepcopy(model[3])


SWAPS = (swap_layer, swap_in_block, swap_block, swap_copy, swap_in_evaluation)


def swapped_layers_are_refused() -> None:
    """By all ways into the model, until the swap is undone; what the error says makes it exact."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    for swap in SWAPS:
        for before in (False, True):  # when the groups have not run yet, or have
            model = net()
            fully_shard(model[1])
            fully_shard(model)
            if before:
                model(x).sum().backward()
            swap(model)
            for call in (model, model.forward):
                with pytest.raises(RuntimeError, match="modules before fully_shard; or build the model"):
                    call(x)
        plain = net()
        swap(plain)
        model = copy.deepcopy(plain)
        fully_shard(model[1])
        fully_shard(model)
        rows = shard_batch(x, dist.get_rank(), 2) if swap is swap_in_evaluation else x
        model(rows).square().mean().backward()
        plain(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert_same(full(p.grad), q[1].grad, 1e-5, 1e-6, f"{swap.__name__}: {name}")


CHECKS = (
    swapped_layers_are_refused,
    resizing_is_refused_at_once,
    resized_before_it_trains,
    modules_may_be_taken_out,
)


def test_advice() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])
