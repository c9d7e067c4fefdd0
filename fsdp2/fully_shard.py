"""fully_shard(): check the arguments, collect the parameters, shard them, attach hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from . import hooks, torch_compat
from .comm import Comm, make_comm, subgroup
from .context import FSDPState
from .mesh import DataMesh, Distribution, data_mesh, default_mesh, distribute
from .module import public_methods, sharded_class
from .param import FSDPParam, Slot
from .param_group import FSDPParamGroup
from .policy import MixedPrecisionPolicy, OffloadPolicy
from .reduce import Reduction

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")

# Left on an original parameter: if it turns up again, registered elsewhere, it was tied across groups.
_SHARDED_AS = "_fsdp2_sharded_as"


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Modules:
    """Shard the parameters of `module` over the ranks of `mesh`, in place, and return `module`.

    Every parameter below `module` that no inner `fully_shard` call has taken becomes an `nn.Parameter(DTensor)`,
    sharded along dim 0; together they form one group, which is gathered before forward, freed after it, gathered again
    for backward, and whose gradients are averaged over the ranks. Call it bottom-up: on blocks first, then on the
    model. Every rank of the mesh must call it, on the same modules in the same order.

    Args:
        module: a module, or a list of modules that share one group. Modified in place; its class becomes a subclass of
            its own class and `FSDPModule`. FQNs stay as they are.
        mesh: a DeviceMesh of one axis, or of two, of which the first replicates and the second shards (HSDP): each
            replica gathers and reduces by itself, then gradients are averaged between replicas. None: all ranks, on the
            accelerator if there is one, else on the CPU.
        reshard_after_forward: free the full parameters after forward (less memory, one more gather in backward). None:
            True, except for what backward needs first: the root (the outermost sharded module), and the group that
            was last in the forward before. An int k, a divisor of the number of ranks: each rank keeps 1/k of them
            (in compute dtypes), and backward gathers among k neighbouring ranks only, on one machine say.
        shard_placement_fn: called once with each parameter, returns the Shard(dim) to use, or None for Shard(0). Dims
            need not divide evenly. Parameters sharded along dims other than 0 are copied once more per gather.
        mp_policy: dtypes of compute and reduction.
        offload_policy: a CPUOffloadPolicy has sharded parameters and gradients, hence the optimizer, live on the CPU,
            and copies the shards to the mesh's device for each gather. On a mesh of CPUs they are there already.
        ignored_params: parameters to leave as they are: not sharded, moved or reduced.

    Declared, and refused with NotImplementedError until it exists: `dp_mesh_dims`.

    Raises:
        TypeError: an argument of the wrong type; a module with a name of its own that FSDPModule's methods have.
        ValueError: a container without `forward`; a module given twice or sharded already; a parameter that is a
            scalar, uninitialised, tied to one of another group, or over the same memory as another.
        NotImplementedError: something declared above; a parameter that is a tensor subclass, complex, or
            not contiguous; embeddings with sparse gradients or `max_norm`.

    After any of these errors nothing has been changed.
    """
    roots = _check_modules(module)
    _refuse_undeclared(reshard_after_forward, shard_placement_fn, offload_policy, ignored_params, dp_mesh_dims)
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn: expected a function or None, got {shard_placement_fn!r}")
    policy = _check_policy(mp_policy)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    managed = dict(_managed_modules(roots))
    slots = _collect_slots(managed, ignored_params or frozenset())
    for name, parameter_slots in slots.items():
        _check_parameter(name, parameter_slots)
    _check_memory(slots)
    dims = {name: _choose_dim(name, each[0].get(), shard_placement_fn) for name, each in slots.items()}
    for root in roots:
        _check_names(root)
    shards = data_mesh(mesh if mesh is not None else default_mesh())
    _check_reshard(reshard_after_forward, shards)
    kinds = {name: _distribute(name, each[0].get(), shards, dims[name]) for name, each in slots.items()}
    classes = [sharded_class(type(root)) for root in roots]  # type: ignore[arg-type]

    _move_buffers(managed, shards.device)
    group = _make_group(roots, slots, kinds, shards, policy, offload_policy)
    hooks.install(FSDPState(roots, group, policy, *_reshard_choice(reshard_after_forward, shards)))
    for root, cls in zip(roots, classes, strict=True):
        root.__class__ = cls
    return module


# ---- checks: all come before anything is changed


def _check_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("module: expected a module or a list of at least one, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"module: expected an nn.Module or a list of them, got {type(each).__name__}")
        if isinstance(each, torch.jit.ScriptModule):
            raise TypeError(f"module: expected a Python nn.Module, got the TorchScript module {type(each).__name__}")
        if hooks.state_of(each) is not None:
            raise ValueError(f"{type(each).__name__}: fully_shard has been applied to this module already")
        if type(each).forward is nn.Module.forward:
            raise ValueError(
                f"{type(each).__name__} has no forward, so its parameters could never be gathered in time. Apply "
                "fully_shard to the modules inside it, or pass them as a list to share one group."
            )
    if len(set(modules)) < len(modules):
        raise ValueError("module: expected distinct modules, got the same one twice in the list")
    inside = {inner for outer in modules for inner in outer.modules() if inner is not outer}
    return [each for each in modules if each not in inside]


def _refuse_undeclared(
    reshard_after_forward: Any, shard_placement_fn: Any, offload_policy: Any, ignored_params: Any, dp_mesh_dims: Any
) -> None:
    if not isinstance(reshard_after_forward, (int, type(None))):
        raise TypeError(f"reshard_after_forward: expected a bool, an int or None, got {reshard_after_forward!r}")
    is_policy = isinstance(offload_policy, OffloadPolicy) or type(offload_policy).__name__ == "OffloadPolicy"
    if isinstance(offload_policy, type) or not (is_policy or hasattr(offload_policy, "pin_memory")):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {offload_policy!r}")
    if not isinstance(ignored_params, (set, frozenset, type(None))):
        raise TypeError(f"ignored_params: expected a set of parameters or None, got {type(ignored_params).__name__}")
    for each in ignored_params or ():
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"ignored_params: expected parameters, got {type(each).__name__}")
    for name, given in (("dp_mesh_dims", dp_mesh_dims is not None),):
        if given:
            raise NotImplementedError(f"{name} is not supported yet. Leave it out.")


def _check_reshard(choice: bool | int | None, mesh: DataMesh) -> None:
    if choice is None or isinstance(choice, bool):
        return
    if choice < 1 or mesh.size % choice != 0:
        raise ValueError(
            f"reshard_after_forward={choice}: expected a divisor of {mesh.size}, the number of ranks that share the "
            "parameters: each of so many ranks keeps a part after forward."
        )


def _check_policy(policy: Any) -> MixedPrecisionPolicy:
    """Accept any object with the fields of a MixedPrecisionPolicy: torch's own, say."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in names):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {policy!r}")
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in names})


