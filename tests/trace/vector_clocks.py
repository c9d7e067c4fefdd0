"""Simulates the streams of a GPU on the CPU, and judges the order of all work by vector clocks.

Every operation runs at once, with its real numbers. The simulation also notes on which stream a GPU would have queued
it, which bytes it reads and writes, and after which work of other streams it is ordered. The clock of a stream holds,
for each stream, how much of that stream's work it is ordered after; `wait_stream`, events and collectives merge clocks.

Each process group has its own stream, as over NCCL: a collective runs there, after all work that the current stream has
so far, and `Work.wait()` orders the current stream after it. Memory behaves as in CUDA's caching allocator: a block
belongs to the stream that was current when it was allocated, and is returned to it when its storage is freed or resized
to 0; then that stream's next operation may write to it.

`problems` counts what is wrong:
    race        two streams access the same bytes, one of them writes, and neither is ordered after the other
    early free  a block was returned, and its stream begins another operation while some other may still use the block
    use of freed memory

`host_waits` counts what makes the host wait for the device: see `count_host_waits` in simulated_world.py, which has the
process groups, too.

Memory that is a slice of another storage, as the shard of a parameter is of its group's, is judged with that.

The simulation has limits. Autograd runs a node on the stream of its forward, but the simulation on the current stream;
a test states by `Simulation.on_stream` where backward changes streams. It does not distinguish copies between the CPU
and the device from others.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2

Clock = Counter["Stream"]

HOST_READS = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations whose result the host needs, or whose size it needs."""
PLAIN = (Tensor, torch.nn.Parameter)
ALLOCATE_ONLY = ("empty", "new_empty", "resize", "lift")
PACKAGE = fsdp2.__file__.removesuffix("__init__.py")
TOUCH_NOTHING = ("detach", "set_", "alias", "_unsafe_view")


class Stream:
    """Takes the place of `torch.Stream`: a queue of work, and the work of all streams that the next piece is behind."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name, self.clock = name, Clock()
        self._simulation = simulation
        self._outer: list[Stream] = []
        simulation.streams.append(self)

    def come_behind(self, clock: Clock) -> None:
        self.clock |= clock

    def wait_stream(self, other: Stream) -> None:
        self._simulation.stream_waits[self.name, other.name] += 1
        self.come_behind(other.clock)

    def wait_event(self, event: Event) -> None:
        self.come_behind(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        return Event(self._simulation, self.clock.copy())

    def synchronize(self) -> None:
        self._simulation.host_waits_for("Stream.synchronize", self.clock)

    def __enter__(self) -> Stream:
        self._outer.append(self._simulation.current)
        self._simulation.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._simulation.current = self._outer.pop()

    def __repr__(self) -> str:
        return self.name


class Event:
    """Takes the place of `torch.Event`."""

    def __init__(self, simulation: Simulation, clock: Clock) -> None:
        self._simulation, self.clock = simulation, clock

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._simulation.current).come_behind(self.clock)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._simulation.host_waits_for("Event.synchronize", self.clock)


@dataclass(slots=True)
class Access:
    """One operation's use of bytes `first` up to `end` of a block."""

    stream: Stream
    time: int
    first: int
    end: int
    writes: bool
    what: str

    def conflicts(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.first < other.end and other.first < self.end

    def makes_needless(self, other: Access) -> bool:
        """True if whoever is behind this access is behind `other`, too, and no conflict of `other` is lost."""
        covers = self.first <= other.first and other.end <= self.end and (self.writes or not other.writes)
        return covers and self.stream is other.stream

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} by {self.what} on {self.stream}"


@dataclass
class Block:
    """The memory of one storage, as the allocator of a GPU would have it."""

    storage: weakref.ref[torch.UntypedStorage]
    stream: Stream
    made_by: str
    accesses: list[Access] = field(default_factory=list)
    # Streams for which `Tensor.record_stream` was called.
    recorded: set[Stream] = field(default_factory=set)
    # The block of a storage that this one is a slice of, and the byte where it begins there.
    inside: tuple[Block, int] | None = None
    freed_at: str = ""
    is_on_host: bool = False


