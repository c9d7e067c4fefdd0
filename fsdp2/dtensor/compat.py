"""Private names of DTensor that fsdp2 uses, each with its reason, and what is made of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import Parameter
from torch.optim.optimizer import _foreach_supported_types as _optimizers_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _norms_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from ..core import compat
from ..core.compat import local_if_any, local_of, new_dtensor, no_torch_function  # noqa: F401
from ..core.events import strategies
from .write_notices import notices

# Whether an operation on a subclass of DTensor calls its `__torch_dispatch__`.
DISPATCHES_TO_SUBCLASSES = torch.__version__ >= "2.13"


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor of the class of sharded parameters, without a copy, a check or an autograd node."""
    return new_dtensor(strategies().tensor_class, local, spec)


def of_chosen_class(tensor: DTensor) -> DTensor:
    """Returns `tensor`; if it is torch's DTensor, it gets the class of sharded parameters."""
    if type(tensor) is DTensor:
        tensor.__class__ = strategies().tensor_class
    return tensor


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns this rank's part of a tensor that all ranks have, without communication."""
    return compat.cut(whole, mesh, placements, strategies().tensor_class)


# Those that sharded parameters are on, in torch 2.11 and 2.12: operations are found by that.
meshes_in_use: WeakSet[DeviceMesh] = WeakSet()


# How it is distributed, its shape and dtype.
spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")
def is_masked(tensor: DTensor) -> bool:
    """Whether ranks have parts of rows that an embedding has looked up: torch counts those who will add them."""
    return any(hasattr(each, "mask_buffer") for each in spec_of(tensor).placements)


def has_numbers_for_all(tensor: DTensor) -> bool:
    """Whether each rank has a number for each element: it, or a part of it."""
    placements = spec_of(tensor).placements
    return all(each.is_replicate() or each.is_partial() for each in placements) and not is_masked(tensor)


def dtensor_like(like: DTensor, local: Tensor) -> DTensor:
    """`local`, of any shape and strides, distributed as `like`, of which each rank has numbers for all."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return dtensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta))


def set_local(tensor: Tensor, local: Tensor, like: DTensor | None = None) -> None:
    """Put `local` behind an existing DTensor: users and optimizers hold that object. It has equal shape and dtype, or
    those of `like`, which says how it is distributed.
    """
    tensor._local_tensor = local  # type: ignore[attr-defined]
    if like is not None:
        tensor._spec = like._spec  # type: ignore[attr-defined]


def follow_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a DTensor, the first of `args`, the shape that `op`, an in-place view, has given its local tensor."""
    return return_and_correct_aliasing(op, args, kwargs, args[0])


def whole_of(tensor: DTensor) -> Tensor:
    """What `full_tensor()` returns, of the same memory where each rank has all: for handlers of operations, in which
    torch 2.11 can't run functions of autograd's. Every rank must call it.
    """
    spec = spec_of(tensor)
    replicated = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return redistribute_local_tensor(local_of(tensor), spec, replicated)


def without_parts(tensor: DTensor, axis: int | None = None) -> DTensor:
    """It, with what ranks hold parts of a number of brought together: replicated; along `axis`, or all. Every rank must
    call it.
    """
    spec, local = spec_of(tensor), local_of(tensor)
    placements = tuple(
        Replicate() if each.is_partial() and axis in (None, i) else each for i, each in enumerate(spec.placements)
    )
    if placements == spec.placements:
        return tensor
    joined = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    summable = local.int() if local.dtype == torch.bool else local  # gloo's sum of two truths is a byte of 2
    return dtensor(redistribute_local_tensor(summable, spec, joined).to(local.dtype), joined)


def parts_of(tensor: Any) -> set[str]:
    """Of what each rank holds a part, in place of elements, if it is a DTensor: "sum", "avg", "max", ..., or "norm"."""
    placements: Sequence[Any] = spec_of(tensor).placements if isinstance(tensor, DTensor) else ()
    return {_part_of(each) for each in placements if each.is_partial()}


def _part_of(placement: Any) -> str:
    return "norm" if hasattr(placement, "norm_type") else str(placement.reduce_op)


def set_parts(tensor: DTensor, value: Tensor | float) -> None:
    """Write to each rank's part, in its memory, so that together they come to `value`, which no norm below 0 can."""
    local = local_of(tensor)
    local.copy_(value) if isinstance(value, Tensor) else local.fill_(value)
    for axis, placement in enumerate(tensor.placements):
        neutral = _NEUTRAL.get(_part_of(placement)) if placement.is_partial() else None
        if neutral is not None and tensor.device_mesh.get_local_rank(axis):
            local.fill_(neutral)


# What changes nothing. The largest of equal parts, or their mean, is each.
_NEUTRAL = {"sum": 0, "norm": 0, "product": 1}


def is_strided(tensor: DTensor) -> bool:
    """Whether it has such a placement as `strided_shard` returns."""
    return any(isinstance(each, _StridedShard) for each in tensor.placements)


def explain_plans(explain: Callable[[Exception, Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """From now on `explain(error, op, args, kwargs)` may change the text of an error about an operation that DTensor
    can't do. Plans of operations that it can do are kept in C++: none of this runs for them.
    """
    dispatcher: Any = DTensor._op_dispatcher
    plainly = dispatcher._propagate_op_sharding_dispatch_slow_path

    def plan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **options: Any) -> Any:
        try:
            return plainly(op, args, kwargs, *rest, **options)
        except (NotImplementedError, RuntimeError) as error:
            explain(error, op, args, kwargs)
            raise

    dispatcher._propagate_op_sharding_dispatch_slow_path = plan


def refuse_plain_target(op: Any, target: Any) -> None:
    """
    Raises:
        RuntimeError: `target` is plain, and `op` would write to it what is distributed. Torch has an assertion for it.
    """
    if not isinstance(target, DTensor):
        name = op._schema.name.removeprefix("aten::")
        resizing = " To resize a parameter (an embedding, for new tokens), do so before fully_shard."
        raise RuntimeError(
            f"{name} of a plain tensor of shape {tuple(target.shape)} with a DTensor: "
            "this rank may hold a part of the latter only. Write full_tensor() behind that, on every rank (`total += "
            f"p.grad.norm().full_tensor()`).{resizing if name == 'copy_' else ''}"
        )


# Whether argmax and its kin count rows of the whole tensor, not of a rank's part.
FINDS_PLACES = torch.__version__ >= "2.13"
# Whether a number is divided by each rank's part of a sum.
DIVIDES_BY_PARTS = torch.__version__ < "2.13"


def views_and_writes() -> list[Any]:
    """The operations that return views, and those that write to an argument's memory."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    ops = [getattr(each, name) for each in packets if hasattr(each, "overloads") for name in each.overloads()]
    return [op for op in ops if (op._schema.is_mutable or is_view(op)) and op is not torch.ops.aten.detach_.default]


def argument_names(op: Any) -> list[str]:
    return [each.name for each in op._schema.arguments]


def is_view(op: Any) -> bool:
    """Whether `op` returns views of its first argument."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `op` writes to, and what is in those that are lists."""
    if not op._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return found


def returned_of(op: Any, written: Sequence[Tensor]) -> Any:
    """What `op`, which writes to `written`, returns of them: itself, each of several, or nothing."""
    count = len(op._schema.returns)
    return tuple(written) if count > 1 else written[0] if count else None
