"""Compares buffers between ranks: those that ranks begin with, and those that each may compute from its own rows.

Nothing shards a buffer, and nothing synchronises it. A buffer that differs makes each rank compute something else, and
a checkpoint has the values of one rank.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.checksum import checksum, joint_checksum, read
from ..engine.compare_ranks import ComparedNumbers, Comparison, compare, groups_by_mesh, widest_mesh
from ..engine.compat import local_if_any
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.group_parameters import version_if_counted
from ..engine.mesh import DataMesh
from ..engine.owners import some_of
from ..engine.parameter import fqn
from ..engine.policy import ReduceWhen
from ..engine.rank_facts import all_reduce_over, gather_by_rank, ranks_of
from ..engine.root import Root
from ..engine.state import names_below
from ..features.running_stats import find_running_stats
from .buffer_influence import Influence
from .due import RankCheck

# Numbers of elements of the states of random generators, of a CPU and of CUDA: each rank has its own.
_RANDOM_STATES = (torch.get_rng_state().numel(), 16)


class _Buffer(NamedTuple):
    """Holds a buffer, the module and the name under which it is registered, and whether state dicts have it."""

    tensor: Tensor
    module: nn.Module
    name: str
    is_persistent: bool


class _Report(NamedTuple):
    """Says what a rank has under the name of a buffer. `is_written`, `is_read`: since ranks found that it differs.
    `is_exempt`: it may differ.
    """

    shape: tuple[int, ...]
    dtype: str
    is_persistent: bool
    checksum: int
    is_written: bool
    is_read: bool
    is_exempt: bool


class Buffers(RankCheck):
    """Compares buffers between ranks: all of them at first, later those that a forward may have changed.

    Buffers that are not persistent may be scratch memory, which each forward fills. If one differs at first, it is
    compared once more: it is an error if a forward has read it since, and no rank has written to it.

    Buffers that have come to differ, since each rank computes them from its own rows, are an error if the output of a
    forward depends on them; otherwise (observers of quantization, for example) a warning.
    """

    def __init__(self) -> None:
        self._root: Any = None
        self._suspects: dict[str, _Suspect] = {}
        # Buffers that have come to differ, and how; and the last forward that was followed from them.
        self._apart: dict[DataMesh, dict[str, str]] = {}
        self._influences: dict[DataMesh, Influence] = {}
        self._has_warned = self._has_waited = False

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        self._root, self.at_evaluation = comparison.root, False
        self._has_waited, self.compares_next = self.compares_next, False
        root, meshes = self._root, groups_by_mesh(self._root.groups)
        of_meshes = find_buffers(root) if meshes else {}
        for mesh in meshes:
            found, apart = of_meshes.get(mesh, {}), self._apart.get(mesh, {})
            names = drifting(found, root)
            self.at_evaluation = self.at_evaluation or bool(names)
            if comparison.is_anew:
                exempt = _averaged(root).union(apart)
                yield mesh, _numbers_of(root, found, partial(self._judge_first, mesh, exempt))
            else:
                names = names.union(self._suspects).difference(apart)
                chosen = {name: each for name, each in found.items() if name in names}
                yield mesh, _numbers_of(root, chosen, partial(self._judge_later, mesh), self._wait)
                if apart:
                    yield mesh, self._influence(mesh)
                yield mesh, self._follow_next(mesh, found)

    def detached(self, root: Root) -> None:
        self._drop(self._suspects)
        for each in self._influences.values():
            each.end()

    def _judge_first(self, mesh: DataMesh, exempt: set[str], chosen: Mapping[str, _Buffer], differ: bool) -> None:
        self._drop(chosen)
        of_ranks = self._gather(mesh, chosen, exempt) if differ else {}
        exempt = {name for reports in of_ranks.values() for name, each in reports.items() if each.is_exempt}
        apart = {name: text for name, text in _apart(mesh, chosen, of_ranks).items() if name not in exempt}
        persistent = {name: text for name, text in apart.items() if name not in chosen or chosen[name].is_persistent}
        if persistent:
            raise RuntimeError(_differ_at_first(persistent, self._to_synchronise(mesh, chosen, persistent)))
        for name in apart:
            tensor = chosen[name].tensor
            if tensor.numel() > 1 or tensor.is_floating_point():  # else the number of a rank, or of its first expert
                self._suspects[name] = _Suspect(chosen[name])

    def _judge_later(self, mesh: DataMesh, chosen: Mapping[str, _Buffer], differ: bool) -> None:
        of_ranks = self._gather(mesh, chosen) if differ else {}
        apart = _apart(mesh, chosen, of_ranks)
        said = [(name, each) for reports in of_ranks.values() for name, each in reports.items()]
        used = {name for name, each in said if each.is_read} - {name for name, each in said if each.is_written}
        constant = {name: text for name, text in apart.items() if name in used}
        changed = {name: text for name, text in apart.items() if name not in self._suspects}
        if constant:
            raise RuntimeError(_differ_at_first(constant, self._to_synchronise(mesh, chosen, constant)))
        self._drop(chosen)
        if changed:
            self._apart.setdefault(mesh, {}).update(changed)

    # ---- buffers that each rank computes from its own rows

    def _follow_next(self, mesh: DataMesh, found: Mapping[str, _Buffer]) -> ComparedNumbers:
        """Returns a number by which ranks know if all are in a forward; has them follow it, if some buffers differ.

        They judge it when it ends if all are in it, and otherwise the next time that they compare.
        """
        root = self._root
        is_in_forward = root.depth > 0 and root.backward is None

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            names = [name for name in self._apart.get(mesh, ()) if name in found]
            if not names:
                return
            if mesh in self._influences:
                self._influences[mesh].end()
            buffers = {name: (found[name].module, found[name].name) for name in names}
            self._influences[mesh] = Influence(_around(root, [module for module, _ in buffers.values()]), buffers)
            if bounds[0][0] and mesh == widest_mesh(root.groups):
                root.add(_AtPassEnd(partial(self._judge_now, mesh)))
            else:
                self._wait()

        return ComparedNumbers("ranks in a forward", [int(is_in_forward)], judge)

    def _wait(self) -> None:
        """Has ranks compare the next time, too, unless they do so for that reason now."""
        self.compares_next = not self._has_waited

    def _judge_now(self, mesh: DataMesh) -> None:
        if self._influences[mesh].has_run:
            self._influences[mesh].end()
        compare(mesh, [self._influence(mesh)], self._root)

    def _influence(self, mesh: DataMesh) -> ComparedNumbers:
        """Returns whether an output of this rank depends on a buffer that differs between ranks."""
        influence = self._influences.get(mesh)
        found = set() if influence is None else influence.found

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            (_, most), (_, has_run) = bounds
            texts = self._apart[mesh]
            if most:
                names = set().union(*gather_by_rank(found, mesh.axis_groups, mesh.device).values())
                raise RuntimeError(_differ_since({name: text for name, text in texts.items() if name in names}))
            if has_run and not self._has_warned:
                self._has_warned = True
                warnings.warn(_differ_without_harm(texts), stacklevel=2)

        has_run = influence is not None and influence.has_run
        return ComparedNumbers("influence of buffers", [int(bool(found)), int(has_run)], judge)

    # ---- what ranks tell each other

    def _to_synchronise(self, mesh: DataMesh, chosen: Mapping[str, _Buffer], apart: Iterable[str]) -> str:
        """Returns, as code, what `sync_module_states` must get: ranks of other meshes have buffers of their own."""
        root = self._root
        if mesh == widest_mesh(root.groups):
            return "model"
        module = next((chosen[name].module for name in apart if name in chosen), None)
        below = names_below(root.state.modules)
        names = [below.get(state.modules[0], "") for state in root.states if module in state.own_modules()]
        return f"model.get_submodule({next(iter(names), '')!r})"

    def _drop(self, names: Iterable[str]) -> None:
        for name in [*names]:
            if name in self._suspects:
                self._suspects.pop(name).unwatch()

    def _gather(
        self, mesh: DataMesh, chosen: Mapping[str, _Buffer], exempt: Container[str] = ()
    ) -> dict[int, dict[str, _Report]]:
        sums = read([checksum(each.tensor) for each in chosen.values()])
        reports = {}
        for (name, each), value in zip(chosen.items(), sums, strict=True):
            suspect, tensor = self._suspects.get(name), each.tensor
            is_written = suspect is not None and suspect.is_written(tensor)
            is_read = suspect is not None and suspect.is_read()
            shape = tuple(tensor.shape)
            of_kind = shape, str(tensor.dtype), each.is_persistent
            reports[name] = _Report(*of_kind, value, is_written, is_read, name in exempt)
        return gather_by_rank(reports, mesh.axis_groups, mesh.device)


class _AtPassEnd(Observer):
    """Calls a function at the end of the forward pass that runs, unless it fails."""

    def __init__(self, judge: Callable[[], None]) -> None:
        self._judge = judge

    def pass_ended(self, root: Root) -> None:
        root.remove(self)
        self._judge()

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        root.remove(self)


def _around(root: Root, modules: Collection[nn.Module]) -> list[nn.Module]:
    """Returns `modules` and the modules around them below the root, the outermost first."""
    return [each for each in names_below(root.state.modules) if not {*each.modules()}.isdisjoint(modules)]


class _WatchedBuffers(dict[str, Any]):
    """Replaces `module._buffers`, and notes which of them somebody reads by name: `module.name` does."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        super().__init__(buffers)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


