"""Holds the events of a Chrome trace, and writes them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

# The tracks of a picture.
PASSES, MODULES, HOST, RESHARDS, OPTIMIZER = range(1, 6)
_TRACKS = ["passes", "forwards of modules", "host: launches, waits", "reshards", "optimizer steps"]


class Picture:
    """Collects the events of a Chrome trace. Several threads may add some. `rank`: of this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = time.perf_counter_ns()
        self._lock = Lock()
        self.events: list[dict[str, Any]] = []
        self._pass_began: dict[str, float] = {}
        size = dist.get_world_size()
        self.note("M", "process_name", 0, args={"name": f"rank {rank} of {size}"})
        for track, name in enumerate(_TRACKS, 1):
            self.note("M", "thread_name", track, args={"name": name})

    def now(self) -> float:
        """Returns the time in microseconds."""
        return (time.perf_counter_ns() - self._began) / 1000

    def note(self, phase: str, name: str, track: int, when: float | None = None, **more: Any) -> None:
        """Adds one event, of a kind that the format calls `phase`, at the time `when`. None: now."""
        event = {
            "ph": phase,
            "name": name,
            "pid": self._rank,
            "tid": track,
            "ts": self.now() if when is None else when,
        }
        with self._lock:
            self.events.append(event | more)

    def span(self, name: str, track: int, began: float, **arguments: Any) -> None:
        """Adds what has lasted from `began` until now."""
        self.note("X", name, track, began, dur=self.now() - began, args=arguments)

    def count(self, counters: dict[str, int], device: torch.device) -> None:
        """Adds the present values of counters of bytes; on CUDA, also what is allocated."""
        for name, nbytes in counters.items():
            self.note("C", name, 0, args={"bytes": nbytes})
        if device.type == "cuda":
            self.note("C", "allocated", 0, args={"bytes": torch.cuda.memory_allocated(device)})

    def refresh(self) -> None:
        """Notes the memory, at the beginning and at the end of passes and steps."""

    def begin_pass(self, name: str) -> None:
        """Notes that a forward or backward pass begins."""
        self._pass_began.setdefault(name, self.now())
        self.refresh()

    def end_pass(self, name: str) -> None:
        """Notes that it has ended, if one runs."""
        began = self._pass_began.pop(name, None)
        if began is not None:
            self.span(name, PASSES, began)
            self.refresh()

    def write(self, path: Path) -> None:
        """Writes the file."""
        for name in [*self._pass_began]:  # a step has raised
            self.end_pass(name)
        self.refresh()
        path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))
