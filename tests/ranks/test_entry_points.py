"""Tests ways into a sharded model other than its forward: they are exact, or refused with advice that is exact."""

import asyncio
import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard, register_fsdp_forward_method
from helpers import assert_same, full, run_checks, shard_batch
from scenarios import WIDTH, Block, Run, check, loss_of, sgd

VOCAB = 7


class Encoder(nn.Module):
    """Sharded by itself; as in CLIP, `encode` projects by a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)
        self.projection = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.project(self.inner(x).tanh())

    def project(self, x: Tensor) -> Tensor:
        return x @ self.projection

    def rows(self, x: Tensor) -> Iterator[Tensor]:
        for row in x:
            yield self.encode(row)

    async def later(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Captioner(nn.Module):
    """Sharded around an encoder and blocks. `use`: what forward does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([Encoder()])
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.use: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoders[0](x)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.use is None else self.use(self, x))

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @staticmethod
    def tokens(x: Tensor) -> Tensor:
        return (x.abs().sum(1) * 7).long() % VOCAB

    def score(self, x: Tensor) -> Tensor:
        return self.head(x).log_softmax(-1)

    def look_up(self, x: Tensor) -> Tensor:
        return torch.cat([self.embed(token) for token in self.tokens(x).split(1)])

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def project_twice(self, x: Tensor) -> Tensor:
        return self.encoders[0].project(x[:, :3]).sin()

    def read_projection(self, x: Tensor) -> Tensor:
        return x[:, :3] @ self.encoders[0].projection.sin()

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        """Calls itself and blocks by turns, as many a `generate` does."""
        made = []
        for _ in range(3):
            x = self.through_blocks(x) + F.one_hot(self(x).argmax(-1), WIDTH + VOCAB)[:, :WIDTH]
            made.append(x)
        return torch.cat(made, 1)

    def penalty(self) -> Tensor:
        return sum(param.square().sum() for param in self.parameters())  # type: ignore[return-value]

    def count(self) -> int:
        return sum(param.numel() for param in self.parameters())

    def build_optimizer(self) -> torch.optim.Optimizer:
        return sgd(self)

    def halve(self) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.5)


def shard(run: Run, model: Captioner) -> None:
    for module in (*model.encoders, *model.blocks, model):
        run.shard(module)


def with_full(module: nn.Module) -> AbstractContextManager[Any]:
    return full_params(module) if any(isinstance(param, DTensor) for param in module.parameters()) else nullcontext()


def reads_projection(model: Captioner, x: Tensor) -> Tensor:
    return x[:, :3] @ model.encoders[0].projection


def calls_inner(model: Captioner, x: Tensor) -> Tensor:
    return model.encoders[0].project(model.encoders[0].inner(x))


class Way(NamedTuple):
    """How to compute something by `use(model, x)`, outside of a forward, and what makes it right.

    `of(model)`: the module that it is about. `method`: that of it to register; None: it runs inside full_params.
    """

    use: Callable[[Captioner, Tensor], Tensor]
    of: Callable[[Captioner], nn.Module]
    method: str | None = None


WAYS = {
    "own method": Way(lambda model, x: model.encoders[0].encode(x), lambda model: model.encoders[0], "encode"),
    "own parameter": Way(
        lambda model, x: model.encoders[0].project(x[:, :3]), lambda model: model.encoders[0], "project"
    ),
    "module inside": Way(lambda model, x: model.score(x), lambda model: model, "score"),
    "one token": Way(lambda model, x: model.look_up(x), lambda model: model, "look_up"),
    "method inside": Way(lambda model, x: model.project_twice(x), lambda model: model.encoders[0], "project"),
    "generator": Way(
        lambda model, x: torch.stack(list(model.encoders[0].rows(x))), lambda model: model.encoders[0], "rows"
    ),
    "asynchronous": Way(lambda model, x: asyncio.run(model.encoders[0].later(x)), lambda model: model.encoders[0]),
    "parameter inside": Way(lambda model, x: model.read_projection(x), lambda model: model.encoders[0]),
    "called alone": Way(lambda model, x: model.head(x), lambda model: model.head),
    "one row, alone": Way(
        lambda model, x: torch.cat([model.embed(token) for token in model.tokens(x).split(1)]),
        lambda model: model.embed,
    ),
}
# By name: the module inside that is called, or the parameter that an operation meets.
REFUSED = r"model\.\S+ \(\w+\) was called while its parameters are sharded|\w+\.\w+: each rank holds a shard of it"


