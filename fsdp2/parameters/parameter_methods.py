"""Methods of nn.Module that change parameters, move them or clear their gradients, and hooks for state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..calls.user_code import hides_modes
from ..engine.events import Change
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.parameter import USER_CLASS, FSDPParam
from ..engine.placeholders import UnsynchronizedGrad
from ..engine.state import STATE, groups_below, groups_of, modules_below, require_state, states_of
from .empty_memory import mark
from .replacements import Accept
from .saved_shards import refuse_others

if TYPE_CHECKING:
    from ..engine.state import FSDPState


def parameter_methods(cls: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods that change a module's parameters, or give them other memory."""

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        # .to(), .cuda(), to_empty(), ... replace local tensors: move them into the shard buffer at once.
        groups = _groups_within(self)
        _refuse_unsynchronized(groups_below(self) if recurse else groups)
        for group in groups:
            group.reshard()
        empty = [[param for param in group.params if param.local.is_meta] for group in groups]
        chosen = [param for group in groups for param in group.params if param.grad_choice is not None]
        kept = [] if not chosen else _take_gradients(chosen)
        try:
            cls._apply(self, fn, recurse)
        except BaseException:
            _put_gradients(kept)
            raise
        for group, params in zip(groups, empty, strict=True):
            group.adopt_replacements(Accept.META | Accept.UNTIED)
            group.empty.note_parameters(params)
        _put_gradients(kept)
        return self

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        groups = groups_below(self) if recurse else groups_of(self)
        params = [param for group in groups for param in group.params if param.local.is_meta]
        buffers = buffers_on_meta(modules_below(self) if recurse else [self])
        cls.to_empty(self, device=device, recurse=recurse)
        given: list[Any] = [module._buffers[name] for module, name in buffers]
        for param in params:
            mark(param.local)
        groups_of(self)[0].empty.note_buffers(given)
        return self

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        # It is the sharded parameters that have gradients, also between unshard() and reshard(), and in a forward.
        hidden = _unregister(self.__dict__[STATE].root.groups)
        try:
            cls.zero_grad(self, set_to_none)
        finally:
            _register_again(hidden)

    return {"_apply": apply, "to_empty": to_empty, "zero_grad": zero_grad, "share_memory": _refuse_shared_memory}


def _groups_within(module: nn.Module) -> list[FSDPParamGroup]:
    """Returns the groups whose parameters a method of `module` reaches under all their names: all that it uses, but of
    those that other modules use, too, only those all of whose modules are inside. They are followed once all names have
    been given something else.
    """
    shared = require_state(module).root.shared
    if not shared:
        return groups_of(module)
    inside, own = modules_below(module), [group for group in groups_of(module) if not group.sharing_states]
    return own + [
        group for group in shared if all(slot.module in inside for param in group.params for slot in param.slots)
    ]


def _refuse_unsynchronized(groups: Iterable[FSDPParamGroup]) -> None:
    """Refuses to convert or move parameters whose gradients are not synchronised yet, before anything is changed."""
    for group in groups:
        for param in [group.params[i] for i in group.placeholders]:
            if isinstance(param.sharded.grad, UnsynchronizedGrad):
                param.sharded.grad.refuse(f"{param.name}, in Module.to, .cuda or the like")


def _take_gradients(params: Iterable[FSDPParam]) -> list[tuple[FSDPParam, Tensor]]:
    """Takes gradients whose dtype was chosen out of `.grad`: it stays what it is when parameters get another dtype."""
    taken = [
        (param, param.sharded.grad)
        for param in params
        if param.sharded.grad is not None and not isinstance(param.sharded.grad, UnsynchronizedGrad)
    ]
    for param, _ in taken:
        param.sharded.grad = None
    return taken


def _put_gradients(taken: Iterable[tuple[FSDPParam, Tensor]]) -> None:
    for param, gradient in taken:
        param.put_gradient(gradient)


def buffers_on_meta(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Returns where those of `modules` have buffers with elements, and without memory for them."""
    return [
        (module, name)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and buffer.numel()
    ]


def _refuse_shared_memory(self: nn.Module) -> nn.Module:
    """Refuses `share_memory` of a sharded module: it would end the process."""
    raise NotImplementedError(
        f"{type(self).__name__}.share_memory: sharded parameters can't be moved to shared memory. Each rank is a "
        "process with shards of its own; share what full_params lends, or buffers."
    )


# ---- state dicts


def hook_state_dicts(state: FSDPState) -> None:
    """Has state dicts of a call's modules hold sharded parameters, also between unshard() and reshard(), and adopts
    what is loaded.
    """
    for module in state.modules:
        if _before_state_dict not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_before_state_dict)
            module.register_state_dict_post_hook(_after_state_dict)
            module.register_load_state_dict_pre_hook(_before_load)
            module.register_load_state_dict_post_hook(_after_load)
    for slot in [
        slot
        for group in (group for each in (state, *state.parts) for group in each.groups)
        for param in group.params
        if param.leaf_class is not nn.Parameter
        for slot in param.slots
    ]:
        hooks = [getattr(each, "hook", each) for each in slot.module._load_state_dict_pre_hooks.values()]
        if _drop_attributes not in hooks:
            slot.module.register_load_state_dict_pre_hook(_drop_attributes)


@hides_modes
def _before_state_dict(module: nn.Module, *_: Any) -> None:
    """Registers the sharded parameters. It does no more: this rank may be alone in asking."""
    idle = [group for group in groups_of(module) if not group.num_running]
    require_state(module).unregistered[module] = _unregister(idle)
    _swap_buffers(module, exact=True)


def _after_state_dict(module: nn.Module, *_: Any) -> None:
    _register_again(require_state(module).unregistered.pop(module, []))
    _swap_buffers(module, exact=False)


def _swap_buffers(module: nn.Module, exact: bool) -> None:
    """Registers buffers in their own dtypes, or copies in that which the policy has for them."""
    for state in states_of(module):
        if state.cast_buffers is not None:
            state.cast_buffers.restore() if exact else state.cast_buffers.cast()


def _unregister(groups: list[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Registers the sharded parameters of those groups whose unsharded ones are registered; returns these groups."""
    chosen = [group for group in groups if group.phase is UNSHARDED]
    for group in chosen:
        group.unregister()
    return chosen


def _register_again(groups: list[FSDPParamGroup]) -> None:
    for group in groups:
        group.register()


@hides_modes
def _before_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    refuse_others((name, value) for name, value in state_dict.items() if name.startswith(prefix))
    for group in groups_of(module):
        group.reshard_if_idle()
    _swap_buffers(module, exact=True)


@hides_modes
def _drop_attributes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Removes entries below a parameter that its attributes hold already: "weight.absmax", for example.

    Modules of bitsandbytes write such entries, which no module reads. What differs stays, and is an unexpected key.
    """
    for name, parameter in module._parameters.items():
        start = f"{prefix}{name}."
        has_class = parameter is not None and USER_CLASS in vars(parameter)
        for key in [key for key in state_dict if has_class and key.startswith(start)]:
            try:
                found, value = attrgetter(key[len(start) :])(parameter), state_dict[key]
            except AttributeError:
                continue
            if isinstance(found, Tensor) and found.shape == value.shape and torch.equal(found, value.to(found)):
                del state_dict[key]


@hides_modes
def _after_load(module: nn.Module, _: Any) -> None:
    _swap_buffers(module, exact=False)
    for group in _groups_within(module):
        if group.adopt_replacements(Accept.META | Accept.UNTIED | Accept.WHOLE):
            group.note_change(Change.LOADED)
