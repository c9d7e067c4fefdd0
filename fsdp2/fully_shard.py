"""fully_shard() and replicate(): check the arguments, collect the parameters, shard them, attach hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import checks, hooks
from .guards.starting_weights import BUILT, StartingWeights
from .mesh import DataMesh, DataParallelMeshDims, data_mesh, default_mesh, named_data_mesh, replicated_data_mesh
from .modes import hides_modes
from .padding import log_waste
from .param import FSDPParam, Slot, fqn
from .param_group import FSDPParamGroup
from .policy import MixedPrecisionPolicy, OffloadPolicy
from .sharded_class import sharded_class
from .sharding_plan import Arguments, Plan, Share, plan_parameter, share_out
from .state import FSDPState, modules_below, names_below, state_of, states_among
from .torch_compat import Memory
from .units import attach, find_units

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
) -> Modules:
    """Shard the parameters of `module` over the ranks of `mesh`, in place, and return `module`.

    Every parameter below `module` that no inner `fully_shard` call has taken becomes an `nn.Parameter(DTensor)`,
    sharded along dim 0 (scalars are replicated). Together they form one group, which is gathered before forward, freed
    after it, gathered again for backward, and whose gradients are averaged over the ranks. Call it bottom-up: on blocks
    first, then on the model, where modules as large as blocks (an embedding, a head) get groups of their own (see
    units.py). Every rank of the mesh must call it, on the same modules in the same order.

    Args:
        module: a module, or a list of modules that share one group. Modified in place; its class becomes a subclass of
            its own class and `FSDPModule`. FQNs stay as they are.
        mesh: a DeviceMesh of one axis, or of two, of which the first replicates and the second shards (HSDP): each
            replica gathers and reduces by itself, then gradients are averaged between replicas. None: all ranks, on the
            accelerator if there is one, else on the CPU.
        reshard_after_forward: free the full parameters after forward (less memory, one more gather in backward). None:
            True, except for what backward needs first: the root (the outermost sharded module), the group that was
            last in the forward before, and what backward gathers ahead of that (one group, if no prefetch budget says
            otherwise): freed, it would be back at once. An int k, a divisor of the number of ranks: each rank keeps
            1/k of them (in compute dtypes), and backward gathers among k neighbouring ranks only, on one machine say.
            On one rank nothing is gathered, whatever it is; an int is refused on a mesh that only replicates.
        shard_placement_fn: called once with each parameter, returns the Shard(dim) to use, or None for Shard(0). Dims
            need not divide evenly, but gathers and reductions bring padding then: `cheapest_placement` is such a
            function, which keeps it small, and what is much is logged. Parameters sharded along dims other than 0 are
            copied once more per gather. It may return a ShardPlacementResult, for a parameter on a mesh of its own
            (experts, say): the parameters of each mesh then form a group, which settings and methods of the module
            reach alike. On a mesh that only replicates it must return None, or such a result.
        mp_policy: dtypes of compute and reduction.
        offload_policy: a CPUOffloadPolicy has sharded parameters and gradients, hence the optimizer, live on the CPU,
            and copies the shards to the mesh's device for each gather. On a mesh of CPUs they are there already.
        ignored_params: parameters to leave as they are: not sharded, moved or reduced. Others than those below `module`
            may be among them: one set serves all calls.
        dp_mesh_dims: `mesh` is a larger mesh, of which these axes shard and replicate; every parameter must be a
            DTensor on it, with Replicate() on these axes.
        conditional: whether ranks may leave `module` out, each for itself, in any forward: the image tower of a batch
            of text, an expert, a dropped layer. It trains as if ranks without it had run it to a gradient of zero;
            parameters that no rank has used keep `.grad` None, and nothing is gathered or reduced for them. What other
            sharded modules hold inside it is conditional with it. Some module around it must be sharded, and run on
            all ranks. Under that one ranks then meet, before each gather and each group's reduction, in an all-reduce
            of three numbers, which the host waits for: on the CPU, if their process group has a backend for it. One
            rank has none to meet.

    Raises:
        TypeError: an argument of the wrong type; a module with a name of its own that FSDPModule's methods have.
        ValueError: a container without `forward`; a module given twice or sharded already; a parameter that is
            uninitialised, tied to one of another group, or over the same memory as another.
        NotImplementedError: a parameter that is complex, or a tensor subclass that does not say how it is gathered (see
            extension.py); embeddings with sparse gradients or `max_norm`.

    After any of these errors nothing has been changed.
    """
    given = Arguments(
        mesh,
        dp_mesh_dims,
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        ignored_params,
        conditional,
    )
    return _apply(
        module, given, data_mesh if dp_mesh_dims is None else lambda mesh: named_data_mesh(mesh, dp_mesh_dims)
    )


def replicate(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    conditional: bool = False,
) -> Modules:
    """Keep a whole copy of the parameters of `module` on each rank of `mesh`, and average their gradients: DDP.

    All else is as with `fully_shard`, whose arguments and errors these are; parameters become DTensors with
    Replicate(). Nothing is gathered; without mixed precision the modules compute with the very parameters that the
    optimizer updates.

    Args:
        mesh: a DeviceMesh of one axis.
    """
    given = Arguments(mesh, None, None, None, mp_policy, offload_policy, ignored_params, conditional)
    return _apply(module, given, replicated_data_mesh)


@hides_modes
def _apply(module: Modules, given: Arguments, choose_axes: Callable[[DeviceMesh], DataMesh]) -> Modules:
    roots = checks.check_modules(module)
    given = _check(given)
    found = _collect(roots, given.ignored_params or frozenset())
    shared = choose_axes(given.mesh if given.mesh is not None else default_mesh())
    plans = _plan(found, shared, given)
    classes = [sharded_class(type(root)) for root in roots]

    # From here on nothing is refused.
    _move_buffers(found.managed, shared.device)
    states = _make_states(found, plans, shared, given)
    hooks.install(states, found.inside, found.below)
    attach(states[0])
    log_waste(states)
    for root, cls in zip(roots, classes, strict=True):
        root.__class__ = cls
    return module


# As torch's functions have it: the state that they left on a module, or None.
fully_shard.state = replicate.state = state_of  # type: ignore[attr-defined]


# ---- what is looked at, and may be refused


class _Found(NamedTuple):
    """What there is in the modules of one call: `roots`.

    `below`: all modules at and below them, with their FQNs; `managed`: those that no inner call manages; `inside`: the
    states of inner calls. `slots`, `memory_of`: of each parameter, by its FQN.
    """

    roots: list[nn.Module]
    below: dict[nn.Module, str]
    managed: dict[nn.Module, str]
    slots: dict[str, list[Slot]]
    memory_of: dict[str, Memory | None]
    inside: list[FSDPState]


def _check(given: Arguments) -> Arguments:
    checks.check_mesh(given.mesh, given.dp_mesh_dims)
    checks.check_arguments(
        given.reshard_after_forward,
        given.shard_placement_fn,
        given.offload_policy,
        given.ignored_params,
        given.conditional,
    )
    return given._replace(mp_policy=checks.check_policy(given.mp_policy))


def _collect(roots: list[nn.Module], ignored: Collection[nn.Parameter]) -> _Found:
    below = names_below(roots)
    inside = list(states_among(below))
    managed = _managed_modules(roots) if inside or len(roots) > 1 else below
    slots = _collect_slots(managed, ignored)
    for name, parameter_slots in slots.items():
        checks.check_parameter(name, parameter_slots)
    memory_of = checks.check_memory(slots, managed, roots, inside)
    for root in roots:
        checks.check_names(root)
    return _Found(roots, below, managed, slots, memory_of, inside)


def _managed_modules(roots: list[nn.Module]) -> dict[nn.Module, str]:
    """The modules at and below `roots` that no inner call manages, with their FQNs (in a list: after its index)."""
    managed: dict[nn.Module, str] = {}
    for i, root in enumerate(roots):
        here = modules_below(root, "" if len(roots) == 1 else f"[{i}]", and_sharded=False)
        managed.update((module, name) for module, name in here.items() if module not in managed)
    return managed


def _collect_slots(managed: dict[nn.Module, str], ignored: Collection[nn.Parameter]) -> dict[str, list[Slot]]:
    """FQN -> the slots of one distinct parameter. Tied parameters go under the first of their names."""
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and not (ignored and parameter in ignored):
                slots.setdefault(parameter, []).append(Slot(module, name))
    return {fqn(managed[first.module], first.name): [first, *others] for first, *others in slots.values()}


def _plan(found: _Found, shared: DataMesh, given: Arguments) -> list[Plan]:
    reshard, conditional = given.reshard_after_forward, given.conditional
    checks.check_reshard(reshard, shared)
    checks.check_conditional(found.roots, found.inside, conditional, reshard, shared)
    plans = [plan_parameter(name, slots, found.memory_of[name], shared, given) for name, slots in found.slots.items()]
    checks.check_groups({id(mesh): mesh for mesh in (shared, *(plan.mesh for plan in plans))}.values())
    for plan in plans if conditional else ():
        checks.check_one_mesh(plan.name, plan.mesh, shared)
    return plans


# ---- what is changed then


def _move_buffers(managed: Iterable[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def _make_states(found: _Found, plans: list[Plan], shared: DataMesh, given: Arguments) -> list[FSDPState]:
    """That of the modules of the call themselves first; the units' last."""
    rest, pin = _resting_place(given.offload_policy, shared.device)
    shares = share_out(plans, find_units(found.roots, found.inside, found.slots), shared)
    states = []
    for share, members in shares.items():
        params, starts = _shard(members, rest, type(found.roots[0]).__name__)
        states.append(_make_state(found.roots, share, params, pin, given))
        states[-1].group.adopted.note_starts(starts)
    for state, share in zip(states, shares, strict=True):
        state.outer = states[0] if share.unit is not None else None
    return states


