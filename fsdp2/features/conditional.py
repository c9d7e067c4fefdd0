"""Lets some ranks leave modules out of a forward: conditional modules.

A group below a conditional module may run on some ranks only, but its gathers and reductions take all of them. So
before anything is communicated the ranks reach *consensus*, in one exchange of three numbers, each with what it is
about to do. While any of them asks for a conditional group, all do that: those that do not run it join, with their
shards and with gradients of zeros. When none does, all are about to do the same, and go on. Nothing is remembered from
one consensus to the next: whatever modules run on which ranks, in forward, backward or recomputation, all ranks
communicate in one order. A pass that raises ends with a consensus, too: other ranks may still be in a module that this
one has left out.

The consensus has process groups of its own, so that a user's collective never meets it. Inside a pass, a user's
collective asks for consensus first (user_collectives.py).
"""

from __future__ import annotations

import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..calls.nested import map_tensors, tensors_in
from ..collectives.choose import make_comm
from ..collectives.gather_bytes import all_gather_now
from ..collectives.subgroups import subgroup
from ..collectives.watching import compare_first
from ..engine.comm import Comm, CommLabel
from ..engine.group import FSDPParamGroup
from ..engine.policy import ReduceWhen
from ..engine.root import Root
from ..engine.schedule import Cursor
from ..engine.state import FSDPState, groups_below
from ..ranks.rank_facts import all_reduce_now, all_reduce_over, is_first, moves_data, ranks_of
from ..torch_private.internals import backend_name, size_may_change
from ..torch_private.rare_internals import alias, has_backend
from .user_collectives import pass_began, pass_ended
from .vocab_parallel import refuse_beside_conditional

# Marks a node of the graph that is the output of a module.
_OUTPUT = "_fsdp2_output"

# An event, which is about to be communicated: `kind + _KINDS * group index`.
GATHER, REDUCE = range(2)
_KINDS = 2
_NUMBERS = struct.Struct("<3q")
_ASKED = "what ranks do next"
_VERBS = ("gathering", "reducing the gradients of")
# Events of no group: the ends of a forward of the outermost module, and of a backward; one of them has raised; a user's
# collective.
_FORWARD_END, _BACKWARD_END, _FAILED, _COLLECTIVE = -1, -2, -3, -4
_OTHERS = {
    _FORWARD_END: "at the end of a forward",
    _BACKWARD_END: "at the end of a backward",
    _FAILED: "giving up a forward or backward that has raised",
    _COLLECTIVE: "at a collective of your own",
}
_ADVICE = (
    "Has a rank raised, and gone on? See its log. Give whatever runs on some ranks only to fully_shard by itself, with "
    "conditional=True."
)
# The request of a rank whose event is not conditional. It is larger than any event of a group: the least is chosen.
_COMMON = 1 << 40


def is_conditional(state: FSDPState) -> bool:
    """Returns True if ranks may leave the modules of `state` out."""
    return state.groups[0].settings.conditional


def find_conditional(states: Sequence[FSDPState]) -> dict[FSDPParamGroup, FSDPState]:
    """Returns, for each group that is conditional or lies inside a conditional module, the innermost such state."""
    found = {}
    for conditional in (state for state in states if is_conditional(state)):  # outer ones come first
        inside = {module for outer in conditional.modules for module in outer.modules()}
        for state in states:
            if inside.issuperset(state.modules):
                found.update(dict.fromkeys(state.used, conditional))
    return found


