"""Whole states that an optimizer of sharded parameters loads: of training in one process, or of scalars.

Torch leaves them plain, those of scalars in `set_optimizer_state_dict`, too, and can't step with them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from .compat import dtensor
from ..ext.owners import sharded_owner
from ..core.parameter import FSDPParam
from .switches import switched

# Of which torch's optimizers have one number for each parameter, of whatever shape.
_NUMBERS = ("step", "eta", "mu", "mu_product")


def cut_loaded_states() -> None:
    """From now on each rank keeps its part of a whole state that is loaded. All must load the same."""
    plainly = Optimizer.load_state_dict

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        plainly(self, state_dict)
        for param, state in self.state.items():
            if isinstance(param, DTensor) and isinstance(state, dict):
                _cut(param, state)

    Optimizer.load_state_dict = switched("optimizer-states", plainly, load_state_dict)  # type: ignore[method-assign]


def _cut(param: DTensor, state: dict[str, Any]) -> None:
    """What has the parameter's shape, in a state of which nothing is distributed yet."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in _NUMBERS}
    is_whole = all(type(value) is Tensor for value in tensors.values())
    owned = sharded_owner(param) if is_whole and tensors else None
    if owned is not None:
        state.update({name: _part(owned.param, each) for name, each in tensors.items() if each.shape == param.shape})


def _part(param: FSDPParam, whole: Tensor) -> DTensor:
    return dtensor(param.copy_rows(param.gathered(whole), whole.device), param.dtensor_spec)
