"""Tests checkpoints: saved on any number of ranks and loaded on any other, they continue the same training.

The uninterrupted run is a plain model on whole batches. A checkpoint that is loaded on as many ranks as saved it must
continue bitwise like these.
"""

import copy
import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import helpers
import training
from fsdp2 import fully_shard
from helpers import assert_same, assert_same_names, assert_shard_of, full, shard_batch, world_sizes
from models import FrozenMix, OddMLP, TinyGPT, TinyModel, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

TOPOLOGIES = ("1", "2", "3", "2x2 across")
PLACES = {"1": None, "2": None, "3": training.PLACES["various"], "2x2 across": training.PLACES["last"]}
"""Along which dims parameters are cut: others than where they were saved."""
ROWS = 12
BEFORE, AFTER = 2, 1
"""Steps before and after the checkpoint: one shows all of the optimizer's state."""


class WithBuffer(OddMLP):
    """A buffer is in the state dict, too, and belongs to every rank whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.scale *= 1.125
        return super().forward(x * self.scale)


def blocks(model: nn.Module, shard: Callable[..., Any] = fully_shard) -> None:
    for block in getattr(model, "blocks", ()):
        shard(block)
    shard(model)


def on(topology: str) -> Callable[..., Any]:
    """Returns fully_shard on that mesh, which each rank must have made. See `PLACES`."""
    mesh = training.TOPOLOGIES[topology].make()
    return functools.partial(fully_shard, mesh=mesh, shard_placement_fn=PLACES[topology])


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], TinyModel]
    optimizer: Callable[..., torch.optim.Optimizer]

    def plain(self, seed: int = 1) -> TinyModel:
        torch.manual_seed(seed)
        return self.build()

    def make(
        self, seed: int = 1, shard: Callable[..., Any] | None = fully_shard
    ) -> tuple[TinyModel, torch.optim.Optimizer]:
        model = self.plain(seed)
        if shard is not None:
            blocks(model, shard)
        return model, self.optimizer([p for p in model.parameters() if p.requires_grad])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.5, foreach=True)


CASES = [
    Case("uneven, empty shards, buffers", WithBuffer, adamw),
    Case("tied", lambda: TinyGPT(tied=True, depth=1), adamw),
    Case("frozen", FrozenMix, sgd),
]


def train(model: TinyModel, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in range(first, first + steps):
        batch = model.example(rows=ROWS, seed=step)
        mean_loss(model(shard_batch(batch, rank, world_size))).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, whole. Every rank must call it."""
    return {name: full(value).clone() for name, value in model.state_dict().items()}


def assert_values(model: nn.Module, expected: dict[str, Tensor], exact: bool, name: str) -> None:
    actual = values(model)
    assert_same_names(actual, expected)
    tolerance = (0.0, 0.0) if exact else (2e-5, 1e-6)
    for key, value in expected.items():
        assert_same(actual[key], value, *tolerance, f"{name}: {key}")


