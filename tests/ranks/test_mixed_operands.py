"""Plain tensors beside sharded parameters: the error names the parameter, and what it says to do is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from fsdp2 import fully_shard
from helpers import full, run_checks
from scenarios import WIDTH, Net

# Of a parameter and a plain tensor like it.
USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda p, plain: p.mul_(plain),
    "copied": lambda p, plain: p.data.copy_(plain),
    "operator": lambda p, plain: p.data + 0.2 * plain,
    "rows read": lambda p, plain: p[torch.tensor([0, 1])],
    "rows filled": lambda p, plain: p.index_fill_(0, torch.tensor([0, 1]), 0.0),
    "rows copied": lambda p, plain: p.index_copy_(0, torch.tensor([0]), plain[:1]),
    "masked": lambda p, plain: p.masked_fill_(plain > 0, 0.0),
    "put": lambda p, plain: p.__setitem__(plain > 0, 0.0),
    "computed": lambda p, plain: p.exp() * plain,
}


def sharded() -> Any:
    torch.manual_seed(0)
    return fully_shard(Net())


def each_names_the_parameter() -> None:
    model = sharded()
    p, before = model.head.weight, full(model.head.weight)
    for name, use in USES.items():
        with (
            torch.set_grad_enabled(name == "computed"),
            pytest.raises(RuntimeError, match=r"^head\.weight: .*full_tensor\(\).*distribute_tensor\(plain, .*mixed"),
        ):
            use(p, torch.ones(p.shape))
    assert torch.equal(full(p), before)


def so_do_gradients() -> None:
    model = sharded()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    p = model.head.weight
    with pytest.raises(RuntimeError, match=r"^the gradient of head\.weight: .*full_tensor"):
        p.grad + torch.ones(p.shape)
    p.register_hook(lambda gradient: gradient * torch.ones(gradient.shape))
    with pytest.raises(RuntimeError, match=r"^a DTensor of global shape \(5, 5\): .*full_tensor"):
        model(torch.randn(4, WIDTH)).sum().backward()


def the_advice_is_exact() -> None:
    p = sharded().head.weight
    old, mask = full(p), torch.ones(p.shape).triu() > 0
    with torch.no_grad():
        p.masked_fill_(distribute_tensor(mask, p.device_mesh, p.placements), 7.0)
    assert torch.equal(full(p), old.masked_fill(mask, 7.0))


def test_mixed_operands() -> None:
    checks = (each_names_the_parameter, so_do_gradients, the_advice_is_exact)
    run_checks(2, [(each.__name__, each) for each in checks])
