"""Tests that each situation of situations.py ends as it states: EXACT, or LOUD with the right message."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from helpers import NIGHTLY
from outcomes import CRYPTIC, EXACT, HANG, LOUD, SILENT, Options, Program, Side, Situation, merged, outcome_of, run_each
from situations import SITUATIONS

# How some end on a mesh whose ranks hold whole parameters: they are the memory of their shards; nothing is gathered.
ENDS_OF_REPLICAS = {
    "data_of_shards_written": (EXACT, ""),
    "another_collective_before_backward": (LOUD, "all_gather: expected None"),
    "states_of_own_rows_in_a_distributed_checkpoint": (EXACT, ""),
    "weight_gathered_in_the_loss": (EXACT, ""),
    "penalty_summed_over_shards": (EXACT, ""),
}

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def mesh_of_replicas() -> DeviceMesh:
    """One of each rank: every process group has a thread, which wakes a hundred times a second."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def replicas() -> dict[str, Any]:
    return {"mesh": mesh_of_replicas()}


WAYS: dict[str, Options] = {
    "as usual": dict,
    "replicas": replicas,
    "kept": lambda: {"reshard_after_forward": False},
}
if NIGHTLY:  # it differs from the default in what the root and the last two groups do
    WAYS["resharded"] = lambda: {"reshard_after_forward": True}


@pytest.mark.parametrize("ranks", sorted({situation.ranks for situation in SITUATIONS}))
def test_each_ends_well(ranks: int) -> None:
    """On two ranks as usual, and every second one in another way to shard; at night each one in each way.

    In one launch: what plain training shows is computed once.
    """
    usual, *others = WAYS
    runs = [(situation, usual) for situation in SITUATIONS if situation.ranks == ranks]
    for i, (situation, _) in enumerate([*runs] if ranks == 2 else []):
        runs += [(situation, way) for j, way in enumerate(others) if NIGHTLY or i % (2 * len(others)) == 2 * j]
    ends = run_each(ranks, [(situation, WAYS[way]) for situation, way in runs], fsdp2, 170)
    found = []
    for (situation, way), of_ranks in zip(runs, ends, strict=True):
        outcome, kind, says = merged(of_ranks), situation.ends, situation.says
        if way == "replicas":
            kind, says = ENDS_OF_REPLICAS.get(situation.name, (kind, says))
        if (outcome.kind, says in outcome.text) != (kind, True):
            expected = f"{kind} {says!r}".strip()
            found.append(f"{situation.name}, {way}: expected {expected}, got {outcome.kind}: {outcome.text}")
    assert not found, "\n".join(found)


def test_each_says_how_it_ends() -> None:
    for situation in SITUATIONS:
        assert situation.ends in (EXACT, LOUD)
        assert bool(situation.says) == (situation.ends == LOUD), situation.name


# ---- the judgement itself


def wrong_silently(side: Side) -> None:
    """A value that depends on whether the model is sharded"""
    side.value("value", torch.ones(1) * side.is_sharded)


def fails_without_advice(side: Side) -> None:
    """A bare assertion"""
    side.value("value", 1)
    assert not side.is_sharded


def fails_with_advice(side: Side) -> None:
    """An argument, and what to do"""
    side.value("value", 1)
    if side.is_sharded:
        raise ValueError("mesh: expected another one. Pass that.")


def fails_on_one_rank(side: Side) -> None:
    """An error on one rank, after which the others train on"""
    side.value("value", 1)
    if side.rank == 1:
        raise ValueError("mesh: expected another one. Pass that.")


def hangs(side: Side) -> None:
    """A collective that one rank enters alone"""
    side.value("value", 1)
    if side.rank == 1:
        dist.barrier()
        dist.barrier()


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (wrong_silently, SILENT),
        (fails_without_advice, CRYPTIC),
        (fails_with_advice, LOUD),
        (fails_on_one_rank, CRYPTIC),
        (hangs, HANG),
    ],
)
def test_judgement(program: Program, kind: str) -> None:
    assert outcome_of(Situation(program, EXACT), fsdp2, patience_s=2).kind == kind
