"""Defines ShardedDTensor, the class of sharded parameters, of their gradients, and of all results computed from them.

torch's DTensor computes other results for some operations than plain tensors do, or has no rule for them. The fixes of
this folder are attached to this class: other DTensors behave like torch's.

An operation on a ShardedDTensor takes one way:

1. A handler: the function that a fix has set for that operation (`handle_operations`).
2. Else DTensor's own rule (`call_unhandled`). It refuses what it has no rule for, and plain tensors among DTensors; the
   error names the parameter and says what to write.
3. A result that the rule leaves Partial, a norm or a sum for example, is an UnreducedDTensor. An operation that
   computes with it gets the reduced value. So no operation takes what each rank has for what all have.

The class of an operand decides. Other DTensors, those of torch's FSDP2 or of tensor parallelism for example, run
torch's code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter

from ..calls.nested import map_tensors
from ..devices.write_notices import notices
from ..engine.owners import sharded_owner
from ..engine.parameter import USER_CLASS
from ..parameters import saved_shards
from ..torch_private.dtensor import DTensorSpec, follow_local, is_partial, set_local_and_spec, spec_of, written_by
from ..torch_private.internals import local_of, new_dtensor, set_grad_dtype
from ..torch_private.once import once
from .making import reduced

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Operation -> the function that replaces it, below autograd, if a ShardedDTensor is among its arguments.
_handlers: dict[Any, Handler] = {}
# Functions that may change the text of an error about an operation.
_explainers: list[Callable[[Exception, Any, tuple[Any, ...], dict[str, Any]], None]] = []


class ShardedDTensor(DTensor):
    """A DTensor with the fixes. Results of operations on it have this class, too."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _has_other_subclasses(types):
            return NotImplemented
        if is_mutable(op):
            notices.notify()
            return _handlers.get(op, call_unhandled)(op, args, kwargs or {})
        return as_sharded(_handlers.get(op, call_unhandled)(op, args, kwargs or {}))

    def to_local(self, **options: Any) -> Tensor:
        """Returns what DTensor.to_local returns."""
        notices.note_returned()
        return super().to_local(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """Returns what DTensor.redistribute returns, of this class."""
        redistributed: DTensor = as_sharded(super().redistribute(*args, **options))
        return redistributed

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of `.grad`; None: any."""
        return super().grad_dtype

    @grad_dtype.setter
    def grad_dtype(self, dtype: torch.dtype | None) -> None:
        owner = sharded_owner(self)
        if owner is None:
            set_grad_dtype(self, dtype)
        else:
            owner.group.choose_grad_dtype(owner.param, dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> DTensor:
        """Rebuilds a tensor in graphs that torch.compile makes."""
        rebuilt: DTensor = as_sharded(DTensor.__tensor_unflatten__(inner, spec, size, stride))
        return rebuilt

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles torch's DTensor, so that a program that reads the file need not have fsdp2; and says whose shard it
        is, since the file has no other.
        """
        tensor = _with_torch_class(self)
        tensor.__dict__ = {name: value for name, value in vars(self).items() if name != _VALUE}
        saved_shards.mark(tensor)
        return tensor.__reduce_ex__(protocol)


class _Value:
    """The reduced value of an UnreducedDTensor, and of the tensors that were detached from it, which have its memory.
    Autograd, too, detaches what it saves.
    """

    def __init__(self) -> None:
        # None: no operation has needed it yet.
        self.reduced: DTensor | None = None
        self._tensors: list[weakref.ref[UnreducedDTensor]] = []

    def belongs_to(self, tensor: UnreducedDTensor) -> None:
        """Notes a tensor that has this value."""
        self._tensors.append(weakref.ref(tensor))
        vars(tensor)[_VALUE] = self

    def put_into_tensors(self) -> None:
        """Makes ShardedDTensors of all tensors that have this value: one of them is about to be written to."""
        for each in [each() for each in self._tensors]:
            if each is not None and self.reduced is not None:
                set_local_and_spec(each, local_of(self.reduced).detach(), self.reduced)
                each.__class__ = ShardedDTensor  # type: ignore[assignment]


# The attribute of an UnreducedDTensor that holds its _Value.
_VALUE = "_reduced_value"


class UnreducedDTensor(ShardedDTensor):
    """The result of an operation on ShardedDTensors that DTensor's rule has left Partial: a norm, a sum.

    An operation that computes with it gets the reduced value; all ranks must call that operation. The tensor itself
    stays as it is: the reduced value is kept next to it, and serves later operations. Only an operation that writes to
    the tensor makes a ShardedDTensor of it. Sums and multiples of sums, as in a penalty, and `stack`, as in clipping,
    are left to DTensor's rules where all are distributed alike: one reduction serves all. `to_local()` returns this
    rank's part.
    """

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _has_other_subclasses(types):
            return NotImplemented
        kwargs = kwargs or {}
        if op is _aten.detach.default or op is _aten.alias.default:
            detached = super().__torch_dispatch__(op, types, args, kwargs)
            args[0]._value().belongs_to(detached)
            return detached
        for each in written_by(op, args, kwargs):
            if isinstance(each, UnreducedDTensor):
                each._reduced()
                each._value().put_into_tensors()
        if op in _JOINS:
            known = list(map(_known_value_of, args[0]))
            if len({isinstance(each, DTensor) and spec_of(each).placements for each in known}) == 1:
                return super().__torch_dispatch__(op, types, (known, *args[1:]), kwargs)
        if op in _LINEAR:
            args = tuple(map(_known_value_of, args))
            if all(_is_sum(each) for each in args if isinstance(each, UnreducedDTensor)):
                return super().__torch_dispatch__(op, types, args, kwargs)
        elif (
            op is _aten._local_scalar_dense.default and args[0].dtype != torch.bool and args[0]._value().reduced is None
        ):
            raise _error_of_unreduced(spec_of(args[0]), "item")
        return op(*map_tensors(args, _reduced_value_of), **map_tensors(kwargs, _reduced_value_of))

    def full_tensor(self, **options: Any) -> Tensor:
        """Returns what DTensor.full_tensor returns."""
        copied: Any = self.clone()
        full: Tensor = copied.full_tensor(**options)
        return full

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """Returns what DTensor.redistribute returns."""
        copied: Any = self.clone()
        redistributed: DTensor = copied.redistribute(*args, **options)
        return redistributed

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone()) if self.is_leaf else super().__deepcopy__(memo)

    def _value(self) -> _Value:
        if _VALUE not in vars(self):
            _Value().belongs_to(self)
        value: _Value = vars(self)[_VALUE]
        return value

    def _reduced(self) -> DTensor:
        """Returns the reduced value. All ranks must call it."""
        value = self._value()
        if value.reduced is None:
            value.reduced = reduced(self)
        return value.reduced


