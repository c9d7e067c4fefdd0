"""Ways into a sharded module other than its forward. Nothing gathers there by itself: errors say what does.

Many methods are about the sharded parameters: they build an optimizer, initialise, count, save. Those that compute with
full ones are to be registered (see forward_method.py). Without that, torch says no more than that it can't mix tensors
and DTensors. What is here costs next to nothing while modules have full parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from traceback import walk_tb
from types import FrameType, FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..ext.owners import all_states
from ..core.parameter import FSDPParam
from ..core.state import FSDPState, state_of
from ..core.user_code import left_out, tensors_in

# What torch says of operands of different dtypes.
_ON_DTYPES = re.compile("dtype|scalar type|should be the same")
# What torch says of an operation on sharded parameters and a plain tensor, and of one that it can't do on shards.
_ON_SHARDS = re.compile("mixed torch.Tensor and DTensor|sharding strategy")


def leave_fast_paths(modules: Iterable[nn.Module]) -> None:
    """Have torch's transformer layers among `modules` call what is sharded inside them: in evaluation they would read
    its parameters, but for modules that have hooks.
    """
    for layer in (module for module in modules if isinstance(module, nn.TransformerEncoderLayer)):
        for module in layer.modules():
            is_sharded = module is not layer and state_of(module) is not None
            if is_sharded and _do_nothing not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, args: Any) -> None:
    pass


class _NotGatheredError(RuntimeError):
    """`owner`: whose parameters were sharded."""

    def __init__(self, text: str, owner: FSDPState) -> None:
        super().__init__(text)
        self.owner = owner


def refuse_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A module whose parameters another one gathers is called while they are sharded.

    Raises:
        RuntimeError: unless the call computes on shards, with DTensors.
    """
    owner, _ = next(_sharded([module]), (None, None))
    if owner is None or any(isinstance(tensor, DTensor) for tensor in tensors_in(args, kwargs)):
        return
    outer, inner = _expression(owner.modules[0], owner), _expression(module, owner)
    by = inner if owner is owner.context.root else outer  # of the root's, little may be meant
    raise _NotGatheredError(
        f"{inner} ({type(module).__name__}) was called while its parameters are sharded: they are gathered in the "
        f"forward of {outer}. Call it inside `with fsdp2.full_params({by}):`, or apply fully_shard to {inner}, too, "
        f"before {outer}.",
        owner,
    )


def explained_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """The public methods of `cls`, but those of torch, with errors that say how to have parameters gathered."""
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
            explain(error, self, name, is_generator=True)
            raise

    return wraps(method)(iterate if inspect.isgeneratorfunction(method) else call)


class _NotCastError(RuntimeError):
    pass


def explain_dtypes(error: RuntimeError, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raise a better error, if `error` is about dtypes, and `module` was called with tensors that its policy has not
    cast, because they are in objects of a user's own. Objects are not copied for that: a module may write to them.
    """
    state = state_of(module)
    dtype = None if state is None else state.input_dtype
    if state is None or dtype is None or isinstance(error, _NotCastError) or not _ON_DTYPES.search(str(error)):
        return
    for name, value in _named_arguments(module, args, kwargs).items():
        for path, inside, tensor in left_out(value, name):
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
    """What `module` was called with, under the names that its forward gives that, if it has them."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {"args": args, **kwargs}


def explain(error: RuntimeError, entry: nn.Module, name: str, is_generator: bool = False) -> None:
    """Raise a better error, if `error` comes of sharded parameters that `entry.name(...)` has met."""
    if isinstance(error, _NotGatheredError):
        owners = [error.owner] if entry in error.owner.modules and not error.owner.group.faces.installed else []
    else:
        owners = _owners_met(error) if _ON_SHARDS.search(str(error)) else []
    if not owners:
        return
    owner, is_own = owners[0], all(entry in each.modules for each in owners)
    where, by = _expression(entry, owner), _expression(owner.modules[0] if len(owners) == 1 else entry, owner)
    what = f"{where}.{name}() computes with parameters that are sharded"
    if "resize" in name:
        text = (
            f"{what}. fully_shard manages parameters of the shapes that they had: call {name}() before it, or build "
            "the model anew with the other shape, apply fully_shard, and load the rest."
        )
    elif is_own and not is_generator:
        text = f"{what}. After fully_shard, add `fsdp2.register_fsdp_forward_method({where}, {name!r})`."
    else:
        text = f"{what}. Run {'it' if is_own else 'that part'} inside `with fsdp2.full_params({by}):`."
    raise _NotGatheredError(text, owner) from error.__cause__ or error


def _owners_met(error: RuntimeError) -> list[FSDPState]:
    """Whose sharded parameters torch has refused to compute with: the innermost module's own, or, if it has none, or
    full ones, those below it that the code that ran speaks of most.
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
    """Whether what raised is a part of its forward: then its parameters may be DTensors, of tensor parallelism."""
    return owner.group.faces.installed or any(frame.f_locals.get("state") is owner for frame in frames)


def _sharded(modules: Iterable[nn.Module]) -> Iterator[tuple[FSDPState, FSDPParam]]:
    """The modules' own parameters, where the sharded ones are registered, and whose they are."""
    registered = {id(param) for module in modules for param in module._parameters.values()}
    for state in all_states():
        yield from ((state, param) for param in state.group.params if id(param.sharded) in registered)


def _expression(module: nn.Module, owner: FSDPState) -> str:
    """What a user writes for `module`: `model.blocks[0]`."""
    for root in owner.context.root.modules:
        for name, each in root.named_modules(prefix="model"):
            if each is module:
                return re.sub(r"\.(\d+)", r"[\1]", name)
    return type(module).__name__
