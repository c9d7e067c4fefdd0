"""Describes tensors as made of parts of other tensors: the language of `names=` in load_model and save_model."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .files import Box, whole_box

ShapeOf = Callable[[str], Sequence[int]]


class Leaf(NamedTuple):
    """Says that a box of a view is a box of the tensor `name`, with the dims in another order perhaps.

    `box`: in the view. `starts`: the first index of each dim of the tensor. `dims`: for each dim of the view, the dim
    of the tensor, or None for one that the tensor lacks (stack). Dims of the tensor that the view lacks have one index.
    `seen`: the shape as which the tensor is seen, if that may be another one than its own: in a file, shapes are but
    numbers. None: it is its own.
    """

    name: str
    box: Box
    starts: tuple[int, ...]
    dims: tuple[int | None, ...]
    seen: tuple[int, ...] | None = None

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
                found.append(leaf._replace(box=moved, starts=leaf.in_tensor(box).starts))
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


def permute(source: str | View, order: Sequence[int]) -> View:
    """Describes a tensor with its dims in another order, as `torch.permute` makes it."""
    return _rearranged(source, lambda dims: [dims[dim] for dim in order])


def reshape(source: str | View, sizes: Sequence[int]) -> View:
    """Describes a tensor with other sizes, as `torch.reshape` makes it. It may need a leaf for each row."""

    def resolve(shape_of: ShapeOf) -> Resolved:
        shape, leaves = as_view(source).resolve(shape_of)
        if math.prod(shape) != math.prod(sizes):
            raise ValueError(f"reshape: expected {math.prod(shape)} elements, got sizes {list(sizes)}")
        if not math.prod(shape):
            return tuple(sizes), []
        first = leaves[0]
        if first.seen == tuple(shape) == first.box.sizes and first.dims == tuple(range(len(shape))):  # it is whole
            box = whole_box(sizes)
            return tuple(sizes), [Leaf(first.name, box, box.starts, tuple(range(len(sizes))), tuple(sizes))]
        kept = [dim for dim, size in enumerate(shape) if size > 1]
        if [shape[dim] for dim in kept] == [size for size in sizes if size > 1]:  # dims of size 1 come or go
            left = iter(kept)
            order = [next(left) if size > 1 else None for size in sizes]
            return _rearranged(View(lambda _: (shape, leaves)), lambda _: order).resolve(shape_of)
        groups = [*_groups_of_dims(shape, sizes)]
        return tuple(sizes), _joined_leaves([new for leaf in leaves for new in _reshaped(leaf, shape, sizes, groups)])

    return View(resolve)


def _groups_of_dims(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yields dims of the old and the new shape that have as many elements together, from left to right."""
    i = j = 0
    while i < len(old) or j < len(new):
        first_old, first_new, a, b = i, j, 1, 1
        if i < len(old):
            a, i = old[i], i + 1
        if j < len(new):
            b, j = new[j], j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        yield range(first_old, i), range(first_new, j)


# A part of a leaf inside one group of dims: its range and its dim of the tensor for each new dim, and by how much its
# first index in dims of the tensor is larger than the leaf's.
_Span = tuple[list[tuple[int, int, int | None]], dict[int, int]]


def _reshaped(
    leaf: Leaf, shape: Sequence[int], sizes: Sequence[int], groups: Sequence[tuple[range, range]]
) -> Iterator[Leaf]:
    """Yields the parts of a leaf of which each is a box of the reshaped view, too."""
    for spans in itertools.product(*(_spans(leaf, shape, sizes, old, new) for old, new in groups)):
        ranges = [each for found, _ in spans for each in found]
        starts = [*leaf.starts]
        for _, moved in spans:
            for dim, by in moved.items():
                starts[dim] += by
        box = Box(tuple(start for start, _, _ in ranges), tuple(size for _, size, _ in ranges))
        yield leaf._replace(box=box, starts=tuple(starts), dims=tuple(dim for _, _, dim in ranges))


