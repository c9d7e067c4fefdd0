"""Work under way, which a user waits for."""

from __future__ import annotations

from . import hooks
from .context import Context
from .modes import hides_modes
from .state import FSDPState


class UnshardHandle:
    """A gather under way, started by `FSDPModule.unshard(async_op=True)`."""

    def __init__(self, states: list[FSDPState]) -> None:
        self._states = states

    @hides_modes
    def wait(self) -> None:
        """Finish the gather and register the full parameters. Further calls do nothing. The next forward of the module
        waits by itself.
        """
        states, self._states = self._states, []
        for state in states:
            if not state.held:  # a forward, or reshard(), has given it up since
                continue
            hooks.unshard(state)
            state.is_pinned = True
            state.context.settle_transfers()


class GradientReductionHandle:
    """Reductions under way, which `FSDPModule.finalize_backward(async_op=True)` leaves to be finished."""

    def __init__(self, context: Context) -> None:
        self._context: Context | None = context
        self._resets = context.resets

    @hides_modes
    def wait(self) -> None:
        """Finish them. Further calls do nothing.

        Raises:
            RuntimeError: `reset_iter_state` was called since.
        """
        context, self._context = self._context, None
        if context is None:
            return
        if context.resets != self._resets:
            raise RuntimeError("the reductions this handle waits for were dropped by reset_iter_state")
        context.finalize()
