"""Builds the findings of `check` from the reports of all ranks. It does not depend on groups and modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """Describes one thing that is wrong with a model, or may be. Print it for a readable text.

    Args:
        kind: one of `KINDS`.
        names: FQNs of the parameters, buffers or modules. Tensors that are not in the model are named by their
            positions in an optimizer, settings by their names and the groups that have them.
        detail: the expected and the actual value.
        ranks: the global ranks that it concerns.
    """

    kind: str
    names: tuple[str, ...]
    detail: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def is_note(self) -> bool:
        """True if it may be intended."""
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
    "not finite": "Expected finite values. Look for an overflow, a bad batch, or memory that was never initialised.",
    "gradients not finite": "Expected finite values. Clear them (zero_grad), or leave this step out.",
    "unsynchronized": "These gradients are unsynchronized; an optimizer would step without them. Call "
    "set_requires_gradient_sync(True) (HSDP: set_requires_all_reduce(True), too) before the last backward.",
    "unmanaged": "Trainable, but no fully_shard call manages it, so its gradient differs from rank to rank. Create it "
    "before fully_shard, and leave it out of ignored_params; or freeze it, or reduce its gradient yourself.",
    "written on some ranks": "Only these ranks have written to this frozen parameter since ranks last compared it, so "
    "it is made of parts of different models. Load a checkpoint of before, and write to it on all ranks alike.",
    "optimizer holds strangers": "The optimizer steps tensors that are no parameters of the model, whose parameters "
    "never change. Build it from model.parameters(), after fully_shard and after whatever replaces parameters.",
    "optimizer lacks": "Trainable, and in no parameter group: it never changes. Add it to the optimizer, or freeze it.",
    "optimizer holds twice": "Each step changes it twice. Give each parameter to one group.",
    "optimizer has states that are no DTensors": "They are plain tensors of each rank's rows, and a distributed "
    "checkpoint keeps those of one rank. Have the optimizer make each one a DTensor: DTensor.from_local(local, "
    "p.device_mesh, p.placements, shape=p.shape, stride=p.stride()); or save a file of each rank.",
    "optimizer has states of strangers": "These are in none of its parameter groups, and its sharded parameters have "
    "no states: they would begin anew. Call states = optimizer.state_dict() before fully_shard, and "
    "optimizer.load_state_dict(states) when the groups have the sharded parameters.",
    "layouts differ": "Expected the same modules, parameters, order, dtypes, flags and settings on every rank. Build "
    "and set up the model by the same code on every rank. Values were not compared.",
    "replicas differ": "Expected the same bits in every replica. Initialise from the same seed, or broadcast; then "
    "look for a rank that steps differently.",
    "unmanaged differ": "Expected the same bits on every rank. Broadcast it; if it is trained, see 'unmanaged'.",
    "model-parallel ranks differ": "A note: if your code shards it, each rank holds another shard. Else expected the "
    "same bits: give the ranks of such an axis one seed, and the same batches.",
    "buffers differ": "A note: running statistics of each rank's own batches differ, if they are not averaged, and so "
    "do caches. Expected the same in other buffers: call sync_module_states(model).",
}


def merge(found: dict[int, dict[str, list[str]]]) -> list[Finding]:
    """Returns one finding for each kind. `found`: rank -> kind -> names."""
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
    """Returns the tensors that differ among ranks that hold the same shard of them.

    `names`: for each tensor its name, and its kind: a "parameter" of a group, "unmanaged", or a "buffer".
    `sums`: rank -> for each tensor a number that identifies the rank's shard of it, and a checksum of its values.
    `batches`: rank -> a number that is equal on the ranks that train on one batch, each on its own rows. Ranks with
        different numbers get the same rows, and share one model (model parallelism).
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
    """Returns a finding for each name whose description is not the same on every rank.

    `layouts`: rank -> name -> description.
    """
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
