"""Running statistics of normalisations such as BatchNorm, of which each rank keeps those of its own rows: averaged
over the ranks, so that all evaluate and save the same.

Training itself normalises with the statistics of a rank's own rows, as under DDP: nn.SyncBatchNorm takes all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import torch_compat
from ..dtensor.compat import local_if_any
from .headers import Label
from ..core.mesh import DataMesh
from .small_collectives import all_reduce_over
from ..core.state import names_below, some_of

_NAMES = ("running_mean", "running_var")


class RunningStats:
    """Those of all modules below `modules`.

    Ranks average before they reduce gradients. Forwards in training mode without a backward may come between: then they
    do before the next gather. It depends on nothing but modes and the order of gathers and reductions, which ranks have
    in common. What a module that evaluates has is left alone: a backward may be about to read it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # What a user may set.
        self.are_averaged = True
        # Those that may have run in training mode since ranks have averaged.
        self._changed: list[nn.Module] = []
        self._reduced: object = None

    def begin_anew(self) -> None:
        """Ranks were out of step: what each has changed may differ, what trains now does not."""
        self._changed, self._reduced = self._find_training(), None

    def before_gather(self, mesh: DataMesh | None) -> None:
        """A forward may follow. Every rank must call it."""
        self._average(mesh, self._changed)
        self._changed = self._find_training()

    def before_reduction(self, mesh: DataMesh | None, backward_pass: object) -> None:
        """All forwards of `backward_pass` are over. Every rank must call it; again in the same pass, to no effect."""
        if self._reduced is not backward_pass:
            self._reduced, self._changed = backward_pass, []
            self._average(mesh, self._find_training())

    @cached_property
    def _found(self) -> dict[nn.Module, str]:
        """With their names."""
        return {each: name for each, name in names_below(self._modules).items() if _has_own(each)}

    def _find_training(self) -> list[nn.Module]:
        return [module for module in self._found if module.training]

    @torch.no_grad()
    def _average(self, mesh: DataMesh | None, modules: Sequence[nn.Module]) -> None:
        if mesh is None or not modules or not self.are_averaged or mesh.num_ranks == 1:
            return
        found: list[Any] = [module._buffers[name] for module in modules for name in _NAMES]
        buffers = [local_if_any(buffer) for buffer in found]
        # Sums of half precision would lose more than they average.
        wide = [torch.promote_types(buffer.dtype, torch.float32) for buffer in buffers]
        whole = torch.cat([each.flatten().to(mesh.device, dtype) for each, dtype in zip(buffers, wide, strict=True)])
        label = Label(f"running statistics of {some_of([self._found[module] for module in modules])}")
        all_reduce_over(whole, mesh.axis_groups, largest=False, label=label)
        whole.div_(mesh.num_ranks)
        # The normalisations' own kernels leave no trace in versions either: in training mode no backward reads them.
        versions = tuple(buffer._version for buffer in buffers)
        for buffer, mean in zip(buffers, whole.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))
        torch_compat.set_versions(tuple(buffers), versions)


def _has_own(module: nn.Module) -> bool:
    """Whether it keeps statistics, of a rank's own rows."""
    has = all(isinstance(module._buffers.get(name), Tensor) for name in _NAMES)
    return has and not isinstance(module, nn.SyncBatchNorm)
