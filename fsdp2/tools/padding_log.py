"""Logs which gathers of a `fully_shard` call have much padding."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..module import FSDPModule
from ..shards.ours import OurGroup
from .padding import GroupPadding, group_padding

# A gather with at least so much padding is logged: in bytes, and relative to the parameters' own bytes.
MIN_LOGGED_NBYTES = 16 * 1024 * 1024
MIN_LOGGED_SHARE = 0.25
_WIDEST = torch.float64.itemsize
# The kinds of groups whose padding was examined already.
_examined: set[tuple[object, ...]] = set()


class WasteLog(Observer):
    """Logs, on the first rank of each mesh, which gathers of a `fully_shard` call have much padding, and what to do.

    Of groups that are alike one is logged. It is a log line, not a warning: a warning that is turned into an error
    would end one rank only, and every rank would print a warning.
    """

    def attached(self, root: Any) -> None:
        for state in (root.state, *root.state.parts):
            for group in state.groups:
                _log_waste(group)


def _log_waste(group: FSDPParamGroup) -> None:
    is_first = not any(group.mesh.mesh.get_coordinate() or ())
    if is_first and _padding_numel(group) * _WIDEST >= MIN_LOGGED_NBYTES and not _was_examined(group):
        report = group_padding(OurGroup(group))
        if report.gather.waste >= max(MIN_LOGGED_NBYTES, MIN_LOGGED_SHARE * report.gather.nbytes):
            logging.getLogger("fsdp2").warning(f"fully_shard({_class_name(group)}): {_advise(report)}")


def _class_name(group: FSDPParamGroup) -> str:
    """Returns the name that the class of the group's first module had before it was sharded."""
    cls = type(group.modules[0])
    return (cls.__bases__[0] if issubclass(cls, FSDPModule) else cls).__name__


def _was_examined(group: FSDPParamGroup) -> bool:
    """Returns True if a group of the same kind was examined before, and notes that this one was."""
    shapes = tuple((param.gathered_shape, param.dim, param.local.dtype) for param in group.params)
    kind = (_class_name(group), group.mesh.size, group.settings.policy.param_dtype, shapes)
    before = kind in _examined
    _examined.add(kind)
    return before


def _padding_numel(group: FSDPParamGroup) -> int:
    """Returns the number of elements of padding. It is computed for every group, and must be fast."""
    size, numel = group.mesh.size, 0
    for param in group.params:
        rows = param.gathered_shape[param.dim]
        if rows % size:
            numel += -rows % size * (math.prod(param.gathered_shape) // rows)
    return numel


def _advise(report: GroupPadding) -> str:
    worst = [each for each in report.parameters if each.gather.waste > report.gather.waste / 10]
    advice = "Pass shard_placement_fn=fsdp2.cheapest_placement(mesh)"
    if all(each.dim == each.cheapest_dim for each in worst):
        advice = "No dim of these divides better: shard them over fewer ranks, on a mesh that also replicates"
    return (
        f"padding makes each gather over {report.num_ranks} ranks {report.gather}, most of it by "
        f"{'; '.join(map(str, worst))}. {advice}. fsdp2.padding_report tells more."
    )
