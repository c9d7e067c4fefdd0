"""Tests many steps, with errors, evaluation, accumulation and state dicts between them, for leaks.

FSDP2_NIGHTLY=1 python -m pytest tests/ranks/test_soak.py    # 2,000 steps, in place of 60
"""

import gc
import os
import threading
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import clip_grad_norm_, fully_shard
from helpers import NIGHTLY, run_ranks, shard_batch
from scenarios import WIDTH, MayFail, loss_of

STEPS = 2000 if NIGHTLY else 60
WARM_UP = 20
RESIDENT_BYTES = 4 * 1024 * 1024
"""For what allocators keep. A leak of 2 KB a step shows in 2,000 steps; one of Python's objects in any."""
ERRORS = ("", "", "forward", "", "backward")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    fails: nn.Module = model.middle[1]  # type: ignore[index, assignment]
    fails.when = ERRORS[number % len(ERRORS)]
    batch = shard_batch(torch.randn(2 * size, WIDTH, generator=torch.Generator().manual_seed(number)), rank, size)
    with suppress(ValueError):
        for part, rows in enumerate(batch.split(1)):
            model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            loss_of(model(rows)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    fails.when = ""
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch)
    loss_of(model(batch))  # a graph that nobody uses
    model.unshard()  # type: ignore[operator]
    model.reshard()  # type: ignore[operator]
    model.load_state_dict(model.state_dict())


def held() -> dict[str, int]:
    gc.collect()
    objects = gc.get_objects()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident bytes": resident,
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python's threads": threading.active_count(),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "objects": len(objects),
        "tensors": sum(isinstance(each, torch.Tensor) for each in objects),
    }


def test_nothing_grows_from_step_to_step() -> None:
    def body(rank: int, _: int) -> tuple[dict[str, int], dict[str, int]]:
        torch.manual_seed(1)
        model = MayFail()
        for module in (model.first, model.middle, model.last, model):
            fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)
        for number in range(WARM_UP):
            step(model, optimizer, number)
        before = held()
        for number in range(WARM_UP, STEPS):
            step(model, optimizer, number)
        return before, held()

    for before, after in run_ranks(2, body, timeout=170):
        growth = {name: after[name] - before[name] for name in before}
        assert growth.pop("resident bytes") < RESIDENT_BYTES, (before, after)
        if torch.__version__ < "2.13":
            # Before, tuples of DTensorSpecs gather, four a step, which no Python object refers to: DTensor's own cache.
            del growth["objects"]
        grown = {name: more for name, more in growth.items() if more > 0}
        assert not grown
