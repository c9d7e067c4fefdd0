"""Tests that `torch.amp.GradScaler` scales, skips and backs off on sharded gradients as it does on plain ones.

All ranks must see an infinity on one rank, or some would step and others not. The oracle is the plain model with a
plain scaler, on the whole batch, in fp64 and with scales that are powers of 2, so that nothing is rounded.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, replicate
from helpers import NIGHTLY, Differences, assert_same, full, run_checks, shard_batch
from models import TinyModel, mean_loss
from scenarios import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

RANKS, STEPS, ROWS = 4, 6, 8


class Layers(TinyModel):
    """The weights of `up` and `down` can be tensor-parallel."""

    row_shape = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


Layout = Callable[[Layers], tuple[int, int]]
"""Shards a model; returns which of how many slices of the batch this rank takes."""


def one_axis(model: Layers) -> tuple[int, int]:
    for module in (model.up, model.down, model):
        fully_shard(module)
    return dist.get_rank(), RANKS


def hsdp(model: Layers) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2, 2))
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    return dist.get_rank(), RANKS


def replicas(model: Layers) -> tuple[int, int]:
    replicate(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return dist.get_rank(), RANKS


def tensor_parallel(model: Layers) -> tuple[int, int]:
    """The head lies on one axis only, and comes first: torch tells an infinity to the ranks of the first gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["shard"])
    return mesh.get_local_rank("shard"), 2


LAYOUTS: tuple[Layout, ...] = (one_axis, hsdp, replicas, tensor_parallel)


def plain() -> Layers:
    torch.manual_seed(1)
    return Layers().double()


def sharded(layout: Layout) -> tuple[Layers, tuple[int, int]]:
    model = plain()
    return model, layout(model)


def set_infinite(gradient: Any, row: int, column: int) -> None:
    """One element, on the ranks that hold it: one, but for replicas. All must call it."""
    if isinstance(gradient, DTensor):
        place = torch.zeros(gradient.shape, dtype=torch.bool)
        place[row, column] = True
        own = distribute_tensor(place, gradient.device_mesh, gradient.placements).to_local()
        gradient.to_local()[own] = float("inf")
    else:
        gradient[row, column] = float("inf")


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


