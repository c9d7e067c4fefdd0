"""Runs tools at events of a root, and imports each tool only then: `import fsdp2` imports none."""

from __future__ import annotations

import logging
import os
from functools import cache

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from ..ranks.rank_facts import is_first

_LOG = "FSDP2_LOG"


class Summary(Observer):
    """Has the first rank log how its model was sharded, once, when the first pass begins: then the root is known.

    Where the logger is off, it only compares a level. It removes itself when that pass begins.
    """

    def pass_began(self, root: Root) -> None:
        root.remove(self)
        _follow_log_level()
        logger = logging.getLogger("fsdp2")
        if logger.isEnabledFor(logging.INFO) and is_first(root.group.mesh):
            from ..tools.summary_log import log_summary

            log_summary(root.state.modules, logger)


@cache
def _follow_log_level() -> None:
    """Gives the logger "fsdp2" the level that the environment variable FSDP2_LOG names. Where the program has no
    handlers, its messages go to stderr.

    Raises:
        ValueError: it is no level of logging.
    """
    value = os.environ.get(_LOG)
    if not value:
        return
    level = logging.getLevelName(value.upper())
    if not isinstance(level, int):
        raise ValueError(f"environment variable {_LOG}: expected a level such as INFO or DEBUG, got {value!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    handler.addFilter(lambda record: not logging.getLogger().handlers)  # which print it themselves
    logger = logging.getLogger("fsdp2")
    logger.setLevel(level)
    logger.addHandler(handler)


class ProfilerRanges(Observer):
    """Opens ranges in torch's profiler: "fsdp2.all_gather blocks.0 4096 bytes", and others.

    A root compares one flag when a pass begins, and has this observer while a profiler runs. So a step without one runs
    nothing of it.
    """

    def __init__(self, root: Root) -> None:
        """`root`: which it will follow."""

    def attached(self, root: Root) -> None:
        from ..tools.profiler_ranges import start

        start(root)

    def detached(self, root: Root) -> None:
        from ..tools.profiler_ranges import end

        end(root)

    def before_free(self, group: FSDPParamGroup) -> None:
        from ..tools.profiler_ranges import show_reshard

        show_reshard(group)
