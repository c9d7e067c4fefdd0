"""Views of DTensors: refuses writes to those of which each rank holds a copy.

Torch returns copies for `p[2]`, `p.split(4)[0]` and `p.diagonal()` where ranks hold rows, and refuses `p.view(-1)`
where they hold different numbers of rows. A write to a copy would be lost, silently. So a copy can be read until the
DTensor is written to. It can be filled with a number, as layers do with padding rows, and programs that train some rows
of a weight only. All other writes raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..calls.nested import map_tensors
from ..devices.write_notices import notices
from ..torch_private.dtensor import full_tensor_of, name_of, returns_views, spec_of, written_by
from ..torch_private.internals import local_of, new_dtensor
from .making import cut, dtensor
from .refusals import advise, describe
from .sharded_dtensor import ShardedDTensor, call_unhandled, handle_operations

_aten = torch.ops.aten
# The views for which torch gathers: for the last one from 2.15 on, if there are fewer rows than ranks. All other views
# are in the memory of their base.
_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
    _aten.as_strided.default,
    _aten.t.default,
)
_FILLS = (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default)


def refuse_lost_writes() -> None:
    """Makes views that torch returns as copies refuse what a copy can't do. Every rank must take such a view."""
    handle_operations(_VIEWS, _take_view)
    handle_operations([_aten.view.default], _reshape)
    handle_operations([_aten.detach.default, _aten.alias.default], _share)


class CopiedView(ShardedDTensor):
    """A view of a DTensor of which each rank holds a copy."""

    # The DTensor of which this is a view, perhaps a copied view itself, and a function that takes the same view of the
    # full tensor of that.
    _base_tensor: DTensor
    _take_view: Callable[[Tensor], Tensor]
    # The version that the DTensor at the end of the chain of bases had when it was copied.
    _copied_version: int

    @classmethod
    def of(cls, base: DTensor, take_view: Callable[[Tensor], Tensor], copied: DTensor) -> CopiedView:
        """Returns `copied`, which holds the values of `take_view(base)`, as a view."""
        view = cast(CopiedView, new_dtensor(cls, local_of(copied), spec_of(copied)))
        view._base_tensor, view._take_view, view._copied_version = base, take_view, _version_of(_origin(base))
        return view

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        for each in written_by(op, args, kwargs):
            if isinstance(each, CopiedView):
                return _fill(each, op, args)
        result = op(*map_tensors(args, _plain), **map_tensors(kwargs, _plain))
        if isinstance(args[0], CopiedView) and returns_views(op):
            return _as_views(result, args[0], op, args, kwargs)
        return result

    def full_tensor(self, **options: Any) -> Tensor:
        """Returns what DTensor.full_tensor returns."""
        full: Tensor = _plain(self).full_tensor(**options)
        return full

    def to_local(self, **options: Any) -> Tensor:
        """Refuses to return this rank's copy.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{describe([self])}: to_local() of a view of it, of which each rank holds a copy: what is written to that "
            "copy would be lost. Call clone() on the view first, which is a tensor of its own, or full_tensor(), on "
            "every rank."
        )

    # A distributed checkpoint calls these methods: the first two to save, the other one to load in place.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return _plain(self).__create_write_items__(fqn, _plain(object))

    def __get_tensor_shard__(self, index: Any) -> Any:
        return _plain(self).__get_tensor_shard__(index)

    def __create_chunk_list__(self) -> NoReturn:
        raise NotImplementedError(
            f"{describe([self])}: a checkpoint can't be loaded into a view of it, of which each rank holds a copy. "
            "Load into clones of the views, call clone() on each, and pass the state dict to model.load_state_dict, "
            "which joins them, on every rank."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _take_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = call_unhandled(op, args, kwargs)
    return _as_views(result, args[0], op, args, kwargs) if _is_written_through(args[0]) else result


def _reshape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `p.view(-1)`, which torch refuses, or copies, if ranks have different numbers of rows."""
    base = args[0]
    try:
        return _take_view(op, args, kwargs)
    except RuntimeError:  # torch raises it when it plans the operation, on every rank
        if not _is_written_through(base):
            raise
    if tuple(args[1]) == tuple(base.shape):
        return dtensor(local_of(base).view(local_of(base).shape), spec_of(base))
    reshaped = op(full_tensor_of(base).contiguous(), *args[1:], **kwargs)
    return _as_views(cut(reshaped, base.device_mesh, [Replicate()] * base.device_mesh.ndim), base, op, args, kwargs)