class _Suspect:
    """Follows a buffer that differs between ranks: whether it is read, and whether it is written to."""

    def __init__(self, buffer: _Buffer) -> None:
        self._module, self._name = weakref.ref(buffer.module), buffer.name
        self._tensor, self._version = weakref.ref(buffer.tensor), version_if_counted(buffer.tensor)
        if type(buffer.module._buffers) is dict:
            buffer.module._buffers = _WatchedBuffers(buffer.module._buffers)

    def is_written(self, now: Tensor) -> bool:
        """Returns True if it was written to, or replaced by `now`."""
        return self._tensor() is not now or version_if_counted(now) != self._version

    def is_read(self) -> bool:
        """Returns True if somebody has read it since."""
        buffers: Any = getattr(self._module(), "_buffers", None)
        return not isinstance(buffers, _WatchedBuffers) or self._name in buffers.read

    def unwatch(self) -> None:
        """Puts a plain dict in place of what notes reads."""
        module = self._module()
        if module is not None and isinstance(module._buffers, _WatchedBuffers):
            module._buffers = dict(module._buffers)


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
    found: dict[DataMesh, dict[str, _Buffer]] = {}
    for module, prefix in below.items():
        mesh = mesh_of.get(module)
        if mesh is None or module in skipped:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and _is_whole(buffer, mesh):
                seen.add(id(buffer))
                is_persistent = name not in module._non_persistent_buffers_set
                found.setdefault(mesh, {})[fqn(prefix, name)] = _Buffer(buffer, module, name, is_persistent)
    return found


