"""Holds the private names of torch that the plan uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "NO_SPLIT",
    "RUN_POLICY",
    "PlainDispatchMode",
    "fake_mode",
    "flop_formulas",
    "is_fake",
    "mesh_of_numbers",
    "no_dispatch",
]

NO_SPLIT = "_no_split_modules"
"""The attribute in which models of Transformers name the classes of their blocks."""
RUN_POLICY = "_run_policy"
"""The method of torch's ModuleWrapPolicy and CustomPolicy that names the modules to shard."""
# Context: operations are not dispatched to Python.
no_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch


class PlainDispatchMode(TorchDispatchMode):
    """Is a TorchDispatchMode whose own code is not hidden from dynamo, which would take as long as all it does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fake_mode() -> Any:
    """Returns a context in which operations compute shapes, dtypes and storages, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # it takes long to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Tensor) -> bool:
    """Returns True for a tensor without values that such a context has made."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def flop_formulas() -> dict[Any, Any]:
    """Returns torch's formulas of floating-point operations, by operation. torch has none for attention on the CPU,
    which takes the same arguments first as that on CUDA.
    """
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    formulas: dict[Any, Any] = dict(flop_registry)
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
        on_cuda, on_cpu = getattr(aten, name, None), getattr(aten, name.replace("attention", "attention_for_cpu"), None)
        if on_cuda in formulas and on_cpu is not None:
            formulas[on_cpu] = formulas[on_cuda]
    return formulas


def mesh_of_numbers(shape: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of so many ranks, of which this process is the first, without process groups."""
    ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
    names = ("shards",) if len(shape) == 1 else ("replicas", "shards")
    return DeviceMesh("meta", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
