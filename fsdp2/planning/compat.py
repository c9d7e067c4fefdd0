"""Holds the private names of torch that the plan uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

__all__ = [
    "NO_SPLIT",
    "RUN_POLICY",
    "PlainDispatchMode",
    "fake_mode",
    "flop_formulas",
    "is_fake",
    "mesh_of_numbers",
    "no_dispatch",
    "run_backward",
]

NO_SPLIT = "_no_split_modules"
"""The attribute in which models of Transformers name the classes of their blocks."""
RUN_POLICY = "_run_policy"
"""The method of torch's ModuleWrapPolicy and CustomPolicy that names the modules to shard."""
_READ_DEVICE: Any = torch.ops.prim.device.default
# Context: operations are not dispatched to Python.
no_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch


class PlainDispatchMode(TorchDispatchMode):
    """Is a TorchDispatchMode whose own code is not hidden from dynamo, which would take as long as all it does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_mode(after: Callable[[Any, Any, Any, Any], None]) -> FakeTensorMode:
    """Returns a context in which operations compute shapes, dtypes and storages, and no values.

    `after(operation, args, kwargs, out)` is called behind each operation, but not behind those of which it is made.

    It is torch's FakeTensorMode. Blocks of a model repeat their operations: what torch returns from its own cache is
    made here of a shorter key, in half the time.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

    class Mode(FakeTensorMode):
        """Calls `after`. It goes round what torch's own mode does to hide from dynamo and to count calls."""

        def __init__(self) -> None:
            super().__init__(allow_non_fake_inputs=True)
            self._is_inside = False
            self._known: dict[Any, tuple[_Result, ...]] = {}

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _READ_DEVICE and isinstance(args[0], FakeTensor):  # autograd does for each gradient
                return args[0].fake_device
            kwargs = kwargs or {}
            if self._is_inside:
                return self.dispatch(func, types, args, kwargs)
            key = self._key_of(func, args, kwargs)
            known = None if key is None else self._known.get(key)
            if known is not None:
                made = tuple([self._make(each, args) for each in known])
                out: Any = made[0] if len(made) == 1 else made
            else:
                hits, self._is_inside = FakeTensorMode.cache_hits, True
                try:
                    out = self.dispatch(func, types, args, kwargs)
                finally:
                    self._is_inside = False
                # What torch has in its cache depends on nothing else than the key.
                if key is not None and FakeTensorMode.cache_hits == hits + 1:
                    self._remember(key, func, args, out)
            after(func, args, kwargs, out)
            return out

        def _key_of(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Returns all that the result depends on; None if it may depend on more."""
            key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
            for each in (*args, *kwargs.items()):
                part = self._describe(each)
                if part is None:
                    return None
                key.append(part)
            return tuple(key)

        def _describe(self, value: Any) -> Any:
            kind = type(value)
            if kind is FakeTensor:
                is_plain = value.fake_mode is self and value.constant is None and value.layout is torch.strided
                if not is_plain or value.dtype.is_complex or value.is_neg():
                    return None
                sizes = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
                return *sizes, value.dtype, value.fake_device, value.requires_grad
            if kind in _CONSTANTS:
                return kind, value
            if kind is list or kind is tuple:
                parts = tuple(map(self._describe, value))
                return None if None in parts else (kind, parts)
            return None

        def _remember(self, key: Any, func: Any, args: Any, out: Any) -> None:
            """Remembers a result that consists of tensors of their own, views of one argument, or arguments."""
            results = []
            for each in out if type(out) is tuple and len(out) > 1 else (out,):
                if type(each) is not FakeTensor or each.requires_grad or each.is_neg():
                    return
                place = next((i for i, arg in enumerate(args) if arg is each), None)
                of = [i for i, arg in enumerate(args) if type(arg) is FakeTensor and _is_view_of(each, arg)]
                if place is None and len(of) != bool(getattr(func, "is_view", False)):
                    return
                sizes = tuple(each.shape), each.stride(), int(each.storage_offset())
                results.append(_Result(place, of[0] if of else None, *sizes, each.dtype, each.fake_device))
            self._known[key] = tuple(results)

        def _make(self, result: _Result, args: Any) -> Any:
            """Makes a tensor as torch would."""
            if result.place is not None:
                return args[result.place]
            with in_kernel_invocation_manager(self):
                found = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
                if result.view_of is not None:
                    storage = args[result.view_of].untyped_storage()
                    found.set_(storage, result.offset, result.shape, result.stride)
            return FakeTensor(self, found, result.device)

    return Mode()


_CONSTANTS = {int, float, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}


class _Result(NamedTuple):
    """Describes a tensor that an operation returns: it is the argument at `place`, or lies in the memory of that at
    `view_of`, or in memory of its own.
    """

    place: int | None
    view_of: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


def _is_view_of(tensor: Tensor, other: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor without values that such a context has made."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def run_backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does. That method, and `torch.autograd.backward`, would leave the innermost
    TorchFunctionMode, and a forward that runs again would then be another one.
    """
    gradients = (torch.ones_like(loss),)
    torch.autograd.graph._engine_run_backward(
        (loss,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def flop_formulas() -> dict[Any, Any]:
    """Returns torch's formulas of floating-point operations, by operation. torch has none for attention on the CPU,
    which takes the same arguments first as that on CUDA. Those of torch 2.11 refuse keys that several heads share.
    """
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    formulas: dict[Any, Any] = dict(flop_registry)
    # Name -> where the query is among the arguments: behind the gradient of the output in backward.
    queries = {"_scaled_dot_product_flash_attention": 0, "_scaled_dot_product_flash_attention_backward": 1}
    for name, query in queries.items():
        on_cuda, on_cpu = getattr(aten, name, None), getattr(aten, name.replace("attention", "attention_for_cpu"), None)
        if on_cuda in formulas and on_cpu is not None:
            formulas[on_cpu] = partial(_with_heads_of_query, formulas[on_cuda], query)
    return formulas


def _with_heads_of_query(formula: Callable[..., int], query: int, *args: Any, **kwargs: Any) -> int:
    """Returns what a formula counts for attention whose keys and values have as many heads as the query."""
    num_heads = args[query].shape[1]
    key, value = (torch.Size([t.shape[0], num_heads, *t.shape[2:]]) for t in args[query + 1 : query + 3])
    return formula(*args[: query + 1], key, value, *args[query + 3 :], **kwargs)


def mesh_of_numbers(shape: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of so many ranks, of which this process is the first, without process groups."""
    ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
    names = ("shards",) if len(shape) == 1 else ("replicas", "shards")
    return DeviceMesh("meta", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
