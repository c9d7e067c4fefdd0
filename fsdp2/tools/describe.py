"""Describes how a model is sharded: a table of its groups (`describe`), and a note in `print(model)`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.buckets import codecs_of
from ..engine.compat import local_of
from ..engine.group import FSDPParamGroup
from ..engine.owners import owners_by_id
from ..engine.parameter import fqn
from ..engine.policy import GroupSettings
from ..engine.state import STATE, FSDPState, groups_below, modules_below
from ..features.conditional import is_conditional

__all__ = ["GroupDescription", "ModelDescription", "describe"]
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_HEADS = [
    "group",
    "class",
    "params",
    "elements",
    "stored/computed/reduced",
    "resting",
    "gathered",
    "reduced",
    "ranks",
    "settings",
]
_RIGHT = {2, 3, 5, 6, 7, 8}


@dataclass(frozen=True)
class GroupDescription:
    """Describes one group: the parameters that are gathered and reduced together.

    Args:
        name: FQN of the (first) module, "root" for the root's own group.
        modules: FQNs of the modules that one `fully_shard` call has got.
        cls: name of the class of the first one, before it was sharded.
        parameters: FQNs of the parameters; of tied ones, the first.
        num_frozen: how many of these do not require a gradient.
        numel: elements of all whole parameters (under tensor parallelism: of those that the ranks share).
        dtypes: the dtypes in which parameters are stored, computed with and reduced; several of each are possible.
        resting_nbytes: bytes of this rank's shards.
        gathered_nbytes: bytes of the unsharded parameters, padding included.
        reduced_nbytes: bytes of the gradients of trainable parameters, in the dtypes in which they travel.
        num_shards: how many ranks share the parameters.
        num_replicas: how many groups of such ranks there are.
        settings: what was chosen for the group and differs from the default, as text.
    """

    name: str
    modules: tuple[str, ...]
    cls: str
    parameters: tuple[str, ...]
    num_frozen: int
    numel: int
    dtypes: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...], tuple[torch.dtype, ...]]
    resting_nbytes: int
    gathered_nbytes: int
    reduced_nbytes: int
    num_shards: int
    num_replicas: int
    settings: tuple[str, ...]

    def _cells(self) -> tuple[str, ...]:
        frozen = f" ({self.num_frozen} frozen)" if self.num_frozen else ""
        replicas = f"{self.num_replicas} x " if self.num_replicas > 1 else ""
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return (
            self.name + more,
            self.cls,
            f"{len(self.parameters)}{frozen}",
            f"{self.numel:,}",
            dtypes_text(self.dtypes),
            *map(size_text, (self.resting_nbytes, self.gathered_nbytes, self.reduced_nbytes)),
            f"{replicas}{self.num_shards}",
            ", ".join(self.settings) or "-",
        )


@dataclass(frozen=True, repr=False)
class ModelDescription:
    """Describes how a model is sharded. It prints as a table.

    Args:
        cls: name of the class of the model, before it was sharded.
        groups: its groups, the outermost first, in the order of the model.
        unmanaged: FQNs of parameters that no fully_shard call manages.
        unmanaged_nbytes: their bytes on this rank.
    """

    cls: str
    groups: tuple[GroupDescription, ...]
    unmanaged: tuple[str, ...]
    unmanaged_nbytes: int

    @property
    def numel(self) -> int:
        """Elements of all whole parameters that groups manage."""
        return sum(group.numel for group in self.groups)

    @property
    def resting_nbytes(self) -> int:
        """Bytes of this rank's shards of all groups."""
        return sum(group.resting_nbytes for group in self.groups)

    def __str__(self) -> str:
        rows = [_HEADS, *(group._cells() for group in self.groups)]
        sums = [sum(getattr(g, f"{name}_nbytes") for g in self.groups) for name in ("resting", "gathered", "reduced")]
        params = sum(len(group.parameters) for group in self.groups)
        rows.append(("total", self.cls, f"{params}", f"{self.numel:,}", "", *map(size_text, sums), "", ""))
        lines = aligned(rows, _RIGHT)
        lines[1:1] = ["-" * max(map(len, lines))]
        lines.insert(len(lines) - 1, lines[1])
        if self.unmanaged:
            named = ", ".join(self.unmanaged[:5]) + (", ..." if len(self.unmanaged) > 5 else "")
            lines.append(f"not sharded, {size_text(self.unmanaged_nbytes)}: {named}")
        return "\n".join(lines)

    __repr__ = __str__


