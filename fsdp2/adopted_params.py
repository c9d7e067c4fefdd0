"""What one group has made of the parameters that its modules have: memory for their shards and for the full ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import dtensor_compat, torch_compat
from .buffers import GroupBuffers
from .comm import Comm
from .extension import GroupExtensions, refuse_part
from .full_places import FullPlaces
from .gradients import GroupGradients
from .guards.full_content import FullContent
from .guards.starting_weights import LOADED, StartingWeights
from .layout import GatherLayout, ParamSpec, gather_layout
from .mesh import DataMesh
from .param import FSDPParam
from .policy import MixedPrecisionPolicy
from .registered_faces import RegisteredFaces
from .replacements import cut_whole, find_replacement, is_untied
from .transfers import Transfers
from .versions import GroupVersions, requires_grad_of

_NO_PLACES = FullPlaces((), (), torch.UntypedStorage(0))


class AdoptedParams:
    """The parameters of one group: `adopt` builds buffers, full faces and plans of the local tensors that they have,
    once more whenever a user has replaced some.

    `faces`, `versions` tell what users have done since; `buffers` is None while parameters are elsewhere than on
    `rest`, on meta say. Those that say themselves how they are gathered (`extensions`) are the last in `params`.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        gradients: GroupGradients,
        mesh: DataMesh,
        policy: MixedPrecisionPolicy,
        rest: torch.device,
        transfers: Transfers | None,
    ) -> None:
        self.params, self._gradients = params, gradients
        self._mesh, self._policy, self._transfers = mesh, policy, transfers
        # Where shards live.
        self.rest = rest
        # What parameters were when this rank had them whole, until ranks have compared that.
        self.starts: dict[FSDPParam, StartingWeights] = {}
        self.faces, self.versions = RegisteredFaces(), GroupVersions()
        self.buffers: GroupBuffers | None = None
        self.extensions = GroupExtensions((), mesh, policy)
        self._looked = False
        self._specs: tuple[ParamSpec, ...] = ()
        self._full: list[nn.Parameter] = []
        self.places = _NO_PLACES
        # Parameters whose local tensors were assigned since they were placed in the group's memory.
        self._assigned: set[FSDPParam] = set()
        self.trainable: list[bool] = []
        self.has_frozen = False
        # Whether a backward may come to graphs of a time when other parameters were trainable.
        self.trained_others = False
        # Tied parameters of which several objects were registered when that was last looked at.
        self._untied: list[FSDPParam] = []
        # Identity of the storage that full parameters share, and of those that extended ones have.
        self.storage_ids: frozenset[int] = frozenset()
        # That the sharded parameters are on: few.
        self.meshes: list[DeviceMesh] = []
        # What is chosen: from how many bytes on a parameter is gathered on its own; whether the full storage is kept
        # when its data is given up; ranks that can restore the parameters of which each has kept a part after forward.
        self._direct_min_bytes = 0
        self.keeps_storage = False
        self.few: Comm | None = None

    # ---- what users have done

    def are_replaced(self) -> bool:
        """Whether a parameter or its local tensor is another one, or was given an extension's methods."""
        return self.buffers is None or self.faces.is_replaced() or not (self._looked or self._is_extended_as_before())

    def _is_extended_as_before(self) -> bool:
        """Whether no user has set an extension's methods on a shard since all were put in place: looked at once."""
        self._looked = all(p.is_extended == spec.extended for p, spec in zip(self.params, self._specs, strict=True))
        return self._looked

    def find_changed(self, weight: Tensor, before: tuple[int, ...], now: tuple[int, ...]) -> list[str]:
        """Names of the parameters, of one of which `weight` is a view, that have other versions `now` than `before`; of
        all there are, if some were replaced.
        """
        if before[-1:] != now[-1:]:  # or nothing is known of before
            return [param.name for param in self.params]
        return [self.params[i].name for i in self._places_of(weight) if before[i] != now[i]]

    def _places_of(self, weight: Tensor) -> range:
        """Of the parameters, among which is that of which `weight` is a view."""
        assert self.buffers is not None, "a full parameter was saved"
        if self.extensions.members and torch_compat.storage_id(weight) != self.buffers.storage_id:
            return range(len(self.buffers.layout.specs), len(self.params))  # which of them is not known
        weight = dtensor_compat.local_if_any(weight)
        i = bisect_right(self.buffers.layout.full_offsets, weight.storage_offset() * weight.element_size()) - 1
        return range(i, i + 1)

    def refuse_moved(self) -> None:
        """Full parameters do not lie in the group's memory any more: put them there again.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{', '.join(self.take_moved())}: the full parameter does not lie in its group's memory any more, because "
            "`.data` was assigned, or it was resized or transposed in place, while it was unsharded. The next gather "
            "would not reach it, and no optimizer would train it. What was assigned is dropped. Write inside `with "
            "fsdp2.full_params(module, writeback=True):`; change a shape (resize an embedding) before fully_shard."
        )

    def take_moved(self) -> list[str]:
        """Puts full parameters that do not lie in the group's memory any more there again, in their shapes; returns
        their names, and shapes that were wrong. The group must be unsharded.
        """
        if self.places.are_kept():
            return []
        moved = self.places.find_moved()
        self.move_full()
        if any(shape is not None for shape in moved.values()):
            self._renew_full([param for param, shape in moved.items() if shape is not None])
        return [
            param.name if shape is None else f"{param.name} (expected shape {param.gathered_shape}, got {shape})"
            for param, shape in moved.items()
        ]

    def _renew_full(self, moved: Sequence[FSDPParam]) -> None:
        assert self.buffers is not None, "they are there"
        was_installed = self.faces.installed
        self.faces.uninstall()
        with torch.inference_mode(False), torch.no_grad():
            for i, param in enumerate(self.params[: len(self.buffers.layout.specs)]):
                if param in moved:
                    param.renew_full(self.buffers.full_parameter(i))
            self._follow_faces()
        if was_installed:
            self.faces.install()

    def note_content(self, every: int) -> FullContent:
        """Note what the full parameters hold, but for those that say themselves how they are gathered: see there."""
        assert self.buffers is not None, "they have their data"
        return FullContent(self.params, self.buffers, every)

    # ---- following that

    def take_replacements(self, accept_whole: bool, may_be_untied: bool = False) -> None:
        """Adopt what is registered now. `accept_whole`: plain tensors of whole parameters, too. `may_be_untied`: tied
        parameters that have been replaced under some of their names are left as they are, to be looked at next time.

        Raises:
            ValueError: one can't take its parameter's place, or that of several; nothing is changed then.
        """
        untied = [
            param for param in self.params if may_be_untied and is_untied(param, accept_whole or param in self._untied)
        ]
        found = [
            param.sharded if param in untied else find_replacement(param, accept_whole, may_be_untied)
            for param in self.params
        ]
        owners: dict[nn.Parameter, FSDPParam] = {}
        for param, parameter in zip(self.params, found, strict=True):
            other = owners.setdefault(parameter, param)
            if other is not param:
                raise ValueError(
                    f"{param.name} and {other.name} are one parameter now, but were two when fully_shard was applied. "
                    "Tie parameters before fully_shard."
                )
        starts, self._untied = {}, untied
        for param in self.faces.replaced(self.params):
            self.starts.pop(param, None)
        with torch.no_grad():
            for param in untied if accept_whole else ():
                cut_whole(param)
            for param, parameter in zip(self.params, found, strict=True):
                if param in untied:
                    continue
                if not isinstance(parameter, DTensor):
                    starts[param] = StartingWeights.of(param, parameter, LOADED)
                param.replace(parameter)
        self.versions.note_replacement()
        self._adopt()
        self.note_starts(starts)

    def note_starts(self, starts: dict[FSDPParam, StartingWeights | None]) -> None:
        """Have ranks compare these when they look next."""
        with dtensor_compat.no_torch_function():
            for param, start in starts.items():
                if start is not None:
                    start.note_place()
                    self.starts[param] = start

    def adopt(self, direct_min_bytes: int) -> None:
        """Build everything, in other memory than before."""
        self._direct_min_bytes, self.buffers = direct_min_bytes, None
        self._adopt()

    def _adopt(self) -> None:
        """(Re)build buffers, plan and full parameters from the present local tensors, if all are on the device."""
        self.faces.forget()
        if any(param.local.device != self.rest for param in self.params):
            self.give_up_memory()
            return
        self._specs = specs = self._find_specs()
        plain = tuple(spec for spec in specs if not spec.extended)
        # Also when the first forward runs in inference mode: what is built here must serve training.
        with torch.inference_mode(False), torch.no_grad():
            self._place_shards(plain)
        self._follow_faces()

    def give_up_memory(self) -> None:
        """Hold no memory of the parameters, which lie elsewhere now: `adopt` allocates some when they are needed."""
        self.faces.forget()
        if self.buffers is not None and self.buffers.layout.aliased:
            for param in self.params[: len(self.buffers.layout.specs)]:
                param.empty_full()
        self.buffers, self.places = None, _NO_PLACES
        self._watch()

    def note_assigned(self, param: FSDPParam) -> bool:
        """A user has assigned the local tensor of `param`. Returns True if none is left in the group's memory."""
        self._assigned.add(param)
        self.starts.pop(param, None)
        return self.buffers is not None and not self.keeps_storage and len(self._assigned) == len(self.params)

    def _place_shards(self, plain: tuple[ParamSpec, ...]) -> None:
        shared = self.params[: len(plain)]
        locals_ = [param.local for param in shared]
        if self.buffers is None or self.buffers.layout.specs != plain:
            self.buffers = self._allocate(gather_layout(plain, self._mesh.size, self._direct_min_bytes))
        elif self.buffers.hold(locals_):
            return  # as users' aliases have them
        else:
            self._renew_shards(self.buffers)
        for param, local in zip(shared, self.buffers.move_into_shards(locals_), strict=True):
            param.local = local

    def _find_specs(self) -> tuple[ParamSpec, ...]:
        """Of the parameters, in the order in which they are from now on."""
        spec_of = {param: param.spec(self._policy) for param in self.params}
        ordered = sorted(self.params, key=lambda param: spec_of[param].extended)
        if ordered != self.params and self._gradients.is_pending():
            raise RuntimeError(
                f"{ordered[-1].name}: how it is gathered (fsdp_pre_all_gather) can't change while gradients of its "
                "group wait to be synchronised, or are on their way. Do that between steps."
            )
        self.params[:] = ordered
        members = [param for param in ordered if spec_of[param].extended]
        self.extensions, self._looked = GroupExtensions(members, self._mesh, self._policy), False
        if self.extensions.members and self.few is not None:
            refuse_part(self.params[-1].name)
        return tuple(spec_of[param] for param in ordered)

    def _allocate(self, layout: GatherLayout) -> GroupBuffers:
        buffers = GroupBuffers(layout, self._mesh.rank, self._mesh.device, self._transfers, self.few)
        # While the storage has its size: a tensor that is put over a smaller one makes it grow, and stay.
        for i in range(len(layout.specs)):
            self.params[i].build_full(buffers.full_parameter(i))
        buffers.free()
        buffers.keeps_storage = self.keeps_storage
        return buffers

    def _renew_shards(self, buffers: GroupBuffers) -> None:
        """Have other memory for the shards: users may hold what lies in the present one, to put it back."""
        buffers.renew_shards()
        if buffers.layout.aliased:
            self.move_full()

    def move_full(self) -> None:
        """Have the full parameters over the memory that is theirs, which must be there."""
        assert self.buffers is not None, "they are there"
        with torch.inference_mode(False), torch.no_grad():
            for i in range(len(self.buffers.layout.specs)):
                self.params[i].move_full(self.buffers.full_parameter(i))

    def finish_extensions(self) -> None:
        """Extended parameters were gathered: make full ones of them."""
        if self.extensions.finish():
            was_installed = self.faces.installed
            self.faces.uninstall()
            self._follow_faces()
            if was_installed:
                self.faces.install()
        self.versions.accept()

    def _follow_faces(self) -> None:
        self._watch()
        self.follow_requires_grad()
        assert self.buffers is not None, "full faces are there"
        self._full = [param.full for param in self.params]
        self.places = self.buffers.places_of(self.params)
        self.storage_ids = frozenset([self.buffers.storage_id]) | self.extensions.storage_ids()
        self.faces.prepare(self.params)

    def _watch(self) -> None:
        """Remember what is registered where, to notice what is put there instead."""
        self._assigned.clear()
        self.faces.watch(self.params)
        self.versions.watch(self.params)
        self.meshes = list({id(mesh): mesh for mesh in (param.dtensor_spec.mesh for param in self.params)}.values())

    def keep_requires_grad(self) -> None:
        """A forward ends: what it has made of the full parameters' `requires_grad` holds for the sharded ones."""
        if self.buffers is not None and list(map(requires_grad_of, self._full)) != self.trainable:
            for param, before in zip(self.params, self.trainable, strict=True):
                if param.full.requires_grad != before:
                    param.sharded.requires_grad_(param.full.requires_grad)
            self.follow_requires_grad()

    def follow_again(self) -> None:
        """A backward begins: the forward that froze or unfroze parameters last need not be the one that it is of."""
        self.trained_others = False
        if self.buffers is not None and self.versions.trainable() != self.trainable:
            self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Have the gradients of those reduced that are trainable now."""
        before, self.trainable = self.trainable, self.versions.trainable()
        self.trained_others = bool(before) and before != self.trainable
        for param, trainable in zip(self.params, self.trainable, strict=True):
            param.full.requires_grad_(trainable)
        specs = self._specs if self.buffers is not None else ()
        self._gradients.prepare(specs, self._policy, [i for i, yes in enumerate(self.trainable) if yes])
        self.has_frozen = not all(self.trainable)
