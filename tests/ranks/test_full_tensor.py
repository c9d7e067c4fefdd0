"""Tests that losses with `weight.full_tensor()` train like those of the whole batch, for any placement."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import fully_shard, replicate
from fsdp2.dtensor import crossings
from helpers import run_ranks, world_sizes
from scenarios import Net, Run, check, loss_of, sgd


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(run: Run, model: Net, **options: Any) -> None:
    for module in (*model.blocks, model):
        run.shard(module, **options)


def of_a_weight(model: Net, x: Tensor) -> Tensor:
    return x @ whole(model.head.weight)


def of_the_product(model: Net, x: Tensor) -> Tensor:
    return x @ whole(model.blocks[0].down.weight @ model.blocks[0].up.weight)


def of_several_groups(model: Net, x: Tensor) -> Tensor:
    return x @ whole(model.head.weight + model.blocks[1].down.weight.sum() * model.stem.weight)


def twice(model: Net, x: Tensor) -> Tensor:
    return of_a_weight(model, of_a_weight(model, x))


def of_a_norm(model: Net, x: Tensor) -> Tensor:
    """The same on all ranks, whose mean it then is."""
    return x * whole(model.head.weight.square().sum())


USES = (of_a_weight, of_the_product, of_several_groups, twice, of_a_norm)


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[2]))
def test_it_trains(world_size: int) -> None:
    def scenario(run: Run, use: Callable[[Net, Tensor], Tensor]) -> None:
        model = run.build(Net)
        shard(run, model)
        optimizer = sgd(model)
        for step in range(2):
            x = run.batch(seed=step)
            run.step(f"after {step}", model, optimizer, loss_of(use(model, model(x))))
            run.step(f"before {step}", model, optimizer, loss_of(model(use(model, x))))
            run.step(f"alone {step}", model, optimizer, loss_of(use(model, x)))

    check(scenario, world_size, use=USES)


@pytest.mark.parametrize("how", ["replicas of shards", "replicated", "columns"])
def test_wherever_the_weight_lies(how: str) -> None:
    def scenario(run: Run) -> None:
        model = run.build(Net)
        if run.sharded:
            pairs = init_device_mesh("cpu", (2, 2)) if how == "replicas of shards" else None
            options = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)} if how == "columns" else {}
            for module in (*model.blocks, model):
                replicate(module) if how == "replicated" else fully_shard(module, mesh=pairs, **options)
        for step in range(2):
            x = run.batch(seed=step, rows=8)
            loss_of(of_a_weight(model, model(x))).backward()
        for name, param in model.named_parameters():
            run.value(name, whole(param.grad))

    check(scenario, 4 if how == "replicas of shards" else 2)


def test_divisor() -> None:
    def scenario(run: Run) -> None:
        model = run.build(Net)
        shard(run, model)
        if run.sharded:
            for module in (*model.blocks, model):
                module.set_gradient_divide_factor(1.0)
        loss = loss_of(of_a_weight(model, model(run.batch(seed=0))))
        (loss / (run.world_size if run.sharded else 1)).backward()
        run.grads("summed", model)

    check(scenario)


def test_accumulation() -> None:
    """Its gradients do not wait: they are in `.grad` at once, to which those that waited come."""

    def scenario(run: Run) -> None:
        model = run.build(Net)
        shard(run, model)
        for part in range(3):
            run.set_sync(model, part == 2)
            loss_of(of_a_weight(model, model(run.batch(seed=part)))).backward()
        run.grads("all", model)

    check(scenario)


def test_a_graph_of_its_gradient_is_refused() -> None:
    def body(rank: int, _: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model)
        loss = model.weight.full_tensor().square().sum()
        with pytest.raises(RuntimeError, match=r"weight: the gradient of its full_tensor\(\) has no graph"):
            torch.autograd.grad(loss, model.weight, create_graph=True)

    run_ranks(2, body)


def test_other_tensors_are_as_they_were() -> None:
    """Gradients of what nobody shards are not touched, nor those for which somebody says what they are."""

    def body(rank: int, _: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        other = nn.Parameter(torch.randn(4, 4))
        fully_shard(model)
        theirs = nn.Parameter(distribute_tensor(other.detach(), model.weight.device_mesh, [Replicate()]))
        scale = float(rank + 1)
        (theirs.full_tensor() * scale).sum().backward()
        (model.weight.full_tensor(grad_placements=[Replicate()]) * scale).sum().backward()
        (model.weight.detach().full_tensor() * scale).sum()
        return [theirs.grad.to_local(), model.weight.grad.to_local()]  # type: ignore[union-attr]

    for rank, (theirs, ours) in enumerate(run_ranks(2, body)):
        torch.testing.assert_close(theirs, torch.full((4, 4), rank + 1.0))
        torch.testing.assert_close(ours, torch.full((2, 4), rank + 1.0))


def test_calls_on_one_graph_leave_one_hook() -> None:
    """A graph that lives on, and another through the same parameter, do not take longer with each call."""

    def body(rank: int, _: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model)
        scaled = 2 * model.weight
        (accumulate,) = crossings.dtensor_nodes([scaled.grad_fn])
        hooks = []
        register = crossings._DistributedLike.__init__
        crossings._DistributedLike.__init__ = lambda self, leaf: (hooks.append(leaf), register(self, leaf))[1]
        for _ in range(3):
            scaled.full_tensor().sum().backward(retain_graph=True)
            (3 * model.weight).full_tensor().sum().backward()
        assert len(hooks) == 1
        assert accumulate.variable is model.weight
        torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 15.0))

    run_ranks(2, body)


def test_gradients_that_were_computed_on_shards() -> None:
    """Those of a product are not distributed as its factors are; the model's own come to them all the same."""

    def scenario(run: Run) -> None:
        model = run.build(Net)
        shard(run, model)
        block = model.blocks[0]
        penalty = (block.down.weight @ block.up.weight).square().sum()
        penalty.backward()
        loss_of(model(run.batch(seed=0))).backward()
        run.grads("both", model)

    check(scenario)
    check(scenario, 3)
