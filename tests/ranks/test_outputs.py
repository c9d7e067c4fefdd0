"""Tests what a module returns, stores and takes: any type, hidden tensors, views changed in place, weights."""

import collections
import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy
from matrix import TOPOLOGIES, Matrix, MatrixRun
from models import TinyLSTM
from scenarios import WIDTH, WRAPS, Block, Run, Wrap, blocks, check, leaves, loss_of, sgd, whole

matrix = Matrix()

# ---- kinds of containers ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Data:
    y: Tensor
    more: list[Tensor]


@dataclasses.dataclass(frozen=True)
class FrozenData:
    y: Tensor
    more: tuple[Tensor, ...]


@dataclasses.dataclass(slots=True)
class SlotsData:
    y: Tensor
    more: list[Tensor]


class Named(NamedTuple):
    y: Tensor
    more: list[Tensor]


class Attributes(dict):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ModelOutput(collections.OrderedDict):
    """As in transformers: items and attributes are two copies of the same, kept equal by `__setitem__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Data2(UserDict):
    """As BatchEncoding and BatchFeature."""


class Custom:
    """A plain object, with a cycle."""

    def __init__(self, y: Tensor, more: list[Tensor]) -> None:
        self.y, self.more, self.me = y, more, self


class Slots:
    """A plain object without a `__dict__`."""

    __slots__ = ("more", "y")

    def __init__(self, y: Tensor, more: list[Tensor]) -> None:
        self.y, self.more = y, more


def closure(y: Tensor, more: list[Tensor]) -> Callable[[], tuple[Tensor, list[Tensor]]]:
    """Nobody can look into a function."""
    return lambda: (y, more)


MAKE: dict[str, Callable[..., Any]] = {
    "tuple": lambda y, more: (y, more),
    "dict": lambda y, more: {"y": y, "more": {"x": more}},
    "dataclass": Data,
    "frozen dataclass": lambda y, more: FrozenData(y, tuple(more)),
    "slots dataclass": SlotsData,
    "namedtuple": Named,
    "dict subclass": lambda y, more: Attributes(y=y, more=more),
    "ModelOutput": lambda y, more: ModelOutput(y=y, more=more),
    "UserDict": lambda y, more: Data2(y=y, more=more),
    "custom object": Custom,
    "slots object": Slots,
    "closure": closure,
    "generator": lambda y, more: (t for t in (y, more)),
}


def parts(output: Any) -> tuple[Tensor, list[Tensor]]:
    if isinstance(output, tuple):
        y, more = output
    elif isinstance(output, dict | UserDict):
        y, more = output["y"], output["more"]
    elif callable(output):
        y, more = output()
    else:
        y, more = output if hasattr(output, "__next__") else (output.y, output.more)
    return y, list(more["x"] if isinstance(more, dict) else more)


class Returns(nn.Module):
    """Two modules that hand each other outputs of some kind; the root returns it too."""

    class Part(nn.Module):
        def __init__(self, make: Callable[..., Any]) -> None:
            super().__init__()
            self.make = make
            self.main, self.side, self.unused = Block(), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

        def forward(self, x: Any) -> Any:
            if not isinstance(x, Tensor):
                y, more = parts(x)
                x = y * more[0].mean(1, keepdim=True)
            y = self.main(x)
            return self.make(y, [self.side(y), self.unused(y)])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = self.Part(MAKE[kind]), self.Part(MAKE[kind])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(self.second(self.first(x * self.scale))))


@matrix.over(kind=tuple(MAKE), wrap=(whole, blocks, leaves))
def any_output_type_trains(run: MatrixRun, kind: str, wrap: Wrap) -> None:
    """Hooks on outputs must not be what backward depends on: nobody can look into every object."""
    model = run.build(Returns, kind)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        output = model(run.batch(seed=step))
        run.value("type", type(output).__name__)
        y, more = parts(output)
        run.rows("y", y)
        run.step(f"step {step}", model, optimizer, loss_of(y) + loss_of(more[0]))
        with torch.no_grad():
            run.rows("evaluated", parts(model(run.batch(seed=9)))[1][1])


@matrix.over(used=((0,), (3,), (4, 0), (2, 5), (1,)), wrap=WRAPS)
def only_a_part_of_the_outputs_is_used(run: MatrixRun, used: tuple[int, ...], wrap: Wrap) -> None:
    """An unused output gets no gradient, so its hook never runs; what feeds only it has no gradient either."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> dict[int, Tensor]:
            return {i: part(x) for i, part in enumerate(self.parts)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.last = Many(), Block()

        def forward(self, x: Tensor) -> dict[int, Tensor]:
            first = self.many(x)
            second = self.many(self.last(first[1]))
            return {**first, **{i + 3: y for i, y in second.items()}}

    model = run.build(Model)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        outputs = model(run.batch(seed=step))
        run.step(f"step {step}", model, optimizer, sum(loss_of(outputs[i]) for i in used))


@matrix.over(wrap=WRAPS)
def outputs_and_views_of_them_modified_in_place(run: MatrixRun, wrap: Wrap) -> None:
    """A hook or a wrapper around an output that makes it a view of something turns in-place operations into errors."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), Block()
            self.c = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            x = self.a(x)
            x += 1
            x.relu_()
            y = self.b(x)
            y[:, 1:3].mul_(2)
            z = self.c(y)
            z[:, 0] = x[:, 0]
            return z[:, :WIDTH], z[:, WIDTH:], z

    model = run.build(Model)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        left, right, whole_output = model(run.batch(seed=step))
        left.mul_(3)
        right += 2
        whole_output[:, 2].sub_(1)
        run.rows("output", whole_output)
        run.step(f"step {step}", model, optimizer, loss_of(whole_output) + loss_of(left))


@matrix.over(wrap=WRAPS)
def inputs_modified_in_place_and_passed_through(run: MatrixRun, wrap: Wrap) -> None:
    """A module that returns its input, or writes to it: hooks meant for the input then sit on the output as well."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += self.linear(x.detach().clone()).tanh()
            return x

    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.in_place, self.identity, self.last = Block(), InPlace(), Identity(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.identity(self.in_place(self.first(self.identity(x)))))

    model = run.build(Model)
    wrap(run, model)
    optimizer = sgd(model)
    x = run.batch(seed=1).requires_grad_()
    for step in range(3):
        run.step(f"step {step}", model, optimizer, loss_of(model(x)))
        run.rows("x.grad", x.grad / run.world_size)
    run.value("hooks left on the input", len(x._backward_hooks or ()))


class GivesWeight(nn.Module):
    """Returns its weight, or a view of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.how = how

    def forward(self) -> Any:
        if self.how == "view":
            return self.weight[1:, :2]
        return MAKE[self.how](self.weight, [self.weight]) if self.how in MAKE else self.weight


@matrix.over(how=["itself", "view", "ModelOutput", "custom object", "slots object"], wrap=WRAPS)
def a_weight_as_output_is_used_outside(run: MatrixRun, wrap: Wrap, how: Any) -> None:
    """The caller computes with it after the module's forward has ended: nothing may be freed under it, nor be lost."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gives, self.block = GivesWeight(how), Block()

        def forward(self, x: Tensor) -> tuple[Tensor, Any]:
            weight = self.gives()
            plain = weight if isinstance(weight, Tensor) else parts(weight)[0]
            return self.block(x) @ plain.T if how != "view" else self.block(x)[:, :2] @ plain.T, weight

    model = run.build(Tied)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        x = run.batch(seed=step)
        output, weight = model(x)
        plain = weight if isinstance(weight, Tensor) else parts(weight)[0]
        run.value("weight", plain.detach().clone())
        loss = loss_of(output) + plain.square().sum()
        loss = loss + loss_of(x[:, : plain.shape[1]] @ plain.T)
        run.step(f"step {step}", model, optimizer, loss)
        with torch.no_grad():
            output, weight = model(x)
            plain = weight if isinstance(weight, Tensor) else parts(weight)[0]
            run.rows("used without grad", x[:, : plain.shape[1]] @ plain.T)


@matrix.over(how=["itself", "view", "ModelOutput", "custom object", "slots object"])
def a_weight_as_output_can_be_read_after_backward(run: MatrixRun, how: Any) -> None:
    """A dangling tensor would show freed memory, or end the process."""
    model = run.build(GivesWeight, how)
    run.shard(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            output = model()
        weight = output if isinstance(output, Tensor) else parts(output)[0]
        if grad:
            weight.square().sum().backward()
        else:
            with torch.no_grad():
                model()
        run.value("after", weight.detach().clone())


def test_tensors_stored_on_self() -> None:
    """Losses on attributes that forward leaves behind, at every level, and read in the next forward as well."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.block = nn.Linear(WIDTH, 3), Block()
            self.aux: Any = None
            self.previous: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x)
            self.aux = {"loss": logits.logsumexp(1).square().mean(), "weight": self.gate.weight}
            y = self.block(x) * logits.softmax(1)[:, :1]
            y = y if self.previous is None else y + self.previous
            self.previous = y.mean(1, keepdim=True)
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routers = nn.ModuleList(Router() for _ in range(2))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            for router in self.routers:
                x = router(x)
            return self.head(x)

    def scenario(run: Run, only_aux: bool, wrap: Wrap) -> None:
        model = run.build(Model)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            outputs = [model(run.batch(seed=10 * step + i)) for i in range(2)]
            loss = sum(router.aux["loss"] for router in model.routers)
            if not only_aux:
                loss = loss + loss_of(outputs[1])
            run.step(f"step {step}", model, optimizer, loss)
            for router in model.routers:
                router.previous = None

    check(scenario, only_aux=(False, True), wrap=WRAPS)


@matrix.over(wrap=WRAPS)
def outputs_without_gradient(run: MatrixRun, wrap: Wrap) -> None:
    """Detached tensors, integers, None, an empty dict, a sparse tensor: nothing to hook, and nothing to wait for."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor) -> tuple[Any, ...]:
            y = self.b(self.a(x))
            return y.detach(), y.argmax(1), None, {}, "text", y.sin(), y.detach().relu().to_sparse()

    model = run.build(Model)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        detached, *_, y, sparse = model(run.batch(seed=step))
        run.rows("detached", detached)
        run.rows("sparse", sparse.to_dense())
        run.step(f"step {step}", model, optimizer, loss_of(y))
        run.rows("detached again", model(run.batch(seed=step))[0])


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@matrix.over(kind=tuple(kind for kind in MAKE if kind not in ("closure", "generator")))
def inputs_and_outputs_are_cast_and_keep_their_types(run: MatrixRun, kind: str) -> None:
    """A cast that rebuilds containers loses their class or attributes, or calls constructors that it can't."""
    dtype = torch.float16 if kind in ("tuple", "ModelOutput", "custom object") else torch.bfloat16
    cast = kind not in ("dict", "ModelOutput", "frozen dataclass")  # inputs, too

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen: Any = None

        def forward(self, x: Any) -> Any:
            y, more = parts(x)
            self.seen = (type(x).__name__, y.dtype, [t.dtype for t in more])
            y = self.linear(y if y.dtype == self.linear.weight.dtype else y.to(self.linear.weight.dtype))
            return MAKE[self.kind](y, [*more, y])

    model = run.build(Passes)
    model.kind = kind
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32, cast_forward_inputs=cast)
    run.shard(model, mp_policy=policy)
    low = torch.float64 if not run.sharded else dtype
    same = kind in ("custom object", "slots object")  # not looked into, as in torch
    inner = torch.float64 if same or not cast or not run.sharded else dtype
    x = MAKE[kind](run.batch(seed=1), [run.batch(seed=2), torch.arange(3)])
    output = model(x)
    assert model.seen == (type(x).__name__, inner, [inner, torch.int64]), model.seen
    y, more = parts(output)
    outer = low if same else torch.float32
    if run.sharded:
        assert y.dtype == outer
        assert more[-1].dtype == outer
    assert more[1].dtype == torch.int64
    run.value("type", type(output).__name__)
    if isinstance(output, ModelOutput):
        assert output.y is output["y"]
    before = parts(x)[0] if kind != "generator" else None
    assert before is None or before.dtype == torch.float64, "the caller's own container must not change"
    loss_of(y.double()).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.dtype == param.dtype == torch.float64


@matrix.over(wrap=(whole, blocks), dtype=(torch.bfloat16,))
def low_precision_gradients_are_those_of_a_low_precision_copy(run: MatrixRun, wrap: Wrap, dtype: torch.dtype) -> None:
    """Computed in bf16 between ranks in fp32: with equal rows on every rank, a plain bf16 model says every bit."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(8, 6), Block(8, 4)

        def forward(self, x: Tensor, more: ModelOutput) -> ModelOutput:
            return ModelOutput(y=self.b(self.a(x) + more["z"]))

    model = run.build(Model).float()
    if run.sharded:
        for module in (model.a, model.b) if wrap is blocks else ():
            run.shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        run.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32))
    generator = torch.Generator().manual_seed(1)
    x, z = torch.randn(2, 4, 8, generator=generator)  # the same rows on every rank
    low = model if run.sharded else run.build(Model).to(dtype)
    args = (x, ModelOutput(z=z)) if run.sharded else (x.to(dtype), ModelOutput(z=z.to(dtype)))
    output = low(*args)["y"].float()
    (output - 0.5).square().mean().backward()
    run.value("output", output)
    for (name, param), (_, own) in zip(low.named_parameters(), model.named_parameters(), strict=True):
        grad = param.grad.float() if not run.sharded else own.grad
        run._show("shard", f"{name}.grad", grad)


@matrix.over(wrap=WRAPS)
def lstm(run: MatrixRun, wrap: Wrap) -> None:
    """nn.LSTM keeps a list of its weights besides its parameters, and its kernel saves them in forward."""
    model = run.build(TinyLSTM)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        with torch.no_grad():
            run.rows("evaluated", model(run.batch(*model.row_shape, seed=9)))
        losses = [loss_of(model(run.batch(*model.row_shape, seed=10 * step + i))) for i in range(2)]
        run.step(f"step {step}", model, optimizer, sum(losses))
        listed = zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True)
        run.value("flat weights", [weight is param for weight, param in listed])


class Frozen:
    """Takes a value for each name once."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is frozen")


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.how: Callable[..., Any] = lambda y, weight: y

    def forward(self, x: Tensor) -> Any:
        return self.how(self.inner(x) * self.weight, weight=self.weight)


@matrix.over(wrap=WRAPS)
def the_step_after_an_output_that_cannot_be_changed(run: MatrixRun, wrap: Wrap) -> None:
    """A weight in it would have to be replaced by a copy: the error is the object's, and the module goes on."""
    model = run.build(ReturnsItsWeight)
    wrap(run, model)
    optimizer = sgd(model)
    if run.sharded:
        model.how = lambda y, weight: Frozen(y=y, weight=weight)
        with pytest.raises(AttributeError, match="is frozen"):
            model(run.batch(seed=1))
        assert all(isinstance(param, DTensor) for param in model.parameters())
        copy.deepcopy(model)
    model.how = lambda y, weight: y
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
