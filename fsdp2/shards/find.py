"""Finds the shards of a module, or of parameters. Nothing else knows that there are two implementations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..checks.clipping import ClippedParameters, clipped_parameters, note_clipping
from ..checks.model_facts import compare_initial_weights, refuse_empty_memory
from ..devices.write_notices import notices
from ..engine.owners import SHARDED_AS, owners_by_id, sharded_owner
from ..engine.parameter import USER_CLASS
from ..engine.placeholders import UnsynchronizedGrad
from ..engine.state import STATE, require_module, state_of
from ..torch_private.checks import is_sharded_by_fsdp1
from .ours import OurGroup, OurParam, OurShards, plain_class
from .ours import place_of as place_in_group
from .protocol import Place, ShardGroup, ShardParam, Shards
from .registered import refuse_written
from .torch_fsdp2 import TorchParam, TorchShards, is_sharded_by_torch
from .torch_fsdp2 import plain_class as plain_class_of_torchs

__all__ = [
    "WRAPPERS",
    "ClippedParameters",
    "attributes_of",
    "before_write",
    "check_weights",
    "clipped_parameters",
    "find_params",
    "fqn_of",
    "groups_managing",
    "has_users_class",
    "is_sharded",
    "is_sharded_by_fsdp1",
    "is_unsynchronized",
    "note_clipping",
    "original_class",
    "place_of",
    "refuse_written",
    "shard_of",
    "sharded_name_of",
    "shards_of",
]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""The names of what torch.compile and checkpointing wrap. State dicts of these modules leave them out."""


def shards_of(module: nn.Module) -> Shards:
    """Returns the sharded parameters of a module: its groups, what this rank holds of each parameter, how to gather it.

    All tools of fsdp2 stand on it. It takes modules that `fsdp2.fully_shard` has sharded,
    and those that torch's own FSDP2 has (`torch.distributed.fsdp.fully_shard`), itself or inside. It does not
    communicate. Call it between steps: where torch's FSDP2 has left parameters unsharded, it reshards them first.

    Args:
        module: any module. Groups of modules around it are not in `groups`.

    Returns:
        A `Shards`, see the protocol in `fsdp2/shards/protocol.py`: `groups`, `names()`, `find(tensor)`. Without a
        sharded module inside, `groups` is empty.

    Raises:
        TypeError: `module` is no module.
    """
    require_module("module", module, "shards_of")
    found: list[Shards] = [OurShards(module)]
    if any(map(is_sharded_by_torch, module.modules())):
        found.append(TorchShards(module))
    return found[0] if len(found) == 1 else _Joined(found)


class _Joined:
    """The shards of a module of which each implementation may have sharded some submodules."""

    def __init__(self, found: Sequence[Shards]) -> None:
        self._found = found
        self.groups: Sequence[ShardGroup] = [group for each in found for group in each.groups]

    def names(self) -> dict[str, ShardParam]:
        return {name: param for each in self._found for name, param in each.names().items()}

    def find(self, tensor: Tensor) -> ShardParam | None:
        return next((param for each in self._found if (param := each.find(tensor)) is not None), None)

    def unwritten(self) -> Sequence[Tensor]:
        return [tensor for each in self._found for tensor in each.unwritten()]

    def note_emptied(self, buffers: Sequence[Tensor]) -> None:
        for each in self._found:
            each.note_emptied(buffers)

    def frozen_writes(self) -> dict[str, bool]:
        return {name: is_written for each in self._found for name, is_written in each.frozen_writes().items()}

    def finish_gradients(self) -> None:
        for each in self._found:
            each.finish_gradients()

    def drop(self, after_error: bool) -> None:
        for each in self._found:
            each.drop(after_error)


def shard_of(tensor: Tensor) -> ShardParam | None:
    """Returns what this rank holds of a parameter; None if it is no DTensor.

    Any DTensor will do: without its module, one that fsdp2 has not sharded has no names, and no slots.
    """
    if not isinstance(tensor, DTensor):
        return None
    owned = sharded_owner(tensor)
    return TorchParam(tensor) if owned is None else OurParam(owned.group, owned.param)


def place_of(tensor: Tensor, known: dict[Any, Any]) -> Place | None:
    """Returns `shard_of(tensor).place`, for many parameters in less time. `known`: an empty dict that it fills, for
    all calls until something moves.
    """
    owned = sharded_owner(tensor) if isinstance(tensor, DTensor) else None
    return None if owned is None else place_in_group(OurParam(owned.group, owned.param), known)


def groups_managing(module: nn.Module) -> list[ShardGroup]:
    """Returns the groups of sharded modules in `module`, and those of modules around it that shard its parameters."""
    shards = shards_of(module)
    owners = (shards.find(tensor) for tensor in module.parameters())
    return [*dict.fromkeys([*shards.groups, *(param.group for param in owners if param is not None)])]


def find_params(tensors: Iterable[Tensor]) -> list[OurParam | None]:
    """Returns what `tensors` are: sharded parameters of fsdp2, or what modules have registered meanwhile; or None."""
    owners = owners_by_id()
    found = (owners.get(id(tensor)) for tensor in tensors)
    return [None if owner is None else OurParam(owner.group, owner.param) for owner in found]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module has by itself, by name: without what sharding it has added."""
    return {name: value for name, value in vars(module).items() if name != STATE}


def has_users_class(parameter: Tensor) -> bool:
    """Returns True if a sharded parameter is of a class of the user's, with attributes and methods of its own."""
    return USER_CLASS in vars(parameter)


def sharded_name_of(parameter: Tensor) -> str | None:
    """Returns the name under which a plain parameter was sharded, of which it is a left-over since; else None."""
    name: str | None = getattr(parameter, SHARDED_AS, None)
    return name


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before it was sharded."""
    return plain_class_of_torchs(module) if is_sharded_by_torch(module) else plain_class(module)


def check_weights(groups: Iterable[ShardGroup]) -> None:
    """Raises RuntimeError, on all ranks, if shards were cut from different weights, or not written to since `to_empty`;
    of groups of fsdp2. Every rank must call it.
    """
    ours = [group.engine_group for group in groups if isinstance(group, OurGroup)]
    refuse_empty_memory(ours)
    compare_initial_weights(ours)


def is_sharded(module: nn.Module) -> bool:
    """Returns True if `fully_shard` of fsdp2 or of torch was applied to this very module."""
    return state_of(module) is not None or is_sharded_by_torch(module)


def is_unsynchronized(gradient: object) -> bool:
    """Returns True if `gradient` stands in `.grad` for one that is still to be reduced: it can only be set to zero."""
    return isinstance(gradient, UnsynchronizedGrad)


before_write = notices.notify
"""Call it before you write to local tensors: a copy of them may be on its way to a device. It does not communicate."""


def fqn_of(model: nn.Module, name: str) -> str:
    """Returns the name of a submodule, a parameter or a buffer without the names that DDP, torch.compile and
    checkpointing add.
    """
    kept, module = list[str](), model
    for each in name.split("."):
        if each not in WRAPPERS and not (each == "module" and isinstance(module, DistributedDataParallel)):
            kept.append(each)
        module = getattr(module, each, module)
    return ".".join(kept)
