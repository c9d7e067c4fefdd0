"""Refuses DistributedDataParallel around a sharded model, which a program may have used before."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from ..bridge.when_imported import when_imported
from ..engine.owners import owners_by_id
from ..engine.torch_names import is_shared_with_ddp
from .switches import switched


def refuse_ddp_around() -> None:
    """Makes DDP raise an error that says what to do. Torch's own error is about views of DTensors."""
    when_imported("torch.nn.parallel.distributed", _guard)


def _guard(imported: ModuleType) -> None:
    ddp: Any = imported.DistributedDataParallel
    init = ddp.__init__

    def checked(self: nn.Module, module: Any, *args: Any, **options: Any) -> None:
        if isinstance(module, nn.Module) and not is_shared_with_ddp(module):
            _check(module)
        init(self, module, *args, **options)

    ddp.__init__ = switched("ddp-around", init, checked)


def _check(module: nn.Module) -> None:
    """Refuses a module with sharded parameters.

    Raises:
        ValueError: some parameters of `module` are sharded.
    """
    owners = owners_by_id()
    sharded = {name: owners[id(param)].param for name, param in module.named_parameters() if id(param) in owners}
    if sharded:
        name, param = next(iter(sharded.items()))
        kind, what = "DistributedDataParallel", f"DistributedDataParallel({type(module).__name__})"
        if isinstance(module, nn.ParameterList):  # which torch's replicate builds when the first forward begins
            kind, what, name = "replicate", "torch's replicate", param.name
        raise ValueError(
            f"{what}: fully_shard manages {name} ({len(sharded)} parameters in all), and averages their gradients. "
            f"Remove {kind}; of a model that is sharded in part, apply fully_shard or fsdp2.replicate to the whole, "
            "too."
        )
