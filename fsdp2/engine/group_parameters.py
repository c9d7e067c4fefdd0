"""Builds a group's buffers from its modules' parameters, registers sharded or unsharded ones, and notices changes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from operator import add, gt, is_, setitem, sub
from sys import getrefcount
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..parameters.cast_buffers import CastBuffers
from ..parameters.subclasses import SubclassGather
from ..torch_private import compat
from ..torch_private.compat import peek_local, requires_grad_of, version_of
from .comm import Comm, SoloComm
from .freed import NOTHING_TO_REFUSE, Readability
from .layout import GatherLayout, ParamSpec, gather_layout
from .memory import Memory
from .mesh import DataMesh
from .owners import note_shards
from .parameter import FSDPParam
from .policy import GroupSettings
from .unsharded_versions import UnshardedVersions

if TYPE_CHECKING:
    from ..devices.streams import Transfers
    from .gradients import GroupGradients

_SHARDED, _UNSHARDED = 0, 1
_NOTHING: Mapping[FSDPParam, nn.Parameter] = MappingProxyType({})
_uncounted = count()
# So many views of each parameter, on average, are kept for the next step.
_VIEWS_OF_PARAMETER = 4


class Registration:
    """Swaps sharded and unsharded parameters in the modules that own them, and reads version counters.

    A tensor counts the in-place operations on it, together with those on its views. A gathered copy is stale when the
    counters have moved on since. `watched`: in which dicts of modules, under which names, the sharded parameters were
    registered, with which local tensors.
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
        self.buffers: CastBuffers | None = None

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
        if unsharded and self.buffers is not None:
            self.buffers.cast()

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
        slots, names, sharded, locals_ = self.watched
        are_registered = all(map(is_, map(dict.get, slots, names), sharded))
        return not (are_registered and all(map(is_, map(peek_local, sharded), locals_)))

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
        with compat.no_torch_function():  # or reading them takes twice as long
            try:
                return tuple(map(version_of, self._sharded))
            except RuntimeError:  # some were made in inference mode
                return tuple(map(add, map(version_if_counted, self._sharded), map(version_if_counted, self._locals)))

    def trainable(self) -> list[bool]:
        """Returns which of the sharded parameters require a gradient."""
        with compat.no_torch_function():
            return list(map(requires_grad_of, self._sharded[:-1]))


def version_if_counted(tensor: Tensor) -> int:
    """Returns a tensor's version. One made in inference mode has none, and counts as changed whenever it is asked."""
    return next(_uncounted) if tensor.is_inference() else tensor._version


