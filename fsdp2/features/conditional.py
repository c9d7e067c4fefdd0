"""Lets some ranks leave modules out of a forward: conditional modules.

A group below a conditional module may run on some ranks only, but its gathers and reductions take all of them. So
before anything is communicated the ranks reach *consensus*, in one all-reduce of four numbers, each with what it is
about to do. While any of them asks for a conditional group, all do that: those that do not run it join, with their
shards and with gradients of zeros. When none does, all are about to do the same, and go on. Nothing is remembered from
one consensus to the next: whatever modules run on which ranks, in forward, backward or recomputation, all ranks
communicate in one order. A pass that raises ends with a consensus, too: other ranks may still be in a module that this
one has left out.

The consensus has process groups of its own, so that a user's collective never meets it. Between a forward and its
backward, a user's collective asks for consensus first: a rank may have raised there, unseen by the engine, and others
may be in backward.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from threading import get_ident
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collectives import make_comm
from ..engine.comm import Purpose, compare_first
from ..engine.compat import backend_name, size_may_change
from ..engine.group import FSDPParamGroup, Hold
from ..engine.mesh import DataMesh
from ..engine.nested import map_tensors, tensors_in
from ..engine.owners import note_consensus
from ..engine.passes import share_reductions
from ..engine.policy import ReduceWhen
from ..engine.rank_facts import all_reduce_now, all_reduce_over, is_first, moves_data, ranks_of
from ..engine.root import Root
from ..engine.schedule import Cursor, Prefetcher
from ..engine.state import FSDPState, groups_below, names_below
from ..engine.subgroups import subgroup
from ..engine.torch_names import alias, has_backend
from .row_embedding import refuse_beside_conditional
from .user_collectives import watch_collectives

# Marks a node of the graph that is the output of a module.
_OUTPUT = "_fsdp2_output"

# An event, which is about to be communicated: `kind + _KINDS * group index`.
GATHER, REDUCE = range(2)
_KINDS = 2
_VERBS = ("gathering", "reducing the gradients of")
# Events of no group: the ends of a forward of the outermost module, and of a backward; collectives of users; a forward
# or a backward has raised.
_FORWARD_END, _BACKWARD_END, _COLLECTIVE, _FAILED, _BEHIND_FORWARD = -1, -2, -3, -4, -12
_OTHERS = {
    _FORWARD_END: "at the end of a forward",
    _BACKWARD_END: "at the end of a backward",
    _COLLECTIVE: "at a collective of your own",
    _BEHIND_FORWARD: "at a collective of your own, behind a forward",
    _FAILED: "giving up a forward or backward that has raised",
}
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


class RanksOfConsensus:
    """The ranks of a root with conditional modules, and the process groups on which they reach consensus.

    It outlives the root. Python frees a model at its own time on each rank: while one of them still has it, and asks
    for consensus before a collective of the program, the others answer (`answer`), and all ask no more.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self.ranks = ranks_of(mesh)
        # What is left of a root must not keep a process group that the program destroys.
        self._groups = [ref(group) for group in mesh.axis_groups]
        self._have_met = False
        # A backward may follow, or a pass has failed: collectives of users, on the thread of the last forward, ask for
        # consensus until the next pass.
        self.is_open = False
        self.thread: int | None = None
        cpu = torch.device("cpu")
        # The host reads the result. From an accelerator it would wait for all that this computes.
        has_cpu = all(has_backend(group, cpu) for group in self.process_groups)
        self.device = cpu if has_cpu else mesh.device

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        return [group for each in self._groups if (group := each()) is not None]

    def find_largest(self, numbers: Sequence[int]) -> list[int]:
        """Returns the largest of each number over all ranks, which must call it."""
        if not self._have_met:
            self._meet()
        largest = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        for group in self.process_groups:
            own = group if size_may_change(group) else subgroup(group, group.size())
            all_reduce_now(largest, own, largest=True)
        found: list[int] = largest.tolist()
        return found

    def _meet(self) -> None:
        """Finds out, before process groups over the same ranks are made for the consensus alone, that all ranks come to
        the first one, and none has died: it would be waited for.
        """
        nothing, purpose = torch.empty(0, device=self.device), Purpose("the first consensus")
        for each in self.process_groups:
            compare_first(make_comm(each, self.device, purpose), "reaching", nothing)
        self._have_met = True

    def answer(self) -> None:
        """Reaches consensus before a collective of the program on a rank that has freed the model.

        Raises:
            RuntimeError: another rank is in a pass of that model; on all ranks.
        """
        self.is_open = False
        chosen, first, last, _ = self.find_largest([-_COMMON, -_BEHIND_FORWARD, _BEHIND_FORWARD, 1])
        if -chosen != _COMMON or -first != last:
            raise RuntimeError(_FREED)


