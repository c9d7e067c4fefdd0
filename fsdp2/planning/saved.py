"""Writes what a plan has chosen as JSON or YAML, and shards a model as such a file says: without planning again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..engine.state import require_module
from . import apply
from .policies import OPTIONS, WrapGroup
from .settings import Setting

_FORMAT = 1


def to_dict(
    model: nn.Module,
    calls: Sequence[WrapGroup],
    policy: MixedPrecisionPolicy,
    setting: Setting,
    predicted: Mapping[str, float | None],
) -> dict[str, Any]:
    """Returns values of JSON that say how a model is sharded.

    Raises:
        ValueError: a policy has a function or a codec, which no file holds.
    """
    names = {module: name for name, module in model.named_modules()}
    return {
        "format": _FORMAT,
        "setting": {name: _plain(f"setting.{name}", value) for name, value in asdict(setting).items()},
        "mp_policy": _plain("mp_policy", policy),
        "calls": [
            {
                "modules": [names[module] for module in call.modules],
                **({"by_rows": True} if call.by_rows else {}),
                **{name: _plain(name, value) for name, value in call.options.items()},
            }
            for call in calls
        ],
        "predicted": dict(predicted),
    }


def apply_plan(model: nn.Module, plan: str | os.PathLike[str] | Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """Shards a model as a plan says that `Plan.save` has written, and returns it. Every rank of the mesh must call it.

    It does what `Plan.apply` does, without planning: plan where there is time, keep the file with the program, and
    read it in each run.

    Args:
        model: one whose modules have the names of the planned one's.
        plan: a file, of YAML if its name ends so (`.yaml`, `.yml`), else of JSON; or what `Plan.to_dict` has returned.
        mesh: a DeviceMesh of as many ranks as the plan; of two axes, (replicas, ranks that shard), if it replicates.
            If replicas share what rests, its axes have names.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: it is one of YAML, and the package PyYAML is not installed.
        ValueError: it is no plan, or one of another format; the model lacks a module; the mesh has other sizes.
        TypeError: an argument.

    Example:
        ```python
        fsdp2.plan(model_on_meta, ranks=8, batch=make_batch, memory="80GB").save("plan.json")  # once, anywhere
        model = fsdp2.apply_plan(model, "plan.json", mesh)  # in each run, on every rank
        ```
    """
    require_module("model", model, "apply_plan")
    if not isinstance(plan, str | os.PathLike | Mapping):
        raise TypeError(f"plan: expected a file, or what Plan.to_dict has returned, got {type(plan).__name__}")
    what = "plan" if isinstance(plan, Mapping) else str(plan)
    saved = dict(plan) if isinstance(plan, Mapping) else _read(Path(plan))
    if saved.get("format") != _FORMAT:
        raise ValueError(f"{what}: expected a plan of format {_FORMAT}, got {saved.get('format')!r}. Plan again.")
    try:
        setting = Setting(**{name: _value(each) for name, each in saved["setting"].items()})
        policy = _value(saved["mp_policy"])
        calls = [*map(_call, saved["calls"])]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{what}: expected what Plan.to_dict returns, got another dict ({error})") from error
    apply.check_mesh(mesh, setting)
    modules, groups = dict(model.named_modules()), []
    for names, options, by_rows in calls:
        if unknown := [name for name in names if name not in modules]:
            raise ValueError(f"{what}: {unknown[0]}: the plan shards it, and {type(model).__name__} has no such module")
        groups.append(WrapGroup(names[0], tuple(modules[name] for name in names), options, by_rows))
    return apply.shard(model, groups, policy, setting, mesh)


def _call(saved: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], bool]:
    """Returns the names of modules of a fully_shard call, its options, and whether it shards an embedding by rows."""
    first, *others = saved["modules"]
    options = {name: _value(each) for name, each in saved.items() if name in OPTIONS}
    return [str(first), *map(str, others)], options, bool(saved.get("by_rows", False))


def save(saved: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes a plan, in the format that the file's name ends with."""
    path = Path(path)
    text = _yaml(path).safe_dump(dict(saved), sort_keys=False) if _is_yaml(path) else json.dumps(saved, indent=2) + "\n"
    path.write_text(text)


def _read(path: Path) -> dict[str, Any]:
    kind, parse, wrong = "JSON", json.loads, ValueError
    if path.exists() and not path.is_file():  # a FIFO is never read to its end
        raise ValueError(f"{path}: expected a file, got a folder or a device")
    if _is_yaml(path):
        yaml = _yaml(path)
        kind, parse, wrong = "YAML", yaml.safe_load, yaml.YAMLError
    try:
        found = parse(path.read_text())
    except (wrong, ValueError, RecursionError) as error:  # ValueError: no text
        raise ValueError(f"{path}: expected a plan in {kind}, got something else ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a plan, got a {type(found).__name__}")
    return found


def _is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def _yaml(path: Path) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: a plan in YAML needs the package PyYAML: pip install 'fsdp2[yaml]'. Or name the file .json."
        ) from error
    return yaml


# ---- values


def _plain(name: str, value: Any) -> Any:
    """Returns a value as JSON has it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (MixedPrecisionPolicy, OffloadPolicy)):
        given = {each.name: getattr(value, each.name) for each in fields(value)}
        usual = type(value)()
        changed = {key: each for key, each in given.items() if each != getattr(usual, key)}
        return {"policy": type(value).__name__, **{key: _plain(f"{name}.{key}", each) for key, each in changed.items()}}
    raise ValueError(f"{name}: expected what a file can hold (dtypes, numbers, True and False), got {value!r}")


def _value(plain: Any) -> Any:
    """Returns what `_plain` has made JSON of."""
    if not isinstance(plain, dict):
        return plain
    if "dtype" in plain:
        return getattr(torch, plain["dtype"])
    classes = {cls.__name__: cls for cls in (MixedPrecisionPolicy, CPUOffloadPolicy, OffloadPolicy)}
    return classes[plain["policy"]](**{name: _value(each) for name, each in plain.items() if name != "policy"})
