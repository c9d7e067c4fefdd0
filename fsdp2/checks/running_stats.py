"""Averages running statistics of normalisations such as BatchNorm over the ranks, each of which keeps those of its own
rows, so that all evaluate and save the same. It is a setting, not a check: it changes numbers.

Training itself normalises with the statistics of a rank's own rows, as under DDP: nn.SyncBatchNorm takes all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.comm import Purpose
from ..core.compat import local_if_any
from ..core.events import Observer
from ..core.group import FSDPParamGroup
from ..core.mesh import DataMesh
from ..core.state import names_below
from ..ext.compat import set_versions
from ..ext.owners import some_of
from ..ext.rank_facts import all_reduce_over
from .compare_ranks import connects
from .observers import group_of_all_ranks

SETTING = "average_running_stats"
"""What `set_running_stats_averaging` sets among the `extras` of the root's settings."""
_NAMES = ("running_mean", "running_var")


class RunningStats(Observer):
    """Averages the running statistics of all modules below a root, unless a user does not want that.

    Ranks average before they reduce gradients. Forwards in training mode without a backward may come between: then they
    do before the next gather. It depends on nothing but modes and the order of gathers and reductions, which ranks have
    in common. The statistics of a module that evaluates are left alone: a backward may be about to read them.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # Those that may have run in training mode since ranks have averaged.
        self._changed: list[nn.Module] = []
        self._reduced: object = None
        # Ranks were out of step: what each has changed may differ, and which modules train, too, until they go on.
        self._begins_anew = False

    def before_gather(self, group: FSDPParamGroup) -> None:
        if group is self._group:
            if self._begins_anew:
                self._begins_anew, self._changed, self._reduced = False, self._find_training(), None
            self._average(self._changed)
            self._changed = self._find_training()

    def before_reduce(self, group: FSDPParamGroup) -> None:
        if group is self._group and self._reduced is not group.gradients.backward_pass:
            # All forwards of this backward pass are over.
            self._reduced, self._changed, self._begins_anew = group.gradients.backward_pass, [], False
            self._average(self._find_training())

    def out_of_step(self, root: Any) -> None:
        self._begins_anew = True

    @cached_property
    def _group(self) -> FSDPParamGroup | None:
        """The group at whose collectives ranks average. It is known when all groups are attached."""
        return group_of_all_ranks(self._root)

    @cached_property
    def _mesh(self) -> DataMesh | None:
        """The mesh whose ranks average; None if it connects no ranks."""
        assert self._group is not None, "it communicates"
        mesh = self._group.mesh
        return mesh if mesh.num_ranks > 1 and connects(mesh) else None

    @cached_property
    def _found(self) -> dict[nn.Module, str]:
        return find_running_stats(self._root)

    def _find_training(self) -> list[nn.Module]:
        return [module for module in self._found if module.training]

    @torch.no_grad()
    def _average(self, modules: Sequence[nn.Module]) -> None:
        if not modules or self._mesh is None or not self._root.settings.extras.get(SETTING, True):
            return
        found: list[Any] = [module._buffers[name] for module in modules for name in _NAMES]
        buffers, mesh = [local_if_any(buffer) for buffer in found], self._mesh
        # Sums of half precision would lose more than they average.
        wide = [torch.promote_types(buffer.dtype, torch.float32) for buffer in buffers]
        flat = torch.cat([each.flatten().to(mesh.device, dtype) for each, dtype in zip(buffers, wide, strict=True)])
        purpose = Purpose(f"running statistics of {some_of([self._found[module] for module in modules])}")
        all_reduce_over(flat, mesh.axis_groups, largest=False, purpose=purpose)
        flat.div_(mesh.num_ranks)
        # The normalisations' own kernels leave no trace in versions either: in training mode no backward reads them.
        versions = tuple(buffer._version for buffer in buffers)
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))
        set_versions(tuple(buffers), versions)


def make_running_stats(root: Any) -> RunningStats | None:
    """Returns the observer of a root below which modules keep running statistics; None if there are no such modules."""
    return RunningStats(root) if find_running_stats(root) else None


def find_running_stats(root: Any) -> dict[nn.Module, str]:
    """Returns the modules below the root's that keep statistics of a rank's own rows, with their names."""
    below = names_below(root.state.modules)
    return {each: name for each, name in below.items() if each._buffers and _has_own(each)}


def _has_own(module: nn.Module) -> bool:
    has = all(name in module._buffers and isinstance(module._buffers[name], Tensor) for name in _NAMES)
    return has and not isinstance(module, nn.SyncBatchNorm)
