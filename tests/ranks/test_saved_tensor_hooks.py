"""Tests backward without saved-tensor hooks: exact for gradients that enter by outputs of modules, and refused for
others.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule
from matrix import TOPOLOGIES, Matrix, MatrixRun
from scenarios import WIDTH, WRAPS, Block, Run, Wrap, blocks, leaves, loss_of, sgd

matrix = Matrix()

REFUSED = r"modified by an inplace operation"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def watch(run: Run, model: nn.Module, enabled: bool) -> None:
    if run.sharded:
        assert isinstance(model, FSDPModule)
        model.set_saved_tensor_hooks(enabled)


@matrix.over(wrap=WRAPS)
def gradients_that_enter_by_outputs_are_exact(run: MatrixRun, wrap: Wrap) -> None:
    """Accumulated over two passes, one of them in inference, and with a graph that is used twice."""
    model = run.build(Chain)
    wrap(run, model)
    watch(run, model, False)
    optimizer = sgd(model)
    for step in range(3):
        with torch.no_grad():
            run.rows("no grad", model(run.batch(seed=step)))
        loss_of(model(run.batch(seed=10 + step))).backward()
        loss = loss_of(model(run.batch(seed=20 + step)))
        loss.backward(retain_graph=True)
        run.step(f"step {step}", model, optimizer, loss)


@matrix.over(wrap=(blocks, leaves))
def a_module_that_runs_twice_and_one_that_is_frozen(run: MatrixRun, wrap: Wrap) -> None:

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.block = Block().requires_grad_(False), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.frozen(self.block(x)))

    model = run.build(Twice)
    if wrap is blocks:
        for child in model.children():
            run.shard(child)
        run.shard(model)
    else:
        wrap(run, model)
    watch(run, model, False)
    optimizer = sgd(model)
    for step in range(3):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@matrix.over(use_reentrant=(True, False))
def a_group_that_runs_twice_in_a_checkpoint(run: MatrixRun, use_reentrant: bool) -> None:
    """It is freed behind the second forward's backward, and needed again by the first one's."""

    class Checkpointed(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.first, self.second, self.twice = Block(), Block(), Block()
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=self.use_reentrant)

        def run(self, x: Tensor) -> Tensor:
            return self.twice(self.second(self.first(self.twice(x))))

    model = run.build(Checkpointed, use_reentrant)
    run.shard([model.first, model.second])
    run.shard(model.twice)
    run.shard(model)
    watch(run, model, False)
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step).requires_grad_())))


@matrix.over()
def other_gradients_are_refused_until_hooks_are_on_again(run: MatrixRun) -> None:
    """A loss of what a forward hook has kept from inside a block, which no returned tensor depends on."""
    model, kept = run.build(Chain), []
    model.blocks[0].down.register_forward_hook(lambda _module, _args, output: kept.append(output))
    blocks(run, model)
    optimizer = sgd(model)
    for step in range(2):
        watch(run, model, False)
        model(run.batch(seed=step))
        if run.sharded:
            with pytest.raises(RuntimeError, match=REFUSED):
                loss_of(kept[-1]).backward()
            optimizer.zero_grad()
        watch(run, model, True)
        model(run.batch(seed=step))
        run.step(f"inside {step}", model, optimizer, loss_of(kept[-1]))
        watch(run, model, False)
        run.step(f"usual {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@matrix.over(name=("weight", "bias"), keeps=(False, True))
def parameters_that_change_before_backward(run: MatrixRun, name: str, keeps: bool) -> None:
    """Of a changed weight no gradient is computed; a changed bias, which none depends on, is no error: as in torch."""
    model = run.build(nn.Sequential, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    for layer in (model[0], model[2]):
        run.shard(layer, reshard_after_forward=not keeps)
    run.shard(model)
    watch(run, model, False)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        with torch.no_grad():
            model[2].get_parameter(name).mul_(2)
        if name == "weight":
            with pytest.raises(RuntimeError, match=REFUSED):
                loss.backward()
            optimizer.zero_grad()
        else:
            run.step(f"changed {step}", model, optimizer, loss)
        run.step(f"usual {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@matrix.over(enabled=(False, True))
def a_graph_from_before_the_switch(run: MatrixRun, enabled: bool) -> None:
    """Its weights have changed since, whichever way they would have been noticed."""
    model = run.build(Chain)
    blocks(run, model)
    watch(run, model, enabled)
    optimizer = sgd(model)
    loss = loss_of(model(run.batch(seed=0)))
    run.step("another", model, optimizer, loss_of(model(run.batch(seed=1))))
    watch(run, model, not enabled)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        loss.backward()
    optimizer.zero_grad()
    run.step("after", model, optimizer, loss_of(model(run.batch(seed=2))))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
