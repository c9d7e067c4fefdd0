"""fsdp2 without what watches its users: to measure what that costs. Numbers of a step are right without it, too.

python -m benchmarks host --libraries fsdp2 unguarded
python -m benchmarks.instructions --libraries fsdp2 unguarded no-written no-replaced no-saved no-calls
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def drop_written(model: nn.Module) -> None:
    """After a forward: was a full parameter written to?"""
    for state in _states(model):
        state.group.versions.check_written = _nothing


def drop_replaced(model: nn.Module) -> None:
    """Before a gather: was a parameter or its local tensor replaced, frozen or thawed?"""
    for state in _states(model):
        state.group._notice_replacements = _nothing


def drop_saved(model: nn.Module) -> None:
    """When backward uses a saved tensor: was it, or the parameter that it is of, changed since?"""
    for state in _states(model):
        state.note_versions = _nothing
        saved_tensors = state.context._saved_tensors
        saved_tensors._pack = _Unchecked(saved_tensors).pack
        saved_tensors._unpack = _Unchecked(saved_tensors).unpack


def drop_calls(model: nn.Module) -> None:
    """When a module inside is called: are its parameters gathered?"""
    for state in _states(model):
        for hooks in state.group._call_hooks:
            hooks.clear()
        state.group._call_hooks = []


GUARDS: dict[str, tuple[Callable[[nn.Module], None], ...]] = {
    "unguarded": (drop_written, drop_replaced, drop_saved, drop_calls),
    "no-written": (drop_written,),
    "no-replaced": (drop_replaced,),
    "no-saved": (drop_saved,),
    "no-calls": (drop_calls,),
}


class _Unchecked:
    """`SavedTensors._pack` and `_unpack`, but for the comparison: weights are noticed, and gathered again."""

    def __init__(self, saved_tensors: Any) -> None:
        from fsdp2.torch_compat import storage_id

        self._of, self._storage_id = saved_tensors, storage_id

    def pack(self, tensor: Tensor) -> Any:
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        storage = self._storage_id(kept)
        return kept, self._of.owners.get(storage) or (self._of._outer and self._of._owner_in_outer(storage))

    def unpack(self, saved: Any) -> Tensor:
        tensor, owner = saved
        if owner is not None:
            self._of._before_use(owner)
        return tensor


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _states(model: nn.Module) -> Any:
    from fsdp2.hooks import states_below

    return states_below(model)
