"""Tests that torchtitan's CheckpointManager and `fsdp2.checkpoint` resume from each other's folders, to the bit."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from fsdp2 import checkpoint, fully_shard
from helpers import full, run_checks
from models import OddMLP

titan = pytest.importorskip("torchtitan.components.checkpointer")
optimizer = pytest.importorskip("torchtitan.components.optimizer")
loading = pytest.importorskip("torchtitan.components.dataloader")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Rows(IterableDataset):
    """An endless data set, which begins where its state says."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield OddMLP().example(rows=1, seed=100 * dist.get_rank() + self.at)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Run:
    """A training with what torchtitan's trainer has. `folder`: where its CheckpointManager saves and loads."""

    def __init__(self, folder: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.step, self.ntokens_seen = fully_shard(OddMLP()), 0, 0
        options = {r"bias$": {"lr": 0.01, "weight_decay": 0.0}, r".*": {"lr": 0.02, "weight_decay": 1.0 / (1 + seed)}}
        groups = [
            optimizer.ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=each)
            for pattern, each in options.items()
        ]
        config = optimizer.OptimizersContainer.Config(param_groups=groups, implementation="foreach")
        self.optimizers = config.build(model_parts=[self.model])
        schedule = optimizer.LRSchedulersContainer.Config(warmup_steps=4)
        self.schedules = schedule.build(optimizers=self.optimizers, training_steps=9)
        self.loader = loading.ParallelAwareDataloader(Rows(), dist.get_rank(), dist.get_world_size(), batch_size=2)
        self.manager = titan.CheckpointManager.Config(enable=True, folder=folder.name, interval=1).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder.parent),
        )

    @property
    def extra(self) -> dict[str, Any]:
        return {"lr_scheduler": self.schedules, "dataloader": self.loader, "train_state": self}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int) -> list[Any]:
        """Returns the numbers of each step, and the weights."""
        numbers, batches = [], iter(self.loader)
        for _ in range(steps):
            batch = next(batches)
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedules.step()
            self.step, self.ntokens_seen = self.step + 1, self.ntokens_seen + batch.numel()
            numbers += [loss.item(), self.step, self.ntokens_seen, *self.schedules.get_metrics().values()]
        return numbers + [full(p).tolist() for p in self.model.parameters()]


def resume(folder: Path) -> None:
    run = Run(folder / "titan", seed=0)
    run.train(2)
    run.manager.save(run.step)
    checkpoint.save(folder / "ours" / "step-2", run.model, run.optimizers, extra=run.extra, flat_keys=True)
    expected = run.train(3)
    ours = Run(folder / "none", seed=3)
    assert checkpoint.load(folder / "titan" / "step-2", ours.model, ours.optimizers, extra=ours.extra) == {}
    assert ours.train(3) == expected
    titans = Run(folder / "ours", seed=4)
    assert titans.manager.load()
    assert titans.train(3) == expected


def test_resume_from_each_other(tmp_path: Path) -> None:
    run_checks(2, [("resume", partial(resume, tmp_path))], timeout=120)
