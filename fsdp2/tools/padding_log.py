"""Logs which gathers of a `fully_shard` call have much padding."""

from __future__ import annotations

import logging

from ..engine.group import FSDPParamGroup
from ..shards.find import original_class
from ..shards.ours import OurGroup
from .padding import GroupPadding, group_padding

# A gather with at least so much padding is logged, relative to the parameters' own bytes.
MIN_LOGGED_SHARE = 0.25
# The kinds of groups whose padding was examined already.
_examined: set[tuple[object, ...]] = set()


def log_waste(group: FSDPParamGroup, least: int) -> None:
    """Logs that a gather of `group` has `least` bytes of padding or more, and what to do. Of groups that are alike one
    is logged.
    """
    if not _was_examined(group):
        report = group_padding(OurGroup(group))
        if report.gather.waste >= max(least, MIN_LOGGED_SHARE * report.gather.nbytes):
            logging.getLogger("fsdp2").warning(f"fully_shard({_class_name(group)}): {_advise(report)}")


def _class_name(group: FSDPParamGroup) -> str:
    """Returns the name that the class of the group's first module had before it was sharded."""
    return original_class(group.modules[0]).__name__


def _was_examined(group: FSDPParamGroup) -> bool:
    """Returns True if a group of the same kind was examined before, and notes that this one was."""
    shapes = tuple((param.gathered_shape, param.dim, param.local.dtype) for param in group.params)
    kind = (_class_name(group), group.mesh.size, group.settings.policy.param_dtype, shapes)
    before = kind in _examined
    _examined.add(kind)
    return before


def _advise(report: GroupPadding) -> str:
    worst = [each for each in report.parameters if each.gather.waste > report.gather.waste / 10]
    advice = "Pass shard_placement_fn=fsdp2.cheapest_placement(mesh)"
    if all(each.dim == each.cheapest_dim for each in worst):
        advice = "No dim of these divides better: shard them over fewer ranks, on a mesh that also replicates"
    return (
        f"padding makes each gather over {report.num_ranks} ranks {report.gather}, most of it by "
        f"{'; '.join(map(str, worst))}. {advice}."
    )
