"""Units: large modules among those that one `fully_shard` call manages (an embedding, a head), with groups of their
own, gathered when the module runs and freed behind it.

The standard recipe shards each block and then the model. What is left for that last call would be one group otherwise:
gathered before anything computes, there until the end of backward, and reduced when the last gradient of all is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

from torch import nn

from . import hooks, torch_compat
from .once import once
from ..core.parameter import Slot
from ..core.state import FSDPState

# Below, a collective of its own costs more than it saves, absolutely and beside the groups of the modules inside: the
# projections of a block whose experts are sharded are no units, though they may be larger than another model's head.
MIN_UNIT_BYTES = 4 * 1024 * 1024
MIN_SHARE_OF_A_GROUP = 0.5

_UNIT = "_fsdp2_unit"


def find_units(
    roots: Sequence[nn.Module], inside: Sequence[FSDPState], slots: Mapping[str, Sequence[Slot]]
) -> dict[str, nn.Module]:
    """FQN of a parameter -> the unit that it belongs to.

    `inside`: the states of what is sharded in `roots`; `slots`: FQN -> the places of one parameter.
    """
    groups = dict.fromkeys(state.group for state in inside)
    if not groups:
        return {}  # not the last call of many
    typical = median_low(_nbytes(param.sharded for param in group.params) for group in groups)
    min_nbytes = max(MIN_UNIT_BYTES, MIN_SHARE_OF_A_GROUP * typical)
    names: dict[nn.Module, list[str]] = {}
    tied: set[nn.Module] = set()
    for name, places in slots.items():
        names.setdefault(places[0].module, []).append(name)
        if len({slot.module for slot in places}) > 1:
            tied.update(slot.module for slot in places)
    return {
        name: module
        for module, own in names.items()
        if module not in tied and module not in roots and _may_be_unit(module)
        if _nbytes(slots[name][0].get() for name in own) >= min_nbytes
        for name in own
    }


def _may_be_unit(module: nn.Module) -> bool:
    cls = type(module)
    is_usual = cls.__call__ is nn.Module.__call__ and cls.__getattr__ is nn.Module.__getattr__
    return is_usual and next(module.children(), None) is None


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    """Of the whole parameters, as they are stored."""
    return sum(param.nbytes for param in params)


def attach(outer: FSDPState) -> None:
    """Have the units of `outer` run as such. Their modules stay what they are to `isinstance`, and by name."""
    for unit in outer.units:
        (module,) = unit.modules
        module.__dict__[_UNIT] = unit
        module.__class__ = _unit_class(type(module))


@once
def _unit_class(cls: Any) -> Any:
    """The class of a unit of `cls`.

    Outer modules also read a unit's parameters without calling it (a head's weight, for a fused loss): then they get
    the full ones, which stay for backward, as an outer module's own do.
    """

    @torch_compat.untraced
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hooks.run_forward(self.__dict__[_UNIT], self, partial(cls.__call__, self), args, kwargs)

    def look_up(self: nn.Module, name: str) -> Any:
        if name in self.__dict__["_parameters"]:
            hooks.read_parameters(self.__dict__[_UNIT])
        return cls.__getattr__(self, name)

    def reduce(self: nn.Module, protocol: int) -> Any:
        # A copy of this module alone is no unit; that of the outer module attaches it again.
        _, _, state, *rest = cls.__reduce_ex__(self, protocol)
        return object.__new__, (cls,), {name: value for name, value in state.items() if name != _UNIT}, *rest

    body = {
        "__call__": call,
        "__getattr__": look_up,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(cls.__name__, (cls,), body)
