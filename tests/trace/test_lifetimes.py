"""Tests that no model outlives its deletion, whatever it went through: it would keep its shards on the device."""

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.checks import watch
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.root import Root
from fsdp2.features import large_submodules
from helpers import NIGHTLY, fake_world, full
from models import CausalBlock, TinyGPT, mean_loss

RANKS = 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class FailedError(Exception):
    """Is raised on purpose."""


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


class ScaledBlock(CausalBlock):
    """Has a parameter of its own: from there it is one step to the group, from those of submodules there is no way."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Model(TinyGPT):
    """Has an embedding and a head that are large enough for groups of their own, beside its blocks."""

    vocab = 64

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.blocks = nn.ModuleList(ScaledBlock(6, 2) for _ in range(2))


def build(tied: bool = False, on_meta: bool = False, **options: Any) -> Any:
    with torch.device("meta" if on_meta else "cpu"):
        model = Model(tied)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: Any, *optimizers: torch.optim.Optimizer, steps: int = 2) -> Any:
    for seed in range(steps):
        mean_loss(model(model.example(rows=2, seed=seed))).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return model


def given_empty_memory() -> Any:
    """Nobody writes to it where a version counter would tell: so do collectives that initialise."""
    model = build(on_meta=True)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.to_local().data.zero_()
    return train(model)


def given_empty_memory_and_never_run() -> Any:
    model = build(on_meta=True)
    model.to_empty(device="cpu")
    return model


def loaded_by_assignment() -> Any:
    model = build(on_meta=True)
    model.load_state_dict(Model().state_dict(), assign=True)
    return train(model)


def untied_by_loading() -> Any:
    """The parameter has a name in the sharded module itself, too."""
    model = Model()
    model.alias = model.norm.weight
    fully_shard(model)
    loaded = {name: torch.full_like(value, i) for i, (name, value) in enumerate(model.state_dict().items())}
    whole = {name: full(value) for name, value in loaded.items()}
    model.load_state_dict(whole, assign=True)
    return model


def whose_state_dict_failed() -> Any:
    """Between unshard and reshard, so that sharded parameters are registered for it."""
    model = train(build())
    model.blocks[0].unshard()
    model.blocks[0].norm1.register_state_dict_post_hook(raise_failed)
    with suppress(FailedError):
        model.blocks[0].state_dict()
    return model


def raise_failed(*_: Any) -> None:
    raise FailedError


def whose_forward_failed() -> Any:
    model = train(build())
    handle = model.blocks[1].register_forward_pre_hook(raise_failed)
    with suppress(FailedError):
        model(model.example(rows=2, seed=0))
    handle.remove()
    return model


def whose_backward_failed() -> Any:
    model = train(build())
    handle = model.blocks[0].norm1.register_full_backward_hook(raise_failed)
    loss = mean_loss(model(model.example(rows=2, seed=0)))
    with suppress(FailedError):
        loss.backward()
    handle.remove()
    return model


def in_the_middle_of_a_forward() -> Any:
    model = train(build())
    model(model.example(rows=2, seed=0))
    return model


def with_gradients_that_wait() -> Any:
    model = build()
    model.set_requires_gradient_sync(False)
    mean_loss(model(model.example(rows=2, seed=0))).backward()
    return model


def recomputed() -> Any:
    model = build()
    for block in model.blocks:
        block.forward = CheckpointedForward(block.forward)
    return train(model)


class CheckpointedForward:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(self.forward, x, use_reentrant=False)


def stepped_in_backward() -> Any:
    model = build()
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    return train(model)


def with_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], Any]:
    def run() -> Any:
        model = build()
        return train(model, make(model.parameters(), **options))

    return run


def flattened() -> Any:
    model = build()
    return train(model, fsdp2.flatten_optimizer(torch.optim.AdamW(model.parameters())))


def clipped() -> Any:
    model = build()
    mean_loss(model(model.example(rows=2, seed=0))).backward()
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    return model


def conditional() -> Any:
    model = Model()
    for block in model.blocks:
        fully_shard(block, conditional=True)
    return train(fully_shard(model))


def copied() -> Any:
    model = train(build())
    return train(copy.deepcopy(model))


class ReadsItsHead(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(self.embed(tokens)), self.head.weight)


def read_outside_its_module() -> Any:
    """The head has a group of its own, and the model reads its weight."""
    model = ReadsItsHead()
    for block in model.blocks:
        fully_shard(block)
    return train(fully_shard(model))


def with_whole_parameters() -> Any:
    model = train(build())
    with fsdp2.full_params(model):
        pass
    return model


def described() -> Any:
    model = train(build())
    str(fsdp2.describe(model))
    return model


def replicas() -> Any:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    return train(build(mesh=mesh, mp_policy=BF16))


def averaged() -> Any:
    model = build()
    average = fsdp2.AveragedModel(model)
    train(model)
    average.update_parameters(model)
    return model


def stepped_on_whole_matrices() -> Any:
    model = build()
    return train(model, fsdp2.muon(fsdp2.split_matrices(model, exclude=["embed*", "head*"]).matrices))


def streamed() -> Any:
    model = train(build())
    for _ in fsdp2.stream_full_params(model):
        pass
    return model


def checked() -> Any:
    model = train(build())
    fsdp2.check(model)
    return model


def saved() -> Any:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state, _ = get_state_dict(model, optimizer)
    set_model_state_dict(model, state)
    return train(model, optimizer)


def compiled() -> Any:
    model = build()
    for block in model.blocks:
        block.compile(backend="eager")
    train(model)
    torch._dynamo.reset()
    return model


def storage_kept() -> Any:
    model = build()
    model.set_keep_unsharded_storage(True)
    return train(model)


def frozen() -> Any:
    model = build()
    train(model)
    model.blocks.requires_grad_(False)
    return train(model)


def cast_to_another_dtype() -> Any:
    return train(train(build()).double())


def profiled() -> Any:
    model = build()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(model)
    return model


PROGRAMS: dict[str, Callable[[], Any]] = {
    "trained": lambda: train(build()),
    "bf16": lambda: train(build(mp_policy=BF16)),
    "kept for backward": lambda: train(build(reshard_after_forward=False)),
    "resharded to fewer ranks": lambda: train(build(reshard_after_forward=2)),
    "offloaded": lambda: train(build(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "SGD": with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW, foreach": with_optimizer(torch.optim.AdamW, foreach=True),
    **{
        program.__name__.replace("_", " "): program
        for program in (
            *(given_empty_memory, given_empty_memory_and_never_run, loaded_by_assignment, untied_by_loading),
            *(whose_state_dict_failed, whose_forward_failed, whose_backward_failed, in_the_middle_of_a_forward),
            *(with_gradients_that_wait, recomputed, stepped_in_backward, flattened, clipped, conditional, copied),
            *(read_outside_its_module, with_whole_parameters, described, replicas, averaged),
            *(stepped_on_whole_matrices, streamed, checked, saved, compiled, storage_kept, frozen),
            *(cast_to_another_dtype, profiled),
        )
    },
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo reads it
@pytest.mark.parametrize("checks", ["default", "off"] if NIGHTLY else ["default"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_model_goes_with_its_last_reference(name: str, checks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do its groups, with the memory of its shards, and all copies of it."""
    monkeypatch.setattr(large_submodules, "MIN_BYTES", 64)
    fsdp2.set_checks(checks)
    try:
        gc.collect()
        before = {*alive()}
        model = PROGRAMS[name]()
        reference = weakref.ref(model)
        assert {*alive()} - before
        del model
        gc.collect()
    finally:
        fsdp2.set_checks("default")
    assert reference() is None
    assert not {*alive()} - before, "its groups are alive"


