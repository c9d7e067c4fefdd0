"""`weight.full_tensor()` of a sharded parameter in a loss: has it get the gradient of the ranks' mean loss.

Torch assumes that all ranks compute the same of a full tensor. Each then keeps its shard of its own gradient, though
their losses differ. In code that torch.compile has traced it still does.
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
    """Has gradients through `full_tensor` of a ShardedDTensor averaged over the ranks that share the parameter, whether
    it is a sharded parameter or computed from such only.
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
    """Returns the owner of a sharded parameter, or of one of those, all on one mesh, that `tensor` is computed from.

    It returns None for tensors that depend on anything else. (Unsharded parameters, which are DTensors under tensor
    parallelism, have their gradients reduced anyway.)
    """
    if tensor.device_mesh not in meshes_in_use:
        return None  # an activation, say, behind which there may be a large graph
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
    """Hook on the end of a graph: gives gradients the placements of the sharded parameter `leaf`, and memory.

    An operation may leave them Partial, for example; or as one value for all elements, of which torch 2.11 makes a
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
    """Hook on a full tensor: averages its gradient over the ranks that share `owner`, all of which must call it.

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
                f"{name}: the gradient of its full_tensor() has no graph, with create_graph=True. Use `with "
                "fsdp2.full_params(...)` there, in place of full_tensor()."
            )
        group.root.enter_backward()  # `.grad` may hold what stands for unsynchronized gradients
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        purpose = Purpose(f"the gradient of {name}.full_tensor()")
        all_reduce_over(total, group.mesh.axis_groups, largest=False, purpose=purpose)
        shards, replicas = group.gradients.reduction.divisors()
        return total.div_(shards * replicas)
