"""Copies of a group's unsharded parameters, registered in its modules for a while: to read, or to change and save."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checks.checksum import are_alike, bits_of, checksum, read, values_of, word_sum
from ..core.buffers import GroupBuffers
from ..core.compat import local_if_any
from ..core.group import FSDPParamGroup
from ..core.layout import gather_layout
from ..core.parameter import FSDPParam
from ..dtensor.write_notices import notices
from ..ext.rank_facts import all_gather_now

_DIGEST_NBYTES = 16
_CHANGED_MEANWHILE = (
    "the sharded parameters were changed inside the block, by an optimizer, for example. Step before the block, or "
    "after it"
)


def copy_unsharded(group: FSDPParamGroup, params: Sequence[FSDPParam], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns what the ranks share of `params`, in new memory, in the dtypes in which they are stored, or, of
    floating-point ones, in `dtype`. Every rank must call it.
    """
    specs = []
    for spec in (param.spec(group.settings.policy) for param in params):
        wanted = dtype if dtype is not None and spec.storage_dtype.is_floating_point else spec.storage_dtype
        specs.append(replace(spec, compute_dtype=wanted))
    comm, mesh = group.comms.gathers, group.mesh
    with torch.inference_mode(False), torch.no_grad():
        layout = gather_layout(tuple(specs), mesh.size, comm.direct_min_bytes)
        buffers = GroupBuffers(layout, mesh.rank, mesh.device, group.transfers)
        buffers.move_into_shards([param.local for param in params])
        buffers.start_gather(comm).finish()
        return [buffers.unsharded_parameter(i) for i in range(len(specs))]


