"""Defines process groups that are written in Python, as those of fault-tolerant libraries are."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PythonGroup(dist.ProcessGroup):
    """Hands each call on to another group, as those of fault-tolerant libraries do. It has no backend of its own, and
    of the functions that gather and reduce only those of lists.
    """

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.called = inner, set[str]()

    def getBackendName(self) -> str:
        return "written-in-python"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _call(self, name: str, *args: Any) -> Any:
        self.called.add(name)
        return getattr(self.inner, name)(*args)

    def allgather(self, *args: Any) -> Any:
        return self._call("allgather", *args)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        assert options.reduceOp != dist.ReduceOp.AVG, "many groups take no means"
        return self._call("allreduce", tensors, options)

    def broadcast(self, *args: Any) -> Any:
        return self._call("broadcast", *args)

    def barrier(self, *args: Any) -> Any:
        return self._call("barrier", *args)

    def reduce_scatter(self, *args: Any) -> Any:
        return self._call("reduce_scatter", *args)


class WithTensors(PythonGroup):
    """It has the functions of one tensor, too, under torch's old names for them and the new ones."""

    def _allgather_base(self, *args: Any) -> Any:
        return self._call("_allgather_base", *args)

    def _reduce_scatter_base(self, *args: Any) -> Any:
        return self._call("_reduce_scatter_base", *args)

    def alltoall_base(self, *args: Any) -> Any:
        return self._call("alltoall_base", *args)

    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base


class WithBackend(WithTensors):
    """A backend is registered with it, too, as torch's own groups have one."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner)
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._register_backend(cpu, gloo, inner._get_backend(cpu))
        self._set_default_backend(gloo)


class OnlySums(PythonGroup):
    """It sums and broadcasts; all else it refuses, as a base class does."""

    def allgather(self, *args: Any) -> Any:
        raise NotImplementedError("not implemented")

    def reduce_scatter(self, *args: Any) -> Any:
        raise NotImplementedError("not implemented")


def python_group(cls: type[PythonGroup], ranks: list[int], timeout: timedelta | None = None) -> PythonGroup:
    """Registered as torchft registers its own. All ranks of the world must call it."""
    inner = dist.new_group(ranks, timeout=timeout)
    name = f"{cls.__name__}-{'-'.join(map(str, ranks))}".lower()
    made = cls(inner) if dist.get_rank() in ranks else None
    dist.Backend.register_backend(name, lambda *_: made, devices=["cpu"])
    group = dist.new_group(ranks, backend=name)
    assert made is None or group is made
    return group  # type: ignore[return-value]
