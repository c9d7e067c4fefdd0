"""What parameters were when ranks cut them: the same on all, if these were seeded alike, or have loaded the same."""

from __future__ import annotations

import weakref
from functools import lru_cache

import torch
from torch import Tensor, nn

from ..core.parameter import FSDPParam, without_graph
from ..ext.unsharded_versions import count_of
from .checksum import bits_of, checksum

_NUM_SAMPLES = 16
# What is known of a parameter: nothing, or nothing that still holds; its values at fully_shard; those that were loaded.
UNKNOWN, BUILT, LOADED = range(3)


@lru_cache
def _places_among(numel: int) -> range:
    """Of so many elements, those that are looked at."""
    return range(0, numel, max(1, numel // _NUM_SAMPLES))


class StartingWeights:
    """Some values of one parameter that this rank has had whole."""

    def __init__(self, param: FSDPParam, gathered: Tensor, origin: int) -> None:
        self._param, self._shape, self._origin = param, gathered.shape, origin
        self._places = _places_among(gathered.numel())
        self.values = torch.as_strided_copy(gathered.contiguous(), (len(self._places),), (self._places.step,))
        self._local: weakref.ref[Tensor] | None = None
        self._count = -1

    @classmethod
    def of(cls, param: FSDPParam, whole: Tensor, origin: int) -> StartingWeights | None:
        """`whole`: the parameter before it was sharded. None: it has no values yet, or is no plain tensor.

        Grad is off.
        """
        gathered = param.gathered(without_graph(whole))
        is_plain = type(gathered) in (Tensor, nn.Parameter) and gathered.dim() > 0 and not gathered.is_meta
        return cls(param, gathered, origin) if is_plain else None

    def note_place(self) -> None:
        """The shard is where it will be."""
        local = self._param.local
        self._local, self._count = weakref.ref(local), count_of(self._param)

    def origin(self) -> int:
        """Where the parameter's values come from, if they are what they were."""
        return UNKNOWN if self._is_written() or self._has_other_values() else self._origin

    def _is_written(self) -> bool:
        """Whether somebody has written to the shard, as far as version counters tell."""
        is_there = self._local is not None and self._local() is self._param.local
        return is_there and count_of(self._param) != self._count

    def _has_other_values(self) -> bool:
        local = self._param.local
        if local.dtype != self.values.dtype:
            return True
        first, last = self._param.bounds
        places = torch.unravel_index(torch.tensor(self._places, dtype=torch.int64, device=local.device), self._shape)
        own = (places[self._param.dim] >= first) & (places[self._param.dim] < last)
        index = [place[own] - (first if dim == self._param.dim else 0) for dim, place in enumerate(places)]
        return bool((bits_of(local[tuple(index)]) != bits_of(self.values.to(local.device)[own])).any())


def digest(starts: list[StartingWeights]) -> Tensor | int:
    """Of all of them: an int64 without dims."""
    if not starts:
        return 0
    device = starts[0].values.device
    return checksum(torch.cat([bits_of(start.values).to(device, torch.int64) for start in starts]))
