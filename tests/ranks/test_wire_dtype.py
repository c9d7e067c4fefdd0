"""Tests gradients that are sent in fewer bits than they are summed in, where ranks or passes differ.

test_training.py has them in training. Here, too, each rank's gradients of the unsharded model are rounded by hand,
added in rank order and divided in the reduce dtype: equal bit by bit.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_ as clip

from fsdp2 import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
)
from fsdp2.compression import Compression
from helpers import Differences, assert_same, full, run_checks
from models import Odd

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


POLICIES = {
    "bf16": MixedPrecisionPolicy(BF16, F32, compression=Compression(reduce_scatter=BF16)),
    "fp32": MixedPrecisionPolicy(compression=Compression(reduce_scatter=BF16)),
    "fp16 wire, fp64 sums": MixedPrecisionPolicy(BF16, F64, compression=Compression(reduce_scatter=F16)),
    # Where ranks sum what they receive, these travel as they come.
    "bf16 as it comes": MixedPrecisionPolicy(BF16, F32),
}


WIRES = {"bf16": BF16, "fp32": BF16, "fp16 wire, fp64 sums": F16}


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def plain_model() -> Odd:
    torch.manual_seed(1)
    return Odd()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * number + rank))


def gradients_of_a_rank(model: Odd, policy: MixedPrecisionPolicy, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    dtype = policy.param_dtype or F32
    leaves = {name: param.detach().to(dtype).requires_grad_() for name, param in model.named_parameters()}
    (loss_of(functional_call(model, leaves, (x.to(dtype),))) * scale).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def mean(parts: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts) / len(parts)


def waits_inside_a_pass() -> None:
    """An inner backward's gradients wait, and those of the outer one are added, before they leave."""
    model, rank, ranks = plain_model(), dist.get_rank(), range(dist.get_world_size())
    fully_shard(model, mp_policy=POLICIES["bf16 as it comes"])
    inner, output = loss_of(model(batch(rank, 0))), model(batch(rank, 1))

    def run_inner(_: Any) -> None:
        inner.backward()
        model.set_requires_gradient_sync(True)

    output.grad_fn.register_prehook(run_inner)  # behind that of the module, which begins the pass
    model.set_requires_gradient_sync(False)
    loss_of(output).backward()
    grads = [[gradients_of_a_rank(plain_model(), POLICIES["bf16"], batch(each, n)) for n in (0, 1)] for each in ranks]
    for name, param in model.named_parameters():
        sums = [first[name].float() + second[name].float() for first, second in grads]
        assert name != "left.weight" or all((each != each.bfloat16()).any() for each in sums), "nothing to round"
        assert_same(full(param.grad), mean(sums), 0, 0, f"{name}.grad")


def test_gradients_accumulated_inside_a_pass_are_not_rounded() -> None:
    run_checks(2, [("waits inside a pass", waits_inside_a_pass)])


def different_numbers_of_batches(wire_dtype: torch.dtype | None) -> None:
    """Without gathers in between, ranks may: of three batches on one rank, and one on the other, the sums."""
    rank, model = dist.get_rank(), plain_model()
    fully_shard(
        model,
        mp_policy=MixedPrecisionPolicy(BF16, F32, compression=Compression(reduce_scatter=wire_dtype)),
        reshard_after_forward=False,
    )
    numbers = (range(3), range(1))
    for number in numbers[rank]:
        last = number == numbers[rank][-1]
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss_of(model(batch(rank, number))).backward()
    grads = [
        [gradients_of_a_rank(plain_model(), POLICIES["bf16"], batch(each, n)) for n in numbers[each]]
        for each in range(2)
    ]
    for name, param in model.named_parameters():
        sums = [functools.reduce(operator.add, (grad[name].float() for grad in own)) for own in grads]
        assert_same(full(param.grad), mean(sums), 0, 0, f"{name}.grad")


def refused() -> None:
    with pytest.raises(RuntimeError, match=r"float32.*bfloat16.*give MixedPrecisionPolicy compression=Compression"):
        different_numbers_of_batches(None)


def test_ranks_that_accumulate_different_numbers_of_batches() -> None:
    """They don't know of each other what has waited: refused, unless gradients are cast before they travel."""
    run_checks(2, [("cast", functools.partial(different_numbers_of_batches, F32)), ("refused", refused)])


# ---- what is usual between backward and step


class Side:
    """A model, sharded or plain, and what steps it."""

    def __init__(self, model: Odd) -> None:
        self.model = model
        self.scaler = GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-8, growth_interval=2)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    def step(self, clip: Callable[..., Tensor] | None) -> Tensor:
        """The norm of the unscaled gradients, before they are clipped."""
        self.scaler.unscale_(self.optimizer)
        norm = full(clip(self.model.parameters(), 0.05)) if clip else torch.zeros(())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm


def clipped_and_scaled(policy_name: str, clips: bool) -> None:
    """What is clipped and unscaled are the sums, after the wire; where that has too few exponents, all ranks skip.

    Without clipping bitwise. A norm may differ in its last bit, so each step begins with the same values.
    """
    policy, tolerance = POLICIES[policy_name], 1e-6 if clips else 0
    model, different, scales = plain_model(), Differences(), []
    fully_shard(model, mp_policy=policy)
    ours, reference = Side(model), Side(plain_model())
    for number in range(4):
        scale = ours.scaler.get_scale()
        ours.scaler.scale(loss_of(ours.model(batch(dist.get_rank(), number)))).backward()
        reference.scaler.scale(torch.zeros(()))  # begins to scale
        sent = [
            gradients_of_a_rank(reference.model, policy, batch(rank, number), scale)
            for rank in range(dist.get_world_size())
        ]
        for name, param in reference.model.named_parameters():
            parts = [each[name].to(WIRES[policy_name]).to(policy.reduce_dtype or F32) for each in sent]
            param.grad = mean(parts).to(F32)
        norm, expected = ours.step(clip_grad_norm_ if clips else None), reference.step(clip if clips else None)
        scales.append(ours.scaler.get_scale())
        with different.noted():
            assert scales[-1] == reference.scaler.get_scale(), f"step {number}"
            assert_same(norm, expected, tolerance, 0, f"step {number}: norm")
        for (name, actual), whole in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
            value = full(actual)
            with different.noted():
                assert_same(value, whole.detach(), tolerance, tolerance, f"step {number}: {name}")
            whole.data.copy_(value)
    different.raise_first()
    assert (scales[0] < 2.0**22) == (WIRES[policy_name] is F16), "beyond 65504"
    assert scales[-1] > scales[0], "steps were taken"


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_and_loss_scaling(world_size: int) -> None:
    cases = [(name, clips) for name in ("bf16", "fp16 wire, fp64 sums") for clips in (False, True)]
    run_checks(world_size, [(str(case), functools.partial(clipped_and_scaled, *case)) for case in cases])


# ---- parameters that are not plain, with whole numbers that bf16 rounds


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-20, 21, shape, generator=torch.Generator().manual_seed(seed)).float()


def of_a_rank(first: Tensor, second: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Gradients of two matrices, one behind the other: exact in fp32, in whatever order they are computed."""
    x, y = numbers(3, 8, seed=rank), numbers(3, 6, seed=10 + rank)
    return (second.T @ y.T @ x), y.T @ (x @ first.T)


def tensor_parallel() -> None:
    """Each rank sends its part of the gradient of a DTensor, to those that have the same part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first, second = numbers(10, 8, seed=20), numbers(6, 10, seed=21)
    model = nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 6, bias=False))
    model[0].weight.data.copy_(first), model[1].weight.data.copy_(second)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=POLICIES["fp32"])
    rank = mesh.get_local_rank("dp")
    (model(numbers(3, 8, seed=rank)) * numbers(3, 6, seed=10 + rank)).sum().backward()
    for i in range(2):
        whole = [of_a_rank(first, second, each)[i] for each in range(2)]
        assert any((part != part.bfloat16()).any() for part in whole), "otherwise nothing is rounded"
        expected = mean([part.bfloat16().float() for part in whole])
        assert_same(full(model[i].weight.grad), expected, 0, 0, f"{i}.weight.grad")


def self_gathering() -> None:
    """Its gradient may come in any dtype: here in fp32, of a parameter that is gathered in bf16."""
    model = nn.Linear(8, 6, bias=False)
    model.weight.data.copy_(numbers(6, 8, seed=20))
    fully_shard(model, mp_policy=POLICIES["fp32"])
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local.bfloat16(),), None)
    local.fsdp_post_all_gather = post_all_gather
    rank = dist.get_rank()
    x, y = numbers(3, 8, seed=rank) * 7, numbers(3, 6, seed=10 + rank)
    (model(x) * y).sum().backward()
    parts = [numbers(3, 6, seed=10 + each).T @ (numbers(3, 8, seed=each) * 7) for each in range(2)]
    assert any((part != part.bfloat16()).any() for part in parts), "otherwise nothing is rounded"
    assert_same(full(model.weight.grad), mean([part.bfloat16().float() for part in parts]), 0, 0, "weight.grad")


def post_all_gather(outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    value = outputs[0].float()
    if out is not None:
        out.copy_(value)
        return None
    return value, (value,)


def test_tensor_parallel_gradients() -> None:
    run_checks(4, [("tensor parallel", tensor_parallel)])


def test_gradients_of_extensions() -> None:
    run_checks(2, [("self_gathering", self_gathering)])
