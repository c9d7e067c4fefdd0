"""Shows the state of sharded modules to pipelining and other clients, under torch's private names for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from ..engine.group import COPIED, FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.parameter import FSDPParam
from ..engine.policy import AfterForward, KeepUntil
from ..engine.state import FSDPState, names_below, require_state, state_of
from ..features.passes import finalize, reduce_unsynchronized
from ..torch_private.bridge import ComposableState, is_traced, register_composable, state_in_table
from ..torch_private.lookup import load_module
from .fsdp1_states import StateRef

# The attribute in which a state holds its TorchState, so that it stays the same object: torch's table does not keep
# it alive.
_ATTRIBUTE = "_torch_state"
# The modules of torch that have its descriptions of meshes, and the phases of its groups. Programs compare with these.
_INTERNAL = "torch.distributed.fsdp._fully_shard."
_INTERFACE = "the state of sharded modules under torch's private names"


def _mesh_info(mesh: DataMesh) -> Any:
    """Returns torch's description of the ranks that share and replicate parameters.

    Raises:
        NotImplementedError: several axes shard, or replicate, or there is an `outer_shard`: torch's has one each.
    """
    axes = [mesh.shard_axes, mesh.replicate_axes]
    if mesh.joins is not None or any(len(each) > 1 for each in axes):
        raise NotImplementedError(
            f"mesh_info: expected one axis that shards and one that replicates at most, got the axes {axes} of a mesh "
            f"of {mesh.mesh.ndim}; torch's mesh_info names one of each. Read parameter.device_mesh instead."
        )
    kinds = load_module(f"{_INTERNAL}_fsdp_common", _INTERFACE)
    shard, replicate = (each[0] if each else None for each in axes)
    if shard is None:
        return kinds.DDPMeshInfo(mesh.mesh, replicate_mesh_dim=replicate)
    if replicate is None:
        return kinds.FSDPMeshInfo(mesh.mesh, shard_mesh_dim=shard)
    return kinds.HSDPMeshInfo(mesh.mesh, shard_mesh_dim=shard, replicate_mesh_dim=replicate)


class TorchParam:
    """Shows one parameter as one of torch's groups does, to read."""

    __slots__ = ("_param",)

    def __init__(self, param: FSDPParam) -> None:
        self._param = param

    @property
    def sharded_param(self) -> nn.Parameter:
        return self._param.sharded

    @property
    def unsharded_param(self) -> nn.Parameter:
        """Its data is there from unshard to reshard."""
        return self._param.unsharded

    _unsharded_param = unsharded_param

    @property
    def _param_fqn(self) -> str:
        return self._param.name

    @property
    def fsdp_placement(self) -> Shard:
        return Shard(self._param.dim)

    @property
    def sharded_size(self) -> torch.Size:
        return self._param.local_shape

    @property
    def sharded_grad_dtype(self) -> torch.dtype:
        return self._param.delivered_dtype

    @property
    def mesh_info(self) -> Any:
        return _mesh_info(self._param.mesh)


class TorchParamGroup:
    """Shows groups of one state as one of torch's. Other attributes can't be set: they would have no effect."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._groups = groups

    @property
    def fsdp_params(self) -> list[TorchParam]:
        return [TorchParam(param) for group in self._groups for param in group.params]

    @property
    def mesh_info(self) -> Any:
        return _mesh_info(self._groups[0].mesh)

    @property
    def post_forward_mesh_info(self) -> Any:
        """Says where forward leaves parameters: `mesh_info` after `reshard_after_forward=True`, None after False.

        Programs assign to it what torch's `_get_post_forward_mesh_info` returns, to change `reshard_after_forward`.
        """
        settings = self._groups[0].settings
        if settings.secondary_size is not None:
            return load_module(f"{_INTERNAL}_fsdp_init", _INTERFACE)._get_post_forward_mesh_info(
                settings.secondary_size, self.mesh_info
            )
        return None if settings.after_forward is AfterForward.KEEP else self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        own = self.mesh_info
        chosen = info is not None if info in (None, own) else info.shard_mesh_size
        for group in self._groups:
            group.set(reshard_after_forward=chosen)

    @property
    def _training_state(self) -> Any:
        states = load_module(f"{_INTERNAL}_fsdp_common", _INTERFACE).TrainingState
        root = self._groups[0].root
        if root.is_in_backward():
            return states.PRE_BACKWARD
        return states.FORWARD if self._groups[0].state.running else states.IDLE

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        """Takes the state that the group has: programs set IDLE before they move a model, in case torch's forgot to."""
        if state != self._training_state:
            raise RuntimeError(
                f"{self._groups[0].name}: _training_state is {self._training_state.name}, and can't be set to "
                f"{getattr(state, 'name', state)}: it follows the forwards and backwards of the model."
            )

    def post_backward(self) -> None:
        """Reduces unsynchronized gradients, outside a backward pass, and reshards.

        `.grad` holds all of them when this returns for the last group that had some: until then one reduction is in
        flight.
        """
        root = self._groups[0].root
        reduce_unsynchronized(root, self._groups)
        if not any(group.params and group.gradients.unsynchronized.were_left for group in root.groups):
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
        return self.state.root.queue

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
    """The attribute `_is_fsdp_managed_module` of each module in a sharded one. torch sets it to True.

    It is true if a forward may gather parameters, so that all ranks must run it. `generate` of Transformers then goes
    on until the texts of all ranks have ended, and speech models run all layers in spite of layer drop. It is false
    inside `full_params` around the whole model, between `unshard` and `reshard` of all groups, and where nothing is
    sharded. It is also false while torch.compile traces a module, which would leave out its guards on parameters. A
    copy is False: the copy of a sharded model gets one of its own.
    """

    def __init__(self, state: FSDPState) -> None:
        self._state: weakref.ref[FSDPState] = weakref.ref(state)

    def __bool__(self) -> bool:
        state = self._state()
        return state is not None and not is_traced() and any(map(_may_gather, state.root.groups))

    def __reduce__(self) -> Any:
        return bool, ()


def _may_gather(group: FSDPParamGroup) -> bool:
    is_lent = group.phase is COPIED or group.num_running > 0 or group.keep_until is KeepUntil.USER
    return bool(group.params) and group.mesh.size > 1 and not is_lent


def register_state(state: FSDPState) -> None:
    """Registers the modules of one call with torch's other composable APIs, under a TorchState."""
    needs_all_ranks = ForwardsNeedAllRanks(state)
    for module in names_below(state.modules):
        module.__dict__["_is_fsdp_managed_module"] = needs_all_ranks
    for module in state.modules:
        register_composable(module, StateRef(_torch_state(state)), "fully_shard")


def get_module_fsdp_state(module: nn.Module) -> Any:
    """Returns the state of a module that fsdp2 or torch has sharded, under torch's names for it; else None."""
    found = torch_state_of(module)
    if found is not None:
        return found
    state = state_in_table(module)
    return state if isinstance(state, load_module(f"{_INTERNAL}_fsdp_state", _INTERFACE).FSDPState) else None


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
