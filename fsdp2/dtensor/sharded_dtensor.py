"""The class of sharded parameters, of their gradients, and of all that is computed of them.

torch's DTensor carries out some operations otherwise than plain tensors do, or has no rule for them. What fsdp2 does
instead is attached to this class, which `corrections/table.py` lists: torch's own DTensors stay what they are.

From 2.13 on torch asks a subclass of DTensor what to do. torch 2.11 and 2.12 do not: there the operations that are
replaced are found in torch's own table, by the mesh of what they are called with, and all DTensors pay for the look-up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import dtensor_compat
from .compat import DISPATCHES_TO_SUBCLASSES, local_of, new_dtensor, spec_of
from ..ext.once import once
from .write_notices import notices

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Operation -> what runs in its place, below autograd, if a ShardedDTensor is among its arguments.
_handlers: dict[Any, Handler] = {}
# Names of the class's attributes that `replace_attribute` has set.
_replaced: set[str] = set()
# What may change the text of an error about an operation.
_explainers: list[Callable[[Exception, Any, tuple[Any, ...], dict[str, Any]], None]] = []


class _Sharded(DTensor):
    """What a ShardedDTensor does whichever fixes are in force."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _are_others(types):
            return NotImplemented
        if is_mutable(op):
            notices.tell()
            return _handlers.get(op, call_unhandled)(op, args, kwargs or {})
        return as_sharded(_handlers.get(op, call_unhandled)(op, args, kwargs or {}))

    def to_local(self, **options: Any) -> Tensor:
        """As that of a DTensor."""
        notices.note_handed_out()
        return super().to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As that of a DTensor."""
        redistributed: DTensor = as_sharded(super().redistribute(*args, **options))
        return redistributed

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> DTensor:
        """For graphs that torch.compile makes."""
        rebuilt: DTensor = as_sharded(DTensor.__tensor_unflatten__(inner, spec, size, stride))
        return rebuilt

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Files hold a DTensor: whoever reads them need not have fsdp2."""
        return _twin(self).__reduce_ex__(protocol)


class ShardedDTensor(_Sharded):
    """A DTensor with what fsdp2 mends. Results of operations on it are such, too."""


@cache
def _are_others(types: Iterable[type]) -> bool:
    """Returns True if other subclasses of DTensor take part, which are to say what happens."""
    return any(
        issubclass(each, DTensor) and each is not DTensor and not issubclass(each, ShardedDTensor) for each in types
    )


def as_sharded(result: Any) -> Any:
    """Makes ShardedDTensors of torch's DTensors in `result`: a tensor, or a list or tuple. Returns `result`."""
    kind = type(result)
    if kind is DTensor:
        result.__class__ = ShardedDTensor
    elif kind is list or kind is tuple:
        for each in result:
            as_sharded(each)
    return result


def _twin(tensor: DTensor) -> DTensor:
    """Returns torch's DTensor over the same memory, with the same attributes: a leaf, if `tensor` is one."""
    twin = new_dtensor(DTensor, local_of(tensor), spec_of(tensor))
    twin.requires_grad_(tensor.requires_grad)
    twin.__dict__ = vars(tensor)
    return twin


def as_torchs(value: Any) -> Any:
    """Returns torch's DTensor in place of a ShardedDTensor, below autograd; also in a list or tuple."""
    kind = type(value)
    if kind is ShardedDTensor:
        return new_dtensor(DTensor, local_of(value), spec_of(value))
    if kind is list or kind is tuple:
        return [as_torchs(each) for each in value]
    return value


is_mutable = cache(lambda op: op._schema.is_mutable)


def handle_operations(ops: Iterable[Any], handler: Handler) -> None:
    """Has `handler(op, args, kwargs)` run in place of each of `ops`, below autograd, if a ShardedDTensor takes part."""
    for op in ops:
        _handlers[op] = handler
        if not DISPATCHES_TO_SUBCLASSES:
            _have_handlers_by_thread()
            _TorchsHandlers.usual[op] = _handle_if_sharded


def handler_of(op: Any) -> Handler:
    """Returns what runs in place of `op` now."""
    return _handlers.get(op, call_unhandled)


def replace_attribute(name: str, replace: Callable[[Any], Any]) -> None:
    """Has the class hold `replace(attribute)` under `name`, in place of the attribute that it holds or inherits."""
    setattr(ShardedDTensor, name, replace(getattr(ShardedDTensor, name)))
    _replaced.add(name)