def _known_value_of(operand: Any) -> Any:
    """Returns the reduced value of an UnreducedDTensor that an operation has needed before; else the operand itself."""
    value = vars(operand).get(_VALUE) if isinstance(operand, UnreducedDTensor) else None
    return operand if value is None or value.reduced is None else value.reduced


def _reduced_value_of(tensor: Tensor) -> Tensor:
    return tensor._reduced() if isinstance(tensor, UnreducedDTensor) else tensor


_aten = torch.ops.aten
_JOINS = (_aten.stack.default, _aten.cat.default)
_LINEAR = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.neg.default)


def _is_sum(tensor: DTensor) -> bool:
    """Returns True if each rank has an addend of the value, or of a mean. Whole numbers and truths are reduced first:
    where DTensor adds a number that all ranks have to an addend, it divides that number by the ranks.
    """
    kinds = {(type(each), each.reduce_op) for each in spec_of(tensor).placements if isinstance(each, Partial)}
    return tensor.dtype.is_floating_point and kinds <= {(Partial, "sum"), (Partial, "avg")}


def _error_of_unreduced(spec: DTensorSpec, method: str) -> RuntimeError:
    """Returns the error for `item()`, which one rank alone may call, to print the number. The truth of a bool is
    reduced instead, because all ranks execute `if p.isnan().any():`.
    """
    placement = next(each for each in spec.placements if each.is_partial())
    return RuntimeError(
        f"{method}() of a DTensor of placement {placement}: this rank holds a value that is still to be reduced. "
        "Call full_tensor().item() instead, on every rank."
    )


@once
def look_up_in_user_classes() -> None:
    """Has sharded parameters find what their users' classes define. Attributes that are missing take longer then."""
    ShardedDTensor.__getattr__ = _find_in_user_class  # type: ignore[attr-defined]


