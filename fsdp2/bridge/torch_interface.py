"""What pipelining and other clients read of a sharded module's state, under torch's private names for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..ext.compat import ComposableState


class TorchParamGroup:
    """A group, as its state hands it out. What is not here can't be set: nothing would follow from it."""

    __slots__ = ("_state",)

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def post_backward(self) -> None:
        """Reduce the gradients that wait, outside a backward pass, and reshard.

        They are there when the last group that has some returns from this: until then one reduction is in flight.
        """
        context = self._state.context
        context.synchronise_waiting([self._state])
        if not any(state.group.params and state.group.gradients.owes for state in context.states):
            context.finalize()

    @property
    def reshard_after_backward(self) -> bool:
        return self._state.reshard_after_backward


class TorchState(ComposableState):
    """Base of our state. `fully_shard.state(module)` and `module._get_fsdp_state()` return one."""

    context: Any
    group: Any
    policy: Any
    reshard_after_forward: bool | None
    reshard_after_backward: bool

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=self.context.states)

    @property
    def _comm_ctx(self) -> object:
        """The same object for those that count as one in what bounds reductions in flight."""
        return self.group.gradients.queue

    @property
    def _fsdp_param_groups(self) -> list[TorchParamGroup]:
        return [TorchParamGroup(self)] if self.group.params else []

    @property
    def _fsdp_param_group(self) -> TorchParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _mp_policy(self) -> Any:
        return self.policy

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, auto: bool) -> None:
        if auto != self._auto_reshard_after_forward:
            self.reshard_after_forward = None if auto else True

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what waits below this root, and have `.grad` show it."""
        self.context.synchronise_waiting()
        self.context.finalize()
