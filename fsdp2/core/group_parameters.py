"""Builds a group's buffers from its modules' parameters, and rebuilds them when a user has replaced some."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import compat
from .buffers import GroupBuffers
from .events import strategies
from .gradients import GroupGradients
from .layout import GatherLayout, ParamSpec, gather_layout
from .mesh import DataMesh
from .parameter import FSDPParam
from .policy import GroupSettings
from .registration import Registration
from .streams import Transfers


class GroupParameters:
    """The parameters of one group, and what is built from them.

    `buffers`: their memory; None while they are elsewhere than on `storage_device`, on the meta device for example.
    `extension`: what gathers those that say themselves how; they are the last ones in `params`.
    `unsharded`: the unsharded parameters. `trainable`: which of them require a gradient, as far as buckets know. `storage_ids`: of the unsharded parameters.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        gradients: GroupGradients,
        mesh: DataMesh,
        storage_device: torch.device,
        transfers: Transfers | None,
    ) -> None:
        self.params, self._gradients, self.mesh = params, gradients, mesh
        self.storage_device, self._transfers = storage_device, transfers
        self.registration = Registration()
        self.buffers: GroupBuffers | None = None
        self.extension: Any = None  # see SubclassGather in ext/subclasses.py
        self.specs: tuple[ParamSpec, ...] = ()
        self.unsharded: list[nn.Parameter] = []
        self.trainable: list[bool] = []
        self.storage_ids: frozenset[int] = frozenset()
        # From how many bytes on a parameter is gathered on its own.
        self._direct_min_bytes = 0
        self._settings = GroupSettings()
        # What `make_buffers` of the strategies is given besides.
        self.buffer_options: dict[str, Any] = {}

    @property
    def plain(self) -> Sequence[FSDPParam]:
        """Those that lie in the buffers."""
        return self.params[: len(self.buffers.layout.specs)] if self.buffers is not None else ()

    # ---- building

    def build(self, settings: GroupSettings, direct_min_bytes: int) -> None:
        """Builds everything in new memory."""
        self._settings, self._direct_min_bytes, self.buffers = settings, direct_min_bytes, None
        self._rebuild()

    def use(self, settings: GroupSettings) -> None:
        """Follows the group's settings from now on."""
        self._settings = settings
        if self.buffers is not None:
            self.buffers.keeps_storage = settings.keep_storage

    def take(self, found: Sequence[tuple[FSDPParam, nn.Parameter]]) -> None:
        """Takes what users have registered in place of parameters, and rebuilds."""
        with torch.no_grad():
            for param, parameter in found:
                param.take(parameter)
        self.registration.note_replacement()
        self._rebuild()

    def _rebuild(self) -> None:
        """Builds buffers, plans and unsharded parameters from the present local tensors, if all are on the device."""
        self.registration.prepare(())
        if any(param.local.device != self.storage_device for param in self.params):
            self.give_up_memory()
            return
        self.specs = self._find_specs()
        plain = tuple(spec for spec in self.specs if not spec.extended)
        # Also when the first forward runs in inference mode: what is built here must serve training.
        with torch.inference_mode(False), torch.no_grad():
            self._place_shards(plain)
        self.follow()

    def _find_specs(self) -> tuple[ParamSpec, ...]:
        """Orders the parameters, and returns their specs."""
        spec_of = {param: param.spec(self._settings.policy) for param in self.params}
        ordered = sorted(self.params, key=lambda param: spec_of[param].extended)
        if ordered != self.params and self._gradients.is_pending():
            raise RuntimeError(
                f"{ordered[-1].name}: how it is gathered (fsdp_pre_all_gather) can't change while gradients of its "
                "group are unsynchronized, or in flight. Do that between steps."
            )
        self.params[:] = ordered
        extended, make = [param for param in ordered if spec_of[param].extended], strategies().gather_extension
        self.extension = make(extended, self, self._settings.policy) if extended and make is not None else None
        return tuple(spec_of[param] for param in ordered)

    def _place_shards(self, plain: tuple[ParamSpec, ...]) -> None:
        shared = self.params[: len(plain)]
        locals_ = [param.local for param in shared]
        if self.buffers is None or self.buffers.layout.specs != plain:
            self.buffers = self._allocate(gather_layout(plain, self.mesh.size, self._direct_min_bytes))
        elif self.buffers.hold(locals_):
            return  # as users' aliases have them
        else:
            self.buffers.renew_shards()  # users may hold what lies in the present memory, to put it back
            if self.buffers.layout.aliased:
                self.move_unsharded()
        for param, local in zip(shared, self.buffers.move_into_shards(locals_), strict=True):
            param.local = local

    def _allocate(self, layout: GatherLayout) -> GroupBuffers:
        make = strategies().make_buffers or GroupBuffers
        buffers = make(layout, self.mesh.rank, self.mesh.device, self._transfers, **self.buffer_options)
        # While the storage has its size: a tensor that is put over a smaller one makes it grow, and stay.
        for i in range(len(layout.specs)):
            self.params[i].build_unsharded(buffers.unsharded_parameter(i))
        buffers.free()
        buffers.keeps_storage = self._settings.keep_storage
        return buffers

    def move_unsharded(self) -> None:
        """Puts the unsharded parameters over their memory in the buffers, which must be allocated."""
        assert self.buffers is not None, "they are there"
        with torch.inference_mode(False), torch.no_grad():
            for i, param in enumerate(self.plain):
                param.move_unsharded(self.buffers.unsharded_parameter(i))

    def give_up_memory(self) -> None:
        """Holds no memory of the parameters, which lie elsewhere now. The next `build` allocates some."""
        self.registration.prepare(())
        if self.buffers is not None and self.buffers.layout.aliased:
            for param in self.plain:
                param.move_unsharded(None)
        self.buffers = None
        self._watch()

    def follow(self) -> None:
        """Has everything else follow the sharded and unsharded parameters that there are now."""
        assert self.buffers is not None, "unsharded parameters are there"
        self._watch()
        self.follow_requires_grad()
        self.unsharded = [param.unsharded for param in self.params]
        extended = self.extension.storage_ids() if self.extension is not None else set()
        self.storage_ids = frozenset([self.buffers.storage_id, *extended])
        self.registration.prepare(self.params)

    def _watch(self) -> None:
        self.registration.watch(self.params)
        for notify in self._gradients.group.events.rebuilt:
            notify(self._gradients.group)

    # ---- requires_grad

    def follow_requires_grad(self) -> None:
        """Plans to reduce the gradients of the parameters that require one now."""
        self.trainable = self.registration.trainable()
        for param, trainable in zip(self.params, self.trainable, strict=True):
            param.unsharded.requires_grad_(trainable)
        specs = self.specs if self.buffers is not None else ()
        self._gradients.prepare(specs, self._settings.policy, [i for i, yes in enumerate(self.trainable) if yes])

    # ---- what a tensor belongs to

    def changed_names(self, weight: Tensor, before: tuple[int, ...], now: tuple[int, ...]) -> list[str]:
        """Returns the names of parameters, of one of which `weight` is a view, whose versions differ between `before`
        and `now`; all names, if some were replaced.
        """
        if before[-1:] != now[-1:]:  # or nothing is known of before
            return [param.name for param in self.params]
        return [self.params[i].name for i in self._indices_of(weight) if before[i] != now[i]]

    def _indices_of(self, weight: Tensor) -> range:
        """Returns the indices of the parameters among which is the one that `weight` is a view of."""
        assert self.buffers is not None, "an unsharded parameter was saved"
        if self.extension is not None and compat.storage_id(weight) != self.buffers.storage_id:
            return range(len(self.plain), len(self.params))  # which of them is not known
        weight = compat.local_if_any(weight)
        i = bisect_right(self.buffers.layout.full_offsets, weight.storage_offset() * weight.element_size()) - 1
        return range(i, i + 1)


def find_replacements(group: Any, accept_whole: bool = False, may_be_untied: bool = False) -> list[Any]:
    """Returns (param, what is registered in its place now) for all parameters of `group`: the strategy of the core
    alone, which extensions replace by one that looks more closely.

    Raises:
        ValueError: nothing is there, or a parameter of another shape, or a plain tensor unless `accept_whole`.
    """
    found = []
    for param in group.params:
        parameter = param.slots[0].module._parameters.get(param.slots[0].name)
        if parameter is None or tuple(parameter.shape) != param.shape:
            got = "nothing" if parameter is None else f"shape {tuple(parameter.shape)}"
            raise ValueError(f"{param.name}: expected a parameter of global shape {param.shape}, got {got}.")
        if not accept_whole and not isinstance(parameter, DTensor):
            raise ValueError(f"{param.name}: expected a DTensor, got a plain {type(parameter).__name__}.")
        found.append((param, parameter))
    return found
