"""Copies the parameters and buffers of the first rank to all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from ..shards.find import before_write, check_weights, groups_managing, has_users_class, shards_of
from ..shards.protocol import NotedValues, Ranks, ShardGroup, Shards
from ..shards.ranks import bounds_over, broadcast_over, default_mesh, gather_objects, ranks_on
from ..shards.tensors import PLAIN, fqn, holds_values, inner_tensors, no_torch_function, require_module
from .audit import widest

# Bytes of the bucket in which values are sent: the memory that a call needs besides the model.
BUCKET_NBYTES = 16 * 1024 * 1024
_ALIGNMENT = 16


def sync_module_states(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Copies the parameters and buffers of the first rank to all ranks, in place.

    Call it before `fully_shard` if ranks may have built different weights, because they have different seeds or only
    one of them has loaded a checkpoint: otherwise the sharded model would consist of shards of different models.
    Every rank of the mesh must call it, on models of the same structure. Values are sent in buckets of at most 16 MiB
    (`BUCKET_NBYTES`), which is all the memory that is needed besides the model. Parameters and buffers stay the same
    objects, and are written to in place; a tied parameter is sent once. Tensors among the attributes of a parameter of
    your own class, the scales of packed values for example, are copied with it.

    After `fully_shard`, of fsdp2 or of torch, it copies the tensors that several ranks hold: buffers, parameters that
    no fully_shard call manages, replicas (HSDP, `replicate`) and scalars. Each shard exists once, so it is an error if
    the shards were cut from different weights, which is known of fsdp2's.

    Args:
        module: the model, or any part of it.
        mesh: the mesh whose ranks get the values of its first rank. None: all ranks, or, if the model is sharded, the
            ranks of its mesh. Models that differ between ranks (stages of a pipeline), or parameters that tensor
            parallelism has cut, need the axes of data parallelism, for example `mesh["dp"]`.

    Raises:
        TypeError: `module` is no module, or `mesh` no DeviceMesh.
        ValueError: this rank is not part of `mesh`; names, shapes or dtypes differ between ranks; ranks of `mesh` hold
            different shards of a DTensor. The last two are raised on all ranks, before anything is sent.
        RuntimeError: a parameter or buffer is on meta or uninitialised, or a forward or backward runs, on any rank. It
            is raised on all ranks, before anything is sent. Or the shards were cut from different weights, or were not
            written to since `to_empty`.
        NotImplementedError: a sparse or quantized tensor, or a tensor subclass without `__tensor_flatten__`.
    """
    require_module("module", module, "sync_module_states")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh is not None and mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}. Pass the mesh that it is part of.")
    groups = groups_managing(module)
    ranks = widest(groups) if mesh is None and groups else ranks_on(mesh or default_mesh())
    problem = _settle(groups)
    found: list[_Copies] = []
    known: list[NotedValues] = []
    if problem is None:
        try:
            found += _find_copies(module, ranks)
            for group in groups:
                for copies, values in _known_of_replicas(group):
                    found.append(copies)
                    known.append(values)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            problem = error
    _refuse_differences(ranks, [copies.description for copies in found], problem)
    with torch.no_grad(), no_torch_function():
        _broadcast(found, ranks.device)
    for values in known:
        values.keep()
    check_weights(groups)


class _Copies(NamedTuple):
    """Holds one parameter or buffer, of which the ranks of `groups` must hold equal copies.

    `parts`: plain tensors over its memory on this rank, several for a tensor subclass. `groups`: one process group for
    each axis of a mesh. `description`: a text that ranks compare.
    """

    parts: list[Tensor]
    groups: list[dist.ProcessGroup]
    description: str


# ---- the tensors


def _settle(groups: Sequence[ShardGroup]) -> Exception | None:
    """Reshards the groups. Returns the error that forbids it, or None."""
    for group in groups:
        if group.in_use is not None:
            return RuntimeError(
                f"sync_module_states: a forward or backward of {group} runs, or full_params has registered copies of "
                "its parameters. Call it between steps."
            )
    try:
        for group in groups:
            group.settle()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return error
    return None


