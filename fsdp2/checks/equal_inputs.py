"""Notices that all data-parallel ranks train on the same rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls.nested import tensors_in
from ..engine.events import Observer
from ..engine.mesh import DataMesh
from ..engine.root import Root
from ..engine.state import FSDPState
from ..parameters.checksum import joint_checksum, values_of
from ..ranks.compare_ranks import ComparedNumbers, Comparison
from ..torch_private.internals import runs_transform, storage_id
from .due import RankCheck, is_capturing


class EqualInputs(RankCheck):
    """Compares the inputs of two training passes between ranks, the first ones at which ranks compare anything.

    Only ranks that shard or replicate the same parameters compare, so ranks of tensor or context parallelism that have
    an axis of their own do not. Inputs of one value each (zeros for a test) are no data.
    """

    def __init__(self) -> None:
        self._inputs = _Inputs(self)
        self._num_equal = 0
        # A training pass has run since ranks compared; of its inputs: if some tensor has two values, and a checksum.
        self._has_inputs = False
        self._has_data: Tensor | int = 0
        self._checksum: Tensor | int = 0

    def attached(self, root: Root) -> None:
        root.add(self._inputs)

    def detached(self, root: Root) -> None:
        root.remove(self._inputs)

    def take(self, root: Root, args: Any, kwargs: Any) -> None:
        """Computes what ranks compare of the inputs of a training pass. Nothing waits for the device."""
        if not torch.is_grad_enabled() or not root.state.modules[0].training or runs_transform() or is_capturing():
            return
        self._has_inputs = True
        root.remove(self._inputs)
        with torch.no_grad():
            tensors = [tensor for tensor in tensors_in(args, kwargs) if storage_id(tensor) != -1]
            parts = [part for tensor in tensors for part in values_of(tensor) if part.numel() > 1]
            varied = [(part != part.reshape(-1)[0]).any() for part in parts]
            if varied:
                self._has_data = torch.stack([each.to(varied[0].device) for each in varied]).any().long()
            self._checksum = joint_checksum(parts)

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        mesh, root = comparison.mesh, comparison.root
        if mesh is None or mesh.num_ranks == 1 or self._num_equal == _TIMES:
            return

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            (has_inputs, _), (has_data, _), (least, most) = bounds
            are_equal = bool(has_data) and least == most
            if has_inputs:
                self._num_equal = self._num_equal + 1 if are_equal else _TIMES
            if self._num_equal < _TIMES:
                root.remove(self._inputs)  # it still follows if no training pass has come
                root.add(self._inputs)
                self._has_inputs, self._has_data, self._checksum = False, 0, 0
            elif are_equal:
                warnings.warn(_SAME.format(ranks=mesh.num_ranks), stacklevel=2)

        yield mesh, ComparedNumbers("inputs", [int(self._has_inputs), self._has_data, self._checksum], judge)


class _Inputs(Observer):
    """Gives an EqualInputs the inputs of the next training pass. It follows only until then."""

    def __init__(self, check: EqualInputs) -> None:
        self._check = check

    def inputs_given(self, state: FSDPState, args: Any, kwargs: Any) -> None:
        root = state.root
        if state is root.state or len(root.running) == 1:
            self._check.take(root, args, kwargs)


_TIMES = 2
_SAME = (
    "all {ranks} data-parallel ranks got the same inputs in two training steps: they train on the same rows, and "
    "compute the same gradients. Give torch.utils.data.DistributedSampler to the DataLoader as its sampler, or draw "
    "the rows of each rank from a seed of its own. If all are to train on the same batch (in a test, for example), "
    "nothing is wrong. This is said once."
)
