"""Shows the state of sharded modules to pipelining and other clients, under torch's private names for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..engine.group import COPIED, FSDPParamGroup
from ..engine.passes import finalize, reduce_unsynchronized
from ..engine.policy import Hold
from ..engine.root import Root
from ..engine.state import STATE, FSDPState, names_below, require_state, state_of
from ..engine.torch_names import ComposableState, is_traced, register_composable
from .fsdp1_methods import StateRef

# The attribute in which a state holds its TorchState, so that it stays the same object: torch's table does not keep
# it alive.
_ATTRIBUTE = "_torch_state"


class TorchParamGroup:
    """Shows groups of one state as one of torch's. Other attributes can't be set: they would have no effect."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups

    def post_backward(self) -> None:
        """Reduces unsynchronized gradients, outside a backward pass, and reshards.

        `.grad` holds all of them when this returns for the last group that had some: until then one reduction is in
        flight.
        """
        root = self._groups[0].root
        reduce_unsynchronized(root, self._groups)
        if not any(group.params and group.gradients.left_gradients for group in root.groups):
            finalize(root)

    @property
    def reshard_after_backward(self) -> bool:
        """True if the unsharded parameters are freed after backward."""
        return self._groups[0].settings.reshard_after_backward


class TorchState(ComposableState):
    """Shows one FSDPState, which it holds as `state`, under the names of torch's."""

    def __init__(self, state: FSDPState) -> None:
        self.state = state

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=[_torch_state(each) for each in self.state.root.states])

    @property
    def _comm_ctx(self) -> object:
        """This is the same object for all states whose reductions in flight are bounded together."""
        return self.state.groups[0].queue

    @property
    def _fsdp_param_groups(self) -> list[TorchParamGroup]:
        return [TorchParamGroup([group]) for group in self._groups_with_params()]

    @property
    def _fsdp_param_group(self) -> TorchParamGroup | None:
        """All groups as one: a client that asks for one group expects that a module has no more."""
        groups = self._groups_with_params()
        return TorchParamGroup(groups) if groups else None

    def _groups_with_params(self) -> list[FSDPParamGroup]:
        return [group for group in self.state.groups if group.params]

    @property
    def _mp_policy(self) -> Any:
        return self.state.policy

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.state.groups[0].settings.reshard_after_forward is None

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, auto: bool) -> None:
        if auto != self._auto_reshard_after_forward:
            for group in self.state.groups:
                group.set(reshard_after_forward=None if auto else True)

    def _root_post_backward_final_callback(self) -> None:
        """Reduces unsynchronized gradients of all groups under the root, and sets `.grad`."""
        root = self.state.root
        reduce_unsynchronized(root)
        finalize(root)


class ForwardsNeedAllRanks:
    """Is the attribute `_is_fsdp_managed_module` of each module in a sharded one. torch sets it to True.

    It is true if a forward may gather parameters, so that all ranks must run it. `generate` of Transformers then goes
    on until the texts of all ranks have ended, and speech models run all layers in spite of layer drop. It is false
    inside `full_params` around the whole model, between `unshard` and `reshard` of all groups, and where nothing is
    sharded. It is also false while torch.compile traces a module, which would leave out its guards on parameters. A
    copy is False: the copy of a sharded model gets one of its own.
    """

    def __init__(self, root: Any) -> None:
        self._root: weakref.ref[Any] = weakref.ref(root)

    def __bool__(self) -> bool:
        root = self._root()
        return root is not None and not is_traced() and any(map(_may_gather, root.groups))

    def __reduce__(self) -> Any:
        return bool, ()


def _may_gather(group: FSDPParamGroup) -> bool:
    is_lent = group.phase is COPIED or group.num_running > 0 or group.hold is Hold.USER
    return bool(group.params) and group.mesh.size > 1 and not is_lent


def register_states(root: Root) -> None:
    """Registers sharded modules with torch's other composable APIs, under a TorchState for each FSDPState."""
    needs_all_ranks = ForwardsNeedAllRanks(root)
    for module in names_below(root.state.modules):
        module.__dict__["_is_fsdp_managed_module"] = needs_all_ranks
    for state in root.states:
        for module in state.modules:
            if module.__dict__.get(STATE) is state:  # not so for large submodules that became groups of their own
                register_composable(module, StateRef(_torch_state(state)), "fully_shard")


def torch_state_of(module: nn.Module) -> TorchState | None:
    """Returns the TorchState of a sharded module, always the same object. None: the module is not sharded."""
    state = state_of(module)
    return None if state is None else _torch_state(state)


def require_torch_state(module: Any) -> TorchState:
    """Returns the TorchState of a sharded module.

    Raises:
        RuntimeError: it is not sharded.
    """
    return _torch_state(require_state(module))


def _torch_state(state: FSDPState) -> TorchState:
    found: TorchState | None = state.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = state.__dict__[_ATTRIBUTE] = TorchState(state)
    return found
