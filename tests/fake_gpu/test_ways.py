"""Tests training on a device that is not the CPU, on autograd's own threads and streams, beside a plain model.

The clocks judge all of it: an order of operations in which a GPU might compute wrong numbers is a failure, too.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fake_gpu
from cut_gradients import small_pieces
from fake_gpu.training import EXACT, OFFLOAD, ROUNDED, ROWS_OF_RANK, WIDTH, build, judged, on_a_thread, train
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadBudget, accumulate, fully_shard
from fsdp2.collectives import coalesced
from fsdp2.compression import Compression, Int8, PowerSGD
from fsdp2.engine import codec
from helpers import run_checks


@contextmanager
def as_large_ones() -> Iterator[None]:
    """Gradients travel one by one, in pieces; parameters are gathered straight into place."""
    with small_pieces(piece_bytes=64), mock.patch.object(coalesced.CoalescedComm, "direct_min_bytes", 64):
        yield


MP_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
BF16 = {"mp_policy": MP_BF16, "tolerance": ROUNDED}
SENT_IN_BF16 = MixedPrecisionPolicy(
    torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
)
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "sent in bf16": {"mp_policy": SENT_IN_BF16, "tolerance": ROUNDED},
    # The simulated GPU has no random numbers, which the default rounds with.
    "sent in int8": {
        "mp_policy": MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8(8, True))),
        "tolerance": ROUNDED,
    },
    "kept": {"reshard_after_forward": False},
    "recomputed": {"recompute": False},
    "recomputed, reentrant": {"recompute": True},
    "offloaded": OFFLOAD,
    "offloaded, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded, bf16": {**OFFLOAD, **BF16},
    "offloaded, accumulated": {"micro_batches": 2, **OFFLOAD},
    "offloaded, recomputed": {"recompute": False, **OFFLOAD, **BF16},
    "offloaded, conditional": {"conditional": True, **OFFLOAD},
    "up to a budget": {"offload_policy": OffloadBudget(700)},
    "conditional, recomputed": {"conditional": True, "recompute": False},
    "accumulated": {"micro_batches": 2},
    "weighted, at the end": {"micro_batches": 2, "weighted": {}},
    "weighted, each, at the end": {"micro_batches": 2, "weighted": {"sync": "each"}},
    "weighted, each, offloaded": {"micro_batches": 2, "weighted": {"num_batches": 2, "sync": "each"}, **OFFLOAD},
    "optimizer in backward, offloaded": {"in_backward": True, **OFFLOAD},
    "both on threads": {"calls_forward": on_a_thread, "calls_backward": on_a_thread},
}
WEIGHTED: dict[str, Any] = {"micro_batches": 2, "weighted": {"num_batches": 2, "sync": "each"}}
REPLICAS: dict[str, dict[str, Any]] = {
    "HSDP, bf16": BF16,
    "HSDP, offloaded": OFFLOAD,
    "HSDP, weighted": WEIGHTED,
    "HSDP, int8 between": {
        "mp_policy": MixedPrecisionPolicy(compression=Compression(all_reduce=Int8(8, True))),
        "tolerance": ROUNDED,
    },
    "HSDP, low rank between": {
        "mp_policy": MixedPrecisionPolicy(compression=Compression(all_reduce=PowerSGD(64, start=0, min_saving=1e-3))),
        "tolerance": ROUNDED,
    },
}
TWO_STREAMS: dict[str, dict[str, Any]] = {
    "two streams": {},
    "two streams, offloaded": OFFLOAD,
    "two streams, bf16": BF16,
    "two streams, weighted": WEIGHTED,
}


def in_way(options: dict[str, Any], pieces: bool = False) -> None:
    small_ones = mock.patch.object(codec, "SMALL_NUMEL", 1)  # are encoded, too
    with judged(), small_ones, as_large_ones() if pieces else nullcontext():
        train(**options)


def test_all_ways_on_two_ranks() -> None:
    checks = [(way, partial(in_way, options)) for way, options in WAYS.items()]
    checks += [(f"{way}, in pieces", partial(in_way, WAYS[way], pieces=True)) for way in ("fp32", "bf16", "offloaded")]
    checks += [("replicated", partial(in_way, {"mesh": (2, 1)}))]
    run_checks(2, checks, device=fake_gpu.KIND)


def test_replicas_on_four_ranks() -> None:
    checks = [(way, partial(in_way, {"mesh": (2, 2), **options})) for way, options in REPLICAS.items()]
    checks += [("HSDP, in pieces", partial(in_way, {"mesh": (2, 2), **BF16}, pieces=True))]
    int8 = {"mesh": (4, 1), **REPLICAS["HSDP, int8 between"]}
    checks += [("replicas, int8 between", partial(in_way, int8))]
    run_checks(4, checks, device=fake_gpu.KIND)


def test_a_tower_on_a_stream_of_its_own() -> None:
    """Its parameters are gathered, its gradients computed and reduced beside those of the other blocks."""
    checks = [(way, partial(in_way, {"has_side": True, **options})) for way, options in TWO_STREAMS.items()]
    run_checks(2, checks, device=fake_gpu.KIND)


def test_the_host_waits_for_nothing_in_a_step_at_which_ranks_compare_nothing() -> None:
    """They compare at the first step, and at ever fewer of those after it."""

    def check(**options: Any) -> None:
        _, model = build(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)
        counts = []
        for _ in range(12):
            x = torch.randn(ROWS_OF_RANK, WIDTH, device=fake_gpu.KIND)
            before = fake_gpu.native().host_waits()
            (model(x) - 0.5).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(fake_gpu.native().host_waits() - before)
        assert counts[0] > 0, "the first step compares, so that waits are counted"
        assert counts[8:] == [0] * 4, counts

    def weighted(**how: Any) -> None:
        """The host reads the sums of weights once, when the block ends."""
        _, model = build()
        counts = []
        for _ in range(12):
            before = fake_gpu.native().host_waits()
            with accumulate(model, **how) as acc:
                for i in range(2):
                    x = torch.randn(ROWS_OF_RANK, WIDTH, device=fake_gpu.KIND)
                    acc.backward((model(x) - 0.5).square().sum(), weight=(x > i).sum())
            model.zero_grad()
            counts.append(fake_gpu.native().host_waits() - before)
        assert counts[8:] == [1] * 4, counts

    options: dict[str, dict[str, Any]] = {"sharded": {}, "replicated": {"mesh": (2, 1)}, "bf16": {"mp_policy": MP_BF16}}
    checks: list[Any] = [(name, partial(check, **each)) for name, each in options.items()]
    checks += [("weighted", partial(weighted, num_batches=2)), ("weighted, at the end", weighted)]
    run_checks(2, checks, device=fake_gpu.KIND)


class Remembering(torch.nn.Module):
    """Writes what it computes into a cache, and appends it to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
        hidden = self.layer(x.to(self.layer.weight.dtype))
        with torch.no_grad():
            cache[:, len(states)] = hidden
            states.append(hidden.detach())
        return hidden


