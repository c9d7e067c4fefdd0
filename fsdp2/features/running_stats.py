"""Averages running statistics of normalisations such as BatchNorm over the ranks, each of which keeps those of its own
rows, so that all evaluate and save the same. It is a setting, not a check: it changes numbers.

Training itself normalises with the statistics of a rank's own rows, as under DDP: nn.SyncBatchNorm takes all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.comm import CommLabel
from ..engine.group import COPIED, FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import some_of
from ..engine.policy import KeepUntil
from ..engine.root import Root
from ..engine.state import names_below
from ..ranks.compare_ranks import ComparedNumbers, Comparison, RankObserver, connects, groups_of_all_ranks
from ..ranks.rank_facts import all_reduce_over
from ..torch_private.internals import local_if_any, version_of
from ..torch_private.rare_internals import set_versions

AVERAGED = "running statistics of "
"""The beginning of the name of the all-reduce that averages."""
_NAMES = ("running_mean", "running_var")


class RunningStats(RankObserver):
    """Averages the running statistics of all modules below a root, unless a user does not want that.

    Ranks average when a forward pass ends in which modules have trained: then whoever reads the statistics finds the
    average, whether or not a backward follows. Modules that checkpointing runs again in backward change them once more:
    then ranks average before they reduce gradients, instead. Whether some rank does that, ranks tell each other when
    they compare what they have (until then, they average at both times). All depends on nothing but modes and the
    order of passes, gathers and reductions, which ranks have in common. The statistics of a module that evaluates are
    left alone: a backward may be about to read them.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        # Those that may have run in training mode since ranks have averaged.
        self._changed: list[nn.Module] = []
        self._reduced: object = None
        # Ranks were out of step: what each has changed may differ, and which modules train, too, until they go on.
        self._begins_anew = False
        # All ranks take part in the forward pass that runs: they have gathered in it.
        self._has_gathered = False
        # The last pass with grad was followed by a backward pass, or that is still to come.
        self._expects_backward = self._has_backward = False
        # Some rank runs modules again in backward, or nobody knows yet. This rank has done so, or has not, since ranks
        # compared; None: it has had no backward pass.
        self._averages_in_backward = True
        self._runs_again: bool | None = None
        # What counts the passes of modules in training mode, and the versions when the last pass ended.
        self._counters = self._find_counters()
        self._versions: list[int] = []

    def pass_began(self, root: Root) -> None:
        self._has_gathered = False
        if self._has_backward:
            self._runs_again = self._runs_again or self._versions != [*map(version_of, self._counters)]

    def before_gather(self, group: FSDPParamGroup) -> None:
        self._has_gathered = self._has_gathered or group in self._groups
        if group is self._group and self._root.backward is None:
            if self._begins_anew:
                self._begins_anew, self._changed, self._reduced = False, [], None
                self._expects_backward = self._has_backward = False
                self._averages_in_backward, self._runs_again = True, None
            # A pass whose end has not averaged has had no backward either.
            if any(not module.training for module in self._changed):
                self._average(self._changed)
            self._note_training()

    def _note_training(self) -> None:
        """Notes, where all ranks do, that modules which train may run."""
        self._changed = [*dict.fromkeys([*self._changed, *self._find_training()])]

    def pass_ended(self, root: Root) -> None:
        has_grad, had_backward = torch.is_grad_enabled(), self._has_backward
        if has_grad:
            self._expects_backward, self._has_backward = had_backward, False
        waits = has_grad and self._expects_backward and self._averages_in_backward
        self._versions = [*map(version_of, self._counters)]
        if self._is_with_others():
            self._note_training()
            if self._changed and not waits:
                self._average(self._changed)

    def backward_began(self, root: Root) -> None:
        self._has_backward = self._expects_backward = True

    def before_reduce(self, group: FSDPParamGroup) -> None:
        if group is self._group and self._reduced is not group.gradients.backward_pass:
            # All forwards of this backward pass are over.
            self._reduced, self._begins_anew = group.gradients.backward_pass, False
            if self._averages_in_backward or self._changed:
                self._average(self._find_training())

    def out_of_step(self, root: Root) -> None:
        self._begins_anew = True

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        if comparison.mesh is None:
            return
        self._counters = self._find_counters()
        is_known, runs_again = self._runs_again is not None, self._runs_again or len(self._counters) < len(self._found)
        self._runs_again = None

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            (_, most), (known, _) = bounds
            if known:
                self._averages_in_backward = bool(most)

        yield comparison.mesh, ComparedNumbers("running statistics", (int(runs_again), int(is_known)), judge)

    def _is_with_others(self) -> bool:
        """Returns True if all ranks run this pass. One may be alone with parameters that a user has gathered."""
        by_hand = (group.keep_until is KeepUntil.USER or group.phase is COPIED for group in self._groups)
        return self._has_gathered or not any(by_hand)

    def _find_counters(self) -> list[Tensor]:
        """Returns the tensors in which modules count how often they have run in training mode; some may have none."""
        found = [module._buffers.get("num_batches_tracked") for module in self._found]
        return [each for each in found if each is not None and not each.is_inference()]

    @cached_property
    def _groups(self) -> list[FSDPParamGroup]:
        """The groups whose gathers all ranks share. They are known when all groups are attached."""
        return groups_of_all_ranks(self._root)

    @cached_property
    def _group(self) -> FSDPParamGroup | None:
        """The group at whose collectives ranks average."""
        return next(iter(self._groups), None)

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
        self._changed = []
        if not modules or self._mesh is None or not self._root.settings.averages_running_stats:
            return
        found: list[Any] = [module._buffers[name] for module in modules for name in _NAMES]
        buffers, mesh = [local_if_any(buffer) for buffer in found], self._mesh
        # Sums of half precision would lose more than they average.
        wide = [torch.promote_types(buffer.dtype, torch.float32) for buffer in buffers]
        flat = torch.cat([each.flatten().to(mesh.device, dtype) for each, dtype in zip(buffers, wide, strict=True)])
        comm_label = CommLabel(f"{AVERAGED}{some_of([self._found[module] for module in modules])}")
        all_reduce_over(flat, mesh.axis_groups, largest=False, comm_label=comm_label)
        flat.div_(mesh.num_ranks)
        # The normalisations' own kernels leave no trace in versions either: in training mode no backward reads them.
        versions = tuple(buffer._version for buffer in buffers)
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))
        set_versions(tuple(buffers), versions)


def make_running_stats(root: Root) -> RunningStats | None:
    """Returns the observer of a root below which modules keep running statistics; None if there are no such modules."""
    return RunningStats(root) if find_running_stats(root) else None


def find_running_stats(root: Root) -> dict[nn.Module, str]:
    """Returns the modules below the root's that keep statistics of a rank's own rows, with their names."""
    below = names_below(root.state.modules)
    return {each: name for each, name in below.items() if each._buffers and _has_own(each)}


def _has_own(module: nn.Module) -> bool:
    has = all(name in module._buffers and isinstance(module._buffers[name], Tensor) for name in _NAMES)
    return has and not isinstance(module, nn.SyncBatchNorm)
