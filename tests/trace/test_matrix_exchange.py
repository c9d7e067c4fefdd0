"""Whole-matrix optimizers on simulated ranks: bytes, operations and collectives of a step, and who owns what."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.flop_counter import FlopCounterMode

import fsdp2
from fsdp2 import fully_shard
from helpers import fake_world

LAYERS, WIDTH, HIDDEN, KEYS = 32, 4096, 14336, 1024  # Llama 3 8B


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, keys: int) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(x) * self.up(x))


def llama(layers: int = LAYERS, width: int = WIDTH, hidden: int = HIDDEN, keys: int = KEYS) -> nn.Module:
    """A sharded model on meta, whose parameters have gradients."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width, hidden, keys) for _ in range(layers)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return model


class Counted(NamedTuple):
    """Of one step: the bytes that this rank sent to others, the collectives, and floating-point operations."""

    nbytes: int
    collectives: Counter[str]
    flop: int


@contextmanager
def counted_collectives() -> Iterator[tuple[list[int], Counter[str]]]:
    nbytes, names = [0], Counter[str]()
    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce

    def exchange(output: Any, source: Any, received: list[int], sent: list[int], **options: Any) -> Any:
        nbytes[0] += (sum(sent) - sent[dist.get_rank()]) * source.element_size()
        names["all_to_all"] += 1
        return all_to_all(output, source, received, sent, **options)

    def reduce(tensor: Any, *args: Any, **options: Any) -> Any:
        nbytes[0] += tensor.nbytes
        names["all_reduce"] += 1
        return all_reduce(tensor, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", exchange), mock.patch.object(dist, "all_reduce", reduce):
        yield nbytes, names


def count(optimizer: torch.optim.Optimizer) -> Counted:
    with counted_collectives() as (nbytes, names), FlopCounterMode(display=False) as flops:
        optimizer.step()
    return Counted(nbytes[0], names, flops.get_total_flops())


def mean_bytes(optimizer: fsdp2.WholeMatrixOptimizer) -> float:
    """What a rank sends in all-to-alls, averaged over all ranks."""
    total = ranks = 0
    for bucket in optimizer.plan().buckets:
        ranks = len(bucket.owned)
        for owner, matrices in enumerate(bucket.owned):
            for matrix in matrices:
                cut = optimizer._members[matrix.param].cut
                rows, cols = matrix.part_shape(cut, owner)
                total += 2 * (matrix.numel - rows * cols) * bucket.wire.itemsize  # there and back
    return total / ranks


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_bytes_and_operations_for_the_shapes_of_llama(ranks: int) -> None:
    """With P elements over N ranks: no matrix is computed twice, and no padding travels."""
    with fake_world(ranks):
        model = llama()
        optimizer = fsdp2.muon(model.parameters())
        counted = count(optimizer)
        numel = sum(param.numel() for param in model.parameters())
        assert mean_bytes(optimizer) + 7 * LAYERS <= 1.02 * 4 * numel / ranks * (ranks - 1) / ranks
        (loads,) = optimizer.plan().loads.values()
        # What rank 0 computes: five iterations of what it owns, and nothing else.
        assert counted.flop == 5 * loads[0]
        assert counted.collectives == {"all_to_all": 2 * len(optimizer.plan().buckets), "all_reduce": 1}


class Bag(nn.Module):
    """Parameters of these shapes, without a use for them."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.ones(shape)))

    def forward(self) -> None: ...


def with_gradients(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return module


@contextmanager
def noted_exchanges() -> Iterator[list[tuple[list[int], list[int]]]]:
    """What each all-to-all of this rank receives and sends, in elements from and to each rank."""
    noted: list[tuple[list[int], list[int]]] = []

    def exchange(output: Any, source: Any, received: list[int], sent: list[int], **options: Any) -> Any:
        assert (output.numel(), source.numel()) == (sum(received), sum(sent))
        noted.append((received, sent))
        return mock.Mock()  # this backend refuses to receive from a rank that sends nothing

    with mock.patch.object(dist, "all_to_all_single", exchange):
        yield noted


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_what_one_rank_sends_another_expects(dim: int) -> None:
    """Uneven and empty shards; blocks that one rank has, or two; ranks that own nothing."""
    ranks, of_all = 5, []
    for rank in range(ranks):
        with fake_world(ranks, rank), noted_exchanges() as noted:
            bag = Bag((13, 5), (5, 13), (3, 7), (1, 6), (12, 4), (6, 4, 9))
            fully_shard(bag, shard_placement_fn=lambda param: Shard(dim % param.dim()))
            with_gradients(bag)
            groups = [{"params": [each for each in bag.parameters() if each is not bag.p4]}]
            fsdp2.muon([*groups, {"params": [bag.p4], "blocks": 4}], bucket_bytes=100).step()
            of_all.append(noted)
    assert len({len(noted) for noted in of_all}) == 1
    assert of_all[0]
    for exchanges in zip(*of_all, strict=True):
        for i in range(ranks):
            for j in range(ranks):
                assert exchanges[i][1][j] == exchanges[j][0][i], f"from {i} to {j}"


def test_what_one_rank_has_as_a_whole_does_not_travel() -> None:
    ways: list[tuple[int, Any]] = [
        (4, lambda: fully_shard(Bag((8, 3, 5), (9, 2, 2)))),  # experts, sharded by expert
        (4, lambda: fsdp2.replicate(Bag((8, 3)))),
        (1, lambda: fully_shard(Bag((8, 3)))),
        (4, lambda: Bag((8, 3))),
        (4, lambda: fully_shard(Bag((1, 3)))),  # the first rank has it
    ]
    for ranks, make in ways:
        with fake_world(ranks), counted_collectives() as (_, names):
            fsdp2.muon(with_gradients(make()).parameters()).step()
            assert not names
    with fake_world(4), noted_exchanges() as noted:  # three heads of four rows: four ranks have three rows each
        heads = with_gradients(fully_shard(Bag((12, 5))))
        fsdp2.muon([{"params": [*heads.parameters()], "blocks": 3}]).step()
        ((received, _), _) = noted
        assert sum(received) == 4 * 5


def test_the_next_bucket_travels_while_one_is_updated() -> None:
    """And the one before comes back. x: an exchange is issued, w: waited for, u: matrices are updated."""
    events: list[str] = []
    all_to_all = dist.all_to_all_single

    def exchange(*args: Any, **options: Any) -> Any:
        assert options["async_op"]
        events.append("x")
        work = mock.Mock()
        work.wait.side_effect = lambda: events.append("w")
        all_to_all(*args, **options).wait()
        return work

    def update(matrices: Tensor, group: dict[str, Any]) -> Tensor:
        events.append("u")
        return matrices

    with fake_world(2), mock.patch.object(dist, "all_to_all_single", exchange):
        bag = with_gradients(fully_shard(Bag(*[(4, 4)] * 6)))
        optimizer = fsdp2.WholeMatrixOptimizer(bag.parameters(), update, bucket_bytes=1)
        optimizer.step()
        assert "".join(events) == "x" + "xwux" + "xwuxw" + "wuxw" + "w"
        events.clear()
        bag.p0.grad = bag.p1.grad = None  # on all ranks, as far as this backend knows: they do not travel
        optimizer.step()
        assert "".join(events) == "x" + "xwux" + "wuxw" + "w"


def test_replicas_of_shards_exchange_nothing_between_them() -> None:
    with fake_world(8), noted_exchanges() as noted:
        bag = fully_shard(Bag((8, 8), (8, 8)), mesh=init_device_mesh("cpu", (2, 4)))
        fsdp2.muon(with_gradients(bag).parameters()).step()
        assert [len(received) for received, _ in noted] == [4, 4]
