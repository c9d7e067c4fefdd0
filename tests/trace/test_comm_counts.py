"""Tests how many collectives a step issues in each mode, as torch's CommDebugMode counts them: the table in
fsdp2/README.md.

It runs on one of four ranks whose peers are simulated, also through the interface of NCCL. tests/ranks/test_comm.py
counts on gloo, where ranks send and receive instead, which CommDebugMode does not see.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.meters import WireMeter
from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.compression import Compression, Int8
from fsdp2.engine.state import groups_below
from helpers import fake_world

BLOCKS, WIDTH = 3, 8
GROUPS = BLOCKS + 1
c10d = torch.ops.c10d
GATHERS = (c10d._allgather_base_, c10d.allgather_into_tensor_coalesced_)
REDUCES = (c10d._reduce_scatter_base_, c10d.reduce_scatter_tensor_coalesced_)
EXCHANGES = (c10d.alltoall_base_,)
BF16_REDUCE_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_WIRE = dataclasses.replace(BF16_REDUCE_FP32, compression=Compression(reduce_scatter=torch.bfloat16))
INT8 = dataclasses.replace(BF16_REDUCE_FP32, compression=Compression(reduce_scatter=Int8()))
SUMS = (c10d.allreduce_,)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(4):
        yield


class Net(nn.Module):
    """Blocks, and a scale of the root's own. Every backward reads the weights."""

    def __init__(self, width: int = WIDTH, depth: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))) for _ in range(BLOCKS)
        )
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def build(model: Net | None = None, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    model = Net() if model is None else model
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Collectives in one step."""

    forward: int = 0  # gathers; nothing else may happen there
    gathers: int = 0  # in backward, as the other two
    reduces: int = 0
    sums: int = 0


def step(model: Any) -> Counts:
    x = torch.ones(2, model.scale.shape[0], requires_grad=True)  # CommDebugMode's own hooks ask for it
    with CommDebugMode() as forward:
        loss = model(x).sum()
    with CommDebugMode() as backward:
        loss.backward()
    model.zero_grad()
    seen = backward.get_comm_counts()
    gathers, reduces, sums = (sum(seen[op] for op in ops) for ops in (GATHERS, (*REDUCES, *EXCHANGES), SUMS))
    before = sum(forward.get_comm_counts()[op] for op in GATHERS)
    assert forward.get_total_counts() == before, forward.get_comm_counts()
    assert backward.get_total_counts() == gathers + reduces + sums, seen
    return Counts(before, gathers, reduces, sums)


def steps(model: Any) -> Counts:
    """Of each step but the first, which has no order to follow yet, and does not know which groups are the last."""
    first, second, third = (step(model) for _ in range(3))
    assert third == second
    assert dataclasses.replace(first, gathers=second.gathers) == second
    assert first.gathers >= second.gathers
    return second


@pytest.mark.parametrize(
    ("reshard", "gathers"),
    [(True, GROUPS), (None, GROUPS - 3), (False, 0), (1, 0), (2, GROUPS), (4, GROUPS)],
    ids=str,
)
def test_sharded(reshard: bool | int | None, gathers: int) -> None:
    """One gather in forward and one in backward, unless parameters stay; None: those of the root and the last two."""
    model = build(reshard_after_forward=reshard)
    assert steps(model) == Counts(forward=GROUPS, gathers=gathers, reduces=GROUPS)


@pytest.mark.parametrize(
    ("change", "stay"),
    [
        (lambda model: model.blocks[2].set_modules_to_backward_prefetch([]), 1),
        (lambda model: model.blocks[1].set_unshard_in_backward(False), 1),
        (lambda model: model.blocks[1].set_reshard_after_forward(True), 1),
    ],
    ids=["none ahead", "not to be gathered", "to be freed"],
)
def test_groups_that_backward_needs_first_stay_unsharded(change: Callable[[Any], None], stay: int) -> None:
    """The last block alone, where another may not be gathered ahead of its backward, or is not to stay."""
    model = build()
    change(model)
    assert steps(model).gathers == BLOCKS - stay


def test_groups_that_stay_for_backward_are_gathered_if_freed_by_hand() -> None:
    model = build(reshard_after_forward=False)
    steps(model)
    with CommDebugMode() as seen:
        loss = model(torch.ones(2, WIDTH, requires_grad=True)).sum()
        for module in (*model.blocks, model):
            module.reshard()
        loss.backward()
    assert sum(seen.get_comm_counts()[op] for op in GATHERS) == 2 * GROUPS


@pytest.mark.parametrize("reshard", [True, None, False, 2], ids=str)
def test_hsdp(reshard: bool | int | None) -> None:
    """Each reduction is summed between replicas once more."""
    alone = steps(build(reshard_after_forward=reshard))
    model = build(mesh=init_device_mesh("cpu", (2, 2)), reshard_after_forward=reshard)
    assert steps(model) == dataclasses.replace(alone, sums=GROUPS)
    model.set_requires_all_reduce(False)
    assert step(model) == alone
    model.set_requires_all_reduce(True)
    assert step(model) == dataclasses.replace(alone, sums=GROUPS)


def test_replicated() -> None:
    assert steps(build(shard=replicate)) == Counts(sums=GROUPS)


@pytest.mark.parametrize("hsdp", [False, True])
def test_accumulation(hsdp: bool) -> None:
    """Without synchronisation nothing is reduced."""
    options = {"mesh": init_device_mesh("cpu", (2, 2))} if hsdp else {}
    model = build(reshard_after_forward=True, **options)
    steps(model)
    for sync in (False, False, True):
        model.set_requires_gradient_sync(sync)
        assert step(model) == Counts(GROUPS, GROUPS, GROUPS * sync, GROUPS * sync * hsdp)


def test_accumulation_without_resharding() -> None:
    """As torch's users write it: what stays after one micro-batch is not gathered for the next, the last included."""
    model = build(reshard_after_forward=False)
    seen = []
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        model.set_reshard_after_backward(i == 2)
        seen.append(step(model))
    assert seen == [Counts(forward=GROUPS), Counts(), Counts(reduces=GROUPS)]
    assert step(model) == Counts(forward=GROUPS, reduces=GROUPS)


def test_large_groups_reduce_in_several_buckets() -> None:
    """From 1 MiB on, at most four, while backward goes on; they gather in one launch all the same."""
    width, depth = 512, 8  # 1 MiB in each weight
    model = build(Net(width, depth), reshard_after_forward=True)
    assert steps(model) == Counts(forward=GROUPS, gathers=GROUPS, reduces=4 * BLOCKS + 1)


@pytest.mark.parametrize("hsdp", [False, True])
def test_gradients_that_are_exchanged(hsdp: bool) -> None:
    """An all-to-all in place of each reduce-scatter; large gradients go each on their own, in as many buckets."""
    mesh = {"mesh": init_device_mesh("cpu", (2, 2))} if hsdp else {}
    options = {"mp_policy": BF16_WIRE, "reshard_after_forward": True, **mesh}
    assert steps(build(**options)) == Counts(GROUPS, GROUPS, reduces=GROUPS, sums=GROUPS * hsdp)
    width, depth = 512, 8  # two matrices in each of four buckets
    counts = steps(build(Net(width, depth), **options))
    assert counts == Counts(GROUPS, GROUPS, reduces=8 * BLOCKS + 1, sums=(4 * BLOCKS + 1) * hsdp)


@pytest.mark.parametrize(  # of widths whose shards need no padding: packed, and large
    ("reshard", "width"), [(True, 32), (None, 512), (False, 32), (True, 512)], ids=str
)
def test_bytes_sent(reshard: bool | None, width: int) -> None:
    """(2 + 2 + 4) (N - 1) / N for each parameter, less what needs no second gather; (2 + 2 + 2) on a bf16 wire.

    As int8, (2 + 2 + 1 + 4 / 128), and up to 15 bytes to each rank of each group, whose last block may have few. A
    vector is not encoded.
    """
    for policy, gradient in ((BF16_REDUCE_FP32, 4), (BF16_WIRE, 2), (INT8, 1 + 4 / 128)):
        model = build(Net(width), mp_policy=policy, reshard_after_forward=reshard)
        numel = BLOCKS * width**2 + width
        kept = {True: 0, None: 2 * width**2 + width, False: numel}[reshard]  # the last two blocks and the root
        steps(model)
        with WireMeter() as wire:
            step(model)
        vectors = (4 - gradient) * width if policy is INT8 else 0
        rest = wire.sent_bytes - ((2 + 2 + gradient) * numel + vectors - 2 * kept) * 3 / 4
        assert 0 <= rest < (3 * GROUPS * (15 + 4) if policy is INT8 else 1), policy
        # By these bytes reductions in flight are limited.
        more = sum(group.gradients.sent_nbytes for group in groups_below(model)) - gradient * numel - vectors
        assert 0 <= more < (4 * GROUPS * (15 + 4) if policy is INT8 else 1), policy
