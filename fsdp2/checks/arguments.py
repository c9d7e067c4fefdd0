"""What fully_shard refuses: every check comes before anything is changed, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from . import dtensor_compat, group_compat, torch_compat
from ..ext.subclasses import count_pre_arguments, refuse_part
from ..core.mesh import DataMesh, Distribution, described_data_mesh, distribute
from ..module import public_methods
from ..core.parameter import SHARDED_AS, Slot, fqn, is_extended, lacks_of_extension
from ..core.policy import MixedPrecisionPolicy, OffloadPolicy
from ..core.state import FSDPState, state_of
from ..ext.compat import Memory


def _can_be_called(module: nn.Module) -> bool:
    """Whether the class or the instance has a forward, or the user has written methods, which can be registered in
    place of one: torch's containers have none.
    """
    cls = type(module)
    if cls.forward is not nn.Module.forward or "forward" in vars(module):
        return True
    own = [base for base in cls.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")]
    return any(
        callable(value) and (name[0] != "_" or name == "__call__") for base in own for name, value in vars(base).items()
    )


def check_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("module: expected a module or a list of at least one, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"module: expected an nn.Module or a list of them, got {type(each).__name__}")
        if isinstance(each, torch.jit.ScriptModule):
            raise TypeError(f"module: expected a Python nn.Module, got the TorchScript module {type(each).__name__}")
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
    if len(modules) == 1:
        return modules
    if len(set(modules)) < len(modules):
        raise ValueError("module: expected distinct modules, got the same one twice in the list")
    inside = {inner for outer in modules for inner in outer.modules() if inner is not outer}
    return [each for each in modules if each not in inside]


def check_arguments(
    reshard_after_forward: Any, shard_placement_fn: Any, offload_policy: Any, ignored_params: Any, conditional: Any
) -> None:
    """Types only; values are checked where their meaning is known."""
    if not isinstance(conditional, bool):
        raise TypeError(f"conditional: expected a bool, got {conditional!r}")
    if not isinstance(reshard_after_forward, (int, type(None))):
        raise TypeError(f"reshard_after_forward: expected a bool, an int or None, got {reshard_after_forward!r}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    is_policy = isinstance(offload_policy, OffloadPolicy) or type(offload_policy).__name__ == "OffloadPolicy"
    if isinstance(offload_policy, type) or not (is_policy or hasattr(offload_policy, "pin_memory")):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if not isinstance(ignored_params, (set, frozenset, type(None))):
        raise TypeError(f"ignored_params: expected a set of parameters or None, got {type(ignored_params).__name__}")
    for each in ignored_params or ():
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got {type(each).__name__}")


def check_mesh(mesh: Any, dims: Any) -> None:
    """Accept torch's DataParallelMeshDims, too."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if dims is None:
        return
    if isinstance(dims, type) or not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
        raise TypeError(f"dp_mesh_dims: expected a DataParallelMeshDims or None, got {dims!r}")
    if mesh is None:
        raise ValueError("dp_mesh_dims names axes of `mesh`: pass the mesh, too")


def check_groups(meshes: Iterable[DataMesh]) -> None:
    """A group that ranks join and leave may hold replicas, not shards: these would have to be cut anew."""
    for mesh in meshes:
        group = mesh.shard_group
        if group is None or not group_compat.size_may_change(group):
            continue
        sizes = group_compat.size_at_first(group), group.size()
        if sizes != (mesh.size, mesh.size):
            raise ValueError(
                f"mesh: expected a process group of {mesh.size} ranks that stay, for the axis that shards, got a "
                f"{type(group).__name__} of {sizes[0]} when it was made and {sizes[1]} now. Give a group that ranks "
                "join and leave to the axis that replicates."
            )


def check_reshard(choice: bool | int | None, mesh: DataMesh) -> None:
    if choice is None or isinstance(choice, bool):
        return
    if choice >= 1 and mesh.num_ranks == 1:
        return  # nothing is gathered: the program is one for more ranks
    if choice > 1 and mesh.size == 1:
        raise ValueError(
            f"reshard_after_forward={choice}: expected a bool or None on {mesh.mesh}, which only replicates: each rank "
            "holds whole parameters, of which it can keep no part."
        )
    if choice < 1 or mesh.size % choice != 0:
        raise ValueError(
            f"reshard_after_forward={choice}: expected a divisor of {mesh.size}, the number of ranks that share the "
            "parameters: each of so many ranks keeps a part after forward."
        )