def alive() -> list[int]:
    return [id(each) for each in gc.get_objects() if issubclass(type(each), Root | FSDPParamGroup)]


@contextmanager
def without_collections() -> Iterator[list[Any]]:
    """Yields a list of what only the garbage collector can free of the work inside; programs turn it off for speed."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


STEPPED = ("bf16", "kept for backward", "offloaded", "recomputed", "flattened", "clipped", "conditional", "streamed")


@pytest.mark.parametrize("name", [*STEPPED, "stepped in backward", "replicas", "frozen"])
def test_steps_leave_no_tensor_to_the_garbage_collector(name: str) -> None:
    """Also those in which checks are due."""
    model = PROGRAMS[name]()
    with without_collections() as garbage:
        train(model, steps=9)
    assert not [each for each in garbage if isinstance(each, torch.Tensor | FrameType)]


def test_looks_at_other_threads_leave_nothing_to_the_garbage_collector() -> None:
    """The thread that watches idle ranks looks at what all of them run, twice a second, with all their tensors."""
    assert dist.group.WORLD is not None
    watched = watch.Watch(dist.group.WORLD)

    def look_later() -> None:
        time.sleep(0.05)  # this thread waits then: frames that return meanwhile are another matter
        watched._threads.add(threading.get_ident())  # of a thread that has ended, and whose number this one has got
        watched.look()

    def look() -> None:
        thread = threading.Thread(target=look_later)
        thread.start()
        thread.join()

    def compute() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(4)
        look()
        return weakref.ref(tensor)

    with mock.patch.object(watch, "WAIT_S", 0.0), without_collections() as garbage:
        look()  # notes how many collectives were begun
        assert compute()() is None
    assert not [each for each in garbage if isinstance(each, FrameType)]
