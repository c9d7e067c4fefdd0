"""Tests the mesh of calls that pass none."""

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.collectives.subgroups import subgroup
from fsdp2.engine.mesh import DataMesh
from helpers import fake_world


def mesh_of(module: nn.Linear):
    return module.weight.device_mesh  # type: ignore[attr-defined]


def test_the_default_mesh_is_one_object_while_it_is_in_use() -> None:
    """Also when the default process group has gone and another has come, with parameters left of the first."""
    with fake_world(4):
        first, second = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
        assert mesh_of(first) is mesh_of(second)
        assert mesh_of(first).size() == 4
    for size in (2, 4):
        with fake_world(size):
            other = fully_shard(nn.Linear(4, 4))
            assert mesh_of(other) is not mesh_of(first)
            assert mesh_of(other).size() == size


def test_nothing_keeps_the_default_mesh_alive() -> None:
    with fake_world(4):
        model = fully_shard(nn.Linear(4, 4))
        mesh = weakref.ref(mesh_of(model))
        del model
        gc.collect()
        assert mesh() is None


def test_ranks_of_two_shard_axes_are_counted_in_row_major_order() -> None:
    """Every rank of 2 x 3 has its own rows. On real ranks another order hangs, or crashes, and says nothing."""
    for rank in range(6):
        with fake_world(6, rank):
            grid = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
            assert (DataMesh(grid, (0, 1)).rank, DataMesh(grid, (0, 1)).size) == (rank, 6)
            assert (DataMesh(grid, (1,)).rank, DataMesh(grid, (1,)).size) == (rank % 3, 3)


def test_a_subgroup_lives_as_long_as_its_group() -> None:
    with fake_world(4):
        group = dist.group.WORLD
        assert group is not None
        first = subgroup(group, 2)
        assert subgroup(group, 2) is first
        assert first.size() == 2
        reference = weakref.ref(first)
        del first, group
    gc.collect()
    assert reference() is None


@pytest.fixture
def current() -> Any:
    """Stands in for the devices of an accelerator: `device` is current on this thread, and 0 on all others."""
    local = threading.local()
    local.device = 3
    module = SimpleNamespace(current_device=lambda: getattr(local, "device", 0))
    with mock.patch.object(torch, "get_device_module", return_value=module):
        yield local


def on_another_thread(function: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class Accelerated:
    """A mesh of accelerators."""

    device_type = "cuda"


@pytest.mark.parametrize(
    "find",
    [
        lambda data: on_another_thread(lambda: data.device),
        lambda data: on_another_thread(lambda: copy.deepcopy(data).device),
        lambda data: copy.deepcopy(on_another_thread(lambda: copy.deepcopy(data))).device,
    ],
    ids=["another thread", "a copy there", "a copy of a copy"],
)
def test_the_device_is_fixed_when_a_mesh_is_built(find: Any, current: Any) -> None:
    """The kind: what is asked of the thread that runs. A thread that writes checkpoints, or evaluates, may never have
    chosen a device: what it gathered would be allocated on device 0, which another process has.
    """
    data: Any = DataMesh(Accelerated(), (0,))  # type: ignore[arg-type]
    assert find(data) == torch.device("cuda", 3)


def test_a_later_choice_of_device_changes_no_mesh(current: Any) -> None:
    data: Any = DataMesh(Accelerated(), (0,))  # type: ignore[arg-type]
    current.device = 5
    assert data.device == torch.device("cuda", 3)
    assert copy.deepcopy(data).device == torch.device("cuda", 3)
    assert pickle.loads(pickle.dumps(data)).device == torch.device("cuda", 5), "another process has another device"
