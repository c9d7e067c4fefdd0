"""Backward passes are followed for placeholders of unsynchronized gradients while there are any, and only then."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.engine.placeholders import UnsynchronizedGrad
from fsdp2.engine.state import require_state
from helpers import fake_world


def raise_on_purpose(_: Any) -> None:
    raise ValueError("on purpose")


@pytest.fixture
def net() -> Iterator[Any]:
    with fake_world(4):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        yield fully_shard(model, mesh=mesh)


def is_followed(model: Any) -> bool:
    """Returns True if backward passes look for placeholders."""
    leaves: bool = require_state(model).root.leaves_gradients
    return leaves


def backward(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()


def num_placeholders(model: Any) -> int:
    return sum(isinstance(param.grad, UnsynchronizedGrad) for param in model.parameters())


def test_a_plain_step_is_not_followed(net: Any) -> None:
    assert not is_followed(net)
    backward(net)
    assert not is_followed(net)


@pytest.mark.parametrize("method", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_an_accumulation_is_followed_to_its_end(net: Any, method: str) -> None:
    for _ in range(2):
        getattr(net, method)(False)
        assert is_followed(net)
        backward(net)
        assert num_placeholders(net) == 4
        getattr(net, method)(True)
        assert is_followed(net), "gradients are unsynchronized"
        backward(net)
        assert not is_followed(net)
        assert num_placeholders(net) == 0


def test_one_group_is_enough(net: Any) -> None:
    net[0].set_requires_gradient_sync(False)
    backward(net)
    backward(net)
    assert is_followed(net)
    assert num_placeholders(net) == 2
    net[0].set_requires_gradient_sync(True)
    backward(net)
    assert not is_followed(net)


def test_placeholders_are_used_again(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    backward(net)
    before = [param.grad for param in net.parameters()]
    backward(net)
    assert all(param.grad is each for param, each in zip(net.parameters(), before, strict=True))


def test_a_placeholder_that_a_user_has_kept_and_set_to_zero_is_not_used_again(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    backward(net)
    kept = [param.grad for param in net.parameters()]
    net.set_requires_gradient_sync(True)
    backward(net)
    for each in kept:
        each.zero_()
    net.set_requires_gradient_sync(False)
    backward(net)
    assert num_placeholders(net) == 4


def test_a_placeholder_that_a_user_clears_keeps_no_gradient(net: Any) -> None:
    backward(net)
    reduced = [weakref.ref(param.grad) for param in net.parameters()]
    net.set_requires_gradient_sync(False)
    for _ in range(2):
        backward(net)
    assert all(each() is not None for each in reduced)
    net.zero_grad()
    assert all(each() is None for each in reduced)


def test_settings_that_are_changed_back_are_forgotten_by_the_next_step(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    net.set_requires_gradient_sync(True)
    backward(net)
    assert not is_followed(net)


def test_gradients_that_a_failed_backward_has_lost(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    backward(net)
    net.set_requires_gradient_sync(True)
    out = net(torch.ones(2, 4))
    hidden = net[0](torch.ones(2, 4))
    hidden.register_hook(raise_on_purpose)
    with pytest.raises(ValueError, match="on purpose"):
        (out.sum() + net[1](hidden).sum()).backward()
    assert is_followed(net)
    assert num_placeholders(net) == 4
    net.zero_grad()
    backward(net)
    assert num_placeholders(net) == 0
    assert not is_followed(net)


def test_what_a_user_drops(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    backward(net)
    net.reset_iter_state()
    assert num_placeholders(net) == 0
    assert is_followed(net), "the next backward leaves some"
    net.set_requires_gradient_sync(True)
    backward(net)
    assert not is_followed(net)


def test_delivery_is_put_off_until_gradients_are_synchronised_again(net: Any) -> None:
    root = require_state(net).root
    net.set_requires_all_reduce(False)
    root.set(finalize_backward=False)
    backward(net)
    net.set_requires_all_reduce(True)
    root.set(finalize_backward=True)
    root.deliver()
    assert num_placeholders(net) == 4
    backward(net)
    assert num_placeholders(net) == 0
    assert not is_followed(net)


def test_a_root_that_is_replaced_leaves_its_placeholders(net: Any) -> None:
    net.set_requires_gradient_sync(False)
    backward(net)
    net.set_requires_gradient_sync(True)
    outer = nn.Sequential(net, nn.Linear(4, 4))
    fully_shard(outer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert is_followed(outer)
    assert num_placeholders(outer) == 4
    backward(outer)
    assert num_placeholders(outer) == 0
    assert not is_followed(outer)
