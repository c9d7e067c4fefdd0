"""Collectives before which ranks tell each other what they are about to do, whatever the backend: the debug level."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from . import group_compat
from ..core.comm import Comm, all_gather_now, make_comm
from .headers import REDUCING, SUMMING, TABLE, Header, Label, digest_of, out_of_step, text_of, without_sizes
from ..core.comm import Work

_VARIABLE = "FSDP2_DEBUG"


def level_from_environment() -> int:
    """
    Raises:
        ValueError: neither 0 nor 1, nor empty.
    """
    value = os.environ.get(_VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"environment variable {_VARIABLE}: expected 0 or 1, got {value!r}")
    return int(value)


# Of process groups: whether ranks compare all that they do there; whose collectives those are.
_levels: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
_labels: WeakKeyDictionary[dist.ProcessGroup, WeakSet[Label]] = WeakKeyDictionary()


def note_level(groups: Sequence[dist.ProcessGroup], label: Label, checked: bool) -> None:
    """Have collectives over these compared, or not, from now on: also those of no group of parameters."""
    for group in groups:
        _levels[group] = checked
        _labels.setdefault(group, WeakSet()).add(label)


def are_checked(group: dist.ProcessGroup) -> bool:
    """Whether ranks compare all that they do there."""
    return _levels.get(group, False)


class Rollcall:
    """Before a collective over `group`, on `device`, its ranks tell each other what they are about to do, and leave a
    note of where they are in the store that all processes share.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, cpu = group, torch.device("cpu")
        self._device = cpu if group_compat.has_backend(group, cpu) else device
        self.aside = make_comm(group, self._device)

    def answer(self, header: Header) -> None:
        """
        Raises:
            RuntimeError: on all ranks, if their headers differ; or one does not come in time.
        """
        with _telling_where():
            _note(without_sizes(header.text))
            self._compare(header)

    def _compare(self, header: Header) -> None:
        of_all = all_gather_now(bytes(header.data.tolist()), self.aside, self._device)
        if len({digest_of(each) for each in of_all}) > 1:
            for label in [*_labels.get(self._group, ())]:
                label.note_out_of_step()
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(out_of_step({rank: text_of(each) for rank, each in zip(ranks, of_all, strict=True)}))


class CheckedComm:
    """A Comm whose ranks answer a rollcall before each collective: no data moves if they differ. If one fails, it says
    what all processes have noted.
    """

    def __init__(self, unchecked: Comm, device: torch.device) -> None:
        self.unchecked = self._comm = unchecked
        self.rank, self.label = unchecked.rank, unchecked.label
        self.direct_min_bytes, self.force_sum = unchecked.direct_min_bytes, unchecked.force_sum
        self.sums_on_arrival = unchecked.sums_on_arrival
        assert unchecked.group is not None, "there are other ranks"
        self._rollcall = Rollcall(unchecked.group, device)
        _labels.setdefault(unchecked.group, WeakSet()).add(self.label)
        self.label.comms.update(self._rollcall.aside.label.comms)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._comm.group

    @property
    def size(self) -> int:
        return self._comm.size

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return self._checked("gathering", inputs, lambda: self._comm.all_gather(outputs, inputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        return self._checked(REDUCING, inputs, lambda: self._comm.reduce_scatter(outputs, inputs, divisor))

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        return self._checked(SUMMING, [tensor], lambda: self._comm.all_reduce(tensor, divisor))

    def _checked(self, kind: str, tensors: Sequence[Tensor], start: Callable[[], Work]) -> Work:
        self._rollcall.answer(self.label.placed_header(kind, tensors))
        with _telling_where():
            return _NotedWork(start())


class _NotedWork:
    """Says, if it fails, where all ranks have noted that they are."""

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
        group_compat.default_store().set(_key(dist.get_rank()), f"{time.time()} {text}")


@contextmanager
def _telling_where() -> Iterator[None]:
    """Have errors say where all ranks have noted that they are."""
    try:
        yield
    except RuntimeError as error:
        _add_table(error)
        raise


def _add_table(error: RuntimeError) -> None:
    """Put what the store knows in place of what headers have told, if anything."""
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
    store = group_compat.default_store()
    if not store.check([_key(rank)]):
        return "nothing yet"
    since, _, text = store.get(_key(rank)).decode().partition(" ")
    return f"{text}, since {time.time() - float(since):.1f} s"
