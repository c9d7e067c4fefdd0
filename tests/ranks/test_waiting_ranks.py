"""Tests ranks that wait for each other in different collectives: those in fsdp2's raise within seconds, and say where
the other is. The process group's timeout is half an hour.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional  # type: ignore[attr-defined]

from fsdp2 import fully_shard, replicate
from fsdp2.checks import watch
from helpers import assert_same, full, one_mesh, run_checks, run_ranks

SOON_S = 10
LATE_S = 4


class Net(nn.Module):
    """`leaves`: the loss does not depend on the first layer, whose gradients are reduced last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.leaves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.second(x.detach() if self.leaves else x))


def build(shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    for layer in (model.first, model.second):
        shard(layer, **options)
    return shard(model, **options)


def loss_of(model: Any) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().sum()


def step(model: Any) -> None:
    loss_of(model).backward()


# What a rank calls by itself, and what the others' error says about it.


def barrier() -> None:
    dist.barrier()


def all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


def waits_later() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()  # type: ignore[union-attr]


def all_reduce_functional() -> None:
    functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).add(1)


def broadcast_object_list() -> None:
    dist.broadcast_object_list([None], src=0)


HERE = r"test_waiting_ranks\.py:\d+"
OWN: dict[Callable[[], None], str] = {
    barrier: rf"in barrier, called at {HERE} \(barrier\)",
    all_reduce: rf"in all_reduce, called at {HERE} \(all_reduce\)",
    waits_later: rf"at {HERE} \(waits_later\)",
    all_reduce_functional: rf"at {HERE} \(all_reduce_functional\)",
    broadcast_object_list: rf"in broadcast_object_list, called at {HERE} \(broadcast_object_list\)",
}


def own_of(model: Any, is_alone: bool, own: Callable[[], None]) -> None:
    """One rank raises in its loss, and catches; the others are told in backward. All come to `own`."""
    loss = loss_of(model)
    if not is_alone:
        told = "|out of step with others, see its error" if dist.get_world_size() == 4 else ""
        with pytest.raises(RuntimeError, match=f"rank 1: blocked {OWN[own]}{told}"):
            loss.backward()
    own()