_FREED = (
    "ranks are out of step: some have freed a model with conditional modules, and others are in a pass of it; each "
    "rank must run the same passes."
)


class Consensus:
    """Keeps the ranks of one root in one order, if some of them may leave modules out: a RankConsensus.

    `conditional`: group -> the innermost conditional state that it lies in.
    """

    def __init__(self, root: Root) -> None:
        self._root, mesh = root, root.group.mesh
        self.among = RanksOfConsensus(mesh)
        self.conditional = find_conditional(root.states)
        self._indices = {group: i for i, group in enumerate(root.groups)}
        self._is_joining = False
        # A forward of the outermost module, or a backward, has begun, and has not come to the consensus at its end.
        self._is_in_forward = self._is_in_backward = False
        # This rank may have left the last step alone: if others are still in it, they are told so, and it goes on.
        self._has_left = False
        # True until a warning has said what a consensus costs here.
        self._warns = is_first(mesh) and self.among.device.type not in ("cpu", "meta")

    @property
    def ranks(self) -> frozenset[int]:
        return self.among.ranks

    @property
    def is_open(self) -> bool:
        return self.among.is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self.among.is_open, self.among.thread = value, get_ident()

    # ---- what the engine calls

    def is_conditional(self, group: FSDPParamGroup) -> bool:
        return group in self.conditional

    def before_pass(self) -> None:
        if is_conditional(self._root.state):
            raise RuntimeError(
                f"{self._root.group}: conditional=True needs a module around it that all ranks run, at which they "
                "agree. Apply fully_shard to that, too."
            )
        for group in self._root.shared:
            if group.comms.post_forward is not None and group in self.conditional:
                raise NotImplementedError(
                    f"{group} has an int for reshard_after_forward, or shard_at_rest, and a parameter that is tied to "
                    "one of a conditional module: ranks that leave that out have no part to keep. Pass a bool, or None."
                )
        self._is_in_forward, self._has_left, self.is_open = True, self.is_open, False

    def before_gather(self, group: FSDPParamGroup) -> None:
        if group.params and group.comms.gathers.size > 1:
            self._reach(GATHER + _KINDS * self._indices[group], group in self.conditional)

    def before_reduce(self, group: FSDPParamGroup, indices: set[int]) -> set[int]:
        self._reach(REDUCE + _KINDS * self._indices[group], group in self.conditional)
        if group in self.conditional:
            group.gradients.reduce_with_zeros()
        return indices

    def after_forward(self, state: FSDPState, inputs: Any, output: Any) -> Any:
        if len(self._root.running) == 1 and state.groups[0] not in self.conditional:
            self._reach(_FORWARD_END, False)  # others may still run what this rank does not
            self._is_in_forward, self.is_open = False, self._root.forward.has_grad
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

    def after_backward(self) -> None:
        self._reach(_BACKWARD_END, False)
        self._is_in_backward = self.is_open = False

    def pass_failed(self, in_backward: bool) -> None:
        """Joins what other ranks ask for until their passes have failed, too. If one of them goes on, this rank's error
        is that of the program, and all others get one here.
        """
        if in_backward:
            expects, self._is_in_backward = self._is_in_backward, False
        else:  # ranks may call a conditional module by itself
            expects = self._is_in_forward and self._root.running[0].groups[0] not in self.conditional
            self._is_in_forward = False
        self.is_open = self.is_open or expects
        error = sys.exc_info()[1]
        if expects and not self._root.is_out_of_step and (error is None or isinstance(error, Exception)):
            with suppress(RuntimeError):  # the program's own error says more
                self._tell_failed()

    def _tell_failed(self) -> None:
        self._reach(_FAILED, False)

    def before_collective(self) -> None:
        """Reaches consensus: a user is about to communicate over all ranks, of which others may run another module.

        Between passes, others that are in one are told so once, and raise. They may come to the same collective then.
        """
        is_in_pass = self._root.running or self._root.backward is not None
        self._has_left = not is_in_pass
        self._reach(_COLLECTIVE if is_in_pass else _BEHIND_FORWARD, False)

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
            chosen, first, last = self._exchange(request, event)
            if chosen == _COMMON and first != last:
                self._root.note_out_of_step()
                if has_left:
                    has_left = False
                    self._root.begin_anew()
                    continue
                advice = "See the error of that rank." if first == _FAILED else self._advice
                raise RuntimeError(f"{self._differ(event, first, last)} {advice}")
            if chosen == request:
                return
            if has_left and not follows:
                self._root.follow_backward()
                follows = True
            self._join(chosen)

    _advice = (
        "Has a rank raised, and gone on? See its log. Give whatever runs on some ranks only to fully_shard by itself, "
        "with conditional=True."
    )

    def _differ(self, event: int, first: int, last: int) -> str:
        own, one, other = map(self._describe, (event, first, last))
        return f"ranks are out of step: this one is {own}, one is {one}, one is {other}."

    def _exchange(self, request: int, event: int) -> tuple[int, int, int]:
        """Returns the least request of all ranks, and the least and the largest event."""
        try:
            chosen, first, last, is_freed = self.among.find_largest([-request, -event, event, 0])
        except RuntimeError as error:  # a peer is gone, for example
            self._is_in_forward = self._is_in_backward = self.is_open = False  # there is nobody to tell
            error.args = (f"{error} (while this rank is {self._describe(event)})",)
            raise
        if is_freed:  # by the collector, on another rank
            self.is_open = False
            if -chosen != _COMMON or -first != last:
                self._root.note_out_of_step()
                raise RuntimeError(_FREED)
        return -chosen, -first, last

    def _join(self, event: int) -> None:
        """Joins an all-gather or a reduction that only other ranks use."""
        index, kind = divmod(event, _KINDS)
        group, self._is_joining = self._root.groups[index], True
        try:
            if kind == REDUCE:
                group.gradients.reduce_with_zeros()
            elif not group.is_resting:
                group.unshard_again()
            else:
                group.unshard(registers=False)
                group.hold = Hold.NOTHING
                group.reshard(free=group.root.frees_memory)
        finally:
            self._is_joining = False

    def _describe(self, event: int) -> str:
        index, kind = divmod(event, _KINDS)
        return _OTHERS.get(event) or f"{_VERBS[kind]} {self._root.groups[index]}"

    def _warn(self) -> None:
        self._warns, kind = False, self.among.device.type
        name = backend_name(self.among.process_groups[0], self.among.device) or "its backend"
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
    root.prefetcher = Prefetcher(root.groups, ConditionalCursor)
    if not root.group.mesh.axis_groups:
        return
    root.consensus = consensus = Consensus(root)
    note_consensus()
    for group in root.groups:
        group.set(reduce_when=ReduceWhen.ASKED if group in consensus.conditional else ReduceWhen.GROUP)
    watch_collectives(consensus, root)


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
        if group.comms.post_forward is not None or group.mesh.shards_at_rest:
            raise NotImplementedError(
                f"{group} has an int for reshard_after_forward, or shard_at_rest, and can't be conditional: ranks that "
                "leave it out have no part to keep. Pass a bool, or None."
            )
        if group.mesh.mesh != root.group.mesh.mesh:
            raise NotImplementedError(
                f"{group} is conditional, or inside a conditional module: expected it on the mesh of the module around "
                f"it, {root.group.mesh.mesh}, got {group.mesh.mesh}"
            )
    mesh = root.group.mesh
    if moves_data(mesh.axis_groups, mesh.device):  # a rank that does not call it would wait in another collective
        purpose = Purpose(f"set_conditional({conditional}) of {state}")
        all_reduce_over(torch.zeros(1, device=mesh.device), mesh.axis_groups, largest=True, purpose=purpose)
    for group in state.groups:
        group.set(conditional=conditional)
    for group in root.groups:
        group.set(reduce_when=ReduceWhen.BUCKET)  # the new root chooses
    replacement = Root(root.state, root.states, names_below(root.state.modules))
    replacement.set(**vars(root.settings))
    share_reductions(replacement, root)


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
