"""Calls the engine from the autograd graph: when tensors are saved and unpacked, and when gradients are computed.

Saved-tensor hooks make backward independent of how a loss reached a module: whatever node of the graph needs a weight
unpacks it first, whether the module returned its tensors, kept them on `self`, or handed out views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from . import compat
from .compat import PLAIN, graph_task, has_storage, num_dispatch_modes, num_function_modes, storage_address, storage_id
from .user_code import are_in_force, run_hidden

# What stands for a saved tensor: (the tensor, its version or its group's versions, the group if it is a weight).
_Saved = tuple[Tensor, Any, Any]

_DO_LATER = "Change parameters before forward or after backward; none made in torch.inference_mode() can be trained"


class SavedTensors:
    """Holds the saved-tensor hooks that are in force during a forward pass of one root.

    They recognise unsharded parameters among what autograd saves, have them gathered again when backward reads them,
    and refuse those that have changed meanwhile. `owners`: storage identity -> the group whose weights lie there.
    """

    def __init__(self, before_absence: Callable[[], None]) -> None:
        self.owners: dict[int, Any] = {}
        # Called when autograd is about to save weights while the hooks are not in force.
        self.before_absence = before_absence
        self._hooks: saved_tensors_hooks | None = None
        # Those of a sharded model inside whose forward this one is called.
        self._outer: SavedTensors | None = None

    def activate(self) -> None:
        """Puts the hooks in force, unless other hooks are, or none may be (in `torch.func.grad`).

        Activation checkpointing brings its own hooks and saves nothing: it runs the forward again, with the engine's
        module hooks, inside backward. Hooks on top of its own would make it save what it is there to drop.
        """
        if self._hooks is not None:
            return
        if compat.why_no_hooks() is not None:
            self.before_absence()
            return
        active = compat.top_saved_tensor_hooks(False)
        self._outer = getattr(active[0], "__self__", None) if active else None
        if not active or isinstance(self._outer, SavedTensors):
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def deactivate(self) -> None:
        """Takes the hooks out of force."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def are_on_top(self) -> bool:
        """Returns True if these hooks, and no other hooks on top of them, are called."""
        active = compat.top_saved_tensor_hooks(False)
        return bool(active) and getattr(active[0], "__self__", None) is self

    def _owner_in_outer(self, storage: int) -> Any:
        outer = self._outer
        while outer is not None:
            owner = outer.owners.get(storage)
            if owner is not None:
                return owner
            outer = outer._outer
        return None

    @compat.no_user_hook
    def _pack(self, tensor: Tensor) -> _Saved:
        if num_function_modes() and are_in_force():  # which see attributes, too
            return run_hidden(self._pack, tensor)
        # A node that saves its own output would keep itself alive through the tensor's grad_fn; autograd restores that.
        kept = tensor if tensor.is_leaf else run_hidden(tensor.detach) if num_dispatch_modes() else tensor.detach()
        storage = storage_address(kept) if type(kept) in PLAIN and has_storage(kept) else storage_id(kept)
        owner = self.owners.get(storage) or (self._outer and self._owner_in_outer(storage))
        return (kept, owner.versions, owner) if owner else (kept, kept._version, None)

    def _unpack(self, saved: _Saved) -> Tensor:
        if num_function_modes() and are_in_force():
            return run_hidden(self._unpack, saved)
        tensor, before, owner = saved
        # Autograd checks versions itself, but not of tensors that pass through hooks.
        if owner is None:
            if tensor._version != before:
                _refuse("a tensor", tensor, "torch.autograd.set_detect_anomaly(True) finds what needs it")
        else:
            owner.before_unpack()
            now = owner.versions
            if now is not before and now != before:
                names = owner.parameters.changed_names(tensor, before, now)
                if names:
                    _refuse(names[0] if len(names) == 1 else f"a parameter (of {owner})", tensor, _DO_LATER)
        return tensor


def _refuse(what: str, tensor: Tensor, do: str) -> None:
    raise RuntimeError(
        f"{what} of shape {tuple(tensor.shape)} that is needed for the gradient was modified by an in-place operation "
        f"since forward, or replaced. {do}."
    )


def after_tensors(tensors: Sequence[Tensor], callback: Callable[[], None]) -> None:
    """Calls `callback` when all of `tensors` have their gradient, in each backward."""
    total, missing, backward = len(tensors), 0, -1

    def hook(_: Tensor) -> None:
        nonlocal missing, backward
        if missing == 0 or backward != graph_task():  # the one before may not have reached all
            missing, backward = total, graph_task()
        missing -= 1
        if missing == 0:
            callback()

    for tensor in tensors:
        tensor.register_hook(hook)


def after_leaf(leaf: Tensor, callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of the next (inner) backward that reaches `leaf`.

    Autograd accumulates into leaves before all else: the gradient itself comes too early.
    """

    def hook(_: Tensor) -> None:
        handle.remove()
        compat.on_backward_end(callback)

    handle = leaf.register_hook(hook)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor.to(dtype)`. The user's modes don't see its gradient being cast back."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or compat.runs_transform():
        return tensor.to(dtype)
    return _Cast.apply(tensor, dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.before, ctx.after = tensor.dtype, dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return run_hidden(gradient.to, ctx.before), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return run_hidden(tangent.to, ctx.after)