def _meshes_by_module(root: Root) -> dict[nn.Module, DataMesh]:
    """Returns the mesh over which the buffers of a module are compared: that of its own parameters, or of its call."""
    found: dict[nn.Module, DataMesh] = {}
    for state in root.states:
        groups: list[FSDPParamGroup] = [group for group in state.groups if group.params] or state.groups
        narrowest = min((group.mesh for group in groups), key=lambda mesh: mesh.num_ranks)
        found.update(dict.fromkeys(state.own_modules(), narrowest))
        for group in state.groups:
            found.update((slot.module, group.mesh) for param in group.params for slot in param.slots)
    return found


def _ignored_modules(root: Root, below: dict[nn.Module, str]) -> set[nn.Module]:
    """Returns the modules that are in one which has parameters, itself or below, none of which a group manages."""
    managed = {slot.module for group in root.groups for param in group.params for slot in param.slots}
    has_any: dict[nn.Module, bool] = {}
    has_managed: dict[nn.Module, bool] = {}
    for module in reversed(below):  # what is inside comes first
        children = [child for child in module._modules.values() if child is not None]
        own = any(parameter is not None for parameter in module._parameters.values())
        has_any[module] = own or any(has_any.get(child, False) for child in children)
        has_managed[module] = module in managed or any(has_managed.get(child, False) for child in children)
    ignored: set[nn.Module] = set()
    for module in below:
        if module in ignored or (has_any[module] and not has_managed[module]):
            ignored.add(module)
            ignored.update(child for child in module._modules.values() if child is not None)
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


def _averaged(root: Root) -> set[str]:
    """Returns the names of running statistics that ranks average in this step, or are told not to average."""
    return _statistics(root, only_training=root.settings.averages_running_stats)


