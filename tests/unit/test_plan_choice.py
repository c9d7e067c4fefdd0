"""Tests what a plan computes from its predictions: sizes, choice, time, texts. No process group exists.

tests/trace/test_plan.py compares the predictions with real steps.
"""

import copy
import dataclasses
import gc
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2.__main__ import main as main_of_package
from fsdp2.devices.simulation import simulated
from fsdp2.engine import events
from fsdp2.engine.owners import all_groups
from fsdp2.planning import plan as planning
from fsdp2.planning.command import main as main_of_plan
from fsdp2.planning.plan import Plan
from fsdp2.planning.prediction import PlanRow
from fsdp2.planning.settings import Setting
from fsdp2.torch_private import internals
from helpers import fake_world
from models import FrozenMix, TanhBlock, TinyGPT, TinyLSTM

WIDTH, HIDDEN, DEPTH, RANKS = 64, 256, 4, 8
BLOCK = sum(p.numel() for p in TanhBlock(WIDTH, HIDDEN).parameters())
WORKSPACES = 64 * 2**20  # of cuBLAS
MACHINE = {field.name for field in dataclasses.fields(fsdp2.Machine)}


def stack() -> nn.Sequential:
    return nn.Sequential(*[TanhBlock(WIDTH, HIDDEN) for _ in range(DEPTH)])


def batch() -> Tensor:
    return torch.ones(16, WIDTH)


def plan(model: Any = None, **arguments: Any) -> Plan:
    """Plans for a machine without headroom. Fields of a Machine may stand among the arguments."""
    machine = {"headroom": 0, **{name: arguments.pop(name) for name in [*arguments] if name in MACHINE}}
    given = {"ranks": RANKS, "batch": batch, "machine": fsdp2.Machine(**machine), **arguments}
    return fsdp2.plan(stack() if model is None else model, **given)


def only(**arguments: Any) -> PlanRow:
    (row,) = plan(**{"settings": [{}], **arguments}).rows
    return row


# ---- bytes


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [("adamw", 8), ("AdamW", 8), ("adam", 8), ("muon", 4), ("momentum", 4), ("sgd", 0), (None, 0), (6, 6)],
)
def test_states_of_optimizers(optimizer: Any, nbytes: int) -> None:
    row = only(optimizer=optimizer)
    assert row.states == nbytes * DEPTH * BLOCK / RANKS
    assert row.resting == (4 + nbytes) * DEPTH * BLOCK / RANKS + WORKSPACES
    assert row.total == row.resting + row.step_peak


def test_frozen_parameters_have_no_states() -> None:
    model = stack()
    model[0].requires_grad_(False)
    assert only(model=model).states == 8 * (DEPTH - 1) * BLOCK / RANKS


def test_offload_leaves_workspaces_alone_on_the_device() -> None:
    row = only(settings=[{"offload": True}])
    shards = 4 * DEPTH * BLOCK / RANKS
    assert (row.resting, row.shards) == (WORKSPACES, shards)
    # Shards come for forward, again for backward but for the last two groups, and gradients go.
    assert row.moved["transfer"] == shards * (1 + (DEPTH - 2) / DEPTH + 1)


def test_shards_are_padded_to_rows() -> None:
    row = only(model=nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)), batch=None, optimizer=None)
    assert row.shards == 2 * 48  # 2 rows of 4 and 2 elements, a row of 9 and 1: 40 bytes, a multiple of 16


def test_bytes_of_collectives_and_order() -> None:
    taken = only()
    assert taken.order == ("root", "0", "1", "2", "3")
    assert taken.moved == {"all_gather": 4 * BLOCK * (2 * DEPTH - 2), "reduce_scatter": 4 * BLOCK * DEPTH}
    assert taken.sent == sum(taken.moved.values()) * (RANKS - 1) / RANKS
    taken = only(settings=[{"replicas": 2}])
    assert taken.moved["all_reduce"] == 4 * BLOCK * DEPTH / (RANKS / 2)


def test_checkpointing_computes_the_forward_again() -> None:
    plain, again = (only(settings=[{"checkpointing": each}]) for each in (False, True))
    matrix = 2 * 16 * WIDTH * HIDDEN  # of one product
    assert plain.flops == DEPTH * 2 * matrix * 3 - matrix  # the batch needs no gradient
    assert again.flops == plain.flops + DEPTH * 2 * matrix
    assert again.forward_peak < plain.forward_peak


