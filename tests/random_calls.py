"""Makes random sequences of calls of a training program, for a model of random_models.py and the same model sharded.

Each call runs on both sides (see sides.py) with the same random choices of a recipe: `{"call 3": "backward", "call 3
retains": True}`. Where a call may raise although plain PyTorch does not, the advice of its error is given with it; a
program ends there. Calls that change a model in other ways than training are in random_changes.py.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from random_models import DIM, VOCAB, branches
from recipes import Recipe
from sides import Loss, Side

ROWS = 12  # divides by 1 to 4 ranks
NUMBERS = range(1, 100)


class Draw:
    """Holds the random choices of one call."""

    def __init__(self, recipe: Recipe, call: str) -> None:
        self._recipe, self._call = recipe, call

    def __call__(self, name: str, plainest: Any, others: Sequence[Any], chance: float) -> Any:
        return self._recipe.pick(f"{self._call} {name}", plainest, others, chance)

    def flag(self, name: str, chance: float) -> bool:
        return self(name, False, (True,), chance)

    def of(self, name: str, items: Sequence[Any]) -> Any:
        return items[self(name, 0, NUMBERS, 0.9) % len(items)]


@dataclasses.dataclass
class Call:
    run: Callable[[Side, Draw], None]
    weight: int
    refusals: tuple[str, ...]


CALLS: dict[str, Call] = {}


def call(weight: int, *refusals: str) -> Callable[[Callable[[Side, Draw], None]], Callable[[Side, Draw], None]]:
    """Registers a call: its weight among the others, and parts of the messages with which it may be refused."""

    def add(run: Callable[[Side, Draw], None]) -> Callable[[Side, Draw], None]:
        CALLS[run.__name__] = Call(run, weight, refusals)
        return run

    return add


def program(recipe: Recipe, length: int) -> list[tuple[str, str]]:
    """Yields (name of the choice, the call)."""
    names = [name for name, each in CALLS.items() for _ in range(each.weight)]
    drawn = [(f"call {n}", recipe.pick(f"call {n}", None, names, 1.0)) for n in range(length)]
    return [(choice, name) for choice, name in drawn if name is not None]


WAITS = "set_requires_gradient_sync(True) before the last"
WRITTEN = "Change parameters before forward or after backward"  # plain PyTorch does not see `.data`, nor fused steps
SECOND_ORDER = "Call backward through it before that forward, or model.set_keep_unsharded_storage(True)"


# ---- forward


def run_forward(side: Side, draw: Draw) -> Loss:
    generator = torch.Generator().manual_seed(draw("batch", 0, NUMBERS, 0.9))
    x = side.rows(torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64))
    tokens = side.rows(torch.randint(VOCAB, (ROWS,), generator=generator))
    x.requires_grad_(draw.flag("x has a gradient", 0.3))
    for number, branch in enumerate(branches(side.model)):
        branch.skipped = frozenset(i for i in range(len(branch.parts)) if draw.flag(f"skips {number}.{i}", 0.1))
    output = side.model(x, tokens)
    side.show("output", output, is_rows=True)
    return Loss((output - 0.5).square().mean(), x)


@call(12)
def forward(side: Side, draw: Draw) -> None:
    loss = run_forward(side, draw)
    if loss.value.requires_grad:
        side.losses = [*side.losses[-2:], loss]


@call(4)
def evaluate(side: Side, draw: Draw) -> None:
    """Runs an evaluation, also between a forward and its backward."""
    mode = draw("mode", "no_grad", ("inference_mode", "enable_grad"), 0.6)
    side.model.eval()
    with getattr(torch, mode)():
        run_forward(side, draw)
    side.model.train()


# ---- backward


def run_backward(side: Side, loss: Tensor, x: Tensor | None = None, **options: Any) -> None:
    if x is not None:
        x.grad = None
    loss.backward(**options)
    if x is not None and x.grad is not None:
        side.show("x.grad", x.grad / (side.world_size if side.is_sharded else 1), is_rows=True)


def take_loss(side: Side, draw: Draw) -> Loss:
    loss = draw.of("loss", side.losses)
    if not draw.flag("retains", 0.15):
        side.losses.remove(loss)
    return loss


@call(14, WRITTEN, SECOND_ORDER)
def backward(side: Side, draw: Draw) -> None:
    if len(side.losses) > 1 and draw.flag("of two losses", 0.1):
        run_backward(side, side.losses.pop().value + 0.5 * side.losses.pop(0).value)
    elif side.losses:
        loss = take_loss(side, draw)
        run_backward(side, loss.value, loss.x, retain_graph=loss in side.losses)


@call(2, WRITTEN, SECOND_ORDER)
def backward_to_some(side: Side, draw: Draw) -> None:
    if side.losses:
        trainable = [p for p in side.params.values() if p.requires_grad]
        chosen = [draw.of(f"input {i}", trainable) for i in range(3)]
        loss = take_loss(side, draw)
        run_backward(side, loss.value, retain_graph=loss in side.losses, inputs=list(dict.fromkeys(chosen)))


@call(2, WRITTEN)
def gradient_by_x(side: Side, draw: Draw) -> None:
    loss = side.losses[-1] if side.losses else None
    if loss is not None and loss.x is not None and loss.x.requires_grad:
        (slope,) = torch.autograd.grad(loss.value, loss.x, retain_graph=True)
        side.show("slope", slope / (side.world_size if side.is_sharded else 1), is_rows=True)


@call(1)
def penalty(side: Side, draw: Draw) -> None:
    """Returns a loss of a gradient, whose backward comes later."""
    x = side.rows(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    tokens = side.rows(torch.arange(ROWS) % VOCAB)
    (slope,) = torch.autograd.grad(side.model(x.requires_grad_(), tokens).square().sum(), x, create_graph=True)
    side.show("slope", slope, is_rows=True)
    side.losses.append(Loss(slope.square().sum(1).mean()))


class Boom(Exception):
    pass


def boom(*_: Any) -> None:
    raise Boom


def boom_in_backward(*args: Any) -> None:
    args[-1].register_hook(boom)


def some_part(side: Side, draw: Draw) -> nn.Module:
    return draw.of("part", [part for branch in branches(side.model) for part in branch.parts])


@call(2)
def fail(side: Side, draw: Draw) -> None:
    in_backward = draw.flag("in backward", 0.5)
    handle = some_part(side, draw).register_forward_hook(boom_in_backward if in_backward else boom)
    try:
        loss = run_forward(side, draw)
        if in_backward:
            loss.value.backward()
    except Boom:
        side.show("failed", True)
    finally:
        handle.remove()
    if in_backward:
        side.give_up()


# ---- optimizer and gradients


@call(8, WAITS)
def step(side: Side, draw: Draw) -> None:
    if side.waits and not draw.flag("though gradients wait", 0.1):
        return
    side.optimizer.step()
    if not draw.flag("keeps gradients", 0.3):
        side.optimizer.zero_grad(set_to_none=not draw.flag("zeroes in place", 0.4))
    if not draw.flag("keeps losses", 0.15):
        side.losses.clear()


@call(3)
def zero_grad(side: Side, draw: Draw) -> None:
    owner = side.model if draw.flag("of the model", 0.4) else side.optimizer
    owner.zero_grad(set_to_none=not draw.flag("in place", 0.5))


@call(2, WAITS)
def clip(side: Side, draw: Draw) -> None:
    ours = draw.flag("by fsdp2", 0.5) and side.is_sharded
    norm_type = draw("norm", 2.0, (1.0, float("inf")), 0.5)
    clip_grad_norm = fsdp2.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    norm = clip_grad_norm(side.params.values(), 0.1, norm_type=norm_type)
    side.show("norm", norm.double())


EDITS_OF_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "none": lambda p: None,
    "times": lambda p: p.grad * 0.5,
    "mul_": lambda p: p.grad.mul_(0.5),
    "zero_": lambda p: p.grad.zero_(),
    "zeros": lambda p: torch.zeros_like(p),
    "clone": lambda p: p.grad.clone(),
    "decay": lambda p: p.detach() * 0.5,
}


@call(2, WAITS)
def edit_gradient(side: Side, draw: Draw) -> None:
    param = draw.of("parameter", [p for p in side.params.values() if p.requires_grad])
    how = draw("how", "none", list(EDITS_OF_GRADIENTS), 0.9)
    if param.grad is not None or how in ("none", "zeros", "decay"):
        param.grad = EDITS_OF_GRADIENTS[how](param)


@call(1)
def another_optimizer(side: Side, draw: Draw) -> None:
    old, side.optimizer = side.optimizer, side.make_optimizer(side.params.values())
    if draw.flag("with the state of the old one", 0.5):
        side.optimizer.load_state_dict(copy.deepcopy(old.state_dict()))


def close(side: Side, draw: Draw) -> None:
    """Ends the program: a last backward reduces all unsynchronized gradients, and the optimizer steps."""
    side.losses.clear()
    if side.is_sharded:
        side.model.set_requires_gradient_sync(True)
        side.model.set_requires_all_reduce(True)
    run_backward(side, run_forward(side, draw).value)
    side.optimizer.step()
    with torch.no_grad():
        run_forward(side, draw)