def check_conditional(
    roots: list[nn.Module], inside: list[FSDPState], conditional: bool, choice: bool | int | None, mesh: DataMesh
) -> None:
    """Of `roots`, and of what is sharded `inside` them."""
    meeting = [state for state in inside if conditional or state.gate is not None]
    if not conditional and not meeting:
        return
    names = {module: name for root in roots for name, module in root.named_modules()}
    keeping = [names[state.modules[0]] for state in inside if state.keeps_part]
    if not isinstance(choice, (bool, type(None))):
        keeping.append("this module")
    if conditional and keeping:
        raise NotImplementedError(
            f"conditional=True with an int for reshard_after_forward, of {', '.join(keeping)}, is not supported: ranks "
            "that leave it out have no part to keep. Pass a bool, or None."
        )
    for state in meeting:
        check_one_mesh(names[state.modules[0]], state.group.mesh, mesh)


def check_one_mesh(name: str, mesh: DataMesh, outer: DataMesh) -> None:
    """Ranks meet over the mesh of the outermost module."""
    if mesh.mesh != outer.mesh:
        raise NotImplementedError(
            f"{name} is conditional, or inside a conditional module: expected it on the mesh of the module around it, "
            f"{outer.mesh}, got {mesh.mesh}"
        )


def check_policy(policy: Any) -> MixedPrecisionPolicy:
    """Accept any object with the fields of a MixedPrecisionPolicy: torch's own, say."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in names):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {policy!r}")
    # Younger than the others: torch has it since 2.15.
    override = getattr(policy, "param_dtype_override_fn", None)
    wire = getattr(policy, "wire_dtype", None)  # ours
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in names), param_dtype_override_fn=override, wire_dtype=wire
    )


def check_wire(name: str, policy: MixedPrecisionPolicy, mesh: DataMesh) -> None:
    if policy.wire_dtype is not None and not mesh.shard_axes:
        raise ValueError(
            f"{name}: expected no wire_dtype in mp_policy on a mesh that only replicates, got {policy.wire_dtype}. "
            "Gradients are summed between replicas in the reduce dtype."
        )


def check_parameter(name: str, slots: list[Slot]) -> None:
    parameter = slots[0].get()
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{name} is uninitialised. Run the lazy module once before fully_shard.")
    if parameter.layout is not torch.strided:
        raise NotImplementedError(
            f"{_describe(name, parameter)} has the sparse layout {parameter.layout}; expected a dense tensor."
        )
    if type(parameter) is not nn.Parameter:
        data = dtensor_compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
        if type(data) is not Tensor or type(parameter) is not DTensor:
            _check_subclass(name, parameter, data)
    if parameter.is_complex():
        raise NotImplementedError(
            f"{_describe(name, parameter)} complex parameters are not supported yet. Store torch.view_as_real of it."
        )
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise NotImplementedError(
            f"{_describe(name, parameter)} a grad_dtype of its own ({parameter.grad_dtype}) is not supported: "
            "gradients have their parameter's dtype. Store it in that one, and compute in a policy's param_dtype."
        )
    owner = getattr(parameter, SHARDED_AS, None)
    if owner is not None:
        raise ValueError(
            f"{name} is the same parameter as {owner}, which another fully_shard call has sharded. Tied parameters "
            "must be in one group: pass the modules that hold them as one list, fully_shard([a, b])."
        )
    if parameter.grad is not None:
        raise ValueError(
            f"{name} has a gradient, of which nobody knows whether each rank has all of it, or a part. Call step() or "
            "zero_grad() before fully_shard."
        )
    for slot in slots:
        if isinstance(slot.module, (nn.Embedding, nn.EmbeddingBag)) and slot.module.sparse:
            raise NotImplementedError(f"{name}: sparse gradients are not supported. Use sparse=False.")
        if _attribute(slot.module, "max_norm") is not None:
            raise NotImplementedError(
                f"{name}: max_norm writes to the weight in forward; that would be lost. Leave it out."
            )


def _attribute(module: nn.Module, name: str) -> Any:
    """`module.name`, or None: nn.Module takes 5 us to find that it has none, for each parameter of a model."""
    return getattr(module, name, None) if name in vars(module) or _may_have(type(module), name) else None  # type: ignore[arg-type]


@lru_cache
def _may_have(cls: type[nn.Module], name: str) -> bool:
    """Whether its instances may have an attribute `name` besides what is in their dict."""
    return cls.__getattr__ is not nn.Module.__getattr__ or hasattr(cls, name)


def _describe(name: str, parameter: nn.Parameter) -> str:
    return f"{name}, of shape {tuple(parameter.shape)} and dtype {parameter.dtype}:"


def _check_subclass(name: str, parameter: nn.Parameter, data: Tensor) -> None:
    missing = lacks_of_extension(data)
    if missing:
        kind = type(parameter if type(data) is Tensor else data).__name__
        raise NotImplementedError(
            f"{_describe(name, parameter)} is a {kind}, which does not say how it is gathered. Give the class "
            f"{' and '.join(missing)}, or put the parameter into ignored_params."
        )


def check_frequencies(name: str, slots: list[Slot], mesh: DataMesh) -> None:
    if mesh.num_ranks > 1 and any(_attribute(slot.module, "scale_grad_by_freq") for slot in slots):
        raise NotImplementedError(
            f"{name}: scale_grad_by_freq would count how often indices occur in each rank's rows, not in the whole "
            "batch. Leave it out."
        )


def check_extension(name: str, parameter: nn.Parameter, choice: bool | int | None, mesh: DataMesh) -> None:
    """An extension's parameters are given up as a whole, and gathered among all ranks."""
    data = dtensor_compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
    if not is_extended(data):
        return
    count_pre_arguments(name, data)
    if choice is not None and not isinstance(choice, bool) and choice not in (1, mesh.size):
        refuse_part(name)


