"""What all groups under one root share: the pass that runs, the order of gathers, the end of backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn

from . import torch_compat
from .agreement import make_agreement
from .checked_comm import level_from_environment
from .corrections.own_collectives import meet_before_collectives
from .graph_hooks import at_backward_end
from .guards.entry_points import leave_fast_paths, refuse_call
from .guards.rank_guard import RankGuard
from .guards.reads import PassReads
from .prefetch import Prefetcher
from .reduction_queue import ReductionQueue
from .saved_tensors import SavedTensors
from .state import FSDPState
from .write_notices import notices

# What looks at a root before its next pass, once it is at the debug level. It needs to know all that stands above
# this file.
audits: list[Callable[[FSDPState], None]] = []


class Context:
    """The runtime of one root and of all states below it.

    A *pass* is one call of the outermost sharded module outside backward. The context follows the order in which
    groups run, and gathers the next ones early: in forward in the order of the pass before, in backward in reverse.

    `names`: FQNs of all modules at and below the root's; `use_in_backward(state)`: gathers and registers the state's
    parameters for backward.
    """

    def __init__(
        self,
        root: FSDPState,
        states: Iterable[FSDPState],
        names: Mapping[nn.Module, str],
        use_in_backward: Callable[[FSDPState], None],
    ) -> None:
        self.root, self.states = root, list(dict.fromkeys(states))
        # Whether the pass began with grad enabled, so that a backward may follow.
        self.pass_has_grad = False
        # What runs: forwards, which are counted, and blocks of full_params.
        self.running: list[FSDPState] = []
        self.forwards = 0
        # Where the inputs of a pass are moved: to an accelerator, as torch's FSDP2 does it.
        device = root.group.mesh.device
        self.takes_inputs_to = None if device.type in ("cpu", "meta") else device
        self._transfers = {state.group.transfers for state in self.states if state.group.transfers is not None}
        # What has shards that may still be copied to the device, behind a forward, and the versions of these.
        self._unsettled: list[tuple[FSDPState, tuple[int, ...]]] = []
        self.saved_tensors = SavedTensors(use_in_backward, self._guard_saved)
        # Whether backward's use of a weight is noticed, whatever way it comes.
        self.notices_saved_tensors = True
        self._reductions = ReductionQueue()
        # What a user may set: see the methods of FSDPModule.
        self.is_last_backward = True
        self.finalizes_by_itself = True
        self.post_optim_event: Any = None
        # How often a user dropped what was under way.
        self.resets = 0
        # Lists of modules of which not all have run yet in this pass, and whether backward may come back to them.
        self.unfinished: dict[FSDPState, bool] = {}
        self.in_backward = False
        # A backward with create_graph has saved weights where our hooks don't see it: until others, which may read
        # them, have ended, and another pass begins, their storage is refilled but not freed.
        self.graph_reads_weights = self._graph_was_read = self._builds_graph = False
        self._task = -1
        # Identity of the thread on which the last pass began.
        self._thread = -1
        # Identity of the backward pass that runs, or ran last; how many have ended.
        self._backward_pass = object()
        self._backwards = 0
        self._is_out_of_step = False
        self.audits_next_pass = level_from_environment() > 0
        self._take_over(names)

    def _take_over(self, names: Mapping[nn.Module, str]) -> None:
        """Bring all states under this context, and name groups and parameters after their place below the root."""
        for state in self.states:
            state.context = self
            state.group.gradients.queue = self._reductions
            state.backward_hooks = []
            state.group.rename(names)
            state.group.label.run_in(self)
            state.group.watch_calls(refuse_call)
        leave_fast_paths(names)
        self.agreement = make_agreement(self.states, self.root.group.mesh, self.note_out_of_step)
        meet_before_collectives(self)
        self.prefetcher = Prefetcher(self.states)
        self.reads = PassReads()
        self.rank_guard = RankGuard(self.root, self.states, self.reads)
        self.rank_guard.attach()

    def where(self) -> tuple[str, int]:
        """What runs, and in which step: behind how many backward passes."""
        phase = "backward" if self.in_backward else "forward" if self.running else "by hand"
        return phase, self._backwards

    def note_out_of_step(self) -> None:
        """Ranks were: each may have left another part of a pass undone. Let none remember any, from the next one on."""
        self._is_out_of_step = True
        for state in self.states:
            state.group.label.leave()

    def settings(self) -> dict[str, Any]:
        """What a user has set for all states."""
        return {
            "finalizes_by_itself": self.finalizes_by_itself,
            "notices_saved_tensors": self.notices_saved_tensors,
            "averages_stats": self.rank_guard.stats.are_averaged,
            "prefetch": self.prefetcher.settings(),
        }

    def take_settings(
        self, finalizes_by_itself: bool, notices_saved_tensors: bool, averages_stats: bool, prefetch: dict[str, Any]
    ) -> None:
        """Take over the settings of the context that this one is a copy of."""
        self.finalizes_by_itself = finalizes_by_itself
        self.notice_saved_tensors(notices_saved_tensors)
        self.rank_guard.stats.are_averaged = averages_stats
        self.prefetcher.take_settings(**prefetch)

    def notice_saved_tensors(self, notices: bool) -> None:
        """Choose whether backward's use of a weight is noticed, or refused unless a gradient of what its module
        returned has come first.
        """
        self.notices_saved_tensors = notices
        for state in self.states:
            state.versions = ()  # what earlier graphs have saved is refused
        if not notices:
            self._guard_saved()

    def _guard_saved(self) -> None:
        """Weights may be saved where we don't notice it. For good: graphs of that time may live on."""
        for state in self.states:
            state.group.guard_saved()

    def share_reductions(self, other: Context) -> None:
        """Queue reductions with those of another root from now on."""
        other._reductions.take_over(self._reductions)
        self._reductions = other._reductions
        for state in self.states:
            state.group.gradients.queue = self._reductions

    # ---- forward

    def enter(self, state: FSDPState, in_backward: bool) -> None:
        """A forward of `state` begins."""
        if not in_backward and (not self.running or state is self.root):
            if self.in_backward and not self.running:
                self.recover()
            self._begin_pass()
        self.forwards += 1
        self.join(state)

    def join(self, state: FSDPState) -> None:
        """Something of `state` runs from now on until `leave`, in the pass that runs, or between passes."""
        self.running.append(state)
        state.running += 1
        if len(self.running) == 1:
            # Storages are known by their addresses, which others may have taken since the last pass.
            self.saved_tensors.owners.clear()
            if self.notices_saved_tensors:
                self.saved_tensors.activate()

    def leave(self) -> None:
        """The innermost forward ends, or has failed."""
        self.running.pop().running -= 1
        if not self.running:
            self.saved_tensors.deactivate()
            self.prefetcher.end_pass()
            for state, backward_follows in self.unfinished.items():
                state.settle(backward_follows)
            self.unfinished.clear()
            if not self.in_backward:
                self.prefetcher.drop()
                self._settle_before_writes()

    def settle_transfers(self) -> None:
        """The user is about to go on, and may write to shards: have none of them still be copied to the device."""
        for transfers in self._transfers:
            transfers.settle()
        self._refuse_unnoticed_writes()

    def _refuse_unnoticed_writes(self) -> None:
        unsettled, self._unsettled = self._unsettled, []
        written = [state for state, versions in unsettled if state.group.versions.sharded() != versions]
        if written:
            raise RuntimeError(
                f"{', '.join(map(str, written))}: a shard was written to by its private local tensor, behind a "
                "forward, perhaps while it was still copied to the device. Write to the sharded parameter, or to what "
                "its to_local() returns; and load a checkpoint before you go on."
            )

    def _settle_before_writes(self) -> None:
        """The same, but where somebody is about to write: not now, at the end of a forward, if that is noticed."""
        if self._transfers:
            self._unsettled = [(s, s.group.shard_versions()) for s in self.states if s.group.transfers is not None]
            notices.before_next_write(self.settle_transfers)

    def meet_at_end(self, state: FSDPState) -> None:
        """The forward of `state` is about to end: if it is the outermost, serve what others still run in theirs."""
        assert self.agreement is not None
        if len(self.running) == 1 and state.gate is None:
            self.agreement.meet_at_forward_end()

    def _begin_pass(self) -> None:
        self._refuse_unnoticed_writes()
        if torch_compat.makes_a_graph():
            raise NotImplementedError(f"{self.root}: its gathers can be in no graph. {torch_compat.EXPORT_PLAIN}")
        if self.root.conditional and self.agreement is not None:
            raise RuntimeError(
                f"{self.root}: conditional=True needs a module around it that all ranks run, at which they meet. Apply "
                "fully_shard to that, too."
            )
        if self._is_out_of_step:
            self._begin_anew()
        if self.audits_next_pass:
            self.audits_next_pass = False
            for audit in audits:
                audit(self.root)
        if self._graph_was_read:
            self.graph_reads_weights = self._graph_was_read = False
            for state in self.states:
                if not state.held:
                    state.release()
        self.pass_has_grad, self._thread = torch.is_grad_enabled(), get_ident()
        self.prefetcher.begin_pass()
        sent = [state.group.gradients.sent_nbytes for state in self.states]
        self._reductions.limit(max([state.max_reductions for state in self.states]), sent)
        self.forget_stale(self.states)

    def _begin_anew(self) -> None:
        self._is_out_of_step = False
        self.prefetcher.forget_order()
        self.rank_guard.begin_anew()
        for state in self.states:
            with suppress(RuntimeError):  # gathers that never were
                state.release()

    def forget_stale(self, states: Iterable[FSDPState]) -> None:
        """Between passes, before shards are read, and behind the optimizer's event, if there is one: let go of full
        copies that the passes before have left, unless they may be used.
        """
        self.is_in_backward()
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            event.wait()
        for state in states:
            if (state.kept or state.held) and not state.is_kept_for_next_pass():
                state.release()

    # ---- backward

    def is_in_backward(self) -> bool:
        """Returns True while a backward pass runs. To be called by what cannot be a part of one.

        If one has begun and none runs on this thread, it has failed: this recovers. Autograd does not say so, and drops
        what a failed backward holds at some later time.
        """
        if self.in_backward and torch_compat.graph_task() == -1:
            self.recover()
        return self.in_backward

    def is_of_this_thread(self) -> bool:
        """Returns True if the last pass began on the thread that calls."""
        return self._thread == get_ident()

    def enter_backward(self, recomputes: bool = False) -> None:
        """Something of a backward pass happens. The first time in each, arrange for its end to be noticed.

        `recomputes`: it is a forward that runs again, with grad enabled, whether or not the backward builds a graph.
        """
        if not self.in_backward:
            if torch_compat.graph_task() == -1:
                return  # somebody looks at saved tensors outside backward
            self._begin_backward()
        if torch.is_grad_enabled() and not recomputes and not self._builds_graph:
            self._builds_graph = self.graph_reads_weights = True
            self._guard_saved()

    def _begin_backward(self) -> None:
        self._refuse_unnoticed_writes()
        self.in_backward = True
        self._builds_graph = False
        self._task = torch_compat.graph_task()
        at_backward_end(self.end_backward, self.recover)
        self.prefetcher.begin_backward()
        self._reductions.finish_partial()
        self._backward_pass = object()
        for state in self.states:
            if state.group.adopted.trained_others:
                state.group.adopted.follow_again()
            state.group.gradients.begin_backward(self._backward_pass)

    def end_backward(self) -> None:
        """All gradients are computed: reduce what is left, free what is left, deliver everything."""
        for state in reversed(self.states):
            state.group.gradients.end_backward()
        self._resume_reductions(reversed(self.states))
        self._graph_was_read = self.graph_reads_weights and not self._builds_graph
        for state in self.states:
            if state.backward_ready:
                state.completes = False
            state.release_after_backward()
        self.prefetcher.drop()
        if self.finalizes_by_itself:
            self._deliver()
        self.settle_transfers()  # behind gradients on the CPU, which come behind all copies to the device
        if self.is_last_backward and not self._builds_graph:
            self.prefetcher.forget_forwards()
        self.in_backward = False
        self._backwards += 1

    def _resume_reductions(self, states: Iterable[FSDPState]) -> None:
        if self.agreement is not None:
            self.agreement.meet_at_backward_end()
        for state in states:
            state.group.gradients.resume()

    def synchronise_waiting(self, states: Iterable[FSDPState] | None = None) -> None:
        """Between backward passes: begin to reduce what waits to be synchronised, of all states or of some, and free
        what a backward pass would have freed at its end. `finalize` delivers.

        Raises:
            RuntimeError: during a backward pass.
        """
        if self.is_in_backward():
            raise RuntimeError("gradients that wait are reduced by the backward pass that runs: ask for it afterwards")
        with self._all_or_nothing():
            self._reductions.finish_partial()
            chosen = list(reversed(self.states) if states is None else states)
            for state in chosen:
                state.group.gradients.reduce_waiting()
                state.release_after_backward()
            self._resume_reductions(chosen)
            if self.is_last_backward:
                self.prefetcher.forget_forwards()

    def finalize(self) -> None:
        """Between backward passes: finish the reductions in flight, and let `.grad` show what there is."""
        with self._all_or_nothing():
            self._deliver()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an error, what is in flight must not be delivered later as if it were all."""
        try:
            yield
        except BaseException:
            self._reductions.abandon(None)
            self.recover()
            raise

    def _deliver(self) -> None:
        self._reductions.finish_all()
        for state in self.states:
            state.group.gradients.mark_waiting()

    def reset(self) -> None:
        """Drop everything that is under way, the gradients that wait for a later pass too."""
        self.resets += 1
        self._reductions.abandon(None)
        self.recover()
        for state in self.states:
            state.group.gradients.waiting.drop()
        for state in list(self.running):
            state.running = 0
        for state in self.states:
            state.is_pinned = False
        self.running.clear()
        self.forwards = 0
        self.reads.drop()
        self.saved_tensors.deactivate()
        for state in self.states:
            state.release()

    def recover(self) -> None:
        """A backward pass died with an exception: drop what it left half done."""
        self.in_backward = self.graph_reads_weights = self._graph_was_read = False
        self._unsettled = []  # another error comes first
        self._reductions.abandon(self._backward_pass)
        self.is_last_backward = True
        for state in self.states:
            state.group.gradients.discard()
            if state.group.is_unsharded:
                state.group.adopted.take_moved()  # a forward may have assigned `.data`
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the parameters any more
                state.release()
        self.prefetcher.drop()
        self.prefetcher.forget_forwards()
        self.settle_transfers()

    def in_inner_backward(self) -> bool:
        """Whether a backward runs inside the one that began: reentrant checkpointing, of one of several regions."""
        return torch_compat.graph_task() != self._task

    def used(self, state: FSDPState) -> None:
        """`state` is unsharded on purpose now, not only in advance: what is saved of its weights is known as such."""
        self.prefetcher.prefetched.discard(state)
        if self.notices_saved_tensors:
            for storage in state.group.adopted.storage_ids:
                self.saved_tensors.owners[storage] = state