def _find_in_user_class(self: DTensor, name: str) -> Any:
    """Finds what the user's class of a parameter defines besides what tensors have (see FSDPParam)."""
    for cls in vars(self).get(USER_CLASS, object).__mro__:
        if cls is Tensor or cls is Parameter:
            break
        if name in vars(cls):
            found = vars(cls)[name]
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@cache
def _has_other_subclasses(types: Iterable[type]) -> bool:
    """Returns True if other subclasses of DTensor are among `types`, whose `__torch_dispatch__` then decides."""
    return any(
        issubclass(each, DTensor) and each is not DTensor and not issubclass(each, ShardedDTensor) for each in types
    )


def as_sharded(result: Any) -> Any:
    """Makes ShardedDTensors, or UnreducedDTensors, of torch's DTensors in `result`: a tensor, or a list or tuple.
    Returns `result`.
    """
    kind = type(result)
    if kind is DTensor or kind is ShardedDTensor:
        result.__class__ = UnreducedDTensor if is_partial(result) else ShardedDTensor
    elif kind is list or kind is tuple:
        for each in result:
            as_sharded(each)
    return result


def _with_torch_class(tensor: DTensor) -> DTensor:
    """Returns a torch DTensor over the same memory, with the same attributes. It is a leaf."""
    copied = new_dtensor(DTensor, local_of(tensor), spec_of(tensor))
    copied.requires_grad_(tensor.requires_grad)
    copied.__dict__ = vars(tensor)
    return copied


def _as_dtensor(value: Any) -> Any:
    """Returns torch's DTensor in place of a ShardedDTensor, below autograd; also in a list or tuple."""
    kind = type(value)
    if kind is ShardedDTensor or kind is UnreducedDTensor:
        return new_dtensor(DTensor, local_of(value), spec_of(value))
    if kind is list or kind is tuple:
        return [_as_dtensor(each) for each in value]
    return value


is_mutable = cache(lambda op: op._schema.is_mutable)


# ---- what fixes attach


def handle_operations(ops: Iterable[Any], handler: Handler) -> None:
    """Calls `handler(op, args, kwargs)` in place of each of `ops`, below autograd, if a ShardedDTensor is among the
    arguments.
    """
    for op in ops:
        _handlers[op] = handler


def handler_of(op: Any) -> Handler:
    """Returns the function that replaces `op` now."""
    return _handlers.get(op, call_unhandled)


def explain_errors(explain: Callable[[Exception, Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Calls `explain(error, op, args, kwargs)` with the errors that torch raises about operations."""
    _explainers.append(explain)


def replace_attribute(name: str, replace: Callable[[Any], Any]) -> None:
    """Sets the attribute `name` of ShardedDTensor to `replace(attribute)`, of the one that it has or inherits."""
    setattr(ShardedDTensor, name, replace(getattr(ShardedDTensor, name)))


# ---- torch's own operations


def call_unhandled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `op` for torch's DTensors in place of ShardedDTensors."""
    try:
        if is_mutable(op):
            return _write(op, args, kwargs)
        return op(*map(_as_dtensor, args), **{name: _as_dtensor(each) for name, each in kwargs.items()})
    except (NotImplementedError, RuntimeError, ValueError) as error:
        for explain in _explainers:
            explain(error, op, args, kwargs)
        raise


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op`, which writes to some of its arguments, and returns these where `op` returns them."""
    dtensors = [*map(_as_dtensor, args)]
    named_dtensors = {name: _as_dtensor(each) for name, each in kwargs.items()}
    result = op(*dtensors, **named_dtensors)
    written = written_by(op, args, kwargs)
    for each, dtensor in zip(written, written_by(op, tuple(dtensors), named_dtensors), strict=True):
        if isinstance(each, ShardedDTensor) and spec_of(dtensor) is not spec_of(each):
            set_local_and_spec(each, local_of(dtensor), dtensor)
            if torch.Tag.inplace_view in op.tags:
                follow_local(op, args, kwargs)
    returns = op._schema.returns
    found = result if len(returns) > 1 else (result,)
    own = iter(written)
    returned = [
        next(own) if each.alias_info is not None else as_sharded(one) for each, one in zip(returns, found, strict=False)
    ]
    return tuple(returned) if len(returns) > 1 else returned[0] if returned else None
