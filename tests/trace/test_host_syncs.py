"""How often the host waits for the device in each step: never but where checks look, see guards/looks.py.

The kind: a check, or a piece of bookkeeping, that reads a number off the device where it is computed. On a GPU the host
then stands still until all kernels that were launched before have run, once for each such place: for each group, each
parameter, each input. A read of a tensor counts, whatever its device; so does a copy of host memory to the device.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.guards import questions
from fsdp2.guards.looks import is_time_to_look
from helpers import fake_world

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_unique2", "unique_consecutive"}
READS |= {"unique_dim", "masked_select"}
STEPS = 9
MOST = 3


class HostWaits(TorchDispatchMode):
    """Counts what the host waits for."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each not in (Tensor, nn.Parameter) for each in types):
            return NotImplemented
        name = func._schema.name.split("::")[-1]
        if name in READS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts in it; a simulated world is taken for one whose ranks can tell each other something."""
    waits, tolist, to_device = HostWaits(), Tensor.tolist, questions._to_device

    def counted_tolist(tensor: Tensor) -> Any:
        waits.seen["tolist"] += 1
        return tolist(tensor)

    def counted_copy(*args: Any) -> Tensor:
        waits.seen["copies to the device"] += 1
        return to_device(*args)

    with (
        mock.patch.object(Tensor, "tolist", counted_tolist),
        mock.patch.object(questions, "_to_device", counted_copy),
        mock.patch.object(questions, "moves_data", return_value=True),
        waits,
    ):
        yield waits.seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(5)])
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
def test_the_host_waits_at_the_steps_where_checks_look_and_thrice_then(way: Callable[[Net], None]) -> None:
    """Whatever is checked, for however many groups: of one root, in one pass."""
    with fake_world(4):
        torch.manual_seed(0)
        model = Net()
        way(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        x, per_step = torch.randn(4, 8), list[dict[str, int]]()
        for _ in range(STEPS):
            with counted() as seen:
                loss = model(x).sum()
                if loss.requires_grad:
                    loss.backward()
                    if way is not accumulating:
                        optimizer.step()
                        optimizer.zero_grad()
                per_step.append(dict(seen))
        for number, seen in enumerate(per_step, 1):
            waits = sum(seen.values())
            assert waits <= MOST if is_time_to_look(number) else not waits, f"step {number} of {way.__name__}: {seen}"
        assert sum(per_step[1].values()) >= 2, "the ranks compare, and the host reads what the pass has found"
