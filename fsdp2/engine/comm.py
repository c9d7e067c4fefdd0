"""Issues collectives: the interface `Comm`, and its implementations for any process group.

A `Comm` moves bytes between the ranks of one process group and returns at once; whoever needs the bytes waits on the
`Work` that it returns. Every method is a collective: all ranks of the group must call it, in the same order, with
tensors of the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned. `gloo.py`
and `any_group.py` have further implementations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

# Imported by name: an extension may put other functions under these names in `dist`.
from torch.distributed import all_reduce, all_to_all_single

from ..collectives.comm_memory import TORCH_MEMORY, CommMemory
from ..devices.streams import AllWork as AllWork
from ..devices.streams import CopyWork as CopyWork
from ..devices.streams import DividedWork as DividedWork
from ..devices.streams import SumWork as SumWork
from ..devices.streams import Work as Work
from ..torch_private import compat
from .codec import Rows as Rows
from .layout import MAX_OPERATIONS

if TYPE_CHECKING:
    from .root import Root

# ---- the interface


class NamedComm(Protocol):
    """Is a Comm whose messages carry names."""

    def leave(self) -> None:
        """Says goodbye, once, to the other ranks: they raise at the next collective."""


class Purpose:
    """Names the group whose collectives a Comm issues, for errors and for checks that compare ranks.

    `name`: FQN of the group's module; `label`: the same for errors, with the class where the FQN says little. `remark`:
    what else errors of ranks that are out of step may say, which is not compared. `root`: a weak reference to the root
    that runs the group: a collective in flight must not keep a model alive. `named_comms`: the Comms whose collectives
    carry this name, over one axis of a mesh each, or over some of the ranks; they say goodbye when ranks get out of
    step.
    """

    def __init__(self, name: str = "facts to compare", root: Root | None = None) -> None:
        self.name, self.label, self.remark = name, name, ""
        self.root: Callable[[], Root | None] = lambda: None
        if root is not None:
            self.run_under(root)
        self.named_comms: WeakSet[NamedComm] = WeakSet()

    def run_under(self, root: Root) -> None:
        """Names collectives of `root` from now on."""
        self.root = weakref.ref(root)

    def rename(self, name: str, label: str) -> None:
        """Has another name and label from now on."""
        self.name, self.label = name, label

    def set_remark(self, remark: str) -> None:
        """Has errors of ranks that are out of step say `remark`, in place of the one before."""
        self.remark = remark

    def where(self) -> tuple[str, int]:
        """Returns what runs on this rank ("forward", "backward", "by hand"), and how many backwards have ended."""
        root = self.root()
        return ("by hand", 0) if root is None else root.where()

    def locate(self, error: RuntimeError, doing: str) -> None:
        """Adds to the message of `error` what this rank was doing, and when: few process groups know."""
        phase, step = self.where()
        error.args = (f"{error} (while {doing}; {phase}, step {step})",)


class Comm(Protocol):
    """Issues collectives over one group of ranks.

    `what`, an argument of those that reduce, names the gradients (" of blocks.0.weight"), for checks that compare
    ranks. The rest of a collective's name is the method's, and the group's: `purpose`.
    """

    rank: int
    # Parameters of which each rank holds at least so many bytes are gathered and reduced on their own, straight from
    # and into place. That saves a copy and costs messages; both grow with the number of ranks.
    direct_min_bytes: int
    # Sum, and divide afterwards, even if the backend can average.
    force_sum: bool
    # Each rank itself sums what other ranks send it, in `reduce_scatter`, too: then an exchange costs no more.
    sums_on_arrival: bool
    # A collective begins behind all that the current stream was given before. So whoever waits for its Work is behind
    # all that, too.
    follows_stream: bool
    # Where what plans have it send and fill comes from. It takes tensors of any memory.
    memory: CommMemory
    purpose: Purpose

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. None: this rank alone."""

    @property
    def size(self) -> int:
        """The number of ranks. It may change between steps where ranks join and leave: see AnyComm."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Fills outputs[i] with the inputs[i] of all ranks, in rank order. inputs[i] may be this rank's part of it."""

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        """Fills outputs[i] with the sum over ranks of this rank's slice of inputs[i], divided by `divisor`.

        inputs[i] is `size` slices in rank order, in the dtype of outputs[i].
        """

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        """Sends slice r of each of `sent`, `size` slices in rank order, to rank r, and sums nothing.

        Returns a Work, and what has arrived when it was waited for: element r of rows[i] is this rank's slice of rank
        r's sent[i]. This rank's own may lie in sent[i].
        """

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        """Fills `tensor` with its sum over ranks, divided by `divisor`."""


