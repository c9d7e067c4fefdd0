"""An embedding whose rows are looked up at their owners (`embed_by_rows`), beside plain training on the whole batch."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, embed_by_rows, full_params, fully_shard
from helpers import end_of_part, full, run_ranks, world_sizes

ROWS, WIDTH, STEPS = 11, 6, 3
LENGTHS = [5, 3, 0, 7]  # how many tokens the ranks have


class Language(nn.Module):
    def __init__(self, padding_idx: int | None = None, checkpoints: bool = False, num: int = 1) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(ROWS + i, WIDTH, padding_idx=padding_idx) for i in range(num))
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.checkpoints = checkpoints

    def begin(self, ids: Tensor) -> Tensor:
        return sum((embed(ids) for embed in self.embeds), start=torch.zeros((), dtype=self.embeds[0].weight.dtype))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = checkpoint(self.begin, ids, use_reentrant=False) if self.checkpoints else self.begin(ids)
        return self.head(self.block(hidden))


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Language:
    torch.manual_seed(3)
    return Language(**options).to(dtype)


def shard(model: Language, mesh: Any = None, **options: Any) -> Language:
    for embed in model.embeds:
        embed_by_rows(embed, mesh=mesh, **options)
    fully_shard(model.block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank: int, step: int) -> Tensor:
    """Returns the ids of a rank, of which some repeat."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (LENGTHS[rank],), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum()  # what ranks sum up to


def train(model: nn.Module, optimizer: Any, ranks: list[int], num_ranks: int, micro: int = 1, sync: bool = True) -> Any:
    """Trains on the batches of `ranks`; losses are divided so that the mean over ranks is the loss of the whole."""
    norms = []
    for step in range(STEPS):
        for i in range(micro):
            holds = sync or i == micro - 1 or not isinstance(model, fsdp2.FSDPModule)
            with nullcontext() if holds else fsdp2.no_sync(model):
                loss = sum(loss_of(model, batch(rank, step * micro + i)) for rank in ranks) / micro
                (loss if isinstance(model, fsdp2.FSDPModule) else loss / num_ranks).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: full(p).clone() for name, p in model.named_parameters()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", world_sizes(1, 2, 3, 4))
def test_trains_as_plain_on_the_whole_batch(size: int) -> None:
    def body(rank: int, size: int) -> None:
        ways: list[dict[str, Any]] = [
            {},
            {"padding_idx": 2},
            {"checkpoints": True},
            {"num": 2},
            {"micro": 3},
            {"micro": 3, "sync": False},
        ]
        for way in ways:
            steps = {name: way[name] for name in ("micro", "sync") if name in way}
            options = {name: value for name, value in way.items() if name not in steps}
            plain, model = make(**options), shard(make(**options))
            expected = train(plain, adamw(plain), [*range(size)], size, **steps)
            found = train(model, adamw(model), [rank], size, **steps)
            for (norm, values), (other, others) in [(found, expected)]:
                same(norm, other)
                same({name: values[name] for name in others}, others)
            end_of_part()

    run_ranks(size, body)
