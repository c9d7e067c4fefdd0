"""Collects what a save writes and a load fills: this rank's flat state dict, under the keys of torch's state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards.dtensors import box_of, cut_axes
from ..shards.dtensors import cuts_of as cuts_of_rank
from ..shards.find import shards_of
from ..shards.tensors import PLAIN, local_if_any, require_module
from .layout import Entry, Kind, Mesh

Optimizers = Optimizer | Sequence[Optimizer]
MODEL, OPTIMIZER, PER_RANK = "model", "optimizer", "per_rank"


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
            self.paths[name] = path
            (self.tensors if isinstance(value, Tensor) else self.objects)[name] = value
        self.stored_paths = {
            name: path[1:] if flat_keys and path[0] == MODEL else path for name, path in self.paths.items()
        }
        """Key -> the keys and indices on the way to it, as torch.distributed.checkpoint notes them."""

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


def check_arguments(function: str, model: Any, optimizer: Any) -> tuple[Optimizer, ...]:
    """Returns the optimizers; raises TypeError for what is no module, or no optimizer."""
    require_module("model", model, function)
    optimizers = [] if optimizer is None else [*optimizer] if isinstance(optimizer, Iterable) else [optimizer]
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"{function}: optimizer: expected a torch.optim.Optimizer, several, or None, got {type(each).__name__}"
            )
    return tuple(optimizers)


def parameter_of(path: Sequence[Any]) -> str | None:
    """Returns the FQN of the parameter to which an optimizer's state on this path belongs; None for anything else."""
    if path[0] != OPTIMIZER:
        return None
    if path[1] == "state":
        return str(path[2])
    is_flat = len(path) == 2 and str(path[1]).startswith("state.")
    return str(path[1]).removeprefix("state.").rpartition(".")[0] if is_flat else None


def states_of(
    model: nn.Module, optimizers: Sequence[Optimizer], *, trainable_only: bool, keep_empty: bool, flat_keys: bool
) -> dict[str, Any]:
    """Returns the state dicts of a model and its optimizers. Every rank must call it.

    Args:
        model: the model.
        optimizers: its optimizers.
        trainable_only: leave out parameters that do not require a gradient.
        keep_empty: an optimizer that has not stepped has no states. False: torch makes them, of zeros.
        flat_keys: states and options of the optimizers lie under keys with the FQN of their parameter.
    """
    for group in shards_of(model).groups:
        group.before_read()
    options = StateDictOptions(ignore_frozen_params=trainable_only, flatten_optimizer_state_dict=flat_keys)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        states: dict[str, Any] = {MODEL: get_model_state_dict(model, options=options)}
        found: dict[str, Any] = {}
        for each in optimizers:
            is_fresh = keep_empty and not each.state
            own: dict[str, Any] = get_optimizer_state_dict(model, each, options=options)
            if is_fresh:  # torch has stepped on zeros to make states, and that would count as a step
                each.state.clear()
                own = {key: value for key, value in own.items() if key.partition(".")[0] != "state"}
            for key, value in own.items():
                if key in ("state", "param_groups") and key in found:
                    found[key] = found[key] | value if key == "state" else found[key] + value
                else:
                    found[key] = value
        if optimizers:
            states[OPTIMIZER] = found
    return states