# ---- choice


def test_the_fastest_row_that_fits_is_the_best() -> None:
    rows = plan(memory="1GB", flops=1e9, link=1e6).rows
    assert [row.setting.offload for row in rows] == [False] * 4 + [True] * 4
    for offload in (False, True):
        times = [row.time for row in rows if row.setting.offload == offload]
        assert times == sorted(times)  # type: ignore[type-var]
    kept = rows[0]
    assert kept.setting.reshard_after_forward is False
    assert not kept.setting.checkpointing
    made = plan(memory=kept.total - 1, flops=1e9, link=1e6)
    assert made.fits
    assert made.best.setting != kept.setting
    assert made.best.total < kept.total
    (late,) = (row for row in made.rows if row.setting == kept.setting)
    assert (late.fits, late.missing) == (False, 1)
    assert "no: 1 B more, at the backward of" in str(made)
    assert kept.times is not None
    assert "time: " in str(made)
    assert "of the optimizer" in str(made)


@pytest.mark.parametrize("speeds", [{}, {"flops": 1e9, "link": 1e12, "host_link": 1e15}], ids=["bytes", "times"])
@pytest.mark.parametrize("optimizer", ["momentum", None, "adamw"])
def test_offload_is_the_best_only_if_nothing_else_fits(optimizer: str | None, speeds: dict[str, Any]) -> None:
    """Though it may take no time. The table says so, what is on the CPU, and if states alone would be enough."""
    rows = plan(memory="1GB", optimizer=optimizer, **speeds).rows
    least = min(row.total for row in rows if not row.setting.offload)
    made = plan(memory=least, optimizer=optimizer, **speeds)
    assert not made.best.setting.offload
    fits = [row.setting.offload for row in made.rows if row.fits]
    assert fits == sorted(fits)
    assert "Optimizer states on the CPU" not in str(made)
    made = plan(memory=least - 1, optimizer=optimizer, **speeds)
    assert made.fits
    assert made.best.setting.offload
    numel = sum(param.numel() for param in stack().parameters())
    states = {"adamw": 2, "momentum": 1, None: 0}[optimizer]
    assert ("Optimizer states on the CPU would make it fit" in str(made)) == (states > 0)
    (whole,) = {row.on_host for row in made.rows if row.setting.offload}
    assert whole == 4 * numel // RANKS * (2 + states)
    assert "of the CPU's memory" in str(made)
    assert any("read and write 93.1 GiB of the CPU's memory per second" in note for note in made.notes)
    without = plan(memory="1GB", settings=[{}])
    assert without.best.on_host == 0
    assert "CPU" not in str(without)


def test_without_speeds_the_row_that_moves_least_is_the_best() -> None:
    best = plan(memory="1GB").best
    assert best.setting == Setting(RANKS, reshard_after_forward=False)
    assert best.time is None


def test_if_nothing_fits_the_best_row_misses_least() -> None:
    made = plan(memory="10KB")
    assert not made.fits
    assert made.best.missing == min(row.missing for row in made.rows) == made.best.total - 10_000
    assert "nothing fits into 9.8 KiB" in str(made)
    assert "more, of which shards and states alone take too much" in str(made)


def test_several_machines_are_compared_with_hybrid_meshes() -> None:
    settings = {row.setting for row in plan(ranks=[8, 16], device="cpu").rows}
    assert Setting(16, replicas=2) in settings
    assert Setting(16, reshard_after_forward=8) in settings
    assert len(settings) == 4 + 8
    assert not any(setting.offload for setting in settings)


