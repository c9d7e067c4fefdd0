"""Gives large submodules of a root (an embedding, a head) groups of their own: each is unsharded only while it runs.

The standard recipe shards each block and then the model. The parameters that are left for that last call would be one
group otherwise. It would be gathered before anything computes, stay unsharded until the end of backward, and be reduced
when the last of its gradients is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from statistics import median_low
from typing import Any

from torch import nn

from ..calls.user_classes import make_subclass
from ..calls.user_code import hides_modes
from ..engine.build import Plan
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.state import FSDPState
from ..engine.step import run_forward
from ..torch_private.internals import untraced
from ..torch_private.once import once

# Below these, a collective of its own costs more than it saves: absolutely, and compared with the groups of the modules
# inside. The projections of a block with sharded experts get no group, though they may be larger than another model's
# head.
MIN_BYTES = 4 * 1024 * 1024
MIN_SHARE_OF_A_GROUP = 0.5
# Modules inside that hold less, compared with the rest of the call, are no blocks: adapters, for example, which are
# sharded by themselves, before the block that they are in.
MIN_SHARE_INSIDE = 1 / 16

_STATE = "_fsdp2_submodule_state"


def plan_large_submodules(plan: Plan) -> None:
    """Finds the large submodules of a call, and plans a state for each."""
    groups = [group for state in plan.inside for group in state.groups]
    if not groups:
        return  # nothing inside is sharded: all is one group, as the user asks
    sizes = [_nbytes(param.sharded for param in group.params) for group in groups]
    if sum(sizes) < MIN_SHARE_INSIDE * _nbytes(each.slots[0].get() for each in plan.parameters.values()):
        return
    min_nbytes = max(MIN_BYTES, MIN_SHARE_OF_A_GROUP * median_low(sizes))
    names: dict[nn.Module, list[str]] = {}
    tied: set[nn.Module] = set()
    for name, parameter in plan.parameters.items():
        names.setdefault(parameter.slots[0].module, []).append(name)
        if len({slot.module for slot in parameter.slots}) > 1:
            tied.update(slot.module for slot in parameter.slots)
    # A module with one parameter, tied to one of an earlier call, uses the group of that call when it runs.
    for each in plan.tied.values():
        for module in [slot.module for slot in each.slots]:
            own_ones = {param for param in module._parameters.values() if param is not None}
            is_all = own_ones == {each.slots[0].get()} and _nbytes(own_ones) >= min_nbytes
            if is_all and module not in plan.roots and _may_have_own_group(module):
                plan.submodules[module] = []
    for module, own in names.items():
        if module in tied or module in plan.roots or not _may_have_own_group(module):
            continue
        if _nbytes(plan.parameters[name].slots[0].get() for name in own) >= min_nbytes:
            plan.submodules[module] = own


def _may_have_own_group(module: nn.Module) -> bool:
    cls = type(module)
    is_usual = cls.__call__ is nn.Module.__call__ and cls.__getattr__ is nn.Module.__getattr__
    return is_usual and next(module.children(), None) is None


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    """Returns the bytes of parameters of all ranks together, in the dtypes in which they are stored."""
    return sum(param.nbytes for param in params)


def gather_when_called(state: FSDPState) -> None:
    """Has each large submodule of a call's modules gather its own parameters when it is called.

    An outer module may read the parameters of a submodule without calling it (a head's weight, for a fused loss). It
    gets the unsharded ones then, which stay for backward, as its own do (`ForwardPass.read_outside`).
    """
    for part in state.parts:
        (module,) = part.modules
        if _STATE not in module.__dict__:
            module.__dict__[_STATE] = part
            object.__setattr__(module, "__class__", _own_class(type(module)))
            if isinstance(module, nn.Embedding):  # its backward reads no weight
                for group in part.groups:
                    group.set(unshard_in_backward=False)


def is_read_outside(group: FSDPParamGroup) -> bool:
    """Returns True if the outer module has read parameters of a large submodule without calling it, in this pass."""
    return group in group.root.forward.read_outside


@hides_modes
def _read_parameters(state: FSDPState) -> None:
    """Registers the unsharded parameters of a large submodule if the outer module runs: one of them is being read."""
    root = state.root
    in_backward = root.backward is not None
    is_used = in_backward or any(state in other.parts for other in root.running)
    for group in state.used:
        if group.phase is not UNSHARDED and is_used:
            group.pre_forward(in_backward)
            if not in_backward:
                root.forward.read_outside.add(group)


@once
def _own_class(cls: Any) -> Any:
    """Returns the class that a large submodule of class `cls` gets: a subclass with the same name."""

    @untraced
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        part: FSDPState = self.__dict__[_STATE]
        run = partial(run_forward, part, self, partial(cls.__call__, self), args, kwargs)
        root = part.root
        if root.running or not root.prefetcher.ran or root.backward is not None:
            return run()
        with root.in_same_pass():
            return run()

    def get_attribute(self: nn.Module, name: str) -> Any:
        if name in self.__dict__["_parameters"]:
            _read_parameters(self.__dict__[_STATE])
        return cls.__getattr__(self, name)

    def reduce(self: nn.Module, protocol: int) -> Any:
        # A copy of this module alone has no group; that of the outer module gives it one again.
        _, _, state, *rest = cls.__reduce_ex__(self, protocol)
        return object.__new__, (cls,), {name: value for name, value in state.items() if name != _STATE}, *rest

    body = {
        "__call__": call,
        "__getattr__": get_attribute,
        "__reduce_ex__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return make_subclass(cls, cls.__name__, (cls,), body)
