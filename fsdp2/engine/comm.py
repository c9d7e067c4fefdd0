"""Defines the interface of communication, `Comm`, and its trivial implementation for one rank.

A `Comm` moves bytes between the ranks of one process group. Its methods return at once, with a `Work` to wait for
before the bytes are read. Every method is a collective: all ranks of the group must call it, in the same order, with
tensors of the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned. The implementations
for process groups are in `collectives/`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.streams import Work as Work
from .codec import Rows as Rows

if TYPE_CHECKING:
    from .root import Root


class NamedComm(Protocol):
    """A Comm whose messages carry names."""

    def leave(self) -> None:
        """Says goodbye, once, to the other ranks: they raise at the next collective."""


class CommLabel:
    """Names the group whose collectives a Comm issues, for errors and for checks that compare ranks."""

    def __init__(self, name: str = "facts to compare", root: Root | None = None) -> None:
        # The FQN of the group's module; and the same for errors, with the class where the FQN says little.
        self.name = self.label = name
        # What else errors of ranks that are out of step say. Ranks do not compare it.
        self.remark = ""
        # A weak reference to the root that runs the group: a collective in flight must not keep a model alive.
        self.root: Callable[[], Root | None] = lambda: None
        if root is not None:
            self.run_under(root)
        # The Comms whose collectives carry this name, each over one axis of a mesh, or over some of the ranks. They say
        # goodbye when ranks get out of step.
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

    `label`, an argument of those that reduce, names the gradients (" of blocks.0.weight"), for checks that compare
    ranks. The rest of a collective's name is the method's, and the group's: `comm_label`.
    """

    rank: int
    # Parameters of which each rank holds at least so many bytes are gathered and reduced on their own, straight from
    # and into place. That saves a copy and costs messages; both grow with the number of ranks.
    direct_min_bytes: int
    # Sum, and divide afterwards, even if the backend can average.
    force_sum: bool
    # Each rank itself sums what other ranks send it, in `reduce_scatter`, too: then an exchange costs no more.
    receiver_sums: bool
    # A collective begins behind all that the current stream was given before. So code that waits for its Work is behind
    # all that, too.
    is_stream_ordered: bool
    # Where what plans have it send and fill comes from. It takes tensors of any memory.
    memory: CommMemory
    comm_label: CommLabel

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. None: this rank alone."""

    @property
    def size(self) -> int:
        """The number of ranks. It may change between steps where ranks join and leave: see AnyComm."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Fills outputs[i] with the inputs[i] of all ranks, in rank order. inputs[i] may be this rank's part of it."""

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        """Fills outputs[i] with the sum over ranks of this rank's slice of inputs[i], divided by `divisor`.

        inputs[i] is `size` slices in rank order, in the dtype of outputs[i].
        """

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        """Sends slice r of each of `sent`, `size` slices in rank order, to rank r, and sums nothing.

        Returns a Work, and what has arrived when it was waited for: element r of rows[i] is this rank's slice of rank
        r's sent[i]. This rank's own may lie in sent[i].
        """

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        """Fills `tensor` with its sum over ranks, divided by `divisor`."""


# ---- memory


class CommMemory(Protocol):
    """Gives the memory that collectives of a Comm send and fill."""

    # Collectives are faster on this memory. So shards are copied to it before they are sent, and gradients are packed.
    is_registered: bool
    # Ranks must `meet` before each collective.
    is_symmetric: bool

    @property
    def empty(self) -> Callable[..., Tensor]:
        """The function to call in place of `torch.empty`."""

    @property
    def zeros(self) -> Callable[..., Tensor]:
        """The function to call in place of `torch.zeros`."""

    def allocator(self, nbytes: int) -> Callable[[torch.UntypedStorage], object]:
        """Returns what gives a storage, which has been freed, `nbytes` again. It is called in each step."""

    def meet(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        """Has ranks know where all of them have these tensors. Every rank of `group` must call it, in order."""


class TorchMemory:
    """Gives memory of torch's allocator."""

    is_registered = is_symmetric = False
    empty, zeros = staticmethod(torch.empty), staticmethod(torch.zeros)

    def allocator(self, nbytes: int) -> Callable[[torch.UntypedStorage], object]:
        return methodcaller("resize_", nbytes)  # in a step no function of ours runs

    def meet(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        pass


TORCH_MEMORY = TorchMemory()


# ---- one rank


class SoloComm:
    """The Comm of one rank, which has nothing to communicate."""

    group, rank, size, direct_min_bytes, force_sum, receiver_sums = None, 0, 1, 0, False, False
    is_stream_ordered = False
    memory: CommMemory = TORCH_MEMORY
    comm_label = CommLabel()

    def all_gather(self, *_: object) -> Work:
        raise AssertionError("one rank has nothing to communicate")

    reduce_scatter = all_reduce = all_gather

    def exchange(self, *_: object) -> tuple[Work, Sequence[Rows]]:
        raise AssertionError("one rank has nothing to communicate")
