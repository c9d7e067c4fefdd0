"""Refuses calls of fully_shard that the engine can't do, before anything is changed; errors say what to do."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.offload import is_policy, storage_place
from ..engine.build import ParameterPlan, Plan
from ..engine.codec import Compression
from ..engine.mesh import DataMesh, Distribution
from ..engine.parameter import FSDPParam, fqn, grad_choice
from ..engine.policy import COPIED, MixedPrecisionPolicy
from ..engine.state import names_below
from ..features.conditional import find_conditional
from ..features.vocab_parallel import refuse_beside_conditional, refuse_tied
from ..module import public_methods
from ..parameters.subclasses import (
    count_pre_arguments,
    gathers_itself,
    missing_methods,
    no_methods,
    refuse_secondary_shards,
    rows_of_subclass,
)
from ..parameters.ties import has_changed, original_of
from ..torch_private.checks import is_replicated_by_ddp, size_at_first
from ..torch_private.internals import PLAIN, holds_values, local_if_any, size_may_change
from ..torch_private.rare_internals import memory_of
from .arguments import Placements
from .shared_memory import check_memory


def check_plan(plan: Plan) -> None:
    """Refuses what a call is about to do, if the engine can't do it: see `fsdp2.fully_shard` for the errors.

    Each call comes here, so nothing is called for a plain parameter that need not be.
    """
    everything = {**plan.parameters, **plan.tied}
    _check_wrappers(plan)
    originals = {name: each.slots[0].get() for name, each in everything.items()}
    parameters = {name: originals[name] for name in plan.parameters}
    with_options = {module for module in plan.managed if not vars(module).keys().isdisjoint(_OPTIONS)}
    for name, planned in everything.items():
        _check_parameter(name, originals[name])
        for slot in planned.slots if with_options else ():
            if slot.module in with_options:
                _check_options(planned, slot.module)
    for planned in plan.tied.values():
        _check_tied(planned, plan)
    check_memory(plan, parameters)
    for root in plan.roots:
        _check_names(root)
    given, shared = plan.given, plan.mesh
    reshard, conditional = given.reshard_after_forward, given.conditional
    _check_reshard(reshard, shared)
    _check_conditional(plan, conditional)
    _check_placements(plan)
    meshes, policy = {id(shared): shared}, given.mp_policy
    compresses = policy.compression != Compression()
    for name, each in plan.parameters.items():
        if each.mesh is not shared:
            meshes[id(each.mesh)] = each.mesh
            _check_device_type(name, each.mesh, shared)
            _check_reshard(reshard, each.mesh)
        if compresses:
            _check_compression(name, policy, each.mesh, parameters[name])
        if type(parameters[name]) is not nn.Parameter:
            _check_extension(each, reshard, policy)
    for mesh in meshes.values():
        _check_ranks_stay(mesh)
    for each in plan.parameters.values() if conditional else ():
        _check_one_mesh(each.name, each.mesh, shared)


# Attributes of embeddings, and of modules like them, which some values of are refused.
_OPTIONS = ("sparse", "max_norm", "scale_grad_by_freq")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.layout is not torch.strided:
        raise NotImplementedError(
            f"{_describe(name, parameter)} has the sparse layout {parameter.layout}; expected a dense tensor."
        )
    if type(parameter) is not nn.Parameter:
        _check_subclass(name, parameter)
    if parameter.is_complex():
        raise NotImplementedError(
            f"{_describe(name, parameter)} complex parameters are not supported yet. Store torch.view_as_real of it."
        )
    if parameter.grad is not None:
        raise ValueError(
            f"{name} has a gradient, of which nobody knows whether each rank has all of it, or a part. Call step() or "
            "zero_grad() before fully_shard."
        )


def _check_tied(planned: ParameterPlan, plan: Plan) -> None:
    """Refuses a parameter that an earlier call has sharded in another way, or that was changed since."""
    original = planned.slots[0].get()
    mark, owner = original_of(original), planned.owner
    assert mark is not None, "it was sharded"
    there = mark.name if owner is None else _name_of_owner(owner.param, plan, mark.name)
    which = f"{planned.name} is the same parameter as {there}, which another fully_shard call has sharded"
    if owner is None:
        raise ValueError(f"{which}, and which is in no model any more. Build the model again.")
    refuse_tied(planned.name, there, owner.group)
    if has_changed(original, mark, owner.param):
        raise ValueError(
            f"{which}; since then {planned.name} was written to, moved or frozen, and that one was not. Change a "
            "tied parameter before fully_shard, or after the last call of it."
        )
    if owner.group.phase is COPIED or owner.group.num_running:
        raise RuntimeError(f"{which}, and which is in use. Leave the forward, or the block of full_params, first.")
    given = plan.given
    group, param = owner
    found = _ways(planned.mesh, planned.distribution, planned.keeps_dtype, given.mp_policy, original.dtype)
    if is_policy(given.offload_policy):  # a budget leaves it where the earlier call has put it
        found["offload_policy"] = storage_place(plan.offload, planned.mesh.device)
    before = _ways(param.mesh, param.distribution, param.keeps_dtype, group.settings.policy, original.dtype) | {
        "offload_policy": (param.storage_device, group.settings.pin_memory)
    }
    for argument, value in found.items():
        if value != before[argument]:
            raise ValueError(
                f"{which} with another {argument}: {before[argument]}, here {value}. Pass the same to both calls; or "
                "pass the modules that hold the parameter as one list, fully_shard([a, b])."
            )


def _name_of_owner(param: FSDPParam, plan: Plan, otherwise: str) -> str:
    """Returns the FQN of a tied parameter at the module whose call has sharded it, below the modules of this call. That
    call knew a part of the FQN only. `otherwise`: its name if that module is elsewhere.
    """
    first = param.slots[0]
    if first.module in plan.names:
        return fqn(plan.names[first.module], first.name)
    return otherwise


def _ways(
    mesh: DataMesh, distribution: Distribution, keeps_dtype: bool | None, policy: MixedPrecisionPolicy, dtype: Any
) -> dict[str, Any]:
    """Returns what two calls that have a parameter must agree on, by the arguments that say it."""
    return {
        "mesh": mesh,
        "shard_placement_fn": distribution,
        "mp_policy (param_dtype)": dtype if keeps_dtype else policy.compute_dtype(dtype),
        "mp_policy (reduce_dtype)": policy.gradient_dtype(dtype),
        "mp_policy (grad_dtype)": policy.grad_dtype,
        "mp_policy (compression.all_gather)": None if keeps_dtype else policy.compression.all_gather,
        "mp_policy (compression.reduce_scatter)": policy.compression.reduce_scatter,
        "mp_policy (compression.all_reduce)": policy.compression.all_reduce,
    }


_SCRIPTED = (
    " is in a TorchScript module, whose parameters can't be replaced. Use the Python module in its place, and "
    "torch.compile to make it fast; or leave a frozen one out: ignored_params=set(scripted.parameters())."
)
_OF_FSDP1 = (
    ": FullyShardedDataParallel wraps the module that has it, and shards it in its own way. Leave "
    "FullyShardedDataParallel out, and call fully_shard on the module instead; or, if it is to stay, put its "
    "parameters into ignored_params."
)
_REPLICATED = (
    ": torch's replicate was applied to a module that has it, and puts DDP around it in the first forward. Leave "
    "replicate out: fully_shard averages the gradients."
)


@lru_cache
def _managed_by_class(cls: type[nn.Module]) -> str:
    """Returns the error where instances of `cls`, and what is inside of them, have parameters of the call, or ""."""
    if issubclass(cls, torch.jit.ScriptModule):
        return _SCRIPTED
    of_fsdp1 = any(base.__name__ == "FullyShardedDataParallel" for base in cls.__mro__)  # of torch, or of fairscale
    return _OF_FSDP1 if of_fsdp1 else ""


def _check_wrappers(plan: Plan) -> None:
    """Refuses parameters inside of modules that something else shards, replicates or keeps."""
    for outer in plan.managed:
        text = _managed_by_class(type(outer)) or (_REPLICATED if is_replicated_by_ddp(outer) else "")  # type: ignore[arg-type]
        inside = {*outer.modules()} if text else ()
        for name, planned in {**plan.parameters, **plan.tied}.items() if inside else ():
            if any(slot.module in inside for slot in planned.slots):
                raise NotImplementedError(f"{name}{text}")


def _check_options(planned: ParameterPlan, module: nn.Module) -> None:
    name, options = planned.name, vars(module)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and options.get("sparse"):
        raise NotImplementedError(f"{name}: sparse gradients are not supported. Use sparse=False.")
    if options.get("max_norm") is not None:
        raise NotImplementedError(
            f"{name}: max_norm writes to the weight in forward; that would be lost. Leave it out."
        )
    if planned.mesh.num_ranks > 1 and options.get("scale_grad_by_freq"):
        raise NotImplementedError(
            f"{name}: scale_grad_by_freq would count how often indices occur in each rank's rows, not in the whole "
            "batch. Leave it out."
        )


def _describe(name: str, parameter: nn.Parameter) -> str:
    return f"{name}, of shape {tuple(parameter.shape)} and dtype {parameter.dtype}:"


def _check_subclass(name: str, parameter: nn.Parameter) -> None:
    """Refuses a class of which one method is missing that says how it is gathered. Both may be set later."""
    data = local_if_any(parameter)
    missing = missing_methods(data)
    if missing and type(data).__name__ == "FakeTensor":
        raise NotImplementedError(
            f"{_describe(name, parameter)} is a FakeTensor, which has no values to shard. Build the model outside of "
            "FakeTensorMode, on the meta device if it is large; fsdp2.plan predicts what it takes when it is sharded."
        )
    if len(missing) == 1 or (missing and data is not parameter and type(data) not in PLAIN and holds_values(data)):
        raise NotImplementedError(no_methods(name, data, missing))
    if holds_values(data):
        _check_attributes(name, parameter)


def _check_attributes(name: str, parameter: nn.Parameter) -> None:
    """Refuses attributes that are tensors over the memory of a parameter, which it leaves when it is sharded."""
    for attribute, value in vars(parameter).items():
        if isinstance(value, Tensor) and _overlap(parameter, value):
            advice = "Copy it, or leave it out"
            if not parameter.requires_grad:
                advice = "Put the parameter into ignored_params of fully_shard: each rank keeps all of it, as the "
                advice += "attribute would"
            raise ValueError(
                f"{name}.{attribute}, an attribute of a {type(parameter).__name__}, and {name} share memory, and would "
                f"not after sharding. {advice}."
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns True if both tensors have some memory in common."""
    mine, theirs = memory_of(one), memory_of(other)
    return mine is not None and theirs is not None and mine.overlaps(theirs)


