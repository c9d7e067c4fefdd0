"""Averages gradients through `weight.full_tensor()` of a sharded parameter over the ranks.

Torch assumes that all ranks compute the same result from a full tensor. Each rank then keeps its shard of its own
gradient, though their losses differ. In code that torch.compile has traced, torch still does so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.comm import Purpose
from ..core.user_code import hides_modes
from ..ext.owners import Owned, sharded_owner
from ..ext.rank_facts import all_reduce_over
from .compat import meshes_in_use
from .differing_numbers import refuse_differing_numbers
from .graph import leaf_nodes
from .sharded_dtensor import as_sharded, replace_attribute

# The key under which the metadata of a graph's node says that the node has a hook of this file.
_HAS_HOOK = "fsdp2_distributes_gradients"


def average_in_full_tensor() -> None:
    """Makes `full_tensor` of a ShardedDTensor average its gradients over the ranks that share the parameter. The
    DTensor may be a sharded parameter, or computed from sharded parameters only.
    """
    replace_attribute("full_tensor", _averaging)


def _averaging(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def full_tensor(self: DTensor, **options: Any) -> Tensor:
        full = original(self, **options)
        if full.requires_grad and options.get("grad_placements") is None:
            owner = owner_of(self)
            if owner is not None:
                refuse_differing_numbers(self, owner)
                _distribute_gradients_of(self)
                full.register_hook(_Average(owner))
        return full

    return full_tensor


def owner_of(tensor: DTensor) -> Owned | None:
    """Returns the owner of the sharded parameter that `tensor` is, or of one of those that it is computed from.

    It returns None for a tensor that depends on anything else, or on parameters of several meshes. (The gradients of
    unsharded parameters, which are DTensors under tensor parallelism, are reduced anyway.)
    """
    if tensor.device_mesh not in meshes_in_use:
        return None  # an activation, for example, whose graph may be large
    if tensor.grad_fn is None:
        return sharded_owner(tensor)
    nodes = list(leaf_nodes([tensor.grad_fn]))
    first, *others = [sharded_owner(node.variable) for node in nodes] or [None]
    if first is None or any(each is None or each.group.mesh != first.group.mesh for each in others):
        return None
    return first


def _distribute_gradients_of(tensor: DTensor) -> None:
    """Gives each leaf of the graph behind `tensor` a hook that distributes its gradients, unless it has one: the node
    of a leaf lives as long as any graph that ends there, through which other full tensors may have come.
    """
    for node in leaf_nodes([tensor.grad_fn]):
        if not node.metadata.get(_HAS_HOOK):
            node.metadata[_HAS_HOOK] = True
            node.register_prehook(_DistributedLike(node.variable))


class _DistributedLike:
    """Is a hook on the leaf of a graph: redistributes gradients like the sharded parameter `leaf`.

    An operation may return Partial gradients, for example, or an expanded scalar, of which torch 2.11 makes a
    replicated copy. A gradient is None where no element has one.
    """

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __call__(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        placements = self._leaf.placements
        return tuple(
            each if each is None else as_sharded(each).redistribute(placements=placements).contiguous()
            for each in gradients
        )


class _Average:
    """Is a hook on a full tensor: averages its gradient over the ranks that share `owner`, all of which must call it.

    Raises:
        RuntimeError: with `create_graph`.
    """

    def __init__(self, owner: Owned) -> None:
        self._owner = owner

    @hides_modes
    def __call__(self, gradient: Tensor) -> Tensor:
        group, name = self._owner.group, self._owner.param.name
        if gradient.requires_grad:
            raise RuntimeError(
                f"{name}: the gradient of its full_tensor() has no graph, which create_graph=True needs. Use `with "
                "fsdp2.full_params(...)` in place of full_tensor()."
            )
        group.root.enter_backward()  # removes the placeholders of unsynchronized gradients from `.grad`
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        purpose = Purpose(f"the gradient of {name}.full_tensor()")
        all_reduce_over(total, group.mesh.axis_groups, largest=False, purpose=purpose)
        shards, replicas = group.gradients.reduction.divisors()
        return total.div_(shards * replicas)
