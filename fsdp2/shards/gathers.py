"""Gathers values that ranks have cut alike, many in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .protocol import Cut
from .ranks import comm_over

__all__ = ["gather_whole", "place_chunks"]


def gather_whole(values: Sequence[Tensor], cuts: Sequence[Sequence[Cut]], device: torch.device) -> list[Tensor]:
    """Returns whole values in new memory on `device`. All ranks of the cuts must call it, with alike values.

    It takes one collective for each cut of all values that have a dtype and the process groups of their cuts in common.

    Args:
        values: this rank's parts.
        cuts: of each value, from the innermost cut to the outermost, as `ShardParam.cuts`.
    """
    wholes = [*values]
    alike: dict[object, list[int]] = {}
    for i, (value, own) in enumerate(zip(values, cuts, strict=True)):
        alike.setdefault((value.dtype, *(cut.group.group_name for cut in own)), []).append(i)
    for indices in alike.values():
        for stage in range(len(cuts[indices[0]])):
            some = _gather([wholes[i] for i in indices], [cuts[i][stage] for i in indices], device)
            for i, whole in zip(indices, some, strict=True):
                wholes[i] = whole
    return [
        whole.to(device, copy=True) if whole is value else whole for whole, value in zip(wholes, values, strict=True)
    ]


def _gather(values: Sequence[Tensor], cuts: Sequence[Cut], device: torch.device) -> list[Tensor]:
    """Returns the values that the ranks of one process group share, of one dtype."""
    group, size = cuts[0].group, cuts[0].size
    rows = torch.empty(size, sum(cut.chunk_numel for cut in cuts), dtype=values[0].dtype, device=device)
    own = rows[cuts[0].rank]
    for part, value in zip(own.split([cut.chunk_numel for cut in cuts]), values, strict=True):
        part[: value.numel()].copy_(value.reshape(-1))
    comm = comm_over(group, device, "whole parameters")
    bytes_ = rows.view(torch.uint8)
    comm.all_gather([bytes_.view(-1)], [bytes_[cuts[0].rank]]).wait()
    wholes, first = [], 0
    for cut in cuts:
        whole = torch.empty(cut.shape, dtype=rows.dtype, device=device)
        for target, source in place_chunks(whole, cut, rows[:, first : first + cut.chunk_numel]):
            target.copy_(source)
        first += cut.chunk_numel
        wholes.append(whole)
    return wholes


def place_chunks(whole: Tensor, cut: Cut, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns (target, source) of the copies that fill a value with the chunks of all ranks.

    Args:
        whole: a tensor of the shape of the value.
        rows: the chunks of all ranks, [ranks, elements of a whole chunk].
    """
    if not whole.numel():
        return []
    dim, num_whole = cut.dim, cut.shape[cut.dim] // cut.chunk
    end = num_whole * cut.chunk
    first = whole.narrow(dim, 0, end).unflatten(dim, (num_whole, cut.chunk)).movedim(dim, 0)
    copies = [(first, rows[:num_whole].unflatten(1, cut.chunk_shape(0)))]
    if end < cut.shape[dim]:
        rest = whole.narrow(dim, end, cut.shape[dim] - end)
        copies.append((rest, rows[num_whole, : rest.numel()].view(rest.shape)))
    return copies
