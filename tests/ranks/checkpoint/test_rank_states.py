"""Tests what is saved besides the model: schedules, states of each rank, random states and what codecs keep."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import MixedPrecisionPolicy, checkpoint, fully_shard
from fsdp2.compression import Compression, Int8
from helpers import full, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


class Position:
    """As a data loader has it: each rank its own."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def make(feedback: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8(feedback=True) if feedback else None))
    model = fully_shard(nn.Sequential(nn.Linear(24, 40), nn.Dropout(), nn.Linear(40, 16)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> float:
    loss = model(torch.randn(4, 24)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return loss.item() + random.random()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [full(p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_with_its_bits(wait: bool, tmp_path: Path) -> None:
    """With dropout, random batches of each rank, a schedule with milestones, and feedback of a codec."""

    def save(rank: int, _: int) -> None:
        made = make()
        torch.manual_seed(10 + rank)
        random.seed(20 + rank)
        for _ in range(2):
            train(*made)
        model, optimizer, schedule = made
        own = {"random": checkpoint.RandomStates(), "position": Position(7 + rank)}
        running = checkpoint.save(
            tmp_path / "a", model, optimizer, extra={"schedule": schedule, "step": 2}, per_rank=own, wait=wait
        )
        expected = [train(*made) for _ in range(3)]
        running.wait()
        again = model2, optimizer2, schedule2 = make()
        own = {"random": checkpoint.RandomStates(), "position": (position := Position(0))}
        found = checkpoint.load(tmp_path / "a", model2, optimizer2, extra={"schedule": schedule2}, per_rank=own)
        assert found == {"step": 2}
        assert position.at == 7 + rank
        assert [train(*again) for _ in range(3)] == expected
        assert schedule2.state_dict() == schedule.state_dict()
        for one, other in zip(weights(model), weights(model2), strict=True):
            assert torch.equal(one, other)
        checkpoint.save(tmp_path / "one", nn.Linear(2, 2), per_rank=None if rank else {"position": Position(5)})
        own = {} if rank else {"position": (position := Position(0))}
        checkpoint.load(tmp_path / "one", nn.Linear(2, 2), per_rank=own)
        assert position.at == 7 + rank if rank else position.at == 5
        plain, optimizer3, _ = make(feedback=False)
        with pytest.warns(UserWarning, match="codecs begin anew"):
            checkpoint.load(tmp_path / "a", plain, optimizer3)

    def elsewhere(rank: int, _: int) -> None:
        model, optimizer, schedule = make()
        own = {"position": (position := Position(3))}
        with pytest.warns(UserWarning, match="2 ranks have saved states of their own, .* 3 load"):
            checkpoint.load(tmp_path / "a", model, optimizer, extra={"schedule": schedule}, per_rank=own)
        assert position.at == 3
        assert schedule.last_epoch == 2
        assert dist.get_world_size() == 3

    run_ranks(2, save)
    run_ranks(3, elsewhere)
