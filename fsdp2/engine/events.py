"""Tells observers of events: how the rest of the package, and users, follow what the engine does.

An *observer* follows the groups under one root: it overrides methods of `Observer`, and a root calls only those that
are overridden. `extend` adds observers for the whole process, before modules are sharded. fsdp2/README.md shows one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .comm import CommWatcher, Unwatched

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .parameter import FSDPParam
    from .root import Root
    from .state import FSDPState


class Observer:
    """Follows all groups under one root. Override what is needed; the methods do nothing here.

    `root` is a Root, `state` the FSDPState of one sharded module, `group` an FSDPParamGroup, `param` an FSDPParam. What
    a method raises propagates to the caller of the event. A method must do the same on all ranks if it communicates.
    Observers are called in the order in which `extend` got them. Forwards that checkpointing runs again send
    `forward_failed` and `pass_failed`, and no other event of forwards.

    `ignored`: names of events that the observer overrides and is not told of now; `root.events.follow` and
    `root.events.ignore` change it. A class names there those events that it needs at times only.
    """

    ignored: frozenset[str] = frozenset()

    def attached(self, root: Root) -> None:
        """A new root knows its groups and their names. An outer module's root makes other observers."""

    def pass_began(self, root: Root) -> None:
        """A forward pass begins: a sharded module is called outside of others, or the root itself is."""

    def profiler_switched(self, root: Root) -> None:
        """A profiler of torch has started or stopped since the last pass: `root.is_profiled` says which."""

    def inputs_cast(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """A forward is about to cast floating-point tensors among `inputs` to `dtype`."""

    def inputs_returned(self, state: FSDPState, inputs: Any) -> None:
        """A forward that got cast or moved inputs has returned. `inputs`: the HandedInputs, taken back already."""

    def forward_began(self, group: FSDPParamGroup) -> None:
        """A module's forward begins; its unsharded parameters are registered."""

    def forward_ended(self, group: FSDPParamGroup) -> None:
        """The module's call, hooks included, has returned; the unsharded parameters are still there."""

    def forward_returns(self, state: FSDPState, inputs: Any, output: Any) -> Any:
        """The module's call has returned `output`. `inputs`: (args, kwargs). Returns it for the next observer."""
        return output

    def forward_finished(self, state: FSDPState, backward_follows: bool, failed: bool) -> None:
        """After a forward, the groups of `state` were resharded, or left unsharded."""

    def forward_failed(self, group: FSDPParamGroup) -> None:
        """A forward has raised. The group reshards next, unless backward or another forward of it runs."""

    def pass_ended(self, root: Root) -> None:
        """The outermost module's own forward has returned."""

    def pass_failed(self, root: Root) -> None:
        """The outermost forward has raised."""

    def before_gather(self, group: FSDPParamGroup) -> None:
        """The group's all-gather is about to begin. One rank, or a group without parameters, communicates nothing."""

    def gathered(self, group: FSDPParamGroup) -> None:
        """The group's all-gather has been waited for: by the host, or by the current stream of a device."""

    def unsharded(self, group: FSDPParamGroup) -> None:
        """The unsharded parameters hold data, gathered now or before. Perhaps only other ranks use them."""

    def before_reshard(self, group: FSDPParamGroup) -> None:
        """A user calls `reshard`. An exception skips the groups that follow; it propagates when all are resharded."""

    def before_free(self, group: FSDPParamGroup) -> None:
        """`reshard` is about to free the unsharded parameters. Perhaps there are none, or `keep_storage` keeps them."""

    def memory_kept(self, group: FSDPParamGroup) -> None:
        """The memory of the group's unsharded parameters is not freed, because something outside the engine has kept
        one of them, or a view of one, since a forward.
        """

    def shards_needed(self, group: FSDPParamGroup) -> None:
        """The group's shards are about to be read."""

    def backward_began(self, root: Root) -> None:
        """A backward pass begins, or `reduce_unsynchronized` does: then `root.backward` is None."""

    def saved_unseen(self, root: Root) -> None:
        """Autograd may save unsharded parameters from now on where no hook of the engine sees them."""

    def graph_built(self, root: Root) -> None:
        """A backward pass runs with grad enabled (create_graph=True): it may save weights where no hook sees them."""

    def before_reduce(self, group: FSDPParamGroup) -> None:
        """Gradients of the group, perhaps not all of them, are about to be reduced."""

    def gradients_due(self, group: FSDPParamGroup) -> None:
        """All gradients of a group that reduces them together (ReduceWhen) are about to be reduced."""

    def gradients_delivered(self, group: FSDPParamGroup, params: Sequence[FSDPParam], of_pass: object) -> None:
        """`.grad` includes what the pass `of_pass` has computed. Another thread may call it (offloaded parameters
        that an optimizer steps on in backward)."""

    def gradients_computed(self, root: Root) -> None:
        """Backward, or `reduce_unsynchronized`, has begun its reductions; all-reduces between replicas may follow."""

    def finalized(self, root: Root) -> None:
        """All reductions have finished; `.grad` holds every gradient except unsynchronized ones."""

    def backward_ended(self, root: Root) -> None:
        """All work of a backward pass is done; `root.backward` is still set."""

    def backward_failed(self, root: Root) -> None:
        """A backward or a finalize has failed, or `reset` was called. Gradients in flight are dropped, and
        unsynchronized ones that the pass had included; what `.grad` has received stays. Groups are resharded next.
        """

    def reset(self, root: Root) -> None:
        """A user has dropped everything that was under way, unsynchronized gradients, too."""

    def out_of_step(self, root: Root) -> None:
        """Ranks have run different sequences; from the next pass on, no observer may rely on what it recorded."""

    def settings_changed(self, group: FSDPParamGroup) -> None:
        """Settings or trainable parameters may have changed: `set` was called, or buckets were planned."""

    def rebuilt(self, group: FSDPParamGroup) -> None:
        """Parameters, or their memory, may be others. What `group.parameters` holds is updated after it."""

    def loaded(self, group: FSDPParamGroup) -> None:
        """`load_state_dict` has replaced parameters (assign=True, for example). Loads in place do not send it."""

    def given_memory(
        self, group: FSDPParamGroup, params: Sequence[FSDPParam], buffers: Sequence[Tensor], are_empty: bool
    ) -> None:
        """Parameters of the group, and buffers below its modules, that were on the meta device have memory now.

        `are_empty`: `to_empty` gave it to them, without values.
        """

    def call_failed(
        self, state: FSDPState, module: nn.Module, name: str | None, inputs: Any, error: RuntimeError
    ) -> None:
        """A call of a module of `state` has raised. An observer may raise a better error.

        `name`: the method; None: it is not known. `inputs`: (args, kwargs), as the caller has given them, or None.
        """

    def before_replace(self, group: FSDPParamGroup, found: Sequence[tuple[FSDPParam, nn.Parameter]]) -> None:
        """A user has replaced parameters of the group, or their local tensors, and the group is about to take `found`:
        (param, what is registered in its place).
        """


@cache
def _events_of(cls: type) -> list[str]:
    """Returns the names of the events that observers of class `cls` follow."""
    return [name for name in EVENTS if getattr(cls, name) is not getattr(Observer, name)]


EVENTS = tuple(name for name, method in vars(Observer).items() if callable(method) and not name.startswith("_"))


class Events:
    """Holds one attribute for each event: the list of observers' methods to call."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.observers = (*observers,)
        self._of_class = {type(each): each for each in self.observers}
        follow: dict[str, list[Any]] = {name: [] for name in EVENTS}
        for each in self.observers:
            for name in _events_of(type(each)):  # type: ignore[arg-type]
                if name not in each.ignored:
                    follow[name].append(getattr(each, name))
        vars(self).update(follow)

    def __getattr__(self, name: str) -> list[Any]:
        raise AttributeError(f"{name} is no event of fsdp2; there are {', '.join(EVENTS)}")

    def follow(self, observer: Observer, *names: str) -> None:
        """Tells `observer` of the events `names`, too, from the next time on that they happen."""
        observer.ignored = observer.ignored.difference(names)
        vars(self).update(vars(Events(self.observers)))  # new lists: an event that happens now walks along an old one

    def ignore(self, observer: Observer, *names: str) -> None:
        """Does not tell `observer` of the events `names`, from the next time on that they happen."""
        observer.ignored = observer.ignored.union(names)
        vars(self).update(vars(Events(self.observers)))

    def follow_if(self, wanted: bool, observer: Observer, *names: str) -> None:
        """Tells `observer` of the events `names` from now on if `wanted`, else no more."""
        if wanted is (names[0] in observer.ignored):
            (self.follow if wanted else self.ignore)(observer, *names)

    def of(self, cls: type) -> Any:
        """Returns the observer of that class, or None."""
        return self._of_class.get(cls)


NO_EVENTS = Events()


_UNWATCHED = Unwatched()


@dataclass(frozen=True)
class Extensions:
    """Holds what other folders, and users, add to the engine for the whole process.

    Args:
        observers: called with each new root; each returns an observer, or None.
        plan: called with the plan of each `fully_shard` call before anything is changed; may refuse it, or regroup.
        class_attributes: called with a module's class; what they return is added to its sharded class.
        tensor_class: class of sharded parameters and of their gradients.
        comm_watcher: watches what ranks are about to communicate.
    """

    observers: tuple[Callable[[Any], Observer | None], ...] = ()
    plan: tuple[Callable[[Any], None], ...] = ()
    class_attributes: tuple[Callable[[type], dict[str, Any]], ...] = ()
    tensor_class: type[DTensor] = DTensor
    comm_watcher: CommWatcher = _UNWATCHED


class _Current:
    extensions = Extensions()


# Those that hold on this thread instead, see `chosen`.
_chosen: ContextVar[Extensions | None] = ContextVar("extensions", default=None)


def extensions() -> Extensions:
    """Returns what has been added so far, or holds on this thread."""
    return _chosen.get() or _Current.extensions


@contextmanager
def chosen(**changes: Any) -> Iterator[None]:
    """Context: on this thread, these fields replace those of the process."""
    token = _chosen.set(replace(extensions(), **changes))
    try:
        yield
    finally:
        _chosen.reset(token)


def extend(**changes: Any) -> None:
    """Adds to the fields of Extensions. A tuple is added to the present one; another class replaces the present one.

    Call it before the first `fully_shard`: some are read at each use, others once for a module, a root or a class.
    """
    now = _Current.extensions
    joined: dict[str, Any] = {
        n: (*getattr(now, n), *each) if isinstance(each, tuple) else each for n, each in changes.items()
    }
    _Current.extensions = replace(now, **joined)
