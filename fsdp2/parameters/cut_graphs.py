"""Refuses losses made of `.grad` after backward(create_graph=True): reducing gradients has cut their graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..torch_private.internals import local_of, new_dtensor

if TYPE_CHECKING:
    from ..engine.parameter import FSDPParam

SomeTensor = TypeVar("SomeTensor", bound=Tensor)


class _Node(Protocol):
    """A node of `_WithoutGraph`, which keeps the attributes that its forward sets."""

    parameter: str
    alive: _Alive


class _WithoutGraph(torch.autograd.Function):
    """Makes a gradient whose graph the reduction has cut off. Its node says so, to backward of a loss made of it."""

    @staticmethod
    def forward(ctx: _Node, anchor: Tensor, name: str, make: Callable[[], Tensor]) -> Tensor:
        ctx.parameter, ctx.alive = name, _Alive()
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        refuse_loss_of_gradient(ctx)


class _Alive:
    """Marks a node as alive: it is in `without_graph` until the node is freed."""

    def __init__(self) -> None:
        without_graph[id(self)] = weakref.ref(self, partial(_forget, id(self)))


# Identity -> each _Alive of a node of `_WithoutGraph`.
without_graph: dict[int, weakref.ref[_Alive]] = {}


def _forget(key: int, _: object) -> None:
    without_graph.pop(key, None)


def refuse_graph(param: FSDPParam) -> None:
    """Replaces `.grad` of a sharded parameter by one over the same memory that raises if a loss is made of it."""
    gradient = param.sharded.grad
    assert gradient is not None, "it has just been delivered"
    make = partial(new_dtensor, param.tensor_class, local_of(gradient), param.gradient_spec)
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        param.sharded.grad = _WithoutGraph.apply(anchor, param.name, make)


def refuse_loss_of_gradient(node: object) -> None:
    """Refuses to go on behind `node` of the graph of a loss, if it made the gradient of a sharded parameter.

    Raises:
        RuntimeError: it did.
    """
    if _made_gradient(node):
        name = getattr(node, "parameter", "a sharded parameter")
        raise RuntimeError(
            f"{name}: a loss is made of its .grad, which backward(create_graph=True) has computed; gradients "
            "of sharded parameters have no graph, because they are reduced. Call the model and torch.autograd.grad("
            "loss, list(full.values()), create_graph=True) inside `with fsdp2.full_params(model) as full:` instead, "
            "with the same batch on every rank."
        )


def without_node(gradient: SomeTensor) -> SomeTensor:
    """Returns a gradient without the node that refuses to be part of a loss, if it has that node. It is a view."""
    return gradient.detach() if _made_gradient(gradient.grad_fn) else gradient  # type: ignore[return-value]


def _made_gradient(node: object) -> bool:
    return getattr(node, "_forward_cls", None) is _WithoutGraph
