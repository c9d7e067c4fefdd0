"""`p[2]`, `p.split(4)[0]`, `p.diagonal()`: parts of a DTensor that torch hands out as copies, where ranks hold rows;
and `p.view(-1)`, which it refuses where they hold different numbers of rows.

What is written to a copy is lost, without a word: `embedding.weight[padding_idx].zero_()`, or rows of a gradient
cleared. Ours know what they are parts of, and write there, as views of plain tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import dtensor_compat
from .compat import local_of, set_local, spec_of
from .sharded_dtensor import ShardedDTensor, call_unhandled, handle_operations, handler_of
from ..core.user_code import map_tensors, tensors_in
from .write_notices import notices
from .local_copies import LocalCopy, memory_of, version_of

_aten = torch.ops.aten
# Views that torch gathers for: the last, from 2.15 on, of fewer rows than ranks. All others are in the memory of what
# they are views of.
_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
    _aten.as_strided.default,
    _aten.unbind.int,
    _aten.t.default,
)
View = Callable[[Tensor], Tensor]


def write_through_parts() -> None:
    """From now on writing to a part of a DTensor writes to the DTensor, and `p[...] = 0` is possible. It gathers the
    whole on every rank, each of which must do it, as each must to take the part.
    """
    handle_operations(_VIEWS, _take_part)
    handle_operations([_aten.view.default], _reshape)
    handle_operations([_aten.detach.default, _aten.alias.default], _share)
    handle_operations([_aten.fill_.Tensor], _fill)
    global _are_dispatched_to
    _are_dispatched_to = dtensor_compat.DISPATCHES_TO_SUBCLASSES


# Whether operations on parts are sent to them: torch 2.11 has to be told, when there is one.
_are_dispatched_to = True
# All of them, by identity.
_parts: WeakValueDictionary[int, Part] = WeakValueDictionary()


class Part(ShardedDTensor):
    """`view(base)`, of which each rank holds a copy."""

    _base_of: DTensor
    _view_of: View
    _version_of: int

    @classmethod
    def of(cls, base: DTensor, view: View, copied: DTensor) -> Part:
        part = cast(Part, dtensor_compat.new_dtensor(cls, local_of(copied), spec_of(copied)))
        part._base_of, part._view_of, part._version_of = base, view, version_of(_root(base))
        _parts[id(part)] = part
        if not _are_dispatched_to:
            _dispatch_to_parts()
        return part

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if any(isinstance(each, Part) for each in dtensor_compat.written_by(op, args, kwargs)):
            return _write(op, args, kwargs)
        result = op(*map_tensors(args, _plain), **map_tensors(kwargs, _plain))
        if isinstance(args[0], Part) and dtensor_compat.is_view(op):
            return _as_parts(result, args[0], op, args, kwargs)
        return result

    def full_tensor(self, **options: Any) -> Tensor:
        _catch_up(self)
        return super().full_tensor(**options)

    def to_local(self, **options: Any) -> Tensor:
        """Without communication, unlike all else here."""
        self.refuse_outdated()
        return LocalCopy.of(self, super().to_local(**options))

    def refuse_outdated(self, copied: Tensor | None = None) -> None:
        """
        Raises:
            RuntimeError: the whole has been written to since this part, or `copied` of it, was taken.
        """
        is_renewed = copied is not None and memory_of(copied) != memory_of(local_of(self))
        if is_renewed or version_of(_root(self)) != self._version_of:
            raise RuntimeError(
                f"to_local() of a part of a DTensor of global shape {tuple(_root(self).shape)}: the whole has been "
                "written to since. Take the part again, or call full_tensor() on the part, on every rank."
            )

    def write_own(self) -> None:
        _write_own(self)

    # Checkpoints are planned by these on every rank, and then read and written by `to_local()`.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        _catch_up(self)
        return super().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> Any:
        _catch_up(self)
        return super().__create_chunk_list__()

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return memo.setdefault(id(self), _plain(self).clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


def _take_part(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    if dtensor_compat.has_numbers_for_all(base):
        return _take_alike(op, args, kwargs)
    if op is _aten.unbind.int and Shard([*args[1:], 0][0] % base.dim()) in base.placements:
        return _unbind_rows(op, args, kwargs)
    result = call_unhandled(op, args, kwargs)
    return _as_parts(result, base, op, args, kwargs) if _has_parts(base) else result


def _take_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of each rank's memory, where ranks have all elements, or parts of each. From 2.15 on torch would bring
    parts of norms and products together, in other memory.
    """
    views = op(local_of(args[0]), *args[1:], **kwargs)
    return map_tensors(views, partial(dtensor_compat.dtensor_like, args[0]))


