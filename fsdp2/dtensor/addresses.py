"""Refuses to return the address of a DTensor's memory to safetensors, NumPy and other libraries that read it.

They read the address of a tensor's storage, and the bytes there. A DTensor has no memory of its own: torch says that
its storage is invalid, and returns the address 0 by `__dlpack__`, at which readers crash. Libraries that only compare
addresses, to find a parameter again (accelerate), get that of this rank's shard by `data_ptr()` of the tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.compat import local_of
from ..engine.owners import sharded_in
from .refusals import describe
from .sharded_dtensor import replace_attribute
from .wrapped_after import advice_about_caller, advice_about_optimizer

# Methods that give memory to other libraries.
_METHODS = ("tolist", "numpy", "__dlpack__", "__dlpack_device__")
# Modules, and what is inside them, that go on to read, write or save as many elements as the full tensor has.
_READERS = ("bitsandbytes", "safetensors", "transformers.modeling_utils", "triton")


def refuse_addresses() -> None:
    """Makes these methods of a ShardedDTensor raise an error that names the parameter and says what to call instead,
    however the calling library was imported. The rest of a storage does not change.

    - `data_ptr()` of its storage, typed or not, which safetensors and `save_pretrained` of transformers and peft call;
    - `data_ptr()` of the tensor, for libraries that are known to read there; others get the address of the shard, and
      torch itself 0: copying, pickling and recurrent layers learn from it that the tensor has no memory;
    - `tolist()`, `numpy()`, and `__dlpack__`, whose readers would crash.
    """
    replace_attribute("untyped_storage", lambda _: _untyped_storage)
    replace_attribute("data_ptr", lambda _: _data_ptr)
    for name in _METHODS:
        replace_attribute(name, partial(_refusing, name))


class _StorageOfDTensor(torch.UntypedStorage):
    """Is torch's storage object of a DTensor, which only knows the size of the full tensor."""

    # The tensor, and its name in errors once it has been freed.
    _tensor: weakref.ref[DTensor]
    _name: str

    def data_ptr(self) -> int:
        """Refuses to return an address.

        Raises:
            RuntimeError: always.
        """
        tensor = self._tensor()
        raise _error("its storage's data_ptr()", self._name if tensor is None else describe([tensor]))

    def resize_(self, size: int) -> Any:
        """Refuses another size, which FSDP1 asks for.

        Raises:
            RuntimeError: always.
        """
        tensor = self._tensor()
        raise _error("another size of its storage", self._name if tensor is None else describe([tensor]))


def _untyped_storage(self: DTensor) -> torch.UntypedStorage:
    storage = Tensor.untyped_storage(self)
    if type(storage) is torch.UntypedStorage:
        storage.__class__ = _StorageOfDTensor
    if isinstance(storage, _StorageOfDTensor):
        param = sharded_in(local_of(self))
        storage._tensor, storage._name = weakref.ref(self), "a DTensor" if param is None else param.name
    return storage


def _data_ptr(self: DTensor) -> int:
    """Returns the address of this rank's shard, and 0 to callers in torch. It is 0 for an empty shard.

    Raises:
        RuntimeError: the caller would read more than the shard.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.partition(".")[0] == "torch":
        return Tensor.data_ptr(self)
    if any(caller == each or caller.startswith(f"{each}.") for each in _READERS):
        raise _error("data_ptr()", describe([self]))
    return local_of(self).data_ptr()


def _refusing(name: str, _: Any) -> Callable[..., Any]:
    def refuse(self: DTensor, *args: Any, **options: Any) -> Any:
        raise _error(f"{name}()", describe([self]))

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _error(what: str, name: str) -> RuntimeError:
    advice = advice_about_optimizer() or advice_about_caller()  # optimizers of a library, whose kernels take addresses
    if advice is not None:
        return RuntimeError(f"{name}: {what} was asked of a DTensor. {advice}")
    return RuntimeError(
        f"{name}: {what} was asked of a DTensor, of which this rank holds only a shard. Call full_tensor() first, on "
        "every rank. To save a model, call fsdp2.hf.save_model(model, folder), or fsdp2.hf.save_adapter, on every "
        "rank, which write the files of save_pretrained; or call get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and save the result on the "
        "first (`model.save_pretrained(folder, state_dict=state)`)."
    )
