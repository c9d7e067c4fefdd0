"""Tests `python -m fsdp2 migrate`: programs as the documents of FSDP1, DDP and DeepSpeed have them, and the table."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from documents import ROOT
from fsdp2.__main__ import main
from fsdp2.bridge.migrate import Advice, find
from fsdp2.bridge.migration_table import ROWS, Row

# torch's tutorial "Advanced Model Training with Fully Sharded Data Parallel", shortened.
FSDP1_TUTORIAL = """\
import os
import functools
import torch
import torch.distributed as dist
from transformers.models.t5.modeling_t5 import T5Block
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, BackwardPrefetch
from torch.distributed.fsdp import ShardingStrategy, FullStateDictConfig, StateDictType, FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy, enable_wrap, wrap

def setup(model):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = FSDP(model, auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.cuda.current_device())
    return model

def train(model, loader, optimizer):
    for batch in loader:
        loss = model(batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()

def save(model, rank):
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        state = model.state_dict()
    with FSDP.summon_full_params(model):
        pass
"""
# torch's tutorial "Getting Started with Distributed Data Parallel", shortened.
DDP_TUTORIAL = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def demo(rank, world_size):
    model = ToyModel().to(rank)
    ddp_model = DDP(model, device_ids=[rank])
    loss_fn(ddp_model(torch.randn(20, 10)), labels).backward()
    with ddp_model.no_sync():
        pass
    torch.save(ddp_model.module.state_dict(), "checkpoint")
"""
# DeepSpeed's page "Getting Started", shortened.
DEEPSPEED_PAGE = """\
import deepspeed
deepspeed.init_distributed()
config = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": False}, "bf16": {"enabled": True}}
with deepspeed.zero.Init():
    net = Net()
model_engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for step, batch in enumerate(loader):
    loss = model_engine(batch)
    model_engine.backward(loss)
    model_engine.step()
model_engine.save_checkpoint(folder, step)
"""
TORCH_FSDP2 = """\
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy, FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
fully_shard(model, mp_policy=Policy())
model.set_symm_mem_for_comm()
"""
CLEAN = "import torch, os\nfrom torch.nn.parallel import DataParallel\nx = os.path.join('a', 'b')\nm.step()\nm.module\n"


def lines(advice: list[Advice]) -> dict[int, list[str]]:
    """Returns the composed lines, by the line that they replace."""
    return {each.line: [*each.write] for each in advice if not each.was}


def rows(advice: list[Advice]) -> set[tuple[int, str]]:
    return {(each.line, each.was) for each in advice if each.was}


def test_a_program_for_fsdp1() -> None:
    advice = find(FSDP1_TUTORIAL)
    names = "FSDPModule, MixedPrecisionPolicy, fully_shard, hsdp_mesh, wrap_groups"
    assert lines(advice) == {
        6: [f"from fsdp2 import {names.replace('FSDPModule, ', '')}"],
        7: ["from fsdp2 import FSDPModule"],
        8: ["from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy"],
        12: [
            "options = dict(mesh=hsdp_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.bfloat16))",
            "for group in wrap_groups(model, policy):",
            "    fully_shard(group.module, **{**options, **group.options})",
            "fully_shard(model, **options)",
        ],
        22: ["torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"],
    }
    assert rows(advice) >= {
        (12, "`auto_wrap_policy=policy`"),
        (13, "`MixedPrecision(param_dtype, reduce_dtype)`"),
        (14, "`HYBRID_SHARD`; `_HYBRID_SHARD_ZERO2`"),
        (15, "`device_id`"),
        (27, "`state_dict_type(FULL_STATE_DICT)`"),
        (29, "`summon_full_params(m, recurse, writeback, rank0_only, offload_to_cpu)`"),
    }


def test_a_program_for_ddp() -> None:
    advice = find(DDP_TUTORIAL)
    assert lines(advice) == {
        2: ["from fsdp2 import replicate, sync_module_states"],
        6: [
            "sync_module_states(model)  # unless all ranks build, or load, the same weights",
            "ddp_model = replicate(model)",
        ],
    }
    found = rows(advice)
    assert {line for line, _ in found} == {6, 8, 10}
    assert (10, "`model.module`, names that begin with `module.`") in found


def test_a_program_for_deepspeed() -> None:
    advice = find(DEEPSPEED_PAGE)
    assert lines(advice) == {
        1: ["from fsdp2 import fully_shard, wrap_groups"],
        6: ["for group in wrap_groups(net):", "    fully_shard(group.module, **group.options)", "fully_shard(net)"],
        9: ["loss.backward()"],
        10: ["optimizer.step()", "optimizer.zero_grad()"],
    }
    found = rows(advice)
    assert {(3, "stage 3"), (3, "`bf16.enabled`"), (4, "`zero.Init()`")} <= found
    assert (3, "`fp16`, `loss_scale`") not in found, "it is not enabled"
    assert {line for line, _ in found} == {2, 3, 4, 9, 10, 11}


def test_a_configuration_of_deepspeed() -> None:
    text = '{"zero_optimization": {\n  "stage": 2,\n  "offload_param": {"device": "cpu"}\n}, "unknown": null}'
    found = rows(find(text, is_json=True))
    assert found == {(2, "stage 2"), (3, "`offload_param`, `offload_optimizer`")}


def test_a_program_for_torchs_fsdp2() -> None:
    advice = find(TORCH_FSDP2)
    assert lines(advice) == {
        1: ["from fsdp2 import fully_shard"],
        2: ["from fsdp2 import FSDPModule, MixedPrecisionPolicy as Policy"],
    }
    assert {line for line, _ in rows(advice)} == {5}


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_arguments_of_a_wrapper(strategy: str) -> None:
    imports = "from torch.distributed.fsdp import *\n"
    names = "FullyShardedDataParallel as F, ShardingStrategy as S, CPUOffload"
    text = imports.replace("*", names) + f"x = F(net, group, S.{strategy}, CPUOffload(offload_params=True))"
    ((*_, last),) = [each for line, each in lines(find(text)).items() if line == 2]
    first = 'mesh=DeviceMesh.from_group(group, "cuda")'
    assert (
        last
        == {
            "NO_SHARD": f"x = replicate(net, {first}, offload_policy=CPUOffloadPolicy())",
            "SHARD_GRAD_OP": f"x = fully_shard(net, reshard_after_forward=False, {first}, "
            "offload_policy=CPUOffloadPolicy())",
            "FULL_SHARD": f"x = fully_shard(net, {first}, offload_policy=CPUOffloadPolicy())",
            "_HYBRID_SHARD_ZERO2": "x = fully_shard(net, mesh=hsdp_mesh(), reshard_after_forward=False, "
            "offload_policy=CPUOffloadPolicy())",
        }[strategy]
    )


def test_composed_lines_are_programs_with_names_of_fsdp2() -> None:
    for text in (FSDP1_TUTORIAL, DDP_TUTORIAL, DEEPSPEED_PAGE, TORCH_FSDP2):
        for written in lines(find(text)).values():
            for node in ast.walk(ast.parse("\n".join(written))):
                if isinstance(node, ast.ImportFrom) and node.module == "fsdp2":
                    assert {alias.name for alias in node.names} <= {*fsdp2.__all__}


# ---- the command


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp2", "migrate", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_changes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    files = {"one.py": DDP_TUTORIAL, "clean.py": CLEAN, "config.json": '{"zero_optimization": {"stage": 1}}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert call(monkeypatch, str(tmp_path / "clean.py")) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'clean.py'}: nothing to migrate\n"
    assert call(monkeypatch, *(str(tmp_path / name) for name in files)) == 1
    shown = capsys.readouterr().out
    assert "    6  ddp_model = DDP(model, device_ids=[rank])\n" in shown
    assert "     + ddp_model = replicate(model)\n" in shown
    assert "       DDP: `device_ids`, `output_device`, `dim` -> nothing: the device of the mesh." in shown
    assert "       DeepSpeed: stage 1 -> `reshard_after_forward=False`" in shown
    assert {name: (tmp_path / name).read_text() for name in files} == files
    (tmp_path / "broken.py").write_text("def (")
    assert call(monkeypatch, str(tmp_path / "broken.py")) == 2
    assert call(monkeypatch, str(tmp_path / "missing.py")) == 2
    assert "missing.py" in capsys.readouterr().err


# ---- the table

PATTERNS = [(row, pattern) for row in ROWS for pattern in row.finds]
FSDP = "torch.distributed.fsdp"
MODULES = {"FSDP1": FSDP, "DDP": "torch.nn.parallel", "DeepSpeed": "deepspeed"}


def program_with(row: Row, pattern: str) -> str:
    """Returns a program that has what a pattern is to find."""
    if row.library == "DDP" and pattern == "Join":
        return "from torch.distributed.algorithms.join import Join\nJoin([m])"
    wrapper = {"FSDP1": "FullyShardedDataParallel", "DDP": "DistributedDataParallel"}.get(row.library, "initialize")
    module = MODULES.get(row.library, FSDP)
    target = "m, o, _, _" if row.library == "DeepSpeed" else "m"
    if row.library == "torch's FSDP2":
        wrapper = "fully_shard"
    imported = f"from {module} import {wrapper}\n{target} = {wrapper}(net)\n"
    if pattern[0] in ".~":
        return f"{imported}m.{pattern[1:]}(x)"
    if pattern[0] == "'":
        key, _, value = pattern.partition("=")
        return f"{imported}config = {{{key}: {value or '1'}}}"
    name, opened, key = pattern.partition("(")
    inside = key.rstrip(")") if "=" in key else f"{key.rstrip(')')}=1"
    top = name.partition(".")[0]
    if pattern == wrapper:
        return imported
    if top == "wrap":
        return f"import torch.distributed.fsdp.wrap as wrap\n{name}(x)"
    if top == "deepspeed":
        return f"import deepspeed\n{name}()"
    if top in ("zero", "zero_to_fp32"):
        return f"from deepspeed import {top}\n{name}({inside if opened else ''})"
    return f"from {module} import {top}\n{name}({inside})" if opened else f"from {module} import {top}\nx = {name}"


@pytest.mark.parametrize(("row", "pattern"), PATTERNS, ids=[f"{row.library} {pattern}" for row, pattern in PATTERNS])
def test_each_pattern_is_found(row: Row, pattern: str) -> None:
    advice = find(program_with(row, pattern))
    is_wrapper = pattern in ("DistributedDataParallel", "deepspeed.initialize")  # of which lines are composed
    assert any((each.was == row.was or (is_wrapper and not each.was)) and each.line >= 2 for each in advice)


def test_patterns_are_names_of_the_libraries() -> None:
    """A keyword that is misspelt here would never be found."""
    scaler = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler").ShardedGradScaler
    known: dict[str, Any] = {**vars(torch_fsdp), "ShardedGradScaler": scaler}
    known |= {"DistributedDataParallel": DistributedDataParallel, "wrap": importlib.import_module(f"{FSDP}.wrap")}
    of_replicate = {"ignored_modules"}  # of torch.distributed._composable.replicate, which makes a DDP
    checked = 0
    for row, pattern in PATTERNS:
        name, opened, key = pattern.partition("(")
        if row.library not in ("FSDP1", "DDP") or pattern[0] in ".~" or name == "Join":
            continue
        first, *others = name.split(".")
        found = known[first]
        for part in others:
            found = getattr(found, part)
        if torch.__version__ < "2.13" and key in ("forward_sync_buffers)", "batched_grad_copy)"):
            continue  # they are younger
        if opened and (row.library != "DDP" or key[:-1] not in of_replicate):
            assert key.rstrip(")").partition("=")[0] in inspect.signature(found).parameters, pattern
        checked += 1
    assert checked > 50


def plain(cell: str) -> str:
    """Returns a cell of a guide without links."""
    cell = re.sub(r" \(\[[^\]]*\]\([^)]*\)\)", "", cell)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)


def test_the_table_is_that_of_the_guides() -> None:
    """Each row of the guides' tables for FSDP1, DDP and DeepSpeed is here, and each row here is in one of them."""
    guides: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((ROOT / "examples").rglob("*.md")):
        head = ""
        for line in path.read_text().splitlines():
            cells = [plain(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) != 2:
                head = ""
            elif not head:
                head = cells[0]
            elif not set("".join(cells)) <= set("-:"):
                guides.setdefault(head, set()).add((cells[0], cells[1]))
    for library in MODULES:
        assert {(row.was, row.write) for row in ROWS if row.library == library} == guides[library], library
    assert {(row.was, row.write) for row in ROWS if row.library == "torch's FSDP2"} <= guides["torch's FSDP2"]
