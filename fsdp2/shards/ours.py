"""The protocol for modules that fsdp2 has sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks.model_facts import find_written, known_of
from ..collectives.choose import choice_of
from ..engine.buckets import codecs_of
from ..engine.codec import Cast
from ..engine.events import Change
from ..engine.group import COPIED, UNSHARDED, FSDPParamGroup
from ..engine.layout import GatherLayout, ParamSpec, gather_layout
from ..engine.memory import Memory
from ..engine.mesh import DataMesh
from ..engine.owners import Owned, owners_by_id
from ..engine.parameter import FSDPParam, fqn
from ..engine.placeholders import UnsynchronizedGrad
from ..engine.policy import GroupSettings
from ..engine.state import STATE, groups_below, groups_of, modules_below, state_of
from ..engine.unsharded import UnshardedParameters
from ..features.conditional import is_conditional
from ..features.large_submodules import is_read_outside
from ..features.module_repr import dtype_text
from ..features.optimizer_in_backward import steps_of
from ..features.passes import finalize, reset
from ..parameters.empty_memory import find_unwritten
from ..parameters.replacements import Accept
from ..parameters.subclasses import gathers_itself
from ..parameters.tensor_parallel import TensorParallel
from ..ranks.rank_facts import is_first, ranks_of
from ..torch_private.internals import graph_task, local_if_any, new_dtensor
from .dtensors import box_of, cuts_of, replicas_of
from .protocol import (
    Cut,
    GroupFacts,
    NotedValues,
    Place,
    Ranks,
    ShardGroup,
    ShardParam,
    Unsharded,
)
from .registered import registered

__all__ = ["OurGroup", "OurParam", "OurShards", "place_of", "ranks_on"]

Names = dict[nn.Module, str]
"""Modules -> their FQNs in the module that shards are asked of."""


class OurParam:
    """One parameter of fsdp2, see ShardParam. `names_in`: None: its FQNs are those in the whole model."""

    def __init__(self, group: FSDPParamGroup, param: FSDPParam, names_in: Names | None = None) -> None:
        self.engine_group, self.engine_param, self._names_in = group, param, names_in

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OurParam) and other.engine_param is self.engine_param

    def __hash__(self) -> int:
        return id(self.engine_param)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.shape} by fsdp2>"

    @property
    def names(self) -> Sequence[str]:
        below = self._names_in or {}
        inside = [fqn(below[slot.module], slot.name) for slot in self.engine_param.slots if slot.module in below]
        return inside or self.engine_param.names

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def group(self) -> OurGroup:
        return OurGroup(self.engine_group, self._names_in)

    @property
    def slots(self) -> Sequence[tuple[nn.Module, str]]:
        return [(slot.module, slot.name) for slot in self.engine_param.slots]

    @property
    def parameter(self) -> nn.Parameter:
        return self.engine_param.sharded

    @property
    def registered(self) -> Tensor:
        own = self.engine_param
        return own.sharded if self.engine_group.phase in (UNSHARDED, COPIED) else own.slots[0].get()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.engine_param.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.engine_param.local.dtype

    @property
    def local(self) -> Tensor:
        return self.engine_param.local

    @property
    def grad(self) -> Tensor | None:
        grad = self.engine_param.sharded.grad
        return None if grad is None or self.is_unsynchronized else local_if_any(grad)

    @property
    def is_unsynchronized(self) -> bool:
        return isinstance(self.engine_param.sharded.grad, UnsynchronizedGrad)

    @property
    def version(self) -> int:
        pair = self.engine_param.sharded, self.engine_param.local
        return sum(0 if each.is_inference() else each._version for each in pair)

    @property
    def cuts(self) -> Sequence[Cut]:
        param, mesh = self.engine_param, self.engine_param.mesh
        cuts: list[Cut] = []
        if not param.is_scalar and mesh.size > 1:
            assert mesh.shard_group is not None, "ranks share it"
            cuts.append(Cut(mesh.shard_group, param.dim, param.gathered_shape, mesh.size, mesh.rank))
        kind = param.distribution
        if isinstance(kind, TensorParallel):
            cuts += cuts_of(self.name, kind.full_mesh, kind.full_placements, param.shape)
        return tuple(cuts)

    @property
    def replicas(self) -> Sequence[dist.ProcessGroup]:
        return replicas_of(self.parameter)

    @property
    def box(self) -> tuple[slice, ...]:
        return box_of(self.cuts, self.shape)

    @property
    def place(self) -> Place | None:
        return place_of(self, {})

    @property
    def gathers_itself(self) -> bool:
        return gathers_itself(self.engine_param.local)

    @property
    def is_stepped_in_backward(self) -> bool:
        return steps_of(self.engine_group) is not None

    def part_of(self, value: Tensor) -> Tensor:
        own = self.engine_param
        is_gathered = tuple(value.shape) == own.gathered_shape or own.is_scalar
        return own.own_rows(value if is_gathered else own.gathered(value))

    def as_parameter(self, value: Tensor) -> nn.Parameter:
        return self.engine_param.as_unsharded(value, requires_grad=False)

    def register(self, parameter: nn.Parameter) -> None:
        self.engine_param.register(parameter)

    def empty(self, device: torch.device) -> Tensor:
        """A group moves new local tensors into its shard buffer, and copies nothing of those that have no memory, as
        this one. `device`: where parameters rest is known.
        """
        param = self.engine_param
        local = torch.empty((), dtype=param.local.dtype, device=param.storage_device).expand(param.local.shape)
        local.untyped_storage().resize_(0)
        return new_dtensor(param.tensor_class, local, param.dtensor_spec)


def place_of(param: OurParam, known: dict[Any, Any]) -> Place | None:
    """Returns where a parameter lies. `known`: remembers the order of each group."""
    group, own = param.engine_group, param.engine_param
    buffers = group.parameters.buffers
    if buffers is None:
        return None
    if group not in known:
        offsets, params = buffers.layout.shard_offsets, group.parameters.plain
        order = sorted(range(len(params)), key=lambda i: (offsets[i], i))
        known[group] = {params[i]: (offsets[i], index) for index, i in enumerate(order)}
    if own not in known[group]:
        return None
    local, shards = own.local, buffers.shards
    offset, index = known[group][own]
    is_there = not local.numel() or (local.data_ptr() == shards.data_ptr() + offset and local.is_contiguous())
    return Place(shards, offset, index, partial(_are_shards_of, group, shards)) if is_there else None


def _are_shards_of(group: FSDPParamGroup, memory: Tensor) -> bool:
    buffers = group.parameters.buffers
    return buffers is not None and buffers.shards is memory


def ranks_on(mesh: DataMesh) -> Ranks:
    """Returns the ranks of a mesh."""
    return Ranks(mesh.device, tuple(mesh.axis_groups), ranks_of(mesh), mesh.size, is_first(mesh))


class OurGroup:
    """One group of fsdp2, see ShardGroup."""

    def __init__(self, group: FSDPParamGroup, names_in: Names | None = None) -> None:
        self.engine_group, self._names_in = group, names_in

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OurGroup) and other.engine_group is self.engine_group

    def __hash__(self) -> int:
        return id(self.engine_group)

    def __repr__(self) -> str:
        return repr(self.engine_group)

    @property
    def name(self) -> str:
        below, first = self._names_in or {}, self.engine_group.modules[0]
        return self.engine_group.name if first not in below else below[first] or "root"

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.engine_group.modules

    @property
    def is_root(self) -> bool:
        return self.engine_group.state.outermost is self.engine_group.state

    @property
    def params(self) -> Sequence[OurParam]:
        return [OurParam(self.engine_group, param, self._names_in) for param in self.engine_group.params]

    @property
    def ranks(self) -> Ranks:
        return ranks_on(self.engine_group.mesh)

    is_foreign = False

    @property
    def in_use(self) -> str | None:
        group = self.engine_group
        if graph_task() != -1 or group.root.is_in_backward():
            return "backward"
        if group.phase is COPIED:
            return "copies"
        return "forward" if group.num_running or is_read_outside(group) else None

    def settle(self, *, reshard: bool = True, may_be_meta: bool = True, may_be_untied: bool = False) -> None:
        group = self.engine_group
        if reshard:
            group.reshard_stale()
        elif group.phase is UNSHARDED or not group.registration.is_replaced():
            return
        group.reshard_if_idle()
        meta = Accept.META if may_be_meta else Accept.SHARDED
        group.adopt_replacements(meta | Accept.UNTIED if may_be_untied else meta)

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.engine_group.state.input_dtype

    @property
    def settings_text(self) -> str:
        own = self.engine_group.settings
        return f"sync={own.reduce_gradients}, all_reduce={own.all_reduce}, divisor={own.divide_factor}, {own.policy}"

    def find_computed(self) -> tuple[torch.dtype, ...]:
        return self.facts().computed or ()

    def facts(self) -> GroupFacts:
        group, policy = self.engine_group, self.engine_group.settings.policy
        params = sorted(group.params, key=lambda param: param.spec(policy).self_gathering)
        specs = [param.spec(policy) for param in params]
        trainable = [param.sharded.requires_grad for param in params]
        stored, computed = [spec.storage_dtype for spec in specs], [spec.compute_dtype for spec in specs]
        sums = [policy.gradient_dtype(spec.delivered_dtype) for spec in specs]
        summed = [*compress(sums, trainable)]
        codecs = codecs_of(specs, policy, group.comms.reduces.receiver_sums)
        sent = [codec.packed_dtype(dtype) for codec, dtype in zip(codecs, sums, strict=True)]
        codec = policy.compression.reduce_scatter
        if codec is not None and codec.exchanges and type(codec) is not Cast:
            sent = [torch.bfloat16] * len(specs)  # a codec that is worth its bytes is not more exact
        sizes = [codec.sent_nbytes(spec.numel, dtype) for codec, spec, dtype in zip(codecs, specs, sums, strict=True)]
        below = self._names_in or {}
        slots = [next((slot for slot in param.slots if slot.module in below), param.slots[0]) for param in params]
        return GroupFacts(
            cls=plain_class(group.modules[0]).__name__,
            modules=tuple(below.get(module, group.name) or "root" for module in group.modules),
            parameters=tuple(fqn(below.get(slot.module, group.name), slot.name) for slot in slots),
            num_frozen=trainable.count(False),
            numel=sum(1 if param.is_scalar else spec.numel for param, spec in zip(params, specs, strict=True)),
            stored=tuple(dict.fromkeys(stored)),
            computed=tuple(dict.fromkeys(computed)),
            reduced=tuple(dict.fromkeys(summed)),
            sent=tuple(dict.fromkeys(compress(sent, trainable))),
            gathered_nbytes=sum(spec.unsharded_nbytes for spec in specs),
            reduced_nbytes=sum(compress(sizes, trainable)) if group.mesh.num_ranks > 1 else 0,
            padding_nbytes=_padding_nbytes(group),
            settings=tuple(_settings_text(group)),
        )

    def before_read(self) -> None:
        for wait in self.engine_group.root.waits_before_read:
            wait(self.engine_group)

    def versions(self) -> tuple[int, ...]:
        return self.engine_group.shard_versions()

    def copy_whole(self, params: Sequence[ShardParam] | None = None, dtype: torch.dtype | None = None) -> list[Tensor]:
        group = self.engine_group
        chosen = [_engine_param(param) for param in (self.params if params is None else params)]
        specs = []
        for spec in (param.spec(group.settings.policy) for param in chosen):
            wanted = dtype if dtype is not None and spec.storage_dtype.is_floating_point else spec.storage_dtype
            specs.append(replace(spec, compute_dtype=wanted, gather_codec=None))
        comm, mesh = group.comms.gathers, group.mesh
        with torch.inference_mode(False), torch.no_grad():
            layout = gather_layout(tuple(specs), mesh.size, comm.direct_min_bytes)
            buffers = Memory(layout, mesh.rank, mesh.device, UnshardedParameters(), group.transfers)
            buffers.move_into_shards([param.local for param in chosen])
            buffers.start_gather(comm).finish()
            return buffers.unsharded_parameters()

    def note_loaded(self) -> None:
        self.engine_group.note_change(Change.LOADED)

    def noted_values(self) -> Sequence[NotedValues]:
        group = self.engine_group
        return [
            NotedValues(OurParam(group, param, self._names_in), known.values, known.note_place)
            for param, known in known_of(group).items()
        ]

    def begin_copies(self) -> None:
        self.engine_group.begin_copies()

    def end_copies(self) -> None:
        self.engine_group.end_copies()

    @property
    def unsharded(self) -> Unsharded:
        return _unsharded


def _engine_param(param: Any) -> FSDPParam:
    assert isinstance(param, OurParam), "a parameter of this group"
    return param.engine_param


def _unsharded(groups: Sequence[Any]) -> AbstractContextManager[Callable[[Any], nn.Parameter]]:
    return registered([group.engine_group for group in groups], lambda param: _engine_param(param).unsharded)


class OurShards:
    """The parameters in a module that fsdp2 has sharded, see Shards."""

    def __init__(self, module: nn.Module) -> None:
        self._below = modules_below(module)
        self.groups: Sequence[ShardGroup] = [OurGroup(g, self._below) for g in groups_below(module)]
        self._owners: dict[int, Owned] | None = None

    def names(self) -> dict[str, ShardParam]:
        return {name: param for group in self.groups for param in group.params for name in param.names}

    def find(self, tensor: Tensor) -> ShardParam | None:
        if self._owners is None:
            self._owners = owners_by_id()
        owner = self._owners.get(id(tensor))
        return None if owner is None else OurParam(owner.group, owner.param, self._below)

    @property
    def _engine_groups(self) -> list[FSDPParamGroup]:
        return [group.engine_group for group in self.groups if isinstance(group, OurGroup)]

    def unwritten(self) -> Sequence[Tensor]:
        found = find_unwritten(self._engine_groups)
        return [each.sharded if isinstance(each, FSDPParam) else each for each in found]

    def note_emptied(self, buffers: Sequence[Tensor]) -> None:
        sharded = next((module for module in self._below if state_of(module) is not None), None)
        if sharded is not None:
            groups_of(sharded)[0].empty.note_buffers(buffers)

    def frozen_writes(self) -> dict[str, bool]:
        return find_written(self._engine_groups)

    def finish_gradients(self) -> None:
        for root in dict.fromkeys(group.root for group in self._engine_groups):
            finalize(root)

    def drop(self, after_error: bool) -> None:
        if after_error:
            for root in dict.fromkeys(group.root for group in self._engine_groups):
                reset(root)
        for group in self._engine_groups:
            group.gradients.unsynchronized.clear()


# ---- padding


def gathered_nbytes(layout: GatherLayout) -> int:
    """Returns the bytes that each rank contributes to a gather: its chunk of each parameter, and up to 15 bytes after
    the packed ones.

    R rows over W ranks need (-R) mod W rows of padding, so all ranks' payloads together have at most (W - 1) rows of
    each parameter and 15 * W bytes above the parameters' own.
    """
    if layout.world_size == 1:
        return 0
    return sum(layout.specs[i].compute_nbytes for i in layout.direct) + layout.packed_nbytes + layout.encoded_nbytes


def _padding_nbytes(group: FSDPParamGroup) -> int:
    """Returns the bytes that one gather sends besides the parameters."""
    size, specs = group.mesh.size, [param.spec(group.settings.policy) for param in group.params]
    if size == 1:
        return 0
    plain = tuple(spec for spec in specs if not spec.self_gathering)
    sent = size * gathered_nbytes(gather_layout(plain, size, group.comms.gathers.direct_min_bytes))
    return sent - sum(map(_needed_nbytes, plain))


def _needed_nbytes(spec: ParamSpec) -> int:
    """Returns the bytes of an unsharded parameter as it travels, without padding."""
    codec = spec.gather_codec
    return spec.nbytes if codec is None else codec.sent_nbytes(spec.numel, spec.storage_dtype)


# ---- what describe shows


def _codec_text(codec: object) -> str:
    return f"in {dtype_text(codec.dtype)}" if isinstance(codec, Cast) else f"by {codec!r}"


def _settings_text(group: FSDPParamGroup) -> Iterable[str]:
    now, usual = group.settings, GroupSettings()
    if now.reshard_after_forward is not None:
        yield f"reshard_after_forward={now.reshard_after_forward}"
    for name in (
        *("reshard_after_backward", "unshard_in_backward", "reduce_gradients", "all_reduce", "reduce_unused"),
        *("bucket_bytes", "max_reductions", "divide_factor", "keep_storage", "free_viewed_storage"),
    ):
        if getattr(now, name) != getattr(usual, name):
            yield f"{name}={getattr(now, name)}"
    if group.mesh.joins is not None:
        yield str(group.mesh.topology)
    if group.transfers is not None or (group.params and group.params[0].storage_device != group.mesh.device):
        yield "CPU offload"
    dims = {param.dim for param in group.params} - {0}
    if dims:
        yield f"some sharded along dim {', '.join(map(str, sorted(dims)))}"
    compression = now.policy.compression
    if compression.all_gather is not None:
        yield f"all_gather {_codec_text(compression.all_gather)}"
    if compression.reduce_scatter is not None:
        yield f"reduce_scatter {_codec_text(compression.reduce_scatter)}"
    if now.comm_hook is not None:
        yield f"comm_hook={now.comm_hook.name}"
    elif compression.all_reduce is not None:
        yield f"all_reduce {_codec_text(compression.all_reduce)}"
    if now.policy.buffer_dtype is not None:
        yield f"buffer_dtype={dtype_text(now.policy.buffer_dtype)}"
    memory = choice_of(group).memory
    if memory is not None:
        yield f"{memory} memory"
    if now.vocab_parallel:
        yield "rows are looked up, nothing is gathered"
    if is_conditional(group.state):
        yield "conditional"


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before fsdp2 sharded it."""
    cls: Any = type(module)
    found: type[nn.Module] = cls.__bases__[0] if STATE in vars(module) else cls
    return found
