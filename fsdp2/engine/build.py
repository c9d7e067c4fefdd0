"""Does what fully_shard() and replicate() do: collects the parameters of modules, shards them, and attaches hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parameter import UninitializedParameter

from ..calls.user_code import hides_modes
from ..collectives.choose import separate_where_usual
from ..devices.offload import OffloadChoice, shard_nbytes, storage_place
from ..parameters.tensor_parallel import distribute
from ..parameters.ties import MARK, find_owner, mark_originals, original_of
from .events import extensions
from .group import SHARDED, FSDPParamGroup
from .group_parameters import Rebuild
from .mesh import DataMesh, Distribution
from .owners import Owned, forget_state, note_state
from .parameter import FSDPParam, Slot, fqn
from .policy import CPUOffloadPolicy, GroupSettings, MixedPrecisionPolicy, OffloadBudget, OffloadPolicy
from .state import STATE, FSDPState, Notes, modules_below, names_below, state_of, states_among

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")


class Arguments(NamedTuple):
    """The arguments of one call of `fully_shard` or `replicate`, as the user gave them."""

    # What the user's mesh says of each of its axes, see collectives/meshes.py.
    mesh: DataMesh
    reshard_after_forward: bool | int | None = None
    # Returns a Shard or None; a Shard and a DataMesh for a parameter on a mesh of its own.
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload_policy: OffloadChoice = OffloadPolicy()
    ignored_params: Collection[nn.Parameter] | None = None
    # Modules whose buffers stay as they are.
    ignored_modules: Collection[nn.Module] = ()
    # See GroupSettings, as the next one.
    conditional: bool = False
    vocab_parallel: bool = False


class ParameterPlan(NamedTuple):
    """How one call is about to shard one parameter."""

    # Its FQN at the first module that has it.
    name: str
    # Where it is registered.
    slots: list[Slot]
    mesh: DataMesh
    distribution: Distribution
    # It computes in its own dtype. None: the user has not said so, and the policy's dtype holds.
    keeps_dtype: bool | None
    # The parameter that an earlier call has cut from this one, if its module is alive.
    owner: Owned | None = None


@dataclass
class Plan:
    """The plan of one call. Extensions may refuse or change it: no module has been changed yet."""

    # The modules of the call.
    roots: list[nn.Module]
    given: Arguments
    # The mesh of all parameters for which the user has chosen no other.
    mesh: DataMesh
    # The modules of the call, and those inside them that no inner call manages -> their FQNs.
    managed: dict[nn.Module, str]
    # The modules of the call, and all modules inside them -> their FQNs.
    names: dict[nn.Module, str]
    # The states of inner calls, outermost first.
    inside: list[FSDPState]
    # FQN -> the plan of a parameter of the call.
    parameters: dict[str, ParameterPlan]
    # FQN -> the plan of a parameter that an earlier call has sharded, for modules of its own.
    tied: dict[str, ParameterPlan]
    # Submodules that get a state of their own -> the FQNs of their parameters. Extensions fill it.
    submodules: dict[nn.Module, list[str]] = field(default_factory=dict)
    # Where the parameters are stored.
    offload: OffloadPolicy = OffloadPolicy()
    # The bytes that they take of an OffloadBudget.
    nbytes_of_budget: int = 0
    # Notes of extensions about the call. All its states get them.
    notes: Notes = field(default_factory=Notes)


@hides_modes
def apply(module: Modules, given: Arguments, make_class: Callable[[type], type]) -> Modules:
    """Shards the parameters of `module`, or of a list of modules, and has its calls gather them. Returns `module`.

    `make_class` returns the sharded class for a module's class.
    """
    plan = _plan(module, given)
    for check in extensions().plan:
        check(plan)
    classes = [make_class(type(root)) for root in plan.roots]
    with _forgotten_if_it_fails(plan) as states:
        # From here on nothing is refused.
        for each in plan.managed:
            for name, buffer in each._buffers.items() if each not in plan.given.ignored_modules else ():
                if buffer is not None and buffer.device.type != "meta":
                    each._buffers[name] = buffer.to(plan.mesh.device)
        states += _make_states(plan)
        _join_owners(plan, states[0])
        attach(states[0], plan.inside, classes, plan.names)
        for state in states:
            if state.cast_buffers is not None:
                state.cast_buffers.cast()
        if isinstance(given.offload_policy, OffloadBudget):
            given.offload_policy._take(plan.nbytes_of_budget)
    return module


@contextmanager
def _forgotten_if_it_fails(plan: Plan) -> Iterator[list[FSDPState]]:
    """Context: if it raises, no other module is affected by what was done. It yields the list of the new states.

    The modules of the call are lost: their whole parameters were freed one by one as these were cut.
    """
    groups = [group for state in plan.inside for group in state.groups]
    groups = list(dict.fromkeys([*groups, *(each.owner.group for each in plan.tied.values() if each.owner)]))
    changed = [*plan.inside, *groups, *(group.comm_label for group in groups)]
    before = [(each, {**vars(each)}) for each in changed]
    names = [(group, [[*param.names] for param in group.params]) for group in groups]
    classes = [type(root) for root in plan.roots]
    states: list[FSDPState] = []
    try:
        yield states
    except BaseException as error:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)
        for group, names_of_params in names:
            for param, own in zip(group.params, names_of_params, strict=True):
                if param.set_names(own):
                    group.parameters.rebuild(Rebuild.SHARDS)
        for state in states:
            forget_state(state)
        for module, cls in zip(plan.roots, classes, strict=True):
            module.__dict__.pop(STATE, None)
            object.__setattr__(module, "__class__", cls)
        add_note = getattr(error, "add_note", None)  # from Python 3.11 on
        if add_note is not None:
            add_note(f"fully_shard had begun to shard {type(plan.roots[0]).__name__}. Build the model again.")
        raise


def attach(
    state: FSDPState,
    inside: Iterable[FSDPState],
    classes: Sequence[type],
    names: Mapping[nn.Module, str] | None = None,
) -> None:
    """Gives the modules of `state` their state and class. The states `inside` run under its root from now on.

    Every rank must call it. `names`: what `names_below` returns for its modules, if the caller has that.
    """
    for group in [group for each in (state, *state.parts) for group in each.groups]:
        separate_where_usual(group)
    for module, cls in zip(state.modules, classes, strict=True):
        module.__dict__[STATE] = state
        object.__setattr__(module, "__class__", cls)  # a user's __setattr__ may refuse it
    state.enclose(inside)
    names = names_below(state.modules) if names is None else names
    for group in [group for each in (state, *state.inside) for group in each.groups]:
        group.rename(names)
    for each in (state, *state.parts):
        note_state(each)
    for follow in extensions().after_sharding:
        follow(state)


# ---- the plan


def _plan(module: Any, given: Arguments) -> Plan:
    roots = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in roots:
        if not isinstance(each, nn.Module):
            raise TypeError(f"module: expected an nn.Module or a list of them, got {type(each).__name__}")
        if state_of(each) is not None:
            raise ValueError(f"{type(each).__name__}: fully_shard has been applied to this module already")
    nested = {inner for outer in roots for inner in outer.modules() if inner is not outer} if len(roots) > 1 else ()
    roots = [each for each in roots if each not in nested]
    names = names_below(roots)
    inside = list(states_among(names))
    managed: dict[nn.Module, str] = {} if inside or len(roots) > 1 else {**names}
    for i, root in enumerate(roots if not managed else ()):
        here = modules_below(root, "" if len(roots) == 1 else f"[{i}]", and_sharded=False)
        managed.update((each, name) for each, name in here.items() if each not in managed)
    found = _collect_slots(managed, given.ignored_params or ())
    slots = {fqn(managed[own[0].module], own[0].name): own for own in found.values()}
    parameters = {name: _plan_parameter(name, own, given.mesh, given) for name, own in slots.items()}
    marks = {
        name: original_of(each)
        for name, each in zip(slots, found, strict=True)
        if getattr(each, MARK, None) is not None
    }
    tied = {name: parameters.pop(name)._replace(owner=find_owner(mark, inside)) for name, mark in marks.items() if mark}
    plan = Plan(roots, given, given.mesh, managed, names, inside, parameters, tied)
    _plan_offload(plan)
    return plan


def _plan_offload(plan: Plan) -> None:
    """Chooses where the parameters of the call are stored. Tied ones stay where an earlier call has put them."""
    given = plan.given.offload_policy
    if not isinstance(given, OffloadBudget):
        plan.offload = given
        return
    nbytes = sum(shard_nbytes(each.slots[0].get(), each.distribution) for each in plan.parameters.values())
    if nbytes <= given.left:
        plan.nbytes_of_budget = nbytes
    else:
        plan.offload = CPUOffloadPolicy(pin_memory=given.pin_memory)


def _collect_slots(managed: dict[nn.Module, str], ignored: Collection[nn.Parameter]) -> dict[nn.Parameter, list[Slot]]:
    """Returns each distinct parameter -> its slots. The FQN of the first one is its name."""
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None and not (ignored and parameter in ignored):
                slots.setdefault(parameter, []).append(Slot(module, name))
    return slots


def _plan_parameter(name: str, slots: list[Slot], shared: DataMesh, given: Arguments) -> ParameterPlan:
    """Plans one parameter, as the user's `shard_placement_fn` and policy say."""
    parameter, mesh, placement = slots[0].get(), shared, None
    if issubclass(type(parameter), UninitializedParameter):
        raise ValueError(f"{name} is uninitialised. Run the lazy module once before fully_shard.")
    try:
        if given.shard_placement_fn is not None:
            placement = given.shard_placement_fn(parameter)
            if isinstance(placement, tuple):  # also a mesh of its own
                placement, mesh = placement
        dim = 0 if placement is None else _dim_of(placement, parameter)
        distribution = distribute(parameter, mesh, dim)
        return ParameterPlan(name, slots, mesh, distribution, given.mp_policy.keeps_dtype(parameter))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def _dim_of(placement: Any, parameter: nn.Parameter) -> int:
    if type(placement) is not Shard:
        raise ValueError(f"expected shard_placement_fn to return a Shard or None, got {placement!r}")
    if not -parameter.dim() <= placement.dim < parameter.dim():
        raise ValueError(f"expected a dim of shape {tuple(parameter.shape)}, got {placement!r}")
    return placement.dim % parameter.dim()


