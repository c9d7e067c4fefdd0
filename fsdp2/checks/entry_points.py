"""Raises errors for ways into a sharded module other than its forward, where nothing gathers: they say what does.

Many methods are about the sharded parameters: they build an optimizer, initialise, count, save. Those that compute with
unsharded ones are to be registered (see forward_method.py). Without that, torch says no more than that it can't mix
tensors and DTensors. What is here costs next to nothing while modules have unsharded parameters.
"""

from __future__ import annotations

import inspect
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from traceback import walk_tb
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from ..engine.events import extensions
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.nested import attribute_names, fields_of, is_dataclass, tensors_in
from ..engine.owners import all_groups, owners_by_id, sharded_owner
from ..engine.parameter import FSDPParam
from ..engine.replacements import REPLACE_BEFORE
from ..engine.root import Root
from ..engine.served_calls import serve_call
from ..engine.state import FSDPState, names_below, state_of
from ..engine.torch_names import watch_calls
from .before_sharding import facts_of
from .due import Check

_KEY = "fsdp2"
# Types whose objects hold no tensors, or are not searched.
_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, nn.Module)
# What torch says of operands of different dtypes.
_ON_DTYPES = re.compile("dtype|scalar type|should be the same")
# What torch says of an operation on sharded parameters and a plain tensor, and of one that it can't do on shards.
_ON_SHARDS = re.compile("mixed torch.Tensor and DTensor|sharding strategy")


class EntryPoints(Check):
    """Refuses calls of modules whose parameters another module gathers, while these are sharded."""

    def attached(self, root: Root) -> None:
        for group in root.groups:
            if group not in root.new_groups and not group.users and _is_watched(group):
                continue  # the root before has done all of this
            self._unwatch(group)
            inside = dict.fromkeys([slot.module for param in group.params for slot in param.slots])
            for module in inside:
                if module not in group.modules:
                    self._watch(group, module)
            for reference in facts_of(group).transformer_layers:
                layer = reference()
                if layer is not None:
                    leave_fast_path(layer)

    def call_failed(
        self, state: FSDPState, module: nn.Module, name: str | None, inputs: Any, error: RuntimeError
    ) -> None:
        if name is not None:
            explain(error, module, name)
        if inputs is not None:
            explain_dtypes(error, module, *inputs)

    def detached(self, root: Root) -> None:
        for group in root.groups:
            self._unwatch(group)

    def _watch(self, group: FSDPParamGroup, module: nn.Module) -> None:
        hooks = watch_calls(module, _KEY)
        group.registration.while_sharded.append((hooks, _KEY, refuse_call))
        if group.phase is not UNSHARDED:
            hooks[_KEY] = refuse_call

    def _unwatch(self, group: FSDPParamGroup) -> None:
        entries = group.registration.while_sharded
        for hooks, key, value in entries:
            if value is refuse_call:
                hooks.pop(key, None)
        entries[:] = [each for each in entries if each[2] is not refuse_call]


def _is_watched(group: FSDPParamGroup) -> bool:
    return any(value is refuse_call for _, _, value in group.registration.while_sharded)


def leave_fast_path(layer: nn.TransformerEncoderLayer) -> None:
    """Has one of torch's transformer layers call what is sharded inside it: in evaluation it would read the parameters,
    except from modules that have hooks.
    """
    for module in layer.modules():
        is_sharded = module is not layer and state_of(module) is not None
        if is_sharded and _do_nothing not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, args: Any) -> None:
    pass


# ---- calls of modules


class _NotGatheredError(RuntimeError):
    """Says that parameters were not gathered. `owner`: the state whose parameters were sharded."""

    def __init__(self, text: str, owner: FSDPState) -> None:
        super().__init__(text)
        self.owner = owner