def _share(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `detach` and `alias` in less time than torch."""
    return dtensor(op(local_of(args[0])), spec_of(args[0]))


def _is_written_through(base: DTensor) -> bool:
    """Returns True if writes to views of `base` must write to `base`.

    They need not if it is an activation, whose views autograd tracks, or a tensor without memory that torch.compile
    traces.
    """
    is_activation = torch.is_grad_enabled() and base.grad_fn is not None
    return type(base) in (DTensor, ShardedDTensor) and not is_activation and type(local_of(base)) is Tensor


def _as_views(result: Any, base: DTensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns `result`, the return value of `op(*args)`, which views `base`, with CopiedViews in place of copies."""

    def take_views(full: Tensor) -> Any:
        return op(full, *args[1:], **kwargs)

    if isinstance(result, DTensor):
        return CopiedView.of(base, take_views, result) if _is_copied(base, result) else result
    return [
        CopiedView.of(base, partial(_item, take_views, i), each) if _is_copied(base, each) else each
        for i, each in enumerate(result)
    ]


def _item(take_views: Callable[[Tensor], Sequence[Tensor]], i: int, full: Tensor) -> Tensor:
    return take_views(full)[i]


def _is_copied(base: DTensor, result: DTensor) -> bool:
    """Returns True if `result` is a copy. Only the specs decide, which are equal on all ranks: an empty local tensor
    may lie in the memory of the base on some of them.
    """
    return isinstance(base, CopiedView) or _count_distributed(result) < _count_distributed(base)


def _count_distributed(tensor: DTensor) -> int:
    return sum(not each.is_replicate() for each in spec_of(tensor).placements)


def _plain(tensor: Any) -> Any:
    """Returns a DTensor over the memory of a copied view that is not a view itself; other tensors as they are.

    Raises:
        RuntimeError: the copy holds older values than the DTensor of which it is a view.
    """
    if not isinstance(tensor, CopiedView):
        return tensor
    if _version_of(_origin(tensor)) != tensor._copied_version:
        raise RuntimeError(
            f"{describe([tensor])}: it has been written to since this view of it was taken, of which each rank holds a "
            "copy. Take the view again, or the state dict that has it, on every rank."
        )
    copied: Any = new_dtensor(ShardedDTensor, local_of(tensor), spec_of(tensor))
    copied._base_tensor = tensor._base_tensor  # for errors
    return copied


def _fill(view: CopiedView, op: Any, args: tuple[Any, ...]) -> CopiedView:
    """Fills `view` with a number: each rank fills the elements that are in its shard.

    Raises:
        NotImplementedError: `op` does something else, or this rank's shard isn't known.
    """
    value, origin = [*args[1:2], 0][0], _origin(view)
    is_number = not isinstance(value, Tensor) or (type(value) is Tensor and not value.dim())
    if op not in _FILLS or not is_number or not all(type(each) in (Shard, Replicate) for each in origin.placements):
        raise NotImplementedError(
            f"{describe([view])}: {name_of(op)} of a view of it, of which each rank holds a copy, would be lost. Such "
            f"a view can be filled with a number only (where no two mesh axes cut a dim). {advise(name_of(op), [view])}"
        )
    notices.notify()
    local = local_of(origin)
    is_filled = torch.zeros(origin.shape, dtype=torch.bool, device=local.device)
    _view_in(view, is_filled).fill_(True)
    own = local_of(cut(is_filled, origin.device_mesh, origin.placements))
    local.masked_fill_(own, value.to(local) if isinstance(value, Tensor) else value)
    return view  # autograd, from which it has the version counter of its base, increments that


def _origin(tensor: DTensor) -> DTensor:
    while isinstance(tensor, CopiedView):
        tensor = tensor._base_tensor
    return tensor


def _view_in(tensor: DTensor, full: Tensor) -> Tensor:
    """Returns the view of `full`, the full tensor of its origin, that `tensor` is."""
    return tensor._take_view(_view_in(tensor._base_tensor, full)) if isinstance(tensor, CopiedView) else full


def _version_of(tensor: DTensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
