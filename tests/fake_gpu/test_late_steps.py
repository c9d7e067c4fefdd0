"""Tests steps that overlap the next forward on a device that is not the CPU; the clocks judge the order of
operations.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fake_gpu
from fake_gpu.training import EXACT, ROUNDED, build, judged, loss_of, same
from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, flatten_optimizer
from fsdp2.features.late_steps import LateSteps
from helpers import run_checks

BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def train(options: dict[str, Any], tolerance: dict[str, float], reads: bool = False) -> None:
    """Beside a plain model. `reads`: each step's parameters and states are read before the next forward."""
    plain, model = build(**options)
    rank, size = dist.get_rank(), dist.get_world_size()
    ours: Any = flatten_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), overlap_with_forward=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for step in range(6):
        for i in range(size):
            (loss_of(plain, step, i, False) / size).backward()
        loss_of(model, step, rank, False).backward()
        for each in (plain, model):
            clip_grad_norm_(each.parameters(), 1.0) if each is model else torch.nn.utils.clip_grad_norm_(
                plain.parameters(), 1.0
            )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        if reads:
            same(plain, model, "value", tolerance)
            assert len(ours.state_dict()["state"]) == len(theirs.state_dict()["state"])
    same(plain, model, "value", tolerance)
    assert vars(ours)["_fsdp2_flat_steps"].late.taken >= 2  # checks that are due may read, too


def ways(options: dict[str, Any], tolerance: dict[str, float], reads: bool) -> None:
    with judged():
        train(options, tolerance, reads)


def without_waits() -> None:
    with judged(expected="race"), mock.patch.object(LateSteps, "__call__", return_value=None):
        train({}, {"rtol": 1e9, "atol": 1e9})


def test_on_a_device() -> None:
    checks = [
        ("fp32", partial(ways, {}, EXACT, False)),
        ("bf16", partial(ways, BF16, ROUNDED, False)),
        ("replicas", partial(ways, {"mesh": (2, 1)}, EXACT, False)),
        ("read", partial(ways, {}, EXACT, True)),
        ("without waits", without_waits),
    ]
    run_checks(2, checks, device=fake_gpu.KIND)