def refuse_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses a call of a module whose parameters, which another module gathers, are sharded. It is a forward pre-hook.

    Raises:
        RuntimeError: unless the call computes on shards, with DTensors, or unsharded parameters that stay serve it.
    """
    groups = _groups_of_own_parameters(module)
    if not groups or any(isinstance(tensor, DTensor) for tensor in tensors_in(args, kwargs)):
        return
    if all(serve_call(module, group) for group in groups):
        return
    if isinstance(module, ParametrizationList):  # a parametrized weight is read: most compute with DTensors
        return
    owner = groups[0].state
    outer, inner = _expression(owner.modules[0], owner), _expression(module, owner)
    if owner.modules[0] not in names_below(owner.root.state.modules):
        raise _NotGatheredError(
            f"{inner} ({type(module).__name__}) was called while its parameters are sharded: they are gathered in the "
            f"forward of a {outer} that is no part of the model any more. {REPLACE_BEFORE}",
            owner,
        )
    if not hasattr(owner.modules[0], "unshard"):  # a method of FSDPModule, which no user's class may have
        raise _NotGatheredError(
            f"{inner} ({type(module).__name__}) was called while its parameters are sharded: the class of {outer}, "
            f"which fully_shard had made, was replaced by {type(owner.modules[0]).__name__}, which gathers nothing. "
            "Set __class__ before fully_shard.",
            owner,
        )
    by = inner if owner is owner.root.state else outer  # of the root's parameters, few may be meant
    raise _NotGatheredError(
        f"{inner} ({type(module).__name__}) was called while its parameters are sharded: they are gathered in the "
        f"forward of {outer}. On every rank, call it inside `with fsdp2.full_params({by}):`; or apply fully_shard to "
        f"{inner}, too, before {outer}.",
        owner,
    )


def _groups_of_own_parameters(module: nn.Module) -> list[FSDPParamGroup]:
    """Returns the groups of the sharded parameters that `module` itself has."""
    sharded: list[Any] = [each for each in module._parameters.values() if isinstance(each, DTensor)]
    return list(dict.fromkeys(each.group for each in map(sharded_owner, sharded) if each is not None))


def class_attributes(cls: type) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of `cls`, but those of torch, with errors that say how to have parameters gathered."""
    found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return {
        name: _explained(name, value)
        for name, value in found.items()
        if isinstance(value, FunctionType) and not name.startswith("_") and not hasattr(nn.Module, name)
        if not (value.__module__ or "").startswith("torch.")
    }


def _explained(name: str, method: Any) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            explain(error, self, name)
            raise

    def iterate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return (yield from method(self, *args, **kwargs))
        except RuntimeError as error:
            explain(error, self, name)
            raise

    async def wait(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except RuntimeError as error:
            explain(error, self, name, is_asynchronous=True)
            raise

    if inspect.iscoroutinefunction(method):
        return wraps(method)(wait)
    return wraps(method)(iterate if inspect.isgeneratorfunction(method) else call)


# ---- dtypes


class _NotCastError(RuntimeError):
    pass


def explain_dtypes(error: RuntimeError, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises a better error, if `error` is about dtypes, and `module` was called with tensors that its policy has not
    cast, because they are in objects of a user's own. Objects are not copied for that: a module may write to them.
    """
    state = state_of(module)
    dtype = None if state is None else state.input_dtype
    if state is None or dtype is None or isinstance(error, _NotCastError) or not _ON_DTYPES.search(str(error)):
        return
    if not _is_on(state):
        return
    for name, value in _named_arguments(module, args, kwargs).items():
        for path, inside, tensor in _tensors_in_objects(value, name):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                kind = type(inside).__name__
                raise _NotCastError(
                    f"{_expression(module, state)} ({type(module).__name__}): expected inputs of {dtype}, as its "
                    f"MixedPrecisionPolicy says, got {path} of {tensor.dtype}. Policies cast what is in tuples, lists, "
                    f"dicts, UserDicts and dataclasses, not in other objects, such as this {kind}. Cast it there, by "
                    f"`{path} = {path}.to({dtype})` before the call or in the forward; or make {kind} a dataclass. "
                    f"Torch says: {error}"
                ) from error


def _named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns what `module` was called with, under the names that its forward gives that, if it has them."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {"args": args, **kwargs}


def _tensors_in_objects(value: Any, name: str) -> Iterator[tuple[str, Any, Tensor]]:
    """Yields the tensors that `map_tensors` does not find, since they are in objects of other kinds: an expression
    for each, if `value` is called `name`, and the outermost such object around it.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any, Any]] = [(name, value, None)]
    while waiting:
        name, value, inside = waiting.pop()
        if isinstance(value, Tensor):
            if inside is not None:
                yield name, inside, value
        elif not isinstance(value, _ATOMS) and id(value) not in seen:
            seen.add(id(value))
            is_mapped = isinstance(value, (tuple, list, dict, UserDict)) or is_dataclass(value)
            inside = value if inside is None and not is_mapped else inside
            waiting.extend((name + path, item, inside) for path, item in reversed(_parts_by_path(value)))


