"""Tests the time that `fsdp2.plan` predicts on real steps, on a simulated link beside simulated compute.

All but compute and link takes no time there, as in a plan.
"""

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from benchmarks.libraries import load_library
from benchmarks.overlap import BLOCKS, DIM, FORWARD_SECONDS, LAYERS, Compute, SlowStack, exposed_by_order
from benchmarks.timed_group import SimulatedClock
from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning.times import Times

RANKS = 8
FLOPS = LAYERS * 2 * DIM * DIM / FORWARD_SECONDS  # of one row
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def plan(model: nn.Module, transfer: float, mixed: bool) -> Times:
    """Returns the prediction for a link that gathers a block in `transfer` seconds."""
    block = LAYERS * DIM * DIM * (2 if mixed else 4)
    made = fsdp2.plan(
        model,
        ranks=RANKS,
        batch=lambda: torch.ones(1, DIM, requires_grad=True),
        loss=loss_of,
        mp_policy=MIXED if mixed else MixedPrecisionPolicy(),
        settings=[{}],
        machine=fsdp2.Machine(device="cpu", backend="nccl", link=block * (RANKS - 1) / RANKS / transfer, flops=FLOPS),
    )
    assert made.best.times is not None
    return made.best.times


@pytest.mark.parametrize(("per_compute", "mixed"), [(0.1, True), (0.3, False), (1.0, True), (3.0, False)])
def test_time_is_predicted(per_compute: float, mixed: bool) -> None:
    """Within a thousandth where computation is longer. Where communication is, it also begins and ends each pass alone
    for a while, which the formula leaves out: up to 5 %.
    """
    transfer = per_compute * FORWARD_SECONDS
    exposed = exposed_by_order(load_library("fsdp2-best"), RANKS, transfer, mixed=mixed)
    taken = plan(SlowStack(Compute(SimulatedClock())), transfer, mixed)
    compute = 3 * FORWARD_SECONDS * BLOCKS
    assert taken.compute == pytest.approx(compute)
    off = taken.total / (exposed + compute) - 1
    assert -0.05 < off < 1e-6
    assert off > -0.001 or per_compute >= 1
