"""Calls the engine from the autograd graph: when tensors are saved and unpacked, and when gradients are computed.

Saved-tensor hooks make backward independent of how a loss reached a module: whatever node of the graph needs a weight
unpacks it first, whether the module returned its tensors, kept them on `self`, or handed out views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ..calls.user_code import are_in_force, run_hidden, run_shown
from ..torch_private import internals
from ..torch_private.internals import (
    PLAIN,
    graph_task,
    local_of,
    new_dtensor,
    num_dispatch_modes,
    num_function_modes,
    spec_of,
    storage_address,
    storage_id,
)

if TYPE_CHECKING:
    from .group import FSDPParamGroup

# What stands for a saved tensor: (the tensor, its version, None). Of a weight: (the index of the parameter, its group's
# versions, the group). Of a view of a weight, in place of the index: (dtype, shape, stride, offset in elements), and
# its class and spec (None: no DTensor) if it is no plain tensor. So a graph keeps neither the parameter nor its memory.
# Of what other hooks take: (what they have made of it, their unpack hook, _OTHERS).
_Saved = tuple[Any, Any, Any]
_OTHERS = object()

_DO_LATER = "Change parameters before forward or after backward; none made in torch.inference_mode() can be trained"


class SavedTensors:
    """Holds the saved-tensor hooks that are in force during a forward pass of one root.

    They recognise unsharded parameters among what autograd saves, have them gathered again when backward reads them,
    and refuse those that have changed meanwhile. `owners`: storage identity -> the group whose weights lie there.

    Hooks that a forward finds in force get all other tensors: a user's own, which offload activations or count them;
    those of another sharded model inside whose forward this one is called. `pack`, `depth`: the pack hook that was put
    in force last, and how many forwards ran then.
    """

    def __init__(self, before_absence: Callable[[], None]) -> None:
        self.owners: dict[int, FSDPParamGroup] = {}
        # Called when autograd is about to save weights while the hooks are not in force.
        self.before_absence = before_absence
        # Above those that hold for no forward: (depth, pack hook, context, other hooks that were in force before). The
        # last entry counts: Ctrl-C may come before the attributes below are set.
        self.in_force: list[tuple[int, Any, Any, Any]] = [(0, None, None, None)]
        self.depth, self.pack, _, self._others = self.in_force[-1]

    def activate(self, depth: int) -> None:
        """Puts the hooks in force above all others, unless none may be (in `torch.func.grad`), or those of activation
        checkpointing are. `deactivate` follows. `depth`: how many forwards run, the one that begins included.

        Checkpointing brings its own hooks and saves nothing: it runs the forward again, with the engine's module hooks,
        inside backward. Hooks on top of its own would make it save what it is there to drop.
        """
        if internals.why_no_hooks() is not None:
            self.before_absence()
            return
        others = internals.top_saved_tensor_hooks(False)
        if others is None or not internals.are_of_checkpointing(others[0]):
            pack = self._pack
            hooks = saved_tensors_hooks(pack, self._unpack)
            try:
                hooks.__enter__()
                self.in_force.append((depth, pack, hooks, others))
            except BaseException:  # Ctrl-C
                active = internals.top_saved_tensor_hooks(False)
                if self.in_force[-1][1] is not pack and active is not None and active[0] is pack:
                    hooks.__exit__()
                raise
            self.depth, self.pack, self._others = depth, pack, others

    def deactivate(self, depth: int) -> None:
        """Takes out of force what was put in force when more than `depth` forwards ran."""
        while self.in_force[-1][0] > depth:
            self.in_force.pop()[2].__exit__()
        self.depth, self.pack, _, self._others = self.in_force[-1]

    def are_on_top(self) -> bool:
        """Returns True if these hooks, and no other hooks on top of them, are called."""
        active = internals.top_saved_tensor_hooks(False)
        return active is not None and active[0] is self.pack

    @internals.no_user_hook
    def _pack(self, tensor: Tensor) -> _Saved:
        if (num_function_modes() or num_dispatch_modes()) and are_in_force():  # the former see attributes, too
            return run_hidden(self._pack, tensor)
        kind = type(tensor)
        try:
            storage = storage_address(tensor) if kind in PLAIN else storage_id(tensor)
        except RuntimeError:  # it has none
            storage = -1
        owner = self.owners.get(storage)
        if owner is not None:
            index = owner.unsharded.indices.get(id(tensor))
            if index is not None:
                return (index, owner.backward_versions, owner)
            if storage == owner.unsharded.described_storage and (
                kind is Tensor or isinstance(tensor, DTensor) or internals.is_only_of_class(tensor)
            ):
                spec = spec_of(tensor) if kind is not Tensor and isinstance(tensor, DTensor) else None
                local = tensor if spec is None else local_of(tensor)
                place = local.dtype, local.shape, local.stride(), local.storage_offset()
                view = place if kind is Tensor else (*place, kind, spec)
                return (view, owner.backward_versions, owner)
        elif self._others is not None:
            pack, unpack = self._others
            return (run_shown(pack, tensor), unpack, _OTHERS)
        # A node that saves its own output would keep itself alive through the tensor's grad_fn; autograd restores that.
        kept = tensor if tensor.is_leaf else tensor.detach()
        return (kept, kept._version, None) if owner is None else (kept, owner.backward_versions, owner)

    def _unpack(self, saved: _Saved) -> Tensor:
        if num_function_modes() and are_in_force():
            return run_hidden(self._unpack, saved)
        kept, before, owner = saved
        # Autograd checks versions itself, but not of tensors that pass through hooks.
        if owner is None:
            if kept._version != before:
                _refuse("a tensor", kept.shape, "torch.autograd.set_detect_anomaly(True) finds what needs it")
        elif owner is _OTHERS:
            return run_shown(before, kept)  # type: ignore[no-any-return]
        else:
            if owner.reached_by is None or owner.streams is not None:
                owner.before_unpack()
            now = owner.backward_versions
            if now is not before and now != before:
                names = owner.unsharded.changed_names(kept, before, now)
                if names:
                    weight = owner.unsharded.parameters[kept] if type(kept) is int else kept
                    shape = weight[1] if type(weight) is tuple else weight.shape
                    _refuse(names[0] if len(names) == 1 else f"a parameter (of {owner})", shape, _DO_LATER)
            if type(kept) is int:
                return owner.unsharded.parameters[kept]  # type: ignore[no-any-return]
            if type(kept) is tuple:
                if num_dispatch_modes() and are_in_force():
                    return run_hidden(self._unpack, saved)
                place, wrapper, unsharded = kept[:4], kept[4:], owner.unsharded
                view: Tensor | None = unsharded.views.get(place)
                if view is None:
                    view = unsharded.make_view(place)
                if not wrapper:
                    return view
                kind, spec = wrapper
                return view.as_subclass(kind) if spec is None else new_dtensor(kind, view, spec)
        return kept  # type: ignore[no-any-return]


def _refuse(what: str, shape: torch.Size, do: str) -> None:
    raise RuntimeError(
        f"{what} of shape {tuple(shape)} that is needed for the gradient was modified by an in-place operation "
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
        internals.on_backward_end(callback)

    handle = leaf.register_hook(hook)
