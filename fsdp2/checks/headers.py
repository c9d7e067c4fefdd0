"""What collectives say about themselves, so that those of two ranks that don't belong together are never mixed.

A header names a group of parameters, what is done with it, and the sizes of the tensors that cross. Ranks that find
different headers at the same place of their sequence of collectives are out of step: all of them raise.
"""

from __future__ import annotations

import hashlib
import re
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.comm import Work

HEADER_NBYTES = 192
_DIGEST_NBYTES = 8
_LONGEST_NAME = 100
REDUCING, SUMMING, DIVIDED = "reducing", "summing replicas of", ", divided by "
TABLE = "\nWhere each rank was:"

# Tags of messages, which must not meet a user's: of headers, one for each time that ranks were out of step, and of what
# follows them.
_HEADER_TAG = 0x0F5D_0000
_DATA_TAG = 0x4000_0000


class Header(NamedTuple):
    """`data`: what crosses, as bytes: `digest`, which is compared, and `text`, which people read."""

    text: str
    data: Tensor
    digest: Tensor

    @classmethod
    def of(cls, doing: str, where: str, sizes: Sequence[Any], part: str, compared: str = "") -> Header:
        """`where` is not compared, `compared` is. Ends with the sizes and the part, as far as there is room."""
        digest = hashlib.blake2b(repr((doing, compared, sizes, part)).encode(), digest_size=_DIGEST_NBYTES).digest()
        text = f"{doing}{where}\t{', '.join(f'{numel} {str(dtype)[6:]}' for dtype, numel in sizes)}{part}"
        data = (digest + text.encode()[: HEADER_NBYTES - _DIGEST_NBYTES]).ljust(HEADER_NBYTES, b"\0")
        return cls.holding(text, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @classmethod
    def holding(cls, text: str, data: Tensor) -> Header:
        return cls(text, data, data[:_DIGEST_NBYTES])


class Runtime(Protocol):
    """What runs the group whose collectives they are: a Context."""

    def where(self) -> tuple[str, int]:
        """What runs, and in which step."""

    def note_out_of_step(self) -> None:
        """What this rank has recorded may differ from what others have."""


class Label:
    """Whose collectives those of a Comm are. `name`: of the group of parameters."""

    def __init__(self, name: str = "facts to compare") -> None:
        self.name = name
        # Of which of the group's parameters the next gradients are: set before a reduction.
        self.part = ""
        # Its Comms that can say goodbye: over the axes of a mesh, or over some of the ranks.
        self.comms: weakref.WeakSet[Any] = weakref.WeakSet()
        self._runtime: Callable[[], Runtime | None] = lambda: None
        self._headers: dict[Any, Header] = {}

    def run_in(self, runtime: Runtime) -> None:
        """Ask `runtime` from now on. It is not kept alive: collectives that nobody waits for must not keep a model."""
        self._runtime = weakref.ref(runtime)

    def note_out_of_step(self) -> None:
        runtime = self._runtime()
        if runtime is not None:
            runtime.note_out_of_step()

    def where(self) -> tuple[str, int]:
        """Returns what runs on this rank, and in which step."""
        runtime = self._runtime()
        return ("by hand", 0) if runtime is None else runtime.where()

    def locate(self, error: RuntimeError, doing: str) -> None:
        """Say in the message of `error` what this rank was doing, and when: few process groups know."""
        phase, step = self.where()
        error.args = (f"{error} (while {doing}; {phase}, step {step})",)

    def leave(self) -> None:
        """Ranks are out of step: tell all with whom this one has collectives, for those of other axes wait for it."""
        for comm in self.comms:
            comm.leave()

    def header(self, kind: str, tensors: Sequence[Tensor]) -> Header:
        """Of a collective that takes `tensors` of this rank; built once."""
        part = self.part if kind in (REDUCING, SUMMING) else ""
        key = (kind, self.name, part, *[(tensor.dtype, tensor.numel()) for tensor in tensors])
        header = self._headers.get(key)
        if header is None:
            header = self._headers[key] = Header.of(self._doing(kind), "", key[3:], part)
        return header

    def placed_header(self, kind: str, tensors: Sequence[Tensor]) -> Header:
        """The same, with what runs, which is compared, and the step, which is not: ranks may accumulate different
        numbers of batches, and after an error their counts may differ for ever.
        """
        phase, step = self.where()
        sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        part = self.part if kind in (REDUCING, SUMMING) else ""
        return Header.of(self._doing(kind), f" ({phase}, step {step})", sizes, part, phase)

    def _doing(self, kind: str) -> str:
        return f"{kind} {self.name}" if len(self.name) <= _LONGEST_NAME else f"{kind} ...{self.name[-_LONGEST_NAME:]}"


_LEFT = "out of step with others, see its error"
_GOODBYE = (bytes(_DIGEST_NBYTES) + _LEFT.encode()).ljust(HEADER_NBYTES, b"\0")
GOODBYE = Header.holding(_LEFT, torch.frombuffer(bytearray(_GOODBYE), dtype=torch.uint8))
"""Of no collective: what a rank sends last, before all begin anew."""


def differ(message: Tensor, own: Header) -> bool:
    """Whether the header with which `message` begins means something else than `own`."""
    return not torch.equal(message[:_DIGEST_NBYTES], own.digest)


def digest_of(header: bytes) -> bytes:
    return header[:_DIGEST_NBYTES]


def text_of(header: Tensor | bytes) -> str:
    data = bytes(header.tolist()) if isinstance(header, Tensor) else header
    return data[_DIGEST_NBYTES:HEADER_NBYTES].rstrip(b"\0").decode(errors="replace")


def without_sizes(text: str) -> str:
    return text.partition("\t")[0]


_DTYPE = re.compile(r"\bb?float\d+\b")


def _hint(texts: Sequence[str]) -> str:
    """What may be the reason where all reduce."""
    if not all(text.startswith((REDUCING, SUMMING)) for text in texts):
        return ""
    if len({DIVIDED in text for text in texts}) == 2:
        return " Call set_gradient_divide_factor on all of them, with the same factor."
    if len({_DTYPE.sub("", text) for text in texts}) == 1:
        what = "give MixedPrecisionPolicy its reduce_dtype as wire_dtype"
        return f" If they accumulate different numbers of batches, {what}."
    return " If ranks use different parameters of one group, call set_reduce_scatter_unused_params(True)."


def out_of_step(texts: Mapping[int, str]) -> str:
    """The error's message. `texts`: by rank."""
    doing = {rank: without_sizes(text) for rank, text in texts.items()}
    if len(set(doing.values())) == 1:
        doing = {rank: text.replace("\t", ", tensors of ", 1) for rank, text in texts.items()}
    ranks: dict[str, list[str]] = {}
    for rank, text in doing.items():
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank{'s' * (len(own) > 1)} {', '.join(own)}: {text}" for text, own in ranks.items()]
    return (
        f"ranks are out of step. {'; '.join(parts)}. All must run the same sharded modules in the same order; has one "
        "gone on after an exception, left a module out, or built another model?"
        f"{_hint([*texts.values()])} Nothing was mixed. Where every rank catches this error, the next step is exact."
    )


class Exchange:
    """The messages of one collective between this rank and the others: a Work.

    A rank's first message begins with its header; a small tensor may ride behind that.

    `rows`: where first messages arrive, by the rank that sends them.
    `take_leave`: called, if ranks are out of step, with this exchange and those that began later: see PairwiseComm.
    """

    def __init__(
        self,
        conversation: Conversation,
        label: Label,
        header: Header,
        rows: dict[int, Tensor],
        take_leave: Callable[[Sequence[Exchange]], None],
    ) -> None:
        self.label, self.header, self.rows, self.take_leave = label, header, rows, take_leave
        # First messages that are sent, and received, by rank; all that follow, by rank; riders, as (target, row).
        self.sent: list[Work] = []
        self.received: dict[int, Work] = {}
        self.rest: dict[int, list[Work]] = {rank: [] for rank in rows}
        self.riders: list[tuple[Tensor, Tensor]] = []
        self.error: str | None = None
        self.is_compared = self.differs = False
        self._conversation = conversation

    def wait(self) -> None:
        """Raises RuntimeError: ranks are out of step, or one does not answer."""
        self._conversation.compare_until(self)
        if self.error is not None:
            raise RuntimeError(self.error)
        riders, self.riders = self.riders, []
        for target, source in riders:
            target.copy_(source.narrow(0, HEADER_NBYTES, target.numel()))
        rest, self.rest = self.rest, {}
        try:
            for works in rest.values():
                for work in works:
                    work.wait()
        except RuntimeError as error:
            error.args = (f"{error}{self._conversation.table(self, set(self.rows))}",)
            raise

    def receive(self) -> tuple[set[int], str]:
        """Wait for first messages. Return whose came, and why others' did not."""
        came, problem = set(self.rows), ""
        for source, work in self.received.items():
            try:
                work.wait()
            except RuntimeError as error:  # then all other works of the process group end at once
                came.discard(source)
                problem = problem or str(error)
        self.differs = any(differ(row, self.header) for row in self.rows.values())
        try:
            for work in () if self.differs else self.sent:  # who has left takes it later
                work.wait()
        except RuntimeError as error:
            problem = problem or str(error)
        return came, problem

    def fail(self, error: RuntimeError) -> None:
        """It could not even be begun. Say in the message where ranks are."""
        error.args = (f"{error}{self._conversation.table(self, set())}",)
        self._conversation.give_up([self], str(error))


class Conversation:
    """The collectives of one process group whose headers are still to be compared, in the order in which they began.

    Messages that follow headers are matched by tags that derive from all headers so far: what is sent by ranks that are
    out of step arrives nowhere. After an error tags begin anew, on all ranks.

    `partings`: the goodbyes that this rank has sent, until all ranks have.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        # Of all that talk here.
        self.labels: weakref.WeakSet[Label] = weakref.WeakSet()
        self._pending: deque[Exchange] = deque()
        self._errors = 0
        self._sequence = 0
        self._last = ("nothing yet", time.monotonic())
        self.partings: list[Work] = []
        # Sent before the last error: those who left earlier take it when they come back.
        self._left_behind: list[Work] = []

    @property
    def header_tag(self) -> int:
        return _HEADER_TAG + self._errors % 0x10000

    def begin(self, exchange: Exchange) -> int:
        """The tag of the messages that follow its first ones."""
        self._pending.append(exchange)
        self._sequence = zlib.crc32(exchange.header.text.encode(), self._sequence)
        return _DATA_TAG | self._sequence & 0x3FFF_FFFF

    def compare_until(self, last: Exchange) -> None:
        """Compare headers, in order, of all up to `last`, unless that has been done."""
        while not last.is_compared:
            exchange = self._pending.popleft()
            exchange.is_compared = True
            came, problem = exchange.receive()
            if problem:
                self.give_up([exchange], problem + self.table(exchange, came))
            elif exchange.differs:
                if not self.partings:  # else that was said when this rank left
                    for label in [*self.labels]:
                        label.note_out_of_step()
                with suppress(RuntimeError):  # one is gone: then nothing arrives any more
                    exchange.take_leave([exchange, *self._pending])
                texts = {source: text_of(row) for source, row in exchange.rows.items()}
                texts[self._own_rank()] = exchange.header.text
                self.give_up([exchange], out_of_step({self._ranks()[i]: texts[i] for i in sorted(texts)}))
            else:
                self._last = exchange.header.text, time.monotonic()

    def come_back(self, take_leave: Callable[[Sequence[Exchange]], None]) -> None:
        """Behind a goodbye: wait until all ranks have said theirs, and whatever began before is compared."""
        if self._pending:
            self.compare_until(self._pending[-1])
        if self.partings:
            with suppress(RuntimeError):  # one is gone: whoever asks for the next collective is told
                take_leave([])
            self.give_up([], "")

    def give_up(self, begun: Sequence[Exchange], error: str) -> None:
        """Those, and all that are still to be compared, will not happen."""
        self._left_behind, self.partings = self.partings, []
        for each in (*begun, *self._pending):
            self._left_behind += each.sent
            each.is_compared, each.error = True, error
            each.rest, each.riders = {}, []
        self._pending.clear()
        self._errors += 1
        self._sequence = self._errors

    def table(self, exchange: Exchange, came: set[int]) -> str:
        """Where each rank was, as far as headers have told."""
        doing, (last, since) = without_sizes(exchange.header.text), self._last
        absent = f"not there; {time.monotonic() - since:.1f} s ago it was {without_sizes(last)}"
        lines = []
        for i, rank in enumerate(self._ranks()):
            is_own = i == self._own_rank()
            lines.append(f"  rank {rank}: {doing if is_own or i in came else absent}{' (this one)' * is_own}")
        return "\n".join([TABLE, *lines])

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group())

    def _own_rank(self) -> int:
        group = self._group()
        assert group is not None, "its messages are under way"
        return group.rank()
