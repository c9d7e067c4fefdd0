"""Follows the advice of `fsdp2.join`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fsdp2
from advised.registry import batch, follows, loss_of, own, pair, refused, same_gradients, same_parameters, sgd

COUNTS = (3, 1)
"""How many batches each rank has."""


def loop(model: Any, act: Callable[[int], object], joins: Callable[[], Any], count: int | None = None) -> None:
    """Calls `act` behind each backward."""
    with joins():
        for i in range(COUNTS[dist.get_rank()] if count is None else count):
            loss_of(model(own(batch(i)))).backward()
            act(i)


def plainly(plain: Any, act: Callable[[int], object], counts: tuple[int, int] = COUNTS) -> None:
    """Trains on the batches that are there, divided by the number of all ranks."""
    for i in range(max(counts)):
        rows = [part for part, count in zip(batch(i).chunk(2), counts, strict=True) if i < count]
        (sum(loss_of(plain(part)) for part in rows) / 2).backward()
        act(i)


def clear(*models: Any) -> None:
    for model in models:
        model.zero_grad()


def stepping(model: Any, prepare: Callable[[Any, Any], object]) -> Callable[[], None]:
    """Returns the step of `model`, which begins with `prepare(model, schedule)`."""
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step() -> None:
        prepare(model, schedule)
        optimizer.step()
        optimizer.zero_grad()

    return step


def follow(prepare: Callable[[Any, Any], object]) -> None:
    """Steps in the loop, which is refused, and then as `step`."""
    refused_model, _ = pair()
    step = stepping(refused_model, prepare)
    refused(lambda: loop(refused_model, lambda i: step(), lambda: fsdp2.join(refused_model)))
    model, plain = pair()
    joined, plain_step = fsdp2.join(model, step=stepping(model, prepare)), stepping(plain, prepare)
    loop(model, lambda i: joined.step(), lambda: joined)
    plainly(plain, lambda i: plain_step())
    same_parameters(model, plain)


@follows(
    "Pass what all ranks are to do for a step, clipping and schedulers included, as a function: "
    "`with fsdp2.join(model, step=step) as joined:`, and call joined.step() in the loop"
)
def clipped_in_the_loop() -> None:
    follow(lambda model, schedule: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@follows("Step it in the function that join gets as `step`, or behind the block")
def scheduled_in_the_loop() -> None:
    follow(lambda model, schedule: schedule.step())


@follows("Pass it: `fsdp2.join(model, optimizer=optimizer)`, or a function that steps, as `step`")
def a_rank_without_any_batch() -> None:
    counts = (3, 0)
    model, plain = pair()
    optimizer, expected = sgd(model), sgd(plain)

    def step(i: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    count = counts[dist.get_rank()]
    refused(lambda: loop(model, step, lambda: fsdp2.join(model), count))
    clear(model)
    loop(model, step, lambda: fsdp2.join(model, optimizer=optimizer), count)

    def step_plainly(i: int) -> None:
        expected.step()
        expected.zero_grad()

    plainly(plain, step_plainly, counts)
    same_parameters(model, plain)


@follows("Change it behind the block")
def frozen_in_the_loop() -> None:
    model, plain = pair()

    def freeze(i: int) -> None:
        if i == 1:
            model.stem.requires_grad_(False)

    refused(lambda: loop(model, freeze, lambda: fsdp2.join(model)))
    model.stem.requires_grad_(True)
    clear(model)
    loop(model, lambda i: None, lambda: fsdp2.join(model))
    plainly(plain, lambda i: None)
    same_gradients(model, plain)
    model.stem.requires_grad_(False)


@follows("Apply fully_shard to the same models, in the same order, on all ranks")
def another_model_in_the_loop() -> None:
    def run(more_on: int) -> None:
        """Trains on what another model returns. `more_on`: the rank that has sharded one model more."""
        model, plain = pair()
        if dist.get_rank() == more_on:
            fsdp2.fully_shard(torch.nn.Linear(3, 3))
        other, plain_other = pair()
        optimizer, expected = sgd(model), sgd(plain)

        def act(i: int) -> None:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found = other(own(batch(i)))
            assert torch.allclose(found, plain_other(own(batch(i))))

        loop(model, act, lambda: fsdp2.join(model, optimizer=optimizer))
        plainly(plain, lambda i: (expected.step(), expected.zero_grad()))
        same_parameters(model, plain)

    refused(lambda: run(1))
    run(-1)


@follows("Call optimizer.zero_grad(), without set_to_none=False, or clear gradients behind each step")
def zeros_that_may_be_cleared() -> None:
    model, plain = pair()

    def accumulate(side: Any, to_none: bool) -> None:
        """The gradients of the block alone are cleared at the beginning of each step."""
        optimizer = torch.optim.SGD(side.block.parameters(), lr=0.1)
        counts = COUNTS[dist.get_rank()] if side is model else 3
        for i in range(counts):
            optimizer.zero_grad(set_to_none=to_none)
            if side is model:
                loss_of(model(own(batch(i)))).backward()
            else:
                rows = [part for part, count in zip(batch(i).chunk(2), COUNTS, strict=True) if i < count]
                (sum(loss_of(plain(part)) for part in rows) / 2).backward()

    def join(to_none: bool) -> None:
        with fsdp2.join(model):
            accumulate(model, to_none)

    refused(lambda: join(False))
    clear(model)
    join(True)
    accumulate(plain, True)
    same_gradients(model, plain)


class Both(torch.nn.Module):
    """Has two models, of which a forward runs one."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.models = torch.nn.ModuleList([first, second])

    def forward(self, x: Any, which: int) -> Any:
        return self.models[which](x)


@follows(
    "Write one module that has all of them, whose forward runs the one that it is told; apply fully_shard to it, and "
    "join that."
)
def two_models_that_train() -> None:
    model, plain = pair()
    other, plain_other = pair()

    def in_two_blocks() -> None:
        with fsdp2.join(model), fsdp2.join(other):
            pass

    refused(in_two_blocks, NotImplementedError)
    both, plain_both = fsdp2.fully_shard(Both(model, other)), Both(plain, plain_other)
    optimizers, expected = ([sgd(each) for each in side.models] for side in (both, plain_both))
    with fsdp2.join(both):
        for i in range(COUNTS[dist.get_rank()]):
            for which, optimizer in enumerate(optimizers):
                loss_of(both(own(batch(i)), which)).backward()
                optimizer.step()
                optimizer.zero_grad()
    for i in range(max(COUNTS)):
        rows = [part for part, count in zip(batch(i).chunk(2), COUNTS, strict=True) if i < count]
        for which, optimizer in enumerate(expected):
            (sum(loss_of(plain_both(part, which)) for part in rows) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(both, plain_both)
