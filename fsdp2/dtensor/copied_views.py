"""Makes views of a DTensor that torch returns as copies write to their base, as views of plain tensors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..engine.compat import local_of, new_dtensor, set_local
from ..engine.nested import map_tensors
from ..engine.write_notices import notices
from .compat import (
    cut,
    full_tensor_of,
    returned_of,
    returns_views,
    spec_of,
    written_by,
)
from .local_copies import LocalCopy, address_of, version_of
from .sharded_dtensor import ShardedDTensor

View = Callable[[Tensor], Tensor]

# All copied views that are alive, by identity.
_views: WeakValueDictionary[int, CopiedView] = WeakValueDictionary()


class CopiedView(ShardedDTensor):
    """Is a view of a DTensor, of which each rank holds a copy.

    `_base_tensor`: the DTensor that it is a view of, perhaps a copied view itself. `_take_view`: takes the same view of
    the full tensor of the base. `_copied_version`: the version that its origin had when the copy was made. The origin
    is the DTensor at the end of the chain of bases.
    """

    _base_tensor: DTensor
    _take_view: View
    _copied_version: int

    @classmethod
    def of(cls, base: DTensor, take_view: View, copied: DTensor) -> CopiedView:
        """Returns `copied`, which holds the values of `take_view(base)`, as a view."""
        view = cast(CopiedView, new_dtensor(cls, local_of(copied), spec_of(copied)))
        view._base_tensor, view._take_view, view._copied_version = base, take_view, version_of(_origin(base))
        _views[id(view)] = view
        return view

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if any(isinstance(each, CopiedView) for each in written_by(op, args, kwargs)):
            return _write(op, args, kwargs)
        result = op(*map_tensors(args, _plain), **map_tensors(kwargs, _plain))
        if isinstance(args[0], CopiedView) and returns_views(op):
            return as_views(result, args[0], op, args, kwargs)
        return result

    def full_tensor(self, **options: Any) -> Tensor:
        """Returns the values that the base has now."""
        _catch_up(self)
        return super().full_tensor(**options)

    def to_local(self, **options: Any) -> Tensor:
        """Returns this rank's copy. Unlike all other methods, it does not communicate."""
        self.refuse_outdated()
        return LocalCopy.of(self, super().to_local(**options))

    def refuse_outdated(self, copied: Tensor | None = None) -> None:
        """Refuses a copy that holds older values than the origin.

        Raises:
            RuntimeError: the origin has been written to since this view, or `copied` of it, was taken.
        """
        is_renewed = copied is not None and address_of(copied) != address_of(local_of(self))
        if is_renewed or version_of(_origin(self)) != self._copied_version:
            raise RuntimeError(
                f"to_local() of a view of a DTensor of global shape {tuple(_origin(self).shape)}: the DTensor has been "
                "written to since. Take the view again, or call full_tensor() on the view, on every rank."
            )

    def write_own(self) -> None:
        """Writes this rank's copy to the origin: all ranks have written the same to theirs."""
        _write_own(self)

    # Every rank calls these methods to plan a checkpoint, before it reads and writes local tensors.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        _catch_up(self)
        return super().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> Any:
        _catch_up(self)
        return super().__create_chunk_list__()

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied: DTensor = memo.setdefault(id(self), _plain(self).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


# ---- making views


def as_views(result: Any, base: DTensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns `result`, the return value of `op(*args)`, which views `base`, with CopiedViews in place of copies."""
    take_views = partial(_view, op, args[1:], kwargs)
    if isinstance(result, DTensor):
        return CopiedView.of(base, take_views, result) if _is_copied(base, result) else result
    return [
        CopiedView.of(base, partial(_item, take_views, i), each) if _is_copied(base, each) else each
        for i, each in enumerate(result)
    ]


def _view(op: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], full: Tensor) -> Any:
    return op(full, *rest, **kwargs)


def _item(take_views: Callable[[Tensor], Sequence[Tensor]], i: int, full: Tensor) -> Tensor:
    return take_views(full)[i]


def _is_copied(base: DTensor, result: DTensor) -> bool:
    """Returns True if `result` is a copy. Only the specs decide, which are equal on all ranks: an empty local tensor
    may lie in the memory of the base on some of them.
    """
    return isinstance(base, CopiedView) or _count_distributed(result) < _count_distributed(base)


def _count_distributed(tensor: DTensor) -> int:
    return sum(not each.is_replicate() for each in spec_of(tensor).placements)


# ---- reading and writing


def _plain(tensor: Any) -> Any:
    """Returns an up-to-date DTensor over the memory of a view that is not a view itself; other tensors as they are."""
    if not isinstance(tensor, CopiedView):
        return tensor
    _catch_up(tensor)
    copied: Any = new_dtensor(ShardedDTensor, local_of(tensor), spec_of(tensor))
    copied._base_tensor = tensor._base_tensor  # for errors
    return copied


def _catch_up(view: CopiedView) -> None:
    """Copies the present values of the origin to `view`. Every rank must call it."""
    origin = _origin(view)
    if version_of(origin) != view._copied_version:
        _update(view, _full_copy(origin))


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op` on full tensors, and keeps this rank's shards of those that it has written to.

    Raises:
        NotImplementedError: a tensor is distributed in a way for which this rank's shard isn't known.
    """
    written = [each for each in written_by(op, args, kwargs) if isinstance(each, DTensor)]
    origins = {id(origin): origin for origin in map(_origin, written)}
    notices.notify()
    for origin in origins.values():
        _refuse_strided(origin)
    full_tensors = {key: _full_copy(origin) for key, origin in origins.items()}

    def in_full(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        key = id(_origin(tensor))
        return _view_in(tensor, full_tensors[key] if key in full_tensors else _full_copy(_origin(tensor)))

    op(*map_tensors(args, in_full), **map_tensors(kwargs, in_full))
    for key, origin in origins.items():
        local_of(origin).copy_(_cut(full_tensors[key], origin))
    increment_version([each for each in origins.values() if not each.is_inference()])  # foreach operations don't
    for each in written:
        if isinstance(each, CopiedView):
            _update(each, full_tensors[id(_origin(each))])
    return returned_of(op, written)


def _origin(tensor: DTensor) -> DTensor:
    while isinstance(tensor, CopiedView):
        tensor = tensor._base_tensor
    return tensor


def _view_in(tensor: DTensor, full: Tensor) -> Tensor:
    """Returns the view of `full`, the full tensor of its origin, that `tensor` is."""
    return tensor._take_view(_view_in(tensor._base_tensor, full)) if isinstance(tensor, CopiedView) else full


def _full_copy(origin: DTensor) -> Tensor:
    """Returns a copy of the full tensor. Every rank must call it."""
    return full_tensor_of(origin).clone(memory_format=torch.contiguous_format)


def _cut(full: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's shard of `full`, distributed as `like` is."""
    return local_of(cut(full, like.device_mesh, like.placements))


def _update(view: CopiedView, full: Tensor) -> None:
    """Copies to `view` its values in `full`, the full tensor of its origin."""
    set_local(view, _cut(_view_in(view, full).contiguous(), view))
    view._copied_version = version_of(_origin(view))


@torch.no_grad()
def _write_own(view: CopiedView) -> None:
    """Writes this rank's copy of `view` to its shard of the origin. All ranks have the same copy.

    Raises:
        NotImplementedError: this rank does not have a copy of the whole view.
    """
    origin, copied = _origin(view), local_of(view)
    notices.notify()
    _refuse_strided(origin)
    if copied.shape != view.shape:
        raise NotImplementedError(
            f"writing to to_local() of a view of a DTensor of global shape {tuple(origin.shape)}, of which each rank "
            "has only a shard. Write to the view itself, on every rank."
        )
    others = [each for each in _views.values() if each is not view and _can_follow(each, view)]
    full, is_written = (copied.new_zeros(origin.shape, dtype=dtype) for dtype in (origin.dtype, torch.bool))
    _view_in(view, full).copy_(copied)
    _view_in(view, is_written).fill_(True)
    own, new, is_new = local_of(origin), _cut(full, origin), _cut(is_written, origin)
    own.copy_(torch.where(is_new.to(own.device), new.to(own.device), own))
    increment_version([origin])
    for each in others:
        _write_common(view, each)
    for each in (view, *others):  # they may share the memory of the origin, where each rank has all of it
        each._copied_version = version_of(origin)


def _can_follow(other: CopiedView, view: CopiedView) -> bool:
    """Returns True if `other` has the origin and the version of `view`, and this rank has a copy of all of it."""
    locals_ = [local_of(_origin(each)) for each in (other, view)]
    is_same_memory = len({(each.data_ptr(), each.shape) for each in locals_}) == 1
    is_same = is_same_memory and _origin(other).shape == _origin(view).shape
    return is_same and other._copied_version == view._copied_version and local_of(other).shape == other.shape


def _write_common(view: CopiedView, other: CopiedView) -> None:
    """Writes to `other` the elements that it has in common with `view`."""
    full = local_of(other).new_zeros(_origin(other).shape)
    _view_in(other, full).copy_(local_of(other))
    _view_in(view, full).copy_(local_of(view))
    local_of(other).copy_(_view_in(other, full))


def _refuse_strided(origin: DTensor) -> None:
    if not all(type(each) in (Shard, Replicate) for each in origin.placements):
        raise NotImplementedError(
            f"writing to a view of a DTensor of global shape {tuple(origin.shape)} and placements {origin.placements}: "
            "this is possible with Shard and Replicate only. Write to the whole DTensor, or, for a sharded parameter, "
            "inside `with fsdp2.full_params(module, writeback=True):`."
        )
