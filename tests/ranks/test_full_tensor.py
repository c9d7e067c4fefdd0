"""Tests that losses of plain tensors made of sharded weights train like those of the whole batch, for any placement:
`full_tensor()`, `redistribute`, `to_local()`; and that collectives of shards are refused.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard, replicate
from fsdp2.dtensor import crossings, graph, summed_parts
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


def of_a_sum(model: Net, x: Tensor) -> Tensor:
    """Two weights get one gradient, which autograd copies for one of them."""
    return x @ whole(model.head.weight + model.stem.weight)


def twice(model: Net, x: Tensor) -> Tensor:
    return of_a_weight(model, of_a_weight(model, x))


def of_a_norm(model: Net, x: Tensor) -> Tensor:
    """The same on all ranks, whose mean it then is."""
    return x * whole(model.head.weight.square().sum())


def redistributed(tensor: Any, **options: Any) -> Tensor:
    """Returns the whole weight by another name than `full_tensor`."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local(**options)


def of_a_redistributed_weight(model: Net, x: Tensor) -> Tensor:
    return x @ redistributed(model.head.weight)


def of_a_redistributed_product(model: Net, x: Tensor) -> Tensor:
    return x @ redistributed(2 * model.head.weight @ model.blocks[0].down.weight @ model.blocks[0].up.weight)


def of_a_weight_in_all_ways(model: Net, x: Tensor) -> Tensor:
    weight = model.head.weight
    return x @ whole(weight) @ redistributed(weight)


def of_a_checkpointed_use(model: Net, x: Tensor) -> Tensor:
    """The crossing is inside what runs again."""

    def used(x: Tensor) -> Tensor:
        return torch.tanh(x @ redistributed(model.head.weight)) @ redistributed(model.blocks[0].down.weight)

    return checkpoint(used, x.detach().requires_grad_(), use_reentrant=False) @ whole(model.blocks[0].up.weight)


def of_a_weight_with_explicit_gradients(model: Net, x: Tensor) -> Tensor:
    """The program says what gradients are: nothing is averaged twice."""
    weight = model.head.weight
    if not isinstance(weight, DTensor):
        return x @ weight @ weight
    averaged = [Partial("avg")] * weight.device_mesh.ndim
    return x @ redistributed(weight, grad_placements=averaged) @ weight.full_tensor(grad_placements=averaged)


USES = (of_a_weight, of_the_product, of_several_groups, of_a_sum, twice, of_a_norm)
OTHER_NAMES = (
    of_a_redistributed_weight,
    of_a_redistributed_product,
    of_a_weight_in_all_ways,
    of_a_checkpointed_use,
    of_a_weight_with_explicit_gradients,
)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_it_trains(world_size: int) -> None:
    def scenario(run: Run, use: Callable[[Net, Tensor], Tensor]) -> None:
        model = run.build(Net)
        shard(run, model)
        optimizer = sgd(model)
        x = run.batch(seed=0)
        run.step("after", model, optimizer, loss_of(use(model, model(x))))
        run.step("before", model, optimizer, loss_of(model(use(model, x))))
        run.step("alone", model, optimizer, loss_of(use(model, x)))

    check(scenario, world_size, use=(*USES, *OTHER_NAMES))


@pytest.mark.parametrize("how", ["replicas of shards", "replicated", "columns"])
def test_wherever_the_weight_lies(how: str) -> None:
    def scenario(run: Run, use: Callable[[Net, Tensor], Tensor]) -> None:
        model = run.build(Net)
        if run.sharded:
            pairs = init_device_mesh("cpu", (2, 2)) if how == "replicas of shards" else None
            options = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)} if how == "columns" else {}
            for module in (*model.blocks, model):
                replicate(module) if how == "replicated" else fully_shard(module, mesh=pairs, **options)
        for step in range(2):
            x = run.batch(seed=step, rows=8)
            loss_of(use(model, model(x))).backward()
        for name, param in model.named_parameters():
            run.value(name, whole(param.grad))

    check(scenario, 4 if how == "replicas of shards" else 2, use=(of_a_weight, *OTHER_NAMES))


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

    def scenario(run: Run, use: Callable[[Net, Tensor], Tensor]) -> None:
        model = run.build(Net)
        shard(run, model)
        for part in range(3):
            run.set_sync(model, part == 2)
            loss_of(use(model, model(run.batch(seed=part)))).backward()
        run.grads("all", model)

    check(scenario, use=(of_a_weight, *OTHER_NAMES))


