"""Tests that ranks which wait for each other in vain are named at once, with the line of each one's program."""

import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import fully_shard, testing
from fsdp2.simulate.turns import ranks_text

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def line(function: Callable[..., Any], mark: str) -> str:
    """Returns the place of the one line of `function` that ends with the comment `mark`, as reports show it."""
    lines, first = inspect.getsourcelines(function)
    (index,) = (index for index, each in enumerate(lines) if each.rstrip().endswith(f"# {mark}"))
    return re.escape(f"{__file__}:{first + index}")


def report_of(program: Callable[[int], Any], ranks: int) -> str:
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        testing.run(program, ranks)
    assert time.monotonic() - start < 20  # a timeout of gloo is 30 minutes
    return str(raised.value)


def says(report: str, ranks: str, call: str, place: str) -> bool:
    return re.search(rf"^  {ranks}: .*{call}.* at {place} ", report, re.MULTILINE) is not None


def missing(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank != 2:
        dist.all_reduce(torch.ones(3))  # missing
    dist.barrier()  # early


def test_a_missing_collective() -> None:
    report = report_of(missing, 4)
    assert report.startswith("ranks are out of step in call 1 of the default group. All ranks")
    assert says(report, "rank 2", r"calls barrier\(\)", line(missing, "early"))
    assert says(report, "ranks 0.*", r"calls all_reduce\(SUM, 3 float32\)", line(missing, "missing"))


def swapped(rank: int) -> None:
    first, second = torch.ones(2), torch.ones(2)
    if rank == 1:
        dist.broadcast(first, 0)  # swapped
    dist.all_reduce(second)  # usual
    if rank != 1:
        dist.broadcast(first, 0)


def test_swapped_collectives() -> None:
    report = report_of(swapped, 2)
    assert says(report, "rank 1", r"broadcast\(2 float32, root rank 0\)", line(swapped, "swapped"))
    assert says(report, "rank 0", r"all_reduce\(SUM, 2 float32\)", line(swapped, "usual"))


def unequal(rank: int) -> None:
    dist.all_gather_into_tensor(torch.empty(12 - 3 * (rank == 2)), torch.ones(4 - (rank == 2)))  # unequal


def test_unequal_collectives() -> None:
    report = report_of(unequal, 3)
    assert says(report, "ranks? 0.*", r"all_gather_into_tensor\(4 float32\)", line(unequal, "unequal"))
    assert says(report, "rank 2", r"all_gather_into_tensor\(3 float32\)", line(unequal, "unequal"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rank: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM), "MAX"),
        (lambda rank: dist.broadcast(torch.ones(2), rank), "root rank 1"),
        (lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32)), "float64"),
        (
            lambda rank: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 2], [2, 1] if rank else [1, 2]),
            "expects",
        ),
        (lambda rank: dist.send(torch.ones(3), 0) if rank else dist.recv(torch.ones(2), 1), "longer than the tensor"),
    ],
)
def test_other_differences(change: Callable[[int], Any], text: str) -> None:
    assert text in report_of(change, 2)


def waiting(rank: int) -> None:
    pair, others = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 2:
        return
    for group in (pair, others) if rank else (others, pair):
        dist.all_reduce(torch.ones(1), group=group)  # crossed


def test_two_groups_in_different_orders() -> None:
    report = report_of(waiting, 3)
    assert report.startswith("no rank can go on.")
    for rank, group in ((0, 2), (1, 1)):
        call = rf"in all_reduce\(SUM, 1 float32\), call 0 of group {group} of ranks 0-1"
        assert says(report, f"rank {rank}", call, line(waiting, "crossed"))
    assert "\n  rank 2: has ended" in report


def test_messages_for_each_other() -> None:
    """Over gloo a message waits for its receiver. Here each rank sends first."""
    report = report_of(lambda rank: dist.send(torch.ones(1), 1 - rank), 2)
    assert re.search(r"rank 0: in send\(1 float32\) to rank 1, .*\n  rank 1: in send\(1 float32\) to rank 0", report)


def test_a_key_that_no_rank_sets() -> None:
    def run(rank: int) -> None:
        store = dist.TCPStore("localhost", 29500, 2, is_master=rank == 0)
        store.set(f"key {rank}", "value")
        assert store.get(f"key {1 - rank}") == b"value"
        store.get("never")

    assert re.search("ranks 0-1: waits for never in a store", report_of(run, 2))


def test_all_ranks_raise_and_may_go_on() -> None:
    """As where fsdp2 finds by headers that ranks differ."""

    def run(rank: int) -> str:
        try:
            unequal(rank)
        except RuntimeError as error:
            return str(error)
        return ""

    found = testing.run(run, 3)
    assert len({*found}) == 1
    assert "out of step" in found[0]


def test_fsdp2_itself_names_the_group() -> None:
    def run(rank: int) -> None:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))))
        model(torch.ones(1, 2)) if rank else model[1](torch.ones(1, 2))

    assert "ranks are out of step. rank 0: gathering" in report_of(run, 2)


def test_names_of_ranks() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


# ---- programs after public reports, each of which hung


def unequal_batches(rank: int) -> None:
    """dmlc/dgl#2539: one rank has a batch more."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2 + (rank == 0)):
        model(torch.ones(1, 2)).sum().backward()  # one more


def state_on_one_rank(rank: int) -> None:
    """pytorch/pytorch#122903: only rank 0 asks for the whole state dict."""
    model = torch_fully_shard(nn.Linear(4, 4))
    if rank == 0:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # alone
    dist.barrier()  # meanwhile


def mesh_of_members(rank: int) -> None:
    """cornstarch-org/Cornstarch#76: each rank makes only the meshes that it is in."""
    ranks = [0] if rank == 0 else [1, 2]
    group = dist.new_group(ranks)
    if rank:
        dist.all_reduce(torch.ones(1), group=group)
    third = dist.new_group([0, 2]) if rank != 1 else None
    if third is not None:
        dist.all_reduce(torch.ones(1), group=third)


def groups_by_rank(rank: int) -> None:
    """pytorch/pytorch#130102: each rank makes another group."""
    group = dist.new_group([0, 3] if rank in (0, 3) else [1, 2])
    dist.barrier(group)


def test_one_rank_has_a_batch_more() -> None:
    report = report_of(unequal_batches, 3)
    assert says(report, "rank 0", "in (broadcast|all_reduce)", line(unequal_batches, "one more"))
    assert "\n  ranks 1-2: has ended" in report


def test_one_rank_asks_for_the_state() -> None:
    report = report_of(state_on_one_rank, 3)
    assert says(report, "rank 0", "all_gather", line(state_on_one_rank, "alone"))
    assert says(report, "ranks? [12-]+", "barrier", line(state_on_one_rank, "meanwhile"))


@pytest.mark.parametrize(("program", "ranks"), [(mesh_of_members, 3), (groups_by_rank, 4)])
def test_groups_that_some_ranks_do_not_make(program: Callable[[int], None], ranks: int) -> None:
    report = report_of(program, ranks)
    assert "new_group" in report
