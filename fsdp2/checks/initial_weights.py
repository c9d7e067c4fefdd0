"""Compares the weights that ranks begin with: all must have cut the same, seeded alike, or loaded from one file.

Some values of each parameter are kept from before it is sharded, until ranks have compared them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.build import ParameterPlan
from ..engine.checksum import bits_of, checksum
from ..engine.compare_ranks import ComparedNumbers, Comparison, bounds_over, compare, groups_by_mesh
from ..engine.compat import is_python_group, no_torch_function
from ..engine.group import FSDPParamGroup
from ..engine.group_parameters import version_if_counted
from ..engine.mesh import DataMesh
from ..engine.parameter import FSDPParam
from ..engine.root import Root
from .before_sharding import Key, facts_of
from .due import RankCheck

_NUM_SAMPLES = 16
# Where the values of a parameter come from: nobody knows, or they are others by now; fully_shard was given them; they
# were loaded.
UNKNOWN, BUILT, LOADED = range(3)


class _Sample(NamedTuple):
    """Holds some values of a tensor of shape `shape`: those at `indices` of its elements."""

    values: Tensor
    shape: torch.Size
    indices: range


@lru_cache
def _indices_among(numel: int) -> range:
    """Returns the indices, among so many elements, of those that are kept."""
    return range(0, numel, max(1, numel // _NUM_SAMPLES))


def _sample(gathered: Any) -> _Sample | None:
    """Returns some values of what the ranks of the mesh share of a parameter; None if it has none, or is no plain
    tensor. Grad must be off.
    """
    if type(gathered) not in (Tensor, nn.Parameter) or gathered.dim() == 0 or gathered.is_meta:
        return None
    indices = _indices_among(gathered.numel())
    values = torch.as_strided_copy(gathered.contiguous(), (len(indices),), (indices.step,))
    return _Sample(values, gathered.shape, indices)


class InitialValues:
    """Holds some values of a parameter that this rank has had whole, and where they came from (BUILT or LOADED)."""

    def __init__(self, param: FSDPParam, sample: _Sample, origin: int) -> None:
        self._param, self._sample, self._origin = param, sample, origin
        self.note_place()

    @property
    def values(self) -> Tensor:
        """The values that were kept. `sync_module_states` writes to them."""
        return self._sample.values

    def note_place(self) -> None:
        """Notes that the shard holds these values now, where it lies now."""
        self._local, self._version = weakref.ref(self._param.local), version_if_counted(self._param.sharded)

    def origin(self) -> int:
        """Returns where the parameter's values come from, if they are what they were."""
        return UNKNOWN if self._is_written() or self._has_other_values() else self._origin

    def _is_written(self) -> bool:
        """Returns True if somebody has written to the shard, as far as version counters tell."""
        is_there = self._local() is self._param.local
        return is_there and version_if_counted(self._param.sharded) != self._version

    def _has_other_values(self) -> bool:
        param, local, values = self._param, self._param.local, self.values
        if local.dtype != values.dtype:
            return True
        first, last = param.bounds
        indices = torch.tensor(self._sample.indices, dtype=torch.int64, device=local.device)
        places = torch.unravel_index(indices, self._sample.shape)
        own = (places[param.dim] >= first) & (places[param.dim] < last)
        index = [place[own] - (first if dim == param.dim else 0) for dim, place in enumerate(places)]
        return bool((bits_of(local[tuple(index)]) != bits_of(values.to(local.device)[own])).any())


def digest(known: Sequence[InitialValues]) -> Tensor | int:
    """Returns the checksum of the values of several parameters: an int64 without dims."""
    if not known:
        return 0
    device = known[0].values.device
    return checksum(torch.cat([bits_of(each.values).to(device, torch.int64) for each in known]))


# ---- what is known of parameters


class KnownValues:
    """Holds what is known of parameters of one call that ranks have not compared yet."""

    def __init__(self) -> None:
        self.of_params: dict[FSDPParam, InitialValues] = {}


def keep_sample(samples: dict[Key, Any], each: ParameterPlan, parameter: nn.Parameter) -> None:
    """Keeps some values of a parameter, before it is cut. Grad must be off."""
    sample, slot = _sample(each.distribution.gathered_part(parameter)), each.slots[0]
    if sample is not None:
        samples[id(slot.module), slot.name] = sample