def _check_extension(each: ParameterPlan, choice: bool | int | None, policy: MixedPrecisionPolicy) -> None:
    """Checks a parameter that says itself how it is gathered: it is resharded as a whole, and gathered among all."""
    data = local_if_any(each.slots[0].get())
    if gathers_itself(data):
        if missing_methods(data):
            _check_can_cut(each, data)
        else:
            count_pre_arguments(each.name, data)
        if policy.compression.all_gather is not None:
            raise NotImplementedError(
                f"{each.name} has fsdp_pre_all_gather, which says itself how it travels: expected no compression of "
                f"all_gather, got {policy.compression.all_gather!r}. Call fully_shard on its module without it."
            )
        is_int = choice is not None and not isinstance(choice, bool) and choice not in (1, each.mesh.size)
        if is_int or each.mesh.has_outer_shard:
            refuse_secondary_shards(each.name)


def _check_can_cut(each: ParameterPlan, data: Tensor) -> None:
    """Refuses a wrapper without methods whose class can't cut it, either."""
    try:
        rows_of_subclass(data.detach(), each.distribution.dim, each.mesh, data.device)
    except Exception as error:
        missing = missing_methods(data)
        raise NotImplementedError(f"{no_methods(each.name, data, missing)} Cutting it fails: {error}") from error


