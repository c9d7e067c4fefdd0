"""Tests the sender of weight deltas in examples/adapters: names, exact bits over steps, versions that were missed."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.adapters.weight_deltas import (
    RENAMES,
    STEPS,
    DeltaReceiver,
    DeltaSender,
    MissedVersion,
    Place,
    Rename,
    as_engine,
    digest,
    find_places,
    make_model,
)
from fsdp2 import fully_shard
from helpers import run_checks
from programs import run_forked


def sharded() -> tuple[nn.Sequential, Callable[[], None]]:
    """Returns a model, whose embedding is frozen, and what trains it for a step that changes few bits."""
    model = make_model(is_fused=False)
    model[0].requires_grad_(False)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        model(torch.arange(dist.get_rank(), 16 + dist.get_rank())[None]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def assert_bits(weights: dict[str, Tensor], model: nn.Module) -> None:
    """On the rank that receives; every rank must call it."""
    expected = as_engine(model)
    if dist.get_rank() == 0:
        assert weights.keys() == expected.keys()
        assert digest(weights) == digest(expected)
        for name, each in expected.items():
            assert torch.equal(weights[name].view(torch.int16), each.view(torch.int16)), name


def follows(bucket_bytes: int, into_engine: bool) -> None:
    """Whole weights first, then few bytes. An engine whose weights are fused has the same bits after each step."""
    model, step = sharded()
    engine = {name: each.detach() for name, each in make_model(is_fused=True).bfloat16().named_parameters()}
    torch.manual_seed(1)
    for each in engine.values():
        each.normal_()
    loaded: list[list[str]] = []
    receiver = DeltaReceiver(engine if into_engine else None, lambda pairs: loaded.append([name for name, _ in pairs]))
    messages: list[bytes] = []
    sender = DeltaSender(model, messages.append, renames=RENAMES, bucket_bytes=bucket_bytes)
    sizes = []
    for version in range(4):
        messages.clear()
        assert sender.send() == version
        for number, data in enumerate(messages):
            assert receiver.receive(data) is (number == len(messages) - 1)
        assert_bits(engine if into_engine else receiver.weights, model)
        sizes.append(sender.nbytes)
        if version < 2:  # the third version has no changes at all
            step()
    if dist.get_rank() == 0:
        assert receiver.version == 3
        assert len(messages) == 1
        assert sorted(loaded[0]) == sorted(engine)
        assert "0.weight" not in loaded[1], "it is frozen"
        assert "1.qkv_proj.weight" in loaded[1]
        assert len(loaded) == 3, "nothing is loaded where nothing has changed"
        assert sizes[1] < sizes[0]
        assert sizes[3] < sizes[1] / 2
    else:
        assert not messages
        assert sizes == [0] * 4


def misses(lose: Callable[[list[list[bytes]]], list[bytes]], got: str) -> None:
    """A receiver that has missed something says what, takes nothing more, and goes on from a version with all."""
    model, step = sharded()
    versions: list[list[bytes]] = []
    sender = DeltaSender(model, lambda data: versions[-1].append(data), renames=RENAMES, bucket_bytes=2**11)
    receiver = DeltaReceiver()
    for _ in range(3):
        versions.append([])
        sender.send()
        step()
    if dist.get_rank() == 0:
        assert min(map(len, versions)) > 2
        for data in versions[0]:
            receiver.receive(data)
        *before, last = lose(versions[1:])
        for data in before:
            receiver.receive(data)
        with pytest.raises(MissedVersion, match=got):
            receiver.receive(last)
        assert receiver.version is None
        for data in versions[2]:
            with pytest.raises(MissedVersion, match="has no complete version"):
                receiver.receive(data)
        sender.resync()
    versions.append([])
    sender.send()
    if dist.get_rank() == 0:
        assert [receiver.receive(data) for data in versions[3]][-1]
        assert receiver.version == 3
    assert_bits(receiver.weights, model)


LOSSES: dict[str, tuple[Callable[[list[list[bytes]]], list[bytes]], str]] = {
    "a version": (lambda later: later[1][:1], r"part 0 of version 2, which changes version 1; .* has version 0\."),
    "a part": (lambda later: [later[0][0], later[0][2]], r"part 2 of version 1.* expects part 1 of version 1\."),
    "the end": (lambda later: [*later[0][:-1], later[1][0]], r"part 0 of version 2.* expects part \d+ of version 1\."),
    "an order": (lambda later: [later[0][1]], r"part 1 of version 1.* has version 0\."),
}


def fails_to_send() -> None:
    """The next version has all weights, and another receiver can begin with it."""
    model, step = sharded()
    messages: list[bytes] = []

    def send(data: bytes) -> None:
        if sender.version == 1:
            raise ConnectionError("the engine is gone")
        messages.append(data)

    sender = DeltaSender(model, send, renames=RENAMES)
    sender.send()
    step()
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError):
            sender.send()
    else:
        sender.send()
    step()
    messages.clear()
    assert sender.send() == 2
    receiver = DeltaReceiver()
    if dist.get_rank() == 0:
        assert [receiver.receive(data) for data in messages] == [True]
    assert_bits(receiver.weights, model)


def refuses(change: Callable[[dict[str, Tensor]], Any], error: type[Exception], match: str) -> None:
    """What the engine has not, or has otherwise."""
    model, _ = sharded()
    messages: list[bytes] = []
    DeltaSender(model, messages.append, renames=RENAMES).send()
    engine = dict(make_model(is_fused=True).bfloat16().named_parameters())
    change(engine)
    if dist.get_rank() == 0:
        receiver = DeltaReceiver(engine)
        with pytest.raises(error, match=match):
            receiver.receive(messages[0])
        assert receiver.version is None


def test_deltas() -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for bucket_bytes, into_engine in ((2**20, True), (2**11, True), (2**11, False)):
        checks.append((f"follows {bucket_bytes} {into_engine}", partial(follows, bucket_bytes, into_engine)))
    for name, (lose, got) in LOSSES.items():
        checks.append((f"misses {name}", partial(misses, lose, got)))
    checks.append(("fails to send", fails_to_send))
    missing = partial(refuses, lambda engine: engine.pop("1.qkv_proj.weight"), KeyError, r"1\.qkv_proj\.weight: .*no t")
    checks.append(("no such tensor", missing))
    shape = partial(refuses, lambda engine: engine.update({"3.bias": torch.ones(3)}), ValueError, r"3\.bias: .*\[64\]")
    checks.append(("another shape", shape))
    run_checks(2, checks)


SHAPES = {"a.q_proj.weight": (4, 3), "a.k_proj.weight": (2, 3), "b.weight": (5,)}
Q, K = Rename(r"(.*)\.q_proj\.weight", r"\1.qk", 0), Rename(r"(.*)\.k_proj\.weight", r"\1.qk", 1)


def test_places() -> None:
    assert find_places(SHAPES, ()) == {name: Place(name, shape, 0) for name, shape in SHAPES.items()}
    expected = {"a.q_proj.weight": Place("a.qk", (6, 3), 0), "a.k_proj.weight": Place("a.qk", (6, 3), 12)}
    assert find_places(SHAPES, (K, Q)) == expected | {"b.weight": Place("b.weight", (5,), 0)}


@pytest.mark.parametrize(
    ("renames", "shapes", "text"),
    [
        ((Q, K, Rename("c", "d")), SHAPES, "['c'], which match none"),
        ((K,), SHAPES, "a.qk: expected parts 0 to 0, got [1]"),
        ((Q, Rename(K.pattern, K.name, 0)), SHAPES, "a.k_proj.weight and a.q_proj.weight both become part 0 of a.qk"),
        ((Q, K), SHAPES | {"a.k_proj.weight": (2, 4)}, "a.qk: expected parts that differ in rows only"),
    ],
)
def test_bad_renames(renames: tuple[Rename, ...], shapes: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        find_places(shapes, renames)


def test_program() -> None:
    """As its users run it: the engine is another process."""
    output = run_forked("adapters/weight_deltas.py", 2)
    lines = re.findall(r"^version (\d+): ([\d,]+) bytes sent, equal to the bit: True, next token \d+$", output, re.M)
    assert [int(version) for version, _ in lines] == [*range(STEPS)]
    sizes = [int(nbytes.replace(",", "")) for _, nbytes in lines]
    assert max(sizes[1:]) < sizes[0]
