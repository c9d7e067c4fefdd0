"""Tests `torch.compile` of blocks and of whole models: the numbers of the plain model, and no more graphs than needed.

Graphs are counted by their backend. A sharded module is called outside of any graph; modules that it calls may be
compiled. Equal blocks share one graph, and no later step makes another. `examples/checkpoint_compile.py` is a whole
program.
"""

import copy
import functools
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import NIGHTLY, Differences, assert_same, full, run_checks, shard_batch
from scenarios import TOLERANCE, WIDTH, loss_of, sgd

pytestmark = [
    pytest.mark.timeout(300),  # dynamo alone takes seconds to import
    # dynamo looks for a gradient of what it is given, a plain module's inputs too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

RANKS, STEPS, ROWS = 2, 2, 4


# ---- a model, and a backend that counts ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.inner: Callable[..., Any] | None = None

    def mix(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.mix(x) if self.inner is None else self.inner(self.mix, x))


class Model(nn.Module):
    """Its forward has operations of its own before, between and after the blocks. In a loop dynamo would give up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.outer: Callable[..., Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = self.first(x) if self.outer is None else self.outer(self.first, x)
        x = torch.tanh(x * self.scale)
        x = self.second(x) if self.outer is None else self.outer(self.second, x)
        x = self.third(x) if self.outer is None else self.outer(self.third, x)
        return self.head(x)

    def blocks(self) -> list[Block]:
        return [self.first, self.second, self.third]


def counting() -> Any:
    """A backend that keeps the graphs it is given, and runs them as they are through AOT autograd."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return CompileCounterWithBackend("aot_eager")


def operations(backend: Any) -> list[list[str]]:
    """Names of the functions that each graph calls."""
    return [
        [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes if "call" in node.op]
        for graph in backend.graphs
    ]


def plain(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def shard(model: Model, **options: Any) -> Model:
    for block in model.blocks():
        fully_shard(block, **options)
    return fully_shard(model, **options)


checkpointed = functools.partial(checkpoint, use_reentrant=False)


# How to compile and shard a plain model; each gives back what is to be called.


def compiled_then_sharded(model: Model, backend: Any, **options: Any) -> Any:
    for block in model.blocks():
        block.compile(backend=backend, fullgraph=True)
    return shard(model, **options)


def sharded_then_compiled(model: Model, backend: Any, **options: Any) -> Any:
    shard(model, **options)
    for block in model.blocks():
        block.compile(backend=backend)
    return model


def whole_then_sharded(model: Model, backend: Any, **options: Any) -> Any:
    model.compile(backend=backend)
    return shard(model, **options)


def wrapped_whole(model: Model, backend: Any, **options: Any) -> Any:
    return torch.compile(shard(model, **options), backend=backend)


def checkpoint_inside(model: Model, backend: Any, **options: Any) -> Any:
    """A region within a compiled block: part of the graph."""
    for block in model.blocks():
        block.inner = checkpointed
    return compiled_then_sharded(model, backend, **options)


def checkpoint_wrapped(model: Model, backend: Any, **options: Any) -> Any:
    """The order that trainers use: checkpoint, compile, shard."""
    for name in ("first", "second", "third"):
        setattr(model, name, checkpoint_wrapper(getattr(model, name)))
    return compiled_then_sharded(model, backend, **options)


def checkpoint_outside(model: Model, backend: Any, **options: Any) -> Any:
    """The call of a compiled, sharded block is recomputed: it is gathered once more by that."""
    model.outer = checkpointed
    return compiled_then_sharded(model, backend, **options)


# The same with what `torch.compile(module)` returns: a module around another, whose forward is set on the instance.


def optimized(model: Model, backend: Any, wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> Model:
    for name in ("first", "second", "third"):
        setattr(model, name, torch.compile(wrap(getattr(model, name)), backend=backend))
    return model


def optimized_then_sharded(model: Model, backend: Any, **options: Any) -> Any:
    """torchtitan's recipe."""
    return shard(optimized(model, backend), **options)


def whole_optimized_then_sharded(model: Model, backend: Any, **options: Any) -> Any:
    for block in model.blocks():
        fully_shard(block, **options)
    return fully_shard(torch.compile(model, backend=backend), **options)


def optimized_then_inner_sharded(model: Model, backend: Any, **options: Any) -> Any:
    """What is compiled has kept the call that its module had before it was sharded."""
    blocks = model.blocks()
    optimized(model, backend)
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def optimized_within_checkpoint(model: Model, backend: Any, **options: Any) -> Any:
    optimized(model, backend)
    for name in ("first", "second", "third"):
        setattr(model, name, checkpoint_wrapper(getattr(model, name)))
    return shard(model, **options)


def optimized_around_checkpoint(model: Model, backend: Any, **options: Any) -> Any:
    return shard(optimized(model, backend, checkpoint_wrapper), **options)


def optimized_in_checkpoint(model: Model, backend: Any, **options: Any) -> Any:
    model.outer = checkpointed
    return optimized_then_sharded(model, backend, **options)


def forwards_called_in_a_graph(model: Model, backend: Any, **options: Any) -> Any:
    """The graph of the whole model breaks at `block.forward(x)` as it does at `block(x)`."""
    model.outer = lambda block, x: block.forward(x)
    return wrapped_whole(model, backend, **options)


BLOCK = ["layer_norm", "linear", "tanh", "linear", "add"]
STEM, BETWEEN, HEAD = ["linear", "tanh"], ["mul", "tanh"], ["linear"]

How = Callable[..., Any]
GRAPHS: dict[How, Sequence[Sequence[str]]] = {
    compiled_then_sharded: [BLOCK],
    sharded_then_compiled: [BLOCK],
    whole_then_sharded: [STEM, BLOCK, BETWEEN, HEAD],
    wrapped_whole: [STEM, BLOCK, BETWEEN, HEAD],
    checkpoint_wrapped: [["tag_activation_checkpoint"]],
    checkpoint_outside: [BLOCK],
    checkpoint_inside: [["tag_activation_checkpoint", "add"]],
    optimized_then_sharded: [BLOCK],
    whole_optimized_then_sharded: [STEM, BLOCK, BETWEEN, HEAD],
    optimized_then_inner_sharded: [BLOCK],
    optimized_within_checkpoint: [BLOCK],
    optimized_around_checkpoint: [["tag_activation_checkpoint"]],
    optimized_in_checkpoint: [BLOCK],
    forwards_called_in_a_graph: [STEM, BLOCK, BETWEEN, HEAD],
}


def short(graph: Sequence[str]) -> list[str]:
    return [name for name in graph if name != "getitem"]


# ---- checks, each on two ranks ---------------------------------------------------------------------------------------


def own(batch: Tensor) -> Tensor:
    return shard_batch(batch, dist.get_rank(), dist.get_world_size())


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(model: nn.Module, expected: nn.Module, different: Differences, what: str, gradients: bool = False) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        actual, whole = (full(p.grad), q.grad) if gradients else (full(p), q.detach())
        with different.noted():
            assert_same(actual, whole, **TOLERANCE, name=f"{what}: {name}")


def trains_with_few_graphs(how: How, **options: Any) -> None:
    """Losses, gradients, parameters; all graphs in the first step, and those that are expected."""
    different, backend, expected = Differences(), counting(), plain()
    model = plain()
    call = how(model, backend, **options)
    optimizers = sgd(model), sgd(expected)
    for step in range(STEPS):
        loss, whole = loss_of(call(own(batch(step)))), loss_of(expected(batch(step)))
        for each in (loss, whole):
            each.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        with different.noted():
            assert_same(mean / dist.get_world_size(), whole.detach(), **TOLERANCE, name=f"step {step}: loss")
        compare(model, expected, different, f"step {step}, gradients", gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with different.noted():
            assert [short(graph) for graph in operations(backend)] == list(map(list, GRAPHS[how])), f"step {step}"
    compare(model, expected, different, "trained")
    different.raise_first()


def settings_make_no_graphs() -> None:
    """Accumulation, full parameters that stay, and divisors are no part of a graph; they change from step to step."""
    different, backend, model, expected = Differences(), counting(), plain(), plain()
    call = compiled_then_sharded(model, backend)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model.set_reshard_after_forward(step < 2, recurse=True)
        model.set_reshard_after_backward(step < 1)
        loss_of(call(own(batch(step)))).backward()
        loss_of(expected(batch(step))).backward()
    compare(model, expected, different, "gradients", gradients=True)
    assert backend.frame_count == 1
    different.raise_first()


def evaluation_makes_one_more() -> None:
    """Without grad the graph is another; going back and forth makes no third. A new batch size makes one for all."""
    backend, model, expected = counting(), plain(), plain()
    call, counts = compiled_then_sharded(model, backend), []
    for rows in (4, 4, 6, 8, 4):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                output, whole = call(own(batch(1, rows))), expected(batch(1, rows))
            assert_same(output.detach(), own(whole.detach()), **TOLERANCE, name=f"{rows} rows")
            counts.append(backend.frame_count)
    assert counts == [1, 2, 2, 2, 3, 4, 4, 4, 4, 4]


def mixed_precision_is_that_of_eager() -> None:
    """bf16 weights, cast on their way through the gather: bit for bit what the sharded model computes otherwise."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    eager, model, backend = shard(plain(torch.float32), mp_policy=policy), plain(torch.float32), counting()
    call = wrapped_whole(model, backend, mp_policy=policy)
    for step in range(2):
        for each in (eager, call):
            loss_of(each(own(batch(step)).float()).float()).backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert_same(p.grad.to_local(), q.grad.to_local(), 0, 0, f"step {step}: {name}")
    assert len(backend.graphs) == len(GRAPHS[wrapped_whole])


def one_that_fails_to_compile() -> None:
    """With `fullgraph` an error of dynamo comes to the user; after it the model is whole, and trains uncompiled."""
    backend, model, expected = counting(), plain(), plain()
    call = compiled_then_sharded(model, backend)
    model.second.inner = lambda mix, x: mix(x) if torch._dynamo.graph_break() is None else x
    with pytest.raises(torch._dynamo.exc.Unsupported):
        call(own(batch(0)))
    model.second.inner = None
    different = Differences()
    torch._dynamo.reset()
    loss_of(call(own(batch(0)))).backward()
    loss_of(expected(batch(0))).backward()
    compare(model, expected, different, "gradients", gradients=True)
    different.raise_first()


def other_backends() -> None:
    """`eager`, which runs what dynamo captures; at night `inductor`, which compiles it, where there is a compiler."""
    has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    for backend in ("eager", "inductor") if NIGHTLY and has_compiler else ("eager",):
        torch._dynamo.reset()
        different, model, expected = Differences(), plain(torch.float32), plain(torch.float32)
        call = optimized_then_sharded(model, backend)
        for step in range(2):
            loss_of(call(own(batch(step)).float())).backward()
            loss_of(expected(batch(step).float())).backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            with different.noted():
                assert_same(full(p.grad), q.grad, 1e-5, 1e-6, f"{backend}: {name}")
        different.raise_first()


def names_are_those_of_torch() -> None:
    """Checkpoints of compiled models can be exchanged with torch's own FSDP2."""
    from torch.distributed.fsdp import fully_shard as theirs

    def whole(api: Callable[..., Any]) -> nn.Module:
        return api(torch.compile(plain(), backend="eager"))

    def blocks(api: Callable[..., Any]) -> nn.Module:
        model = optimized(plain(), "eager")
        for block in model.blocks():
            api(block)
        return api(model)

    def after(api: Callable[..., Any]) -> nn.Module:
        return torch.compile(api(plain()), backend="eager")

    for make in (whole, blocks, after):
        model, other = make(fully_shard), make(theirs)
        assert list(model.state_dict()) == list(other.state_dict())
        assert any("_orig_mod" in name for name in model.state_dict())
        assert sorted(get_model_state_dict(model)) == sorted(get_model_state_dict(other))
        set_model_state_dict(model, get_model_state_dict(other))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(p.to_local(), q.to_local(), 0, 0, make.__name__)


def copies_of_optimized_modules_train_on() -> None:
    """Also where the module outside is what `torch.compile` returned, whose class builds its copies in its own way."""
    whole = fully_shard(torch.compile(plain(), backend="eager"))
    x = own(batch(0))
    for model in (whole, optimized_then_sharded(plain(), "eager")):
        expected = model(x)
        for _ in range(2):
            other = copy.deepcopy(model)
            loss_of(other(x)).backward()
            sgd(other).step()
            assert not torch.equal(other(x), expected)
            assert torch.equal(model(x), expected)
            assert next(model.parameters()).grad is None


# What is compiled, and when, is the same on one rank. Each rank compiles by itself, and imports what does it.
ON_RANKS = (wrapped_whole, checkpoint_outside)


def graphs_of(hows: Iterable[How]) -> dict[str, Callable[[], None]]:
    return {how.__name__: functools.partial(trains_with_few_graphs, how) for how in hows}


def test_on_one_rank() -> None:
    checks = graphs_of(how for how in GRAPHS if NIGHTLY or how not in ON_RANKS)
    others = (settings_make_no_graphs, evaluation_makes_one_more, one_that_fails_to_compile, other_backends)
    checks |= {each.__name__: each for each in (*others, copies_of_optimized_modules_train_on)}
    run_checks(1, [*checks.items()], timeout=240)


def test_on_two_ranks() -> None:
    checks = graphs_of(GRAPHS if NIGHTLY else ON_RANKS)
    checks |= {each.__name__: each for each in (mixed_precision_is_that_of_eager, names_are_those_of_torch)}
    run_checks(RANKS, [*checks.items()], timeout=240)
