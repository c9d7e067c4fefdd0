"""Tests the messages between ranks where some modules are conditional, and what a rank does for others that run more.

It runs on one of four ranks. A script plays its peers: it gives the least request of all ranks, one consensus after the
other.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from recorder import record
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.features import conditional
from fsdp2.features.conditional import _COMMON, GATHER, REDUCE, Consensus
from helpers import fake_world


class Model(nn.Module):
    """A tower of one block, which `runs_tower` may leave out, and a layer that always runs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.layer = nn.Linear(8, 8)
        self.runs_tower = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.tower(x) + x if self.runs_tower else x)


NAMES = ["root", "tower", "tower.0", "layer"]
"""Of the groups, in their order below the root: what events are numbered by."""


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(4):
        yield


def build() -> Any:
    model = Model()
    fully_shard(model.tower[0])
    fully_shard(model.tower, conditional=True)
    fully_shard(model.layer)
    return fully_shard(model)


@pytest.mark.parametrize(("device", "warnings"), [("cuda", 1), ("cpu", 0)])
def test_the_cost_of_a_consensus_on_a_device_is_logged_once(device: str, warnings: int) -> None:
    """At the first one, on the first rank: not where a model is built, which may never run."""

    def agree(_: Any, request: int, event: int) -> tuple[int, int, int]:
        return request, event, event

    with (
        mock.patch.object(conditional, "has_backend", return_value=device == "cpu"),
        mock.patch.object(conditional, "backend_name", return_value="nccl"),
        mock.patch.object(Consensus, "_exchange", agree),
    ):
        root = mock.Mock(states=[], groups=[])
        root.group.mesh = mock.Mock(axis_groups=[mock.Mock()], device=torch.device(device))
        found = []
        for is_first in (True, False):
            with mock.patch.multiple(conditional, ranks_of=mock.Mock(), is_first=lambda _, first=is_first: first):
                found.append(Consensus(root))
        with pytest.warns(UserWarning, match="conditional=True") if warnings else nullcontext([]) as seen:
            for _ in range(2):
                for each in found:
                    each.after_backward()
    assert len(seen) == warnings
    assert all('init_process_group("cpu:gloo,cuda:nccl")' in str(each.message) for each in seen)


def event(name: str, kind: int) -> int:
    return 2 * NAMES.index(name) + kind


def step(model: Any, others_ask: dict[int, list[int]] | None = None) -> list[str]:
    """Returns the events of a step, "agree" among them. `others_ask`: number of a consensus -> what other ranks ask for
    before it.
    """
    lines = record(model)
    others = dict(others_ask or {})
    agreed = 0

    def all_reduce(tensor: Tensor, group: Any, *, largest: bool) -> None:
        nonlocal agreed
        lines.append("agree")
        asked = others.get(agreed)
        if asked:
            tensor[0] = max(int(tensor[0]), -asked.pop(0))
        else:
            agreed += 1

    with mock.patch.object(conditional, "all_reduce_now", all_reduce):
        model(torch.ones(2, 8)).sum().backward()
    return lines


def test_a_step_without_the_tower() -> None:
    """One before each gather and each reduction, one at each end; nothing of the tower."""
    assert step(build()) == [
        "agree",
        "gather layer 320",
        "free   layer",
        "agree",  # the end of the forward
        "agree",
        "gather layer 320",
        "agree",
        "reduce layer 320",
        "free   layer",
        "agree",  # the end of the backward
        "free   root",
    ]


def test_others_that_run_the_tower_are_joined() -> None:
    """In the order in which they ask, before what all ranks do: gathers are freed at once, zeros are reduced."""
    forward = [event("tower", GATHER), event("tower.0", GATHER)]
    backward = [event("tower", GATHER), event("tower", REDUCE), event("tower.0", GATHER), event("tower.0", REDUCE)]
    lines = [line for line in step(build(), {0: forward, 4: backward}) if line != "agree"]
    assert lines == [
        *("gather tower 320", "free   tower", "gather tower.0 320", "free   tower.0"),
        *("gather layer 320", "free   layer", "gather layer 320", "reduce layer 320", "free   layer"),
        *("gather tower 320", "free   tower", "reduce tower 320"),
        *("gather tower.0 320", "free   tower.0", "reduce tower.0 320"),
        "free   root",
    ]


def test_ranks_in_different_modules_raise() -> None:
    def all_reduce(tensor: Tensor, group: Any, *, largest: bool) -> None:
        tensor[1] = max(int(tensor[1]), -event("tower.0", REDUCE))
        tensor[2] = max(int(tensor[2]), event("root", GATHER))
        assert -int(tensor[0]) == _COMMON

    model = build()
    with (
        mock.patch.object(conditional, "all_reduce_now", all_reduce),
        pytest.raises(RuntimeError, match=r"this one is gathering layer, one is reducing the gradients of tower\.0"),
    ):
        model(torch.ones(2, 8))
