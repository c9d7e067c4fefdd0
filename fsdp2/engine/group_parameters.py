"""Builds a group's buffers from its modules' parameters, registers sharded or unsharded ones, and notices changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from itertools import count
from operator import add, is_, setitem
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..parameters.cast_buffers import CastBuffers
from ..parameters.secondary_shards import SecondaryLevel, SecondaryShards
from ..parameters.subclasses import SubclassGather, refuse_secondary_shards
from ..torch_private import internals
from ..torch_private.internals import peek_local, requires_grad_of, version_of
from .events import Change
from .layout import GatherLayout, ParamSpec, gather_layout
from .memory import Memory
from .owners import note_shards
from .parameter import FSDPParam
from .unsharded import UnshardedParameters

if TYPE_CHECKING:
    from .group import FSDPParamGroup

_SHARDED, _UNSHARDED = 0, 1
NONE_REPLACED: Mapping[FSDPParam, nn.Parameter] = MappingProxyType({})
_uncounted = count()


class Registration:
    """Swaps sharded and unsharded parameters in the modules that own them, and reads version counters.

    A tensor counts the in-place operations on it, together with those on its views. A gathered copy is stale when the
    counters have moved on since.
    """

    def __init__(self) -> None:
        # What to write where, to register the sharded parameters and the unsharded ones.
        self._dict_slots: list[tuple[tuple[Any, ...], ...]] = [((),) * 4] * 2
        self._setattr_slots: tuple[list[Any], list[Any]] = ([], [])
        # In which dicts of modules, under which names, the sharded ones were registered, with which local tensors.
        self.watched: tuple[tuple[Any, ...], ...] = ((),) * 4
        # Entries (dict, key, value) that are there only while the sharded parameters are registered; for extensions.
        self.while_sharded: list[tuple[dict[Any, Any], Any, Any]] = []
        # A parameter's two share one version counter, unless inference mode made one of them: see `note_shards`. The
        # last ones count replacements.
        self._sharded: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._replacements = torch.empty(0, device="cpu")
        # Casts buffers that were replaced, if the policy has a dtype for them.
        self._cast_buffers: CastBuffers | None = None

    def use_cast_buffers(self, cast_buffers: CastBuffers | None) -> None:
        """Has `cast_buffers` cast what users put in place of buffers, in each forward."""
        self._cast_buffers = cast_buffers

    def cast_buffers_with(self, buffers: CastBuffers | None) -> None:
        """Has `buffers` cast buffers that were replaced. None: they stay as they are."""
        self.buffers = buffers

    # ---- swapping

    def register(self, unsharded: bool) -> None:
        """Registers the unsharded parameters in their modules, or the sharded ones.

        What a user has registered in their place stays, for the next forward to notice.
        """
        for entries, key, value in self.while_sharded:
            if unsharded:
                entries.pop(key, None)
            else:
                entries[key] = value
        slots, names, parameters, others = self._dict_slots[unsharded]
        if all(map(is_, map(dict.get, slots, names), others)):  # no loop: it takes twice as long
            deque(map(setitem, slots, names, parameters), maxlen=0)
        else:
            for entries, name, parameter, other in zip(slots, names, parameters, others, strict=True):
                if entries.get(name) is other:
                    entries[name] = parameter
        for module, name, parameter in self._setattr_slots[unsharded]:
            setattr(module, name, parameter)
        if unsharded and self._cast_buffers is not None:
            self._cast_buffers.cast()

    def prepare(self, params: Sequence[FSDPParam]) -> None:
        """Prepares to swap the parameters that `params` have now. None of them: there is nothing to swap."""
        self._setattr_slots, rows = ([], []), []
        for param in params:
            sharded, unsharded = param.sharded, param.unsharded
            for slot in param.slots:
                module, name = slot.module, slot.name
                if slot.is_plain:
                    rows.append((module._parameters, name, sharded, unsharded))
                else:
                    self._setattr_slots[_SHARDED].append((module, name, sharded))
                    self._setattr_slots[_UNSHARDED].append((module, name, unsharded))
        slots, names, of_shards, of_whole = tuple(zip(*rows, strict=True)) or ((),) * 4
        self._dict_slots = [(slots, names, of_shards, of_whole), (slots, names, of_whole, of_shards)]

    # ---- noticing

    def watch(self, params: Sequence[FSDPParam], locals_: Sequence[Tensor]) -> None:
        """Remembers what is registered where, and from where version counters are read. `locals_`: of `params`."""
        rows = [
            (slot.module._parameters, slot.name, param.sharded, local)
            for param, local in zip(params, locals_, strict=True)
            for slot in param.slots
        ]
        self.watched = tuple(zip(*rows, strict=True)) or ((),) * 4
        self._sharded = [*[param.sharded for param in params], self._replacements]
        self._locals = [*locals_, self._replacements]

    def is_replaced(self) -> bool:
        """Returns True if a sharded parameter that should be registered is not, or has another local tensor."""
        # No loop: it takes twice as long, in every gather.
        slots, names, sharded, _ = self.watched
        return not all(map(is_, map(dict.get, slots, names), sharded)) or self.has_other_data()

    def has_other_data(self) -> bool:
        """Returns True if a sharded parameter has another local tensor than when it was watched."""
        return not all(map(is_, map(peek_local, self.watched[2]), self.watched[3]))

    def has_data_of(self, sharded: Tensor) -> bool:
        """Returns True if the local tensor of `sharded` is one that is watched."""
        local = peek_local(sharded)
        return any(each is local for each in self.watched[3])

    def find_replaced(self) -> set[int]:
        """Returns the identities of the sharded parameters for which `is_replaced` is True."""
        return {
            id(sharded)
            for slots, name, sharded, local in zip(*self.watched, strict=True)
            if slots.get(name) is not sharded or peek_local(sharded) is not local
        }

    def note_replacement(self) -> None:
        """Counts that parameters, or their local tensors, were replaced."""
        increment_version(self._replacements)

    def versions(self) -> tuple[int, ...]:
        """Returns a number per sharded parameter, which grows with each in-place operation on it, or step of an
        optimizer; and then one that grows with replacements.
        """
        with internals.no_torch_function():  # or reading them takes twice as long
            try:
                return tuple(map(version_of, self._sharded))
            except RuntimeError:  # some were made in inference mode
                return tuple(map(add, map(version_if_counted, self._sharded), map(version_if_counted, self._locals)))

    def trainable(self) -> list[bool]:
        """Returns which of the sharded parameters require a gradient."""
        with internals.no_torch_function():
            return list(map(requires_grad_of, self._sharded[:-1]))


def version_if_counted(tensor: Tensor) -> int:
    """Returns a tensor's version. One made in inference mode has none, and counts as changed whenever it is asked."""
    return next(_uncounted) if tensor.is_inference() else tensor._version


