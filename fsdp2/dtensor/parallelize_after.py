"""Refuses tensor parallelism for a model that is sharded already. The other order works."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_module

from ..bridge.when_imported import when_imported
from ..engine.owners import sharded_owner
from .switches import switched


def refuse_parallelize_after() -> None:
    """Makes parallelize_module and distribute_module say what to do. Torch's own error is about device meshes."""
    _check_in(distribute_module.__globals__)
    when_imported("torch.distributed.tensor.parallel.style", lambda style: _check_in(vars(style)))


def _check_in(names: dict[str, Any]) -> None:
    distribute = names["distribute_tensor"]

    def checked(tensor: Tensor, *args: Any, **options: Any) -> DTensor:
        owner = sharded_owner(tensor) if isinstance(tensor, DTensor) else None
        if owner is not None:
            raise ValueError(
                f"{owner.param.name}: fully_shard has sharded it, so it can't be distributed by parallelize_module or "
                "distribute_module any more. Call these before fully_shard."
            )
        distributed: DTensor = distribute(tensor, *args, **options)
        return distributed

    names["distribute_tensor"] = switched("parallelize-after", distribute, checked)
