"""Compares what ranks must have in common of a model: the order and kinds of its parameters, the weights that they
begin with, memory without values, and writes to frozen parameters.

A gather and a reduction go by position: ranks whose groups differ would mix rows of different parameters. Each rank
holds its own rows of each parameter: of ranks that begin with different weights, or write to a frozen parameter on some
ranks only, these are rows of different models.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.build import ParameterPlan, Plan
from ..engine.codec import AS_IS
from ..engine.events import Change
from ..engine.group import FSDPParamGroup
from ..engine.group_parameters import version_if_counted
from ..engine.mesh import DataMesh
from ..engine.owners import by_ranks, some_of
from ..engine.parameter import FSDPParam, fqn
from ..engine.policy import ReduceWhen
from ..engine.root import Root
from ..engine.state import FSDPState, names_below
from ..parameters.checksum import bits_of, checksum, read
from ..parameters.empty_memory import is_marked
from ..parameters.parameter_methods import buffers_on_meta
from ..ranks.compare_ranks import ComparedNumbers, Comparison, compare, groups_by_mesh
from ..torch_private.internals import is_python_group, no_torch_function
from .due import ForwardCheck, RankCheck, alike, found
from .headers import trainable_remark
from .level import is_on

_Numbers = Iterator[tuple[DataMesh, ComparedNumbers]]

# ---- structure


class _Described(NamedTuple):
    """Describes one parameter, as ranks compare it. `kind`: text -> value, such as "the shape" -> its shape."""

    name: str
    group: str
    kind: dict[str, str]
    requires_grad: bool


def _describe(groups: Sequence[FSDPParamGroup]) -> list[_Described]:
    """Returns a description of each parameter of `groups`, in the order in which they are gathered."""
    described = []
    for group in groups:
        policy = group.settings.policy
        for param in group.params:
            choice = param.grad_choice
            is_free = choice is not None and choice.dtype is None
            codec = policy.codec_for(param.delivered_dtype)
            kind = {
                "the shape": str(param.shape),
                "the dtype": str(param.local.dtype),
                "the dtype in forward": str(param.compute_dtype(policy)),
                "gradients of the dtype": (
                    "of the parameter" if choice is None else f"{param.delivered_dtype}{' from any' * is_free}"
                ),
                "tensors of the class": type(param.local).__name__,
                "shards along dim": str(param.dim),
                "gradients that travel in": "the dtype of their sums" if codec == AS_IS else repr(codec),
                "sums between replicas by": repr(policy.compression.all_reduce),
            }
            described.append(_Described(" = ".join(param.names), group.name, kind, param.sharded.requires_grad))
    return described


class Structure(RankCheck):
    """Compares names, order, shapes, dtypes and `requires_grad` of parameters between ranks.

    It also has headers say which parameters are trainable, for the errors of ranks that are out of step.
    """

    def __init__(self) -> None:
        self._trainable: dict[FSDPParamGroup, list[bool]] = {}

    def attached(self, root: Root) -> None:
        self._trainable = {group: group.parameters.trainable for group in root.groups}
        self._remark()

    def detached(self, root: Root) -> None:
        for group in root.groups:
            group.comm_label.set_remark("")

    def changed(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        if (
            change is Change.SETTINGS and self._trainable[group] != group.parameters.trainable
        ):  # other settings change in each accumulation
            self._trainable[group] = group.parameters.trainable
            self._remark()

    def _remark(self) -> None:
        remark = trainable_remark([flag for flags in self._trainable.values() for flag in flags])
        for group in self._trainable:
            group.comm_label.set_remark(remark)

    def numbers(self, comparison: Comparison) -> _Numbers:
        for mesh, groups in groups_by_mesh(comparison.root.groups).items():
            if mesh.num_ranks > 1:
                described = _describe(groups)
                # Ranks that leave conditional modules out reduce zeros in their place. Where grad is off on some rank,
                # nothing is reduced.
                asked = {group.name for group in groups if group.settings.reduce_when is ReduceWhen.ASKED}
                flags = {each.name: each.requires_grad for each in described if each.group not in asked}
                told = [each[:-1] for each in described], flags if torch.is_grad_enabled() else None
                yield alike("structure", mesh, lambda told=told: told, _explain_structure)  # type: ignore[misc]


_Told = tuple[list[tuple[str, str, dict[str, str]]], dict[str, bool] | None]
_SAME_CODE = "Build and set up the model by the same code on all ranks"


def _explain_structure(of_ranks: Mapping[int, _Told]) -> str:
    """Returns what differs between ranks, and what to do about it."""
    (first, (expected, _)), *others = of_ranks.items()
    for other, (got, _) in others:
        text = _missing(first, expected, other, got) or _missing(other, got, first, expected)
        text = text or _kinds_differ(first, expected, other, got) or _orders_differ(first, expected, other, got)
        if text:
            return text
    flags = {rank: each for rank, (_, each) in of_ranks.items() if each is not None}
    if len(flags) < len(of_ranks):
        return ""
    apart = [name for name in flags[first] if len({each.get(name) for each in flags.values()}) > 1]
    return (
        f"{some_of(apart)}: requires_grad differs between ranks: it is "
        f"{by_ranks({rank: str(each.get(apart[0])) for rank, each in flags.items()})}, so they would reduce different "
        "gradients. Set requires_grad alike on all ranks, before the forward; fsdp2.check(model) lists where it "
        "differs."
    )


def _missing(one: int, ones: Sequence[Any], other: int, others: Sequence[Any]) -> str:
    """Says which parameters of rank `one` the rank `other` lacks."""
    there = {name for name, *_ in others}
    missing = [name for name, *_ in ones if name not in there]
    if not missing:
        return ""
    return (
        f"{some_of(missing)}: rank {one} shards this parameter, and rank {other} does not. {_SAME_CODE}, and call "
        "fully_shard on the same modules, with the same ignored_params."
    )


def _kinds_differ(one: int, ones: Sequence[Any], other: int, others: Sequence[Any]) -> str:
    """Says in what the first parameter differs that is not the same on both ranks."""
    of_other = {name: (group, kind) for name, group, kind in others}
    for name, group, kind in ones:
        other_group, other_kind = of_other[name]
        for what, value in kind.items():
            if value != other_kind[what]:
                return (
                    f"{name}: expected the same on all ranks, got {what} {value} on rank {one}, and {what} "
                    f"{other_kind[what]} on rank {other}. {_SAME_CODE}; if a size depends on data that a rank reads (a "
                    "vocabulary), take one rank's on all of them (torch.distributed.broadcast_object_list)."
                )
        if group != other_group:
            return (
                f"{name}: rank {one} has it in the group {group}, and rank {other} in the group {other_group}. "
                "Call fully_shard on the same modules on all ranks."
            )
    return ""


def _orders_differ(one: int, ones: Sequence[Any], other: int, others: Sequence[Any]) -> str:
    """Says where the order of parameters differs."""
    for i, ((name, *_), (got, *_)) in enumerate(zip(ones, others, strict=True)):
        if name != got:
            return (
                f"{name}: ranks register their modules in another order: parameter {i} is {name} on rank {one}, and "
                f"{got} on rank {other}. Gathers go by that order, so weights would be made of rows of both. Register "
                "modules in the same order on all ranks (of names in a set: in that of sorted(names)), and call "
                "fully_shard after that."
            )
    return ""


# ---- memory without values


class EmptyMemory(RankCheck):
    """Refuses to train with memory that nobody has initialised, the first time, and the first after loading."""

    def numbers(self, comparison: Comparison) -> _Numbers:
        if comparison.is_anew:
            yield from _empty_memory(comparison.root.groups)


def refuse_empty_memory(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises RuntimeError, on all ranks, if nobody has initialised memory of `groups`. All ranks of the groups' meshes
    must call it.
    """
    for mesh, numbers in _empty_memory(groups):
        compare(mesh, [numbers])


