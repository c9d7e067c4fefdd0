"""Tests `describe`, a value that prints as a table, and what `print(model)` says of sharded modules."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, describe, fully_shard, replicate
from fsdp2.shards.find import shards_of
from helpers import fake_world

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(8):
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.outside = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def sharded(net: Any = None, **options: Any) -> Any:
    net = net or Net()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, ignored_params={net.outside}, **options)


def test_rows_are_groups() -> None:
    net = Net()
    net.blocks[1][0].requires_grad_(False)
    found = describe(sharded(net, mp_policy=BF16))
    assert [group.name for group in found.groups] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    root, first, frozen, _ = found.groups
    assert (root.cls, first.cls) == ("Net", "Sequential")
    assert root.parameters == ("embed.weight",)
    assert first.parameters == ("blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias")
    assert first.dtypes == ((torch.float32,), (torch.bfloat16,), (torch.float32,))
    assert first.numel == 2 * 72
    assert first.resting_nbytes == 2 * 72 * 4 // 8
    assert first.gathered_nbytes == 2 * 72 * 2
    assert first.reduced_nbytes == 2 * 72 * 4
    assert first.padding_nbytes == 8 * 6 * 2, "six elements a rank, so that chunks are aligned"
    assert (frozen.num_frozen, frozen.reduced_nbytes) == (2, 72 * 4)
    assert (first.num_shards, first.num_replicas) == (8, 1)
    assert found.unmanaged == ("outside",)
    assert found.unmanaged_nbytes == 12
    assert found.numel == 16 * 8 + 3 * 144
    assert found.resting_nbytes == found.numel * 4 // 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(found)) == found


def test_it_prints_as_a_table() -> None:
    net = Net()
    net.blocks[1][0].requires_grad_(False)
    found = describe(sharded(net, mp_policy=BF16, reshard_after_forward=2))
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert re.split("  +", lines[0]) == [
        *("group", "class", "params", "elements", "stored/computed/reduced"),
        *("resting", "gathered", "padding", "reduced", "ranks", "settings"),
    ]
    assert re.split("  +", lines[4]) == [
        *("blocks.1", "Sequential", "4 (2 frozen)", "144", "fp32/bf16/fp32"),
        *("72 B", "288 B", "96 B", "288 B", "8", "reshard_after_forward=2"),
    ]
    assert lines[-2].startswith("total     Net")
    assert lines[-1] == "not sharded, 12 B: outside"
    assert len({line.index(" KiB" if " KiB" in line else " B") for line in lines[3:6]}) == 1


def test_settings_are_shown() -> None:
    """Those that differ from the defaults, before the first forward and after changes."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1), offload_policy=CPUOffloadPolicy())
    net.blocks[0].set_requires_all_reduce(False)
    net.blocks[1].set_reshard_after_forward(False)
    _, first, second, third = describe(net).groups
    assert first.settings == ("all_reduce=False", "some sharded along dim 1")
    assert second.settings == ("reshard_after_forward=False", "some sharded along dim 1")
    assert third.settings == ("some sharded along dim 1",)
    assert (third.num_shards, third.num_replicas) == (4, 2)
    assert "  2 replicas of 4  " in str(describe(net))


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_on_meta_and_one_module(shard: Any) -> None:
    with torch.device("meta"):
        net = nn.Linear(8, 8)
    (group,) = describe(shard(net)).groups
    assert group.name == "root"
    assert group.num_shards * group.num_replicas == 8
    assert group.gathered_nbytes == 72 * 4


def test_of_lists_parts_and_plain_modules() -> None:
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([pair[0], pair[1]])
    (group,) = describe(pair).groups
    assert group.modules == ("0", "1")
    assert "0 and 1 more" in str(describe(pair))
    assert describe(pair).unmanaged == ("2.weight", "2.bias")
    net = sharded()
    (part,) = describe(net.blocks[2]).groups
    assert (part.name, part.modules, part.parameters[0]) == ("this module", ("this module",), "0.weight")
    assert [group.is_root for group in describe(net).groups] == [True, False, False, False]
    assert [group.is_root for group in shards_of(net).groups] == [True, False, False, False]
    assert [group.modules[0] for group in shards_of(net).groups] == [net, *net.blocks]
    assert describe(nn.Linear(2, 2)).groups == ()
    with pytest.raises(TypeError, match=r"nn\.Module, got Parameter"):
        describe(net.outside)


# ---- print(model)


def test_print_shows_groups() -> None:
    """Equal blocks are still printed once."""
    text = repr(sharded(mp_policy=BF16))
    assert "FSDPNet(\n  fsdp2: group of 1 parameters, shard 1/8, param_dtype=bf16, reduce_dtype=fp32\n" in text
    assert "(0-2): 3 x FSDPSequential(\n      fsdp2: group of 4 parameters, shard 1/8, param_dtype=bf16" in text
    linear = fully_shard(nn.Linear(8, 4))
    expected = "FSDPLinear(in_features=8, out_features=4, bias=True, fsdp2: group of 2 parameters, shard 1/8)"
    assert repr(linear) == expected
    assert repr(copy.deepcopy(linear)) == expected
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    pair = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
    fully_shard(pair, mesh=mesh)
    assert "fsdp2: group of 2 parameters with 1 more modules, shard 1/4, 2 replicas)" in repr(pair[1])


def test_a_module_is_named_like_its_plain_class() -> None:
    """By which libraries look up what kind of model it is; torch prints the name of its class."""

    class Named(nn.Linear):
        def _get_name(self) -> str:
            return "of its own"

    linear, named = fully_shard(nn.Linear(8, 4)), fully_shard(Named(8, 4))
    assert linear._get_name() == copy.deepcopy(linear)._get_name() == "Linear"
    assert named._get_name() == "of its own"
    assert repr(named).startswith("of its own(")
    assert "FSDPLinear" in repr(nn.Sequential(linear))


def test_modules_with_a_text_of_their_own_keep_it() -> None:
    class Own(nn.Linear):
        def __repr__(self) -> str:
            return "mine"

    class Named(nn.Linear):
        def extra_repr(self) -> str:
            return f"of {self.in_features}"

    assert repr(fully_shard(Own(2, 2))) == "mine"
    assert repr(fully_shard(Named(2, 2))) == "FSDPNamed(of 2, fsdp2: group of 2 parameters, shard 1/8)"
