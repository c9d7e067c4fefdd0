"""Unshards and reshards, as one, the parameters that one `fully_shard` call shards together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from .buffers import GroupBuffers, PendingGather
from .comm import Comm, Purpose
from .events import NO_EVENTS, Events, strategies
from .gradients import GroupGradients
from .group_parameters import GroupParameters, find_replacements
from .mesh import DataMesh
from .parameter import FSDPParam, fqn
from .policy import COPIED, GATHERED, GATHERING, SHARDED, UNSHARDED, GroupSettings, Hold
from .reduce import Reduction
from .streams import make_transfers

if TYPE_CHECKING:
    from .home_streams import GroupStreams


class Comms(NamedTuple):
    """Holds the Comms of a group: to gather, to reduce, between replicas, and among the ranks that restore the
    parameters after forward (`reshard_after_forward=k`).
    """

    gathers: Comm
    reduces: Comm
    replicas: Comm | None = None
    post_forward: Comm | None = None


class ParamGroup:
    """Owns one flat shard buffer and one storage for the unsharded parameters of a group.

    `phase` says where the parameters are, `hold` for how long unsharded ones stay; outside of forward and backward
    modules have the sharded ones, even if the unsharded ones' data is there. `gathered_at`: versions of the shards that
    were gathered last, or None where that was for a backward, between which and its forward users may not change
    parameters.
    """

    # Those of the root that the group runs under, see Root.
    root: Any = None
    queue: Any = None
    # Its streams. None: the device has none.
    streams: GroupStreams | None = None

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], mesh: DataMesh, settings: GroupSettings
    ) -> None:
        self.modules, self.params, self.mesh, self.settings = list(modules), list(params), mesh, settings
        self.name = type(modules[0]).__name__
        self.purpose = Purpose(self.name)
        self.phase = SHARDED
        self._pending: PendingGather | None = None
        self.hold = Hold.NOTHING
        self.gathered_at: tuple[int, ...] | None = None
        self.events: Events = NO_EVENTS
        storage_device = params[0].storage_device if params else mesh.device
        offloads = storage_device != mesh.device
        self.transfers = make_transfers(mesh.device, settings.pin_memory) if offloads else None
        self.comms = self.usual_comms = self._make_comms()
        self.gradients = GroupGradients(self, self.params, self._reduction(), self.streams)  # type: ignore[arg-type]
        self.parameters = GroupParameters(self.params, self.gradients, mesh, storage_device, self.transfers)
        self.registration = self.parameters.registration
        self.parameters.build(settings, self.comms.gathers.direct_min_bytes)

    def __repr__(self) -> str:
        return self.purpose.label

    # ---- settings

    @property
    def frees_viewed_storage(self) -> bool:
        """True if memory is freed although there are views of it: the user wants that, or graphs have them as a rule,
        because no hook sees what autograd saves.
        """
        root = self.root
        return self.settings.free_viewed_storage or (
            root is not None and (root.saves_unseen or not root.settings.saved_tensor_hooks)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters, in compute dtypes, padding included."""
        return self.parameters.nbytes

    @property
    def is_unsharded(self) -> bool:
        """True if the unsharded parameters' data is there."""
        return self.phase in (GATHERED, UNSHARDED)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Names the group and its parameters after the FQNs of their modules."""
        for param in self.params:
            for i, slot in enumerate(param.slots):
                prefix = names.get(slot.module)
                if prefix is not None:
                    param.names[i] = fqn(prefix, slot.name)
        self.name = self.purpose.name = self.purpose.label = names.get(self.modules[0], "") or "root"
        if not re.search("[^0-9.]", self.name):  # indices alone, of an nn.Sequential, say little in an error
            self.purpose.label = f'{type(self.modules[0]).__name__} "{self.name}"'

    def set(self, **changes: Any) -> None:
        """Changes settings of the group, between steps."""
        before, self.settings = self.settings, replace(self.settings, **changes)
        self.gradients.use(self._reduction())
        self.parameters.use(self.settings)
        if self.settings.keep_storage != before.keep_storage and self.phase is SHARDED:
            self.reshard()
        for notify in self.events.settings_changed:
            notify(self)

    def use_comms(self, comms: Comms) -> None:
        """Communicates in that way from now on. Every rank must call it, between steps."""
        before, self.comms = self.comms, comms
        self.gradients.use(self._reduction())
        sizes = [(each.gathers.direct_min_bytes, each.reduces.direct_min_bytes) for each in (before, comms)]
        if sizes[0] != sizes[1] or comms.post_forward is not before.post_forward:
            self.parameters.buffer_options = {"post_forward": comms.post_forward} if comms.post_forward else {}
            self._rebuild()

    def _make_comms(self) -> Comms:
        groups, make = (self.mesh.shard_group, self.mesh.replicate_group), strategies().make_comm
        shards, replicas = (make(group, self.mesh.device, self.purpose) for group in groups)
        return Comms(shards, shards, replicas if self.mesh.replicas_may_grow or replicas.size > 1 else None)

    def _reduction(self) -> Reduction:
        comms, now = self.comms, self.settings
        how = now.divide_factor, now.all_reduce, now.reduce_hook
        return Reduction(comms.reduces, comms.replicas, *how, self.transfers)

    def _rebuild(self) -> None:
        self.reshard()
        self.parameters.build(self.settings, self.comms.gathers.direct_min_bytes)

    # ---- sharded -> unsharded -> sharded

    def start_unshard(self, for_backward: bool = False, ahead: bool = True) -> None:
        """Begins to gather, unless that is under way or done. Every rank must call it, in the same order.

        `ahead`: of the modules that need it, which may run on another stream.
        """
        if self.phase is not SHARDED:
            return
        if self.parameters.buffers is None:
            self._notice_changes()
        for notify in self.events.shards_needed:
            notify(self)
        for notify in self.events.before_gather:
            notify(self)
        buffers, extension = self.parameters.buffers, self.parameters.extension
        assert buffers is not None, "shards are on the device"
        stays = self.hold >= Hold.NEXT_PASS or not self.settings.reshard_after_backward
        self.gathered_at = self.registration.versions() if stays or not for_backward else None
        try:
            more = extension.start(self.comms.gathers) if extension is not None else ()
            self._pending, self.phase = buffers.start_gather(self.comms.gathers, *more), GATHERING
        except RuntimeError as error:  # out of memory, for example
            self._locate(error)
            raise

    def unshard(self, for_backward: bool = False, registers: bool = True) -> None:
        """Makes the unsharded parameters of what the sharded ones are now, unless they are there, and registers them.

        Gathers, or finishes the gather in flight. `for_backward`: users may not have changed parameters since forward.
        """
        if not for_backward and self.phase is not UNSHARDED:
            self._notice_changes()
        if self.phase is SHARDED:
            self.start_unshard(for_backward, ahead=False)
        if self.phase is GATHERING:
            self._finish_gather()
        for notify in self.events.unsharded:
            notify(self)
        if registers:
            self.register()

    def _finish_gather(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None, "a gather is in flight"
        try:
            pending.finish()
        except BaseException as error:
            self.phase = SHARDED
            if isinstance(error, RuntimeError):  # a peer is gone, for example
                self._locate(error)
            raise
        self.phase = GATHERED
        self.parameters.readability.allow(True)
        if self.parameters.extension is not None and self.parameters.extension.finish():
            self.parameters.follow()
        for notify in self.events.gathered:
            notify(self)

    def unshard_again(self) -> None:
        """Gathers, for other ranks, parameters that are in use here. Every rank must call it, or `unshard`."""
        self.unshard(for_backward=True, registers=False)
        was_registered = self.phase is UNSHARDED
        self.phase = SHARDED
        self.unshard(for_backward=True, registers=False)
        if was_registered:
            self.phase = UNSHARDED

    def register(self) -> None:
        """Registers the unsharded parameters, whose data is there."""
        if self.phase is GATHERED:
            self.phase = UNSHARDED
            self.registration.register(unsharded=True)

    def unregister(self) -> None:
        """Registers the sharded parameters, and leaves the unsharded ones' data where it is."""
        if self.phase is UNSHARDED:
            self.phase = GATHERED
            self.registration.register(unsharded=False)

    def reshard(self, free: bool = True) -> None:
        """Registers the sharded parameters, and frees the unsharded ones' data.

        `free=False` leaves the bytes where they are, for a graph that reads them unnoticed.
        """
        if self.phase is COPIED:
            return
        self.unregister()
        pending, self._pending, self.phase = self._pending, None, SHARDED
        if pending is not None:
            pending.abandon()
        buffers = self.parameters.buffers
        if free and buffers is not None:
            for notify in self.events.before_free:
                notify(self)
            if self.parameters.readability.are_readable:
                self.parameters.readability.allow(False)
            if not buffers.free():
                self._leave_viewed()
            if self.parameters.extension is not None and not buffers.keeps_storage:
                self.parameters.extension.free()

    def _leave_viewed(self) -> None:
        """Leaves memory that something has a view of until a pass ends, unless it is to be freed although it has."""
        if self.frees_viewed_storage:
            assert self.parameters.buffers is not None, "it is there"
            GroupBuffers.free(self.parameters.buffers, although_viewed=True)
        elif self.root is not None:
            self.root.viewed.add(self)

    def free_if_resharded(self) -> bool:
        """Frees memory of unsharded parameters that `reshard` had to leave, and no secondary shards. Returns False if
        something still uses it.
        """
        buffers = self.parameters.buffers
        if buffers is None or self.phase is not SHARDED:
            return True
        self.parameters.readability.allow(False)
        return GroupBuffers.free(buffers)

    def shrink(self, free: bool = True) -> None:
        """Registers the sharded parameters; frees the unsharded ones but for this rank's secondary shards.

        `free=False` leaves the bytes of the unsharded ones, too.
        """
        self.unregister()
        assert self.phase is GATHERED, "a forward has just used them"
        assert self.parameters.buffers is not None, "they are there"
        self.phase = SHARDED
        buffers: Any = self.parameters.buffers
        buffers.keep_secondary()
        if free:
            for notify in self.events.before_free:
                notify(self)
            self.parameters.readability.allow(False)
            if not GroupBuffers.free(buffers):
                self._leave_viewed()

    def begin_copies(self) -> None:
        """Notes that modules are about to get copies of the parameters."""
        self.reshard()
        self.phase = COPIED

    def end_copies(self) -> None:
        """Notes that modules have the sharded parameters again."""
        if self.phase is COPIED:
            self.phase = SHARDED

    def _locate(self, error: RuntimeError) -> None:
        """Says in the message which group it was: neither allocators nor process groups know."""
        self.purpose.locate(error, f"gathering {self}, {self.nbytes} bytes")

    # ---- what users do to parameters

    def shard_versions(self) -> tuple[int, ...]:
        """Returns the versions of the sharded parameters, see Registration."""
        for notify in self.events.shards_needed:
            notify(self)
        return self.registration.versions()

    def adopt_replacements(
        self, accept_whole: bool = False, may_be_meta: bool = True, may_be_untied: bool = False
    ) -> bool:
        """Takes what a user has put in place of parameters or their local tensors (`.to`, loading, assignment).

        Returns True if there was any. `accept_whole`: also plain tensors of whole parameters. `may_be_meta`: parameters
        may be on the meta device. `may_be_untied`: tied parameters may be several objects for a while.
        """
        if self.phase is COPIED:
            return False
        self.reshard()
        return self._notice_changes(accept_whole, may_be_meta, may_be_untied)

    def _notice_changes(
        self, accept_whole: bool = False, may_be_meta: bool = False, may_be_untied: bool = False
    ) -> bool:
        """Follows what a user did to the parameters, and drops what was gathered before that. Returns True if some were
        replaced.
        """
        if self.phase is COPIED:
            raise RuntimeError(
                f"{self.name}: its parameters are copies that full_params has made, with which no sharded module "
                "runs. Leave that block first."
            )
        if self.shard_versions() != self.gathered_at:
            self.reshard()  # also secondary shards
        parameters = self.parameters
        are_replaced = parameters.buffers is None or self.registration.is_replaced()
        if are_replaced:
            self.reshard()
            found = (strategies().find_replacements or find_replacements)(self, accept_whole, may_be_untied)
            for notify in self.events.before_replace:
                notify(self, found)
            parameters.take(found)
        elif parameters.trainable != self.registration.trainable():
            parameters.follow_requires_grad()
        if parameters.buffers is None and not may_be_meta:
            expected = parameters.storage_device
            names = [f"{p.name} on {p.local.device}" for p in self.params if p.local.device != expected]
            raise RuntimeError(
                f"expected parameters on {expected}, got {', '.join(names)}. Materialise the model "
                f"before its first forward: model.to_empty(device={expected.type!r}), then initialise or load."
            )
        return are_replaced

    def is_up_to_date(self) -> bool:
        """Returns True if no parameter has changed, was replaced, frozen or unfrozen since the group was gathered."""
        is_replaced = self.phase is not UNSHARDED and self.registration.is_replaced()
        is_changed = self.shard_versions() != self.gathered_at
        return not (is_replaced or is_changed or self.registration.trainable() != self.parameters.trainable)
