"""Follows the advice of `fsdp2.accumulate`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from advised.registry import backward, batch, follows, loss_of, own, pair, refused, same_gradients, sgd
from fsdp2 import MixedPrecisionPolicy
from fsdp2.compression import Compression


def add(acc: Any, model: nn.Module, step: int = 0) -> None:
    """One micro-batch, whose weight is the number of this rank's rows."""
    rows = own(batch(step))
    acc.backward(loss_of(model(rows)) * len(rows), weight=len(rows))


def weighted(model: nn.Module, inside: Callable[[Any], object] = lambda acc: None, **options: Any) -> None:
    with fsdp2.accumulate(model, **options) as acc:
        add(acc, model)
        inside(acc)
        add(acc, model, step=1)


def matches(model: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """Compares with the mean over both micro-batches."""
    weighted(model)
    plain.zero_grad()
    loss_of(plain(torch.cat([batch(0), batch(1)]))).backward()
    same_gradients(model, plain, tolerance)
    model.zero_grad()


@follows(
    "Call acc.backward(loss, weight=...) in place of loss.backward(), as often as num_batches says",
    "Leave that one first",
    "Call zero_grad before the block, or behind it",
    "it is inside of a block of accumulate, whose gradients are complete when it ends. Step behind the block",
)
def amid_a_block() -> None:
    model, plain = pair()
    optimizer = sgd(model)
    refused(lambda: weighted(model, lambda acc: backward(model)))
    refused(lambda: weighted(model, lambda acc: backward(model), num_batches=1))
    refused(lambda: weighted(model, lambda acc: weighted(model)))
    refused(lambda: weighted(model, lambda acc: model.zero_grad()))
    refused(lambda: weighted(model, lambda acc: optimizer.step()))
    model.zero_grad()
    matches(model, plain)


@follows("Call fsdp2.accumulate(model) for each step")
def entered_twice() -> None:
    model, plain = pair()
    block = fsdp2.accumulate(model)

    def enter() -> None:
        with block as acc:
            add(acc, model)

    enter()
    refused(enter)
    model.zero_grad()
    matches(model, plain)


@follows(
    "Leave no_sync, and call set_requires_gradient_sync(True), before it: the block chooses when they are",
    "Call set_optimizer_in_backward(None), and step behind the block",
    "Call optimizer.zero_grad() before accumulate",
)
def before_a_block() -> None:
    model, plain = pair()
    with model.no_sync():
        refused(partial(weighted, model))
    model.set_requires_gradient_sync(False)
    refused(partial(weighted, model))
    model.set_requires_gradient_sync(True)
    matches(model, plain)
    optimizer = sgd(model, lr=0.0, momentum=0.0)
    model.set_optimizer_in_backward(optimizer)
    refused(partial(weighted, model))
    model.set_optimizer_in_backward(None)
    matches(model, plain)
    backward(model)
    refused(partial(weighted, model))
    optimizer.zero_grad()
    matches(model, plain)


@follows(
    "Give MixedPrecisionPolicy a reduce_dtype, and a dtype for its compression of reduce_scatter if any, of more range"
)
def sums_in_float16() -> None:
    half = MixedPrecisionPolicy(torch.float16, torch.float16)
    refused(lambda: weighted(pair(mp_policy=half)[0]))
    sent = MixedPrecisionPolicy(reduce_dtype=torch.float32, compression=Compression(reduce_scatter=torch.float16))
    refused(lambda: weighted(pair(mp_policy=sent)[0]))
    matches(*pair(mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32)), tolerance=1e-2)
    sent = MixedPrecisionPolicy(reduce_dtype=torch.float32, compression=Compression(reduce_scatter=torch.bfloat16))
    matches(*pair(mp_policy=sent), tolerance=1e-2)


@follows("Leave such a step out, on all ranks")
def without_weight() -> None:
    model, plain = pair()

    def step(weight: float) -> None:
        total = torch.tensor(weight)
        dist.all_reduce(total)
        if heeds and not total:
            return
        with fsdp2.accumulate(model) as acc:
            acc.backward(loss_of(model(own(batch()))) * weight, weight=weight)

    heeds = False
    refused(lambda: step(0.0))
    heeds = True
    step(0.0)
    step(2.0)
    backward(plain, x=batch())
    same_gradients(model, plain)


@follows("so that bits depend on the number of ranks. Change that, or leave global_batches out")
def bits_of_the_number_of_ranks() -> None:
    def block(model: Any) -> None:
        with fsdp2.accumulate(model, global_batches=4) as acc:
            for i in acc.batches:
                rows = batch(i // 2)[i % 2 :: 2]
                acc.backward(loss_of(model(rows)) * len(rows), weight=len(rows))

    def compressed() -> tuple[Any, Any]:
        return pair(mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16)))

    model, plain = compressed()
    refused(lambda: block(model))
    matches(model, plain, 0.1)
    model, plain = pair()
    block(model)
    loss_of(plain(torch.cat([batch(0), batch(1)]))).backward()
    same_gradients(model, plain)
