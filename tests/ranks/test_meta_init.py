"""Tests models that are built on meta, sharded there, and given memory and values afterwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy, fully_shard, set_checks
from fsdp2.engine.state import require_state
from fsdp2.parameters.empty_memory import is_marked
from helpers import (
    assert_same,
    assert_same_names,
    assert_shard_of,
    full,
    leaves,
    own_rows,
    run_checks,
    run_ranks,
    shard_batch,
    world_sizes,
)
from models import Experts, OddMLP, TinyGPT, TinyLSTM, TinyModel, mean_loss

ROWS = 12


class Buffered(TinyModel):
    """A parameter, a buffer that is saved and one that is not; all are filled by `reset_parameters` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5))
        self.register_buffer("scale", torch.empty(5))
        self.register_buffer("shift", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.125)
            self.scale.copy_(torch.arange(5))
            self.shift.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.weight.T + self.shift


def whole(model: nn.Module) -> None:
    fully_shard(model)


def on_meta(build: Callable[[], TinyModel], wrap: Callable[[nn.Module], None]) -> TinyModel:
    with torch.device("meta"):
        model = build()
    wrap(model)
    assert all(p.is_meta for p in model.parameters())
    return model


def distributed(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a plain model as its sharded twin would have it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: distribute_tensor(value, mesh, [Shard(0)]) if name in parameters else value.clone()
        for name, value in model.state_dict().items()
    }


def trains_like(sharded: TinyModel, plain: TinyModel) -> None:
    """Bitwise on 1 rank, else within rounding. The optimizer is built from what is registered now."""
    tolerance = (0.0, 0.0) if dist.get_world_size() == 1 else (2e-5, 1e-6)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True) for model in (plain, sharded)]
    for step in range(2):
        batch = plain.example(rows=ROWS, seed=step)
        mean_loss(plain(batch)).backward()
        mean_loss(sharded(shard_batch(batch, dist.get_rank(), dist.get_world_size()))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected, actual = dict(plain.named_parameters()), dict(sharded.named_parameters())
        assert_same_names(actual, expected)
        for name, p in expected.items():
            assert_shard_of(actual[name], p, *tolerance, f"step {step}, {name}")


BUILDS: list[Callable[[], TinyModel]] = [OddMLP, TinyGPT, lambda: TinyGPT(tied=True), TinyLSTM, Experts, Buffered]


def loaded_by_assignment() -> None:
    for build in BUILDS[:-1]:
        for wrap in (whole, leaves) if build is not BUILDS[2] else (whole,):
            plain = build()
            sharded = on_meta(build, wrap)
            sharded.load_state_dict(distributed(plain), assign=True)
            trains_like(sharded, plain)


def loaded_by_assignment_of_whole_tensors() -> None:
    """A full state dict on every rank: each keeps its rows. The optimizer is built before the first forward."""
    plain = OddMLP()
    sharded = on_meta(OddMLP, leaves)
    sharded.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    trains_like(sharded, plain)


def given_memory_then_loaded() -> None:
    for build in BUILDS:
        plain = build()
        sharded = on_meta(build, whole)
        sharded.to_empty(device="cpu")
        if build is Buffered:
            sharded.shift.fill_(0.5)  # in no state dict
        sharded.load_state_dict(distributed(plain))
        trains_like(sharded, plain)


def given_memory_then_initialised() -> None:
    """By the modules' own code, which sees DTensors; and into the very tensors that the next gather reads."""
    plain = Buffered()
    sharded = on_meta(Buffered, whole)
    sharded.to_empty(device="cpu")
    sharded.reset_parameters()
    assert_same(sharded.scale, plain.scale, 0, 0, "scale")
    trains_like(sharded, plain)


def given_memory_group_by_group() -> None:
    """As trainers do that fill one block at a time; the optimizer exists already."""
    plain = TinyGPT()
    sharded = on_meta(TinyGPT, leaves)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, foreach=True)
    for name, module in sharded.named_modules():
        if module._parameters:
            module.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for attribute, p in module._parameters.items():
                    if p is not None:
                        value = getattr(plain.get_submodule(name), attribute)
                        p.copy_(distribute_tensor(value.detach(), p.device_mesh, [Shard(0)]))
    registered = dict.fromkeys(sharded.parameters())
    assert all(p in registered for p in optimizer.param_groups[0]["params"])
    trains_like(sharded, plain)


def given_memory_again() -> None:
    """`to_empty` of a model that has trained already."""
    plain = OddMLP()
    sharded = copy.deepcopy(plain)
    whole(sharded)
    mean_loss(sharded(sharded.example(rows=2, seed=0))).backward()
    sharded.zero_grad()
    sharded.to_empty(device="cpu")
    sharded.load_state_dict(distributed(plain))
    trains_like(sharded, plain)


def still_on_meta_at_the_first_forward() -> None:
    """Every parameter that is still there is named; when they have values, the same model works."""
    plain = TinyGPT()
    sharded = on_meta(TinyGPT, lambda model: [fully_shard(model.blocks[1]), fully_shard(model)])
    for _ in range(2):
        expected = r"embed\.weight on meta, blocks\.0\.norm1\.weight on meta.*to_empty"
        with pytest.raises(RuntimeError, match=expected) as error:
            sharded(plain.example(rows=2, seed=0))
    assert "blocks.1" not in str(error.value), "another group's"
    sharded.to_empty(device="cpu")
    sharded.load_state_dict(distributed(plain))
    trains_like(sharded, plain)


