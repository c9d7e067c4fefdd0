"""Refuses calls that FSDP1's class offers for state dicts, with modules that fully_shard was applied to.

`FullyShardedDataParallel.state_dict_type(model, FULL_STATE_DICT)` takes any module, looks in torch's table of
composable states for modules of its own class, and does nothing if there are none. A program that came from FSDP1
would save shards as a full state dict. So the entries of fsdp2 in that table raise an error when such a method looks
them up.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn

_CLASS = "FullyShardedDataParallel"
_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
# Method -> the function of torch.distributed.checkpoint.state_dict to call in its place.
_INSTEAD = {
    "set_state_dict_type": "get_model_state_dict",  # what the context `state_dict_type` calls
    "optim_state_dict": "get_optimizer_state_dict",
    "full_optim_state_dict": "get_optimizer_state_dict",
    "sharded_optim_state_dict": "get_optimizer_state_dict",
    "optim_state_dict_to_load": "set_optimizer_state_dict",
    "shard_full_optim_state_dict": "set_optimizer_state_dict",
    "scatter_full_optim_state_dict": "set_optimizer_state_dict",
    "flatten_sharded_optim_state_dict": "set_optimizer_state_dict",
}
# How many functions of torch are at most between such a method and the look-up in the table.
_DEPTH = 24


class StateRef(weakref.ref[Any]):
    """A weak reference to a state in torch's table, which no such method may use."""

    __slots__ = ()

    def __call__(self) -> Any:
        state = super().__call__()
        if state is not None and _MODULE in sys.modules:
            _refuse_methods(state)
        return state


def _refuse_methods(state: Any) -> None:
    """Refuses the look-up of `state`, a TorchState, by such a method.

    Raises:
        RuntimeError: such a method was called with a module that is none of FSDP1.
    """
    managed = next((param.name for group in state.state.groups for param in group.params), None)
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH if managed is not None else 0):
        if frame is None:
            return
        name, given = frame.f_code.co_name, frame.f_locals
        if name in _INSTEAD and frame.f_globals.get("__name__") == _MODULE:
            module = next((value for value in given.values() if isinstance(value, nn.Module)), None)
            if isinstance(module, getattr(sys.modules[_MODULE], _CLASS)):
                return  # some modules inside are FSDP1's, which are meant
            raise RuntimeError(
                f"{_CLASS}.{name}: expected a {_CLASS}, got {type(module).__name__}, which fully_shard was applied to "
                f"(it manages {managed}). On every rank, call torch.distributed.checkpoint.state_dict."
                f"{_INSTEAD[name]} instead, for full states with StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)."
            )
        frame = frame.f_back
