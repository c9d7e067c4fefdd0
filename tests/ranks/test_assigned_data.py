"""Tests unsharded parameters that have left their group's memory, and local tensors of another shape than the layout's.

`.data` was assigned while the parameter was unsharded, as Hugging Face's resize_token_embeddings does, or the tensor
was changed in place. The faults in question: with a larger tensor a copy would write beyond the memory of a gradient;
with a smaller one `.grad` would contain uninitialised bytes; with an equal one, forwards would use a tensor that no
optimizer trains.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from helpers import NIGHTLY, assert_same, full, run_checks, world_sizes

WIDTH = 6
Assign = Callable[[nn.Parameter], object]


class Net(nn.Module):
    """Its middle layer is square. `during`: what a forward does to that layer's weight, behind its use or before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.during: Assign | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.during is not None:
            self.during(self.middle.weight)
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))  # of any width
        return self.last(nn.functional.pad(x, (0, WIDTH))[:, :WIDTH])


def larger(weight: nn.Parameter) -> None:
    weight.data = weight.new_ones(WIDTH + 4, WIDTH)


def smaller(weight: nn.Parameter) -> None:
    weight.data = weight.data[: WIDTH - 2].clone()


def fewer_rows_of_the_same(weight: nn.Parameter) -> None:
    weight.data = weight.data[: WIDTH - 2]


def equal(weight: nn.Parameter) -> None:
    weight.data = torch.ones_like(weight)


def transposed(weight: nn.Parameter) -> None:
    weight.data = weight.data.t()


def flattened(weight: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(weight.new_ones(WIDTH * WIDTH), [weight])


def set_in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.set_(torch.ones_like(weight))


ASSIGNS: tuple[Assign, ...] = (*(larger, smaller, fewer_rows_of_the_same, equal, transposed, flattened, set_in_place),)


def sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    return fsdp2.fully_shard(Net(), **options)


def step(model: Any) -> None:
    model(torch.ones(4, WIDTH)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"middle\.weight") as error:
        call()
    assert "full_params(module, writeback=True)" in str(error.value)


def trains_as_if_nothing_had_happened(model: Any) -> None:
    """One step more: the parameters are those of a model to which nobody has done anything."""
    plain = sharded()
    step(plain)
    step(model)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(mine), full(theirs), 0, 0, name)


def reshards(model: Any, assign: Assign) -> None:
    model.unshard()
    assign(model.middle.weight)
    refused(model.reshard)


def runs(model: Any, assign: Assign) -> None:
    model.unshard()
    assign(model.middle.weight)
    refused(lambda: model(torch.ones(4, WIDTH)))


def leaves_a_block(model: Any, assign: Assign) -> None:
    def block() -> None:
        with fsdp2.full_params(model):
            assign(model.middle.weight)

    with pytest.raises(RuntimeError, match=r"middle\.weight"):
        block()


def assigns_in_forward(model: Any, assign: Assign) -> None:
    """In the third, in which no check of what forwards write takes place. Backward, or the next forward, finds it."""
    lr = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        lr.step()
        model.zero_grad()
    model.during = assign

    def third() -> None:
        loss = model(torch.ones(4, WIDTH)).square().mean()
        model.during = None
        loss.backward()
        model(torch.ones(4, WIDTH))

    try:
        refused(third)
    finally:
        model.during = None
    model.zero_grad()


MOMENTS = (reshards, runs, leaves_a_block, assigns_in_forward)
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "freed": lambda: {"reshard_after_forward": True},
    "kept": lambda: {"reshard_after_forward": False},
    "bf16": lambda: {"mp_policy": fsdp2.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)},
    "columns": lambda: {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 else None},
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_data_assigned_while_unsharded_is_refused_and_dropped(world_size: int) -> None:
    def check(moment: Callable[[Any, Assign], None], assign: Assign, way: str) -> None:
        model = sharded(**WAYS[way]())
        moment(model, assign)
        # A graph has noted another shape: the gradients of later ones are refused by autograd.
        is_other_graph = moment is assigns_in_forward and assign in (larger, smaller, fewer_rows_of_the_same)
        if way != "bf16" and not is_other_graph:
            trains_as_if_nothing_had_happened(model)

    cases = [(moment, assign, "freed") for moment in MOMENTS for assign in ASSIGNS]
    cases += [(moment, assign, way) for moment in MOMENTS for assign in (larger, equal) for way in WAYS]
    chosen = cases if NIGHTLY else cases[::4]
    names = [f"{moment.__name__} {assign.__name__} {way}" for moment, assign, way in chosen]
    run_checks(world_size, [(name, partial(check, *case)) for name, case in zip(names, chosen, strict=True)])


def test_data_assigned_to_replicas_is_refused() -> None:
    def replicas(assign: Assign) -> None:
        torch.manual_seed(0)
        runs(fsdp2.replicate(Net()), assign)

    run_checks(2, [(each.__name__, partial(replicas, each)) for each in ASSIGNS])


def test_a_local_tensor_of_other_rows_is_refused() -> None:
    """Rank 0 gives a DTensor of the right global shape too many rows, which would lie over another parameter's."""

    def check(assign: Callable[[nn.Module, DTensor], object]) -> None:
        model = sharded()
        weight = model.middle.weight
        rows = 4 if dist.get_rank() == 0 else 2
        wrong = DTensor.from_local(
            torch.ones(rows, WIDTH), weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
        )
        assign(model, wrong)
        with pytest.raises(ValueError, match=r"middle\.weight: expected a local tensor of shape \(3, 6\)"):
            model(torch.ones(4, WIDTH))

    def by_data(model: Any, wrong: DTensor) -> None:
        model.middle.weight.data = wrong

    def by_parameter(model: Any, wrong: DTensor) -> None:
        model.middle.weight = nn.Parameter(wrong)

    run_checks(2, [("data", partial(check, by_data)), ("parameter", partial(check, by_parameter))])
