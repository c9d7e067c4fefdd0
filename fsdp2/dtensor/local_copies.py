"""What `to_local()` of a part of a DTensor returns (see parts.py): plain values, which know what they were copied from.

As with `to_local()` of the whole, what is written to them is written to what the part is of.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..core.user_code import map_tensors, tensors_in


class Original(Protocol):
    """What a local copy is of."""

    def refuse_outdated(self, copied: Tensor) -> None:
        """Raise if the original has other values by now than when `copied` was taken of it."""

    def write_own(self) -> None:
        """The memory of its local copies was written to: follow that."""


class LocalCopy(Tensor):
    """`plain`, this rank's copy of a part, or a view of it: what is written to it is written to what the part is of."""

    plain: Tensor
    part: Original

    @classmethod
    def of(cls, part: Original, plain: Tensor) -> LocalCopy:
        copied = plain.as_subclass(cls)
        copied.plain, copied.part = plain, part
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        copies = [each for each in tensors_in(args, kwargs) if isinstance(each, LocalCopy)]
        for each in copies:
            each.part.refuse_outdated(each.plain)
        before = [version_of(each.plain) for each in copies]
        result = func(*map_tensors(args, _behind), **map_tensors(kwargs or {}, _behind))
        for each, version in zip(copies, before, strict=True):
            if version_of(each.plain) != version:
                each.part.write_own()
        return map_tensors(result, partial(_as_copy, copies))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.plain.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _behind(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, LocalCopy) else tensor


def _as_copy(copies: list[LocalCopy], result: Tensor) -> Tensor:
    """What is in the memory of one of `copies` is one, too."""
    for each in copies:
        if type(result) is Tensor and memory_of(result) == memory_of(each.plain):
            return LocalCopy.of(each.part, result)
    return result


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