class Rebuild(IntEnum):
    """How much of a group's memory and objects must be built anew. Each level includes those below it."""

    TRAINABLE = auto()  # which parameters require a gradient: buckets
    OBJECTS = auto()  # unsharded parameters: everything that is prepared for these objects, and what swaps them
    SHARDS = auto()  # local tensors, or slots: the shards are put into the buffer, if they are not there
    MEMORY = auto()  # how the ranks gather, or dtypes: all memory


class GroupParameters:
    """Builds the memory of one group, and its unsharded parameters, from the parameters that its modules have."""

    def __init__(self, group: FSDPParamGroup, storage_device: torch.device) -> None:
        self._group, self.params, self.mesh = group, group.params, group.mesh
        # Where the sharded parameters live.
        self.storage_device = storage_device
        self.registration = Registration()
        self.unsharded = UnshardedParameters()
        # Shards, and the gathers from them. None while the parameters are elsewhere than on `storage_device`, on the
        # meta device for example.
        self.buffers: Memory | None = None
        # Gathers those that say themselves how; they are the last ones in `params`. None: there are none.
        self.self_gather: SubclassGather | None = None
        self.specs: tuple[ParamSpec, ...] = ()
        # Which of them required a gradient when buckets were last planned.
        self.trainable: list[bool] = []
        # Those whose shards a user has put elsewhere (`p.data = x`) since they were copied to the buffers.
        self._assigned: set[FSDPParam] = set()

    @property
    def plain(self) -> Sequence[FSDPParam]:
        """The parameters that lie in the buffers: those that do not say themselves how they are gathered."""
        return self.params[: len(self.buffers.layout.specs)] if self.buffers is not None else ()

    @property
    def secondary(self) -> SecondaryShards | None:
        """The secondary shards. None: no rank keeps any."""
        return None if self.buffers is None else self.buffers.secondary

    # ---- building

    def rebuild(self, level: Rebuild, replaced: Mapping[FSDPParam, nn.Parameter] = NONE_REPLACED) -> None:
        """Builds anew what depends on `change`. The group must be resharded, unless only objects have changed.

        `replaced`: the parameters that users have replaced, with what they have put in their place.
        """
        if level is Rebuild.TRAINABLE:
            self._plan_gradients()
            return
        self.unsharded.allow_reads()
        if level is not Rebuild.OBJECTS and not self._build_memory(level is Rebuild.MEMORY):
            self.drop_memory(replaced)
            return
        assert self.buffers is not None, "the memory is there"
        self._watch(replaced)
        self._plan_gradients()
        self.registration.prepare(self.params)
        self.unsharded.prepare(self.params, self.buffers.layout, self.self_gather)
        self.use_settings()

    def use_settings(self) -> None:
        """Follows the settings of the group, which say whether the memory of unsharded parameters is freed."""
        if self.buffers is not None:
            self.unsharded.use_settings(self._group.settings.keep_storage)

    def adopt(self, found: Sequence[tuple[FSDPParam, nn.Parameter]]) -> None:
        """Adopts what users have registered in place of parameters, and rebuilds."""
        self.unsharded.allow_reads()
        gone = self.registration.find_replaced()
        replaced = {param: parameter for param, parameter in found if id(param.sharded) in gone}
        with torch.no_grad():
            for param, parameter in found:
                param.adopt(parameter)
        self.registration.note_replacement()
        if replaced:
            self._group.gradients.codecs.discard()
        self.rebuild(Rebuild.SHARDS, replaced)

    def _build_memory(self, is_new: bool) -> bool:
        """Puts the shards into the group's memory. Returns False if some of them are on another device.

        `is_new`: the memory is allocated anew in any case, and else only if the parameters have another layout.
        """
        self.registration.prepare(())
        self.buffers = None if is_new else self.buffers
        if {param.local.device for param in self.params} - {self.storage_device}:
            return False
        self.specs = self._find_specs()
        plain = tuple(spec for spec in self.specs if not spec.self_gathering)
        # Also when the first forward runs in inference mode: what is built here must serve training.
        with torch.inference_mode(False), torch.no_grad():
            self._place_shards(plain)
        return True

    def _find_specs(self) -> tuple[ParamSpec, ...]:
        """Orders the parameters, and returns their specs."""
        policy = self._group.settings.policy
        specs = [param.spec(policy) for param in self.params]
        order = sorted(range(len(specs)), key=[spec.self_gathering for spec in specs].__getitem__)
        ordered = [self.params[i] for i in order]
        if ordered != self.params and self._group.gradients.is_pending():
            raise RuntimeError(
                f"{ordered[-1].name}: how it is gathered (fsdp_pre_all_gather) can't change while gradients of its "
                "group are unsynchronized, or in flight. Do that between steps."
            )
        self.params[:] = ordered
        self_gathering = ordered[[spec.self_gathering for spec in specs].count(False) :]
        if self_gathering and self._group.comms.secondary is not None:
            refuse_secondary_shards(self_gathering[-1].name)
        self.self_gather = SubclassGather(self_gathering, self.mesh, policy) if self_gathering else None
        return tuple(specs[i] for i in order)

    def _place_shards(self, plain: tuple[ParamSpec, ...]) -> None:
        shared = self.params[: len(plain)]
        locals_ = [param.local for param in shared]
        if self.buffers is None or self.buffers.layout.specs != plain:
            direct_min_bytes = self._group.comms.gathers.direct_min_bytes
            self.buffers = self._allocate(gather_layout(plain, self.mesh.size, direct_min_bytes))
        elif self.buffers.has_in_place(locals_):
            return  # as users' aliases have them
        else:
            self.buffers.renew_shards()  # users may hold what lies in the present memory, to put it back
            if self.buffers.layout.aliased:
                self.move_unsharded()
        for param, local in zip(shared, self.buffers.move_into_shards(locals_), strict=True):
            param.local = local

    def _allocate(self, layout: GatherLayout) -> Memory:
        mesh, comms = self.mesh, self._group.comms
        level = None if comms.secondary is None else SecondaryLevel(comms.secondary, mesh.has_outer_shard)
        where = mesh.rank, mesh.device, self.unsharded, self._group.transfers
        buffers = Memory(layout, *where, level, comms.gathers.memory)
        # While the storage has its size: a tensor that is put over a smaller one makes it grow, and stay.
        for param, memory in zip(self.params, buffers.unsharded_parameters(), strict=False):
            param.build_unsharded(memory)
        self.unsharded.note_uses()
        self.unsharded.free()
        return buffers

    def move_unsharded(self) -> None:
        """Puts the unsharded parameters over their memory in the buffers, which must be allocated."""
        assert self.buffers is not None, "they are there"
        with torch.inference_mode(False), torch.no_grad():
            for param, memory in zip(self.plain, self.buffers.unsharded_parameters(), strict=True):
                param.move_unsharded(memory)

    def note_assigned(self, param: FSDPParam) -> bool:
        """Notes that a user has put the shard of `param` elsewhere. Returns True if the buffers are now empty, and
        their memory may be dropped.
        """
        self._assigned.add(param)
        has_memory = self.buffers is not None and not self._group.settings.keep_storage
        return has_memory and len(self._assigned) == len(self.params)

    def drop_memory(self, replaced: Mapping[FSDPParam, nn.Parameter] = NONE_REPLACED) -> None:
        """Holds no memory of the parameters, which lie elsewhere now. The next `rebuild` allocates some."""
        self.unsharded.allow_reads()
        self.registration.prepare(())
        if self.buffers is not None and self.buffers.layout.aliased:
            for param in self.plain:
                param.move_unsharded(None)
        self.buffers = None
        self.unsharded.drop_memory()
        self._watch(replaced)

    def _watch(self, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        self._assigned.clear()
        locals_ = [param.local for param in self.params]
        self.registration.watch(self.params, locals_)
        note_shards(self.params, locals_)
        self.unsharded.watch_versions(self.params, self.registration.versions())
        self._group.note_change(Change.PARAMETERS, replaced)

    # ---- requires_grad

    def adopt_requires_grad(self) -> None:
        """Has the sharded parameters take the `requires_grad` that a user has given to the unsharded ones."""
        if self.buffers is None or list(map(requires_grad_of, self.unsharded.parameters)) == self.trainable:
            return
        for param, before in zip(self.params, self.trainable, strict=True):
            if param.unsharded.requires_grad != before:
                param.sharded.requires_grad_(param.unsharded.requires_grad)
        self.rebuild(Rebuild.TRAINABLE)

    def follow_if_changed(self) -> None:
        """Plans buckets anew if other sharded parameters require a gradient than before."""
        if self.buffers is not None and self.registration.trainable() != self.trainable:
            self.rebuild(Rebuild.TRAINABLE)

    def _plan_gradients(self) -> None:
        """Plans to reduce the gradients of the parameters that require one now."""
        self.unsharded.forget_references()  # which the buckets have, too
        self.trainable = self.registration.trainable()
        with internals.no_torch_function():
            for param, trainable in zip(self.params, self.trainable, strict=True):
                if param.unsharded.requires_grad is not trainable:
                    param.unsharded.requires_grad_(trainable)
        specs, group = self.specs if self.buffers is not None else (), self._group
        group.expect_other_gradients()
        group.gradients.prepare(specs, group.settings.policy, [i for i, yes in enumerate(self.trainable) if yes])
        group.note_change(Change.SETTINGS)