def _check_compression(name: str, policy: MixedPrecisionPolicy, mesh: DataMesh, parameter: nn.Parameter) -> None:
    """Refuses a compression of a collective that there is not, or of numbers that it can't compress."""
    given = policy.compression
    gathers, reduces, sums = given.all_gather, given.reduce_scatter, given.all_reduce
    for argument, codec in {"all_gather": gathers, "reduce_scatter": reduces}.items():
        if codec is not None and not mesh.shard_axes:
            raise ValueError(
                f"{name}: expected no compression of {argument} on a mesh that only replicates, got {codec!r}. "
                "Gradients are summed between replicas: compress all_reduce."
            )
    if sums is not None and not mesh.replicate_axes and not mesh.has_outer_shard:
        raise ValueError(
            f"{name}: expected no compression of all_reduce on a mesh without replicas, got {sums!r}. Gradients travel "
            "between ranks that shard: compress reduce_scatter."
        )
    stored = delivered = parameter.dtype
    if not stored.is_floating_point:
        return
    choice = grad_choice(parameter, policy.grad_dtype)
    delivered = stored if choice is None else choice.dtype or stored
    summed = policy.gradient_dtype(delivered)
    if hasattr(sums, "make_sum"):
        if mesh.has_outer_shard:
            raise NotImplementedError(
                f"{name}: {sums!r} needs sums of whole shards on each replica; with outer_shard each replica has its "
                "part only. Name the axis in `replicate`, or pass a codec such as fsdp2.compression.Int8()."
            )
        sums = None
    for codec, dtype in ((gathers, stored), (reduces, summed), (sums, summed)):
        if codec is None:
            continue
        try:
            sent = codec.packed_dtype(dtype)
        except NotImplementedError as error:
            raise NotImplementedError(f"{name}: {error}") from None
        if sent.itemsize > dtype.itemsize:
            raise ValueError(
                f"{name}: {codec!r}.packed_dtype: expected a dtype no wider than its argument, {dtype}, got {sent}"
            )


