"""Tests `fsdp2.even_batches`: ranks with different numbers of batches train as a plain model on all of them."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fsdp2
from helpers import assert_same, full, run_checks

COUNTS = (3, 1, 4)


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def sharded() -> Any:
    model = build()
    fsdp2.fully_shard(model[0])
    return fsdp2.fully_shard(model)


def rows(rank: int, step: int) -> Tensor:
    """Returns a batch: the more rows, the later the step."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(2 + step, 4, dtype=torch.float64, generator=generator)


def own_batches() -> list[Tensor]:
    rank = dist.get_rank()
    return [rows(rank, step) for step in range(COUNTS[rank])]


def steps(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def compare(model: Any, plain: Any) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(parameter), expected, 1e-12, 1e-14, name)


def repeated_batches_have_no_gradient() -> None:
    """With clipping and momentum, and a collective of the program's own in the loop."""
    ranks, seen = dist.get_world_size(), list[bool]()
    model, plain = sharded(), build()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain)]
    for batch, is_real in fsdp2.even_batches(own_batches()):
        loss = model(batch).square().mean() * is_real
        loss.backward()
        dist.all_reduce(loss.detach())
        steps(model, optimizers[0])
        seen.append(is_real)
    own = COUNTS[dist.get_rank()]
    assert seen == [True] * own + [False] * (max(COUNTS[:ranks]) - own)
    for step in range(max(COUNTS[:ranks])):
        for rank in range(ranks):
            if step < COUNTS[rank]:
                (plain(rows(rank, step)).square().mean() / ranks).backward()
        steps(plain, optimizers[1])
    compare(model, plain)


def weights_of_zero_in_accumulate() -> None:
    """Gradients are means over the rows that are real."""
    ranks = dist.get_world_size()
    model, plain = sharded(), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, plain)]
    for batch, is_real in fsdp2.even_batches(iter(own_batches())):
        with fsdp2.accumulate(model, num_batches=1) as acc:
            acc.backward(model(batch).square().sum() * is_real, weight=len(batch) * is_real)
        steps(model, optimizers[0])
    for step in range(max(COUNTS[:ranks])):
        real = [rows(rank, step) for rank in range(ranks) if step < COUNTS[rank]]
        (plain(torch.cat(real)).square().sum() / sum(map(len, real))).backward()
        steps(plain, optimizers[1])
    compare(model, plain)


def a_loader_that_raises() -> None:
    """On one rank, in its second batch: that rank raises its own error, the others name it. The next loop is exact."""

    def loader() -> Iterator[Tensor]:
        yield rows(0, 0)
        if dist.get_rank() == 1:
            raise OSError("no such file")
        yield rows(0, 1)

    begun, seen = time.monotonic(), list[bool]()
    kind, text = (OSError, "no such file") if dist.get_rank() == 1 else (RuntimeError, "loader of rank 1 has raised")
    with pytest.raises(kind, match=text):
        seen.extend(is_real for _, is_real in fsdp2.even_batches(loader()))
    assert seen == [True]
    assert time.monotonic() - begun < 10
    assert [is_real for _, is_real in fsdp2.even_batches([0])] == [True]


def no_batch_at_all() -> None:
    with pytest.raises(ValueError, match="rank 1 has no batch at all"):
        list(fsdp2.even_batches([1] if dist.get_rank() == 0 else []))
    assert list(fsdp2.even_batches([])) == []


def join_is_refused() -> None:
    model = sharded()
    with pytest.raises(NotImplementedError, match=r"for batch, is_real in fsdp2\.even_batches\(loader\)"):
        Join([model])


def test_even_batches() -> None:
    training = [repeated_batches_have_no_gradient, weights_of_zero_in_accumulate]
    run_checks(3, [(each.__name__, each) for each in training])
    others = [*training, a_loader_that_raises, no_batch_at_all, join_is_refused]
    run_checks(2, [(each.__name__, each) for each in others])


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        next(fsdp2.even_batches([1]))
