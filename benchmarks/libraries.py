"""The libraries that are compared, by name: where each is imported from, and nothing else about them."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Measure this checkout, not an fsdp2 that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# "torch-again" checks the benchmark itself: beside "torch", every ratio must come out as 1.
MODULES = {
    "fsdp2": "fsdp2",
    "torch": "torch.distributed.fsdp",
    "torch-again": "torch.distributed.fsdp",
}


@dataclass(frozen=True)
class Library:
    """What the benchmark needs from a library that has torch's FSDP2 surface.

    `planner`: makes a `shard_placement_fn` that keeps padding small; torch has none.
    """

    name: str
    fully_shard: Callable[..., Any]
    mixed_precision_policy: Callable[..., Any]
    planner: Callable[[], Any] | None

    @property
    def has_wire_dtype(self) -> bool:
        """Whether gradients may travel in a narrower dtype than the one in which they are summed."""
        return "wire_dtype" in inspect.signature(self.mixed_precision_policy).parameters


def load_library(name: str) -> Library:
    """Import one library; exits with a sentence that says what to do when it cannot be imported."""
    if name not in MODULES:
        raise SystemExit(f"unknown library {name!r}: choose from {', '.join(MODULES)}")
    try:
        module = importlib.import_module(MODULES[name])
        planner = getattr(module, "cheapest_placement", None)
        return Library(name, module.fully_shard, module.MixedPrecisionPolicy, planner)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"cannot import fully_shard and MixedPrecisionPolicy from {MODULES[name]!r}: {error}. "
            f"Run in an environment with torch and a working checkout of this repository, "
            f"or check the benchmark alone with --libraries torch-again torch."
        ) from error
