"""Compares buffers between ranks: those that ranks begin with, and those that each may compute from its own rows.

Nothing shards a buffer, and nothing synchronises it. A buffer that differs makes each rank compute something else, and
a checkpoint has the values of one rank.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import some_of
from ..engine.parameter import fqn
from ..engine.policy import ReduceWhen
from ..engine.root import Root
from ..engine.state import names_below
from ..features.running_stats import find_running_stats
from ..parameters.checksum import checksum, joint_checksum, read
from ..ranks.compare_ranks import ComparedNumbers, Comparison, compare, groups_by_mesh, widest_mesh
from ..ranks.rank_facts import all_reduce_over, gather_by_rank, ranks_of
from ..torch_private.internals import local_if_any
from .buffer_influence import Influence
from .due import RankCheck, alike

# Numbers of elements of the states of random generators, of a CPU and of CUDA: each rank has its own.
_RANDOM_STATES = (torch.get_rng_state().numel(), 16)


class _Buffer(NamedTuple):
    """A buffer, the module that has it, its name there, and if state dicts have it."""

    tensor: Tensor
    module: nn.Module
    name: str
    is_persistent: bool


class _Report(NamedTuple):
    """What a rank has under the name of a buffer. `may_differ`: it averages the buffer, or shall not. `is_in_forward`:
    the rank compares it in a forward pass.
    """

    shape: tuple[int, ...]
    dtype: str
    is_persistent: bool
    checksum: int
    may_differ: bool
    is_in_forward: bool


class Buffers(RankCheck):
    """Compares buffers between ranks: all of them at first, and later those that forwards may have changed.

    Those that ranks have built or loaded differently are an error, if state dicts have them. Others are a warning: they
    may be scratch memory, which each forward fills. Those that come to differ, since each rank computes them from its
    own rows, are an error if the output of the forward that runs depends on them, and else a warning: observers of
    quantization, for example, are right so.
    """

    _has_warned = _has_waited = False

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        root, self.at_evaluation = comparison.root, False
        self._has_waited, self.compares_next = self.compares_next, False
        of_meshes = find_buffers(root) if groups_by_mesh(root.groups) else {}
        for mesh in groups_by_mesh(root.groups):
            everything, is_anew = of_meshes.get(mesh, {}), comparison.is_anew
            drift = drifting(everything, root)
            self.at_evaluation = self.at_evaluation or bool(drift)
            chosen = {name: everything[name] for name in sorted(everything if is_anew else drift)}
            yield self._numbers_on(mesh, root, chosen, is_anew)

    def _numbers_on(
        self, mesh: DataMesh, root: Root, chosen: Mapping[str, _Buffer], is_anew: bool
    ) -> tuple[DataMesh, ComparedNumbers]:
        may_differ = _statistics(root, only_training=root.settings.averages_running_stats) if is_anew else set()
        is_in_forward = root.depth > 0 and root.backward is None

        def tell() -> dict[str, _Report]:
            sums = read([checksum(each.tensor) for each in chosen.values()])
            kinds = [(tuple(each.tensor.shape), str(each.tensor.dtype), each.is_persistent) for each in chosen.values()]
            return {
                name: _Report(*kind, total, name in may_differ, is_in_forward)
                for name, kind, total in zip(chosen, kinds, sums, strict=True)
            }

        def explain(of_ranks: Mapping[int, Mapping[str, _Report]]) -> str:
            apart = _apart(mesh, chosen, of_ranks)
            wrong = {name: text for name, text in apart.items() if is_anew and _is_persistent(name, of_ranks)}
            if wrong:
                return _differ_at_first(wrong, self._to_synchronise(mesh, root, chosen, wrong))
            apart = {name: text for name, text in apart.items() if name in chosen and _may_be_read(chosen[name])}
            if apart and is_anew:
                self._warn(apart, _AT_FIRST)
            elif apart and mesh != widest_mesh(root.groups):  # other ranks of the root know nothing of it
                self._warn(apart, f"{_SINCE} {_IF_READ}")
            elif apart and all(each.is_in_forward for reports in of_ranks.values() for each in reports.values()):
                root.add(_FollowedPass(mesh, root, {name: chosen[name] for name in apart}, apart, self._warn))
            elif apart:
                self.compares_next = not self._has_waited  # in a forward, perhaps
            return ""

        layout = [(name, tuple(each.tensor.shape), each.tensor.dtype) for name, each in chosen.items()]
        numbers = [zlib.crc32(repr(layout).encode()), joint_checksum([each.tensor for each in chosen.values()])]
        return alike("buffers", mesh, tell, explain, numbers)

    def _warn(self, apart: Mapping[str, str], text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{_shown(apart)}: {text} This is said once.", stacklevel=2)

    def _to_synchronise(
        self, mesh: DataMesh, root: Root, chosen: Mapping[str, _Buffer], apart: Mapping[str, str]
    ) -> str:
        """Returns, as code, what `sync_module_states` must get: ranks of other meshes have buffers of their own."""
        if mesh == widest_mesh(root.groups):
            return "model"
        module = next((chosen[name].module for name in apart if name in chosen), None)
        below = names_below(root.state.modules)
        names = [below.get(state.modules[0], "") for state in root.states if module in state.own_modules()]
        return f"model.get_submodule({next(iter(names), '')!r})"


class _FollowedPass(Observer):
    """Follows, until the forward pass ends that runs, if its output depends on buffers that differ between ranks.

    Args:
        mesh: the ranks that differ. All of them are in the pass.
        apart: name -> how the buffer differs.
        warn: called if no output depends on them.
    """

    def __init__(
        self,
        mesh: DataMesh,
        root: Root,
        buffers: Mapping[str, _Buffer],
        apart: Mapping[str, str],
        warn: Callable[[Mapping[str, str], str], None],
    ) -> None:
        self._mesh, self._apart, self._warn = mesh, apart, warn
        modules = {each.module for each in buffers.values()}
        around = [each for each in names_below(root.state.modules) if not modules.isdisjoint(each.modules())]
        self._influence = Influence(around, {name: (each.module, each.name) for name, each in buffers.items()})

    def detached(self, root: Root) -> None:
        self._influence.end()

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        root.remove(self)

    def pass_ended(self, root: Root) -> None:
        root.remove(self)
        influence, mesh = self._influence, self._mesh

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            if bounds[0][1]:
                names = set().union(*gather_by_rank(influence.found, mesh.axis_groups, mesh.device).values())
                apart = {name: text for name, text in self._apart.items() if name in names}
                raise RuntimeError(f"{_shown(apart)}: {_SINCE} The output of a forward depends on it. {_REDUCE}")
            if bounds[1][0]:
                self._warn(self._apart, f"{_SINCE} {_WITHOUT_HARM}")

        numbers = [int(bool(influence.found)), int(influence.has_run)]
        compare(mesh, [ComparedNumbers("influence of buffers", numbers, judge)], root)


# ---- which buffers


def find_buffers(root: Root) -> dict[DataMesh, dict[str, _Buffer]]:
    """Returns, for the mesh of each group, the buffers of the modules that belong to it, by their names.

    Ranks of the mesh share the parameters of these modules, so they must share the buffers. It leaves out: modules all
    of whose parameters are unmanaged, which are the user's own; states of random generators; buffers that are sharded
    over the same ranks; buffers without memory.
    """
    below = names_below(root.state.modules)
    mesh_of = _meshes_by_module(root)
    skipped, seen = _ignored_modules(root, below), set()
    buffers: dict[DataMesh, dict[str, _Buffer]] = {}
    for module, prefix in below.items():
        mesh = mesh_of.get(module)
        if mesh is None or module in skipped:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and _is_whole(buffer, mesh):
                seen.add(id(buffer))
                is_persistent = name not in module._non_persistent_buffers_set
                buffers.setdefault(mesh, {})[fqn(prefix, name)] = _Buffer(buffer, module, name, is_persistent)
    return buffers


def _meshes_by_module(root: Root) -> dict[nn.Module, DataMesh]:
    """Returns the mesh over which the buffers of a module are compared: that of its own parameters, or of its call."""
    meshes: dict[nn.Module, DataMesh] = {}
    for state in root.states:
        groups: list[FSDPParamGroup] = [group for group in state.groups if group.params] or state.groups
        narrowest = min((group.mesh for group in groups), key=lambda mesh: mesh.num_ranks)
        meshes.update(dict.fromkeys(state.own_modules(), narrowest))
        for group in state.groups:
            meshes.update((slot.module, group.mesh) for param in group.params for slot in param.slots)
    return meshes


def _ignored_modules(root: Root, below: dict[nn.Module, str]) -> set[nn.Module]:
    """Returns the modules that have parameters, themselves or below, but none that a group manages, and all modules
    inside them.
    """
    managed = {slot.module for group in root.groups for param in group.params for slot in param.slots}
    ignored: set[nn.Module] = set()
    for module in below:
        if module not in ignored and next(module.parameters(), None) is not None:
            inside = {*module.modules()}
            if inside.isdisjoint(managed):
                ignored |= inside
    return ignored


def _is_whole(buffer: Tensor, mesh: DataMesh) -> bool:
    if buffer.is_meta or (buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.numel() in _RANDOM_STATES):
        return False
    if not isinstance(buffer, DTensor):
        return True
    axes = [axis for axis, placement in enumerate(buffer.placements) if not placement.is_replicate()]
    own = buffer.device_mesh.get_coordinate() or ()
    for axis in axes:
        index: list[Any] = [*own]
        index[axis] = slice(None)
        if len(ranks_of(mesh).intersection(buffer.device_mesh.mesh[tuple(index)].tolist())) > 1:
            return False
    return True


def drifting(buffers: Mapping[str, _Buffer], root: Root) -> set[str]:
    """Returns the names of those that a forward may change, and that must stay the same on all ranks nevertheless.

    Buffers that no state dict has may be caches of a rank's own rows, and counters may count these; modules that some
    ranks leave out change theirs on the others only.
    """
    asked = [group for group in root.groups if group.settings.reduce_when is ReduceWhen.ASKED]
    left_out = {module for group in asked for module in group.state.own_modules()}
    statistics = _statistics(root, only_training=False)
    return {
        name
        for name, each in buffers.items()
        if each.is_persistent and name not in statistics and each.module not in left_out and _may_be_read(each)
    }


def _may_be_read(buffer: _Buffer) -> bool:
    """Returns False for a whole number by itself: a counter, the number of a rank, or of its first expert."""
    return buffer.tensor.numel() > 1 or buffer.tensor.is_floating_point() or buffer.tensor.is_complex()


def _statistics(root: Root, only_training: bool) -> set[str]:
    """Returns the names of running statistics, and of their counters, below the root; of modules that train only.

    Ranks average those of modules that train, or are told to keep their own.
    """
    return {
        fqn(prefix, name)
        for module, prefix in find_running_stats(root).items()
        if module.training or not only_training
        for name in module._buffers
    }


# ---- what differs


def _is_persistent(name: str, of_ranks: Mapping[int, Mapping[str, _Report]]) -> bool:
    return any(reports[name].is_persistent for reports in of_ranks.values() if name in reports)


def _apart(
    mesh: DataMesh, chosen: Mapping[str, _Buffer], of_ranks: Mapping[int, Mapping[str, _Report]]
) -> dict[str, str]:
    """Returns the names of those that differ by more than rounding, and how. All ranks of `mesh` must call it."""
    first = next(iter(of_ranks))
    apart: dict[str, str] = {}
    for name in sorted({name for reports in of_ranks.values() for name in reports}):
        reports = {rank: each[name] for rank, each in of_ranks.items() if name in each}
        if any(each.may_differ for each in reports.values()):
            continue
        if len(reports) < len(of_ranks):
            if _is_persistent(name, of_ranks):
                apart[name] = "is not there on all ranks"
            continue
        if len({each[:3] for each in reports.values()}) > 1:
            other = next(rank for rank, each in reports.items() if each[:3] != reports[first][:3])
            if all(each.is_persistent for each in reports.values()):
                there = [f"{reports[rank].shape} of {reports[rank].dtype} on rank {rank}" for rank in (first, other)]
                apart[name] = f"has the shape {there[0]}, and {there[1]}"
            continue
        others = [str(rank) for rank, each in reports.items() if each.checksum != reports[first].checksum]
        if others and _differs_in_value(chosen[name].tensor, mesh):
            apart[name] = f"holds other values on rank {some_of(others)} than on rank {first}"
    return apart


def _differs_in_value(buffer: Tensor, mesh: DataMesh) -> bool:
    """Returns True if ranks hold values that differ by more than rounding. All of them must call it."""
    values = local_if_any(buffer.detach())
    if not (values.is_floating_point() or values.is_complex()) or values.layout != torch.strided:
        return True
    eps = torch.finfo(values.dtype).eps
    values = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).to(mesh.device)
    wide = values.to(torch.promote_types(values.dtype, torch.float32)).flatten()
    wide = wide.nan_to_num(nan=torch.finfo(wide.dtype).max / 4)
    both = torch.cat([wide, -wide])
    all_reduce_over(both, mesh.axis_groups, largest=True)
    largest, least = both[: len(wide)], -both[len(wide) :]
    scale = torch.maximum(largest.abs(), least.abs()).amax()
    return bool(((largest - least).amax() > scale * eps ** (2 / 3)).item())


def _differ_at_first(apart: Mapping[str, str], synchronised: str) -> str:
    when = "before or after" if synchronised == "model" else "after"
    return (
        f"{_shown(apart)}: a buffer that ranks have built, or loaded, differently, so that each computes something "
        f"else. Call fsdp2.sync_module_states({synchronised}), {when} fully_shard, which gives all ranks the "
        "first one's; or set the same seed on all ranks before the model is built; or, if each rank is to have its "
        "own, register it with persistent=False."
    )


_AT_FIRST = (
    "a buffer that ranks have built differently. If a forward reads it before it writes to it, each rank computes "
    "something else: call fsdp2.sync_module_states(model), or set the same seed on all ranks before the model is "
    "built. If each forward fills it, nothing is wrong."
)
_SINCE = (
    "a buffer that was the same on all ranks, and is not any more: each rank computes it from its own rows, or has "
    "loaded it."
)
_REDUCE = (
    "All-reduce what the module writes to it (torch.distributed.all_reduce). If each rank is to have its own, register "
    "it with persistent=False."
)
_IF_READ = f"If a forward reads it, each rank computes something else. {_REDUCE}"
_WITHOUT_HARM = (
    "Training is right, as the output of no forward was found to depend on it, but a checkpoint has the values of one "
    f"rank. {_REDUCE}"
)


def _shown(apart: Mapping[str, str]) -> str:
    return f"{some_of(apart)} {next(iter(apart.values()))}"
