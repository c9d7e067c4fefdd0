"""Tests `offload_policy` by parameter: a function, names, a budget of bytes. `fake_gpu/test_ways.py` trains so."""

from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import CPUOffloadPolicy, OffloadBudget, OffloadPolicy, describe, fully_shard, replicate
from fsdp2.engine.state import groups_of
from helpers import fake_world
from simulated_device import simulated_device

ON_CPU = CPUOffloadPolicy()


def no_vectors(name: str, parameter: nn.Parameter) -> OffloadPolicy | None:
    return ON_CPU if parameter.dim() == 2 else None


def places(model: nn.Module) -> dict[str, bool]:
    """Whether each parameter rests on the CPU, as its group knows it."""
    found = {}
    for group in groups_of(model):
        for param in group.params:
            assert (param.storage_device != group.mesh.device) == (group.transfers is not None)
            found[param.name] = group.transfers is not None
    return found


class Sizes(nn.Module):
    """Shards of 32, 64, 256 and 512 bytes on one of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(16, 32, bias=False), nn.Linear(8, 16, bias=True, dtype=torch.bfloat16)
        self.middle = nn.Linear(8, 30, bias=False)

    def forward(self, x: Any) -> Any:
        return x


def test_the_largest_that_do_not_fit_rest_on_the_cpu() -> None:
    # small.bias: 4 rows of 2 bytes; small.weight: 4 x 8 x 2; middle: ceil(30 / 4) x 8 x 4; large: 8 x 16 x 4.
    nbytes = {"small.bias": 8, "small.weight": 64, "middle.weight": 256, "large.weight": 512}
    for budget in (0, 7, 8, 71, 72, 327, 328, 839, 840):
        with fake_world(4), simulated_device():
            given = OffloadBudget(budget)
            found = places(fully_shard(Sizes(), offload_policy=given))
        left, expected = budget, {}
        for name, size in nbytes.items():
            expected[name] = any(expected.values()) or size > left
            left -= 0 if expected[name] else size
        assert found == expected, budget
        assert given.is_spent == any(expected.values())
        assert given.left == (0 if given.is_spent else left)


def test_calls_share_a_budget() -> None:
    """One call has parameters in both places; the later ones rest on the CPU as a whole."""
    with fake_world(2), simulated_device():
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)) for _ in range(4)])
        given = OffloadBudget(2 * 128 + 16 + 16 + 128)  # one block, and a weight and a bias of the next
        on_cpu = [places(fully_shard(block, offload_policy=given)) for block in model]
    assert [sum(each.values()) for each in on_cpu] == [0, 1, 3, 3]
    assert [len(groups_of(block)) for block in model] == [1, 2, 1, 1]


def test_a_refused_call_takes_nothing_of_a_budget() -> None:
    with fake_world(2), simulated_device():
        given = OffloadBudget(1000)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            fully_shard(nn.Linear(4, 4), offload_policy=given, reshard_after_forward=7)
        assert given.left == 1000
        fully_shard(nn.Linear(4, 4), offload_policy=given)
        assert given.left == 1000 - 32 - 8


def test_policies_that_come_to_one_place_are_one_group() -> None:
    """On a mesh of CPUs nothing is offloaded, so nothing is split."""
    with fake_world(2):
        assert len(groups_of(fully_shard(nn.Linear(4, 4), offload_policy=no_vectors))) == 1
    with fake_world(2), simulated_device():
        model = fully_shard(nn.Linear(4, 4), offload_policy={"weight": ON_CPU, "bias": CPUOffloadPolicy(False)})
        assert len(groups_of(model)) == 2 - (not torch.accelerator.is_available())


def test_the_first_pattern_counts() -> None:
    with fake_world(2), simulated_device():
        given = {"0.*": OffloadPolicy(), "*.weight": ON_CPU}
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), offload_policy=given)
        assert places(model) == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": False}
        assert "CPU offload" in str(describe(model))
    with fake_world(2), simulated_device():
        modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
        fully_shard(modules, offload_policy={"?1?.*": ON_CPU})  # names of a list begin with [0], [1]
        groups = groups_of(modules[0])
        assert [(len(group.params), group.transfers is not None) for group in groups] == [(2, False), (2, True)]


def test_replicate_takes_them_too() -> None:
    with fake_world(2), simulated_device():
        model = replicate(nn.Linear(4, 4), offload_policy=OffloadBudget(16))
        assert places(model) == {"weight": True, "bias": False}


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
        fully_shard(model[0], offload_policy=lambda name, p: ON_CPU)
        with pytest.raises(ValueError, match="with another offload_policy"):
            fully_shard(model[1], offload_policy=lambda name, p: None)
        fully_shard(model[1], offload_policy={"0.weight": ON_CPU})


@pytest.mark.parametrize(
    ("arguments", "error"), [((1.5,), TypeError), ((True,), TypeError), ((-1,), ValueError), ((None,), TypeError)]
)
def test_budgets_that_are_refused(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"OffloadBudget.nbytes: expected"):
        OffloadBudget(*arguments)
    with pytest.raises(TypeError, match=r"pin_memory: expected a bool"):
        OffloadBudget(1, pin_memory=None)  # type: ignore[arg-type]