def test_options_of_a_policy_replace_those_of_the_row() -> None:
    kept = plan(policy={TanhBlock: {"reshard_after_forward": False}}, settings=[{}]).best
    assert kept.moved["all_gather"] == 4 * BLOCK * DEPTH
    half = {"mp_policy": fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    assert plan(policy={TanhBlock: half}, settings=[{}]).best.moved["all_gather"] == 2 * BLOCK * (2 * DEPTH - 2)


# ---- headroom, the CPU


def test_headroom_is_kept() -> None:
    """A tenth of the memory, unless it is said; the table has it."""
    total = only(memory="1GB").total
    for arguments, fits in (
        ({"memory": total, "headroom": 0.1}, False),
        ({"memory": total}, True),
        ({"memory": 2 * total, "headroom": 0.5}, True),
        ({"memory": 2 * total, "headroom": 0.501}, False),
    ):
        assert only(**arguments).fits == fits, arguments
    assert fsdp2.Machine().headroom == 0.1
    made = plan(memory="1GB", headroom=0.1)
    assert "and 95.4 MiB kept for what is not counted, of 953.7 MiB on each device" in str(made)
    assert "with 1000 B kept for what is not counted" in str(plan(memory=10_000, headroom=0.1))


def test_the_memory_of_the_cpu() -> None:
    numel = sum(param.numel() for param in stack().parameters())
    arguments = {"settings": [{"offload": True}], "memory": "1GB"}
    assert only(**arguments, host_memory=16 * numel).fits
    made = plan(**arguments, host_memory=16 * numel - 8 * RANKS)
    assert not made.fits
    assert made.best.host_missing == 8
    assert "no: 8 B more of the CPU's memory" in str(made)
    assert "misses least: 8 B more of the CPU's memory" in str(made)
    assert plan(memory="1GB", host_memory=1).fits, "rows without offload need none"


def cluster(**machine: Any) -> Setting:
    """Returns what is chosen for a model of 0.5 B parameters, with 8 rows of 1024 tokens for each rank."""
    with torch.device("meta"):
        model = TinyGPT(dim=4096, heads=32, depth=4)
    where = fsdp2.Machine(flops=4e14, link="370GB/s", network="50GB/s", **machine)
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    made = fsdp2.plan(model, ranks=8, batch=lambda: tokens, mp_policy=policy, machine=where)
    assert made.fits == (machine.get("host_memory") is None)
    return made.best.setting


def test_advice_for_plain_cases() -> None:
    """With ample memory nothing is computed again; with too little for activations, they are; the CPU is the last way,
    and none if it has too little memory.
    """
    ample = cluster(memory="80GB")
    assert (ample.checkpointing, ample.offload, ample.replicas) == (False, False, 1)
    tight = cluster(memory="4.5GB")
    assert (tight.checkpointing, tight.offload) == (True, False)
    small = cluster(memory="3.4GB")
    assert (small.checkpointing, small.offload) == (True, True)
    assert cluster(memory="3.4GB", host_memory="4GB") is not None


# ---- the model


def test_the_model_stays_as_it_was() -> None:
    model = FrozenMix()
    before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    state = torch.get_rng_state()
    made = fsdp2.plan(model, ranks=2, batch=lambda: model.example(rows=2, seed=0), policy=nn.Linear)
    assert made.best.has_activations
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == before
    assert torch.equal(torch.get_rng_state(), state)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in module.__dict__
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_nothing_is_left_in_the_process() -> None:
    """No process group, no mode, no extension, no live root, no patch; also after a forward that fails."""
    gc.collect()  # of earlier tests
    model, before = stack(), (events.extensions(), len([*all_groups()]), {**vars(torch.UntypedStorage)})
    modes = internals.num_dispatch_modes()
    for made in (plan(model), plan(DataDependent())):
        assert str(made)
    assert not torch.distributed.is_initialized()
    assert torch.distributed.group.WORLD is None
    assert simulated.get() is None
    assert internals.num_dispatch_modes() == modes
    assert (events.extensions(), len([*all_groups()]), {**vars(torch.UntypedStorage)}) == before
    assert type(model) is nn.Sequential
    assert type(model[0]) is TanhBlock


def test_a_plan_is_made_beside_training_and_with_modes_in_force() -> None:
    """Other sharded models, other threads, and modes of the user are as before; the plan is the same."""
    expected = str(plan())
    with fake_world(RANKS):
        trained = fsdp2.fully_shard(stack())
        trained(batch()).sum().backward()
        assert str(plan()) == expected
        with torch.device("meta"), LoggingMode() as mode:
            assert str(fsdp2.plan(stack(), ranks=RANKS, batch=batch)) == expected
            seen = len(mode.seen)
        trained(batch()).sum().backward()
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(str(plan()))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [expected] * 2
    assert seen == len(mode.seen)


class LoggingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_model_on_meta_gets_the_same_plan() -> None:
    with torch.device("meta"):
        on_meta = TinyGPT()
        tokens = torch.zeros(2, 4, dtype=torch.long)
    real = TinyGPT()
    plans = [plan(model, batch=lambda: tokens.to("meta")) for model in (on_meta, real)]
    assert str(plans[0]) == str(plans[1])


def test_a_plan_keeps_no_parameter_alive() -> None:
    """The parameters that sharding replaces must be freed."""
    made = plan()
    assert all(p.is_meta for group in made.groups for p in group.parameters)


def test_two_recordings_serve_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a large model takes as long as two steps without values."""
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return record(*arguments)

    record = planning.record
    monkeypatch.setattr(planning, "record", counted)
    made = plan(ranks=[8, 16, 64], flops=1e12, link="50GB/s", network="50GB/s")
    assert len(made.rows) == 8 + 16 + 16
    assert len(calls) == 2


class DataDependent(nn.Module):
    """Reads a value to decide how often to run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock(WIDTH, HIDDEN) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: int(x.sum().item())]:
            x = block(x)
        return x


