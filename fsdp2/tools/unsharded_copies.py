"""Registers copies of unsharded parameters for a block of `full_params`, and writes them back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checks.checksum import are_alike, bits_of, checksum, read, values_of, word_sum
from ..engine.comm import all_gather_now
from ..engine.compat import local_if_any
from ..engine.group import FSDPParamGroup
from ..engine.layout import gather_layout
from ..engine.memory import Memory
from ..engine.parameter import FSDPParam
from ..engine.write_notices import notices

_DIGEST_NBYTES = 16
_CHANGED_MEANWHILE = (
    "the sharded parameters were changed inside the block, by an optimizer, for example. Step before the block, or "
    "after it"
)


def copy_unsharded(group: FSDPParamGroup, params: Sequence[FSDPParam], dtype: torch.dtype | None) -> list[Tensor]:
    """Returns the unsharded parameters, in new memory, in the dtypes in which they are stored. Floating-point ones are
    in `dtype`, if that is given. Every rank must call it.
    """
    specs = []
    for spec in (param.spec(group.settings.policy) for param in params):
        wanted = dtype if dtype is not None and spec.storage_dtype.is_floating_point else spec.storage_dtype
        specs.append(replace(spec, compute_dtype=wanted))
    comm, mesh = group.comms.gathers, group.mesh
    with torch.inference_mode(False), torch.no_grad():
        layout = gather_layout(tuple(specs), mesh.size, comm.direct_min_bytes)
        buffers = Memory(layout, mesh.rank, mesh.device, group.transfers)
        buffers.move_into_shards([param.local for param in params])
        buffers.start_gather(comm).finish()
        return [buffers.unsharded_parameter(i) for i in range(len(specs))]


class UnshardedCopies:
    """Holds copies of `params`, all of one group, in memory of their own. They take no gradient."""

    def __init__(self, group: FSDPParamGroup, params: Sequence[FSDPParam]) -> None:
        self._group, self._params = group, params
        self._copies: list[_Copy] = []
        # The versions that the sharded parameters had when they were copied.
        self._versions: tuple[int, ...] = ()

    def register(
        self, dtype: torch.dtype | None, device: torch.device, has_data: bool
    ) -> dict[FSDPParam, nn.Parameter]:
        """Registers copies on `device`, in `dtype` or in the dtypes in which the parameters are stored, and returns
        them. Without `has_data` they are on meta. Every rank must call it.
        """
        self._group.adopt_replacements(may_be_meta=False)
        self._versions = self._group.shard_versions()
        gathered = copy_unsharded(self._group, self._params, dtype)
        self._group.begin_copies()
        with torch.inference_mode(False), torch.no_grad():
            for param, memory in zip(self._params, gathered, strict=True):
                own = memory.to(device, copy=True) if has_data else memory.to("meta")
                self._copies.append(_Copy(param, param.as_unsharded(own, requires_grad=False)))
        return {copy.param: copy.parameter for copy in self._copies}

    def unregister(self) -> None:
        """Registers the sharded parameters again. A parameter by which a user has replaced a copy becomes its value."""
        for copy in self._copies:
            copy.unregister()
        self._group.end_copies()

    def written(self) -> list[str]:
        """Returns the names of the parameters whose copies were modified or replaced."""
        return [copy.param.name for copy in self._copies if copy.is_written()]

    def find_changes(self) -> None:
        """Finds the copies that were changed on any rank and must be written back. Every rank must call it.

        Raises:
            ValueError: a copy has different values on different ranks, or can't be written back. Every rank raises.
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
        """Writes the copies that `find_changes` has found into the shards. Other parameters are not written to, so that
        their versions stay the same.
        """
        for copy in self._copies:
            if copy.is_changed:
                copy.write_back()


class _Copy:
    """Holds one copy, `parameter`.

    `problem`: the reason why it can't be written back, or None. `is_changed`: True if the shard of any rank changes.
    """

    def __init__(self, param: FSDPParam, parameter: nn.Parameter) -> None:
        self.param, self.parameter = param, parameter
        self.problem: str | None = None
        self.is_changed = False
        self._versions, self._sums = _versions_of(parameter), _sums_of(parameter)
        # The parameter that was registered in each slot at the end.
        self._found: list[Tensor | None] = []
        param.register(parameter)

    def unregister(self) -> None:
        """Registers the sharded parameter again, and notes what was registered."""
        self._found = [slot.module._parameters.get(slot.name) for slot in self.param.slots]
        self.param.register(self.param.sharded)

    def is_written(self) -> bool:
        """Returns True if it was modified or replaced."""
        is_replaced = any(each is not self.parameter for each in self._found)
        return is_replaced or _versions_of(self.parameter) != self._versions or _sums_of(self.parameter) != self._sums

    def digest(self, is_current: bool) -> bytes:
        """Returns a digest of the value to write back, or of the problem that forbids it.

        `is_current`: True if the sharded parameters have not changed since they were copied.
        """
        self.problem = self._find_problem() if is_current else _CHANGED_MEANWHILE
        content = self.problem or int(checksum(self._value()))
        return hashlib.sha256(repr(content).encode()).digest()[:_DIGEST_NBYTES]

    def _find_problem(self) -> str | None:
        replaced = [each is not self.parameter for each in self._found]
        value, copy = self._found[0], self.parameter
        if value is None or any(each is None for each in self._found) or any(replaced) != all(replaced):
            return "it was removed, or was replaced under some of its names only"
        if tuple(value.shape) != self.param.shape or value.dtype != self.param.local.dtype:
            stored = f"{self.param.local.dtype} of shape {self.param.shape}"
            return f"expected {stored}, got {value.dtype} of shape {tuple(value.shape)}"
        if _placements_of(value) != _placements_of(copy):
            return f"expected placements {_placements_of(copy)}, got {_placements_of(value)}"
        for name, other in zip(self.param.names, self._found, strict=True):
            if other is not None and (_placements_of(other) != _placements_of(value) or not are_alike(value, other)):
                return f"{name} is the same parameter, but has other values. Give both names the same values"
        return None

    def _value(self) -> Tensor:
        value = self._found[0]
        assert value is not None, "else that is the problem"
        return local_if_any(value.detach())

    def changes_rows(self) -> bool:
        """Returns True if this rank's shard changes when the copy is written back."""
        if self.problem is not None:
            return False
        local = self.param.local
        rows = self.param.own_rows(self._value()).to(local.device)
        return not torch.equal(bits_of(rows), bits_of(local))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies this rank's rows of the value into its shard."""
        notices.notify()
        self.param.local.copy_(self.param.own_rows(self._value()))


def _placements_of(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _versions_of(copy: Tensor) -> tuple[int, int, int]:
    """Returns numbers of which at least one changes with an in-place operation, or when `.data` is assigned."""
    local = local_if_any(copy)
    return copy._version, local._version, local.data_ptr()


def _sums_of(copy: Tensor) -> list[int]:
    """Returns checksums, which change when `.data` is written to. No version counter shows such writes."""
    return read([word_sum(part) for part in values_of(copy)])


def _from_all_ranks(own: bytes, group: FSDPParamGroup) -> list[bytes]:
    """Returns `own` of each rank that shards or replicates the group. All of these ranks must call it."""
    comms, device = group.comms, group.mesh.device
    of_all = all_gather_now(own, comms.reduces, device)
    if comms.replicas is not None:
        joined = all_gather_now(b"".join(of_all), comms.replicas, device)
        of_all = [each[i : i + len(own)] for each in joined for i in range(0, len(each), len(own))]
    return of_all
