"""Tests what fsdp2 changes in a process: the identities of all attributes of all modules and classes of torch, and of
the items of containers among them, are compared before and after. fsdp2/README.md lists what is changed.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from documents import ROOT, table_rows
from fsdp2 import fully_shard
from helpers import fake_world

SCRIPT = r"""
import gc, json, os, sys, warnings
from collections.abc import Mapping
from weakref import WeakKeyDictionary
import torch, torch.distributed as dist, torch.distributed.tensor, torch.profiler
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed._composable.contract
import torch.distributed.tensor.parallel, torch.nn.utils.parametrize, torch.nn.utils.prune
from torch import nn
{imports}
warnings.simplefilter("ignore")

def items(value):
    if value is os.environ:  # a name of torch 2.15; it makes new strings whenever it is read
        return sorted(value.items())
    if type(value) in (list, tuple, set, frozenset):
        return [id(each) for each in value]
    if isinstance(value, Mapping) and not isinstance(value, WeakKeyDictionary):
        return [(repr(key)[:80], id(each)) for key, each in [*value.items()]]
    return len(value) if isinstance(value, WeakKeyDictionary) else None

def names():
    found = {{}}
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "torch" and isinstance(vars(sys).get("modules").get(name), type(sys)):
            found.update({{(name, key): (value, items(value)) for key, value in [*vars(module).items()]}})
    for cls in [each for each in gc.get_objects() if isinstance(each, type)]:
        if str(cls.__module__).partition(".")[0] == "torch":
            name = f"{{cls.__module__}}.{{cls.__qualname__}}"
            found.update({{(name, key): (value, items(value)) for key, value in [*vars(cls).items()]}})
    return found

def changed(before, after):
    # Modules and classes that torch has loaded meanwhile are not counted, as they are whole.
    owners = {{owner for owner, _ in before}}
    found = []
    for key in {{*before, *after}}:
        old, new = before.get(key, (None, None)), after.get(key, (None, None))
        is_submodule = f"{{key[0]}}.{{key[1]}}" in sys.modules
        if key[0] in owners and not is_submodule and (old[0] is not new[0] or old[1] != new[1]):
            found.append(".".join(key))
    return sorted(found)

def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

def build():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
train(build())  # fills what torch caches, and so does a DTensor
dtensor = dist.tensor.distribute_tensor(torch.ones(4), mesh, [dist.tensor.Shard(0)])
dtensor.norm().full_tensor()
plain, finders = names(), [*sys.meta_path]
import fsdp2
imported, finders_of_import = changed(plain, names()), [each for each in sys.meta_path if each not in finders]
model = build()
for module in (model[0], model):
    fsdp2.fully_shard(module, mesh=mesh)
train(model)
trained, finders_of_training = changed(plain, names()), [each for each in sys.meta_path if each not in finders]
dist.destroy_process_group()
before = names()
nn.Linear.extra_repr = lambda self: ""
torch.save = lambda *_: None
torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX = "other"
torch.distributed.tensor.__all__.append("planted")
planted = changed(before, names())
print(json.dumps([imported, trained, planted, len(finders_of_import), len(finders_of_training)]))
"""
# What torch itself counts, and keeps for later, in any training with DTensors: names that begin so.
OF_TORCH = (
    "torch._guards.",
    "torch._opaque_base.",
    "torch._ops.",
    "torch._subclasses.",
    "torch.autograd.profiler._cupti_monitor",
    "torch.distributed.tensor._redistribute._planner_cache",
    "torch.fx.operator_schemas._SCHEMA_TO_SIGNATURE_CACHE",
    "torch.jit._builtins._builtin_table",
    "torch.ops.",
    "torch.profiler._cupti_monitor",
    "torch.utils._stats.simple_call_counter",
    "torch.utils.hooks.RemovableHandle.next_id",
)
ALWAYS = {
    # Two lists, each of which has a second name.
    "torch.optim.optimizer._foreach_supported_types",
    "torch.distributed.tensor._optim_foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.distributed.tensor._util_foreach_supported_types",
    # Public functions of torch put hooks there.
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
    "torch.autograd._engine_run_backward",
    "torch.autograd.graph.disable_saved_tensors_hooks",
}
# A class of torch's registry of rules for operations on subclasses of Tensor. There torch looks for ours up to 2.12.
if torch.__version__ < "2.13":
    ALWAYS.add("torch._library.simple_registry.GenericTorchDispatchRuleHolder.find")
# An entry for each sharded module, which goes with it.
OF_MODULES = {"torch.distributed._composable_state._module_state_mapping"}
# Only where a program imports these modules.
WHERE_IMPORTED = {
    "torch._dynamo.trace_rules.SKIP_DIRS",
    "torch._dynamo.trace_rules.SKIP_DIRS_RE",
    "torch.distributed.pipelining.stage._PipelineStageBase.backward_maybe_with_nosync",
    "torch.distributed.tensor.debug.CommDebugMode.__torch_dispatch__",
}
IMPORTS = "import torch._dynamo, torch.distributed.pipelining, torch.distributed.tensor.debug"


def test_what_is_changed(tmp_path: Path) -> None:
    script = SCRIPT.format(imports=IMPORTS, store=tmp_path / "store")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported, trained, planted, finders_of_import, finders_of_training = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in imported if not name.startswith(OF_TORCH)] == []
    assert {name for name in trained if not name.startswith(OF_TORCH)} == ALWAYS | OF_MODULES | WHERE_IMPORTED
    assert {
        "torch.nn.modules.linear.Linear.extra_repr",
        "torch.save",
        "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX",
        "torch.distributed.tensor.__all__",
    } == {name for name in planted if not name.startswith(OF_TORCH)}
    assert finders_of_import == finders_of_training == 0, "none waits for modules that are there"


def test_readme_lists_it() -> None:
    rows = table_rows(ROOT / "fsdp2" / "README.md")["What is changed of torch"]
    text = "\n".join(cell for cells in rows for cell in cells)
    names = ALWAYS | OF_MODULES | WHERE_IMPORTED
    hidden = {name for name in names if name.startswith("torch.distributed.tensor._")}  # second names of one list
    assert [name for name in sorted(names - hidden) if f"`{name}`" not in text] == []


def test_collectives_are_torchs_again_when_no_pass_of_a_conditional_model_runs() -> None:
    names = ("all_reduce", "broadcast", "barrier")
    before = [vars(dist)[name] for name in names]

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append([vars(dist)[name] for name in names] == before)
            if fails:
                raise ValueError("a bad sample")
            return super().forward(x)

    inside: list[bool] = []
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), Looks(4, 4))
        fully_shard(model[0], conditional=True)
        fully_shard(model)
        for fails in (False, True):
            with pytest.raises(ValueError, match="a bad sample") if fails else contextlib.nullcontext():
                model(torch.ones(2, 4)).sum().backward()
            assert [vars(dist)[name] for name in names] == before
    assert inside == [False, False]


def test_torchs_name_of_groups_is_in_its_place_behind_the_group() -> None:
    with fake_world(4):
        before = dist.distributed_c10d._hash_ranks_to_str
        model = fully_shard(nn.Linear(8, 8), reshard_after_forward=2)
        assert model.weight.shape == (8, 8)
        assert dist.distributed_c10d._hash_ranks_to_str is before
