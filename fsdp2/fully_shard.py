"""fully_shard() and replicate(): check the arguments, collect the parameters, shard them, attach hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import checks, hooks, torch_compat
from .guards.starting_weights import BUILT, StartingWeights
from .mesh import (
    DataMesh,
    DataParallelMeshDims,
    Distribution,
    data_mesh,
    default_mesh,
    named_data_mesh,
    replicated_data_mesh,
)
from .padding import log_waste
from .param import SHARDED_AS, FSDPParam, Slot, fqn
from .param_group import FSDPParamGroup
from .policy import MixedPrecisionPolicy, OffloadPolicy
from .sharded_class import sharded_class
from .state import FSDPState, state_of, states_below
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
        shard_placement_fn: called once with each parameter, returns the Shard(dim) to use, or None for Shard(0). Dims
            need not divide evenly, but gathers and reductions bring padding then: `cheapest_placement` is such a
            function, which keeps it small, and what is much is logged. Parameters sharded along dims other than 0 are
            copied once more per gather. It may return a ShardPlacementResult, for a parameter on a mesh of its own
            (experts, say): the parameters of each mesh then form a group, which settings and methods of the module
            reach alike.
        mp_policy: dtypes of compute and reduction.
        offload_policy: a CPUOffloadPolicy has sharded parameters and gradients, hence the optimizer, live on the CPU,
            and copies the shards to the mesh's device for each gather. On a mesh of CPUs they are there already.
        ignored_params: parameters to leave as they are: not sharded, moved or reduced.
        dp_mesh_dims: `mesh` is a larger mesh, of which these axes shard and replicate; every parameter must be a
            DTensor on it, with Replicate() on these axes.
        conditional: whether ranks may leave `module` out, each for itself, in any forward: the image tower of a batch
            of text, an expert, a dropped layer. It trains as if ranks without it had run it to a gradient of zero;
            parameters that no rank has used keep `.grad` None, and nothing is gathered or reduced for them. What other
            sharded modules hold inside it is conditional with it. Some module around it must be sharded, and run on
            all ranks. Under that one ranks then meet, before each gather and each group's reduction, in an all-reduce
            of three numbers, which the host waits for: on the CPU, if their process group has a backend for it.

    Raises:
        TypeError: an argument of the wrong type; a module with a name of its own that FSDPModule's methods have.
        ValueError: a container without `forward`; a module given twice or sharded already; a parameter that is
            uninitialised, tied to one of another group, or over the same memory as another.
        NotImplementedError: a parameter that is complex, or a tensor subclass that does not say how it is gathered (see
            extension.py); embeddings with sparse gradients or `max_norm`.

    After any of these errors nothing has been changed.
    """
    given = _Arguments(
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
    given = _Arguments(mesh, None, None, None, mp_policy, offload_policy, ignored_params, conditional)
    return _apply(module, given, replicated_data_mesh)


class _Arguments(NamedTuple):
    """Of one call."""

    mesh: DeviceMesh | None
    dp_mesh_dims: DataParallelMeshDims | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    conditional: bool


def _apply(module: Modules, given: _Arguments, choose_axes: Callable[[DeviceMesh], DataMesh]) -> Modules:
    roots = checks.check_modules(module)
    checks.check_mesh(given.mesh, given.dp_mesh_dims)
    _, _, reshard, placement_fn, _, offload_policy, ignored, conditional = given
    checks.check_arguments(reshard, placement_fn, offload_policy, ignored, conditional)
    policy = checks.check_policy(given.mp_policy)
    managed = dict(_managed_modules(roots))
    slots = _collect_slots(managed, ignored or frozenset())
    for name, parameter_slots in slots.items():
        checks.check_parameter(name, parameter_slots)
    inside = [state for root in roots for state in states_below(root)]
    memory_of = checks.check_memory(slots, managed, roots, inside)
    for root in roots:
        checks.check_names(root)
    shared = choose_axes(given.mesh if given.mesh is not None else default_mesh())
    checks.check_reshard(reshard, shared)
    checks.check_conditional(roots, inside, conditional, reshard, shared)
    plans = [
        _plan(name, parameter_slots, memory_of[name], shared, policy, given) for name, parameter_slots in slots.items()
    ]
    for plan in plans if conditional else ():
        checks.check_one_mesh(plan.name, plan.mesh, shared)
    classes = [sharded_class(type(root)) for root in roots]  # type: ignore[arg-type]

    # From here on nothing is refused.
    _move_buffers(managed, shared.device)
    rest, pin = _resting_place(offload_policy, shared.device)
    shares = _shares(plans, find_units(roots, inside, slots), shared)
    states = []
    for share, members in shares.items():
        params, starts = _shard(members, rest, type(roots[0]).__name__)
        states.append(_make_state(roots, share, params, policy, pin, given))
        states[-1].group.adopted.note_starts(starts)
    for state, share in zip(states, shares, strict=True):
        state.outer = states[0] if share.unit is not None else None
    hooks.install(states)
    attach(states[0])
    log_waste(states)
    for root, cls in zip(roots, classes, strict=True):
        root.__class__ = cls
    return module


# As torch's functions have it: the state that they left on a module, or None.
fully_shard.state = replicate.state = state_of  # type: ignore[attr-defined]


# ---- what belongs to the call


def _managed_modules(roots: list[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The modules at and below `roots` that no inner call manages, with their FQNs (in a list: after its index)."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        if module in seen or state_of(module) is not None:
            return
        seen.add(module)
        yield module, name
        for child_name, child in module.named_children():
            yield from walk(child, fqn(name, child_name))

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
    return {fqn(managed[first.module], first.name): [first, *others] for first, *others in slots.values()}


class _Plan(NamedTuple):
    """What is to become of one parameter."""

    name: str
    slots: list[Slot]
    mesh: DataMesh
    distribution: Distribution
    keeps_dtype: bool
    memory: Memory | None

    def shard(self, rest: torch.device, root: str) -> FSDPParam:
        original = self.slots[0].get()
        param = FSDPParam(self.slots, self.name, self.mesh, self.distribution, rest, self.keeps_dtype, self.memory)
        setattr(original, SHARDED_AS, f"{root}'s {self.name}")
        if original.requires_grad:
            torch_compat.replace_hooks(original, partial(_refuse_gradient, f"{root}'s {self.name}"))
        return param


def _refuse_gradient(name: str, _: Tensor) -> None:
    """Hook on what was a parameter before it was sharded."""
    raise RuntimeError(
        f"something has computed with what {name} was before fully_shard (a list or view of parameters, another module "
        "that shares it, a loss from before?), which is no parameter of the model any more. Use what modules have now."
    )


def _plan(
    name: str,
    slots: list[Slot],
    memory: Memory | None,
    shared: DataMesh,
    policy: MixedPrecisionPolicy,
    given: _Arguments,
) -> _Plan:
    """Ask the user's functions about one parameter, and check what they say."""
    parameter, reshard = slots[0].get(), given.reshard_after_forward
    dim, own = checks.choose_placement(name, parameter, given.shard_placement_fn)
    mesh = own or shared
    checks.check_device_type(name, mesh, shared)
    checks.check_reshard(reshard, mesh)
    checks.check_wire(name, policy, mesh)
    checks.check_frequencies(name, slots, mesh)
    checks.check_extension(name, parameter, reshard, mesh)
    distribution = checks.choose_distribution(name, parameter, mesh, dim)
    return _Plan(name, slots, mesh, distribution, checks.choose_dtype(name, parameter, policy), memory)


class _Share(NamedTuple):
    """What one group is made of: parameters on one mesh; those of one unit, or those that belong to none."""

    mesh: DataMesh
    unit: nn.Module | None


def _shares(plans: list[_Plan], units: dict[str, nn.Module], shared: DataMesh) -> dict[_Share, list[_Plan]]:
    """One for the modules of the call themselves first, though it may be empty; the units' last."""
    shares: dict[_Share, list[_Plan]] = {}
    for plan in plans:
        shares.setdefault(_Share(plan.mesh, units.get(plan.name)), []).append(plan)
    if all(share.unit is not None for share in shares):
        shares[_Share(shared, None)] = []
    return dict(sorted(shares.items(), key=lambda item: item[0].unit is not None))


def _shard(members: list[_Plan], rest: torch.device, root: str) -> tuple[list[FSDPParam], dict[FSDPParam, Any]]:
    """The parameters of one group, and what is known of each of them before."""
    params: list[FSDPParam] = []
    starts = {}
    for plan in members:
        whole = plan.slots[0].get()
        params.append(plan.shard(rest, root))
        starts[params[-1]] = StartingWeights.of(params[-1], whole, BUILT)
    return params, starts


def _move_buffers(managed: Iterable[nn.Module], device: torch.device) -> None:
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)


def _resting_place(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """Where shards live, and whether in page-locked memory. A policy of torch's own is accepted, too."""
    cpu = torch.device("cpu")
    if not hasattr(policy, "pin_memory") or device == cpu:
        return device, False
    return cpu, bool(policy.pin_memory) and torch.accelerator.is_available()


def _make_state(
    roots: list[nn.Module],
    share: _Share,
    params: list[FSDPParam],
    policy: MixedPrecisionPolicy,
    pin: bool,
    given: _Arguments,
) -> FSDPState:
    modules = roots
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
    if choice in (1, mesh.size) or mesh.shard_group is None:
        return choice != 1, None
    return True, choice
