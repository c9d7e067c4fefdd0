"""PowerSGD: replicas sum two narrow matrices in place of each gradient, which is their product.

Shape legend:  R replicas,  M: [n, m], one rank's gradient,  P: [n, r] and Q: [m, r] of rank r.

    P = sum of M Q over replicas, orthogonalised       the first all-reduce: n r elements
    Q = sum of M^T P over replicas, divided            the second: m r elements
    mean = P Q^T

(Vogels, Karimireddy, Jaggi, arXiv 1905.13727.) Q is that of the step before, so that it follows the gradient's largest
directions. What the product lacks is added to the next gradient (error feedback).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..engine.codec import Part, Steps, Sums, is_large
from ..engine.comm import Comm
from ..engine.layout import ParamSpec

# Each all-reduce of P also sums these digits of what a rank knows, and their squares: equal on all ranks if and only if
# the squares have no variance. With digits below 64 float32 tells that apart for some hundred replicas.
_DIGIT, _DIGITS = 64, 5


@dataclass(frozen=True)
class PowerSGD:
    """Replicas sum gradients of rank `rank`: (n + m) rank elements, twice, in place of n m.

    It is for sums between replicas only (HSDP, `replicate`): `Compression(all_reduce=PowerSGD())`. A
    gradient is a matrix of its first dim and all others; of HSDP's replicas, each sums the shards that it has. Small
    parameters, those of one dim, and those that it would make less than `min_saving` times smaller are summed as
    without it, to the bit.

    Args:
        rank: of the matrices that are summed. More costs bytes, and is closer to the gradient.
        start: so many sums of a parameter are made as without it: early gradients have no few directions.
        min_saving: how many times fewer elements must be sent.
        feedback: add what the product lacks to the next gradient. Each rank keeps it, as large as its shards in fp32.
            It has the scale of the loss.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of range.
    """

    rank: int = 1
    start: int = 1000
    min_saving: float = 2.0
    feedback: bool = True

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PowerSGD.{name}: expected a number, got {value!r}")
            if value < least:
                raise ValueError(f"PowerSGD.{name}: expected {least} or more, got {value}")
        if not isinstance(self.min_saving, (int, float)) or not self.min_saving > 0:
            raise ValueError(f"PowerSGD.min_saving: expected a positive number, got {self.min_saving!r}")
        if not isinstance(self.feedback, bool):
            raise TypeError(f"PowerSGD.feedback: expected a bool, got {self.feedback!r}")

    def rank_of(self, rows: int, columns: int) -> int:
        """Returns the rank of the matrices for a gradient of so many rows and columns."""
        return min(self.rank, rows, columns)

    def make_sum(self) -> LowRankSum:
        return LowRankSum(self)


@dataclass
class _State:
    """What PowerSGD keeps of one parameter between steps."""

    count: int = 0
    """How often its gradient was summed."""
    q: Tensor | None = None
    """[m, r]: Q of the last sum."""
    first: Tensor | None = None
    """[m, r]: Q to begin with."""
    renewed: int = 0
    """How often there was a new Q."""
    residual: Tensor | None = None
    """[n, m]: the part of earlier gradients that was not sent."""

    def forget(self) -> None:
        """Begins anew. `count` stays: other replicas have begun the same sums."""
        self.q, self.renewed, self.residual = None, 0, None


class _Matrix(NamedTuple):
    """A gradient while it is summed: [n, m], with what was not sent before, and an orthogonal Q, [m, r]."""

    part: Part
    state: _State
    values: Tensor
    q: Tensor


@final
class LowRankSum:
    """Sums the gradients of one group as matrices of low rank."""

    def __init__(self, how: PowerSGD) -> None:
        self._how = how
        # By parameter index.
        self._states: dict[int, _State] = {}

    @property
    def nbytes(self) -> int:
        kept = [each for state in self._states.values() for each in (state.q, state.residual)]
        return sum(each.nbytes for each in kept if each is not None)

    def holds_for(self, spec: ParamSpec) -> bool:
        shape = spec.local_shape(0)
        if not is_large(spec.shape) or not shape[0] or 0 in shape:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        sent = (rows + columns) * self._how.rank_of(rows, columns)
        return sent * self._how.min_saving <= rows * columns

    def discard(self) -> None:
        for state in self._states.values():
            state.forget()

    def kept_state(self) -> dict[str, Any]:
        copied = {i: {**vars(state)} for i, state in self._states.items()}
        for each in copied.values():
            each.update((name, value.to("cpu", copy=True)) for name, value in each.items() if isinstance(value, Tensor))
        return {"matrices": copied}

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        self._states = {}
        for i, saved in state["matrices"].items():
            tensors = {name: value.to(device, copy=True) for name, value in saved.items() if isinstance(value, Tensor)}
            self._states[i] = _State(**{**saved, **tensors})

    def steps(self, sums: Sums, comm: Comm, divisor: float, label: str) -> Steps:
        flat, _, parts, _ = sums
        states = [self._states.setdefault(part.i, _State()) for part in parts]
        starts = min(state.count for state in states) < self._how.start
        for state in states:
            state.count += 1  # here: other ranks may have begun, too, before this one fails
        if starts:
            yield comm.all_reduce(flat, divisor, label)
            return
        matrices = [
            self._matrix(flat, part, state) for part, state in zip(parts, states, strict=True) if 0 not in part.shape
        ]
        of_p, ps = _room(matrices, 0, flat, _digits(matrices, flat.device))
        for each, p in zip(matrices, ps, strict=True):
            torch.mm(each.values, each.q, out=p)
        yield comm.all_reduce(of_p, 1, label)
        differ = _differ(of_p[-2 * _DIGITS :], comm.size)
        if flat.device.type == "cpu" and bool(differ):
            # A backward has failed on some replicas only. All see that, and sum as without.
            for each in matrices:
                each.state.forget()
                each.part.of(flat).copy_(each.values.view(each.part.shape))
            yield comm.all_reduce(flat, divisor, label)
            return
        of_q, qs = _room(matrices, 1, flat)
        for each, p, q in zip(matrices, ps, qs, strict=True):
            p.copy_(torch.linalg.qr(p).Q)
            if flat.device.type != "cpu":
                p.masked_fill_(
                    differ, math.nan
                )  # the host does not wait to see it: no gradient is better than a wrong one
            torch.mm(each.values.t(), p, out=q)
        yield comm.all_reduce(of_q, divisor, label)
        for each, p, q in zip(matrices, ps, qs, strict=True):
            self._finish(each, p, q, flat, divisor / comm.size)

    def _matrix(self, flat: Tensor, part: Part, state: _State) -> _Matrix:
        shard = part.of(flat)
        wide = shard if flat.dtype == torch.float64 else shard.float()
        values = wide.reshape(part.shape[0], -1)
        if self._how.feedback:
            residual = state.residual
            if residual is not None and (residual.shape, residual.dtype) == (values.shape, values.dtype):
                values = values + residual
        shape = values.size(1), self._how.rank_of(*values.shape)
        if state.first is None or state.first.shape != shape or state.first.dtype != values.dtype:
            # The same on all replicas.
            generator = torch.Generator("cpu").manual_seed(zlib.crc32(part.name.encode()))
            first = torch.randn(shape, generator=generator, dtype=values.dtype, device="cpu")
            state.first, state.q, state.renewed = first.to(flat.device), None, 0
        return _Matrix(part, state, values, torch.linalg.qr(state.first if state.q is None else state.q).Q)

    def _finish(self, each: _Matrix, p: Tensor, q: Tensor, flat: Tensor, share: float) -> None:
        """Writes the product to its place. `share`: the divisor by the number of replicas."""
        state, mean = each.state, p @ q.t()
        assert state.first is not None, "it began with one"
        if self._how.feedback:
            # What is not finite would stay in all later gradients.
            state.residual = torch.sub(each.values, mean, alpha=share).nan_to_num_(0, 0, 0)
        each.part.of(flat).copy_(mean.view(each.part.shape))
        state.q, state.renewed = torch.where(q.isfinite().all(), q, state.first), state.renewed + 1


def _room(
    matrices: Sequence[_Matrix], side: int, flat: Tensor, more: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Returns one flat tensor for P (side 0) or Q (side 1) of all matrices, with `more` behind, and a view for each."""
    sizes = [each.values.size(side) * each.q.size(1) for each in matrices]
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    extra = 0 if more is None else len(more)
    room = flat.new_empty(sum(sizes) + extra, dtype=dtype)
    if more is not None:
        room[len(room) - extra :] = more
    views = room[: len(room) - extra].split(sizes)
    return room, [view.view(each.values.size(side), -1) for view, each in zip(views, matrices, strict=True)]


def _digits(matrices: Sequence[_Matrix], device: torch.device) -> Tensor:
    """Returns digits of a number that says which Q this rank has, and their squares."""
    number = zlib.crc32(repr([each.state.renewed for each in matrices]).encode())
    digits = [number // _DIGIT**k % _DIGIT for k in range(_DIGITS)]
    return torch.tensor([*digits, *(digit * digit for digit in digits)], dtype=torch.float64, device=device)


def _differ(summed: Tensor, ranks: int) -> Tensor:
    """Returns True, as a tensor, if not all ranks have given the same digits."""
    sums, squares = summed.double().view(2, _DIGITS)
    return torch.any(ranks * squares - sums * sums > (ranks - 1) / 2)
