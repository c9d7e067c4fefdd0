"""Calls, graphs, and classes of modules."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fsdp2
from outcomes import EXACT, LOUD, Side
from situations.common import (
    Block,
    Net,
    distributed,
    ends,
    full_params,
    loaded,
    loss_of,
    sgd,
    shard,
    train,
    weights_of,
    whole,
)

# ---- parts of the root, used between its forward and its backward


class Hidden(Net):
    """Returns hidden states: a loss calls what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def kept_for_backward(side: Side) -> Any:
    return shard(side, Hidden(), reshard_after_forward=None)


def chunked_loss(model: Any, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__) -> Tensor:
    chunks = model(x).chunk(2)
    return sum(loss_of(call(model.head, model.norm(chunk))) for chunk in chunks) / 2


@ends(EXACT)
def head_called_on_chunks(side: Side) -> None:
    """The loss calls norm and head on chunks of what the model has returned, also while gradients accumulate"""
    model = kept_for_backward(side)
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2):
            side.set_sync(model, part == 1)
            chunked_loss(model, side.batch(2 * step + part)).backward()
        side.grads(f"gradients {step}", model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def head_checkpointed_on_chunks(side: Side) -> None:
    """The same, where activation checkpointing runs the head again in backward"""
    model = kept_for_backward(side)
    for use_reentrant in (False, True):
        run = functools.partial(checkpoint, use_reentrant=use_reentrant)
        chunked_loss(model, side.batch(int(use_reentrant)), run).backward()
        side.grads(f"gradients {use_reentrant}", model)


@ends(EXACT)
def hidden_states_projected(side: Side) -> None:
    """Distillation: the head and the stem also run on states that a hook has kept, with and without gradients"""
    model, kept = shard(side, Net(), reshard_after_forward=None), []
    model.blocks[0].register_forward_hook(lambda _, args, output: kept.append(output))
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(side.batch(step)))
        with torch.no_grad():
            target = model.head(kept[-1] * 0.5)
            side.rows(f"target {step}", target)
        loss = loss + (model.head(model.stem(kept[-1])) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def block_called_after_forward(side: Side) -> None:
    """Parts of a block are called after the forward, and after an evaluation, where `reshard_after_forward=False`"""
    model = shard(side, Net(), reshard_after_forward=False)
    optimizer = sgd(model)
    for step in range(2):
        with torch.no_grad():
            model(side.batch(step))
            side.rows(f"evaluated {step}", model.blocks[1].up(side.batch(step)))
        loss = loss_of(model(side.batch(step)))
        (loss + loss_of(model.blocks[1].up(model.stem(side.batch(9))))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(
    LOUD,
    "with fsdp2.full_params(model.head)",
    advises=(
        "On every rank, call it inside `with fsdp2.full_params({}):`; or register the method of {} that calls it",
        "or apply fully_shard to {}, too, before {}",
    ),
    ways=("inside", "sharded"),
)
def head_called_after_reshard(side: Side, way: str = "") -> None:
    """The head is called after `reshard`"""
    model = Hidden()
    if way == "sharded":
        side.fully_shard(model.head)
    shard(side, model, reshard_after_forward=None)
    hidden = model(side.batch(0))
    if side.is_sharded:
        model.reshard()
    with full_params(side, model.head) if way == "inside" else nullcontext():
        output = model.head(hidden)
        side.rows("output", output)
        loss_of(output).backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    advises="call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`",
    ways="inside",
)
def weights_read_after_forward(side: Side, way: str = "") -> None:
    """The loss reads the head's weight, which is sharded there"""
    model = kept_for_backward(side)
    hidden = model(side.batch(0))
    with full_params(side, model.head) if way else nullcontext():
        loss_of(hidden @ model.head.weight.t()).backward()
    side.grads("gradients", model)


@ends(EXACT, follows="weights_read_after_forward")
def whole_weights_read_after_forward(side: Side) -> None:
    """The same by `full_tensor()`, as the error says"""
    model = kept_for_backward(side)
    loss_of(model(side.batch(0)) @ whole(model.head.weight).t()).backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    advises="call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`",
    ways=("full_tensor", "inside"),
)
def an_operation_without_a_rule(side: Side, way: str = "") -> None:
    """`torch.cdist` of a weight, for which torch has no rule to compute it of shards"""
    model = shard(side, Net())
    with full_params(side, model) if way == "inside" else nullcontext(), torch.no_grad():
        weight = whole(model.head.weight) if way else model.head.weight
        side.value("distances", torch.cdist(weight, weight))


