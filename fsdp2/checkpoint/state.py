"""Collects what a save writes and a load fills: this rank's flat state dict, under the keys of torch's state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ..shards.dtensors import box_of, cut_axes
from ..shards.dtensors import cuts_of as cuts_of_rank
from ..shards.find import fqn_of, is_sharded_by_fsdp1, shards_of
from ..shards.tensors import PLAIN, dtensor, dtensor_spec, local_if_any, local_of, require_module, some_of
from .layout import Entry, Kind, Mesh

Optimizers = Optimizer | Sequence[Optimizer]
MODEL, OPTIMIZER, PER_RANK = "model", "optimizer", "per_rank"
STATES, GROUPS = "state", "param_groups"
"""The keys in the state dict of an optimizer."""


class State:
    """The flat state dict of this rank.

    Args:
        nested: the state dict, of dicts, lists, tensors and other values.
        flat_keys: keys of the model do not begin with "model".

    Attributes:
        tensors: key -> the tensor, plain or a DTensor.
        objects: key -> any other value.
        paths: key -> the keys and indices on the way to it in the state dict.
    """

    def __init__(self, nested: Mapping[str, Any], flat_keys: bool = False) -> None:
        self.flat_keys = flat_keys
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        for path, value in _leaves((), nested):
            name = ".".join(map(str, path[1:] if flat_keys and path[0] == MODEL else path))
            if name in self.paths:
                raise ValueError(f"{name}: expected one value of this name, got two: {path} and {self.paths[name]}")
            self.add(name, path, value)
        self.stored_paths = {
            name: path[1:] if flat_keys and path[0] == MODEL else path for name, path in self.paths.items()
        }
        """Key -> the keys and indices on the way to it, of which the layout of a checkpoint has a list."""

    def add(self, name: str, path: tuple[Any, ...], value: Any) -> None:
        """Adds a value."""
        self.paths[name] = path
        (self.tensors if isinstance(value, Tensor) else self.objects)[name] = value

    def remove(self, name: str) -> None:
        """Removes a value."""
        for each in (self.paths, self.tensors, self.objects):
            each.pop(name, None)

    def local(self, name: str) -> Tensor:
        """Returns this rank's part of a tensor: a plain tensor over its memory."""
        return local_if_any(self.tensors[name]).detach()

    def kind(self) -> Kind:
        """Returns what this rank holds.

        Raises:
            NotImplementedError: a tensor is of a subclass, or is distributed in another way than by chunks.
            RuntimeError: a tensor is on meta.
        """
        meshes: dict[Mesh, int] = {}
        known: dict[Any, int] = {}
        entries = []
        for name, tensor in self.tensors.items():
            mesh, cuts = -1, tuple[tuple[int, int], ...]()
            if isinstance(tensor, DTensor):
                if id(tensor.device_mesh) not in known:
                    ranks = tensor.device_mesh.mesh
                    own = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
                    known[id(tensor.device_mesh)] = meshes.setdefault(own, len(meshes))
                mesh, cuts = known[id(tensor.device_mesh)], cuts_of(name, tensor)
            _check(name, self.local(name))
            entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), mesh, cuts))
        return Kind(tuple(meshes), tuple(entries), tuple(self.objects))

    def may_be_copied_later(self, model: nn.Module) -> dict[str, Callable[[], int]]:
        """Returns the tensors that no forward or backward changes: sharded parameters, and their states.

        They are names -> functions that return a number which changes when the tensor is written to.
        """
        params = {(MODEL, name): param for name, param in shards_of(model).names().items()}
        if any(param.is_stepped_in_backward for param in params.values()):
            return {}
        found: dict[str, Callable[[], int]] = {}
        for name, tensor in self.tensors.items():
            if (param := params.get(self.paths[name])) is not None:
                found[name] = partial(attrgetter("version"), param)
            elif isinstance(tensor, DTensor) and self.paths[name][0] == OPTIMIZER:
                found[name] = partial(_version, tensor, self.local(name))
        return found


def _version(tensor: Tensor, local: Tensor) -> int:
    return tensor._version + local._version


def _leaves(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields what torch.distributed.checkpoint saves under a key of its own, each with its path.

    A dict with other keys than texts is one value here: torch makes texts of them, and loads another dict.
    """
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            yield from _leaves((*path, key), each)
    elif isinstance(value, list) and any(map(_is_container, value)):
        for index, each in enumerate(value):
            yield from _leaves((*path, index), each)
    else:
        yield path, value


def _is_container(value: Any) -> bool:
    return isinstance(value, Tensor | Mapping) or (isinstance(value, list) and any(map(_is_container, value)))


def nest(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Returns the dicts and lists in which values have these paths."""
    if [*values] == [()]:
        return values[()]
    below: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *path), value in values.items():
        below.setdefault(key, {})[tuple(path)] = value
    if all(isinstance(key, int) for key in below):
        return [nest(below[key]) for key in sorted(below)]
    return {key: nest(each) for key, each in below.items()}


