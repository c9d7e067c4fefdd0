"""What autograd saves for backward: notice gathered weights among it, and have them gathered again when they are used.

This is what makes backward independent of how a loss reached the module: whatever node of the graph needs a weight
unpacks it here first, whether the module returned its tensors, kept them on `self`, or handed out views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks

from . import torch_compat
from .modes import are_in_force, num_dispatch_modes, num_function_modes, run_hidden
from .once import once
from .param_group import FSDPParamGroup
from .torch_compat import storage_id

# What stands for a saved tensor: (the tensor, its version or its owner's versions, the owner if it is a weight).
_Saved = tuple[Tensor, Any, "Owner | None"]


class Owner(Protocol):
    """Whoever can gather weights."""

    group: FSDPParamGroup
    # Of the weights: in forward when they are packed, in backward when they are ready to be read.
    versions: tuple[int, ...]


_DO_LATER = "Change parameters before forward or after backward; none made in torch.inference_mode() can be trained"
_DISABLE = graph.disable_saved_tensors_hooks


@once
def make_way_where_disabled() -> None:
    """From now on hooks of ours make way where somebody disables all, as `torch.func.grad` does: it would raise."""
    graph.disable_saved_tensors_hooks = _disable


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    active = getattr(torch_compat.active_pack_hook(), "__self__", None)
    if isinstance(active, SavedTensors):
        with active.absent(), _disable(error_message):
            yield
    else:
        with _DISABLE(error_message):
            yield


class SavedTensors:
    """Saved-tensor hooks that are in force during one forward pass. `owners`: storage identity -> owner of a weight.

    `before_use(owner)` is called whenever backward is about to read a weight of `owner`; `before_absence()` when
    weights are about to be saved without the hooks.
    """

    def __init__(self, before_use: Callable[[Any], None], before_absence: Callable[[], None]) -> None:
        self.owners: dict[int, Owner] = {}
        self._before_use, self._before_absence = before_use, before_absence
        self._hooks: saved_tensors_hooks | None = None
        # Of a sharded model inside whose forward this one is called.
        self._outer: SavedTensors | None = None

    def activate(self) -> None:
        """Put the hooks in force, unless others are, or none may be (in `torch.func.grad`).

        Activation checkpointing brings its own hooks and saves nothing: it runs the forward again, with our module
        hooks, inside backward. Hooks of ours on top of its own would make it save what it is there to drop.
        """
        if self._hooks is not None:
            return
        if torch_compat.disables_hooks():
            self._before_absence()
            return
        active = torch_compat.active_pack_hook()
        self._outer = getattr(active, "__self__", None)
        if active is None or isinstance(self._outer, SavedTensors):
            self._hooks = saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def is_on_top(self) -> bool:
        """Whether these hooks, not somebody else's on top of them, are called."""
        return getattr(torch_compat.active_pack_hook(), "__self__", None) is self

    def deactivate(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Have the hooks, which are on top, out of force meanwhile."""
        self._before_absence()
        assert self._hooks is not None, "they are in force"
        self._hooks.__exit__()
        try:
            yield
        finally:
            self._hooks.__enter__()

    def _owner_in_outer(self, storage: int) -> Owner | None:
        outer = self._outer
        while outer is not None:
            owner = outer.owners.get(storage)
            if owner is not None:
                return owner
            outer = outer._outer
        return None

    @torch_compat.no_user_hook
    def _pack(self, tensor: Tensor) -> _Saved:
        if num_function_modes() and are_in_force():  # which see attributes, too
            return run_hidden(self._pack, tensor)
        # A node that saves its own output would keep itself alive through the tensor's grad_fn; autograd restores that.
        kept = tensor if tensor.is_leaf else run_hidden(tensor.detach) if num_dispatch_modes() else tensor.detach()
        storage = storage_id(kept)
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
            self._before_use(owner)
            now = owner.versions
            if now is not before and now != before:
                names = owner.group.adopted.find_changed(tensor, before, now)
                if names:
                    _refuse(names[0] if len(names) == 1 else f"a parameter (of {owner})", tensor, _DO_LATER)
        return tensor


def _refuse(what: str, tensor: Tensor, do: str) -> None:
    raise RuntimeError(
        f"{what} of shape {tuple(tensor.shape)} that is needed for the gradient was modified by an in-place operation "
        f"since forward, or replaced. {do}."
    )
