"""Cuts full states that an optimizer of sharded parameters has loaded: those of training in one process, of scalars.

Torch leaves such states plain (`set_optimizer_state_dict` leaves those of scalars), and can't step with them. They are
cut before the next step, which notices that `load_state_dict` has made another dict of states.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..engine.owners import sharded_owner
from ..engine.parameter import FSDPParam
from ..engine.saved_shards import refuse_others
from .compat import dtensor

# States that are one number for each parameter in torch's optimizers, whatever the parameter's shape.
_NUMBERS = ("step", "eta", "mu", "mu_product")


def cut_loaded_states(optimizer: Optimizer) -> None:
    """Makes each rank keep its shard of full states that were loaded. All ranks must have loaded the same states.

    Raises:
        RuntimeError: another rank has saved the shards of a state.
    """
    for param, state in vars(optimizer).get("state", {}).items():
        if isinstance(param, DTensor) and isinstance(state, dict):
            refuse_others((f"{type(optimizer).__name__}: {name}", value) for name, value in state.items())
            _cut(param, state)


def _cut(param: DTensor, state: dict[str, Any]) -> None:
    """Cuts the tensors of the parameter's shape in a state without DTensors."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in _NUMBERS}
    is_full = all(type(value) is Tensor for value in tensors.values())
    owned = sharded_owner(param) if is_full and tensors else None
    if owned is not None:
        state.update({name: _shard(owned.param, each) for name, each in tensors.items() if each.shape == param.shape})


def _shard(param: FSDPParam, full: Tensor) -> DTensor:
    return dtensor(param.copy_rows(param.gathered(full), full.device), param.dtensor_spec)
