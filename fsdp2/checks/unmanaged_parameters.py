"""Finds trainable parameters that no group manages: each rank trains them with its own gradient.

Those that were the same on all ranks must stay so: they do if the user averages gradients, or broadcasts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..core.group import FSDPParamGroup
from ..core.mesh import DataMesh
from ..core.parameter import fqn
from ..ext.owners import names_of_unsharded, sharded_owner, some_of
from .check_times import Comparison, RankCheck
from .checksum import checksum
from .compare_ranks import ComparedNumbers


class UnmanagedParameters(RankCheck):
    """Compares checksums of unmanaged parameters between ranks."""

    def __init__(self) -> None:
        # Those that were there when ranks last compared them, and those of them that were the same on all ranks.
        self._known: set[str] = set()
        self._common: set[str] = set()
        # Plain parameters that an optimizer steps on beside sharded ones, and their checksums before it did.
        self._beside: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note_beside(self, params: Mapping[str, Tensor]) -> None:
        """Notes plain parameters on which an optimizer is about to step first. All ranks must call it alike."""
        self._beside.update((name, (weakref.ref(param), checksum(param))) for name, param in params.items())

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        if comparison.mesh is None or comparison.mesh.num_ranks == 1:
            return
        unmanaged = dict(_find_unmanaged(comparison.root))
        if unmanaged:
            _refuse_replaced_modules(unmanaged, comparison.root)
            yield comparison.mesh, self._compare_unmanaged(unmanaged, is_first=comparison.number == 1)
        else:
            self._known = set()
        if self._beside:
            yield comparison.mesh, self._compare_beside()

    def _compare_unmanaged(self, unmanaged: dict[str, nn.Parameter], is_first: bool) -> ComparedNumbers:
        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            common = {name for name, (least, most) in zip(unmanaged, bounds, strict=True) if least == most}
            late = set() if is_first else set(unmanaged) - self._known
            apart = [name for name in unmanaged if name in (self._common | late) - common]
            if apart:
                raise RuntimeError(
                    f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, or has come "
                    "since, and is not the same: each rank trains it with its own gradient. Have it there before "
                    "fully_shard, and out of ignored_params; or freeze it, or average its gradient before each step."
                )
            self._common, self._known = common, set(unmanaged)

        sums = [checksum(parameter) for parameter in unmanaged.values()]
        return ComparedNumbers(f"checksums of {some_of(unmanaged)} (unmanaged)", sums, judge)

    def _compare_beside(self) -> ComparedNumbers:
        numbers = []
        for reference, before in self._beside.values():
            param = reference()
            numbers += [before, before if param is None else checksum(param)]

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            pairs = zip(self._beside, bounds[::2], bounds[1::2], strict=True)
            apart = [name for name, before, now in pairs if before[0] == before[1] and now[0] != now[1]]
            if apart:
                raise RuntimeError(
                    f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, and is not any "
                    "more: each rank has trained it with its own gradient. Apply fully_shard to the module around it; "
                    "or freeze it, or average its gradient before each step."
                )

        return ComparedNumbers(f"checksums of {some_of(self._beside)} (unmanaged)", numbers, judge)


def note_beside(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], params: Mapping[int, Tensor]) -> None:
    """Notes that `optimizer` is about to step on these plain parameters (number -> parameter) for the first time,
    beside sharded ones of `groups`. All ranks must call it alike.
    """
    check, kind = groups[0].root.events.of(UnmanagedParameters), type(optimizer).__name__
    if check is not None:
        check.note_beside({f"parameter {i} of {kind}, of shape {tuple(p.shape)}": p for i, p in params.items()})


def _refuse_replaced_modules(unmanaged: Mapping[str, nn.Parameter], root: Any) -> None:
    """Raises RuntimeError if an unmanaged parameter has the name of one that is managed, in a module that was there."""
    managed = {name: param for group in root.groups for param in group.params for name in param.names}
    for name, parameter in unmanaged.items():
        if name in managed:
            raise RuntimeError(
                f"{name}: the module around it was replaced after fully_shard, which manages the parameter of shape "
                f"{managed[name].shape} that was there; each rank would train the new one, of shape "
                f"{tuple(parameter.shape)}, with its own gradient. Replace or resize modules before fully_shard; or "
                "build the model anew with the new one, apply fully_shard, and load the rest."
            )


def _find_unmanaged(root: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields trainable parameters below the root's modules that no group has, with their names. A module that has come
    later, sharded by itself, is its own root.
    """
    managed = {(slot.module, slot.name) for group in root.groups for param in group.params for slot in param.slots}
    for outer in root.state.modules:
        for prefix, module in outer.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad or (module, name) in managed:
                    continue
                if names_of_unsharded(parameter):
                    continue
                if not isinstance(parameter, DTensor) or sharded_owner(parameter) is None:
                    yield fqn(prefix, name), parameter
