"""Tests torchao: weights that are tensor subclasses and define how FSDP2 gathers them.

They quantise activations over a rank's whole batch, so the oracle is a plain model that sees each rank's rows
separately and averages the gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client_training import IMPLEMENTATIONS, Record, assert_sharded, mean_of_ranks, own_part, using
from helpers import alone, run_checks

quantization = pytest.importorskip("torchao.quantization")
float8 = pytest.importorskip("torchao.float8")
int8_training = pytest.importorskip("torchao.prototype.quantized_training")
nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

WORLD_SIZE, STEPS, ROWS, WIDTH = 2, 3, 32, 32
Convert = Callable[[nn.Module, bool], Any]


class Net(nn.Module):
    """Sizes that divide by every block size and number of ranks, as the subclasses need."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in "12")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Adapted(nn.Module):
    """QLoRA: a frozen weight of four bits, two trainable factors."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(nf4.to_nf4(linear.weight.detach(), 32, 2), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, linear.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(linear.out_features, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return nf4.linear_nf4(x, self.weight) + x @ self.down.T @ self.up.T


def to_float8(model: nn.Module, sharded: bool) -> None:
    """Weights are cast before they are gathered, with a scale that all ranks agree on."""
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True)
    float8.convert_to_float8_training(model.blocks, config=config)


def to_int8_mixed(model: nn.Module, sharded: bool) -> None:
    quantization.quantize_(model.blocks, int8_training.int8_mixed_precision_training())


def to_int8(model: nn.Module, sharded: bool) -> None:
    quantization.quantize_(model.blocks, int8_training.int8_weight_only_quantized_training())


def to_bitnet(model: nn.Module, sharded: bool) -> None:
    quantization.quantize_(model.blocks, int8_training.bitnet_training())


def to_nf4(model: nn.Module, sharded: bool) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block[0], block[2] = Adapted(block[0]), Adapted(block[2])


def fresh(convert: Convert, sharded: bool) -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    convert(model, sharded)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def train(model: nn.Module, backward: Callable[[nn.Module, Tensor], Tensor], steps: int = STEPS) -> Record:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.25)
    record = Record()
    for step in range(steps):
        record.add(f"loss {step}", backward(model, batch(step)))
        record.add_params((f"{fqn}.grad {step}", p.grad) for fqn, p in model.named_parameters() if p.requires_grad)
        if step + 1 < steps:
            optimizer.step()
            optimizer.zero_grad()
    return record


def rank_by_rank(model: nn.Module, rows: Tensor) -> Tensor:
    losses = [loss_of(model(part)) for part in rows.chunk(WORLD_SIZE)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach()


def on_this_rank(model: nn.Module, rows: Tensor) -> Tensor:
    if any(isinstance(module, float8.float8_linear.Float8Linear) for module in model.modules()):
        float8.precompute_float8_dynamic_scale_for_fsdp(model)  # one reduction for all weights, as users call it
    loss = loss_of(model(own_part(rows)))
    loss.backward()
    return mean_of_ranks(loss)


def trains(implementation: str, expected: dict[str, Tensor], convert: Convert, steps: int) -> None:
    with using(implementation):
        from torch.distributed._composable.fsdp import fully_shard

        model = fresh(convert, sharded=True)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        assert_sharded(model, implementation, at_least=3)
        assert sum(hasattr(p.to_local(), "fsdp_pre_all_gather") for p in model.parameters()) == 4
        train(model, on_this_rank, steps).assert_like(expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_subclasses_train_as_plain(implementation: str) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for convert in to_float8, to_int8_mixed, to_int8, to_bitnet, to_nf4:
        steps = 1 if convert is to_int8 else STEPS  # its update rounds at random
        expected = alone(lambda convert=convert, steps=steps: train(fresh(convert, False), rank_by_rank, steps).values)
        checks.append((convert.__name__, partial(trains, implementation, expected, convert, steps)))
    run_checks(WORLD_SIZE, checks)
