"""Tests the ranges in torch's profiler, and that they leave nothing."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.checks.tools_when_needed import ProfilerRanges
from fsdp2.engine.state import groups_below
from fsdp2.tools import profiler_ranges
from helpers import fake_world

RANKS, DIM = 4, 16
GROUP = (DIM * DIM + DIM) * 4
NAMES = ["0", "1", "2"]


def sharded(**options: Any) -> tuple[Any, Any]:
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in NAMES])
    for block in model:
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def ranges_of(run: profile) -> Counter[str]:
    return Counter(event.name for event in run.events() if event.name.startswith("fsdp2."))  # type: ignore[union-attr]


# ---- ranges


@pytest.mark.usefixtures("world")
def test_a_profiler_shows_each_group_with_its_bytes() -> None:
    model, optimizer = sharded()
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model, optimizer)
    found = ranges_of(run)
    local = GROUP * len(NAMES) // RANKS
    for name in NAMES:
        assert found[f"fsdp2.all_gather {name} {GROUP} bytes"] == 2
        assert found[f"fsdp2.wait_all_gather {name} {GROUP} bytes"] == 2
        assert found[f"fsdp2.reduce_scatter {name} {GROUP} bytes"] == 1
        assert found[f"fsdp2.wait_reduce_scatter {name} {GROUP} bytes"] == 1
        size = next(group.nbytes for group in groups_below(model) if group.name == name)
        assert found[f"fsdp2.reshard {name} {size} bytes"] == 2
    assert found[f"fsdp2.optimizer_step 0, 1, 2 {local} bytes"] == 1
    assert sum(found.values()) == 3 * 8 + 1


@pytest.mark.usefixtures("world")
def test_without_a_profiler_nothing_is_left() -> None:
    model, optimizer = sharded()
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]):
        step(model, optimizer)
    assert groups_below(model)[0].events.before_free
    step(model, optimizer)  # the next pass notices that it has stopped
    assert not profiler_ranges._ranges.hooks
    for group in groups_below(model):
        for comm in group.comms:
            assert comm is None or not {"all_gather", "reduce_scatter", "all_reduce"} & {*vars(comm)}
        assert not [each for each in group.events.before_free if isinstance(each.__self__, ProfilerRanges)]
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model, optimizer)
    assert ranges_of(run)


@pytest.mark.usefixtures("world")
def test_models_that_are_sharded_while_a_profiler_runs() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as run:
        model, optimizer = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        step(copy.deepcopy(model), optimizer)
        step(model, optimizer)
    padded = (GROUP // 2 // RANKS + 15) // 16 * 16 * RANKS
    assert ranges_of(run)[f"fsdp2.all_gather 1 {padded} bytes"] == 4


@pytest.mark.usefixtures("world")
def test_a_profiler_that_starts_between_forward_and_backward() -> None:
    model, optimizer = sharded()
    loss = model(torch.ones(2, DIM)).sum()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        loss.backward()
        optimizer.step()
    found = ranges_of(run)
    assert [found[f"fsdp2.reduce_scatter {name} {GROUP} bytes"] for name in NAMES] == [1, 1, 1]
    assert sum(each.startswith("fsdp2.optimizer_step") for each in found) == 1


@pytest.mark.usefixtures("world")
def test_sums_between_replicas() -> None:
    model, optimizer = sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model, optimizer)
    assert ranges_of(run)[f"fsdp2.all_reduce 2 {GROUP // 2} bytes"] == 1
    assert ranges_of(run)[f"fsdp2.wait_all_reduce 2 {GROUP // 2} bytes"] == 1


@pytest.mark.usefixtures("world")
def test_a_schedule_of_the_profiler() -> None:
    model, optimizer = sharded()
    found = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule, on_trace_ready=lambda run: found.append(ranges_of(run))
    ) as run:
        for _ in range(3):
            step(model, optimizer)
            run.step()
    (only,) = found
    assert only[f"fsdp2.all_gather 0 {GROUP} bytes"] == 2


# ---- timeline


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def named(events: list[dict[str, Any]], phase: str) -> Counter[str]:
    return Counter(event["name"] for event in events if event["ph"] == phase)
