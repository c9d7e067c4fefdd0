"""Runs all groups below one root: begins and ends forward and backward passes, and recovers when one has failed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..calls.compiled_backward import refuse_compiled_backward
from ..calls.user_code import are_in_force, outside, run_hidden
from ..collectives.choose import separate_where_usual
from ..devices.write_notices import notices
from ..parameters.subclasses import take_methods_set_later
from ..parameters.ties import connect_ties
from ..torch_private import compat
from ..torch_private.compat import (
    graph_task,
    num_dispatch_modes,
    num_function_modes,
    runs_transform,
    top_saved_tensor_hooks,
)
from .autograd import SavedTensors
from .events import NO_EVENTS, BackwardSteps, Events, Observer, RankConsensus, extensions
from .owners import note_root
from .placeholders import leaves_gradients, mark_lost, put_placeholders, take_placeholders
from .policy import SECONDARY, SHARDED, Hold, RootSettings
from .schedule import Prefetcher, ReductionQueue

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .state import FSDPState


@dataclass
class ForwardPass:
    """One call of the outermost sharded module outside backward.

    `has_grad`: it began with grad enabled, so that a backward may follow. `thread`: identity of the one it began on.
    `finished`: modules of lists that share a group, of which some have run; `unfinished`: those states, and whether
    backward comes back to them.
    """

    has_grad: bool
    thread: int
    finished: dict[FSDPState, set[nn.Module]] = field(default_factory=dict)
    unfinished: dict[FSDPState, bool] = field(default_factory=dict)


@dataclass
class BackwardPass:
    """One backward pass.

    `task`: autograd's number of the pass. `builds_graph`: create_graph=True.
    """

    task: int
    builds_graph: bool = False


class Root:
    """Runs the groups of the outermost sharded module (the root) and of all sharded modules below it.

    It follows the order in which groups run, and gathers the next ones early. `state`, `states`: the root's FSDPState,
    and those of all modules below; `group`, `groups`: the root's own group, and all of them; `new_groups`: those
    that were under no other root before. `forward`, `backward`: the
    pass that ran last, and the backward pass that runs. `running`: states whose forwards run now, the innermost last;
    `depth`: how many forwards do. `frees_memory`: False while a graph reads unsharded parameters unnoticed.
    """

    def __init__(self, state: FSDPState, states: Iterable[FSDPState], names: Mapping[nn.Module, str]) -> None:
        self.state, self.states = state, list(dict.fromkeys(states))
        self.groups: list[FSDPParamGroup] = [group for each in self.states for group in each.groups]
        self.group = state.groups[0]
        # Those that own parameters which modules of several states have.
        self.shared = connect_ties(self.states)
        # One that owns parameters of modules here, and is under another root.
        foreign = (group for each in self.states for group in each.tied_to if group not in self.groups)
        self._foreign = next(foreign, None)
        self.new_groups = [group for group in self.groups if group.root is None]
        self.settings = RootSettings()
        self.running: list[FSDPState] = []
        self.depth = 0
        self.forward = ForwardPass(False, get_ident())
        self.backward: BackwardPass | None = None
        # Identity of the backward pass that runs, or ran last; how many have ended; how often a user dropped
        # everything.
        self.backward_pass: object = object()
        self.num_backwards = self.num_resets = 0
        self.frees_memory = True
        # The backward pass that has built a graph last; a later one has read that graph.
        self._graph_of: BackwardPass | None = None
        self._graph_was_read = False
        # Parameters of some group are others than when a pass began last.
        self.has_rebuilt = True
        # A profiler of torch ran when the last pass began; the observers that follow meanwhile.
        self.is_profiled = False
        self._shown: list[Observer] = []
        # A check that needs the inputs of the next pass; None in steady steps.
        self.take_inputs: Callable[[Root, Any, Any], None] | None = None
        # Autograd has saved weights where no hook sees them: then views of them are in graphs as a rule.
        self.saves_unseen = False
        # Groups whose trainable parameters may have changed since the last backward, also that of an earlier forward.
        self.changed: set[FSDPParamGroup] = set()
        # Ranks were out of step: what this one has recorded may differ from what others have.
        self.is_out_of_step = False
        # Ranks were out of step because a pass has raised on this one.
        self.has_failed = False
        # Groups whose memory could not be freed because something had a view of it.
        self.viewed: set[FSDPParamGroup] = set()
        # Groups whose memory a forward has left for a reader in backward that nothing else notices.
        self.kept: set[FSDPParamGroup] = set()
        # Where the inputs of a pass are moved.
        device = self.group.mesh.device
        self.input_device = None if device.type in ("cpu", "meta") else device
        self._is_on_cuda = device.type == "cuda"
        # Shards without memory need not be waited for.
        copies = [group.transfers for group in self.groups if compat.type_of(device) != "meta"]
        self._transfers = {each for each in copies if each is not None}
        self.saved_tensors = SavedTensors(self.note_unseen)
        self.queue = ReductionQueue()
        self.events = NO_EVENTS
        self.prefetcher = Prefetcher(self.groups)
        # What features have joined: see their classes.
        self.consensus: RankConsensus | None = None
        self.steps: BackwardSteps | None = None
        # What may write to shards beside the host. Each is called before shards of a group are read, and waits.
        self.writers: list[Callable[[FSDPParamGroup], None]] = []
        # What ends the calls that are served between passes, see served_calls.py, the innermost last.
        self.served: list[Callable[[], None]] = []
        # A loss calls a part between forward and backward, which needs it first.
        self.runs_for_loss = False
        # Groups of parts, of which an outer module has read parameters in this pass without calling the part: they
        # stay for backward as its own do.
        self.read_outside: set[FSDPParamGroup] = set()
        for each in self.states:
            each.root = self
        for group in self.groups:
            for wait in group.writers:  # which the root before knew
                wait(group)
            group.root, group.queue, group.backward_hooks = self, self.queue, []
            group.writers = self.writers
            group.rename(names)
            group.purpose.root = weakref.ref(self)
        note_root(self)
        for group in self.new_groups:
            separate_where_usual(group)
        # Gradients of some group are unsynchronized, or will be after the next backward pass.
        self.leaves_gradients = any(map(leaves_gradients, self.groups))
        for join in extensions().features:
            join(self)
        observers = [make(self) for make in extensions().observers]
        self.observe([each for each in observers if each is not None])

    def observe(self, observers: Iterable[Observer]) -> None:
        """Has these observers, and no others, follow events from now on."""
        before, now = self.events.observers, (*observers,)
        self.events = Events(now)
        for group in self.groups:
            group.events = self.events
            group.parameters.references = None  # observers may have some
        for each in now:
            if each not in before and type(each).attached is not Observer.attached:  # few do anything then
                each.attached(self)
        for each in before:
            if each not in now:
                each.detached(self)

    def add(self, observer: Observer, behind: Observer | None = None) -> None:
        """Has `observer` follow events from now on, behind another one or behind all. It keeps no parameters."""
        self.events.add(observer, behind)
        observer.attached(self)

    def remove(self, observer: Observer) -> None:
        """Has `observer` follow events no more, if it does."""
        if observer in self.events.observers:
            self.events.remove(observer)
            observer.detached(self)

    def where(self) -> tuple[str, int]:
        """Returns what runs on this rank, and how many backward passes have ended."""
        return "backward" if self.backward else "forward" if self.running else "by hand", self.num_backwards

    def set(self, **changes: Any) -> None:
        """Changes settings of the root, between steps."""
        self.settings = self.prefetcher.settings = replace(self.settings, **changes)

    def note_unseen(self) -> None:
        """Has autograd refuse weights that are freed: it may save some from now on where no hook sees them."""
        self.saves_unseen = True
        for group in self.groups:
            versions = group.parameters.unsharded_versions
            if not versions.guards:
                gathered_at = group.gathered_at if group.is_unsharded else None
                versions.guard(gathered_at or group.shard_versions())

    def notify(self, follow: Iterable[Callable[[Root], None]]) -> None:
        """Tells observers of an event of the whole root: `notify(self.events.pass_began)`."""
        for notify in follow:
            notify(self)

    def switch_profiled(self) -> None:
        """Adds the observers that follow while a profiler of torch runs, or removes them: one has started or stopped
        since the last pass.
        """
        self.is_profiled = not self.is_profiled
        shown, self._shown = self._shown, [make(self) for make in extensions().in_profiler if self.is_profiled]
        for each in shown:
            self.remove(each)
        for each in self._shown:
            self.add(each)

    # ---- forward

    def begin_pass(self) -> None:
        """Begins a forward pass: the outermost sharded module is called, outside backward."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise NotImplementedError(f"{self.group}: its gathers can be in no graph. {compat.EXPORT_PLAIN}")
        if num_dispatch_modes() and compat.are_tensors_fake():
            raise NotImplementedError(
                f"{self.group}: FakeTensorMode has no values to gather. Leave the mode for sharded models; fsdp2.plan "
                "predicts the memory and the time of a plain one when it is sharded."
            )
        if self._is_on_cuda and torch.cuda.is_current_stream_capturing() and (reason := self._why_not_captured()):
            raise RuntimeError(f"{self.group}: its pass can't be part of a CUDA graph: {reason}")
        if self._foreign is not None:
            this, owner = (type(group.modules[0]).__mro__[1].__name__ for group in (self.group, self._foreign))
            raise RuntimeError(
                f"{this}: it has parameters that are tied to some of {owner} ({self._foreign.params[0].name}, for "
                "example), which gathers them, and fully_shard was applied to no module around both. Apply it to such "
                "a module, and call that one."
            )
        if self.backward is not None:
            self.recover()  # it has failed, and autograd does not say so
        while self.served:
            self.served[-1]()  # an interrupt has left it
        if self.is_out_of_step:
            self._forget()
        if compat.profiler_runs() is not self.is_profiled:
            self.switch_profiled()
        if self._graph_was_read:
            self._free_for_graph()
        if self.consensus is not None:
            self.consensus.before_pass()
        if self.has_rebuilt:
            take_methods_set_later(self)
            self.has_rebuilt = False
        self.notify(self.events.pass_began)
        self.forward = ForwardPass(torch.is_grad_enabled(), get_ident())
        if self.kept:
            self.free_kept()
        self.prefetcher.begin_pass()
        sent = [group.gradients.sent_nbytes for group in self.groups]
        self.queue.set_limits(max([g.settings.max_reductions or 1 for g in self.groups]), sent)
        for group in self.groups:
            if group.hold is not Hold.NOTHING or group.phase is SECONDARY:
                group.reshard_stale()

    def _why_not_captured(self) -> str:
        """Returns what the host would have to do in each replay of a CUDA graph, and what to change; "" if nothing."""
        if self._transfers:
            return "the host waits for copies of offloaded shards and gradients. Leave offload_policy out."
        if self.consensus is not None:
            return "the host reads which ranks run conditional modules. Leave conditional=True out."
        if not all(group.settings.reshard_after_backward for group in self.groups):
            return (
                "parameters that are kept over steps are gathered again when the host sees that shards have changed. "
                "Call set_reshard_after_backward(True); set_keep_unsharded_storage(True) keeps their memory."
            )
        return ""

    def _free_for_graph(self) -> None:
        """Frees what was left for a graph that a backward pass has built: a later one has read it."""
        self.frees_memory, self._graph_was_read = True, False
        for group in self.groups:
            if group.hold < Hold.NEXT_PASS:
                group.reshard_if_idle()

    def note_out_of_step(self) -> None:
        """Notes that ranks were out of step: each may have left other work unfinished."""
        self.is_out_of_step = True
        self.notify(self.events.out_of_step)

    def follow_backward(self) -> None:
        """Takes part in reductions of a step that this rank has left. `begin_anew` drops what they return."""
        self.backward_pass = object()
        for group in self.groups:
            group.gradients.begin_backward(self.backward_pass)

    def begin_anew(self) -> None:
        """Goes on between passes, or at the beginning of one, as ranks do that were told in the last step."""
        self.recover()
        self._forget()
        self.prefetcher.begin_pass()

    def _forget(self) -> None:
        """Forgets what was recorded, and drops gathers that never were."""
        self.is_out_of_step = self.has_failed = False
        self.prefetcher.forget_order()
        for group in self.groups:
            with suppress(RuntimeError):
                group.reshard_if_idle()

    def follow_changes(self) -> None:
        """Plans the buckets of groups anew in which other parameters are trainable than in the last forward."""
        changed, self.changed = self.changed, set()
        for group in changed:
            group.parameters.follow_if_changed()

    def enter(self, state: FSDPState) -> None:
        """Notes that the groups of `state` are in use until `leave`, in the pass that runs, or between passes.

        An exception (Ctrl-C, for example) may end it anywhere; the caller calls `leave` then, too.
        """
        self.running.append(state)
        state.running += 1
        if len(self.running) == 1:
            # Storages are known by their addresses, which others may have taken since the last pass.
            self.saved_tensors.owners.clear()
        active = top_saved_tensor_hooks(False)
        if active is None or active[0] is not self.saved_tensors.pack:
            self.saved_tensors.activate(len(self.running))

    def leave(self, num_running: int) -> None:
        """Ends the uses, which may have failed, behind the first `num_running`. To call it again changes nothing."""
        if self.saved_tensors.in_force[-1][0] > num_running:
            self.saved_tensors.deactivate(num_running)
        while len(self.running) > num_running:
            state = self.running.pop()
            state.running = self.running.count(state)
        if not self.running:
            for state, backward_follows in self.forward.unfinished.items():
                state.post_forward(backward_follows, has_run=True)
            self.forward.unfinished.clear()
            if self.backward is None:
                self.prefetcher.drop()
                if self.viewed:
                    self.free_viewed()
                if self._transfers:
                    notices.before_next_write(self.settle_transfers)

    def use(self, group: FSDPParamGroup) -> None:
        """Notes that `group` is in use, not only gathered ahead: recognises what autograd saves of its weights."""
        self.prefetcher.prefetched.discard(group)
        for storage in group.parameters.storage_ids:
            self.saved_tensors.owners[storage] = group

    def free_kept(self) -> None:
        """Frees what a forward has left for readers in backward: that has ended, or another pass begins."""
        self.viewed |= self.kept
        self.kept.clear()
        self.free_viewed()

    def free_viewed(self) -> None:
        """Frees what could not be freed while something used it."""
        self.viewed = {group for group in self.viewed - self.kept if not group.free_if_resharded()}

    # ---- offload

    def settle_transfers(self) -> None:
        """Waits until no shard is being copied to the device: the user may write to shards next."""
        for transfers in self._transfers:
            transfers.settle()

    # ---- backward

    def is_in_backward(self) -> bool:
        """Returns True while a backward pass runs. It is for callers that cannot be a part of one.

        If one has begun and none runs on this thread, it has failed: this recovers. Autograd does not say so, and drops
        what a failed backward holds at some later time.
        """
        if self.backward is not None and graph_task() == -1:
            self.recover()
        return self.backward is not None

    def enter_backward(self, recomputes: bool = False) -> None:
        """Notes that a backward pass runs. The first time in each pass, asks autograd to call `end_backward`.

        `recomputes`: it is a forward that runs again, with grad enabled, whether or not the backward builds a graph.
        """
        if self.backward is None:
            if graph_task() == -1:
                return  # a user reads saved tensors outside backward
            self._begin_backward()
        if torch.is_grad_enabled() and not recomputes and self.backward and not self.backward.builds_graph:
            self.backward.builds_graph = True
            self.frees_memory, self._graph_of, self._graph_was_read = False, self.backward, False
            self.note_unseen()

    def _begin_backward(self) -> None:
        compiled = compat.compiled_autograd()
        if compiled is not None and compat.runs_compiled_backward(compiled):
            name = next((param.name for group in self.groups for param in group.params), self.group.name)
            refuse_compiled_backward(self.group, name)
        if compat.profiler_runs() is not self.is_profiled:
            self.switch_profiled()
        self.backward = BackwardPass(graph_task())
        compat.on_backward_end(self.end_backward)
        self.prefetcher.begin_backward()
        if self.queue.running:
            self.queue.finish_partial()
        self.backward_pass = object()
        if self.changed:
            self.follow_changes()
        if self.consensus is not None:
            self.consensus.before_backward()
        self.notify(self.events.backward_began)
        if self.steps is not None or self.leaves_gradients:
            self.take_placeholders()
        for group in self.groups:
            group.gradients.begin_backward(self.backward_pass)

    def take_placeholders(self) -> None:
        """Takes all placeholders out of `.grad`: gradients are to come."""
        if self.steps is not None:
            self.steps.before_backward()
        take_placeholders(self)

    def end_backward(self) -> None:
        """Reduces and reshards what is left, and delivers all gradients: autograd has computed them.

        Autograd calls it, unless the backward itself fails: then autograd drops what it holds at some later time,
        perhaps on a device's thread.
        """
        if runs_transform() or ((num_dispatch_modes() or num_function_modes()) and are_in_force()):
            with outside():
                return self.end_backward()
        try:
            for group in reversed(self.groups):
                group.gradients.end_backward()
            self.resume_reductions(reversed(self.groups))
            for group in self.groups:
                if group.reached_by is not None and group.params:
                    group.needs_no_input_hooks = False
                buffers = group.parameters.buffers
                is_freed = group.phase is SHARDED and buffers is not None and not buffers.is_allocated
                if group.reached_by is not None or group.hold is not Hold.NOTHING or not is_freed:
                    group.finish_backward()  # else its last gradient has resharded it
            self.prefetcher.drop()
            if self.settings.finalize_backward:
                self.deliver()
            if self._transfers:
                self.settle_transfers()  # behind gradients on the CPU, which come behind all copies to the device
            assert self.backward is not None, "it ends"
            if self.settings.is_last_backward and not self.backward.builds_graph:
                self.prefetcher.ran.clear()
            if not self.frees_memory and self._graph_of is not self.backward:
                self._graph_was_read = True
            self.notify(self.events.backward_ended)
            self.backward = None
            self.num_backwards += 1
            if self.viewed or self.kept:
                self.free_kept()
        except BaseException:  # a user's hook on a parameter raised, or a peer is gone
            run_hidden(self.recover)
            raise

    def resume_reductions(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Sums between replicas the gradients of `groups` that earlier passes have left; others are being reduced."""
        if self.consensus is not None:
            self.consensus.after_backward()
        for group in groups:
            if group.gradients.unsynchronized.reduced_in_shard:
                group.gradients.resume()

    def use_queue(self, queue: ReductionQueue) -> None:
        """Puts the reductions of this root into `queue` from now on, and those that are in flight."""
        if queue is not self.queue:
            queue.take_over(self.queue)
            self.queue = queue
        for group in self.groups:
            group.queue = queue

    def deliver(self) -> None:
        """Finishes the reductions in flight."""
        self.queue.finish_all()
        if self.steps is not None:
            self.steps.after_delivery()
        if self.leaves_gradients:
            put_placeholders(self)

    def recover(self) -> None:
        """Drops what a backward pass that has raised left half done."""
        if self.consensus is not None:
            self.consensus.pass_failed(True)
        self.backward = None
        self.queue.abandon(self.backward_pass)
        self.settings = self.prefetcher.settings = replace(self.settings, is_last_backward=True)
        for group in self.groups:
            group.gradients.discard()
        self.frees_memory, self._graph_was_read = True, False
        for notify in self.events.pass_failed:
            notify(self, True)
        mark_lost(self)
        for group in self.groups:
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the parameters any more
                group.reshard_if_idle()
        self.prefetcher.drop()
        self.prefetcher.ran.clear()
        self.settle_transfers()