def uninterrupted(case: Case, steps: int = BEFORE + AFTER) -> tuple[TinyModel, torch.optim.Optimizer]:
    """The plain run, whole batches, although this is one of several ranks."""
    model, optimizer = case.make(shard=None)
    for step in range(steps):
        mean_loss(model(model.example(rows=ROWS, seed=step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def run_checks(world_size: int, checks: list[Callable[[Case, int, int], None]]) -> None:
    """Runs each check with each case."""

    def bound(check: Callable[[Case, int, int], None], case: Case) -> Callable[[], None]:
        return lambda: check(case, dist.get_rank(), world_size)

    named = [(f"{check.__name__} [{case.name}]", bound(check, case)) for check in checks for case in CASES]
    helpers.run_checks(world_size, named)


# ---- from N ranks to M


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every case on every topology, and by torch's own fully_shard on 2 ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def save(kind: str) -> Callable[[Case, int, int], None]:
        def save_and_go_on(case: Case, rank: int, world_size: int) -> None:
            model, optimizer = case.make(shard=torch_fully_shard if kind == "torch2" else on(kind))
            train(model, optimizer, 0, BEFORE)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.save(state, checkpoint_id=folder / f"{kind} {case.name}")
            train(model, optimizer, BEFORE, AFTER)
            result = values(model)
            if rank == 0:
                torch.save(result, folder / f"{kind} {case.name}.result")

        return save_and_go_on

    for topology in TOPOLOGIES:
        run_checks(training.TOPOLOGIES[topology].ranks, [save(topology)])
    run_checks(2, [save("torch2")])
    return folder


def load(case: Case, folder: Path, shard: Callable[..., Any] = fully_shard) -> tuple[TinyModel, torch.optim.Optimizer]:
    """Into a model that was initialised otherwise."""
    model, optimizer = case.make(seed=99, shard=shard)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_saved_on_some_ranks_and_loaded_on_others(topology: str, saved: Path) -> None:
    """Rows, padding, empty shards and optimizer state all lie elsewhere on another mesh; replicas read the same."""

    def load_and_go_on(case: Case, rank: int, world_size: int) -> None:
        expected = values(uninterrupted(case)[0])  # here: torch 2.15 refuses to fork after a backward pass
        others = [each for each in TOPOLOGIES if each != topology]
        shard = on(topology)
        for kind in (topology, *(others if case is CASES[0] else others[-1:]), "torch2"):
            model, optimizer = load(case, saved / f"{kind} {case.name}", shard)
            train(model, optimizer, BEFORE, AFTER)
            assert_values(model, expected, exact=False, name=f"from {kind}")
            if kind == topology:
                same = torch.load(saved / f"{kind} {case.name}.result")
                assert_values(model, same, exact=True, name=f"from {kind}")

    run_checks(training.TOPOLOGIES[topology].ranks, [load_and_go_on])


def test_torch_loads_our_checkpoints(saved: Path) -> None:
    """Same FQNs, global shapes and placements: users may go back."""

    def into_torch(case: Case, rank: int, world_size: int) -> None:
        model, optimizer = load(case, saved / f"2 {case.name}", torch_fully_shard)
        train(model, optimizer, BEFORE, AFTER)
        assert_values(model, values(uninterrupted(case)[0]), exact=False, name="from ours")

    run_checks(3, [into_torch])


def test_a_checkpoint_has_the_size_of_its_tensors(saved: Path) -> None:
    """Local tensors are views of one buffer per group: a careless writer would save the whole buffer for each."""
    for case, topology in itertools.product(CASES, ("2", "2x2 across")):  # each replica is written once
        folder = saved / f"{topology} {case.name}"
        payload = sum(file.stat().st_size for file in folder.glob("*.distcp"))
        model = case.plain()
        states = 3 if case.optimizer is adamw else 2
        elements = sum(p.numel() * (states if p.requires_grad else 1) for p in model.parameters())
        tensors = sum(1 for _ in model.parameters()) * 2 * states
        assert payload < elements * 4 + tensors * 2500, (case.name, topology)  # a torch.save of its own each


# ---- state dicts


def keys_and_metadata_are_those_of_the_plain_model(case: Case, rank: int, world_size: int) -> None:
    plain, (model, optimizer) = case.plain(), case.make()
    for stage in ("new", "trained"):
        state, expected = model.state_dict(), plain.state_dict()
        assert list(state) == list(expected)
        assert state._metadata.keys() == expected._metadata.keys()
        names = dict(plain.named_parameters(remove_duplicate=False))
        for name, value in expected.items():
            assert isinstance(state[name], DTensor) == (name in names), (stage, name)
            assert (state[name].shape, state[name].stride(), state[name].dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            )
            if stage == "new" and name in names:
                assert_shard_of(state[name], value, 0, 0, name)
        train(model, optimizer, 0, 1)


def state_dict_is_sharded_at_any_time(case: Case, rank: int, world_size: int) -> None:
    """After a forward that keeps the full parameters, and between `unshard` and `reshard`."""
    model, _ = case.make()
    model.set_reshard_after_forward(False)
    expected = case.plain().state_dict()
    output = model(model.example(rows=2, seed=0))
    for name, p in model.named_parameters():
        assert_shard_of(model.state_dict()[name], expected[name], 0, 0, f"after forward: {name}")
        assert isinstance(p, DTensor)
    mean_loss(output).backward()
    model.unshard()
    for name, value in model.state_dict().items():
        if name in dict(case.plain().named_parameters(remove_duplicate=False)):
            assert_shard_of(value, expected[name], 0, 0, f"after unshard: {name}")
    model.reshard()


def full_state_dict_out(case: Case, rank: int, world_size: int) -> None:
    """On rank 0 and the CPU, as one process would save it; nothing on the others."""
    model, optimizer = case.make()
    train(model, optimizer, 0, BEFORE)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if rank:
        assert state == {}
        assert optimizer_state == {}
        return
    plain, _ = uninterrupted(case, BEFORE)
    expected = plain.state_dict()
    assert set(state) == set(expected)
    for name, value in state.items():
        assert not isinstance(value, DTensor)
        assert_same(value, expected[name], 2e-5, 1e-6, name)
    plain.load_state_dict(state)
    trainable = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert set(optimizer_state["state"]) == trainable


def full_state_dict_in(case: Case, rank: int, world_size: int) -> None:
    """Rank 0 alone has read the file."""
    for on_meta in (False, True):
        plain, plain_optimizer = uninterrupted(case, BEFORE)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = {name: value.clone() for name, value in plain.state_dict().items()} if rank == 0 else {}
        flat = get_optimizer_state_dict(plain, plain_optimizer) if rank == 0 else {}
        if on_meta:
            with torch.device("meta"):
                model = case.build()
            blocks(model)
            if case.name == "tied":  # torch loads meta parameters by assignment, which unties them
                model.to_empty(device="cpu")
        else:
            model, _ = case.make(seed=99)
        set_model_state_dict(model, state, options=options)
        optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
        set_optimizer_state_dict(model, optimizer, flat, options=options)
        assert_values(model, values(plain), exact=True, name=f"loaded, meta={on_meta}")
        train(model, optimizer, BEFORE, AFTER)
        assert_values(model, values(uninterrupted(case)[0]), exact=False, name=f"meta={on_meta}")


def loaded_in_place_and_by_assignment(case: Case, rank: int, world_size: int) -> None:
    """From another sharded model's state dict, before and after the first forward; the source must not be shared."""
    source, source_optimizer = case.make()
    train(source, source_optimizer, 0, BEFORE)
    state = copy.deepcopy(source.state_dict())
    expected = values(source)
    optimizer_state = copy.deepcopy(source_optimizer.state_dict())
    train(source, source_optimizer, BEFORE, AFTER)
    for assign in (False, True):
        for trained in (0, 1):
            model, optimizer = case.make(seed=99)
            train(model, optimizer, 0, trained)
            model.load_state_dict(copy.deepcopy(state), assign=assign)
            optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
            optimizer.load_state_dict(copy.deepcopy(optimizer_state))
            assert_values(model, expected, exact=True, name=f"loaded, {assign=}, {trained=}")
            train(model, optimizer, BEFORE, AFTER)
            assert_values(model, values(source), exact=True, name=f"{assign=}, {trained=}")


def whole_tensors_are_refused_without_assignment(case: Case, rank: int, world_size: int) -> None:
    """Neither a plain model's state dict into shards nor one of shards into a plain model: errors name the keys, and
    what they advise loads both.
    """
    (model, _), plain = case.make(), case.plain(seed=99)
    name, options = next(iter(dict(model.named_parameters()))), StateDictOptions(full_state_dict=True)
    advice = r"can't be copied into it.*state_dict\.set_model_state_dict\(model, state_dict, options="
    with pytest.raises(RuntimeError, match=rf"{name}: a plain tensor {advice}"):
        model.load_state_dict(plain.state_dict())
    set_model_state_dict(model, plain.state_dict(), options=options)
    assert_values(model, values(plain), exact=True, name="a full state dict, loaded")
    other = case.plain()
    advice = r"of a plain tensor.*state_dict\.get_model_state_dict\(model, options="
    with pytest.raises(RuntimeError, match=rf"{name}(.|\n)*{advice}"):
        other.load_state_dict(model.state_dict())
    other.load_state_dict(get_model_state_dict(model, options=options))
    assert_values(other, values(plain), exact=True, name="a full state dict, returned")


def loading_after_a_forward_that_kept_the_parameters(case: Case, rank: int, world_size: int) -> None:
    """The full copies that a forward left for its backward are older than what is loaded."""
    model, _ = case.make()
    model.set_reshard_after_forward(False)
    other, _ = case.make(seed=99)
    batch = model.example(rows=2, seed=0)
    model.eval(), other.eval()
    model(batch)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch), other(batch))
    model.unshard()
    third = case.plain(seed=98)
    if all(isinstance(p, DTensor) for p in model.parameters()):
        return
    sharded_third, _ = case.make(seed=98)
    try:
        model.load_state_dict(sharded_third.state_dict())
    except RuntimeError:
        return
    model.reshard()
    third.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch), third(batch))


