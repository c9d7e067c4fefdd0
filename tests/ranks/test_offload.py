"""Tests CPUOffloadPolicy with a device whose copies arrive late (see simulated_device.py), and optimizers in backward.

A reader that does not wait for a copy computes with NaN, and a write to memory that is still being copied is an error.
Optimizers step in backward with and without offload.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, full_params
from fsdp2.devices.write_notices import notices
from fsdp2.engine import buckets
from helpers import assert_same, full, run_ranks
from scenarios import WIDTH, MayFail, Net, Run, check, loss_of, sgd
from simulated_device import SimulatedTransfers, simulated_device

OFFLOAD = CPUOffloadPolicy()


@contextmanager
def offloaded(
    run: Run, model: Any, mesh: tuple[int, int] | None = None, **options: Any
) -> Iterator[SimulatedTransfers]:
    """In it, the children and blocks of `model` are groups whose shards rest apart from the stand-in."""
    with simulated_device() as transfers:
        if run.sharded:
            options |= {"offload_policy": OFFLOAD, "mesh": init_device_mesh("cpu", mesh or (run.world_size,))}
        for child in model.children():
            for module in child if isinstance(child, nn.ModuleList) else [child]:
                run.shard(module, **options)
        run.shard(model, **options)
        yield transfers


def show(run: Run, name: str, model: nn.Module, mesh: tuple[int, int] | None) -> None:
    """Every parameter: where there are replicas, as a whole."""
    if mesh is None:
        return run.params(name, model)
    for fqn, param in model.named_parameters():
        run.value(f"{name}: {fqn}", param)
    return None


# ---- copies that are late --------------------------------------------------------------------------------------------


def test_a_step_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that a failed pass has begun are waited for, and come to nothing."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)

    def scenario(run: Run) -> None:
        model = run.build(MayFail)
        with offloaded(run, model):
            optimizer = sgd(model)
            for step, when in enumerate(("", "forward", "backward", "")):
                if when:
                    model.middle[1].when = when
                    with pytest.raises(ValueError, match="on purpose"):
                        loss_of(model(run.batch(seed=step))).backward()
                    model.middle[1].when = ""
                    optimizer.zero_grad()
                    with torch.no_grad():
                        for param in model.parameters():
                            param.mul_(1.25)
                run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario, 2)


WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: [each.mul_(0.5) for each in model.parameters()],
    "in a list": lambda model: torch._foreach_mul_([*model.parameters()], 0.5),
    "through .data": lambda model: [each.data.mul_(0.5) for each in model.parameters()],
    "a row": lambda model: model.head.weight.__setitem__(0, 0.5),
    "a state dict": lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    "its view": lambda model: [each.mul_(0.5) for each in model.state_dict().values()],
    "whole parameters": lambda model: write_whole(model),
    "a step": lambda model: step_by(model, foreach=False),
    "a step on lists": lambda model: step_by(model, foreach=True),
    "the local tensor": lambda model: [each.to_local().mul_(0.5) for each in model.parameters()],
}


def write_whole(model: nn.Module) -> None:
    with full_params(model, writeback=True):
        for param in model.parameters():
            param.mul_(0.5)


def step_by(model: nn.Module, foreach: bool) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach).step()


@pytest.mark.parametrize("way", WRITES)
def test_writes_to_shards_wait_for_their_copies(way: str) -> None:
    """Not before, at the end of a forward; unless somebody has got a local tensor. The stand-in tells who does not."""

    def body(rank: int, size: int) -> None:
        run = Run(rank, size, [])
        model: Any = run.build(Net)
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        with offloaded(run, model) as transfers, torch.no_grad():
            for _ in range(3):
                model(x)
                transfers.log.clear()
                is_seen = notices.are_seen
                WRITES[way](model)
                assert transfers.log.count("host waits") == is_seen
            assert notices.are_seen == (way != "the local tensor")

    run_ranks(2, body)


def test_unshard_by_hand() -> None:
    """What is written to shards after unshard() returned, or its handle did, does not reach the full parameters."""

    def scenario(run: Run, async_op: bool) -> None:
        model = run.build(nn.Linear, 5, 5)
        whole = [param.detach().clone() for param in model.parameters()]
        with offloaded(run, model):
            params = list(model.parameters())
            if isinstance(model, FSDPModule):
                handle = model.unshard(async_op)
                if handle is not None:
                    handle.wait()
            with torch.no_grad():
                for param in params:
                    param.zero_()
            for i, (param, before) in enumerate(zip(model.parameters(), whole, strict=True)):
                run.value(f"full {i}", param.detach() if run.sharded else before)
            if isinstance(model, FSDPModule):
                model.reshard()
            run.params("sharded", model)

    check(scenario, 2, async_op=(False, True))


# ---- optimizers that step in backward --------------------------------------------------------------------------------


class Recomputes(Net):
    """Blocks under activation checkpointing, one of which is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x * self.scale)


