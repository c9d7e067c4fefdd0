"""Tests the ranges in torch's profiler, and the timeline that `trace` writes; and that neither leaves anything."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard, trace
from fsdp2.checks.backward_ends import BackwardEnd
from fsdp2.checks.tools_when_needed import ProfilerRanges, Summary
from fsdp2.engine.state import groups_below
from fsdp2.tools import profiler_ranges
from helpers import fake_world, run_ranks

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


@pytest.mark.usefixtures("world")
def test_a_timeline(tmp_path: Path) -> None:
    model, optimizer = sharded()
    step(model, optimizer)
    with trace(model, tmp_path / "step.json"):
        step(model, optimizer)
    events = read(tmp_path / "step.json")
    spans = named(events, "X")
    assert {name: spans[name] for name in ("forward", "backward", "step SGD")} == dict.fromkeys(
        ("forward", "backward", "step SGD"), 1
    )
    for name in NAMES:
        assert spans[name] == 1, "its forward"
        assert spans[f"launch all_gather {name}"] == spans[f"wait all_gather {name}"] == 2
        assert spans[f"launch reduce_scatter {name}"] == spans[f"wait reduce_scatter {name}"] == 1
        assert named(events, "i")[f"reshard {name}"] == 2
    assert (
        named(events, "b")
        == named(events, "e")
        == Counter(
            {f"{kind} {name}": times for kind, times in (("all_gather", 2), ("reduce_scatter", 1)) for name in NAMES}
        )
    )
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    begun = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(begun[number] <= ended[number] for number in begun)
    assert {event["args"]["bytes"] for event in events if event["ph"] == "b"} == {GROUP}


@pytest.mark.usefixtures("world")
def test_counters_of_memory(tmp_path: Path) -> None:
    model, optimizer = sharded()
    step(model, optimizer)
    with trace(model, tmp_path / "step.json"):
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, DIM)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    events = read(tmp_path / "step.json")
    values: dict[str, list[int]] = {}
    for event in events:
        if event["ph"] == "C":
            values.setdefault(event["name"], []).append(event["args"]["bytes"])
    shards = GROUP * len(NAMES) // RANKS
    assert {*values["resting"]} == {shards}
    unsharded = sorted({*values["unsharded"]})
    size = groups_below(model)[1].nbytes
    assert unsharded == [0, size, 2 * size], "one group, and the next"
    assert max(values["gradients"]) == GROUP * len(NAMES), "unsynchronized ones are whole"
    assert shards in values["gradients"]
    assert values["gradients"][-1] == 0
    assert max(values["reducing"]) > 0
    assert values["reducing"][-1] == 0


@pytest.mark.usefixtures("world")
def test_a_step_that_raises_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    model, optimizer = sharded()
    root = groups_below(model)[0].root
    root.remove(root.events.of(Summary))  # which follows until the first pass begins
    observers = root.events.observers
    handle = model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), trace(model, str(tmp_path / "step.json")):
        model(torch.ones(2, DIM))
    handle.remove()
    spans = named(read(tmp_path / "step.json"), "X")
    assert spans["0"] == spans["1"] == spans["forward"] == 1
    assert [each for each in root.events.observers if not isinstance(each, BackwardEnd)] == [*observers]
    assert not {"all_gather"} & {*vars(groups_below(model)[1].comms.gathers)}
    step(model, optimizer)
    for wrong, kind in ((3, TypeError), (nn.Linear(2, 2), ValueError)):
        with pytest.raises(kind, match="model: expected"), trace(wrong, tmp_path / "no.json"):  # type: ignore[arg-type]
            pass
    assert not (tmp_path / "no.json").exists()


def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    def body(rank: int, _: int) -> list[Tensor]:
        model, optimizer = sharded()
        with trace(model, tmp_path / "all-{rank}.json"), trace(model, tmp_path / "first.json"):
            step(model, optimizer)
        step(model, optimizer)
        return [param.to_local() for param in model.parameters()]

    run_ranks(2, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-0.json", "all-1.json", "first.json"]
    for rank in range(2):
        events = read(tmp_path / f"all-{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        assert events[0]["args"]["name"] == f"rank {rank} of 2"
        assert named(events, "X")["wait all_gather 0"] == 2
    assert named(read(tmp_path / "first.json"), "e")["all_gather 2"] == 2
    assert fsdp2.trace is trace
