"""Tests that what the engine sends and fills lies in memory that the communicator knows, if a user asks for it."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.collectives import choose as collectives
from fsdp2.collectives import comm_memory
from fsdp2.collectives.coalesced import CoalescedComm
from helpers import fake_world
from known_memory import KnownMemory
from models import TinyGPT, mean_loss


class Pool(KnownMemory, comm_memory.PoolMemory):
    """Is a pool without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.joined = torch.device("cpu"), 0

    def join(self, comm: Any) -> None:
        self.joined += 1


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)])
def test_all_that_a_step_sends_and_fills_lies_there(policy: MixedPrecisionPolicy) -> None:
    """Gradients, too, which are otherwise reduced from where autograd has put them. Not once it is switched off."""
    pool, seen = Pool(), list[bool]()

    def watched(name: str) -> Any:
        usual = getattr(CoalescedComm, name)

        def call(comm: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *rest: Any) -> Any:
            seen.extend(pool.has(each) for each in (*outputs, *inputs) if each.numel())
            return usual(comm, outputs, inputs, *rest)

        return mock.patch.object(CoalescedComm, name, call)

    with fake_world(4), mock.patch.object(collectives, "pool_of_group", return_value=pool):
        model: Any = TinyGPT(dim=96)
        sharded = [fully_shard(each, mp_policy=policy) for each in (*model.blocks, model)]
        for enable in (True, False):
            for each in sharded:
                each.set_allocate_memory_from_process_group_for_comm(enable)
            mean_loss(model(model.example(rows=2, seed=0))).backward()
            seen.clear()
            model.zero_grad()
            with watched("all_gather"), watched("reduce_scatter"):
                mean_loss(model(model.example(rows=2, seed=1))).backward()
            assert len(seen) > 8
            assert all(seen) if enable else not all(seen)
    assert pool.joined >= len(sharded)
