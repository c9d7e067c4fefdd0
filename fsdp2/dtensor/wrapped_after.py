"""Refuses to wrap a sharded model in FullyShardedDataParallel, or to compile it by torch.jit.script."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..bridge.when_imported import when_imported
from ..engine.compat import EXPORT_PLAIN
from ..engine.owners import owners_by_id
from .switches import is_on, switched


def refuse_fsdp1_around() -> None:
    """Makes FullyShardedDataParallel raise an error that says what to do. Torch's own is about storages."""
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _guard_fsdp1)


def _guard_fsdp1(imported: ModuleType) -> None:
    fsdp1: Any = imported.FullyShardedDataParallel
    init = fsdp1.__init__

    def checked(self: nn.Module, module: Any, *args: Any, **options: Any) -> None:
        left = {id(each) for each in _ignored(options)}
        name, count = _find_sharded(module, left)
        if count:
            raise ValueError(
                f"FullyShardedDataParallel({type(module).__name__}): fully_shard manages {name} ({count} parameters in "
                "all). Remove FullyShardedDataParallel, and apply fully_shard to the whole model, too; or pass what is "
                "sharded as ignored_states."
            )
        init(self, module, *args, **options)

    fsdp1.__init__ = switched("fsdp-around", init, checked)


def _ignored(options: dict[str, Any]) -> Iterable[Tensor]:
    """Yields the parameters that the arguments of FullyShardedDataParallel tell it to leave alone."""
    for name in ("ignored_modules", "ignored_parameters", "ignored_states"):
        for each in options.get(name) or ():
            if isinstance(each, nn.Module):
                yield from each.parameters()
            else:
                yield each


def refuse_script_after() -> None:
    """Makes torch.jit.script raise an error that says what to do. Torch's own is about hooks, or about names."""
    script = torch.jit.script

    @wraps(script)
    def checked(
        obj: Any, optimize: Any = None, _frames_up: int = 0, _rcb: Any = None, example_inputs: Any = None
    ) -> Any:
        name, count = _find_sharded(obj, ()) if is_on("script-after") else ("", 0)
        if count:
            raise NotImplementedError(
                f"torch.jit.script({type(obj).__name__}): TorchScript can't gather {name}, which fully_shard manages. "
                f"{EXPORT_PLAIN} To make training fast, use torch.compile."
            )
        return script(obj, optimize, _frames_up + 1, _rcb, example_inputs)  # it looks names up where it is called

    torch.jit.script = checked


def _find_sharded(module: Any, left: Collection[int]) -> tuple[str, int]:
    """Returns the name of a parameter in `module` that fully_shard manages, but those of the identities `left`, and
    the number of all of them.
    """
    if not isinstance(module, nn.Module):
        return "", 0
    owners = owners_by_id()
    found = [name for name, p in module.named_parameters() if id(p) in owners and id(p) not in left]
    return found[0] if found else "", len(found)
