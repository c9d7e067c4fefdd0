"""What may be wrong with a sharded model, and how to make it of what all ranks have told (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be. `str` of it is for people.

    Args:
        kind: one of `KINDS`.
        names: FQNs of the parameters, buffers or modules; of tensors that the model doesn't know: their places; of
            settings: what they are, and of which groups.
        detail: what was expected and found.
        ranks: where; the global ranks.
    """

    kind: str
    names: tuple[str, ...]
    detail: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def is_note(self) -> bool:
        """Whether it may be meant so."""
        return self.kind in ("buffers differ", "model-parallel ranks differ")

    def __str__(self) -> str:
        names = ", ".join(self.names[:_SHOWN]) + (f" and {len(self.names) - _SHOWN} more" * (len(self.names) > _SHOWN))
        ranks = ", ".join(map(str, self.ranks[:_SHOWN])) + (", ..." * (len(self.ranks) > _SHOWN))
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.kind}: {names} (rank {ranks}){detail}. {KINDS[self.kind]}"


KINDS = {
    "on meta": "Expected memory and values before training: model.to_empty(device=...), then initialise or load.",
    "unwritten": "to_empty gave it memory, and no in-place operation has written to it since: its values are whatever "
    "that memory held, unless a collective, a foreach operation or .data has filled it. Initialise or load it.",
    "not finite": "Expected finite values. Look for an overflow, a bad batch, or memory that nobody has initialised.",
    "gradients not finite": "Expected finite values. Clear them (zero_grad), or leave this step out.",
    "unsynced": "These gradients wait for a backward that synchronises; an optimizer would step without them. Call "
    "set_requires_gradient_sync(True) (HSDP: set_requires_all_reduce(True), too) before the last backward.",
    "divided apart": "Gradients of one model are scaled against each other. Call "
    "model.set_gradient_divide_factor(factor, recurse=True) on the root, or give each sharded module the same factor.",
    "never called": "The module has no parameters of its own, and no module that has some was given such a function. "
    "Call the method on the sharded modules that hold the parameters.",
    "unmanaged": "Trainable, but no fully_shard call manages it, so its gradient differs from rank to rank. Have it "
    "there before fully_shard, and out of ignored_params; or freeze it, or reduce its gradient yourself.",
    "optimizer holds strangers": "The optimizer steps what is no parameter of the model, which never changes. Build it "
    "after fully_shard and whatever replaces parameters, from model.parameters().",
    "optimizer lacks": "Trainable, and in no parameter group: it never changes. Add it to the optimizer, or freeze it.",
    "optimizer holds twice": "Each step changes it twice. Give each parameter to one group.",
    "layouts differ": "Expected the same modules, parameters, dtypes, flags and settings on every rank. Build and set "
    "up the model by the same code everywhere. Values were not compared.",
    "replicas differ": "Expected the same bits in every replica. Initialise from the same seed, or broadcast; then "
    "look for a rank that steps differently.",
    "unmanaged differ": "Expected the same bits on every rank. Broadcast it; if it is trained, see 'unmanaged'.",
    "model-parallel ranks differ": "A note: cut by hand, each holds a part of its own. Otherwise expected the same "
    "bits: give the ranks of such an axis one seed, and the same batches.",
    "buffers differ": "A note: running statistics of each rank's own batches do. Others hint at memory that nobody "
    "has initialised since to_empty.",
}


def merge(found: dict[int, dict[str, list[str]]]) -> list[Finding]:
    """One finding for each kind. `found`: by rank, names by kind."""
    findings = []
    for kind in KINDS:
        ranks = [rank for rank in sorted(found) if found[rank].get(kind)]
        names = dict.fromkeys(name for rank in ranks for name in found[rank][kind])
        if ranks:
            findings.append(Finding(kind, tuple(names), ranks=tuple(ranks)))
    return findings


def compare_sums(
    names: Sequence[tuple[str, str]], sums: dict[int, list[tuple[int, int]]], batches: dict[int, int]
) -> list[Finding]:
    """Which tensors differ among ranks that hold the same part of them.

    `names`: of each tensor its name, and whether it is a "parameter" of a group, "unmanaged", or a "buffer".
    `sums`: by rank, of each tensor a number of the part, and one of its values.
    `batches`: by rank, a number of those that train on one batch with it, each on its rows. Others get the same rows,
        and share the model with it.
    """
    found: dict[int, dict[str, list[str]]] = {rank: {} for rank in sums}
    for i, (name, kind) in enumerate(names):
        of_batch: dict[tuple[int, int], int] = {}
        first: dict[int, int] = {}
        for rank in sorted(sums):
            part, value = sums[rank][i]
            other, what = of_batch.setdefault((batches[rank], part), rank), _DIFFERENCES[kind]
            if other == rank and kind != "buffer":
                other, what = first.setdefault(part, rank), "model-parallel ranks differ"
            if sums[other][i][1] != value:
                for each in (other, rank):
                    found[each].setdefault(what, []).append(name)
    return merge(found)


_DIFFERENCES = {"parameter": "replicas differ", "unmanaged": "unmanaged differ", "buffer": "buffers differ"}


def compare_layouts(layouts: dict[int, dict[str, str]]) -> list[Finding]:
    """What isn't the same on every rank, one finding for each name. `layouts`: by rank."""
    findings = []
    for name in dict.fromkeys(name for layout in layouts.values() for name in layout):
        where: dict[str, list[int]] = {}
        for rank, layout in sorted(layouts.items()):
            where.setdefault(layout.get(name, "nothing"), []).append(rank)
        if len(where) > 1:
            detail = "; ".join(f"rank {ranks[0]} has {text}" for text, ranks in where.items())
            ranks = tuple(ranks[0] for ranks in where.values())
            findings.append(Finding("layouts differ", (name,), detail, ranks))
    return findings
