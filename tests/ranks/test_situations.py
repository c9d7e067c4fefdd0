"""Tests that each situation of tests/situations ends as it states, and that what an error advises is right.

Programs of tests/advised follow the advice that no situation gets.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType

import fsdp2
from advised import ENTRIES
from advised.registry import batch, build, heard, refused, shard
from documents import ROOT, error_messages
from helpers import NIGHTLY, run_checks
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


ONLY = os.environ.get("FSDP2_ONLY", "")
"""The name of the one program to run, in seconds."""
assert ONLY in {"", *(each.name for each in (*SITUATIONS, *ENTRIES))}, f"no program is called {ONLY}"


def alone_by(name: str) -> str:
    """Returns the command that runs one program alone."""
    return f"OMP_NUM_THREADS=1 FSDP2_ONLY={name.split(',')[0]} python -m pytest -n0 {Path(__file__).relative_to(ROOT)}"


class Told:
    """Runs what is to run on each number of ranks when it is first asked for.

    `wrong`: what has not ended as it must. `texts`: what the programs have been told. Both by the number of ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of_situations = functools.cache(self._of_situations)
        self.of_programs = functools.cache(self._of_programs)

    def _of_situations(self, ranks: int) -> tuple[list[str], list[str]]:
        """Runs situations as usual, and what they advise, and every second one on two ranks in another way to shard;
        at night each one in each way. In one launch: what plain training shows is computed once.
        """
        usual, *others = WAYS
        chosen = [each for each in SITUATIONS if each.ranks == ranks and ONLY in ("", each.name)]
        runs = [(situation, usual) for each in chosen for situation in (each, *each.followed())]
        for i, situation in enumerate(chosen if ranks == 2 else []):
            runs += [(situation, way) for j, way in enumerate(others) if NIGHTLY or i % (2 * len(others)) == 2 * j]
        ends = run_each(ranks, [(situation, WAYS[way]) for situation, way in runs], fsdp2, 170)
        wrong, texts = [], []
        for (situation, way), of_ranks in zip(runs, ends, strict=True):
            outcome, kind = merged(of_ranks), situation.ends
            is_said = situation.is_said(outcome.text)
            if way == "replicas" and situation.name in ENDS_OF_REPLICAS:
                kind, says = ENDS_OF_REPLICAS[situation.name]
                is_said = says in outcome.text
            if outcome.kind != kind or not is_said:
                expected = " ".join([kind, *filter(None, (situation.says, *situation.advises))])
                got = f"expected {expected}, got {outcome.kind}: {outcome.text}"
                wrong.append(f"{situation.name}, {way}: {got}\n    {alone_by(situation.name)}")
            texts.append(outcome.text)
        return wrong, texts

    def _of_programs(self, ranks: int) -> tuple[list[str], list[str]]:
        def check(number: int, run: Callable[[], list[str]]) -> Callable[[], None]:
            def call() -> None:
                texts = run()
                if dist.get_rank() == 0:
                    (self.folder / f"{ranks} {number}").write_text(json.dumps(texts))

            return call

        runs: list[tuple[str, Callable[[], list[str]]]] = []
        runs += [(each.name, each.run) for each in ENTRIES if each.ranks == ranks and ONLY in ("", each.name)]
        runs += [("others", others)] if ranks == 2 and not ONLY else []
        wrong = []
        try:
            run_checks(ranks, [(name, check(i, run)) for i, (name, run) in enumerate(runs)], timeout=170)
        except pytest.fail.Exception as error:
            wrong = [str(error), f"one of them alone:\n    {alone_by('NAME')}"]
        return wrong, [text for file in self.folder.glob(f"{ranks} *") for text in json.loads(file.read_text())]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("told"))


@pytest.mark.parametrize("ranks", sorted({situation.ranks for situation in SITUATIONS}))
def test_each_ends_well(ranks: int, told: Told) -> None:
    wrong, _ = told.of_situations(ranks)
    assert not wrong, "\n".join(wrong)


def test_each_says_how_it_ends() -> None:
    names = {situation.name for situation in SITUATIONS}
    followed = {situation.follows for situation in SITUATIONS if situation.follows}
    assert followed <= names
    for situation in SITUATIONS:
        assert situation.ends in (EXACT, LOUD)
        assert bool(situation.says or situation.advises) == (situation.ends == LOUD), situation.name
        assert bool(situation.advises) == bool(situation.ways or situation.name in followed), situation.name


@pytest.mark.parametrize("ranks", sorted({entry.ranks for entry in ENTRIES if entry.ranks}))
def test_advice_is_right_to_the_letter(ranks: int, told: Told) -> None:
    wrong, _ = told.of_programs(ranks)
    assert not wrong, "\n".join(wrong)


# ---- errors of the guide


def backward_compiled() -> None:
    """See test_compiled_autograd.py."""
    loss = shard(build())(batch()).sum()
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()


FROM_TORCH = ("module 'torch._C' has no attribute '_cuda_setDevice'", "Connection closed by peer")
OTHERS: tuple[Callable[[], Any], ...] = (
    backward_compiled,
    lambda: shard(build()).head.weight.untyped_storage().data_ptr(),  # see test_addresses.py
    lambda: shard(build(), reshard_after_forward=3),  # see test_placements.py
    lambda: shard(build(), mesh=DeviceMesh("cpu", [1, 0])),  # see test_mesh_order.py
    lambda: FSDP1.set_state_dict_type(shard(build()), StateDictType.FULL_STATE_DICT),  # see test_migration.py
)


def others() -> list[str]:
    heard.clear()
    for program in OTHERS:
        refused(program)
    return heard


def test_errors_in_the_guide_are_those_of_programs(told: Told) -> None:
    """The headings of examples/guides/errors.md are texts that a reader searches for."""
    if ONLY:
        pytest.skip("it needs all programs")
    messages = error_messages()
    assert len(messages) > 40
    texts = [*told.of_situations(2)[1], *told.of_programs(2)[1]]
    unheard = [each for each in messages if not any(each in text for text in texts)]
    assert {*unheard} == {*FROM_TORCH}


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


def test_a_way_that_changes_nothing_fails() -> None:
    def fails(side: Side, way: str = "") -> None:
        """An argument, and what to do, which nobody does"""
        fails_with_advice(side)

    situation = Situation(fails, LOUD, advises=("expected {} one. Pass that",), ways=("that",))
    text = outcome_of(situation, fsdp2).text
    assert situation.is_said(text)
    assert not situation.is_said(text.replace("Pass", "Take"))
    (followed,) = situation.followed()
    assert (followed.ends, outcome_of(followed, fsdp2).kind) == (EXACT, LOUD)