def choose_placement(
    name: str, parameter: nn.Parameter, choose: Callable[[nn.Parameter], Any] | None, shared: DataMesh
) -> tuple[int, DataMesh | None]:
    """Along which dim to shard, and over which mesh if not over `shared`, as the user's function says."""
    if choose is None:
        return 0, None
    result, mesh = choose(parameter), None
    if hasattr(result, "mesh_info"):
        try:
            mesh = described_data_mesh(result.mesh_info)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        result = result.placement
    elif result is not None and not shared.shard_axes:
        raise ValueError(
            f"{name}: expected shard_placement_fn to return None on a mesh that only replicates, got {result!r}"
        )
    return _choose_dim(name, parameter, result), mesh


def _choose_dim(name: str, parameter: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise ValueError(f"{name}: expected shard_placement_fn to return a Shard or None, got {placement!r}")
    dim, ndim = placement.dim, parameter.dim()
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name}: expected a dim of shape {tuple(parameter.shape)}, got {placement!r}")
    return dim % ndim


def check_device_type(name: str, mesh: DataMesh, shared: DataMesh) -> None:
    if mesh.mesh.device_type != shared.mesh.device_type:
        raise ValueError(
            f"{name}: expected a mesh of {shared.mesh.device_type} like that of the others, got {mesh.mesh}"
        )


def choose_distribution(name: str, parameter: nn.Parameter, mesh: DataMesh, dim: int) -> Distribution:
    try:
        return distribute(parameter, mesh, dim)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def choose_dtype(name: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Whether the parameter is an exception from the policy's `param_dtype`."""
    try:
        return policy.keeps_dtype(parameter)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_memory(
    slots: dict[str, list[Slot]], managed: dict[nn.Module, str], roots: Sequence[nn.Module], inside: Iterable[FSDPState]
) -> dict[str, Memory | None]:
    """Two parameters over the same memory, not being one object, would be two after sharding; a buffer over a
    parameter's would keep what it is now. Return where each parameter is.

    `managed`: the modules of the call, with their FQNs; `inside`: what is sharded already below `roots`.
    """
    memory_of = {name: torch_compat.memory_of(slot.get()) for name, (slot, *_) in slots.items()}
    sharded = ((param.memory, param.slots[0]) for state in inside for param in state.group.params)
    here = ((memory_of[name], slot) for name, (slot, *_) in slots.items())
    owners: dict[Memory, Slot] = {}
    for memory, slot in (*sharded, *here):
        if memory is not None and (other := owners.setdefault(memory, slot)) is not slot:
            one, another = (_fqn_below(roots, each) for each in (slot, other))
            raise ValueError(
                f"{one} and {another} share memory. Tie them as one nn.Parameter, in one group, or copy one of them."
            )
    for module, prefix in managed.items():
        for name, buffer in module._buffers.items():
            memory = torch_compat.memory_of(buffer) if buffer is not None else None
            if memory is not None and memory in owners:
                raise ValueError(
                    f"{fqn(prefix, name)}, a buffer, and {_fqn_below(roots, owners[memory])} share memory, and would "
                    "not after sharding: the buffer would keep what the parameter is now. Copy it, or compute it in "
                    "forward."
                )
    return memory_of


def _fqn_below(roots: Sequence[nn.Module], slot: Slot) -> str:
    prefix = next(name for root in roots for name, module in root.named_modules() if module is slot.module)
    return fqn(prefix, slot.name)


def check_names(root: nn.Module) -> None:
    """What the class gains must not hide what the module has."""
    places: list[Any] = [root._modules, root._parameters, root._buffers, vars(root), *map(vars, type(root).__mro__)]
    clash = sorted(set().union(*(place.keys() & public_methods() for place in places)))
    if clash:
        raise TypeError(
            f"{type(root).__name__} has {', '.join(clash)} of its own, which are methods of FSDPModule. Rename them."
        )
