"""Runs all groups below one root: begins and ends forward and backward passes, and recovers when one has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..calls.compiled_backward import refuse_compiled_backward
from ..calls.user_code import are_in_force, outside, run_hidden
from ..devices.write_notices import notices
from ..parameters.subclasses import take_methods_set_later
from ..torch_private import internals
from ..torch_private.internals import (
    graph_task,
    num_dispatch_modes,
    num_function_modes,
    runs_transform,
    top_saved_tensor_hooks,
)
from .autograd import SavedTensors
from .events import BackwardStepper, Change, Events, Observer, RankConsensus, extensions
from .placeholders import leaves_gradients, mark_lost, put_placeholders, take_placeholders
from .policy import SECONDARY, Ending, KeepUntil, RootSettings
from .schedule import Cursor, Prefetcher, ReductionQueue

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .parameter import FSDPParam
    from .state import FSDPState


@dataclass
class ForwardPass:
    """One call of the outermost sharded module outside backward."""

    # It began with grad enabled, so that a backward may follow.
    has_grad: bool
    # Identity of the thread on which it began.
    thread: int
    # State of a list of modules that share groups -> the modules of the list that have run.
    finished: dict[FSDPState, set[nn.Module]] = field(default_factory=dict)
    # States of such lists, while some of their modules have not run -> how the forward of the last one ended.
    unfinished: dict[FSDPState, Ending] = field(default_factory=dict)
    # Groups of large submodules whose parameters an outer module has read without calling the submodule. They stay
    # unsharded for backward, as the outer module's own groups do.
    read_outside: set[FSDPParamGroup] = field(default_factory=set)
    # A loss calls a large submodule between forward and backward, which needs it first.
    runs_for_loss: bool = False
    # An input requires a gradient: a backward may compute that one, and none of parameters (torch.autograd.grad).
    inputs_require_grad: bool = False

    def note_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Notes whether one of the tensors that the outermost module is called with requires a gradient."""
        self.inputs_require_grad = bool([1 for tensor in inputs if tensor.requires_grad])


@dataclass
class BackwardPass:
    """One backward pass."""

    # Autograd's number of the pass.
    task: int
    # It runs with create_graph=True.
    builds_graph: bool = False