def test_each_way_is_refused_and_what_the_error_advises_makes_it_exact() -> None:
    def scenario(run: Run, way: str) -> None:
        model = run.build(Captioner)
        shard(run, model)
        optimizer = sgd(model)
        use, of, method = WAYS[way]
        if run.sharded:
            with pytest.raises(RuntimeError, match=REFUSED):
                use(model, run.batch(seed=0))
        block: Callable[[], AbstractContextManager[Any]] = nullcontext
        if method is not None:
            register_fsdp_forward_method(of(model), method)
        else:
            block = lambda: with_full(of(model))  # noqa: E731
        for step in range(2):
            with block():
                output = use(model, run.batch(seed=step))
                run.rows(f"output {step}", output)
            loss = loss_of(output) + loss_of(model(run.batch(seed=step + 5)))
            run.step(f"step {step}", model, optimizer, loss)

    check(scenario, way=tuple(WAYS))


def test_a_forward_that_computes_with_parameters_of_other_modules() -> None:
    """Refused by name, whether it reads the parameter or calls the module inside; the step after it is exact."""

    def scenario(run: Run, use: Callable[..., Tensor]) -> None:
        model = run.build(Captioner)
        shard(run, model)
        optimizer = sgd(model)
        if run.sharded:
            model.use = use
            with pytest.raises(RuntimeError, match=REFUSED):
                model(run.batch(seed=0))
        model.use = lambda model, x: with_block(model, x, use)
        for step in range(2):
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    def with_block(model: Captioner, x: Tensor, use: Callable[..., Tensor]) -> Tensor:
        with with_full(model.encoders[0]):
            return use(model, x)

    check(scenario, use=(reads_projection, calls_inner))


def test_methods_that_call_sharded_modules() -> None:
    """They need no registration: every call gathers for itself, with a graph through all of them or without."""

    def scenario(run: Run) -> None:
        model = run.build(Captioner)
        shard(run, model)
        optimizer = model.build_optimizer()
        for step in range(3):
            run.rows(f"generated {step}", model.generate(run.batch(seed=step)))
            loss = loss_of(model.through_blocks(run.batch(seed=step)))
            run.step(f"step {step}", model, optimizer, loss + loss_of(model(run.batch(seed=step))))

    check(scenario)


def test_methods_about_the_sharded_parameters() -> None:
    """They see what they are about: nothing is gathered for them. What is computed on shards alone is exact."""

    def scenario(run: Run) -> None:
        model = run.build(Captioner)
        shard(run, model)
        run.value("count", model.count())
        run.value("depth", model.depth)
        optimizer = model.build_optimizer()
        for step in range(2):
            penalty = model.penalty()
            run.value(f"penalty {step}", penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)
            model.halve()
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario)


