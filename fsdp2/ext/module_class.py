"""The class that a module gets when it is sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from . import hooks, torch_compat, units
from .forward_method import Forward
from ..checks import entry_points
from ..checks.empty_memory import mark
from ..module import FSDPModule
from .once import once
from ..core.state import STATE, buffers_on_meta, hide_full, modules_below, show_full, states_below, states_of

Methods = dict[str, Callable[..., Any]]


@once
def sharded_class(cls: Any) -> Any:
    """The class that a module of `cls` gets: "FSDP" + its name, a subclass of `cls` and FSDPModule.

    FSDPModule comes last, because Python allows `module.__class__ = ...` for every layout only so (ABC and Generic have
    layouts of their own); what overrides nn.Module therefore stands in the new class itself.
    """
    body = {
        **entry_points.explained_methods(cls),
        "__call__": _call_of(cls),
        "forward": Forward(cls),
        **_changing_methods(cls),
        **_copying_methods(cls),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(f"FSDP{cls.__name__}", (cls, FSDPModule), body)


def _call_of(cls: Any) -> Callable[..., Any]:
    @torch_compat.untraced
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return hooks.run_forward(self.__dict__[STATE], self, partial(cls.__call__, self), args, kwargs)
        except RuntimeError as error:
            entry_points.explain(error, self, "forward")
            entry_points.explain_dtypes(error, self, args, kwargs)
            raise

    return call


def _changing_methods(cls: Any) -> Methods:
    """Those that change a module's parameters, or give them other memory."""

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        # .to(), .cuda(), to_empty(), ... replace local tensors: move them into the shard buffer at once.
        groups = [state.group for state in states_of(self)]
        for group in groups:
            group.reshard()
        empty = [[param for param in group.params if param.local.is_meta] for group in groups]
        cls._apply(self, fn, recurse)
        for group, params in zip(groups, empty, strict=True):
            group.adopt_replacements(may_be_untied=True)
            group.versions.note_unwritten(params)
        return self

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        states = states_below(self) if recurse else states_of(self)
        params = [param for state in states for param in state.group.params if param.local.is_meta]
        buffers = buffers_on_meta(modules_below(self) if recurse else [self])
        cls.to_empty(self, device=device, recurse=recurse)
        for param in params:
            mark(param.local)
        self.__dict__[STATE].group.empty_buffers.note(module._buffers[name] for module, name in buffers)
        return self

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        # It is the sharded parameters that have gradients, also between unshard() and reshard(), and in a forward.
        hidden = hide_full(self.__dict__[STATE].context.states)
        try:
            cls.zero_grad(self, set_to_none)
        finally:
            show_full(hidden)

    return {"_apply": apply, "to_empty": to_empty, "zero_grad": zero_grad, "share_memory": _refuse_shared_memory}


def _refuse_shared_memory(self: nn.Module) -> nn.Module:
    """`share_memory` of a sharded module: it would end the process."""
    raise NotImplementedError(
        f"{type(self).__name__}.share_memory: sharded parameters can't be moved to shared memory. Each rank is a "
        "process with shards of its own; share what full_params lends, or buffers."
    )


def _copying_methods(cls: Any) -> Methods:
    """Those that make other modules of one."""

    def new(_: type, *args: Any, **kwargs: Any) -> nn.Module:
        # nn.Sequential[...] and the like build a new module of type(self): that one is not sharded.
        plain: nn.Module = cls(*args, **kwargs)
        return plain

    def reduce(self: nn.Module, protocol: int) -> Any:
        # For deepcopy and pickle, which can't find this class by name.
        hooks.before_copy(self)
        if cls.__reduce__ is not object.__reduce__:
            # It builds another module of its own class, as that of torch.compile(module) does: take its state alone.
            get_state = getattr(cls, "__getstate__", vars)  # which `object` has since Python 3.11
            return _new_sharded, (cls,), get_state(self)
        _, _, *rest = cls.__reduce_ex__(self, protocol)
        return _new_sharded, (cls,), *rest

    def setstate(self: nn.Module, state: Any) -> None:
        cls.__setstate__(self, state)
        copied = hooks.after_copy(self)
        if copied is not None:
            units.attach(copied)

    def shallow_copy(self: nn.Module) -> Any:
        raise NotImplementedError(
            f"copy.copy({cls.__name__}): two modules can't gather the parameters that they would share. Use "
            "copy.deepcopy."
        )

    def deepcopy(self: nn.Module, memo: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} has a __deepcopy__ of its own, which knows nothing of shards. Copy the model before "
            "fully_shard, or build a second one and load this one's state dict."
        )

    methods: Methods = {"__new__": new, "__reduce_ex__": reduce, "__setstate__": setstate, "__copy__": shallow_copy}
    if hasattr(cls, "__deepcopy__"):
        methods["__deepcopy__"] = deepcopy
    return methods


def _new_sharded(cls: Any) -> Any:
    """A module to be filled by `__setstate__`."""
    sharded = sharded_class(cls)
    return object.__new__(sharded)