def test_a_graph_of_its_gradient_is_refused() -> None:
    def body(rank: int, _: int) -> None:
        model = nn.Linear(4, 4)
        fully_shard(model)
        loss = model.weight.full_tensor().square().sum()
        with pytest.raises(
            RuntimeError, match=r"weight: the gradient of a plain tensor that full_tensor\(\).*no graph"
        ):
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
        (accumulate,) = graph.leaf_nodes([scaled.grad_fn])
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


# ---- own parts of weights --------------------------------------------------------------------------------------------


def own_part(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of_own_rows(model: Net) -> Tensor:
    """Each rank adds the penalty of its rows; the sum over the ranks is trained."""
    return sum((own_part(p).square().sum() for p in model.parameters()), torch.zeros(()))


def of_own_rows_of_a_result(model: Net) -> Tensor:
    return own_part(2 * model.head.weight.square()).sum()


@pytest.mark.parametrize(("world_size", "mesh"), [(3, None), (4, (2, 2))])
def test_penalties_of_own_parts(world_size: int, mesh: tuple[int, int] | None) -> None:
    def scenario(run: Run, penalty: Callable[[Net], Tensor], waits: bool) -> None:
        model = run.build(Net)
        shard(run, model, **({"mesh": init_device_mesh("cpu", mesh)} if mesh and run.sharded else {}))
        optimizer = sgd(model)
        for part in range(2):
            run.set_sync(model, part == 1 or not waits)
            (loss_of(model(run.batch(seed=part, rows=12))) + 0.1 * penalty(model)).backward()
        run.step("after both", model, optimizer)
        assert not summed_parts.parts, "no graph is alive"

    check(scenario, world_size, penalty=(of_own_rows, of_own_rows_of_a_result), waits=(False, True))


def copied_without_gradient(tensor: Tensor) -> Tensor:
    """Stands for collectives of torch.distributed: gloo's own fail at random if their output requires a gradient."""
    with contextlib.suppress(RuntimeError):  # it has been defined before
        torch.library.define("fsdp2_tests::copied", "(Tensor tensor) -> Tensor")
        torch.library.impl("fsdp2_tests::copied", "CPU", lambda tensor: tensor.detach().clone())
    copied: Tensor = torch.ops.fsdp2_tests.copied(tensor)
    return copied


def by_function(own: Tensor, group: Any) -> Tensor:
    return functional.all_reduce(own, "sum", group)


def by_nn(own: Tensor, group: Any) -> Tensor:
    return with_gradients.all_reduce(own, group=group)


def all_gather(own: Tensor, group: Any) -> Tensor:
    name = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor_autograd"
    return getattr(functional, name)(own.contiguous(), 0, group)


def all_gather_of_nn(own: Tensor, group: Any) -> Tensor:
    return torch.cat([*with_gradients.all_gather(own, group)])


def without_gradient(own: Tensor, _: Any) -> Tensor:
    return copied_without_gradient(own)


COLLECTIVES = (by_function, by_nn, all_gather, all_gather_of_nn, without_gradient)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_collectives_of_parts_are_refused() -> None:
    """On all ranks, before anything is communicated in backward: alone, behind others, with activations."""

    def body(rank: int, _: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4, bias=False))
        group, x = dist.group.WORLD, torch.randn(2, 4)
        says = r"^weight: a collective in the graph of the loss takes.*Call full_tensor\(\) on the parameter"
        for collect in COLLECTIVES:
            losses = (
                lambda part, collect=collect: collect(part, group).square().sum(),
                lambda part, collect=collect: by_function((collect(2 * part, group) * 3).sum(), group) + part.sum(),
                lambda part, collect=collect: model(x).sum() + collect(part + model(x)[:, :4].sum(), group).sum(),
            )
            for loss in losses:
                with pytest.raises(RuntimeError, match=says):
                    loss(model.weight.to_local()).backward()
        model.zero_grad()
        with torch.no_grad():  # as the error says
            collected = all_gather(model.weight.to_local(), group)
        (model.weight.full_tensor() * collected).sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), model.weight.detach().full_tensor())

    run_ranks(2, body)


def test_own_gradients_stay_where_the_program_says_what_they_are() -> None:
    """With `grad_placements`, collectives of parts are as torch computes them; under no_grad nothing is noted."""

    def body(rank: int, size: int) -> None:
        model = fully_shard(nn.Linear(4, 4, bias=False))
        part = model.weight.to_local(grad_placements=model.weight.placements)
        functional.all_reduce(part.sum(), "sum", dist.group.WORLD).backward()
        torch.testing.assert_close(model.weight.grad.to_local(), torch.full((2, 4), 2.0))
        with torch.no_grad():
            model.weight.to_local().mul_(2)
        model.weight.detach().to_local()
        assert not summed_parts.parts

    run_ranks(2, body)
