"""Walks over autograd graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def all_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of the graphs that end in `roots`, in an order that is the same on ranks with equal graphs."""
    waiting, seen = list(roots), {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(each for each, _ in node.next_functions)
            yield node


def leaf_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of the leaves of the graphs, which accumulate gradients into `.grad` of their `variable`."""
    return (node for node in all_nodes(roots) if hasattr(node, "variable"))
