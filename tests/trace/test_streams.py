"""A group whose gradients are computed on several streams: what reads them, and what frees parameters, runs behind all.

Streams are stand-ins that write down who waits for whom; backward is told on which one a part of it runs.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import bucket, fully_shard, reduce, streams
from helpers import fake_world
from stand_in import Stream


class Streams:
    """`current`: the one that computes now."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.home, self.side = (self._make(name) for name in ("home", "side"))
        self.current: Stream = self.home

    def _make(self, name: str) -> Stream:
        stream, switch = Stream(name, self.lines), self._switch

        class Entered(Stream):
            def __enter__(self) -> None:
                super().__enter__()
                self.before = switch(self)

            def __exit__(self, *error: object) -> None:
                switch(self.before)
                super().__exit__(*error)

        stream.__class__ = Entered
        return stream

    def _switch(self, stream: Stream) -> Stream:
        before, self.current = self.current, stream
        return before

    def on_side(self, tensor: Tensor) -> Tensor:
        """The same; what led to it is differentiated on the other stream."""
        return Switch.apply(tensor, self, self.side)

    def at_home(self, tensor: Tensor) -> Tensor:
        return Switch.apply(tensor, self, self.home)


class Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, streams: Streams, stream: Stream) -> Tensor:
        ctx.streams, ctx.stream = streams, stream
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.streams.current = ctx.stream
        ctx.streams.lines.append(f"on {ctx.stream.name}")
        return gradient, None, None


class Branches(nn.Module):
    """Two layers in a row, the first of which is differentiated on another stream than what is around it."""

    def __init__(self, of: Streams) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.of.on_side(self.first(self.of.at_home(x))))


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    of = Streams()
    monkeypatch.setattr(streams, "exist_on", lambda device: True)
    monkeypatch.setattr(streams, "beside", lambda device: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: of.current)
    start = reduce.start

    def note(given: Any, *args: Any) -> Any:
        of.lines.append(f"reduce {len(given)} on {of.current.name}")
        return start(given, *args)

    monkeypatch.setattr(reduce, "start", note)
    with fake_world(2):
        yield of


def backward(of: Streams, x: Tensor) -> list[str]:
    model = fully_shard(Branches(of))
    loss = model(x).sum()
    of.lines.clear()
    loss.backward()
    of.current = of.home  # as autograd goes on
    return of.lines


def test_a_bucket_of_two_streams(of: Streams) -> None:
    """It is complete on the other one, which goes on when it has been packed."""
    joined = ["home waits for side", "enter home", "reduce 2 on home", "leave home", "side waits for home"]
    assert backward(of, torch.ones(2, 4)) == ["on side", *joined]
    assert backward(of, torch.ones(2, 4, requires_grad=True) * 1) == ["on side", *joined, "on home"]


def test_buckets_on_a_stream_each(of: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "MIN_BUCKET_BYTES", 1)
    assert backward(of, torch.ones(2, 4)) == [
        "reduce 1 on home",
        "on side",
        *("home waits for side", "enter home", "reduce 1 on home", "leave home", "side waits for home"),
    ]


def test_one_stream_waits_for_nobody(of: Streams) -> None:
    of.side = of.home
    assert [line for line in backward(of, torch.ones(2, 4)) if not line.startswith("on ")] == ["reduce 2 on home"]
