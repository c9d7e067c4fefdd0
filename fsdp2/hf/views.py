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


class View:
    """Is a tensor made of parts of other tensors; `part`, `select`, `stack`, `cat` and `transpose` make one."""

    def __init__(self, resolve: Callable[[ShapeOf], tuple[tuple[int, ...], list[Leaf]]]) -> None:
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

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        shape = tuple(shape_of(source))
        return shape, [Leaf(source, whole_box(shape), (0,) * len(shape), tuple(range(len(shape))))]

    return View(resolve)


def part(source: str | View, dim: int, start: int, stop: int) -> View:
    """Describes the indices from `start` to `stop` along `dim`: the query rows of a fused QKV weight, for example."""
    view = as_view(source)

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        shape, leaves = view.resolve(shape_of)
        at = _dim(dim, len(shape), "part")
        if not 0 <= start < stop <= shape[at]:
            raise ValueError(f"part: expected indices among {shape[at]} along dim {dim}, got {start} to {stop}")
        starts, sizes = [0] * len(shape), list(shape)
        starts[at], sizes[at] = start, stop - start
        wanted, found = Box(tuple(starts), tuple(sizes)), []
        for leaf in leaves:
            box = leaf.box.intersection(wanted)
            if box.numel:
                moved = tuple(first - offset for first, offset in zip(box.starts, starts, strict=True))
                found.append(Leaf(leaf.name, Box(moved, box.sizes), leaf.in_tensor(box).starts, leaf.dims))
        return tuple(sizes), found

    return View(resolve)


def select(source: str | View, dim: int, index: int) -> View:
    """Describes one index along `dim`, without that dim: one expert of a stack, for example."""
    view = part(source, dim, index, index + 1)

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        shape, leaves = view.resolve(shape_of)
        at = _dim(dim, len(shape), "select")

        def without(values: Sequence[Any]) -> tuple[Any, ...]:
            return (*values[:at], *values[at + 1 :])

        found = [
            Leaf(each.name, Box(without(each.box.starts), without(each.box.sizes)), each.starts, without(each.dims))
            for each in leaves
        ]
        return without(shape), found

    return View(resolve)


def cat(sources: Sequence[str | View], dim: int = 0) -> View:
    """Describes the concatenation of tensors along `dim`, as `torch.cat` makes it."""
    views = [as_view(source) for source in sources]

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        resolved = [view.resolve(shape_of) for view in views]
        first = resolved[0][0]
        at, end, found = _dim(dim, len(first), "cat"), 0, []
        for shape, leaves in resolved:
            if (*shape[:at], *shape[at + 1 :]) != (*first[:at], *first[at + 1 :]):
                raise ValueError(f"cat: expected shapes that differ in dim {dim} only, got {first} and {shape}")
            for leaf in leaves:
                starts = list(leaf.box.starts)
                starts[at] += end
                found.append(leaf._replace(box=Box(tuple(starts), leaf.box.sizes)))
            end += shape[at]
        return (*first[:at], end, *first[at + 1 :]), found

    return View(resolve)


def stack(sources: Sequence[str | View], dim: int = 0) -> View:
    """Describes tensors of equal shapes in a new dim, as `torch.stack` makes it: experts, for example."""
    views = [as_view(source) for source in sources]

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        resolved = [view.resolve(shape_of) for view in views]
        first = resolved[0][0]
        at, found = _dim(dim, len(first) + 1, "stack"), []
        for i, (shape, leaves) in enumerate(resolved):
            if shape != first:
                raise ValueError(f"stack: expected tensors of one shape, got {first} and {shape}")
            for leaf in leaves:
                starts, sizes = leaf.box
                box = Box((*starts[:at], i, *starts[at:]), (*sizes[:at], 1, *sizes[at:]))
                found.append(Leaf(leaf.name, box, leaf.starts, (*leaf.dims[:at], None, *leaf.dims[at:])))
        return (*first[:at], len(resolved), *first[at:]), found

    return View(resolve)


def transpose(source: str | View, dim0: int, dim1: int) -> View:
    """Describes a tensor with two dims exchanged."""
    view = as_view(source)

    def resolve(shape_of: ShapeOf) -> tuple[tuple[int, ...], list[Leaf]]:
        shape, leaves = view.resolve(shape_of)
        order = [*range(len(shape))]
        a, b = (_dim(each, len(shape), "transpose") for each in (dim0, dim1))
        order[a], order[b] = b, a

        def ordered(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[i] for i in order)

        found = [
            Leaf(each.name, Box(ordered(each.box.starts), ordered(each.box.sizes)), each.starts, ordered(each.dims))
            for each in leaves
        ]
        return ordered(shape), found

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
