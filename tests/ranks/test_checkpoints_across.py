"""Tests that checkpoints can be exchanged between fsdp2 and torch's FSDP2, both ways, and loaded from FSDP1.

One library saves a model on one mesh, and the other loads it on another and continues training. The oracle is a plain
model on whole batches that was never interrupted, in fp64. tests/ranks/test_checkpoint.py has one-axis meshes of 1 to 4
ranks, tied and frozen parameters, buffers and asynchronous saving.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from fsdp2 import fully_shard
from helpers import NIGHTLY, Differences, alone, assert_same, assert_same_names, full, one_mesh, run_checks, shard_batch
from models import NormedBlock, TinyModel, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

BEFORE, AFTER = 1, 1
"""Steps before and after the checkpoint: one makes, and one shows, all of the optimizer's state."""
ROWS = 12  # divides by 1, 2, 3 and 4
ROUNDING = {"rtol": 1e-9, "atol": 1e-11}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

Library = Callable[..., Any]
LIBRARIES: dict[str, Library] = {"fsdp2": fully_shard, "torch": torch_fully_shard}
OTHER = {"fsdp2": "torch", "torch": "fsdp2"}


class Stack(TinyModel):
    """10 rows divide by 2 ranks only, and 3 rows leave one of 4 without any.

    The halves of 12 do divide, as torch asks of what tensor parallelism and FSDP2 both cut along dim 0.
    """

    row_shape = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 10)
        self.blocks = nn.ModuleList([NormedBlock(10, 12)])
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh: its shape, and what each axis is for."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))

    @property
    def mesh(self) -> DeviceMesh:
        return one_mesh(self.shape, self.axes)

    @property
    def tp(self) -> int:
        return self.shape[-1] if self.axes[-1] == "tp" else 1

    def own(self, batch: Tensor) -> Tensor:
        """This rank's rows: the ranks of one tensor-parallel group see the same."""
        return shard_batch(batch, dist.get_rank() // self.tp, math.prod(self.shape) // self.tp)

    def make(self, library: Library, seed: int = 1) -> tuple[Stack, torch.optim.Optimizer]:
        model = plain_model(seed)
        mesh = self.mesh[self.axes[:-1]] if self.tp > 1 else self.mesh
        for block in model.blocks:
            if self.tp > 1:
                parallelize_module(block, self.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            library(block, mesh=mesh)
        library(model, mesh=mesh)
        return model, adamw(model, foreach=self.tp == 1)


def plain_model(seed: int = 1) -> Stack:
    torch.manual_seed(seed)
    return Stack().double()


def adamw(model: nn.Module, foreach: bool = True) -> torch.optim.Optimizer:
    """DTensors on two meshes can't be in one foreach operation."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=foreach)


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: range, own: Callable[[Tensor], Tensor] = lambda batch: batch
) -> None:
    for step in steps:
        mean_loss(model(own(Stack().example(rows=ROWS, seed=step).double()))).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_goes_on(layout: Layout, model: Stack, optimizer: torch.optim.Optimizer, name: str) -> None:
    """From BEFORE, like plain training that was not interrupted: so the optimizer's state, too, was all there."""
    plain, different = plain_model(), Differences()
    train(plain, adamw(plain), range(BEFORE + AFTER))
    train(model, optimizer, range(BEFORE, BEFORE + AFTER), layout.own)
    assert_same_names(dict(model.named_parameters()), dict(plain.named_parameters()))
    for (fqn, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        value = full(p)
        with different.noted():
            assert_same(value, q.detach(), **ROUNDING, name=f"{name}: {fqn}")
    different.raise_first()


# ---- sharded checkpoints ---------------------------------------------------------------------------------------------

SHARDED = Layout((2,), ("shard",))
HSDP = Layout((2, 2), ("replicate", "shard"))
TENSOR_PARALLEL = Layout((2, 2), ("shard", "tp"))
SAVED = (SHARDED, HSDP, TENSOR_PARALLEL)
ON_3 = Layout((3,), ("shard",))
HSDP_ON_3 = Layout((1, 3), ("replicate", "shard"))
ALL_AXES = Layout((1, 2, 2), ("replicate", "shard", "tp"))
LOADED = {
    ON_3: SAVED if NIGHTLY else (SHARDED, TENSOR_PARALLEL),
    HSDP: (SHARDED, TENSOR_PARALLEL) if NIGHTLY else (TENSOR_PARALLEL,),
    TENSOR_PARALLEL: SAVED if NIGHTLY else (HSDP,),
    **({HSDP_ON_3: (HSDP,), ALL_AXES: (TENSOR_PARALLEL,)} if NIGHTLY else {}),
}
"""By which layout is loaded what others have saved."""


def save(folder: Path, by: str, layout: Layout) -> None:
    model, optimizer = layout.make(LIBRARIES[by])
    train(model, optimizer, range(BEFORE), layout.own)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"{by} {layout}")


def load(folder: Path, source: Layout, by: str, layout: Layout) -> None:
    model, optimizer = layout.make(LIBRARIES[by], seed=99)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder / f"{OTHER[by]} {source}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_goes_on(layout, model, optimizer, f"{source} by {by} on {layout}")


Check = tuple[Layout, str, Callable[[], None]]


def on_their_ranks(checks: Sequence[Check]) -> None:
    """One launch per number of ranks."""
    for size in sorted({math.prod(layout.shape) for layout, *_ in checks}):
        run_checks(size, [(name, check) for layout, name, check in checks if math.prod(layout.shape) == size])


def saves(folder: Path, save: Callable[..., None]) -> list[Check]:
    cases = itertools.product(LIBRARIES, SAVED)
    return [(layout, f"save {by} {layout}", functools.partial(save, folder, by, layout)) for by, layout in cases]


def test_sharded_checkpoints_cross_both_ways(tmp_path: Path) -> None:
    """Same FQNs, global shapes, offsets and layout of the optimizer's state, on any mesh."""
    on_their_ranks(saves(tmp_path, save))
    on_their_ranks(
        [
            (layout, f"{source} by {by} on {layout}", functools.partial(load, tmp_path, source, by, layout))
            for layout, sources in LOADED.items()
            for i, source in enumerate(sources)
            for by in (LIBRARIES if NIGHTLY or i == 0 else ["fsdp2"])
        ]
    )


# ---- full state dicts ------------------------------------------------------------------------------------------------


def save_whole(folder: Path, by: str, layout: Layout) -> None:
    model, optimizer = layout.make(LIBRARIES[by])
    train(model, optimizer, range(BEFORE), layout.own)
    state = {
        "model": get_model_state_dict(model, options=WHOLE),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
    }
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{by} {layout}")


def load_whole(folder: Path, by: str, layout: Layout) -> None:
    """Rank 0 alone reads the file."""
    model, optimizer = layout.make(LIBRARIES[by], seed=99)
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / f"{OTHER[by]} {TENSOR_PARALLEL}")
    set_model_state_dict(model, state["model"], options=FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FROM_RANK_0)
    assert_goes_on(layout, model, optimizer, f"by {by} on {layout}")


def plain_states() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Of the model, and of the optimizer by parameter, after BEFORE steps."""
    model = plain_model()
    optimizer = adamw(model)
    train(model, optimizer, range(BEFORE))
    return model.state_dict(), {name: optimizer.state[p] for name, p in model.named_parameters()}


def assert_as_plain(state: dict[str, Any], plain: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    model, optimizer = plain
    assert_same_names(state["model"], model)
    assert state["optimizer"]["state"].keys() == optimizer.keys()
    for fqn, expected in model.items():
        values = {"value": state["model"][fqn], **state["optimizer"]["state"][fqn]}
        assert values.keys() == {"value", *optimizer[fqn]}
        for key, q in {"value": expected, **optimizer[fqn]}.items():
            assert type(values[key]) is Tensor
            assert_same(values[key], q, **ROUNDING, name=f"{name}: {fqn} {key}")


def test_full_state_dicts_cross_both_ways(tmp_path: Path) -> None:
    """All are what one process would have saved, so any one is good for any mesh."""
    plain = alone(plain_states)
    on_their_ranks(saves(tmp_path, save_whole))
    for by, layout in itertools.product(LIBRARIES, SAVED):
        assert_as_plain(torch.load(tmp_path / f"{by} {layout}"), plain, f"{by} {layout}")
    on_their_ranks(
        [
            (layout, f"{by} on {layout}", functools.partial(load_whole, tmp_path, by, layout))
            for layout, libraries in ((ON_3, LIBRARIES), (HSDP, ["fsdp2"]), (TENSOR_PARALLEL, ["torch"]))
            for by in (LIBRARIES if NIGHTLY else libraries)
        ]
    )


# ---- FSDP1 -----------------------------------------------------------------------------------------------------------


def save_by_fsdp1(folder: Path, original: bool) -> None:
    """As FSDP1's users do. `original`: its use_orig_params."""
    model = FullyShardedDataParallel(
        plain_model(),
        auto_wrap_policy=ModuleWrapPolicy({NormedBlock}),
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    train(model, optimizer, range(BEFORE), lambda batch: shard_batch(batch, dist.get_rank(), dist.get_world_size()))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = {"model": model.state_dict()}
        if not original:  # there, on a CPU, FSDP1 writes exp_avg_sq in place of exp_avg
            state["optimizer"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"FSDP1 original={original}")


def load_from_fsdp1(folder: Path, layout: Layout, by_assignment: bool) -> None:
    """From rank 0; or every rank reads the file, into a model on meta."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=not by_assignment)
    # FSDP1 has one `step` for all that it has flattened together; an optimizer would count it up once per parameter.
    state = tree_map_only(Tensor, Tensor.clone, torch.load(folder / "FSDP1 original=False"))
    with torch.device("meta" if by_assignment else "cpu"):
        model, optimizer = layout.make(fully_shard, seed=99)
    if by_assignment:
        model.load_state_dict(state["model"], assign=True)
        optimizer = adamw(model)
    else:
        set_model_state_dict(model, state["model"] if dist.get_rank() == 0 else {}, options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert_goes_on(layout, model, optimizer, f"{by_assignment=} on {layout}")


def original_parameters_are_saved_alike(folder: Path) -> None:
    states = [torch.load(folder / f"FSDP1 original={original}")["model"] for original in (False, True)]
    assert_same_names(*states)
    assert_same_names(states[0], plain_model().state_dict())
    for name, value in states[0].items():
        assert_same(value, states[1][name], 0.0, 0.0, name)


def test_full_state_dicts_of_fsdp1_are_loaded(tmp_path: Path) -> None:
    """Its names are those of the plain model, its optimizer's state is keyed by them."""
    run_checks(
        2, [(f"{original=}", functools.partial(save_by_fsdp1, tmp_path, original)) for original in (False, True)]
    )
    original_parameters_are_saved_alike(tmp_path)
    cases = itertools.product((ON_3, HSDP_ON_3), (False, True))
    checks = [(str(case), functools.partial(load_from_fsdp1, tmp_path, *case)) for case in cases]
    run_checks(3, checks)


# ---- files of other formats, and torch's own limit -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # which safetensors asks for
def test_safetensors_of_a_full_state_dict(tmp_path: Path) -> None:
    """Contiguous tensors of their own, under the plain model's names: what that format asks for; not shards."""
    safetensors = pytest.importorskip("safetensors.torch", exc_type=ImportError)
    layout, file = ON_3, tmp_path / "model.safetensors"

    def out_and_in() -> None:
        model, optimizer = layout.make(fully_shard)
        train(model, optimizer, range(BEFORE), layout.own)
        for save in (safetensors.save, functools.partial(safetensors.save_file, filename=file)):
            with pytest.raises(RuntimeError, match=r"weight: its storage's data_ptr.*full_state_dict=True"):
                save(model.state_dict())
        state = get_model_state_dict(model, options=WHOLE)
        if dist.get_rank() == 0:
            safetensors.save_file(state, file)
        dist.barrier()
        again, _ = layout.make(fully_shard, seed=99)
        again.load_state_dict(safetensors.load_file(file), assign=True)
        for (name, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
            assert_same(full(p), full(q), 0.0, 0.0, name)

    run_checks(3, [("safetensors", out_and_in)])


def torch_broadcasts_memory_in_its_order() -> None:
    """Values that are not contiguous on rank 0 arrive in another order: in torch alone, with no sharded module.

    torch 2.11's `full_tensor` returns such for what is cut unevenly along another dim than 0.
    """
    value = torch.arange(6.0).view(2, 3).t()
    for source, arrives in ((value.contiguous(), True), (value, False)):
        model = nn.Linear(2, 3, bias=False)
        mesh = init_device_mesh("cpu", (2,))
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
        state = {"weight": source.clone(), "other": torch.ones(2)} if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=dataclasses.replace(FROM_RANK_0, strict=False))
        assert isinstance(model.weight, DTensor)
        assert torch.equal(full(model.weight), value) == arrives, "the guides' sentence about it is out of date"


def test_why_a_full_state_dict_must_be_contiguous() -> None:
    run_checks(2, [("broadcast", torch_broadcasts_memory_in_its_order)])
