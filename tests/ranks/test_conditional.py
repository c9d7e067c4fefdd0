"""Tests what ranks can't agree on where modules run on some ranks only. test_training.py trains such models."""

import copy
import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conditional_models import Dropped, Tower
from fsdp2 import fully_shard
from helpers import RankError, alone, assert_same, full, one_mesh, raises_in_backward, run_ranks
from scenarios import WIDTH, Block, loss_of

SOON_S = 10
"""The process group's timeout is half an hour."""


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


class Fallible(nn.Module):
    """Leaves `layers` out where it is told so, and raises in front of them in backward, or behind them in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, runs: bool, fails: str = "") -> Tensor:
        x = self.stem(x)
        x = raises_in_backward(x, ValueError("on purpose")) if fails == "backward" else x
        for layer in self.layers if runs else ():
            x = layer(torch.tanh(x))
        if fails == "forward":
            raise ValueError("on purpose")
        return self.head(x)


# What a program does when a step has failed: it asks the other ranks, or goes on.
THEN = ("gathers", "goes on")


@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize(("world_size", "mesh"), [(2, None), (4, (2, 2))])
def test_a_step_that_fails_on_all_ranks(fails: str, world_size: int, mesh: tuple[int, int] | None) -> None:
    """A rank that has left modules out comes to the error first, while others are still in these modules: it takes part
    in what they communicate, and drops that with all else of the step. The next steps are exact.
    """

    def body(rank: int, _: int) -> list[dict[str, Tensor]]:
        return [run(rank, then) for then in THEN]

    def run(rank: int, then: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        plain = Fallible().double()
        model: Any = copy.deepcopy(plain)
        where = {} if mesh is None else {"mesh": one_mesh(mesh, ("replicate", "shard"))}
        for layer in model.layers:
            fully_shard(layer, conditional=True, **where)
        fully_shard(model, **where)
        x = torch.randn(2 * world_size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for step, runs in enumerate([rank != 0, rank == 0, rank != 1]):
            with pytest.raises(ValueError, match="on purpose"):
                model(x[2 * rank : 2 * rank + 2], runs, fails).square().mean().backward()
            if then == "gathers":
                found: list[Any] = [None] * world_size
                dist.all_gather_object(found, step)
                assert found == [step] * world_size
            for parameter in model.parameters():
                parameter.grad = None
            model(x[2 * rank : 2 * rank + 2], rank != 0).square().mean().backward()
            grads = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
            for other in range(world_size):
                (plain(x[2 * other : 2 * other + 2], other != 0).square().mean() / world_size).backward()
            for name, parameter in plain.named_parameters():
                assert_same(grads[name], parameter.grad, 1e-12, 1e-14, f"{then}, step {step}: {name}")
            plain.zero_grad()
            model.zero_grad()
        return grads

    run_ranks(world_size, body, timeout=60)


def own_sum() -> None:
    total = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(total)
    assert total.tolist() == [3] * 3, total


# What all ranks do when one has failed and the others were told so.
RECOVERIES: list[Callable[[], object]] = [lambda: None, dist.barrier, own_sum]


class FailsAlone:
    """A model whose rank 1 can fail, on 3 ranks, and a plain one."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank, self.plain = rank, Fallible().double()
        self.model: Any = copy.deepcopy(self.plain)
        for layer in self.model.layers:
            fully_shard(layer, conditional=True)
        fully_shard(self.model)
        self.x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).split(2)

    def fails_on_rank_1(self, where: str, runs_on: int) -> None:
        where = where if self.rank == 1 else ""
        output = self.model(self.x[self.rank], self.rank == runs_on, where)
        if where == "loss":
            raise ValueError("on purpose")
        if where == "behind the output":
            output = raises_in_backward(output, ValueError("on purpose"))
        output.square().mean().backward()

    def assert_next_step_is_exact(self, name: str) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()
        self.model(self.x[self.rank], self.rank == 0).square().mean().backward()
        for other, x in enumerate(self.x):
            (self.plain(x, other == 0).square().mean() / 3).backward()
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert_same(full(mine.grad), theirs.grad, 1e-12, 1e-14, f"gradient after {name}")


PLACES = ("forward", "backward", "loss", "behind the output")


def test_a_step_that_fails_on_one_rank() -> None:
    """The others get an error that says so, wherever they are: at once if the engine has seen the rank's error, or
    meets the rank in the next step; within seconds if the rank waits in a collective of its own. That meets no other,
    the next step is exact, and the rank that has raised is in it with the others.
    """

    def body(rank: int, _: int) -> None:
        each = FailsAlone(rank)
        for i, (where, recover) in enumerate(product(PLACES, RECOVERIES)):
            text = _TOLD if where in ("forward", "backward") else _MET if i % len(RECOVERIES) == 0 else _BLOCKED
            start = time.monotonic()
            error, match = (ValueError, "on purpose") if rank == 1 else (RuntimeError, text)
            with pytest.raises(error, match=match):
                each.fails_on_rank_1(where, runs_on=i % 3)
            recover()
            each.assert_next_step_is_exact(f"{where}, {i}")
            assert time.monotonic() - start < SOON_S

    run_ranks(3, body, timeout=60)


_TOLD = "one is giving up a forward or backward that has raised, .*See the error of that rank"
_MET = "one is gathering root, .*Has a rank raised, and gone on"
_BLOCKED = r"rank 1: blocked in (barrier|all_reduce), called at test_conditional\.py"


def test_conditional_on_one_rank_only() -> None:
    def body(rank: int, _: int) -> None:
        torch.manual_seed(0)
        model: Any = Chain()
        for layer in model.layers:
            fully_shard(layer, conditional=rank == 1)
        fully_shard(model)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="ranks are out of step"):
            model(torch.ones(2, 4))
        assert time.monotonic() - start < SOON_S

    run_ranks(2, body, timeout=60)
