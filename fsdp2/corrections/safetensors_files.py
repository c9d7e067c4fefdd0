"""`safetensors.torch.save_file(model.state_dict(), ...)`: it writes memory, and a DTensor has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..when_imported import when_imported


@cache
def refuse_shards_in_safetensors() -> None:
    """From now on safetensors raises an error that says what to do, where torch has one about an invalid storage."""
    when_imported("safetensors.torch", _guard)


def _guard(imported: ModuleType) -> None:
    for name in ("save", "save_file"):
        setattr(imported, name, _checked(getattr(imported, name)))


def _checked(save: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(save)
    def checked(tensors: Mapping[str, Tensor], *args: Any, **options: Any) -> Any:
        name = next((name for name, each in tensors.items() if isinstance(each, DTensor)), None)
        if name is not None:
            raise TypeError(
                f"{name}: safetensors can't write a DTensor, of which this rank holds a part. Call "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on "
                "every rank, and save what it returns on the first."
            )
        return save(tensors, *args, **options)

    return checked
