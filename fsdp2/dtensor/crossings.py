"""Averages gradients over the ranks where a plain tensor is made of sharded parameters: `w.full_tensor()`,
`w.redistribute(placements=[Replicate()]).to_local()`, `to_local()` of a replicated parameter.

Each rank computes a loss of its own from the plain tensor; the gradient of a parameter is that of the mean of the
losses. Torch assumes that all ranks compute the same: each rank then keeps its shard of its own gradient. In code that
torch.compile has traced, torch still does so.

A mesh axis on which the DTensor is sharded, or Partial, gives each rank its own part, of which it computes an addend:
its gradient is what that rank computes, as in torch. So `sum(p.to_local().square().sum())`, added to each rank's loss,
is the penalty of the whole model. `summed_parts.py` refuses collectives that take such parts.
`grad_placements=` says what gradients are: with them nothing is averaged.

A plain number of this rank, as in `loss + penalty` and `loss.detach() * p.norm()`, makes a plain tensor of a DTensor,
too: torch assumes that all ranks have the same number. Where no code of fsdp2 runs, as in
`torch.mul(number, p.norm())`, the graph tells the numbers on which gradients depend, and those that differ between
ranks are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import unserializable_hook

from ..calls.user_code import hides_modes
from ..engine.comm import CommLabel
from ..engine.owners import Owned, sharded_owner
from ..ranks.rank_facts import all_reduce_over
from ..torch_private.dtensor import is_from_local
from ..torch_private.internals import local_of
from ..torch_private.rare_internals import saved_by
from .graph import dtensor_nodes, is_dtensor_leaf
from .sharded_dtensor import ShardedDTensor, as_sharded, replace_attribute
from .summed_parts import note_part

_OPERATORS = ("add", "sub", "mul", "truediv")
# The key under which the metadata of a graph's node says that the node has a hook of this file.
_HAS_HOOK = "fsdp2_distributes_gradients"


def average_in_plain_tensors() -> None:
    """Makes `full_tensor` and `to_local` of a ShardedDTensor average gradients over the ranks that have the same. The
    DTensor may be a sharded parameter, or computed from sharded parameters.

    `+ - * /` of a plain tensor without dims and such a DTensor return a plain tensor, made by `full_tensor`, if the
    plain one has a graph or differs between ranks, and grad is enabled.
    """
    replace_attribute("full_tensor", _crossing_in_full_tensor)
    replace_attribute("to_local", _crossing_in_to_local)
    for name in _OPERATORS:
        function, direct, reflected = getattr(operator, name), f"__{name}__", f"__r{name}__"
        replace_attribute(direct, partial(_crossing_in_operator, function))
        replace_attribute(reflected, partial(_crossing_in_reflected, function))


def _crossing_in_full_tensor(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def full_tensor(self: DTensor, **options: Any) -> Tensor:
        full = original(self, **options)
        if full.requires_grad and not torch.compiler.is_compiling():
            _cross(self, full, (Replicate(),) * self.device_mesh.ndim, options.get("grad_placements"))
        return full

    return full_tensor


def _crossing_in_to_local(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def to_local(self: DTensor, **options: Any) -> Tensor:
        local = original(self, **options)
        if local.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _cross(self, local, self.placements, options.get("grad_placements"))
        return local

    return to_local


def _crossing_in_operator(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def operate(self: DTensor, other: Any) -> Any:
        full = _full_if_needed(self, other) if type(other) is Tensor else None
        return original(self, other) if full is None else function(full, other)

    return operate


def _crossing_in_reflected(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operator of the right operand, which Python calls first because its class is a subclass."""

    @wraps(original)
    def operate(self: DTensor, other: Any) -> Any:
        if type(other) is not Tensor:
            return original(self, other)
        full = _full_if_needed(self, other)
        return NotImplemented if full is None else function(other, full)

    return operate


