"""Tests that modules of any kind train exactly, also without a class that has a forward called by `module(x)`."""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, weight_norm
from torch.utils.checkpoint import checkpoint

from fsdp2 import full_params, fully_shard, register_fsdp_forward_method
from helpers import assert_same, full, run_checks
from scenarios import WIDTH, Block, Net, Run, check, loss_of, sgd

# ---- forwards that are called directly -------------------------------------------------------------------------------


class Direct(Net):
    """Calls the forward of its blocks; `how` says in which way."""

    def __init__(self, how: str, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__(depth=2)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            match self.how:
                case "forward":
                    x = block.forward(x)
                case "keywords":
                    x = block.forward(x=x)
                case "of the class":
                    x = type(block).forward(block, x)
                case "checkpointed":
                    x = checkpoint(block.forward, x, use_reentrant=False)
                case "reentrant":
                    x = checkpoint(block.forward, x, use_reentrant=True)
                case "both":
                    x = block(block.forward(x))
                case "called":
                    x = block(x)
                case "kept":
                    forward = block.forward
                    x = forward(x) + forward(block(x))
        return self.head(x * self.scale)


class Recursive(Block):
    """Calls its own forward, and that of the class above, while a call of it runs."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return super().forward(x) if depth == 0 else self.forward(x, depth - 1) + self(x, 0) * 0.1


WAYS = ("forward", "keywords", "of the class", "checkpointed", "reentrant", "both", "kept")


def train(run: Run, model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> None:
    optimizer = sgd(model)
    for step in range(2):
        if step == 1:
            run.set_sync(model, False)
            loss_of((call or model)(run.batch(seed=10))).backward()
            run.set_sync(model, True)
        with torch.no_grad():
            run.rows(f"evaluated {step}", (call or model)(run.batch(seed=step + 20)))
        run.step(f"step {step}", model, optimizer, loss_of((call or model)(run.batch(seed=step))))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # in evaluation
def test_a_forward_that_is_called_directly() -> None:
    """A forward gathers, whether a module is called or its forward: SqueezeBert writes `layer.forward(x)`. Of the kind:
    forwards given to checkpointing, taken from the class, kept in a variable, of a list of modules that share a group,
    of the root, and those that call themselves.
    """

    def scenario(run: Run, how: str, make: Callable[[], nn.Module], shared: bool) -> None:
        model = run.build(Direct, how, make)
        if shared:
            run.shard(list(model.blocks))
        else:
            for block in model.blocks:
                run.shard(block, reshard_after_forward=True)
        run.shard(model)
        train(run, model, model.forward)

    check(scenario, how=WAYS, make=(Block,), shared=(False, True))
    check(scenario, how=("forward", "both", "reentrant"), make=(Recursive,), shared=(False,))


# ---- forwards of instances -------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A class without a forward; its instances may get one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def bare() -> nn.Module:
    module = Bare()
    module.forward = lambda x: torch.tanh(module.linear(x))
    return module


def bare_list() -> nn.Module:
    module = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Tanh()])
    module.forward = lambda x: module[1](module[0](x))
    return module


def bound() -> nn.Module:
    """As accelerate prepares a model, and takes that away: by the function of the forward that is there."""
    module = Block()
    patch(module)
    return module


def patch(module: Any) -> None:
    forward = module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward

    @functools.wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2 * forward(*args, **kwargs)

    module.forward = MethodType(doubled, module)


def patch_by_class(module: Any) -> None:
    module.forward = MethodType(lambda self, x: 3 * type(self).forward(self, x), module)


def patch_what_is_bound(module: Any) -> None:
    """The old forward is called as it was found: outside a call of the module."""
    old = module.forward
    module.forward = lambda x: 0.5 * old(x)


def patch_by_partial(module: Any) -> None:
    module.forward = functools.partial(lambda scale, old, x: scale * old(x), 0.5, module.forward)


PATCHES = (patch, patch_by_class, patch_what_is_bound, patch_by_partial)


def test_a_forward_that_is_set_on_an_instance() -> None:
    """Adapters and preparing libraries set `module.forward`, before fully_shard or after it, on a class with a forward
    or without; it is called through the module or directly, and may be taken away again.
    """

    def scenario(run: Run, change: Callable[[Any], None] | None, late: bool, make: Any, how: str) -> None:
        model = run.build(Direct, how, make)
        for block in model.blocks:
            if change is not None and not late:
                change(block)
            run.shard(block)
            if change is not None and late:
                change(block)
        run.shard(model)
        train(run, model)
        if change is not None:
            del model.blocks[0].forward
            assert "forward" not in vars(model.blocks[0])
            with pytest.raises(AttributeError):
                del model.blocks[0].forward
            train(run, model)

    check(scenario, change=PATCHES, late=(False, True), make=(Block,), how=("both",))
    check(scenario, change=(None,), late=(False,), make=(bare, bare_list, bound), how=("both",))


# ---- classes of other kinds ------------------------------------------------------------------------------------------


class Called(nn.Module):
    """Has a `__call__` of its own, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Wrapper(nn.Module):
    """Passes all but the call on to what it wraps, as peft's and torch.compile's wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.wrapped = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.wrapped, name)


class Chain(nn.Sequential):
    pass


def traced() -> nn.Module:
    return fx.symbolic_trace(Block())


def chain() -> nn.Module:
    return Chain(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(nn.Linear(WIDTH, WIDTH))


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def checkpointed() -> nn.Module:
    return checkpoint_wrapper(Block())


def wrapped() -> nn.Module:
    return Wrapper(Block())


# How each may be used: a forward that only works after hooks, or that is not there, is not called directly.
KINDS = {
    Called: "called",
    normed: "called",
    traced: "both",
    chain: "both",
    parametrized: "both",
    checkpointed: "both",
    wrapped: "both",
}


def test_modules_of_other_kinds() -> None:
    """fx graphs, sequences, weight norms old and new, checkpoint wrappers, wrappers that pass attributes on, classes
    with a `__call__` alone.
    """

    def scenario(run: Run, kind: Callable[[], nn.Module]) -> None:
        model = run.build(Direct, KINDS[kind], kind)
        for block in model.blocks:
            run.shard(block)
        run.shard(model)
        train(run, model)

    check(scenario, kind=tuple(KINDS))


# ---- what users look up ----------------------------------------------------------------------------------------------


def signatures_are_those_of_the_class() -> None:
    """Trainers ask for the names of a forward's arguments, to leave out columns of a data set."""
    model = fully_shard(Recursive())
    for forward in (model.forward, type(model).forward):
        assert list(inspect.signature(forward).parameters)[-2:] == ["x", "depth"]
        assert forward.__name__ == "forward"
        assert forward.__doc__ == Recursive.forward.__doc__


def copies_call_their_own() -> None:
    model = fully_shard(Block())
    model.kept = model.forward
    x = torch.randn(2, WIDTH)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert torch.equal(other.forward(x), x)
        assert torch.equal(other.kept(x), x)
        assert not torch.equal(model.forward(x), x)


def registering_forward_changes_nothing() -> None:
    torch.manual_seed(0)
    plain = Block()
    model = fully_shard(copy.deepcopy(plain))
    register_fsdp_forward_method(model, "forward")
    x = torch.randn(2, WIDTH)
    for output in (model(x), model.forward(x)):
        assert_same(output, plain(x), 1e-6, 1e-6, "output")


def a_forward_within_full_params_gathers_nothing_more() -> None:
    torch.manual_seed(0)
    plain = Block()
    model = fully_shard(copy.deepcopy(plain))
    x = torch.randn(2, WIDTH)
    with full_params(model):
        assert_same(model.forward(x), plain(x), 1e-6, 1e-6, "output")
        assert type(model.up.weight) is nn.Parameter
    assert_same(full(model.up.weight), plain.up.weight, 0, 0, "weight")


def a_class_may_be_patched_later() -> None:
    class Patched(Block):
        pass

    model = fully_shard(Patched())
    Patched.forward = lambda self, x: x + 1
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), x + 1)
    assert torch.equal(model.forward(x), x + 1)


def containers_of_parameters_say_what_to_shard() -> None:
    """Nothing inside them can be sharded: the module around them reads them."""
    for module in (nn.ParameterList([torch.ones(3)]), nn.ParameterDict({"a": torch.ones(3)}), nn.ModuleList()):
        with pytest.raises(ValueError, match=r"has no forward.*Apply fully_shard to the module that holds it"):
            fully_shard(module)


CHECKS = (
    signatures_are_those_of_the_class,
    copies_call_their_own,
    registering_forward_changes_nothing,
    a_forward_within_full_params_gathers_nothing_more,
    a_class_may_be_patched_later,
    containers_of_parameters_say_what_to_shard,
)


def test_attributes_that_users_read() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])
