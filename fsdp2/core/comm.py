"""Collectives: what a group of ranks can do for the engine, and how any process group does it.

A `Comm` moves bytes between the ranks of one process group and returns at once; whoever needs the bytes waits on the
`Work` that it returns. Every method is a collective: all ranks of the group must call it, in the same order, with
tensors of the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned. This file and
backends.py are the only ones that call a collective.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# Imported by name: an extension may put other functions under these names in `dist`.
from torch.distributed import all_gather, all_reduce, all_to_all_single, broadcast, reduce_scatter

from . import compat, streams

# ---- works


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Makes the current stream (on CPU: the caller) wait until the outputs are filled."""


class AllWork:
    """Several works as one. It keeps alive the works, and the tensors that are sent from and received into."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Tensor] = ()) -> None:
        self._works = works
        self._owned: tuple[Tensor | Work, ...] = (*tensors,)

    def wait(self) -> None:
        works, self._works = self._works, ()  # gloo hangs if a work is waited for twice
        for work in works:
            work.wait()
        self._owned = (*self._owned, *works)

    def __del__(self) -> None:
        # Dropped unfinished, with a model that is deleted for example: other ranks still write to the memory, which may
        # belong to any stream.
        if self._works:
            with suppress(RuntimeError):
                AllWork.wait(self)
            for device in {each.device for each in self._owned if isinstance(each, Tensor)}:
                if streams.exist_on(device):
                    torch.accelerator.current_stream(device).synchronize()


class DividedWork(AllWork):
    """Divides all outputs by one operation."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor], divisor: float) -> None:
        super().__init__(works, outputs)
        self._outputs, self._divisor = outputs, divisor

    def wait(self) -> None:
        super().wait()
        outputs, self._outputs = self._outputs, ()
        _divide(outputs, self._divisor)


class SumWork(AllWork):
    """Adds up what arrived, in rank order on every rank, and divides it."""

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor] | Tensor],
        divisor: float,
    ) -> None:
        super().__init__(works, tensors)
        self._outputs, self._parts, self._divisor = outputs, parts, divisor

    def wait(self) -> None:
        super().wait()
        waiting, self._parts = self._parts, []
        for output, parts in zip(self._outputs, waiting):  # noqa: B905  the second wait finds no parts
            _sum(parts, output, self._divisor)
        # Those in fp16 are divided as they are summed.
        _divide([output for output in self._outputs if output.dtype != torch.float16] if waiting else [], self._divisor)


