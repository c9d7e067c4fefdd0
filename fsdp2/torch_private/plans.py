"""The private names of torch that a plan uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .lookup import load, optional
from .rare_internals import TorchDispatchMode

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
_PLAN = "fsdp2.plan"
# Context: operations are not dispatched to Python.
no_dispatch: Callable[[], Any] = optional("torch._C._DisableTorchDispatch", _PLAN)


class PlainDispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose own code is not hidden from dynamo, which would take as long as all it does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_mode(after: Callable[[Any, Any, Any, Any], None]) -> FakeTensorMode:
    """Returns torch's FakeTensorMode, a context in which operations compute shapes, dtypes and storages, and no values.

    `after(operation, args, kwargs, out)` is called after each operation, but not after those of which it is made.
    """
    mode: Any = load("torch._subclasses.fake_tensor.FakeTensorMode", _PLAN)

    class Mode(mode):  # type: ignore[misc]
        """Calls `after`, and goes round what torch's own mode does to hide from dynamo."""

        def __init__(self) -> None:
            super().__init__(allow_non_fake_inputs=True)
            self._is_inside = False

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if self._is_inside:
                return self.dispatch(func, types, args, kwargs)
            self._is_inside = True
            try:
                out = self.dispatch(func, types, args, kwargs)
            finally:
                self._is_inside = False
            after(func, args, kwargs, out)
            return out

    made: FakeTensorMode = Mode()
    return made


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor without values that such a context has made."""
    return isinstance(tensor, load("torch._subclasses.fake_tensor.FakeTensor", _PLAN))


def run_backward(loss: Tensor) -> None:
    """Does what `loss.backward()` does. That method, and `torch.autograd.backward`, would leave the innermost
    TorchFunctionMode, and a forward that runs again would then be another one.
    """
    gradients = (torch.ones_like(loss),)
    load("torch.autograd.graph._engine_run_backward", _PLAN)(
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
