"""Tests the calls to NCCL and similar backends, on a simulated process group of eight ranks with equal values."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.collectives.coalesced import CoalescedComm
from fsdp2.collectives.custom import CustomComm
from fsdp2.engine.comm import Comm, CommLabel
from fsdp2.engine.layout import MAX_OPERATIONS
from fsdp2.engine.reduce import exchange_and_sum

RANKS = 8
F16, F32 = torch.float16, torch.float32
GRADIENT = 10_240
"""8 of them are 81,920; the largest float16 is 65,504. An eighth of it, and all multiples of that, are exact."""


class Group:
    """As NCCL does, it adds in the dtype of the tensors, one rank after the other, and averages by dividing first."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.averages: set[bool] = set()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return RANKS

    def total(self, tensor: Tensor, op: Any) -> Tensor:
        self.averages.add(op == dist.ReduceOp.AVG)
        part = tensor / RANKS if op == dist.ReduceOp.AVG else tensor
        total = part.clone()
        for _ in range(RANKS - 1):
            total += part
        return total

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        self.calls.append(len(outputs))
        for output, own in zip(outputs, inputs, strict=True):
            output.view(RANKS, -1).copy_(own.clone())
        return Done()

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> Any:
        self.calls.append(len(outputs))
        for output, whole in zip(outputs, inputs, strict=True):
            output.copy_(self.total(whole.view(RANKS, -1)[0], options.reduceOp))
        return Done()

    def _allgather_base(self, output: Tensor, own: Tensor) -> Any:
        return self.allgather_into_tensor_coalesced([output], [own])

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any) -> Any:
        return self.reduce_scatter_tensor_coalesced([output], [whole], options)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        for tensor in tensors:
            tensor.copy_(self.total(tensor, options.reduceOp))
        return Done()

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Any) -> Any:
        received.view(RANKS, -1).copy_(sent.view(RANKS, -1)[0])
        return Done()


class Done:
    def wait(self) -> None:
        pass


def custom(group: Group, comm_label: CommLabel) -> Comm:
    """A user's own reduce-scatter, which sums as it is told."""

    def scatter(output_tensor: Tensor, input_tensor: Tensor, op: Any, **_: Any) -> Any:
        return group._reduce_scatter_base(output_tensor, input_tensor, SimpleNamespace(reduceOp=op))

    scatter.allocate = torch.empty  # type: ignore[attr-defined]
    return CustomComm(CoalescedComm(group, comm_label), None, scatter)  # type: ignore[arg-type]


def whole(value: float, dtype: torch.dtype, numel: int = 4) -> Tensor:
    return torch.full((RANKS * numel,), value, dtype=dtype)


def reduce_one(comm: Comm, divisor: float, dtype: torch.dtype) -> list[Tensor]:
    output, gradient = torch.empty(4, dtype=dtype), whole(GRADIENT, dtype)
    comm.reduce_scatter([output], [gradient], divisor).wait()
    assert gradient.eq(GRADIENT).all(), "it may be the memory of another gradient"
    return [output]


def reduce_several(comm: Comm, divisor: float, dtype: torch.dtype) -> list[Tensor]:
    outputs = [torch.empty(numel, dtype=dtype) for numel in (1, 2, 5)]
    comm.reduce_scatter(outputs, [whole(GRADIENT, dtype, output.numel()) for output in outputs], divisor).wait()
    return outputs


def sum_in_place(comm: Comm, divisor: float, dtype: torch.dtype) -> list[Tensor]:
    tensor = torch.full((4,), float(GRADIENT), dtype=dtype)
    comm.all_reduce(tensor, divisor).wait()
    return [tensor]


@pytest.mark.parametrize("make", [CoalescedComm, custom])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("reduce", [reduce_one, reduce_several, sum_in_place])
@pytest.mark.parametrize(("divisor", "force_sum"), [(8.0, False), (8.0, True), (16.0, False), (2.0, False)])
def test_sums_whose_quotient_fits_do_not_overflow(
    make: Callable[[Any, CommLabel], Comm],
    dtype: torch.dtype,
    reduce: Callable[..., Any],
    divisor: float,
    force_sum: bool,
) -> None:
    """The kind: a sum of all ranks' gradients, which is divided, passes the largest float16, whoever sums it: one
    tensor, several in a call, in place between replicas, or a user's own collective.
    """
    group = Group()
    comm = make(group, CommLabel())
    comm.force_sum = force_sum
    for output in reduce(comm, divisor, dtype):
        assert output.eq(RANKS * GRADIENT / divisor).all()
    assert group.averages == {divisor == RANKS and not force_sum}, "the group averages if it may"


@pytest.mark.parametrize("number", [1, 2, MAX_OPERATIONS, MAX_OPERATIONS + 1, 198])
def test_a_call_has_a_bounded_number_of_operations(number: int) -> None:
    """NCCL takes hundreds one after the other. Also of reductions, and every tensor is in one call."""
    group = Group()
    comm = CoalescedComm(group, CommLabel())  # type: ignore[arg-type]
    inputs = [torch.full((3,), float(i)) for i in range(number)]
    outputs = [torch.empty(3 * RANKS) for _ in inputs]
    comm.all_gather(outputs, inputs).wait()
    assert all(output.eq(i).all() for i, output in enumerate(outputs))
    back = [torch.empty_like(own) for own in inputs]
    comm.reduce_scatter(back, outputs, 2.0).wait()
    assert all(own.eq(4 * i).all() for i, own in enumerate(back))
    assert group.calls == 2 * group.calls[: len(group.calls) // 2]
    assert sum(group.calls) == 2 * number
    assert max(group.calls) <= MAX_OPERATIONS
    assert max(group.calls) - min(group.calls) <= 1


class Divisions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wire", [F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("divisor", [2.0, 1.0])
def test_sums_are_divided_by_one_operation(wire: torch.dtype, divisor: float) -> None:
    """Of any number of tensors, summed by NCCL or where they arrive; none if there is nothing to divide by."""
    outputs: Sequence[Tensor] = [torch.empty(numel) for numel in (4, 1, 3)]
    comm, inputs = CoalescedComm(Group(), CommLabel()), [whole(1, wire, output.numel()) for output in outputs]  # type: ignore[arg-type]
    if wire == F32:
        work = comm.reduce_scatter(outputs, inputs, divisor)
    else:
        work = exchange_and_sum(comm, outputs, inputs, divisor)
    with Divisions() as divisions:
        work.wait()
    assert divisions.names == (["_foreach_div_.Scalar"] if divisor != 1 else [])
    assert all(output.eq(RANKS / divisor).all() for output in outputs)
