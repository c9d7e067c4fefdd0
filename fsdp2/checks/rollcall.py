"""Has ranks tell each other what they are about to do before each collective, on any backend: the debug level."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.comm import Comm, DelegatingComm, Purpose, Rows, Work, all_gather_now
from ..engine.gloo import GATHERING, REDUCING, SUMMING
from ..engine.torch_names import default_store, has_backend
from .conversation import tell_out_of_step
from .headers import TABLE, Header, Headers, digest_of, out_of_step, placed_header, text_of, without_sizes
from .watched_groups import watched


class Rollcall:
    """Has the ranks of a process group tell each other what they are about to do, and leave a note of where they are in
    the store that all processes share.

    Args:
        aside: what they tell it by.
    """

    def __init__(self, group: dist.ProcessGroup, aside: Comm, device: torch.device) -> None:
        self._group, self.aside, self._device = group, aside, device

    def answer(self, header: Header) -> None:
        """Compares `header` between ranks. Every rank must call it.

        Raises:
            RuntimeError: on all ranks, if their headers differ; or a rank does not come in time.
        """
        with _telling_where():
            _note(without_sizes(header.text))
            self._compare(header)

    def _compare(self, header: Header) -> None:
        of_all = all_gather_now(bytes(header.data.tolist()), self.aside, self._device)
        if len({digest_of(each) for each in of_all}) > 1:
            tell_out_of_step(watched(self._group).purposes)
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(out_of_step({rank: text_of(each) for rank, each in zip(ranks, of_all, strict=True)}))


class CheckedComm(DelegatingComm):
    """Is a Comm whose ranks answer a rollcall before each collective: no data moves if they differ. If one fails, its
    error says what all processes have noted.

    Args:
        inner: what moves the data.
        make_comm: makes the Comm by which ranks tell each other.
        device: where the tensors are.
    """

    def __init__(self, inner: Comm, make_comm: Callable[..., Comm], device: torch.device) -> None:
        super().__init__(inner)
        group, cpu = inner.group, torch.device("cpu")
        assert group is not None, "there are other ranks"
        aside_device = cpu if has_backend(group, cpu) else device
        aside = make_comm(group, aside_device, Purpose())
        self._rollcall, self._headers = Rollcall(group, aside, aside_device), Headers(self.purpose)
        watched(group).purposes.add(self.purpose)
        self.purpose.named_comms |= aside.purpose.named_comms

    def compare(self, kind: str, tensor: Tensor, what: str = "") -> None:
        """Returns when all ranks are about to do that with a tensor of this size. `what`: names gradients in it."""
        self._rollcall.answer(self._headers.of(kind, [tensor], what))

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return self._checked(GATHERING, inputs, lambda: self.inner_comm.all_gather(outputs, inputs))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        return self._checked(
            REDUCING, inputs, lambda: self.inner_comm.reduce_scatter(outputs, inputs, divisor, what), what
        )

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        self._answer(REDUCING, sent, what)
        with _telling_where():
            work, rows = self.inner_comm.exchange(sent, what)
        return _NotedWork(work), rows

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        return self._checked(SUMMING, [tensor], lambda: self.inner_comm.all_reduce(tensor, divisor, what), what)

    def _checked(self, kind: str, tensors: Sequence[Tensor], start: Callable[[], Work], what: str = "") -> Work:
        self._answer(kind, tensors, what)
        with _telling_where():
            return _NotedWork(start())

    def _answer(self, kind: str, tensors: Sequence[Tensor], what: str) -> None:
        self._rollcall.answer(placed_header(self.purpose, kind, tensors, what))


class _NotedWork:
    """Is a Work that says, if it fails, where all ranks have noted that they are."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        with _telling_where():
            self._work.wait()


# ---- notes in the store


def _key(rank: int) -> str:
    return f"fsdp2/position of rank {rank}"


def _note(text: str) -> None:
    with suppress(RuntimeError):  # whoever held the store is gone, or it is a simulated one: there are no notes then
        default_store().set(_key(dist.get_rank()), f"{time.time()} {text}")


@contextmanager
def _telling_where() -> Iterator[None]:
    """Is a context in which errors say where all ranks have noted that they are."""
    try:
        yield
    except RuntimeError as error:
        _add_table(error)
        raise


def _add_table(error: RuntimeError) -> None:
    """Puts what the store knows in place of what headers have told, if anything."""
    message = str(error)
    if "out of step" in message:
        return
    try:
        lines = [f"  rank {rank}: {_read_note(rank)}" for rank in range(dist.get_world_size())]
    except RuntimeError:  # the process that keeps it is gone
        return
    lines[dist.get_rank()] += " (this one)"
    error.args = ("\n".join([message.partition(TABLE)[0] + TABLE, *lines]),)


def _read_note(rank: int) -> str:
    store = default_store()
    if not store.check([_key(rank)]):
        return "nothing yet"
    since, _, text = store.get(_key(rank)).decode().partition(" ")
    return f"{text}, since {time.time() - float(since):.1f} s"
