"""Tests plans in files: what `apply_plan` shards is what `Plan.apply` does, and wrong files are refused."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.codecs import Compression, Int8
from fsdp2.planning import apply
from helpers import fake_world
from models import CausalBlock, TinyGPT

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"checkpointing": True, "reshard_after_forward": False},
    {"replicas": 2, "wire_dtype": torch.bfloat16},
    {"blocks_per_call": 2},
]


def planned(**arguments: Any) -> tuple[Any, fsdp2.Plan]:
    torch.manual_seed(0)
    model = TinyGPT(depth=4, tied=True)
    given = {"ranks": 4, "batch": lambda: torch.zeros(2, 4, dtype=torch.long), "device": "cpu", **arguments}
    return model, fsdp2.plan(model, **given)


def mesh_for(setting: fsdp2.Setting) -> Any:
    shape = (4,) if setting.replicas == 1 else (setting.replicas, setting.num_shards)
    return init_device_mesh("cpu", shape)


OPTIONS = {CausalBlock: {"reshard_after_forward": False, "mp_policy": BF16}}


@pytest.mark.parametrize(
    ("setting", "policy"), [(each, (CausalBlock, OPTIONS)[i % 2]) for i, each in enumerate(SETTINGS)]
)
def test_a_saved_plan_shards_alike(setting: dict[str, Any], policy: Any, tmp_path: Path) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with fake_world(4):
        model, plan = planned(settings=[setting], policy=policy, mp_policy=BF16)
        plan.save(tmp_path / "plan.json")
        assert json.loads((tmp_path / "plan.json").read_text()) == plan.to_dict()
        mesh = mesh_for(plan.best.setting)
        plan.apply(mesh)
        again, _ = planned(settings=[{}])
        assert fsdp2.apply_plan(again, tmp_path / "plan.json", mesh) is again
        assert fsdp2.describe(again) == fsdp2.describe(model)
        outputs = []
        for each in (model, again):
            output = each(tokens)
            output.float().sum().backward()
            outputs.append(output)
        assert torch.equal(*outputs)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)


def test_policies_of_modules_are_in_it(tmp_path: Path) -> None:
    with fake_world(4):
        offload = {CausalBlock: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
        _, plan = planned(settings=[{}], policy=offload, mp_policy=BF16)
        saved = plan.to_dict()
        assert saved["calls"][0]["offload_policy"] == {"policy": "CPUOffloadPolicy", "pin_memory": False}
        assert saved["mp_policy"]["param_dtype"] == {"dtype": "bfloat16"}
        assert saved["predicted"]["total"] == plan.best.total
        model, _ = planned(settings=[{}])
        with mock.patch.object(apply, "fully_shard", side_effect=fsdp2.fully_shard) as sharded:
            fsdp2.apply_plan(model, saved, init_device_mesh("cpu", (4,)))
        *blocks, root = [call.kwargs["offload_policy"] for call in sharded.call_args_list]
        assert blocks == [CPUOffloadPolicy(pin_memory=False)] * 4
        assert root == OffloadPolicy()
        _, plan = planned(settings=[{}], mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8())))
        with pytest.raises(ValueError, match=r"mp_policy.compression.reduce_scatter: expected what a file can hold"):
            plan.to_dict()


def test_what_is_refused(tmp_path: Path) -> None:
    with fake_world(4):
        model, plan = planned(settings=[{}])
        saved, mesh = plan.to_dict(), init_device_mesh("cpu", (4,))
        (tmp_path / "list.json").write_text("[]")
        (tmp_path / "text.json").write_text("plan")
        (tmp_path / "deep.json").write_text("[" * 100_000)
        (tmp_path / "digits.json").write_text('{"format": %s}' % ("1" * 5000))
        (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
        os.mkfifo(tmp_path / "fifo.json")
        (tmp_path / "calls.json").write_text(json.dumps({**saved, "calls": ["text"]}))
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            (tmp_path / "none.json", mesh, FileNotFoundError, "none.json"),
            (tmp_path / "list.json", mesh, ValueError, "expected a plan, got a list"),
            (tmp_path / "text.json", mesh, ValueError, "expected a plan in JSON"),
            *(
                (
                    tmp_path / f"{name}.json",
                    mesh,
                    ValueError,
                    f"{name}.json: expected a plan in JSON, got something else",
                )
                for name in ("deep", "digits", "bytes")
            ),
            (tmp_path / "fifo.json", mesh, ValueError, "fifo.json: expected a file, got a folder or a device"),
            (tmp_path, mesh, ValueError, "expected a file, got a folder or a device"),
            (tmp_path / "calls.json", mesh, ValueError, "calls.json: expected what Plan.to_dict returns"),
            ({**saved, "calls": [{"modules": []}]}, mesh, ValueError, "expected what Plan.to_dict returns"),
            ({**saved, "format": 9}, mesh, ValueError, "expected a plan of format 1, got 9"),
            ({"format": 1}, mesh, ValueError, "expected what Plan.to_dict returns"),
            ({**saved, "calls": [{"modules": ["blocks.9"]}]}, mesh, ValueError, "blocks.9: the plan shards it"),
            (saved, init_device_mesh("cpu", (2, 2)), ValueError, "the plan is for 4 ranks"),
        ]
        for given, on, error, text in wrong:
            with pytest.raises(error, match=text):
                fsdp2.apply_plan(model, given, on)
            assert not isinstance(model, fsdp2.FSDPModule)
        with pytest.raises(TypeError, match="model: expected"):
            fsdp2.apply_plan("model", saved, mesh)  # type: ignore[arg-type]
        fsdp2.apply_plan(model, saved, mesh)


def test_a_plan_in_yaml(tmp_path: Path) -> None:
    """The file's ending chooses the format; both files say the same, and shard alike."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    with fake_world(4):
        model, plan = planned(settings=[{"reshard_after_forward": False}], policy=CausalBlock, mp_policy=BF16)
        plan.save(tmp_path / "plan.yaml")
        assert yaml.safe_load((tmp_path / "plan.yaml").read_text()) == plan.to_dict()
        assert not (tmp_path / "plan.yaml").read_text().startswith("{")
        mesh = mesh_for(plan.best.setting)
        plan.apply(mesh)
        again, _ = planned(settings=[{}])
        fsdp2.apply_plan(again, tmp_path / "plan.yaml", mesh)
        assert fsdp2.describe(again) == fsdp2.describe(model)
        for text, message in (
            ("a: [1", "expected a plan in YAML"),
            ("[" * 9999, "expected a plan in YAML"),
            ("- 1", "expected a plan, got a list"),
        ):
            (tmp_path / "wrong.yml").write_text(text)
            with pytest.raises(ValueError, match=message):
                fsdp2.apply_plan(planned(settings=[{}])[0], tmp_path / "wrong.yml", mesh)


def test_yaml_without_its_package(tmp_path: Path) -> None:
    with fake_world(4), mock.patch.dict("sys.modules", {"yaml": None}):
        _, plan = planned(settings=[{}])
        with pytest.raises(ModuleNotFoundError, match=r"needs the package PyYAML: pip install 'fsdp2\[yaml\]'"):
            plan.save(tmp_path / "plan.yaml")
        assert not (tmp_path / "plan.yaml").exists()
