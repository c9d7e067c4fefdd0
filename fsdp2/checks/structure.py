"""Compares the structure of the model between ranks: which parameters each group has, in which order, and of what kind.

A gather and a reduction go by position: ranks whose groups differ would mix rows of different parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..engine.codec import AS_IS, Codec
from ..engine.compare_ranks import ComparedNumbers, Comparison, groups_by_mesh
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import some_of
from ..engine.parameter import FSDPParam
from ..engine.policy import ReduceWhen
from ..engine.rank_facts import gather_by_rank
from ..engine.root import Root
from .due import RankCheck
from .headers import trainable_remark

_SAME_CODE = "Build and set up the model by the same code on all ranks"


class Described(NamedTuple):
    """Describes one parameter of a group, as ranks compare it."""

    name: str
    group: str
    shape: tuple[int, ...]
    stored: str
    gathered: str
    delivered: str
    kind: str
    dim: int
    codec: str
    replica_codec: str
    requires_grad: bool


# How an error calls each field that follows the group.
_FIELDS = {
    "shape": "the shape",
    "stored": "the dtype",
    "gathered": "the dtype in forward",
    "delivered": "gradients of the dtype",
    "kind": "tensors of the class",
    "dim": "shards along dim",
    "codec": "gradients that travel in",
    "replica_codec": "sums between replicas by",
}


def describe(groups: Sequence[FSDPParamGroup]) -> list[Described]:
    """Returns a description of each parameter of `groups`, in the order in which they are gathered."""
    found = []
    for group in groups:
        policy, name = group.settings.policy, group.name
        for param in group.params:
            local = param.local
            found.append(
                Described(
                    " = ".join(param.names),
                    name,
                    param.shape,
                    str(local.dtype),
                    str(param.compute_dtype(policy)),
                    _OWN_DTYPE if param.grad_choice is None else _gradients_of(param),
                    type(local).__name__,
                    param.dim,
                    _codec_text(policy.codec_for(param.delivered_dtype)),
                    repr(policy.compression.all_reduce),
                    param.sharded.requires_grad,
                )
            )
    return found


def _codec_text(codec: Codec) -> str:
    return "the dtype of their sums" if codec == AS_IS else repr(codec)


# Gradients have the dtype of their parameter.
_OWN_DTYPE = "of the parameter"


def _gradients_of(param: FSDPParam) -> str:
    """Returns the dtype of a parameter's `.grad`, and whether autograd may compute it in any other."""
    choice = param.grad_choice
    return f"{param.delivered_dtype}{' from any' if choice is not None and choice.dtype is None else ''}"


class Structure(RankCheck):
    """Compares names, order, shapes, dtypes and `requires_grad` of parameters between ranks.

    It also has headers say which parameters are trainable, for the errors of ranks that are out of step.
    """

    def __init__(self) -> None:
        self._trainable: dict[FSDPParamGroup, list[bool]] = {}

    def attached(self, root: Root) -> None:
        self._trainable = {group: group.parameters.trainable for group in root.groups}
        self._remark()

    def detached(self, root: Root) -> None:
        for group in root.groups:
            group.purpose.remark = ""

    def settings_changed(self, group: FSDPParamGroup) -> None:
        if self._trainable[group] != group.parameters.trainable:  # other settings change in each accumulation
            self._trainable[group] = group.parameters.trainable
            self._remark()

    def _remark(self) -> None:
        remark = trainable_remark([flag for flags in self._trainable.values() for flag in flags])
        for group in self._trainable:
            group.purpose.remark = remark

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        for mesh, groups in groups_by_mesh(comparison.root.groups).items():
            if mesh.num_ranks > 1:
                yield mesh, _numbers_of(mesh, groups)


