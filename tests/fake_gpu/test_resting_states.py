"""Tests optimizer states that rest on the CPU, on a simulated device, whose clocks judge the order of all copies.

The oracle is the same optimizer on a second model, with its states on the device: parameters and states have its bits.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fake_gpu
from fake_gpu.training import ROWS_OF_RANK, WIDTH, build, judged
from fsdp2 import CPUOffloadPolicy, checkpoint, flatten_optimizer, muon
from fsdp2.checkpoint import loading
from fsdp2.optim import resting, whole_matrix
from helpers import run_checks, world_sizes

BUCKET = 600
CLASSES: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD, momentum": partial(optim.SGD, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW, amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True, maximize=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "NAdam": partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
}


class Pair:
    """Two models with equal weights on the device, and an optimizer of each. States of the second rest on the CPU."""

    def __init__(self, make: Callable[..., optim.Optimizer], bucket_bytes: int = BUCKET, **options: Any) -> None:
        self.models = [build(**options)[1] for _ in range(2)]
        self.make, self.bucket_bytes = make, bucket_bytes
        self.optimizers: list[Any] = [self.optimizer(0), self.optimizer(1)]

    def optimizer(self, which: int) -> optim.Optimizer:
        named = dict(self.models[which].named_parameters())
        vectors = [p for p in named.values() if p.dim() == 1]
        made = self.make([{"params": [p for p in named.values() if p.dim() != 1]}, {"params": vectors, "lr": 0.05}])
        if which:
            flatten_optimizer(made, offload_states=True, bucket_bytes=self.bucket_bytes)
        return made

    def backward(self, step: int, frozen: str = " ") -> None:
        for model in self.models:
            for name, param in model.named_parameters():
                param.requires_grad_(frozen not in name)
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            model(torch.randn(ROWS_OF_RANK, WIDTH, generator=generator)).square().mean().backward()

    def step(self, step: int, frozen: str = " ") -> None:
        self.backward(step, frozen)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare()

    def compare(self) -> None:
        for (name, one), other in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert torch.equal(one.to_local().cpu(), other.to_local().cpu()), name

    def compare_states(self) -> None:
        one, other = (optimizer.state_dict() for optimizer in self.optimizers)
        assert one["param_groups"] == other["param_groups"]
        assert one["state"].keys() == other["state"].keys()
        for number, state in one["state"].items():
            assert state.keys() == other["state"][number].keys()
            for name, value in state.items():
                found = other["state"][number][name]
                assert torch.equal(local(value).cpu(), local(found).cpu()), (number, name)
                assert type(value) is type(found)
                if value.dim():
                    assert value.placements == found.placements
                    assert value.device_mesh == found.device_mesh
                    assert local(found).device.type == "cpu"


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Counts:
    """Bytes that are copied in each direction, and the most bytes of buckets that the device has."""

    def __init__(self) -> None:
        self.inward = self.outward = self.held = self.peak = 0


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()

    class Counted(resting.StateStream):
        def __init__(self, device: torch.device, buckets: Any) -> None:
            super().__init__(device, buckets)
            counts.held = sum(slot.nbytes for slot in self._slots)
            counts.peak = max(counts.peak, counts.held)
            assert all(tensor.is_pinned() for bucket in buckets for tensor in bucket)

        def _bring(self, number: int) -> None:
            counts.inward += sum(tensor.nbytes for tensor in self._buckets[number])
            super()._bring(number)

        def _send_back(self) -> None:
            if self._used is not None:
                counts.outward += sum(tensor.nbytes for tensor in self._buckets[self._used])
            super()._send_back()

        def close(self) -> None:
            super().close()
            assert not self._slots
            counts.held = 0

    with mock.patch.object(resting, "StateStream", Counted), mock.patch.object(whole_matrix, "StateStream", Counted):
        yield counts


# ---- bits


def trains(make: Callable[..., optim.Optimizer], **options: Any) -> None:
    """Also with parameters that are frozen for a while, an exchange of states, and other rates."""
    with judged():
        pair = Pair(make, **options)
        for step, frozen in enumerate([" ", " ", "blocks.0", "bias", " ", " "]):
            pair.step(step, frozen)
        pair.compare_states()
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = 0.02
        one, other = (optimizer.state_dict() for optimizer in pair.optimizers)
        pair.optimizers[1].load_state_dict(copy.deepcopy(one))
        pair.optimizers[0].load_state_dict(copy.deepcopy(other))
        pair.step(7)
        pair.compare_states()
        pair.step(8)


def test_bits_are_those_of_states_on_the_device() -> None:
    checks = [(name, partial(trains, make)) for name, make in CLASSES.items()]
    adamw = CLASSES["AdamW"]
    checks += [
        ("one bucket", partial(trains, adamw, bucket_bytes=1 << 20)),
        ("a bucket for each parameter", partial(trains, adamw, bucket_bytes=1)),
        ("parameters on the CPU", partial(trains, adamw, offload_policy=CPUOffloadPolicy())),
    ]
    run_checks(2, checks, device=fake_gpu.KIND)


@pytest.mark.parametrize("ranks", world_sizes(3, nightly=[1]))
def test_on_other_numbers_of_ranks(ranks: int) -> None:
    run_checks(ranks, [("AdamW", partial(trains, CLASSES["AdamW"]))], device=fake_gpu.KIND)


def matrices(params: list[dict[str, Any]], nesterov: bool, offload: bool) -> optim.Optimizer:
    chosen = [p for entry in params for p in entry["params"] if p.dim() == 2]
    return muon(chosen, lr=0.02, nesterov=nesterov, bucket_bytes=BUCKET, offload_states=offload)


def muon_trains(nesterov: bool) -> None:
    with judged():
        pair = Pair(CLASSES["SGD, momentum"])
        params = [[{"params": [*model.parameters()]}] for model in pair.models]
        pair.optimizers = [matrices(params[i], nesterov, offload=bool(i)) for i in range(2)]
        for step, frozen in enumerate([" ", "blocks.0", " "]):
            pair.step(step, frozen)
        pair.compare_states()
        one, other = (copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers)
        pair.optimizers[1].load_state_dict(one)
        pair.optimizers[0].load_state_dict(other)
        pair.step(4)
        pair.compare_states()


def steps_in_backward() -> None:
    with judged():
        pair = Pair(CLASSES["AdamW"])
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            model.set_optimizer_in_backward(optimizer)
        for step in range(3):
            pair.backward(step)
            pair.compare()
        pair.compare_states()


def closures() -> None:
    with judged():
        pair = Pair(CLASSES["AdamW"])
        losses = []
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):

            def closure(model: Any = model) -> Tensor:
                loss = model(torch.ones(2, WIDTH)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == losses[1]
        pair.compare()


def a_step_that_fails() -> None:
    """The buckets before it have stepped, and the others not; nothing is lost, and the device keeps no bucket."""
    pair = Pair(CLASSES["AdamW"])
    with judged(), counted() as counts:
        pair.step(0)
        before = copy.deepcopy(pair.optimizers[1].state_dict())
        own, calls = optim.AdamW.step.__wrapped__, []  # type: ignore[attr-defined]

        def fails(optimizer: Any, *args: Any) -> Any:
            calls.append(1)
            result = own(optimizer, *args)
            if len(calls) == 2:
                raise ValueError("on purpose")
            return result

        steps = vars(pair.optimizers[1])["_fsdp2_flat_steps"]
        pair.backward(1)
        with mock.patch.object(steps, "_own_step", fails), pytest.raises(ValueError, match="on purpose"):
            pair.optimizers[1].step()
        assert counts.held == 0
        pair.optimizers[0].step()
        states = [optimizer.state_dict()["state"] for optimizer in pair.optimizers]
        moved = [torch.equal(local(states[1][i]["exp_avg"]), local(states[0][i]["exp_avg"]).cpu()) for i in states[0]]
        kept = [torch.equal(local(states[1][i]["exp_avg"]), local(before["state"][i]["exp_avg"])) for i in states[0]]
        has_rows = [bool(local(states[1][i]["exp_avg"]).numel()) for i in states[0]]
        assert all(a or b for a, b in zip(moved, kept, strict=True))
        assert any(a and not b for a, b in zip(moved, kept, strict=True)), "the first buckets have stepped"
        assert any(b and not a for a, b, c in zip(moved, kept, has_rows, strict=True) if c), "the last have not"


def bytes_are_counted() -> None:
    pair = Pair(CLASSES["AdamW"])
    with counted() as counts:
        pair.step(0)
        assert (counts.inward, counts.outward, counts.held) == (0, 0, 0), "there was nothing to bring"
        for step in range(1, 4):
            counts.inward = counts.outward = counts.peak = 0
            pair.step(step)
            shards = sum(p.to_local().nbytes for p in pair.models[1].parameters())
            padding = sum(p.to_local().nbytes == 0 for p in pair.models[1].parameters())
            assert shards * 2 <= counts.inward == counts.outward <= shards * 2 + 64 * (20 + padding)
            largest = max(p.to_local().nbytes for p in pair.models[1].parameters())
            assert 0 < counts.peak <= 2 * (max(BUCKET, 2 * largest) + 16 * resting._ALIGNMENT)
            assert counts.held == 0


def distributed_checkpoints() -> None:
    pair = Pair(CLASSES["AdamW"])
    pair.step(0)
    # What torch asks of each device's module, before it brings states to the device to gather them.
    asked = mock.patch.object(
        getattr(torch, fake_gpu.KIND), "current_stream", torch.accelerator.current_stream, create=True
    )
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        with asked:
            one, other = (
                get_optimizer_state_dict(m, o, options=options)
                for m, o in zip(pair.models, pair.optimizers, strict=True)
            )
        assert one["state"].keys() == other["state"].keys()
        for name, state in one["state"].items():
            for key, value in state.items():
                assert torch.equal(local(value).cpu(), local(other["state"][name][key]).cpu()), (full, name, key)
    # In memory: writers of files want streams of the simulated device's module.
    fresh = pair.optimizer(1)
    saved = copy.deepcopy(get_optimizer_state_dict(pair.models[0], pair.optimizers[0]))
    set_optimizer_state_dict(pair.models[1], fresh, saved)
    assert all(local(each["exp_avg"]).device.type == "cpu" for each in fresh.state.values())
    pair.optimizers[1] = fresh
    pair.step(1)
    pair.compare_states()
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    checkpoint.save(shared[0], pair.models[1], fresh)
    made, make, fresh = list[Tensor](), loading.make_state, pair.optimizer(1)
    with mock.patch.object(loading, "make_state", lambda *args: made.append(make(*args)) or made[-1]):
        checkpoint.load(shared[0], pair.models[1], fresh)
    assert {local(each).device.type for each in made} == {"cpu"}, "the states were never on the device"
    dist.barrier()
    shutil.rmtree(shared[0], ignore_errors=True)
    pair.optimizers[1] = fresh
    pair.step(2)
    pair.compare_states()
    pair.optimizers[1] = copy.deepcopy(fresh)
    assert type(pair.optimizers[1]) is type(fresh)


def refusals() -> None:
    model = build()[1]
    params = [*model.parameters()]

    class Own(optim.SGD):
        pass

    with pytest.raises(TypeError, match="Own: offload_states calls its step once for each bucket"):
        flatten_optimizer(Own(params, lr=0.1), offload_states=True)
    with pytest.raises(TypeError, match="offload_states: expected a bool, got 1"):
        flatten_optimizer(optim.SGD(params, lr=0.1), offload_states=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"bucket_bytes: expected an int, got 1.5"):
        flatten_optimizer(optim.SGD(params, lr=0.1), bucket_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes: expected a number of bytes above 0, got 0"):
        flatten_optimizer(optim.SGD(params, lr=0.1), bucket_bytes=0)
    flat = flatten_optimizer(optim.SGD(params, lr=0.1))
    assert flatten_optimizer(flat) is flat
    with pytest.raises(ValueError, match="SGD is flat already, and its states stay on the device"):
        flatten_optimizer(flat, offload_states=True)
    offloaded = flatten_optimizer(optim.SGD(params, lr=0.1), offload_states=True)
    assert flatten_optimizer(offloaded, offload_states=True) is offloaded
    with pytest.raises(TypeError, match="offload_states: expected a bool"):
        muon([p for p in params if p.dim() == 2], offload_states=None)  # type: ignore[arg-type]
    adam = optim.Adam(params)
    adam.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match="a graph can't wait for states that rest on the CPU"):
        flatten_optimizer(adam, offload_states=True)
    adam.param_groups[0]["capturable"] = False
    flatten_optimizer(adam, offload_states=True)


def test_other_ways_to_step() -> None:
    checks: list[tuple[str, Callable[[], None]]] = [
        ("muon", partial(muon_trains, True)),
        ("muon without nesterov", partial(muon_trains, False)),
        ("in backward", steps_in_backward),
        ("closures", closures),
        ("failure", a_step_that_fails),
        ("bytes", bytes_are_counted),
        ("distributed checkpoints", distributed_checkpoints),
        ("refusals", refusals),
    ]
    run_checks(2, checks, device=fake_gpu.KIND)
