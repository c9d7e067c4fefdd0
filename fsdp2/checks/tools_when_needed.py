"""Runs tools at events of a root, and imports each tool only then: `import fsdp2` imports none."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.rank_facts import is_first
from .rollcall import level_from_environment

# Padding of fewer bytes is never logged.
MIN_LOGGED_NBYTES = 16 * 1024 * 1024
_WIDEST = torch.float64.itemsize


class AuditAtDebugLevel(Observer):
    """Has the first rank log what `check` finds, once before the next pass after the debug level was switched on.

    It communicates when the pass begins, on every rank. The debug level is off or on for all ranks alike. It follows
    `pass_began` until that has happened.
    """

    def __init__(self) -> None:
        self.ignored = frozenset() if level_from_environment() > 0 else frozenset({"pass_began"})

    def ask(self, root: Any, wanted: bool = True) -> None:
        """Chooses whether `check` runs before the next pass of `root`. Every rank must call it."""
        root.events.follow_if(wanted, self, "pass_began")

    def pass_began(self, root: Any) -> None:
        from ..tools.audit import log_findings

        root.events.ignore(self, "pass_began")
        log_findings(root.state.modules, is_first(root.group.mesh))


class WasteLog(Observer):
    """Logs, on the first rank of each mesh, which gathers of a `fully_shard` call have much padding, and what to do.

    It is a log line, not a warning: a warning that is turned into an error would end one rank only, and every rank
    would print a warning.
    """

    def attached(self, root: Any) -> None:
        for state in (root.state, *root.state.parts):
            for group in state.groups:
                is_first_rank = not any(group.mesh.mesh.get_coordinate() or ())
                if is_first_rank and _padding_numel(group) * _WIDEST >= MIN_LOGGED_NBYTES:
                    from ..tools.padding_log import log_waste

                    log_waste(group, MIN_LOGGED_NBYTES)


def _padding_numel(group: FSDPParamGroup) -> int:
    """Returns the number of elements of padding. It is computed for every group, and must be fast."""
    size, numel = group.mesh.size, 0
    for param in group.params:
        rows = param.gathered_shape[param.dim]
        if rows % size:
            numel += -rows % size * (math.prod(param.gathered_shape) // rows)
    return numel


class ProfilerRanges(Observer):
    """Opens ranges in torch's profiler: "fsdp2.all_gather blocks.0 4096 bytes", and others.

    The root compares one flag when a pass begins, so it notices a profiler with the next forward or backward. It
    follows no other event, and watches no collective, until then. So a step without a profiler runs nothing of it.
    """

    ignored = frozenset({"before_free"})

    def profiler_switched(self, root: Any) -> None:
        from ..tools.profiler_ranges import end, start

        root.events.follow_if(root.is_profiled, self, "before_free")
        (start if root.is_profiled else end)(root)

    def before_free(self, group: Any) -> None:
        from ..tools.profiler_ranges import show_reshard

        show_reshard(group)
