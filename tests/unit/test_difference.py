"""Tests that distances are those computed by hand, and that each hint is given for its own fault and for no other."""

import math

import pytest
import torch

from fsdp2.tools.difference import HINTS, PHASES, Comparison, Difference, explain, explain_scale, first_of_each, measure

RTOL = 1e-3
EXPECTED = torch.tensor([[1.0, -4.0], [0.5, 2.0]])


def test_distances() -> None:
    got = EXPECTED.clone()
    got[1, 0] = 0.75
    assert measure(got, EXPECTED) == (0.25 / 4, 2, 0.75, 0.5)
    assert measure(got, EXPECTED, scale=8.0).relative == 0.25 / 8
    assert measure(EXPECTED, EXPECTED).relative == 0
    assert measure(EXPECTED.bfloat16(), EXPECTED).relative == 0
    assert measure(torch.ones(2), torch.zeros(2)).relative == math.inf
    assert measure(torch.ones(2), torch.ones(3)).relative == math.inf
    assert measure(torch.ones(0), torch.ones(0)).relative == 0
    assert measure(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == (1.0, 1, 2.0, 1.0)
    assert measure(torch.tensor([7]), torch.tensor([14])).relative == 0.5


def test_values_that_are_not_finite() -> None:
    """It equals itself, and is infinitely far from all else."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, 2.0])
    assert measure(odd, odd).relative == 0
    for i, other in enumerate((math.inf, math.nan, math.inf, math.nan)):
        changed = odd.clone()
        changed[i] = other
        assert measure(changed, odd).relative == math.inf
        assert measure(changed, odd).position == i


@pytest.mark.parametrize(
    ("factor", "hints"), [(4, ["sum"]), (0.25, ["mean"]), (3, ["scale"]), (-1, ["scale"]), (1, [])]
)
def test_scales(factor: float, hints: list[str]) -> None:
    noise = 1 + 1e-5 * torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    assert explain_scale(EXPECTED * factor * noise, EXPECTED, 4, RTOL) == hints


def test_differences_without_a_scale() -> None:
    assert explain_scale(EXPECTED + 1, EXPECTED, 4, RTOL) == []
    assert explain_scale(EXPECTED, torch.zeros(2, 2), 4, RTOL) == []
    assert explain_scale(EXPECTED * math.nan, EXPECTED, 4, RTOL) == []
    assert explain_scale(torch.ones(0), torch.ones(0), 4, RTOL) == []
    # Of one number, only a factor that means something.
    assert explain_scale(torch.tensor(3.0), torch.tensor(1.0), 4, RTOL) == []
    assert explain_scale(torch.tensor(4.0), torch.tensor(1.0), 4, RTOL) == ["sum"]


def test_candidates() -> None:
    other = EXPECTED.flip(0)
    candidates = {"a": other, "b": other * (1 + 1e-5), "c": EXPECTED, "d": other * 2, "e": None, "f": other[:1]}
    assert explain(other, EXPECTED, candidates, RTOL) == ["a", "b"]
    assert explain(EXPECTED, EXPECTED, candidates, RTOL) == []


def difference(phase: str, relative: float = 1.0, rank: int = 0, hints: tuple[str, ...] = ()) -> Difference:
    return Difference(phase, "blocks.1", "blocks.1.weight", relative, relative / 2**-23, 2.0, 1.0, hints, rank)


def test_the_first_of_all_ranks() -> None:
    """By place in the order, then whether it is explained, then the largest error; phases in their own order."""
    rank0 = [(3, difference("gradients", rank=0)), (2, difference("weights", rank=0))]
    rank1 = [(1, difference("gradients", rank=1)), (2, difference("weights", 5.0, rank=1))]
    found = first_of_each([rank0, [], rank1])
    assert [(each.phase, each.rank, each.relative_error) for each in found] == [
        ("weights", 1, 5.0),
        ("gradients", 1, 1.0),
    ]
    explained = (1, difference("gradients", 0.5, hints=("scale",)))
    assert first_of_each([rank0, [explained], rank1])[1] == explained[1]
    assert first_of_each([[], []]) == ()


def test_text() -> None:
    counts = {"weights": 8, "gradients": 8}
    assert str(Comparison((), torch.float32, 1e-4, counts)) == (
        "compared 8 weights, 8 gradients (rtol 0.0001, torch.float32): no difference"
    )
    comparison = Comparison((difference("gradients", hints=("sum",)),), torch.float32, 1e-4, counts)
    assert not comparison
    assert str(comparison).splitlines() == [
        "compared 8 weights, 8 gradients (rtol 0.0001, torch.float32): the first difference of each phase:",
        "  gradients: blocks.1.weight (group blocks.1, rank 0): expected 1, got 2, 8.39e+06 ulps, relative error 1",
        f"    sum? {HINTS['sum']}",
    ]
    assert PHASES[0] == "weights"
