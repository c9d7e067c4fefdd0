"""Makes random operations on DTensors, and for tensors like them, give each rank its shard of a plain tensor's values.

Torch gives the shards of all ranks the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..ranks.rank_facts import broadcast_over, moves_data
from ..torch_private.dtensor import full_tensor_of
from ..torch_private.internals import local_of
from .making import cut
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
_IN_PLACE = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
_LIKE = (
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
# Operations that depend on the values of their tensors, too.
_FROM_VALUES = (
    _aten.bernoulli.default,
    _aten.multinomial.default,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.normal.Tensor_Tensor,
    _aten.poisson.default,
)


def randomize_like_plain_tensors() -> None:
    """Makes random operations on a ShardedDTensor on a mesh of CPUs, and for tensors like it, give each rank its shard
    of the values that a plain tensor would get from the same seed, for any number of ranks. Replicated values come from
    the generator of the first of their ranks, so they are equal whatever the ranks' seeds are.

    `rrelu` raises: each rank would use its own slopes.
    """
    handle_operations(_IN_PLACE, _randomize_in_place)
    handle_operations(_LIKE, partial(_randomize, _empty_like))
    handle_operations(_FROM_VALUES, partial(_randomize, full_tensor_of))
    handle_operations([_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default], _refuse_rrelu)


def _randomize_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if _is_left_to_torch(target):
        return call_unhandled(op, args, kwargs)
    local_of(target).copy_(local_of(_random(_empty_like, op, args, kwargs)))
    return target


def _randomize(plain: Callable[[DTensor], Tensor], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(each for each in args if isinstance(each, DTensor))
    return call_unhandled(op, args, kwargs) if _is_left_to_torch(first) else _random(plain, op, args, kwargs)


def _is_left_to_torch(target: DTensor) -> bool:
    return local_of(target).device.type != "cpu"


def _random(plain: Callable[[DTensor], Tensor], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Returns this rank's shard of the result of `op` for plain tensors: `plain(each)` replaces each DTensor."""
    first = next(each for each in args if isinstance(each, DTensor))
    mesh, generator = first.device_mesh, kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    plain_args = [plain(each) if isinstance(each, DTensor) else each for each in args]
    values = op(*plain_args, **kwargs)
    placements = first.placements if values.shape == first.shape else [Replicate()] * mesh.ndim
    shared = _state_among_replicas(before, mesh, placements)
    if not torch.equal(shared, before):
        after = generator.get_state()
        generator.set_state(shared)
        values = op(*plain_args, **kwargs)
        generator.set_state(after)
    return cut(values, mesh, placements)


def _state_among_replicas(own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Returns the generator state of the first of the ranks that hold replicas. All of these ranks must call it."""
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate() and mesh.size(axis) > 1]
    groups = [mesh.get_group(axis) for axis in axes]
    shared = own.clone()
    if moves_data(groups, own.device):
        broadcast_over(shared, groups)
    return shared


def _empty_like(tensor: DTensor) -> Tensor:
    strides = tensor.stride()  # of a view: its order decides which element gets which number
    if 0 in strides:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")


def _refuse_rrelu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise NotImplementedError(
        f"rrelu of a DTensor of global shape {tuple(args[0].shape)}: each rank would use its own random slopes. "
        "Use full_tensor(), on every rank, after the same torch.manual_seed."
    )
