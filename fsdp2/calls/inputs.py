"""Hands a forward copies of the caller's tensors, cast or on another device, and returns to the caller what it writes.

A forward may write into its inputs: keys into a cache, states into a list. It writes into copies where a policy casts
the inputs, or where they are moved to the device. When the forward has ended, what has changed in a copy is written to
the tensor, or the container, that the caller has passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import internals
from ..torch_private.internals import has_storage, storage_address
from ..torch_private.rare_internals import SPMD_PARTS, SPMD_TYPE
from .nested import map_tensors
from .user_code import run_hidden

_ONLY_TENSORS = {Tensor}


class HandedInputs:
    """Holds the copies that one forward is handed in place of the caller's tensors and containers.

    A tensor that is passed several times has one copy. The copies of containers hold these; other containers, and
    plain objects, are passed as they are.
    """

    def __init__(self, change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`change`: returns a copy of a tensor, or the tensor itself, which is then passed as it is."""
        self.given = args, kwargs
        self._change = change
        # The caller's tensor and its copy, with what shows that the copy has been written to: by the identity of the
        # caller's. Containers likewise, with their first contents; None: a tuple, to which nothing can be written.
        self._tensors: dict[int, tuple[Tensor, Tensor, Any]] = {}
        self._containers: list[tuple[Any, Any, Any]] = []
        if not kwargs and {*map(type, args)} == _ONLY_TENSORS:
            self.args, self.kwargs = tuple(map(self._hand, args)), kwargs
        else:
            copied: list[tuple[Any, Any]] = []
            self.args, self.kwargs = map_tensors((args, kwargs), self._hand, copied=copied)
            self._containers = [
                (own, copy, None if isinstance(copy, tuple) else _contents(copy)) for own, copy in copied
            ]

    def _hand(self, tensor: Tensor) -> Tensor:
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known[1]
        if torch.is_inference_mode_enabled():  # whose tensors count no writes
            with torch.inference_mode(False), torch.no_grad():
                copy = self._change(tensor)
        else:
            copy = self._change(tensor)
        if copy is not tensor:
            self._tensors[id(tensor)] = tensor, copy, _state_of(copy)
        return copy

    # ---- what the forward has written

    def take_back(self, module: nn.Module, output: Any = None) -> Any:
        """Writes to the caller's tensors and containers what the forward of `module` has changed in their copies.

        Returns `output`, with the caller's own in place of the copies that were changed.

        Raises:
            RuntimeError: a tensor of the caller's can't be written to. The error names the argument.
        """
        written = [each for each in self._tensors.values() if _state_of(each[1]) != each[2]]
        changed = [each for each in self._containers if each[2] is not None and _is_changed(each[1], each[2])]
        if not written and not changed:
            return output
        own = {id(copy): tensor for tensor, copy, _ in self._tensors.values()}
        own.update((id(copy), container) for container, copy, _ in self._containers)
        for container, copy, before in changed:
            _set_contents(container, copy, before, own)
        for tensor, copy, before in written:
            self._write(module, tensor, copy, before)
        returned = {id(copy): tensor for tensor, copy, _ in written}
        return map_tensors(
            output,
            lambda tensor: returned.get(id(tensor), tensor),
            known={id(copy): container for container, copy, _ in changed},
        )

    def not_written(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the caller's tensors with their copies, of those that no version counter says were written to."""
        return [(tensor, copy) for tensor, copy, before in self._tensors.values() if _state_of(copy) == before]

    def name_of(self, tensor: Tensor, module: nn.Module) -> str:
        """Returns how the forward of `module` calls one of the caller's tensors."""
        return _name_of(tensor, module, self.given)

    def _write(self, module: nn.Module, tensor: Tensor, copy: Tensor, before: Any) -> None:
        is_recorded = copy.requires_grad and copy.grad_fn is not before[2]
        if is_recorded and tensor.requires_grad and tensor.is_leaf:
            why = "it is a leaf that requires a gradient, which autograd forbids to write to"
            self._refuse(module, tensor, copy, why, "Write into a clone")
        other = next((o for o, *_ in self._tensors.values() if o is not tensor and _overlap(o, tensor)), None)
        if other is not None:
            also = self.name_of(other, module)
            if copy.dtype == tensor.dtype:
                instead = "Pass both on that device"
            else:
                instead = "Pass cast_forward_inputs=False in the policy, and cast in forward what it computes with"
            why = f"{also} shares memory with it, and its copy does not"
            self._refuse(module, tensor, copy, why, f"{instead}; or write into a clone")
        try:
            if not is_recorded:
                with torch.no_grad():
                    _copy_changes(tensor, copy)
            elif internals.runs_transform() or internals.has_tangents():
                tensor.copy_(copy)
            else:
                with torch.enable_grad():
                    _Written.apply(tensor, copy)
        except RuntimeError as error:
            self._refuse(module, tensor, copy, str(error).rstrip("."), "Write into a clone", error)

    def _refuse(
        self, module: nn.Module, tensor: Tensor, copy: Tensor, why: str, advice: str, error: Any = None
    ) -> None:
        name, kind = self.name_of(tensor, module), type(module).__name__
        if copy.dtype == tensor.dtype:
            made = f"moved to {copy.device}"
        else:
            made = f"cast to {copy.dtype} by the MixedPrecisionPolicy (cast_forward_inputs)"
        raise RuntimeError(
            f"{kind}: its forward has written in place into {name}, of shape {tuple(copy.shape)}: a copy, {made}. The "
            f"caller's tensor can't receive that: {why}. {advice}."
        ) from error


def _state_of(copy: Tensor) -> Any:
    """Returns what changes when a tensor is written to: its version; where its data is; the node that computed it."""
    place = storage_address(copy) if type(copy) is Tensor and has_storage(copy) else 0
    return copy._version, place, copy.grad_fn


def _copy_changes(tensor: Tensor, copy: Tensor) -> None:
    """Writes `copy` to `tensor`, where it differs from what a cast makes of `tensor`: the rest keeps its precision."""
    is_rounded = torch.promote_types(tensor.dtype, copy.dtype) != copy.dtype
    if tensor.shape != copy.shape:
        tensor.resize_(copy.shape)
    elif is_rounded and type(tensor) in internals.PLAIN and tensor.layout is torch.strided:
        there = tensor.to(copy.device)
        copy = torch.where(copy == there.to(copy.dtype), there, copy.to(tensor.dtype))
    tensor.copy_(copy)


class _Written(torch.autograd.Function):
    """Writes a copy to the caller's tensor. The gradient goes to the copy, whose graph says what was written where."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Tensor) -> Tensor:
        ctx.device, ctx.dtype = copy.device, copy.dtype
        ctx.mark_dirty(tensor)
        _copy_changes(tensor, copy)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, run_hidden(gradient.to, ctx.device, ctx.dtype)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns True if two strided tensors have an element of memory in common."""
    if not all(type(t) in internals.PLAIN and has_storage(t) and t.numel() for t in (one, other)):
        return False
    if storage_address(one) != storage_address(other) or one.is_meta:
        return False
    if one.is_contiguous() and other.is_contiguous():
        (first, end), (start, last) = map(_range_of, (one, other))
        return first < last and start < end
    return bool(torch.isin(_bytes_of(one), _bytes_of(other)).any())


def _range_of(tensor: Tensor) -> tuple[int, int]:
    first = tensor.storage_offset() * tensor.element_size()
    return int(first), int(first) + int(tensor.nbytes)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the offsets of all elements of a tensor in its storage, in bytes."""
    places = torch.full((), int(tensor.storage_offset()) * tensor.element_size())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride * tensor.element_size()
    return places.flatten()


# ---- containers


def _contents(container: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the items of a list or dict, None for other containers, and the attributes of the object."""
    if isinstance(container, list):
        items: Any = [*container]
    else:
        items = dict(container) if isinstance(container, Mapping) else None
    names = [name for kind in type(container).__mro__ for name in _slots_of(kind)]
    attributes = {name: getattr(container, name) for name in names if hasattr(container, name)}
    attributes.update(getattr(container, "__dict__", {}))
    if items is not None and not isinstance(container, (list, dict)):
        attributes.pop("data", None)  # where a UserDict has its items
    return items, attributes


def _slots_of(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _is_changed(container: Any, before: tuple[Any, dict[str, Any]]) -> bool:
    items, attributes = _contents(container)
    return not (_are_same(items, before[0]) and _are_same(attributes, before[1]))


def _are_same(now: Any, before: Any) -> bool:
    """Compares by identity: tensors have no other comparison."""
    if now is None:
        return True
    if isinstance(now, list):
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    return [*now] == [*before] and all(a is b for a, b in zip(now.values(), before.values(), strict=True))


def _set_contents(container: Any, copy: Any, before: tuple[Any, dict[str, Any]], own: dict[int, Any]) -> None:
    """Changes the caller's `container` as `copy` has changed. `own`: what the caller has, by the identity of copies."""
    items, attributes = _contents(copy)
    if isinstance(items, list):
        container[:] = [own.get(id(item), item) for item in items]
    elif items is not None:
        for key in [key for key in before[0] if key not in items]:
            del container[key]
        for key, item in items.items():
            if key not in before[0] or before[0][key] is not item:
                container[key] = own.get(id(item), item)
        if [*container] != [*items]:
            ordered = {key: container[key] for key in items}
            container.clear()
            container.update(ordered)
    for name in before[1].keys() - attributes.keys():
        object.__delattr__(container, name)
    for name, value in attributes.items():
        if name not in before[1] or before[1][name] is not value:
            object.__setattr__(container, name, own.get(id(value), value))


# ---- names


def _name_of(tensor: Tensor, module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Returns how a forward calls the tensor: the argument's name, and where it is in that."""
    args, kwargs = given
    try:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        arguments = {**{f"argument {i}": each for i, each in enumerate(args)}, **kwargs}
    return next((found for name, value in arguments.items() if (found := _path_to(tensor, value, name))), "an input")


def _path_to(tensor: Tensor, value: Any, path: str, seen: frozenset[int] = frozenset()) -> str | None:
    if value is tensor:
        return path
    if isinstance(value, (Tensor, nn.Module, str, bytes)) or callable(value) or id(value) in seen:
        return None
    items: Any = value
    if not isinstance(value, (list, tuple)):
        items, attributes = _contents(value)
        items = {**(items or {}), **({} if items else attributes)}
    named = enumerate(items) if isinstance(items, (list, tuple)) else items.items()
    is_object = not isinstance(value, (list, tuple, Mapping))
    for key, item in named:
        found = _path_to(tensor, item, f"{path}.{key}" if is_object else f"{path}[{key!r}]", seen | {id(value)})
        if found:
            return found
    return None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor.to(dtype)`. The user's modes don't see its gradient being cast back.

    An annotation of spmd_types, whose type checker is one of the user's modes, stays.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()) or internals.runs_transform():
        made = tensor.to(dtype)
    else:
        made = _Cast.apply(tensor, dtype)
    if SPMD_TYPE in vars(tensor):
        vars(made).update(
            {name: shallow_copy(vars(tensor)[name]) for name in (SPMD_TYPE, SPMD_PARTS) if name in vars(tensor)}
        )
    return made


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.before, ctx.after = tensor.dtype, dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return run_hidden(gradient.to, ctx.before), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return run_hidden(tangent.to, ctx.after)


def cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns a function that casts floating-point tensors to `dtype`, and returns other tensors themselves."""
    return lambda tensor: cast(tensor, dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor


def move_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Returns a function that copies tensors to `device`; copies from page-locked memory are asynchronous."""
    return lambda tensor: tensor.to(device, non_blocking=True) if tensor.device != device else tensor
