"""Tests that what a forward writes into its inputs reaches the caller, where a policy has the inputs cast.

Callers' tensors are float64 and the policy casts them to float32, in which the modules compute. The plain module, which
gets the caller's own tensors, is the oracle.
"""

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.calls.nested import tensors_in
from helpers import assert_same, run_checks

POLICY = MixedPrecisionPolicy(param_dtype=torch.float32)
ROWS, WIDTH = 4, 6


class Writer(nn.Module):
    """Computes with a layer in its dtype, and lets `write` do the rest: (layer, x, *arguments) -> output."""

    def __init__(self, write: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(WIDTH, WIDTH), write

    def forward(self, x: Tensor, *states: Any, **options: Any) -> Any:
        return self.write(self.layer, x.to(self.layer.weight.dtype), *states, **options)


def random(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*(sizes or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both(write: Callable[..., Any], policy: MixedPrecisionPolicy = POLICY) -> tuple[nn.Module, nn.Module]:
    """Returns the sharded module, and the plain one."""
    plain = Writer(write)
    return fully_shard(copy.deepcopy(plain), mp_policy=policy), plain


def equal(mine: Any, theirs: Any, dtypes: bool = True) -> None:
    """Compares nested states: their types, keys, order, dtypes (`dtypes`) and values."""
    assert type(mine) is type(theirs), (type(mine), type(theirs))
    if isinstance(mine, Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, check_dtype=dtypes)
    elif isinstance(mine, (dict, UserDict)):
        assert [*mine] == [*theirs], ([*mine], [*theirs])
        for key in mine:
            equal(mine[key], theirs[key], dtypes)
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs), (len(mine), len(theirs))
        for one, other in zip(mine, theirs, strict=True):
            equal(one, other, dtypes)
    elif dataclasses.is_dataclass(mine) or hasattr(mine, "__dict__"):
        equal(attributes(mine), attributes(theirs), dtypes)
    else:
        assert mine == theirs


def attributes(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in getattr(value, "__slots__", ()) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def compare(write: Callable[..., Any], *states: Callable[[], Any], steps: int = 2) -> None:
    """Calls both modules with states of their own, and compares the states, the outputs and all gradients."""
    sharded, plain = both(write)
    mine, theirs = [make() for make in states], [make() for make in states]
    own = {id(tensor): tensor for tensor in tensors_in(mine)}
    for step in range(steps):
        x = random(step)
        output, expected = sharded(x, *mine), plain(x, *theirs)
        equal(output, expected, dtypes=False)
        equal(mine, theirs)
    kept = [id(tensor) in own for tensor in tensors_in(mine) if tensor.dtype == torch.float64]
    assert all(kept), "the caller's tensors are no longer there, but copies of them"
    for found, result in ((mine, output), (theirs, expected)):
        parts = [t.double().square().sum() for t in tensors_in(found, result) if t.requires_grad]
        if parts:
            torch.stack(parts).sum().backward()
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, 1e-5, 1e-6, name)


# ---- tensors


def into_a_cache(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache[:, 1] = layer(x).detach()
    return layer(x) + cache.sum(1)


def with_a_graph(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache[:, 1] = layer(x)
    return layer(x).relu()


def zeros_over_zeros(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    """Writes what was there before: the gradient still belongs to what is written."""
    cache[:, 0] = layer(x) * 0
    return layer(x)


def into_a_total(layer: Any, x: Tensor, total: Tensor) -> Tensor:
    total += layer(x).detach().sum(0)
    return layer(x)


def into_views(layer: Any, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys.copy_(layer(x).detach())
    values[2] = layer(x)[0].detach()
    return layer(x)


def into_one_of_two_names(layer: Any, x: Tensor, one: Tensor, same: Tensor) -> Tensor:
    one.mul_(2)
    return layer(x) + same.to(x.dtype)


def as_an_output(layer: Any, x: Tensor, out: Tensor) -> Tensor:
    torch.add(x, 1, out=out) if out.dtype == x.dtype else out.resize_(x.shape).copy_(x + 1)
    return layer(x)


def returned(layer: Any, x: Tensor, cache: Tensor) -> Any:
    cache[:, 1] = layer(x).detach()
    return {"y": layer(x), "cache": cache}


def data_replaced(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache.data = torch.cat([cache.data, layer(x).detach().to(cache.dtype).unsqueeze(1)], 1)
    return layer(x)


def cache() -> Tensor:
    return random(7, ROWS, 3, WIDTH) / 3


def passed_twice() -> None:
    sharded, plain = both(into_one_of_two_names)
    mine, theirs = random(3), random(3)
    equal(sharded(random(0), mine, mine), plain(random(0), theirs, theirs), dtypes=False)
    equal(mine, theirs)


def views_of_one_cache() -> None:
    """Each model's arguments are views of one tensor, which are made in this order."""
    sharded, plain = both(into_views)
    mine, theirs = random(5, ROWS, 2, WIDTH), random(5, ROWS, 2, WIDTH)
    for step in range(2):
        sharded(random(step), mine[:, 0], mine[:, 1]), plain(random(step), theirs[:, 0], theirs[:, 1])
        equal(mine, theirs)


def what_was_not_written_keeps_its_precision() -> None:
    sharded, _ = both(into_a_cache)
    mine, before = cache(), cache()
    sharded(random(0), mine)
    assert torch.equal(mine[:, [0, 2]], before[:, [0, 2]])
    assert not torch.equal(mine[:, 1], before[:, 1])


def returned_as_the_callers_own() -> None:
    sharded, _ = both(returned)
    mine = cache()
    assert sharded(random(0), mine)["cache"] is mine


def nothing_is_written() -> None:
    sharded, _ = both(lambda layer, x, cache, states: layer(x) + states[0].to(x.dtype))
    mine, states = cache(), [random(1)]
    first, versions = states[0], (mine._version, states[0]._version)
    sharded(random(0), mine, states)
    assert (mine._version, states[0]._version) == versions
    assert states == [first]


TENSORS = [
    ("into a cache", lambda: compare(into_a_cache, cache)),
    ("with a graph", lambda: compare(with_a_graph, cache, steps=1)),
    ("zeros over zeros", lambda: compare(zeros_over_zeros, lambda: torch.zeros(ROWS, 3, WIDTH).double(), steps=1)),
    ("into a total", lambda: compare(into_a_total, lambda: random(2, WIDTH), steps=4)),
    ("a tensor passed twice", passed_twice),
    ("views of one cache", views_of_one_cache),
    ("an empty output", lambda: compare(as_an_output, lambda: torch.empty(0).double())),
    ("data replaced", lambda: compare(data_replaced, cache)),
    ("returned", lambda: compare(returned, cache)),
    ("returned as the caller's own", returned_as_the_callers_own),
    ("precision", what_was_not_written_keeps_its_precision),
    ("nothing is written", nothing_is_written),
]


# ---- containers


@dataclasses.dataclass
class State:
    hidden: Tensor
    seen: int = 0
    more: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: Tensor
    seen: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    states: list[Tensor]


class Options(dict):
    """A dict with attributes."""


def appended(layer: Any, x: Tensor, states: list[Tensor]) -> Tensor:
    states.append(layer(x))
    return states[-1] + states[0].to(x.dtype)


def reordered(layer: Any, x: Tensor, states: list[Tensor]) -> Tensor:
    states.insert(0, layer(x).detach())
    states[1], states[-1] = states[-1], states[1]
    del states[2:4]
    return layer(x)


def items_of_a_dict(layer: Any, x: Tensor, states: Any) -> Tensor:
    states["new"] = layer(x).detach()
    states["hidden"][0] = 1
    states["replaced"] = states["replaced"].to(torch.float32) * 2
    states.pop("gone", None)
    return layer(x)


def new_order(layer: Any, x: Tensor, states: Any) -> Tensor:
    states["hidden"] = states.pop("hidden")
    return layer(x)


def fields(layer: Any, x: Tensor, state: Any) -> Tensor:
    state.seen += 1
    state.hidden = layer(x).detach()
    return layer(x)


def deep_inside(layer: Any, x: Tensor, states: Any) -> Tensor:
    states["blocks"][0][1].append(layer(x).detach())
    states["blocks"][0][0].mul_(2)
    states["blocks"].append((layer(x).detach(), []))
    return layer(x)


def in_a_frozen_one(layer: Any, x: Tensor, state: Frozen) -> Tensor:
    state.states.append(layer(x).detach())
    state.hidden.add_(1)
    return layer(x)


def new_attribute(layer: Any, x: Tensor, states: Any) -> Tensor:
    states.note = "written"
    states["hidden"].mul_(2)
    return layer(x)


def returned_list(layer: Any, x: Tensor, states: list[Tensor]) -> Any:
    states.append(layer(x).detach())
    return layer(x), states


def a_dict() -> dict[str, Any]:
    return {"hidden": random(1), "gone": random(2), "count": 3, "replaced": random(3)}


def returned_containers_are_the_callers_own() -> None:
    sharded, _ = both(returned_list)
    mine = [random(1)]
    for length in (2, 3):
        assert sharded(random(0), mine)[1] is mine
        assert len(mine) == length


def handed_on_from_module_to_module() -> None:
    """Each module casts for itself, and the last one's states are those of the caller."""
    modules = [both(appended) for _ in range(3)]
    mine, theirs = [random(1)], [random(1)]
    x = random(0)
    for sharded, plain in modules:
        sharded(x, mine), plain(x, theirs)
    equal(mine, theirs)
    assert len(mine) == 4


CONTAINERS = [
    ("appended", lambda: compare(appended, lambda: [random(1)])),
    ("appended to an empty list", lambda: compare(appended, list)),
    ("reordered", lambda: compare(reordered, lambda: [random(i) for i in range(6)])),
    ("a dict", lambda: compare(items_of_a_dict, a_dict)),
    ("a UserDict", lambda: compare(items_of_a_dict, lambda: UserDict(a_dict()))),
    ("an OrderedDict", lambda: compare(items_of_a_dict, lambda: OrderedDict(a_dict()))),
    ("new order", lambda: compare(new_order, a_dict)),
    ("a dataclass", lambda: compare(fields, lambda: State(random(1)))),
    ("a dataclass with slots", lambda: compare(fields, lambda: Slots(random(1)))),
    ("a frozen dataclass", lambda: compare(in_a_frozen_one, lambda: Frozen(random(1), [random(2)]))),
    ("deep inside", lambda: compare(deep_inside, lambda: {"blocks": [(random(1), [random(2)])]})),
    ("attributes", lambda: compare(new_attribute, lambda: Options(hidden=random(1)))),
    ("returned", returned_containers_are_the_callers_own),
    ("from module to module", handed_on_from_module_to_module),
]


# ---- ways to call


def activation_in_place() -> None:
    """The input of a forward is another module's output: gradients flow through what is written."""

    def write(layer: Any, x: Tensor, hidden: Tensor) -> Tensor:
        hidden.mul_(3)
        hidden += layer(x)
        return layer(hidden.to(x.dtype))

    sharded, plain = both(write)
    grads = []
    for module in (sharded, plain):
        start = random(4).requires_grad_()
        hidden = start * 1
        output = module(random(0), hidden)
        (output.double().square().sum() + hidden.square().sum()).backward()
        grads.append(start.grad)
    assert_same(*grads, 1e-5, 1e-6, "input")
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, 1e-5, 1e-5, name)


def in_inference_mode() -> None:
    sharded, plain = both(into_a_cache)
    mine, theirs = cache(), cache()
    states, expected = [random(1)], [random(1)]
    with torch.inference_mode():
        made_there, plainly = cache(), cache()
        for step in range(2):
            sharded(random(step), mine), plain(random(step), theirs)
            sharded(random(step), made_there), plain(random(step), plainly)
    equal([mine, made_there], [theirs, plainly])
    sharded, plain = both(appended)
    with torch.inference_mode():
        sharded(random(0), states), plain(random(0), expected)
    equal(states, expected)


def without_grad() -> None:
    with torch.no_grad():
        compare(into_a_cache, cache)
        compare(appended, lambda: [random(1)])


def written_without_grad_to_a_leaf() -> None:
    def write(layer: Any, x: Tensor, leaf: Tensor) -> Tensor:
        with torch.no_grad():
            leaf.mul_(2)
        return layer(x) * leaf.to(x.dtype)

    compare(write, lambda: random(1).requires_grad_())


def a_forward_that_fails() -> None:
    def write(layer: Any, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
        cache[:, 1] = layer(x).detach()
        states.append(layer(x).detach())
        raise KeyError("in forward")

    sharded, plain = both(write)
    mine, theirs = (cache(), [random(1)]), (cache(), [random(1)])
    for module, states in ((sharded, mine), (plain, theirs)):
        with pytest.raises(KeyError, match="in forward"):
            module(random(0), *states)
    equal(mine, theirs)


class Recomputing(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = (
            Writer(lambda layer, x, states: with_states(layer, x, states[0], states)),
            use_reentrant,
        )

    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        return checkpoint(self.inner, x, states, use_reentrant=self.use_reentrant)


def with_states(layer: Any, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
    cache[:, 1] = layer(x).detach()
    states.append(layer(x).detach())
    return layer(x).sigmoid()


def recomputed(use_reentrant: bool) -> None:
    """A recomputation writes once more, as that of the plain module does. Tensors are in a list: torch refuses to write
    to those that are arguments.
    """
    plain = Recomputing(use_reentrant)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded.inner, mp_policy=POLICY)
    mine, theirs = [cache(), random(1)], [cache(), random(1)]
    for module, states in ((sharded, mine), (plain, theirs)):
        module(random(0).requires_grad_(), states).double().sum().backward()
    equal(mine, theirs)
    assert len(mine) == 4
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, 1e-5, 1e-6, name)


def checkpointed_inside_with_a_dict() -> None:
    """What is recomputed reads the dict that the forward was handed, with the tensors as they were cast."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def compute(self, batch: dict[str, Tensor]) -> Tensor:
            return self.layer(batch["x"].to(self.layer.weight.dtype)).sigmoid()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            batch["y"] = checkpoint(self.compute, batch, use_reentrant=False)
            return batch["y"] * 2

    plain = Inside()
    sharded = fully_shard(copy.deepcopy(plain), mp_policy=POLICY)
    for module in (sharded, plain):
        batch = {"x": random(0)}
        (module(batch) + batch["y"]).sum().backward()
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, 1e-5, 1e-6, name)


def nested() -> None:
    """An outer module casts to float32, and the inner one, for itself, to bfloat16."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Writer(with_states), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
            cache[:, 0] = self.outer(x.to(self.outer.weight.dtype)).detach()
            return self.inner(x, cache, states)

    plain = Outer()
    sharded = copy.deepcopy(plain)
    fully_shard(sharded.inner, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(sharded, mp_policy=POLICY)
    plain.inner.to(torch.bfloat16)
    mine, theirs = (cache(), [random(1)]), (cache(), [random(1)])
    for step in range(2):
        sharded(random(step), *mine), plain(random(step), *theirs)
    for (name, one), other in zip((("cache", mine[0]), *enumerate(mine[1])), (theirs[0], *theirs[1]), strict=True):
        assert one.dtype == other.dtype, name
        assert_same(one.double(), other.double(), 1e-2, 1e-2, str(name))


def by_keyword_and_method() -> None:
    sharded, plain = both(lambda layer, x, *, cache, states: with_states(layer, x, cache, states))
    mine, theirs = (cache(), [random(1)]), (cache(), [random(1)])
    for step in range(2):
        sharded(random(step), cache=mine[0], states=mine[1]), plain(random(step), cache=theirs[0], states=theirs[1])
        sharded.forward(random(step), cache=mine[0], states=mine[1])
        plain.forward(random(step), cache=theirs[0], states=theirs[1])
    equal(mine, theirs)


def with_tangents() -> None:
    """Inside transforms of torch.func, and with forward-mode autograd."""

    def write(layer: Any, x: Tensor, hidden: Tensor) -> Tensor:
        hidden.mul_(3)
        return layer(x) * hidden.to(x.dtype)

    sharded, plain = both(write)

    def loss(module: nn.Module, hidden: Tensor) -> Tensor:
        hidden = hidden * 1
        return (module(random(0), hidden).double() + hidden).square().sum()

    for compute in (
        lambda module: torch.func.grad(lambda h: loss(module, h))(random(2)),
        lambda module: torch.func.jvp(lambda h: loss(module, h), (random(2),), (random(3),))[1],
    ):
        assert_same(compute(sharded), compute(plain), 1e-4, 1e-4, "derivative")


CALLS = [
    ("an activation in place", activation_in_place),
    ("inference mode", in_inference_mode),
    ("without grad", without_grad),
    ("written without grad", written_without_grad_to_a_leaf),
    ("a forward that fails", a_forward_that_fails),
    ("recomputed", lambda: recomputed(use_reentrant=False)),
    ("recomputed, reentrant", lambda: recomputed(use_reentrant=True)),
    ("a dict that is recomputed from", checkpointed_inside_with_a_dict),
    ("nested", nested),
    ("by keyword, by method", by_keyword_and_method),
    ("with tangents", with_tangents),
]


# ---- what is refused


def through_data(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache.data[:, 1] = layer(x).detach().to(cache.dtype)
    return layer(x)


def through_data_and_said(layer: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache.data[:, 1] = layer(x).detach().to(cache.dtype)
    torch.autograd.graph.increment_version(cache)
    return layer(x)


def written_unseen() -> None:
    """Where no version counter shows it: in the steps at which checks are due."""
    sharded, _ = both(through_data)
    with pytest.raises(RuntimeError, match=r"has changed states\[0\] where no version counter shows it") as caught:
        sharded(random(0), cache())
    assert "increment_version" in str(caught.value)
    compare(through_data_and_said, cache)
    through = both(through_data, dataclasses.replace(POLICY, cast_forward_inputs=False))
    mine, theirs = cache(), cache()
    for module, states in zip(through, (mine, theirs), strict=True):
        module(random(0).float(), states)
    equal(mine, theirs)


def nan_and_infinity() -> None:
    """Values that differ from themselves, or that a cast makes infinite, were not written."""
    sharded, plain = both(lambda layer, x, mask: layer(x) + mask.to(x.dtype))
    mask = torch.full((ROWS, WIDTH), float("-inf")).double()
    mask[0], mask[1], mask[2] = float("nan"), 1e300, 1e-300
    before = mask.clone()
    equal(sharded(random(0), mask).nan_to_num(), plain(random(0), mask).nan_to_num(), dtypes=False)
    torch.testing.assert_close(mask, before, rtol=0, atol=0, equal_nan=True)


def refused(text: str, write: Callable[..., Any], *states: Any) -> None:
    sharded, plain = both(write)
    with pytest.raises(RuntimeError, match=text) as caught:
        sharded(random(0), *states)
    assert ("cast_forward_inputs=False" in str(caught.value)) == ("shares memory" in text)
    assert "rite into a clone." in str(caught.value)
    # Where the policy leaves the inputs alone, it does what the plain module does.
    policy = dataclasses.replace(POLICY, cast_forward_inputs=False)
    as_advised = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    mine, theirs = copy.deepcopy(states), copy.deepcopy(states)
    try:
        expected = plain(random(0), *theirs)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            as_advised(random(0), *mine)
    else:
        equal(as_advised(random(0), *mine), expected, dtypes=False)
        equal(mine, theirs)


def a_leaf(layer: Any, x: Tensor, states: Any) -> Tensor:
    states["leaf"].mul_(2)
    return layer(x)


def through_another_view(layer: Any, x: Tensor, keys: Tensor, first: Tensor) -> Tensor:
    keys.mul_(2)
    return layer(x) + first.to(x.dtype)


def overlapping() -> tuple[Tensor, Tensor]:
    whole = random(1, ROWS, WIDTH)
    return whole, whole[1:2]


REFUSED = [
    ("unseen", written_unseen),
    ("NaN and infinity", nan_and_infinity),
    ("a leaf", lambda: refused(r"into states\[0\]\['leaf'\].*leaf", a_leaf, {"leaf": random(1).requires_grad_()})),
    (
        "through another view",
        lambda: refused(r"into states\[0\], .*states\[1\] shares memory", through_another_view, *overlapping()),
    ),
    (
        "expanded",
        lambda: refused(
            r"into states\[0\], .*single memory location",
            lambda layer, x, hidden: layer(x) + hidden.mul_(2),
            random(1, 1, WIDTH).expand(4, 6),
        ),
    ),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func imports what uses it
def test_what_a_forward_writes_reaches_the_caller() -> None:
    run_checks(2, [*TENSORS, *CONTAINERS, *CALLS, *REFUSED])
