"""What is wrong with a sharded model and its optimizer before it shows in the loss.

Each rank looks at what it holds, and sends what it found and a checksum of each of its tensors to the others. What to
make of these is computed from the same facts on every rank.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import context
from ..checks.checksum import checksum, read, values_of
from ..checks.partial_settings import find_partial
from ..core.mesh import DataMesh
from ..core.parameter import SHARDED_AS, FSDPParam, fqn
from ..checks.small_collectives import gather_objects
from ..core.state import FSDPState, data_mesh_of, states_below
from ..checks.unsynchronized import UnsyncedGrad
from .finding import Finding, compare_layouts, compare_sums, merge


def check(model: nn.Module, optimizer: Any = None) -> list[Finding]:
    """Look for what trains on without an error and gives wrong weights. Every rank of the model's mesh must call it.

    Found are: parameters and buffers left on meta, or without values since `to_empty` (as far as version counters
    tell); NaN and infinity in weights and gradients; gradients that wait to be synchronised; divisors of gradients and
    functions of the user's that reach only a part of the model; trainable parameters that no group manages; an
    optimizer that holds others than the model's, lacks some or has one twice; modules, dtypes, flags or settings that
    differ among ranks; weights that differ, bit by bit, where they should be the same; and, as notes, buffers that do,
    and weights that do so among the ranks of tensor parallelism.

    Call it before the first step, and between steps where something looks wrong. It reads every shard and gradient, no
    full parameter, and gathers a checksum of each from every rank: two small collectives per axis of the mesh, four
    where layouts differ; also over the axes of tensor parallelism.

    Args:
        model: sharded itself, or with sharded modules inside.
        optimizer: one, or several; anything with `param_groups`. None: not looked at.

    Returns:
        The same list on every rank, empty if nothing was found.

    Raises:
        TypeError: not an nn.Module, or an optimizer without param_groups.
        ValueError: nothing in `model` is sharded.
    """
    states = sharded_states(model)
    mesh = data_mesh_of(states)
    tensors = list(tensors_of(model, states))
    layout = _layout(model, states, tensors)
    digest = hashlib.blake2b(repr(sorted(layout.items())).encode()).hexdigest()
    found = _find_in_values(tensors, states) | _find_in_optimizers(tensors, _optimizers(optimizer))
    report = _Report(dist.get_rank(), min(mesh.ranks), found, digest, _read_sums(tensors, mesh))
    groups = [*mesh.axis_groups, *_model_parallel_groups(states, mesh)]
    reports = {each.rank: each for each in gather_objects(report, groups, mesh.device)}
    findings = merge({rank: each.found for rank, each in reports.items()})
    if len({each.digest for each in reports.values()}) == 1:
        names = [(held.name, held.kind) for held in tensors]
        sums = {rank: each.sums for rank, each in reports.items()}
        return findings + compare_sums(names, sums, {rank: each.batch for rank, each in reports.items()})
    layouts = gather_objects((report.rank, layout), groups, mesh.device)
    return findings + compare_layouts(dict(layouts))


def _model_parallel_groups(states: Sequence[FSDPState], data: DataMesh) -> list[dist.ProcessGroup]:
    """Of this rank's, along axes of parameters' meshes, those that connect it with ranks which get the same rows."""
    meshes = dict.fromkeys(mesh for state in states for mesh in state.group.adopted.meshes)
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    found = {tuple(dist.get_process_group_ranks(group)): group for group in groups}
    return [group for ranks, group in sorted(found.items()) if not data.ranks.issuperset(ranks)]


def _log_findings(root: FSDPState) -> None:
    """What `check` finds, logged by the first rank. Every rank must call it."""
    findings = [finding for module in root.modules for finding in check(module)]
    if root.group.mesh.is_first:
        for finding in findings:
            logging.getLogger("fsdp2").warning(f"before the first forward: {finding}")


context.audits.append(_log_findings)


def sharded_states(model: Any) -> list[FSDPState]:
    """All states in `model`.

    Raises:
        TypeError, ValueError: see `check`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got a {type(model).__name__}")
    states = list(dict.fromkeys(states_below(model)))
    if not states:
        raise ValueError(
            f"model: expected a module that fully_shard was applied to, or one with such modules inside, "
            f"got a {type(model).__name__} without"
        )
    return states


# ---- what a rank holds


class Held(NamedTuple):
    """A tensor of the model, as registered on this rank.

    `kind`: "parameter", "unmanaged" (a parameter too) or "buffer".
    `param`: that of a group, if one manages it.
    """

    name: str
    kind: str
    tensor: Tensor
    param: FSDPParam | None = None


class _Report(NamedTuple):
    """What a rank tells the others.

    `batch`: a number of the ranks that train on one batch with it, each on its rows.
    `found`: names by kind.
    `sums`: which part of each tensor it has, and the checksum of that.
    """

    rank: int
    batch: int
    found: dict[str, list[str]]
    digest: str
    sums: list[tuple[int, int]]


def tensors_of(model: nn.Module, states: Sequence[FSDPState]) -> Iterator[Held]:
    """Each once, by its first name. Of managed parameters the sharded face, whichever is registered now."""
    managed = {(slot.module, slot.name): param for s in states for param in s.group.params for slot in param.slots}
    seen: set[Any] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            param = managed.get((module, name))
            key = param or parameter
            if parameter is not None and key not in seen:
                seen.add(key)
                tensor = parameter if param is None else param.sharded
                kind = "unmanaged" if param is None else "parameter"
                yield Held(fqn(prefix, name), kind, tensor, param)
    yield from (Held(name, "buffer", buffer) for name, buffer in model.named_buffers())