def optimizer_state_round_trip(case: Case, rank: int, world_size: int) -> None:
    """In memory and through torch.save, each rank its own; the state's DTensors lie as the parameters do."""
    model, optimizer = case.make()
    train(model, optimizer, 0, BEFORE)
    for p in optimizer.param_groups[0]["params"]:
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor) and value.dim():
                assert isinstance(value, DTensor)
                assert value.to_local().shape == p.to_local().shape
                assert value.placements == p.placements
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, BEFORE, AFTER)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    again, again_optimizer = case.make(seed=99)
    again.load_state_dict(state["model"])
    again_optimizer.load_state_dict(state["optimizer"])
    train(again, again_optimizer, BEFORE, AFTER)
    assert_values(again, values(model), exact=True, name="reloaded")


def wrong_state_dicts_name_their_keys(case: Case, rank: int, world_size: int) -> None:
    model, _ = case.make()
    name, value = next(iter(model.named_parameters()))
    state = dict(model.state_dict())
    missing = {key: tensor for key, tensor in state.items() if key != name}
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        model.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*stranger"):
        model.load_state_dict({**state, "stranger": value})
    wider = torch.distributed.tensor.zeros(value.shape[0] + 1, *value.shape[1:], device_mesh=value.device_mesh)
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
        model.load_state_dict({**state, name: wider})
    model(model.example(rows=2, seed=0))


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_state_dicts(world_size: int) -> None:
    run_checks(
        world_size,
        [
            keys_and_metadata_are_those_of_the_plain_model,
            state_dict_is_sharded_at_any_time,
            full_state_dict_out,
            full_state_dict_in,
            loaded_in_place_and_by_assignment,
            whole_tensors_are_refused_without_assignment,
            loading_after_a_forward_that_kept_the_parameters,
            optimizer_state_round_trip,
            wrong_state_dicts_name_their_keys,
        ],
    )


def test_async_save_writes_the_values_at_its_call(tmp_path: Path) -> None:
    """Training goes on while the file is written, in the very buffers that are being saved."""

    def save_and_go_on(case: Case, rank: int, world_size: int) -> None:
        model, optimizer = case.make()
        train(model, optimizer, 0, BEFORE)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        future = dcp.async_save(state, checkpoint_id=tmp_path / case.name, process_group=writers())
        train(model, optimizer, BEFORE, AFTER)
        future.result()
        again, again_optimizer = load(case, tmp_path / case.name)
        train(again, again_optimizer, BEFORE, AFTER)
        assert_values(again, values(model), exact=True, name="reloaded")

    writers = functools.cache(lambda: dist.new_group(backend="gloo"))  # their collectives run beside training's
    run_checks(2, [save_and_go_on])
