"""Tests what other systems of torch do to a sharded model: TorchScript, torch.fx, FSDP1, FakeTensorMode, torch.save,
hooks that are set inside a forward. Each is right, or an error names the parameter and says what to write. An error
while a model is being sharded affects no other model.
"""

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import orthogonal

import fsdp2
from fsdp2 import fully_shard, replicate
from fsdp2.engine import events
from fsdp2.engine.group_parameters import GroupParameters
from helpers import assert_same, full, run_checks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*FSDP:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:UserWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def rows(seed: int) -> Tensor:
    return batch(seed).chunk(2)[dist.get_rank()]


def train(model: Any, plain: nn.Module) -> None:
    """Trains both, and compares the weights."""
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (model, plain)]
    for step in range(2):
        for each, optimizer, x in zip((model, plain), optimizers, (rows(step), batch(step)), strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(one.detach()), other.detach(), 1e-5, 1e-6, name)


def nothing_is_spoilt() -> None:
    """Parametrizations look for the owners of parameters, in all sharded models."""
    orthogonal(nn.Linear(4, 4))(torch.ones(1, 4))
    plain = Net()
    train(fully_shard(copy.deepcopy(plain)), plain)


# ---- TorchScript


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.ones(2, 7))


def script_inside(script: Callable[[nn.Module], Any]) -> None:
    model = Net()
    layer = model.second
    model.second = script(layer)
    before = dict(model.named_parameters())
    with pytest.raises(NotImplementedError, match=r"second\.weight is in a TorchScript module"):
        fully_shard(model)
    assert type(model) is Net
    assert all(now is before[name] for name, now in model.named_parameters()), "it has been changed"
    nothing_is_spoilt()
    # As the error says: the Python module in its place; or a frozen one left out.
    model.second = layer
    train(fully_shard(model), Net())
    frozen, plain = Net(), Net()
    plain.second.requires_grad_(False)
    frozen.second = script(frozen.second.requires_grad_(False))
    train(fully_shard(frozen, ignored_params=set(frozen.second.parameters())), plain)


def script_deep_inside() -> None:
    model = nn.Sequential(Net(), nn.Sequential(nn.Tanh(), scripted(nn.Linear(3, 3))))
    fully_shard(model[0])
    with pytest.raises(NotImplementedError, match=r"1\.1\.weight is in a TorchScript module"):
        fully_shard(model)
    train(model[0], Net())
    nothing_is_spoilt()


def script_itself() -> None:
    for module in (scripted(Net()), [nn.Linear(5, 5), scripted(nn.Linear(5, 5))]):
        with pytest.raises(TypeError, match="got the TorchScript module"):
            fully_shard(module)
    with pytest.raises(TypeError, match="got ScriptFunction, a function of TorchScript"):
        fully_shard(torch.jit.script(squared))
    with pytest.raises(TypeError, match="got the TorchScript module"):
        replicate(scripted(Net()))
    nothing_is_spoilt()


def squared(x: Tensor) -> Tensor:
    return x * x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Scaled(Net):
    def __init__(self, script: bool) -> None:
        super().__init__()
        self.scale, self.act, self.function = Scale(), nn.ReLU(), squared
        if script:
            self.scale, self.act = scripted(self.scale), scripted(self.act)
            self.function = torch.jit.script(squared)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.function(self.act(self.scale(self.second(self.first(x))))))


def script_without_parameters() -> None:
    """Buffers, activations and functions of TorchScript train exactly."""
    train(fully_shard(Scaled(script=True)), Scaled(script=False))


def script_of_a_sharded_one() -> None:
    model = Net()
    fully_shard(model.second)
    for each in (model, model.second):  # sharded below, sharded
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.script.*weight.*full state dict"):
            torch.jit.script(each)
    fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script.*weight.*full state dict"):
        torch.jit.script(model)
    with pytest.raises(RuntimeError, match="refuse_call"):  # torch's own error, for a part of a group
        torch.jit.script(model.first)
    train(model, Net())
    assert torch.jit.script(Net())(rows(0)).shape == (2, 3), "plain ones are compiled as before"
    assert torch.jit.script(squared)(torch.tensor(3.0)) == 9


SCRIPTS = [
    ("scripted inside", lambda: script_inside(scripted)),
    ("traced inside", lambda: script_inside(traced)),
    ("scripted deep inside", script_deep_inside),
    ("scripted itself", script_itself),
    ("scripted, without parameters", script_without_parameters),
    ("script of a sharded one", script_of_a_sharded_one),
]


# ---- sharding that fails on its way


class Fails(Exception):
    pass


