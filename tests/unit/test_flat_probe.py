"""Which optimizers `flatten_optimizer` takes: a trial on some numbers decides, and errors name what to use instead."""

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fsdp2 import flatten_optimizer
from fsdp2.optim.probe import NotElementwiseError, Verdict, probe

Params = list[nn.Parameter]


def params() -> Params:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]


class Own(optim.Optimizer):
    """A user's own: `p -= lr * change(p, gradient, state, options)`."""

    change: Callable[..., Tensor]

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(type(self).change(p, p.grad, self.state[p], group), alpha=group["lr"])
        return loss


def own(change: Callable[..., Tensor]) -> Any:
    """Returns a class of optimizers that has the name of its function."""
    return type(change.__name__, (Own,), {"change": staticmethod(change)})


@own
def Signs(p: Tensor, g: Tensor, state: Any, _: Any) -> Tensor:
    """With a count in Python, and a moment."""
    state["count"] = state.get("count", 0) + 1
    state["moment"] = state.get("moment", torch.zeros_like(p)).lerp(g, 0.1)
    return state["moment"].sign() / state["count"]


@own
def Writes(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Changes the gradient, as old optimizers do."""
    return g.add_(p, alpha=0.1)


@own
def Shifts(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Moves zeros."""
    return g + 1


@own
def Lamb(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Scales by a norm of each tensor."""
    return g * (p.norm() / g.norm().clamp(min=1e-6))


@own
def NormInState(p: Tensor, g: Tensor, state: Any, _: Any) -> Tensor:
    """Looks at a norm, by which it does not step yet."""
    state["norm"] = g.norm()
    return g


@own
def LargeOnes(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Does something else from 4096 elements on, as quantised states do."""
    return g.to(torch.bfloat16).to(g.dtype) if p.numel() >= 4096 else g


@own
def Blocks(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Rounds in blocks of 256."""
    flat = nn.functional.pad(g.reshape(-1), (0, -g.numel() % 256)).view(-1, 256)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return ((flat / scale).round() * scale).view(-1)[: g.numel()].view(g.shape)


@own
def Random(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Rounds stochastically."""
    return g + 0.1 * torch.rand_like(g)


@own
def RowSums(p: Tensor, g: Tensor, state: Any, _: Any) -> Tensor:
    """Keeps a state of another shape."""
    state["rows"] = g.sum(-1, keepdim=True)
    return g


def verdict(optimizer: optim.Optimizer, dtype: torch.dtype = torch.float32) -> Verdict:
    return probe(optimizer, type(optimizer), optimizer.param_groups[0], torch.empty(0, dtype=dtype))


@pytest.mark.parametrize(
    "make",
    [
        partial(optim.SGD, momentum=0.9),
        partial(optim.AdamW, foreach=True),
        partial(optim.Adam, amsgrad=True, lr=0.0),
        partial(optim.Adagrad, initial_accumulator_value=1.0),
        optim.RAdam,
        optim.Rprop,
        Signs,
    ],
)
def test_elementwise(make: Callable[[Params], optim.Optimizer]) -> None:
    optimizer = make(params())
    before = torch.get_rng_state()
    assert verdict(optimizer) == Verdict(joins=True, keeps_zeros=True, writes_gradients=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, torch.ones_like(p)) for p in optimizer.param_groups[0]["params"])


def test_what_else_is_found() -> None:
    assert verdict(Writes(params())).writes_gradients
    assert not verdict(Shifts(params())).keeps_zeros
    assert not verdict(optim.AdamW(params(), eps=0.0)).keeps_zeros


DEVICES: set[str] = set()


@own
def Counts(p: Tensor, g: Tensor, *_: Any) -> Tensor:
    """Keeps the number of steps in a tensor on the default device, as Adam does."""
    DEVICES.add(torch.zeros(()).device.type)
    return g


def test_the_default_device_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the parameters: on a GPU, another path would be probed, in which the host waits. A program that
    builds its model on meta trains on another device.
    """
    optimizer = Counts(params())
    for said, expected in (("meta", "cpu"), ("cuda", "meta")):
        monkeypatch.setattr(torch, "get_default_device", lambda said=said: torch.device(said))
        DEVICES.clear()
        with torch.device("meta"):  # stands for any device but the CPU, where get_default_device says another name
            probe(optimizer, Counts, optimizer.param_groups[0], torch.zeros(1, device="cpu"))
        assert {expected} == DEVICES


def test_kernels_that_compute_the_ends_of_tensors_otherwise() -> None:
    """Only these differ, so each parameter can be a tensor of its own."""
    assert not verdict(optim.SGD(params(), weight_decay=0.1), torch.bfloat16).joins


@pytest.mark.parametrize("cls", [Lamb, NormInState, LargeOnes, Blocks, Random])
def test_others_are_found(cls: type[Own]) -> None:
    with pytest.raises(NotElementwiseError, match="of the parts of a tensor is another than that of the tensor"):
        verdict(cls(params()))


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "SparseAdam", "LBFGS"])
def test_those_of_torch_are_refused_by_name(name: str) -> None:
    given = [nn.Parameter(torch.ones(3, 2))]
    optimizer = getattr(optim, name)(given)
    with pytest.raises(TypeError, match=rf"^{name} .*Use {name} as it is"):
        flatten_optimizer(optimizer)
    assert type(optimizer) is getattr(optim, name)


def test_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"Lamb can't step on .* Use Lamb as it is"):
        flatten_optimizer(Lamb(params()))
    with pytest.raises(TypeError, match=r"RowSums .* state 'rows' is neither a number nor a tensor"):
        flatten_optimizer(RowSums(params()))
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got a int"):
        flatten_optimizer(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="differentiable"):
        flatten_optimizer(optim.SGD(params(), differentiable=True))


def test_what_keeps_parameters_elsewhere_is_refused() -> None:
    around = Signs(params())
    around.inner = optim.SGD(params())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="inner is an optimizer of its own: flatten that one"):
        flatten_optimizer(around)
    keeping = Signs(given := params())
    keeping.slow = {p: p for p in given}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="keeps parameters in 'slow', too"):
        flatten_optimizer(keeping)
    replaced = Signs(params())
    replaced.step = lambda: None  # type: ignore[assignment, misc, method-assign]
    with pytest.raises(ValueError, match="step was replaced"):
        flatten_optimizer(replaced)


def test_a_closure_that_is_called_again() -> None:
    class Twice(optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            if closure is not None:
                closure()
                closure()
            return super().step()

    optimizer = flatten_optimizer(Twice(params()))
    with pytest.raises(RuntimeError, match="Twice calls its closure again"):
        optimizer.step(lambda: 1.0)


def test_plain_parameters_step_as_before() -> None:
    """An optimizer of no sharded parameter."""
    given = [params(), params()]
    both = [optim.AdamW(given[0]), flatten_optimizer(optim.AdamW(given[1]))]
    for optimizer, own in zip(both, given, strict=True):
        for p in own:
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, *given))
    assert repr(both[0]) == repr(both[1])


def test_the_state_is_freed_with_the_optimizer() -> None:
    """Not when garbage is collected: it takes twice the memory of the parameters."""
    optimizer = optim.AdamW(given := params())
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    flatten_optimizer(optimizer)
    for p in given:
        p.grad = torch.ones_like(p)
    optimizer.step()
    reference = weakref.ref(optimizer.state[given[0]]["exp_avg"])
    del optimizer, schedule
    assert reference() is None


def test_a_group_that_can_not_be_flat_is_not_added() -> None:
    @own
    def Chosen(p: Tensor, g: Tensor, _: Any, options: Any) -> Tensor:
        return g * g.norm() if options["norms"] else g

    optimizer = flatten_optimizer(Chosen(params(), norms=False))
    with warnings.catch_warnings(), pytest.raises(TypeError, match="Chosen can't step"):
        optimizer.add_param_group({"params": params(), "norms": True})
    assert len(optimizer.param_groups) == 1
