"""Tests patch_torch() and what programs for torch's FSDP2 use: names, classes, states, torch's own objects."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import replicate as ddp_replicate
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import fully_shard, patch_torch
from fsdp2.__main__ import STARTUP, python_options
from fsdp2.bridge import patch
from fsdp2.torch_private.when_imported import when_imported
from helpers import NIGHTLY, fake_world

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

POLICIES = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy")
CALLED = ("fully_shard", "FSDPModule", "register_fsdp_forward_method")
YOUNG = ("DataParallelMeshDims", "GradientReductionHandle")  # torch has them since 2.13 and 2.15
ALL = (*POLICIES, *CALLED, "UnshardHandle", "share_comm_ctx", *YOUNG)
SITES = {
    "torch.distributed.fsdp": ALL,
    "torch.distributed.fsdp._fully_shard": ALL,
    "torch.distributed.fsdp._fully_shard._fully_shard": (*CALLED, "UnshardHandle", "share_comm_ctx"),
    "torch.distributed._composable.fsdp": (*POLICIES, *CALLED),
    "torch.distributed._composable.fsdp.fully_shard": (*CALLED, "UnshardHandle"),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate", "FSDPModule", "ReplicateModule"),
}
NAMES = [
    (site, name)
    for site, names in SITES.items()
    for name in names
    if name not in YOUNG or hasattr(importlib.import_module(site), name)
]


def found(site: str, name: str) -> Any:
    """What a program gets that imports it now."""
    names: dict[str, Any] = {}
    exec(f"from {site} import {name}", names)
    assert names[name] is getattr(importlib.import_module(site), name)
    return names[name]


def ours(name: str) -> Any:
    return patch.ReplicateModule if name == "ReplicateModule" else getattr(fsdp2, name)


@pytest.fixture
def client() -> Iterator[Any]:
    """A module that took torch's function before, under a name of its own."""
    module = sys.modules["a_client"] = ModuleType("a_client")
    module.shard = torch_fsdp.fully_shard  # type: ignore[attr-defined]
    yield module
    del sys.modules["a_client"]


def test_every_name_is_ours_meanwhile_and_torchs_afterwards() -> None:
    before = {key: found(*key) for key in NAMES}
    with patch_torch():
        for site, name in NAMES:
            assert found(site, name) is ours(name), (site, name)
            assert before[site, name] is not ours(name)
    assert {key: found(*key) for key in NAMES} == before


def test_modules_that_took_a_name_before_get_ours(client: Any) -> None:
    torchs = [client.shard]  # a list is no name of a module
    with patch_torch():
        assert client.shard is fully_shard
        client.late = torchs[0]
        patch_torch().undo()  # reaches what was taken since
        assert client.late is fully_shard
    assert [client.shard, client.late] == torchs * 2


def test_calls_nest_and_count(client: Any) -> None:
    torchs = [client.shard]
    outer = patch_torch()
    with patch_torch() as inner:
        inner.undo()
        assert client.shard is fully_shard
    assert client.shard is fully_shard
    with patch_torch():
        outer.undo()
        outer.undo()
        assert client.shard is fully_shard
    assert client.shard is torchs[0]


def test_names_that_the_user_replaced_stay(client: Any) -> None:
    with patch_torch():
        client.shard = print
    assert client.shard is print


def test_modules_of_torch_that_were_imported_meanwhile_are_torchs_again() -> None:
    """torch.distributed.pipelining, say: it would take its own FSDP2's modules for plain ones."""
    torchs = [torch_fsdp.FSDPModule]
    try:
        with patch_torch():
            module: Any = ModuleType("torch.late")
            sys.modules["torch.late"] = module
            module.FSDPModule = torch_fsdp.FSDPModule
            assert module.FSDPModule is fsdp2.FSDPModule
        assert module.FSDPModule is torchs[0]
    finally:
        del sys.modules["torch.late"]


