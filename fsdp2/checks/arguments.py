"""Checks the types of the arguments of fully_shard and replicate before anything else: errors say what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..collectives.meshes import described_data_mesh
from ..devices.offload import check_offload
from ..engine.policy import MixedPrecisionPolicy
from ..engine.state import state_of

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")


def check_arguments(
    module: Any, reshard: Any, placement_fn: Any, mp_policy: Any, offload_policy: Any, ignored: Any
) -> tuple[Any, ...]:
    """Returns the last five arguments, which `fully_shard` or `replicate` is given, with policies of torch's own as
    ours; then the modules among `ignored`, of which the parameters take their place.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a module that can't be sharded.
    """
    _check_modules(module)
    _check_types(reshard, placement_fn, offload_policy)
    mp_policy = check_policy(mp_policy)
    ignored, ignored_modules = _expand(ignored)
    placements = None if placement_fn is None else Placements(placement_fn)
    return reshard, placements, mp_policy, offload_policy, ignored, ignored_modules


def _expand(ignored: Any) -> tuple[set[nn.Parameter], set[nn.Module]]:
    """Returns the parameters that `ignored_params` names, by themselves or by modules; and all modules in the latter.

    Raises:
        TypeError: something else is in it.
        ValueError: it is an iterator that yields nothing.
    """
    given = [ignored] if isinstance(ignored, nn.Module) else () if ignored is None else ignored
    if isinstance(given, (Tensor, str)) or not isinstance(given, Iterable):
        raise TypeError(
            "ignored_params: expected a set, or another iterable, of parameters and modules, or None, got "
            f"{type(given).__name__}"
        )
    parameters: set[nn.Parameter] = set()
    modules: set[nn.Module] = set()
    items = [*given]
    if isinstance(given, Iterator) and not items:
        raise ValueError(
            f"ignored_params: expected parameters and modules, got a {type(given).__name__} that yields none: another "
            "call has used it up. Make a list of it, for all calls."
        )
    for each in items:
        if isinstance(each, nn.Module):
            parameters.update(each.parameters())
            modules.update(each.modules())
        elif isinstance(each, nn.Parameter):
            parameters.add(each)
        else:
            raise TypeError(f"ignored_params: expected parameters and modules, got {type(each).__name__}")
    return parameters, modules


def _check_modules(module: Any) -> None:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("module: expected a module or a list of at least one, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"module: expected an nn.Module or a list of them, got {type(each).__name__}"
                + (", a function of TorchScript" if isinstance(each, torch.jit.ScriptFunction) else "")
            )
        if isinstance(each, torch.jit.ScriptModule):
            raise TypeError(
                f"module: expected a Python nn.Module, got the TorchScript module {type(each).__name__}. Shard the "
                "Python module that it was made of, and use torch.compile to make it fast."
            )
        if state_of(each) is not None:
            raise ValueError(f"{type(each).__name__}: fully_shard has been applied to this module already")
        if not _can_be_called(each):
            has_modules = next(each.children(), None) is not None
            where = (
                "the modules inside it, or pass them as a list to share one group"
                if has_modules
                else ("the module that holds it, whose forward reads them")
            )
            raise ValueError(
                f"{type(each).__name__} has no forward, so its parameters could never be gathered in time. Apply "
                f"fully_shard to {where}."
            )
    if len(set(modules)) < len(modules):
        raise ValueError("module: expected distinct modules, got the same one twice in the list")


def _can_be_called(module: nn.Module) -> bool:
    """Returns True if the class or the instance has a forward, or the user has written methods, which can be registered
    in place of one: torch's containers have none.
    """
    cls = type(module)
    if cls.forward is not nn.Module.forward or "forward" in vars(module):
        return True
    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")]
    return any(
        callable(value) and (name[0] != "_" or name == "__call__") for base in own for name, value in vars(base).items()
    )


def check_mesh(mesh: Any, dims: Any) -> None:
    """Checks `mesh` and `dp_mesh_dims`. It accepts torch's DataParallelMeshDims, too."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if dims is None:
        return
    if isinstance(dims, type) or not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
        raise TypeError(f"dp_mesh_dims: expected a DataParallelMeshDims or None, got {dims!r}")
    if mesh is None:
        raise ValueError("dp_mesh_dims names axes of `mesh`: pass the mesh, too")


def _check_types(reshard: Any, placement_fn: Any, offload_policy: Any) -> None:
    """Checks the types of the other arguments; values are checked where their meaning is known."""
    if not isinstance(reshard, (int, type(None))):
        raise TypeError(f"reshard_after_forward: expected a bool, an int or None, got {reshard!r}")
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {placement_fn!r}")
    check_offload(offload_policy)


def check_policy(policy: Any) -> MixedPrecisionPolicy:
    """Returns any object with the fields of a MixedPrecisionPolicy, such as torch's own, as a MixedPrecisionPolicy."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in names):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {policy!r}")
    # Younger than the others: torch has the first since 2.15, and releases after it have `grad_dtype`.
    younger, own = ("param_dtype_override_fn", "grad_dtype"), ("compression", "buffer_dtype")
    usual = MixedPrecisionPolicy()
    others: dict[str, Any] = {name: getattr(policy, name, getattr(usual, name)) for name in (*younger, *own)}
    return MixedPrecisionPolicy(*(getattr(policy, name) for name in names), **others)


class Placements:
    """Wraps a user's `shard_placement_fn`; notes for which parameters it has returned a placement without a mesh."""

    def __init__(self, choose: Callable[[nn.Parameter], Any]) -> None:
        self._choose = choose
        self.chosen: list[tuple[nn.Parameter, Any]] = []

    def __call__(self, parameter: nn.Parameter) -> Any:
        placement = self._choose(parameter)
        if hasattr(placement, "mesh_info"):
            return placement.placement, described_data_mesh(placement.mesh_info)
        if placement is not None:
            self.chosen.append((parameter, placement))
        return placement