class Consensus:
    """Keeps the ranks of one root in one order, if some of them may leave modules out: a RankConsensus.

    `conditional`: group -> the innermost conditional state that it lies in.
    """

    def __init__(self, root: Root) -> None:
        self.root, mesh = root, root.group.mesh
        self.ranks = ranks_of(mesh)
        self._process_groups = mesh.axis_groups
        self.conditional = find_conditional(root.states)
        self._indices = {group: i for i, group in enumerate(root.groups)}
        self._is_joining = False
        # A forward of the outermost module, or a backward, has begun, and has not come to the consensus at its end.
        self._is_in_forward = self._is_in_backward = False
        # A backward may follow, or a pass has failed: this rank may leave the step alone before the next pass begins.
        self._is_open = False
        # This rank may have left the last step alone: if others are still in it, they are told so, and it goes on.
        self._has_left = False
        # The host reads the result. From an accelerator it would wait for all that this computes.
        cpu = torch.device("cpu")
        has_cpu = all(has_backend(group, cpu) for group in self._process_groups)
        self._device = cpu if has_cpu else mesh.device
        # On process groups of their own, so that a user's collective never meets them; made at the first consensus.
        self._comms: list[Comm] = []
        # True until a warning has said what a consensus costs here.
        self._warns = is_first(mesh) and self._device.type not in ("cpu", "meta")

    # ---- what the engine calls

    def is_conditional(self, group: FSDPParamGroup) -> bool:
        return group in self.conditional

    def before_pass(self) -> None:
        if is_conditional(self.root.state):
            raise RuntimeError(
                f"{self.root.group}: conditional=True needs a module around it that all ranks run, at which they "
                "agree. Apply fully_shard to that, too."
            )
        for group in self.root.shared:
            if group.comms.secondary is not None and group in self.conditional:
                raise NotImplementedError(
                    f"{group} has an int for reshard_after_forward, or outer_shard, and a parameter that is tied to "
                    "one of a conditional module: ranks that leave that out have no part to keep. Pass a bool, or None."
                )
        self._is_in_forward, self._has_left, self._is_open = True, self._is_open, False
        pass_began(self)

    def before_gather(self, group: FSDPParamGroup) -> None:
        if group.params and group.comms.gathers.size > 1:
            self._reach(GATHER + _KINDS * self._indices[group], group in self.conditional)

    def before_reduce(self, group: FSDPParamGroup, indices: set[int]) -> set[int]:
        self._reach(REDUCE + _KINDS * self._indices[group], group in self.conditional)
        if group in self.conditional:
            group.gradients.reduce_with_zeros()
        return indices

    def after_forward(self, state: FSDPState, inputs: Any, output: Any) -> Any:
        if len(self.root.running) == 1 and state.groups[0] not in self.conditional:
            self._reach(_FORWARD_END, False)  # others may still run what this rank does not
            self._is_in_forward, self._is_open = False, self.root.forward.has_grad
            self._pass_ended()
        return self._distinguish(inputs, output)

    def _distinguish(self, inputs: Any, output: Any) -> Any:
        """Returns `output` with views in place of tensors that are inputs, or outputs of another module, as they are
        where a conditional module was left out. The gradient of a view tells when backward begins with this module.
        """
        nodes = {tensor.grad_fn for tensor in tensors_in(inputs) if tensor.grad_fn is not None}

        def view(tensor: Tensor) -> Tensor:
            node: Any = tensor.grad_fn
            return alias(tensor) if node is not None and (node in nodes or _OUTPUT in node.metadata) else tensor

        output = map_tensors(output, view, everywhere=True)
        nodes_of_output: list[Any] = [tensor.grad_fn for tensor in tensors_in(output)]
        for node in nodes_of_output:
            if node is not None:
                node.metadata[_OUTPUT] = True
        return output

    def before_backward(self) -> None:
        self._is_in_backward = True  # all ranks begin backward passes alike
        pass_began(self)

    def after_backward(self) -> None:
        self._reach(_BACKWARD_END, False)
        self._is_in_backward = self._is_open = False
        self._pass_ended()

    def before_collective(self) -> None:
        """Reaches consensus: a user is about to communicate over all ranks. Others may be in another module."""
        self._reach(_COLLECTIVE, False)

    def _pass_ended(self) -> None:
        if not self._is_in_forward and not self._is_in_backward:
            pass_ended(self)

    def pass_failed(self, in_backward: bool) -> None:
        """Joins what other ranks ask for until their passes have failed, too. If one of them goes on, this rank's error
        is that of the program, and all others get one here.
        """
        if in_backward:
            expects, self._is_in_backward = self._is_in_backward, False
        else:  # ranks may call a conditional module by itself
            expects = self._is_in_forward and self.root.running[0].groups[0] not in self.conditional
            self._is_in_forward = False
        self._pass_ended()
        self._is_open = self._is_open or expects
        error = sys.exc_info()[1]
        if expects and not self.root.is_out_of_step and (error is None or isinstance(error, Exception)):
            with suppress(RuntimeError):  # the program's own error says more
                self._reach(_FAILED, False)

    # ---- consensus

    def _reach(self, event: int, is_conditional: bool) -> None:
        """Returns when all ranks are to do `event`; before, joins the collectives that others ask for.

        Raises:
            RuntimeError: ranks are about to do different things, none of them conditional; on all ranks.
        """
        if self._warns:
            self._warn()
        request = event if is_conditional else _COMMON
        has_left, self._has_left, follows = self._has_left, False, False
        while not self._is_joining:
            try:
                chosen, first, last = self._exchange(request, event)
            except RuntimeError:
                if not has_left or not self.root.is_out_of_step:
                    raise
                has_left = False  # others know that this rank was blocked elsewhere
                self.root.begin_anew()
                continue
            if chosen == _COMMON and first != last:
                self.root.note_out_of_step()
                if has_left:
                    has_left = False
                    self.root.begin_anew()
                    continue
                advice = "See the error of that rank." if first == _FAILED else _ADVICE
                raise RuntimeError(f"{self._differ(event, first, last)} {advice}")
            if chosen == request:
                return
            if has_left and not follows:
                self.root.follow_backward()
                follows = True
            self._join(chosen)

    def _differ(self, event: int, first: int, last: int) -> str:
        own, one, other = map(self._describe, (event, first, last))
        return f"ranks are out of step: this one is {own}, one is {one}, one is {other}."

    def _exchange(self, request: int, event: int) -> tuple[int, int, int]:
        """Returns the least request of all ranks, and the least and the largest event."""
        try:
            chosen, first, last = self._find_largest([-request, -event, event])
        except RuntimeError as error:
            if not self.root.is_out_of_step:  # a peer is gone: no rank is there to be told
                self._is_in_forward = self._is_in_backward = self._is_open = False
                self._pass_ended()
            error.args = (f"{error} (while this rank is {self._describe(event)})",)
            raise
        return -chosen, -first, last

    def _find_largest(self, numbers: list[int]) -> list[int]:
        """Returns the largest of each number over all ranks, which must call it."""
        if not self._comms:
            self._comms = self._make_comms()
        for comm in self._comms:
            if hasattr(comm, "compare"):  # its messages have names: a rank that is blocked elsewhere can say goodbye
                data = _NUMBERS.pack(*numbers)
                numbers = [*map(max, *map(_NUMBERS.unpack, all_gather_now(data, comm, self._device)))]
            else:
                largest = torch.tensor(numbers, dtype=torch.int64, device=self._device)
                assert comm.group is not None, "there are other ranks"
                all_reduce_now(largest, comm.group, largest=True)
                numbers = largest.tolist()
        return numbers

    def _make_comms(self) -> list[Comm]:
        """Returns the Comms of the consensus, once all ranks have come to the first one, and none has died: it would be
        waited for while process groups are made.
        """
        nothing, comm_label, found = torch.empty(0, device=self._device), CommLabel(_ASKED, self.root), []
        for group in self._process_groups:
            compare_first(make_comm(group, self._device, comm_label), "beginning to ask", nothing)
        for group in self._process_groups:
            own = group if size_may_change(group) else subgroup(group, group.size())
            found.append(make_comm(own, self._device, comm_label))
        return found

    def _join(self, event: int) -> None:
        """Joins an all-gather or a reduction that only other ranks use."""
        index, kind = divmod(event, _KINDS)
        group, self._is_joining = self.root.groups[index], True
        try:
            if kind == REDUCE:
                group.gradients.reduce_with_zeros()
            else:
                group.join_gather()
        finally:
            self._is_joining = False

    def _describe(self, event: int) -> str:
        index, kind = divmod(event, _KINDS)
        return _OTHERS.get(event) or f"{_VERBS[kind]} {self.root.groups[index]}"

    def _warn(self) -> None:
        self._warns, kind = False, self._device.type
        name = backend_name(self._process_groups[0], self._device) or "its backend"
        warnings.warn(
            "conditional=True: ranks agree before each gather and each group's reduction, and the process group has a "
            f"backend for {kind} only: each time the host waits until the device has done all that it was given. "
            f'Initialise it with a backend for the CPU, too: init_process_group("cpu:gloo,{kind}:{name}").',
            stacklevel=2,
        )