def _check_names(root: nn.Module) -> None:
    """Refuses a module that has what the methods of its new class would hide."""
    added = public_methods()
    places: list[Any] = [root._modules, root._parameters, root._buffers, vars(root), *map(vars, type(root).__mro__)]
    clash = sorted(set().union(*[place.keys() & added for place in places]))
    if clash:
        raise TypeError(
            f"{type(root).__name__} has {', '.join(clash)} of its own, which are methods of FSDPModule. Rename them."
        )


# ---- meshes


def _check_ranks_stay(mesh: DataMesh) -> None:
    """Refuses to shard over ranks that join and leave: shards would have to be cut anew. Such ranks may replicate."""
    group = mesh.shard_group
    if group is None or not size_may_change(group):
        return
    sizes = size_at_first(group), group.size()
    if sizes != (mesh.size, mesh.size):
        raise ValueError(
            f"mesh: expected a process group of {mesh.size} ranks that stay, for the axis that shards, got a "
            f"{type(group).__name__} of {sizes[0]} when it was made and {sizes[1]} now. Give a group that ranks "
            "join and leave to the axis that replicates."
        )


def _check_reshard(choice: bool | int | None, mesh: DataMesh) -> None:
    if choice is None or isinstance(choice, bool):
        return
    if mesh.has_outer_shard:
        raise ValueError(
            f"reshard_after_forward={choice}: expected a bool or None on {mesh.topology}: each rank keeps its shard "
            "along the axes that shard. Leave outer_shard out to keep another part."
        )
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


def _check_device_type(name: str, mesh: DataMesh, shared: DataMesh) -> None:
    if mesh.mesh.device_type != shared.mesh.device_type:
        raise ValueError(
            f"{name}: expected a mesh of {shared.mesh.device_type} like that of the others, got {mesh.mesh}"
        )


def _check_placements(plan: Plan) -> None:
    placements: Any = plan.given.shard_placement_fn
    if plan.mesh.shard_axes or not isinstance(placements, Placements):
        return
    everything = {**plan.parameters, **plan.tied}
    names = {id(each.slots[0].get()): name for name, each in everything.items()}
    for parameter, placement in placements.chosen:
        raise ValueError(
            f"{names[id(parameter)]}: expected shard_placement_fn to return None on a mesh that only replicates, got "
            f"{placement!r}"
        )


def _check_conditional(plan: Plan, conditional: bool) -> None:
    found = find_conditional(plan.inside)
    inside = [
        state
        for state in plan.inside
        if conditional or (found and any(group in found and group.mesh.axis_groups for group in state.groups))
    ]
    if not conditional and not inside:
        return
    refuse_beside_conditional(group for state in plan.inside for group in state.groups)
    names = names_below(plan.roots)
    meshes = [plan.mesh, *(each.mesh for each in plan.parameters.values())]
    meshes += [group.mesh for state in plan.inside for group in state.groups]
    outer = next((mesh for mesh in meshes if mesh.has_outer_shard), None)
    if outer is not None:
        raise NotImplementedError(
            f"conditional modules with outer_shard ({outer.topology}) are not supported: ranks that leave a module "
            "out have no part to keep. Name its axes in `replicate` instead."
        )
    keeping = [names[each.modules[0]] for each in plan.inside if any(g.comms.secondary for g in each.groups)]
    if not isinstance(plan.given.reshard_after_forward, (bool, type(None))):
        keeping.append("this module")
    if conditional and keeping:
        raise NotImplementedError(
            f"conditional=True with an int for reshard_after_forward, of {', '.join(keeping)}, is not supported: ranks "
            "that leave it out have no part to keep. Pass a bool, or None."
        )
    for state in inside:
        for group in state.groups:
            _check_one_mesh(names[state.modules[0]], group.mesh, plan.mesh)


def _check_one_mesh(name: str, mesh: DataMesh, outer: DataMesh) -> None:
    """Ranks reach consensus over the mesh of the outermost module."""
    if mesh.mesh != outer.mesh:
        raise NotImplementedError(
            f"{name} is conditional, or inside a conditional module: expected it on the mesh of the module around it, "
            f"{outer.mesh}, got {mesh.mesh}"
        )
