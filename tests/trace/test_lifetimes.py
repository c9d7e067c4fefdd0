"""Memory that a collective uses is neither touched nor freed before somebody has waited for it.

On CPU a collective that is waited for too late shows as a wrong number, sometimes; on a GPU the caching allocator hands
freed memory to the next kernel, and numbers are wrong once in a while. Here every collective takes for ever, until it
is waited for. A second stream is pretended: see ledger.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ledger import Ledger, Race, ledger_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, bucket, comm, fully_shard, reduce, reduce_plan, replicate

RANKS, BLOCKS, DIM = 4, 3, 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIRE = dataclasses.replace(BF16, wire_dtype=torch.bfloat16)


class Block(nn.Module):
    """Parameters that are gathered on their own, and packed ones; one that doesn't divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A lone parameter at either end, which is reduced in pieces where it is cast or padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(DIM, DIM + 1, bias=False)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.skips else self.last(x)


def build(shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    model = Net()
    for module in (model.first, *model.blocks, model.last):
        shard(module, **options)
    return shard(model, **options)


def hsdp(**options: Any) -> Any:
    return build(mesh=init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("r", "s")), **options)


class Allocating:
    """A user's own collective, as `set_custom_all_gather` and `set_custom_reduce_scatter` want it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool, op: Any = None) -> Any:
        return (group._allgather_base if op is None else group._reduce_scatter_base)(output_tensor, input_tensor)


def own_collectives(model: Any) -> Any:
    for block in model.blocks:
        block.set_custom_all_gather(Allocating())
        block.set_custom_reduce_scatter(Allocating())
    return model


def change(model: Any, setting: str, *values: Any, **options: Any) -> Any:
    getattr(model, setting)(*values, **options)
    return model


MODELS = {
    "fp32": build,
    "bf16": lambda: build(mp_policy=BF16),
    "wire": lambda: build(mp_policy=WIRE),
    "kept part": lambda: build(reshard_after_forward=2),
    "kept": lambda: build(reshard_after_forward=False),
    "replicate": lambda: build(replicate),
    "hsdp": hsdp,
    "hsdp bf16": lambda: hsdp(mp_policy=BF16),
    "hsdp wire": lambda: hsdp(mp_policy=WIRE),
    "hsdp sums": lambda: change(hsdp(), "set_force_sum_reduction_for_comms", True, recurse=True),
    "hsdp own": lambda: own_collectives(hsdp()),
    "own": lambda: own_collectives(build()),
    "sums": lambda: change(build(), "set_force_sum_reduction_for_comms", True, recurse=True),
    "prefetch all": lambda: change(build(mp_policy=BF16), "set_prefetch_budget", 1 << 30),
    "more in flight": lambda: change(hsdp(mp_policy=BF16), "set_reduce_scatter_max_input_buffers", 3),
    "kept storage": lambda: change(build(), "set_keep_unsharded_storage", True),
    "unused": lambda: change(build(), "set_reduce_scatter_unused_params", True),
}


@pytest.fixture(autouse=True)
def _many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm.CoalescedComm, "direct_min_bytes", 16)
    monkeypatch.setattr(bucket, "MIN_BUCKET_BYTES", 64)
    monkeypatch.setattr(reduce_plan, "MIN_PIECE_BYTES", 64)


def train(model: Any, ledger: Ledger) -> None:
    """Steps with an optimizer: one in two parts, of which the first is not reduced; one without a layer that was
    gathered ahead; one that fails; one after it.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, DIM, requires_grad=True)
    with ledger:
        for synchronises in (True, True, False, True):
            model.set_requires_gradient_sync(synchronises)
            model(batch).float().sum().backward()
            if synchronises:
                optimizer.step()
                optimizer.zero_grad()
        model.skips = True
        model(batch).float().sum().backward()
        handle = batch.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch).float().sum().backward()
        handle.remove()
        model(batch).float().sum().backward()
        optimizer.step()
    assert not ledger.open, "every collective has been waited for when a step ends"


@pytest.mark.parametrize("with_streams", [False, True], ids=["cpu", "streams"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_touched_or_freed_too_early(name: str, with_streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with ledger_world(RANKS, monkeypatch, with_streams) as ledger:
        train(MODELS[name](), ledger)
        assert ledger.waits.total() > 20


@pytest.mark.parametrize("name", ["hsdp", "hsdp bf16", "replicate"])
def test_compute_waits_for_sums_between_replicas_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins them, when the reduce-scatter is through, is not the stream that computes."""
    with ledger_world(RANKS, monkeypatch, with_streams=True) as ledger:
        train(MODELS[name](), ledger)
        assert ledger.waits["reduce-scatter", True] == 0
        assert ledger.waits["all-reduce", True] > 10


def test_compute_does_not_wait_for_pieces_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a lone, cast gradient are packed and sent one after the other, beside the backward that goes on."""
    with ledger_world(RANKS, monkeypatch, with_streams=True) as ledger:
        model, batch = build(mp_policy=BF16), torch.ones(2, DIM, requires_grad=True)
        with ledger:
            model(batch).float().sum().backward()
        pieces = 2 * DIM * DIM * 4 // reduce_plan.MIN_PIECE_BYTES
        assert (
            ledger.waits["reduce-scatter", False] >= min(pieces, reduce_plan.MAX_PIECES) - 2 * reduce.PIECES_IN_FLIGHT
        )


def test_the_ledger_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of mistake, made once."""
    with ledger_world(RANKS, monkeypatch, with_streams=True) as ledger, ledger:
        group, whole, own = torch.distributed.group.WORLD, torch.zeros(16), torch.zeros(4)
        work = group._allgather_base(whole, own)
        own.add(1)  # may be read
        with pytest.raises(Race):
            own.add_(1)
        with pytest.raises(Race):
            whole.add(1)
        with pytest.raises(Race):
            whole.untyped_storage().resize_(0)
        work.wait()
        whole.add_(1)
        with ledger.on_the_other_stream(whole.device):
            group._allgather_base(whole, own).wait()
            whole.add(1)
        with pytest.raises(Race):
            whole.add(1)
        later = group._allgather_base(torch.zeros(16), own)
        del whole
        with pytest.raises(Race, match="freed"):
            later.wait()
