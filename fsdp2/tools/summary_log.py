"""Logs how a model was sharded, in one line: when its first pass begins, and its root is known."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from torch import nn

from .describe import GroupDescription, ModelDescription, describe, ranks_text, size_text


def log_summary(modules: Sequence[nn.Module], logger: logging.Logger) -> None:
    """Logs one line about a sharded model; at DEBUG also the table of its groups.

    Args:
        modules: those of the root's `fully_shard` call.
        logger: is enabled for INFO.
    """
    described = describe(modules[0] if len(modules) == 1 else nn.ModuleList(modules))
    if not described.groups:
        return
    logger.info(summary(described))
    logger.debug("groups of %s:\n%s", described.cls, described)


def summary(model: ModelDescription) -> str:
    """Returns the line: groups, parameters, bytes on this rank, the largest group, settings that are no defaults."""
    groups, largest = model.groups, max(model.groups, key=_gathered)
    settings = Counter(setting for group in groups for setting in group.settings or ())
    chosen = [text if count == len(groups) else f"{text} ({count} groups)" for text, count in settings.items()]
    ranks = set(map(ranks_text, groups))
    parts = [
        f"sharded {model.cls}: {_number(len(groups), 'group')}, {model.numel:,} parameters among "
        f"{' and '.join(sorted(ranks))} ranks, {size_text(model.resting_nbytes)} on this rank",
        f"the largest group is {largest.name}, {size_text(_gathered(largest))} unsharded",
        f"settings: {', '.join(chosen) or 'all at their defaults'}",
    ]
    if model.unmanaged:
        parts.append(f"not sharded: {_number(len(model.unmanaged), 'parameter')}, {size_text(model.unmanaged_nbytes)}")
    return "; ".join(parts)


def _gathered(group: GroupDescription) -> int:
    return group.gathered_nbytes or 0


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
