"""Follows the advice of refusals of `fully_shard`: TorchScript, FSDP1, FakeTensorMode, attributes over parameters."""

import copy
import sys
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    follows,
    heard,
    none_found,
    own,
    pair,
    refused,
    same,
    shard,
    train,
)
from fsdp2 import fully_shard
from fsdp2.engine.group_parameters import GroupParameters
from helpers import full


def compiled(model: Any) -> Any:
    """Returns it as torch.compile makes it, without a compiler of C++."""
    return torch.compile(model, backend="aot_eager")


@follows(
    "Shard the Python module that it was made of, and use torch.compile to make it fast",
    "Use the Python module in its place, and torch.compile to make it fast; or leave a frozen one out: ignored_params="
    "set(scripted.parameters())",
)
def torchscript() -> None:
    original = build()
    refused(lambda: fully_shard(torch.jit.script(original)))
    train(compiled(shard(original)), build())
    for script in (torch.jit.script, lambda module: torch.jit.trace(module, batch())):
        model = build()
        layer = model.stem
        model.stem = script(layer)
        refused(lambda model=model: fully_shard(model))
        model.stem = layer
        train(compiled(shard(model)), build())
        model, plain = build(), build()
        for each in (model, plain):
            each.stem.requires_grad_(False)
        model.stem = scripted = script(model.stem)
        fully_shard(model, ignored_params=set(scripted.parameters()))
        train(model, plain)
    # A part of the model may be compiled, too.
    model = shard(build())
    model.block = compiled(model.block)
    train(model, build())


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


@follows(
    "Leave FullyShardedDataParallel out, and call fully_shard on the module instead; or, if it is to stay, put its "
    "parameters into ignored_params"
)
def fsdp1_inside() -> None:
    model = build()
    model.block = FSDP1(model.block, device_id=torch.device("cpu"))
    refused(lambda: fully_shard(model))
    model = build()
    fully_shard(model.block)
    train(fully_shard(model), build())
    for original in (False, True):
        plain = build()
        for param in plain.block.parameters():  # parts of all ranks are the same before they are trained
            nn.init.constant_(param, 0.1)
        model = copy.deepcopy(plain)
        model.block = FSDP1(model.block, device_id=torch.device("cpu"), use_orig_params=original)
        fully_shard(model, ignored_params={*model.block.parameters()})
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        none_found(model, optimizers[0])
        for step in range(9):
            for each, optimizer, x in zip((model, plain), optimizers, (own(batch(step)), batch(step)), strict=True):
                backward(each, x=x)
                optimizer.step()
                optimizer.zero_grad()
        with FSDP1.summon_full_params(model.block):
            for (name, param), expected in zip(
                model.block.module.named_parameters(), plain.block.parameters(), strict=True
            ):
                same(param.detach().clone(), expected.detach(), name)
        for name in ("stem", "head"):
            same(full(getattr(model, name).weight.detach()), getattr(plain, name).weight.detach(), name)


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