class UnshardedCopies:
    """Holds copies of `params`, all of one group, in memory of their own. They take no gradient."""

    def __init__(self, group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
        self._group, self._params = group, params
        self._copies: list[_Copy] = []
        # Versions of the sharded parameters that were copied.
        self._versions: tuple[int, ...] = ()

    def lend(self, dtype: torch.dtype | None, device: torch.device, has_data: bool) -> dict[FSDPParam, nn.Parameter]:
        """Registers copies on `device`, in `dtype` or in the dtypes in which the parameters are stored, and returns
        them. They are on meta if this rank is to have no data. Every rank must call it.
        """
        self._group.adopt_replacements(may_be_meta=False)
        self._versions = self._group.shard_versions()
        gathered = copy_unsharded(self._group, self._params, dtype)
        self._group.lend()
        with torch.inference_mode(False), torch.no_grad():
            for param, memory in zip(self._params, gathered, strict=True):
                own = memory.to(device, copy=True) if has_data else memory.to("meta")
                self._copies.append(_Copy(param, param.as_unsharded(own, requires_grad=False)))
        return {copy.param: copy.parameter for copy in self._copies}

    def take_back(self) -> None:
        """Registers the sharded parameters again. What a user has put in place of a copy is kept as its value."""
        for copy in self._copies:
            copy.take_back()
        self._group.take_back()

    def written(self) -> list[str]:
        """Returns the names of the parameters whose copies were modified or replaced."""
        return [copy.param.name for copy in self._copies if copy.is_written()]

    def find_changes(self) -> None:
        """Finds out which copies must be written back, on whichever rank they were changed. Every rank must call it.

        Raises:
            ValueError: ranks have given one different values, or one that its parameter can't take; on every rank.
        """
        is_current = self._group.shard_versions() == self._versions
        own = [copy.digest(is_current) + bytes([copy.changes_rows()]) for copy in self._copies]
        of_all = _from_all_ranks(b"".join(own), self._group)
        problems = []
        for i, copy in enumerate(self._copies):
            theirs = [each[i * len(own[i]) : (i + 1) * len(own[i])] for each in of_all]
            copy.is_changed = any(each[-1] for each in theirs)
            differs = len({each[:-1] for each in theirs}) > 1
            problem = "ranks have given it different values. Change it on every rank alike" if differs else copy.problem
            problems += [f"{copy.param.name}: {problem}."] if problem else []
        if problems:
            raise ValueError(f"nothing was written back. {' '.join(problems)}")

    def write_back(self) -> None:
        """Writes the values that `find_changes` has found into the shards. Parameters whose values have not changed are
        not written to: to autograd, too, they stay what they are.
        """
        for copy in self._copies:
            if copy.is_changed:
                copy.write_back()


class _Copy:
    """Holds one copy: `parameter`.

    `problem`: why it can't be written back, or None. `is_changed`: True if the rows of any rank were changed.
    """

    def __init__(self, param: FSDPParam, parameter: nn.Parameter) -> None:
        self.param, self.parameter = param, parameter
        self.problem: str | None = None
        self.is_changed = False
        self._trace, self._sums = _trace_of(parameter), _sums_of(parameter)
        # What was registered in each slot of the parameter at the end.
        self._found: list[Tensor | None] = []
        param.register(parameter)

    def take_back(self) -> None:
        """Registers the sharded parameter again."""
        self._found = [slot.module._parameters.get(slot.name) for slot in self.param.slots]
        self.param.register(self.param.sharded)

    def is_written(self) -> bool:
        """Returns True if it was modified or replaced."""
        is_replaced = any(each is not self.parameter for each in self._found)
        return is_replaced or _trace_of(self.parameter) != self._trace or _sums_of(self.parameter) != self._sums

    def digest(self, is_current: bool) -> bytes:
        """Returns a digest of the value to write back, or of what forbids that.

        `is_current`: the sharded parameters have not changed since they were copied.
        """
        self.problem = self._find_problem() if is_current else _CHANGED_MEANWHILE
        content = self.problem or int(checksum(self._value()))
        return hashlib.sha256(repr(content).encode()).digest()[:_DIGEST_NBYTES]

    def _find_problem(self) -> str | None:
        replaced = [each is not self.parameter for each in self._found]
        value, copy = self._found[0], self.parameter
        if value is None or any(each is None for each in self._found) or any(replaced) != all(replaced):
            return "it is gone, or was replaced under some of the names that share it only"
        if tuple(value.shape) != self.param.shape or value.dtype != self.param.local.dtype:
            stored = f"{self.param.local.dtype} of shape {self.param.shape}"
            return f"expected {stored}, got {value.dtype} of shape {tuple(value.shape)}"
        if _placements_of(value) != _placements_of(copy):
            return f"expected placements {_placements_of(copy)}, got {_placements_of(value)}"
        for name, other in zip(self.param.names, self._found, strict=True):
            if other is not None and (_placements_of(other) != _placements_of(value) or not are_alike(value, other)):
                return f"{name} is the same parameter, but was given other values. Give both the same ones"
        return None

    def _value(self) -> Tensor:
        value = self._found[0]
        assert value is not None, "else that is the problem"
        return local_if_any(value.detach())

    def changes_rows(self) -> bool:
        """Returns True if writing it back would change this rank's shard."""
        if self.problem is not None:
            return False
        local = self.param.local
        rows = self.param.own_rows(self._value()).to(local.device)
        return not torch.equal(bits_of(rows), bits_of(local))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies this rank's rows into its shard."""
        notices.notify()
        self.param.local.copy_(self.param.own_rows(self._value()))


def _placements_of(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _trace_of(copy: Tensor) -> tuple[int, int, int]:
    """Returns numbers of which one changes with an in-place operation, or when `.data` is assigned."""
    local = local_if_any(copy)
    return copy._version, local._version, local.data_ptr()


def _sums_of(copy: Tensor) -> list[int]:
    """Returns numbers of which one changes when `.data` is written to, which no version counter shows."""
    return read([word_sum(part) for part in values_of(copy)])


def _from_all_ranks(own: bytes, group: FSDPParamGroup) -> list[bytes]:
    """Returns `own` of each rank that shards or replicates the group. All of these ranks must call it."""
    comms, device = group.comms, group.mesh.device
    of_all = all_gather_now(own, comms.reduces, device)
    if comms.replicas is not None:
        joined = all_gather_now(b"".join(of_all), comms.replicas, device)
        of_all = [each[i : i + len(own)] for each in joined for i in range(0, len(each), len(own))]
    return of_all