class Root:
    """Runs the forward and backward passes of the outermost sharded module and of all sharded modules inside it.

    It follows the order in which their groups run, gathers the next ones early, bounds the reductions in flight, and
    tells observers what happens. An FSDPState builds it when it is first asked for.
    """

    def __init__(self, state: FSDPState, states: Iterable[FSDPState]) -> None:
        # The outermost state, and all states, outermost first.
        self.state, self.states = state, list(dict.fromkeys(states))
        # The outermost state's first group, and all groups.
        self.group = state.groups[0]
        self.groups: list[FSDPParamGroup] = [group for each in self.states for group in each.groups]
        # A group that owns parameters of modules here, and is under another root.
        foreign = (group for each in self.states for group in each.tied_to if group not in self.groups)
        self._foreign = next(foreign, None)
        # A user's choices for the whole model.
        self.settings = RootSettings()

        # -- the pass that runs, or ran last
        # States in use, the innermost last: their forwards run now, or a block of full_params uses their parameters.
        self.running: list[FSDPState] = []
        # How many forwards run now.
        self.depth = 0
        self.forward = ForwardPass(False, state.thread)
        # None unless a backward pass runs.
        self.backward: BackwardPass | None = None
        # Identity of the backward pass that runs, or ran last.
        self.backward_pass: object = object()
        # How many backward passes have ended, and how often a user has dropped everything.
        self.num_backwards = self.num_resets = 0
        # Functions that end the calls served between passes (served_calls.py), the innermost last.
        self.served: list[Callable[[], None]] = []

        # -- changes since the last pass
        # Parameters of some group were replaced, or lie elsewhere, since a pass began last.
        self.has_rebuilt = True
        # Groups that may have other trainable parameters than in the last backward, also that of an earlier forward.
        self.changed: set[FSDPParamGroup] = set()
        # Gradients of some group are unsynchronized, or will be after the next backward pass.
        self.leaves_gradients = any(map(leaves_gradients, self.groups))

        # -- graphs that read weights unnoticed
        # False while a graph reads unsharded parameters unnoticed: then resharding leaves their memory.
        self.frees_memory = True
        # The backward pass that has built that graph; None when a later pass has read it.
        self._graph_of: BackwardPass | None = None
        # Autograd has saved weights where no hook sees them: then views of them are in graphs as a rule.
        self.saves_unseen = False

        # -- memory that something outside keeps
        # Groups whose memory could not be freed because something had a view of it.
        self.freed_later: set[FSDPParamGroup] = set()
        # Groups whose memory a forward has left for a reader in backward that nothing else notices.
        self.held_for_backward: set[FSDPParamGroup] = set()

        # -- other ranks
        # Ranks were out of step: what this one has recorded may differ from what others have.
        self.is_out_of_step = False
        # Ranks were out of step because a pass has raised on this one.
        self.has_failed = False
        # Has ranks agree what they communicate next, where some leave modules out.
        self.consensus: RankConsensus | None = None

        # -- the device
        device = self.group.mesh.device
        # Where the inputs of a pass are moved.
        self.input_device = None if device.type in ("cpu", "meta") else device
        # Copies of offloaded shards to the device. Shards without memory need not be waited for.
        copies = [group.transfers for group in self.groups if internals.type_of(device) != "meta"]
        self._transfers = {each for each in copies if each is not None}

        # -- schedule, events, and what features have joined
        self.prefetcher = Prefetcher(self.groups)
        self.queue = ReductionQueue()
        self.saved_tensors = SavedTensors(self.note_unseen)
        self.events = Events()
        # The observers that follow while a profiler of torch runs. One ran when the last pass began: `is_profiled`.
        self._in_profiler: list[Observer] = []
        self.is_profiled = False
        # Steps on parameters in backward, as soon as their gradients are delivered.
        self.stepper: BackwardStepper | None = None
        # Called with a group before its shards are read. Each waits for writes to them that the host has only begun.
        self.waits_before_read: list[Callable[[FSDPParamGroup], None]] = []

    @property
    def shared(self) -> list[FSDPParamGroup]:
        """The groups that own parameters which modules of several states have (tied weights)."""
        return [group for group in self.groups if group.sharing_states]

    def take_over(self) -> None:
        """Runs all groups from now on, with the features and observers that the process has now."""
        for each in self.states:
            if each.outermost is self.state:  # else it has been moved into another model, and sharded with that
                each.run_under(self)
        for join in extensions().features:
            join(self)
        observers = [make(self) for make in extensions().observers]
        self.observe([each for each in observers if each is not None])

    # ---- what follows the root, and what joins it

    def observe(self, observers: Iterable[Observer]) -> None:
        """Has these observers, and no others, follow events from now on."""
        before, now = self.events.observers, (*observers,)
        self.events.set_observers(now)
        for group in self.groups:
            group.unsharded.forget_references()  # observers may have some
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

    def use_consensus(self, consensus: RankConsensus | None, cursor: type[Cursor[FSDPParamGroup]]) -> None:
        """Has ranks agree what they communicate, if there are several; groups are gathered ahead as `cursor` says."""
        self.consensus, self.prefetcher = consensus, Prefetcher(self.groups, cursor)

    def use_backward_stepper(self, steps: BackwardStepper | None) -> None:
        """Has backward step on parameters from now on. None: it does so no more."""
        if self.stepper is not None:
            self.waits_before_read.remove(self.stepper.wait_for_steps)
        self.stepper = steps
        if steps is not None:
            self.waits_before_read.append(steps.wait_for_steps)

    def share_queue(self, queue: ReductionQueue) -> None:
        """Adds reductions to `queue` from now on, which another root has, and moves those in flight there."""
        if queue is not self.queue:
            queue.take_over(self.queue)
            self.queue = queue

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
            group.guard_saved()

    def notify(self, follow: Iterable[Callable[[Root], None]]) -> None:
        """Tells observers of an event of the whole root: `notify(self.events.pass_began)`."""
        for notify in follow:
            notify(self)

    def switch_profiled(self) -> None:
        """Adds the observers that follow while a profiler of torch runs, or removes them: one has started or stopped
        since the last pass.
        """
        self.is_profiled = not self.is_profiled
        before, self._in_profiler = self._in_profiler, [m(self) for m in extensions().in_profiler if self.is_profiled]
        for each in before:
            self.remove(each)
        for each in self._in_profiler:
            self.add(each)

    # ---- forward

    def begin_pass(self) -> None:
        """Begins a forward pass: the outermost sharded module is called, outside backward."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():
            raise NotImplementedError(f"{self.group}: its gathers can be in no graph. {internals.EXPORT_PLAIN}")
        if num_dispatch_modes() and internals.are_tensors_fake():
            raise NotImplementedError(
                f"{self.group}: FakeTensorMode has no values to gather. Leave the mode for sharded models; fsdp2.plan "
                "predicts the memory and the time of a plain one when it is sharded."
            )
        is_on_cuda = self.input_device is not None and self.input_device.type == "cuda"
        if is_on_cuda and torch.cuda.is_current_stream_capturing() and (reason := self._why_not_captured()):
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
        if internals.profiler_runs() is not self.is_profiled:
            self.switch_profiled()
        if not self.frees_memory and self._graph_of is None:
            self._free_for_graph()
        if self.consensus is not None:
            self.consensus.before_pass()
        if self.has_rebuilt:
            take_methods_set_later(self)
            self.has_rebuilt = False
        self.notify(self.events.pass_began)
        self.forward = ForwardPass(torch.is_grad_enabled(), get_ident())
        if self.held_for_backward:
            self.free_kept()
        self.prefetcher.begin_pass(self.num_backwards)
        sent = [group.gradients.sent_nbytes for group in self.groups]
        self.queue.set_limits(max([g.settings.max_reductions or 1 for g in self.groups]), sent)
        for group in self.groups:
            if group.keep_until is not KeepUntil.END_OF_USE or group.phase is SECONDARY:
                group.reshard_stale()

    def _why_not_captured(self) -> str:
        """Returns what the host would have to do in each replay of a CUDA graph, and what to change; "" if nothing."""
        if self._transfers:
            return "the host waits for copies of offloaded shards and gradients. Leave offload_policy out."
        if self.consensus is not None:
            return "the host reads which ranks run conditional modules. Leave conditional=True out."
        if self.prefetcher.kept.groups or not all(group.settings.reshard_after_backward for group in self.groups):
            return (
                "parameters that are kept over steps are gathered again when the host sees that shards have changed. "
                "Call set_reshard_after_backward(True) and set_unsharded_budget(None). "
                "set_keep_unsharded_storage(True) keeps their memory."
            )
        return ""

    def _free_for_graph(self) -> None:
        """Frees what was left for a graph that a backward pass has built: a later one has read it."""
        self.frees_memory = True
        for group in self.groups:
            if group.keep_until < KeepUntil.NEXT_PASS:
                group.reshard_if_idle()

    def note_out_of_step(self, has_failed: bool = False) -> None:
        """Notes that ranks were out of step: each may have left other work unfinished. `has_failed`: because a pass has
        raised on this rank.
        """
        self.has_failed = self.has_failed or has_failed
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
        self.prefetcher.begin_pass(self.num_backwards)

    def _forget(self) -> None:
        """Forgets what was recorded, and drops gathers that never were."""
        self.is_out_of_step = self.has_failed = False
        self.prefetcher.forget_order()
        for group in self.groups:
            with suppress(RuntimeError):
                group.reshard_if_idle()

    def note_change(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        """Notes what a user may have changed of `group`, and tells observers; see `Observer.changed`."""
        if change is Change.SETTINGS:
            self.changed.add(group)
            self.leaves_gradients = self.leaves_gradients or leaves_gradients(group)
        elif change is Change.PARAMETERS:
            self.has_rebuilt = True
        for notify in self.events.changed:
            notify(group, change, replaced)

    def find_left_gradients(self) -> None:
        """Finds out whether gradients of some group are unsynchronized, or will be."""
        self.leaves_gradients = any(map(leaves_gradients, self.groups))

    def follow_changes(self) -> None:
        """Plans the buckets of groups anew in which other parameters are trainable than in the last forward."""
        changed, self.changed = self.changed, set()
        for group in changed:
            group.parameters.follow_if_changed()

    def enter(self, state: FSDPState, is_forward: bool = True) -> None:
        """Notes that the groups of `state` are in use until `leave`, in the pass that runs, or between passes.

        An exception (Ctrl-C, for example) may end it anywhere; the caller calls `leave` then, too. `is_forward=False`:
        a block of full_params uses them.
        """
        self.running.append(state)
        state.running += 1
        self.depth += is_forward
        if len(self.running) == 1:
            # Storages are known by their addresses, which others may have taken since the last pass.
            self.saved_tensors.owners.clear()
        active = top_saved_tensor_hooks(False)
        if active is None or active[0] is not self.saved_tensors.pack:
            self.saved_tensors.activate(len(self.running))

    def leave(self, num_running: int, depth: int) -> None:
        """Ends the uses, which may have failed, behind the first `num_running`; `depth` forwards run on. To call it
        again changes nothing.
        """
        self.depth = depth
        if self.saved_tensors.in_force[-1][0] > num_running:
            self.saved_tensors.deactivate(num_running)
        while len(self.running) > num_running:
            state = self.running.pop()
            state.running = self.running.count(state)
        if not self.running:
            for state, ending in self.forward.unfinished.items():
                state.post_forward(ending, has_run=True)
            self.forward.unfinished.clear()
            if self.backward is None:
                self.prefetcher.drop()
                if self.freed_later:
                    self.free_viewed()
                if self._transfers:
                    notices.before_next_write(self.settle_transfers)

    @contextmanager
    def in_same_pass(self) -> Iterator[None]:
        """Context: a loss calls a large submodule between forward and backward. A pass of its own would free what the
        forward has kept for backward. The submodule stays for backward, too: a loss may call it on each of many chunks.
        """
        num_running, depth, forward = len(self.running), self.depth, self.forward
        try:
            self.enter(self.state)
            forward.runs_for_loss = True
            yield
        finally:
            forward.runs_for_loss = False
            self.leave(num_running, depth)

    def note_reset(self) -> None:
        """Notes that a user drops everything: handles of reductions that are in flight finish none."""
        self.num_resets += 1

    def forget_running(self) -> None:
        """Forgets all forwards that run: a user drops everything."""
        for state in self.running:
            state.running = 0
        self.running.clear()
        self.depth = 0
        self.saved_tensors.deactivate(0)

    def mark_in_use(self, group: FSDPParamGroup) -> None:
        """Notes that `group` is in use, not only gathered ahead: recognises what autograd saves of its weights."""
        self.prefetcher.prefetched.discard(group)
        for storage in group.unsharded.storage_ids:
            self.saved_tensors.owners[storage] = group

    def free_kept(self) -> None:
        """Frees what a forward has left for readers in backward: that has ended, or another pass begins."""
        self.freed_later |= self.held_for_backward
        self.held_for_backward.clear()
        self.free_viewed()

    def free_viewed(self) -> None:
        """Frees what could not be freed while something used it."""
        self.freed_later = {
            group for group in self.freed_later - self.held_for_backward if not group.free_if_resharded()
        }

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
            self.frees_memory, self._graph_of = False, self.backward
            self.note_unseen()

    def _begin_backward(self) -> None:
        compiled = internals.compiled_autograd()
        if compiled is not None and internals.runs_compiled_backward(compiled):
            name = next((param.name for group in self.groups for param in group.params), self.group.name)
            refuse_compiled_backward(self.group, name)
        if internals.profiler_runs() is not self.is_profiled:
            self.switch_profiled()
        self.backward = BackwardPass(graph_task())
        internals.on_backward_end(self.end_backward)
        self.prefetcher.begin_backward()
        if self.queue.running:
            self.queue.finish_partial()
        self.backward_pass = object()
        if self.changed:
            self.follow_changes()
        if self.consensus is not None:
            self.consensus.before_backward()
        self.notify(self.events.backward_began)
        if self.stepper is not None or self.leaves_gradients:
            self.take_placeholders()
        for group in self.groups:
            group.gradients.begin_backward(self.backward_pass)

    def take_placeholders(self) -> None:
        """Takes all placeholders out of `.grad`: gradients are to come."""
        if self.stepper is not None:
            self.stepper.before_backward()
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
                group.leave_backward()
            self.prefetcher.drop()
            if self.settings.finalize_backward:
                self.deliver()
            if self._transfers:
                self.settle_transfers()  # behind gradients on the CPU, which come behind all copies to the device
            assert self.backward is not None, "it ends"
            if self.settings.is_last_backward and not self.backward.builds_graph:
                self.prefetcher.ran.clear()
            if self._graph_of is not self.backward:
                self._graph_of = None
            self.notify(self.events.backward_ended)
            self.backward = None
            self.num_backwards += 1
            if self.freed_later or self.held_for_backward:
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

    def deliver(self) -> None:
        """Finishes the reductions in flight."""
        self.queue.finish_all()
        if self.stepper is not None:
            self.stepper.after_delivery()
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
        self.frees_memory = True
        for notify in self.events.pass_failed:
            notify(self, True)
        mark_lost(self)
        for group in self.groups:
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the parameters any more
                group.reshard_if_idle()
        self.prefetcher.drop()
        self.prefetcher.ran.clear()
        self.settle_transfers()