def steps_in_backward(
    run: Run, offload: bool, mode: str, mesh: tuple[int, int] | None = None, kind: type[nn.Module] = Net
) -> None:
    model = run.build(kind)
    with offloaded(run, model, mesh) if offload else nullcontext():
        if not offload:
            for module in (*model.blocks, model):
                run.shard(module)
        heads, others = list(model.head.parameters()), [*model.parameters()]
        groups = [{"params": heads, "lr": 0.5}, {"params": [p for p in others if all(p is not h for h in heads)]}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=True)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if run.sharded:
            model.set_optimizer_in_backward(optimizer)
            model.set_manual_backward_finalization(mode == "by hand")
        for step in range(3):
            if mode == "accumulation":
                run.set_sync(model, False)
                loss_of(model(run.batch(seed=step + 10))).backward()
                run.set_sync(model, True)
            loss = loss_of(model(run.batch(seed=step)))
            loss.backward()
            run.mean("loss", loss)
            if not run.sharded:
                optimizer.step()
                optimizer.zero_grad()
            elif mode == "by hand":
                with torch.no_grad():
                    model(run.batch(seed=7))  # in which no shard may be read while it is being stepped on
                model.finalize_backward()
            schedule.step()
            show(run, f"step {step}", model, mesh)


@pytest.mark.parametrize(
    ("world_size", "modes"), [(1, ("", "by hand")), (2, ("", "accumulation", "by hand")), (3, ("",))]
)
def test_an_optimizer_that_steps_in_backward(world_size: int, modes: tuple[str, ...]) -> None:
    """As exact as one that steps after it; parameter groups, schedules and accumulation work as ever."""
    check(steps_in_backward, world_size, offload=(True, False), mode=modes)


def test_an_optimizer_that_steps_in_backward_with_replicas_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is gathered again only when none of its shards is being stepped on."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)
    check(steps_in_backward, 2, offload=(True, False), mode=("accumulation",), mesh=((2, 1),), kind=(Net, Recomputes))


def test_steps_in_backward_with_gradients_sent_in_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of a gradient, which arrives on the thread that computes, ends in no step beside the others'."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 16)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)

    def trained(run: Run, in_backward: bool) -> tuple[list[Tensor], set[int]]:
        model, threads = run.build(Net), set()
        with offloaded(run, model, mp_policy=policy):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def note(*_: Any) -> None:
                threads.add(threading.get_ident())
                time.sleep(0.002)  # in which the optimizer has some of its parameters only

            optimizer.register_step_pre_hook(note)
            model.set_optimizer_in_backward(optimizer if in_backward else None)
            for step in range(3):
                loss_of(model(run.batch(seed=step))).backward()
                if not in_backward:
                    optimizer.step()
                    optimizer.zero_grad()
            return [full(param) for param in model.parameters()], threads

    def body(rank: int, world_size: int) -> None:
        run = Run(rank, world_size, [])
        expected, _ = trained(run, in_backward=False)
        params, threads = trained(run, in_backward=True)
        assert threads
        assert threading.get_ident() not in threads
        for i, (param, after) in enumerate(zip(params, expected, strict=True)):
            assert_same(param, after, 0, 0, f"parameter {i}")

    run_ranks(2, body)


def test_a_step_after_an_error_amid_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been stepped on stays so, on all ranks alike; the next pass is exact from there."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)

    def body(rank: int, world_size: int) -> tuple[int, list[str]]:
        run = Run(rank, world_size, [])
        model, plain = run.build(MayFail), run.build(MayFail)
        names = [name for name, _ in model.named_parameters()]
        with offloaded(run, model):
            model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.25))
            model.middle[1].when = "backward"
            before = [full(param) for param in model.parameters()]
            with pytest.raises(ValueError, match="on purpose"):
                loss_of(model(run.batch(seed=0))).backward()
            model.middle[1].when = ""
            for param, whole in zip(plain.parameters(), map(full, model.parameters()), strict=True):
                param.data.copy_(whole)
            stepped = sum(not torch.equal(p, old) for p, old in zip(plain.parameters(), before, strict=True))
            loss_of(plain(Run().batch(seed=1))).backward()
            torch.optim.SGD(plain.parameters(), lr=0.25).step()
            loss_of(model(run.batch(seed=1))).backward()
            after = [full(param) for param in model.parameters()]
        wrong = [n for n, p, q in zip(names, plain.parameters(), after, strict=True) if not torch.allclose(p, q)]
        return stepped, wrong

    for stepped, wrong in run_ranks(2, body):
        assert not wrong
        assert 0 < stepped <= 4, "of the last module's parameters"
