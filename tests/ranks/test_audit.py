"""Tests that `check` finds every planted fault, and nothing else, on all ranks, and nothing in a correct model."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import check, fully_shard, replicate
from fsdp2.tools.finding import Finding
from helpers import run_checks
from models import OddMLP, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
INPUT = torch.arange(20.0).view(4, 5) / 10


def sharded(**options: Any) -> nn.Module:
    """Two groups, uneven everywhere."""
    torch.manual_seed(0)
    model = OddMLP()
    fully_shard(model.wide, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    mean_loss(model(INPUT * (1 + dist.get_rank()))).backward()
    if optimizer is not None:
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def expect(found: list[Finding], *expected: tuple[str, tuple[str, ...], tuple[int, ...]]) -> None:
    assert [(each.kind, each.names, each.ranks) for each in found] == list(expected), "\n".join(map(str, found))
    assert all(str(each).startswith(f"{each.kind}: {each.names[0]}") for each in found)


BOTH = (0, 1)
ALL = ("wide.weight", "wide.bias", "narrow.weight", "narrow.bias", "single.weight", "single.bias", "back.weight")
ALL += ("back.bias",)


def clean() -> None:
    """Before the first step, with gradients, after it; with buffers, a frozen and a tied parameter, offloaded too."""
    for model in (sharded(), sharded(reshard_after_forward=False), sharded(mesh=init_device_mesh("cpu", (2, 1)))):
        optimizer = torch.optim.Adam(model.parameters())
        expect(check(model, optimizer))
        train(model)
        expect(check(model, optimizer))
        optimizer.step()
        expect(check(model, optimizer))
        model.unshard()
        expect(check(model, optimizer))
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    torch.nn.init.zeros_(model[1].weight.requires_grad_(False))
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    fully_shard(model)
    expect(check(model, sgd(model)))
    parent = nn.Sequential(model)
    expect(check(parent, [sgd(parent)]))


def built_before() -> None:
    model = OddMLP()
    optimizer = sgd(model)
    fully_shard(model)
    strangers, lacking = check(model, optimizer)
    assert strangers.kind == "optimizer holds strangers"
    assert len(strangers.names) == 8
    assert strangers.names[0] == "param_groups[0][0], what was OddMLP's wide.weight before fully_shard"
    expect([lacking], ("optimizer lacks", ALL, BOTH))


def replaced_since() -> None:
    model = sharded()
    optimizer = sgd(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.wide.load_state_dict({"weight": state["wide.weight"], "bias": state["wide.bias"]}, assign=True)
    strangers, lacking = check(model, optimizer)
    assert strangers.names == (
        "param_groups[0][0], a ShardedDTensor (7, 5)",
        "param_groups[0][1], a ShardedDTensor (7,)",
    )
    expect([lacking], ("optimizer lacks", ALL[:2], BOTH))
    expect(check(model, sgd(model)))


def held_twice_or_not() -> None:
    model = sharded()
    optimizer = torch.optim.SGD([model.wide.weight])
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.wide.weight]})
    for parameter in [*model.narrow.parameters(), *model.single.parameters()]:
        parameter.requires_grad_(False)
    expect(
        check(model, [optimizer, torch.optim.Adam(model.back.parameters())]),
        ("optimizer lacks", ("wide.bias",), BOTH),
        ("optimizer holds twice", ("wide.weight",), BOTH),
    )
    expect(
        check(model, [sgd(model), torch.optim.Adam(model.back.parameters())]),
        ("optimizer holds twice", ("back.weight", "back.bias"), BOTH),
    )


def unmanaged() -> None:
    """Left out, and added later."""
    model = OddMLP()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    fully_shard(model, ignored_params={model.single.weight, model.single.bias})
    model.single.bias.requires_grad_(False)
    expect(check(model, sgd(model)), ("unmanaged", ("single.weight",), BOTH))
    model.back.adapter = nn.Linear(3, 3, bias=False)
    names = ("single.weight", "back.adapter.weight")
    torch.nn.init.ones_(model.back.adapter.weight)
    expect(check(model), ("unmanaged", names, BOTH))
    train(model, sgd(model))  # on each rank's own gradient
    expect(check(model), ("unmanaged", names, BOTH), ("unmanaged differ", ("single.weight",), BOTH))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    single = fully_shard(nn.Linear(2, 2), mesh=alone)
    single.adapter = nn.Linear(2, 2)
    expect(check(single))


def buffers_differ() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    fully_shard(model)
    train(model)
    expect(check(model))
    model.set_running_stats_averaging(False)
    train(model)
    (found,) = check(model)
    expect([found], ("buffers differ", ("1.running_mean", "1.running_var"), BOTH))
    assert found.is_note


def uninitialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    fully_shard(model[2])
    fully_shard(model)
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")
    buffers = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    expect(check(model), ("on meta", names + buffers, BOTH))
    model.to_empty(device="cpu")
    with torch.no_grad():
        nn.init.ones_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        model[1].running_mean.zero_()
        for parameter in model.parameters():  # no in-place operation: not seen, and finite
            parameter.to_local().data.zero_()
    model[0].reset_parameters()
    expect(check(model), ("unwritten", ("2.weight", "2.bias", *buffers[1:]), BOTH))
    model[1].reset_running_stats()
    train(model)
    expect(check(model)[:1], ("unwritten", ("2.weight", "2.bias"), BOTH))
    with torch.no_grad():
        model[2].weight.fill_(1)
        model[2].bias.to_local().fill_(1)
    expect(check(model)[:-1])
    with torch.device("meta"):
        loaded = fully_shard(nn.Linear(5, 3))
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(nn.Linear(5, 3).state_dict(), assign=True)
    expect(check(loaded))


def unsynchronized() -> None:
    model = sharded()
    model.wide.set_requires_gradient_sync(False)
    train(model)
    expect(check(model), ("unsynchronized", ALL[:2], BOTH))
    model.wide.set_requires_gradient_sync(True)
    train(model)
    expect(check(model))


def not_finite() -> None:
    """On one rank only: the row lies there, and the finding is on both."""
    model = sharded()
    with torch.no_grad():
        if dist.get_rank() == 1:
            model.wide.weight.to_local()[-1, -1] = float("nan")
    train(model)
    found = check(model)
    assert found[0] == Finding("not finite", ("wide.weight",), ranks=(1,))
    assert [each.kind for each in found] == ["not finite", "gradients not finite"]
    model = sharded()
    train(model)
    model.single.bias.grad.to_local().fill_(float("-inf"))
    expect(check(model), ("gradients not finite", ("single.bias",), (0,)))  # its one row is there


def ranks_differ() -> None:
    model = sharded()
    if dist.get_rank() == 1:
        model.narrow.weight.requires_grad_(False)
        model.wide.eval()
        model.set_gradient_divide_factor(3.0)
    found = check(model)
    assert [each.kind for each in found] == ["layouts differ"] * 3
    assert [each.names for each in found] == [("module wide",), ("parameter narrow.weight",), ("group 0 root",)]
    assert found[0].detail == "rank 0 has training=True; rank 1 has training=False"
    model = sharded()
    if dist.get_rank() == 1:
        model.register_buffer("extra", torch.zeros(2))
    expect(check(model), ("layouts differ", ("buffer extra",), BOTH))


def same_findings() -> None:
    """Word for word: whatever a rank does about them, all do."""
    model = sharded()
    if dist.get_rank() == 1:
        model.wide.weight.data.to_local().fill_(float("nan"))
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, "\n".join(map(str, check(model))))
    assert texts[0] == texts[1]
    assert texts[0].startswith("not finite: wide.weight (rank 1). Expected finite values.")


def wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        check([sharded()])
    with pytest.raises(ValueError, match="fully_shard was applied to"):
        check(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="optimizer: expected an optimizer or several"):
        check(sharded(), 3)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What this rank logs."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp2").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("fsdp2").removeHandler(handler)


TWO_RANKS: list[Callable[[], None]] = [
    clean,
    built_before,
    replaced_since,
    held_twice_or_not,
    unmanaged,
    buffers_differ,
    uninitialised,
    unsynchronized,
    not_finite,
    ranks_differ,
    same_findings,
    wrong_arguments,
]


def test_on_two_ranks() -> None:
    run_checks(2, [(each.__name__, each) for each in TWO_RANKS])


def replicas_differ() -> None:
    """Bit by bit, and only where the same part lies: rows 0 to 3 of wide.weight are on ranks 0 and 2."""
    model = sharded(mesh=init_device_mesh("cpu", (2, 2)))
    expect(check(model))
    with torch.no_grad():
        if dist.get_rank() == 2:
            model.wide.weight.to_local()[0, 0] += 1e-7
    expect(check(model), ("replicas differ", ("wide.weight",), (0, 2)))
    with torch.no_grad():
        if dist.get_rank() == 2:
            model.wide.weight.to_local()[0, 0] = -0.0
        if dist.get_rank() == 0:
            model.wide.weight.to_local()[0, 0] = 0.0
    expect(check(model), ("replicas differ", ("wide.weight",), (0, 2)))


def seeds_differ() -> None:
    """Replicated ones show it; sharded ones are a patchwork that no other rank can know."""
    torch.manual_seed(dist.get_rank())
    model = replicate(OddMLP())
    expect(check(model), ("replicas differ", ALL, (0, 1, 2, 3)))
    model = fully_shard(OddMLP())
    expect(check(model))


def partial_sums_wait() -> None:
    model = sharded(mesh=init_device_mesh("cpu", (2, 2)))
    model.set_requires_all_reduce(False)
    train(model)
    expect(check(model), ("unsynchronized", ALL, (0, 1, 2, 3)))


def several_meshes() -> None:
    """Experts of their own on every other rank, and tensor parallelism: other ranks' parts are other values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "other"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 4))
    torch.manual_seed(dist.get_rank() % 2)
    model[1].reset_parameters()
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model)
    expect(check(model, sgd(model)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
    parallelize_module(model, mesh["other"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    expect(check(model, sgd(model)))


def model_parallel_ranks_differ() -> None:
    """Those of tensor parallelism have got other batches: what is not cut among them drifts apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "other"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 4))
    parallelize_module(model, mesh["other"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model)
    for _ in range(2):
        mean_loss(model(INPUT * (1 + mesh["shard"].get_local_rank()))).backward()
        optimizer.step()
    expect(check(model, optimizer))
    train(model, optimizer)
    (found,) = check(model, optimizer)
    expect([found], ("model-parallel ranks differ", ("0.weight",), (0, 1, 2, 3)))
    assert found.is_note


def test_on_four_ranks() -> None:
    """HSDP, and groups on meshes of different sizes."""
    checks = (replicas_differ, seeds_differ, partial_sums_wait, several_meshes, model_parallel_ranks_differ)
    run_checks(4, [(each.__name__, each) for each in checks])