def _empty_memory(groups: Iterable[FSDPParamGroup]) -> _Numbers:
    for mesh, members in groups_by_mesh(groups).items():
        name = next(filter(None, map(_unwritten_in, members)), "")
        yield found("empty memory", mesh, name and f"{name}: {_EMPTY}")


_EMPTY = (
    "to_empty gave it memory, and nobody has initialised it since. Initialise or load it before the first forward; a "
    "buffer that no state dict holds, too."
)


def _unwritten_in(group: FSDPParamGroup) -> str:
    """Returns the name of a parameter or buffer that is as `to_empty` left it, or an empty text."""
    names = [param.name for param in group.empty.unwritten_params() if is_marked(param.local)]
    empty = {id(buffer) for buffer in group.empty.unwritten_buffers()}
    prefix = "" if group.name == "root" else group.name
    for module in group.modules if empty else ():
        names += [name for name, buffer in module.named_buffers(prefix) if id(buffer) in empty]
    return next(iter(names), "")


class BuffersOnMeta(ForwardCheck):
    """Refuses a forward with buffers on the meta device: torch may read as indices what is no memory."""

    def before_forward(self, group: FSDPParamGroup) -> None:
        device = group.mesh.device
        on_meta = buffers_on_meta(group.state.own_modules())
        if on_meta and device.type != "meta":
            below = names_below(group.root.state.modules)
            names = [f"{fqn(below[module], name)} on meta" for module, name in on_meta]
            raise RuntimeError(
                f"expected buffers on {device}, got {', '.join(names)}. Materialise the model before its first "
                f"forward: model.to_empty(device={device.type!r}), then initialise or load; or assign what the state "
                "dict that was loaded lacks."
            )