class GroupParameters:
    """Builds buffers, plans and unsharded parameters from the parameters of one group.

    `buffers`: their memory; None while they are elsewhere than on `storage_device`, on the meta device for example.
    `extension`: what gathers those that say themselves how; they are the last ones in `params`. `unsharded`: the
    unsharded parameters, and `unsharded_versions` their version counters; `storage_ids`: the identities of their
    storages; `nbytes`: the bytes of these, with padding and with what travels packed.
    `trainable`: which of them required a gradient when buckets were last planned.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        gradients: GroupGradients,
        mesh: DataMesh,
        device: torch.device,
        transfers: Transfers | None,
    ) -> None:
        self.params, self._gradients, self.mesh = params, gradients, mesh
        self.storage_device, self._transfers = device, transfers
        self.registration = Registration()
        self.buffers: Memory | None = None
        self.extension: SubclassGather | None = None
        self.specs: tuple[ParamSpec, ...] = ()
        self.unsharded: list[nn.Parameter] = []
        self.unsharded_versions = UnshardedVersions((), ())
        self.trainable: list[bool] = []
        self.storage_ids: frozenset[int] = frozenset()
        # True if their memory is freed at times: it is not that of the shards, and the user does not keep it.
        self.frees_memory = False
        # How many references there are to each unsharded parameter in a forward when nobody has kept it.
        self.references: list[int] | None = None
        # Identity of an unsharded parameter -> its index.
        self.indices: dict[int, int] = {}
        # Of those that lie in the buffers; refuses reads while their memory is freed.
        self.readability = NOTHING_TO_REFUSE
        # Tensors over the memory of those that lie in the buffers, which share their version counters; and where they
        # begin, in bytes. Views that autograd has saved are made again of them, and kept: the next step saves the same.
        self.bases: list[Tensor] = []
        self.offsets: tuple[int, ...] = ()
        self.views: dict[tuple[Any, ...], Tensor] = {}
        # Identity of the storage whose views autograd saves as descriptions.
        self.described_storage: int | None = None
        self.nbytes = 0
        # Those whose shards a user has put elsewhere (`p.data = x`) since they were copied to the buffers.
        self._assigned: set[FSDPParam] = set()
        # How the ranks gather.
        self._comm: Comm = SoloComm()
        self._settings = GroupSettings()
        # The ranks that restore the parameters after forward from secondary shards, this one included.
        self.neighbours: Comm | None = None

    @property
    def plain(self) -> Sequence[FSDPParam]:
        """The parameters that lie in the buffers: those that do not say themselves how they are gathered."""
        return self.params[: len(self.buffers.layout.specs)] if self.buffers is not None else ()

    # ---- building

    def build(self, settings: GroupSettings, comm: Comm) -> None:
        """Builds everything in new memory. `comm`: gathers."""
        self._settings, self._comm, self.buffers = settings, comm, None
        self._rebuild()

    def use(self, settings: GroupSettings) -> None:
        """Follows the group's settings from now on."""
        self._settings = settings
        if self.buffers is not None:
            self._follow_settings()

    def take(self, found: Sequence[tuple[FSDPParam, nn.Parameter]]) -> None:
        """Takes what users have registered in place of parameters, and rebuilds."""
        self.readability.allow(True)
        gone = self.registration.find_replaced()
        replaced = {param: parameter for param, parameter in found if id(param.sharded) in gone}
        with torch.no_grad():
            for param, parameter in found:
                param.take(parameter)
        self.registration.note_replacement()
        if replaced:
            self._gradients.codecs.discard()
        self._rebuild(replaced)

    def follow_slots(self) -> None:
        """Follows parameters to the modules that have them now: tied ones have got slots, or lost some."""
        self._rebuild()

    def _rebuild(self, replaced: Mapping[FSDPParam, nn.Parameter] = _NOTHING) -> None:
        """Builds buffers, plans and unsharded parameters from the present local tensors, if all are on the device."""
        self.readability.allow(True)
        self.registration.prepare(())
        if {param.local.device for param in self.params} - {self.storage_device}:
            self.drop_memory(replaced)
            return
        self.specs = self._find_specs()
        plain = tuple(spec for spec in self.specs if not spec.extended)
        # Also when the first forward runs in inference mode: what is built here must serve training.
        with torch.inference_mode(False), torch.no_grad():
            self._place_shards(plain)
        self.follow(replaced)

    def _find_specs(self) -> tuple[ParamSpec, ...]:
        """Orders the parameters, and returns their specs."""
        specs = [param.spec(self._settings.policy) for param in self.params]
        order = sorted(range(len(specs)), key=[spec.extended for spec in specs].__getitem__)
        ordered = [self.params[i] for i in order]
        if ordered != self.params and self._gradients.is_pending():
            raise RuntimeError(
                f"{ordered[-1].name}: how it is gathered (fsdp_pre_all_gather) can't change while gradients of its "
                "group are unsynchronized, or in flight. Do that between steps."
            )
        self.params[:] = ordered
        extended = ordered[[spec.extended for spec in specs].count(False) :]
        self.extension = SubclassGather(extended, self, self._settings.policy) if extended else None
        return tuple(specs[i] for i in order)

    def _place_shards(self, plain: tuple[ParamSpec, ...]) -> None:
        shared = self.params[: len(plain)]
        locals_ = [param.local for param in shared]
        if self.buffers is None or self.buffers.layout.specs != plain:
            self.buffers = self._allocate(gather_layout(plain, self.mesh.size, self._comm.direct_min_bytes))
        elif self.buffers.has_in_place(locals_):
            return  # as users' aliases have them
        else:
            self.buffers.renew_shards()  # users may hold what lies in the present memory, to put it back
            if self.buffers.layout.aliased:
                self.move_unsharded()
        for param, local in zip(shared, self.buffers.move_into_shards(locals_), strict=True):
            param.local = local

    def _allocate(self, layout: GatherLayout) -> Memory:
        where = self.mesh.rank, self.mesh.device, self._transfers
        buffers = Memory(layout, *where, self.neighbours, self._comm.memory)
        # While the storage has its size: a tensor that is put over a smaller one makes it grow, and stay.
        for param, memory in zip(self.params, buffers.unsharded_parameters(), strict=False):
            param.build_unsharded(memory)
        buffers.note_uses()
        buffers.free()
        return buffers

    def move_unsharded(self) -> None:
        """Puts the unsharded parameters over their memory in the buffers, which must be allocated."""
        assert self.buffers is not None, "they are there"
        with torch.inference_mode(False), torch.no_grad():
            for param, memory in zip(self.plain, self.buffers.unsharded_parameters(), strict=True):
                param.move_unsharded(memory)

    def note_assigned(self, param: FSDPParam) -> bool:
        """Notes that a user has put the shard of `param` elsewhere. Returns True if the buffers hold none any more, and
        their memory may be dropped.
        """
        self._assigned.add(param)
        has_memory = self.buffers is not None and not self._settings.keep_storage
        return has_memory and len(self._assigned) == len(self.params)

    def drop_memory(self, replaced: Mapping[FSDPParam, nn.Parameter] = _NOTHING) -> None:
        """Holds no memory of the parameters, which lie elsewhere now. The next `build` allocates some."""
        self.readability.allow(True)
        self.registration.prepare(())
        if self.buffers is not None and self.buffers.layout.aliased:
            for param in self.plain:
                param.move_unsharded(None)
        self.buffers, self.nbytes, self.bases, self.views = None, 0, [], {}
        self._watch(replaced)

    def follow(self, replaced: Mapping[FSDPParam, nn.Parameter] = _NOTHING) -> None:
        """Updates everything that depends on which sharded and unsharded parameters there are now."""
        assert self.buffers is not None, "unsharded parameters are there"
        self.readability.allow(True)
        self._watch(replaced)
        self.follow_requires_grad()
        self.unsharded = [param.unsharded for param in self.params]
        self.storage_ids, self.nbytes = frozenset([self.buffers.storage_id]), self.buffers.layout.unsharded_nbytes
        if self.extension is not None:
            self.storage_ids |= self.extension.storage_ids()
            self.nbytes += self.extension.nbytes
        self.registration.prepare(self.params)
        self.references = None
        self.indices = {id(unsharded): i for i, unsharded in enumerate(self.unsharded)}
        self.bases = [
            each.detach() if type(each) is nn.Parameter else _plain_base(each)
            for each in [param.unsharded for param in self.plain if not self.buffers.layout.aliased]
        ]
        self.offsets, self.views = self.buffers.layout.unsharded_offsets, {}
        self._follow_settings()
        self.buffers.note_uses()
        if not self.buffers.is_allocated:
            self.readability.allow(False)

    def _follow_settings(self) -> None:
        """Prepares for memory that is freed, unless it is that of the shards, or the user wants to keep it."""
        buffers, settings = self.buffers, self._settings
        assert buffers is not None, "unsharded parameters are there"
        self.readability.allow(True)
        buffers.keeps_storage = settings.keep_storage
        self.frees_memory = not buffers.layout.aliased and not buffers.keeps_storage
        self.readability = Readability([param.unsharded for param in self.plain] if self.frees_memory else ())
        is_complex = any(spec.compute_dtype.is_complex for spec in buffers.layout.specs)  # views may be conjugated
        self.described_storage = buffers.storage_id if self.frees_memory and not is_complex else None

    def make_view(self, place: tuple[torch.dtype, torch.Size, tuple[int, ...], int]) -> Tensor:
        """Makes the view of unsharded parameters that `place` describes: its dtype, shape, stride and offset in
        elements. It shares the version counter of the parameter in which it begins, and is kept in `views`.
        """
        dtype, shape, stride, offset = place
        base = self.bases[bisect_right(self.offsets, offset * dtype.itemsize) - 1]
        view = (base if base.dtype is dtype else base.view(dtype)).as_strided(shape, stride, offset)
        if len(self.views) < _VIEWS_OF_PARAMETER * len(self.bases) and self.buffers is not None:
            self.views[place] = view
            self.buffers.num_uses += 1
        return view

    def are_kept(self) -> bool:
        """Returns True if the forward that has just run has left an unsharded parameter where something else than the
        engine can read it, and their memory is to be freed.
        """
        if not self.frees_memory:
            return False
        in_cpp = map(compat.SHARED_IN_CPP.__le__, map(compat.cpp_references, self.unsharded))  # by autograd's graph
        references = list(map(sub, map(getrefcount, self.unsharded), in_cpp))
        if references == self.references:
            return False
        self.references = least = list(map(min, references, self.references or references))
        return any(map(gt, references, least))

    def _watch(self, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        self._assigned.clear()
        locals_ = [param.local for param in self.params]
        self.registration.watch(self.params, locals_)
        note_shards(self.params, locals_)
        guards = self.unsharded_versions.guards
        self.unsharded_versions = UnshardedVersions(self.params, self.registration.versions(), guards)
        group = self._gradients.group
        if group.root is not None:
            group.root.has_rebuilt = True
        for notify in group.events.rebuilt:
            notify(group, replaced)

    # ---- requires_grad

    def take_requires_grad(self) -> None:
        """Has the sharded parameters take the `requires_grad` that a user has given to the unsharded ones."""
        if self.buffers is None or list(map(requires_grad_of, self.unsharded)) == self.trainable:
            return
        for param, before in zip(self.params, self.trainable, strict=True):
            if param.unsharded.requires_grad != before:
                param.sharded.requires_grad_(param.unsharded.requires_grad)
        self.follow_requires_grad()

    def follow_if_changed(self) -> None:
        """Calls `follow_requires_grad` if other sharded parameters require a gradient than before."""
        if self.buffers is not None and self.registration.trainable() != self.trainable:
            self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Plans to reduce the gradients of the parameters that require one now."""
        self.references = None  # which the buckets have, too
        self.trainable = self.registration.trainable()
        with compat.no_torch_function():
            for param, trainable in zip(self.params, self.trainable, strict=True):
                if param.unsharded.requires_grad is not trainable:
                    param.unsharded.requires_grad_(trainable)
        specs = self.specs if self.buffers is not None else ()
        self._gradients.prepare(specs, self._settings.policy, [i for i, yes in enumerate(self.trainable) if yes])
        self._gradients.group.note_change()

    # ---- what a tensor belongs to

    def changed_names(
        self, weight: Tensor | int | tuple[Any, ...], before: tuple[int, ...], now: tuple[int, ...]
    ) -> list[str]:
        """Returns the names of parameters, of one of which `weight` is a view, whose versions differ between `before`
        and `now`; all names, if some were replaced.
        """
        if before[-1:] != now[-1:]:  # or nothing is known of before
            return [param.name for param in self.params]
        return [self.params[i].name for i in self.indices_of(weight) if before[i] != now[i]]

    def indices_of(self, weight: Tensor | int | tuple[Any, ...]) -> range:
        """Returns the indices of the parameters among which is the one that `weight` is a view of."""
        assert self.buffers is not None, "an unsharded parameter was saved"
        if isinstance(weight, int):
            return range(weight, weight + 1)
        if isinstance(weight, tuple):
            return self._indices_at(weight[3] * weight[0].itemsize)
        if self.extension is not None and compat.storage_id(weight) != self.buffers.storage_id:
            return range(len(self.plain), len(self.params))  # which of them is not known
        weight = compat.local_if_any(weight)
        return self._indices_at(int(weight.storage_offset()) * weight.element_size())

    def _indices_at(self, offset: int) -> range:
        assert self.buffers is not None, "an unsharded parameter was saved"
        i = bisect_right(self.buffers.layout.unsharded_offsets, offset) - 1
        return range(i, i + 1)


def _plain_base(unsharded: Tensor) -> Tensor:
    """Returns a plain tensor over the memory of an unsharded parameter, which shares its version counter."""
    if compat.has_no_dispatch(type(unsharded)):
        return compat.plain_values(unsharded)
    return compat.local_if_any(unsharded).detach()