def test_classes() -> None:
    with fake_world(2), patch_torch():
        single = torch_fsdp.fully_shard(nn.Linear(4, 4))
        unit = torch_fsdp.fully_shard([nn.Linear(4, 4), nn.ReLU()])
        copied = found("torch.distributed._composable.replicate_with_fsdp", "replicate")(nn.Linear(4, 4))
    for module, cls in ((single, nn.Linear), (unit[0], nn.Linear), (unit[1], nn.ReLU), (copied, nn.Linear)):
        assert isinstance(module, fsdp2.FSDPModule)
        assert isinstance(module, cls)
        assert type(module).__name__ == f"FSDP{cls.__name__}"
        assert not isinstance(module, torch_fsdp.FSDPModule)
        assert isinstance(module, patch.ReplicateModule) == (module is copied)
    assert not isinstance(nn.Linear(1, 1), patch.ReplicateModule)


def test_references_to_torchs_own_functions_continue_to_work() -> None:
    kept = (torch_fsdp.fully_shard, torch_fsdp.FSDPModule)
    with fake_world(2), patch_torch():
        model = kept[0](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        assert isinstance(model, kept[1])
        model(torch.ones(2, 4)).sum().backward()
        assert kept[0].state(model) is not None
        assert fully_shard.state(model) is None  # type: ignore[attr-defined]
    with fake_world(2):
        torch_fsdp.fully_shard(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()


def test_torchs_policies_and_mesh_dims_are_taken_by_attribute() -> None:
    """Of a client that took these before the patch, or a user who changed one import line."""
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    with fake_world(4):
        for offload in (torch_fsdp.OffloadPolicy(), torch_fsdp.CPUOffloadPolicy(pin_memory=False)):
            model = fully_shard(nn.Linear(4, 4), mp_policy=policy, offload_policy=offload)
            assert model(torch.ones(2, 4)).dtype is torch.float64
            model.unshard()
            assert model.weight.dtype is torch.bfloat16
    if hasattr(torch_fsdp, "DataParallelMeshDims"):
        with fake_world(4):
            assert_cut_by(torch_fsdp.DataParallelMeshDims(shard="data"))


def assert_cut_by(dims: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = nn.Linear(4, 4, bias=False)
    whole = distribute_tensor(model.weight, mesh, (Replicate(), Shard(1)), src_data_rank=None)
    model.weight = nn.Parameter(whole)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model.weight.placements == (Shard(0), Shard(1))
    assert model.weight.to_local().shape == (2, 2)


def test_state_under_torchs_names() -> None:
    with fake_world(2):
        inner, outer = nn.Linear(4, 4), nn.Sequential(nn.ReLU())
        outer.append(fully_shard(inner, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
        fully_shard(outer)
    state = fully_shard.state(inner)  # type: ignore[attr-defined]
    root = outer._get_fsdp_state()
    assert state._mp_policy.param_dtype is torch.bfloat16
    assert list(root._state_ctx.all_states) == [root, state]
    assert [len(each._fsdp_param_groups) for each in (root, state)] == [0, 1]
    assert root._fsdp_param_group is None
    assert state._fsdp_param_group.reshard_after_backward
    inner.set_reshard_after_backward(False)
    assert not state._fsdp_param_group.reshard_after_backward
    with pytest.raises(AttributeError):
        state._fsdp_param_group.mesh_info = None
    assert state._auto_reshard_after_forward
    state._auto_reshard_after_forward = False
    assert [group.settings.reshard_after_forward for group in state.state.groups] == [True]
    state._auto_reshard_after_forward = True
    assert state._auto_reshard_after_forward
    assert fully_shard.state(nn.Linear(1, 1)) is None  # type: ignore[attr-defined]


def test_all_roots_that_share_reductions_are_finished() -> None:
    with fake_world(2):
        first, second = fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))
    assert first._get_fsdp_state()._comm_ctx is not second._get_fsdp_state()._comm_ctx
    fsdp2.share_comm_ctx([first, second])
    assert first._get_fsdp_state()._comm_ctx is second._get_fsdp_state()._comm_ctx


def test_torchs_composable_apis_know_our_modules() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        assert _get_module_state(model) is model._get_fsdp_state()
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            ddp_replicate(model)


# ---- what the command line stands on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "options"),
    [
        (["-m", "fsdp2"], []),
        (["-mfsdp2"], []),
        (["-u", "-X", "dev", "-m", "fsdp2"], ["-u", "-X", "dev"]),
        (["-um", "fsdp2"], ["-u"]),
        (["-m", "debugger", "--port", "1", "-m", "fsdp2"], ["-m", "debugger", "--port", "1"]),
    ],
)
def test_options_of_python_are_kept(before: list[str], options: list[str]) -> None:
    arguments = ["script.py", "-m", "fsdp2"]
    assert python_options(["python", *before, *arguments], arguments) == options


@pytest.mark.parametrize("before", [[], ["fsdp2"], ["-c", "run()"], ["fsdp2/__main__.py"]])
def test_other_ways_to_start_are_refused(before: list[str]) -> None:
    with pytest.raises(SystemExit, match="python -m fsdp2"):
        python_options(["python", *before, "script.py"], ["script.py"])


def test_action_waits_for_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    finders = list(sys.meta_path)
    when_imported("imported_late", lambda module: seen.append(module.value))
    cancel = when_imported("imported_late", lambda module: seen.append("cancelled"))
    cancel()
    assert importlib.util.find_spec("imported_late") is not None  # only looks
    assert seen == []
    import imported_late  # type: ignore[import-not-found]

    assert seen == [1]
    assert imported_late.__spec__.loader.get_source("imported_late") == "value = 1\n"
    assert sys.meta_path == finders
    when_imported("imported_late", lambda module: seen.append(module))
    assert seen == [1, imported_late]
    del sys.modules["imported_late"]


def test_startup_runs_what_it_hides_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([STARTUP, STARTUP, str(tmp_path)])}
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules, sys.modules['sitecustomize'].__file__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == f"the other one\nFalse {tmp_path / 'sitecustomize.py'}\n"


TRAINING = """
import torch
from torch.distributed.fsdp import fully_shard
model = torch.nn.Linear(2, 2)
{shard}
optimizer = torch.optim.SGD(model.parameters())
for _ in range({steps}):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
del model, optimizer
"""
SHARD = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
fully_shard(model)
"""


@pytest.mark.parametrize(
    ("rank", "shard", "steps", "says"),
    [("0", "", 2, True), ("0", SHARD, 2, False), *([("1", "", 2, False), (None, "", 0, False)] if NIGHTLY else [])],
)
def test_a_training_that_shards_nothing_is_told(rank: str | None, shard: str, steps: int, says: bool) -> None:
    """At the end, by the first rank: accelerate leaves FSDP out without a word where there is no accelerator."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": STARTUP}
    environment |= {} if rank is None else {"RANK": rank}
    command = [sys.executable, "-W", "ignore", "-c", TRAINING.format(shard=shard, steps=steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("fully_shard was never called in this process") == says


FIRST = ("torch.distributed.pipelining", "torch.distributed._composable.replicate_with_fsdp", "torch._dynamo")


@pytest.mark.parametrize("first", FIRST if NIGHTLY else FIRST[:1])
def test_programs_may_import_anything_first(first: str) -> None:
    """Each has torch.distributed.fsdp imported in the middle of its own import."""
    script = f"""
import {first}
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage
from torch.distributed._composable.replicate_with_fsdp import replicate
assert FSDPModule.__module__ == stage.FSDPModule.__module__ == "fsdp2.module", stage.FSDPModule
assert replicate.__module__ == "fsdp2.api"
"""
    environment = {**os.environ, "PYTHONPATH": STARTUP}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
