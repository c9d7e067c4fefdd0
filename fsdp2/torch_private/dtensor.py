"""Collects the private names of DTensor that the fixes use, each with its reason, and functions built on them.

Names that the engine uses as well are in torch_private/internals.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from . import internals
from .internals import DTensorSpec as DTensorSpec
from .internals import TensorMeta as TensorMeta
from .internals import local_of
from .internals import spec_of as spec_of
from .lookup import load, optional, required
from .once import once
from .rare_internals import is_strided_placement

# (local tensor, its spec, the wanted spec) -> the local tensor of that.
redistribute_local_tensor: Callable[..., Tensor] = required(
    "torch.distributed.tensor._redistribute.redistribute_local_tensor"
)

# True if torch calls `__torch_dispatch__` of a subclass of DTensor for an operation on it only where it has been told.
_HAS_DISPATCH_RULES = torch.__version__ < "2.13"
_rule_holder: Any = (
    required("torch._library.simple_registry.GenericTorchDispatchRuleHolder") if _HAS_DISPATCH_RULES else None
)
# True if argmax and similar operations return indices of the full tensor; else they return those of a rank's shard.
FINDS_GLOBAL_INDICES = torch.__version__ >= "2.13"
# True if `new_empty_strided` of an uneven shard is replicated. Autograd copies gradients to it that others use, too.
REPLICATES_COPIED_GRADIENTS = torch.__version__ < "2.13"


# True if torch takes a negative dim of `select` for another one in backward.
IS_OLD = torch.__version__ < "2.15"

_FOREACH = "steps and norms of many sharded parameters in one operation"
_foreach_types: tuple[list[type], ...] = (
    optional("torch.optim.optimizer._foreach_supported_types", _FOREACH, instead=[]),
    optional("torch.utils._foreach_utils._foreach_supported_types", _FOREACH, instead=[]),
)


def allow_in_foreach(cls: type[DTensor]) -> None:
    """Makes torch's foreach optimizers and norms accept tensors of `cls`: they compare classes with two private
    lists.
    """
    for supported in _foreach_types:
        if cls not in supported:
            supported.append(cls)


# ---- changing DTensors


def set_local_and_spec(tensor: Tensor, local: Tensor, like: DTensor) -> None:
    """Replaces the local tensor of an existing DTensor, which users and optimizers hold, and gives it the spec of
    `like`.
    """
    internals.set_local(tensor, local)
    tensor._spec = like._spec  # type: ignore[attr-defined]


def follow_local(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gives a DTensor, the first of `args`, the shape that `op`, an in-place view, has given its local tensor."""
    correct = load("torch.utils._python_dispatch.return_and_correct_aliasing", "views of sharded parameters in place")
    return correct(op, args, kwargs, args[0])


# ---- placements


def full_tensor_of(tensor: DTensor) -> Tensor:
    """Returns the full tensor, which is the local tensor where each rank has all of it. Every rank must call it.

    Handlers of operations call this instead of `full_tensor()`: torch 2.11 can't run functions of autograd in them.
    """
    spec = spec_of(tensor)
    replicated = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return redistribute_local_tensor(local_of(tensor), spec, replicated)


def is_partial(tensor: DTensor) -> bool:
    """Returns True if the ranks along some mesh axis hold values that are still to be reduced."""
    return any(each.is_partial() for each in spec_of(tensor).placements)


def is_strided(tensor: DTensor) -> bool:
    """Returns True if two mesh axes cut the same dim, the left one last: see torch_private/internals.py."""
    return any(is_strided_placement(each) for each in tensor.placements)


def may_be_empty(tensor: DTensor) -> bool:
    """Returns True if some rank may hold no element of `tensor`. The result is the same on all ranks."""
    ranks = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            ranks[dim] *= tensor.device_mesh.size(axis)
    return any(n > 1 and (n - 1) * -(-rows // n) >= rows for rows, n in zip(tensor.shape, ranks, strict=True))


# ---- graphs

# Names of nodes: of `DTensor.from_local`, and of operations without a gradient, where backward stops.
_FROM_LOCAL, _NO_GRADIENT = "_FromTorchTensorBackward", "torch::autograd::WarnNotImplemented"
# Parts of names of other nodes of torch's functional collectives than those that communicate.
_NO_COLLECTIVES = ("wait_tensor", "wrap_tensor")
_CPP_COLLECTIVES = ("AllGather", "AllReduce", "AllToAll", "ReduceScatter")


def is_from_local(node: Any) -> bool:
    """Returns True if `node` of an autograd graph is that of a DTensor that was made of a plain tensor."""
    return bool(node.name() == _FROM_LOCAL)


def may_be_collective(node: Any) -> bool:
    """Returns True if `node` of an autograd graph is that of a collective of torch: a functional collective, which
    torch 2.11 has in C++, or one of torch.distributed.nn; or of any operation that has no gradient.
    """
    return _may_be_collective(type(node), node.name())  # type: ignore[arg-type]


@lru_cache(4096)
def _may_be_collective(cls: Any, name: str) -> bool:
    if name == _NO_GRADIENT:
        return True
    if "c10d_functional" in name:
        return not any(each in name for each in _NO_COLLECTIVES)
    if "CppNode" in name:
        return any(each in name for each in _CPP_COLLECTIVES)
    function = getattr(cls, "_forward_cls", None)
    return function is not None and function.__module__ == "torch.distributed.nn.functional"


# ---- autograd


def wrap_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has `torch.autograd.backward` and `torch.autograd.grad` call what `wrap` makes of their way into the engine.

    Its arguments are: outputs, gradients of outputs, retain_graph, create_graph, inputs, and others; `accumulate_grad`
    is True for `backward`. The engine is C++, and calls nothing of a tensor class for `inputs`.
    """
    # Both functions call it by this name.
    run = optional(
        "torch.autograd._engine_run_backward", "backward(inputs=) and autograd.grad of sharded parameters", instead=None
    )
    if run is not None:
        torch.autograd._engine_run_backward = wrap(run)


# ---- operations


@once
def dispatch_to(classes: Iterable[type[DTensor]]) -> None:
    """Makes torch call `__torch_dispatch__` of `classes`, subclasses of DTensor, for operations on them. It does so by
    itself from 2.13 on.

    torch 2.11 and 2.12 compute with a subclass as with DTensor, unless `torch.library.register_torch_dispatch` has got
    a rule for the operation and the exact class. They ask for that rule each time. Here one rule serves all operations:
    to register each of the 3,700 would take 0.2 s.
    """
    if not _HAS_DISPATCH_RULES:
        return
    rules: dict[type, Any] = {cls: attrgetter("__torch_dispatch__.__func__")(cls) for cls in classes}

    def find(self: Any, cls: type) -> Any:
        return self._data.get(cls) or rules.get(cls)

    _rule_holder.find = find


def overloads(names: Iterable[str]) -> list[Any]:
    """Returns all overloads of the ATen operations of these names."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


def name_of(op: Any) -> str:
    """Returns the name of an ATen operation without its namespace."""
    name: str = op._schema.name
    return name.removeprefix("aten::")


def argument_names(op: Any) -> list[str]:
    """Returns the names of all arguments of `op`, in order."""
    return [each.name for each in op._schema.arguments]


def returns_views(op: Any) -> bool:
    """Returns True if `op` returns views of its first argument."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that `op` writes to, with the items of those that are lists."""
    if not op._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return found
