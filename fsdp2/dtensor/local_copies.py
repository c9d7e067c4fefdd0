"""Defines LocalCopy, which `to_local()` of a copied view of a DTensor returns (see copied_views.py).

As with `to_local()` of any DTensor, a write to it is a write to the DTensor that the view was taken of.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..engine.nested import map_tensors, tensors_in


class Original(Protocol):
    """The view that a local copy was taken of."""

    def refuse_outdated(self, copied: Tensor) -> None:
        """Raises an error if the values of the view have changed since `copied` was taken."""

    def write_own(self) -> None:
        """Writes the values of the local copy, which have changed, to the DTensor that the view was taken of."""


class LocalCopy(Tensor):
    """Is this rank's copy of a view, or a view of that copy. `plain`: a plain tensor over the same memory."""

    plain: Tensor
    original: Original

    @classmethod
    def of(cls, original: Original, plain: Tensor) -> LocalCopy:
        """Returns `plain`, which lies in the memory of a copy of `original`, as a LocalCopy."""
        copied = plain.as_subclass(cls)
        copied.plain, copied.original = plain, original
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        copies = [each for each in tensors_in(args, kwargs) if isinstance(each, LocalCopy)]
        for each in copies:
            each.original.refuse_outdated(each.plain)
        before = [version_of(each.plain) for each in copies]
        result = func(*map_tensors(args, _plain_of), **map_tensors(kwargs or {}, _plain_of))
        for each, version in zip(copies, before, strict=True):
            if version_of(each.plain) != version:
                each.original.write_own()
        return map_tensors(result, partial(_as_copy, copies))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.plain.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _plain_of(tensor: Tensor) -> Tensor:
    return tensor.plain if isinstance(tensor, LocalCopy) else tensor


def _as_copy(copies: list[LocalCopy], result: Tensor) -> Tensor:
    """Returns `result` as a LocalCopy if it lies in the memory of one of `copies`, and else `result` itself."""
    for each in copies:
        if type(result) is Tensor and address_of(result) == address_of(each.plain):
            return LocalCopy.of(each.original, result)
    return result


def address_of(tensor: Tensor) -> int:
    """Returns the address of the storage of a plain tensor."""
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: Tensor) -> int:
    """Returns the version of a tensor; 0 for one that was made in inference mode and has none."""
    return 0 if tensor.is_inference() else tensor._version
