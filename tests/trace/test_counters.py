"""Tests `fsdp2.counters`: against formulas, torch's count of collectives, and real ranks; and that it costs nothing
before it is asked for.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.codecs import Int8
from fsdp2.engine.state import groups_below, require_state
from fsdp2.tools.counters import _Counts, _has_memory
from helpers import fake_world, run_ranks

RANKS, DIM, DEPTH = 4, 32, 4
BLOCK = (DIM * DIM + DIM) * 4
c10d = torch.ops.c10d


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def sharded(**options: Any) -> Any:
    model = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(DEPTH)])
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step(model: Any) -> None:
    model(torch.ones(2, DIM, requires_grad=True)).sum().backward()


def asked(model: Any, steps: int = 1) -> dict[str, float]:
    """Returns the counters of steps in steady state."""
    step(model)
    fsdp2.counters(model)
    for _ in range(steps):
        step(model)
    return fsdp2.counters(model)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kept", [True, False, None])
def test_counts_are_those_of_the_formulas(kept: bool | None, steps: int) -> None:
    """All groups are gathered in forward, and those that were freed again in backward: all, none, or all but two."""
    model = sharded(reshard_after_forward=kept)
    found = asked(model, steps)
    gathers = DEPTH + {True: DEPTH, False: 0, None: DEPTH - 2}[kept]
    assert found["all_gathers"] == steps * gathers
    assert found["all_gather_bytes"] == steps * gathers * BLOCK
    assert found["reduce_scatter_bytes"] == steps * DEPTH * BLOCK
    assert found["reduce_scatters"] == steps * DEPTH
    assert (found["all_reduces"], found["all_reduce_bytes"]) == (0, 0)
    assert (found["forward_passes"], found["backward_passes"]) == (steps, steps)
    assert found["host_waits"] == found["all_gathers"] + found["reduce_scatters"]
    assert found["host_wait_seconds"] > 0
    assert found["resting_bytes"] == DEPTH * BLOCK / RANKS
    (group_nbytes,) = {group.nbytes for group in groups_below(model)} - {0}
    assert BLOCK < group_nbytes < 1.1 * BLOCK, "what travels packed lies behind the parameters"
    assert found["unsharded_peak_bytes"] == (DEPTH if kept is False else 2) * group_nbytes
    assert "allocated_peak_bytes" not in found, "the CPU has no statistics"


@pytest.mark.usefixtures("world")
def test_counts_are_those_of_torch() -> None:
    model = sharded()
    asked(model)
    with CommDebugMode() as counted:
        step(model)
    found, torchs = fsdp2.counters(model), counted.get_comm_counts()
    gathers = torchs[c10d._allgather_base_] + torchs[c10d.allgather_into_tensor_coalesced_]
    reduces = torchs[c10d._reduce_scatter_base_] + torchs[c10d.reduce_scatter_tensor_coalesced_]
    assert (found["all_gathers"], found["reduce_scatters"]) == (gathers, reduces)


@pytest.mark.usefixtures("world")
def test_replicas_codecs_and_dtypes() -> None:
    hybrid = asked(sharded(mesh=init_device_mesh("cpu", (2, 2))))
    assert hybrid["all_reduce_bytes"] == DEPTH * BLOCK / 2
    assert hybrid["all_reduces"] > 0
    half = asked(sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
    assert half["all_gather_bytes"] == (2 * DEPTH - 2) * BLOCK / 2
    assert half["reduce_scatter_bytes"] == DEPTH * BLOCK
    coded = asked(sharded(mp_policy=MixedPrecisionPolicy(gradient_codec=Int8())))
    assert 0 < coded["reduce_scatter_bytes"] < DEPTH * BLOCK


@pytest.mark.usefixtures("world")
def test_the_peak_is_the_most_that_had_memory() -> None:
    """Against a look at all groups at each event."""
    model = sharded()
    root = require_state(model).root
    asked(model)
    most = [0]

    class Look(fsdp2.engine.events.Observer):  # type: ignore[name-defined, misc]
        def unsharded(self, group: Any) -> None:
            most[0] = max(most[0], sum(each.nbytes for each in root.groups if _has_memory(each)))

        before_free = unsharded

    root.add(Look())
    step(model)
    assert fsdp2.counters(model)["unsharded_peak_bytes"] == most[0] > 0


@pytest.mark.usefixtures("world")
def test_nothing_is_there_before_it_is_asked_for() -> None:
    model = sharded()
    step(model)
    root = require_state(model).root
    assert root.events.of(_Counts) is None
    comms = [comm for group in groups_below(model) for comm in group.comms if comm is not None]
    assert not any("all_gather" in vars(comm) for comm in comms)
    first = fsdp2.counters(model)
    assert not any(first[key] for key in first if key not in ("resting_bytes", "unsharded_peak_bytes"))
    assert {*asked(model)} == {*first}


@pytest.mark.usefixtures("world")
def test_models_are_freed_and_comms_replaced() -> None:
    model = sharded()
    asked(model)
    model.set_debug_level(0)
    model.set_force_sum_reduction_for_comms(True, recurse=True)
    step(model)
    assert fsdp2.counters(model)["all_gathers"] == 2 * DEPTH - 2
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("world")
def test_a_part_counts_for_its_whole_model_and_others_are_refused() -> None:
    model = sharded()
    asked(model)
    step(model)
    assert fsdp2.counters(model[1])["all_gathers"] == 2 * DEPTH - 2
    assert fsdp2.counters(model)["all_gathers"] == 0, "they were read"
    with pytest.raises(ValueError, match="expected a module that fsdp2 has sharded, got Linear"):
        fsdp2.counters(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got int"):
        fsdp2.counters(3)  # type: ignore[arg-type]


def test_real_ranks_count_alike() -> None:
    def body(rank: int, world_size: int) -> dict[str, float]:
        torch.manual_seed(0)
        found = asked(sharded(), 2)
        dist.barrier()
        return found

    first, second = run_ranks(2, body)
    timed = {"host_wait_seconds"}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
    assert first["all_gathers"] == 2 * (2 * DEPTH - 2)
    assert first["all_gather_bytes"] == first["all_gathers"] * BLOCK
    assert first["reduce_scatter_bytes"] == 2 * DEPTH * BLOCK
