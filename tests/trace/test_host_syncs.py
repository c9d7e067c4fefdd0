"""Tests how often the host waits for the device in a step: only when checks are due (due.py).

The fault in question: a check, or some bookkeeping, reads a number from the device where it is computed. On a GPU the
host then waits until all kernels that were launched before have run, once for each such read: for each group, each
parameter, each input. A read of a tensor counts, whatever its device; so does a copy of host memory to the device.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from simulated_world import count_host_waits, simulated_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from vector_clocks import Stream

from fsdp2 import FSDPModule, MixedPrecisionPolicy, full_params, fully_shard
from fsdp2.checks.due import is_check_time
from fsdp2.engine import buckets
from fsdp2.ranks import compare_ranks
from models import NormedBlock

STEPS = 9
MOST = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[NormedBlock(8, 16) for _ in range(5)])
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def plain(model: Net) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def cast(model: Net) -> None:
    """Inputs of each block are cast."""
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    fully_shard(model)


def kept(model: Net) -> None:
    plain(model)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)


def some_unmanaged(model: Net) -> None:
    for block in model.blocks:
        fully_shard(block, ignored_params={*block.norm.parameters()})
    fully_shard(model, ignored_params={*[p for block in model.blocks for p in block.norm.parameters()]})


def accumulating(model: Net) -> None:
    plain(model)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)


def evaluated(model: Net) -> None:
    plain(model)
    model.eval().requires_grad_(False)


WAYS: tuple[Callable[[Net], None], ...] = (plain, cast, kept, some_unmanaged, accumulating, evaluated)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_host_waits_only_at_steps_of_checks_and_three_times(way: Callable[[Net], None]) -> None:
    """Whatever is checked, for however many groups: of one root, in one pass."""
    copies, to_device = Counter[str](), compare_ranks._to_device

    def counted_copy(numbers: Sequence[int], device: torch.device) -> Tensor:
        copies["numbers to the device"] += 1
        return to_device(numbers, device)

    with (
        simulated_world(4) as simulation,
        mock.patch.object(compare_ranks, "_to_device", counted_copy),
        mock.patch.object(compare_ranks, "moves_data", return_value=True),  # so that ranks compare what they have
    ):
        torch.manual_seed(0)
        model = Net()
        way(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        x = torch.randn(4, 8)

        def step() -> None:
            loss = model(x).sum()
            if loss.requires_grad:
                loss.backward()
                if way is not accumulating:
                    optimizer.step()
                    optimizer.zero_grad()

        for number in range(1, STEPS + 1):
            copies.clear()
            seen = count_host_waits(simulation, step) + copies
            waits = seen.total()
            assert waits <= MOST if is_check_time(number) else not waits, f"step {number} of {way.__name__}: {seen}"
            assert number != 2 or waits == MOST, "ranks compare what one copy brings, and the pass reads what it found"
    assert not simulation.problems, "\n".join(simulation.problems)


def test_a_block_of_full_params_reads_the_checks_of_all_groups_once() -> None:
    with simulated_world(4) as simulation:
        model = Net()
        plain(model)

        def block() -> None:
            with full_params(model):
                pass

        waits = [count_host_waits(simulation, block).total() for _ in range(4)]
    assert waits == [1, 1, 0, 1]


def cast_replicas(model: Net) -> None:
    """Large gradients travel in pieces, and are summed between replicas, both of which is issued beside backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def hooked(model: Net) -> None:
    cast(model)
    assert isinstance(model, FSDPModule)
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda gradients: gradients.mul_(1), stream=torch.Stream())  # type: ignore[operator]


@pytest.mark.parametrize("way", [plain, cast, cast_replicas, hooked], ids=lambda way: way.__name__)
def test_no_stream_is_entered_inside_itself(way: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 keeps one context in each stream object, and refuses, or restores the wrong stream."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 64)
    enter, leave, entered, times = Stream.__enter__, Stream.__exit__, set[int](), Counter[str]()

    def enter_once(stream: Stream) -> Stream:
        assert id(stream) not in entered, stream
        entered.add(id(stream))
        times[str(stream)] += 1
        return enter(stream)

    def leave_once(stream: Stream, *error: object) -> None:
        entered.remove(id(stream))
        leave(stream, *error)

    monkeypatch.setattr(Stream, "__enter__", enter_once)
    monkeypatch.setattr(Stream, "__exit__", leave_once)
    with simulated_world(4) as simulation:
        model = Net()
        way(model)
        for _ in range(3):
            with simulation:
                model(torch.randn(4, 8)).sum().backward()
    assert times or way in (plain, cast)
