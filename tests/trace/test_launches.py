"""Tests how many kernels gathers and reductions would launch on a GPU, for blocks of real sizes.

It runs on one of many simulated ranks. benchmarks/launches.py has the rules by which CUDA needs one kernel or many.
"""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launches import LaunchMeter, count_group
from benchmarks.libraries import load_library
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.collectives import choose as collectives
from fsdp2.engine import buckets, gather, pack
from fsdp2.engine.layout import MAX_OPERATIONS
from fsdp2.engine.state import groups_of
from helpers import NIGHTLY, fake_world

# (block, precision, ranks) -> launches of a gather, of a reduction; collective calls of each. A gather is a cast, and
# if something is packed a kernel that copies out and the upload of its addresses; a reduction a kernel and an upload
# where something is packed. Gradients of more than 1 GiB are reduced in several buckets.
CEILINGS = {
    ("GPT-2 124M", "bf16/fp32", 8): ((3, 2), (1, 1)),
    ("GPT-2 124M", "fp32", 8): ((2, 2), (1, 1)),
    ("GPT-2 124M", "bf16/fp32", 1024): ((3, 2), (1, 1)),
    ("Llama-7B", "bf16/fp32", 8): ((2, 2), (1, 1)),
    ("Llama-7B", "fp32", 8): ((0, 0), (1, 1)),
    ("Llama-7B", "bf16/fp32", 1024): ((3, 2), (1, 1)),
    ("64 experts", "bf16/fp32", 64): ((3, 4), (1, 2)),
}
if NIGHTLY:
    CEILINGS |= {
        ("GPT-2 124M", "fp32", 1024): ((2, 2), (1, 1)),
        ("Llama-7B", "fp32", 1024): ((2, 2), (1, 1)),
        ("64 experts", "fp32", 64): ((2, 4), (1, 2)),
        ("64 experts", "bf16/fp32", 1024): ((3, 6), (1, 3)),
    }


@functools.cache
def counts_of(name: str, precision: str, library: str, ranks: int) -> Any:
    """Returns what a gather and a reduction of a block take."""
    return count_group(name, precision, load_library(library), ranks)


@pytest.mark.parametrize(("name", "precision", "ranks"), CEILINGS, ids=str)
def test_launches_are_bounded(name: str, precision: str, ranks: int) -> None:
    """Also the operations in one collective call, of which NCCL works through hundreds one after the other."""
    both = counts_of(name, precision, "fsdp2", ranks)
    launches, calls = CEILINGS[name, precision, ranks]
    for counts, most_launches, most_calls in zip(both, launches, calls, strict=True):
        assert counts.launches <= most_launches
        assert counts.calls <= most_calls
        assert counts.largest_call <= MAX_OPERATIONS


@pytest.mark.parametrize(
    ("name", "ranks", "precision"),
    [
        ("GPT-2 124M", 8, "fp32"),
        ("GPT-2 124M", 1024, "bf16/fp32"),
        ("Llama-7B", 8, "bf16/fp32"),
        ("Llama-7B", 8, "fp32"),
    ],
)
def test_launches_are_no_more_than_those_of_torch(name: str, ranks: int, precision: str) -> None:
    """torch copies all shards into one buffer, and all parameters out of it; all gradients into one, and reduces them
    at once.
    """
    ours, theirs = (counts_of(name, precision, each, ranks) for each in ("fsdp2", "torch"))
    assert ours[0].launches < theirs[0].launches
    assert ours[0].written_nbytes < theirs[0].written_nbytes
    assert ours[0].calls == theirs[0].calls == 1
    assert ours[1].calls == theirs[1].calls == 1
    in_all = [2 * gather.launches + reduction.launches for gather, reduction in (ours, theirs)]
    assert in_all[0] < in_all[1]


class Mixed(nn.Module):
    """Parameters that are cast, and some that aren't; few of them large."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(shape) for shape in ((256, 256), (7, 5), (64,), (3,), (12, 8)))
        self.scales = nn.ParameterList(torch.ones(shape) for shape in ((5, 3), (64, 64), (2,)))
        self.halves = nn.ParameterList(torch.ones(shape, dtype=torch.float64) for shape in ((4, 2), (33,)))

    def forward(self) -> None:
        pass


class Copies(TorchDispatchMode):
    """Pairs of dtypes in each foreach copy, and the number of other copies to several places."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[set[tuple[torch.dtype, torch.dtype]]] = []
        self.splits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.__name__ == "_foreach_copy_.default":
            self.pairs.append({(to.dtype, source.dtype) for to, source in zip(*args[:2], strict=True)})
        self.splits += func.__name__ == "split_with_sizes_copy.out"
        return func(*args, **(kwargs or {}))


def keep_scales(module: nn.Module) -> MixedPrecisionPolicy:
    names = dict(module.named_parameters())
    kept = {id(names[name]) for name in names if name.startswith("scales")}
    return MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, param_dtype_override_fn=lambda p: torch.float32 if id(p) in kept else None
    )