def _unbind_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`for row in p`: each rank gets all rows, as by `p[i]`, by one gather. Torch refuses to."""
    base, mesh = args[0], args[0].device_mesh
    rows = op(dtensor_compat.whole_of(base).clone(), *args[1:], **kwargs)
    replicated = [dtensor_compat.cut(each.contiguous(), mesh, [Replicate()] * mesh.ndim) for each in rows]
    return _as_parts(replicated, base, op, args, kwargs) if _has_parts(base) else replicated


def _share(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for `detach()`, of any DTensor, for torch takes longer."""
    if dtensor_compat.is_masked(args[0]):
        return call_unhandled(op, args, kwargs)
    return dtensor_compat.dtensor(op(local_of(args[0])), spec_of(args[0]))


def _reshape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`p.view(-1)`: the rows of all ranks are no shards of it, unless each has as many. Torch refuses to, or copies."""
    base = args[0]
    try:
        result = call_unhandled(op, args, kwargs)
        return _as_parts(result, base, op, args, kwargs) if _has_parts(base) else result
    except RuntimeError:  # of planning: on every rank
        if not _has_parts(base) or any(each.is_partial() for each in base.placements):
            raise
    if tuple(args[1]) == tuple(base.shape):
        return dtensor_compat.dtensor(local_of(base).view(local_of(base).shape), spec_of(base))
    whole = op(dtensor_compat.whole_of(base).contiguous(), *args[1:], **kwargs)
    replicated = dtensor_compat.cut(whole, base.device_mesh, [Replicate()] * base.device_mesh.ndim)
    return _as_parts(replicated, base, op, args, kwargs)


def _has_parts(base: DTensor) -> bool:
    """Not if it is an activation, of which autograd keeps what is written; what torch.compile traces is no memory."""
    is_activation = torch.is_grad_enabled() and base.grad_fn is not None
    return type(base) in (DTensor, ShardedDTensor) and not is_activation and type(local_of(base)) is Tensor


def _as_parts(result: Any, base: DTensor, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op(*args)` has returned: views of `base`, or copies, which become parts."""
    view = partial(_view, op, args[1:], kwargs)
    if isinstance(result, DTensor):
        return Part.of(base, view, result) if _is_copied(base, result) else result
    return [
        Part.of(base, partial(_item, view, i), each) if _is_copied(base, each) else each
        for i, each in enumerate(result)
    ]


def _view(op: Any, rest: tuple[Any, ...], kwargs: dict[str, Any], whole: Tensor) -> Any:
    return op(whole, *rest, **kwargs)


def _item(view: Callable[[Tensor], Sequence[Tensor]], i: int, whole: Tensor) -> Tensor:
    return view(whole)[i]


def _is_copied(base: DTensor, result: DTensor) -> bool:
    """Of the specs alone, which all ranks have in common: memory may be the same on one that holds nothing of it."""
    return isinstance(base, Part) or _count_distributed(result) < _count_distributed(base)


def _count_distributed(tensor: DTensor) -> int:
    return sum(not each.is_replicate() for each in spec_of(tensor).placements)


def _dispatch_to_parts() -> None:
    """torch 2.11 sends operations on parts where those on any DTensor go. What is only read is not renewed there."""
    global _are_dispatched_to
    _are_dispatched_to = True
    for op in dtensor_compat.views_and_writes():
        handle_operations([op], partial(_parts_first, handler_of(op)))


def _parts_first(handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(each, Part) for each in tensors_in(args, kwargs)):
        return Part.__torch_dispatch__(op, (), args, kwargs)
    return handler(op, args, kwargs)


# ---- reading and writing


def _plain(tensor: Any) -> Any:
    """What is in the memory of a part, which has the values of what it is part of, and is none itself."""
    if not isinstance(tensor, Part):
        return tensor
    _catch_up(tensor)
    copied: Any = dtensor_compat.new_dtensor(ShardedDTensor, local_of(tensor), spec_of(tensor))
    copied._base_of = tensor._base_of  # for errors
    return copied


