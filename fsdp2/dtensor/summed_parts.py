"""Averages gradients of parts of weights that ranks exchange by collectives that have a gradient:
`all_gather_single(w.to_local(), ...)`, `all_reduce(penalty_of_own_rows, ...)`, those of `torch.distributed.nn`.

The backward of such a collective sums over the ranks, of which each has a loss of its own: this file divides the sum by
their number. A part that no collective has passed is left as it is, see crossings.py. No code of fsdp2 runs in these
collectives, which have many names; but backward can look at the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .compat import COLLECTIVE, NO_GRADIENT, TO_LOCAL, kind_of
from .graph import next_nodes

# The key under which the metadata of a graph's node has the part of a weight that the node makes.
_PART = "fsdp2_part"
# Identity -> each part whose graph is alive. While there is none, no graph is walked over.
parts: dict[int, weakref.ref[_Part]] = {}


class _Part:
    """Is this rank's part of a weight, with a graph.

    `name`: of the parameter; `divisor`: of sums of its gradients over the ranks that have the other parts.
    """

    def __init__(self, name: str, divisor: float) -> None:
        self.name, self.divisor = name, divisor


def note_part(node: Any, name: str, divisor: float) -> None:
    """Notes that `node` of a graph makes this rank's part of the parameter `name`."""
    part = _Part(name, divisor)
    key = id(part)
    parts[key] = weakref.ref(part, lambda _: parts.pop(key, None))
    node.metadata[_PART] = part


def average_summed_parts(outputs: Sequence[Any]) -> list[Any]:
    """Gives nodes of the graphs of `outputs`, through which backward is about to go, hooks that divide sums over ranks.
    Returns the handles of the hooks, which are to be removed behind backward.

    Raises:
        RuntimeError: a part's gradient can't be divided, or is lost. All ranks raise, for their graphs are alike.
    """
    roots = [each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None]
    collectives, direct = _find_collectives(roots)
    found = [each for each in map(_look_behind, collectives) if each.parts]
    for each in found:
        if each.is_lost:
            raise RuntimeError(
                f"{each.names()}: a node in the graph of the loss has no gradient. An operation without one, a "
                "collective of torch.distributed for example, got this rank's part, which to_local() had returned. "
                "Call full_tensor() on the parameter instead, on every rank; or call the operation in torch.no_grad()."
            )
    of_parts_only = [each for each in found if not each.has_others and len(each.divisors()) == 1]
    mixed = {node: part for each in found if each not in of_parts_only for node, part in each.parts.items()}
    divided = direct.union(*(each.parts for each in of_parts_only))
    for node, part in mixed.items():
        if node in divided:
            raise RuntimeError(
                f"{part.name}: the same to_local() is used by itself and, together with other tensors, in a "
                "collective that has a gradient: which of its gradients are sums over ranks can't be told apart. Call "
                "to_local() once for each use; or full_tensor(), on every rank, in place of the collective."
            )
    hooks = {each.node: each.divisors().pop() for each in of_parts_only}
    hooks.update((node, part.divisor) for node, part in mixed.items())
    return [node.register_prehook(_Divide(divisor)) for node, divisor in hooks.items() if divisor != 1]


@dataclass
class _Behind:
    """Says what lies behind `node`, a collective.

    `parts`: the nodes of parts of weights. `has_others`: there are other leaves, too. `is_lost`: it has no gradient.
    """

    node: Any
    is_lost: bool
    parts: dict[Any, _Part] = field(default_factory=dict)
    has_others: bool = False

    def divisors(self) -> set[float]:
        return {part.divisor for part in self.parts.values()}

    def names(self) -> str:
        return ", ".join(dict.fromkeys(part.name for part in self.parts.values()))


def _find_collectives(roots: Iterable[Any]) -> tuple[list[Any], set[Any]]:
    """Returns the collectives before which backward reaches no other, and the nodes of parts that it reaches directly.

    A collective behind another sums what is to be divided once.
    """
    collectives, direct, waiting, seen = [], set(), [*roots], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = kind_of(node)
        if kind in (COLLECTIVE, NO_GRADIENT):
            collectives.append(node)
            continue
        if kind == TO_LOCAL and _part_of(node) is not None:
            direct.add(node)
        waiting.extend(next_nodes(node))
    return collectives, direct


def _look_behind(collective: Any) -> _Behind:
    behind, waiting, seen = _Behind(collective, kind_of(collective) == NO_GRADIENT), [*next_nodes(collective)], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        part = _part_of(node)
        if part is not None:
            behind.parts[node] = part
            continue  # it is divided there, or before
        behind.has_others = behind.has_others or hasattr(node, "variable")
        waiting.extend(next_nodes(node))
    return behind


def _part_of(node: Any) -> _Part | None:
    return node.metadata.get(_PART) if kind_of(node) == TO_LOCAL else None


class _Divide:
    """Is a hook on a node: divides the gradients of its outputs."""

    def __init__(self, divisor: float) -> None:
        self._divisor = divisor

    def __call__(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each if each is None else each / self._divisor for each in gradients)
