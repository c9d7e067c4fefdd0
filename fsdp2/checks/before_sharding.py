"""Keeps what checks have found of the parameters of a fully_shard call before it sharded them, for its observers."""

from __future__ import annotations

from typing import Any

from ..engine.build import Plan
from ..engine.group import FSDPParamGroup
from ..engine.torch_names import Memory

# The id of the module of a parameter's first slot, and its name there. The parameter's group keeps the module alive.
Key = tuple[int, str]


class BeforeSharding:
    """Facts of the parameters of one call, by their keys. Each check fills and empties its own dict."""

    def __init__(self) -> None:
        # Where the parameter was in memory; None if it had none.
        self.memory: dict[Key, Memory | None] = {}
        # Some of its values (model_facts.py), until its group is attached.
        self.samples: dict[Key, Any] = {}


def facts_of_call(plan: Plan) -> BeforeSharding:
    """Returns the facts of the call that `plan` is about."""
    return plan.notes.of(BeforeSharding)


def facts_of(group: FSDPParamGroup) -> BeforeSharding:
    """Returns the facts of the call that made `group`."""
    return group.state.notes.of(BeforeSharding)
