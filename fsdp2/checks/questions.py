"""Compares numbers over ranks in an all-reduce of some integers: what all have is its own minimum and maximum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.comm import moves_data
from .headers import Label, Runtime
from ..core.mesh import DataMesh
from .small_collectives import all_reduce_over


class Question(NamedTuple):
    """Numbers of which ranks compare the least and the greatest, and what judges these, on all ranks alike."""

    name: str
    numbers: Sequence[Tensor | int]
    judge: Callable[[Sequence[tuple[int, int]]], None]


def ask(mesh: DataMesh, questions: Sequence[Question], runtime: Runtime | None = None) -> None:
    """Compare the numbers of all `questions` over the ranks of `mesh` in one all-reduce, and judge them in order.

    `runtime`: what runs, for errors to say so.
    """
    numbers = [number for question in questions for number in question.numbers]
    if numbers:
        name = ", ".join(question.name for question in questions)
        bounds = iter(bounds_over(mesh, numbers, name, runtime))
        for question in questions:
            question.judge([*islice(bounds, len(question.numbers))])


def connects(mesh: DataMesh) -> bool:
    """Whether its ranks, or its only one, can tell each other anything."""
    return mesh.num_ranks == 1 or moves_data(mesh.axis_groups, mesh.device)


def bounds_over(
    mesh: DataMesh, numbers: Sequence[Tensor | int], name: str, runtime: Runtime | None = None
) -> list[tuple[int, int]]:
    """Returns the least and the greatest of each over the ranks of `mesh`, all of which must call it. `name`: of what.

    Of tensors without dims, too. They and the result cross between the host and the device in one copy each.
    """
    kind = mesh.device.type
    there = {i: each for i, each in enumerate(numbers) if isinstance(each, Tensor) and each.device.type == kind}
    sent = _to_device([0 if i in there else int(each) for i, each in enumerate(numbers)], mesh.device)
    # What is a number on the host of this rank may be one on the device of another: each keeps its place.
    own = torch.stack([there[i].to(sent) if i in there else each for i, each in enumerate(sent.unbind())])
    both, label = torch.cat([~own, own]), Label(name)
    if runtime is not None:
        label.run_in(runtime)
    all_reduce_over(both, mesh.axis_groups, largest=True, label=label)
    found = both.tolist()
    return [(~inverse, most) for inverse, most in zip(found[: len(own)], found[len(own) :], strict=True)]


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns an int64 tensor on `device`, in one copy, for which the host does not wait on CUDA."""
    whole = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)


def greatest(numbers: Sequence[Tensor]) -> Tensor | int:
    """Returns the greatest of some numbers that are not negative, of one device, where they lie."""
    return torch.stack([*numbers]).amax() if numbers else 0
