"""Plain tensors beside sharded parameters: the error names the parameter, and what it says to do is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from fsdp2 import full_params, fully_shard
from helpers import full, run_checks
from scenarios import WIDTH, Net


class Adding(Net):
    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return super().forward(x if state is None else x + state)


def sharded() -> Any:
    torch.manual_seed(0)
    model = Adding()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def put(target: Tensor) -> None:
    target[torch.ones(target.shape, dtype=torch.bool)] = 0


# Of the model, a parameter of its head and a plain tensor like that.
USES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "in place": lambda model, p, plain: p.mul_(plain),
    "copied": lambda model, p, plain: p.data.copy_(plain),
    "operator": lambda model, p, plain: 0.8 * p.data + 0.2 * plain,
    "the other way": lambda model, p, plain: plain - p,
    "gradient": lambda model, p, plain: p.grad + torch.normal(0.0, 1.0, size=p.shape),
    "plain average": lambda model, p, plain: plain.lerp_(p.grad, 0.1),
    "where": lambda model, p, plain: torch.where(plain > 0, plain, p),
    "rows read": lambda model, p, plain: p[torch.tensor([0, 1])],
    "rows filled": lambda model, p, plain: p.index_fill_(0, torch.tensor([0, 1]), 0.0),
    "rows copied": lambda model, p, plain: p.index_copy_(0, torch.tensor([0]), plain[:1]),
    "masked": lambda model, p, plain: p.masked_fill_(plain > 0, 0.0),
    "put": lambda model, p, plain: put(p),
    "put in a gradient": lambda model, p, plain: put(p.grad),
    "listed": lambda model, p, plain: torch.cat([p, plain]),
    "computed": lambda model, p, plain: p.exp().addcmul(plain, plain),
    "by its path": lambda model, p, plain: model.head.weight.add(plain),
    "in one of two": lambda model, p, plain: model.stem.weight + model.head.weight.add(plain),
    "several lines": lambda model, p, plain: torch.where(
        plain > 0,
        plain,
        model.head.weight.detach(),
    ),
}


def each_names_the_parameter() -> None:
    model = sharded()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    p, before = model.head.weight, full(model.head.weight)
    advice = (
        r"^head\.weight: .*full_tensor\(\).*distribute_tensor\(plain, .*full_params\(.*mixed torch\.Tensor and DTensor"
    )
    for use in USES.values():
        with torch.no_grad(), pytest.raises(RuntimeError, match=advice):
            use(model, p, torch.ones(p.shape))
    assert torch.equal(full(p), before)
    with pytest.raises(RuntimeError, match=r"^blocks\.0\.up\.weight: .*full_tensor"):
        model.blocks[0].up.weight.add(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"^head\.weight, head\.bias: .*full_tensor"):
        torch._foreach_add([model.head.weight, model.head.bias], [torch.ones(2), torch.ones(2)])


def gradients_in_hooks_are_told_by_their_shape() -> None:
    model = sharded()
    model.head.weight.register_hook(lambda gradient: gradient * torch.ones(gradient.shape))
    with pytest.raises(RuntimeError, match=r"^a DTensor of global shape \(5, 5\), .*if it is a gradient.*distribute_"):
        model(torch.randn(4, WIDTH)).sum().backward()


def states_made_of_parameters_are_refused_inside_forward() -> None:
    """In a program that made them outside, and a module that has full parameters by then."""
    model = sharded()
    for state in (model.scale.expand(4, WIDTH), 2 * model.scale):
        with pytest.raises(
            RuntimeError, match=r"^scale: an input or state .* outside its forward\. Make it by torch\.z"
        ):
            model(torch.randn(4, WIDTH), state)
    with pytest.raises(RuntimeError, match=r"^a DTensor of global shape \(4, 5\).*make it by torch\.zeros"):
        model(torch.randn(4, WIDTH), model.scale.new_zeros(4, WIDTH))


def the_advice_is_exact() -> None:
    model = sharded()
    p, old = model.head.weight, full(model.head.weight)
    mask = torch.arange(WIDTH)[:, None] > 2
    with torch.no_grad():
        spread = distribute_tensor(mask.expand_as(old).contiguous(), p.device_mesh, p.placements)
        p.masked_fill_(spread, 7.0)
        assert torch.equal(full(p), old.masked_fill(mask, 7.0))
        with full_params(model, writeback=True):
            model.head.weight[mask[:, 0]] = old[mask[:, 0]]
    assert torch.equal(full(p), old)


def names_of_operations_stay_what_they_are() -> None:
    """Where somebody asks for them who complains of nothing, also inside an operation."""
    op, p = torch.ops.aten.add.Tensor, sharded().head.weight
    assert f"{op} {p.shape}".startswith("aten.add.Tensor ")
    seen: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Names():
        p + p
        torch.ones(2) + 1
    assert {"aten.add.Tensor"} <= set(seen)
    assert all(each.startswith("aten.") for each in seen)


CHECKS = (
    each_names_the_parameter,
    gradients_in_hooks_are_told_by_their_shape,
    states_made_of_parameters_are_refused_inside_forward,
    the_advice_is_exact,
    names_of_operations_stay_what_they_are,
)


def test_mixed_operands() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])