def test_a_forward_that_reads_values_gets_a_plan_of_states_alone() -> None:
    made = plan(DataDependent(), settings=[{}])
    assert not made.best.has_activations
    assert "Peaks are those of parameters and gradients alone: the step could not run without values" in str(made)
    states = plan(DataDependent(), settings=[{}], batch=None).best
    assert made.best == states
    assert states.step_peak >= 2 * 4 * BLOCK
    assert "No batch was given" in str(plan(DataDependent(), batch=None))


class ReadsItsList(nn.Sequential):
    """Computes with the parameters that it has put into a list."""

    def __init__(self) -> None:
        super().__init__(*stack())
        self.weights = [each.up.weight for each in self]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(weight.sum() for weight in self.weights)


def test_a_forward_that_reads_parameters_elsewhere_gets_no_gradients() -> None:
    model = ReadsItsList()
    made = plan(model, settings=[{}])
    assert "the forward reads 4 parameters otherwise than from where they are registered" in str(made)
    assert all(p.grad is None for p in model.parameters())


def test_an_lstm_is_recorded() -> None:
    """It keeps a second list of its weights."""
    model = TinyLSTM()
    made = plan(model, batch=lambda: model.example(rows=2, seed=0), policy=nn.LSTM, settings=[{}])
    assert made.best.has_activations
    assert all(kept is own for kept, own in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))


def test_a_loss_must_be_a_scalar() -> None:
    made = plan(loss=lambda output: output)
    assert "loss: expected a function that returns a scalar tensor" in str(made)


def test_a_parameter_of_tensor_parallelism_is_refused() -> None:
    model = stack()
    with fake_world(2):
        local = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Replicate()])
        model[0].up.bias = nn.Parameter(local)
        with pytest.raises(NotImplementedError, match=r"0.up.bias: .*Plan before parallelize_module"):
            plan(model)


# ---- texts


def test_the_table_has_each_group_and_each_row_once() -> None:
    made = plan(memory="1MB", link="1GB/s", flops=1e9)
    text = str(made)
    assert "0 ... 3 (4)  TanhBlock" in text
    assert "order in forward: root, 0, 1, 2, 3" in text
    assert text.count("reshard_after_forward=") == len(made.rows) + 1  # and the best again
    assert text.count("*") == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("24GB", 24e9),
        ("24GiB", 24 * 2**30),
        ("50 GB/s", 50e9),
        ("1.5K", 1500),
        (7, 7),
        ("8e3", 8000),
        ("3 mib", 3 * 2**20),
    ],
)
def test_sizes_are_read(text: Any, number: float) -> None:
    assert fsdp2.Machine(memory=text).memory == number


# ---- the command line