def drifting(found: Mapping[str, _Buffer], root: Root) -> set[str]:
    """Returns the names of those that a forward may change, and that must stay the same on all ranks nevertheless.

    Buffers that no state dict has may be caches of a rank's own rows, and counters may count these; modules that some
    ranks leave out change theirs on the others only.
    """
    modules = [module for group in root.groups if _is_asked(group) for module in group.state.own_modules()]
    below, left_out = names_below(root.state.modules), _statistics(root, only_training=False)
    asked = {fqn(below[module], name) for module in modules if module in below for name in module._buffers}
    return {
        name
        for name, each in found.items()
        if each.is_persistent
        and name not in left_out
        and name not in asked
        and (each.tensor.numel() > 1 or each.tensor.is_floating_point() or each.tensor.is_complex())
    }


def _is_asked(group: FSDPParamGroup) -> bool:
    return group.settings.reduce_when is ReduceWhen.ASKED


def _statistics(root: Root, only_training: bool) -> set[str]:
    """Returns the names of running statistics, and of their counters, below the root; of modules that train only."""
    return {
        fqn(prefix, name)
        for module, prefix in find_running_stats(root).items()
        if module.training or not only_training
        for name in module._buffers
    }


# ---- what ranks compare


def _numbers_of(
    root: Root,
    chosen: Mapping[str, _Buffer],
    judge: Callable[[Mapping[str, _Buffer], bool], None],
    wait: Callable[[], None] = lambda: None,
) -> ComparedNumbers:
    """Returns a checksum of `chosen`, and whether gradients are accumulated: a user may average buffers with them.

    `judge`: called with `chosen`, and True if ranks differ, unless they accumulate. `wait`: called if they differ, and
    accumulate.
    """
    is_pending = any(group.gradients.is_pending() for group in root.groups)
    names = sorted(chosen)
    layout = [(name, tuple(chosen[name].tensor.shape), chosen[name].tensor.dtype) for name in names]

    def judge_bounds(bounds: Sequence[tuple[int, int]]) -> None:
        *sums, (_, pending) = bounds
        differ = any(least != most for least, most in sums)
        if not pending:
            judge(chosen, differ)
        elif differ:
            wait()

    total = joint_checksum([chosen[name].tensor for name in names])
    return ComparedNumbers("buffers", [zlib.crc32(repr(layout).encode()), total, int(is_pending)], judge_bounds)


def _apart(
    mesh: DataMesh, chosen: Mapping[str, _Buffer], of_ranks: Mapping[int, Mapping[str, _Report]]
) -> dict[str, str]:
    """Returns the names of those that differ by more than rounding, and how. All ranks of `mesh` must call it."""
    first = next(iter(of_ranks), 0)
    apart: dict[str, str] = {}
    for name in sorted({name for reports in of_ranks.values() for name in reports}):
        reports = {rank: found.get(name) for rank, found in of_ranks.items()}
        if None in reports.values():
            if any(each is not None and each.is_persistent for each in reports.values()):
                apart[name] = "is not there on all ranks"
            continue
        kinds = {rank: each[:3] for rank, each in reports.items() if each is not None}
        if len(set(kinds.values())) > 1:
            other = next(rank for rank, kind in kinds.items() if kind != kinds[first])
            if all(kind[2] for kind in kinds.values()):
                there = [f"{kinds[rank][0]} of {kinds[rank][1]} on rank {rank}" for rank in (first, other)]
                apart[name] = f"has the shape {there[0]}, and {there[1]}"
            continue
        sums = {rank: each.checksum for rank, each in reports.items() if each is not None}
        others = [str(rank) for rank, value in sums.items() if value != sums[first]]
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
        f"first one's; or set the same seed on all ranks before the model is built. {_OWN}"
    )


def _differ_since(apart: Mapping[str, str]) -> str:
    return (
        f"{_shown(apart)}: a buffer that was the same on all ranks, and is not any more: each rank has written what it "
        "computed from its own rows, or loaded, and the output of a forward depends on it. All-reduce that in the "
        f"module, before it writes (torch.distributed.all_reduce). {_OWN}"
    )


def _differ_without_harm(apart: Mapping[str, str]) -> str:
    return (
        f"{_shown(apart)}: each rank computes this buffer from its own rows. Training is right, as the output of no "
        "forward was found to depend on it. But a checkpoint has the values of one rank. All-reduce that in the "
        f"module, before it writes (torch.distributed.all_reduce). {_OWN} This is said once."
    )


_OWN = (
    "If each rank is to have its own, register it with persistent=False and write it in forward, or call "
    'fsdp2.set_checks("off", "buffers").'
)


def _shown(apart: Mapping[str, str]) -> str:
    return f"{some_of(apart)} {next(iter(apart.values()))}"
