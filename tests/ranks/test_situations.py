"""Each situation of situations.py ends as its line says: EXACT, or LOUD with the right message."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from helpers import NIGHTLY
from outcomes import CRYPTIC, EXACT, HANG, LOUD, SILENT, Options, Program, Side, Situation, merged, outcome_of, run_on
from situations import SITUATIONS

# How some end on a mesh whose ranks hold whole parameters: they are the memory of their shards; nothing is gathered.
ENDS_OF_REPLICAS = {
    "data_of_shards_written": (EXACT, ""),
    "another_collective_before_backward": (LOUD, "all_gather: expected None"),
}

pytestmark = pytest.mark.filterwarnings("ignore")


def problems(situations: list[Situation], ranks: int, options: Options = dict) -> list[str]:
    found = []
    outcomes = run_on(ranks, situations, fsdp2, 120, options)
    for situation in situations:
        outcome = merged(outcomes[situation.name])
        if (outcome.kind, situation.says in outcome.text) != (situation.ends, True):
            expected = f"{situation.ends} {situation.says!r}".strip()
            found.append(f"{situation.name}: expected {expected}, got {outcome.kind}: {outcome.text}")
    return found


@pytest.mark.parametrize("ranks", sorted({situation.ranks for situation in SITUATIONS}))
def test_each_ends_well(ranks: int) -> None:
    found = problems([s for s in SITUATIONS if s.ranks == ranks], ranks)
    assert not found, "\n".join(found)


@functools.cache
def mesh_of_replicas() -> DeviceMesh:
    """One of each rank: every process group has a thread, which wakes a hundred times a second."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def replicas() -> dict[str, Any]:
    return {"mesh": mesh_of_replicas()}


VARIANTS: dict[str, Options] = {
    "replicas": replicas,
    "kept": lambda: {"reshard_after_forward": False},
    "offloaded": lambda: {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
}
if NIGHTLY:  # it differs from the default in what the root and the last two groups do
    VARIANTS["resharded"] = lambda: {"reshard_after_forward": True}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_ends_well_in_other_ways_to_shard(variant: str) -> None:
    situations = [s for s in SITUATIONS if s.ranks == 2]
    if variant == "replicas":
        ends = [ENDS_OF_REPLICAS.get(s.name, (s.ends, s.says)) for s in situations]
        situations = [replace(s, ends=end, says=says) for s, (end, says) in zip(situations, ends, strict=True)]
    found = problems(situations, 2, VARIANTS[variant])
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
