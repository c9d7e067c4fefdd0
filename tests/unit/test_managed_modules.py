"""Tests `_is_fsdp_managed_module`, by which other libraries ask whether all ranks must run a module's forward."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import fully_shard, replicate
from helpers import fake_world


class Block(nn.Sequential):
    """Has a forward of its own: that of torch's containers is a file that dynamo skips."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


def build() -> Any:
    return nn.Sequential(Block(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def sharded() -> Any:
    model = build()
    fully_shard(model[0])
    return fully_shard(model)


def answers(model: nn.Module) -> set[bool]:
    return {bool(getattr(module, "_is_fsdp_managed_module", False)) for module in model.modules()}


def test_each_module_below_a_sharded_one_knows_whether_forwards_gather() -> None:
    assert answers(build()) == {False}
    with fake_world(2):
        model = sharded()
        assert answers(model) == {True}
        for options in ({}, {"writeback": True}):
            with torch.no_grad(), fsdp2.full_params(model, **options):
                assert answers(model) == {False}
            assert answers(model) == {True}
        with fsdp2.full_params(model[0]):
            assert answers(model) == {True}, "the root gathers"
        model.unshard()
        assert answers(model) == {True}
        model[0].unshard()
        assert answers(model) == {False}
        model.reshard()
        assert answers(model) == {True}
        copied = copy.deepcopy(model)
        assert answers(copied) == {True}
        assert answers(copy.deepcopy(model[0][0])) == {False}, "a copied Linear is not sharded"
        with fsdp2.full_params(model):
            assert answers(copied) == {True}
        assert answers(replicate(build())) == {False}
    with fake_world(1):
        assert answers(sharded()) == {False}


def test_compiled_code_keeps_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo leaves out guards on the parameters of modules that say so while it traces them."""
    from torch._dynamo.variables import builder

    def refuse(value: Any, **_: Any) -> None:
        raise AssertionError(f"{type(value)} is traced without guards")

    monkeypatch.setattr(builder, "FSDPManagedNNModuleVariable", refuse)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with fake_world(2):
        model = build()
        model[0].compile(backend=note)
        for block in model:  # while one runs, another would have to be gathered
            fully_shard(block)
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
    assert len(graphs) == 1
