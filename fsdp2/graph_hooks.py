"""Callbacks at places of the autograd graph: backward reaches a node, has the gradients of some tensors, or ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from . import torch_compat
from .modes import run_hidden
from .transforms import outside

_HOOKS = "_fsdp2_hooks"


def before_nodes(nodes: Sequence[Any], callback: Callable[[], None], last_first: bool) -> None:
    """Have `callback` called when backward is about to run any of `nodes`.

    On nodes, not on tensors: a tensor may be the next module's input, whose hooks on it are to run first, in whatever
    order they came. `last_first`: of several callbacks on one node, that which came last is called first.
    """

    def hook(_: Any) -> None:
        callback()

    for node in nodes:
        if last_first:
            _hook_last_first(node, callback)
        else:
            node.register_prehook(hook)


def _hook_last_first(node: Any, callback: Callable[[], None]) -> None:
    callbacks = node.metadata.setdefault(_HOOKS, [])
    callbacks.insert(0, callback)

    def hook(_: Any) -> None:
        for each in callbacks:
            each()

    if len(callbacks) == 1:
        node.register_prehook(hook)


def after_tensors(tensors: Sequence[Tensor], callback: Callable[[], None]) -> None:
    """Have `callback` called when all of `tensors` have their gradient, in each backward."""
    total, missing, backward = len(tensors), 0, -1

    def hook(_: Tensor) -> None:
        nonlocal missing, backward
        if missing == 0 or backward != torch_compat.graph_task():  # the one before may not have reached all
            missing, backward = total, torch_compat.graph_task()
        missing -= 1
        if missing == 0:
            callback()

    for tensor in tensors:
        tensor.register_hook(hook)


def leaf_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """The ends of a graph, which add gradients to `.grad` of their `variable`."""
    return (node for node in all_nodes(roots) if hasattr(node, "variable"))


def all_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """The nodes of a graph, in an order that is the same wherever the graph is."""
    waiting, seen = list(roots), {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(each for each, _ in node.next_functions)
            yield node


def after_leaf(leaf: Tensor, callback: Callable[[], None]) -> None:
    """Have `callback` called at the end of the next (inner) backward that reaches `leaf`.

    Autograd accumulates into leaves before all else: the gradient itself comes too early.
    """

    def hook(_: Tensor) -> None:
        handle.remove()
        torch_compat.on_backward_end(callback)

    handle = leaf.register_hook(hook)


def at_backward_end(end: Callable[[], None], recover: Callable[[], None]) -> None:
    """Have `end` called when the backward that runs has computed all gradients, and `recover` if `end` fails.

    Nothing is called if the backward itself fails: autograd drops what it holds at some later time, on a device's
    thread perhaps.
    """

    def run() -> None:
        try:
            with outside():
                end()
        except BaseException:  # a user's hook on a parameter raised, or a peer is gone
            run_hidden(recover)
            raise

    torch_compat.on_backward_end(run)