def _numbers_of(mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> ComparedNumbers:
    """Returns numbers that are the same on all ranks if `groups`, on `mesh`, are the same there."""
    described = describe(groups)
    # Ranks that leave conditional modules out reduce zeros in their place. Where grad is off, nothing is reduced.
    asked = {group.name for group in groups if group.settings.reduce_when is ReduceWhen.ASKED}
    flags = [each.requires_grad for each in described if each.group not in asked]
    structure = zlib.crc32(repr([each[:-1] for each in described]).encode())
    numbers = (structure, zlib.crc32(bytes(flags)), int(torch.is_grad_enabled()))

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        (least, most), (least_flags, most_flags), (has_grad, _) = bounds
        if least != most or (has_grad and least_flags != most_flags):
            of_ranks = gather_by_rank(described, mesh.axis_groups, mesh.device)
            raise RuntimeError(difference(of_ranks))

    return ComparedNumbers("structure", numbers, judge)


def difference(of_ranks: Mapping[int, Sequence[Described]]) -> str:
    """Returns what differs between ranks, and what to do about it. `of_ranks`: rank -> its parameters, in order."""
    first, *others = sorted(of_ranks)
    expected = of_ranks[first]
    for other in others:
        got = of_ranks[other]
        text = _missing(first, expected, other, got) or _missing(other, got, first, expected)
        text = text or _kinds_differ(first, expected, other, got) or _orders_differ(first, expected, other, got)
        if text:
            return text
    return _flags_differ(of_ranks)


def _missing(one: int, ones: Sequence[Described], other: int, others: Sequence[Described]) -> str:
    """Says which parameters of rank `one` the rank `other` lacks."""
    there = {each.name for each in others}
    missing = [each.name for each in ones if each.name not in there]
    if not missing:
        return ""
    return (
        f"{some_of(missing)}: rank {one} shards this parameter, and rank {other} does not. {_SAME_CODE}, and call "
        "fully_shard on the same modules, with the same ignored_params."
    )


def _kinds_differ(one: int, ones: Sequence[Described], other: int, others: Sequence[Described]) -> str:
    """Says of the first parameter that is not the same on both ranks in what it differs."""
    of_other = {each.name: each for each in others}
    for each in ones:
        got = of_other[each.name]
        for field, what in _FIELDS.items():
            here, there = getattr(each, field), getattr(got, field)
            if here != there:
                return (
                    f"{each.name}: expected the same on all ranks, got {what} {here} on rank {one}, and {what} {there} "
                    f"on rank {other}. {_SAME_CODE}; if a size depends on data that a rank reads (a vocabulary), take "
                    "one rank's on all of them (torch.distributed.broadcast_object_list)."
                )
        if each.group != got.group:
            return (
                f"{each.name}: rank {one} has it in the group {each.group}, and rank {other} in the group {got.group}. "
                "Call fully_shard on the same modules on all ranks."
            )
    return ""


def _orders_differ(one: int, ones: Sequence[Described], other: int, others: Sequence[Described]) -> str:
    """Says where the order of parameters differs."""
    for i, (each, got) in enumerate(zip(ones, others, strict=True)):
        if each.name != got.name:
            return (
                f"{each.name}: ranks register their modules in another order: parameter {i} is {each.name} on rank "
                f"{one}, and {got.name} on rank {other}. Gathers go by that order, so weights would be made of rows of "
                "both. Register modules in the same order on all ranks (of names in a set: in that of sorted(names)), "
                "and call fully_shard after that."
            )
    return ""


def _flags_differ(of_ranks: Mapping[int, Sequence[Described]]) -> str:
    """Says which parameters some ranks train and others do not."""
    flags = {rank: [each.requires_grad for each in described] for rank, described in of_ranks.items()}
    names = [each.name for each in next(iter(of_ranks.values()))]
    apart = [i for i in range(len(names)) if len({each[i] for each in flags.values()}) > 1]
    i = apart[0]
    on, off = ([str(rank) for rank in sorted(flags) if flags[rank][i] is flag] for flag in (True, False))
    return (
        f"{some_of([names[i] for i in apart])}: requires_grad differs between ranks: it is True on rank {some_of(on)}, "
        f"and False on rank {some_of(off)}, so they would reduce different gradients. Set requires_grad alike on all "
        "ranks, before the forward; fsdp2.check(model) lists where it differs."
    )
