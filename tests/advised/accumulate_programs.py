"""Follows the advice of `fsdp2.accumulate`."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from advised.registry import backward, batch, follows, loss_of, own, pair, refused, same_gradients, sgd
from fsdp2 import MixedPrecisionPolicy
from helpers import full


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


@follows("Give MixedPrecisionPolicy a reduce_dtype, and a wire_dtype if any, of more range")
def sums_in_float16() -> None:
    half = MixedPrecisionPolicy(torch.float16, torch.float16)
    refused(lambda: weighted(pair(mp_policy=half)[0]))
    sent = MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.float16)
    refused(lambda: weighted(pair(mp_policy=sent)[0]))
    matches(*pair(mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32)), tolerance=1e-2)
    sent = MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16)
    matches(*pair(mp_policy=sent), tolerance=1e-2)


def on_demand(model: Any, plain: Any, inside: Callable[[], object] = lambda: None) -> None:
    """Two micro-batches on demand, beside the mean over both."""
    weighted(model, lambda acc: inside(), on_demand=True)
    plain.zero_grad()
    loss_of(plain(torch.cat([batch(0), batch(1)]))).backward()
    same_gradients(model, plain)
    model.zero_grad()


@follows("Write to parameters behind the block", "Call set_debug_level and the like before the block, or behind it")
def amid_gathers_on_demand() -> None:
    model, plain = pair()

    @torch.no_grad()
    def write(each: nn.Module = model) -> None:
        for param in each.parameters():
            param.mul_(0.5)

    refused(lambda: on_demand(model, plain, write))
    write(plain)  # the values stay that were written inside
    on_demand(model, plain)
    write()
    write(plain)
    on_demand(model, plain)
    refused(lambda: on_demand(model, plain, lambda: model.set_debug_level(1)))
    model.set_debug_level(1)
    on_demand(model, plain)


@follows(
    "If there is memory, keep weights unsharded over the block, which saves as much time: call "
    "set_reshard_after_forward(False) and set_reshard_after_backward(False)",
    "Make {} larger (docker run --shm-size), or leave on_demand out",
)
def without_shared_memory() -> None:
    model, plain = pair()
    with mock.patch("fsdp2.features.on_demand._map_file", return_value=None):
        refused(lambda: on_demand(model, plain))
    with mock.patch("fsdp2.features.on_demand._make_file", side_effect=OSError(28, "No space left on device")):
        refused(lambda: on_demand(model, plain))
    matches(model, plain)
    on_demand(model, plain)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    matches(model, plain)


@follows("Call model.set_running_stats_averaging(False), or have it evaluate")
def running_statistics_on_demand() -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model: Any = fsdp2.fully_shard(copy.deepcopy(plain))

    def train() -> None:
        with fsdp2.accumulate(model, on_demand=True) as acc:
            acc.backward(model(torch.arange(8.0).view(2, 4)).square().sum(), weight=1)
        plain.zero_grad()
        plain(torch.arange(8.0).view(2, 4)).square().sum().backward()
        same_gradients(model, plain)
        model.zero_grad()

    refused(train)
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    model.set_running_stats_averaging(False)
    train()
    model.set_running_stats_averaging(True)
    model.eval()
    plain.eval()
    train()


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