def check_recovery(make: Callable[[], Any], stray: Callable[[Any, bool], object]) -> None:
    """Rank 1 goes astray twice; then all train on."""
    rank, model = dist.get_rank(), make()
    step(model)
    expected = [full(param.grad) for param in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        start = time.monotonic()
        stray(model, rank == 1)
        assert time.monotonic() - start < SOON_S
    model.zero_grad()
    step(model)
    for param, want in zip(model.parameters(), expected, strict=True):
        assert_same(full(param.grad), want, 1e-6, 1e-7, "gradient of the next step")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_that_raises_and_waits_in_a_collective_of_its_own(world_size: int) -> None:
    """On four ranks: HSDP. A rank of the other replica may hear of it by one that was told."""

    def make() -> Any:
        return build(**({"mesh": one_mesh((2, 2), ("replicate", "shard"))} if world_size == 4 else {}))

    own = OWN if world_size == 2 else [barrier]
    checks = [(each.__name__, partial(check_recovery, make, partial(own_of, own=each))) for each in own]
    run_checks(world_size, checks, timeout=60)


def others_try_again(model: Any, is_alone: bool) -> None:
    """It stays where it is while the others go on to the next step: they are told again."""
    loss = loss_of(model)
    for attempt in () if is_alone else (loss.backward, partial(step, model)):
        with pytest.raises(RuntimeError, match=f"rank 1: blocked {OWN[barrier]}"):
            attempt()
    barrier()


def clips_alone(model: Any, is_alone: bool) -> None:
    """torch's function, which takes all ranks: the others are in the next forward, and all raise there."""
    step(model)
    if is_alone:
        nn.utils.clip_grad_norm_(model.parameters(), 1)
    where = rf"blocked in clip_grad_norm_, called at {HERE} \(clips_alone\)"
    with pytest.raises(RuntimeError, match=f"rank 0: (gathering root|all-reducing what).*; rank 1: {where}"):
        step(model)
    if not is_alone:
        nn.utils.clip_grad_norm_(model.parameters(), 1)


def leaves_out_what_is_reduced_last(model: Any, is_alone: bool) -> None:
    """Its backward ends while others wait for gradients that it does not have. It is told so in its next step."""
    model.leaves = is_alone
    if is_alone:
        step(model)
    else:
        with pytest.raises(RuntimeError, match=_LEFT):
            step(model)
    model.leaves = False
    all_reduce()
    if is_alone:
        with pytest.raises(RuntimeError, match=_LEFT):
            step(model)


_LEFT = rf"rank 0: (reducing|summing replicas of) first.*; rank 1: blocked in all_reduce, called at {HERE}"


def shards_another(model: Any, is_alone: bool) -> None:
    """An error that one rank alone has in fully_shard, at which others wait for it. It is told so in its next step."""
    other, where = nn.Linear(4, 4), rf"rank 1: blocked in barrier, called at {HERE} \(shards_another\)"
    if is_alone:
        with pytest.raises(TypeError):
            fully_shard(other, reshard_after_forward="yes")  # type: ignore[call-overload]
    else:
        with pytest.raises(RuntimeError, match=where):
            fully_shard(other)(torch.ones(2, 4))
    dist.barrier()
    if is_alone:
        with pytest.raises(RuntimeError, match=where):
            step(model)
    step(model)


def test_other_ways_to_be_in_another_collective() -> None:
    strays = (others_try_again, clips_alone, leaves_out_what_is_reduced_last, shards_another)
    replicas = partial(build, replicate)
    checks = [(each.__name__, partial(check_recovery, build, each)) for each in strays]
    checks.append(("replicas", partial(check_recovery, replicas, leaves_out_what_is_reduced_last)))
    run_checks(2, checks, timeout=60)


# ---- what may look so, and is not


def in_a_barrier(model: Any, groups: Any, late: bool) -> None:
    """Rank 0 waits in a gather for rank 1, which waits in a barrier for rank 2, which is late."""
    if dist.get_rank() > 0:
        time.sleep(LATE_S if late else 0)
        dist.barrier(groups[0])


def begun_before(model: Any, groups: Any, late: bool) -> None:
    """Rank 1 waits for a sum that rank 0 has begun, and for which rank 2 is late."""
    time.sleep(LATE_S if late else 0)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if dist.get_rank() > 0:
        assert work is not None
        work.wait()


def received(model: Any, groups: Any, late: bool) -> None:
    """Rank 1 waits for a message of rank 2, which is late."""
    if dist.get_rank() == 2:
        time.sleep(LATE_S)
        dist.send(torch.ones(2), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(2), 2)


def by_a_thread(model: Any, groups: Any, late: bool) -> None:
    """A thread of rank 0 comes late to a sum for which rank 1 waits: as one that saves a checkpoint."""

    def communicate() -> None:
        time.sleep(0 if dist.get_rank() else LATE_S)  # its first collective is still to come
        for _ in range(2):
            dist.all_reduce(torch.ones(2), group=groups[1])

    if dist.get_rank() == 0:
        threading.Thread(target=communicate).start()
    elif dist.get_rank() == 1:
        communicate()


def computes(model: Any, groups: Any, late: bool) -> None:
    """Rank 1 has begun a sum that rank 0 has not, and computes."""
    works = []
    if dist.get_rank() == 1:
        works.append(dist.all_reduce(torch.ones(2), group=groups[1], async_op=True))
        time.sleep(LATE_S)
    step(model)
    if dist.get_rank() == 0:
        works.append(dist.all_reduce(torch.ones(2), group=groups[1], async_op=True))
    for work in works:
        work.wait()  # type: ignore[union-attr]


def note_what_is_logged() -> list[str]:
    """Returns a list that gets each message of the library's logger."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp2").addHandler(handler)
    return logged


def test_a_rank_that_waits_long_logs_where_others_are() -> None:
    def body(rank: int, size: int) -> list[str]:
        model, logged = build(), note_what_is_logged()
        step(model)
        with mock.patch.multiple(watch, LOG_S=3, ASK_S=0.1):
            time.sleep(rank * LATE_S)
            step(model)
        return logged

    (text,), none = run_ranks(2, body)
    assert re.fullmatch(rf"rank 0 has waited for \d s in .*; rank 1 is at {HERE} \(body\)", text), text
    assert none == []


def test_ranks_that_wait_in_different_collectives_of_their_own_log_where_they_are() -> None:
    """As after `if rank == 0: get_model_state_dict(model)`: none waits in a collective of fsdp2, and nobody raises."""

    def body(rank: int, size: int) -> list[str]:
        model, logged, group = build(), note_what_is_logged(), dist.new_group([0, 1])
        step(model)
        with mock.patch.multiple(watch, LOG_S=2):
            works = [dist.all_reduce(torch.ones(2), group=group, async_op=True)] if rank == 0 else []
            if rank == 1:
                time.sleep(LATE_S + 2)
                works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
            for work in works:
                work.wait()  # type: ignore[union-attr]
        step(model)
        return logged

    (text,), none = run_ranks(2, body)
    assert re.fullmatch(rf"rank 0 has been at {HERE} \(body\) for \d s; .*", text), text
    assert none == []


def test_ranks_that_are_late_and_come_raise_nothing() -> None:
    def check(stray: Callable[[Any, Any, bool], None]) -> None:
        model = build()
        groups = [dist.new_group([1, 2]), dist.new_group([0, 1])]
        step(model)
        start = time.monotonic()
        with mock.patch.object(watch, "ASK_S", 0.1):
            stray(model, groups, dist.get_rank() == 2)
            step(model)
        assert time.monotonic() - start > LATE_S - 1, "some rank has waited"

    strays = (in_a_barrier, begun_before, received, by_a_thread, computes)
    run_checks(3, [(each.__name__, partial(check, each)) for each in strays])


def test_the_end_of_a_process_waits_for_a_look() -> None:
    """The interpreter would abort the process if it found the thread in a call to the store."""

    class Slow:
        rank = 0

        def look(self) -> bool:
            time.sleep(1.5)  # the machine is busy
            return True

    end = threading.Event()
    thread = threading.Thread(target=watch._run, args=(Slow(), end), daemon=True)
    with mock.patch.object(watch, "PERIOD_S", 0):
        watch._running[thread] = end
        thread.start()
        watch._stop()
    assert not thread.is_alive()
