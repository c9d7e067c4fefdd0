"""Describes how a model is sharded: a table of its groups (`describe`), and a note in `print(model)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..shards.find import original_class, shards_of
from ..shards.protocol import ShardGroup
from ..shards.tensors import dtype_text, local_if_any, require_module
from .columns import ruled

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
    "padding",
    "reduced",
    "ranks",
    "settings",
]
# The name of the described module, if it is sharded inside another one.
_INNER = "this module"
_RIGHT = {2, 3, 5, 6, 7, 8, 9}


@dataclass(frozen=True)
class GroupDescription:
    """Describes one group: the parameters that are gathered and reduced together.

    Args:
        name: FQN of the (first) module in the described one, which itself is "root" if it is the outermost sharded
            module, else "this module".
        modules: FQNs of the modules that one `fully_shard` call has got.
        cls: name of the class of the first one, before it was sharded.
        parameters: FQNs of the parameters; of tied ones, the first.
        num_frozen: how many of these do not require a gradient.
        numel: elements of all whole parameters (under tensor parallelism: of those that the ranks share).
        dtypes: the dtypes in which parameters are stored, computed with and reduced; several of each are possible.
        resting_nbytes: bytes of this rank's shards.
        gathered_nbytes: bytes of the unsharded parameters, padding included.
        padding_nbytes: bytes of padding in one all-gather, to which all ranks send chunks of equal size.
        reduced_nbytes: bytes of the gradients of trainable parameters, in the dtypes in which they travel.
        num_shards: how many ranks share the parameters.
        num_replicas: how many groups of such ranks there are.
        settings: what was chosen for the group and differs from the default, as text.
        is_root: True if the modules are the outermost sharded ones of their model.

    Of a group of torch's FSDP2, which does not tell its policy, the last two of `dtypes`, `gathered_nbytes`,
    `reduced_nbytes` and `settings` are None; and so is `is_root` before the first forward.
    """

    name: str
    modules: tuple[str, ...]
    cls: str
    parameters: tuple[str, ...]
    num_frozen: int
    numel: int
    dtypes: tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...] | None, tuple[torch.dtype, ...] | None]
    resting_nbytes: int
    gathered_nbytes: int | None
    padding_nbytes: int
    reduced_nbytes: int | None
    num_shards: int
    num_replicas: int
    settings: tuple[str, ...] | None
    is_root: bool | None

    def _cells(self) -> tuple[str, ...]:
        frozen = f" ({self.num_frozen} frozen)" if self.num_frozen else ""
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return (
            self.name + more,
            self.cls,
            f"{len(self.parameters)}{frozen}",
            f"{self.numel:,}",
            dtypes_text(self.dtypes),
            *map(size_text, (self.resting_nbytes, self.gathered_nbytes, self.padding_nbytes, self.reduced_nbytes)),
            ranks_text(self),
            "?" if self.settings is None else ", ".join(self.settings) or "-",
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
        found = [
            [getattr(g, f"{name}_nbytes") for g in self.groups]
            for name in ("resting", "gathered", "padding", "reduced")
        ]
        sums = [None if None in each else sum(each) for each in found]
        params = sum(len(group.parameters) for group in self.groups)
        rows.append(("total", self.cls, f"{params}", f"{self.numel:,}", "", *map(size_text, sums), "", ""))
        lines = ruled(rows, _RIGHT)
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
    parameters, `padding` the bytes that an all-gather sends besides them, `reduced` those of gradients as they travel.
    It does not communicate, may be called on any rank and at any time, and works for models on meta. Models that
    torch's FSDP2 has sharded are described between steps; what it does not tell is "?".

    Args:
        model: any module. Groups of outer modules do not count.

    Raises:
        TypeError: `model` is no module.
    """
    require_module("model", model, "describe")
    shards = shards_of(model)
    unmanaged: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if shards.find(p) is None}
    return ModelDescription(
        cls=original_class(model).__name__,
        groups=tuple(_describe_group(group) for group in shards.groups if group.params),
        unmanaged=tuple(unmanaged),
        unmanaged_nbytes=sum(_local_nbytes(param) for param in unmanaged.values()),
    )


def _local_nbytes(param: Tensor) -> int:
    local = local_if_any(param)
    return local.numel() * local.element_size()


def _describe_group(group: ShardGroup) -> GroupDescription:
    facts, ranks, is_root = group.facts(), group.ranks, group.is_root
    names = [_INNER if name == "root" and is_root is False else name for name in (group.name, *facts.modules)]
    return GroupDescription(
        name=names[0],
        modules=tuple(names[1:]),
        cls=facts.cls,
        parameters=facts.parameters,
        num_frozen=facts.num_frozen,
        numel=facts.numel,
        dtypes=(facts.stored, facts.computed, facts.reduced),
        resting_nbytes=sum(_local_nbytes(param.local) for param in group.params),
        gathered_nbytes=facts.gathered_nbytes,
        padding_nbytes=facts.padding_nbytes,
        reduced_nbytes=facts.reduced_nbytes,
        num_shards=ranks.num_shards,
        num_replicas=ranks.num_replicas,
        settings=facts.settings,
        is_root=is_root,
    )


# ---- text


def ranks_text(group: GroupDescription) -> str:
    """Returns "8" for 8 ranks that shard, "2 replicas of 4" for HSDP."""
    return f"{group.num_replicas} replicas of {group.num_shards}" if group.num_replicas > 1 else f"{group.num_shards}"


def dtypes_text(dtypes: Iterable[Iterable[torch.dtype] | None]) -> str:
    """Returns "fp32/bf16/fp32", or "fp32" if all are the same. None: unknown."""
    texts = list(filter(None, ("?" if each is None else "+".join(map(dtype_text, each)) for each in dtypes)))
    return texts[0] if len({*texts}) == 1 else "/".join(texts)


def size_text(nbytes: float | None) -> str:
    if nbytes is None:
        return "?"
    unit, size = next(((unit, size) for unit, size in _UNITS if nbytes >= size), ("B", 1))
    return f"{nbytes / size:.1f} {unit}" if size > 1 else f"{nbytes:.0f} B"