class CopyWork(AllWork):
    """Copies what arrived elsewhere: pairs of (target, source)."""

    def __init__(
        self, works: Sequence[Work], copies: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(works, [*tensors, *(source for _, source in copies)])
        self._copies = copies

    def wait(self) -> None:
        super().wait()
        copies, self._copies = self._copies, ()
        for target, source in copies:
            target.copy_(source)


def _divide(tensors: Sequence[Tensor], divisor: float) -> None:
    if tensors and divisor != 1:
        compat.divide_each([*tensors], divisor)


def _sum(parts: Sequence[Tensor] | Tensor, output: Tensor, divisor: float) -> None:
    """Writes the sum of `parts`, tensors or rows of one, to `output`. It adds up in the dtype of `output`; in fp32 if
    that is fp16, and then divides by `divisor`.
    """
    if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        output.copy_(total.div_(divisor))
        return
    if isinstance(parts, Tensor) and parts.device.type != "cpu":
        # One launch. On CPU it would first cast all parts.
        torch.sum(parts, 0, dtype=output.dtype, out=output)
        return
    first, *rest = parts
    if rest and first.dtype == output.dtype:
        torch.add(first, rest.pop(0), out=output)
    else:
        output.copy_(first)  # the sum of two in a narrower dtype would be rounded to that
    for part in rest:
        output.add_(part)


# ---- the interface


class Purpose:
    """Says whose collectives those of a Comm are, in errors, and to checks that compare ranks.

    `name`: FQN of the group's module. `part`: which of its gradients the next reduction is about.
    """

    def __init__(self, name: str = "facts to compare") -> None:
        self.name, self.part = name, ""
        self._where: Callable[[], Any] = lambda: None

    def run_in(self, root: Any) -> None:
        """Asks `root.where()` from now on. It is held weakly: a collective in flight must not keep a model alive."""
        self._where = weakref.ref(root)

    @property
    def root(self) -> Any:
        """The root that runs the group, or None."""
        return self._where()

    def where(self) -> tuple[str, int]:
        """Returns what runs on this rank ("forward", "backward", "by hand"), and how many backwards have ended."""
        root = self._where()
        return ("by hand", 0) if root is None else root.where()

    def locate(self, error: RuntimeError, doing: str) -> None:
        """Adds to the message of `error` what this rank was doing, and when: few process groups know."""
        phase, step = self.where()
        error.args = (f"{error} (while {doing}; {phase}, step {step})",)


class Comm(Protocol):
    """Collectives over one group of ranks."""

    rank: int
    # Parameters of which each rank holds at least so many bytes are gathered and reduced on their own, straight from
    # and into place. That saves a copy and costs messages; both grow with the number of ranks.
    direct_min_bytes: int
    # Sum, and divide afterwards, even if the backend can average.
    force_sum: bool
    # Each rank itself sums what other ranks send it, so that it may travel in a narrower dtype.
    sums_on_arrival: bool
    purpose: Purpose

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. None: this rank alone."""

    @property
    def size(self) -> int:
        """The number of ranks. It may change between steps where ranks join and leave: see AnyComm."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Fills outputs[i] with the inputs[i] of all ranks, in rank order. inputs[i] may be its slot of outputs[i]."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        """Fills outputs[i] with the sum over ranks of this rank's slice of inputs[i], divided by `divisor`.

        inputs[i] is `size` slices in rank order. If its dtype is narrower than that of outputs[i], the slices travel in
        the narrower dtype and are summed in the wider one, on this rank.
        """

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        """Fills `tensor` with its sum over ranks, divided by `divisor`."""


# ---- any process group

# What groups and backends say, apart from a NotImplementedError, of a function that they lack. A connection that has
# failed says "Operation not supported".
_LACKS = re.compile("does(n't| not) support|(?<!operation )not (supported|implemented)|no backend type", re.IGNORECASE)


class _FirstOffered:
    """Calls the first of several functions, in order of their cost, that the group offers, and keeps to that one.

    All ranks of a group find the same, because a group offers the same functions on all ranks.
    """

    def __init__(self, *functions: Callable[[AnyComm, Tensor, Tensor], Work]) -> None:
        self._functions = list(functions)

    def __call__(self, comm: AnyComm, output: Tensor, source: Tensor) -> Work:
        while True:
            try:
                return self._functions[0](comm, output, source)
            except RuntimeError as error:  # NotImplementedError is one
                lacks = isinstance(error, NotImplementedError) or _LACKS.search(str(error))
                if not lacks or len(self._functions) == 1:
                    raise
                del self._functions[0]


class AnyComm:
    """A Comm over any process group on which torch.distributed's functions work: threads as ranks, groups written in
    Python, backends that nobody has measured.

    It uses public functions only, one launch for each tensor, and divides sums afterwards. It assumes nothing else of
    the group. Where the group lacks a function, another one does the same at more cost.
    """

    direct_min_bytes = 512 * 1024
    force_sum = True
    sums_on_arrival = False  # unless the dtypes differ

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        self.group, self.rank, self.purpose = group, group.rank(), purpose
        self._size = None if compat.size_may_change(group) else group.size()
        cls = AnyComm  # its functions, not this object's methods, which would keep it alive
        self._gather = _FirstOffered(cls._gather_into_one, cls._gather_into_list, cls._gather_by_broadcasts)
        self._scatter = _FirstOffered(cls._scatter_one, cls._scatter_list, cls._scatter_by_all_reduce)
        self._exchange = _FirstOffered(cls._exchange_and_sum, cls._sum_in_dtype_of_output)

    @property
    def size(self) -> int:
        """The number of ranks; of a group that ranks join and leave, the number of those that take part now."""
        return self._size or max(1, self.group.size())

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        works = [self._gather(self, output, own) for output, own in zip(outputs, inputs, strict=True)]
        return AllWork(works, [*outputs, *inputs])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        works = []
        for output, source in zip(outputs, inputs, strict=True):
            if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
                wide = torch.empty_like(output, dtype=torch.float32)
                works.append(_divide_wide(self._reduce_one(wide, source), wide, output, divisor))
            else:
                works.append(DividedWork([self._reduce_one(output, source)], [output], divisor))
        return AllWork(works, [*outputs, *inputs])

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        wide = tensor.float() if tensor.dtype == torch.float16 else tensor
        work = all_reduce(wide, group=self.group, async_op=True)
        return DividedWork([work], [tensor], divisor) if wide is tensor else _divide_wide(work, wide, tensor, divisor)

    def _reduce_one(self, output: Tensor, source: Tensor) -> Work:
        reduce = self._scatter if output.dtype == source.dtype else self._exchange
        return reduce(self, output, source)

    # Ways to gather: fill `output` with the sources of all ranks.

    def _gather_into_one(self, output: Tensor, source: Tensor) -> Work:
        return compat.all_gather_one(output, source, group=self.group, async_op=True)

    def _gather_into_list(self, output: Tensor, source: Tensor) -> Work:
        own = source.clone()  # it may be a part of the output
        return AllWork([all_gather([*output.view(self.size, -1)], own, group=self.group, async_op=True)], [own])

    def _gather_by_broadcasts(self, output: Tensor, source: Tensor) -> Work:
        parts = output.view(self.size, -1)
        if parts[self.rank].data_ptr() != source.data_ptr():
            parts[self.rank].copy_(source)
        return AllWork([broadcast(part, group=self.group, group_src=i, async_op=True) for i, part in enumerate(parts)])

    # Ways to reduce: fill `output` with the sum of this rank's slices of all ranks' sources.

    def _scatter_one(self, output: Tensor, source: Tensor) -> Work:
        return compat.reduce_scatter_one(output, source, group=self.group, async_op=True)

    def _scatter_list(self, output: Tensor, source: Tensor) -> Work:
        return reduce_scatter(output, [*source.view(self.size, -1)], group=self.group, async_op=True)

    def _scatter_by_all_reduce(self, output: Tensor, source: Tensor) -> Work:
        total = source.clone()
        work = all_reduce(total, group=self.group, async_op=True)
        return CopyWork([work], [(output, total.view(self.size, -1)[self.rank])])

    # Ways to reduce into a wider dtype than the one that travels.

    def _exchange_and_sum(self, output: Tensor, source: Tensor) -> Work:
        received = torch.empty_like(source)
        work = all_to_all_single(received, source, group=self.group, async_op=True)
        return SumWork([work], [source, received], [output], [received.view(self.size, -1)], 1)

    def _sum_in_dtype_of_output(self, output: Tensor, source: Tensor) -> Work:
        return self._scatter(self, output, source.to(output.dtype))


def _divide_wide(work: Work, wide: Tensor, output: Tensor, divisor: float) -> Work:
    """Divides the sum in `wide` by `divisor`, and casts the result to `output`, when the returned work is waited for."""
    return CopyWork([DividedWork([work], [wide], divisor)], [(output, wide)])