def _find_copies(root: nn.Module, ranks: Ranks) -> Iterator[_Copies]:
    """Yields each distinct parameter and buffer of the modules in `root`, under the first of its names."""
    seen: set[int] = set()
    shards = shards_of(root)
    for prefix, module in root.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _copies_of(f"{kind} {fqn(prefix, name)}", tensor, ranks, shards)
                    if has_users_class(tensor) or (type(tensor) not in PLAIN and holds_values(tensor)):
                        for attribute, value in _tensors_of(tensor, seen):
                            yield _copies_of(f"attribute {fqn(prefix, name)}.{attribute}", value, ranks, shards)


def _tensors_of(owner: object, seen: set[int], depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors among the attributes of `owner`, and of objects among these: by them a user's class may read
    the values of a parameter, as the scales of packed ones.
    """
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        if id(value) in seen or isinstance(value, nn.Module | type):
            continue
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield name, value
        elif depth > 1:
            yield from ((f"{name}.{below}", each) for below, each in _tensors_of(value, seen, depth - 1))


def _copies_of(name: str, tensor: Tensor, ranks: Ranks, shards: Shards) -> _Copies:
    if isinstance(tensor, UninitializedParameter):
        raise RuntimeError(f"{name} is uninitialised. Run the lazy module once before sync_module_states.")
    description = f"{name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    groups = [*ranks.axis_groups]
    if isinstance(tensor, DTensor):
        description += f" and placements {tensor.placements}"
        groups = _groups_of_copies(name, tensor, ranks, shards)
    parts = [_writable(name, part) for part in inner_tensors(tensor)] if groups else []
    if not isinstance(tensor, DTensor):
        description += "".join(f", {tuple(part.shape)} {part.dtype}" for part in parts if part.shape != tensor.shape)
    return _Copies(parts, groups, description)


def _groups_of_copies(name: str, tensor: DTensor, ranks: Ranks, shards: Shards) -> list[dist.ProcessGroup]:
    """Returns the process groups whose ranks hold the same shard of a DTensor as this rank."""
    mesh = tensor.device_mesh
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    groups = [mesh.get_group(axis) for axis in axes if tensor.placements[axis].is_replicate()]
    if shards.find(tensor) is not None:
        return groups
    apart = [mesh.get_group(axis) for axis in axes if not tensor.placements[axis].is_replicate()]
    others = {rank for group in apart for rank in dist.get_process_group_ranks(group)} - {dist.get_rank()}
    if others & ranks.members:
        raise ValueError(
            f"{name}: ranks of {sorted(ranks.members)} hold different shards of it ({tensor.placements} on {mesh}). "
            "Pass the axes of data parallelism, for example sync_module_states(model, mesh['dp'])."
        )
    return [*groups, *(group for group in ranks.axis_groups if group not in groups)]


def _writable(name: str, part: Tensor) -> Tensor:
    """Returns a plain view of the memory of `part`, without expanded dims."""
    if part.is_meta:
        raise RuntimeError(
            f"{name} is on meta: it has no values. On each rank but the first, call model.to_empty(device=...) before; "
            "on the first, initialise or load it."
        )
    bases = type(part).__mro__[: type(part).__mro__.index(Tensor)]
    if part.layout != torch.strided or part.is_quantized or any("__torch_dispatch__" in vars(base) for base in bases):
        what = type(part).__name__ if part.layout == torch.strided and not part.is_quantized else part.layout
        raise NotImplementedError(
            f"{name}: expected dense tensors, or a tensor subclass that says what it consists of "
            f"(__tensor_flatten__), got {what}. Take it out of the module during the call, and broadcast it yourself."
        )
    with no_torch_function():
        plain = part.detach().as_subclass(Tensor)
    for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        plain = plain.narrow(dim, 0, 1) if size > 1 and stride == 0 else plain
    return plain


def _known_of_replicas(group: ShardGroup) -> Iterator[tuple[_Copies, NotedValues]]:
    """Yields the noted values of the weights from which replicas were cut, which must come from the first rank, too."""
    for noted in group.noted_values():
        replicas = [*noted.param.replicas]
        if replicas:
            yield _Copies([noted.values], replicas, f"values that {noted.param.name} was cut from"), noted


def _refuse_differences(ranks: Ranks, descriptions: Sequence[str], problem: Exception | None) -> None:
    """Raises the error of one rank on all ranks.

    Raises:
        ValueError: ranks describe their models differently.
    """
    checksum = zlib.crc32("\n".join(descriptions).encode())
    numbers = [len(descriptions), checksum, int(problem is not None)]
    (_, most), (least_sum, most_sum), (_, any_problem) = bounds_over(
        ranks, numbers, "what sync_module_states is to send"
    )
    if any_problem:
        problems = gather_objects((dist.get_rank(), problem), ranks.axis_groups, ranks.device)
        rank, error = next((rank, error) for rank, error in problems if error is not None)
        if problem is not None:
            raise problem
        raise type(error)(f"rank {rank}: {error}")
    if least_sum == most_sum:
        return
    sums = [zlib.crc32(each.encode()) for each in descriptions] + [-1] * (most - len(descriptions))
    bounds = bounds_over(ranks, sums, "parameters of the modules that sync_module_states was called with")
    index = next(i for i, (least, largest) in enumerate(bounds) if least != largest)
    own = descriptions[index] if index < len(descriptions) else "nothing more"
    of_ranks = sorted(gather_objects((dist.get_rank(), own), ranks.axis_groups, ranks.device))
    (first, expected), *_ = of_ranks
    other, got = next((rank, each) for rank, each in of_ranks if each != expected)
    raise ValueError(
        f"sync_module_states: expected the same model on all ranks, got {expected} on rank {first}, and {got} on rank "
        f"{other}. Build the same modules on all ranks; where they differ on purpose (stages of a pipeline), pass the "
        "axes of data parallelism, for example sync_module_states(model, mesh['dp'])."
    )


# ---- the broadcast


def _broadcast(found: Sequence[_Copies], device: torch.device) -> None:
    """Sends the parts from the first rank of their groups to the others. Parts with the same groups are sent together.

    `device`: the device on which ranks communicate.
    """
    of_groups: dict[tuple[str, ...], tuple[list[dist.ProcessGroup], list[Tensor]]] = {}
    for parts, groups, _ in found:
        key = tuple(group.group_name for group in groups)
        of_groups.setdefault(key, (groups, []))[1].extend(parts)
    for groups, parts in of_groups.values():
        if groups and parts:
            _broadcast_over(groups, parts, device)


def _broadcast_over(groups: Sequence[dist.ProcessGroup], parts: Sequence[Tensor], device: torch.device) -> None:
    before_write()
    is_first = all(group.rank() == 0 for group in groups)
    size = min(BUCKET_NBYTES, sum(_aligned(part.nbytes) for part in parts))
    bucket = torch.empty(size, dtype=torch.uint8, device=device)
    # The contents of the bucket: (memory in the bucket, a chunk of a part).
    packed: list[tuple[Tensor, Tensor]] = []
    used = 0

    def send() -> None:
        for memory, chunk in packed:
            memory.copy_(chunk)
        broadcast_over(bucket[:used], groups)
        for memory, chunk in packed if not is_first else ():
            with torch.inference_mode(chunk.is_inference()):
                chunk.copy_(memory)
        packed.clear()

    for part in parts:
        for chunk in _chunks(part, size // part.element_size()):
            if used + chunk.nbytes > size:
                send()
                used = 0
            memory = bucket[used : used + chunk.nbytes]
            packed.append((memory.view(chunk.dtype).view(chunk.shape), chunk))
            used = _aligned(used + chunk.nbytes)
    if packed:
        send()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _chunks(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yields views of at most `most` elements each, which together are `tensor`. Its memory may be in any order."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    rows = max(1, most * tensor.shape[dim] // tensor.numel())
    for chunk in tensor.split(rows, dim):
        yield from _chunks(chunk, most)
