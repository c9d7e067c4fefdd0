"""Tests the tables of the guides for programs that come from torch's FSDP2, FSDP1, DDP and DeepSpeed.

Each row says "in place of X write Y". tests/BEHAVIOURS.md names the test in which Y is written; what no other test has,
is written here. A row that has neither fails, as does a name that no row has: its first cell identifies a row.
"""

import copy
import inspect
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from documents import ROOT, table_rows, tables_of_guides
from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from helpers import assert_same, run_checks, shard_batch
from models import TanhBlock, mean_loss

TABLES = {name: f"Move from {name}" for name in ("torch's FSDP2", "FSDP1", "DDP", "DeepSpeed")}
ROWS = tables_of_guides()
BEHAVIOURS = table_rows(ROOT / "tests" / "BEHAVIOURS.md")
NAMED = {(name, cells[0]) for name, heading in TABLES.items() for cells in BEHAVIOURS[heading]}
Program = Callable[[], None]
PROGRAMS: dict[tuple[str, str], Program] = {}


def row(table: str, cell: str) -> Callable[[Program], Program]:
    """The program of the row of `table` whose first cell is `cell`."""

    def add(program: Program) -> Program:
        PROGRAMS[table, cell] = program
        return program

    return add


# ---- a model, its plain training, and its training in shards -------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(TanhBlock(8, 6) for _ in range(3))
        self.branch = nn.Linear(8, 8)  # which no step uses

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Net, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def own(step: int, whole: bool = False) -> Tensor:
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
    return batch if whole else shard_batch(batch, dist.get_rank(), dist.get_world_size())


