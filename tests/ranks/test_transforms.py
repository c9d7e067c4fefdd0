"""Tests `torch.func`'s transforms around the forward of a sharded module, and inside it."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from helpers import NIGHTLY, assert_same, run_ranks
from matrix import TOPOLOGIES, Matrix, MatrixRun
from scenarios import WIDTH, Block, Net, blocks, kept, loss_of, sgd, whole

matrix = Matrix()

# Torch's own, when it loads what forward mode needs.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

Model = Callable[[Tensor], Tensor]


def vjp_and_output(model: Model, x: Tensor) -> Tensor:
    """The first forward of two is gone back to twice, the second as usual."""
    output, pull = vjp(model, x)
    return torch.cat([pull(output)[0], pull(output.cos())[0], output, model(x)], dim=1)


AROUND: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "grad": lambda model, x: grad(lambda x: model(x).square().sum())(x),
    "vjp": vjp_and_output,
    "jvp": lambda model, x: torch.cat(jvp(model, (x,), (torch.ones_like(x),)), dim=1),
    "jacrev": lambda model, x: vmap(jacrev(model))(x).flatten(1),
    "jacfwd": lambda model, x: vmap(jacfwd(model))(x).flatten(1),
    "hessian": lambda model, x: vmap(hessian(lambda x: model(x).sum()))(x).flatten(1),
    "grad of vmap": lambda model, x: grad(lambda x: vmap(model)(x).square().sum())(x),
    "vmap": lambda model, x: vmap(model)(x),
}


@matrix.over(wrap=[whole, blocks, *([kept] if NIGHTLY else [])], transform=list(AROUND))
def training_through_a_transform(run: MatrixRun, transform: str, wrap: Any) -> None:
    """Its result is a loss: backward goes through graphs that were built inside it."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        run.rows(f"result {step}", AROUND[transform](model, run.batch(seed=step)).detach())
        loss = loss_of(AROUND[transform](model, run.batch(seed=step)))
        run.step(f"step {step}", model, optimizer, loss)


class Force(nn.Module):
    """A gradient inside a forward, of modules that the same group gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, 1)

    def energy(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x)))).sum()

    def forward(self, x: Tensor) -> Tensor:
        return grad(self.energy)(x) + vmap(jacrev(self.energy))(x) + jvp(self.up, (x,), (x,))[1][:, :WIDTH]


class Field(nn.Module):
    """A block of its own group inside the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Force()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](x) + grad(lambda x: self.blocks[0](x).square().sum())(x)
        return self.head(x)


@matrix.over(wrap=[whole, blocks, kept])
def transforms_inside_a_forward(run: MatrixRun, wrap: Any) -> None:
    """Ours would be the saved-tensor hooks that torch.func refuses to run with."""
    model = run.build(Field)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@matrix.over()
def later_and_after_failures(run: MatrixRun) -> None:
    """A pullback is called after the next forward and step; a function fails inside a transform; without grad mode."""

    def fails(x: Tensor) -> Tensor:
        raise KeyError(str(x.shape))

    model = run.build(Net)
    blocks(run, model)
    optimizer, x = sgd(model), run.batch(seed=0)
    output, pull = vjp(model, x)
    run.step("between", model, optimizer, loss_of(model(run.batch(seed=1))))
    model(run.batch(seed=2))
    output, pull = vjp(model, x)
    model(run.batch(seed=3))
    run.rows("pulled", pull(output)[0].detach())
    for _ in range(2):
        with pytest.raises(KeyError):
            grad(lambda x: fails(model(x)))(x)
        run.rows("after a failure", grad(lambda x: model(x).sum())(x).detach())
    with torch.no_grad():
        run.rows("without grad mode", grad(lambda x: model(x).sum())(x))
    run.step("at last", model, optimizer, loss_of(model(run.batch(seed=4))))


class Slope(Force):
    """Reads its weights inside a gradient only."""

    def forward(self, x: Tensor) -> Tensor:
        return grad(self.energy)(x)


STALE: dict[str, tuple[Callable[[], nn.Module], Callable[[Model, Tensor], Tensor]]] = {
    "inside": (Slope, lambda model, x: model(x)),
    "around": (Block, lambda model, x: grad(lambda x: model(x).square().sum())(x)),
}


@matrix.over(where=list(STALE))
def weights_that_change_before_backward_are_refused(run: MatrixRun, where: str) -> None:
    """As in plain training: no hook of ours has seen that they were saved."""
    build, transform = STALE[where]
    model = run.build(build)
    run.shard(model, reshard_after_forward=True)
    result = transform(model, run.batch(seed=0))
    with torch.no_grad():
        model.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(result).backward()
    loss_of(transform(model, run.batch(seed=1))).backward()
    run.grads("after the next forward", model)


def test_with_casts_and_offload() -> None:
    def body(rank: int, _: int) -> None:
        for options in (
            {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            {"reshard_after_forward": 1},
        ):
            torch.manual_seed(0)
            model, plain, x = Net(), Net(), torch.randn(4, WIDTH)
            plain.load_state_dict(model.state_dict())
            for block in model.blocks:
                fully_shard(block, **options)
            is_cast = "mp_policy" in options
            if is_cast:
                options = {"mp_policy": replace(options["mp_policy"], output_dtype=torch.float32)}
            fully_shard(model, **options)
            for transform in ("grad", "jvp", "jacrev", "grad of vmap"):
                got, expected = AROUND[transform](model, x), AROUND[transform](plain, x)
                assert got.dtype == torch.float32
                assert_same(got, expected, 0.1 if is_cast else 1e-5, 0.1 if is_cast else 1e-6, transform)

    run_ranks(2, body)


def test_gradients_of_sharded_parameters_are_refused() -> None:
    def body(rank: int, _: int) -> None:
        model = fully_shard(nn.Sequential(OrderedDict(blocks=nn.Sequential(Block()))))
        x, params = torch.randn(2, WIDTH), dict(model.named_parameters())

        def loss(params: dict[str, Any]) -> Tensor:
            return functional_call(model, params, (x,)).sum()

        with pytest.raises(NotImplementedError, match=r"blocks\.0\.up\.weight: .*call backward\(\) instead"):
            grad(loss)(params)
        model(x).sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