def _layout(model: nn.Module, states: Sequence[FSDPState], tensors: Sequence[Held]) -> dict[str, str]:
    """Name -> what must be the same on every rank."""
    layout = {f"module {name or 'root'}": f"training={module.training}" for name, module in model.named_modules()}
    for held in tensors:
        tensor = held.tensor
        lies = f" {tensor.placements} on {tuple(tensor.device_mesh.shape)}" if isinstance(tensor, DTensor) else ""
        text = f"{tuple(tensor.shape)} {tensor.dtype}{lies} requires_grad={tensor.requires_grad}"
        layout[f"{'buffer' if held.kind == 'buffer' else 'parameter'} {held.name}"] = text
    for i, state in enumerate(states):
        own = state.group.gradients
        layout[f"group {i} {state}"] = (
            f"{len(state.group.params)} parameters, sync={own.synchronise}, all_reduce={own.reduction.all_reduce}, "
            f"divisor={own.reduction.divisor}, {state.policy}"
        )
    return layout


def _find_in_values(tensors: Sequence[Held], states: Sequence[FSDPState]) -> dict[str, list[str]]:
    parameters = [held for held in tensors if held.kind != "buffer"]
    gradients = [(held.name, held.tensor.grad) for held in parameters]
    waiting = [name for name, gradient in gradients if isinstance(gradient, UnsyncedGrad)]
    reduced = [(name, gradient) for name, gradient in gradients if gradient is not None and name not in set(waiting)]
    unwritten: set[Any] = {param for state in states for param in state.group.versions.unwritten()}
    unwritten |= {buffer for state in states for buffer in state.group.empty_buffers.unwritten()}
    alone = all(state.group.mesh.num_ranks == 1 for state in states)
    return {
        "on meta": [held.name for held in tensors if held.tensor.is_meta],
        "unwritten": [held.name for held in tensors if (held.param or held.tensor) in unwritten],
        "not finite": _not_finite((held.name, held.tensor) for held in parameters),
        "gradients not finite": _not_finite(reduced),
        "unsynced": waiting,
        **find_partial(states),
        "unmanaged": [h.name for h in tensors if h.kind == "unmanaged" and h.tensor.requires_grad and not alone],
    }


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    names, flags = [], []
    for name, tensor in tensors:
        for part in values_of(tensor):
            if part.is_floating_point() or part.is_complex():
                names.append(name)
                flags.append((part.float() if part.element_size() == 1 else part).isfinite().all().logical_not())
    return list(dict.fromkeys(name for name, flag in zip(names, read(flags), strict=True) if flag))


# ---- optimizers


def _optimizers(given: Any) -> list[Any]:
    several = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    if not all(hasattr(each, "param_groups") for each in several):
        raise TypeError(f"optimizer: expected an optimizer or several, with param_groups, got {given!r}")
    return several


def _find_in_optimizers(tensors: Sequence[Held], optimizers: Sequence[Any]) -> dict[str, list[str]]:
    if not optimizers:
        return {}
    parameters = {held.tensor: held for held in tensors if held.kind != "buffer"}
    places: dict[Tensor, list[str]] = {}
    for i, optimizer in enumerate(optimizers):
        prefix = f"optimizer {i}, " if len(optimizers) > 1 else ""
        for j, group in enumerate(optimizer.param_groups):
            for k, tensor in enumerate(group["params"]):
                places.setdefault(tensor, []).append(f"{prefix}param_groups[{j}][{k}]")
    strangers = [_describe(place, tensor) for tensor, (place, *_) in places.items() if tensor not in parameters]
    lacking = [h.name for t, h in parameters.items() if h.param and t.requires_grad and t not in places]
    twice = [parameters[t].name for t, several in places.items() if t in parameters and len(several) > 1]
    return {"optimizer holds strangers": strangers, "optimizer lacks": lacking, "optimizer holds twice": twice}


def _describe(place: str, tensor: Tensor) -> str:
    origin = getattr(tensor, SHARDED_AS, None)
    what = f"what was {origin} before fully_shard" if origin else f"a {type(tensor).__name__} {tuple(tensor.shape)}"
    return f"{place}, {what}"


# ---- what ranks tell each other


def _read_sums(tensors: Sequence[Held], data: DataMesh) -> list[tuple[int, int]]:
    sums = read([checksum(held.tensor) for held in tensors])
    return [(_part(held.tensor, data), value) for held, value in zip(tensors, sums, strict=True)]


def _part(tensor: Tensor, data: DataMesh) -> int:
    """The same number on ranks that should hold the same values: which part of a sharded tensor this rank has."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh, axes = tensor.device_mesh, enumerate(tensor.placements)
    place = tuple(mesh.get_local_rank(axis) for axis, placement in axes if not placement.is_replicate())
    ranks = tuple(mesh.mesh.flatten().tolist())
    # What is cut among all that train on one batch is the same on other ranks that get the same rows.
    return hash(((ranks if data.ranks.difference(ranks) else ()), place))
