"""Tests ranks that are out of step, or alone, on a backend without headers: a process group in Python replaces NCCL.

Without headers, a collective takes any data that the others send. At the debug level ranks detect on any backend that
they are about to do different things, before anything is sent. Without it, a rank that waits for an absent one ends
with the process group's timeout, and its error says what it was doing.
"""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_any_process_group import PythonGroup, WithBackend, WithTensors, python_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import fully_shard, set_checks
from helpers import NIGHTLY, assert_same, run_ranks

WIDTH = 6
LONG, SHORT = 30, 2  # seconds


class Stack(nn.Module):
    """Blocks of equal shapes, of which `order` names those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = torch.tanh(self.blocks[i](x))
        return x


def build(cls: type[PythonGroup], size: int, level: int, timeout: float) -> Any:
    group = python_group(cls, [*range(size)], timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    model: Any = Stack()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shards",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    set_checks("debug" if level else "default")
    return fully_shard(model, mesh=mesh)


def batch(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


def own_gradients(model: Any) -> list[Tensor]:
    """This rank's part of each."""
    return [param.grad.to_local().clone() for param in model.parameters()]


def train(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


def left_out(model: Any, x: Tensor) -> None:
    model.order = (0, 2, 3)
    train(model, x)


def another_of_equal_shape(model: Any, x: Tensor) -> None:
    model.order = (0, 2, 1, 3)
    train(model, x)


def once_more(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    train(model, x)


def not_reduced(model: Any, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    train(model, x)
    train(model, x)


STRAYS = (left_out, another_of_equal_shape, once_more, not_reduced)


@pytest.mark.parametrize(
    "cls", [WithBackend, *([PythonGroup, WithTensors] if NIGHTLY else [])], ids=lambda cls: cls.__name__
)
def test_the_debug_level_finds_it_and_the_next_step_is_exact(cls: type[PythonGroup]) -> None:
    """Whatever one of three ranks does: all raise, at once, each names what the others were about to do."""

    def body(rank: int, size: int) -> None:
        model = build(cls, size, level=1, timeout=LONG)
        train(model, batch(rank))
        expected = own_gradients(model)
        for stray in STRAYS:
            model.zero_grad()
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"ranks are out of step\. .*rank.*; rank.*: ") as caught:
                (stray if rank == 1 else train)(model, batch(rank))
            assert time.monotonic() - start < LONG / 2, "nobody has waited for the timeout"
            assert re.search(r"(gathering|reducing) blocks\.\d \((forward|backward), step \d\)", str(caught.value))
            model.order = (0, 1, 2, 3)
            model.set_requires_gradient_sync(True)
            model.zero_grad()
            train(model, batch(rank))
            for i, (got, want) in enumerate(zip(own_gradients(model), expected, strict=True)):
                assert_same(got, want, 0, 0, f"gradient {i} after {stray.__name__}")

    run_ranks(3, body, timeout=60)


def fail(*_: Any) -> None:
    raise ValueError("on purpose")


def in_forward(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(fail)


def before_a_comparison(model: Any) -> None:
    """Before the first block is gathered for the second time, when ranks compare what they have in common."""
    model.blocks[2].register_full_backward_hook(fail)


def amid_reductions(model: Any) -> None:
    model.blocks[0].register_full_backward_pre_hook(fail)


WHERE: dict[Callable[[Any], None], str] = {
    # The rank that fails has begun to gather what follows.
    in_forward: r"\(while gathering blocks\.[23], \d+ bytes; forward, step 1\)",
    before_a_comparison: r"\(while all-reducing what checks compare of root; backward, step 1\)",
    amid_reductions: r"\(while reducing gradients of blocks\.\d; backward, step 1\)",
}


@pytest.mark.parametrize("fails", WHERE, ids=lambda fails: fails.__name__)
def test_without_it_the_others_end_within_the_timeout_and_say_where_they_were(fails: Callable[[Any], None]) -> None:
    def body(rank: int, size: int) -> str:
        model = build(WithTensors, size, level=0, timeout=SHORT)
        train(model, batch(rank))
        model.zero_grad()
        if rank == 1:
            fails(model)
        dist.barrier()
        start = time.monotonic()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            train(model, batch(rank))
        assert time.monotonic() - start < SHORT + LONG / 2
        dist.barrier()  # the failed rank's sockets stay: the others wait for the timeout
        return str(caught.value)

    texts = run_ranks(3, body, timeout=60)
    assert texts[1] == "on purpose"
    for text in (texts[0], texts[2]):
        assert re.search(WHERE[fails], text), text
