"""Follows the advice of refusals of `fully_shard`: TorchScript, FSDP1, FakeTensorMode, attributes over parameters."""

import sys
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    follows,
    heard,
    pair,
    refused,
    shard,
    train,
)
from fsdp2 import fully_shard
from fsdp2.engine.group_parameters import GroupParameters


@follows(
    "Build the model outside of FakeTensorMode, on the meta device if it is large; fsdp2.plan predicts what it takes"
)
def built_of_fake_tensors() -> None:
    with FakeTensorMode():
        model = build()
        refused(lambda: fully_shard(model))
    refused(lambda: fully_shard(model))
    train(shard(build()), build())
    with torch.device("meta"):
        model = Net()
    assert fsdp2.plan(model, ranks=2, batch=lambda: batch(), machine=fsdp2.Machine(device="cpu")).fits
    with torch.device("meta"):
        model = shard(Net())
    model.to_empty(device="cpu")
    plain = build()
    for each in (model, plain):
        for param in each.parameters():
            nn.init.constant_(param, 0.1)
    train(model, plain)


@follows("Leave the mode for sharded models; fsdp2.plan predicts the memory and the time of a plain one when it is")
def run_with_fake_tensors() -> None:
    model, plain = pair()

    def fake() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            backward(model)

    refused(fake)
    prediction = fsdp2.plan(build(), ranks=2, batch=lambda: batch(), machine=fsdp2.Machine(device="cpu")).best
    assert prediction.step_peak > 0
    train(model, plain)


class Marked(nn.Parameter):
    """A class of its own, with attributes."""


@follows(
    "Copy it, or leave it out",
    "Put the parameter into ignored_params of fully_shard: each rank keeps all of it, as the ",
)
def attributes_over_parameters() -> None:
    def marked(way: str = "", trains: bool = True) -> Any:
        model: Any = build()
        model.stem.weight = Marked(model.stem.weight.data, requires_grad=trains)
        if way != "left out":
            values = model.stem.weight.data
            model.stem.weight.whole = values.clone() if way == "copied" else values
        return model

    refused(lambda: shard(marked()))
    for way in ("copied", "left out"):
        train(shard(marked(way)), marked("left out"))
    refused(lambda: shard(marked(trains=False)))
    model, plain = marked(trains=False), marked(trains=False)
    shard(model, ignored_params={model.stem.weight})
    train(model, plain, steps=4)
    assert model.stem.weight.whole.data_ptr() == model.stem.weight.data_ptr()


@follows("fully_shard had begun to shard {}. Build the model again")
def memory_that_is_not_there() -> None:
    model, plain = build(), build()
    fully_shard(model.block)
    train(model.block, plain.block)
    no_memory = mock.patch.object(GroupParameters, "_allocate", side_effect=torch.OutOfMemoryError)
    with no_memory:
        refused(lambda: fully_shard(model), torch.OutOfMemoryError)
    if sys.version_info < (3, 11):  # errors have no notes there
        heard.append("fully_shard had begun to shard Net. Build the model again.")
    train(model.block, plain.block)
    model = build()
    train(shard(model), build())