def assert_like(model: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    others = dict(expected.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(others)
    for name, param in model.named_parameters():
        assert_same(param, others[name], tolerance, tolerance, name)


def trains(model: Any) -> None:
    expected = build()
    for each in (model, expected):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
        for step in range(2):
            mean_loss(each(own(step, whole=each is expected))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_like(model, expected)


def of_first_rank() -> bool:
    return dist.get_rank() == 0


# ---- FSDP1 ---------------------------------------------------------------------------------------------------------


@row("FSDP1", "`MixedPrecision(keep_low_precision_grads=True)`")
def arguments_of_fsdp1() -> None:
    """They are errors of Python, and rows of the guide."""
    fields = {*inspect.signature(torchs.MixedPrecision).parameters} - {
        *inspect.signature(MixedPrecisionPolicy).parameters
    }
    assert fields == {"keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore"}
    for name in {*inspect.signature(torchs.FullyShardedDataParallel).parameters} - {"module"}:
        with pytest.raises(TypeError, match=name):
            fully_shard(build(), **{name: None})


@row("DDP", "`ignored_modules`")
@row("FSDP1", "`ignored_states`, `ignored_modules`")
def ignored() -> None:
    for chosen in (lambda m: {*m.parameters()}, lambda m: [m, m.weight], lambda m: m):
        model = build()
        model.branch.requires_grad_(False)
        shard(model, ignored_params=chosen(model.branch))
        assert type(model.branch.weight) is nn.Parameter
        trains(model)
    used: Any = build()
    used.branch.requires_grad_(False)
    parameters = used.branch.parameters()
    fully_shard(used, ignored_params=parameters)
    assert type(used.branch.weight) is nn.Parameter
    with pytest.raises(ValueError, match="another call has used it up"):
        fully_shard(nn.Linear(2, 2), ignored_params=parameters)
    with_buffer = build()
    with_buffer.branch.requires_grad_(False)
    with_buffer.branch.register_buffer("large", torch.ones(2, device="meta"))
    large = with_buffer.branch.large
    shard(with_buffer, ignored_params=[with_buffer.branch, with_buffer.branch.weight])
    assert with_buffer.branch.large is large


# ---- DDP -----------------------------------------------------------------------------------------------------------


@row("DDP", "`if rank == 0: torch.save(model.state_dict(), file)`")
@row("DDP", "`model.load_state_dict(torch.load(file))`")
def saved_by_the_first_rank() -> None:
    full_state = StateDictOptions(full_state_dict=True)
    name = [tempfile.mkdtemp()]
    dist.broadcast_object_list(name)
    file = Path(name[0]) / "model.pt"
    for apply in (shard, replicate):
        state = get_model_state_dict(apply(build()), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, file)
        dist.barrier()
        plain = build(seed=1)
        plain.load_state_dict(torch.load(file))
        before = apply(plain)  # loaded before sharding
        after = apply(build(seed=2))
        set_model_state_dict(after, torch.load(file), options=full_state)
        for model in (before, after):
            assert_like(model, build(), 0)
            trains(model)
        dist.barrier()


@row("DDP", "`if rank == 0:` around an evaluation, or `generate`")
def evaluated_on_every_rank() -> None:
    for apply in (shard, replicate):
        model = apply(build())
        with torch.no_grad():
            assert_same(model(own(0, whole=True)), build()(own(0, whole=True)), 1e-5, 1e-6, "outputs")
        trains(model)


@row("DDP", "`broadcast_buffers=True`, bit for bit")
def buffers_of_the_first_rank() -> None:
    """Beside DDP itself: each forward begins with the first rank's buffers, also at the steps at which checks run."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model: Any = replicate(plain)
    model.set_running_stats_averaging(False)

    def broadcast(module: nn.Module, args: Any) -> None:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    model.register_forward_pre_hook(broadcast)
    for step in range(5):
        for each in (model, ddp):
            mean_loss(each(own(step))).backward()
        for buffer, other in zip(model.buffers(), ddp.module.buffers(), strict=True):
            assert torch.equal(buffer, other)


@row("DDP", "`device_ids`, `output_device`, `dim`")
@row("DDP", "`init_sync=False`, `forward_sync_buffers`")
def arguments_of_ddp() -> None:
    """They are errors that say what to write."""
    options = {
        "device_ids": [0],
        "output_device": 0,
        "broadcast_buffers": True,
        "bucket_cap_mb": 25,
        "init_sync": False,
    }
    options |= {"find_unused_parameters": True, "gradient_as_bucket_view": True, "static_graph": True}
    for name, value in options.items():
        with pytest.raises(TypeError, match=name):
            replicate(build(), **{name: value})  # type: ignore[call-arg]
    parameters = {*inspect.signature(nn.parallel.DistributedDataParallel).parameters}
    cells = " ".join(cells[0] for cells in ROWS["Move from DDP"])
    for name in parameters - {"module"}:
        assert f"`{name}" in cells, name
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        replicate(build(), typo=1)  # type: ignore[call-arg]
    model = replicate(build())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    trains(model)


# ---- DeepSpeed -----------------------------------------------------------------------------------------------------


@row("DeepSpeed", "`zero_to_fp32.py`")
def a_file_of_all_without_ranks() -> None:
    """From a distributed checkpoint, by one process."""
    folder = [tempfile.mkdtemp() if of_first_rank() else ""]
    dist.broadcast_object_list(folder)
    try:
        torch.distributed.checkpoint.save(shard(build()).state_dict(), checkpoint_id=folder[0])
        if of_first_rank():
            dcp_to_torch_save(folder[0], f"{folder[0]}/whole.pt")
            loaded = build(seed=1)
            loaded.load_state_dict(torch.load(f"{folder[0]}/whole.pt"))
            assert_like(loaded, build(), 0)
        dist.barrier()
    finally:
        if of_first_rank():
            shutil.rmtree(folder[0])


def states_by_fsdp1() -> None:
    """FSDP1's methods for state dicts raise, with what to write, and leave its own modules and plain ones alone."""
    fsdp1, full, model = torchs.FullyShardedDataParallel, torchs.StateDictType.FULL_STATE_DICT, shard(build())
    optimizer = torch.optim.AdamW(model.parameters())
    called = r"call torch\.distributed\.checkpoint\.state_dict\.{}_{}_state_dict instead"
    with pytest.raises(RuntimeError, match=called.format("get", "model")), fsdp1.state_dict_type(model, full):
        pass
    with pytest.raises(RuntimeError, match=called.format("get", "optimizer")):
        fsdp1.optim_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=called.format("set", "optimizer")):
        fsdp1.optim_state_dict_to_load(model, optimizer, {})
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if of_first_rank():
        for name, value in build().state_dict().items():
            assert_same(state[name], value, 0, 0, name)
    wrapped = fsdp1(build(), device_id=torch.device("cpu"), use_orig_params=True)
    with fsdp1.state_dict_type(wrapped, full):
        shapes = {name: value.shape for name, value in wrapped.state_dict().items()}
    assert shapes == {name: value.shape for name, value in build().state_dict().items()}


# ---- every row -----------------------------------------------------------------------------------------------------


def test_every_row_has_a_program_or_a_named_test() -> None:
    """tests/unit/test_readme.py holds that named tests exist."""
    rows = {(name, cells[0]) for name, heading in TABLES.items() for cells in ROWS[heading]}
    assert NAMED - rows == set()
    assert rows - NAMED == PROGRAMS.keys()
    assert len(rows) == sum(len(ROWS[heading]) for heading in TABLES.values()), "two rows begin alike"


@pytest.mark.filterwarnings("ignore:.*(deprecated|state_dict).*:FutureWarning")
def test_programs_that_come_from_elsewhere() -> None:
    programs = dict.fromkeys([*PROGRAMS.values(), states_by_fsdp1])  # some stand for two rows
    run_checks(2, [(program.__name__, program) for program in programs])
