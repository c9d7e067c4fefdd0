"""Tests that tensors are found and cast in any inputs of a forward, and that the inputs themselves do not change."""

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp2.calls.inputs import HandedInputs, move_to
from fsdp2.calls.nested import tensors_in
from fsdp2.engine.step import cast_floating

BF16 = torch.bfloat16


class Pair(NamedTuple):
    first: Any
    second: Any


class Options(dict):
    """Like many configuration classes: the constructor takes something else than items."""

    def __init__(self, *, tensor: Any, note: str = "kept") -> None:
        super().__init__(tensor=tensor)
        self.note = note


class ModelOutput(collections.OrderedDict):
    """As in transformers: an OrderedDict whose items are attributes too, rebuilt by `copy` from its fields."""

    def __init__(self, tensor: Any = None) -> None:
        super().__init__(tensor=tensor)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch(collections.UserDict):
    """As transformers' BatchEncoding."""

    def __init__(self, data: Any, extra: str) -> None:
        super().__init__(data)
        self.extra = extra


class Wrapper(MutableMapping):
    """A mapping of its own kind around a dict: a shallow copy shares that dict."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self._inner = inner

    def __getitem__(self, key: str) -> Any:
        return self._inner[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class Rows(list):
    """A list whose constructor takes something else than items."""

    def __init__(self, tensor: Any, *, note: str) -> None:
        super().__init__([tensor])
        self.note = note


class Shape3(tuple):
    """A tuple whose constructor takes something else than one iterable."""

    __slots__ = ()

    def __new__(cls, tensor: Any, number: int) -> "Shape3":
        return super().__new__(cls, (tensor, number))


@dataclasses.dataclass
class Counted:
    """Counts how often its constructor ran."""

    tensor: Any
    number: int = 3
    built = 0

    def __post_init__(self) -> None:
        type(self).built += 1
        self.derived = "derived"


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    number: int = 3


@dataclasses.dataclass
class Slotted:
    __slots__ = ("number", "tensor")
    tensor: Any
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    tensor: Any
    number: int = 3


@dataclasses.dataclass
class Unset:
    """A field that nobody has set."""

    tensor: Any
    later: Any = dataclasses.field(init=False)


class Plain:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Colour(enum.Enum):
    RED = 1


def get(key: Any) -> Callable[[Any], Any]:
    return lambda container: container[key]


def attribute(container: Any) -> Any:
    return container.tensor


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda t: [1, t], get(1)),
    "tuple": (lambda t: (t, "x"), get(0)),
    "namedtuple": (lambda t: Pair(t, 1), get(0)),
    "torch.return_types": (lambda t: torch.return_types.max((t, torch.tensor(1))), get(0)),
    "tuple with its own constructor": (lambda t: Shape3(t, 2), get(0)),
    "list with its own constructor": (lambda t: Rows(t, note="kept"), get(0)),
    "dict": (lambda t: {"tensor": t, 2: None}, get("tensor")),
    "OrderedDict": (lambda t: collections.OrderedDict(b=1, tensor=t, a=2), get("tensor")),
    "defaultdict": (lambda t: collections.defaultdict(list, tensor=t), get("tensor")),
    "dict with its own constructor": (lambda t: Options(tensor=t), get("tensor")),
    "ModelOutput": (ModelOutput, get("tensor")),
    "UserDict": (lambda t: Batch({"tensor": t}, "kept"), get("tensor")),
    "dataclass": (Counted, attribute),
    "frozen dataclass": (Frozen, attribute),
    "dataclass with slots": (lambda t: Slotted(t, 3), attribute),
    "frozen dataclass with slots": (FrozenSlotted, attribute),
    "dataclass with an unset field": (Unset, attribute),
    "nested": (lambda t: {"a": [Pair(1, Frozen((t,)))]}, lambda c: c["a"][0].second.tensor[0]),
}
ALL = pytest.mark.parametrize(("build", "look"), CONTAINERS.values(), ids=CONTAINERS)


# ---- find


@ALL
def test_tensors_are_found(build: Callable[[Any], Any], look: Callable[[Any], Any]) -> None:
    """One that is not found gets no hint for backward."""
    tensor = torch.ones(2)
    assert any(found is tensor for found in tensors_in(build(tensor)))


@pytest.mark.parametrize(
    "container",
    [
        lambda t: t,
        Plain,
        lambda t: {t},
        lambda t: frozenset([t]),
        lambda t: types.MappingProxyType({"a": t}),
        lambda t: types.SimpleNamespace(a=Plain([t])),
    ],
    ids=["itself", "plain object", "set", "frozenset", "read-only mapping", "namespace"],
)
def test_tensors_are_found_in_objects_that_are_never_cast(container: Callable[[Tensor], Any]) -> None:
    tensor = torch.ones(2)
    assert [found is tensor for found in tensors_in(container(tensor))] == [True]


def test_tensors_are_found_once_and_in_order() -> None:
    """Twice would count as two inputs that need a gradient, of which only one ever arrives."""
    a, b, c = (torch.zeros(1) for _ in range(3))
    found = list(tensors_in([a, {"x": b, "y": a}, (a, [b, c]), Plain(b)]))
    assert [id(tensor) for tensor in found] == [id(a), id(b), id(c)]


def test_tensors_are_found_in_cycles() -> None:
    tensor = torch.zeros(1)
    cycle: list[Any] = [tensor]
    plain = Plain(cycle)
    cycle += [cycle, {"again": cycle}, plain]
    plain.itself = plain
    assert [found is tensor for found in tensors_in(cycle)] == [True]


@pytest.mark.parametrize(
    "value", [None, 1, "text", b"bytes", 1.5, torch.float32, Tensor, Colour.RED, len, nn.Linear(2, 2), torch.Size([2])]
)
def test_atoms_hold_no_tensors(value: Any) -> None:
    """A module that is passed as an argument has tensors, which are none of the inputs."""
    assert list(tensors_in(value)) == []
    assert cast_floating(value, BF16) is value


# ---- cast


@ALL
def test_cast_makes_a_copy_of_the_same_kind(build: Callable[[Any], Any], look: Callable[[Any], Any]) -> None:
    tensor = torch.ones(2)
    container = build(tensor)
    cast = cast_floating(container, BF16)
    assert type(cast) is type(container)
    assert look(cast).dtype == BF16
    assert look(container) is tensor, "the caller's own container must not change"


@ALL
@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.int64), None], ids=str)
def test_values_that_need_no_cast_are_returned_unchanged(
    build: Callable[[Any], Any], look: Callable[[Any], Any], tensor: Any
) -> None:
    """Users may look for their own object, and a copy costs."""
    container = build(tensor)
    assert cast_floating(container, BF16) is container
    assert look(container) is tensor


def test_cast_keeps_everything_else() -> None:
    tensor = torch.ones(1)
    mapping = collections.OrderedDict(b=1, tensor=tensor, a=[2])
    cast = cast_floating(mapping, BF16)
    assert list(cast) == ["b", "tensor", "a"]
    assert cast["a"] is mapping["a"]
    default = cast_floating(collections.defaultdict(list, tensor=tensor), BF16)
    assert default["new"] == []
    assert cast_floating(Options(tensor=tensor), BF16).note == "kept"
    assert cast_floating(Batch({"tensor": tensor}, "kept"), BF16).extra == "kept"
    assert cast_floating(Rows(tensor, note="kept"), BF16).note == "kept"
    assert cast_floating(ModelOutput(tensor), BF16).tensor.dtype == BF16
    pair = cast_floating(Pair(mapping, tensor), BF16)
    assert pair._fields == ("first", "second")


def test_cast_does_not_construct_dataclasses_anew() -> None:
    """`__post_init__` may check, count or open something; fields without `init` would be lost."""
    value = Counted(torch.ones(1), 7)
    built = Counted.built
    cast = cast_floating(value, BF16)
    assert Counted.built == built
    assert (cast.number, cast.derived) == (7, "derived")


def test_cast_leaves_tensors_that_are_not_floating_point() -> None:
    values = [torch.ones(1, dtype=dtype) for dtype in (torch.int32, torch.bool, torch.complex64)]
    cast = cast_floating([*values, torch.ones(1)], BF16)
    assert all(new is old for new, old in zip(cast, values, strict=False))
    assert cast[-1].dtype == BF16


def test_cast_keeps_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    cast_floating({"x": x}, BF16)["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == x.dtype


def test_cast_survives_cycles() -> None:
    """A structure that contains itself (a tree with links to parents) works in a plain module, so it must here."""
    cycle: dict[str, Any] = {"tensor": torch.ones(1)}
    cycle["itself"] = cycle
    cast = cast_floating(cycle, BF16)
    assert cast["tensor"].dtype == BF16
    assert cycle["tensor"].dtype == torch.float32


def test_a_mapping_that_may_share_its_insides_is_left_alone() -> None:
    """A shallow copy of it could share the inner dict: casting would change the caller's batch."""
    mapping = Wrapper({"tensor": torch.ones(2)})
    assert cast_floating(mapping, BF16) is mapping
    assert mapping["tensor"].dtype == torch.float32
    assert len(tensors_in(mapping)) == 1


def test_to_device_moves_all_tensors_and_keeps_the_rest() -> None:
    value = {"a": [torch.ones(2), "text"], "b": (torch.ones(1, dtype=torch.int64, device="meta"),)}
    inputs = HandedInputs(move_to(torch.device("meta")), (value,), {})
    moved = inputs.args[0]
    assert [each.device.type for each in (moved["a"][0], moved["b"][0])] == ["meta", "meta"]
    assert moved["a"][1] == "text"
    assert moved["b"][0] is value["b"][0], "it is there already"
    assert value["a"][0].device.type == "cpu"
