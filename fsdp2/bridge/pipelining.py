"""Lets torch.distributed.pipelining find the parameters whose gradients it computes separately from those of inputs."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.state import groups_below
from ..features.passes import finalize, reduce_unsynchronized
from ..torch_private.once import once
from ..torch_private.when_imported import when_imported


@once
def adapt_schedules() -> None:
    """Adapts torch.distributed.pipelining as soon as a program has imported it."""
    when_imported("torch.distributed.pipelining.stage", _adapt)


def _adapt(stage: ModuleType) -> None:
    """Registers the unsharded parameters while a zero-bubble schedule computes gradients of weights.

    Such a schedule searches `module.parameters()` for the leaves of the graph, between forward and backward. At that
    time the sharded parameters are registered, which are not in the graph: gradients of weights would be missing,
    without an error. The gradients that the schedule assigns to the unsharded parameters are reduced like all others,
    in the reduce dtype: at once, or, after `patch_torch()`, when a schedule that knows sharded modules asks for it.

    Such a schedule runs a backward pass for each weight, or for few. They deliver gradients together, behind the last
    one: to take placeholders of unsynchronized gradients out of `.grad` and to put them back, in each pass and for all
    parameters of the stage, would take longer than all else.
    """
    cls: Any = stage._PipelineStageBase
    original = cls.backward_maybe_with_nosync

    @wraps(original)
    def backward(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if backward_type == "full":
            return original(self, backward_type, *args, **kwargs)
        groups = groups_below(self.submod)
        roots = dict.fromkeys(group.root for group in groups)
        finalized = [root for root in roots if root.settings.finalize_backward]
        for group in groups:
            _register_unsharded(group)
        for root in finalized:
            root.set(finalize_backward=False)
        try:
            return original(self, backward_type, *args, **kwargs)
        finally:
            try:
                for group in groups:
                    _register_sharded(group)
                    if backward_type == "weight":  # autograd does not tell us of assigned gradients
                        group.gradients.unsynchronized.expect()
                for root in roots:
                    reduce_unsynchronized(root, [group for group in groups if group.root is root])
            finally:
                for root in finalized:
                    root.set(finalize_backward=True)
            for root in finalized:
                finalize(root)

    cls.backward_maybe_with_nosync = backward


def _register_unsharded(group: FSDPParamGroup) -> None:
    """Registers the unsharded parameters, whether or not their data is there."""
    if group.phase is not UNSHARDED:
        group.registration.register(unsharded=True)


def _register_sharded(group: FSDPParamGroup) -> None:
    if group.phase is UNSHARDED:
        group.unregister()
    else:
        group.registration.register(unsharded=False)