@ends(EXACT)
def interrupt_in_a_head(side: Side) -> None:
    """Ctrl-C while the loss calls the head, in a notebook that trains on"""
    model = kept_for_backward(side)
    optimizer = sgd(model)
    for error in (KeyboardInterrupt, ValueError):
        hidden = model(side.batch(0))

        def interrupt(*_: Any, error: type[BaseException] = error) -> None:
            raise error("stop")

        handle = model.head.register_forward_hook(interrupt)
        try:
            model.head(hidden)
        except error:
            handle.remove()
        for step in range(2):
            chunked_loss(model, side.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        side.weights(f"trained after {error.__name__}", model)


# ---- weights that modules compute from parameters


class LowRank(nn.Module):
    """Adds a product of two small matrices to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@ends(EXACT)
def parametrized_weights_logged(side: Side) -> None:
    """Norms of parametrized weights are logged between steps, and one is a penalty"""
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)], nn.Linear(5, 3))
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[1], dim=None)
    parametrize.register_parametrization(model[2], "weight", nn.Tanh())
    parametrize.register_parametrization(model[3], "weight", LowRank())
    side.fully_shard(model[1])
    side.fully_shard(model)
    optimizer = sgd(model)
    for step in range(2):
        for i in range(4):
            side.value(f"norm {i} at {step}", model[i].weight.norm().detach())
            side.value(f"weight {i} at {step}", model[i].weight.detach())
        (loss_of(model(side.batch(step))) + 0.1 * model[2].weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- classes that see their subclasses, or refuse changes


class Forked(nn.Module):
    """Layers of users' base classes do more to a subclass than sharding may cause."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def residual(cls: Any) -> None:
    own = cls.forward
    cls.forward = lambda self, x: x + own(self, x)


class ResidualOnce(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "forward" in vars(cls):
            residual(cls)


class ResidualAlways(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        residual(cls)


class MayNotOverride(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        if "forward" in vars(cls):
            raise TypeError(f"{cls.__name__} must not override forward")


class Registered(Forked):
    names: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str, **keywords: Any) -> None:
        if name in cls.names:
            raise ValueError(f"{name} is registered already")
        cls.names[name] = cls


class Final(Forked):
    def __init_subclass__(cls) -> None:
        raise TypeError(f"{cls.__name__}: Final can have no subclasses")


class Named(type):
    def __new__(cls, name: str, bases: Any, body: Any, *, prefix: str) -> Any:
        return super().__new__(cls, f"{prefix}{name}", bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, *, prefix: str) -> None:
        residual(cls)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name != "forward":
            raise AttributeError(f"{name}: a class that can't be changed")
        super().__setattr__(name, value)


class ByMetaclass(ResidualOnce, metaclass=Named, prefix="My"):
    pass


class Frozen(Forked):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["is_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "is_frozen" in vars(self):
            raise AttributeError(f"{name}: frozen after __init__")
        super().__setattr__(name, value)


class Adds(ResidualOnce):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class AddsOften(ResidualAlways):
    pass


class Overrides(MayNotOverride):
    pass


class HasName(Registered, name="has a name"):
    pass


@ends(EXACT)
def base_classes_that_see_subclasses(side: Side) -> None:
    """Base classes, and a metaclass, wrap the forward of each subclass, refuse subclasses or demand keywords"""
    layers = [cls() for cls in (Adds, AddsOften, Overrides, HasName, Final, ByMetaclass, Frozen)]
    model = nn.Sequential(*layers, nn.Linear(5, 3))
    for layer in layers:
        side.fully_shard(layer)
    train(side, side.fully_shard(model))
    later = type("Later", (Adds,), {"forward": Forked.forward})().requires_grad_(False)
    side.value("registered", Registered.names)
    side.value("a later subclass", later.forward(torch.ones(5)) - torch.tanh(later.linear(torch.ones(5))))
    side.value("instances", [isinstance(ResidualOnce(), type(layers[0])), isinstance(layers[0], Adds)])


class Generates(Net):
    def generate(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@ends(
    LOUD,
    "fsdp2.register_fsdp_forward_method(model, name)",
    advises="or apply fully_shard to {}, too, before {}",
    ways="too",
)
def another_method_than_forward(side: Side, way: str = "") -> None:
    """Another method than `forward` is called: `generate`"""
    model = Generates()
    for each in (model.stem, model.head) if way else ():
        side.fully_shard(each)
    shard(side, model)
    with torch.no_grad():
        side.rows("output", model.generate(side.batch(0)))


@ends(EXACT, follows="head_called_after_reshard")
def a_registered_method(side: Side) -> None:
    """The same, registered by `register_fsdp_forward_method`"""
    model = shard(side, Generates())
    if side.is_sharded:
        side.library.register_fsdp_forward_method(model, "generate")
    loss_of(model.generate(side.batch(0))).backward()
    side.grads("gradients", model)


REPLACED: dict[str, Any] = {
    "advises": "Replace modules before fully_shard; or build the model anew with the new one, apply fully_shard, and "
    "load the rest",
    "ways": ("before", "anew"),
}


def replaced_after_sharding(side: Side, way: str, replace: Callable[[Any], None], make: Any = Net) -> None:
    """Replaces modules of a sharded model, before `fully_shard`, or in another model that loads what was there."""
    model = make()
    if way == "before":
        replace(model)
    shard(side, model)
    if way == "anew":
        weights, model = weights_of(model), make()
        replace(model)
        rest = {name: value for name, value in weights.items() if name in model.state_dict()}
        shard(side, model)
        loaded(side, model, rest, strict=False)
    elif not way:
        replace(model)
    is_refused = side.library is fsdp2 and not way
    with pytest.raises(RuntimeError, match="before fully_shard") if is_refused else nullcontext():
        model.forward(side.batch(0))
    train(side, model)


class Agent(nn.Module):
    """No forward, but methods of its own, and a parameter that none of the modules inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(5, 2), nn.Linear(5, 1)
        self.log_scale = nn.Parameter(torch.zeros(1, 2))

    def value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(self.actor(x)) * self.log_scale.exp()


def train_agent(side: Side, agent: Any) -> None:
    optimizer = sgd(agent)
    for step in range(3):
        with torch.no_grad():
            target = agent.value(side.batch(9))
        (loss_of(agent.act(side.batch(step))) + (agent.value(side.batch(step)) - target).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", agent)


@ends(EXACT)
def no_forward_but_registered_methods(side: Side) -> None:
    """A module without `forward`, whose methods are registered"""
    agent = side.fully_shard(Agent())
    for name in ("value", "act") if side.is_sharded else ():
        side.library.register_fsdp_forward_method(agent, name)
    train_agent(side, agent)


@ends(LOUD, "fsdp2.register_fsdp_forward_method(model, name)")
def no_forward_and_no_registered_methods(side: Side) -> None:
    """The same, not registered"""
    train_agent(side, side.fully_shard(Agent()))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Any:
        for row in x.split(1):
            yield self.block(row) @ self.weight


@ends(EXACT)
def a_forward_that_is_a_generator(side: Side) -> None:
    """`forward` is a generator, which computes with weights after it was called"""
    model = Rows()
    side.fully_shard(model.block)
    side.fully_shard(model)
    loss_of(torch.cat([*model(side.batch(0))])).backward()
    side.grads("gradients", model)


class Faster(nn.Module):
    """Takes over the parameters of a Linear, as `from_float` and convert_sync_batchnorm do."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@ends(LOUD, **REPLACED)
def a_layer_that_takes_over_parameters(side: Side, way: str = "") -> None:
    """A layer is replaced, after sharding, by one that takes over its parameters"""

    def replace(model: Any) -> None:
        model.stem = Faster(model.stem)

    replaced_after_sharding(side, way, replace)


@ends(LOUD, **REPLACED, only_ours=True)
def a_layer_of_a_block_that_takes_over_parameters(side: Side, way: str = "") -> None:
    """The same of a layer in a block that is sharded by itself"""

    def replace(model: Any) -> None:
        model.blocks[1].up = Faster(model.blocks[1].up)

    replaced_after_sharding(side, way, replace)


@ends(LOUD, **REPLACED, only_ours=True)
def a_block_that_takes_over_layers(side: Side, way: str = "") -> None:
    """A block is replaced by one that takes over its layers"""

    class FasterBlock(Block):
        def __init__(self, old: Any) -> None:
            super().__init__()
            self.up, self.down = old.up, old.down

    def replace(model: Any) -> None:
        model.blocks[1] = FasterBlock(model.blocks[1])

    replaced_after_sharding(side, way, replace)


@ends(
    LOUD,
    advises="Replace or resize modules before fully_shard; or build the model anew",
    ways=("before", "anew"),
    only_ours=True,
)
def a_copy_in_place_of_a_layer(side: Side, way: str = "") -> None:
    """A layer is replaced by its copy"""

    def replace(model: Any) -> None:
        model.head = copy.deepcopy(model.head)

    replaced_after_sharding(side, way, replace)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5).eval()

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


@ends(LOUD, **REPLACED, only_ours=True)
def batch_norm_converted_after_sharding(side: Side, way: str = "") -> None:
    """`SyncBatchNorm.convert_sync_batchnorm`, which replaces modules; in evaluation: its training needs a device"""
    replaced_after_sharding(side, way, nn.SyncBatchNorm.convert_sync_batchnorm, Normed)


@ends(EXACT)
def a_head_taken_out(side: Side) -> None:
    """A head is replaced, after sharding, by a module without parameters"""
    model = shard(side, Net())
    train(side, model, name="before")
    model.head = nn.Identity()
    train(side, model)


EMBEDDINGS = {"scale_grad_by_freq": True, "sparse": True, "max_norm": 1.0}


def train_embedding(side: Side, way: str, option: str) -> None:
    options = {} if way else {option: EMBEDDINGS[option]}
    model = side.fully_shard(nn.Embedding(6, 5, **options))
    indices = (side.batch(0)[:, :2] * 10).long() % 6
    model(indices).square().mean().backward()
    side.grads("gradients", model)


@ends(EXACT, only_ours=True)
def a_wrap_policy_that_matches_nothing(side: Side) -> None:
    """A wrap policy by size that no submodule of a small model meets"""
    model = Net()
    for group in side.library.wrap_groups(model, 10**9) if side.library is not None else ():
        side.fully_shard(group.module, **group.options)
    train(side, side.fully_shard(model))


@ends(LOUD, advises="scale_grad_by_freq would count{}Leave it out", ways="left out")
def rows_by_frequency(side: Side, way: str = "") -> None:
    """An embedding whose gradient depends on how often indices occur"""
    train_embedding(side, way, "scale_grad_by_freq")


@ends(LOUD, advises=": sparse gradients are not supported. Use sparse=False", ways="left out")
def sparse_gradients(side: Side, way: str = "") -> None:
    """An embedding whose gradient is sparse"""
    train_embedding(side, way, "sparse")


@ends(LOUD, advises="max_norm writes to the weight{}Leave it out", ways="left out")
def rows_of_a_norm(side: Side, way: str = "") -> None:
    """An embedding that scales its rows in forward"""
    train_embedding(side, way, "max_norm")


@ends(
    LOUD,
    "weight: expected .grad to be None or a DTensor",
    advises="Use distribute_tensor(gradient, p.device_mesh, p.placements)",
    ways="distributed",
)
def plain_gradient_by_hand(side: Side, way: str = "") -> None:
    """A plain, whole tensor put into `.grad` before a backward"""
    model = side.fully_shard(nn.Linear(5, 3))
    for parameter in model.parameters():
        gradient = torch.ones(parameter.shape, dtype=parameter.dtype)
        parameter.grad = distributed(gradient, parameter) if way else gradient
    loss_of(model(side.batch(0))).backward()
    side.grads("all", model)


class KeepsOnCtx(torch.autograd.Function):
    """Computes x @ weight.T, and keeps the weight on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad @ ctx.weight, grad.T @ ctx.x


class Sided(nn.Module):
    """Its blocks' losses leave by attributes: backward comes to them before it comes to an output."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.multiply = nn.Linear(5, 5), multiply
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        for block in self.blocks:
            block.forward = functools.partial(self.run, block)  # type: ignore[assignment]

    def run(self, block: Any, x: Tensor) -> Tensor:
        passed_on = x * 2
        block.side = self.multiply(self.multiply(x, block.weight).tanh(), block.weight).square().mean()
        return passed_on

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, output: Tensor) -> Tensor:
        return loss_of(output) + sum(block.side for block in self.blocks)  # type: ignore[misc, operator]


@ends(EXACT)
def weights_kept_on_ctx(side: Side) -> None:
    """An autograd function that keeps its weight on `ctx`, and an auxiliary loss that comes to it first"""
    model = shard(side, Sided(KeepsOnCtx.apply))
    model.loss(model(side.batch(0))).backward()
    for name, param in model.named_parameters():
        side.value(name, param.grad)


@ends(EXACT)
def saved_tensor_hooks_of_ones_own(side: Side) -> None:
    """Saved-tensor hooks of one's own around a forward, and an auxiliary loss"""
    model = shard(side, Sided(nn.functional.linear))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        output = model(side.batch(0))
    model.loss(output).backward()
    for name, param in model.named_parameters():
        side.value(name, param.grad)


@ends(EXACT)
def views_kept_by_a_hook(side: Side) -> None:
    """A view of a weight that a forward hook keeps, read after an evaluation"""
    model = shard(side, Net())
    kept: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    with torch.no_grad():
        side.rows("output", model(side.batch(0)))
    side.value("kept", kept[0].clone())


# ---- graphs that leave the usual way


@ends(EXACT)
def loss_of_a_tensor_that_was_not_returned(side: Side) -> None:
    """A loss of a tensor that was kept, not returned"""

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.up(x))
            return super().forward(x).detach()

    kept: list[Tensor] = []
    model = side.fully_shard(nn.Sequential(side.fully_shard(Keeps()), side.fully_shard(nn.Linear(5, 5))))
    model(side.batch(0))
    loss_of(kept[0]).backward()
    side.grads("gradients", model)


@ends(EXACT)
def outputs_of_a_class_of_ones_own(side: Side) -> None:
    """A module that returns an object of the user's own class"""

    class Output:
        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden

    class Returns(Block):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = side.fully_shard(Returns()), side.fully_shard(nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Any:
            return Output(self.last(self.inner(x).hidden))

    model = side.fully_shard(Outer())
    loss_of(model(side.batch(0)).hidden).backward()
    side.grads("gradients", model)


@ends(EXACT)
def views_modified_in_place(side: Side) -> None:
    """An output that is a view, and is modified in place"""

    class View(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 5)

    model = side.fully_shard(nn.Sequential(side.fully_shard(View(5, 5)), nn.ReLU(True), side.fully_shard(View(5, 5))))
    loss_of(model(side.batch(0)).mul_(2)).backward()
    side.grads("gradients", model)


@ends(EXACT)
def gradient_penalty(side: Side) -> None:
    """Double backward: a gradient penalty"""
    model = shard(side, Net())
    x = side.batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum(1).mean().backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    advises="Call the model and torch.autograd.grad(loss, list(full.values()), create_graph=True) inside `with "
    "fsdp2.full_params(model) as full:` instead, with the same batch on every rank",
    ways="inside",
)
def penalty_on_gradients_of_parameters(side: Side, way: str = "") -> None:
    """A penalty on `.grad` after `backward(create_graph=True)`"""
    model = shard(side, Net())
    if way:
        with full_params(side, model) as full:
            loss = loss_of(model(Side().batch(0)))
            slopes = torch.autograd.grad(loss, list(full.values()), create_graph=True)
            torch.stack([each.square().sum() for each in slopes]).sum().backward()
        return side.grads("gradients", model)
    loss_of(model(side.batch(0))).backward(create_graph=True)
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    penalty = sum(whole(g).square().sum() for g in grads)
    (loss_of(model(side.batch(1))) + penalty).backward()
    return side.grads("gradients", model)


def compiled(module: Any) -> Any:
    """Returns it as torch.compile makes it, without a compiler of C++."""
    return torch.compile(module, backend="aot_eager")


@ends(
    LOUD,
    only_ours=True,
    advises="Shard the Python module that it was made of, and use torch.compile to make it fast",
    ways="compiled",
)
def model_of_torchscript(side: Side, way: str = "") -> None:
    """The model is compiled by TorchScript"""
    model: Any = nn.Linear(5, 3).double()
    if side.is_sharded and not way:
        model = torch.jit.script(model)
    side.fully_shard(model)
    loss_of((compiled(model) if way and side.is_sharded else model)(side.batch(0))).backward()
    side.grads("gradients", model)


def train_scripted(side: Side, way: str, script: Callable[[Any], Any]) -> None:
    """Trains a model whose head is scripted, compiled by torch.compile in its place, or scripted and ignored."""
    model: Any = Net().double()
    model.head.requires_grad_(way != "ignored")
    ignored = None
    if side.is_sharded and way != "Python":
        model.head = script(model.head)
        ignored = set(model.head.parameters()) if way else None
    shard(side, model, ignored_params=ignored)
    if way == "Python" and side.is_sharded:
        model.head.compile(backend="aot_eager")
    train(side, model)


PYTHON: dict[str, Any] = {
    "advises": "Use the Python module in its place, and torch.compile to make it fast; or leave a frozen one out: "
    "ignored_params=set(scripted.parameters())",
}


@ends(EXACT)
def inference_mode_then_training(side: Side) -> None:
    """A first forward in inference mode, then training"""
    model = shard(side, Net())
    with torch.inference_mode():
        model(side.batch(1))
    train(side, model)


@ends(EXACT)
def built_in_inference_mode(side: Side) -> None:
    """A model built and run in inference mode"""
    with torch.inference_mode():
        model = shard(side, Net())
        side.rows("outputs", model(side.batch(0)).clone())


@ends(EXACT)
def several_forwards(side: Side) -> None:
    """Two forwards, two backwards, a graph that is retained"""
    model = shard(side, Net())
    first, second = (loss_of(model(side.batch(seed))) for seed in range(2))
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    side.grads("gradients", model)


@ends(EXACT)
def reentrant_checkpointing(side: Side) -> None:
    """Reentrant activation checkpointing"""

    class Checkpointed(Net):
        def features(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    train(side, shard(side, Checkpointed()))


@ends(EXACT)
def child_before_root(side: Side) -> None:
    """A sharded child is called before the root"""
    model = shard(side, Net())
    with torch.no_grad():
        model.blocks[0](side.batch(1))
    train(side, model)


@ends(LOUD, "TorchScript", **PYTHON, ways=("Python", "ignored"))
def layer_of_torchscript(side: Side, way: str = "") -> None:
    """A layer inside is compiled by TorchScript"""
    train_scripted(side, way, torch.jit.script)


@ends(LOUD, "TorchScript", **PYTHON, ways="ignored", only_ours=True)
def traced_layer(side: Side, way: str = "") -> None:
    """The same, traced"""
    train_scripted(side, way, lambda head: torch.jit.trace(head, torch.ones(2, 5)))


@ends(EXACT)
def hook_set_in_forward(side: Side) -> None:
    """A post-accumulate hook that forward sets steps an optimizer"""

    class Stepping(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_set"):
                self.is_set = True
                self.stem.weight.register_post_accumulate_grad_hook(step)
            return super().forward(x)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None

    model = shard(side, Stepping().double())
    for seed in range(3):
        loss_of(model(side.batch(seed))).backward()
    side.weights("stepped", model)


@ends(LOUD, "compiled autograd")
def compiled_autograd_holds_the_backward(side: Side) -> None:
    """Backward under compiled autograd"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    with compiled_autograd._enable(lambda graph: graph) if side.is_sharded else nullcontext():
        loss.backward()
    side.grads("gradients", model)


# ---- calls in unusual orders, found by a fuzzer


@ends(EXACT, only_ours=True)
def a_handle_awaited_late(side: Side) -> None:
    """`unshard(async_op=True)` awaited behind the step that its gather was for"""
    model = side.fully_shard(nn.Linear(5, 3))
    optimizer = sgd(model)
    handle = model.unshard(async_op=True) if side.is_sharded else None
    loss_of(model(side.batch(0))).backward()
    if handle is not None:
        handle.wait()
    optimizer.step()
    with torch.no_grad():
        side.rows("output", model(side.batch(1)))


@ends(EXACT, only_ours=True)
def cleared_while_they_wait(side: Side) -> None:
    """Gradients that wait to be synchronised are cleared, and work under way is finished, before the next backward"""
    model = shard(side, Net())
    optimizer = sgd(model)
    if side.is_sharded:
        model.set_requires_gradient_sync(False)
    loss_of(model(side.batch(0))).backward()
    optimizer.zero_grad()
    if side.is_sharded:
        model.set_optimizer_in_backward(None)
        model.set_requires_gradient_sync(True)
    loss_of(model(side.batch(1))).backward()
    side.grads("of the second", model)


class GathersByItself:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        group.allgather_into_tensor_coalesced([output_tensor], [input_tensor]).wait()


@ends(EXACT, only_ours=True)
def another_collective_before_backward(side: Side) -> None:
    """`set_custom_all_gather` between a forward and its backward"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss = loss_of(model(side.batch(0)))
    if side.is_sharded:
        model.set_custom_all_gather(GathersByItself())
    loss.backward()
    side.grads("all", model)


@ends(EXACT, only_ours=True)
def settings_of_full_parameters(side: Side) -> None:
    """`requires_grad_` and `zero_grad` between `unshard()` and `reshard()`"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    for step, trainable in enumerate([False, True]):
        if side.is_sharded:
            model.unshard()
        model.zero_grad()
        model[0].requires_grad_(trainable)
        if side.is_sharded:
            model.reshard()
        side.value(f"trainable {step}", [parameter.requires_grad for parameter in model.parameters()])
        loss_of(model(side.batch(step))).backward()
        side.grads(f"step {step}", model)


@ends(EXACT)
def written_then_unsharded(side: Side) -> None:
    """`torch._foreach_mul_` of parameters that a forward has left gathered, then `unshard()`"""
    model = side.fully_shard(nn.Linear(5, 3))
    for _ in range(2):
        model(side.batch(0))
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    if side.is_sharded:
        model.unshard()
    side.rows("output", model(side.batch(0)))


@ends(EXACT)
def replaced_then_copied(side: Side) -> None:
    """`deepcopy` behind `functional_call`, which has put each parameter back"""
    model = side.fully_shard(nn.Linear(5, 3))
    other = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        side.rows("other", torch.func.functional_call(model, other, (side.batch(1),)))
    train(side, copy.deepcopy(model))


@ends(EXACT)
def step_behind_unshard(side: Side) -> None:
    """A step between `unshard()` and what reads the full parameters"""
    model = side.fully_shard(nn.Linear(5, 3))
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    if side.is_sharded:
        model.unshard()
    optimizer.step()
    side.value("read", model.weight.detach().clone())
    if side.is_sharded:
        model.reshard()
    side.weights("stepped", model)


@ends(
    LOUD,
    "stem.weight: each rank holds a shard",
    advises=(
        "On every rank, write inside `with fsdp2.full_params(module, writeback=True):`; {}",
        "or make a constant of its shape, which is the same on every rank, a DTensor: distribute_tensor(constant",
    ),
    ways=("inside", "a constant"),
)
def rows_cleared_by_a_mask(side: Side, way: str = "") -> None:
    """`weight[mask] = 0` with a plain mask, between steps"""
    model = shard(side, Net())
    row = torch.arange(5) == 2
    with full_params(side, model, writeback=True) if way == "inside" else nullcontext(), torch.no_grad():
        if way == "a constant":
            mask = (~row)[:, None].expand(5, 5).double()
            model.stem.weight.mul_(distributed(mask.contiguous(), model.stem.weight))
        else:
            model.stem.weight[row] = 0
    train(side, model)


@ends(
    LOUD,
    "a DTensor of global shape (5, 5)",
    advises=(
        "On every rank, call full_tensor() on it; {}",
        "or make a constant of its shape, which is the same on every rank, a DTensor: distribute_tensor(constant",
    ),
    ways=("full_tensor", "a constant"),
)
def gradients_masked_in_hooks(side: Side, way: str = "") -> None:
    """A hook on a parameter that masks its gradient"""
    model = shard(side, Net())
    mask = (torch.arange(5.0) > 2)[:, None].double()

    def masked(gradient: Tensor) -> Tensor:
        if way == "full_tensor":
            return whole(gradient) * mask
        return gradient * (distributed(mask.expand(5, 5).contiguous(), gradient) if way else mask)

    model.stem.weight.register_hook(masked)
    loss_of(model(side.batch(0))).backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    advises="On every rank, write to a whole one, `whole = x.full_tensor()` of the gradient or result x, and copy it "
    "back, `x.copy_(distribute_tensor(whole, x.device_mesh, x.placements))`",
    ways="whole",
)
def a_row_of_a_gradient_scaled(side: Side, way: str = "") -> None:
    """`p.grad[1].mul_(2)`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    gradient = model.stem.weight.grad
    rows = whole(gradient).clone() if way else gradient
    with torch.no_grad():
        rows[1].mul_(2)
        gradient.copy_(distributed(rows, gradient) if way else rows)
    side.grads("gradients", model)
