"""Takes a group of parameters through a step: unshards and reshards it, and reduces the gradients that are left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..calls.user_code import are_in_force, outside, run_hidden
from ..collectives.choose import make_comm, make_neighbour_comm
from ..devices.streams import make_transfers, order_streams
from ..parameters.empty_memory import EmptyTensors
from ..parameters.replacements import Accept, find_replacements
from ..torch_private import internals
from ..torch_private.internals import num_dispatch_modes, num_function_modes, runs_transform
from .comm import Comm, CommLabel
from .events import NO_EVENTS, Change, Events
from .gather import PendingGather
from .gradients import GradientsOnOwnerStream, GroupGradients
from .group_parameters import NONE_REPLACED, GroupParameters, Rebuild
from .mesh import DataMesh
from .parameter import FSDPParam, fqn
from .placeholders import forget_cleared
from .policy import (
    COPIED,
    GATHERED,
    GATHERING,
    SECONDARY,
    SHARDED,
    UNSHARDED,
    AfterForward,
    Demand,
    Ending,
    GroupSettings,
    KeepUntil,
    Phase,
)
from .reduce import Reduction

if TYPE_CHECKING:
    from ..codecs.comm_hook import CommHook
    from .root import BackwardPass, Root
    from .state import FSDPState

__all__ = ["COPIED", "GATHERED", "GATHERING", "SECONDARY", "SHARDED", "UNSHARDED", "FSDPParamGroup"]


class Comms(NamedTuple):
    """How the ranks of a group communicate."""

    gathers: Comm
    reduces: Comm
    # Sums between replicas. None: there are none.
    replicas: Comm | None = None
    # Gathers among the ranks that keep secondary shards. None: none are kept.
    secondary: Comm | None = None


class FSDPParamGroup:
    """Unshards and reshards, as one, the parameters that one `fully_shard` call shards together on one mesh.

    Hooks (step.py, autograd.py), gradients, the Prefetcher and Root call its steps. Features and checks read its
    attributes, and change them by its methods: `set`, `use_comms`, `keep`, `reshard_if_idle`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[FSDPParam],
        mesh: DataMesh,
        settings: GroupSettings,
        name: str | None = None,
    ) -> None:
        self.modules, self.params, self.mesh, self.settings = list(modules), list(params), mesh, settings
        # The FQN of the first module, and how errors call the group.
        self.name = type(modules[0]).__name__ if name is None else name
        self.comm_label = CommLabel(self.name)

        # ---- around it
        # The state of the modules.
        self.state: FSDPState
        # Other states under the root whose modules have some of the parameters, too (tied weights, see ties.py).
        self.sharing_states: tuple[FSDPState, ...] = ()
        # If there are such states, those with a backward that has begun, and not ended.
        self.backwards_running: set[FSDPState] = set()
        # What its parameters were before fully_shard, if something else than their modules still holds that.
        self.originals: list[weakref.ref[nn.Parameter]] = []
        # Who follows what the group does: the observers of the root.
        self.events: Events = NO_EVENTS

        # ---- where the parameters are
        # Outside of forward and backward modules have the sharded ones, even if the unsharded ones' data is there.
        self.phase = SHARDED
        self.keep_until = KeepUntil.END_OF_USE
        # The hook by which backward will reach the last forward behind which the user's setting keeps them.
        self._awaited: weakref.ref[Any] | None = None
        self._pending: PendingGather | None = None
        # Versions of the shards that were gathered last; None if that was for a backward: users may not change
        # parameters between a forward and its backward, so that nothing is compared.
        self.gathered_versions: tuple[int, ...] | None = None
        # Versions of the shards when they were last gathered for a forward, or when backward last reached the group.
        # SavedTensors compares saved weights with them.
        self.backward_versions: tuple[int, ...] = ()

        # ---- backward
        # A forward has run, of which backward may come, and no backward has ended since.
        self.awaits_backward = False
        # The pass that has reached the group, until it reshards.
        self.reached_by: BackwardPass | None = None
        # True if the last backward resharded the group as soon as all gradients had been counted.
        self.last_gradient_reshards = not params
        # Some backward had to reshard the group at its end: others may, too, that compute no gradients of parameters.
        self.was_left_by_backward = False
        # Dicts of backward hooks: of the modules that the state owns, and torch's global one; found in backward.
        self._backward_hooks: list[dict[int, Any]] = []
        # Indices of the parameters whose `.grad` has a placeholder: their gradient is unsynchronized.
        self.placeholders: set[int] = set()

        # ---- what users do to parameters
        # Tied parameters of which several objects were registered when replacements were last looked for.
        self._untied: Collection[FSDPParam] = ()
        # How many blocks of full_params have used it outside of forwards.
        self._num_blocks = 0
        # Those of its tensors that were given memory without values.
        self.empty = EmptyTensors()

        # ---- its parts
        storage_device = params[0].storage_device if params else mesh.device
        offloads = storage_device != mesh.device
        # Copies offloaded shards.
        self.transfers = make_transfers(mesh.device, settings.pin_memory) if offloads else None
        # Orders the streams that use the group's memory. None: the device has no streams.
        self.streams = order_streams(mesh.device)
        # How its ranks communicate, and how they would, had the user chosen nothing.
        self.comms = self.usual_comms = self._make_comms()
        gradients = GroupGradients if self.streams is None else GradientsOnOwnerStream
        self.gradients = gradients(self, self.params, self._reduction(), self.streams)
        self.parameters = GroupParameters(self, storage_device)
        self.registration, self.unsharded = self.parameters.registration, self.parameters.unsharded
        self.parameters.rebuild(Rebuild.MEMORY)

    def __repr__(self) -> str:
        return self.comm_label.label

    # ---- the state and the root

    def join_state(self, state: FSDPState) -> None:
        """Belongs to `state` from now on."""
        self.state = state

    def note_originals(self, originals: list[weakref.ref[nn.Parameter]]) -> None:
        """Remembers what its parameters were before fully_shard."""
        self.originals = originals

    def share_with(self, states: Iterable[FSDPState]) -> None:
        """Gives the parameters to the modules of these states as well, and to no others besides its own."""
        self.sharing_states = (*states,)

    @cached_property
    def root(self) -> Root:
        """The Root that runs the group: `state.root`, which is built when it is first asked for."""
        return self.state.root

    @property
    def built_root(self) -> Root | None:
        """The Root that runs the group, if it is built."""
        return vars(self).get("root")

    def join_root(self, root: Root) -> None:
        """Runs under `root` from now on."""
        self.root, self.events = root, root.events
        self.comm_label.run_under(root)

    def leave_root(self) -> None:
        """Runs under another root next, which is not built yet."""
        root = self.built_root
        for wait in root.waits_before_read if root is not None else ():  # the next root does not know them
            wait(self)
        vars(self).pop("root", None)
        self.events, self._backward_hooks = NO_EVENTS, []

    def _set_phase(self, phase: Phase) -> None:
        """Changes the phase.

        Raises:
            RuntimeError: that one can't follow the present one.
        """
        if phase not in self.phase.may_become:
            raise RuntimeError(f"{self}: {self.phase.name} cannot become {phase.name}")
        self.phase = phase

    # ---- settings

    @property
    def frees_viewed_storage(self) -> bool:
        """True if memory is freed although there are views of it: the user wants that, or graphs have them as a rule,
        because no hook sees what autograd saves.
        """
        return self.settings.free_viewed_storage or self.root.saves_unseen

    @property
    def scatter_hook(self) -> CommHook | None:
        """The hook by which the ranks that shard reduce, where nothing is replicated; else it is for replicas."""
        return self.settings.comm_hook if self.mesh.size > 1 and not self.mesh.replicate_axes else None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of the unsharded parameters while they are there: in compute dtypes, with padding and
        the segments that are gathered packed. Small parameters take twice their size.
        """
        return self.unsharded.nbytes

    @property
    def is_unsharded(self) -> bool:
        """True if the unsharded parameters' data is there."""
        return self.phase in (GATHERED, UNSHARDED)

    @property
    def num_running(self) -> int:
        """How many forwards and blocks of full_params that use the group run now."""
        return self.state.running + sum(state.running for state in self.sharing_states)

    def runs_beside(self, state: FSDPState) -> bool:
        """Returns True if a forward of another state than `state` uses the group."""
        return any(each.running for each in (self.state, *self.sharing_states) if each is not state)

    @property
    def is_resting(self) -> bool:
        """True if nothing is gathered: a gather would begin from the shards, or from secondary ones."""
        return self.phase in (SHARDED, SECONDARY)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Names the group and its parameters after the FQNs of their modules."""
        self.gradients.forget_names()
        for param in self.params:
            for i, slot in enumerate(param.slots):
                prefix = names.get(slot.module)
                if prefix is not None:
                    param.names[i] = fqn(prefix, slot.name)
        self.name = label = names.get(self.modules[0], "") or "root"
        if not self.name.strip("0123456789."):  # indices alone, of an nn.Sequential, say little in an error
            label = f'{type(self.modules[0]).__name__} "{self.name}"'
        self.comm_label.rename(self.name, label)

    def set(self, **changes: Any) -> None:
        """Changes settings of the group, between steps. Pipelines set the same ones in each backward pass."""
        if all(getattr(self.settings, name) is value for name, value in changes.items()):
            return
        before, self.settings = self.settings, replace(self.settings, **changes)
        self.gradients.set_reduction(self._reduction())
        self.parameters.use_settings()
        if self.settings.bucket_bytes != before.bucket_bytes and self.parameters.buffers is not None:
            self.parameters.rebuild(Rebuild.TRAINABLE)
        if self.settings.reduce_unused is not before.reduce_unused:
            self.last_gradient_reshards = False
        if self.settings.secondary_size != before.secondary_size:
            self.use_comms(self.comms._replace(secondary=self._secondary_comm()))
        if self.settings.keep_storage != before.keep_storage and self.is_resting:
            self.reshard()
        self.note_change(Change.SETTINGS)

    def choose_grad_dtype(self, param: FSDPParam, dtype: torch.dtype | None) -> None:
        """Delivers gradients of `param`, one of its parameters, in another dtype from now on. Every rank must call it.

        Raises:
            RuntimeError: a forward or backward runs, gradients wait for a later pass, or `.grad` has another dtype.
        """
        is_running = self.phase is COPIED or self.state.running > 0 or self.root.is_in_backward()
        if is_running or self.gradients.is_pending():
            why = "a forward or backward runs" if is_running else "gradients of its group are not synchronised yet"
            raise RuntimeError(f"{param.name}: its grad_dtype can't be set while {why}. Set it between steps.")
        param.choose_grad_dtype(dtype)
        self.reshard()
        self.parameters.rebuild(Rebuild.MEMORY)
        self.note_change(Change.SETTINGS)

    def note_change(self, change: Change, replaced: Mapping[FSDPParam, nn.Parameter] = NONE_REPLACED) -> None:
        """Tells the root, and its observers, what a user may have changed. A root that is not built finds out when it
        is, but for what was `replaced`: param -> what the user has put in its place.
        """
        root = self.root if replaced else self.built_root
        if root is not None:
            root.note_change(self, change, replaced)

    def use_comms(self, comms: Comms) -> None:
        """Communicates in that way from now on. Every rank must call it, between steps."""
        before, self.comms = self.comms, comms
        self.gradients.set_reduction(self._reduction())
        kinds = [
            [(each.direct_min_bytes, each.memory) for each in (now.gathers, now.reduces)] for now in (before, comms)
        ]
        if kinds[0] != kinds[1] or comms.secondary is not before.secondary:
            self.reshard()
            self.parameters.rebuild(Rebuild.MEMORY)

    def _make_comms(self) -> Comms:
        """Returns the Comms of the mesh, as they are if the user chooses nothing. Every rank must call it."""
        shards, replicas = (
            make_comm(group, self.mesh.device, self.comm_label)
            for group in (self.mesh.shard_group, self.mesh.outer_group or self.mesh.replicate_group)
        )
        if self.mesh.has_outer_shard:
            inner = self._secondary_comm()
            assert inner is not None, "several ranks shard"
            return Comms(shards, inner, replicas, inner)
        has_replicas = self.mesh.replicas_may_grow or replicas.size > 1
        return Comms(shards, shards, replicas if has_replicas else None, self._secondary_comm())

    def _secondary_comm(self) -> Comm | None:
        """Returns the Comm of those of the ranks that shard which keep secondary shards, if any do."""
        if self.mesh.has_outer_shard:
            return make_comm(self.mesh.inner_group, self.mesh.device, self.comm_label)
        size, group = self.settings.secondary_size, self.mesh.shard_group
        if size is None or group is None or size >= self.mesh.size:
            return None
        return make_neighbour_comm(group, size, self.mesh.device, self.comm_label)

    def _reduction(self) -> Reduction:
        """Returns how gradients are summed by the present Comms and settings."""
        comms, now = self.comms, self.settings
        divisor = now.divide_factor if now.divide_late is None else 1
        how = divisor, now.all_reduce, now.reduce_hook, self.transfers
        by_hook = self.scatter_hook is not None
        return Reduction(comms.reduces, comms.replicas, *how, self.mesh.has_outer_shard, now.divide_late, by_hook)

    # ---- sharded -> unsharded -> sharded

    def start_unshard(self, for_backward: bool = False, demand: Demand = Demand.AHEAD) -> None:
        """Begins to gather, unless that is under way or done. Every rank must call it, in the same order."""
        if self.phase is not SHARDED and self.phase is not SECONDARY and demand is not Demand.OTHERS:
            return
        streams = self.streams
        if streams is not None and streams.choose_owner(demand is Demand.AHEAD, self._is_busy_on_owner_stream):
            with streams.on_owner_stream(joins=False):
                return self.start_unshard(for_backward, demand)
        if self.parameters.buffers is None:
            self._notice_changes()
        for wait in self.root.waits_before_read:
            wait(self)
        if self.root.consensus is not None:
            self.root.consensus.before_gather(self)
        for notify in self.events.before_gather:
            notify(self)
        buffers, self_gather = self.parameters.buffers, self.parameters.self_gather
        assert buffers is not None, "shards are on the device"
        if self.phase is not SECONDARY:  # else it stands for what was gathered before
            stays = self.keep_until >= KeepUntil.NEXT_PASS or not self.settings.reshard_after_backward
            stays = stays or self in self.root.prefetcher.kept.after_backward
            self.gathered_versions = self.registration.versions() if stays or not for_backward else None
        try:
            more = self_gather.start(self.comms.gathers) if self_gather is not None else ()
            if self.phase is SECONDARY:
                assert buffers.secondary is not None, "the group has kept some"
                self._pending = buffers.secondary.restore()
            else:
                self._pending = buffers.start_gather(self.comms.gathers, *more)
            self._set_phase(GATHERING)
        except RuntimeError as error:  # out of memory, for example
            self._locate(error)
            raise

    def unshard(self, for_backward: bool = False, registers: bool = True) -> None:
        """Makes the unsharded parameters of what the sharded ones are now, unless they are there, and registers them.

        Gathers, or finishes the gather in flight. `for_backward`: users may not have changed parameters since forward.
        """
        if not for_backward and self.phase is not UNSHARDED:
            self._notice_changes()
        if self.phase is SHARDED or self.phase is SECONDARY:
            self.start_unshard(for_backward, Demand.NOW)
        if self.phase is GATHERING:
            self._finish_gather()
        if self.unsharded.guards:
            self.unsharded.renew(self.shard_versions())
        for notify in self.events.unsharded:
            notify(self)
        if registers:
            self.register()
        if self.streams is not None:
            self.streams.wait_here()

    def _finish_gather(self) -> None:
        if self.streams is not None and self.streams.are_apart():
            with self.streams.on_owner_stream(joins=False):
                return self._finish_gather()
        pending, self._pending = self._pending, None
        assert pending is not None, "a gather is in flight"
        try:
            pending.finish()
        except BaseException as error:
            self._set_phase(SHARDED)
            if isinstance(error, RuntimeError):  # a peer is gone, for example
                self._locate(error)
            raise
        self._set_phase(GATHERED)
        self.unsharded.allow_reads()
        if self.parameters.self_gather is not None:
            if self.parameters.self_gather.finish():
                self.parameters.rebuild(Rebuild.OBJECTS)
            self.unsharded.accept_versions()  # it may have refilled them by operations that count

    def join_gather(self) -> None:
        """Joins an all-gather of the group that other ranks need, and this one does not."""
        if not self.is_resting:
            self.unshard_again()
            return
        self.unshard(registers=False)
        self.keep_until = KeepUntil.END_OF_USE
        self.reshard(self.root.frees_memory)

    def unshard_again(self) -> None:
        """Gathers, for other ranks, parameters that are in use here. Every rank must call it, or `unshard`."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.on_owner_stream():
                return self.unshard_again()
        self.unshard(for_backward=True, registers=False)
        was_registered = self.phase is UNSHARDED
        if was_registered:  # modules keep the unsharded parameters, unless it fails
            self._set_phase(GATHERED)
        try:
            # A forward that needs them once more compares the versions that its own gather has noted.
            self.start_unshard(for_backward=self.gathered_versions is None, demand=Demand.OTHERS)
            self.unshard(for_backward=True, registers=False)
        except BaseException:
            self.registration.register(unsharded=False)
            raise
        if was_registered:
            self._set_phase(UNSHARDED)

    def register(self) -> None:
        """Registers the unsharded parameters, whose data is there."""
        if self.phase is GATHERED:
            self._set_phase(UNSHARDED)
            self.registration.register(unsharded=True)

    def unregister(self) -> None:
        """Registers the sharded parameters, and leaves the unsharded ones' data where it is."""
        if self.phase is UNSHARDED:
            self._set_phase(GATHERED)
            self.registration.register(unsharded=False)

    def reshard(self, free: bool = True, keeps_secondary: bool = False) -> None:
        """Registers the sharded parameters, and frees the unsharded ones' data, or leaves it until a pass ends if
        something has a view of it. Does nothing while modules have copies (COPIED).

        `free=False` leaves the bytes where they are, for a graph that reads them unnoticed. `keeps_secondary`: keeps
        this rank's secondary shards of what is unsharded; else there are none afterwards.
        """
        if self.phase is COPIED:
            return
        streams = self.streams
        if (
            streams is not None
            and (self.phase is not SHARDED or self._is_busy_on_owner_stream())
            and streams.are_apart()
        ):
            with streams.on_owner_stream():
                return self.reshard(free, keeps_secondary)
        self.unregister()
        pending, self._pending, buffers = self._pending, None, self.parameters.buffers
        if keeps_secondary:
            assert buffers is not None, "a forward has just used it"
            assert buffers.secondary is not None, "some ranks keep a part"
            buffers.secondary.keep()
            if self.phase is not SECONDARY:
                self._set_phase(SECONDARY)
        elif self.phase is not SHARDED:
            self._set_phase(SHARDED)
        if pending is not None:
            pending.abandon()
        if buffers is None:
            return
        if buffers.secondary is not None and not keeps_secondary:
            buffers.secondary.drop()
        if not free:
            return
        for notify in self.events.before_free:
            notify(self)
        if not self.unsharded.free():
            if self.frees_viewed_storage:
                self.unsharded.free(although_viewed=True)
            else:
                self.root.freed_later.add(self)
        if self.parameters.self_gather is not None and not self.unsharded.keeps_storage:
            self.parameters.self_gather.free()

    def free_if_resharded(self) -> bool:
        """Frees memory of unsharded parameters that `reshard` had to leave, and no secondary shards. Returns False if
        something still uses it.
        """
        return self.parameters.buffers is None or not self.is_resting or self.unsharded.free()

    def holds_memory(self) -> bool:
        """Returns True if resharding would give memory back: that of unsharded parameters, or secondary shards."""
        secondary = self.parameters.secondary
        return self.unsharded.holds_memory or (secondary is not None and secondary.is_filled)

    def _is_busy_on_owner_stream(self) -> bool:
        """Returns True if memory of the group, that of its gradients included, is in use on its owner stream."""
        return self.holds_memory() or self.gradients.is_pending()

    def begin_copies(self) -> None:
        """Notes that modules are about to get copies of the parameters, unless they have some."""
        self.reshard()
        if self.phase is not COPIED:
            self._set_phase(COPIED)

    def end_copies(self) -> None:
        """Notes that modules have the sharded parameters again."""
        if self.phase is COPIED:
            self._set_phase(SHARDED)

    def _locate(self, error: RuntimeError) -> None:
        """Says in the message which group it was: neither allocators nor process groups know."""
        self.comm_label.locate(error, f"gathering {self}, {self.nbytes} bytes")

    # ---- what users do to parameters

    def shard_versions(self) -> tuple[int, ...]:
        """Returns the versions of the sharded parameters, see Registration."""
        for wait in self.root.waits_before_read:
            wait(self)
        return self.registration.versions()

    def adopt_replacements(self, accepted: Accept = Accept.META) -> bool:
        """Adopts what a user has put in place of parameters or their local tensors (`.to`, loading, assignment).
        Returns True if there was any.
        """
        if self.phase is COPIED:
            return False
        self.reshard()
        return self._notice_changes(accepted)

    def _notice_changes(self, accepted: Accept = Accept.SHARDED) -> bool:
        """Follows what a user did to the parameters, and drops what was gathered before that. Returns True if some were
        replaced.
        """
        if self.phase is COPIED:
            raise RuntimeError(
                f"{self.name}: its parameters are copies that full_params has made, with which no sharded module "
                "runs. Leave that block first."
            )
        for wait in self.root.waits_before_read:
            wait(self)
        if self.registration.versions() != self.gathered_versions:
            self.reshard()  # also secondary shards
        parameters = self.parameters
        are_replaced = parameters.buffers is None or self.registration.is_replaced()
        if are_replaced:
            self.reshard()
            found, self._untied = find_replacements(self.params, accepted, self._untied)
            forget_cleared(self)
            parameters.adopt(found)
        elif parameters.trainable != self.registration.trainable():
            parameters.rebuild(Rebuild.TRAINABLE)
        if parameters.buffers is None and Accept.META not in accepted:
            expected = parameters.storage_device
            names = [f"{p.name} on {p.local.device}" for p in self.params if p.local.device != expected]
            raise RuntimeError(
                f"expected parameters on {expected}, got {', '.join(names)}. Materialise the model "
                f"before its first forward: model.to_empty(device={expected.type!r}), then initialise or load."
            )
        return are_replaced

    def guard_saved(self) -> None:
        """Has autograd refuse weights that it has saved, and that were freed since, from now on."""
        if not self.unsharded.guards:
            made_of = self.gathered_versions if self.is_unsharded else None
            self.unsharded.guard(made_of or self.shard_versions())

    def count_block(self) -> int:
        """Counts a block of full_params that uses the group outside of forwards, and returns its number, from 1 on."""
        self._num_blocks += 1
        return self._num_blocks

    def is_up_to_date(self) -> bool:
        """Returns True if no parameter has changed, was replaced, frozen or unfrozen since the group was gathered."""
        is_replaced = self.phase is not UNSHARDED and self.registration.is_replaced()
        is_changed = self.shard_versions() != self.gathered_versions
        return not (is_replaced or is_changed or self.registration.trainable() != self.parameters.trainable)

    # ---- use

    def pre_forward(self, in_backward: bool) -> None:
        """Unshards and registers for a forward. `in_backward`: checkpointing runs it again."""
        root = self.root
        if in_backward:
            self.pre_backward(recomputes=True)  # gradients follow at once
        self.unshard(for_backward=root.backward is not None)
        root.mark_in_use(self)
        if not in_backward and self.gathered_versions != self.backward_versions:
            assert self.gathered_versions is not None, "noted at each gather for a forward"
            self.backward_versions = self.gathered_versions  # else the same object: no time to compare
        if self.unsharded.references is None:
            self.unsharded.are_kept()  # counts references for the first time

    def before_unpack(self) -> None:
        """Calls `pre_backward` unless backward has reached the group: a saved weight is about to be unpacked."""
        if self.reached_by is None:
            self.pre_backward()
        elif self.streams is not None:
            self.streams.wait_here()

    def pre_backward(self, recomputes: bool = False) -> None:
        """Unshards when backward reaches the group, needs a weight of it, or runs its forward again (checkpointing)."""
        if runs_transform() or ((num_dispatch_modes() or num_function_modes()) and are_in_force()):
            with outside():
                return self.pre_backward(recomputes)
        root = self.root
        if root.backward is None or torch.is_grad_enabled():
            root.enter_backward(recomputes)
        if self.reached_by is None:
            self.reached_by = root.backward
            for wait in self.root.waits_before_read:
                wait(self)
            if self.parameters.buffers is None or self.registration.has_other_data():
                self._refuse_other_data()
            now = self.registration.versions()
            if now != self.backward_versions:  # written to since the forward: checkpointing computes with what is new
                self.backward_versions = now
                self.reshard()
            self.unshard(for_backward=root.backward is not None)
            root.mark_in_use(self)
            for ahead in root.prefetcher.in_backward(self):
                ahead.start_unshard(for_backward=True)
        if self.streams is not None:
            self.streams.wait_here()

    def _refuse_other_data(self) -> None:
        """Raises RuntimeError if a user has put other data into a parameter: a graph needs the old data, or the new one
        where it is checkpointed. A group that has the same parameter (tied) may have put it into its own memory.
        """
        others = [group.registration for group in self.root.groups if group is not self]
        found = self.registration.find_replaced()
        changed = [
            param
            for param in self.params
            if id(param.sharded) in found and not any(each.has_data_of(param.sharded) for each in others)
        ]
        if self.parameters.buffers is not None and not changed:
            return
        raise RuntimeError(
            f"{(changed or self.params)[0].name}: other data was put into this parameter (`.data =`, swap_tensors) "
            "between a forward and its backward, which may need the old one. Change parameters before forward or after "
            "backward."
        )

    def first_gradient(self) -> None:
        """Begins the backward pass of the root, unless it has begun: the first gradient of a bucket has arrived."""
        if self.reached_by is None:
            enter = self.root.enter_backward
            if (num_dispatch_modes() or num_function_modes()) and are_in_force():
                run_hidden(enter)
            else:
                enter()

    def last_gradient(self) -> None:
        """Reshards when the gradients of all buckets have arrived, and notes whether inputs need hooks.

        It leaves that to a later hook if a parameter is frozen, a module has full backward hooks, or another backward
        runs inside this one.
        """
        # Frozen weights may be needed after the last gradient of the others, and parameters by other checkpointed
        # regions (reentrant checkpointing runs a backward inside the one that began).
        backward = self.root.backward
        assert backward is not None, "a gradient has arrived"
        if all(self.parameters.trainable) and backward.task == internals.graph_task():
            # A full backward hook of a module comes later, with the gradients of the module's inputs.
            has_hooks = any(self._backward_hooks or self._find_backward_hooks())
            # Those of sharing states tell when to reshard in between: the last gradient of a tied parameter comes late.
            needs_hooks = has_hooks or self.settings.reduce_unused or self.sharing_states or self.was_left_by_backward
            self.last_gradient_reshards = not needs_hooks
            if not has_hooks:
                self.finish_backward()

    def expect_other_gradients(self) -> None:
        """Notes that other parameters may get gradients than in the last backward."""
        self.last_gradient_reshards = not self.params

    def _find_backward_hooks(self) -> list[dict[int, Any]]:
        own = [module._backward_hooks for state in (self.state, *self.sharing_states) for module in state.own_modules()]
        self._backward_hooks = [*own, internals.hooks_of_all_modules]
        return self._backward_hooks

    # ---- after use

    def keep(self, until: KeepUntil) -> None:
        """Keeps the unsharded parameters until then at least. `reshard_if_idle` ends that."""
        self.keep_until = max(self.keep_until, until)

    def await_backward(self, hook: Callable[..., object]) -> None:
        """Notes the hook by which backward will reach the forward that has run. It goes with the graph of that."""
        self._awaited = weakref.ref(hook)

    def post_forward(self, ending: Ending, has_run: bool = False) -> None:
        """Reshards after a forward, or keeps the unsharded parameters or secondary shards.

        `has_run`: a module's own code has run. If it has left a weight where something else can read it in backward
        (`ctx.weight = weight` in an autograd function, hooks of a user's own for saved tensors, a list), their memory
        stays as it is until then: nothing would gather for such a reader. Ranks communicate in the
        same way in any case, since other ranks may have left none.
        """
        stays, backward_follows = self._what_stays(ending), ending is Ending.TRAINING
        self.awaits_backward = self.awaits_backward or backward_follows
        if stays is AfterForward.KEEP:
            if backward_follows or self.keep_until is not KeepUntil.USER:
                kept, has_budget = self.root.prefetcher.kept.groups, self.root.settings.unsharded_budget
                stays_after = self in kept or not (has_budget or self.settings.reshard_after_backward)
                for_backward = backward_follows and not stays_after
                self.keep_until = max(self.keep_until, KeepUntil.BACKWARD if for_backward else KeepUntil.NEXT_PASS)
                self.unregister()
            return
        has_run = has_run and self.phase is UNSHARDED  # else another state has resharded it
        is_kept = has_run and backward_follows and self.unsharded.are_kept() and not self.frees_viewed_storage
        if is_kept:
            self.root.held_for_backward.add(self)
        keeps_secondary = stays is AfterForward.SECONDARY
        self.keep_until = KeepUntil.BACKWARD if keeps_secondary and backward_follows else KeepUntil.END_OF_USE
        self.reshard(self.root.frees_memory and not is_kept, keeps_secondary)

    def _what_stays(self, ending: Ending) -> AfterForward:
        """Decides what stays after a forward: by the settings, by the user's calls, and by what backward needs first.

        Without a backward, parameters stay until a weight changes if the user wants that: each token that a model
        generates would take a gather of each group otherwise.
        """
        root, choice = self.root, self.settings.after_forward
        if ending is Ending.FAILED:
            return AfterForward.FREE
        keeps = choice is AfterForward.KEEP or self in root.prefetcher.kept.groups
        if ending is Ending.EVALUATION:
            keeps = keeps or self.keep_until is KeepUntil.USER
        elif choice is None and not keeps:
            keeps = root.group is self or root.state in self.sharing_states or root.forward.runs_for_loss
            keeps = keeps or self in root.prefetcher.first_in_backward or self in root.forward.read_outside
        if keeps:
            return AfterForward.KEEP
        may_keep = self.comms.secondary is not None and self._may_keep_secondary(ending is Ending.TRAINING)
        return AfterForward.SECONDARY if may_keep else AfterForward.FREE

    def _may_keep_secondary(self, backward_follows: bool = False) -> bool:
        """Returns True if secondary shards are to stay, and the group has what they consist of."""
        secondary = self.parameters.secondary
        if secondary is None or not self.root.frees_memory:
            return False
        if secondary.level.until_write:
            return (self.phase is SECONDARY or self.is_unsharded) and self.gathered_versions is not None
        return backward_follows and self.is_unsharded

    def reshard_if_idle(self, drops_secondary: bool = True) -> None:
        """Reshards, although somebody has asked to keep the parameters; if a forward or a full_params block uses the
        group, at the end of that, unless its settings keep them.

        `drops_secondary=False`: secondary shards that last until a write stay.
        """
        self.reached_by = None
        self.backwards_running.clear()
        if self.state.running or (self.sharing_states and self.num_running):
            is_left = self.keep_until is KeepUntil.BACKWARD
            self.keep_until = KeepUntil.END_OF_USE if is_left else min(self.keep_until, KeepUntil.NEXT_PASS)
        else:
            self.keep_until = KeepUntil.END_OF_USE
            keeps = not drops_secondary and self.comms.secondary is not None and self._may_keep_secondary()
            self.reshard(self.root.frees_memory, keeps)

    def is_freed_in_backward(self) -> bool:
        """Returns True if the group is resharded when backward is done with it, by the budget or the user's setting."""
        budget = self.root.settings.unsharded_budget
        return self not in self.root.prefetcher.kept.groups if budget else self.settings.reshard_after_backward

    def finish_backward(self) -> None:
        """Reshards, or keeps the data for the next pass, by the budget or else by the setting `reshard_after_backward`,
        which torch's pipelines turn off for all groups.
        """
        is_running = self.state.running or (self.sharing_states and self.num_running)
        root, phase, stays = self.root, self.phase, not self.settings.reshard_after_backward
        if root.settings.unsharded_budget:
            stays = root.prefetcher.kept.stays(self, root.num_backwards)
        if not stays or is_running or (phase is not GATHERED and phase is not UNSHARDED):
            self.reshard_if_idle(drops_secondary=False)
            return
        self.reached_by = None
        self.backwards_running.clear()
        # What other passes have left as it is costs this one little: zero-bubble schedules run one for each weight.
        if self.keep_until < KeepUntil.NEXT_PASS:
            self.keep(KeepUntil.NEXT_PASS)
        if phase is UNSHARDED:
            self.unregister()

    def reshard_stale(self) -> None:
        """Reshards between passes, unless the parameters are kept until the next pass or longer, and nothing has
        changed. What a user has asked for stays in force. Drops secondary shards of parameters that were written to.

        Parameters that the user's setting keeps until backward stay for other forwards, too, as long as that backward
        may come: a pipeline runs several forwards before the first one.
        """
        self.root.is_in_backward()  # one that has failed is over
        until = self.keep_until
        if self.phase is SECONDARY and self.shard_versions() != self.gathered_versions:
            self.reshard()
        stays = until >= KeepUntil.NEXT_PASS or (self._awaited is not None and self._awaited() is not None)
        if until is KeepUntil.END_OF_USE or (stays and self.is_up_to_date()):
            return
        self.reshard_if_idle(drops_secondary=False)
        if until is KeepUntil.USER:
            self.keep(until)

    def leave_backward(self) -> None:
        """Reshards at the end of backward, unless the last gradient has done it."""
        self.awaits_backward = False
        if self.reached_by is not None:
            self.last_gradient_reshards = not self.params
            self.was_left_by_backward = self.was_left_by_backward or self.settings.reshard_after_backward
        is_freed = self.phase is SHARDED and self.parameters.buffers is not None and not self.unsharded.is_allocated
        if self.reached_by is not None or self.keep_until is not KeepUntil.END_OF_USE or not is_freed:
            self.finish_backward()

    def post_backward(self, state: FSDPState) -> None:
        """Reduces what buckets have left, and reshards, after the backward of a forward of `state`. It is called only
        if forward has hooked the inputs.

        If other states share the group, gradients may be still to come: buckets reduce them, or the end of backward
        does. While the backward of another state runs, the parameters are still needed.
        """
        if self.sharing_states:
            self.backwards_running.discard(state)
            if self.backwards_running:
                return
        else:
            self.gradients.flush()
        self.finish_backward()
