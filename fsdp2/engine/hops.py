"""Gathers and reduces in two hops: between machines, among ranks of the same place, and inside each machine.

Shape legend:  M machines,  G ranks of each,  S bytes of what all ranks gather or reduce.

The mesh counts ranks by place first, then by machine (`Use.SHARD_ACROSS`). So what the M ranks of one place hold is one
contiguous piece, S / G, and the pieces of a machine follow one another:

    gather    rail: into this rank's piece of the output, in place      machine: the other pieces, in place
    reduce    machine: to the sum of this rank's piece, a buffer of S / G       rail: to the sum of this rank's shard

Each hop has a process group of its own, and reductions have others than gathers. Two short latencies take the place of
a long one, and network cards and the links inside a machine work for different groups at once. So two groups are
gathered ahead, and two reductions may be in flight, unless the user chooses otherwise (`num_hops` in `schedule.py` and
`root.py`): with one, a hop would wait for both hops of the group before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import streams
from .comm import AllWork, Comm, Purpose, Rows, SumWork, Work
from .comm_memory import TORCH_MEMORY, CommMemory
from .streams import StreamWork

# The second hops that have not begun, in the order of their first hops.
Waiting = deque["_SecondHop"]


class _SecondHop:
    """Is a collective of two hops over a backend without streams, where the host begins the second hop.

    All ranks begin second hops in the same order, that of the first hops, whatever they wait for first: `waiting` has
    those of all groups of a mesh. Otherwise ranks that wait in different orders would mix up their messages. It begins
    when its rank waits for it, or before ranks that may be at different places reach consensus.
    """

    def __init__(self, first: Work, begin: Callable[[], Work], waiting: Waiting) -> None:
        self._first: Work | None = first
        self._begin, self._waiting = begin, waiting
        self._second: Work | None = None
        self._error: BaseException | None = None
        waiting.append(self)

    def begin(self) -> None:
        first, self._first = self._first, None
        assert first is not None, "it waits to begin"
        try:
            first.wait()
            self._second = self._begin()
        except BaseException as error:
            self._error = error  # for whoever waits for this one
            raise

    def wait(self) -> None:
        while self._first is not None:
            self._waiting.popleft().begin()
        if self._error is not None:
            raise self._error
        second, self._second = self._second, None
        if second is not None:
            second.wait()


def begin_second_hops(waiting: Waiting) -> None:
    """Begins the second hops that have not begun, so that no other rank has to wait for this one to do so.

    Whoever is about to have the host wait for something else that ranks do together, at which they may arrive by
    different ways, calls it before.
    """
    while waiting:
        waiting.popleft().begin()


class HopsComm:
    """Is the Comm of all ranks of a mesh whose gathers and reductions take two hops.

    Args:
        rail: the ranks of the same place in each machine.
        machine: the ranks of this rank's machine.
        flat: all ranks, in the order of the mesh; for what takes one hop, all-reduces and exchanges.
        device: where the tensors are.
        waiting: the second hops of the mesh, where the host begins them.
        lane: names the stream on which second hops follow first ones: gathers and reductions do not wait for each
            other.
        sent: dtype in which sums of a machine travel between machines, if it is narrower than theirs. None: in their
            own.
    """

    sums_on_arrival = False
    memory: CommMemory = TORCH_MEMORY

    def __init__(
        self,
        rail: Comm,
        machine: Comm,
        flat: Comm,
        device: torch.device,
        waiting: Waiting,
        lane: str,
        sent: torch.dtype | None = None,
    ) -> None:
        self.rail_comm, self.machine_comm, self._flat_comm = rail, machine, flat
        self._device, self._waiting, self._lane, self._sent = device, waiting, lane, sent
        self.rank, self.size = machine.rank * rail.size + rail.rank, rail.size * machine.size
        self.direct_min_bytes = max(rail.direct_min_bytes, machine.direct_min_bytes)
        self.follows_stream = rail.follows_stream and machine.follows_stream
        self.purpose: Purpose = flat.purpose

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._flat_comm.group

    @property
    def force_sum(self) -> bool:
        return self.machine_comm.force_sum

    @force_sum.setter
    def force_sum(self, value: bool) -> None:
        for comm in (self.rail_comm, self.machine_comm, self._flat_comm):
            comm.force_sum = value

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        pieces = [output.view(self.machine_comm.size, -1)[self.machine_comm.rank] for output in outputs]
        first = self.rail_comm.all_gather(pieces, inputs)
        return self._then(first, lambda: self.machine_comm.all_gather(outputs, pieces), [*outputs, *inputs])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        averages = divisor == self.size
        before, behind = (self.machine_comm.size, self.rail_comm.size) if averages else (divisor, 1)
        sizes = [output.numel() * self.rail_comm.size for output in outputs]
        pieces = outputs[0].new_empty(sum(sizes)).split(sizes)
        sent = self._sent if self._sent is not None and self._sent.itemsize < outputs[0].dtype.itemsize else None
        # Allocated on the stream that computes.
        cast = () if sent is None else outputs[0].new_empty(sum(sizes), dtype=sent).split(sizes)

        def reduce_between() -> Work:
            if not cast:
                return self.rail_comm.reduce_scatter(outputs, pieces, behind, what)
            for narrow, piece in zip(cast, pieces, strict=True):
                narrow.copy_(piece)
            work, rows = self.rail_comm.exchange(cast, what)
            summed = SumWork([work], cast, outputs, rows, behind)
            if not streams.exist_on(self._device):
                return summed
            summed.wait()  # on the stream beside, from whose memory the rows are
            return StreamWork(self._device)

        first = self.machine_comm.reduce_scatter(pieces, inputs, before, what)
        return self._then(first, reduce_between, [*outputs, *inputs, *pieces, *cast])

    def _then(self, first: Work, begin: Callable[[], Work], tensors: Sequence[Tensor]) -> Work:
        """Begins the second hop behind the first: on a stream beside, or when anything behind it is waited for."""
        if not streams.exist_on(self._device):
            return AllWork([_SecondHop(first, begin, self._waiting)], tensors)
        with streams.beside(self._device, waits=not self.follows_stream, lane=self._lane):
            first.wait()
            second = begin()
        return AllWork([second], tensors)

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        return self._flat_comm.exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        return self._flat_comm.all_reduce(tensor, divisor, what)
