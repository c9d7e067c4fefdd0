"""Takes a group of parameters through a step: unshards and reshards it, and reduces the gradients that are left."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..calls.user_code import are_in_force, outside, run_hidden
from ..collectives.choose import make_comm, make_neighbour_comm
from ..devices.streams import make_transfers, order_streams
from ..parameters.empty_memory import EmptyTensors
from ..parameters.replacements import find_replacements
from ..torch_private import compat
from ..torch_private.compat import num_dispatch_modes, num_function_modes, runs_transform
from .comm import Comm, Purpose
from .events import NO_EVENTS, Events
from .gradients import GroupGradients
from .group_parameters import GroupParameters
from .memory import PendingGather
from .mesh import DataMesh
from .parameter import FSDPParam, fqn
from .placeholders import forget_cleared, leaves_gradients
from .policy import COPIED, GATHERED, GATHERING, SECONDARY, SHARDED, UNSHARDED, GroupSettings, Hold, Phase
from .reduce import Reduction

if TYPE_CHECKING:
    from ..codecs.replicas import CommHook
    from .root import BackwardPass, Root
    from .schedule import ReductionQueue
    from .state import FSDPState

__all__ = ["COPIED", "GATHERED", "GATHERING", "SECONDARY", "SHARDED", "UNSHARDED", "FSDPParamGroup", "Hold", "Phase"]


class Comms(NamedTuple):
    """The Comms of a group: to gather, to reduce, between replicas, and among the ranks that restore the
    parameters from secondary shards.
    """

    gathers: Comm
    reduces: Comm
    replicas: Comm | None = None
    post_forward: Comm | None = None


class FSDPParamGroup:
    """Unshards and reshards, as one, the parameters that one `fully_shard` call shards together on one mesh.

    Hooks (step.py, autograd.py), gradients, the Prefetcher and Root call its steps. It alone changes `phase`, and calls
    Memory and Registration; features and checks read its attributes, and change choices by `set` and `use_comms`.

    `modules`, `params`, `mesh`, `settings`: what the call has given; `name`: the FQN of the first module.
    `state`: the FSDPState of the modules; `root`, `queue`: the root that the group runs under, and its reductions.
    `users`: other states under that root whose modules have some of the parameters, too (tied weights, see ties.py);
    `begun`: if there are users, the states whose backward has begun, and not ended.
    `phase`: where the parameters are; `hold`: for how long unsharded ones stay. Outside of forward and backward modules
        have the sharded ones, even if the unsharded ones' data is there.
    `gathered_at`: versions of the shards that were gathered last; None if that was for a backward: users may not change
        parameters between a forward and its backward, so that nothing is compared.
    `versions`: version counters of the shards when they were last gathered for a forward, or when backward last reached
        the group; SavedTensors compares saved weights with them.
    `reached_by`: the BackwardPass that has reached the group, until it reshards; else None.
    `needs_no_input_hooks`: the last backward resharded the group as soon as all gradients had been counted.
    `streams`: orders the streams that use the group's memory; None where the device has none.
    `comms`: how its ranks communicate; `usual_comms`: how they would, had the user chosen nothing.
    `parameters`: their memory, and what is built over it; `registration`: which of them modules have.
    `gradients`: those that have arrived, and how they are reduced; `transfers`: copies of offloaded shards.
    `empty`: those of its tensors that were given memory without values. `writers`: those of the root.
    `events`: whom to tell; `purpose`: its name in errors.
    """

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[FSDPParam], mesh: DataMesh, settings: GroupSettings
    ) -> None:
        self.modules, self.params, self.mesh, self.settings = list(modules), list(params), mesh, settings
        self.state: FSDPState
        self.users: tuple[FSDPState, ...] = ()
        self.begun: set[FSDPState] = set()
        # What its parameters were before fully_shard, if something else than their modules still holds that.
        self.originals: list[weakref.ref[nn.Parameter]] = []
        # Typed as if there always were one: nothing runs without.
        self.root: Root = None  # type: ignore[assignment]
        self.queue: ReductionQueue = None  # type: ignore[assignment]
        self.name = type(modules[0]).__name__
        self.purpose = Purpose(self.name)
        self.phase = SHARDED
        self._pending: PendingGather | None = None
        self.hold = Hold.NOTHING
        self.gathered_at: tuple[int, ...] | None = None
        self.versions: tuple[int, ...] = ()
        self.reached_by: BackwardPass | None = None
        self.needs_no_input_hooks = not params
        # Dicts of backward hooks: of the modules that the state owns, and torch's global one; found in backward.
        self.backward_hooks: list[dict[int, Any]] = []
        # Indices of the parameters whose `.grad` has a placeholder: their gradient is unsynchronized.
        self.placeholders: set[int] = set()
        # Tied parameters of which several objects were registered when users' replacements were last looked for.
        self.untied: list[FSDPParam] = []
        # How many blocks of full_params have used it outside of forwards.
        self.num_blocks = 0
        self.events: Events = NO_EVENTS
        self.empty = EmptyTensors()
        self.writers: list[Callable[[FSDPParamGroup], None]] = []
        storage_device = params[0].storage_device if params else mesh.device
        offloads = storage_device != mesh.device
        self.transfers = make_transfers(mesh.device, settings.pin_memory) if offloads else None
        self.streams = order_streams(mesh.device)
        self.comms = self.usual_comms = self._make_comms()
        self.gradients = GroupGradients(self, self.params, self._reduction(), self.streams)
        self.parameters = GroupParameters(self.params, self.gradients, mesh, storage_device, self.transfers)
        self.parameters.neighbours = self.comms.post_forward
        self.registration = self.parameters.registration
        self.parameters.build(settings, self.comms.gathers)

    def __repr__(self) -> str:
        return self.purpose.label

    def _become(self, phase: Phase) -> None:
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
        return self.settings.free_viewed_storage or (self.root is not None and self.root.saves_unseen)

    @property
    def scatter_hook(self) -> CommHook | None:
        """The hook by which the ranks that shard reduce, where nothing is replicated; else it is for replicas."""
        return self.settings.comm_hook if self.mesh.size > 1 and not self.mesh.replicate_axes else None

    @property
    def nbytes(self) -> int:
        """Bytes of the memory in which the unsharded parameters lie while they are there: they themselves in compute
        dtypes, padding, and behind them what travels packed. Small parameters take twice their size.
        """
        return self.parameters.nbytes

    @property
    def is_unsharded(self) -> bool:
        """True if the unsharded parameters' data is there."""
        return self.phase in (GATHERED, UNSHARDED)

    @property
    def num_running(self) -> int:
        """How many forwards and blocks of full_params that use the group run now."""
        return self.state.running + sum(user.running for user in self.users)

    def runs_beside(self, state: FSDPState) -> bool:
        """Returns True if a forward of another state than `state` uses the group."""
        return any(each.running for each in (self.state, *self.users) if each is not state)

    @property
    def is_resting(self) -> bool:
        """True if nothing is gathered: a gather would begin from the shards, or from secondary ones."""
        return self.phase in (SHARDED, SECONDARY)

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
        if self.settings.bucket_bytes != before.bucket_bytes and self.parameters.buffers is not None:
            self.parameters.follow_requires_grad()  # plans buckets
        if self.settings.restored_among != before.restored_among:
            self.use_comms(self.comms._replace(post_forward=self._neighbours()))
        if self.settings.keep_storage != before.keep_storage and self.is_resting:
            self.reshard()
        self.note_change()
        for notify in self.events.settings_changed:
            notify(self)

    def choose_grad_dtype(self, param: FSDPParam, dtype: torch.dtype | None) -> None:
        """Delivers gradients of `param`, one of its parameters, in another dtype from now on. Every rank must call it.

        Raises:
            RuntimeError: a forward or backward runs, gradients wait for a later pass, or `.grad` has another dtype.
        """
        is_running = self.phase is COPIED or self.state.running > 0 or self.root.is_in_backward()
        if is_running or self.gradients.is_pending():
            why = "a forward or backward runs" if is_running else "gradients of its group are not synchronised yet"
            raise RuntimeError(f"{param.name}: its grad_dtype can't be set while {why}. Set it between steps.")
        compat.set_grad_dtype(param.sharded, dtype)
        param.grad_choice = compat.GradDtype(dtype)
        self.reshard()
        self.parameters.build(self.settings, self.comms.gathers)
        self.note_change()

    def note_change(self) -> None:
        """Notes that settings or trainable parameters may have changed."""
        if self.root is not None:
            self.root.changed.add(self)
            self.root.leaves_gradients = self.root.leaves_gradients or leaves_gradients(self)

    def use_comms(self, comms: Comms) -> None:
        """Communicates in that way from now on. Every rank must call it, between steps."""
        before, self.comms = self.comms, comms
        self.gradients.use(self._reduction())
        kinds = [
            [(each.direct_min_bytes, each.memory) for each in (now.gathers, now.reduces)] for now in (before, comms)
        ]
        if kinds[0] != kinds[1] or comms.post_forward is not before.post_forward:
            self.parameters.neighbours = comms.post_forward
            self.reshard()
            self.parameters.build(self.settings, comms.gathers)

    def _make_comms(self) -> Comms:
        """Returns the Comms of the mesh, as they are if the user chooses nothing. Every rank must call it."""
        shards, replicas = (
            make_comm(group, self.mesh.device, self.purpose)
            for group in (self.mesh.shard_group, self.mesh.outer_group or self.mesh.replicate_group)
        )
        if self.mesh.has_outer_shard:
            inner = self._neighbours()
            assert inner is not None, "several ranks shard"
            return Comms(shards, inner, replicas, inner)
        has_replicas = self.mesh.replicas_may_grow or replicas.size > 1
        return Comms(shards, shards, replicas if has_replicas else None, self._neighbours())

    def _neighbours(self) -> Comm | None:
        """Returns the Comm of those neighbouring ranks that restore the parameters from secondary shards, if any do."""
        if self.mesh.has_outer_shard:
            return make_comm(self.mesh.inner_group, self.mesh.device, self.purpose)
        count, group = self.settings.restored_among, self.mesh.shard_group
        if count is None or group is None or count >= self.mesh.size:
            return None
        return make_neighbour_comm(group, count, self.mesh.device, self.purpose)

    def _reduction(self) -> Reduction:
        """Returns how gradients are summed by the present Comms and settings."""
        comms, now = self.comms, self.settings
        divisor = now.divide_factor if now.divide_late is None else 1
        how = divisor, now.all_reduce, now.reduce_hook, self.transfers
        by_hook = self.scatter_hook is not None
        return Reduction(comms.reduces, comms.replicas, *how, self.mesh.has_outer_shard, now.divide_late, by_hook)

    # ---- sharded -> unsharded -> sharded

    def start_unshard(self, for_backward: bool = False, ahead: bool = True, again: bool = False) -> None:
        """Begins to gather, unless that is under way or done. Every rank must call it, in the same order.

        `ahead`: before the modules need it, which may run on another stream. `again`: also if it is done.
        """
        if self.phase is not SHARDED and self.phase is not SECONDARY and not again:
            return
        streams = self.streams
        if streams is not None and streams.choose_home(ahead, self._holds_memory):
            with streams.at_home(joins=False):
                return self.start_unshard(for_backward, again=again)
        if self.parameters.buffers is None:
            self._notice_changes()
        for wait in self.writers:
            wait(self)
        if self.root.consensus is not None:
            self.root.consensus.before_gather(self)
        for notify in self.events.before_gather:
            notify(self)
        buffers, extension = self.parameters.buffers, self.parameters.extension
        assert buffers is not None, "shards are on the device"
        if self.phase is not SECONDARY:  # else it stands for what was gathered before
            stays = self.hold >= Hold.NEXT_PASS or not self.settings.reshard_after_backward
            self.gathered_at = self.registration.versions() if stays or not for_backward else None
        try:
            more = extension.start(self.comms.gathers) if extension is not None else ()
            if self.phase is SECONDARY:
                self._pending = buffers.restore()
            else:
                self._pending = buffers.start_gather(self.comms.gathers, *more)
            self._become(GATHERING)
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
            self.start_unshard(for_backward, ahead=False)
        if self.phase is GATHERING:
            self._finish_gather()
        if self.parameters.unsharded_versions.guards:
            self.parameters.unsharded_versions.renew(self.shard_versions())
        for notify in self.events.unsharded:
            notify(self)
        if registers:
            self.register()
        if self.streams is not None:
            self.streams.use()

    def _finish_gather(self) -> None:
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home(joins=False):
                return self._finish_gather()
        pending, self._pending = self._pending, None
        assert pending is not None, "a gather is in flight"
        try:
            pending.finish()
        except BaseException as error:
            self._become(SHARDED)
            if isinstance(error, RuntimeError):  # a peer is gone, for example
                self._locate(error)
            raise
        self._become(GATHERED)
        self.parameters.readability.allow(True)
        if self.parameters.extension is not None:
            if self.parameters.extension.finish():
                self.parameters.follow()
            self.parameters.unsharded_versions.accept()  # it may have refilled them by operations that count

    def unshard_again(self) -> None:
        """Gathers, for other ranks, parameters that are in use here. Every rank must call it, or `unshard`."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.unshard_again()
        self.unshard(for_backward=True, registers=False)
        was_registered = self.phase is UNSHARDED
        if was_registered:  # modules keep the unsharded parameters, unless it fails
            self._become(GATHERED)
        try:
            self.start_unshard(for_backward=True, ahead=False, again=True)
            self.unshard(for_backward=True, registers=False)
        except BaseException:
            self.registration.register(unsharded=False)
            raise
        if was_registered:
            self._become(UNSHARDED)

    def register(self) -> None:
        """Registers the unsharded parameters, whose data is there."""
        if self.phase is GATHERED:
            self._become(UNSHARDED)
            self.registration.register(unsharded=True)

    def unregister(self) -> None:
        """Registers the sharded parameters, and leaves the unsharded ones' data where it is."""
        if self.phase is UNSHARDED:
            self._become(GATHERED)
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
        if streams is not None and (self.phase is not SHARDED or self._holds_memory()) and streams.are_apart():
            with streams.at_home():
                return self.reshard(free, keeps_secondary)
        self.unregister()
        pending, self._pending, buffers = self._pending, None, self.parameters.buffers
        if keeps_secondary:
            assert buffers is not None, "a forward has just used it"
            buffers.keep_secondary(refill=not self.mesh.has_outer_shard)
            if self.phase is not SECONDARY:
                self._become(SECONDARY)
        elif self.phase is not SHARDED:
            self._become(SHARDED)
        if pending is not None:
            pending.abandon()
        if buffers is None:
            return
        if buffers.secondary is not None and not keeps_secondary:
            buffers.secondary.drop()
        if not free:
            return
        if self.parameters.unsharded_versions.guards and not buffers.keeps_storage:
            self.parameters.unsharded_versions.expire()
        for notify in self.events.before_free:
            notify(self)
        if self.parameters.readability.are_readable:
            self.parameters.readability.allow(False)
        if not buffers.free():
            if self.frees_viewed_storage:
                buffers.free(although_viewed=True)
            elif self.root is not None:
                self.root.viewed.add(self)
        if self.parameters.extension is not None and not buffers.keeps_storage:
            self.parameters.extension.free()

    def free_if_resharded(self) -> bool:
        """Frees memory of unsharded parameters that `reshard` had to leave, and no secondary shards. Returns False if
        something still uses it.
        """
        if self.parameters.buffers is None or not self.is_resting:
            return True
        self.parameters.readability.allow(False)
        return self.parameters.buffers.free()

    def _holds_memory(self) -> bool:
        """Returns True if memory of the group, that of its gradients included, is in use at its home stream."""
        buffers = self.parameters.buffers
        return (buffers is not None and buffers.hold_memory()) or self.gradients.is_pending()

    def begin_copies(self) -> None:
        """Notes that modules are about to get copies of the parameters, unless they have some."""
        self.reshard()
        if self.phase is not COPIED:
            self._become(COPIED)

    def end_copies(self) -> None:
        """Notes that modules have the sharded parameters again."""
        if self.phase is COPIED:
            self._become(SHARDED)

    def _locate(self, error: RuntimeError) -> None:
        """Says in the message which group it was: neither allocators nor process groups know."""
        self.purpose.locate(error, f"gathering {self}, {self.nbytes} bytes")

    # ---- what users do to parameters

    def shard_versions(self) -> tuple[int, ...]:
        """Returns the versions of the sharded parameters, see Registration."""
        for wait in self.writers:
            wait(self)
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
            found = find_replacements(self, accept_whole, may_be_untied)
            forget_cleared(self)
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

    # ---- use

    def pre_forward(self, in_backward: bool) -> None:
        """Unshards and registers for a forward. `in_backward`: checkpointing runs it again."""
        root = self.root
        if in_backward:
            self.pre_backward(recomputes=True)  # gradients follow at once
        self.unshard(for_backward=root.backward is not None)
        root.use(self)
        if not in_backward and self.gathered_at != self.versions:
            assert self.gathered_at is not None, "noted at each gather for a forward"
            self.versions = self.gathered_at  # else the same object: no time to compare
        if self.parameters.references is None:
            self.parameters.are_kept()  # counts references for the first time

    def before_unpack(self) -> None:
        """Calls `pre_backward` unless backward has reached the group: a saved weight is about to be unpacked."""
        if self.reached_by is None:
            self.pre_backward()
        elif self.streams is not None:
            self.streams.use()

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
            for wait in self.writers:
                wait(self)
            now = self.registration.versions()
            if now != self.versions:
                self.versions = now
            self.unshard(for_backward=root.backward is not None)
            root.use(self)
            for ahead in root.prefetcher.in_backward(self):
                ahead.start_unshard(for_backward=True)
        if self.streams is not None:
            self.streams.use()

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
        if all(self.parameters.trainable) and backward.task == compat.graph_task():
            # A full backward hook of a module comes later, with the gradients of the module's inputs.
            has_hooks = any(self.backward_hooks or self._find_backward_hooks())
            # Those of users tell when to reshard in between: the last gradient of a tied parameter comes late.
            self.needs_no_input_hooks = not (has_hooks or self.settings.reduce_unused or self.users)
            if not has_hooks:
                self.finish_backward()

    def _find_backward_hooks(self) -> list[dict[int, Any]]:
        own = [module._backward_hooks for state in (self.state, *self.users) for module in state.own_modules()]
        self.backward_hooks = [*own, compat.hooks_of_all_modules]
        return self.backward_hooks

    # ---- after use

    def post_forward(
        self, backward_follows: bool, failed: bool = False, keeps: bool = False, has_run: bool = False
    ) -> None:
        """Reshards after a forward, or keeps the unsharded parameters or secondary shards, by `hold` and settings.

        Without a backward, they stay until a weight changes if the user wants that: each token that a model generates
        would take a gather of each group otherwise. `failed`: the forward has raised, perhaps after writing to them.
        `keeps`: keep them for backward if the user has not set `reshard_after_forward`. `has_run`: a module's own code
        has run. If it has left a weight where something else can read it in backward (`ctx.weight = weight` in an
        autograd function, hooks of a user's own for saved tensors, a list), their memory stays as it is until then:
        nothing would gather for such a reader. Ranks communicate as ever, since others may have left none.
        """
        choice = self.settings.frees_after_forward
        if not backward_follows and not failed and (self.hold is Hold.USER or choice is False):
            if self.hold is not Hold.USER:
                self.hold = Hold.NEXT_PASS
                self.unregister()
            return
        if choice is None:
            is_of_root = self.root.group is self or self.root.state in self.users
            keeps = keeps or is_of_root or self in self.root.prefetcher.first_in_backward or self.root.runs_for_loss
        else:
            keeps = choice is False
        if backward_follows and keeps:
            stays = Hold.BACKWARD if self.settings.reshard_after_backward else Hold.NEXT_PASS
            self.hold = max(self.hold, stays)
            self.unregister()
            return
        has_run = has_run and self.phase is UNSHARDED  # else another user has resharded it
        is_kept = has_run and backward_follows and self.parameters.are_kept() and not self.frees_viewed_storage
        if is_kept:
            self.root.kept.add(self)
        frees = self.root.frees_memory and not is_kept
        if self.mesh.has_outer_shard:
            self.hold = Hold.BACKWARD if backward_follows else Hold.NOTHING
            self.reshard(frees, keeps_secondary=not failed and self._may_keep_secondary())
        elif backward_follows and self.comms.post_forward is not None and self.is_unsharded and self.root.frees_memory:
            self.hold = Hold.BACKWARD
            self.reshard(frees, keeps_secondary=True)
        else:
            self.hold = Hold.NOTHING
            self.reshard(frees)

    def _may_keep_secondary(self) -> bool:
        """Returns True if secondary shards are to stay until a write, and the group has what they consist of."""
        is_there = self.phase is SECONDARY or self.is_unsharded
        return self.mesh.has_outer_shard and is_there and self.gathered_at is not None and self.root.frees_memory

    def reshard_if_idle(self, drops_secondary: bool = True) -> None:
        """Reshards and clears `hold`, unless a forward or a full_params block uses the group.

        `drops_secondary=False`: secondary shards that last until a write stay.
        """
        self.reached_by = None
        self.begun.clear()
        if self.state.running or (self.users and self.num_running):
            self.hold = Hold.NOTHING if self.hold is Hold.BACKWARD else self.hold
        else:
            self.hold = Hold.NOTHING
            keeps = self.mesh.has_outer_shard and not drops_secondary and self._may_keep_secondary()
            self.reshard(self.root.frees_memory, keeps)

    def finish_backward(self) -> None:
        """Reshards, or keeps the data for the next pass if the setting `reshard_after_backward` is False."""
        is_running = self.state.running or (self.users and self.num_running)
        if self.settings.reshard_after_backward or is_running or not self.is_unsharded:
            if self.hold is Hold.USER:
                self.hold = Hold.NEXT_PASS
            self.reshard_if_idle(drops_secondary=False)
        else:
            self.reached_by = None
            self.begun.clear()
            self.hold = max(self.hold, Hold.NEXT_PASS)
            self.unregister()

    def reshard_stale(self) -> None:
        """Reshards, between passes, unless `hold` is NEXT_PASS or more and nothing has changed. Keeps Hold.USER. Drops
        secondary shards of parameters that were written to.
        """
        self.root.is_in_backward()  # one that has failed is over
        hold = self.hold
        if self.phase is SECONDARY and self.shard_versions() != self.gathered_at:
            self.reshard()
        if hold is not Hold.NOTHING and not (hold >= Hold.NEXT_PASS and self.is_up_to_date()):
            self.reshard_if_idle(drops_secondary=False)
            self.hold = hold if hold is Hold.USER else self.hold

    def post_backward(self, state: FSDPState) -> None:
        """Reduces what buckets have left, and reshards, after the backward of a forward of `state`. It is called only
        if forward has hooked the inputs.

        Of a group with users, gradients may be still to come: they are left to buckets, or the end. While the backward
        of another user runs, around this one or beside it, that needs the parameters.
        """
        if self.users:
            self.begun.discard(state)
            if self.begun:
                return
        else:
            self.gradients.flush()
        self.finish_backward()