# ---- weights that ranks begin with

_NUM_SAMPLES = 16
# Where the values of a parameter come from: nobody knows, or they are others by now; fully_shard was given them; they
# were loaded.
_UNKNOWN, _BUILT, _LOADED = range(3)


@lru_cache
def _indices_among(numel: int) -> range:
    """Returns the indices of the elements that are kept, among `numel`."""
    return range(0, numel, max(1, numel // _NUM_SAMPLES))


class _Sample(NamedTuple):
    """Some values of a tensor of shape `shape`."""

    values: Tensor
    shape: torch.Size


def _sample(gathered: Any) -> _Sample | None:
    """Returns some values of what the ranks of the mesh share of a parameter; None if it has none, or is no plain
    tensor. Grad must be off.
    """
    if type(gathered) not in (Tensor, nn.Parameter) or gathered.dim() == 0 or gathered.is_meta:
        return None
    indices = _indices_among(gathered.numel())
    return _Sample(torch.as_strided_copy(gathered.contiguous(), (len(indices),), (indices.step,)), gathered.shape)


class InitialValues:
    """Some values of a parameter that this rank has had whole, and where they came from (_BUILT or _LOADED).

    `values`: those that were kept. `sync_module_states` writes to them.
    """

    def __init__(self, param: FSDPParam, sample: _Sample, origin: int) -> None:
        self.values, self._shape = sample
        self._param, self._origin = param, origin
        self.note_place()

    def note_place(self) -> None:
        """Notes that the shard holds these values now, where it lies now."""
        self._local, self._version = weakref.ref(self._param.local), version_if_counted(self._param.sharded)

    def tell(self) -> tuple[Tensor, int]:
        """Returns a checksum of the values, and where they come from, if the parameter still has them."""
        return checksum(self.values), _UNKNOWN if self._is_written() or self._has_other_values() else self._origin

    def _is_written(self) -> bool:
        """Returns True if somebody has written to the shard, as far as version counters tell."""
        is_there = self._local() is self._param.local
        return is_there and version_if_counted(self._param.sharded) != self._version

    def _has_other_values(self) -> bool:
        param, local, values = self._param, self._param.local, self.values
        if local.dtype != values.dtype:
            return True
        first, last = param.bounds
        indices = torch.tensor(_indices_among(self._shape.numel()), dtype=torch.int64, device=local.device)
        places = torch.unravel_index(indices, self._shape)
        own = (places[param.dim] >= first) & (places[param.dim] < last)
        index = [place[own] - (first if dim == param.dim else 0) for dim, place in enumerate(places)]
        return bool((bits_of(local[tuple(index)]) != bits_of(values.to(local.device)[own])).any())


class _Samples(dict[tuple[int, str], _Sample]):
    """Some values of the parameters of one call, until their groups are attached: by the id of the module of the first
    slot, which the parameter's group keeps alive, and the name there.
    """


class _KnownValues(dict[FSDPParam, InitialValues]):
    """What is known of parameters of one call that ranks have not compared yet."""


def known_of(group: FSDPParamGroup) -> dict[FSDPParam, InitialValues]:
    """Returns what is known of parameters of the group that ranks have not compared yet."""
    known = _known_of_call(group)
    return {param: known[param] for param in group.params if param in known}


def _known_of_call(group: FSDPParamGroup) -> dict[FSDPParam, InitialValues]:
    return group.state.notes.of(_KnownValues)


def keep_samples(plan: Plan) -> None:
    """Keeps some values of each parameter of a call, before it is cut, unless checks are off."""
    samples = plan.notes.of(_Samples)
    each: ParameterPlan
    with torch.no_grad():
        for each in plan.parameters.values() if is_on() else ():
            slot = each.slots[0]
            sample = _sample(each.distribution.gathered_part(slot.get()))
            if sample is not None:
                samples[id(slot.module), slot.name] = sample


def keep_initial_values(state: FSDPState) -> None:
    """Keeps the samples of a call with the parameters that were cut, for ranks to compare."""
    samples, known = state.notes.of(_Samples), state.notes.of(_KnownValues)
    with no_torch_function():  # versions are read three times as fast
        for param in [param for each in (state, *state.parts) for group in each.groups for param in group.params]:
            slot = param.slots[0]
            sample = samples.pop((id(slot.module), slot.name), None)
            if sample is not None:
                known[param] = InitialValues(param, sample, _BUILT)


class InitialWeights(RankCheck):
    """Compares what ranks have cut their shards from, the first time, and the first after all ranks have loaded."""

    def changed(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        known = _known_of_call(group)
        for param, parameter in replaced.items():
            known.pop(param, None)
            if not isinstance(parameter, DTensor):
                with torch.no_grad():
                    sample = _sample(param.gathered(parameter))
                if sample is not None:
                    known[param] = InitialValues(param, sample, _LOADED)

    def numbers(self, comparison: Comparison) -> _Numbers:
        if comparison.is_anew:
            yield from _initial_weights(comparison.root.groups)


def compare_initial_weights(groups: Sequence[FSDPParamGroup]) -> None:
    """Raises RuntimeError, on all ranks, if they have cut groups from different weights. All ranks of the meshes must
    call it.
    """
    for mesh, numbers in _initial_weights(groups):
        compare(mesh, [numbers])


def _initial_weights(groups: Iterable[FSDPParamGroup]) -> _Numbers:
    for mesh, members in groups_by_mesh(groups).items():
        yield _initial_weights_on(mesh, members)


def _initial_weights_on(mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> tuple[DataMesh, ComparedNumbers]:
    params = [param for group in groups for param in group.params]
    known = {param: each for group in groups for param, each in known_of(group).items()}

    def tell() -> list[tuple[int, int]]:
        told = {param: each.tell() for param, each in known.items()}
        sums = dict(zip(told, read([number for number, _ in told.values()]), strict=True))
        return [(sums[param], told[param][1]) if param in told else (0, _UNKNOWN) for param in params]

    def explain(of_ranks: Mapping[int, Sequence[tuple[int, int]]]) -> str:
        for param, *of_param in zip(params, *of_ranks.values(), strict=True):
            origins = {origin for _, origin in of_param}
            if len({*of_param}) > 1 and origins == {_BUILT}:
                return (
                    f"{param.name}: ranks had different values of it when fully_shard was called, so the sharded model "
                    "is made of parts of different models. Call fsdp2.sync_module_states(model) before fully_shard, "
                    "which gives all ranks the first one's weights; or set the same seed on all ranks before the model "
                    f"is built; or load the weights after fully_shard.{_hint(mesh)}"
                )
            if len({*of_param}) > 1 and _LOADED in origins:
                return (
                    f"{param.name}: load_state_dict(..., assign=True) was given whole tensors of different values on "
                    "the ranks, or on some ranks only, so its shards are parts of different tensors. Load the same on "
                    "all ranks, or set_model_state_dict(..., broadcast_from_rank0=True)."
                )
        return ""

    def settle(_: bool) -> None:
        for group in groups:
            for param in group.params:
                _known_of_call(group).pop(param, None)

    values = [bits_of(each.values).to(mesh.device, torch.int64) for each in known.values()]
    return alike("initial weights", mesh, tell, explain, [checksum(torch.cat(values)) if values else 0], settle)


def _hint(mesh: DataMesh) -> str:
    """Says why a seed is not enough, where ranks are threads, or may be."""
    if not any(map(is_python_group, mesh.axis_groups)):
        return ""
    return " Threads share one random generator: if ranks are threads, broadcast the weights before fully_shard."


# ---- frozen parameters


class FrozenParameters(RankCheck):
    """Compares between ranks which frozen parameters have been written to since ranks last compared them.

    Optimizers step on trainable parameters, and step_history.py compares that. A frozen one should change on all ranks
    or on none, which its version counter shows.
    """

    def __init__(self) -> None:
        # The identity of the sharded parameter, and its version, then. torch swaps no tensor that has a weak reference.
        self._seen: WeakKeyDictionary[FSDPParam, tuple[int, int]] = WeakKeyDictionary()

    def numbers(self, comparison: Comparison) -> _Numbers:
        for mesh, groups in groups_by_mesh(comparison.root.groups).items():
            if comparison.is_anew:
                self._see(groups)
            elif mesh.num_ranks > 1:
                yield self._numbers_on(mesh, groups)

    def _numbers_on(self, mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> tuple[DataMesh, ComparedNumbers]:
        written = self.find_written(groups)
        number = zlib.crc32(repr([name for name, yes in written.items() if yes]).encode())
        return alike(
            "frozen parameters", mesh, lambda: written, _explain_written, [number], lambda _: self._see(groups)
        )

    def find_written(self, groups: Iterable[FSDPParamGroup]) -> dict[str, bool]:
        """Returns the name of each frozen parameter that has rows on all ranks -> True if this rank has written to it
        since ranks last compared it.
        """
        with no_torch_function():
            params = [param for group in groups for param in group.params]
            return {
                param.name: self._seen.get(param) not in (None, _version_of(param))
                for param in params
                if not param.sharded.requires_grad and _is_on_all(param)
            }

    def _see(self, groups: Iterable[FSDPParamGroup]) -> None:
        with no_torch_function():
            for param in (param for group in groups for param in group.params):
                self._seen[param] = _version_of(param)


def find_written(groups: Iterable[FSDPParamGroup]) -> dict[str, bool]:
    """Returns what `FrozenParameters.find_written` does, of groups under any roots; nothing where checks are off."""
    written: dict[str, bool] = {}
    for group in groups:
        check = group.root.events.of(FrozenParameters)
        written.update(check.find_written([group]) if check is not None else {})
    return written


def written_by_some(of_ranks: Mapping[int, Mapping[str, bool]]) -> dict[str, list[int]]:
    """Returns the names of parameters that some ranks have written to and others not -> the ranks that have.

    `of_ranks`: rank -> what it has found.
    """
    names = dict.fromkeys(name for written in of_ranks.values() for name in written)
    apart = {}
    for name in names:
        flags = {rank: written[name] for rank, written in of_ranks.items() if name in written}
        if len({*flags.values()}) > 1:
            apart[name] = [rank for rank, flag in flags.items() if flag]
    return apart


def _version_of(param: FSDPParam) -> tuple[int, int]:
    return id(param.sharded), version_if_counted(param.sharded)


def _is_on_all(param: FSDPParam) -> bool:
    """Returns True if each rank has rows of it. One that has none may leave out what it does with its own rows."""
    size = param.mesh.size
    rows = 1 if param.is_scalar else param.gathered_shape[param.dim]
    return param.is_scalar or rows > (size - 1) * -(-rows // size)


def _explain_written(of_ranks: Mapping[int, Mapping[str, bool]]) -> str:
    apart = written_by_some(of_ranks)
    if not apart:
        return ""
    ranks = next(iter(apart.values()))
    return (
        f"{some_of(apart)}: only rank {some_of(map(str, ranks))} has written to this frozen parameter since ranks last "
        "compared it, so each rank's part is of another model now. Load a checkpoint of before, and write to the "
        "parameter on all ranks alike."
    )
