"""Each check catches its fault at the levels "default" and "debug"; at "off" none of them does anything."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, set_checks
from helpers import run_ranks

WIDTH = 4
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# What names messages is chosen when a model is sharded, and what this file counts are checks besides.
_OTHERS = {"headers", "named_comm", "conversation", "rollcall", "level", "watch"}


class Block(nn.Module):
    """`change` is called with the weight before the module computes with it."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("scale", torch.ones(WIDTH, device=device))
        self.change: Callable[[nn.Parameter], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self.linear.weight)
        return self.linear(x) * self.scale


def build(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def train(model: nn.Module, steps: int = 1, x: Tensor | None = None, num_updates: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        model(torch.ones(2, WIDTH) if x is None else x).square().mean().backward()
        for _ in range(num_updates):
            optimizer.step()
        optimizer.zero_grad()


# ---- faults, by the check that catches them


def steps_where_autograd_accumulates() -> None:
    with warnings.catch_warnings():  # torch warns about itself
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    model = build()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    train(model)


def initialises_nothing() -> None:
    model = nn.Sequential(Block("meta"), Block("meta"))
    fully_shard(model).to_empty(device="cpu")
    train(model)


def seeds_differ() -> None:
    train(build(seed=dist.get_rank()))


def steps_once_more() -> None:
    train(build(), steps=5, num_updates=1 + dist.get_rank())


def registers_in_another_order() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("ab" if dist.get_rank() == 0 else "ba")})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    train(fully_shard(model))


def draws_a_buffer() -> None:
    model = build()
    model[0].scale.fill_(dist.get_rank())
    train(model)


def trains_on_the_same_rows() -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(build(), steps=5, x=x)


def writes_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block().requires_grad_(False), Block())
    fully_shard(model)
    for _ in range(4):
        with torch.no_grad():
            model[0].linear.weight.mul_(0.9) if dist.get_rank() == 1 else None
        model(torch.ones(2, WIDTH)).square().mean().backward()


def trains_one_by_itself() -> None:
    model = build()
    train(model)
    model[1].extra = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    train(model, steps=3)


def passes_positions() -> None:
    train(build(mp_policy=_BF16), steps=3, x=torch.arange(256.0, 256 + 4 * WIDTH).view(4, WIDTH))


def forgets_a_buffer() -> None:
    model = build()
    model[0].scale = torch.ones(WIDTH, device="meta")
    train(model)


def changes(change: Callable[[nn.Parameter], object], steps: int = 1) -> Callable[[], None]:
    def run() -> None:
        model = build()
        model[0].change = change
        train(model, steps)

    return run


@torch.no_grad()
def scale(weight: nn.Parameter) -> None:
    weight.mul_(0.5)


def scale_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def assign_data(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def calls_a_module_inside() -> None:
    model = build()
    model[0].linear(torch.ones(2, WIDTH))


def divides_apart() -> None:
    model = build()
    model[0].set_gradient_divide_factor(7.0)
    train(model)


def computes_with_a_former_parameter() -> None:
    model = nn.Sequential(Block())
    weight = model[0].linear.weight
    fully_shard(model)
    weight.sum().backward()


def clips_to_another_norm() -> None:
    model = build()
    train(model)
    clip_grad_norm_(model.parameters(), 1.0 + dist.get_rank())
    train(model)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "optimizers in backward": (steps_where_autograd_accumulates, "_apply_optimizer_in_backward would never step"),
    "empty memory": (initialises_nothing, "to_empty gave it memory, and nobody has initialised it"),
    "initial weights": (seeds_differ, "ranks had different values of it when fully_shard was called"),
    "structure": (registers_in_another_order, "ranks register their modules in another order"),
    "buffers": (draws_a_buffer, "0.scale holds other values on rank 1 than on rank 0"),
    "equal inputs": (trains_on_the_same_rows, "all 2 data-parallel ranks got the same inputs in two training steps"),
    "frozen parameters": (writes_alone, "0.linear.weight: only rank 1 has written to this frozen parameter"),
    "step history": (steps_once_more, "this optimizer has stepped . times? on rank 0 and . times? on rank 1"),
    "clipping": (clips_to_another_norm, "max_norm=1, norm_type=2 on rank 0 and 0.linear.bias"),
    "unmanaged parameters": (trains_one_by_itself, "1.extra: no fully_shard call manages it"),
    "cast whole numbers": (passes_positions, "floating-point whole numbers"),
    "buffers on meta": (forgets_a_buffer, "expected buffers on cpu, got 0.scale on meta"),
    "written unsharded parameters": (changes(scale), "0.linear.weight was modified in place during forward"),
    "moved data": (changes(assign_data), "0.linear.weight was modified in place during forward"),
    "unseen writes": (changes(scale_data, steps=2), "0.linear.weight was modified in place during forward"),
    "entry points": (calls_a_module_inside, r"model\[0\].linear .* was called while its parameters are sharded"),
    "divisors": (divides_apart, "The gradients of one model are divided in several ways"),
    "original parameters": (computes_with_a_former_parameter, "something has computed with what Sequential's"),
}


