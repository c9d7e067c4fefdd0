"""With `accumulate(global_batches=)`, parameters and optimizer states have the same bits on any number of ranks.

The oracle is the plain model in one process: gradients of each micro-batch by autograd, added by a recursion over
halves, divided by the sum of the weights, clipped by a norm in exact rational arithmetic.
"""

import math
import random
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.compression import Compression, Float8
from fsdp2.devices.streams import sum_pairs
from fsdp2.engine.unsynchronized import PartialSums
from helpers import NIGHTLY, alone, full, run_ranks

LEAVES, STEPS = 8, 50 if NIGHTLY else 6
MAX_NORM = 0.05


class Uneven(nn.Module):
    """Shards of odd sizes on any number of ranks, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(13, 37), nn.LayerNorm(37), nn.Linear(37, 53)
        self.last = nn.Linear(53, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.second(x)))  # type: ignore[no-any-return]


def build() -> Uneven:
    torch.manual_seed(0)
    return Uneven()


def leaves(step: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(step)
    draw = partial(torch.randn, generator=source)
    return [(draw(4, 13), draw(4, 3)) for _ in range(LEAVES)]


def weight(i: int) -> float:
    return 0.1 * i + 0.3  # sums of these are rounded


def loss_of(model: nn.Module, leaf: tuple[Tensor, Tensor]) -> Tensor:
    x, y = leaf
    return (model(x) - y).square().sum()  # type: ignore[no-any-return]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns parameters, and both moments of each."""
    found = []
    for param in model.parameters():
        found += [param, *(optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))]
    return [full(each).detach().clone() for each in found]


# ---- the oracle


