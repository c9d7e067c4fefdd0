"""Tests which collectives two hops issue, among which ranks and of how many bytes: 2 machines of 4 ranks, simulated."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, codecs, fully_shard
from fsdp2.engine.comm import CoalescedComm
from fsdp2.engine.hops import HopsComm
from fsdp2.engine.state import groups_below, require_state
from helpers import fake_world

MACHINES, PLACES = 2, 4
ACROSS = DataParallelMeshDims(shard="gpu", shard_across="machine")
WIDTH = 64
NBYTES = WIDTH * WIDTH * 4
RAIL, MACHINE = (0, 4), (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(MACHINES * PLACES):
        yield


class Log:
    """Notes what CoalescedComms issue: the kind, the ranks, and the bytes of the larger side."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, tuple[int, ...], int]] = []
        self.groups: set[Any] = set()

    def __enter__(self) -> "Log":
        self._patches = [
            mock.patch.object(CoalescedComm, "all_gather", self._noted("gather", CoalescedComm.all_gather, 0)),
            mock.patch.object(CoalescedComm, "reduce_scatter", self._noted("reduce", CoalescedComm.reduce_scatter, 1)),
            mock.patch.object(CoalescedComm, "exchange", self._noted("exchange", CoalescedComm.exchange, 0)),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _noted(self, kind: str, issue: Any, which: int) -> Any:
        def call(comm: CoalescedComm, *args: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(comm.group))
            self.entries.append((kind, ranks, sum(each.nbytes for each in args[which])))
            self.groups.add((kind, comm.group))
            return issue(comm, *args)

        return call


def train(**options: Any) -> Log:
    mesh = fsdp2.two_hop_mesh("cpu", ranks_per_machine=PLACES)
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh, dp_mesh_dims=ACROSS, **options)
    with Log() as log:
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    return log


def test_each_hop_has_its_ranks_and_bytes() -> None:
    log = train(reshard_after_forward=True)
    gather = [("gather", RAIL, NBYTES // PLACES), ("gather", MACHINE, NBYTES)]
    reduce = [("reduce", MACHINE, NBYTES), ("reduce", RAIL, NBYTES // PLACES)]
    assert log.entries == gather + gather + reduce
    assert len(log.groups) == len({group for _, group in log.groups}) == 4  # gathers and reductions share none


def test_backward_gathers_inside_the_machine() -> None:
    log = train(reshard_after_forward=PLACES)
    gathers = [each for each in log.entries if each[0] == "gather"]
    assert gathers == [("gather", RAIL, NBYTES // PLACES), ("gather", MACHINE, NBYTES), ("gather", MACHINE, NBYTES)]


def test_a_cast_between_machines_halves_what_rails_carry() -> None:
    log = train(mp_policy=MixedPrecisionPolicy(replica_codec=codecs.Cast(torch.bfloat16)))
    assert log.entries[-2:] == [("reduce", MACHINE, NBYTES), ("exchange", RAIL, NBYTES // PLACES // 2)]


def test_gathers_take_no_memory_but_that_of_the_parameters() -> None:
    """What a rail brings lies where the unsharded parameters are; a reduction has a buffer of 1 / PLACES beside."""
    mesh = fsdp2.two_hop_mesh("cpu", ranks_per_machine=PLACES)
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh, dp_mesh_dims=ACROSS)
    (group,) = groups_below(model)
    pieces: list[torch.Tensor] = []
    gather = CoalescedComm.all_gather

    def noted(comm: CoalescedComm, outputs: Any, inputs: Any) -> Any:
        pieces.extend(outputs)
        return gather(comm, outputs, inputs)

    with mock.patch.object(CoalescedComm, "all_gather", noted):
        model(torch.ones(2, WIDTH))
    assert len(pieces) == 2
    storage = group.parameters.buffers.storage
    assert {each.untyped_storage().data_ptr() for each in pieces} == {storage.data_ptr()}


def make_blocks(device: str = "meta") -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(3)))


def plan_of(model: nn.Module, *settings: dict[str, Any]) -> fsdp2.Plan:
    return fsdp2.plan(
        model,
        ranks=MACHINES * PLACES,
        batch=lambda: torch.zeros(2, WIDTH, device="meta"),
        policy=nn.Linear,
        settings=[*settings],
        link=50e9,
        machine_link=370e9,
        ranks_per_machine=PLACES,
        latency=(1e-5, 1e-6, 1e-3),
        flops=1e14,
    )


def test_a_plan_predicts_the_collectives_of_two_hops() -> None:
    free = {"reshard_after_forward": True}  # else two hops keep a group more for backward
    plan = plan_of(make_blocks(), free, {**free, "machines": MACHINES})
    one, two = sorted(plan.rows, key=lambda row: row.setting.machines)
    for kind in ("all_gather", "reduce_scatter"):
        assert two.prediction.launched[kind] == 2 * one.prediction.launched[kind]
        assert two.prediction.moved[kind] * PLACES == one.prediction.moved[kind] * (PLACES + 1)
    assert "two hops over 2 machines" in str(plan)


def test_two_groups_are_gathered_ahead() -> None:
    """So the hops of two groups overlap: where each collective takes 1 ms and nothing else takes time, two hops take
    little longer than one. With one group ahead each would wait for both hops of the group before: twice as long.
    """
    plan = fsdp2.plan(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(12))),
        ranks=MACHINES * PLACES,
        policy=nn.Linear,
        batch=lambda: torch.zeros(2, WIDTH, device="meta"),
        settings=[{"reshard_after_forward": True}, {"reshard_after_forward": True, "machines": MACHINES}],
        link=1e30,
        ranks_per_machine=PLACES,
        latency=1e-3,
        flops=1e30,
        optimizer=None,
        memory_link=1e30,
    )
    one, two = sorted(plan.rows, key=lambda row: row.setting.machines)
    assert two.prediction.time is not None
    assert one.prediction.time is not None
    assert two.prediction.time < 1.3 * one.prediction.time  # twice as many collectives
    meshes = {1: None, 2: fsdp2.two_hop_mesh("cpu", ranks_per_machine=PLACES)}
    for number, mesh in meshes.items():
        dims = {} if mesh is None else {"mesh": mesh, "dp_mesh_dims": ACROSS}
        model = nn.Sequential(*(fully_shard(nn.Linear(4, 4), **dims) for _ in range(4)))
        root = require_state(fully_shard(model, **dims)).root
        model(torch.zeros(1, 4)).sum().backward()
        model(torch.zeros(1, 4))
        assert root.queue.max_running == number
        model.set_reduce_scatter_max_input_buffers(3)
        model(torch.zeros(1, 4))
        assert root.queue.max_running == 3


def test_apply_asks_for_the_mesh_of_two_hops() -> None:
    plan = plan_of(make_blocks("cpu"), {"machines": MACHINES})
    with pytest.raises(ValueError, match=r"Write fsdp2.two_hop_mesh\(ranks_per_machine=4\)"):
        plan.apply(init_device_mesh("cpu", (8,)))
    model = plan.apply(fsdp2.two_hop_mesh("cpu", ranks_per_machine=PLACES))
    assert all(isinstance(group.comms.gathers, HopsComm) for group in groups_below(model))


@pytest.mark.parametrize(
    "fields",
    [
        {"machines": 3},
        {"machines": 8},
        {"machines": 2, "replicas": 2},
        {"machines": 2, "wire_dtype": torch.bfloat16},
    ],
)
def test_settings_that_exclude_two_hops_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="machines: expected"):
        fsdp2.Setting(8, **fields)
