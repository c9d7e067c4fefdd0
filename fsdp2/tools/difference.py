"""Measures how much two tensors differ, and suggests causes. It does not depend on ranks and groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PHASES = ("weights", "gathered weights", "outputs", "loss", "gradients")

HINTS = {
    "sum": "It is the sum over all ranks where their mean is expected: see set_gradient_divide_factor, or a loss or "
    "hook that multiplies by the number of ranks.",
    "mean": "It is divided by the number of ranks once too often: the loss sums over rows (gradients are the mean over "
    "ranks), or is divided already.",
    "scale": "It is a constant times what is expected: a divisor, a loss scale, a number of accumulation steps.",
    "unsynchronized": "It is the gradient of this rank's rows alone, or unsynchronized: "
    "set_requires_gradient_sync(False) was left on, or no fully_shard call manages the parameter.",
    "cast input": "The reference does the same when inputs are rounded to param_dtype: "
    "MixedPrecisionPolicy(cast_forward_inputs=False), or cast where it is harmless.",
    "across rows": "The reference computes the same from this rank's rows alone: a module computes across the rows of "
    "a batch, as BatchNorm does in training mode. Use SyncBatchNorm or larger batches; compare all else in eval mode.",
    "tied": "It is tied to another parameter in one of the two models only.",
    "stale": "The module computed with other values than its shards hold: these were changed in a way that no version "
    "counter shows (.data, a collective, a foreach operation) while it stayed unsharded. Call reshard() after such "
    "changes.",
    "missing": "One of the two models has no gradient: only one takes that path, or the parameter is frozen in one.",
    "rounding": "After a cast to the narrower of the two dtypes they are equal.",
    "random": "The forward uses random numbers, which each rank generates for its own rows: compare in eval mode.",
    "order": "The two models ran other modules, or in another order.",
}


class Distance(NamedTuple):
    """Holds how much two tensors differ.

    `relative`: the largest error over the largest expected magnitude. `position`: the index of that error in the
    flattened tensor. `got`, `expected`: the values there.
    """

    relative: float
    position: int
    got: float
    expected: float


def measure(got: Tensor, expected: Tensor, scale: float | None = None) -> Distance:
    """Returns how much `got` differs from `expected`, of equal shape. A NaN, or an infinity, equals itself.

    `scale`: the largest expected magnitude, if `expected` is only a shard of the expected tensor.
    """
    if got.shape != expected.shape:
        return Distance(math.inf, 0, math.nan, math.nan)
    if not got.numel():
        return Distance(0.0, 0, 0.0, 0.0)
    one, two = (_numbers(tensor) for tensor in (got, expected))
    same = (one == two) | (one.isnan() & two.isnan())
    error = (one - two).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    position = int(error.argmax())
    largest, scale = float(error[position]), magnitude(expected) if scale is None else scale
    relative = 0.0 if largest == 0 else largest / scale if scale else math.inf
    return Distance(relative, position, float(one[position]), float(two[position]))


def magnitude(tensor: Tensor) -> float:
    """Returns the largest finite absolute value, or 0."""
    return float(_numbers(tensor).abs().nan_to_num(nan=0.0, posinf=0.0).amax()) if tensor.numel() else 0.0


def _numbers(tensor: Tensor) -> Tensor:
    """Returns a tensor's values in a flat fp64 tensor. A complex number becomes its real and imaginary part."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).double()


def explain_scale(got: Tensor, expected: Tensor, num_ranks: int, rtol: float) -> list[str]:
    """Returns the hint for the factor by which `got` is a multiple of `expected`, or no hint if it is no multiple."""
    one, two = _numbers(got), _numbers(expected)
    square = float(two.dot(two))
    ratio = float(one.dot(two)) / square if square else 1.0
    if not math.isfinite(ratio) or abs(ratio - 1) <= rtol or measure(one, two * ratio).relative > rtol:
        return []
    if one.numel() == 1 and not any(math.isclose(ratio, k, rel_tol=rtol) for k in (num_ranks, 1 / num_ranks)):
        return []  # any two numbers are a multiple of each other
    names = {num_ranks: "sum", 1 / num_ranks: "mean"}
    return [next((name for k, name in names.items() if math.isclose(ratio, k, rel_tol=rtol)), "scale")]


def explain(got: Tensor, expected: Tensor, candidates: Mapping[str, Tensor | None], rtol: float) -> list[str]:
    """Returns the hints whose candidate equals `got`. A candidate that equals `expected`, too, explains nothing."""
    return [
        hint
        for hint, candidate in candidates.items()
        if candidate is not None
        and candidate.shape == got.shape
        and measure(got, candidate).relative <= rtol < measure(candidate, expected).relative
    ]


@dataclass(frozen=True)
class Difference:
    """Describes the first difference of one phase. Print it for a readable text.

    Args:
        phase: one of `PHASES`.
        group: FQN of the sharded module.
        name: FQN of the parameter, buffer or module (its outputs are numbered); "loss".
        relative_error: the largest error divided by the largest magnitude expected in that tensor. inf: one of the two
            models has no such tensor, or one of another shape.
        ulps: the relative error in units in the last place of that magnitude, in `Comparison.dtype`.
        got, expected: the two values where they differ most.
        hints: keys of `HINTS`, the likeliest first.
        rank: the global rank on which this was seen.
    """

    phase: str
    group: str
    name: str
    relative_error: float
    ulps: float
    got: float
    expected: float
    hints: tuple[str, ...]
    rank: int

    def __str__(self) -> str:
        text = f"{self.phase}: {self.name} (group {self.group}, rank {self.rank}): expected {self.expected:.9g}, "
        text += f"got {self.got:.9g}, {self.ulps:.3g} ulps, relative error {self.relative_error:.3g}"
        return "\n    ".join([text, *(f"{hint}? {HINTS[hint]}" for hint in self.hints)])


@dataclass(frozen=True)
class Comparison:
    """Holds the result of `compare`. It is true if nothing differs. Print it for a readable text.

    Args:
        differences: the first difference of each phase that has one, in the order of phases. Examine the first of all:
            the others may follow from it.
        dtype: the coarsest dtype that the sharded model computes or reduces in.
        rtol: the relative error that was allowed, weights excepted.
        num_compared: how many tensors were compared on this rank, by phase. Outputs and gradients behind the first one
            that differs are not compared.
    """

    differences: tuple[Difference, ...]
    dtype: torch.dtype
    rtol: float
    num_compared: Mapping[str, int]

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {phase}" for phase, number in self.num_compared.items())
        title = f"compared {counts} (rtol {self.rtol:.2g}, {self.dtype}): "
        title += "no difference" if self else "the first difference of each phase:"
        return "\n  ".join([title, *map(str, self.differences)])


def first_of_each(found: Sequence[Sequence[tuple[int, Difference]]]) -> tuple[Difference, ...]:
    """Returns the first difference of each phase.

    `found`: for each rank, its first differences, with the index in the order of comparison. Among ranks that have
    found the same one, a rank that can explain it is chosen: others may hold a single number of that tensor.
    """
    firsts = []
    for phase in PHASES:
        of_phase = [each for rank in found for each in rank if each[1].phase == phase]
        if of_phase:
            firsts.append(
                min(of_phase, key=lambda each: (each[0], not each[1].hints, -each[1].relative_error, each[1].rank))[1]
            )
    return tuple(firsts)