def compare_first(comm: Comm, kind: str, tensor: Tensor, what: str = "") -> None:
    """Returns when all ranks are about to do that with a tensor of this size, where they compare what they do: a
    collective that is not the Comm's own follows, whose messages have no names. `what`: names gradients in it.

    Raises:
        RuntimeError: they are not; on all ranks.
    """
    compare = getattr(comm, "compare", None)
    if compare is not None:
        compare(kind, tensor, what)


class CommWatcher(Protocol):
    """Watches what ranks are about to communicate, and raises on all of them if they are out of step. Checks give the
    engine one; without, nothing is watched (Unwatched).
    """

    def named(self, group: dist.ProcessGroup, purpose: Purpose) -> Comm | None:
        """Returns a Comm over gloo whose collectives carry their names; None: an ordinary one will do."""

    def is_checked(self, group: dist.ProcessGroup | None) -> bool:
        """Returns True if ranks compare all that they do there."""

    def checked(self, comm: Comm, device: torch.device) -> Comm:
        """Returns a Comm that does what `comm` does, once ranks have compared what that is."""

    def unchecked(self, comm: Comm) -> Comm:
        """Returns the Comm inside of such a one, or `comm` itself."""

    def note_level(self, groups: Sequence[dist.ProcessGroup], purpose: Purpose, checked: bool) -> None:
        """Has collectives over these process groups compared, or not, from now on."""


class Unwatched:
    """Is the CommWatcher that watches nothing."""

    def named(self, group: dist.ProcessGroup, purpose: Purpose) -> Comm | None:
        return None

    def is_checked(self, group: dist.ProcessGroup | None) -> bool:
        return False

    def checked(self, comm: Comm, device: torch.device) -> Comm:
        return comm

    def unchecked(self, comm: Comm) -> Comm:
        return comm

    def note_level(self, groups: Sequence[dist.ProcessGroup], purpose: Purpose, checked: bool) -> None:
        pass


# ---- ways to communicate


_Options = TypeVar("_Options", dist.ReduceScatterOptions, dist.AllreduceOptions)


def _options(kind: type[_Options], op: dist.ReduceOp.RedOpType) -> _Options:
    options = kind()
    options.reduceOp = op  # type: ignore[assignment]
    return options


_AVERAGE_SCATTER = _options(dist.ReduceScatterOptions, dist.ReduceOp.AVG)
_SUM_SCATTER = _options(dist.ReduceScatterOptions, dist.ReduceOp.SUM)
_AVERAGE_ALL = _options(dist.AllreduceOptions, dist.ReduceOp.AVG)
SUM_ALL = _options(dist.AllreduceOptions, dist.ReduceOp.SUM)