def test_what_a_forward_writes_into_inputs_that_are_moved_reaches_the_caller() -> None:
    """The cache and the list are on the CPU, and are moved to the device, and cast, for the forward."""

    def check(tolerance: dict[str, float], **options: Any) -> None:
        torch.manual_seed(0)
        plain = Remembering()
        model = copy.deepcopy(plain)
        fully_shard(model, mesh=init_device_mesh(fake_gpu.KIND, (dist.get_world_size(),)), **options)
        mine, theirs = ((torch.randn(2, 4, WIDTH), [torch.ones(2, WIDTH)]) for _ in range(2))
        mine[0].copy_(theirs[0])
        untouched = theirs[0][:, [0, 3]].clone()
        for step in range(2):
            x = torch.full((2, WIDTH), step + 0.5)
            model(x, *mine), plain(x, *theirs)
        assert mine[0].device.type == "cpu"
        assert torch.equal(mine[0][:, [0, 3]], untouched)
        torch.testing.assert_close(mine[0], theirs[0], **tolerance)
        assert [each.device.type for each in mine[1]] == ["cpu", fake_gpu.KIND, fake_gpu.KIND]
        torch.testing.assert_close([each.cpu().float() for each in mine[1]], theirs[1], **tolerance)

    ways = [("moved", partial(check, EXACT)), ("moved and cast", partial(check, ROUNDED, mp_policy=MP_BF16))]
    run_checks(2, ways, device=fake_gpu.KIND)


class SharesMemory(torch.nn.Module):
    """Writes into a state, or a clone of it, and computes with another one, which may be a view of it."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.layer, self.clones = torch.nn.Linear(WIDTH, WIDTH), clones

    def forward(self, x: Tensor, state: Tensor, view: Tensor) -> Tensor:
        written = state.clone() if self.clones else state
        written.mul_(2)
        return self.layer(x) * written * view


def writes_to_what_shares_memory() -> None:
    """What is on the CPU, and written to where it was moved to, has another view. The error's advice is followed."""

    def compare(clones: bool, device: str = "cpu") -> None:
        torch.manual_seed(0)
        plain = SharesMemory(clones)
        model = copy.deepcopy(plain)
        fully_shard(model, mesh=init_device_mesh(fake_gpu.KIND, (dist.get_world_size(),)))
        x, mine, theirs = (torch.full((2, WIDTH), 0.5) for _ in range(3))
        if device != "cpu":
            mine = mine.to(device)
        output, expected = model(x, mine, mine.view(2, WIDTH)), plain(x, theirs, theirs.view(2, WIDTH))
        torch.testing.assert_close(output.cpu(), expected, **EXACT)
        torch.testing.assert_close(mine.cpu(), theirs, **EXACT)

    with pytest.raises(RuntimeError, match=r"view shares memory with it, .*Pass both on that device; or write into a"):
        compare(clones=False)
    compare(clones=False, device=fake_gpu.KIND)
    compare(clones=True)


def test_writes_that_cannot_reach_the_caller() -> None:
    run_checks(2, [("shares memory", writes_to_what_shares_memory)], device=fake_gpu.KIND)