def _catch_up(part: Part) -> None:
    """Give `part` what it is of its root now. Every rank must call it."""
    root = _root(part)
    if version_of(root) != part._version_of:
        _renew(part, _whole(root))


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out `op` on whole tensors, and keep what it has written of them.

    Raises:
        NotImplementedError: they are distributed in a way of which this rank's part isn't known.
    """
    written = [each for each in dtensor_compat.written_by(op, args, kwargs) if isinstance(each, DTensor)]
    roots = {id(root): root for root in map(_root, written)}
    notices.tell()
    for root in roots.values():
        _refuse_strided(root)
    wholes = {key: _whole(root) for key, root in roots.items()}

    def in_whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        key = id(_root(tensor))
        return _view_in(tensor, wholes[key] if key in wholes else _whole(_root(tensor)))

    op(*map_tensors(args, in_whole), **map_tensors(kwargs, in_whole))
    for key, root in roots.items():
        local_of(root).copy_(_cut(wholes[key], root))
    increment_version([root for root in roots.values() if not root.is_inference()])  # foreach operations don't
    for each in written:
        if isinstance(each, Part):
            _renew(each, wholes[id(_root(each))])
    return dtensor_compat.returned_of(op, written)


def _root(tensor: DTensor) -> DTensor:
    while isinstance(tensor, Part):
        tensor = tensor._base_of
    return tensor


def _view_in(tensor: DTensor, whole: Tensor) -> Tensor:
    """What `tensor` is of `whole`, its root's."""
    return tensor._view_of(_view_in(tensor._base_of, whole)) if isinstance(tensor, Part) else whole


def _whole(root: DTensor) -> Tensor:
    """A copy. Every rank must call it."""
    return dtensor_compat.whole_of(root).clone(memory_format=torch.contiguous_format)


def _cut(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of `whole`."""
    return local_of(dtensor_compat.cut(whole, like.device_mesh, like.placements))


def _renew(part: Part, whole: Tensor) -> None:
    """Give `part` what it is of `whole`, its root's."""
    set_local(part, _cut(_view_in(part, whole).contiguous(), part))
    part._version_of = version_of(_root(part))


@torch.no_grad()
def _write_own(part: Part) -> None:
    """Write this rank's copy of `part` to what the rank has of its root: all ranks have written the same.

    Raises:
        NotImplementedError: the rank's is not all of `part`.
    """
    root, copied = _root(part), local_of(part)
    notices.tell()
    _refuse_strided(root)
    if copied.shape != part.shape:
        raise NotImplementedError(
            f"writing to to_local() of a part of a DTensor of global shape {tuple(root.shape)}, of which each rank has "
            "some only. Write to the part itself, on every rank."
        )
    others = [each for each in _parts.values() if each is not part and _is_beside(each, part)]
    whole, is_written = (copied.new_zeros(root.shape, dtype=dtype) for dtype in (root.dtype, torch.bool))
    _view_in(part, whole).copy_(copied)
    _view_in(part, is_written).fill_(True)
    own, new, is_new = local_of(root), _cut(whole, root), _cut(is_written, root)
    own.copy_(torch.where(is_new.to(own.device), new.to(own.device), own))
    increment_version([root])
    for each in others:
        _write_beside(part, each)
    for each in (part, *others):  # whose memory may be that of the root, where ranks have all
        each._version_of = version_of(root)


def _is_beside(other: Part, part: Part) -> bool:
    """Whether it is a part of the same, as up to date as `part`, and this rank's copy is all of it."""
    roots = [local_of(_root(each)) for each in (other, part)]
    is_same = len({(each.data_ptr(), each.shape) for each in roots}) == 1 and _root(other).shape == _root(part).shape
    return is_same and other._version_of == part._version_of and local_of(other).shape == other.shape


def _write_beside(part: Part, other: Part) -> None:
    """Write to `other` what it has of `part`."""
    whole = local_of(other).new_zeros(_root(other).shape)
    _view_in(other, whole).copy_(local_of(other))
    _view_in(part, whole).copy_(local_of(part))
    local_of(other).copy_(_view_in(other, whole))


def _refuse_strided(root: DTensor) -> None:
    if not all(type(each) in (Shard, Replicate) for each in root.placements):
        raise NotImplementedError(
            f"writing to a part of a DTensor of global shape {tuple(root.shape)} and placements {root.placements}: "
            "this is possible with Shard and Replicate only. Write to all of it, or, of a sharded parameter, inside "
            "`with fsdp2.full_params(module, writeback=True):`."
        )


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With a tensor, as `p[:, 1] = 0` does. Torch refuses to."""
    target, value = args
    dtensor_compat.refuse_plain_target(op, target)
    if any(each.is_partial() for each in target.placements):
        return call_unhandled(op, args, kwargs)
    local_of(target).fill_(dtensor_compat.whole_of(value) if isinstance(value, DTensor) else value)
    return target