def fails_at(target: Any, name: str, nth: int = 1) -> Any:
    """Returns a context in which the `nth` call of a method raises."""
    usual, calls = getattr(target, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Fails
        return usual(*args, **kwargs)

    return mock.patch.object(target, name, call)


def sharding_fails(where: Any) -> None:
    """Modules that were sharded before, inside, train on; so does every other model."""
    model, plain = Net(), Net()
    fully_shard(model.second)
    inner = nn.Sequential(nn.Linear(5, 7).requires_grad_(False), model.second, nn.Tanh())
    expected = nn.Sequential(copy.deepcopy(inner[0]), plain.second, nn.Tanh())
    train(inner, expected)
    with where, pytest.raises(Fails) as caught:
        fully_shard(model)
    if hasattr(caught.value, "__notes__"):
        assert "Build the model again" in caught.value.__notes__[0]
    assert type(model) is Net
    train(inner, expected)
    nothing_is_spoilt()


def a_follower_fails() -> Any:
    def fail(state: Any) -> None:
        raise Fails

    usual = events.extensions()
    changed = dataclasses.replace(usual, after_sharding=(*usual.after_sharding, fail))
    return mock.patch.object(events._Current, "extensions", changed)


FAILURES = [
    ("a group that can't be built", lambda: sharding_fails(fails_at(GroupParameters, "rebuild"))),
    ("memory that can't be had", lambda: sharding_fails(fails_at(GroupParameters, "_allocate"))),
    ("what follows a call fails", lambda: sharding_fails(a_follower_fails())),
]


# ---- other systems


def recompiled() -> None:
    """A GraphModule is changed after it was sharded."""
    plain = torch.fx.symbolic_trace(Net())
    model = fully_shard(copy.deepcopy(plain))
    model.recompile()
    train(model, plain)
    for each in (model, plain):
        for node in each.graph.nodes:
            if node.target is torch.tanh:
                node.target = torch.sin
        each.recompile()
    train(model, plain)
    assert isinstance(model, fsdp2.FSDPModule)
    whole, part = torch.fx.symbolic_trace(Net()), copy.deepcopy(Net())
    fully_shard(whole.second)
    fully_shard(whole)
    whole.graph = whole.graph  # which recompiles, too
    train(whole, part)


def fsdp1_around() -> None:
    for shard in (fully_shard, lambda model: fully_shard(model.second), replicate):
        model = Net()
        shard(model)
        with pytest.raises(
            RuntimeError, match=r"FullyShardedDataParallel: .*Remove FullyShardedDataParallel"
        ) as caught:
            FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        assert "data_ptr" not in str(caught.value)
    # As the error says.
    part = Net()
    fully_shard(part.second)
    train(fully_shard(part), Net())
    plain = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    assert plain(rows(0)).shape == (2, 3)


def fake_tensors() -> None:
    model = fully_shard(Net())
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(NotImplementedError, match="FakeTensorMode has no values to gather"),
    ):
        model(rows(0))
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=r"first\.weight.* is a FakeTensor"):
        fully_shard(Net())
    train(model, Net())


# ---- hooks that are set inside a forward


class Hooking(Net):
    """Sets a hook in the first forward, by which it learns of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, Tensor]] = []
        self.handle: Any = None

    def hook(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.seen.append((isinstance(gradient, DTensor), full(gradient.clone())))

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.second.weight.register_post_accumulate_grad_hook(self.hook)
        return super().forward(x)


def hook_in_forward(shard: Callable[[Any], Any]) -> None:
    plain = Hooking()
    model = copy.deepcopy(plain)
    shard(model)
    for step in range(3):
        for each, x in ((model, rows(step)), (plain, batch(step))):
            each(x).square().mean().backward()
            if step == 1:
                each.handle.remove()
    assert len(plain.seen) == 2
    for (is_sharded, mine), (_, theirs) in zip(model.seen, plain.seen, strict=True):
        assert is_sharded
        assert_same(mine, theirs, 1e-5, 1e-6, "gradient in the hook")


def blocks(model: Any) -> None:
    for layer in (model.first, model.second, model.third):
        fully_shard(layer)
    fully_shard(model)


def hooks_in_order() -> None:
    """Hooks set before sharding, after it and inside a forward run in that order, and each can be removed."""
    order: list[str] = []
    model = Hooking()
    model.hook = lambda parameter: order.append("inside")  # type: ignore[method-assign]
    weight = model.second.weight
    first = weight.register_post_accumulate_grad_hook(lambda p: order.append("before"))
    fully_shard(model)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: order.append("after"))
    model(rows(0)).sum().backward()
    assert order == ["before", "after", "inside"]
    first.remove()
    model.handle.remove()
    model(rows(0)).sum().backward()
    assert order[3:] == ["after"]


HOOKS = [
    ("hooks in forward", lambda: hook_in_forward(fully_shard)),
    ("hooks in forward, of a block", lambda: hook_in_forward(blocks)),
    ("hooks in forward, kept", lambda: hook_in_forward(lambda m: fully_shard(m, reshard_after_forward=False))),
    ("hooks in forward, replicas", lambda: hook_in_forward(replicate)),
    (
        "hooks in forward, HSDP",
        lambda: hook_in_forward(lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2, 1)))),
    ),
    ("hooks in order", hooks_in_order),
]


# ---- files


def bytes_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def parts_are_saved_alone(shard: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(50, 50) for _ in range(7)])
    shard(model)
    model(torch.ones(2, 50)).sum().backward()
    most = bytes_of(torch.empty(50, 50)) + 2500  # what DTensors add
    weight = model[3].weight
    for name, value in {
        "parameter": weight,
        "local tensor": weight.to_local(),
        "gradient": weight.grad,
        "in a dict": {"a": [weight.grad]},
        "state": model.state_dict()["3.weight"],
    }.items():
        assert bytes_of(value) < most, (name, bytes_of(value))
    with fsdp2.full_params(model):  # whose tensors are parts of a group's memory
        assert bytes_of(model[3].weight.clone()) < most


FILES = [
    ("parts are saved alone", lambda: parts_are_saved_alone(fully_shard)),
    ("parts are saved alone, replicas", lambda: parts_are_saved_alone(replicate)),
    (
        "parts are saved alone, HSDP",
        lambda: parts_are_saved_alone(lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2, 1)))),
    ),
]

OTHERS = [
    ("recompiled", recompiled),
    ("FSDP1 around", fsdp1_around),
    ("fake tensors", fake_tensors),
]


def test_other_systems() -> None:
    run_checks(2, [*SCRIPTS, *FAILURES, *OTHERS, *HOOKS, *FILES])
