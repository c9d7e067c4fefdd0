"""What steps, clipping and averages cost the host when parameters are many and small, as exact counts.

On one of 64 simulated ranks, of 144 parameters: 16 blocks of 9. Beside them, the same of torch's optimizers on the same
sharded parameters.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import swa_utils

from benchmarks.host import count_calls, count_ops
from benchmarks.libraries import load_library
from benchmarks.models import Shape, build_sharded, compute_loss, make_batch
from fsdp2 import AveragedModel, clip_grad_norm_, flatten_optimizer
from helpers import fake_world

SHAPE = Shape(blocks=16, dim=16, hidden=32, tokens=4)
RANKS = 64


@pytest.fixture
def model() -> Iterator[Any]:
    """With gradients."""
    with fake_world(RANKS):
        built: Any = build_sharded(SHAPE, "fp32", load_library("fsdp2-best"), init_device_mesh("cpu", (RANKS,)))
        for param in built.parameters():
            nn.init.ones_(param)
        compute_loss(built, make_batch(SHAPE, "fp32")).backward()
        for param in built.parameters():
            param.grad.to_local().fill_(0.5)  # what a fake group leaves may be anything
        yield built


def cost(call: Callable[[], Any]) -> tuple[int, int]:
    """Python functions called, and operations dispatched, in steady state."""
    for _ in range(3):
        call()
    num_ops = count_ops(call)
    return count_calls(call), num_ops


def by_decay(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2], "lr": 0.1}]


# (options, whether vectors have options of their own) -> most calls and operations of a flat step. Counted in November
# 2026, plus a tenth. Views of gradients are more than half of the operations: one each.
STEPS = {
    ("foreach", False): (277, 180),
    ("fused", False): (197, 5),
    ("one by one", False): (244, 178),
    ("foreach", True): (454, 197),
    ("fused", True): (297, 7),
}
OPTIONS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}, "one by one": {}}


@pytest.mark.parametrize(("way", "decays"), STEPS)
def test_a_step_costs_a_bounded_number(model: Any, way: str, decays: bool) -> None:
    params = [*model.parameters()]
    make = partial(optim.AdamW, by_decay(params) if decays else params, **OPTIONS[way])
    flat = cost(flatten_optimizer(make()).step)
    plain = cost(make().step)
    assert flat[0] <= STEPS[way, decays][0], flat
    assert flat[1] <= STEPS[way, decays][1], flat
    assert flat[0] * 5 <= plain[0], (flat, plain)


def test_gradients_that_lie_as_the_parameters_do_are_not_copied(model: Any) -> None:
    """As views of one flat tensor for each group."""
    from fsdp2.engine.state import groups_below
    from fsdp2.torch_private.internals import local_of, set_local

    for group in groups_below(model):
        buffers = group.parameters.buffers
        flat = torch.full((buffers.shards.numel() // 4,), 0.5)
        for param, offset in zip(group.params, buffers.layout.shard_offsets, strict=True):
            local = local_of(param.sharded)
            set_local(param.sharded.grad, flat.as_strided(local.shape, local.stride(), offset // 4))
    optimizer = flatten_optimizer(optim.SGD(model.parameters(), lr=0.5))
    steps, clip = cost(optimizer.step), cost(partial(clip_grad_norm_, [*model.parameters()], 1e9))
    assert steps[1] <= 44, steps
    assert clip[1] <= 54, clip
    assert all(bool((local_of(p) == 1 - 5 * 0.25).all()) for p in model.parameters())


def test_memory_is_that_of_the_states(model: Any) -> None:
    """No copy of the shards or the gradients stays."""

    def tensors() -> int:
        gc.collect()
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided and each.device.type == "cpu"
        }
        return sum(storages.values())

    optimizer = flatten_optimizer(optim.AdamW(model.parameters()))
    before = tensors()
    optimizer.step()
    numel = sum(p.to_local().numel() for p in model.parameters())
    assert tensors() - before <= 2 * 4 * numel + 1024


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_costs_a_bounded_number(model: Any, order: float) -> None:
    params = [*model.parameters()]
    calls, ops = cost(partial(clip_grad_norm_, params, 1.0, order))
    assert calls <= 122, calls
    assert ops <= 186, ops  # a view of each gradient, inside one call that copies all


def test_an_average_costs_a_bounded_number(model: Any) -> None:
    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    flat, plain = (
        cost(partial(cls(model, multi_avg_fn=ema).update_parameters, model))
        for cls in (AveragedModel, swa_utils.AveragedModel)
    )
    assert flat[1] * 6 <= plain[1], (flat, plain)
    assert flat[1] <= 44, flat
    assert flat[0] * 2 <= plain[0], (flat, plain)