def join_consensus(root: Root) -> None:
    """Has the ranks of a root with conditional modules reach consensus, if there are several. Its groups are gathered
    ahead as ConditionalCursor says.
    """
    if not any(map(is_conditional, root.states)):
        return
    consensus = Consensus(root) if root.group.mesh.axis_groups else None
    root.use_consensus(consensus, ConditionalCursor)
    if consensus is not None:
        for group in root.groups:
            group.set(reduce_when=ReduceWhen.ASKED if group in consensus.conditional else ReduceWhen.GROUP)


def set_conditional(state: FSDPState, conditional: bool) -> None:
    """Does what `FSDPModule.set_conditional` does."""
    root = state.root
    if root.prefetcher.has_begun or root.num_backwards:
        raise RuntimeError(
            f"{state}: set_conditional comes too late: a forward has run without it. Call it before the first forward, "
            "on all ranks."
        )
    if conditional:
        refuse_beside_conditional(root.groups)
    for group in dict.fromkeys(group for module in state.modules for group in groups_below(module) if conditional):
        if group.comms.secondary is not None:
            raise NotImplementedError(
                f"{group} has an int for reshard_after_forward, or outer_shard, and can't be conditional: ranks that "
                "leave it out have no part to keep. Pass a bool, or None."
            )
        if group.mesh.mesh != root.group.mesh.mesh:
            raise NotImplementedError(
                f"{group} is conditional, or inside a conditional module: expected it on the mesh of the module around "
                f"it, {root.group.mesh.mesh}, got {group.mesh.mesh}"
            )
    mesh = root.group.mesh
    if moves_data(mesh.axis_groups, mesh.device):  # a rank that does not call it would wait in another collective
        comm_label = CommLabel(f"set_conditional({conditional}) of {state}")
        all_reduce_over(torch.zeros(1, device=mesh.device), mesh.axis_groups, largest=True, comm_label=comm_label)
    for group in state.groups:
        group.set(conditional=conditional)
    for group in root.groups:
        group.set(reduce_when=ReduceWhen.BUCKET)  # the new root chooses
    root.state.drop_root()
    replacement = root.state.root
    replacement.set(**vars(root.settings))
    replacement.share_queue(root.queue)


