"""Refuses to record a backward of sharded parameters by compiled autograd, before torch refuses it without their names.

Compiled autograd records the graph, its leaves included, among which freed parameters are. What runs without being
recorded, Root finds out when backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .events import Observer
from .once import once
from .owners import all_groups
from .root import refuse_compiled_backward
from .torch_names import before_backward_is_recorded


class CompiledBackwards(Observer):
    """Watches compiled autograd once the first module is sharded."""

    def attached(self, root: Any) -> None:
        _watch()


@once
def _watch() -> None:
    before_backward_is_recorded(_check)


def _check(leaves: Sequence[Any]) -> None:
    identities = {id(each) for each in leaves}
    for group in all_groups():
        for param in group.params:
            if id(param.unsharded) in identities:
                refuse_compiled_backward(group, param.name)