def _resting_place(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """Where shards live, and whether in page-locked memory. A policy of torch's own is accepted, too."""
    cpu = torch.device("cpu")
    if not hasattr(policy, "pin_memory") or device == cpu:
        return device, False
    return cpu, bool(policy.pin_memory) and torch.accelerator.is_available()


def _shard(members: list[Plan], rest: torch.device, root: str) -> tuple[list[FSDPParam], dict[FSDPParam, Any]]:
    """The parameters of one group, and what is known of each of them before."""
    params: list[FSDPParam] = []
    starts = {}
    with torch.no_grad():
        for plan in members:
            whole = plan.slots[0].get()
            params.append(plan.shard(rest, root))
            starts[params[-1]] = StartingWeights.of(params[-1], whole, BUILT)
    return params, starts


def _make_state(
    roots: list[nn.Module], share: Share, params: list[FSDPParam], pin: bool, given: Arguments
) -> FSDPState:
    modules, policy = roots, given.mp_policy
    if share.unit is not None:  # inputs and outputs are those of the outer module: what is inside stays as it is
        modules, policy = [share.unit], replace(policy, cast_forward_inputs=False, output_dtype=None)
    group = FSDPParamGroup(modules, params, share.mesh, policy, pin)
    reshard, few = _reshard_choice(given.reshard_after_forward, share.mesh)
    state = FSDPState(modules, group, policy, reshard, few, given.conditional)
    # The backward of an embedding reads no weight.
    state.unshard_in_backward = not isinstance(share.unit, nn.Embedding)
    return state


def _reshard_choice(choice: bool | int | None, mesh: DataMesh) -> tuple[bool | None, int | None]:
    """As a bool, and among how many ranks a part stays after forward, if that is neither all of them nor one."""
    if choice is None or isinstance(choice, bool):
        return choice, None
    if choice in (1, mesh.size) or mesh.size == 1:
        return choice != 1, None
    return True, choice
