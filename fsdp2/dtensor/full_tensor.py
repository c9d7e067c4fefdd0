"""`weight.full_tensor()` of a sharded parameter in a loss: the gradient is that of the ranks' mean loss, as everywhere.

Torch takes what ranks compute of a whole tensor for the same on all of them. Each then keeps its part of its own
gradient, though their losses differ. In code that torch.compile has traced it still does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.autograd import leaf_nodes
from ..checks.headers import Label
from ..core.user_code import hides_modes
from ..ext.owners import Owned, all_states, sharded_owner
from .sharded_dtensor import as_sharded, replace_attribute
from ..checks.small_collectives import all_reduce_over
from .own_numbers import refuse_own_numbers


def average_in_full_tensor() -> None:
    """Gradients through `full_tensor` of a ShardedDTensor are averaged over the ranks that share the parameter, whether
    it is one that fully_shard has sharded, or is computed of such only.
    """
    replace_attribute("full_tensor", _averaging)


def _averaging(plainly: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plainly)
    def full_tensor(self: DTensor, **options: Any) -> Tensor:
        whole = plainly(self, **options)
        if whole.requires_grad and options.get("grad_placements") is None:
            owner = owner_of(self)
            if owner is not None:
                refuse_own_numbers(self, owner)
                _distribute_gradients_of(self)
                whole.register_hook(_Average(owner))
        return whole

    return full_tensor


def owner_of(tensor: DTensor) -> Owned | None:
    """Whose sharded parameter it is, or one of those of one mesh that it is computed of; None: neither, or not only of
    such. (Full ones, which tensor parallelism has made DTensors, have their gradients reduced anyway.)
    """
    if not any(tensor.device_mesh in state.group.adopted.meshes for state in all_states()):
        return None  # an activation, say, behind which there may be a large graph
    if tensor.grad_fn is None:
        return sharded_owner(tensor)
    nodes = list(leaf_nodes([tensor.grad_fn]))
    first, *others = [sharded_owner(node.variable) for node in nodes] or [None]
    if first is None or any(each is None or each.state.group.mesh != first.state.group.mesh for each in others):
        return None
    return first


def _distribute_gradients_of(tensor: DTensor) -> None:
    for node in leaf_nodes([tensor.grad_fn]):
        node.register_prehook(_DistributedLike(node.variable))


class _DistributedLike:
    """Hook on the end of a graph: an operation may leave the gradient of a sharded parameter unsummed, say; or as one
    number in all places, of which torch 2.11 makes a replicated copy. It is None where no element has one.
    """

    def __init__(self, leaf: Any) -> None:
        self._placements = leaf.placements

    def __call__(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            each if each is None else as_sharded(each).redistribute(placements=self._placements).contiguous()
            for each in gradients
        )


class _Average:
    """Hook on a whole tensor: its gradient, averaged over the ranks that share `owner`, all of which must call it.

    Raises:
        RuntimeError: with `create_graph`.
    """

    def __init__(self, owner: Owned) -> None:
        self._owner = owner

    @hides_modes
    def __call__(self, gradient: Tensor) -> Tensor:
        group, name = self._owner.state.group, self._owner.param.name
        if gradient.requires_grad:
            raise RuntimeError(
                f"{name}: the gradient of its full_tensor() has no graph, with create_graph=True. Use `with "
                "fsdp2.full_params(...)` there, in place of full_tensor()."
            )
        self._owner.state.context.enter_backward()  # in `.grad` a stand-in may be, for gradients that wait
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        label = Label(f"the gradient of {name}.full_tensor()")
        all_reduce_over(total, group.mesh.axis_groups, largest=False, label=label)
        shards, replicas = group.gradients.reduction.divisors()
        return total.div_(shards * replicas)
