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
from ..collectives.choose import require_backend
from ..devices.offload import OffloadChoice, shard_nbytes, storage_place
from ..parameters.tensor_parallel import distribute
from ..parameters.ties import MARK, find_owner, mark_originals, original_of
from .events import extensions
from .group import FSDPParamGroup
from .mesh import DataMesh, Distribution
from .owners import Owned
from .parameter import FSDPParam, Slot, fqn
from .policy import CPUOffloadPolicy, GroupSettings, MixedPrecisionPolicy, OffloadBudget, OffloadPolicy
from .root import Root
from .state import STATE, FSDPState, Notes, modules_below, names_below, state_of, states_among

Modules = TypeVar("Modules", bound="nn.Module | Sequence[nn.Module]")


class Arguments(NamedTuple):
    """The arguments of one call of `fully_shard` or `replicate`.

    `shard_placement_fn` may return a Shard and a DataMesh for a parameter on a mesh of its own. `offload_policy`: as
    the user gave it. `ignored_modules`: whose buffers stay as they are. `conditional`, `vocab_parallel`: see
    GroupSettings.
    """

    mesh: DataMesh
    reshard_after_forward: bool | int | None = None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload_policy: OffloadChoice = OffloadPolicy()
    ignored_params: Collection[nn.Parameter] | None = None
    ignored_modules: Collection[nn.Module] = ()
    conditional: bool = False
    vocab_parallel: bool = False


class ParameterPlan(NamedTuple):
    """How to shard one parameter: its FQN, where it is registered, its mesh, and its placement.

    `keeps_dtype`: it computes in its own dtype; None: the user has not said so, and the policy's dtype holds.
    `owner`: what it is of an earlier call, which has sharded it already; None: there is no such call, or it is gone.
    """

    name: str
    slots: list[Slot]
    mesh: DataMesh
    distribution: Distribution
    keeps_dtype: bool | None
    owner: Owned | None = None


@dataclass
class Plan:
    """What one call is about to do. Extensions may refuse or change it: no module has been changed yet.

    `roots`: the modules of the call; `managed`: the modules at and below them that no inner call manages, with their
    FQNs; `names`: the FQNs of all modules at and below them; `inside`: the states of inner calls; `parameters`: by FQN;
    `tied`: those that earlier calls have sharded, as parameters of modules of theirs. `submodules`: those that get a
    state of their own, with the FQNs of their parameters; extensions fill it. `offload`: where its
    parameters rest, and `nbytes_of_budget`: what they take of an OffloadBudget. `notes`: what extensions keep of it,
    which all states of the call get.
    """

    roots: list[nn.Module]
    given: Arguments
    mesh: DataMesh
    managed: dict[nn.Module, str]
    names: dict[nn.Module, str]
    inside: list[FSDPState]
    parameters: dict[str, ParameterPlan]
    tied: dict[str, ParameterPlan]
    submodules: dict[nn.Module, list[str]] = field(default_factory=dict)
    offload: OffloadPolicy = OffloadPolicy()
    nbytes_of_budget: int = 0
    notes: Notes = field(default_factory=Notes)


@hides_modes
def apply(module: Modules, given: Arguments, make_class: Callable[[type], type]) -> Modules:
    """Does what `fully_shard` and `replicate` do. `make_class`: returns the class that a module of a class gets."""
    plan = _plan(module, given)
    for check in extensions().plan:
        check(plan)
    classes = [make_class(type(root)) for root in plan.roots]
    _check_backends(plan)
    with _forgotten_if_it_fails(plan) as states:
        # From here on nothing is refused.
        for each in plan.managed:
            for name, buffer in each._buffers.items() if each not in plan.given.ignored_modules else ():
                if buffer is not None and buffer.device.type != "meta":
                    each._buffers[name] = buffer.to(plan.mesh.device)
        states += _make_states(plan)
        _join_owners(plan, states[0])
        attach(states[0], [*states, *plan.inside], classes, plan.names)
        for state in states:
            if state.cast_buffers is not None:
                state.cast_buffers.cast()
        if isinstance(given.offload_policy, OffloadBudget):
            given.offload_policy.left -= plan.nbytes_of_budget
    return module