def outcome(fault: Callable[[], None]) -> str:
    try:
        fault()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_each_fault_is_caught_and_none_when_checks_are_off() -> None:
    def body(rank: int, size: int) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for level in ("default", "debug", "off"):
            set_checks(level)
            for name, (fault, _) in FAULTS.items():
                found.setdefault(name, []).append(outcome(fault))
        return found

    for found in run_ranks(2, body):
        for name, (_, text) in FAULTS.items():
            *on, off = found[name]
            assert all(re.search(text, each) for each in on), f"{name}: {on}"
            assert not re.search(text, off), f"{name}: {off}"


# ---- what runs


@contextmanager
def counted(calls: Counter[str]) -> Any:
    """Counts the calls of functions of checks/, by file and name."""

    def count(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parts[-3:-1] == ("fsdp2", "checks") and path.stem not in _OTHERS:
            calls[f"{path.stem}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def one_step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()


def test_checks_that_are_off_run_nothing_and_a_steady_step_runs_little() -> None:
    """Also if they are switched while a model trains, and on again."""

    def body(rank: int, size: int) -> list[list[str]]:
        found = []
        set_checks("off")
        model = build()
        for level in ("off", "default", "off", "debug"):
            set_checks(level)
            calls: Counter[str] = Counter()
            for _ in range(4):  # in the third no check is due
                calls.clear()
                with counted(calls):
                    one_step(model)
                if level == "default" and _ == 2:
                    break
            found.append([*calls])
        return found

    for off, default, again_off, debug in run_ranks(2, body):
        assert off == again_off == []
        assert {name.partition(".")[0] for name in default} == {"due", "lost_writes"}
        assert len(default) <= 4, default
        assert len(debug) > 20


def test_checks_that_are_switched_later_begin_and_end_to_catch() -> None:
    def body(rank: int, size: int) -> list[str]:
        set_checks("off")
        model = build()
        model[0].change = scale_data
        inside = torch.ones(2, WIDTH)
        ends = [outcome(lambda: one_step(model)), outcome(lambda: model[0].linear(inside))]
        set_checks("default")
        ends += [outcome(lambda: one_step(model)), outcome(lambda: model[0].linear(inside))]
        set_checks("off")
        return [*ends, outcome(lambda: one_step(model)), outcome(lambda: model[0].linear(inside))]

    for nothing, unrefused, written, refused, again, unrefused_again in run_ranks(2, body):
        assert nothing == again == "nothing"
        assert "0.linear.weight was modified in place" in written
        assert "was called while its parameters are sharded" in refused
        assert "was called while its parameters are sharded" not in unrefused + unrefused_again


def test_at_the_debug_level_all_are_due_at_once() -> None:
    """At "default" they are due at the 1st, 2nd, 4th, 8th, ... pass, and ranks compare as rarely."""

    def body(rank: int, size: int) -> list[str]:
        set_checks("default")
        model, found = build(), []
        for i in range(1, 7):
            if i == 6:
                set_checks("debug")
            model[0].change = scale_data if i > 4 else None
            found.append(outcome(lambda: one_step(model)))
        set_checks("default")
        model = build()
        train(model, steps=9)
        set_checks("debug")
        return [*found[-2:], outcome(lambda: train(model, steps=2, num_updates=1 + rank))]

    for unseen, seen, steps in run_ranks(2, body):
        assert unseen == "nothing", "the 5th forward"
        assert "0.linear.weight was modified in place" in seen
        assert "this optimizer has stepped" in steps


def test_the_level_changes_between_steps_only() -> None:
    def body(rank: int, size: int) -> str:
        model = build()
        model[0].change = lambda _: set_checks("debug")
        return outcome(lambda: one_step(model))

    assert all("call it between steps, not during a forward" in text for text in run_ranks(2, body))
