"""The gradients of a bucket lie in one tensor as their shards lie in the shard buffer, so both are one tensor. A step
on gradients that lie otherwise is exact.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.engine.state import groups_below
from fsdp2.torch_private.internals import local_of
from helpers import assert_same, fake_world, full, run_ranks

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16/fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
}


class Block(nn.Module):
    """Matrices and vectors alternate; some sizes are uneven on all numbers of ranks that are tested."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.odd = nn.Linear(size, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + y * self.odd(x).sum()


@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize(("ranks", "size"), [(2, 16), (3, 32), (8, 256), (64, 16)])
def test_gradients_lie_like_shards(ranks: int, size: int, precision: str) -> None:
    with fake_world(ranks):
        model = nn.Sequential(Block(size), Block(size))
        for block in model:
            fully_shard(block, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=POLICIES[precision])
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=POLICIES[precision])
        model(torch.randn(2, size)).sum().backward()
        for group in groups_below(model)[1:]:
            for bucket in group.gradients.buckets:
                params = [group.params[i] for i in bucket.indices if group.params[i].local.numel()]
                gradients = [local_of(param.sharded.grad) for param in params]
                assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) <= 1
                offsets = group.parameters.buffers.layout.shard_offsets
                offset_of = dict(zip(group.params, offsets, strict=True))
                places = sorted((offset_of[param], local_of(param.sharded.grad).data_ptr()) for param in params)
                runs = count_runs(places)
                # One, or the large ones and the small ones, which are gathered in other ways.
                assert runs <= 2, places
                assert len(group.gradients.buckets) > 1 or runs == 1, places


def count_runs(places: list[tuple[int, int]]) -> int:
    """Returns in how many parts pairs of (offset of a shard, address of its gradient) agree but for a constant."""
    constants = [address - offset for offset, address in places]
    return 1 + sum(a != b for a, b in pairwise(constants))


def test_vectors_lie_behind_matrices() -> None:
    """So optimizers that treat vectors otherwise (no weight decay) need two tensors, not one for each parameter."""
    with fake_world(64):
        block = fully_shard(Block(16), mesh=init_device_mesh("cpu", (64,)))
        (group,) = groups_below(block)
        buffers = group.parameters.buffers
        assert buffers is not None
        offsets = zip(buffers.layout.shard_offsets, group.params, strict=True)
        dims = [len(param.shape) for _, param in sorted(offsets, key=lambda item: item[0])]
        assert dims == sorted(dims, reverse=True)


def placed(*placements: Any) -> Callable[[Any], DTensor]:
    return lambda gradient: gradient.redistribute(placements=placements)


# The last two have the shape of this rank's shard.
OTHERWISE: dict[str, Callable[[Any], DTensor]] = {
    "whole": placed(Replicate(), Replicate()),
    "columns": placed(Replicate(), Shard(1)),
    "whole, by torch's class": lambda g: distribute_tensor(full(g), g.device_mesh, [Replicate(), Replicate()]),
    "halves to add": lambda g: DTensor.from_local(g.to_local() / 2, g.device_mesh, [Partial(), Shard(0)]),
    "other axes": placed(Shard(1), Shard(0)),
}


def test_steps_on_gradients_that_lie_otherwise_are_exact() -> None:
    """Users may set any. A local step would take what this rank has for what belongs to its rows."""

    def body(rank: int, _: int) -> list[str]:
        mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), []
        for name, change in OTHERWISE.items():
            layer = nn.Linear(4, 4, bias=False)
            before = torch.arange(16.0).view(4, 4)
            if name == "other axes":
                layer.weight = nn.Parameter(distribute_tensor(before, mesh["shard"], [Shard(1)]))
                fully_shard(layer, mesh=mesh["replicate"])
            else:
                layer.weight = nn.Parameter(before.clone())
                fully_shard(layer, mesh=mesh)
            gradient = torch.randn(4, 4)
            layer.weight.grad = distribute_tensor(gradient, mesh, layer.weight.placements)
            layer.weight.grad = change(torch.zeros_like(layer.weight).copy_(layer.weight.grad))
            assert layer.weight.grad.placements != layer.weight.placements, name
            torch.optim.SGD(layer.parameters(), lr=0.5).step()
            assert_same(full(layer.weight), before - 0.5 * gradient, 0, 0, name)
            found.append(name)
        return found

    assert run_ranks(4, body) == [[*OTHERWISE]] * 4
