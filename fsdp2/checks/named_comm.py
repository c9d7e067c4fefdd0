"""Runs collectives over gloo that carry their names: ranks that are out of step raise, and no bytes are mixed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.choose import make_comm
from ..collectives.gloo import SUMMING, PairwiseComm
from ..collectives.sums import SUM_ALL, divide_before
from ..collectives.watching import compare_first
from ..devices.streams import DividedWork
from ..engine.comm import CommLabel, Rows, Work
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from .conversation import Conversation, Exchange, roots_of, tell_out_of_step
from .headers import GOODBYE, HEADER_NBYTES, RAISED, Header, Headers, differ, goodbye, out_of_step
from .watched_groups import watched

# A tensor of at most so many bytes, as it goes to all other ranks together, travels in the messages that carry headers:
# to copy it twice takes less than messages of its own. See benchmarks/results.
MAX_RIDER_NBYTES = 1024 * 1024
# Tag of messages that only find out to which ranks there are connections.
_PROBE_TAG = 0x0F5E_0000


class NamedPairwiseComm(PairwiseComm):
    """A PairwiseComm whose first message to each rank begins with a header. Ranks compare headers before all else."""

    def __init__(self, group: dist.ProcessGroup, comm_label: CommLabel) -> None:
        super().__init__(group, comm_label)
        known = watched(group)
        known.comm_labels.add(comm_label)
        comm_label.named_comms.add(self)
        self.conversation: Conversation = known.conversation
        self._headers = Headers(comm_label)
        # Of a message whose sender may be out of step: one that is longer than expected would end the process.
        self._max_rider = MAX_RIDER_NBYTES // max(1, self.size - 1)
        self.longest_first = HEADER_NBYTES + self._max_rider

    def compare(self, kind: str, tensor: Tensor, label: str = "") -> None:
        """Returns when all ranks are about to do that with a tensor of this size. `label`: names gradients in it.

        Raises:
            RuntimeError: they are not; on all ranks.
        """
        self.compare_header(self._headers.of(kind, [tensor], label))

    def compare_header(self, header: Header) -> None:
        """Returns when all ranks have sent a header that means the same.

        Raises:
            RuntimeError: they differ; on all ranks.
        """
        self._begin(header, [], []).wait()

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        exchange = self._exchange(SUMMING, [tensor], [], [], label)
        exchange.wait()  # gloo's own messages have no header: ranks must agree before there are any
        divisor = divide_before(tensor, divisor)
        exchange.rest[self.rank] = [self.group.allreduce([tensor], SUM_ALL)]
        return DividedWork([exchange], [tensor], divisor)

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Rows],
        incoming: Sequence[Rows],
        label: str = "",
    ) -> Exchange:
        return self._begin(self._headers.of(kind, tensors, label), outgoing, incoming)

    def _begin(self, header: Header, outgoing: Sequence[Rows], incoming: Sequence[Rows]) -> Exchange:
        with self.conversation.lock:
            if self.conversation.partings:
                self._come_back()
            return self._post(header, outgoing, incoming)

    def _post(self, header: Header, outgoing: Sequence[Rows], incoming: Sequence[Rows]) -> Exchange:
        conversation = self.conversation
        rows = {source: torch.empty(self.longest_first, dtype=torch.uint8, device="cpu") for _, source in self._peers}
        exchange = Exchange(conversation, self.comm_label, header, rows, self._take_leave, self._find_ended)
        first_tag, tag = conversation.header_tag, conversation.begin(exchange)
        rides = bool(outgoing) and outgoing[-1][0].nbytes <= self._max_rider
        bulk = [*zip(outgoing, incoming, strict=True)][: len(outgoing) - rides]
        try:
            for to, source in self._peers:
                message = header.data
                if rides:
                    message = torch.cat([message, _bytes_of(outgoing[-1][to])])
                    exchange.riders.append((_bytes_of(incoming[-1][source]), rows[source]))
                exchange.sent.append(self.group.send([message], to, first_tag))
                exchange.received[source] = self.group.recv([rows[source]], source, first_tag)
                for out, into in bulk:
                    exchange.rest[to].append(self.group.send([out[to]], to, tag))
                    exchange.rest[source].append(self.group.recv([into[source]], source, tag))
        except RuntimeError as error:  # a peer is gone
            exchange.fail(error)
            raise
        return exchange

    def leave(self) -> None:
        """Says goodbye, once, to the other ranks: they get that in place of the next collective's header, and raise."""
        conversation = self.conversation
        if conversation.left is not None:  # said while this rank was blocked: now it knows
            conversation.left = None
            tell_out_of_step(conversation.comm_labels)
        if not conversation.partings:
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        data, tag = self.conversation.goodbye.data, self.conversation.header_tag
        with suppress(RuntimeError):  # a peer is gone
            self.conversation.partings = [self.group.send([data], to, tag) for to, _ in self._peers]

    def leave_blocked(self, num_errors: int, number: int, texts: dict[int, str]) -> None:
        """Says goodbye for a thread of this rank that is blocked elsewhere, if it has not begun collective `number`.

        `num_errors`: how often ranks were out of step when that began. `texts`: rank -> what it does.
        """
        conversation = self.conversation
        if not conversation.lock.acquire(blocking=False):
            return  # the thread is here
        try:
            if conversation.num_errors < num_errors and conversation.partings:
                # All others have gone on since, and wait again.
                left, conversation.left = conversation.left, None
                conversation.come_back(self._take_leave)
                conversation.left = left
            if conversation.num_errors == num_errors and conversation.number < number and not conversation.partings:
                conversation.goodbye, conversation.left = goodbye(texts[dist.get_rank()]), texts
                self._say_goodbye()
        finally:
            conversation.lock.release()

    def _come_back(self) -> None:
        """Goes on behind a goodbye.

        Raises:
            RuntimeError: it was sent while this rank was blocked elsewhere, and this rank does not know that yet.
        """
        conversation, root = self.conversation, self.comm_label.root()
        left, conversation.left = conversation.left, None
        raises = left is not None and not (root is not None and root.is_out_of_step)
        if raises:
            tell_out_of_step(conversation.comm_labels)
        conversation.come_back(self._take_leave)
        if left is not None and raises:
            raise RuntimeError(out_of_step(left))

    def _find_ended(self) -> set[int]:
        found, nothing = set(), torch.zeros(1, dtype=torch.uint8, device="cpu")
        for to, _ in self._peers:
            try:
                self.group.send([nothing], to, _PROBE_TAG)
            except RuntimeError:
                found.add(to)
        return found

    def _take_leave(self, begun: Sequence[Exchange]) -> None:
        """Waits, as ranks are out of step since the first of `begun`, until nothing is under way to this rank.

        gloo stops delivering to a rank that has dropped a message which arrives after all. What each other rank has
        begun is known when it says goodbye, as all do as soon as they compare the first.
        """
        self.leave()
        for _, source in self._peers:
            self._wait_for_goodbye(source, begun)

    def _wait_for_goodbye(self, source: int, begun: Sequence[Exchange]) -> None:
        agrees = True
        for i, exchange in enumerate(begun):
            if i > 0:
                exchange.received[source].wait()
            if not differ(exchange.rows[source], GOODBYE):
                return
            agrees = agrees and not differ(exchange.rows[source], exchange.header)
            for work in exchange.rest[source] if agrees else ():
                work.wait()
        message, tag = torch.zeros(self.longest_first, dtype=torch.uint8, device="cpu"), self.conversation.header_tag
        message[0] = 1  # no goodbye yet
        while differ(message, GOODBYE):
            self.group.recv([message], source, tag).wait()


