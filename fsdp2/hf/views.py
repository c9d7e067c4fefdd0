"""Describes tensors as made of parts of other tensors: the language of `names=` in load_model and save_model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .files import Box, whole_box

ShapeOf = Callable[[str], Sequence[int]]


class Leaf(NamedTuple):
    """Says that a box of a view is a box of the tensor `name`, with the dims in another order perhaps.

    `box`: in the view. `starts`: the first index of each dim of the tensor. `dims`: for each dim of the view, the dim
    of the tensor, or None for one that the tensor lacks (stack). Dims of the tensor that the view lacks have one index.
    """

    name: str
    box: Box
    starts: tuple[int, ...]
    dims: tuple[int | None, ...]

    def in_tensor(self, box: Box) -> Box:
        """Returns which box of the tensor a box of the view is, which must lie in `self.box`."""
        starts, sizes = list(self.starts), [1] * len(self.starts)
        for dim, start, size, first in zip(self.dims, box.starts, box.sizes, self.box.starts, strict=True):
            if dim is not None:
                starts[dim] += start - first
                sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    def in_view(self, box: Box) -> Box | None:
        """Returns which box of the view, inside `self.box`, comes from a box of the tensor; None: there is none."""
        starts, sizes = list(self.box.starts), list(self.box.sizes)
        for i, dim in enumerate(self.dims):
            if dim is not None:
                starts[i] += box.starts[dim] - self.starts[dim]
                sizes[i] = box.sizes[dim]
        for dim, (index, start, size) in enumerate(zip(self.starts, box.starts, box.sizes, strict=True)):
            if dim not in self.dims and not start <= index < start + size:
                return None
        found = self.box.intersection(Box(tuple(starts), tuple(sizes)))
        return found if found.numel else None

    def arrange(self, tensor: Any) -> Any:
        """Returns a part of the tensor with the dims of the view."""
        kept = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(tensor.dim()) if dim not in kept]
        tensor = tensor.permute((*rest, *kept))
        for _ in rest:
            tensor = tensor[0]
        for i, dim in enumerate(self.dims):
            tensor = tensor.unsqueeze(i) if dim is None else tensor
        return tensor


Resolved = tuple[tuple[int, ...], list[Leaf]]


class View:
    """Is a tensor made of parts of other tensors; `part`, `select`, `stack`, `cat` and `transpose` make one."""

    def __init__(self, resolve: Callable[[ShapeOf], Resolved]) -> None:
        self.resolve = resolve


def as_view(source: str | View) -> View:
    """Returns a view of a whole tensor, by its name; or the view itself.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(source, View):
        return source
    if not isinstance(source, str):
        raise TypeError(f"names: expected the name of a tensor, or a view of tensors, got {source!r}")

    def resolve(shape_of: ShapeOf) -> Resolved:
        shape = tuple(shape_of(source))
        return shape, [Leaf(source, whole_box(shape), (0,) * len(shape), tuple(range(len(shape))))]

    return View(resolve)


def part(source: str | View, dim: int, start: int, stop: int) -> View:
    """Describes the indices from `start` to `stop` along `dim`: the query rows of a fused QKV weight, for example."""

    def resolve(shape_of: ShapeOf) -> Resolved:
        shape, leaves = as_view(source).resolve(shape_of)
        at = _dim(dim, len(shape), "part")
        if not 0 <= start < stop <= shape[at]:
            raise ValueError(f"part: expected indices among {shape[at]} along dim {dim}, got {start} to {stop}")
        wanted, found = whole_box(shape).replaced(at, start, stop - start), []
        for leaf in leaves:
            box = leaf.box.intersection(wanted)
            if box.numel:
                moved = box.replaced(at, box.starts[at] - start, box.sizes[at])
                found.append(Leaf(leaf.name, moved, leaf.in_tensor(box).starts, leaf.dims))
        return wanted.sizes, found

    return View(resolve)


def cat(sources: Sequence[str | View], dim: int = 0) -> View:
    """Describes the concatenation of tensors along `dim`, as `torch.cat` makes it."""
    return _joined(sources, dim, "cat")


