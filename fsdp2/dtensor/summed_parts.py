"""Refuses losses in which a collective takes this rank's part of a weight: `all_gather_single(w.to_local(), ...)`,
`all_reduce(penalty_of_own_rows, ...)`, those of `torch.distributed.nn`.

The backward of such a collective sums over the ranks, of which each has a loss of its own; gradients are means over the
ranks. A part that no collective takes is right as it is, see crossings.py. No code of fsdp2 runs in these collectives,
which have many names; but before a backward the graph of the loss tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from ..torch_private.dtensor import may_be_collective
from .graph import all_nodes

# The key under which the metadata of a graph's node has the part of a weight that the node makes.
_PART = "fsdp2_part"


class _Part:
    """This rank's part of the parameter `name`, with a graph."""

    def __init__(self, name: str) -> None:
        self.name = name


# Identity -> each part whose graph is alive. While there is none, no graph is walked over: each backward asks, and a
# WeakValueDictionary would answer in Python.
parts: dict[int, ref[_Part]] = {}


def note_part(node: Any, name: str) -> None:
    """Notes that `node` of a graph makes this rank's part of the parameter `name`."""
    part = _Part(name)
    key = id(part)
    parts[key] = ref(part, lambda _: parts.pop(key, None))
    node.metadata[_PART] = part


def refuse_summed_parts(outputs: Sequence[Any]) -> None:
    """Refuses losses `outputs` whose graphs have collectives of parts. All ranks raise, for their graphs are alike.

    Raises:
        RuntimeError: a collective takes a part.
    """
    roots = [each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None]
    collectives = [node for node in all_nodes(roots) if may_be_collective(node)]
    for behind in all_nodes(each for node in collectives for each, _ in node.next_functions):
        part = behind.metadata.get(_PART)
        if part is not None:
            raise RuntimeError(
                f"{part.name}: a collective in the graph of the loss takes this rank's part of it, which to_local() "
                "has returned. Its backward would sum over the losses of all ranks, or end there. Call full_tensor() "
                "on the parameter, or on what is computed from it, in place of to_local() and the collective, on every "
                "rank; or call the collective in torch.no_grad()."
            )
