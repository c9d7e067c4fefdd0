"""Numbers of a rank's own beside what is computed of shards: losses that plain operators put together."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from helpers import run_ranks
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
