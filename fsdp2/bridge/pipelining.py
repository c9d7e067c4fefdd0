"""torch.distributed.pipelining may compute gradients of weights apart from those of inputs: it must find these."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..state import state_of, states_below


def adapt(stage: ModuleType) -> Callable[[], None]:
    """Zero-bubble schedules look in `module.parameters()` for the leaves of the graph, between forward and backward.

    There the sharded parameters are registered, of which the graph knows nothing: gradients of weights would stay away
    without a word. So the full ones are registered meanwhile; what is assigned to them as gradients then waits for the
    reduction like all others, in the reduce dtype. Returns what undoes it.

    `stage`: the module torch.distributed.pipelining.stage.
    """
    cls: Any = stage._PipelineStageBase
    original = cls.backward_maybe_with_nosync

    @functools.wraps(original)
    def backward(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if backward_type == "full" or state_of(self.submod) is None:
            return original(self, backward_type, *args, **kwargs)
        states = list(states_below(self.submod))
        for state in states:
            state.group.faces.install()
        try:
            return original(self, backward_type, *args, **kwargs)
        finally:
            for state in states:
                state.group.faces.uninstall()
                state.context.synchronise_waiting([state])

    cls.backward_maybe_with_nosync = backward

    def undo() -> None:
        cls.backward_maybe_with_nosync = original

    return undo
