"""Logs what `check` finds before the first pass at the debug level."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..checks.rollcall import level_from_environment
from ..engine.events import Observer
from ..engine.rank_facts import is_first
from .audit import check


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
        root.events.ignore(self, "pass_began")
        _log_findings(root.state.modules, is_first(root.group.mesh))


def _log_findings(modules: Iterable[nn.Module], logs: bool) -> None:
    findings = [finding for module in modules for finding in check(module)]
    for finding in findings if logs else ():
        logging.getLogger("fsdp2").warning(f"before the first forward: {finding}")