def _joined(sources: Sequence[str | View], dim: int, function: str) -> View:
    def resolve(shape_of: ShapeOf) -> Resolved:
        resolved = [as_view(source).resolve(shape_of) for source in sources]
        first = resolved[0][0]
        at, end, found = _dim(dim, len(first), function), 0, []
        for shape, leaves in resolved:
            if (*shape[:at], *shape[at + 1 :]) != (*first[:at], *first[at + 1 :]):
                raise ValueError(f"{function}: expected shapes that differ in dim {at} only, got {first} and {shape}")
            for leaf in leaves:
                moved = leaf.box.replaced(at, leaf.box.starts[at] + end, leaf.box.sizes[at])
                found.append(leaf._replace(box=moved))
            end += shape[at]
        return (*first[:at], end, *first[at + 1 :]), found

    return View(resolve)


def select(source: str | View, dim: int, index: int) -> View:
    """Describes one index along `dim`, without that dim: one expert of a stack, for example."""

    def without(dims: list[int | None]) -> list[int | None]:
        at = _dim(dim, len(dims), "select")
        return dims[:at] + dims[at + 1 :]

    return _rearranged(part(source, dim, index, index + 1), without)


def stack(sources: Sequence[str | View], dim: int = 0) -> View:
    """Describes tensors of equal shapes in a new dim, as `torch.stack` makes it: experts, for example."""

    def with_new(dims: list[int | None]) -> list[int | None]:
        at = _dim(dim, len(dims) + 1, "stack")
        return [*dims[:at], None, *dims[at:]]

    return _joined([_rearranged(source, with_new) for source in sources], dim, "stack")


def transpose(source: str | View, dim0: int, dim1: int) -> View:
    """Describes a tensor with two dims exchanged."""

    def exchanged(dims: list[int | None]) -> list[int | None]:
        a, b = (_dim(dim, len(dims), "transpose") for dim in (dim0, dim1))
        dims[a], dims[b] = dims[b], dims[a]
        return dims

    return _rearranged(source, exchanged)


def _rearranged(source: str | View, rearrange: Callable[[list[int | None]], list[int | None]]) -> View:
    """Describes a tensor with other dims: `rearrange` gets the list of its dims, and returns that of the view, in which
    None is a new dim of size 1. A dim that is left out must have size 1.
    """

    def resolve(shape_of: ShapeOf) -> Resolved:
        shape, leaves = as_view(source).resolve(shape_of)
        dims = rearrange([*range(len(shape))])

        def ordered(values: Sequence[Any], new: int | None) -> tuple[Any, ...]:
            return tuple(new if dim is None else values[dim] for dim in dims)

        return ordered(shape, 1), [
            Leaf(name, Box(ordered(box.starts, 0), ordered(box.sizes, 1)), starts, ordered(of_tensor, None))
            for name, box, starts, of_tensor in leaves
        ]

    return View(resolve)


def _dim(dim: int, ndim: int, function: str) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{function}: expected a dim of {ndim}, got {dim}")
    return dim % ndim


# ---- tables of names

Source = str | View | None
Names = Mapping[str, Source | Callable[..., Source]] | Callable[[str], Source]
_FIELD = re.compile(r"\\\{(\w+)(\\\*)?\\\}")


class NameTable:
    """Finds what a parameter or buffer is called in the files, by what a user has passed as `names`."""

    def __init__(self, names: Names | None) -> None:
        self._function = names if callable(names) else None
        if names is not None and not callable(names) and not isinstance(names, Mapping):
            raise TypeError(f"names: expected a dict, a function or None, got {type(names).__name__}")
        table: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._rows = [(key, re.compile(_pattern(key)), value) for key, value in table.items()]
        self._unused = dict.fromkeys(table)

    def find(self, name: str) -> Source:
        """Returns what is loaded into the parameter `name`; None: nothing."""
        if self._function is not None:
            return self._function(name)
        for key, pattern, row in self._rows:
            match = pattern.fullmatch(name)
            if match:
                self._unused.pop(key, None)
                fields = match.groupdict()
                source: Source = row(**fields) if callable(row) else row
                if isinstance(row, str):
                    for field, text in fields.items():
                        row = row.replace(f"{{{field}}}", text)
                    source = row
                return source
        return name

    def refuse_unused(self) -> None:
        """Refuses rows that no parameter matches: they are misspelt.

        Raises:
            ValueError: there are some.
        """
        for key in self._unused:
            raise ValueError(
                f"names: expected names of parameters or buffers, {key!r} matches none. In a pattern, {{x}} is one "
                "part between dots, and {x*} any number of them."
            )


def _pattern(key: str) -> str:
    """Returns a regular expression for a row's key, in which `{x}` is one part of a name and `{x*}` any number."""
    return _FIELD.sub(lambda found: f"(?P<{found[1]}>{'.+' if found[2] else '[^.]+'})", re.escape(key))
