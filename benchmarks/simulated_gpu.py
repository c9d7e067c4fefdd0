"""Simulates a GPU whose tensors have sizes but no memory, and counts the bytes that are alive on it and on the host.

The device is one that torch lets Python programs define (PrivateUse1), its tensors are FakeTensors, and its process
group sends nothing. So one process runs a training step of any library at any size, and nothing is computed. Libraries
treat it as a GPU: they use streams, and offload to the host.

Not counted: what kernels allocate for themselves, the rounding and the fragmentation of an allocator, and memory that
waits for a stream before it is free.
"""

import math
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fsdp2.planning import meter

from .cuda_group import Wire, start_wire_group

KIND = "gpu"


class StorageMeter(meter.StorageMeter):
    """Counts the bytes of all storages of FakeTensors that operations make while it is active.

    `live`, `peak`: bytes now, and the most since `start_region`, by the type of device.
    """

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come back to us
        out = func(*args, **(kwargs or {}))
        self.see(tree_leaves(out))
        return out

    def start_region(self) -> None:
        self.peak = Counter(self.live)

    def change(self, place: str, nbytes: int, more: int) -> None:
        self.live[place] += nbytes
        self.peak[place] = max(self.peak[place], self.live[place])


@contextmanager
def simulated_gpu(world_size: int, kind: str = KIND) -> Iterator[tuple[DeviceMesh, StorageMeter, Wire]]:
    """Context: on rank 0 of so many, tensors are fake. It yields a mesh of all ranks, and meters of memory and wire.

    `kind`: the type of device of the mesh. On "cpu" counts can be compared with those of real memory.
    """
    _install()
    wire = start_wire_group(world_size, torch.device(kind, 0))
    mesh = dist.init_device_mesh(kind, (world_size,))
    storages = StorageMeter()
    try:
        with ExitStack() as stack:
            for patch in (*_patches_of_torch(), *_patches_of_fsdp2()):
                stack.enter_context(patch)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(storages)
            yield mesh, storages, wire
    finally:
        dist.destroy_process_group()


# ---- the device


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Stream:
    """Runs all work at once, so that nothing has to wait."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@cache
def _install() -> None:
    """Makes the device known to torch in this process, for good."""
    stream = _Stream()
    functions: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream),
        **dict.fromkeys(("set_device", "set_stream", "synchronize", "manual_seed_all", "_lazy_init"), lambda *_: None),
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "stream": nullcontext,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "Stream": _Stream,
        "Event": _Event,
    }
    module = types.ModuleType(f"torch.{KIND}")
    module.__dict__.update(functions)
    _setup_privateuseone_for_python_backend(KIND, module)


# ---- what libraries do that FakeTensors do not know


def _do_nothing(*_: Any) -> None:
    """Takes the place of a function. A Mock would keep its arguments alive."""


def _have_one_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _patches_of_torch() -> Iterator[Any]:
    make, data = Tensor._make_subclass, Tensor.data

    def make_alike(*args: Any, **kwargs: Any) -> Tensor:
        if "device_for_backend_keys" in kwargs:
            kwargs["device_for_backend_keys"] = torch.device("cpu")
        return make(*args, **kwargs)

    def set_data(tensor: Tensor, value: Tensor) -> None:
        data.__set__(tensor, value)  # type: ignore[attr-defined]
        tensor.fake_device = value.fake_device  # type: ignore[attr-defined]

    # FSDP1 offloads by `.data`, which must not be of another kind of tensor, and which FakeTensors do not follow.
    yield mock.patch.object(Tensor, "_make_subclass", staticmethod(make_alike))
    yield mock.patch.object(FakeTensor, "data", property(data.__get__, set_data))  # type: ignore[attr-defined]
    for module in ("_flat_param", "_runtime_utils"):
        yield mock.patch(f"torch.distributed.fsdp.{module}._no_dispatch_record_stream", _do_nothing)
    # FSDP1 compares addresses, and here all are 0.
    yield mock.patch("torch.distributed.fsdp._flat_param._data_ptr_allocated", lambda a: a.untyped_storage().size() > 0)
    yield mock.patch("torch.distributed.fsdp._flat_param._same_storage", _have_one_storage)
    yield mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor)
    yield mock.patch("torch.Stream", _Stream)
    # DDP rebuilds its buckets, in the order of gradients, after the ranks have exchanged that order.
    yield mock.patch.object(dist.Reducer, "_rebuild_buckets", _do_nothing)


def _patches_of_fsdp2() -> Iterator[Any]:
    from fsdp2.checks import levels

    def view_of(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return buffer[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    yield mock.patch("fsdp2.checks.plan._check_subclass", _do_nothing)  # it refuses FakeTensors
    yield mock.patch("fsdp2.engine.buffers.own_storage_view", view_of)  # slices of a storage need its memory
    yield mock.patch("fsdp2.engine.mesh.check_order", _do_nothing)  # it reads values
    yield mock.patch.dict(levels._levels(), dict.fromkeys(levels.NAMES, "off"))  # they read values