def _full_if_needed(tensor: DTensor, number: Tensor) -> Tensor | None:
    """Returns the full tensor, or None if it is not needed, on all ranks alike. All of them must call it."""
    if number.dim() or not (tensor.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    owner = owner_of(tensor)
    if owner is None or not (number.requires_grad or _differ([number], owner)):
        return None
    return tensor.full_tensor()


def _cross(tensor: DTensor, plain: Tensor, placements: Sequence[Any], grad_placements: Any) -> None:
    """Corrects the gradients of `plain`, which has just been made of `tensor` as if it had `placements`.

    Raises:
        NotImplementedError: different ranks share some of the parameters from which it is computed.
    """
    owners = _owners_of(tensor)
    if not owners:
        return
    owner = owners[0]
    _distribute_gradients_behind(plain.grad_fn)
    if grad_placements is not None:
        return
    for each in owners[1:]:
        if _data_axes(each) != _data_axes(owner):
            raise NotImplementedError(
                f"a plain tensor made of a DTensor that is computed from {owner.param.name} and {each.param.name}, "
                "which different ranks share. Call full_tensor() on each of them first, on every rank."
            )
    mesh = owner.group.mesh
    axes = [axis for axis in mesh.shard_axes + mesh.replicate_axes if mesh.mesh.size(axis) > 1]
    alike = sorted(axis for axis in axes if placements[axis].is_replicate())
    if alike:
        refuse_differing_numbers(tensor, owner)
        plain.register_hook(unserializable_hook(_Average(owner, alike)))  # files hold values only
    if len(alike) < len(axes):
        note_part(plain.grad_fn, owner.param.name)


def owner_of(tensor: DTensor) -> Owned | None:
    """Returns the owner of the sharded parameter that `tensor` is, or of one of those that it is computed from.

    It returns None for a tensor that depends on no sharded parameter, on some that different ranks share, or on plain
    tensors with a graph, which `DTensor.from_local` has brought in. (The gradients of unsharded parameters, which are
    DTensors under tensor parallelism, are reduced anyway.)
    """
    owners = _owners_of(tensor)
    return owners[0] if owners and all(_data_axes(each) == _data_axes(owners[0]) for each in owners[1:]) else None


def _owners_of(tensor: DTensor) -> list[Owned]:
    if not isinstance(tensor, ShardedDTensor):
        return []  # an activation, for example, whose graph may be large
    if tensor.grad_fn is None:
        found = [sharded_owner(tensor)]
    else:
        nodes = [*dtensor_nodes([tensor.grad_fn])]
        if any(map(is_from_local, nodes)):
            return []
        found = [sharded_owner(node.variable) for node in nodes if is_dtensor_leaf(node)]
    return [each for each in found if each is not None]


def _data_axes(owner: Owned) -> tuple[DeviceMesh, set[int]]:
    mesh = owner.group.mesh
    return mesh.mesh, {*mesh.shard_axes, *mesh.replicate_axes}


def _divisor(owner: Owned, axes: Iterable[int]) -> float:
    """Returns by what sums of gradients over these mesh axes are divided. A factor that a user has set replaces the
    number of all ranks; it counts for the axes that shard, or replicate where none does.
    """
    mesh, reduction = owner.group.mesh, owner.group.gradients.reduction
    if reduction.divisor is not None:
        counted = {axis for axis in mesh.shard_axes if mesh.mesh.size(axis) > 1} or {*mesh.replicate_axes}
        return reduction.divisor if counted.issubset(axes) else 1.0
    product = 1
    for axis in axes:
        product *= mesh.mesh.size(axis)
    return product


def _distribute_gradients_behind(node: Any) -> None:
    """Gives each leaf of the graph behind `node` a hook that distributes its gradients, unless it has one: the node of
    a leaf lives as long as any graph that ends there, through which other plain tensors may have come.
    """
    for leaf in dtensor_nodes([node]):
        if is_dtensor_leaf(leaf) and not leaf.metadata.get(_HAS_HOOK):
            leaf.metadata[_HAS_HOOK] = True
            leaf.register_prehook(_DistributedLike(leaf.variable))


class _DistributedLike:
    """A hook on the leaf of a graph: redistributes gradients like the sharded parameter `leaf`.

    An operation may return Partial gradients, for example, or an expanded scalar, of which torch 2.11 makes a
    replicated copy. A gradient is None where no element has one.
    """

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf

    def __call__(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        owner = sharded_owner(self._leaf)
        if owner is not None and owner.group.gradients.unsynchronized:
            owner.group.root.enter_backward()  # removes the placeholders of unsynchronized gradients from `.grad`
        return tuple(each if each is None else self._distributed(as_sharded(each)) for each in gradients)

    def _distributed(self, gradient: Any) -> Any:
        placements = self._leaf.placements
        if gradient.placements == placements and gradient.is_contiguous() and local_of(gradient).is_contiguous():
            return gradient
        return gradient.redistribute(placements=placements).contiguous()


class _Average:
    """A hook on a plain tensor: averages its gradient over the ranks along mesh axes on which the ranks that share
    `owner` have the same tensor. All of these must call it.

    Raises:
        RuntimeError: with `create_graph`.
    """

    def __init__(self, owner: Owned, axes: Sequence[int]) -> None:
        self._owner, self._axes = owner, axes

    @hides_modes
    def __call__(self, gradient: Tensor) -> Tensor:
        group, name = self._owner.group, self._owner.param.name
        if gradient.requires_grad:
            raise RuntimeError(
                f"{name}: the gradient of a plain tensor that full_tensor() or to_local() has made of it has no graph, "
                "which create_graph=True needs. Use `with fsdp2.full_params(...)` in place of full_tensor()."
            )
        group.root.enter_backward()  # removes the placeholders of unsynchronized gradients from `.grad`
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        comm_label = CommLabel(f"the gradient of {name}.full_tensor()")
        groups = [group.mesh.mesh.get_group(axis) for axis in self._axes]
        all_reduce_over(total, groups, largest=False, comm_label=comm_label)
        return total.div_(_divisor(self._owner, self._axes))


# ---- plain numbers that differ between ranks


def refuse_differing_numbers(tensor: DTensor, owner: Owned) -> None:
    """Refuses `tensor`, which is computed from `owner`, if its gradients depend on numbers that differ between ranks.
    All ranks that share `owner` must call it.

    Raises:
        RuntimeError: a number on which the gradient depends differs between them, on all of them.
    """
    saved = [each for node in dtensor_nodes([tensor.grad_fn]) for each in saved_by(node)]
    numbers = [each for each in saved if type(each) is Tensor and each.numel() == 1]
    if numbers and _differ(numbers, owner):
        raise RuntimeError(
            f"{owner.param.name}: a plain number that differs between ranks is combined with a DTensor that is "
            "computed from this parameter; torch would use each rank's number as if it were that of all. Call "
            "full_tensor() on the DTensor, on every rank (`torch.mul(number, penalty.full_tensor())`)."
        )


def _differ(numbers: Sequence[Tensor], owner: Owned) -> bool:
    """Returns True if the ranks that share `owner` have different numbers. All of them must call it."""
    mesh = owner.group.mesh
    own = torch.stack([each.detach().reshape(()).to(mesh.device, torch.float64) for each in numbers]).nan_to_num()
    extremes = torch.stack([own, -own])
    all_reduce_over(extremes, mesh.axis_groups, largest=True)
    return bool(extremes.sum(0).any())