@pytest.mark.parametrize("few", [True, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_copies_of_one_call_have_one_pair_of_dtypes(ranks: int, few: int) -> None:
    """torch 2.11 on CUDA writes to all destinations as to the first. In gathers whose casts differ, on one rank, in
    copies of a part that stays, and where parameters that aren't cast are packed beside others.
    """
    with fake_world(ranks), mock.patch.object(gather, "costs_launches", return_value=True):
        model = Mixed()
        fully_shard(
            model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=keep_scales(model), reshard_after_forward=few
        )
        with Copies() as copies:
            for _ in range(2):
                model.unshard()
                model.reshard()
    assert copies.pairs
    assert all(len(pairs) == 1 for pairs in copies.pairs)
    assert copies.splits == (2 if ranks > 1 else 0)


class Experts(nn.Module):
    """Few matrices, of which each rank holds some rows; they are more ranks than matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.ones(4, *shape)) for shape in ((64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up @ self.down


def test_stacks_that_are_cut_along_another_dim_are_copied_by_one_kernel() -> None:
    """Slice by slice: a kernel and its addresses out of the gather, the same into the reduction."""
    with (
        fake_world(16),
        mock.patch.object(gather, "costs_launches", return_value=True),
        mock.patch.object(buckets, "costs_launches", return_value=True),
        mock.patch.object(pack, "costs_launches", return_value=True),
    ):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = fully_shard(Experts(), mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        for _ in range(2):
            with LaunchMeter() as gathers:
                output = model(torch.ones(4, 2, 64))
            with LaunchMeter() as reductions:
                output.sum().backward()
            model.zero_grad()
    assert gathers.launches["aten.split_with_sizes_copy"] == 2
    assert gathers.launches["aten._foreach_copy"] == 1, "the cast"
    assert reductions.launches["aten._chunk_cat"] == 2
    assert not reductions.launches["aten._foreach_copy"]


@pytest.mark.parametrize(
    ("ranks", "shape", "setting", "is_separate"),
    [
        (16, (16,), None, True),
        (16, (16,), False, False),
        (8, (8,), None, False),
        (8, (8,), True, True),
        (32, (2, 16), None, True),
        (32, (4, 8), None, False),
    ],
)
def test_devices_reduce_on_a_group_of_their_own_beyond_a_machine(
    ranks: int, shape: tuple[int, ...], setting: bool | None, is_separate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ranks that share the shards; a user may choose otherwise. On CPU nobody does it unasked."""
    monkeypatch.setattr(collectives, "exist_on", lambda device: True)
    with fake_world(ranks):
        model = fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", shape))
        if setting is not None:
            model.set_separate_reduce_scatter_group(setting)
        (group,) = groups_of(model)
        assert (group.comms.reduces.group is not group.comms.gathers.group) is is_separate
        monkeypatch.undo()
        (on_cpu,) = groups_of(fully_shard(nn.Linear(64, 64), mesh=init_device_mesh("cpu", shape)))
        assert on_cpu.comms.reduces.group is on_cpu.comms.gathers.group


def test_the_meter_distinguishes_one_launch_from_many() -> None:
    """By sizes, strides, dtypes, and the numbers that fit into one kernel."""
    x, y, double, half = torch.zeros(64, 8), torch.zeros(64, 8), torch.zeros(8).double(), torch.zeros(64, 8).half()
    alike, other = [torch.zeros(4) for _ in range(65)], [torch.zeros(4) for _ in range(65)]
    cases = [
        (lambda: torch._foreach_copy_([x[:, :4], x[:, 4:]], [y[:, :4], y[:, 4:]]), 2),
        (lambda: torch._foreach_copy_([x, x[0]], [y, double]), 2),
        (lambda: torch._foreach_copy_([x, x[0]], [y, y[0]]), 1),
        (lambda: torch._foreach_copy_(alike, other), 2),
        (lambda: torch._foreach_div_(alike, 2.0), 1),
        (lambda: torch._foreach_copy_([torch.empty(321 * 65536)], [torch.empty(321 * 65536)]), 2),
        (lambda: torch.split_with_sizes_copy(x, [3, 5], 1, out=[torch.empty(64, 3), torch.empty(64, 5)]), 2),
        (lambda: torch.split_with_sizes_copy(x, [3, 5], 1, out=[y[:, :3], y[:, 3:]]), 2),
        (lambda: torch._chunk_cat([x, y], 0, 4, out=torch.empty(4, 256)), 2),
        (lambda: torch._chunk_cat([half, half], 0, 4, out=torch.empty(4, 256)), 5),
    ]
    for number, (call, launches) in enumerate(cases):
        with LaunchMeter() as meter:
            call()
        assert meter.launches.total() == launches, number
