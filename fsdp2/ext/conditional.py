"""What ranks do next, where they do not all run the same modules.

A group below a *conditional* module may run on some ranks only, but its gathers and reductions take all of them. So
before anything is communicated the ranks meet, in one all-reduce of three numbers, each with what it is about to do.
While any of them asks for a conditional group, all do that: those that do not run it serve, with their shards and with
gradients of zeros. When none does, all are at the same place, and go on. Nothing is remembered from one meeting to the
next: whatever modules run where, in forward, backward or recomputation, the ranks communicate in one order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from . import group_compat
from ..core.comm import all_reduce_now
from ..core.mesh import DataMesh

# What is about to be communicated: at a meeting, `kind + _KINDS * index of the group`.
GATHER, REDUCE = range(2)
_KINDS = 2
_VERBS = ("gathering", "reducing the gradients of")
# Not a group's: the ends of a forward of the outermost module, and of a backward; what users communicate.
_FORWARD_END, _BACKWARD_END, _COLLECTIVE = -1, -2, -3
_OTHERS = {
    _FORWARD_END: "at the end of a forward",
    _BACKWARD_END: "at the end of a backward",
    _COLLECTIVE: "at a collective of your own",
}
# Of a rank that asks for nothing that others may lack. Larger than any event of a group: the smallest wins.
_COMMON = 1 << 40


class Server(Protocol):
    """One group at run time: see FSDPState."""

    modules: list[nn.Module]
    group: Any
    conditional: bool
    gate: Any

    def serve(self) -> None:
        """Take part in a gather that other ranks need."""


class Agreement:
    """The meetings of all groups under one root, over the ranks of its mesh."""

    def __init__(self, servers: Sequence[Server], mesh: DataMesh, note_out_of_step: Callable[[], None]) -> None:
        self.ranks = mesh.ranks
        self._note_out_of_step = note_out_of_step
        self._servers, self._meeting_groups, self._is_serving = servers, mesh.axis_groups, False
        cpu = torch.device("cpu")
        # The host reads the result: not from an accelerator, behind all that this computes, if there is another way.
        has_cpu = all(group_compat.has_backend(group, cpu) for group in self._meeting_groups)
        self._device = cpu if has_cpu else mesh.device
        # Whether to say, at the first meeting, what meetings cost here.
        self._warns = mesh.is_first and self._device.type not in ("cpu", "meta")

    def meet(self, event: int, is_conditional: bool) -> None:
        """`event` comes next here. Return when all ranks are to do that; serve what others need before.

        Raises:
            RuntimeError: other ranks are somewhere else, for something that is not conditional; on all ranks.
        """
        if self._warns:
            self._warn()
        request = event if is_conditional else _COMMON
        while not self._is_serving:
            chosen, first, last = self._exchange(request, event)
            if chosen == _COMMON and first != last:
                self._note_out_of_step()
                raise RuntimeError(
                    f"ranks are out of step: this one is {self._describe(event)}, one is {self._describe(first)}, one "
                    f"is {self._describe(last)}. Give whatever runs on some ranks only to fully_shard by itself, with "
                    "conditional=True."
                )
            if chosen == request:
                return
            self._serve(chosen)

    def meet_at_forward_end(self) -> None:
        """A forward of the outermost module ends. Others may still run what this rank does not."""
        self.meet(_FORWARD_END, is_conditional=False)

    def meet_at_backward_end(self) -> None:
        """The same of a backward, or of what is done between backward passes in place of one."""
        self.meet(_BACKWARD_END, is_conditional=False)

    def meet_at_collective(self) -> None:
        """A user communicates, what takes all ranks. Others may still run what this rank does not."""
        self.meet(_COLLECTIVE, is_conditional=False)

    def _exchange(self, request: int, event: int) -> tuple[int, int, int]:
        """The least request of all ranks, and the least and the largest event."""
        largest = torch.tensor([-request, -event, event], device=self._device)
        try:
            for group in self._meeting_groups:
                all_reduce_now(largest, group, largest=True)
        except RuntimeError as error:  # a peer is gone, say
            error.args = (f"{error} (while this rank is {self._describe(event)})",)
            raise
        chosen, first, last = largest.tolist()
        return -chosen, -first, last

    def _warn(self) -> None:
        self._warns, kind = False, self._device.type
        name = group_compat.backend_name(self._meeting_groups[0], self._device) or "its backend"
        warnings.warn(
            "conditional=True: ranks meet before each gather and each group's reduction, and the process group has a "
            f"backend for {kind} only: each time the host waits until the device has done all that it was given. "
            f'Initialise it with a backend for the CPU, too: init_process_group("cpu:gloo,{kind}:{name}").',
            stacklevel=2,
        )

    def _serve(self, event: int) -> None:
        index, kind = divmod(event, _KINDS)
        server, self._is_serving = self._servers[index], True
        try:
            server.serve() if kind == GATHER else server.group.gradients.serve()
        finally:
            self._is_serving = False

    def _describe(self, event: int) -> str:
        index, kind = divmod(event, _KINDS)
        return _OTHERS.get(event) or f"{_VERBS[kind]} {self._servers[index]}"


class Turn:
    """One group's part in an agreement. `is_conditional`: it may run on some ranks only."""

    def __init__(self, agreement: Agreement, index: int, is_conditional: bool) -> None:
        self._agreement, self._first, self.is_conditional = agreement, _KINDS * index, is_conditional

    def gather(self) -> None:
        """Return when all ranks are to gather the group."""
        self._agreement.meet(self._first + GATHER, self.is_conditional)

    def reduce(self) -> None:
        """Return when all ranks are to reduce its gradients."""
        self._agreement.meet(self._first + REDUCE, self.is_conditional)


def make_agreement(servers: Sequence[Server], mesh: DataMesh, note_out_of_step: Callable[[], None]) -> Agreement | None:
    """How ranks stay in one order, if some of them may leave modules out. Each group gets its turn."""
    if not mesh.axis_groups:
        return None
    _find_gates(servers)
    if all(server.gate is None for server in servers):
        return None
    agreement = Agreement(servers, mesh, note_out_of_step)
    for i, server in enumerate(servers):
        server.group.turn = server.group.gradients.turn = Turn(agreement, i, server.gate is not None)
    return agreement


def _find_gates(servers: Sequence[Server]) -> None:
    """Tell each the innermost conditional one that it is, or lies in."""
    for gate in (server for server in servers if server.conditional):  # outer ones come first
        inside = {module for outer in gate.modules for module in outer.modules()}
        for server in servers:
            if inside.issuperset(server.modules):
                server.gate = gate
