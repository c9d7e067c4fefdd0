"""The mesh of calls that name none."""

import gc
import weakref

import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.mesh import subgroup
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