# ---- prefetching


class ConditionalCursor(Cursor[FSDPParamGroup]):
    """Walks along the recorded order inside each conditional module, and outside of all, separately.

    Groups in a conditional module are gathered ahead inside that module only. For all other groups, ranks that run the
    module and ranks that don't must expect the same.
    """

    def __init__(self, recorded: Sequence[FSDPParamGroup]) -> None:
        self._all = recorded
        self._cursors: dict[FSDPState, Cursor[FSDPParamGroup]] = {}
        self._conditional = find_conditional(recorded[0].root.states) if recorded else {}
        super().__init__([group for group in recorded if group not in self._conditional])
        self._now: Cursor[FSDPParamGroup] | None = None

    def visit(self, item: FSDPParamGroup) -> int | None:
        inside = self._conditional.get(item)
        if inside is None:
            self._now = None
            return super().visit(item)
        if inside not in self._cursors:
            self._cursors[inside] = Cursor([group for group in self._all if self._conditional.get(group) is inside])
        self._now = self._cursors[inside]
        is_known = self._now.visit(item) is not None
        return len(self._all) + 1 if is_known else None  # no group inside is needed at once

    def ahead(self) -> Iterator[FSDPParamGroup]:
        """Yields the groups that follow, up to the next conditional module, which may be left out this time."""
        expected = super().ahead() if self._now is None else self._now.ahead()
        yield from takewhile(lambda group: not is_conditional(group.state), expected)
