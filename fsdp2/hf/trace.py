"""Follows where the elements of tensors come from, while code that fsdp2 has not written rearranges them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_private.files import TorchDispatchMode
from .views import Resolved, View, as_view, cat, part, permute, reshape, select, stack


class Tracer(TorchDispatchMode):
    """While it is entered, operations on the tensors on meta that it follows are noted as views.

    Operations that cut, join and rearrange are known. The result of any other has no view, and `view_of` names it.
    `of_files`: the tensors are in files, where they may be seen as other shapes.
    """

    def __init__(self, *, of_files: bool = False) -> None:
        super().__init__()
        self._of_files = of_files
        # Identity of a tensor -> the tensor, which keeps that identity its own, and its view.
        self._views: dict[int, tuple[Tensor, View]] = {}
        self._computed: dict[int, tuple[Tensor, str]] = {}

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor on meta that stands for the tensor `name`."""
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.follow(name, made)
        return made

    def follow(self, name: str, tensor: Tensor) -> None:
        """Notes that a tensor on meta stands for the tensor `name`."""
        shape, leaves = as_view(name).resolve(lambda _: tensor.shape)
        seen = shape if self._of_files else None
        self._views[id(tensor)] = tensor, _constant((shape, [leaf._replace(seen=seen) for leaf in leaves]))

    def view_of(self, tensor: Any) -> View | str:
        """Returns the view that a tensor has become; or, of a computed one, the name of the operation."""
        if id(tensor) in self._views:
            return self._views[id(tensor)][1]
        return self._computed[id(tensor)][1] if id(tensor) in self._computed else "other tensors"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation, and notes what its results are."""
        kwargs = dict(kwargs or {})
        name = func.name()
        if name == "aten::_to_copy" and args[0].is_meta:
            kwargs.pop("device", None)  # there are no values to move
        results = func(*args, **kwargs)
        given = args[0] if name in _OF_LISTS else args[:1]
        if not any(isinstance(each, Tensor) and each.is_meta for each in _flat((args, kwargs))):
            return results
        views = [self.view_of(each) for each in given]
        found = [results] if isinstance(results, Tensor) else [*results]
        rule = _RULES.get(name)
        known = [view for view in views if isinstance(view, View)]
        if rule is None or len(known) < len(views):
            failed = next((view for view in views if isinstance(view, str) and view.startswith("aten")), name)
            for each in found:
                self._views.pop(id(each), None)
                self._computed[id(each)] = each, failed
            return results
        for each, view in zip(found, rule(known, args, kwargs, found), strict=True):
            self._views[id(each)] = each, _constant(view.resolve(_no_shape))
        return results


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    return [each for item in value for each in _flat(item)] if isinstance(value, list | tuple) else [value]


def _constant(resolved: Resolved) -> View:
    return View(lambda _: resolved)


def _no_shape(name: str) -> Sequence[int]:
    raise AssertionError(f"views of a tracer are resolved, {name} is not")


# ---- what operations of torch make of views

# The views of the first argument, or of the list that it is; all arguments; the results -> the views of the results.
_Rule = Callable[[list[View], Sequence[Any], Mapping[str, Any], list[Tensor]], list[View]]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _same(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return views


def _reshape(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return [reshape(views[0], tuple(results[0].shape))]


def _transpose(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    ndim = args[0].dim()
    order = [*range(ndim)]
    a, b = (args[1] % ndim, args[2] % ndim) if len(args) > 1 else (0, ndim - 1)  # t() has no dims
    order[a], order[b] = order[b], order[a]
    return [permute(views[0], order)]


def _permute(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return [permute(views[0], [dim % args[0].dim() for dim in args[1]])]


def _split(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    dim, found, end = _argument(args, kwargs, 2, "dim", 0), [], 0
    for each in results:
        found.append(part(views[0], dim, end, end + each.shape[dim]))
        end += each.shape[dim]
    return found


def _unbind(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    dim = _argument(args, kwargs, 1, "dim", 0)
    return [select(views[0], dim, i) for i in range(len(results))]


def _select(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return [select(views[0], args[1], args[2] % args[0].shape[args[1]])]


def _slice(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    dim = _argument(args, kwargs, 1, "dim", 0)
    size, step = args[0].shape[dim], _argument(args, kwargs, 4, "step", 1)
    start = _argument(args, kwargs, 2, "start", None) or 0
    start = max(0, start + size) if start < 0 else min(start, size)
    indices = range(start, size, step)[: results[0].shape[dim]]
    if step == 1:
        return [part(views[0], dim, start, start + len(indices))]
    return [cat([part(views[0], dim, i, i + 1) for i in indices], dim)]


def _cat(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return [cat(views, _argument(args, kwargs, 1, "dim", 0))]


def _stack(views: list[View], args: Sequence[Any], kwargs: Mapping[str, Any], results: list[Tensor]) -> list[View]:
    return [stack(views, _argument(args, kwargs, 1, "dim", 0))]


_OF_LISTS = ("aten::cat", "aten::stack")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("aten::detach", "aten::alias", "aten::clone", "aten::contiguous", "aten::_to_copy"), _same),
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias"), _reshape),
    **dict.fromkeys(("aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims", "aten::unsqueeze"), _reshape),
    **dict.fromkeys(("aten::transpose.int", "aten::t"), _transpose),
    "aten::permute": _permute,
    **dict.fromkeys(("aten::split.Tensor", "aten::split_with_sizes"), _split),
    "aten::unbind.int": _unbind,
    "aten::select.int": _select,
    "aten::slice.Tensor": _slice,
    "aten::cat": _cat,
    "aten::stack": _stack,
}