def _check_parameter(name: str, slots: list[Slot]) -> None:
    parameter = slots[0].get()
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{name} is uninitialised. Run the lazy module once before fully_shard.")
    what = f"{name}, of shape {tuple(parameter.shape)} and dtype {parameter.dtype}:"
    if parameter.layout is not torch.strided:
        raise NotImplementedError(f"{what} has the sparse layout {parameter.layout}; expected a dense tensor.")
    data = torch_compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
    if type(parameter) not in (nn.Parameter, DTensor) or type(data) is not Tensor:
        raise NotImplementedError(f"{what} is a {type(parameter).__name__}. Tensor subclasses are not supported yet.")
    if parameter.dim() == 0:
        raise ValueError(f"{what} a scalar can't be sharded along dim 0. Make it a tensor of shape (1,).")
    if parameter.is_complex():
        raise NotImplementedError(f"{what} complex parameters are not supported yet. Store torch.view_as_real of it.")
    if not data.is_contiguous():
        raise NotImplementedError(f"{what} has strides {parameter.stride()}; expected a contiguous tensor.")
    owner = getattr(parameter, _SHARDED_AS, None)
    if owner is not None:
        raise ValueError(
            f"{name} is the same parameter as {owner}, which another fully_shard call has sharded. Tied parameters "
            "must be in one group: pass the modules that hold them as one list, fully_shard([a, b])."
        )
    if any(isinstance(slot.module, (nn.Embedding, nn.EmbeddingBag)) and slot.module.sparse for slot in slots):
        raise NotImplementedError(f"{what} has sparse gradients, which are not supported. Use sparse=False.")
    if any(getattr(slot.module, "max_norm", None) is not None for slot in slots):
        raise NotImplementedError(f"{what} max_norm writes to the weight in forward; that would be lost. Leave it out.")


