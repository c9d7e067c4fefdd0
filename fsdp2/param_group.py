"""The parameters that one `fully_shard` call shards together: gathered, freed and reduced as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import dtensor_compat, torch_compat
from .agreement import Turn
from .buffers import GroupBuffers
from .checked_comm import level_from_environment
from .comm import Comm, make_comm, subgroup
from .corrections.dtensor_operations import count_foreach_operations
from .custom_comm import CommChoice
from .extension import GroupExtensions, refuse_part
from .gather import PendingGather
from .gradients import GroupGradients
from .guards.full_content import FullContent
from .headers import Label
from .layout import GatherLayout, ParamSpec, gather_layout
from .mesh import DataMesh
from .param import FSDPParam
from .policy import MixedPrecisionPolicy
from .reduce import Reduction
from .registered_faces import RegisteredFaces
from .transfers import Transfers, make_transfers
from .versions import GroupVersions


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
        self._policy = policy
        self._choice = CommChoice()
        # Under which name its collectives are known among ranks.
        self.label = Label()
        self.name = type(modules[0]).__name__
        # Where shards live, and whether in page-locked memory; what copies them to where they compute, if elsewhere.
        self._rest = params[0].rest if params else mesh.device
        self._pin = pin
        self.transfers: Transfers | None = make_transfers(mesh.device, pin) if self._rest != mesh.device else None
        reduction = Reduction.over(mesh, self.transfers, self.label)
        self._comm = self._plain_comm = reduction.shards
        self.state: _Settled | PendingGather = SHARDED
        self.faces = RegisteredFaces()
        self.gradients = GroupGradients(self.params, reduction)
        self.gradients.label = self.label
        self.versions = GroupVersions()
        # Identity of the storage that full parameters share, and of those that extended ones have.
        self.storage_ids: frozenset[int] = frozenset()
        self.has_frozen = False
        self.keeps_storage = False
        # Whether copies (tools/full_copies.py) are registered in place of parameters, which then can't be gathered.
        self.is_lent = False
        # What to ask before a gather, if some group under the same root is conditional.
        self.turn: Turn | None = None
        # Values from before sharding, until ranks have compared them; what has them do that, before a gather.
        self.start: Any = None
        self.guard: Callable[[], None] | None = None
        # The versions of the shards that were last gathered; for backward they are noted only if `_notes_changes`.
        self._notes_changes = False
        self.gathered_at: tuple[int, ...] | None = None
        # Ranks that can restore the parameters of which each has kept a part after forward.
        self._few: Comm | None = None
        # The parameters that have one are the last in `params`.
        self._extensions = GroupExtensions((), mesh, policy)
        self._looked = False
        # None while parameters are on another device, on meta say.
        self._buffers: GroupBuffers | None = None
        self._specs: tuple[ParamSpec, ...] = ()
        self._trainable: list[bool] = []
        if level_from_environment():
            self.choose_comms(checked=True)
        self._adopt()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: no memory, no process group."""
        names = ("modules", "params", "mesh", "name", "keeps_storage", "_notes_changes", "_policy", "_pin", "_choice")
        few = self._few.size if self._few is not None else None
        return {**{name: vars(self)[name] for name in names}, "few": few, "gradients": self.gradients.settings()}

    def wake(self) -> None:
        """Become usable, in a copy of which all modules and parameters are there. Every rank must call it."""
        before = dict(vars(self))
        for param in before["params"]:
            param.wake()
        self.__init__(*(before[name] for name in ("modules", "params", "mesh", "_policy", "_pin")))  # type: ignore[misc]
        self.name = before["name"]
        self.note_changes(before["_notes_changes"])
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
        plain = self._buffers.layout.full_nbytes if self._buffers else 0
        return plain + self._extensions.nbytes if self._extensions.members else plain

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Name the group and its parameters after the FQNs of their modules."""
        for param in self.params:
            for i, slot in enumerate(param.slots):
                prefix = names.get(slot.module)
                if prefix is not None:
                    param.names[i] = f"{prefix}.{slot.name}" if prefix else slot.name
        self.name = self.label.name = names.get(self.modules[0], "") or "root"

    def choose_comms(self, **changes: Any) -> None:
        """Change how to communicate (see `CommChoice`). Every rank must call it, between steps."""
        self._choice = replace(self._choice, **changes)
        before, reduction, device = self.direct_min_bytes, self.gradients.reduction, self.mesh.device
        self._comm, reduction.shards = self._choice.build(self._plain_comm, device)
        if reduction.replicas is not None:
            reduction.replicas = self._choice.complete(reduction.replicas, device)
        if self._few is not None:
            self._few = self._choice.complete(self._few, device)
        if self.direct_min_bytes != before or (self._few is not None and "checked" in changes):
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
            self._few = self._choice.complete(comm, self.mesh.device)
            self._rebuild()

    def keep_storage(self, keep: bool) -> None:
        """Keep the full storage when its data is given up, so that pointers into it stay valid."""
        self.keeps_storage = keep
        if self._buffers is not None:
            self._buffers.keeps_storage = keep
            if self.state is SHARDED:
                self._buffers.free()

    def _rebuild(self) -> None:
        self.reshard()
        self._buffers = None
        self._adopt()

    # ---- sharded -> unsharded -> sharded

    def start_unshard(self, for_backward: bool = False) -> None:
        """Begin to gather, unless that is under way or done. Every rank must call it, in the same order.

        `for_backward`: between a forward and its backward users may not change parameters.
        """
        if self.state is not SHARDED:
            return
        if self._buffers is None:
            self._notice_changes()
        if self.gradients.steps:
            self.gradients.await_steps()
        if self.turn is not None and self.params and self._comm.size > 1:
            self.turn.gather()
        if self.guard is not None:
            self.guard()
        assert self._buffers is not None
        self.gathered_at = self.shard_versions() if self._notes_changes or not for_backward else None
        try:
            if self._extensions.members:
                self.state = self._buffers.start_gather(self._comm, *self._extensions.start(self._comm))
            else:
                self.state = self._buffers.start_gather(self._comm)
        except RuntimeError as error:  # out of memory, say
            self._name_error(error)
            raise

    def unshard(self, for_backward: bool = False) -> None:
        """Have the full parameters' data, of what the sharded ones are now: gather, or finish the gather under way."""
        if not (for_backward or self.faces.installed):
            self._notice_changes()
        self.start_unshard(for_backward)
        if isinstance(self.state, PendingGather):
            pending, self.state = self.state, SHARDED  # so it is if that fails
            try:
                pending.finish()
            except RuntimeError as error:  # a peer is gone, say
                self._name_error(error)
                raise
            self.state = UNSHARDED
            if self._extensions.members:
                self._finish_extensions()
        if self.versions.guards:
            self.versions.renew(self.shard_versions())

    def unshard_again(self) -> None:
        """Gather what is in use: it gets the values that it has. Every rank must call it, or `unshard`."""
        self.unshard(for_backward=True)
        self.state = SHARDED
        self.unshard(for_backward=True)

    def _name_error(self, error: RuntimeError) -> None:
        """Say in the message which group it was: neither allocators nor process groups know."""
        error.args = (f"{error} (while gathering {self.name}, {self.nbytes} bytes)",)

    def reshard(self, free: bool = True) -> None:
        """Register the sharded parameters, forget the full ones' data, and free it.

        `free=False` leaves the bytes where they are, for a graph that reads them without our notice.
        """
        self.faces.uninstall()
        state, self.state = self.state, SHARDED
        if isinstance(state, PendingGather):
            state.abandon()
        if free and self._buffers is not None:
            if self.versions.guards:
                self.versions.expire()
            self._buffers.free()
            if self._extensions.members and not self.keeps_storage:
                self._extensions.free()

    def shrink(self) -> None:
        """Register the sharded parameters; give up the full ones but for a part, from which few ranks restore them."""
        self.faces.uninstall()
        assert self.state is UNSHARDED, "a forward has just used them"
        assert self._buffers is not None
        self.state = SHARDED
        if self.versions.guards:
            self.versions.expire()
        self._buffers.shrink()

    def shard_versions(self) -> tuple[int, ...]:
        """`GroupVersions.sharded`, when the steps of an optimizer in backward are done."""
        if self.gradients.steps:
            self.gradients.await_steps()
        return self.versions.sharded()

    def guard_saved(self) -> None:
        """From now on have autograd refuse full parameters that it saves without our hooks, while they are given up."""
        if not self.versions.guards:
            gathered_at = self.gathered_at if self.is_unsharded else None
            self.versions.guard(gathered_at or self.shard_versions())

    def _look(self) -> tuple[tuple[int, ...], list[bool]]:
        """The same, and which parameters are trainable."""
        if self.gradients.steps:
            self.gradients.await_steps()
        return self.versions.sharded_and_trainable()

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

    def is_changed(self, weight: Tensor, before: tuple[int, ...], now: tuple[int, ...]) -> bool:
        """Whether the parameter that `weight` is a view of has other versions `now` than `before`."""
        assert self._buffers is not None, "a full parameter was saved"
        count = len(self.params)
        if before[2 * count :] != now[2 * count :]:  # some were replaced, or nothing is known of before
            return True
        if self._extensions.members and torch_compat.storage_id(weight) != self._buffers.storage_id:
            extended = slice(2 * len(self._buffers.layout.specs), 2 * count)
            return before[extended] != now[extended]  # which of them it is part of is not known
        weight = dtensor_compat.local_if_any(weight)
        i = bisect_right(self._buffers.layout.full_offsets, weight.storage_offset() * weight.element_size()) - 1
        return before[2 * i : 2 * i + 2] != now[2 * i : 2 * i + 2]

    def watch_calls(self, on_sharded_call: Callable[[nn.Module, Any, Any], None] | None) -> None:
        """Have `on_sharded_call(module, args, kwargs)` run before a call of a module inside, if it is not the group's
        own forward that makes it: the full parameters are not there. None: no more.
        """
        inside = dict.fromkeys(slot.module for param in self.params for slot in param.slots if on_sharded_call)
        self.faces.watch_calls([each for each in inside if each not in self.modules], on_sharded_call)

    # ---- construction, and again whenever a user replaces a parameter or its local tensor

    def adopt_replacements(self, accept_whole: bool = False, may_be_meta: bool = True) -> None:
        """Take over what a user put in place of our parameters or their local tensors (`.to`, loading, assignment)."""
        if not self.is_lent:
            self.reshard()
            self._notice_changes(accept_whole, may_be_meta)

    def _notice_changes(self, accept_whole: bool = False, may_be_meta: bool = False) -> None:
        """Follow what a user did to the parameters, and let go of what was gathered ahead of that."""
        versions, trainable = self._look()
        if versions != self.gathered_at:
            self.reshard()  # also what is kept for few ranks to restore
        if self._buffers is None or self.faces.is_replaced() or not (self._looked or self._is_extended_as_before()):
            self.reshard()
            self._readopt(accept_whole)
        elif self._trainable != trainable:
            self._follow_requires_grad()
        if self._buffers is None and not may_be_meta:
            names = [f"{p.name} on {p.local.device}" for p in self.params if p.local.device != self._rest]
            raise RuntimeError(
                f"expected parameters on {self._rest}, got {', '.join(names)}. Materialise the model "
                f"before its first forward: model.to_empty(device={self._rest.type!r}), then initialise or load."
            )

    def note_changes(self, notes: bool) -> None:
        """Choose whether `is_up_to_date` can say so of what is gathered for backward, too."""
        self._notes_changes = notes
        if notes:
            count_foreach_operations()

    def is_up_to_date(self) -> bool:
        """Whether nobody has changed, replaced, frozen or unfrozen a parameter since the group was last gathered."""
        is_replaced = not self.faces.installed and self.faces.is_replaced()
        return not is_replaced and self._look() == (self.gathered_at, self._trainable)

    def _is_extended_as_before(self) -> bool:
        """Whether no user has set an extension's methods on a shard since all were put in place: looked at once."""
        self._looked = all(p.is_extended == spec.extended for p, spec in zip(self.params, self._specs, strict=True))
        return self._looked

    def _readopt(self, accept_whole: bool) -> None:
        if self.is_lent:
            raise RuntimeError(
                f"{self.name}: its parameters are copies that full_params has lent, with which no sharded module runs. "
                "Leave that block first."
            )
        # All are checked before one is taken: after an error the user may put the old ones back.
        found = [param.find_replacement(accept_whole) for param in self.params]
        owners: dict[nn.Parameter, FSDPParam] = {}
        for param, parameter in zip(self.params, found, strict=True):
            other = owners.setdefault(parameter, param)
            if other is not param:
                raise ValueError(
                    f"{param.name} and {other.name} are one parameter now, but were two when fully_shard was applied. "
                    "Tie parameters before fully_shard."
                )
        for param, parameter in zip(self.params, found, strict=True):
            param.replace(parameter)
        self.versions.note_replacement()
        self._adopt()

    def _adopt(self) -> None:
        """(Re)build buffers, plan and full parameters from the present local tensors, if all are on the device."""
        self.faces.forget()
        if any(param.local.device != self._rest for param in self.params):
            self._buffers = None
            self._watch()
            return
        self._find_extensions()
        self._specs = specs = tuple(param.spec(self._policy) for param in self.params)
        plain = tuple(spec for spec in specs if not spec.extended)
        # Also when the first forward runs in inference mode: what is built here must serve training.
        with torch.inference_mode(False), torch.no_grad():
            if self._buffers is None or self._buffers.layout.specs != plain:
                self._allocate(gather_layout(plain, self.mesh.size, self._comm.direct_min_bytes))
            else:
                self._renew_shards()
            assert self._buffers is not None
            shared = self.params[: len(plain)]
            placed = self._buffers.move_into_shards([param.local for param in shared])
            for param, local in zip(shared, placed, strict=True):
                param.local = local
        self._watch()
        self._follow_requires_grad()
        self._prepare_faces()

    def _allocate(self, layout: GatherLayout) -> None:
        device = self.mesh.device
        self._buffers = GroupBuffers(layout, self.mesh.rank, device, self.transfers, self._few)
        # While the storage has its size: a tensor that is put over a smaller one makes it grow, and stay.
        for i in range(len(layout.specs)):
            self.params[i].build_full(self._buffers.full_parameter(i))
        self._buffers.free()
        self._buffers.keeps_storage = self.keeps_storage

    def _renew_shards(self) -> None:
        """Have other memory for the shards: users may hold what lies in the present one, to put it back."""
        assert self._buffers is not None
        self._buffers.renew_shards()
        if self._buffers.layout.aliased:
            self.move_full()

    def note_content(self, every: int) -> FullContent:
        """Note what the full parameters hold, but for those that say themselves how they are gathered: see there."""
        assert self._buffers is not None, "they have their data"
        return FullContent(self.params, self._buffers, every)

    def move_full(self) -> None:
        """Have the full parameters over the memory that is theirs, which must be there."""
        assert self._buffers is not None
        with torch.inference_mode(False), torch.no_grad():
            for i in range(len(self._buffers.layout.specs)):
                self.params[i].move_full(self._buffers.full_parameter(i))

    def _find_extensions(self) -> None:
        self.params.sort(key=lambda param: param.is_extended)
        self._extensions, self._looked = GroupExtensions(self.params, self.mesh, self._policy), False
        if self._extensions.members and self._few is not None:
            refuse_part(self.params[-1].name)

    def _finish_extensions(self) -> None:
        if self._extensions.finish():
            was_installed = self.faces.installed
            self.faces.uninstall()
            self._watch()
            self._follow_requires_grad()
            self._prepare_faces()
            if was_installed:
                self.faces.install()
        self.versions.accept()

    def _watch(self) -> None:
        """Remember what is registered where, to notice what is put there instead."""
        self.faces.watch(self.params)
        self.versions.watch(self.params)
        # That the sharded parameters are on: few.
        meshes = (param.dtensor_spec.mesh for param in self.params)
        self.meshes = list({id(mesh): mesh for mesh in meshes}.values())

    def _follow_requires_grad(self) -> None:
        _, self._trainable = self._look()
        for param, trainable in zip(self.params, self._trainable, strict=True):
            param.full.requires_grad_(trainable)
        specs = self._specs if self._buffers else ()
        self.gradients.prepare(specs, self._policy, [i for i, yes in enumerate(self._trainable) if yes])
        self.has_frozen = not all(self._trainable)

    def _prepare_faces(self) -> None:
        assert self._buffers is not None
        self.storage_ids = frozenset([self._buffers.storage_id]) | self._extensions.storage_ids()
        self.faces.prepare(self.params)
