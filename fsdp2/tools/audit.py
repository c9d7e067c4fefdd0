"""Looks for what is wrong with a sharded model and its optimizer before it shows in the loss.

Each rank examines what it holds, and sends what it found and a checksum of each of its tensors to the others. All ranks
then make the same findings of the same reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards.find import is_sharded_by_fsdp1, is_unsynchronized, sharded_name_of, shards_of
from ..shards.protocol import Ranks, ShardGroup, ShardParam, Shards
from ..shards.ranks import gather_objects
from ..shards.tensors import checksum, fqn, local_states, lost_states, read, require_module, values_of, written_by_some
from .finding import Finding, compare_layouts, compare_sums, merge


def check(model: nn.Module, optimizer: Any = None) -> list[Finding]:
    """Looks for what trains on without an error and gives wrong weights. Every rank of the model's mesh must call it.

    It takes models of torch's FSDP2, too, and then finds the same but for what that does not tell: unsynchronized
    gradients, settings, what `to_empty` has left, and what frozen parameters were written to.

    It finds: parameters and buffers left on meta, or without values since `to_empty` (as far as version counters
    tell); NaN and infinity in weights and gradients; unsynchronized gradients; divisors of gradients and functions of
    the user's that reach only a part of the model; trainable parameters that no group manages; an optimizer that holds
    others than the model's, lacks some or has one twice, whose states are plain tensors of each rank's rows, or belong
    to tensors that it does not step; modules, their order, dtypes, flags (requires_grad) or
    settings that differ among ranks; frozen parameters that some ranks only have written to; weights that differ, bit
    by bit, where they should be the same; and, as notes, buffers that differ, and weights that differ among the ranks
    of tensor parallelism.

    Call it before the first step, and between steps where something looks wrong. It reads every shard and gradient, but
    no unsharded parameter, and gathers a checksum of each from every rank: two small collectives per axis of the mesh,
    four where layouts differ; also over the axes of tensor parallelism.

    Args:
        model: a sharded module, or one with sharded modules inside.
        optimizer: one, or several; anything with `param_groups`. None: no optimizer is examined.

    Returns:
        The same list on every rank, empty if nothing was found.

    Raises:
        TypeError: not an nn.Module, or an optimizer without param_groups.
        ValueError: nothing in `model` is sharded.
    """
    shards = sharded(model, "check")
    groups, ranks = shards.groups, widest(shards.groups)
    everything = list(tensors_of(model, groups))
    tensors = [held for held in everything if not is_sharded_by_fsdp1(held.tensor)]
    layout = _layout(model, groups, tensors)
    digest = hashlib.blake2b(repr(sorted(layout.items())).encode()).hexdigest()
    found = _find_in_values(tensors, shards) | _find_in_optimizers(everything, _optimizers(optimizer))
    sums, written = _read_sums(tensors, ranks), shards.frozen_writes()
    report = _Report(dist.get_rank(), min(ranks.members), found, digest, sums, written)
    axes = [*ranks.axis_groups, *_model_parallel_axes(groups, ranks)]
    reports = {each.rank: each for each in gather_objects(report, axes, ranks.device)}
    for name, apart in written_by_some({rank: each.written for rank, each in sorted(reports.items())}).items():
        for rank in apart:
            reports[rank].found.setdefault("written on some ranks", []).append(name)
    findings = merge({rank: each.found for rank, each in reports.items()})
    if len({each.digest for each in reports.values()}) == 1:
        names = [(held.name, held.kind) for held in tensors]
        of_ranks = {rank: each.sums for rank, each in reports.items()}
        return findings + compare_sums(names, of_ranks, {rank: each.batch for rank, each in reports.items()})
    layouts = gather_objects((report.rank, layout), axes, ranks.device)
    return findings + compare_layouts(dict(layouts))


def _model_parallel_axes(groups: Sequence[ShardGroup], data: Ranks) -> list[dist.ProcessGroup]:
    """Returns this rank's process groups, along axes of parameters' meshes, with ranks that get the same rows."""
    params: list[Any] = [param.parameter for group in groups for param in group.params]
    meshes = {id(mesh): mesh for mesh in (param.device_mesh for param in params)}
    axes = [mesh.get_group(axis) for mesh in meshes.values() for axis in range(mesh.ndim)]
    found = {tuple(dist.get_process_group_ranks(axis)): axis for axis in axes}
    return [axis for ranks, axis in sorted(found.items()) if not data.members.issuperset(ranks)]


def sharded(model: Any, function: str) -> Shards:
    """Returns the shards of a model, with the sharded parameters registered. `function`: the public one that asks.

    Raises:
        TypeError: it is no module.
        ValueError: nothing in it is sharded.
    """
    require_module("model", model, function)
    shards = shards_of(model)
    if not shards.groups:
        raise ValueError(
            f"model: expected a module that fully_shard was applied to, or one with such modules inside, "
            f"got a {type(model).__name__} without"
        )
    return shards


def widest(groups: Sequence[ShardGroup]) -> Ranks:
    """Returns the ranks of the group that has most: those that train on one batch."""
    return max((group.ranks for group in groups), key=lambda ranks: ranks.num_ranks)


# ---- what a rank holds


class Held(NamedTuple):
    """A tensor of the model, as it is registered on this rank.

    `kind`: "parameter", "unmanaged" (a parameter too) or "buffer".
    `param`: what there is to know of a managed parameter, else None.
    """

    name: str
    kind: str
    tensor: Tensor
    param: ShardParam | None = None


class _Report(NamedTuple):
    """What a rank sends to the others.

    `batch`: a number that is the same on all ranks that train on one batch, each on its rows.
    `found`: kind of finding -> names.
    `digest`: the digest of all that must be the same on every rank.
    `sums`: for each tensor, a number for the part of it that the rank holds, and the checksum of that part.
    `written`: name of a frozen parameter -> True if the rank has written to it since ranks last compared it.
    """

    rank: int
    batch: int
    found: dict[str, list[str]]
    digest: str
    sums: list[tuple[int, int]]
    written: dict[str, bool]


def tensors_of(model: nn.Module, groups: Sequence[ShardGroup]) -> Iterator[Held]:
    """Yields each parameter and buffer once, by its first name. It yields the sharded parameter of a managed one, also
    while the unsharded one is registered.
    """
    managed = {slot: param for group in groups for param in group.params for slot in param.slots}
    seen: set[Any] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            param = managed.get((module, name))
            key = param or parameter
            if parameter is not None and key not in seen:
                seen.add(key)
                tensor = parameter if param is None else param.parameter
                kind = "unmanaged" if param is None else "parameter"
                yield Held(fqn(prefix, name), kind, tensor, param)
    yield from (Held(name, "buffer", buffer) for name, buffer in model.named_buffers())


def _layout(model: nn.Module, groups: Sequence[ShardGroup], tensors: Sequence[Held]) -> dict[str, str]:
    """Returns name -> a description that must be the same on every rank."""
    layout = {f"module {name or 'root'}": f"training={module.training}" for name, module in model.named_modules()}
    position = {param: f" at {i} of {group}" for group in groups for i, param in enumerate(group.params)}
    for held in tensors:
        tensor = held.tensor
        lies = f" {tensor.placements} on {tuple(tensor.device_mesh.shape)}" if isinstance(tensor, DTensor) else ""
        place = position[held.param] if held.param is not None else ""
        text = f"{tuple(tensor.shape)} {tensor.dtype}{lies} requires_grad={tensor.requires_grad}{place}"
        layout[f"{'buffer' if held.kind == 'buffer' else 'parameter'} {held.name}"] = text
    for i, group in enumerate(groups):
        layout[f"group {i} {group}"] = f"{len(group.params)} parameters, {group.settings_text}"
    return layout


def _find_in_values(tensors: Sequence[Held], shards: Shards) -> dict[str, list[str]]:
    parameters = [held for held in tensors if held.kind != "buffer"]
    gradients = [(held.name, held.tensor.grad) for held in parameters]
    unsynchronized = [name for name, gradient in gradients if is_unsynchronized(gradient)]
    left_out = set(unsynchronized)
    reduced = [(name, gradient) for name, gradient in gradients if gradient is not None and name not in left_out]
    unwritten = {*map(id, shards.unwritten())}
    alone = all(group.ranks.num_ranks == 1 for group in shards.groups)
    return {
        "on meta": [held.name for held in tensors if held.tensor.is_meta],
        "unwritten": [held.name for held in tensors if id(held.tensor) in unwritten],
        "not finite": _not_finite((held.name, held.tensor) for held in parameters),
        "gradients not finite": _not_finite(reduced),
        "unsynchronized": unsynchronized,
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
    positions: dict[Tensor, list[str]] = {}
    for i, optimizer in enumerate(optimizers):
        prefix = f"optimizer {i}, " if len(optimizers) > 1 else ""
        for j, group in enumerate(optimizer.param_groups):
            for k, tensor in enumerate(group["params"]):
                positions.setdefault(tensor, []).append(f"{prefix}param_groups[{j}][{k}]")
    strangers = [_describe(first, tensor) for tensor, (first, *_) in positions.items() if tensor not in parameters]
    lacking = [h.name for t, h in parameters.items() if h.param and t.requires_grad and t not in positions]
    twice = [parameters[t].name for t, several in positions.items() if t in parameters and len(several) > 1]
    own = [(parameters.get(t), name) for optimizer in optimizers for t, name in local_states(optimizer)]
    lost = [tensor for optimizer in optimizers for tensor in lost_states(optimizer)]
    return {
        "optimizer holds strangers": strangers,
        "optimizer lacks": lacking,
        "optimizer holds twice": twice,
        "optimizer has states that are no DTensors": [
            f"{name} of {held.name}" for held, name in own if held is not None
        ],
        "optimizer has states of strangers": [f"a tensor of shape {tuple(tensor.shape)}" for tensor in lost],
    }


def _describe(position: str, tensor: Tensor) -> str:
    origin = sharded_name_of(tensor)
    what = f"what was {origin} before fully_shard" if origin else f"a {type(tensor).__name__} {tuple(tensor.shape)}"
    return f"{position}, {what}"


# ---- what ranks tell each other


def _read_sums(tensors: Sequence[Held], data: Ranks) -> list[tuple[int, int]]:
    sums = read([checksum(held.tensor) for held in tensors])
    return [(_part(held.tensor, data), value) for held, value in zip(tensors, sums, strict=True)]


def _part(tensor: Tensor, data: Ranks) -> int:
    """Returns a number for the part of a sharded tensor that this rank holds. It is the same on ranks that should hold
    the same values.
    """
    if not isinstance(tensor, DTensor):
        return 0
    mesh, axes = tensor.device_mesh, enumerate(tensor.placements)
    coordinate = tuple(mesh.get_local_rank(axis) for axis, placement in axes if not placement.is_replicate())
    ranks = tuple(mesh.mesh.flatten().tolist())
    # What is cut among all that train on one batch is the same on other ranks that get the same rows.
    return hash(((ranks if data.members.difference(ranks) else ()), coordinate))
