"""Compares numbers between ranks by an all-reduce of integers: what all have is its own minimum and maximum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..engine.comm import CommLabel
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.policy import ReduceWhen
from .rank_facts import all_reduce_over, moves_data

if TYPE_CHECKING:
    from ..engine.root import Root


class ComparedNumbers(NamedTuple):
    """Numbers of a rank to compare with those of other ranks, and a function that judges the result.

    `judge` is called with the least and the greatest value of each number, alike on all ranks; it may raise.
    """

    name: str
    numbers: Sequence[Tensor | int]
    judge: Callable[[Sequence[tuple[int, int]]], None]


class Comparison(NamedTuple):
    """Describes one time at which the ranks of a root compare numbers.

    `number`: how often they have communicated. `is_anew`: it is the first time, or all ranks have loaded weights since.
    `mesh`: the mesh over which they compare; None if it connects no ranks.
    """

    root: Root
    number: int
    is_anew: bool
    mesh: DataMesh | None


class RankObserver(Observer):
    """Compares something between ranks. All that is due at one time for one root shares an all-reduce.

    `at_evaluation`: True if ranks are to compare, too, when the model is evaluated first after training.
    `compares_next`: True if they are to compare the next time in any case. Both must be alike on all ranks.
    """

    at_evaluation = compares_next = False

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        """Yields what to compare, and over which mesh. Ranks must differ in the values of the numbers only."""
        yield from ()


def compare(mesh: DataMesh, compared: Sequence[ComparedNumbers], root: Root | None = None) -> None:
    """Compares all numbers of `compared` over the ranks of `mesh` in one all-reduce, and judges them in order.

    All of these ranks must call it. `root`: the Root that runs, for errors to say what it does.
    """
    compare_now(mesh, compared, root)()


def compare_now(mesh: DataMesh, compared: Sequence[ComparedNumbers], root: Root | None = None) -> Callable[[], None]:
    """Compares as `compare` does, and returns the function that judges, which raises on all ranks what they differ in.

    Raises:
        RuntimeError: the ranks did not compare at all: they are out of step, for example.
    """
    numbers = [number for each in compared for number in each.numbers]
    name = ", ".join(each.name for each in compared) if root is None else f"what checks compare of {root.state}"
    found = iter(bounds_over(mesh, numbers, name, root) if numbers else ())

    def judge() -> None:
        for each in compared:
            each.judge([*islice(found, len(each.numbers))])

    return judge


def connects(mesh: DataMesh) -> bool:
    """Returns True if the ranks of `mesh` can send each other data, or if it has one rank only."""
    return mesh.num_ranks == 1 or moves_data(mesh.axis_groups, mesh.device)


def bounds_over(
    mesh: DataMesh, numbers: Sequence[Tensor | int], name: str, root: Root | None = None
) -> list[tuple[int, int]]:
    """Returns the least and the greatest of each number over the ranks of `mesh`, all of which must call it.

    Numbers may be tensors without dims. They and the result cross between the host and the device in one copy each.
    `name`: what the numbers are, for errors and for checks that compare what ranks do.
    """
    kind = mesh.device.type
    there = {i: each for i, each in enumerate(numbers) if isinstance(each, Tensor) and each.device.type == kind}
    sent = _to_device([0 if i in there else int(each) for i, each in enumerate(numbers)], mesh.device)
    # What is a number on the host of this rank may be one on the device of another: each keeps its index.
    own = torch.stack([there[i].to(sent) if i in there else each for i, each in enumerate(sent.unbind())])
    both, comm_label = torch.cat([~own, own]), CommLabel(name, root)
    all_reduce_over(both, mesh.axis_groups, largest=True, comm_label=comm_label)
    found = both.tolist()
    return [(~inverse, most) for inverse, most in zip(found[: len(own)], found[len(own) :], strict=True)]


def _to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Returns an int64 tensor on `device`, in one copy, for which the host does not wait on CUDA."""
    whole = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return (whole.pin_memory() if device.type == "cuda" else whole).to(device, non_blocking=True)


def greatest(numbers: Sequence[Tensor]) -> Tensor | int:
    """Returns the greatest of some numbers of one device that are not negative, where they lie; 0 if there are none."""
    return torch.stack([*numbers]).amax() if numbers else 0


def widest_mesh(groups: Iterable[FSDPParamGroup]) -> DataMesh:
    """Returns the mesh of most ranks among those of `groups`: the ranks that train on one batch."""
    meshes: Iterable[DataMesh] = (group.mesh for group in groups)
    return max(meshes, key=lambda mesh: mesh.num_ranks)


def groups_by_mesh(groups: Iterable[FSDPParamGroup]) -> dict[DataMesh, list[FSDPParamGroup]]:
    """Returns mesh -> those of `groups` that are on it, for meshes that `connects`."""
    on_mesh: dict[DataMesh, list[FSDPParamGroup]] = {}
    for group in groups:
        on_mesh.setdefault(group.mesh, []).append(group)
    return {mesh: members for mesh, members in on_mesh.items() if connects(mesh)}


def groups_of_all_ranks(root: Root) -> list[FSDPParamGroup]:
    """Returns the groups with parameters, on the mesh of most ranks, that no rank leaves out, and that are gathered."""
    mesh = widest_mesh(root.groups)
    return [
        group
        for group in root.groups
        if group.params
        and (group.mesh is mesh or group.mesh == mesh)
        and group.settings.reduce_when is not ReduceWhen.ASKED
        and not group.settings.vocab_parallel
    ]


def group_of_all_ranks(root: Root) -> FSDPParamGroup | None:
    """Returns the first of `groups_of_all_ranks`."""
    return next(iter(groups_of_all_ranks(root)), None)