def explain_errors(explain: Callable[[Exception, Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Has `explain(error, op, args, kwargs)` called with the errors that torch raises about operations."""
    _explainers.append(explain)


def forget_replacements() -> None:
    """Takes back all that these have set: the class is a DTensor in all it does."""
    _handlers.clear()
    _explainers.clear()
    for name in _replaced:
        delattr(ShardedDTensor, name)
    _replaced.clear()


def call_unhandled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what `op` returns of torch's DTensors."""
    try:
        if not DISPATCHES_TO_SUBCLASSES:
            return _call_without_handler(op, args, kwargs)
        if is_mutable(op):
            return _write(op, args, kwargs)
        return op(*map(as_torchs, args), **{name: as_torchs(each) for name, each in kwargs.items()})
    except (NotImplementedError, RuntimeError) as error:
        for explain in _explainers:
            explain(error, op, args, kwargs)
        raise


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op`, which writes to some of its arguments. They are returned where it returns them."""
    twins = [*map(as_torchs, args)]
    named_twins = {name: as_torchs(each) for name, each in kwargs.items()}
    result = op(*twins, **named_twins)
    written = dtensor_compat.written_by(op, args, kwargs)
    for each, twin in zip(written, dtensor_compat.written_by(op, tuple(twins), named_twins), strict=True):
        if isinstance(each, ShardedDTensor) and spec_of(twin) is not spec_of(each):
            dtensor_compat.set_local(each, local_of(twin), twin)
            if torch.Tag.inplace_view in op.tags:
                dtensor_compat.follow_local(op, args, kwargs)
    returns = op._schema.returns
    found = result if len(returns) > 1 else (result,)
    own = iter(written)
    returned = [
        next(own) if each.alias_info is not None else as_sharded(one) for each, one in zip(returns, found, strict=False)
    ]
    return tuple(returned) if len(returns) > 1 else returned[0] if returned else None


# ---- torch 2.11 and 2.12


class _TorchsHandlers(threading.local):
    """What torch looks up in place of its own table: `now`, on this thread; `usual`, on those that call nothing
    unhandled.

    To take a handler out of the one table that torch has would let another thread, which may be another rank, go on
    without it; and a lock meanwhile would let ranks wait for each other, for operations communicate.
    """

    usual: ClassVar[dict[Any, Handler]] = {}
    now: dict[Any, Handler] = usual


_torchs_handlers = _TorchsHandlers()


@once
def _have_handlers_by_thread() -> None:
    """Has torch look up handlers in `_torchs_handlers.now`; whoever replaces torch's dict replaces the usual one."""
    dispatcher: Any = DTensor._op_dispatcher

    def replace(_: Any, handlers: dict[Any, Handler]) -> None:
        _TorchsHandlers.usual = _TorchsHandlers.now = handlers

    replace(dispatcher, vars(dispatcher).pop("_custom_op_handlers"))
    dispatcher.fsdp2_handlers = _torchs_handlers
    # No function of Python's: it is called for each operation on a DTensor.
    by_thread = property(attrgetter("fsdp2_handlers.now"), replace)
    cls = type(dispatcher)
    dispatcher.__class__ = type(cls.__name__, (cls,), {"_custom_op_handlers": by_thread})
    dtensor_compat.explain_plans(_explain_plan)


def _explain_plan(error: Exception, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Operations without a handler fail where torch plans them."""
    if _is_on_mesh_in_use(args, kwargs):
        for explain in _explainers:
            explain(error, op, args, kwargs)


def _handle_if_sharded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_on_mesh_in_use(args, kwargs):
        return _call_without_handler(op, args, kwargs)
    result = handler_of(op)(op, args, kwargs)
    if is_mutable(op):
        return result
    is_sharded = any(isinstance(each, ShardedDTensor) for each in _dtensors_in((*args, *kwargs.values())))
    return as_sharded(result) if is_sharded else _as_torchs_own(result)


def _as_torchs_own(result: Any) -> Any:
    """Takes back `as_sharded`: below autograd all are torch's."""
    if type(result) is ShardedDTensor:
        result.__class__ = DTensor  # type: ignore[assignment]
    elif type(result) is list or type(result) is tuple:
        for each in result:
            _as_torchs_own(each)
    return result


def _is_on_mesh_in_use(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if a ShardedDTensor is among them, or a DTensor on the mesh of a sharded parameter."""
    return any(
        isinstance(each, ShardedDTensor) or each.device_mesh in dtensor_compat.meshes_in_use
        for each in _dtensors_in((*args, *kwargs.values()))
    )


def _dtensors_in(values: Iterable[Any]) -> Iterator[DTensor]:
    for each in values:
        if isinstance(each, DTensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _dtensors_in(each)


def _call_without_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = _torchs_handlers.now
    others = before.copy()
    others.pop(op, None)
    _torchs_handlers.now = others
    try:
        return op(*args, **kwargs)
    finally:
        if before is _TorchsHandlers.usual:
            del _torchs_handlers.now  # the usual ones, whichever these are by then
        else:
            _torchs_handlers.now = before


if not DISPATCHES_TO_SUBCLASSES:

    def _keep_class(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Operations return torch's DTensors there, also `clone`, which copying goes by."""
        if func is Tensor.__deepcopy__:
            return _deepcopy(*args)
        with dtensor_compat.no_torch_function():
            return as_sharded(func(*args, **(kwargs or {})))

    def _deepcopy(tensor: DTensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            twin = _twin(tensor)
            memo.setdefault(id(memo), []).append(twin)  # so that no other tensor has its identity
            copied = memo[id(tensor)] = as_sharded(twin.__deepcopy__(memo))
            if tensor.grad is not None:
                copied.grad = tensor.grad.__deepcopy__(memo)
        return memo[id(tensor)]

    ShardedDTensor.__torch_function__ = classmethod(_keep_class)  # type: ignore[assignment, method-assign]