def _parts_by_path(value: Any) -> list[tuple[str, Any]]:
    """Returns each part of `value`, with what is written behind an expression for `value` to get that part."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    names = fields_of(value) if is_dataclass(value) else attribute_names(value)
    return [(f".{name}", getattr(value, name)) for name in names]


# ---- methods


def explain(error: RuntimeError, entry: nn.Module, name: str, is_asynchronous: bool = False) -> None:
    """Raises a better error, if `error` comes of sharded parameters that `entry.name(...)` has met."""
    if REPLACE_BEFORE in str(error):
        return
    if isinstance(error, _NotGatheredError):
        is_sharded = entry in error.owner.modules and not _is_registered(error.owner)
        owners = [error.owner] if is_sharded else []
    else:
        is_on_shards = _ON_SHARDS.search(str(error)) is not None
        if is_on_shards:
            _explain_replaced(error, entry)
        owners = _owners_met(error) if is_on_shards else []
    if not owners or not _is_on(owners[0]):
        return
    owner, is_own = owners[0], all(entry in each.modules for each in owners)
    where, by = _expression(entry, owner), _expression(owner.modules[0] if len(owners) == 1 else entry, owner)
    what = f"{where}.{name}() computes with parameters that are sharded"
    tables = [group.params[0].name for each in owners for group in each.groups if group.settings.by_rows]
    if tables:
        text = (
            f"{where}.{name}() computes with {tables[0]}, which is looked up by rows: nothing gathers it. Leave "
            "embed_by_rows out: fully_shard of a module around both gathers it."
        )
    elif "resize" in name:
        text = (
            f"{what}. fully_shard manages parameters of the shapes that they had: call {name}() before it, or build "
            "the model anew with the other shape, apply fully_shard, and load the rest."
        )
    elif "save" in name:  # which the first rank often does alone
        text = f"{what}. On every rank, save inside `with fsdp2.full_params({where}, offload_to_cpu=True):`."
    elif is_own and not is_asynchronous:
        text = (
            f"{what}. After fully_shard, add `fsdp2.register_fsdp_forward_method({where}, {name!r})`, and call it on "
            "every rank."
        )
    else:
        part = "it" if is_own else "that part"
        text = f"{what}. On every rank, run {part} inside `with fsdp2.full_params({by}):`."
    raise _NotGatheredError(text, owner) from error.__cause__ or error


def _explain_replaced(error: RuntimeError, entry: nn.Module) -> None:
    """Raises a better error if the module that has raised `error` came into the model after fully_shard, with sharded
    parameters of another one, or with copies of them.
    """
    *_, module = (each for each in _selves(error))
    owners, state, tensor_class = owners_by_id(), state_of(entry), extensions().tensor_class
    for name, parameter in module._parameters.items():
        owned = owners.get(id(parameter))
        kind: type = type(parameter)
        is_copy = owned is None and kind is tensor_class is not DTensor
        if is_copy or (owned is not None and not any(slot.module is module for slot in owned.param.slots)):
            where = type(module).__name__ if state is None else _expression(module, state)
            whose = "a copy of a sharded parameter" if owned is None else f"{owned.param.name}, of another module,"
            raise RuntimeError(
                f"{where} ({type(module).__name__}) has come into the model after fully_shard: its {name} is {whose} "
                f"and nothing gathers it there. {REPLACE_BEFORE}"
            ) from error


def _selves(error: RuntimeError) -> Iterator[nn.Module]:
    """Yields the modules in whose methods `error` was raised, the innermost last."""
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module


def _is_on(state: FSDPState) -> bool:
    """Returns True if the check is in force for the root of `state`."""
    return state.root.events.of(EntryPoints) is not None


def _owners_met(error: RuntimeError) -> list[FSDPState]:
    """Returns the states whose sharded parameters torch has refused to compute with: the innermost module's own, or, if
    it has none, or unsharded ones, those below it that the code that ran speaks of most.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    *_, (depth, innermost) = (
        (i, each) for i, frame in enumerate(frames) if isinstance(each := frame.f_locals.get("self"), nn.Module)
    )
    own = [owner for owner, _ in _sharded([innermost]) if not _was_gathered(owner, frames)]
    if own:
        return list(dict.fromkeys(own))
    spoken = {name for frame in frames[depth:] for name in frame.f_code.co_names}
    matches: dict[FSDPState, int] = {}
    for owner, param in _sharded(innermost.modules()):
        path = param.name.split(".")
        if path[-1] in spoken and not _was_gathered(owner, frames):
            matches[owner] = max(matches.get(owner, 0), len(spoken.intersection(path)))
    return [owner for owner, count in matches.items() if count == max(matches.values())]


def _was_gathered(owner: FSDPState, frames: list[FrameType]) -> bool:
    """Returns True if its forward has raised: then its parameters may be DTensors, of tensor parallelism."""
    return _is_registered(owner) or any(frame.f_locals.get("state") is owner for frame in frames)


def _is_registered(owner: FSDPState) -> bool:
    """Returns True if modules have the unsharded parameters."""
    return any(group.phase is UNSHARDED for group in owner.groups)


def _sharded(modules: Iterable[nn.Module]) -> Iterator[tuple[FSDPState, FSDPParam]]:
    """Yields the modules' own parameters, where the sharded ones are registered, and the states that they belong to."""
    registered = {id(param) for module in modules for param in module._parameters.values()}
    for group in all_groups():
        yield from ((group.state, param) for param in group.params if id(param.sharded) in registered)


def _expression(module: nn.Module, owner: FSDPState) -> str:
    """Returns what a user writes for `module`: `model.blocks[0]`."""
    for root in owner.root.state.modules:
        for name, each in root.named_modules(prefix="model"):
            if each is module:
                return re.sub(r"\.(\d+)", r"[\1]", name)
    return type(module).__name__