def _spans(leaf: Leaf, shape: Sequence[int], sizes: Sequence[int], old: range, new: range) -> list[_Span]:
    """Returns the spans of a leaf in one group of dims. Along each, the innermost old and new dim vary, no other."""
    box = leaf.box
    if len(old) == len(new) == 1:
        return [([(box.starts[old[0]], box.sizes[old[0]], leaf.dims[old[0]])], {})]
    inner = next((dim for dim in reversed(old) if shape[dim] > 1), None)
    new_inner = next((dim for dim in reversed(new) if sizes[dim] > 1), None)
    outer = [dim for dim in old if dim != inner]
    found: list[_Span] = []
    for indices in itertools.product(*(range(box.sizes[dim]) for dim in outer)):
        moved: dict[int, int] = {}
        position = 0 if inner is None else box.starts[inner]
        for dim, index in zip(outer, indices, strict=True):
            position += (box.starts[dim] + index) * math.prod(shape[dim + 1 : old.stop])
            if (of_tensor := leaf.dims[dim]) is not None:
                moved[of_tensor] = index
        end = position + (1 if inner is None else box.sizes[inner])
        varying, first = None if inner is None else leaf.dims[inner], position
        while position < end:
            row = 1 if new_inner is None else sizes[new_inner]
            stop = min((position // row + 1) * row, end)
            ranges: list[tuple[int, int, int | None]] = []
            for dim in new:
                index = position // math.prod(sizes[dim + 1 : new.stop]) % sizes[dim]
                ranges.append((index, stop - position, varying) if dim == new_inner else (index, 1, None))
            by = {} if varying is None else {varying: position - first}
            found.append((ranges, moved | by))
            position = stop
    return found


def _joined_leaves(leaves: list[Leaf]) -> list[Leaf]:
    """Joins leaves that lie side by side both in the view and in the tensor."""
    for dim in reversed(range(len(leaves[0].dims) if leaves else 0)):
        joined: list[Leaf] = []
        places = [(*leaf.box.starts[:dim], *leaf.box.starts[dim + 1 :], leaf.box.starts[dim]) for leaf in leaves]
        for _, leaf in sorted(zip(places, leaves, strict=True), key=operator.itemgetter(0)):
            both = _join(joined[-1], leaf, dim) if joined else None
            if both is None:
                joined.append(leaf)
            else:
                joined[-1] = both
        leaves = joined
    return leaves


def _join(one: Leaf, other: Leaf, dim: int) -> Leaf | None:
    """Returns one leaf for two that follow each other along `dim`; None if they do not."""
    size = one.box.sizes[dim]
    follows = one.box.replaced(dim, one.box.starts[dim] + size, other.box.sizes[dim]) == other.box
    if (one.name, one.seen) != (other.name, other.seen) or not follows:
        return None
    moved = [i for i, (a, b) in enumerate(zip(one.starts, other.starts, strict=True)) if a != b]
    if len(moved) != 1 or other.starts[moved[0]] != one.starts[moved[0]] + size:
        return None
    dims = list(one.dims)
    if dims[dim] is None and moved[0] not in dims:
        dims[dim] = moved[0]
    rest = [*other.dims]
    rest[dim] = moved[0] if rest[dim] is None and other.box.sizes[dim] == 1 else rest[dim]
    if dims != rest or dims[dim] != moved[0]:
        return None
    return one._replace(box=one.box.replaced(dim, one.box.starts[dim], size + other.box.sizes[dim]), dims=tuple(dims))


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
            leaf._replace(
                box=Box(ordered(leaf.box.starts, 0), ordered(leaf.box.sizes, 1)), dims=ordered(leaf.dims, None)
            )
            for leaf in leaves
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
    """Finds what a parameter or buffer is called in the files, by what a user has passed as `names`.

    `converted`: what is loaded into parameters that `names` does not have. None: what has their own names.
    """

    def __init__(self, names: Names | None) -> None:
        self.converted: Mapping[str, View] | None = None
        self._function = names if callable(names) else None
        if names is not None and not callable(names) and not isinstance(names, Mapping):
            raise TypeError(f"names: expected a dict, a function or None, got {type(names).__name__}")
        table: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._rows = [(key, re.compile(pattern_of(key)), value) for key, value in table.items()]
        self._unused = dict.fromkeys(table)

    def find(self, name: str) -> Source:
        """Returns what is loaded into the parameter `name`; None: nothing.

        Raises:
            KeyError: there is nothing of this name in the files.
        """
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
        return name if self.converted is None else self.converted[name]

    @property
    def is_function(self) -> bool:
        """True if a user's function says what all parameters are called."""
        return self._function is not None

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


def pattern_of(key: str) -> str:
    """Returns a regular expression for a row's key, in which `{x}` is one part of a name and `{x*}` any number."""
    return _FIELD.sub(lambda found: f"(?P<{found[1]}>{'.+' if found[2] else '[^.]+'})", re.escape(key))
