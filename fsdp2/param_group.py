"""The parameters that one `fully_shard` call shards together: gathered, freed and reduced as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .adopted_params import AdoptedParams
from .agreement import Turn
from .buffers import GroupBuffers
from .checked_comm import level_from_environment, note_level
from .comm import make_comm
from .custom_comm import CommChoice
from .gather import PendingGather
from .gradients import GroupGradients
from .guards.empty_memory import EmptyBuffers
from .headers import Label
from .layout import gather_layout
from .mesh import DataMesh, subgroup
from .param import FSDPParam, fqn
from .policy import MixedPrecisionPolicy
from .reduce import Reduction
from .streams import GroupStreams
from .transfers import Transfers, make_transfers


class _Settled:
    """A state with nothing in flight."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


# The states of a group; the third is a PendingGather. Legal transitions:
#   SHARDED -> PendingGather (start_unshard) -> UNSHARDED (unshard) -> SHARDED (reshard); reshard also ends a gather.
SHARDED = _Settled("SHARDED")
UNSHARDED = _Settled("UNSHARDED")


class FSDPParamGroup:
    """Owns one flat shard buffer and one storage for the full parameters.

    Two things are separate: whether the full parameters' *data* is there (`state`), and which *face* is registered
    in the modules (`faces`). Outside forward and backward the sharded faces are, even if the data is kept.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[FSDPParam],
        mesh: DataMesh,
        policy: MixedPrecisionPolicy,
        pin: bool = False,
    ) -> None:
        self.modules, self.params, self.mesh = list(modules), list(params), mesh
        self._policy, self._choice = policy, CommChoice()
        # Under which name its collectives are known among ranks.
        self.label = Label()
        self.name = type(modules[0]).__name__
        # Whether shards live in page-locked memory; what copies them to where they compute, if that is elsewhere.
        self._pin = pin
        rest = params[0].rest if params else mesh.device
        self.transfers: Transfers | None = make_transfers(mesh.device, pin) if rest != mesh.device else None
        reduction = Reduction.over(mesh, self.transfers, self.label)
        self._comm = self._plain_comm = reduction.shards
        self.state: _Settled | PendingGather = SHARDED
        self.streams = GroupStreams.of(mesh.device)
        self.gradients = GroupGradients(self.params, reduction, self.streams)
        self.gradients.label = self.label
        self.adopted = AdoptedParams(self.params, self.gradients, mesh, policy, rest, self.transfers)
        self.faces, self.versions = self.adopted.faces, self.adopted.versions
        # Whether copies (tools/full_copies.py) are registered in place of parameters, which then can't be gathered.
        self.is_lent = False
        # What to ask before a gather, if some group under the same root is conditional.
        self.turn: Turn | None = None
        # What to do before a gather.
        self.guard: Callable[[], None] | None = None
        # Those below its modules that to_empty has given memory.
        self.empty_buffers = EmptyBuffers()
        # The versions of the shards that were last gathered. For backward they are noted only if `notes_changes`, for
        # `is_up_to_date` to say so of what stays.
        self.notes_changes = False
        self.gathered_at: tuple[int, ...] | None = None
        if level_from_environment():
            self.choose_comms(checked=True)
        self.adopted.adopt(self._comm.direct_min_bytes)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: no memory, no process group."""
        names = ("modules", "params", "mesh", "name", "notes_changes", "_policy", "_pin", "_choice")
        few, keeps_storage = self.adopted.few, self.adopted.keeps_storage
        chosen = {"few": few.size if few is not None else None, "keeps_storage": keeps_storage}
        return {**{name: vars(self)[name] for name in names}, **chosen, "gradients": self.gradients.settings()}

    def wake(self) -> None:
        """Become usable, in a copy of which all modules and parameters are there. Every rank must call it."""
        before = dict(vars(self))
        for param in before["params"]:
            param.wake()
        self.__init__(*(before[name] for name in ("modules", "params", "mesh", "_policy", "_pin")))  # type: ignore[misc]
        self.name = before["name"]
        self.notes_changes = before["notes_changes"]
        self.gradients.take_settings(**before["gradients"])
        self.keep_storage(before["keeps_storage"])
        self.choose_comms(**vars(before["_choice"]))
        self.keep_part_among(before["few"])

    # ---- description

    @property
    def is_unsharded(self) -> bool:
        """Whether the full parameters' data is there."""
        return self.state is UNSHARDED

    @property
    def is_checked(self) -> bool:
        """Whether it is at the debug level."""
        return self._choice.checked

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded group, in compute dtypes, padding included."""
        buffers, extensions = self.adopted.buffers, self.adopted.extensions
        plain = buffers.layout.full_nbytes if buffers is not None else 0
        return plain + extensions.nbytes if extensions.members else plain

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Name the group and its parameters after the FQNs of their modules."""
        for param in self.params:
            for i, slot in enumerate(param.slots):
                prefix = names.get(slot.module)
                if prefix is not None:
                    param.names[i] = fqn(prefix, slot.name)
        self.name = self.label.name = names.get(self.modules[0], "") or "root"

    def choose_comms(self, **changes: Any) -> None:
        """Change how to communicate (see `CommChoice`). Every rank must call it, between steps."""
        self._choice = replace(self._choice, **changes)
        if "checked" in changes:
            note_level(self.mesh.axis_groups, self.label, self._choice.checked)
        before, reduction, device = self.direct_min_bytes, self.gradients.reduction, self.mesh.device
        self._comm, reduction.shards = self._choice.build(self._plain_comm, device)
        if reduction.replicas is not None:
            reduction.replicas = self._choice.complete(reduction.replicas, device)
        if self.adopted.few is not None:
            self.adopted.few = self._choice.complete(self.adopted.few, device)
        if self.direct_min_bytes != before or (self.adopted.few is not None and "checked" in changes):
            self._rebuild()  # what goes direct, or who restores what is kept, is another choice now

    @property
    def direct_min_bytes(self) -> tuple[int, int]:
        """From how many bytes on a parameter is gathered, and reduced, on its own."""
        return self._comm.direct_min_bytes, self.gradients.reduction.shards.direct_min_bytes

    def keep_part_among(self, few: int | None) -> None:
        """Have `shrink` keep a part, from which so many neighbouring ranks restore the full parameters."""
        if few is not None:
            assert self.mesh.shard_group is not None, "one rank keeps no part"
            comm = make_comm(subgroup(self.mesh.shard_group, few), self.mesh.device, self.label)
            self.adopted.few = self._choice.complete(comm, self.mesh.device)
            self._rebuild()

    def keep_storage(self, keep: bool) -> None:
        """Keep the full storage when its data is given up, so that pointers into it stay valid."""
        self.adopted.keeps_storage = keep
        if self.adopted.buffers is not None:
            self.adopted.buffers.keeps_storage = keep
            if self.state is SHARDED:
                self.adopted.buffers.free()

    def _rebuild(self) -> None:
        self.reshard()
        self.adopted.adopt(self._comm.direct_min_bytes)

    # ---- sharded -> unsharded -> sharded

    def start_unshard(self, for_backward: bool = False, ahead: bool = True) -> None:
        """Begin to gather, unless that is under way or done. Every rank must call it, in the same order.

        `for_backward`: between a forward and its backward users may not change parameters. `ahead`: of the modules that
        need it, which may run on another stream.
        """
        if self.state is not SHARDED:
            return
        if self.streams is not None and self.streams.choose_home(ahead, self._holds_memory):
            with self.streams.at_home(joins=False):
                return self.start_unshard(for_backward)
        if self.adopted.buffers is None:
            self._notice_changes()
        if self.gradients.steps.under_way:
            self.gradients.steps.wait()
        if self.turn is not None and self.params and self._comm.size > 1:
            self.turn.gather()
        if self.guard is not None:
            self.guard()
        buffers, extensions = self.adopted.buffers, self.adopted.extensions
        assert buffers is not None
        self.gathered_at = self.shard_versions() if self.notes_changes or not for_backward else None
        try:
            more = extensions.start(self._comm) if extensions.members else ()
            self.state = buffers.start_gather(self._comm, *more)
        except RuntimeError as error:  # out of memory, say
            self._name_error(error)
            raise

    def unshard(self, for_backward: bool = False) -> None:
        """Have the full parameters' data, of what the sharded ones are now: gather, or finish the gather under way."""
        if not (for_backward or self.faces.installed):
            self._notice_changes()
        self.start_unshard(for_backward, ahead=False)
        if self.streams is not None and self.streams.are_apart() and isinstance(self.state, PendingGather):
            with self.streams.at_home(joins=False):
                self.unshard(for_backward)
        elif isinstance(self.state, PendingGather):
            pending, self.state = self.state, SHARDED  # so it is if that fails
            try:
                pending.finish()
            except RuntimeError as error:  # a peer is gone, say
                self._name_error(error)
                raise
            self.state = UNSHARDED
            if self.adopted.extensions.members:
                self.adopted.finish_extensions()
        if not self.adopted.places.are_kept(addresses_only=for_backward):
            self.adopted.refuse_moved()
        if self.versions.guards:
            self.versions.renew(self.shard_versions())
        if self.streams is not None:
            self.streams.use()

    def unshard_again(self) -> None:
        """Gather what is in use: it gets the values that it has. Every rank must call it, or `unshard`."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.unshard_again()
        self.unshard(for_backward=True)
        self.state = SHARDED
        self.unshard(for_backward=True)

    def _name_error(self, error: RuntimeError) -> None:
        """Say in the message which group it was: neither allocators nor process groups know."""
        self.label.locate(error, f"gathering {self.name}, {self.nbytes} bytes")

    def reshard(self, free: bool = True) -> None:
        """Register the sharded parameters, forget the full ones' data, and free it.

        `free=False` leaves the bytes where they are, for a graph that reads them without our notice.
        """
        if (
            self.streams is not None
            and self.streams.are_apart()
            and (self.state is not SHARDED or self._holds_memory())
        ):
            with self.streams.at_home():
                return self.reshard(free)
        self.faces.uninstall()
        state, self.state = self.state, SHARDED
        if isinstance(state, PendingGather):
            state.abandon()
        adopted = self.adopted
        if free and adopted.buffers is not None:
            if self.versions.guards and not adopted.keeps_storage:
                self.versions.expire()
            adopted.buffers.free()
            if adopted.extensions.members and not adopted.keeps_storage:
                adopted.extensions.free()

    def shrink(self) -> None:
        """Register the sharded parameters; give up the full ones but for a part, from which few ranks restore them."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.shrink()
        self.faces.uninstall()
        assert self.state is UNSHARDED, "a forward has just used them"
        assert self.adopted.buffers is not None
        self.state = SHARDED
        if self.versions.guards and not self.adopted.keeps_storage:
            self.versions.expire()
        self.adopted.buffers.shrink()

    def _holds_memory(self) -> bool:
        """Returns True if memory of the group, that of its gradients included, is in use at its home stream."""
        buffers = self.adopted.buffers
        return (buffers is not None and buffers.hold_memory()) or self.gradients.are_under_way()

    def shard_versions(self) -> tuple[int, ...]:
        """`GroupVersions.sharded`, when the steps of an optimizer in backward are done."""
        if self.gradients.steps.under_way:
            self.gradients.steps.wait()
        return self.versions.sharded()

    def guard_saved(self) -> None:
        """From now on have autograd refuse full parameters that it saves without our hooks, while they are given up."""
        if not self.versions.guards:
            gathered_at = self.gathered_at if self.is_unsharded else None
            self.versions.guard(gathered_at or self.shard_versions())

    def copy_full(self, params: Sequence[FSDPParam], dtype: torch.dtype | None) -> list[Tensor]:
        """What the ranks share of `params`, of this group, in other memory than the full parameters have, in the dtypes
        in which they are stored, or, of floating-point ones, in `dtype`. Every rank must call it.
        """
        specs = []
        for spec in (param.spec(self._policy) for param in params):
            wanted = dtype if dtype is not None and spec.storage_dtype.is_floating_point else spec.storage_dtype
            specs.append(replace(spec, compute_dtype=wanted))
        with torch.inference_mode(False), torch.no_grad():
            layout = gather_layout(tuple(specs), self.mesh.size, self._comm.direct_min_bytes)
            buffers = GroupBuffers(layout, self.mesh.rank, self.mesh.device, self.transfers)
            buffers.move_into_shards([param.local for param in params])
            buffers.start_gather(self._comm).finish()
            return [buffers.full_parameter(i) for i in range(len(specs))]

    def watch_calls(self, on_sharded_call: Callable[[nn.Module, Any, Any], None] | None) -> None:
        """Have `on_sharded_call(module, args, kwargs)` run before a call of a module inside, if it is not the group's
        own forward that makes it: the full parameters are not there. None: no more.
        """
        inside = dict.fromkeys([slot.module for param in self.params for slot in param.slots if on_sharded_call])
        self.faces.watch_calls([each for each in inside if each not in self.modules], on_sharded_call)

    # ---- what users do to parameters

    def note_assigned(self, param: FSDPParam) -> None:
        """A user has assigned `.data` of a sharded parameter: once all have other memory, give up the old one."""
        if not self.is_lent and self.adopted.note_assigned(param):
            self.reshard()
            self.adopted.give_up_memory()

    def adopt_replacements(
        self, accept_whole: bool = False, may_be_meta: bool = True, may_be_untied: bool = False
    ) -> bool:
        """Take over what a user put in place of our parameters or their local tensors (`.to`, loading, assignment).
        Return whether there was any. For the arguments see AdoptedParams.take_replacements.
        """
        if self.is_lent:
            return False
        self.reshard()
        return self._notice_changes(accept_whole, may_be_meta, may_be_untied)

    def _notice_changes(
        self, accept_whole: bool = False, may_be_meta: bool = False, may_be_untied: bool = False
    ) -> bool:
        """Follow what a user did to the parameters, and let go of what was gathered ahead of that. Return whether some
        were replaced.
        """
        if self.shard_versions() != self.gathered_at:
            self.reshard()  # also what is kept for few ranks to restore
        adopted = self.adopted
        are_replaced = adopted.are_replaced()
        if are_replaced:
            self.reshard()
            if self.is_lent:
                raise RuntimeError(
                    f"{self.name}: its parameters are copies that full_params has lent, with which no sharded module "
                    "runs. Leave that block first."
                )
            adopted.take_replacements(accept_whole, may_be_untied)
        elif adopted.trainable != self.versions.trainable():
            adopted.follow_requires_grad()
        if adopted.buffers is None and not may_be_meta:
            rest = adopted.rest
            names = [f"{p.name} on {p.local.device}" for p in self.params if p.local.device != rest]
            raise RuntimeError(
                f"expected parameters on {rest}, got {', '.join(names)}. Materialise the model "
                f"before its first forward: model.to_empty(device={rest.type!r}), then initialise or load."
            )
        return are_replaced

    def is_up_to_date(self) -> bool:
        """Whether nobody has changed, replaced, frozen or unfrozen a parameter since the group was last gathered."""
        is_replaced = not self.faces.installed and self.faces.is_replaced()
        is_changed = self.shard_versions() != self.gathered_at or self.versions.trainable() != self.adopted.trainable
        return not (is_replaced or is_changed)