class Simulation(TorchDispatchMode):
    """Judges the operations that run inside it. `main` is the stream with which a program begins."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Stream] = []
        self.main = self.current = Stream(self, "main")
        self.problems: Counter[str] = Counter()
        self.host_waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        # Which stream waited for which -> how often; and which collective was waited for by which stream.
        self.stream_waits: Counter[tuple[str, str]] = Counter()
        self.collective_waits: Counter[tuple[str, str]] = Counter()
        self._blocks: dict[int, Block] = {}
        # What has come back to each stream since its last operation.
        self._free: dict[Stream, list[Block]] = {}
        self._restored = -1

    # ---- what tests ask for

    def stream(self, name: str) -> Stream:
        return Stream(self, name)

    def on_stream(self, tensor: Tensor, backward: Stream, waits: bool = True) -> Tensor:
        """Returns the same values. Backward goes on, on `backward`, when it comes to this place.

        As autograd does it: that stream comes behind the one that ran before, if it `waits` for what that computed; and
        when all is computed, the stream that called backward is current again, and comes behind the others.
        """
        result: Tensor = _OnStream.apply(tensor, self, backward, waits)
        return result

    def fork(self, tensor: Tensor, other: Stream) -> tuple[Tensor, Tensor]:
        """Returns the same values for this stream, and for the `other` one. Backward waits for that one where both
        gradients are added up.
        """
        self.record_stream(tensor, other)
        mine, theirs = _Fork.apply(tensor, self, other)
        return mine, theirs

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """What `tensor.record_stream(stream)` does: its memory goes back when `stream` no longer uses it."""
        self._block(tensor.untyped_storage(), "user").recorded.add(stream)

    def lies_on_host(self, tensor: Tensor) -> None:
        """`tensor` stands for memory of the CPU, which no stream gives back."""
        self._block(tensor.untyped_storage(), "host").is_on_host = True

    def switch(self, stream: Stream, waits: bool = True) -> None:
        if waits and stream is not self.current:
            stream.come_behind(self.current.clock)
        self.current = stream

    def restore_at_backward_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._restored:
            self._restored = task
            Variable._execution_engine.queue_callback(partial(self.switch, self.current))

    # ---- what happens

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled in a simulation, and what keeps dynamo out costs as much as the judgement."""
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if issubclass(kind, FakeTensor):
                return func(*args, **(kwargs or {}))
        for kind in types:
            if kind not in PLAIN:
                return NotImplemented  # a subclass, which takes it apart: its inner operations come back to us
        name, touches_nothing, arguments = _signature(func)
        if name in HOST_READS:
            self.count_host_wait(name)
        result = func(*args, **(kwargs or {}))
        if touches_nothing:
            return result
        out = _tensors(result)
        if name.startswith(ALLOCATE_ONLY):
            for tensor in out:
                self._block(tensor.untyped_storage(), name)
            return result
        reads, writes = _arguments(arguments, args, kwargs or {})
        if name.endswith("_like"):
            reads = []  # of which it takes shape and dtype
        known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        fresh = [tensor for tensor in out if tensor.untyped_storage()._cdata not in known]
        self.run(name, reads, [*writes, *fresh], self.current)
        return result

    def run(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], stream: Stream) -> None:
        """Queues an operation on `stream`."""
        self._reuse(stream)
        stream.clock[stream] += 1
        self.operations[stream.name] += 1
        what = f"{what} ({_place()})"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._access(tensor, is_write, what, stream)

    def _access(self, tensor: Tensor, writes: bool, what: str, stream: Stream) -> None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        block, shift = self._block(storage, what), 0
        if not storage.resizable() and block.inside is None:
            block.inside = self._around(storage)
        if block.inside is not None:
            block, shift = block.inside
        if not tensor.numel():
            return
        if not storage.nbytes():
            self.problems[f"use of freed memory: {what} on {stream}"] += 1
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = shift + tensor.storage_offset() * tensor.element_size()
        end = first + (last + 1) * tensor.element_size()
        new = Access(stream, stream.clock[stream], first, end, writes, what)
        for old in block.accesses:
            if old.conflicts(new) and stream.clock[old.stream] < old.time:
                self.problems[f"race: memory made by {block.made_by} is {new}, and {old}"] += 1
        block.accesses = [old for old in block.accesses if not new.makes_needless(old)] + [new]

    def _block(self, storage: torch.UntypedStorage, what: str) -> Block:
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            self._reuse(self.current)
            made_by = f"{what} ({_place()}) on {self.current}"
            reference = weakref.ref(storage, lambda _: self._take_back(key))
            block = self._blocks[key] = Block(reference, self.current, made_by)
        return block

    def _around(self, storage: torch.UntypedStorage) -> tuple[Block, int] | None:
        """Returns the block of another storage, of which this one is a slice, and at which byte it begins there."""
        address = storage.data_ptr()
        for block in self._blocks.values():
            outer = block.storage()
            if outer is not None and outer.resizable():
                begin = outer.data_ptr()
                if begin <= address < begin + outer.nbytes():
                    return block, address - begin
        return None

    # ---- memory

    def resize(self, resize: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        """Stands for `UntypedStorage.resize_`."""
        before = storage.nbytes()
        if before and size != before:
            self._take_back(storage._cdata)
        result = resize(storage, size)
        if size and size != before:
            self._block(storage, "resize_")
        return result

    def _take_back(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None and not block.is_on_host:
            block.freed_at = _place()
            self._free.setdefault(block.stream, []).append(block)

    def _reuse(self, stream: Stream) -> None:
        """An operation begins on `stream`, which may write to any block that has come back to it."""
        for block in self._free.pop(stream, ()):
            for access in block.accesses:
                if stream.clock[access.stream] < access.time and access.stream not in block.recorded:
                    self.problems[
                        f"early free at {block.freed_at}: memory made by {block.made_by} may still be {access}"
                    ] += 1

    # ---- the host

    def host_waits_for(self, what: str, clock: Clock) -> None:
        """The host waits: what it queues from now on, on whatever stream, is behind that work."""
        self.count_host_wait(what)
        for stream in self.streams:
            stream.come_behind(clock)

    def count_host_wait(self, what: str) -> None:
        """The host reads a result. What a program itself reads is left out: counts of steps lie on the CPU, say.

        It orders nothing here, though it does on a GPU: whoever counts on that would fail where that result is the
        CPU's.
        """
        place = _place()
        if place != "user":
            self.host_waits[f"{what} ({place})"] += 1

    def read_on_host(self, read: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """Stands for `Tensor.tolist`, which is no operation."""
        self.count_host_wait("tolist")
        return read(tensor)


class _OnStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, simulation: Simulation, stream: Stream, waits: bool) -> Tensor:
        ctx.simulation, ctx.stream, ctx.waits = simulation, stream, waits
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.simulation.restore_at_backward_end()
        ctx.simulation.record_stream(gradient, ctx.stream)
        ctx.simulation.switch(ctx.stream, ctx.waits)
        return gradient, None, None, None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, simulation: Simulation, other: Stream) -> tuple[Tensor, Tensor]:
        ctx.simulation, ctx.other = simulation, other
        return tensor.view_as(tensor), tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.simulation.current.come_behind(ctx.other.clock)
        ctx.simulation.record_stream(gradients[1], ctx.simulation.current)
        return sum(gradients), None, None


@cache
def _signature(func: OpOverload) -> tuple[str, bool, list[tuple[str, bool]]]:
    """Returns the name, if the operation touches no memory, and its arguments: names, and if it writes to them."""
    name = func._schema.name.split("::")[-1]
    aliases = [each.alias_info for each in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    arguments = [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments]
    return name, is_view or name in TOUCH_NOTHING, arguments


def _arguments(
    arguments: list[tuple[str, bool]], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes to."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for index, (name, is_write) in enumerate(arguments):
        value = args[index] if index < len(args) else kwargs.get(name)
        (writes if is_write else reads).extend(_tensors(value))
    return reads, writes


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in what operations take and return: one, or lists and tuples."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


def _place() -> str:
    """Up to three lines of fsdp2 that run, innermost first; else "user"."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 3:
        file = _file_in_package(frame.f_code.co_filename)
        if file is None:
            break
        if file:
            places.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places) or "user"


@cache
def _file_in_package(file: str) -> str | None:
    """Returns "" of other code, and None of pytest's, outside which there is none of the package."""
    if "/_pytest/" in file:
        return None
    return file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else ""
