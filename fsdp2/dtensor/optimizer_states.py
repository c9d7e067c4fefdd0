"""Finds states of an optimizer of sharded parameters that are no DTensors, and cuts full ones.

Full states, those of training in one process, come from `load_state_dict`: torch leaves them plain
(`set_optimizer_state_dict` leaves those of scalars), and can't step with them. They are cut before the next step, which
notices that `load_state_dict` has made another dict of states. States of before fully_shard, under the original
parameters, are refused.

States that an optimizer has made of this rank's rows are right, until a checkpoint takes them for the same on all
ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from ..calls.callers import function_that_calls
from ..engine.owners import sharded_owner, some_of
from ..engine.parameter import FSDPParam
from ..parameters.saved_shards import refuse_others
from ..torch_private.internals import local_of
from .making import dtensor

# States that are one number for each parameter in torch's optimizers, whatever the parameter's shape.
NUMBERS = ("step", "eta", "mu", "mu_product")
# Functions of torch.distributed.checkpoint that ask an optimizer for its states, of all ranks together.
_CHECKPOINTS = ("get_optimizer_state_dict", "get_state_dict", "_elem_to_state_dict")


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
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in NUMBERS}
    is_full = all(type(value) is Tensor for value in tensors.values())
    owned = sharded_owner(param) if is_full and tensors else None
    if owned is not None:
        state.update({name: _shard(owned.param, each) for name, each in tensors.items() if each.shape == param.shape})


def _shard(param: FSDPParam, full: Tensor) -> DTensor:
    return dtensor(param.copy_rows(param.gathered(full), full.device), param.dtensor_spec)


# ---- states of before fully_shard


def refuse_lost_states(optimizer: Optimizer) -> None:
    """Refuses to begin anew for sharded parameters where there are states of what they were before fully_shard.

    Raises:
        RuntimeError: there are states of other tensors only, that are in no parameter group.
    """
    lost = lost_states(optimizer)
    if lost:
        sharded = [owned.param.name for param in _sharded(optimizer) if (owned := sharded_owner(param)) is not None]
        raise RuntimeError(
            f"{type(optimizer).__name__}: it has states of {len(lost)} tensors that are in none of its parameter "
            f"groups, and none of {some_of(sharded)}: these would begin anew. Call states = "
            "optimizer.state_dict() before fully_shard, and optimizer.load_state_dict(states) when the groups have the "
            "sharded parameters; or call optimizer.state.clear() to begin anew."
        )


def lost_states(optimizer: Any) -> list[Tensor]:
    """Returns the tensors in no parameter group that have states, if no sharded parameter has any, and most of these
    could have been cut from the former, by their shapes.
    """
    sharded, state = _sharded(optimizer), getattr(optimizer, "state", None)
    if not sharded or not state or any(state.get(param) for param in sharded):
        return []
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left = [
        each for each in state if isinstance(each, Tensor) and not isinstance(each, DTensor) and id(each) not in held
    ]
    shapes, of_sharded = Counter(each.shape for each in left), Counter(each.shape for each in sharded)
    return left if 2 * (shapes & of_sharded).total() >= len(sharded) else []


def _sharded(optimizer: Any) -> list[DTensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param for param in params if isinstance(param, DTensor) and param.requires_grad]


# ---- states of this rank's rows


def local_states(optimizer: Any) -> list[tuple[DTensor, str]]:
    """Returns (sharded parameter, name of a state) for states that are plain tensors of the shape of this rank's rows,
    wherever they are no numbers. Ranks agree, but for parameters of one row.
    """
    found, others = [], set()
    for param, own in (getattr(optimizer, "state", None) or {}).items():
        if not isinstance(param, DTensor) or not isinstance(own, dict):
            continue
        shape, dims = local_of(param).shape, [getattr(each, "dim", None) for each in param.placements]
        is_cut = shape != param.shape and any(dim is not None and param.shape[dim] > 1 for dim in dims)
        for name, value in own.items():
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim():
                if value.shape != shape:
                    others.add(name)
                elif is_cut:
                    found.append((param, name))
    return [(param, name) for param, name in found if name not in others]


def follow_state_dicts(optimizer: Optimizer) -> None:
    """Has `local_states` looked for whenever the optimizer is asked for its state dict."""
    hooks = vars(optimizer).get("_optimizer_state_dict_pre_hooks")
    if hooks is not None and _refuse_local_states not in hooks.values():
        optimizer.register_state_dict_pre_hook(_refuse_local_states)


def _refuse_local_states(optimizer: Optimizer) -> None:
    """Warns of states of this rank's rows.

    Raises:
        RuntimeError: a distributed checkpoint, which takes them for the same on all ranks, asks for them.
    """
    found = [*local_states(optimizer)]
    if not found:
        return
    owners = [(sharded_owner(param), name) for param, name in found]
    names = [f"{name} of {'a parameter' if owned is None else owned.param.name}" for owned, name in owners]
    text = (
        f"{type(optimizer).__name__}: states of sharded parameters, {some_of(names)}, are plain tensors of this rank's "
        "rows. Torch takes them for the same on all ranks: a distributed checkpoint, and a full state dict, have those "
        "of one rank. Have the optimizer make each one a DTensor, DTensor.from_local(local, p.device_mesh, "
        "p.placements, shape=p.shape, stride=p.stride()); or save optimizer.state_dict() in a file of each rank."
    )
    if function_that_calls(_CHECKPOINTS) is not None:
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=3)
