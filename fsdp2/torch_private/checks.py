"""Collects the private names of torch that checks use, each with its reason."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from .lookup import are_there, optional

HOOKS_OF_FSDP1 = "torch.distributed.algorithms._comm_hooks"
"""The module of torch's communication hooks for FSDP1."""


def replace_hooks(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Makes `hook` the only hook on the gradient of `tensor`. The hooks before may be those of another tensor now."""
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    tensor._backward_hooks = OrderedDict({0: hook})  # does what register_hook does, at a tenth of the cost


def is_replicated_by_ddp(module: nn.Module) -> bool:
    """Returns True if torch's composable `replicate` was applied to `module`: it has DDP around its parameters from the
    first forward on.
    """
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    key = getattr(contract, "REGISTRY_KEY", None)  # another thread may be importing the module
    return key is not None and "replicate" in vars(module).get(key, ())


def stepped_on_accumulation() -> Collection[Tensor]:
    """Returns the parameters to which `_apply_optimizer_in_backward` has given an optimizer, and a hook for it."""
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    found: Collection[Tensor] = getattr(module, "param_to_optim_hook_handle_map", ())
    return found


def is_sharded_by_fsdp1(parameter: Tensor) -> bool:
    """Returns True for what FullyShardedDataParallel, torch's or fairscale's, has made of parameters: each rank holds a
    part of its own, and trains it with a gradient that was reduced.
    """
    cls = type(parameter)
    is_fairscales = cls.__name__ == "FlatParameter" and cls.__module__.startswith("fairscale.")
    return is_fairscales or getattr(parameter, "_fsdp_flattened", False)


def watch_calls(module: nn.Module, key: str) -> dict[Any, Any]:
    """Returns the dict of the forward pre-hooks of `module`. A hook under `key` gets the keyword arguments, too.

    The engine writes and deletes that hook several times in each step. With the handles of torch's public function that
    takes ten times as long.
    """
    module._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]
    return module._forward_pre_hooks


def size_at_first(group: dist.ProcessGroup) -> int:
    """Returns the number of ranks with which `group` was made, whatever its own `size` returns now."""
    return dist.ProcessGroup.size(group)


_WATCH = "the watch that has ranks raise which wait for each other in different collectives"
# () -> the store that all processes share from `init_process_group` on. torch has no public function for it.
default_store: Callable[[], dist.Store] = optional("torch.distributed.distributed_c10d._get_default_store", _WATCH)
# (name): the process group of that name on this rank. LookupError, or RuntimeError: there is none.
group_of_name: Callable[[Any], dist.ProcessGroup] = optional(
    "torch.distributed.distributed_c10d._resolve_process_group", _WATCH
)
_kind_of_work: Callable[[dist.Work], int] = optional("torch.distributed.Work._get_op_type", _WATCH)
_recorded: Callable[[], str] = optional("torch._C._distributed_c10d._dump_fr_trace_json", _WATCH)


def can_watch() -> bool:
    """Returns True if torch has all that the watch reads. Otherwise a warning says that it is off."""
    return are_there(default_store, group_of_name, _kind_of_work, _recorded)


class RecordedCollective(NamedTuple):
    """One collective that this process has begun, as torch's flight recorder knows it.

    `group`: name of the process group; `number`: its place among the collectives of that group, from 1, the same on all
    ranks; `thread`: identity of the thread that began it.
    """

    group: str
    number: int
    thread: int
    is_done: bool


# torch's numbers of messages between two ranks, and of works that do not say what they are.
_NO_COLLECTIVES = (12, 13, 14, 17, 100)


def is_collective(value: object) -> bool:
    """Returns True for the work of a collective; False for that of a message between two ranks, or anything else."""
    return isinstance(value, dist.Work) and _kind_of_work(value) not in _NO_COLLECTIVES


def recorded_collectives() -> tuple[list[RecordedCollective], bool] | None:
    """Returns the last collectives on gloo that this process has begun, in their order, and whether these are all since
    the process began. Messages between two ranks are not among them. None: the recorder is switched off.

    torch records the last 2,000 by default (`TORCH_FR_BUFFER_SIZE`). To read them takes up to 150 ms.
    """
    found = json.loads(_recorded())
    if not found.get("pg_config"):
        return None
    entries = found.get("entries", [])
    collectives = [
        RecordedCollective(
            entry["process_group"][0], entry["collective_seq_id"], int(entry["thread_id"]), entry["retired"]
        )
        for entry in entries
        if not entry["is_p2p"]
    ]
    return collectives, not entries or entries[0]["record_id"] == 0