def cuts_of(name: str, tensor: DTensor) -> tuple[tuple[int, int], ...]:
    """Returns pairs of a mesh axis and a dim, in the order in which these axes cut a DTensor into chunks."""
    shape, local = [*tensor.shape], [*local_if_any(tensor).shape]
    try:
        axes = cut_axes(name, tensor.device_mesh, tensor.placements, tensor.dim())
        is_known = [each.stop - each.start for each in box_of_rank(name, tensor)] == local
    except NotImplementedError:
        is_known = False
    if not is_known:
        raise NotImplementedError(
            f"{name}: expected a DTensor that each axis of its mesh shards in chunks or replicates, got placements "
            f"{tuple(tensor.placements)} and the local shape {local} of {shape}. Take it out of the state dict, or "
            "save its full_tensor() in extra=."
        )
    return (*axes,)


def box_of_rank(name: str, tensor: DTensor) -> tuple[slice, ...]:
    """Returns one slice for each dim of a DTensor: what this rank holds of it."""
    if tensor.device_mesh.get_coordinate() is None:
        return (slice(0, 0),) * tensor.dim()
    return box_of(cuts_of_rank(name, tensor.device_mesh, tensor.placements, tensor.shape), tensor.shape)


def _check(name: str, local: Tensor) -> None:
    if type(local) not in PLAIN or local.layout != torch.strided or local.is_quantized:
        kind = type(local).__name__ if type(local) not in PLAIN else str(local.layout)
        raise NotImplementedError(
            f"{name}: expected a plain tensor, got {kind}, whose values are not its elements. Save it with "
            "torch.distributed.checkpoint, or take it out of the state dict."
        )
    if local.is_meta:
        raise RuntimeError(f"{name}: expected values, got a tensor on meta. Load or initialise the weights first.")


def check_arguments(function: str, model: Any, optimizer: Any, group: Any) -> tuple[Optimizer, ...]:
    """Returns the optimizers.

    Raises:
        TypeError: the model is no module, or an optimizer is none, or `group` is no process group.
        NotImplementedError: torch's FullyShardedDataParallel has sharded the model.
    """
    require_module("model", model, function)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{function}: process_group: expected a process group or None, got {type(group).__name__}")
    for name, param in model.named_parameters():
        if is_sharded_by_fsdp1(param):
            raise NotImplementedError(
                f"{function}: {name}: expected a parameter that fully_shard has sharded, or a plain one, got one of "
                "FullyShardedDataParallel. Save and load it by torch.distributed.checkpoint: fsdp2.checkpoint.load "
                "reads such a folder into a model that fully_shard has sharded."
            )
    optimizers = [] if optimizer is None else [*optimizer] if isinstance(optimizer, Iterable) else [optimizer]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"{function}: optimizer: expected a torch.optim.Optimizer, several, or None, got {type(each).__name__}"
            )
    return tuple(optimizers)


@torch.no_grad()
def states_of(
    model: nn.Module, optimizers: Sequence[Optimizer], *, trainable_only: bool, flat_keys: bool
) -> dict[str, Any]:
    """Returns the state dicts of a model and its optimizers, under the keys of torch's functions for state dicts.

    Every rank must call it. It makes no step: an optimizer that has not stepped has no states.

    Args:
        model: the model.
        optimizers: its optimizers.
        trainable_only: leave out parameters that do not require a gradient.
        flat_keys: options of the optimizers lie under the FQN of each parameter.

    Raises:
        ValueError: an optimizer has a parameter that the model lacks; of several, one has what is of no parameter, or a
            parameter of another one.
    """
    for sharded in shards_of(model).groups:
        sharded.before_read()
    found: dict[str, Any] = {MODEL: {fqn_of(model, key): value for key, value in model.state_dict().items()}}
    for key, param in model.named_parameters(remove_duplicate=False):
        if trainable_only and not param.requires_grad:
            found[MODEL].pop(fqn_of(model, key), None)
    if not optimizers:
        return found
    states, groups, more = dict[str, Any](), list[dict[str, Any]](), dict[str, Any]()
    for _, own, fqns in _state_dicts(model, optimizers):
        kept = {key: state for key, state in own[STATES].items() if not isinstance(state, dict) or state}
        states |= {fqns.get(key, key): state for key, state in kept.items()}
        groups += [group | {"params": [fqns[number] for number in group["params"]]} for group in own[GROUPS]]
        more |= {key: value for key, value in own.items() if key not in (STATES, GROUPS)}
    by_fqn = {fqn: options_of(group) for group in groups for fqn in group["params"]}
    return found | {OPTIMIZER: ({STATES: states} if states else {}) | {GROUPS: by_fqn if flat_keys else groups} | more}


def load_weights(model: nn.Module, values: Mapping[str, Any], strict: bool) -> None:
    """Has a model load values by FQN. What has none keeps its own.

    Raises:
        ValueError: with `strict`, the model does not take a key of its own state dict.
    """
    keys = {key: fqn_of(model, key) for key in model.state_dict()}
    found = model.load_state_dict({key: values[fqn] for key, fqn in keys.items() if fqn in values}, strict=False)
    if strict and found.unexpected_keys:
        unknown = some_of([*found.unexpected_keys])
        raise ValueError(
            f"load: expected a model that takes the keys of its own state_dict(), got one without {unknown}"
        )


