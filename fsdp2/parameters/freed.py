"""Refuses reads of unsharded parameters whose memory is freed, or is being filled by an all-gather.

An unsharded parameter is one object for as long as its module is sharded: an autograd function may keep it on `ctx`, a
hook in a list. From reshard until the next gather has ended, its class is a FreedParameter, or a FreedDTensor, whose
reads raise an error that names the parameter. What autograd and the engine need meanwhile (shape, `.grad`, hooks) stays
allowed. Only the class changes: no copy is made, and nothing is called while the memory is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.owners import names_of_unsharded
from ..torch_private import internals


class FreedParameter(nn.Parameter):
    """The class of an unsharded parameter while it must not be read."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


class FreedDTensor(DTensor):
    """Refuses the same for the DTensor of tensor parallelism."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


def freed_class(kind: type[Any]) -> type | None:
    """Returns the class that refuses reads of a freed parameter of class `kind`. None: objects of `kind` can't change
    their class.
    """
    if issubclass(kind, DTensor):
        return FreedDTensor
    is_plain = internals.has_no_dispatch(kind) or (
        issubclass(kind, nn.Parameter) and not hasattr(kind, "__tensor_flatten__")
    )
    return FreedParameter if is_plain else None


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    # So torch, and users, find who adds up gradients.
    finds_accumulator = function in (Tensor.view_as, Tensor.expand_as) and args[0] is args[1]
    if function in _allowed() or finds_accumulator:
        with internals.no_torch_function():
            return function(*args, **kwargs)
    if function in (Tensor.__repr__, Tensor.__format__):
        return f"<unsharded parameter {_name(args[0])}, which is freed>"
    names = ", ".join(dict.fromkeys(map(_name, _freed_among([args, kwargs]))))
    raise RuntimeError(
        f"{names}: the unsharded parameter was read after it was freed, or while it is being gathered (by "
        f"{getattr(function, '__qualname__', None) or function}). Something has kept it since a forward: a list, a "
        "hook, an attribute, `ctx` of an autograd function. Keep a copy instead (`weight.detach().clone()`), give it "
        "to `ctx.save_for_backward` in an autograd function, or read it inside `with fsdp2.full_params(module):`."
    )


def _name(freed: Any) -> str:
    return next(iter(names_of_unsharded(freed)), "a parameter")


def _freed_among(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (FreedParameter, FreedDTensor)):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _freed_among(value)


_READ = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr", "retains_grad"),
    *("is_leaf", "requires_grad", "grad", "_grad", "grad_fn", "grad_dtype", "_version", "_base"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_mtia", "is_meta", "is_sparse", "is_sparse_csr", "is_nested"),
    *("is_quantized", "is_mkldnn", "is_ipu", "is_maia", "is_vulkan"),
)
_WRITTEN = ("grad", "_grad", "requires_grad", "grad_dtype", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
    *("is_same_size", "has_names", "__len__", "requires_grad_", "retain_grad", "register_hook"),
    *("register_post_accumulate_grad_hook", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
)
_FUNCTIONS = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "numel"),
    *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "result_type"),
)


@cache
def _allowed() -> frozenset[Any]:
    """The functions that read or write no element of a parameter."""
    found: list[Any] = [torch.autograd.backward, torch.autograd.grad]
    for names, part in ((_READ, "__get__"), (_WRITTEN, "__set__"), (("grad", "_grad"), "__delete__")):
        found += [getattr(getattr(Tensor, each), part, None) for each in names if hasattr(Tensor, each)]
    found += [getattr(Tensor, each) for each in _METHODS if hasattr(Tensor, each)]
    found += [getattr(torch, each) for each in _FUNCTIONS if hasattr(torch, each)]
    return frozenset(each for each in found if each is not None)