def _check_backends(plan: Plan) -> None:
    """Checks that the process groups can communicate, before anything is changed.

    Raises:
        RuntimeError: a group has no backend for the device of its mesh.
    """
    meshes = {id(plan.mesh): plan.mesh, **{id(each.mesh): each.mesh for each in plan.parameters.values()}}
    for mesh in meshes.values():
        for group in (mesh.shard_group, mesh.replicate_group):
            require_backend(group, mesh.device)


@contextmanager
def _forgotten_if_it_fails(plan: Plan) -> Iterator[list[FSDPState]]:
    """Context: if it raises, no other module is affected by what was done. It yields the list of the new states.

    The modules of the call are lost: their whole parameters were freed one by one as these were cut.
    """
    groups = [group for state in plan.inside for group in state.groups]
    groups = list(dict.fromkeys([*groups, *(each.owner.group for each in plan.tied.values() if each.owner)]))
    before = [(group, {**vars(group)}, {**vars(group.purpose)}, [[*p.names] for p in group.params]) for group in groups]
    roots, classes = [(state.root, state.used) for state in plan.inside], [type(root) for root in plan.roots]
    states: list[FSDPState] = []
    try:
        yield states
    except BaseException as error:
        for state, (root, used) in zip(plan.inside, roots, strict=True):
            state.root, state.used = root, used
        for group, attributes, purpose, names in before:
            vars(group).update(attributes)
            vars(group.purpose).update(purpose)
            for param, own in zip(group.params, names, strict=True):
                param.names = own
                if len(own) < len(param.slots):
                    del param.slots[len(own) :]
                    group.parameters.follow_slots()
        for state in states:
            for group in state.groups:
                group.root = None  # type: ignore[assignment]
        for module, cls in zip(plan.roots, classes, strict=True):
            module.__dict__.pop(STATE, None)
            object.__setattr__(module, "__class__", cls)
        add_note = getattr(error, "add_note", None)  # from Python 3.11 on
        if add_note is not None:
            add_note(f"fully_shard had begun to shard {type(plan.roots[0]).__name__}. Build the model again.")
        raise


def attach(
    state: FSDPState,
    below: Iterable[FSDPState],
    classes: Sequence[type],
    names: Mapping[nn.Module, str] | None = None,
) -> None:
    """Gives the modules of `state` their state and class, and makes it the root of all states `below`. `names`: what
    `names_below` returns for its modules, if the caller has that.
    """
    for module, cls in zip(state.modules, classes, strict=True):
        module.__dict__[STATE] = state
        object.__setattr__(module, "__class__", cls)  # a user's __setattr__ may refuse it
    Root(state, below, names_below(state.modules) if names is None else names)


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


# ---- what is changed then


def _make_states(plan: Plan) -> list[FSDPState]:
    """Returns the state of the call's modules, and those of its submodules that get groups of their own."""
    apart = {name for names in plan.submodules.values() for name in names}
    rest = [each for each in plan.parameters.values() if each.name not in apart]
    policy = plan.given.mp_policy
    states = [FSDPState(plan.roots, _make_groups(plan, plan.roots, rest, policy), policy)]
    if plan.submodules:  # whose inputs and outputs are those of the module around them, and stay as they are
        policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
    for submodule, names in plan.submodules.items():
        own = [plan.parameters[name] for name in names]
        states.append(FSDPState([submodule], _make_groups(plan, [submodule], own, policy), policy))
    states[0].parts = states[1:]
    for state in states:
        state.notes = plan.notes
    states[0].ignored = {*plan.given.ignored_modules}
    return states


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
        groups[-1].originals = mark_originals(originals, params, type(plan.roots[0]).__name__)
    return groups


def _join_owners(plan: Plan, state: FSDPState) -> None:
    """Gives tied parameters of the call to the groups that have sharded them before."""
    for each in plan.tied.values():
        assert each.owner is not None, "it is tied"
        group, param = each.owner
        group.reshard_if_idle()
        param.add_slots(each.slots, each.name)
        group.parameters.follow_slots()
        if group not in state.tied_to:
            state.tied_to.append(group)
