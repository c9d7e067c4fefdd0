"""Compares a sharded model with a plain one, and returns where their numbers differ first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards.find import is_unsynchronized
from ..shards.ranks import gather_objects
from ..shards.tensors import checksum, local_of, read, require_module, tensors_in
from .audit import Held, sharded, tensors_of, widest
from .difference import Comparison, Difference, Distance, explain, explain_scale, first_of_each, magnitude, measure
from .side_by_side import Sides, mean_loss, named_tensors, restored, ties


def compare(
    reference: nn.Module,
    model: nn.Module,
    batch: Tensor | tuple[Any, ...],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    rtol: float | None = None,
) -> Comparison:
    """Finds the first weight, output and gradient in which `model` differs from `reference`. Every rank of the model's
    mesh must call it, between steps.

    Both run forward and backward once: the reference on the whole batch, the model on this rank's rows. It compares, in
    this order, weights and buffers; the unsharded weights that modules compute with; what sharded modules return; the
    loss; and gradients, from the last to the first. A difference is compared with what the usual causes would give, for
    which the reference may run once or twice more. Gradients, buffers and random states are restored afterwards. Hooks
    on parameters run: remove those that step an optimizer.

    Args:
        reference: a plain module of the same FQNs, mode and weights, on every rank.
        model: the sharded model, by fsdp2 or by torch's FSDP2.
        batch: a tensor or a tuple of arguments for both models, the same on every rank. Tensors are cut into equal
            chunks along dim 0, one for each rank.
        loss_fn: `loss_fn(module, *batch)` calls the module and returns its loss, a mean over rows. None: the mean of
            the scalars that the module returns; if there are none, the mean square of each tensor, summed.
        rtol: the largest error that is allowed, divided by the largest magnitude in its tensor. None: the square root
            of the precision of `Comparison.dtype`, half of its digits. Weights must be equal. torch's FSDP2 does not
            tell in which dtype it reduces: if that is narrower than the one it computes in, give the error.

    Returns:
        The same on every rank, except for `num_compared`.

    Raises:
        TypeError, ValueError: a wrong argument; other names or modes in the two models; a reference or a batch that
            is not the same on every rank. If one rank raises, all do.
        RuntimeError: there are unsynchronized gradients.

    Example:
        ```python
        found = fsdp2.compare(plain, model, (tokens, targets), lambda m, x, y: F.cross_entropy(m(x), y))
        print(found)  # nothing differs; or what does first, by how much, and what may be the cause
        ```
    """
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a function of the module and the batch, or None, got {loss_fn!r}")
    if rtol is not None and (isinstance(rtol, bool) or not isinstance(rtol, int | float)):
        raise TypeError(f"rtol: expected a number or None, got {rtol!r}")
    shards = sharded(model, "compare")
    mesh = widest(shards.groups)
    share: Callable[[Any], list[Any]] = partial(gather_objects, groups=mesh.axis_groups, device=mesh.device)
    batch = batch if isinstance(batch, tuple) else (batch,)
    tensors = list(tensors_of(model, shards.groups))
    problem = _problem(reference, model, tensors, batch, mesh.num_ranks)
    whole = [] if problem else [*named_tensors(reference).values(), *tensors_in(batch)]
    answers = share((dist.get_rank(), problem, read([checksum(tensor) for tensor in whole])))
    for error in [problem for _, problem, _ in answers if problem] or _unequal(answers):
        raise error
    ranks = [rank for rank, _, _ in answers]
    sides = Sides(reference, model, shards, tensors, batch, loss_fn or mean_loss, ranks, rtol)
    with restored(reference, tensors, shards):
        found = _Found(sides)
        shown = share((_compare_weights(found), float(sides.ours.loss)))
        _compare_gathered(found, {name for names, _ in shown for name in names})
        _compare_outputs(found)
        _compare_loss(found, sum(loss for _, loss in shown) / len(shown))
        _compare_gradients(found)
    return Comparison(first_of_each(share(found.firsts)), sides.dtype, sides.rtol, found.counts)


# ---- before anything runs


def _problem(reference: Any, model: nn.Module, tensors: Sequence[Held], batch: Any, num_ranks: int) -> Exception | None:
    """Returns the error that makes a comparison impossible, as far as this rank can see, or None."""
    try:
        require_module("reference", reference, "compare")
    except TypeError as error:
        return error
    if any(isinstance(param, DTensor) for param in reference.parameters()):
        return ValueError(
            "reference: expected a plain module, got one whose parameters are sharded. Build it again from the same "
            "seed, or copy it before fully_shard."
        )
    ours, theirs = (named_tensors(each, duplicates=True) for each in (model, reference))
    if ours.keys() != theirs.keys():
        return ValueError(f"reference: expected the names of the model, but one lacks {sorted({*ours} ^ {*theirs})}")
    for name, shape, other in ((held.name, held.tensor.shape, theirs[held.name].shape) for held in tensors):
        if shape != other:
            return ValueError(f"reference: expected {name} of the model's shape, {tuple(shape)}, got {tuple(other)}")
    modes = {name: module.training for name, module in reference.named_modules()}
    for name, module in model.named_modules():
        if module.training != modes.get(name, module.training):
            return ValueError(
                f"reference: expected the mode (training or not) of the model, but {name or 'root'} has the other one"
            )
    rows = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(rows) != 1 or not min(rows) or min(rows) % num_ranks:
        return ValueError(f"batch: expected tensors of equally many rows, a multiple of {num_ranks} ranks, got {rows}")
    for held in tensors:
        if is_unsynchronized(held.tensor.grad):
            return RuntimeError(
                f"{held.name}: its gradient is unsynchronized. End the accumulation, or call zero_grad."
            )
    return None


def _unequal(answers: Sequence[tuple[int, Any, list[int]]]) -> list[Exception]:
    """Returns an error for each rank whose reference or batch differs from those of the first rank."""
    return [
        ValueError(
            f"reference, batch: expected the same on every rank, but ranks {answers[0][0]} and {rank} have different "
            "ones. Build the reference from one seed, and pass the whole batch everywhere."
        )
        for rank, _, sums in answers
        if sums != answers[0][2]
    ]


# ---- phase by phase


class _Found:
    """Holds the first difference of each phase on this rank, with its place in the order of all ranks, and how many
    tensors were compared.
    """

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.firsts: list[tuple[int, Difference]] = []
        self.counts: dict[str, int] = {}

    def is_open(self, phase: str) -> bool:
        """Returns True if nothing has differed in `phase` yet."""
        return all(each.phase != phase for _, each in self.firsts)

    def count(self, phase: str, number: int = 1) -> None:
        """Counts tensors that are compared."""
        self.counts[phase] = self.counts.get(phase, 0) + number

    def add(self, place: int, phase: str, group: str, name: str, distance: Distance, hints: Sequence[str] = ()) -> None:
        ulps = distance.relative / torch.finfo(self.sides.dtype).eps
        if phase in ("outputs", "loss", "gradients") and self.sides.whole.is_random:
            hints = [*hints, "random"]
        difference = Difference(
            phase, group, name, distance.relative, ulps, distance.got, distance.expected, tuple(hints), dist.get_rank()
        )
        self.firsts.append((place, difference))


_NOTHING = Distance(math.inf, 0, math.nan, math.nan)


def _compare_weights(found: _Found) -> set[str]:
    """Compares weights, and returns the names of those that differ on this rank."""
    sides, names = found.sides, set()
    for i, held in enumerate(sides.tensors):
        if held.param is not None and held.param.gathers_itself:
            continue
        found.count("weights")
        whole = sides.whole_tensors[held.name]
        own, part = _local(held.tensor), _part(held, whole)
        distance = measure(own, part, magnitude(whole))
        if distance.relative:
            names.add(held.name)
            if found.is_open("weights"):
                found.add(i, "weights", _group_of(sides, held), held.name, distance, _explain_rounding(own, part))
    return names


def _explain_rounding(got: Tensor, expected: Tensor) -> list[str]:
    narrow = min(got.dtype, expected.dtype, key=lambda dtype: dtype.itemsize)
    is_rounded = got.dtype != expected.dtype and not measure(got.to(narrow), expected.to(narrow)).relative
    return ["rounding"] if is_rounded else []


def _compare_gathered(found: _Found, known: set[str]) -> None:
    """Compares unsharded weights. `known`: names of those whose shards differ already, on any rank."""
    sides = found.sides
    if sides.num_gathered:
        found.count("gathered weights", sides.num_gathered)
    for place, held, distance in sides.gathered:
        if held.name not in known and found.is_open("gathered weights"):
            found.add(place, "gathered weights", _group_of(sides, held), held.name, distance, ["stale"])


def _group_of(sides: Sides, held: Held) -> str:
    return sides.group_names[held.param] if held.param else "none"


def _compare_outputs(found: _Found) -> None:
    sides = found.sides
    ours, whole = sides.ours.outputs, sides.whole.outputs
    for i, (name, outputs) in enumerate(ours):
        if i >= len(whole) or whole[i][0] != name or len(whole[i][1]) != len(outputs):
            return found.add(i, "outputs", str(sides.sharded[name]), name, _NOTHING, ["order"])
        for j, got in enumerate(outputs):
            expected = sides.rows_like(whole[i][1][j], got)
            if expected is None:
                continue
            found.count("outputs")
            distance = measure(got, expected, magnitude(whole[i][1][j]))
            if distance.relative > sides.rtol:
                rounded = sides.rows_like(sides.rounded.outputs[i][1][j], got) if sides.rounded else None
                candidates = {"cast input": rounded, "across rows": _of_own_rows(sides, i, j)}
                hints = explain(got, expected, candidates, sides.rtol)
                return found.add(
                    i, "outputs", str(sides.sharded[name]), f"{name or 'root'}, output {j}", distance, hints
                )
    return None


def _of_own_rows(sides: Sides, i: int, j: int) -> Tensor | None:
    """Returns output j of the i-th sharded module that ran, as the reference computes it from this rank's rows. Returns
    None if that would prove nothing: random numbers would be the same as those of the model.
    """
    if sides.whole.is_random:
        return None
    outputs = sides.own_rows.outputs[i : i + 1]
    return outputs[0][1][j] if outputs and j < len(outputs[0][1]) else None


def _compare_loss(found: _Found, mean: float) -> None:
    sides, expected = found.sides, found.sides.whole.loss.double()
    got = torch.tensor(mean, dtype=torch.float64, device="cpu")
    distance = measure(got, expected.cpu())
    found.count("loss")
    if distance.relative > sides.rtol:
        hints = explain_scale(got, expected.cpu(), sides.num_ranks, sides.rtol)
        rounded = sides.rounded.loss.double().cpu() if sides.rounded else None
        hints += explain(got, expected.cpu(), {"cast input": rounded}, sides.rtol)
        found.add(0, "loss", "root", "loss", distance, hints)


def _compare_gradients(found: _Found) -> None:
    """Compares gradients. The tolerance is larger for a gradient that would be zero without rounding errors."""
    sides, gradients = found.sides, found.sides.whole.gradients
    largest = max((magnitude(gradient) for gradient in gradients.values() if gradient is not None), default=0.0)
    slack = min(sides.rtol, 4 * torch.finfo(sides.dtype).eps) * largest
    ours, theirs = ties(sides.model), ties(sides.reference)
    helds = [held for held in sides.tensors if held.kind != "buffer"]
    order = {name: i for i, name in enumerate(gradients)}
    for i, held in enumerate(sorted(helds, key=lambda held: order.get(theirs[held.name][0], len(order)))):
        if found.is_open("gradients"):
            found.count("gradients")
            tied = ["tied"] if ours[held.name] != theirs[held.name] else []
            _compare_gradient(found, i, held, theirs[held.name][0], slack, tied)


def _compare_gradient(found: _Found, place: int, held: Held, name: str, slack: float, hints: list[str]) -> None:
    sides, got = found.sides, found.sides.ours.gradients[held.name]
    whole, group = sides.whole.gradients.get(name), _group_of(found.sides, held)
    if is_unsynchronized(got):
        return found.add(place, "gradients", group, held.name, _NOTHING, ["unsynchronized"])
    if got is None or whole is None:
        return None if got is whole else found.add(place, "gradients", group, held.name, _NOTHING, [*hints, "missing"])
    own = _local(got)
    expected = _part(held, whole)
    distance, scale = measure(own, expected, magnitude(whole)), magnitude(whole)
    if distance.relative and not abs(distance.got - distance.expected) <= sides.rtol * scale + slack:
        hints += explain_scale(own, expected, sides.num_ranks, sides.rtol)
        others = {"unsynchronized": sides.own_rows, "cast input": sides.rounded}
        parts = {hint: run.gradients[name] if run else None for hint, run in others.items()}
        candidates = {hint: None if part is None else _part(held, part) for hint, part in parts.items()}
        found.add(
            place, "gradients", group, held.name, distance, hints + explain(own, expected, candidates, sides.rtol)
        )
    return None


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _part(held: Held, whole: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor of the reference, or the tensor itself if no group shards it."""
    return whole.detach() if held.param is None else held.param.part_of(whole.detach())
