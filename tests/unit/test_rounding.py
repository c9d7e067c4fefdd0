"""Tests which inputs a cast to fewer bits damages: those that hold whole numbers that it would change."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2.checks.rounding import numbers_in, rounded_whole_numbers, tells, tells_of_numbers
from helpers import fake_world

DAMAGED = {
    "positions": torch.arange(2048.0),
    "time steps": torch.tensor([999.0, 37.0, 501.0, 257.0, 3.0]),
    "negative": -torch.arange(300.0, 310.0).double(),
    "on a grid": torch.arange(1024.0).view(32, 32).T,
    "beyond float16": torch.tensor([70000.0, 80001.0, 90001.0]),
}
KEPT = {
    "pixels": torch.arange(256.0),
    "noise": torch.randn(4096) * 1000,
    "additive mask": torch.tensor([0.0, -10000.0, torch.finfo(torch.float32).min]),
    "infinite mask": torch.tensor([0.0, -torch.inf]),
    "no number": torch.tensor([torch.nan, 1000.0, 1001.0, 1003.0]),
    "integers": torch.arange(2048),
    "nothing": torch.zeros(0),
    "scalar": torch.tensor(1001.0),
    "as narrow": torch.arange(2048.0).bfloat16(),
}


def rounded(tensors: list[Tensor], dtype: torch.dtype) -> set[int]:
    """What is found, and told without reading it on the host, too."""
    found = rounded_whole_numbers(tensors, dtype)
    if found is None:
        return set()
    numbers = numbers_in(found.tolist())
    assert bool(tells(found)) == tells_of_numbers(numbers)
    return numbers


@pytest.mark.parametrize("name", DAMAGED)
def test_whole_numbers_that_a_cast_changes(name: str) -> None:
    found = rounded([torch.randn(3), DAMAGED[name]], torch.bfloat16)
    assert tells_of_numbers(found)
    assert found <= set(DAMAGED[name].flatten().tolist())


@pytest.mark.parametrize("name", KEPT)
def test_all_else(name: str) -> None:
    assert not tells_of_numbers(rounded([KEPT[name]], torch.bfloat16))


@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 1 << 24)])
def test_up_to_which_number(dtype: torch.dtype, last: int) -> None:
    def found(first: int) -> set[int]:
        numbers: Tensor = torch.arange(first, first + 8, dtype=torch.float64)
        return rounded([numbers], dtype)

    assert not found(last - 7)
    assert tells_of_numbers(found(last))


def test_only_this_ranks_shard_of_a_dtensor_is_checked() -> None:
    """Inputs on the mesh of the parameters (`dp_mesh_dims`): DTensors can't be indexed by a mask."""
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        positions = torch.arange(1000.0, 1012.0)
        for placement in (Replicate(), Shard(0)):
            given = DTensor.from_local(positions, mesh, [placement])
            assert rounded([given], torch.bfloat16) == {1001.0, 1002.0, 1003.0}