class Steps(nn.Module):
    """A forward that is a generator: it takes tensors and errors, and returns one.
    `ways`: how else it makes a generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)
        self.own, self.way = nn.Parameter(torch.randn(WIDTH)), "function"

    def forward(self, x: Tensor) -> Any:
        if self.way == "expression":
            return (self.head(row * self.own)[None] for row in x.split(1))
        return self.inside(x) if self.way == "method" else self.steps(x)

    def inside(self, x: Tensor) -> Any:
        yield from self.steps(x)

    def steps(self, x: Tensor) -> Any:
        factor = torch.tensor(0.5)
        for row in x.split(1):
            try:
                factor = yield self.head(self.block(row) * self.own)[None] * factor
            except ZeroDivisionError:
                factor = self.own.square().sum() / self.own.square().sum() / 2
        return self.own.square().sum()


def drive(steps: Any) -> tuple[Tensor, Tensor]:
    """Returns all that a generator yields, and what it returns. Tensors are sent into it, and errors thrown."""
    outputs, call, value = [], steps.send, None
    while True:
        try:
            outputs.append(call(value))
        except StopIteration as end:
            return torch.cat(outputs).flatten(1), torch.zeros(()) if end.value is None else end.value
        call, value = (steps.send, torch.tensor(0.5)) if len(outputs) % 2 else (steps.throw, ZeroDivisionError())


def test_forwards_that_are_generators() -> None:
    """Each step gathers: what it yields and returns, for what is sent and thrown into it, is plain, with gradients."""

    def scenario(run: Run, way: str, reshard: bool) -> None:
        model = run.build(Steps)
        model.way = way
        run.shard(model.block, reshard_after_forward=reshard)
        run.shard(model, reshard_after_forward=reshard)
        optimizer = sgd(model)
        for step in range(2):
            made = (model if step else model.forward)(run.batch(seed=step))
            output, total = (torch.cat([*made]).flatten(1), 0.0) if way == "expression" else drive(made)
            run.rows(f"output {step}", output)
            run.step(f"step {step}", model, optimizer, loss_of(output) + total)
        left = model(run.batch(seed=5))
        next(left)
        left.close()
        if way != "expression":
            output, total = drive(model(run.batch(seed=6)))
            run.step("after one that was closed", model, optimizer, loss_of(output) + total)

    check(scenario, way=("function", "method", "expression"), reshard=(False, True))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, 3))

    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for row in x.split(1):
            yield checkpoint(self.inner, row, use_reentrant=False) @ self.own  # type: ignore[operator]


def generators_on_replicas_with_checkpointing() -> None:
    torch.manual_seed(0)
    plain = Recomputed()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (2, 2))
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    loss_of(torch.cat([*model(shard_batch(x, dist.get_rank(), 4))])).backward()
    loss_of(torch.cat([*plain(x)])).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param.grad), expected.grad, 1e-5, 1e-6, name)


def generators_with_a_policy_and_without_grad() -> None:
    torch.manual_seed(0)
    plain, x = Recomputed(), torch.randn(4, WIDTH)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    got = torch.cat([*model(x)])
    assert got.dtype == torch.float32
    assert_same(got.detach(), torch.cat([*plain.bfloat16()(x.bfloat16())]).float().detach(), 0, 0, "bf16")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(torch.cat([*model(x)]), got.detach(), 0, 0, mode.__name__)


def test_generators_on_four_ranks() -> None:
    checks = (generators_on_replicas_with_checkpointing, generators_with_a_policy_and_without_grad)
    run_checks(4, [(each.__name__, each) for each in checks])


def _captioner(**options: Any) -> Captioner:
    torch.manual_seed(0)
    model = Captioner()
    for module in (*model.encoders, *model.blocks, model):
        fully_shard(module, **options)
    return model


def copies_refuse_by_their_own_names() -> None:
    model = _captioner()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(RuntimeError, match=re.escape("`with fsdp2.full_params(model.head):`")):
            other.head(torch.randn(2, WIDTH))
        other(torch.randn(2, WIDTH))
    head = copy.deepcopy(model.head)  # no part of a sharded model
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        head(torch.randn(2, WIDTH))


def computing_on_shards_is_allowed() -> None:
    model = _captioner()
    x = torch.randn(4, WIDTH)
    on_mesh = DTensor.from_local(x, model.head.weight.device_mesh, [Replicate()])
    weight, bias = full(model.head.weight), full(model.head.bias)
    torch.testing.assert_close(full(model.head(on_mesh)), F.linear(x, weight, bias))
    torch.testing.assert_close(full(model.head(input=on_mesh)), F.linear(x, weight, bias))


def nothing_is_left_on_modules_that_run() -> None:
    """Hooks would slow down each call, and break graphs."""
    model, seen = _captioner(), []
    model.use = lambda model, x: seen.append(len(model.head._forward_pre_hooks)) or x
    model(torch.randn(2, WIDTH)).sum().backward()
    assert seen == [0]
    model.unshard()
    assert not model.head._forward_pre_hooks
    model.head(torch.randn(2, WIDTH))
    model.reshard()
    with full_params(model.head, writeback=True):
        model.head(torch.randn(2, WIDTH))
    with full_params(model.head):
        model.head(torch.randn(2, WIDTH))
    assert len(model.head._forward_pre_hooks) == 1


def other_errors_stay_what_they_are() -> None:
    """Of mixing a user's own DTensors, in a forward that has all its parameters; and any that a method raises."""
    model = _captioner()
    other = DTensor.from_local(torch.randn(2, WIDTH), model.head.weight.device_mesh, [Replicate()])
    model.use = lambda model, x: x + other
    with pytest.raises(RuntimeError, match=r"^aten\.add\.Tensor:? got mixed"):
        model(torch.randn(2, WIDTH))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), full_params(model):
        model.encoders[0].project(torch.randn(2, WIDTH))


def what_runs_later_cannot_be_registered() -> None:
    """But that of a module which is not sharded stays as it is."""
    model = _captioner()
    with pytest.raises(NotImplementedError, match=r"later is asynchronous.*full_params\(module\)"):
        register_fsdp_forward_method(model.encoders[0], "later")
    plain = Encoder()
    register_fsdp_forward_method(plain, "later")
    assert "later" not in vars(plain)


def methods_are_compiled_with_their_callers() -> None:
    torch._dynamo.reset()
    model, plain = _captioner(), _captioner()
    for module in (*model.encoders, *model.blocks):
        module.compile(backend="eager", fullgraph=True)
    x = torch.randn(4, WIDTH)
    assert torch.equal(model(x), plain(x))


CHECKS = (
    copies_refuse_by_their_own_names,
    computing_on_shards_is_allowed,
    nothing_is_left_on_modules_that_run,
    other_errors_stay_what_they_are,
    what_runs_later_cannot_be_registered,
    methods_are_compiled_with_their_callers,
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's
def test_limits() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])
