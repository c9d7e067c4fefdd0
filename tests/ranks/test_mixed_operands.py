"""Tests plain tensors in operations with sharded parameters: the error names the parameter, and its advice is exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fsdp2 import full_params, fully_shard
from helpers import assert_same, full, run_checks
from scenarios import WIDTH, Net

WRITES = ("in place", "rows copied", "masked", "put")
# Of a parameter and a plain tensor like it.
USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "in place": lambda p, plain: p.mul_(plain),
    "copied": lambda p, plain: p.data.copy_(plain),
    "operator": lambda p, plain: p.data + 0.2 * plain,
    "rows read": lambda p, plain: p[torch.tensor([0, 1])],
    "rows copied": lambda p, plain: p.index_copy_(0, torch.tensor([0]), plain[:1]),
    "masked": lambda p, plain: p.masked_fill_(plain > 0, 0.0),
    "put": lambda p, plain: p.__setitem__(plain > 0, 0.0),
    "computed": lambda p, plain: p.exp() * plain,
    "on the right": lambda p, plain: plain - p.data,
    "part": lambda p, plain: p[0] + plain[0],
    "gathered": lambda p, plain: torch.gather(p, 0, plain.long()),
    "taken": lambda p, plain: torch.take(p, plain.long()),
    "scattered": lambda p, plain: p.scatter(0, plain.long(), plain),
    "added": lambda p, plain: torch.index_add(p, 0, torch.tensor([0, 1]), plain[:2]),
    "selected": lambda p, plain: torch.masked_select(p, plain > 0),
    "chosen": lambda p, plain: torch.where(plain > 0, p, p),
    "compared": lambda p, plain: torch.equal(p, plain),
    "nearly": lambda p, plain: torch.allclose(p, plain),
    "product": lambda p, plain: torch.mv(p, plain[0]),
    "joined": lambda p, plain: torch.cat([plain, p]),
    "looked up": lambda p, plain: nn.functional.embedding(torch.tensor([0, 1, 2]), p),
    "convolved": lambda p, plain: nn.functional.conv1d(plain[None], p[:, :, None]),
    "loss": lambda p, plain: nn.functional.mse_loss(p, plain),
}


def sharded() -> Any:
    torch.manual_seed(0)
    return fully_shard(Net())


def sharded_not() -> Any:
    torch.manual_seed(0)
    return Net()


def each_names_the_parameter() -> None:
    model = sharded()
    p, before = model.head.weight, full(model.head.weight)
    for name, use in USES.items():
        advice = r"full_state_dict=True.*distribute_tensor\(plain, "
        if name != "copied":  # which load_state_dict does
            writes = name in WRITES
            advice = r"writeback=True\).*distribute_tensor\(constant, .*mixed" if writes else r"full_tensor\(\).*mixed"
        with (
            torch.set_grad_enabled(name == "computed"),
            pytest.raises(RuntimeError, match=rf"^head\.weight: .*{advice}"),
        ):
            use(p, torch.ones(p.shape))
    assert torch.equal(full(p), before)


# What DTensor has no rule for, of a parameter alone.
LACKING: dict[str, Callable[[Any], Any]] = {
    "renorm": lambda p: p.renorm(2, 0, 1.0),
    "unfold": lambda p: p.unfold(0, 2, 1),
    "pdist": torch.pdist,
    "distances": lambda p: torch.cdist(p, p),
}


def so_do_operations_without_a_rule() -> None:
    """Outside and inside of a forward's graph; computing in `full_params`, as the error says, is exact."""
    model = sharded()
    p, whole = model.head.weight, full(model.head.weight)
    for name, use in LACKING.items():
        for tensor in (p, p.data, p.detach()):
            with pytest.raises(NotImplementedError, match=r"^head\.weight: DTensor can't do .*full_params.*strategy"):
                use(tensor)
        with full_params(model.head), torch.no_grad():
            assert torch.equal(use(model.head.weight), use(whole)), name


def so_do_modules_called_alone() -> None:
    """Any group's inner modules, by their names; in full_params they compute."""
    torch.manual_seed(0)
    model: Any = Net()
    x = torch.randn(4, WIDTH)
    expected = model.blocks[0].up(x)
    for module in (*model.blocks, model):
        fully_shard(module)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"^model\.blocks\[0\]\.up \(Linear\).*full_params\(model\.blocks\[0\]\)"
        ):
            model.blocks[0].up(x)
        model(x).sum().backward()
        model.zero_grad()
    with full_params(model.blocks[0]):
        assert torch.equal(model.blocks[0].up(x), expected)


def so_do_gradients() -> None:
    model = sharded()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    p = model.head.weight
    with pytest.raises(RuntimeError, match=r"^the gradient of head\.weight: .*full_tensor.*constant"):
        p.grad + torch.ones(p.shape)
    p.register_hook(lambda gradient: gradient * torch.ones(gradient.shape))
    with pytest.raises(RuntimeError, match=r"^a DTensor of global shape \(5, 5\): .*full_tensor.*constant"):
        model(torch.randn(4, WIDTH)).sum().backward()


def the_advice_is_exact() -> None:
    model, plain = sharded(), sharded_not()
    p, q = model.head.weight, plain.head.weight
    mask = torch.ones(p.shape).triu() > 0
    constant = distribute_tensor(mask, p.device_mesh, p.placements)
    with torch.no_grad():
        p.masked_fill_(constant, 7.0)
        q.masked_fill_(mask, 7.0)
        with full_params(model, writeback=True):
            model.head.weight[torch.tensor([0, 2])] = 5.0
        q[torch.tensor([0, 2])] = 5.0
    p.register_hook(lambda gradient: gradient * constant)
    q.register_hook(lambda gradient: gradient * mask)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert_same(full(p.grad), q.grad, 1e-5, 1e-6, "the gradient")
    assert torch.equal(full(p), q)


def test_mixed_operands() -> None:
    checks = (
        each_names_the_parameter,
        so_do_operations_without_a_rule,
        so_do_modules_called_alone,
        so_do_gradients,
        the_advice_is_exact,
    )
    run_checks(2, [(each.__name__, each) for each in checks])
