"""FSDPModule: what a user may call on a sharded module, and the class swap that adds it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from torch import nn

from . import hooks
from .context import FSDPState


class UnshardHandle:
    """A gather under way, started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Finish the gather and register the full parameters. Further calls do nothing. The next forward of the module
        waits by itself.
        """
        state, self._state = self._state, None
        if state is not None:
            hooks.unshard(state)


class FSDPModule:
    """Base of every module that `fully_shard` was applied to, besides its own class."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own group and register the full parameters, in the policy's `param_dtype`.

        Every rank must call it. They stay until `reshard` is called, or the module's next forward or backward ends that
        reshards. What is written to them is lost.

        Args:
            async_op: return at once, with a handle whose `wait` finishes the work.
        """
        _check_bool("async_op", async_op)
        state = _state(self)
        state.group.start_unshard()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's own group and register the sharded ones."""
        _state(self).release()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the backward passes that follow reduce gradients between ranks.

        Without, full gradients accumulate on each rank in the reduce dtype, and `.grad` holds a stand-in that only
        `zero_grad` may be applied to. The next backward that reduces includes them.

        Args:
            requires_gradient_sync: False for all but the last backward of an accumulation.
            recurse: also for the sharded modules inside this one.
        """
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for state in _states(self, recurse):
            state.group.gradients.synchronise = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the full parameters are freed after forward (and gathered again in backward).

        Args:
            reshard_after_forward: see `fully_shard`.
            recurse: also for the sharded modules inside this one.
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward


def public_methods() -> list[str]:
    """Names that fully_shard adds to a module."""
    return [name for name in vars(FSDPModule) if not name.startswith("_")]


def _state(module: Any) -> FSDPState:
    state = hooks.state_of(module)
    if state is None:
        raise RuntimeError(f"{type(module).__name__}: expected a module that fully_shard was applied to")
    return state


def _states(module: Any, recurse: bool) -> Iterator[FSDPState]:
    _check_bool("recurse", recurse)
    return hooks.states_below(module) if recurse else iter([_state(module)])


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {value!r}")


@cache
def sharded_class(cls: Any) -> Any:
    """The class that a module of `cls` gets: "FSDP" + its name, a subclass of `cls` and FSDPModule.

    FSDPModule comes last, because Python allows `module.__class__ = ...` for every layout only so (ABC and Generic have
    layouts of their own); what overrides nn.Module therefore stands in the new class itself.
    """

    def new(_: type, *args: Any, **kwargs: Any) -> nn.Module:
        # nn.Sequential[...] and the like build a new module of type(self): that one is not sharded.
        plain: nn.Module = cls(*args, **kwargs)
        return plain

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return hooks.run_forward(self, partial(cls.__call__, self), args, kwargs)

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        # .to(), .cuda(), to_empty(), ... replace local tensors: move them into the shard buffer at once.
        group = _state(self).group
        group.reshard()
        cls._apply(self, fn, recurse)
        group.adopt_replacements()
        return self

    def deepcopy(self: nn.Module, memo: Any) -> Any:
        raise NotImplementedError(
            f"deepcopy of a sharded {cls.__name__} is not supported yet. Copy the model before fully_shard, or build "
            "a second one and load this one's state dict."
        )

    body = {
        "__new__": new,
        "__call__": call,
        "_apply": apply,
        "__deepcopy__": deepcopy,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls)(f"FSDP{cls.__name__}", (cls, FSDPModule), body)
