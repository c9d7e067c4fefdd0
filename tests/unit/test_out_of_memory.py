"""Tests the note that errors of memory get: group, pass, and what to do. Types stay."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard
from helpers import fake_world, raises_in_backward

DEPTH, WIDTH = 3, 1024
TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(4):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.tanh(x if self.fails is None else self.fails(x))


class Net(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def sharded(**options: Any) -> Any:
    model = Net(**options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def raising(error: BaseException) -> Any:
    def fail(x: Tensor) -> Tensor:
        raise error

    return fail


def step(model: Any) -> None:
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


def notes_of(model: Any, kind: type[BaseException] = torch.OutOfMemoryError) -> list[str]:
    """Returns the notes of the error that a step raises, whose class and text are its own; the next step is exact."""
    with pytest.raises(kind) as raised:
        step(model)
    assert type(raised.value) is kind
    notes = [*getattr(raised.value, "__notes__", [])]
    for block in model.blocks:
        block.fails = None
    step(model)
    assert all(param.grad is not None for param in model.parameters())
    return notes


def test_a_forward() -> None:
    model = sharded()
    step(model)
    model.blocks[1].fails = raising(torch.OutOfMemoryError(TEXT))
    (note,) = notes_of(model)
    assert note.startswith("fsdp2: memory ran out in the forward of ")
    assert "blocks.1" in note
    assert "(4.0 MiB of unsharded parameters) on this rank. Its shards of the model take 3.0 MiB." in note
    assert "fsdp2.plan(model" in note


def test_a_backward() -> None:
    model = sharded()
    step(model)
    model.blocks[1].fails = lambda x: raises_in_backward(x, torch.OutOfMemoryError(TEXT))
    (note,) = notes_of(model)
    assert note.startswith("fsdp2: memory ran out in the backward of ")
    assert "blocks.1" in note


def test_a_forward_that_runs_again() -> None:
    model = sharded(again=True)
    step(model)
    calls = []

    def fail(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError(TEXT)
        return x

    model.blocks[2].fails = fail
    (note,) = notes_of(model)
    assert "in the forward of" in note
    assert "blocks.2" in note
    assert "which runs again in backward" in note


def test_the_root_itself() -> None:
    model = sharded()
    model.register_forward_hook(lambda *_: raising(torch.OutOfMemoryError(TEXT))(None), prepend=True)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        model(torch.ones(2, WIDTH))
    (note,) = raised.value.__notes__
    assert "in the forward of root" in note or "Net" in note


def test_memory_of_the_cpu() -> None:
    model = sharded()
    step(model)
    model.blocks[0].fails = lambda x: torch.empty(1 << 58) + x
    (note,) = notes_of(model, RuntimeError)
    assert "blocks.0" in note


def test_other_errors_have_no_note() -> None:
    model = sharded()
    for error in (RuntimeError("cublas"), ValueError("out of memory")):
        model.blocks[1].fails = raising(error)
        assert notes_of(model, type(error)) == []


def test_python_without_notes() -> None:
    """The text is extended then."""

    class Old(torch.OutOfMemoryError):
        @property
        def add_note(self) -> Any:
            raise AttributeError

    model = sharded()
    model.blocks[1].fails = raising(Old(TEXT, 3))
    with pytest.raises(Old) as raised:
        model(torch.ones(2, WIDTH))
    text = str(raised.value.args[0])
    assert text.startswith(f"{TEXT}\nfsdp2: memory ran out in the forward of") or TEXT in text
    assert text.count("memory ran out in") == 1
    assert raised.value.args[1:] == (3,)