def describe(model: nn.Module) -> ModelDescription:
    """Returns how a model is sharded, as a value that prints as a table: `print(fsdp2.describe(model))`.

    A row is a group: its module, parameters, dtypes (stored, computed with, reduced), bytes and ranks, and the settings
    that differ from the defaults. `resting` are bytes of this rank's shards, `gathered` those of the unsharded
    parameters, `reduced` those of gradients as they travel. It does not communicate, may be called on any rank and at
    any time, and works for models on meta.

    Args:
        model: any module. Groups of outer modules do not count.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    names, groups = modules_below(model), groups_below(model)
    owners = owners_by_id()
    unmanaged: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if id(p) not in owners}
    return ModelDescription(
        cls=_plain_class(model),
        groups=tuple(_describe_group(group, names) for group in groups if group.params),
        unmanaged=tuple(unmanaged),
        unmanaged_nbytes=sum(_local_nbytes(param) for param in unmanaged.values()),
    )


def _local_nbytes(param: Tensor) -> int:
    local = local_of(param) if isinstance(param, DTensor) else param
    return local.numel() * local.element_size()


def _describe_group(group: FSDPParamGroup, names: dict[nn.Module, str]) -> GroupDescription:
    policy, comms, mesh = group.settings.policy, group.comms, group.mesh
    params = sorted(group.params, key=lambda param: param.spec(policy).extended)
    specs = [param.spec(policy) for param in params]
    trainable = [param.sharded.requires_grad for param in params]
    stored, computed = [spec.storage_dtype for spec in specs], [spec.compute_dtype for spec in specs]
    summed = [policy.gradient_dtype(dtype) for dtype in compress(stored, trainable)]
    codecs = codecs_of(specs, policy, comms.reduces.sums_on_arrival)
    dtypes_of_sums = map(policy.gradient_dtype, stored)
    sizes = [
        codec.sent_nbytes(spec.numel, dtype) for codec, spec, dtype in zip(codecs, specs, dtypes_of_sums, strict=True)
    ]
    slots = [next((slot for slot in param.slots if slot.module in names), param.slots[0]) for param in params]
    return GroupDescription(
        name=group.name if group.modules[0] not in names else names[group.modules[0]] or "root",
        modules=tuple(names.get(module, group.name) or "root" for module in group.modules),
        cls=_plain_class(group.modules[0]),
        parameters=tuple(fqn(names.get(slot.module, group.name), slot.name) for slot in slots),
        num_frozen=trainable.count(False),
        numel=sum(1 if param.is_scalar else spec.numel for param, spec in zip(params, specs, strict=True)),
        dtypes=(tuple(dict.fromkeys(stored)), tuple(dict.fromkeys(computed)), tuple(dict.fromkeys(summed))),
        resting_nbytes=sum(_local_nbytes(param.local) for param in params),
        gathered_nbytes=sum(spec.unsharded_nbytes for spec in specs),
        reduced_nbytes=sum(compress(sizes, trainable)) if mesh.num_ranks > 1 else 0,
        num_shards=mesh.size,
        num_replicas=mesh.num_ranks // mesh.size,
        settings=tuple(_settings_text(group)),
    )


def _settings_text(group: FSDPParamGroup) -> Iterable[str]:
    now, usual = group.settings, GroupSettings()
    if now.reshard_after_forward is not None:
        yield f"reshard_after_forward={now.reshard_after_forward}"
    for name in (
        *("reshard_after_backward", "unshard_in_backward", "reduce_gradients", "all_reduce", "reduce_unused"),
        *("max_reductions", "divide_factor", "keep_storage", "free_viewed_storage"),
    ):
        if getattr(now, name) != getattr(usual, name):
            yield f"{name}={getattr(now, name)}"
    if group.transfers is not None or (group.params and group.params[0].storage_device != group.mesh.device):
        yield "CPU offload"
    dims = {param.dim for param in group.params} - {0}
    if dims:
        yield f"some sharded along dim {', '.join(map(str, sorted(dims)))}"
    if now.policy.wire_dtype is not None:
        yield f"wire_dtype={dtype_text(now.policy.wire_dtype)}"
    if now.policy.gradient_codec is not None:
        yield f"gradient_codec={now.policy.gradient_codec!r}"
    if is_conditional(group.state):
        yield "conditional"


def _plain_class(module: nn.Module) -> str:
    """Returns the name of the module's class before it was sharded."""
    cls = type(module)
    return (cls.__bases__[0] if STATE in vars(module) else cls).__name__


# ---- text


def dtype_text(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")


def dtypes_text(dtypes: Iterable[Iterable[torch.dtype]]) -> str:
    """Returns "fp32/bf16/fp32", or "fp32" if all are the same."""
    texts = list(filter(None, ("+".join(map(dtype_text, each)) for each in dtypes)))
    return texts[0] if len({*texts}) == 1 else "/".join(texts)


def size_text(nbytes: float) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if nbytes >= size), ("B", 1))
    return f"{nbytes / size:.1f} {unit}" if size > 1 else f"{nbytes:.0f} B"


def aligned(rows: Sequence[Sequence[str]], right: Container[int]) -> list[str]:
    """Returns a line for each row. `right`: the columns that are right-aligned, as numbers are."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = [f"{'>' if i in right else '<'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, signs)).rstrip() for row in rows]


# ---- print(model)


def note(state: object) -> str:
    """Returns the share of this rank and the dtypes: the same text for equal blocks, which torch prints once. Nothing
    while a module is being copied.
    """
    if not isinstance(state, FSDPState) or not state.groups:
        return ""
    mesh, policy = state.groups[0].mesh, state.groups[0].settings.policy
    number = sum(len(group.params) for group in state.groups)
    others = f" with {len(state.modules) - 1} more modules" if len(state.modules) > 1 else ""
    notes = [f"fsdp2: group of {number} parameters{others}", f"shard {mesh.rank + 1}/{mesh.size}"]
    notes += [f"{mesh.num_ranks // mesh.size} replicas"] if mesh.num_ranks > mesh.size else []
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        notes += [f"{name}={dtype_text(dtype)}"] if dtype is not None else []
    return ", ".join(notes)
