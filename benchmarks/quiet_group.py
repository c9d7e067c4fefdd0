"""Starts process groups of any size inside one process, for two purposes.

`start_fake_group` is torch's own fake group: every collective passes through the dispatcher, where meters see it.
Since 2.13 its collectives write their outputs rank by rank (an all-gather costs 0.6 us times the world size), which
would hide the host time of the libraries. `start_quiet_group` issues one c10d call that writes nothing instead: the
cost of issuing a collective stays, about 5 us, as with a real backend, and does not grow with the world size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup


class QuietGroup(dist.ProcessGroup):
    """Completes every collective at once and writes no output. It reports itself as backend "fake"."""

    def _issue_single(self, output: Tensor, *_: Any, **__: Any) -> dist.Work:
        return self.broadcast(output, 0)

    def _issue_list(self, outputs: list[Tensor], *_: Any, **__: Any) -> dist.Work:
        return self.allreduce_coalesced(outputs)

    def _issue_nested(self, outputs: list[list[Tensor]], *_: Any, **__: Any) -> dist.Work:
        return self.allreduce_coalesced([tensor for row in outputs for tensor in row])

    # Old and new names of the same call; torch uses one or the other, by version.
    _allgather_base = all_gather_single = _issue_single
    _reduce_scatter_base = reduce_scatter_single = _issue_single
    alltoall_base = all_to_all_single = _issue_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _issue_list
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _issue_list
    alltoall = reduce_scatter = _issue_list
    allgather = allgather_coalesced = _issue_nested


def _create_quiet_group(common: Any, _options: Any) -> QuietGroup:
    group = QuietGroup(common.group_rank, common.group_size)
    backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def start_quiet_group(world_size: int) -> None:
    # Under the name "fake", so that a library treats it as it treats torch's.
    dist.Backend.register_backend("fake", _create_quiet_group, extended_api=True, devices=["cpu"])
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)


def start_fake_group(world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers torch's "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
