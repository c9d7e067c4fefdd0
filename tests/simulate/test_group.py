"""Tests that collectives of simulated ranks have the bits of gloo's. The oracle is gloo itself, on forked ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from fsdp2 import testing
from helpers import run_ranks, world_sizes

SIZES = world_sizes(2, 3, 4, nightly=(5, 8))


def values(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(tensor, op)
    return tensor


def reductions(rank: int, size: int) -> dict[str, Any]:
    """Returns the results of whatever adds. 300,000 elements take several of gloo's segments."""
    found: dict[str, Any] = {}
    for numel in (1, 2, 3, 17, 1000, 300_000 * size):
        found[f"all_reduce {numel}"] = all_reduce(values(rank, 1, numel))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found[f"all_reduce {dtype}"] = all_reduce(values(rank, 2, 1001, dtype=dtype))
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        found[f"all_reduce {op}"] = all_reduce(values(rank, 3, 1001), op)
    found["bits"] = all_reduce(torch.tensor([rank + 1, 6]), dist.ReduceOp.BOR)
    found["transposed"] = all_reduce(values(rank, 4, 6, 7).t())
    for root in range(size):
        tensor = values(rank, 5, 101)
        dist.reduce(tensor, root)
        if rank == root:
            found[f"reduce {root}"] = tensor
    for numel in (1, 7, 1000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            output = torch.empty(numel)
            dist.reduce_scatter_tensor(output, values(rank, 6, numel * size), op)
            found[f"reduce_scatter_tensor {numel} {op}"] = output
    tensors = [values(rank, 7, 100), values(rank, 8, 33)]
    dist.all_reduce_coalesced(tensors)
    with dist._coalescing_manager(async_ops=True) as works:
        later = [values(rank, 9, 100), values(rank, 10, 33)]
        for tensor in later:
            dist.all_reduce(tensor)
    works.wait()
    found["coalesced"] = [*tensors, *later]
    assert dist.group.WORLD is not None
    found["functional"] = functional.all_reduce(values(rank, 11, 55), "sum", dist.group.WORLD) * 1
    return found


def copies(rank: int, size: int) -> dict[str, Any]:
    """Returns the results of whatever copies."""
    found: dict[str, Any] = {}
    own = values(rank, 1, 2, 3)
    found["all_gather"] = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(found["all_gather"], own)
    found["all_gather_into_tensor"] = torch.empty(2 * size, 3)
    work = dist.all_gather_into_tensor(found["all_gather_into_tensor"], own, async_op=True)
    work.wait()
    for root in range(size):
        tensor = values(rank, 2, 5)
        dist.broadcast(tensor, root)
        parts = [torch.empty(2, 3) for _ in range(size)] if rank == root else None
        dist.gather(own, parts, root)
        part = torch.empty(4)
        dist.scatter(part, [values(root, 3 + each, 4) for each in range(size)] if rank == root else None, root)
        found[f"root {root}"] = [tensor, *(parts or []), part]
    output = torch.empty(size, 3)
    dist.all_to_all_single(output, values(rank, 20, size, 3))
    sends = [rank + other + 1 for other in range(size)]  # from each to each as many as in the other direction
    uneven = torch.empty(sum(sends))
    dist.all_to_all_single(uneven, values(rank, 21, sum(sends)), sends, sends)
    found["all_to_all"] = [output, uneven]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "values": [0.5] * rank})
    received: list[Any] = [objects[1] if rank == 1 else None]
    dist.broadcast_object_list(received, 1)
    found["objects"] = [objects, received]
    return found | transposed(rank, size) | messages(rank, size)


def transposed(rank: int, size: int) -> dict[str, Any]:
    """Returns what collectives make of inputs and outputs whose memory has another order than their dims: some take
    them by their shapes, others as they lie in memory.
    """
    found: dict[str, Any] = {}

    def like(tensor: Tensor, is_transposed: bool) -> Tensor:
        return tensor.t().contiguous().t() if is_transposed else tensor

    for of_inputs in (False, True):
        for of_outputs in (False, True):
            own = [like(values(rank, 40 + i, 4, 3), of_inputs) for i in range(size)]
            outputs = [like(torch.zeros(4, 3), of_outputs) for _ in range(size)]
            whole, part = like(torch.zeros(4 * size, 3), of_outputs), like(torch.zeros(4, 3), of_outputs)
            of_root = [like(torch.zeros(4, 3), of_outputs) for _ in range(size)] if rank == 0 else None
            exchanged, scattered = [torch.zeros_like(each) for each in outputs], torch.zeros_like(part)
            dist.all_gather(outputs, own[0])
            dist.all_gather_into_tensor(whole, own[0])
            dist.gather(own[0], of_root, 0)
            dist.reduce_scatter_tensor(part, like(values(rank, 50, 4 * size, 3), of_inputs))
            if torch.__version__ >= "2.13":  # gloo has it
                dist.all_to_all(exchanged, own)
            dist.scatter(scattered, own if rank == 0 else None, 0)
            mixed = own[1] if rank == 0 else like(values(rank, 60, 4, 3), of_outputs)
            dist.broadcast(mixed, 0)
            reduced = all_reduce(like(values(rank, 61, 4, 3), of_inputs if rank == 0 else of_outputs))
            results = [*outputs, whole, *(of_root or []), part, *exchanged, scattered, mixed, reduced]
            found[f"transposed {of_inputs} {of_outputs}"] = [each.contiguous() for each in results]
    return found


