"""Tests who may read a group's unsharded parameters, when their memory is freed, and what a block leaves of them."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard
from fsdp2.engine.gather import leaves_over
from fsdp2.engine.layout import gather_layout, param_spec
from fsdp2.engine.policy import KeepUntil
from fsdp2.engine.state import groups_below
from fsdp2.engine.unsharded import UnshardedParameters
from helpers import fake_world

SHAPE, MADE_OF = (4, 2), (0, 0)


@pytest.fixture
def unsharded() -> UnshardedParameters:
    """One parameter in memory of its own, as a group builds it for one that is stored in another dtype."""
    spec = param_spec(SHAPE, torch.float32, torch.bfloat16, 1, 0)
    layout, made = gather_layout((spec,), 1, 0), UnshardedParameters()
    nbytes = layout.unsharded_nbytes
    made.use_memory(torch.zeros(nbytes, dtype=torch.uint8), lambda storage: storage.resize_(nbytes))
    (memory,) = leaves_over(made.memory, [(0, SHAPE, torch.bfloat16)])
    param: Any = SimpleNamespace(unsharded=nn.Parameter(memory), name="weight")
    made.watch_versions([param], MADE_OF)
    made.prepare([param], layout, None)
    made.use_settings(keep_storage=False)
    return made


def test_memory_that_something_else_uses_is_freed_later(unsharded: UnshardedParameters) -> None:
    view: Tensor | None = unsharded.parameters[0].detach()[1:]
    assert not unsharded.free()
    assert unsharded.storage.nbytes() > 0
    del view
    assert unsharded.free()
    assert unsharded.storage.nbytes() == 0


def test_views_that_backward_was_given_do_not_keep_memory(unsharded: UnshardedParameters) -> None:
    place = torch.bfloat16, torch.Size([2, 2]), (2, 1), 4
    with torch.no_grad():
        unsharded.parameters[0].copy_(torch.arange(8).view(SHAPE))
    assert unsharded.make_view(place).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert unsharded.free()
    unsharded.allocate()
    assert unsharded.views[place].data_ptr() == unsharded.storage.data_ptr() + 8


def test_freed_parameters_refuse_reads_until_they_are_filled(unsharded: UnshardedParameters) -> None:
    (parameter,) = unsharded.parameters
    unsharded.free()
    with pytest.raises(RuntimeError, match="was read after it was freed"):
        parameter.sum()
    unsharded.allocate()
    unsharded.allow_reads()
    assert parameter.shape == SHAPE
    parameter.sum()


def test_kept_memory_is_neither_freed_nor_refused(unsharded: UnshardedParameters) -> None:
    unsharded.use_settings(keep_storage=True)
    assert unsharded.free()
    assert unsharded.parameters[0].sum() == 0


@pytest.mark.parametrize(("made_of", "is_refused"), [(MADE_OF, False), ((1, 0), True), ((0, 1), True)])
def test_autograd_uses_what_it_has_saved_only_if_the_same_data_is_there_again(
    unsharded: UnshardedParameters, made_of: tuple[int, ...], is_refused: bool
) -> None:
    """It saves the parameter without hooks. (1, 0): the shard was written to. (0, 1): a parameter was replaced."""
    (parameter,) = unsharded.parameters
    unsharded.guard(MADE_OF)
    loss = (parameter * parameter).sum()
    unsharded.free()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    assert unsharded.written() == [], "to move a counter on is no write"
    unsharded.allocate()
    unsharded.allow_reads()
    unsharded.renew(made_of)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") if is_refused else nullcontext():
        loss.backward()
    assert (parameter.grad is None) == is_refused


def test_writes_are_told_once(unsharded: UnshardedParameters) -> None:
    with torch.no_grad():
        unsharded.parameters[0].add_(1)
    assert unsharded.written() == ["weight"]
    assert unsharded.written() == []


# ---- blocks


class Squares(nn.Module):
    """Needs its weight in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.weight * x).sum()


@pytest.fixture
def model() -> Iterator[Any]:
    with fake_world(1):
        yield fully_shard(Squares(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def test_a_refused_write_between_forward_and_backward_reaches_no_gradient(model: Any) -> None:
    loss = model(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified inside full_params"), full_params(model), torch.no_grad():
        model.weight.mul_(10)
    loss.backward()
    assert model.weight.grad.to_local().tolist() == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_error_in_a_block_leaves_what_its_end_leaves(model: Any, enabled: bool) -> None:
    """It may come on one rank only, after which all ranks gather alike."""
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    (group,) = groups_below(model)
    found = []
    for error in (None, KeyError()):
        model.reshard()
        with torch.set_grad_enabled(enabled), suppress(KeyError), full_params(model):
            if error is not None:
                raise error
        found.append((group.phase, group.keep_until))
    assert found[0] == found[1]
    assert found[0][1] is KeepUntil.NEXT_PASS