class AnyComm:
    """Is a Comm over any process group that has torch.distributed's functions of one tensor.

    It uses public functions only, one launch for each tensor, and divides sums afterwards.
    """

    direct_min_bytes = 512 * 1024
    force_sum = True
    sums_on_arrival = follows_stream = False  # it may run on the current stream, with a Work that is done
    memory: CommMemory = TORCH_MEMORY

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        self.group, self.rank, self.purpose = group, group.rank(), purpose
        self._size = None if compat.size_may_change(group) else group.size()

    @property
    def size(self) -> int:
        """The number of ranks; of a group that ranks join and leave, the number of those that take part now."""
        return self._size or max(1, self.group.size())

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return AllWork([*map(self._gather, outputs, inputs)], [*outputs, *inputs])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        if outputs and outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            work, rows = self.exchange(inputs, what)
            return SumWork([work], inputs, outputs, rows, divisor)
        return DividedWork([AllWork([*map(self._scatter, outputs, inputs)], inputs)], outputs, divisor)

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        received = [torch.empty_like(tensor) for tensor in sent]
        work = AllWork([*map(self._exchange, received, sent)], [*received, *sent])
        return work, [theirs.view(self.size, -1) for theirs in received]

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        wide = tensor.float() if tensor.dtype == torch.float16 else tensor
        return _divide_wide(all_reduce(wide, group=self.group, async_op=True), wide, tensor, divisor)

    def _gather(self, output: Tensor, source: Tensor) -> Work:
        work: Work = compat.all_gather_one(output, source, group=self.group, async_op=True)
        return work

    def _scatter(self, output: Tensor, source: Tensor) -> Work:
        work: Work = compat.reduce_scatter_one(output, source, group=self.group, async_op=True)
        return work

    def _exchange(self, received: Tensor, source: Tensor) -> Work:
        work: Work = all_to_all_single(received, source, group=self.group, async_op=True)
        return work


def _divide_wide(work: Work, wide: Tensor, output: Tensor, divisor: float) -> Work:
    """Divides the sum in `wide`, and casts it to `output` if that is another tensor, when the work is waited for."""
    divided = DividedWork([work], [wide], divisor)
    return divided if wide is output else CopyWork([divided], [(output, wide)])


