"""Tests what ranks can't agree on where modules run on some ranks only. test_training.py trains such models."""

import copy
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conditional_models import Dropped, Tower
from fsdp2 import fully_shard
from helpers import RankError, alone, assert_same, full, run_ranks
from scenarios import WIDTH, Block, loss_of


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def build(make: Any) -> Any:
    torch.manual_seed(1)
    return make().double()


def test_a_root_is_not_conditional() -> None:
    """Ranks that leave it out would never meet the others. Said before any of these waits."""

    def body(rank: int, _: int) -> None:
        tower = build(Tower)
        fully_shard(tower, conditional=True)
        if rank == 0:
            with pytest.raises(
                RuntimeError, match="root: conditional=True needs a module around it that all ranks run"
            ):
                tower(batch(0, 0))

    run_ranks(2, body, timeout=20)


def test_groups_that_are_not_conditional_must_run_everywhere() -> None:
    """Ranks at different places all raise, before weights are mixed up, though the groups are of equal shapes; the next
    step is exact.
    """

    class Unequal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second, self.expert = (Block() for _ in range(4))
            self.runs = "both"

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = self.first(x) if self.runs != "second" else x
            x = self.second(x) if self.runs != "first" else x
            return self.expert(x)

    def train(model: Any, ranks: Sequence[int]) -> list[Tensor]:
        sum(loss_of(model(batch(rank, 1))) / len(ranks) for rank in ranks).backward()
        return [full(param.grad) for param in model.parameters()]

    expected = alone(lambda: train(build(Unequal), range(3)))

    def body(rank: int, _: int) -> list[Tensor]:
        model = build(Unequal)
        for block in (model.stem, model.first, model.second):
            fully_shard(block, reshard_after_forward=True)
        fully_shard(model.expert, conditional=True)
        fully_shard(model)
        model.runs = "first" if rank < 2 else "second"
        with pytest.raises(RuntimeError, match=r"this one is gathering (first|second), one is gathering f"):
            model(batch(rank, 0))
        model.runs = "both"
        return train(model, [rank])

    for grads in run_ranks(3, body, timeout=30):
        for grad, other in zip(grads, expected, strict=True):
            assert_same(grad, other, 1e-10, 1e-12, "gradient after the error")


def test_a_rank_that_dies_at_a_consensus() -> None:
    def body(rank: int, _: int) -> str:
        model = build(Dropped)
        for module, conditional in model.groups():
            fully_shard(module, conditional=conditional)
        if rank == 1:
            os._exit(1)
        model.plan = frozenset("0")
        with pytest.raises(RuntimeError) as caught:
            model(batch(rank, 0))
        raise AssertionError(f"{caught.value}")

    with pytest.raises(RankError, match=r"while this rank is gathering (root|layers\.0)"):
        run_ranks(2, body, timeout=30)


class Chain(nn.Module):
    """Has conditional layers behind a stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


def test_a_failed_backward_steps_on_no_conditional_module() -> None:
    """The optimizer steps in backward. What the failed pass has delivered is not in the next step."""

    def body(rank: int, _: int) -> list[bool]:
        torch.manual_seed(0)
        plain = Chain().double()
        model: Any = copy.deepcopy(plain)
        for layer in model.layers:
            fully_shard(layer, conditional=True)
        fully_shard(model)
        model.set_optimizer_in_backward(torch.optim.SGD(model.layers.parameters(), lr=0.1))
        optimizer = torch.optim.SGD(plain.layers.parameters(), lr=0.1)
        x = torch.randn(4, 4, dtype=torch.float64)

        def fail(gradient: Tensor) -> None:
            raise ValueError("bad")

        handle = model.stem.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with pytest.raises(ValueError, match="bad"):
            model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        handle.remove()
        left = [parameter.grad is not None for parameter in model.layers.parameters()]
        for _ in range(2):
            model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(parameter), expected, 1e-12, 1e-14, name)
        return left

    assert all(map(any, run_ranks(2, body))), "the failed pass has delivered nothing"
