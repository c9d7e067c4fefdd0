"""Tests the line about a sharded model that the first rank logs, and the variable FSDP2_LOG."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.checks import tools_when_needed
from fsdp2.checks.tools_when_needed import Summary
from fsdp2.engine.state import require_state
from fsdp2.tools.describe import describe
from fsdp2.tools.summary_log import summary
from helpers import RankError, fake_world, run_ranks
from models import TinyGPT

LINE = (
    "sharded TinyGPT: 3 groups, 1,010 parameters among 4 ranks, 1.2 KiB on this rank; the largest group is blocks.0, "
    "1.7 KiB unsharded; settings: reshard_after_forward=False (2 groups)"
)
TOKENS = torch.zeros(2, 4, dtype=torch.long)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(4):
        yield


def sharded(model: Any = None, **options: Any) -> Any:
    model = TinyGPT() if model is None else model
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False, **options)
    return fully_shard(model, **options)


@pytest.mark.usefixtures("world")
def test_one_line_when_the_root_is_known(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fsdp2")
    model = sharded()
    assert caplog.messages == [], "a root may follow"
    for _ in range(2):
        model(TOKENS)
    assert caplog.messages == [LINE]
    assert require_state(model).root.events.of(Summary) is None


@pytest.mark.usefixtures("world")
def test_at_debug_there_is_a_table(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fsdp2")
    model = sharded()
    model(TOKENS)
    assert caplog.messages == [LINE, f"groups of TinyGPT:\n{describe(model)}"]


@pytest.mark.usefixtures("world")
def test_what_is_not_usual_is_in_it() -> None:
    model = TinyGPT()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    text = summary(describe(sharded(model, mesh=mesh, ignored_params={model.head.weight})))
    assert "among 2 replicas of 2 ranks" in text
    assert text.endswith("; not sharded: 1 parameter, 552 B")
    plain = summary(describe(fully_shard(nn.Linear(4, 4))))
    assert plain.startswith("sharded Linear: 1 group, 20 parameters among 4 ranks, ")
    assert plain.endswith("settings: all at their defaults")


@pytest.mark.usefixtures("world")
def test_modules_of_one_call_are_logged_together(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fsdp2")
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard([first, second])
    second(first(torch.ones(2, 4)))
    assert len(caplog.messages) == 1
    assert "1 group, 40 parameters" in caplog.messages[0]


def test_other_ranks_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fsdp2")
    with fake_world(4, rank=1):
        sharded()(TOKENS)
    assert caplog.messages == []


@pytest.mark.usefixtures("world")
def test_nothing_is_imported_where_nobody_logs() -> None:
    before = sys.modules.pop("fsdp2.tools.summary_log", None)
    try:
        sharded()(TOKENS)
        assert "fsdp2.tools.summary_log" not in sys.modules
    finally:
        if before is not None:
            sys.modules["fsdp2.tools.summary_log"] = before


def in_a_program(level: str, is_configured: bool = False) -> tuple[str, str]:
    """Returns what a process of its own writes to stdout and stderr if FSDP2_LOG names this level."""

    def body(rank: int, world_size: int) -> tuple[str, str]:
        dist.destroy_process_group()
        logging.getLogger().handlers.clear()  # those of pytest
        tools_when_needed._follow_log_level.cache_clear()
        os.environ["FSDP2_LOG"] = level
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors, fake_world(4):
            if is_configured:
                logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
            model = sharded()
            with torch.no_grad():
                for _ in range(2):
                    model(TOKENS)
        return out.getvalue(), errors.getvalue()

    return run_ranks(1, body)[0]


@pytest.mark.parametrize(
    ("level", "configured", "shown", "elsewhere"),
    [("", False, 0, 0), ("info", False, 1, 0), ("INFO", True, 0, 1), ("WARNING", False, 0, 0), ("DEBUG", False, 1, 0)],
)
def test_a_program_that_configures_nothing(level: str, configured: bool, shown: int, elsewhere: int) -> None:
    """FSDP2_LOG prints to stderr, unless the program has handlers of its own, which print it once."""
    out, errors = in_a_program(level, configured)
    assert errors.count(f"fsdp2: {LINE}") == shown
    assert out.count(f"INFO:fsdp2:{LINE}") == elsewhere
    assert ("groups of TinyGPT" in errors) == (level == "DEBUG")


def test_a_level_that_there_is_not() -> None:
    with pytest.raises(RankError, match="FSDP2_LOG: expected a level such as INFO or DEBUG, got 'loud'"):
        in_a_program("loud")