def load_states(model: nn.Module, optimizers: Sequence[Optimizer], values: Mapping[str, Any]) -> None:
    """Has optimizers load a state dict, whose states have FQNs and names, and whose options are those of all groups.

    A parameter that has no states in it has none then. Every state keeps its dtype.
    """
    left, states = iter(values[GROUPS]), values[STATES]
    for optimizer, own, fqns in _state_dicts(model, optimizers):
        numbers = {fqn: number for number, fqn in fqns.items()}
        of_all = {key: key for key in states} if len(optimizers) == 1 else {}
        loaded = {number: states[key] for key, number in (of_all | numbers).items() if key in states}
        options = [group | next(left) for group in own[GROUPS]]
        optimizer.load_state_dict({**own, **values, STATES: loaded, GROUPS: options})
    for fqn, (param, optimizer) in params_of(model, optimizers).items():
        if isinstance(now := optimizer.state.get(param), dict):
            # torch has converted each but "step" to the dtype of the parameter: NAdam's product, for example. Of a text
            # it has made a generator.
            given = {name: value for name, value in states.get(fqn, {}).items() if name in now and name != "step"}
            now |= {name: _as_given(now[name], value) for name, value in given.items()}


def _as_given(loaded: Any, given: Any) -> Any:
    """Returns a given value, of which torch has moved the tensors to the device of the parameter."""
    if isinstance(given, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(given, Mapping):
        return {key: _as_given(loaded[key], value) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_as_given(*pair) for pair in zip(loaded, given, strict=True))
    return given


def make_state(
    name: str, param: Tensor | None, dtype: torch.dtype, shape: Sequence[int], is_cut: bool | None, rests: bool
) -> Tensor:
    """Returns memory for a state that the optimizer lacks, over the mesh of its parameter.

    Args:
        name: its key in the flat state dict.
        param: the parameter. None: it is a state of no parameter.
        dtype: the dtype of the state.
        shape: the shape of the whole state.
        is_cut: the state is a DTensor, and ranks have parts of it. False: each has all of it, unless it has the shape
            of the parameter. None: it is a plain tensor.
        rests: the states of the optimizer rest on the CPU.
    """
    if not isinstance(param, DTensor) or is_cut is None:
        return torch.zeros([*shape], dtype=dtype)  # the optimizer moves it to the device of the parameter
    placements = [*param.placements]
    if tuple(shape) != tuple(param.shape):
        keeps = [is_cut and getattr(each, "dim", len(shape)) < len(shape) for each in placements]
        placements = [each if keep else Replicate() for each, keep in zip(placements, keeps, strict=True)]
    box = box_of(cuts_of_rank(name, param.device_mesh, placements, shape), shape)
    device = "cpu" if rests else local_of(param).device
    local = torch.zeros([each.stop - each.start for each in box], dtype=dtype, device=device)
    return dtensor(local, dtensor_spec(param.device_mesh, (*placements,), tuple(shape), dtype))


def params_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, tuple[Tensor, Optimizer]]:
    """Returns the FQNs of the parameters in optimizers -> the parameter, and its optimizer."""
    names = {id(param): fqn_of(model, key) for key, param in model.named_parameters()}
    held = ((param, each) for each in optimizers for group in each.param_groups for param in group["params"])
    return {names[id(param)]: (param, each) for param, each in held}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in a param group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _state_dicts(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Optimizer, dict[str, Any], dict[Any, str]]]:
    """Yields optimizers, their state dicts, and the FQNs of the parameters to which these have given numbers."""
    names = {id(param): fqn_of(model, key) for key, param in model.named_parameters()}
    taken = set[str]()
    for optimizer in optimizers:
        own, fqns, kind = optimizer.state_dict(), dict[Any, str](), type(optimizer).__name__
        for group, saved in zip(optimizer.param_groups, own[GROUPS], strict=True):
            for param, number in zip(group["params"], saved["params"], strict=True):
                if id(param) not in names:
                    raise ValueError(
                        f"optimizer: expected parameters of the model, got one of shape {[*param.shape]} in a "
                        f"{kind} that the model lacks. Pass the model that has all of them."
                    )
                fqns[number] = names[id(param)]
        others = taken & {*fqns.values()} | (own[STATES].keys() - fqns.keys()) | (own.keys() - {STATES, GROUPS})
        if len(optimizers) > 1 and others:
            raise ValueError(
                f"optimizer: expected states of one parameter each, and each parameter in one of several optimizers, "
                f"got {some_of(sorted(map(str, others)))} in a {kind} and in another, or of none. Save each of these "
                "optimizers in a folder of its own, with the model, and load them so."
            )
        taken |= {*fqns.values()}
        yield optimizer, own, fqns
