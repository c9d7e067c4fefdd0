"""Walks over autograd graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from ..torch_private.dtensor import is_from_local


def all_nodes(roots: Iterable[Any], ends: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yields the nodes of the graphs that end in `roots`, in an order that is the same on ranks with equal graphs.

    `ends`: returns True for a node behind which the walk does not go on.
    """
    waiting, seen = list(roots), {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if ends is None or not ends(node):
                waiting.extend(each for each, _ in node.next_functions)
            yield node


def leaf_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of the leaves of the graphs, which accumulate gradients into `.grad` of their `variable`."""
    return (node for node in all_nodes(roots) if hasattr(node, "variable"))


def dtensor_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of operations on DTensors behind `roots`, of their leaves, and of calls of `DTensor.from_local`,
    behind which it does not go.
    """
    return all_nodes(roots, ends=is_from_local)


def is_dtensor_leaf(node: Any) -> bool:
    """Returns True for the node of a leaf that is a DTensor."""
    return isinstance(getattr(node, "variable", None), DTensor)
