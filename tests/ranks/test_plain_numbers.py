"""Tests plain numbers that differ between ranks in losses with DTensors that are computed from shards."""

import operator
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers import assert_same, full, run_ranks
from scenarios import Net, Run, check, loss_of, sgd

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda loss, penalty: loss + penalty,
    "sum, the other way": lambda loss, penalty: penalty + loss,
    "difference": lambda loss, penalty: loss - penalty - loss / 2,
    "product": lambda loss, penalty: loss * penalty,
    "quotient": lambda loss, penalty: loss / penalty,
    "no graph": lambda loss, penalty: loss.detach() * penalty - loss.detach() / penalty,
    "equal numbers": lambda loss, penalty: loss + torch.tensor(0.1) * penalty / torch.tensor(2.0),
}


def shard(run: Run, model: Net, mesh: str) -> None:
    options = {"mesh": init_device_mesh("cpu", (2, 2))} if run.sharded and mesh == "replicas" else {}
    for module in (*model.blocks, model):
        run.shard(module, **options)


@pytest.mark.parametrize("mesh", ["shards", "replicas"])
def test_they_train(mesh: str) -> None:
    def scenario(run: Run, use: str) -> None:
        model = run.build(Net)
        shard(run, model, mesh)
        optimizer = sgd(model)
        for step in range(2):
            loss = loss_of(model(run.batch(seed=step, rows=12)))
            penalty = 1 + model.head.weight.square().sum() + model.blocks[0].down.weight.norm()
            run.step(f"{step}", model, optimizer, USES[use](loss, penalty))

    check(scenario, 2 if mesh == "shards" else 4, use=USES)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": torch.mul,
    "quotient": lambda number, penalty: torch.div(penalty, number),
    "power": lambda number, penalty: penalty**number,
    "weight of two": lambda number, penalty: torch.lerp(penalty, 2 * penalty, number),
    "in place": lambda number, penalty: (1 * penalty).mul_(number),
    "einsum": lambda number, penalty: torch.einsum(",...->...", number, penalty),
    "distance": lambda number, penalty: nn.functional.mse_loss(penalty, number),
}


def whole_of(tensor: DTensor) -> Tensor:
    return tensor.full_tensor()


@pytest.mark.parametrize("mesh", ["shards", "replicas"])
def test_functions_of_a_number_that_differs_between_ranks_raise(mesh: str) -> None:
    """Whose gradients depend on it; and are exact where all ranks have the same."""

    def body(rank: int, size: int) -> None:
        run = Run(rank, size, [])
        model = run.build(Net)
        shard(run, model, mesh)
        own, common = torch.tensor([1.0 + rank // (size // 2), 2.0], dtype=torch.float64).unbind()
        for name, function in FUNCTIONS.items():
            penalty = model.head.weight.norm()
            for end in (Tensor.backward, whole_of, partial(operator.add, own)):
                met = function(own, penalty)
                with pytest.raises(RuntimeError, match=r"head\.weight: a plain number.*full_tensor\(\)"):
                    end(met)
            function(common, penalty).backward()
            whole = full(model.head.weight).requires_grad_()
            function(common, whole.norm()).backward()
            assert_same(model.head.weight.grad, whole.grad, 1e-12, 1e-12, name)
            model.zero_grad()

    run_ranks(2 if mesh == "shards" else 4, body)


def test_numbers_that_are_equal_leave_dtensors() -> None:
    """As torch's FSDP2 does: a program may ask for `full_tensor()` behind."""

    def body(rank: int, size: int) -> list[bool]:
        run = Run(rank, size, [])
        model = run.build(Net)
        shard(run, model, "shards")
        penalty = model.head.weight.sum()
        numbers = [torch.tensor(2.0), torch.tensor(float("nan")), torch.tensor(float(rank))]
        with torch.no_grad():
            unrecorded = penalty * numbers[-1]
        return [isinstance(each, DTensor) for each in (*(penalty * number for number in numbers), unrecorded)]

    assert run_ranks(2, body) == [[True, True, False, True]] * 2