class Side:
    """The sharded or the plain model with all that trains it."""

    def __init__(self, model: Layers, part: tuple[int, int] = (0, 1)) -> None:
        self.model, self.part, self.scaler = model, part, scaler()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, foreach=False)

    def backward(self, seed: int) -> None:
        batch = shard_batch(self.model.example(rows=ROWS, seed=seed).double(), *self.part)
        self.scaler.scale(mean_loss(self.model(batch))).backward()

    def step(self, clip: Callable[..., Tensor] | None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip(self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def resume(self) -> None:
        state, self.scaler = self.scaler.state_dict(), scaler()
        self.scaler.load_state_dict(state)


# ---- checks, each on four ranks --------------------------------------------------------------------------------------


def trains_as_the_plain_model(layout: Layout, clips: bool) -> None:
    """Two steps are skipped for an infinity on one rank; the scale falls there, and grows after two good steps."""
    different, ours, reference = Differences(), Side(*sharded(layout)), Side(plain())
    for step in range(STEPS):
        for i in range(2):
            ours.model.set_requires_gradient_sync(i == 1)
            ours.backward(2 * step + i)
            reference.backward(2 * step + i)
        for side in (ours, reference):
            if step in (1, 4):
                set_infinite(side.model.down.weight.grad, 5, 9)
        ours.step(clip_grad_norm_ if clips else None)
        reference.step(nn.utils.clip_grad_norm_ if clips else None)
        with different.noted():
            assert ours.scaler.get_scale() == reference.scaler.get_scale(), f"step {step}"
        for (name, actual), whole in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
            value = full(actual)
            with different.noted():
                assert_same(value, whole.detach(), **TOLERANCE, name=f"step {step}: {name}")
        if step == 2:
            ours.resume()
            reference.resume()
    assert reference.scaler.get_scale() == 2.0**9, "it fell twice and rose once"
    different.raise_first()


def an_overflow_in_the_backward_of_one_rank() -> None:
    """fp16 on one rank's rows only: every rank skips, its shards untouched; the next step is taken."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    torch.manual_seed(1)
    model = Layers()
    for module in (model.up, model.down, model):
        fully_shard(module, mp_policy=policy)
    side = Side(model)
    for step in range(2):
        before = [full(p).clone() for p in model.parameters()]
        batch = shard_batch(model.example(rows=ROWS, seed=step), dist.get_rank(), RANKS)
        if step == 0 and dist.get_rank() == 2:
            batch = batch * 1e4
        loss = (model(batch).float() * (1e3 if step == 0 and dist.get_rank() == 2 else 1)).mean()
        side.scaler.scale(loss).backward()
        side.step(None)
        changed = [not torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True)]
        assert side.scaler.get_scale() == 2.0**9
        assert any(changed) == (step == 1), step


def under_autocast() -> None:
    """fp16 in forward, by the cached copies that autocast makes of the gathered weights. All ranks see all rows."""
    different, sides = Differences(), []
    for is_sharded in (True, False):
        torch.manual_seed(1)
        model = Layers()
        if is_sharded:
            one_axis(model)
        sides.append(Side(model))
    for step in range(3):
        batch = sides[0].model.example(rows=ROWS, seed=step)
        for side in sides:
            with torch.autocast("cpu", torch.float16):
                output = side.model(batch)
                assert output.dtype == torch.float16
                loss = mean_loss(output)
            side.scaler.scale(loss).backward()
            side.scaler.unscale_(side.optimizer)
        for (name, actual), whole in zip(sides[0].model.named_parameters(), sides[1].model.parameters(), strict=True):
            gradient = full(actual.grad)
            with different.noted():
                assert_same(gradient, whole.grad, rtol=1e-5, atol=1e-6, name=f"step {step}: {name}")
        for side in sides:
            side.step(None)
    different.raise_first()


def unscaling_twice_is_refused() -> None:
    """torch's scaler says so itself; the gradients were divided once."""
    ours, reference = Side(*sharded(one_axis)), Side(plain())
    for side in (ours, reference):
        side.backward(0)
        side.scaler.unscale_(side.optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            side.scaler.unscale_(side.optimizer)
    for (name, actual), whole in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        assert_same(actual.grad, whole.grad, **TOLERANCE, name=name)


def gradients_that_wait_are_refused() -> None:
    """Unscaling amid an accumulation would divide what is reduced, and not what waits. Nothing has been changed."""
    ours, reference = Side(*sharded(one_axis)), Side(plain())
    for i in range(2):
        ours.model.up.set_requires_gradient_sync(i == 1)
        ours.backward(i)
        reference.backward(i)
        if i == 0:
            before = full(ours.model.head.weight.grad)
            for use in (ours.scaler.unscale_, ours.scaler.step):
                with pytest.raises(RuntimeError, match="not synchronised"):
                    use(ours.optimizer)
            assert_same(ours.model.head.weight.grad, before, 0, 0, name="unchanged")
    for side in (ours, reference):
        side.step(None)
    for (name, actual), whole in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
        assert_same(actual, whole.detach(), **TOLERANCE, name=name)


def test_loss_scaling() -> None:
    checks: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        *(
            (trains_as_the_plain_model, (layout, clips))
            for i, layout in enumerate(LAYOUTS)
            for clips in ((False, True) if NIGHTLY else (i % 2 == 0,))
        ),
        (an_overflow_in_the_backward_of_one_rank, ()),
        (under_autocast, ()),
        (unscaling_twice_is_refused, ()),
        (gradients_that_wait_are_refused, ()),
    ]
    named = []
    for check, arguments in checks:
        title = " ".join(getattr(each, "__name__", str(each)) for each in (check, *arguments))
        named.append((title, functools.partial(check, *arguments)))
    run_checks(RANKS, named)