class Goodbyes(Observer):
    """Says goodbye to all ranks with which a root has collectives: when ranks are out of step, because ranks of other
    axes wait; and when a pass raises on this rank, because others may wait for the rest of it. They raise at once,
    whatever this rank does next, and have ended the same step.

    An evaluation that raises says nothing: others may have all that they need of it. A rank that raises between forward
    and backward, where nothing sees it, is noticed when it begins the next forward. If there was no backward in
    between, or if ranks were out of step, they compare first that they begin one: others may still be in backward, and
    raise.
    """

    def __init__(self, root: Root) -> None:
        # The innermost group whose forward has raised in a pass.
        self._failed: FSDPParamGroup | None = None
        # How many backward passes had ended when the last pass began.
        self._num_backwards = 0
        # Ranks were out of step since then.
        self._is_told = False
        self._comm_label = CommLabel("a forward", root)

    def pass_began(self, root: Root) -> None:
        before, self._num_backwards = self._num_backwards, root.num_backwards
        if not self._is_told and (not before or not root.forward.has_grad or root.num_backwards != before):
            return  # a teacher never has a backward
        self._is_told = False
        if not any(hasattr(comm, "compare") for comm in root.group.comms):
            return
        if root.consensus is not None:
            return  # it finds ranks that are elsewhere
        try:
            self._begin_together(root)
        except RuntimeError:
            if not root.is_out_of_step:
                raise
            root.begin_anew()
            self._is_told = False
            self._begin_together(root)

    def _begin_together(self, root: Root) -> None:
        mesh = root.group.mesh
        nothing = torch.empty(0, device=mesh.device)
        for group in mesh.axis_groups:
            compare_first(make_comm(group, mesh.device, self._comm_label), "beginning", nothing)

    def out_of_step(self, root: Root) -> None:
        self._is_told = True
        for group in root.groups:
            for comm in group.comm_label.named_comms:
                comm.leave()

    def forward_failed(self, group: FSDPParamGroup) -> None:
        self._failed = self._failed or group

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        error, group, self._failed = sys.exc_info()[1], self._failed, None
        if error is None or root.is_out_of_step or root.consensus is not None:
            return  # a user drops everything; others know; or they are told by the consensus
        if not in_backward and not root.forward.has_grad:
            return
        where = f" in the forward of {group.comm_label.label}" if group is not None and not in_backward else ""
        text = " ".join(f"{RAISED}{type(error).__name__}{where}: {error}".split())
        comms = [comm for group in root.groups for comm in group.comm_label.named_comms]
        conversations = {comm.conversation for comm in comms if isinstance(comm, NamedPairwiseComm)}
        for each in conversations:
            each.goodbye = goodbye(text)
        # Roots that share a process group meet others there in one order.
        for other in roots_of(comm_label for each in conversations for comm_label in each.comm_labels):
            other.note_out_of_step(has_failed=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)