def messages(rank: int, size: int) -> dict[str, Any]:
    following, before = (rank + 1) % size, (rank - 1) % size
    first, second, short = torch.empty(3), torch.empty(3), torch.zeros(8)
    operations = [
        dist.P2POp(dist.isend, values(rank, 30, 3), following),
        dist.P2POp(dist.irecv, first, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    # Two tags cross; the second message is shorter than the tensor that waits for it.
    works = [dist.irecv(short, before, tag=2), dist.irecv(second, before, tag=1)]
    works += [dist.isend(values(rank, 31, 3), following, tag=1), dist.isend(values(rank, 32, 2), following, tag=2)]
    for work in works:
        work.wait()
    found: dict[str, Any] = {"messages": [first, second, short]}
    if rank == 0:
        any_source = torch.empty(1)
        found["sources"] = sorted(dist.recv(any_source) for _ in range(size - 1))
    else:
        dist.send(torch.ones(1), 0)
    pairs = [dist.new_group([each, each + 1]) for each in range(0, size - 1, 2)]
    if rank // 2 < len(pairs):
        found["pair"] = values(rank, 40, 9)
        dist.all_reduce(found["pair"], group=pairs[rank // 2])
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.LayerNorm(5))


def train(rank: int, wrap: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Trains with dropout, clipping and accumulation; returns this rank's parameters, or shards of them."""
    sharded = wrap(model())
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(6):
        inputs = nn.functional.dropout(values(rank, 100 + step, 4, 7), 0.1)
        sharded(inputs).square().mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    states = ((name, getattr(each, "_local_tensor", each)) for name, each in sharded.named_parameters())
    return {name: each.detach().clone() for name, each in states}


def with_fsdp2(module: nn.Module) -> nn.Module:
    fsdp2.fully_shard(module[0])  # type: ignore[index]
    return fsdp2.fully_shard(module)


def with_torch(module: nn.Module) -> nn.Module:
    torch_fully_shard(module[0])  # type: ignore[index]
    return torch_fully_shard(module)


def everything(rank: int, size: int) -> list[dict[str, Any]]:
    trained = [train(rank, wrap) for wrap in (with_fsdp2, with_torch, DistributedDataParallel)]
    return [reductions(rank, size), copies(rank, size), *trained]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", SIZES)
def test_all_bits_are_gloos(size: int) -> None:
    expected = run_ranks(size, everything)
    found = testing.run(lambda rank: everything(rank, size), size)
    names = [[*each] for each in expected[0]]
    assert sum(map(len, names)) > 40
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_a_list_is_reduced_in_another_order() -> None:
    """gloo takes another algorithm there, whose bits agree on two ranks only."""

    def run(rank: int, size: int) -> Tensor:
        output = torch.empty(1000)
        dist.reduce_scatter(output, [values(rank, each, 1000) for each in range(size)])
        return output

    for size in (2, 3):
        expected, found = run_ranks(size, run), testing.run(lambda rank, size=size: run(rank, size), size)
        tolerance = 0.0 if size == 2 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_gloo_mixes_up_is_refused() -> None:
    """In one call it takes some tensors as they lie in memory, others by their shapes; or it takes contiguous ones."""

    def body(rank: int) -> None:
        own, other = torch.ones(3, 4).t(), torch.ones(4, 3)
        calls: list[Callable[[], Any]] = [
            lambda: dist.reduce_scatter(own, [other, other]),
            lambda: dist.reduce_scatter(other, [own, own]),
            lambda: dist.all_to_all_single(own, other),
            lambda: dist.all_to_all_single(other, own),
            lambda: dist.send(own, 1 - rank),
            lambda: dist.recv(own, 1 - rank),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"expected contiguous tensors, got one of shape \[4, 3\] and strides"):
                call()

    testing.run(body, ranks=2)


def test_writes_are_unknown_to_autograd() -> None:
    """Those of gloo are: a tensor that a backward needs may be reduced in place."""

    def run(_: int) -> None:
        tensor = torch.ones(2, requires_grad=True)
        product = tensor * 2
        version = product._version
        squared = product.square()
        dist.all_reduce(product.detach())
        assert product._version == version
        squared.sum().backward()
        with torch.inference_mode():
            mine = torch.ones(3)
            dist.all_reduce(mine)
        assert mine.tolist() == [2.0] * 3

    testing.run(run, 2)


def test_operations_that_gloo_lacks() -> None:
    def run(_: int) -> None:
        with pytest.raises(RuntimeError, match=r"one of SUM, AVG, .*; got"):
            dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))
        with pytest.raises(ValueError, match=r"on rank \d: expected tensors of 8 elements, got 2 x 3 float32"):
            dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(4))
        with pytest.raises(ValueError, match=r"expected dense tensors, got one of shape \[2\] and strides \[3\]"):
            dist.all_reduce(torch.ones(2, 3)[:, 0])  # gloo adds other elements, and says nothing

    testing.run(run, 2)