def tree_sum(gradients: list[Tensor | None]) -> Tensor | None:
    """Returns the sum of both halves, each of which is made alike."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    one, other = tree_sum(gradients[:half]), tree_sum(gradients[half:])
    return one if other is None else other if one is None else one + other


def exact_norm(gradients: list[Tensor]) -> float:
    """Returns the norm in rational arithmetic, rounded once to fp32."""
    total = sum(Fraction(x) ** 2 for gradient in gradients for x in gradient.flatten().tolist())
    return torch.tensor(math.sqrt(total), dtype=torch.float64).float().item()


def trained_plainly(steps: int) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        of_leaves: list[list[Tensor | None]] = []
        for leaf in leaves(step):
            loss_of(model, leaf).backward()
            of_leaves.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
        total = torch.tensor(math.fsum(map(weight, range(LEAVES))), dtype=torch.float64).float()
        for param, gradients in zip(model.parameters(), zip(*of_leaves, strict=True), strict=True):
            found = tree_sum([*gradients])
            assert found is not None
            param.grad = (found + 0.0) / total
        norm = torch.tensor(exact_norm([param.grad for param in model.parameters() if param.grad is not None]))
        for param in model.parameters():
            assert param.grad is not None
            param.grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return states(model, optimizer)


# ---- ranks


def shard(sizes: tuple[int, ...], how: str = "", **options: Any) -> Any:
    model, mesh = build(), init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
    if how == "replicate":
        return replicate(model, mesh=mesh)
    if how == "outer_shard":
        options["dp_mesh_dims"] = DataParallelMeshDims(shard="inner", outer_shard="outer")
    elif how == "last dim":
        options["shard_placement_fn"] = lambda param: Shard(param.dim() - 1)
    elif how == "offload":
        options["offload_policy"] = CPUOffloadPolicy()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, sync: str) -> None:
    for step in steps:
        with fsdp2.accumulate(model, sync=sync, global_batches=LEAVES) as acc:
            every = leaves(step)
            for i in acc.batches:
                acc.backward(loss_of(model, every[i]), weight=weight(i))
        fsdp2.clip_grad_norm_(model.parameters(), MAX_NORM, exact=True)
        optimizer.step()
        optimizer.zero_grad()


def trained_on_ranks(ways: list[tuple[tuple[int, ...], str, str]]) -> list[list[Tensor]]:
    found = []
    for sizes, sync, how in ways:
        model = shard(sizes, how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(STEPS), sync)
        found.append(states(model, optimizer))
    return found


WAYS: dict[int, list[tuple[tuple[int, ...], str, str]]] = {
    1: [((1,), "last", ""), ((1,), "each", "")],
    2: [((2,), "last", "last dim"), ((2,), "each", "offload"), ((2,), "last", "replicate")],
    4: [
        ((4,), "last", ""),
        ((4,), "each", ""),
        ((2, 2), "last", ""),
        ((2, 2), "each", ""),
        ((2, 2), "each", "outer_shard"),
        ((4,), "each", "replicate"),
    ],
}
if NIGHTLY:
    WAYS[8] = [((8,), "last", ""), ((8,), "each", ""), ((2, 4), "each", "")]


def test_bits_are_those_of_one_process_on_any_number_of_ranks() -> None:
    expected = alone(lambda: trained_plainly(STEPS))
    for ranks, ways in WAYS.items():
        for way, got in zip(ways, run_ranks(ranks, lambda *_, ways=ways: trained_on_ranks(ways))[0], strict=True):
            for i, (one, other) in enumerate(zip(got, expected, strict=True)):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), f"{way}: tensor {i}"


def test_a_run_goes_on_with_the_same_bits_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    def part(_: int, ranks: int, first: int, last: int) -> list[Tensor]:
        model = shard((ranks,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if first:
            names, of_optimizer = get_state_dict(model, optimizer)
            dcp.load({"model": names, "optimizer": of_optimizer}, checkpoint_id=tmp_path / str(first))
            set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=of_optimizer)
        train(model, optimizer, range(first, last), "each" if ranks == 2 else "last")
        names, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": names, "optimizer": of_optimizer}, checkpoint_id=tmp_path / str(last))
        return states(model, optimizer)

    run_ranks(4, part, 0, 2)
    run_ranks(1, part, 2, 4)
    got = run_ranks(2, part, 4, 6)[0]
    for one, other in zip(got, alone(lambda: trained_plainly(6)), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


class OwnReduceScatter:
    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the block is refused")


def test_what_rounds_by_the_number_of_ranks_is_refused() -> None:
    def refused(_: int, __: int) -> None:
        def refuse(model: Any, text: str, error: type = NotImplementedError, **options: Any) -> None:
            with pytest.raises(error, match=text), fsdp2.accumulate(model, **{"global_batches": 8, **options}):
                pass

        def policy(**options: Any) -> MixedPrecisionPolicy:
            return MixedPrecisionPolicy(**options)

        refuse(
            shard((2,)),
            "expected a power of two that the number of ranks, 2, divides, got 6",
            ValueError,
            global_batches=6,
        )
        refuse(shard((2,)), "divides, got 1$", ValueError, global_batches=1)
        refuse(shard((2,)), "expected an int or None, got 8.0", TypeError, global_batches=8.0)
        refuse(shard((2,)), "expected 4, this rank's part of global_batches=8, got 8", ValueError, num_batches=8)
        for compression, text in (
            (Compression(reduce_scatter=torch.bfloat16), "gradients of root are compressed"),
            (Compression(all_reduce=torch.bfloat16), "gradients of root are compressed"),
            (Compression(all_gather=Float8()), "weights of root are compressed shard by shard"),
        ):
            sizes = (2,) if compression.all_reduce is None else (2, 1)
            refuse(shard(sizes, mp_policy=policy(compression=compression)), text)
        refuse(shard((2,), mp_policy=policy(reduce_dtype=torch.bfloat16)), "rounded to torch.bfloat16")
        model = shard((2,))
        model.set_manual_backward_finalization(True)
        refuse(model, "in flight after backward")
        model = shard((2,))
        model.set_conditional()
        refuse(model, "ranks may leave root out of a step")
        model = shard((2,))
        model.set_custom_reduce_scatter(OwnReduceScatter())
        refuse(model, "root has a reduce-scatter of its own")
        model = shard((2,))
        model.register_comm_hook(None, lambda state, gradient, shard: None)
        refuse(model, "a hook reduces the gradients of root")
        model = shard((2,))
        apart = build()
        fully_shard(apart.first, mesh=init_device_mesh("cpu", (1, 2)))
        fully_shard(apart, mesh=init_device_mesh("cpu", (2,)))
        refuse(apart, "is on another mesh than root")
        with fsdp2.accumulate(model, global_batches=2) as acc:
            acc.backward(loss_of(model, leaves(0)[acc.batches[0]]), weight=1)
        with pytest.raises(RuntimeError, match=r"first.bias: expected clip_grad_norm_\(..., exact=True\)"):
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(NotImplementedError, match="expected 2 or inf with exact=True, got 1"):
            fsdp2.clip_grad_norm_(model.parameters(), 1.0, 1, exact=True)
        model.zero_grad()
        with fsdp2.accumulate(model, num_batches=1) as acc:
            acc.backward(loss_of(model, leaves(0)[0]), weight=1)
        with pytest.raises(RuntimeError, match="got a block without"):
            acc.batches  # noqa: B018
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        dist.barrier()

    run_ranks(2, refused)


# ---- one process


def test_sums_of_parts_of_a_tree_are_those_of_the_tree() -> None:
    """Leaves may be missing; any power of two of ranks may share them, in blocks or in turns."""
    source = random.Random(0)
    for _ in range(200):
        count = 1 << source.randrange(5)
        every = [None if source.random() < 0.2 else torch.randn(3) * 10 ** source.randint(-3, 3) for _ in range(count)]
        ranks = 1 << source.randrange(count.bit_length())
        own, expected = count // ranks, tree_sum([*every])
        rows = []
        for rank in range(ranks):
            sums = PartialSums()
            for j, each in enumerate(every[rank * own : (rank + 1) * own]):
                if each is not None:
                    sums.add(each.clone(), j, torch.float32)
            assert sums.numel <= 3 * own.bit_length()
            total = torch.zeros(3)
            for each in sums.take(own - 1):
                total = each + total
            rows.append(total)
        got = torch.empty(3)
        sum_pairs(rows, got)
        assert torch.equal(got, torch.zeros(3) if expected is None else expected)
        sum_pairs(torch.stack(rows), got)
        assert torch.equal(got, torch.zeros(3) if expected is None else expected)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25, 1e-44])
def test_an_exact_norm_is_rounded_once(scale: float) -> None:
    torch.manual_seed(1)
    gradients = [torch.randn(size) * torch.randn(size).mul(3).exp() * scale for size in ((70_000,), (3, 5), (1,))]
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    got = fsdp2.clip_grad_norm_(params, 1e38, exact=True)
    assert got.item() == exact_norm(gradients)
    params[1].grad[1, 1] = math.nan
    assert fsdp2.clip_grad_norm_(params, 1e38, exact=True).isnan()