def _choose_dim(name: str, parameter: nn.Parameter, choose: Callable[[nn.Parameter], Any] | None) -> int:
    """Along which dim to shard, as the user's function says."""
    placement = None if choose is None else choose(parameter)
    if placement is None:
        return 0
    if hasattr(placement, "mesh_info"):
        raise NotImplementedError(f"{name}: shard_placement_fn chose a mesh of its own, which is not supported yet")
    if type(placement) is not Shard:
        raise ValueError(f"{name}: expected shard_placement_fn to return a Shard or None, got {placement!r}")
    dim, ndim = placement.dim, parameter.dim()
    if not -ndim <= dim < ndim:
        raise ValueError(f"{name}: expected a dim of shape {tuple(parameter.shape)}, got {placement!r}")
    return dim % ndim


def _distribute(name: str, parameter: nn.Parameter, mesh: DataMesh, dim: int) -> Distribution:
    try:
        return distribute(parameter, mesh, dim)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_memory(slots: dict[str, list[Slot]]) -> None:
    """Two parameters over the same memory, not being one object, would be two after sharding."""
    owners: dict[int, str] = {}
    for name, (slot, *_) in slots.items():
        parameter = slot.get()
        data = torch_compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter
        if data.numel() and data.device.type != "meta":
            other = owners.setdefault(data.data_ptr(), name)
            if other != name:
                raise ValueError(f"{name} and {other} share memory. Tie them as one nn.Parameter, or copy one of them.")


def _check_names(root: nn.Module) -> None:
    """What the class gains must not hide what the module has."""
    own = {*root._modules, *root._parameters, *root._buffers, *vars(root)}
    clash = sorted(name for name in public_methods() if name in own or hasattr(type(root), name))
    if clash:
        raise TypeError(
            f"{type(root).__name__} has {', '.join(clash)} of its own, which are methods of FSDPModule. Rename them."
        )


# ---- what belongs to the call


def _managed_modules(roots: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The modules at and below `roots` that no inner call manages, with their FQNs (in a list: after its index)."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        if module in seen or hooks.state_of(module) is not None:
            return
        seen.add(module)
        yield module, name
        for child_name, child in module.named_children():
            yield from walk(child, _fqn(name, child_name))

    for i, root in enumerate(roots):
        yield from walk(root, "" if len(roots) == 1 else f"[{i}]")


def _collect_slots(
    managed: dict[nn.Module, str], ignored: set[nn.Parameter] | frozenset[nn.Parameter]
) -> dict[str, list[Slot]]:
    """FQN -> the slots of one distinct parameter. Tied parameters go under the first of their names."""
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                slots.setdefault(parameter, []).append(Slot(module, name))
    return {_fqn(managed[first.module], first.name): [first, *others] for first, *others in slots.values()}


def _fqn(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _move_buffers(managed: Iterable[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def _reshard_choice(choice: bool | int | None, mesh: DataMesh) -> tuple[bool | None, Comm | None]:
    """As a bool, and the ranks among which a part stays after forward, if that is neither all ranks nor this one."""
    if choice is None or isinstance(choice, bool):
        return choice, None
    if choice in (1, mesh.size) or mesh.shard_group is None:
        return choice != 1, None
    return True, make_comm(subgroup(mesh.shard_group, choice), mesh.device)


def _make_group(
    roots: list[nn.Module],
    slots: dict[str, list[Slot]],
    kinds: dict[str, Distribution],
    mesh: DataMesh,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
) -> FSDPParamGroup:
    # A policy of torch's own is accepted, too.
    offloads = hasattr(offload, "pin_memory") and mesh.device != torch.device("cpu")
    rest = torch.device("cpu") if offloads else mesh.device
    originals = [parameter_slots[0].get() for parameter_slots in slots.values()]
    params = [FSDPParam(parameter_slots, name, mesh, kinds[name], rest) for name, parameter_slots in slots.items()]
    for original, name in zip(originals, slots, strict=True):
        setattr(original, _SHARDED_AS, f"{type(roots[0]).__name__}'s {name}")
    comms = [make_comm(group, mesh.device) for group in (mesh.shard_group, mesh.replicate_group)]
    reduction = Reduction(comms[0], comms[1] if comms[1].size > 1 else None, rest=rest if offloads else None)
    pin = offloads and bool(getattr(offload, "pin_memory", False)) and torch.accelerator.is_available()
    return FSDPParamGroup(roots, params, mesh, reduction, policy, pin)
