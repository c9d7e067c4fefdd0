"""Registers copies of unsharded parameters for a block of `full_params`, and writes them back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards.find import before_write
from ..shards.protocol import Ranks, ShardGroup, ShardParam
from ..shards.ranks import gather_bytes
from ..shards.tensors import are_alike, bits_of, checksum, local_if_any, read, values_of, word_sum

_DIGEST_NBYTES = 16
_CHANGED_MEANWHILE = (
    "the sharded parameters were changed inside the block, by an optimizer, for example. Step before the block, or "
    "after it"
)


class UnshardedCopies:
    """Holds copies of `params`, all of one group, in memory of their own. They take no gradient; they may be given
    copies of those that there are.
    """

    def __init__(self, group: ShardGroup, params: Sequence[ShardParam]) -> None:
        self._group, self._params = group, params
        self._copies: list[_Copy] = []
        # The versions that the sharded parameters had when they were copied.
        self._versions: tuple[int, ...] = ()

    def register(
        self, dtype: torch.dtype | None, device: torch.device, has_data: bool, with_grads: bool
    ) -> dict[ShardParam, nn.Parameter]:
        """Registers copies on `device`, in `dtype` or in the dtypes in which the parameters are stored, and returns
        them. Without `has_data` they are on meta. Every rank must call it.

        `with_grads`: they have copies of the whole gradients.
        """
        self._group.settle(may_be_meta=False)
        gradients = [_whole_gradient(param, dtype) if with_grads else None for param in self._params]
        self._versions = self._group.versions()
        gathered = self._group.copy_whole(self._params, dtype)
        self._group.begin_copies()
        with torch.inference_mode(False), torch.no_grad():
            for param, memory, gradient in zip(self._params, gathered, gradients, strict=True):
                own = memory.to(device, copy=True) if has_data else memory.to("meta")
                copied = param.as_parameter(own)
                if gradient is not None and (isinstance(copied, DTensor) or copied.shape != gradient.shape):
                    raise NotImplementedError(
                        f"{param.name}: with_grads is not supported under tensor parallelism. Call p.grad.full_tensor()"
                        " of the sharded parameter, on every rank."
                    )
                if gradient is not None:
                    copied.grad = gradient.to(device if has_data else "meta")
                self._copies.append(_Copy(param, copied))
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
        is_current = self._group.versions() == self._versions
        own = [copy.digest(is_current) + bytes([copy.changes_rows()]) for copy in self._copies]
        of_all = _from_all_ranks(b"".join(own), self._group.ranks)
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

    def __init__(self, param: ShardParam, parameter: nn.Parameter) -> None:
        self.param, self.parameter = param, parameter
        self.problem: str | None = None
        self.is_changed = False
        self._versions, self._sums = _versions_of(parameter), _sums_of(parameter)
        # The gradient that the copy was given, and its version.
        self._gradient = parameter.grad
        self._gradient_version = None if parameter.grad is None else parameter.grad._version
        # The parameter that was registered in each slot at the end.
        self._found: list[Tensor | None] = []
        param.register(parameter)

    def unregister(self) -> None:
        """Registers the sharded parameter again, and notes what was registered."""
        self._found = [module._parameters.get(name) for module, name in self.param.slots]
        self.param.register(self.param.parameter)

    def is_written(self) -> bool:
        """Returns True if it was modified or replaced."""
        is_replaced = any(each is not self.parameter for each in self._found)
        gradient = self._gradient
        if gradient is not None:
            is_replaced |= self.parameter.grad is not gradient or gradient._version != self._gradient_version
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
        if tuple(value.shape) != self.param.shape or value.dtype != self.param.dtype:
            stored = f"{self.param.dtype} of shape {self.param.shape}"
            return f"expected {stored}, got {value.dtype} of shape {tuple(value.shape)}"
        if _placements_of(value) != _placements_of(copy):
            return f"expected placements {_placements_of(copy)}, got {_placements_of(value)}"
        # Of a parameter that is tied to one of a module outside, not all slots have FQNs here.
        names = self.param.names if len(self.param.names) == len(self._found) else repeat(self.param.name)
        for name, other in zip(names, self._found, strict=False):
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
        rows = self.param.part_of(self._value()).to(local.device)
        return not torch.equal(bits_of(rows), bits_of(local))

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies this rank's rows of the value into its shard."""
        before_write()
        self.param.local.copy_(self.param.part_of(self._value()))


def _whole_gradient(param: ShardParam, dtype: torch.dtype | None) -> Tensor | None:
    """Returns a copy of the whole gradient of a parameter, or None. Every rank must call it."""
    gradient = param.parameter.grad
    if gradient is None:
        return None
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach().to(dtype or whole.dtype, copy=True)


def _placements_of(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _versions_of(copy: Tensor) -> tuple[int, int, int]:
    """Returns numbers of which at least one changes with an in-place operation, or when `.data` is assigned."""
    local = local_if_any(copy)
    return copy._version, local._version, local.data_ptr()


def _sums_of(copy: Tensor) -> list[int]:
    """Returns checksums, which change when `.data` is written to. No version counter shows such writes."""
    return read([word_sum(part) for part in values_of(copy)])


def _from_all_ranks(own: bytes, ranks: Ranks) -> list[bytes]:
    """Returns `own` of each rank that shards or replicates the group. All of these ranks must call it."""
    of_all = [own]
    for axis in ranks.axis_groups:
        joined = gather_bytes(b"".join(of_all), axis, ranks.device)
        of_all = [each[i : i + len(own)] for each in joined for i in range(0, len(each), len(own))]
    return of_all
