"""Tests that each fix for sharded parameters is needed with this torch, and helps.

Each program ends well with the fixes, and not with FSDP2_DTENSOR_FIXES=off. One that does can lose its fix.

    FSDP2_DTENSOR_FIXES=off python tests/ranks/test_fixes.py    prints which end well
"""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does

from fsdp2 import fully_shard
from helpers import fake_world, run_ranks, sharded

WHOLE = torch.arange(20.0).reshape(5, 4) / 10 - 1


def linear() -> Any:
    model = nn.Linear(4, 5)
    with torch.no_grad():
        model.weight.copy_(WHOLE)
        model.bias.zero_()
    return fully_shard(model)


def weight() -> Any:
    """Of a model that lives as long."""
    model = linear()
    model.weight.model = [model]
    return model.weight


def ours(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(ours(found.detach()).double(), expected.double())


def raises(program: Callable[[], object], says: str = "") -> bool:
    """Returns True if `program` raises an error that says that."""
    try:
        program()
    except Exception as error:
        return says in str(error)
    return False


def gradient_of_a_full_tensor() -> bool:
    p = weight()
    (p.full_tensor().sum() * (1 + dist.get_rank())).backward()
    return same(p.grad, torch.full((5, 4), 1.5))


def number_beside_a_norm() -> bool:
    p = weight()
    number = torch.tensor(1.0 + dist.get_rank(), requires_grad=True)
    (number * p.norm()).backward()
    return same(p.grad, 1.5 * WHOLE / WHOLE.norm())


def assigned_data() -> bool:
    p = weight()
    p.data = 2 * WHOLE
    return same(p, 2 * WHOLE)


def counted_local_write() -> bool:
    p = weight()
    p.detach().to_local().mul_(1)
    return bool(p._version)


def detached_in_inference() -> bool:
    p = weight()
    with torch.inference_mode():
        return same(p.detach(), WHOLE)


def copied_gradient() -> bool:
    model = linear()
    model(torch.ones(2, 4)).sum().backward()
    copies = [copy.deepcopy(each.grad) for each in model.parameters()]
    return same(copies[0], torch.full((5, 4), 2.0)) and same(copies[1], torch.full((5,), 2.0))


def gradient_of_an_input() -> bool:
    model = linear()
    model(torch.ones(2, 4)).sum().backward(inputs=[model.bias])
    return model.bias.grad is not None


def written_row() -> bool:
    p = weight()
    with torch.no_grad():
        p[1].zero_()
    expected = WHOLE.clone()
    expected[1] = 0
    return same(p, expected)


def list_with_a_plain_tensor() -> bool:
    p = weight()
    with torch.no_grad():
        torch._foreach_add_([p, torch.ones(1)], 1.0)
    return same(p, WHOLE + 1) and p._version == 1


def infinity_on_another_mesh() -> bool:
    """The first gradient is on a mesh of this rank alone."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))["b"] for shape in ((2, 1), (1, 2))]
    gradients = [sharded(torch.ones(4), mesh, [Shard(0)]) for mesh in meshes]
    if dist.get_rank() == 1:
        gradients[1].to_local()[0] = float("inf")
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return found.item() == 1


def whole_truth() -> bool:
    found = (weight() > -5).any()
    return same(found.int(), torch.tensor(1))


def sum_of_norms() -> bool:
    return same(weight().norm(dim=0).sum(), WHOLE.norm(dim=0).sum())


def norm_beside_a_number() -> bool:
    p = weight()
    other = distribute_tensor(torch.tensor(-1.0), p.device_mesh, [Replicate()])
    return same(torch.stack([p.norm(), other]), torch.stack([WHOLE.norm(), torch.tensor(-1.0)]))


def written_sum() -> bool:
    total = weight().detach().sum()
    return same(total.fill_(3.0), torch.tensor(3.0))


def written_by_a_mask() -> bool:
    p = weight().detach()
    p[p > 0] = 0.0
    return same(p, WHOLE.clamp(max=0))


def sum_beside_a_norm() -> bool:
    """Also one row, which some rank has not, is written to what all have: torch refuses from 2.13 on."""
    p = fully_shard(nn.Linear(4, 1)).weight.detach()
    p.mul_(distribute_tensor(torch.zeros(1, 4), p.device_mesh, [Replicate()]))
    return same(p, torch.zeros(1, 4)) and raises(lambda: torch.zeros(()).add_(weight().norm()), "of a plain tensor")


def mean_of_squares() -> bool:
    p = weight()
    return same(nn.functional.mse_loss(p, torch.zeros_like(p)), WHOLE.square().mean())


def sum_over_no_dims() -> bool:
    return same(weight().sum(dim=()), WHOLE.sum())


def gradient_of_a_last_column() -> bool:
    p = weight()
    p.select(-1, 0).square().sum().backward()
    expected = torch.zeros(5, 4)
    expected[:, 0] = 2 * WHOLE[:, 0]
    return same(p.grad, expected)


def number_of_a_sum() -> bool:
    return raises(lambda: weight().sum().item(), "full_tensor().item()")


def collective_on_a_weight() -> bool:
    return raises(lambda: dist.all_reduce(weight().detach()), "Call full_tensor(), on every rank, for the whole tensor")


def drawn() -> bool:
    p = weight().detach()
    torch.manual_seed(0)
    p.normal_()
    torch.manual_seed(0)
    return same(p, torch.empty(5, 4).normal_())


def identity() -> bool:
    return same(nn.init.eye_(weight()), torch.eye(5, 4))


def address() -> bool:
    return raises(weight().untyped_storage().data_ptr, "Call full_tensor() first")


def error_of_a_product() -> bool:
    return raises(lambda: torch.mv(weight(), torch.ones(4)), "weight: each rank holds a shard")


def loss_of_a_closure() -> bool:
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        loss.backward()
        return loss

    losses: list[Any] = [None] * 2
    dist.all_gather_object(losses, optimizer.step(closure).item())
    return losses[0] == losses[1]


def counted_collective() -> bool:
    p = weight()
    with CommDebugMode() as counted:
        torch.stack([p.norm(), (2 * p).norm()]).norm()
    return counted.get_total_counts() == 1


def row_of_means() -> bool:
    p = weight()
    return raises(lambda: torch.no_grad()(p[1].copy_)(p.mean(0)), "would be lost")


PROGRAMS: list[Callable[[], bool]] = [
    *(whole_truth, sum_of_norms, norm_beside_a_number, written_sum, number_of_a_sum),
    *(gradient_of_a_full_tensor, number_beside_a_norm),
    *(assigned_data, counted_local_write, detached_in_inference, copied_gradient, gradient_of_an_input),
    *(written_row, row_of_means, list_with_a_plain_tensor, infinity_on_another_mesh),
    *(written_by_a_mask, sum_beside_a_norm, identity, mean_of_squares, sum_over_no_dims, gradient_of_a_last_column),
    *(drawn, address, error_of_a_product, collective_on_a_weight, loss_of_a_closure, counted_collective),
]
# Programs of one rank alone, which holds no row: others would wait for it.
ON_AN_EMPTY_RANK: list[Callable[[Any], object]] = [lambda p: p.max(), lambda p: p[:, 0].item()]
# Programs for which torch needs no fix any more since 2.15, and one that needed it only for our class until then.
RIGHT = (
    {"whole_truth", "sum_of_norms", "gradient_of_a_last_column", "written_by_a_mask"}
    if torch.__version__ >= "2.15"
    else {"counted_collective"}
)


def ends_well(program: Callable[[], object]) -> bool:
    try:
        return program() is not False
    except Exception:
        return False


def end_well() -> list[str]:
    """Returns the names of the programs that end well, on each of two ranks, or on an empty rank."""

    def body(_: int, __: int) -> set[str]:
        return {program.__name__ for program in PROGRAMS if ends_well(program)}

    found = set.intersection(*run_ranks(2, body))
    with fake_world(4, rank=3), torch.no_grad():
        p = fully_shard(nn.Linear(4, 1), mesh=init_device_mesh("cpu", (2, 2))).weight
        found |= {str(i) for i, program in enumerate(ON_AN_EMPTY_RANK) if ends_well(partial(program, p))}
        found.add(type(p).__name__)
    return sorted(found)


NAMES = {*(program.__name__ for program in PROGRAMS), *map(str, range(len(ON_AN_EMPTY_RANK)))}


@pytest.mark.filterwarnings("ignore")
def test_they_help() -> None:
    assert {*end_well()} == NAMES | {"ShardedDTensor"}


@pytest.mark.parametrize("value", ["off", "views"])
def test_they_are_needed(value: str) -> None:
    """Without them parameters are torch's DTensors. There is one switch."""
    environment = {**os.environ, "FSDP2_DTENSOR_FIXES": value}
    result = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if value == "off":
        assert result.returncode == 0, result.stderr
        assert {*json.loads(result.stdout.splitlines()[-1])} == RIGHT | {"DTensor"}
    else:
        assert "FSDP2_DTENSOR_FIXES: expected off, or no value; got 'views'" in result.stderr


if __name__ == "__main__":
    print(json.dumps(end_well()))
