"""Tests late ranks and collectives: nothing is read before it has arrived, nor freed or overwritten while it is used.

Each rank sleeps for a different time before a collective is issued and before its result is used, after forward and
before the optimizer's step. A wait that is too late, or is missing, changes the numbers.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import FSDPModule
from fsdp2.collectives.gloo import PairwiseComm
from scenarios import Block, Net, Run, Wrap, blocks, check, leaves, loss_of, sgd

LONGEST = 0.003


class Late:
    """A Work that is waited for some time after it could be."""

    def __init__(self, work: Any, nap: Callable[[], None]) -> None:
        self._work, self._nap = work, nap

    def wait(self) -> None:
        self._nap()
        self._work.wait()


@contextmanager
def late(where: str, seed: int) -> Iterator[Callable[[], None]]:
    """Have the collectives named by `where` sleep; yields what sleeps."""
    chance = random.Random(seed)

    def nap() -> None:
        time.sleep(chance.random() * LONGEST)

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any) -> Any:
            nap()
            return Late(collective(*args), nap)

        return issue

    names = ("all_gather", "reduce_scatter")
    changes = {name: slow(getattr(PairwiseComm, name)) for name in names if where in (name, "everywhere")}
    with ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch.object(PairwiseComm, name, change))
        yield nap


def test_gathers_by_hand_between_a_users_own_collectives() -> None:
    """unshard(async_op=True) of every block, with all-reduces of the user's under way beside them."""

    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Net)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            total = torch.full((3,), float(run.rank + step))
            modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
            handles, works = [], []
            for module in modules:
                handles.append(module.unshard(async_op=True))
                works.append(dist.all_reduce(total.clone(), async_op=True))
            for handle, work in zip(handles, works, strict=True):
                work.wait()
                handle.wait()
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario, 3, wrap=(blocks, leaves))


class Averaged(nn.Module):
    """A sharded block between two that users average by themselves, as DDP does: its gathers run beside theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


def test_with_gradients_that_hooks_reduce() -> None:
    """Each all-reduce is under way while the sharded block's own collectives are."""

    def scenario(run: Run) -> None:
        model = run.build(Averaged)
        own = [*model.first.parameters(), *model.last.parameters()]
        run.shard(model.inner, reshard_after_forward=True)
        works: list[Any] = []

        def reduce(param: torch.Tensor) -> None:
            if run.sharded:
                param.grad /= run.world_size
                works.append(dist.all_reduce(param.grad, async_op=True))

        for param in own:
            param.register_post_accumulate_grad_hook(reduce)
        optimizer = sgd(model, foreach=False)
        for step in range(2):
            loss = loss_of(model(run.batch(seed=step)))
            loss.backward()
            for work in works:
                work.wait()
            works.clear()
            run.mean("loss", loss)
            for i, param in enumerate(own):
                run.value(f"gradient {i}", param.grad)
            run.grads("sharded", model.inner)
            optimizer.step()
            optimizer.zero_grad()

    check(scenario, 2)