class CoalescedComm:
    """Issues one coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs. The few operations of a call, see MAX_OPERATIONS, run side by side, so that a small
    # one takes no longer than the packed ones, which are copied and exist twice; less than this saves nothing.
    direct_min_bytes = 1024
    sums_on_arrival = False
    follows_stream = True

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose, memory: CommMemory = TORCH_MEMORY) -> None:
        self.group, self.rank, self.size, self.purpose = group, group.rank(), group.size(), purpose
        self.memory = memory
        self._gather_one, self._scatter_one = compat.single_tensor_collectives(group)
        self.force_sum = False
        # At that debug level torch 2.11 wraps process groups in one that does not know coalesced collectives.
        self._max_operations = 1 if dist.get_debug_level() == dist.DebugLevel.DETAIL else MAX_OPERATIONS

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            work: Work = self._gather_one(outputs[0], inputs[0])
            return work
        if len(outputs) <= self._max_operations:
            return self.group.allgather_into_tensor_coalesced([*outputs], [*inputs])
        return self._in_calls(self.all_gather, outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        averages = divisor == self.size and not self.force_sum
        if not averages and outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            inputs = compat.quotients([*inputs], divisor)  # in other memory: autograd may still use the gradients
            return AllWork([self._scatter(outputs, inputs, _SUM_SCATTER)], inputs)
        work = self._scatter(outputs, inputs, _AVERAGE_SCATTER if averages else _SUM_SCATTER)
        return work if averages else DividedWork([work], outputs, divisor)

    def _scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: dist.ReduceScatterOptions) -> Work:
        if len(outputs) == 1:
            work: Work = self._scatter_one(outputs[0], inputs[0], options)
            return work
        if len(outputs) <= self._max_operations:
            return self.group.reduce_scatter_tensor_coalesced([*outputs], [*inputs], options)
        return self._in_calls(self._scatter, outputs, inputs, options)

    def _in_calls(
        self,
        launch: Callable[..., Work],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *options: dist.ReduceScatterOptions,
    ) -> Work:
        """Launches more collectives than one call may have, in calls of about equal numbers."""
        number = -(-len(outputs) // self._max_operations)
        works = [launch(outputs[i::number], inputs[i::number], *options) for i in range(number)]
        return AllWork(works, [*outputs, *inputs])

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        received = [torch.empty_like(tensor) for tensor in sent]
        works = [self.group.alltoall_base(theirs, mine, [], []) for theirs, mine in zip(received, sent, strict=True)]
        return AllWork(works, [*sent, *received]), [theirs.view(self.size, -1) for theirs in received]

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        if divisor == self.size and not self.force_sum:
            return self.group.allreduce([tensor], _AVERAGE_ALL)
        divisor = divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], SUM_ALL)], [tensor], divisor)


def divide_before(tensor: Tensor, divisor: float) -> float:
    """Divides a tensor in fp16 before it is summed: the sum could pass 65504. Returns what is left to divide by."""
    if tensor.dtype != torch.float16:
        return divisor
    tensor.div_(divisor)
    return 1


class DelegatingComm:
    """Is a Comm that does all as another one, `inner_comm`, does it, but for what a subclass does otherwise."""

    def __init__(self, inner: Comm) -> None:
        self.inner_comm, self.rank, self.purpose = inner, inner.rank, inner.purpose
        self.direct_min_bytes, self.sums_on_arrival = inner.direct_min_bytes, inner.sums_on_arrival
        self.follows_stream, self.memory = inner.follows_stream, inner.memory

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.inner_comm.group

    @property
    def size(self) -> int:
        return self.inner_comm.size

    @property
    def force_sum(self) -> bool:
        return self.inner_comm.force_sum

    @force_sum.setter
    def force_sum(self, value: bool) -> None:
        self.inner_comm.force_sum = value

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return self.inner_comm.all_gather(outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        return self.inner_comm.reduce_scatter(outputs, inputs, divisor, what)

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        return self.inner_comm.exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        return self.inner_comm.all_reduce(tensor, divisor, what)


class SoloComm:
    """Is the Comm of one rank, which has nothing to communicate, and never calls a collective."""

    group, rank, size, direct_min_bytes, force_sum, sums_on_arrival = None, 0, 1, 0, False, False
    follows_stream = False
    memory: CommMemory = TORCH_MEMORY
    purpose = Purpose()

    def all_gather(self, *_: object) -> Work:
        raise AssertionError("one rank has nothing to communicate")

    reduce_scatter = all_reduce = all_gather

    def exchange(self, *_: object) -> tuple[Work, Sequence[Rows]]:
        raise AssertionError("one rank has nothing to communicate")


# Backends that are known to coalesce, also where a debug level wraps them. Others say so themselves.
_COALESCING = ("nccl", "xccl", "hccl", "fake")


def make_comm(group: dist.ProcessGroup | None, device: torch.device, purpose: Purpose) -> Comm:
    """Returns the Comm for a process group on `device`. None: one rank.

    Raises:
        NotImplementedError: gloo with tensors that are not on the CPU, which would crash the process.
        RuntimeError: the group has no backend for `device`.
    """
    if group is None:
        return SoloComm()
    name = compat.backend_name(group, device)
    if name == "gloo" and device.type != "cpu":
        raise NotImplementedError(
            f"a process group whose backend for {device.type} is gloo can't gather there. Initialise it with the "
            "device's own backend too: init_process_group('cpu:gloo,cuda:nccl'), for example."
        )
    coalesces = name in _COALESCING or (name not in ("", "gloo") and compat.coalesces(group, device))
    return CoalescedComm(group, purpose) if coalesces else AnyComm(group, purpose)


def all_gather_now(own: bytes | bytearray, comm: Comm, device: torch.device) -> list[bytes]:
    """Returns `own` of each rank of `comm`, in rank order. All of these must call it, with as many bytes."""
    if comm.size == 1:
        return [bytes(own)]
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    of_all = mine.new_empty(comm.size, mine.numel())
    comm.all_gather([of_all.view(-1)], [mine]).wait()
    return [_bytes(each) for each in of_all]


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())  # numpy, which could do that, need not be there
    torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)
