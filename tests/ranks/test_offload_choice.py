"""Tests `offload_policy` with a budget of bytes. `fake_gpu/test_ways.py` trains so."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import CPUOffloadPolicy, OffloadBudget, describe, fully_shard, replicate
from fsdp2.engine.state import groups_of
from helpers import fake_world
from simulated_device import simulated_device


def rests_on_cpu(model: nn.Module) -> bool:
    """Whether the parameters of a call rest on the CPU, as its group knows it."""
    (group,) = groups_of(model)
    assert (group.params[0].storage_device != group.mesh.device) == (group.transfers is not None)
    return group.transfers is not None


class Sizes(nn.Module):
    """Shards of 32, 64, 256 and 512 bytes on one of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(16, 32, bias=False), nn.Linear(8, 16, bias=True, dtype=torch.bfloat16)
        self.middle = nn.Linear(8, 30, bias=False)

    def forward(self, x: Any) -> Any:
        return x


def test_a_call_that_does_not_fit_rests_on_the_cpu() -> None:
    # small.bias: 4 rows of 2 bytes; small.weight: 4 x 8 x 2; middle: ceil(30 / 4) x 8 x 4; large: 8 x 16 x 4.
    nbytes = 8 + 64 + 256 + 512
    for budget in (0, nbytes - 1, nbytes, nbytes + 1):
        with fake_world(4), simulated_device():
            given = OffloadBudget(budget)
            model = fully_shard(Sizes(), offload_policy=given)
            assert rests_on_cpu(model) == (nbytes > budget)
            assert ("CPU offload" in str(describe(model))) == (nbytes > budget)
        assert given.left == budget - (0 if nbytes > budget else nbytes)


def test_calls_share_a_budget() -> None:
    """A later call may fit into what a larger one has left."""
    with fake_world(2), simulated_device():
        given, sizes = OffloadBudget(300), (8, 16, 8, 8)
        on_cpu = [rests_on_cpu(fully_shard(nn.Linear(n, 8, bias=False), offload_policy=given)) for n in sizes]
    assert on_cpu == [False, True, False, True]
    assert given.left == 300 - 2 * 128


def test_a_refused_call_takes_nothing_of_a_budget() -> None:
    with fake_world(2), simulated_device():
        given = OffloadBudget(1000)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            fully_shard(nn.Linear(4, 4), offload_policy=given, reshard_after_forward=7)
        assert given.left == 1000
        fully_shard(nn.Linear(4, 4), offload_policy=given)
        assert given.left == 1000 - 32 - 8


def test_replicate_takes_one_too() -> None:
    with fake_world(2), simulated_device():
        assert rests_on_cpu(replicate(nn.Linear(4, 4), offload_policy=OffloadBudget(79)))
        assert not rests_on_cpu(replicate(nn.Linear(4, 4), offload_policy=OffloadBudget(80)))


def test_tied_parameters_rest_where_the_first_call_puts_them() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8, bias=False)))
        model[1][0].weight = model[0].weight  # type: ignore[index]
        return model

    with fake_world(2), simulated_device():
        model: Any = tied()
        given = OffloadBudget(0)
        fully_shard(model[0], offload_policy=given)
        fully_shard(model[1], offload_policy=given)
        model = tied()
        fully_shard(model[0], offload_policy=CPUOffloadPolicy())
        with pytest.raises(ValueError, match="with another offload_policy"):
            fully_shard(model[1])
        fully_shard(model[1], offload_policy=CPUOffloadPolicy())


@pytest.mark.parametrize(
    ("arguments", "error"), [((1.5,), TypeError), ((True,), TypeError), ((-1,), ValueError), ((None,), TypeError)]
)
def test_budgets_that_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"OffloadBudget.nbytes: expected"):
        OffloadBudget(*arguments)
    with pytest.raises(TypeError, match=r"pin_memory: expected a bool"):
        OffloadBudget(1, pin_memory=None)  # type: ignore[arg-type]