MODELS = """
import torch
from torch import nn

def stack():
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

def batch():
    return torch.ones(2, 8)
"""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python -m fsdp2 plan` runs it, in a folder that has the model."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["plan", "my_models:stack", "--ranks", "4", "--batch", "my_models:batch", "--memory", "1GB"]
    more = ["--headroom", "0.05", "--host-memory", "1GB"]
    monkeypatch.setattr(sys, "argv", ["fsdp2", *arguments, *more])
    with pytest.raises(SystemExit) as ended:
        main_of_package()
    assert ended.value.code == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "planning: building the model"
    assert "planning: predicting 4 settings" in progress
    assert "0 ... 3 (4)  Linear" in text
    assert "and 47.7 MiB kept for what is not counted, of 953.7 MiB on each device" in text
    speeds = ["--link", "1GB/s", "--flops", "1e12", "--network", "1MB/s", "--host-link", "1GB/s"]
    times = []
    for ranks in ("4", "16"):
        assert main_of_plan([*arguments[1:], "--ranks", ranks, *speeds]) == 0
        lines = capsys.readouterr().out.splitlines()
        times.append([line.split()[-4:-2] for line in lines if line.startswith("*  reshard_after_forward=")])
    assert times[0] != times[1]


def test_command_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp2.planning.command import main

    (tmp_path / "their_models.py").write_text(MODELS)
    monkeypatch.setitem(sys.modules, "transformers", None)  # it is not installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["their_models:stack", "--ranks", "4", "--memory", "10"]) == 1
    assert "nothing fits into 10 B" in capsys.readouterr().out
    (tmp_path / "one_layer.py").write_text("from torch import nn\ndef make(): return nn.Linear(2, 2)")
    assert main(["one_layer:make", "--ranks", "4"]) == 1
    assert "expected blocks to wrap, found none" in capsys.readouterr().out
    for arguments, error in (
        (["their_models:stack", "--ranks", "4", "--policy", "Linaer"], "Linaer matches no module.*Linear"),
        (["their_models:batch", "--ranks", "4"], "expected a class or a function that makes an nn.Module, got Tensor"),
        (["their_models", "--ranks", "4"], "expected package.module:name, or a config that exists"),
        (["their_models:none", "--ranks", "4"], "has no attribute 'none'"),
        (["their_models.py", "--ranks", "4"], "needs the package transformers: pip install transformers"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert re.search(error, capsys.readouterr().err)


def test_plans_count_gradients_in_their_own_dtype() -> None:
    narrow: Any = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(3)))
    wide, policy = copy.deepcopy(narrow), fsdp2.MixedPrecisionPolicy(grad_dtype=torch.float32)
    for parameter in wide.parameters():
        parameter.grad_dtype = torch.float32
    sharded_nbytes = 3 * 256 * 256 // 4
    rows = [
        fsdp2.plan(
            model,
            ranks=4,
            batch=lambda: torch.ones(2, 256, dtype=torch.bfloat16),
            settings=[{}],
            policy={nn.Linear},
            mp_policy=own,
        ).rows[0]
        for model, own in ((narrow, None), (wide, None), (narrow, policy))
    ]
    assert rows[1] == rows[2]
    moved = [row.moved["reduce_scatter"] for row in rows]
    assert moved[1] == 2 * moved[0]
    assert rows[1].step_peak >= rows[0].step_peak + 2 * sharded_nbytes


class Experts(nn.Module):
    """Has as many experts as there are ranks in a test, or half of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bd,edh->bed", x, self.up).sum(1)


def test_padding_of_few_experts_is_noted() -> None:
    few, enough = (nn.Sequential(*[Experts(num) for _ in range(3)]) for num in (RANKS // 2, RANKS))
    assert "padding makes shards and gathers 2.0 times as large" in str(plan(few))
    assert "padding" not in str(plan(enough))


def test_a_budget_of_offload_is_refused() -> None:
    choice = fsdp2.OffloadBudget(5)
    with pytest.raises(NotImplementedError, match=r"plan: 0: offload_policy: expected CPUOffloadPolicy\(\) or "):
        plan(policy={TanhBlock: {"offload_policy": choice}})


def test_a_call_with_a_policy_of_its_own_is_offloaded() -> None:
    row = only(policy={TanhBlock: {"offload_policy": fsdp2.CPUOffloadPolicy()}}, memory="1GB")
    assert row.on_host == (4 + 4 + 8) * DEPTH * BLOCK / RANKS
    assert row.resting == WORKSPACES
