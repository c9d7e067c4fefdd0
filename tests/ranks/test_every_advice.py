"""Runs the programs of tests/advised, each of which follows what an error advises.

What they provoke are also the errors of examples/guides/errors.md, whose headings are texts that a reader
searches for: each must be a part of what some program has heard.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType

from advised import ENTRIES
from advised.registry import batch, build, heard, refused, shard
from documents import error_messages
from helpers import run_checks

pytestmark = pytest.mark.filterwarnings("ignore")

FROM_TORCH = ("module 'torch._C' has no attribute '_cuda_setDevice'", "Connection closed by peer")


# ---- errors whose advice is followed in a file of its own


def backward_compiled() -> None:
    """See test_compiled_autograd.py."""
    loss = shard(build())(batch()).sum()
    with compiled_autograd._enable(lambda graph: graph):
        loss.backward()


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


# ---- all programs


class Told:
    """Runs the programs of each number of ranks when they are first asked for. `failed`, `texts`: by that number."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.failed, self.texts = folder, dict[int, str](), dict[int, list[str]]()

    def run(self, ranks: int) -> None:
        if ranks in self.texts:
            return

        def check(number: int, run: Callable[[], list[str]]) -> Callable[[], None]:
            def call() -> None:
                texts = run()
                if dist.get_rank() == 0:
                    (self.folder / f"{ranks} {number}").write_text(json.dumps(texts))

            return call

        runs: list[tuple[str, Callable[[], list[str]]]] = [(e.name, e.run) for e in ENTRIES if e.ranks == ranks]
        runs += [("others", others)] if ranks == 2 else []
        try:
            run_checks(ranks, [(name, check(i, run)) for i, (name, run) in enumerate(runs)], timeout=170)
        except pytest.fail.Exception as error:
            self.failed[ranks] = str(error)
        files = self.folder.glob(f"{ranks} *")
        self.texts[ranks] = [text for file in files for text in json.loads(file.read_text())]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("heard"))


@pytest.mark.parametrize("ranks", sorted({entry.ranks for entry in ENTRIES if entry.ranks}))
def test_advice_is_right_to_the_letter(ranks: int, told: Told) -> None:
    told.run(ranks)
    assert ranks not in told.failed, told.failed[ranks]


def test_errors_in_the_guide_are_those_of_programs(told: Told) -> None:
    told.run(2)
    messages = error_messages()
    assert len(messages) > 40
    unheard = [each for each in messages if not any(each in text for text in told.texts[2])]
    assert {*unheard} == {*FROM_TORCH}