def known_of(group: FSDPParamGroup) -> dict[FSDPParam, InitialValues]:
    """Returns what is known of parameters of the group that ranks have not compared yet."""
    known = _values_of(group)
    return {param: known[param] for param in group.params if param in known}


def _values_of(group: FSDPParamGroup) -> dict[FSDPParam, InitialValues]:
    """Returns what is known of parameters of the call that made `group`."""
    return group.state.notes.of(KnownValues).of_params


class InitialWeights(RankCheck):
    """Compares what ranks have cut their shards from, the first time, and the first after all ranks have loaded."""

    def attached(self, root: Root) -> None:
        for group in root.new_groups:
            samples, known = facts_of(group).samples, _values_of(group)
            with no_torch_function():  # versions are read three times as fast
                for param in group.params if samples else ():
                    slot = param.slots[0]
                    sample = samples.pop((id(slot.module), slot.name), None)
                    if sample is not None:
                        known[param] = InitialValues(param, sample, BUILT)

    def rebuilt(self, group: FSDPParamGroup, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        known = _values_of(group)
        for param, parameter in replaced.items():
            known.pop(param, None)
            if not isinstance(parameter, DTensor):
                with torch.no_grad():
                    sample = _sample(param.gathered(parameter))
                if sample is not None:
                    known[param] = InitialValues(param, sample, LOADED)

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        if comparison.is_anew:
            yield from _numbers_by_mesh(comparison.root.groups)


def compare_initial_weights(groups: Sequence[FSDPParamGroup]) -> None:
    """Raises RuntimeError, on all ranks, if they have cut groups from different weights. All ranks of the meshes must
    call it.
    """
    for mesh, numbers in _numbers_by_mesh(groups):
        compare(mesh, [numbers])


def _numbers_by_mesh(groups: Iterable[FSDPParamGroup]) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
    return ((mesh, _numbers_of(mesh, members)) for mesh, members in groups_by_mesh(groups).items())


def _numbers_of(mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> ComparedNumbers:
    """Returns a number that is the same on all ranks if these have cut the groups on `mesh` from the same weights."""
    number = digest([known for group in groups for known in known_of(group).values()])

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        ((least, most),) = bounds
        if least != most:
            _refuse_different(mesh, groups)
        for group in groups:
            known = _values_of(group)
            for param in group.params:
                known.pop(param, None)

    return ComparedNumbers("starting weights", [number], judge)


def _refuse_different(mesh: DataMesh, groups: Sequence[FSDPParamGroup]) -> None:
    """Raises RuntimeError if a parameter of `groups`, which are the same on all ranks, is made of parts of different
    tensors.
    """
    params = [param for group in groups for param in group.params]
    all_known = {param: known for group in groups for param, known in known_of(group).items()}
    numbers: list[Tensor | int] = []
    for param in params:
        known = all_known.get(param)
        numbers += [digest([known] if known else []), known.origin() if known else UNKNOWN]
    bounds = bounds_over(mesh, numbers, "starting weights of parameters")
    for param, (least, most), (first, last) in zip(params, bounds[::2], bounds[1::2], strict=True):
        if first == last == BUILT and least != most:
            raise RuntimeError(
                f"{param.name}: ranks had different values of it when fully_shard was called, so the sharded model is "
                "made of parts of different models. Call fsdp2.sync_module_states(model) before fully_shard, which "
                "gives all ranks the first one's weights; or set the same seed on all ranks before the model is built; "
                f"or load the weights after fully_shard.{_hint(mesh)}"
            )
        if last == LOADED and (first != last or least != most):
            raise RuntimeError(
                f"{param.name}: load_state_dict(..., assign=True) was given whole tensors of different values on the "
                "ranks, or on some ranks only, so its shards are parts of different tensors. Load the same on all "
                "ranks, or set_model_state_dict(..., broadcast_from_rank0=True)."
            )


def _hint(mesh: DataMesh) -> str:
    """Says why a seed is not enough, where ranks are threads, or may be."""
    if not any(map(is_python_group, mesh.axis_groups)):
        return ""
    return " Threads share one random generator: if ranks are threads, broadcast the weights before fully_shard."