def one_parameter_still_on_meta() -> None:
    plain = OddMLP()
    sharded = on_meta(OddMLP, whole)
    state = distributed(plain)
    missing = {"narrow.bias": state.pop("narrow.bias")}
    sharded.load_state_dict(state, assign=True, strict=False)
    with pytest.raises(RuntimeError, match=r"cpu.* got narrow\.bias on meta\."):
        sharded(plain.example(rows=2, seed=0))
    sharded.load_state_dict(missing, assign=True, strict=False)
    trains_like(sharded, plain)


def buffers_still_on_meta() -> None:
    """Those of the group that runs are named; of buffers without elements there is nothing to give."""
    plain = Buffered()
    sharded = on_meta(Buffered, whole)
    sharded.register_buffer("cache", torch.empty(0, device="meta"), persistent=False)
    outer = fully_shard(nn.Sequential(sharded))
    sharded.load_state_dict(distributed(plain), assign=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expected buffers on cpu, got 0\.shift on meta\."):
            outer(plain.example(rows=2, seed=0))
    sharded.shift = plain.shift.clone()
    trains_like(sharded, plain)


class Kinds(nn.Module):
    """Buffers of several dtypes, below a module that has none."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"real": torch.float32, "short": torch.bfloat16, "complex": torch.complex64, "long": torch.int64}
        self.inner: Any = nn.Module()
        for name, dtype in {**kinds, "byte": torch.uint8, "flag": torch.bool}.items():
            self.inner.register_buffer(f"{name}_", torch.ones(3, dtype=dtype))
        self.inner.index = nn.Parameter(torch.ones(5, dtype=torch.int64), requires_grad=False)


def what_nobody_has_written_to_is_known() -> None:
    """Of each dtype but bools. Writing through `.data`, by a collective, or another tensor in its place is enough."""
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(Kinds()))
    model.to_empty(device="cpu")
    inner, group = model[0].inner, require_state(model).groups[0]
    assert is_marked(inner.index)
    names = {id(buffer): name for name, buffer in inner.named_buffers()}
    found = [names[id(each)] for each in group.empty.unwritten_buffers()]
    assert found == ["real_", "short_", "complex_", "long_", "byte_"]
    inner.real_.fill_(float("nan"))
    inner.short_.data.zero_()
    inner.complex_ = torch.ones(3)
    dist.broadcast(inner.long_ if dist.get_rank() else inner.long_.data.zero_(), 0)
    assert [each.dtype for each in group.empty.unwritten_buffers()] == [torch.uint8]


def metadata_is_right_on_meta_and_after() -> None:
    """Global shape and stride, placement, and a local shape as torch.chunk gives it; empty on some ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for build in BUILDS:
        plain = build()
        sharded = on_meta(build, whole)
        for stage in ("meta", "empty", "loaded", "forward"):
            if stage == "empty":
                sharded.to_empty(device="cpu")
            elif stage == "loaded":
                sharded.load_state_dict(distributed(plain))
                if build is Buffered:
                    sharded.shift.fill_(0.5)  # in no state dict
            elif stage == "forward":
                sharded(plain.example(rows=2, seed=0))
            assert_same_names(sharded.state_dict(), plain.state_dict())
            for name, p in plain.named_parameters():
                ours = sharded.get_parameter(name)
                assert isinstance(ours, nn.Parameter)
                assert isinstance(ours, DTensor)
                assert (ours.shape, ours.stride(), ours.dtype) == (p.shape, p.stride(), p.dtype), (stage, name)
                assert ours.placements == (Shard(0),)
                local = ours.to_local()
                assert local.shape == own_rows(p, rank, world_size).shape, (stage, name)
                assert local.is_contiguous()
                assert ours.requires_grad
                assert ours.is_leaf


CHECKS = [
    loaded_by_assignment,
    loaded_by_assignment_of_whole_tensors,
    given_memory_then_loaded,
    given_memory_then_initialised,
    given_memory_group_by_group,
    given_memory_again,
    still_on_meta_at_the_first_forward,
    one_parameter_still_on_meta,
    buffers_still_on_meta,
    what_nobody_has_written_to_is_known,
    metadata_is_right_on_meta_and_after,
]


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_meta_init(world_size: int) -> None:
    run_checks(world_size, [(check.__name__, check) for check in CHECKS])


def test_the_default_device_is_not_where_ranks_communicate() -> None:
    """Whatever it is: numbers that ranks compare, and what carries them, are where their backend is."""

    def body(_: int, world_size: int) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for norm, policy in ((nn.BatchNorm1d(8), MixedPrecisionPolicy()), (nn.LayerNorm(8), bf16)):
            model: Any = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 3))
            with torch.device("meta"):
                fully_shard(model[0], mesh=mesh, mp_policy=policy)
                fully_shard(model, mesh=mesh, mp_policy=policy)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for level in (0, 1):
                    set_checks("debug" if level else "default")
                    model(torch.ones(4, 8, device="cpu")).float().sum().backward()
                    optimizer.step()
            assert all(full(param).isfinite().all() for param in model.parameters())

    run_ranks(2, body)
