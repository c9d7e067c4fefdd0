"""Tests that gloo's threads wait for a core instead of interrupting a thread that sends."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from helpers import assert_same, full, run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have policies on Linux only")


def policies() -> list[int]:
    named = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.sched_getscheduler(int(t.name)) for t in named]


def train() -> torch.Tensor:
    model = nn.Linear(3, 2)
    fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    return full(model.weight.grad)


def test_they_do_not_interrupt_other_threads() -> None:
    def body(rank: int, world_size: int) -> list[list[int]]:
        before = policies()
        train()
        trained = policies()
        dist.new_group()
        return [before, trained, policies()]

    for before, trained, unused in run_ranks(2, body):
        if not before:
            pytest.skip("this torch gives gloo's threads no names")
        assert before == [os.SCHED_OTHER]
        assert trained == [os.SCHED_BATCH]
        assert sorted(unused) == [os.SCHED_OTHER, os.SCHED_BATCH]


def test_the_choice_of_a_user_stays() -> None:
    def body(rank: int, world_size: int) -> None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
        train()
        assert set(policies()) <= {os.SCHED_IDLE}

    run_ranks(2, body)


def test_where_it_is_forbidden_all_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*args: Any) -> None:
        raise PermissionError("no")

    def body(rank: int, world_size: int) -> None:
        assert_same(train(), torch.ones(2, 3), 0, 0, "gradient")
        assert set(policies()) <= {os.SCHED_OTHER}

    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    run_ranks(2, body)