# ---- the changes


def _make_states(plan: Plan) -> list[FSDPState]:
    """Returns the state of the call's modules, and those of its submodules that get groups of their own."""
    apart = {name for names in plan.submodules.values() for name in names}
    rest = [each for each in plan.parameters.values() if each.name not in apart]
    policy = plan.given.mp_policy
    groups = _make_groups(plan, plan.roots, rest, policy)
    # Inputs and outputs of submodules are those of the module around them, and stay as they are.
    inner_policy = replace(policy, cast_forward_inputs=False, output_dtype=None) if plan.submodules else policy
    parts = []
    for submodule, names in plan.submodules.items():
        own = [plan.parameters[name] for name in names]
        own_groups = _make_groups(plan, [submodule], own, inner_policy)
        parts.append(FSDPState([submodule], own_groups, inner_policy, notes=plan.notes))
    return [FSDPState(plan.roots, groups, policy, parts, plan.given.ignored_modules, plan.notes), *parts]


def _make_groups(
    plan: Plan, modules: list[nn.Module], parameters: list[ParameterPlan], policy: MixedPrecisionPolicy
) -> list[FSDPParamGroup]:
    """Returns a group for each mesh of `parameters`. Without parameters, an empty one on the mesh of the call."""
    given = plan.given
    alike: dict[DataMesh, list[ParameterPlan]] = {}
    found: dict[int, list[ParameterPlan]] = {}  # by the identity of the mesh: meshes take long to compare
    for each in parameters:
        if id(each.mesh) not in found:
            found[id(each.mesh)] = alike.setdefault(each.mesh, [])
        found[id(each.mesh)].append(each)
    groups = []
    for mesh, members in (alike or {plan.mesh: []}).items():
        device, pin = storage_place(plan.offload, mesh.device) if members else (mesh.device, False)
        with torch.no_grad():
            slots = [each.slots[0] for each in members]
            originals = [weakref.ref(slot.module._parameters[slot.name]) for slot in slots]
            params = [
                FSDPParam(each.slots, each.name, mesh, each.distribution, device, each.keeps_dtype, policy.grad_dtype)
                for each in members
            ]
        how = given.reshard_after_forward
        settings = GroupSettings(
            policy, how, pin_memory=pin, conditional=given.conditional, vocab_parallel=given.vocab_parallel
        )
        groups.append(FSDPParamGroup(modules, params, mesh, settings))
        groups[-1].note_originals(mark_originals(originals, params, type(plan.roots[0]).__name__))
    return groups


def _join_owners(plan: Plan, state: FSDPState) -> None:
    """Gives tied parameters of the call to the groups that have sharded them before."""
    for each in plan.tied.values():
        assert each.owner is not None, "it is tied"
        group, param = each.owner
        if group.phase is not SHARDED:
            group.reshard_if_idle()
        param.add_slots(each.slots, each.name)
        group.parameters.rebuild(Rebuild.SHARDS)
        if group not in state.tied_to:
            state.tied_to.append(group)
