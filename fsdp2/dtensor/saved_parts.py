"""Makes `torch.save` write only the bytes of tensors that are parts of a group's memory.

torch writes the whole storage of each tensor. An unsharded parameter lies in that of its group, and the shard of a
gradient in that of its bucket: a file with one of them would be as large as all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.compat import PLAIN, has_storage, local_if_any, storage_address
from ..engine.nested import map_tensors, tensors_in
from ..engine.owners import all_groups
from .switches import is_on


def save_parts_alone() -> None:
    """Makes torch.save copy such tensors, unless it is given all that is in their memory."""
    save = torch.save

    @wraps(save)
    def save_parts(obj: Any, *args: Any, **options: Any) -> None:
        save(_with_own_memory(obj) if is_on("saved-parts") else obj, *args, **options)

    torch.save = save_parts


def _with_own_memory(obj: Any) -> Any:
    """Returns `obj` with copies of the tensors in it that are small parts of a group's memory."""
    parts: dict[int, list[Tensor]] = {}
    for tensor in tensors_in(obj):
        if type(tensor) in PLAIN and has_storage(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
            parts.setdefault(storage_address(tensor), []).append(tensor)
    ours = set(_memory_of_groups()) if parts else set()
    apart: set[Any] = set()
    for storage, tensors in parts.items():
        places = {_place_of(each): each.nbytes for each in tensors}
        if storage in ours and sum(places.values()) < tensors[0].untyped_storage().nbytes() // 2:
            apart.update(places)

    copies: dict[int, Tensor] = {}

    def change(tensor: Tensor) -> Tensor:
        if type(tensor) not in PLAIN or not has_storage(tensor) or _place_of(tensor) not in apart:
            return tensor
        if id(tensor) not in copies:  # it may be tied
            copies[id(tensor)] = _copied(tensor)
        return copies[id(tensor)]

    return map_tensors(obj, change) if apart else obj


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return storage_address(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    vars(copy).update(vars(tensor))
    return copy


def _memory_of_groups() -> Iterator[int]:
    """Yields the addresses of the storages of unsharded parameters, and of gradients."""
    for group in all_groups():
        yield from group.parameters.storage_ids
        for param in group.params:
            gradient = param.sharded.grad
            if gradient is not None:
                local = local_if_any(gradient)
                if type(local) in PLAIN and has_storage(local):
                    yield storage_address(local)
