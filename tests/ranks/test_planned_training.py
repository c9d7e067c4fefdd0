"""Tests that a planned model trains as the plain one, and that the check of its plan agrees with what is predicted."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from helpers import alone, assert_same, run_ranks, shard_batch
from models import TinyGPT, mean_loss

STEPS, ROWS = 3, 8


def make() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(dim=96, heads=4, depth=2, tied=True)


def train(model: Any, batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        mean_loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_weights() -> dict[str, torch.Tensor]:
    model = make()
    train(model, model.example(rows=ROWS, seed=0))
    return {name: weight.detach() for name, weight in model.named_parameters()}


# A policy of 2,000 elements makes groups of single Linears, and one of the embedding with the head that is tied to it.
BY_SIZE = partial(size_based_auto_wrap_policy, min_num_params=2000)


@pytest.mark.parametrize(
    ("ranks", "policy", "setting"),
    [
        (2, BY_SIZE, {}),
        (2, None, {"reshard_after_forward": False, "checkpointing": True}),
        (4, 2000, {"replicas": 2, "reshard_after_forward": False}),
    ],
)
def test_a_planned_model_trains_as_the_plain_one(ranks: int, policy: Any, setting: dict[str, Any]) -> None:
    expected = alone(plain_weights)

    def body(rank: int, world_size: int) -> None:
        model = make()
        batch = shard_batch(model.example(rows=ROWS, seed=0), rank, world_size)
        names = [name for name, _ in model.named_parameters()]
        plan = fsdp2.plan(
            model, ranks=world_size, policy=policy, batch=lambda: batch, loss=mean_loss, settings=[setting]
        )
        assert not plan.notes
        tied = [group.modules for group in plan.groups() if model.embed in group.modules]
        assert policy is None or tied == [(model.embed, model.head)]
        assert dist.get_world_size() == world_size
        shape = (setting["replicas"], world_size // setting["replicas"]) if "replicas" in setting else (world_size,)
        sharded = plan.apply(init_device_mesh("cpu", shape))
        assert sharded is model
        assert [name for name, _ in model.named_parameters()] == names
        train(sharded, batch)
        for name, weight in model.named_parameters():
            assert_same(weight, expected[name], 1e-4, 1e-5, name)

    run_ranks(ranks, body)


@pytest.mark.parametrize(
    ("ranks", "setting", "policy"),
    [
        (2, {}, MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
        (4, {"replicas": 2, "checkpointing": True}, MixedPrecisionPolicy(torch.bfloat16)),
    ],
)
def test_check_agrees_over_gloo(ranks: int, setting: dict[str, Any], policy: MixedPrecisionPolicy) -> None:
    """It predicts what messages between ranks take, too. The plan was made for GPUs."""

    def body(rank: int, world_size: int) -> Any:
        model = TinyGPT(dim=128, heads=4, depth=3)
        batch = model.example(rows=4, seed=rank)
        torch.backends.mkldnn.set_flags(_enabled=False)  # its products in bf16 take scratch memory
        plan = fsdp2.plan(
            model, ranks=world_size, batch=lambda: (batch,), loss=mean_loss, mp_policy=policy, settings=[setting]
        )
        shape = (setting["replicas"], world_size // setting["replicas"]) if "replicas" in setting else (world_size,)
        plan.apply(init_device_mesh("cpu", shape))
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            if step < 2:
                with pytest.raises(RuntimeError, match=f"expected two steps after plan.apply, got {step}"):
                    plan.check()
            mean_loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        check = plan.check(optimizer)
        assert "forward peak" in str(check)
        return {value.name: value.error for value in check.values}

    for errors in run_ranks(ranks, body)[:1]:  # the first rank has a row of each parameter
        assert {"step peak", "forward peak", "optimizer states", "all_gather bytes", "reduce_scatter bytes"} <= {
            *errors
        }
        assert ("all_reduce bytes" in errors) == ("replicas" in setting)
        assert {name: error for name, error in errors.items() if error is None or abs(error) > 0.03} == {}


def test_a_mesh_of_other_sizes_is_refused() -> None:
    def body(rank: int, world_size: int) -> None:
        plan = fsdp2.plan(make(), ranks=4)
        with pytest.raises(ValueError, match=r"plan is for 4 ranks, got a mesh of shape \(2,\).*init_device_mesh"):
            plan.apply(init_device_mesh("cpu", (2,)))
        plan = fsdp2.plan(make(), ranks=2, settings=[{"replicas": 2}])
        with pytest.raises(ValueError, match="2 replicas of 1 ranks"):
            plan.apply(init_device_mesh("cpu", (2,)))
        plan = fsdp2.plan(make(), ranks=2)
        plan.apply(init_device_mesh("cpu", (2,)))
        with pytest.raises(RuntimeError, match="called already"):
            plan.apply(init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="the model is sharded"):
            fsdp2.plan(plan._model, ranks=2)

    run_ranks(2, body)
