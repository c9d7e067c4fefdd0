"""Whole copies of a group's parameters, registered in its modules for a while: to read, or to edit and write back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import dtensor_compat
from ..core.comm import all_gather_now
from ..checks.checksum import are_alike, bits_of, checksum, read, values_of, word_sum
from ..core.parameter import FSDPParam
from ..core.group import FSDPParamGroup
from ..dtensor.write_notices import notices

_DIGEST_NBYTES = 16
_CHANGED_MEANWHILE = (
    "the sharded parameters were changed inside the block, by an optimizer, say. Step before the block, or after it"
)


class FullCopies:
    """Copies of `params`, all of one group, in memory of their own, which take no gradient."""

    def __init__(self, group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
        self._group, self._params = group, params
        self._copies: list[_Copy] = []
        self._versions: tuple[int, ...] = ()

    def lend(self, dtype: torch.dtype | None, device: torch.device, has_data: bool) -> dict[FSDPParam, nn.Parameter]:
        """Register copies on `device`, of `dtype`, or as the parameters are stored; without data, on meta, where this
        rank is to have none. Return them. Every rank must call it.
        """
        self._group.adopt_replacements(may_be_meta=False)
        self._versions = self._group.shard_versions()
        gathered = self._group.copy_full(self._params, dtype)
        self._group.is_lent = True
        with torch.inference_mode(False), torch.no_grad():
            for param, memory in zip(self._params, gathered, strict=True):
                own = memory.to(device, copy=True) if has_data else memory.to("meta")
                self._copies.append(_Copy(param, param.face_of(own, requires_grad=False)))
        return {copy.param: copy.face for copy in self._copies}

    def take_back(self) -> None:
        """Register the sharded parameters again. What a user has put in place of a copy is taken for it."""
        for copy in self._copies:
            copy.take_back()
        self._group.is_lent = False

    def written(self) -> list[str]:
        """Names of the parameters whose copies were modified or replaced."""
        return [copy.param.name for copy in self._copies if copy.is_written()]

    def agree(self) -> None:
        """Find out which copies are to be written back. Every rank must call it.

        Raises:
            ValueError: ranks have given one different values, or one that its parameter can't take; on every rank.
        """
        is_current = self._group.shard_versions() == self._versions
        parts = [copy.digest(is_current) + bytes([copy.changes_rows()]) for copy in self._copies]
        of_all = _from_all_ranks(b"".join(parts), self._group)
        problems = []
        for i, copy in enumerate(self._copies):
            theirs = [each[i * len(parts[i]) : (i + 1) * len(parts[i])] for each in of_all]
            copy.is_changed = any(each[-1] for each in theirs)
            differs = len({each[:-1] for each in theirs}) > 1
            problem = "ranks have given it different values. Change it on every rank alike" if differs else copy.problem
            problems += [f"{copy.param.name}: {problem}."] if problem else []
        if problems:
            raise ValueError(f"nothing was written back. {' '.join(problems)}")

    def write_back(self) -> None:
        """Have the shards take the values that ranks have agreed upon. Parameters that nobody has changed stay as they
        are, to autograd too.
        """
        for copy in self._copies:
            if copy.is_changed:
                copy.write_back()


class _Copy:
    """One of them. `problem`: why it can't be written back. `is_changed`: whether any rank's rows were changed."""

    def __init__(self, param: FSDPParam, face: nn.Parameter) -> None:
        self.param, self.face = param, face
        self.problem: str | None = None
        self.is_changed = False
        self._trace, self._sums = _trace_of(face), _sums_of(face)
        self._found: list[Tensor | None] = []
        param.register(face)

    def take_back(self) -> None:
        self._found = [slot.module._parameters.get(slot.name) for slot in self.param.slots]
        self.param.register(self.param.sharded)

    def is_written(self) -> bool:
        is_replaced = any(each is not self.face for each in self._found)
        return is_replaced or _trace_of(self.face) != self._trace or _sums_of(self.face) != self._sums

    def digest(self, is_current: bool) -> bytes:
        """Of the value to write back, or of what forbids that. `is_current`: the sharded parameters are as before."""
        self.problem = self._find_problem() if is_current else _CHANGED_MEANWHILE
        content = self.problem or int(checksum(self._value()))
        return hashlib.sha256(repr(content).encode()).digest()[:_DIGEST_NBYTES]

    def _find_problem(self) -> str | None:
        replaced = [each is not self.face for each in self._found]
        value, face = self._found[0], self.face
        if value is None or any(each is None for each in self._found) or any(replaced) != all(replaced):
            return "it is gone, or was replaced in some of the places that share it"
        if tuple(value.shape) != self.param.shape or value.dtype != self.param.local.dtype:
            stored = f"{self.param.local.dtype} of shape {self.param.shape}"
            return f"expected {stored}, got {value.dtype} of shape {tuple(value.shape)}"
        if _placements_of(value) != _placements_of(face):
            return f"expected placements {_placements_of(face)}, got {_placements_of(value)}"
        for name, other in zip(self.param.names, self._found, strict=True):
            if other is not None and (_placements_of(other) != _placements_of(value) or not are_alike(value, other)):
                return f"{name} is the same parameter, but was given other values. Give both the same ones"
        return None

    def _value(self) -> Tensor:
        value = self._found[0]
        assert value is not None, "else that is the problem"
        return dtensor_compat.local_if_any(value.detach())

    def changes_rows(self) -> bool:
        """Whether this rank's shard would be another."""
        if self.problem is not None:
            return False
        local = self.param.local
        rows = self.param.own_rows(self._value()).to(local.device)
        return not torch.equal(bits_of(rows), bits_of(local))

    @torch.no_grad()
    def write_back(self) -> None:
        notices.tell()
        self.param.local.copy_(self.param.own_rows(self._value()))


def _placements_of(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _trace_of(face: Tensor) -> tuple[int, int, int]:
    """What is another one after an in-place operation, or when `.data` was set."""
    local = dtensor_compat.local_if_any(face)
    return face._version, local._version, local.data_ptr()


def _sums_of(face: Tensor) -> list[int]:
    """What is another one when `.data` was written to, which no version shows."""
    return read([word_sum(part) for part in values_of(face)])


def _from_all_ranks(own: bytes, group: FSDPParamGroup) -> list[bytes]:
    """What each rank that shards or replicates the group has. All of them must call it."""
    reduction, device = group.gradients.reduction, group.mesh.device
    of_all = all_gather_now(own, reduction.shards, device)
    if reduction.replicas is not None:
        joined = all_gather_now(b"".join(of_all), reduction.replicas, device)
        of_all = [each[i : i + len(own)] for each in joined for i in range(0, len(each), len(own))]
    return of_all
