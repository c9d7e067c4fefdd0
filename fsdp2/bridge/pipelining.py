"""torch.distributed.pipelining may compute gradients of weights apart from those of inputs: it must find these."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from ..dtensor.switches import is_on
from ..core.state import states_below
from .when_imported import when_imported


def register_full_in_pipelines() -> None:
    """Zero-bubble schedules look in `module.parameters()` for the leaves of the graph, between forward and backward.

    There the sharded parameters are registered, of which the graph knows nothing: gradients of weights would stay away
    without a word. So from now on the full ones are registered meanwhile. What is assigned to them as gradients is
    reduced like all others, in the reduce dtype: at once, or when a schedule asks for it that knows our modules, after
    `patch_torch()`.
    """
    when_imported("torch.distributed.pipelining.stage", _adapt)


def _adapt(stage: ModuleType) -> None:
    cls: Any = stage._PipelineStageBase
    original = cls.backward_maybe_with_nosync

    @wraps(original)
    def backward(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        states = [] if backward_type == "full" or not is_on("pipelines") else list(states_below(self.submod))
        for state in states:
            state.group.faces.install()
        try:
            return original(self, backward_type, *args, **kwargs)
        finally:
            for state in states:
                state.group.faces.uninstall()
                state.group.gradients.owes |= backward_type == "weight"  # what autograd has not told of
                state.context.synchronise_waiting([state])
            for context in dict.fromkeys(state.context for state in states):
                if context.finalizes_by_itself:
                    context.finalize()

    cls.backward_maybe_with_nosync = backward
