"""Handles what runs asynchronously: collectives in flight, side streams, copies to and from the CPU.

Lifetime rule: what a collective or a side stream reads or writes stays alive until the stream that computes has
waited for a collective that was issued later. Then that stream may free it and take the memory again, in the order of
its own work. Memory that was allocated on a side stream goes back to it, in order, too: what is issued there runs
behind all work that the stream that computes was given before. (devices/owner_stream.py orders models that compute on
several streams.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..torch_private import internals
from .owner_stream import GroupStreams
from .simulation import kind_of, simulated

Result = TypeVar("Result")
# What arrives from each rank, in the order of ranks: tensors of one dim, or the rows of one.
Rows: TypeAlias = "Sequence[Tensor] | Tensor"


def exist_on(device: torch.device) -> bool:
    """Returns True if work on `device` is queued on streams, so that waiting does not hold up the host."""
    return kind_of(device) not in ("cpu", "meta")


def costs_launches(device: torch.device) -> bool:
    """Returns True if an operation is a kernel, which takes longer to launch than a few bytes take to copy."""
    return kind_of(device) != "cpu"


@contextmanager
def side_stream(device: torch.device, waits: bool = True) -> Iterator[None]:
    """Context: what is issued inside runs behind all work that the current stream was given, while later
    work runs.

    `waits`: False if what is issued inside begins by waiting for a Work that is behind all that work, see
    `Comm.is_stream_ordered`. See the lifetime rule. If an error ends the context, the current stream waits: memory that
    goes with the error may still be in use. On a device without streams, and on a simulated one, nothing changes.
    """
    if device.type == "meta" or not exist_on(device):
        yield
        return
    current = torch.accelerator.current_stream(device)
    stream = _side_stream_of(current, device)
    if waits:
        stream.wait_stream(current)
    with stream:
        try:
            yield
        except BaseException:
            current.wait_stream(stream)
            raise


def order_streams(device: torch.device) -> GroupStreams | None:
    """Returns what orders the streams that use one group's memory; None where the device has none."""
    return GroupStreams(device) if exist_on(device) and device.type != "meta" else None


@cache
def _side_stream_of(stream: torch.Stream, device: torch.device) -> torch.Stream:
    """Returns a stream for each stream that computes: no other orders the memory allocated on it."""
    return torch.Stream(device)


# ---- collectives in flight


class Work(Protocol):
    """One collective in flight."""

    def wait(self) -> object:
        """Makes the current stream (on CPU: the caller) wait until the outputs are filled."""


class AllWork:
    """Joins several works into one. It keeps alive the works, and the tensors that are sent from and received into."""

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
                if exist_on(device):
                    torch.accelerator.current_stream(device).synchronize()


class StreamWork:
    """All work that the current stream of `device` was given before. Only streams wait for it, not the host."""

    def __init__(self, device: torch.device) -> None:
        is_simulated = device.type == "meta"
        self._event: Any = AllWork(()) if is_simulated else torch.accelerator.current_stream(device).record_event()

    def wait(self) -> None:
        self._event.wait()


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
    """Adds up what arrived, in rank order on every rank, and divides it.

    `add(rows, total)` fills `total` with the sum.
    """

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        parts: Sequence[Rows],
        divisor: float,
        add: Callable[[Rows, Tensor], None] | None = None,
    ) -> None:
        super().__init__(works, tensors)
        self._outputs, self._parts, self._divisor, self._add = outputs, parts, divisor, add or sum_rows

    def wait(self) -> None:
        super().wait()
        waiting, self._parts = self._parts, ()
        for output, parts in zip(self._outputs, waiting):  # noqa: B905  the second wait finds no parts
            _sum(parts, output, self._divisor, self._add)
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


def sum_rows(parts: Rows, output: Tensor) -> None:
    """Writes the sum of `parts` to `output`, added in their order and in the dtype of `output`."""
    if isinstance(parts, Tensor) and costs_launches(parts.device):
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


def sum_pairs(parts: Rows, output: Tensor) -> None:
    """Writes the sum of `parts`, a power of two of them in the dtype of `output`, to `output`. Neighbours are added,
    then the sums of neighbouring pairs, and so on.
    """
    while len(parts) > 2:
        halves = parts[::2], parts[1::2]
        parts = halves[0] + halves[1] if isinstance(parts, Tensor) else [*map(torch.add, *halves)]  # type: ignore[operator]
    if len(parts) == 1:
        output.copy_(parts[0])
    else:
        torch.add(parts[0], parts[1], out=output)


def _divide(tensors: Sequence[Tensor], divisor: float) -> None:
    if tensors and divisor != 1:
        internals.divide_each([*tensors], divisor)


def _sum(parts: Rows, output: Tensor, divisor: float, add: Callable[[Rows, Tensor], None]) -> None:
    """Writes the sum of `parts` to `output`. It adds up in the dtype of `output`; in fp32 if that is fp16, and then
    divides by `divisor`.
    """
    if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
        total = torch.empty_like(output, dtype=torch.float32)
        add(parts, total)
        output.copy_(total.div_(divisor))
        return
    add(parts, output)


# ---- copies between the CPU and the device


class Transfer(Generic[Result]):
    """A copy that has begun. It keeps alive what it reads and writes."""

    def __init__(self, event: Any, tensors: tuple[Tensor, ...], result: Result) -> None:
        self._event, self._tensors, self._result = event, tensors, result

    def wait(self) -> Result:
        """Makes the current stream wait for the copy."""
        self._event.wait()
        return self._result

    def pass_on(self) -> Result:
        """Returns what was launched behind the copy. To wait for that is to wait for the copy, too."""
        return self._result

    def finish(self) -> Result:
        """Makes the host wait for the copy."""
        self._event.synchronize()
        return self._result


class Transfers:
    """Copies between the CPU's memory, where offloaded shards rest, and a device, while the device computes.

    Each direction has a stream of its own. The device's memory is allocated and freed on the stream that computes: a
    copy waits for that stream when it begins, and that stream, or the host, waits for the copy before memory is freed.

    Args:
        device: an accelerator.
        pin: allocate the CPU's side in page-locked memory; copies from and to other memory make the host wait.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._inward, self._outward = torch.Stream(device), torch.Stream(device)
        # Recorded behind the last copy from the CPU's memory that the host has not waited for.
        self._last: Any = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory on the CPU."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pin)

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Result]) -> Transfer[Result]:
        """Begins to copy `source`, on the CPU, to `target`; what `then` launches runs behind the copy.

        `source` must not be written to before `settle`.
        """
        self._inward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._inward:
            target.copy_(source, non_blocking=True)
            result = then()
        self._last = self._inward.record_event()
        return Transfer(self._last, (target, source), result)

    def start_out(self, source: Tensor) -> Transfer[Tensor]:
        """Begins to copy a flat tensor to new memory on the CPU: the result, which may be read after `finish`."""
        target = self.allocate(source.numel(), source.dtype)
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            target.copy_(source, non_blocking=True)
        return Transfer(self._outward.record_event(), (source,), target)

    def settle(self) -> None:
        """Makes the host wait until no copy reads the CPU's memory any more."""
        last, self._last = self._last, None
        if last is not None and not last.query():
            last.synchronize()


def make_transfers(device: torch.device, pin: bool) -> Transfers:
    """Returns the Transfers that all groups on `device` share."""
    simulation = simulated.get() if device.type == "meta" else None
    return _transfers_of(device, pin) if simulation is None else simulation.transfers


@cache
def _transfers_of(device: torch.device, pin: bool) -> Transfers:
    return Transfers(device, pin)
