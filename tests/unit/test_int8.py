"""Tests the codec of one byte an element: how large its errors are, that they add up to nothing, and what it sends."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.compression import Int8
from fsdp2.engine.codec import Cast, Encoder

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SHAPES = [(1, 1), (3, 7), (2, 128), (4, 132), (2, 1000), (64, 256)]


def values(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Blocks of very different sizes, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator) * 10 ** torch.randint(-3, 4, shape, generator=generator)
    numbers[:, ::3] = 0
    return numbers.to(dtype)


def steps_of(numbers: Tensor, block: int) -> Tensor:
    """The size of a step at each element, by a loop."""
    steps = torch.empty_like(numbers, dtype=F64)
    for row, out in zip(numbers.double(), steps, strict=True):
        for part, of_part in zip(row.split(block), out.split(block), strict=True):
            of_part.fill_(part.abs().max() / 127)
    return steps


def arrives(codec: Int8, numbers: Tensor, seed: int = 1) -> Tensor:
    wire = codec.encode(numbers, seed)
    assert wire.dtype == torch.uint8
    assert wire.is_contiguous()
    assert wire.shape == (len(numbers), codec.sent_nbytes(numbers.size(1), numbers.dtype))
    decoded = torch.full(numbers.shape, torch.nan, dtype=F64)
    codec.decode(wire, decoded)
    return decoded


@pytest.mark.parametrize(
    ("dtype", "block", "feedback"),
    [(F32, 128, False), (F32, 128, True), (BF16, 16, True), (F16, 5000, False), (F64, 16, False), (F32, 1, True)],
    ids=str,
)
def test_an_error_is_less_than_a_step_of_its_block(dtype: torch.dtype, block: int, feedback: bool) -> None:
    """Half a step, if it rounds to the nearest one. Whole numbers of steps, and the largest of a block, are exact."""
    codec = Int8(block, feedback)
    for shape in SHAPES:
        numbers = values(shape, dtype)
        before, decoded, steps = numbers.clone(), arrives(codec, numbers), steps_of(numbers, block)
        assert torch.equal(numbers, before), "they may be autograd's"
        error = (decoded - numbers.double()).abs()
        assert (error <= steps * (0.5 if feedback else 1) * (1 + 1e-4)).all()
        assert (decoded[numbers == 0] == 0).all()
        largest = numbers.double().abs() >= steps * 127
        assert (error[largest] <= 1e-6 * steps[largest] * 127).all()


@pytest.mark.parametrize(("numel", "block"), [(1, 128), (128, 128), (129, 128), (4096, 128), (4096, 64), (12, 1)])
def test_bytes(numel: int, block: int) -> None:
    """1 + 4 / block each, rounded up to blocks and to 16."""
    expected = numel + 4 * -(-numel // block)
    assert expected <= Int8(block).sent_nbytes(numel, F32) < expected + 16
    assert Int8(block).sent_nbytes(numel, F32) % 16 == 0


def test_rounding_at_random_adds_up_to_nothing() -> None:
    """Over many calls: five deviations of the mean. The same seed rounds alike, and users' random numbers stay."""
    numbers, codec, count = values((2, 300), F32), Int8(), 2000
    state = torch.get_rng_state()
    total = sum(arrives(codec, numbers, seed) for seed in range(count))
    assert torch.equal(torch.get_rng_state(), state)
    deviation = steps_of(numbers, 128) / 2 / count**0.5
    assert ((total / count - numbers.double()).abs() <= 5 * deviation + 1e-6 * numbers.double().abs()).all()
    assert torch.equal(codec.encode(numbers, 5), codec.encode(numbers, 5))
    assert not torch.equal(codec.encode(numbers, 5), codec.encode(numbers, 6))


def test_a_long_segment_is_encoded_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = values((7, 130), F32)
    whole = Int8(feedback=True).encode(numbers, 0)
    monkeypatch.setattr("fsdp2.codecs.int8._ELEMENTS_AT_A_TIME", 260)
    assert torch.equal(Int8(feedback=True).encode(numbers, 0), whole)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("feedback", [False, True])
def test_what_is_not_finite_arrives_so(bad: float, feedback: bool) -> None:
    """In its own block: other blocks are as before."""
    numbers = values((2, 256), F32)
    numbers[1, 3] = bad
    decoded = arrives(Int8(feedback=feedback), numbers)
    assert not decoded[1, :128].isfinite().any()
    assert decoded[1, 128:].isfinite().all()
    assert decoded[0].isfinite().all()


def test_rows_are_added_in_order() -> None:
    """On any number of ranks, into fp32 and fp64, from a tensor of rows and from rows that lie apart."""
    codec = Int8()
    for ranks in (1, 2, 5):
        numbers = values((ranks, 200), F32, seed=ranks)
        wire = codec.encode(numbers, 3)
        for dtype in (F32, F64):
            expected = torch.zeros(200, dtype=dtype)
            for row in wire:
                one = torch.empty(1, 200, dtype=dtype)
                codec.decode(row[None], one)
                expected += one[0]
            for rows in (wire, [row.clone() for row in wire]):
                total = torch.full((200,), torch.nan, dtype=dtype)
                codec.sum(rows, total)
                assert torch.equal(total, expected)


def test_on_a_device_without_memory() -> None:
    """Where plans and shapes are computed."""
    wire = Int8().encode(torch.empty(4, 132, device="meta"), 1)
    assert wire.shape == (4, Int8().sent_nbytes(132, F32))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"block": 0}, ValueError, "Int8.block: expected a positive number of elements, got 0"),
        ({"block": 1.5}, TypeError, "Int8.block: expected a number of elements, got 1.5"),
        ({"block": True}, TypeError, "Int8.block: .*True"),
        ({"feedback": 1}, TypeError, "Int8.feedback: expected a bool, got 1"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Int8(**options)


def test_it_is_a_value() -> None:
    assert Int8() == Int8(128, False) != Int8(64)
    assert hash(Int8()) == hash(Int8(128))
    assert repr(Int8(64, True)) == "Int8(block=64, feedback=True)"


@dataclass(frozen=True)
class Wrong(Cast):
    """Is a codec that returns what can't travel, or writes to what it is given."""

    how: str = ""

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        if self.how == "writes":
            numbers.mul_(2)
        return {"flat": numbers.clone().flatten(), "strided": numbers.t().contiguous().t()}.get(
            self.how, numbers.clone()
        )


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("flat", ValueError, r"Wrong.*encode: expected a contiguous tensor \[2, n\]"),
        ("strided", ValueError, r"Wrong.*encode: expected a contiguous tensor \[2, n\]"),
        ("writes", RuntimeError, "Wrong.*encode has written to the numbers"),
    ],
)
def test_what_can_not_travel_is_refused_by_name(how: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Encoder(Wrong(torch.float32, how)).encode(torch.ones(2, 3), [])
