"""Lets the rest of the package, and users, extend the engine.

An *observer* follows the groups under one root: it overrides methods of `Observer`, the events, and a root calls only
those that are overridden. It may raise, tell and measure, and changes nothing. A *feature* changes numbers, memory or
communication: the engine calls it by its name (RankConsensus, BackwardStepper). `extend` adds both for the whole
process, before modules are sharded. fsdp2/README.md shows an observer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from inspect import getattr_static, isfunction, signature
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from ..calls.inputs import HandedInputs
    from ..collectives.watching import CommWatcher
    from .build import Plan
    from .gradients import GroupGradients
    from .group import FSDPParamGroup
    from .parameter import FSDPParam
    from .reduce import Pending
    from .root import Root
    from .state import FSDPState


class Change(Enum):
    """What a user has changed of a group."""

    SETTINGS = auto()
    """Settings, or which parameters are trainable: `set` was called, or buckets were planned."""
    PARAMETERS = auto()
    """Parameters, or their memory. `group.parameters` is updated after the event."""
    LOADED = auto()
    """`load_state_dict` has replaced parameters (assign=True, for example). Loads in place do not send it."""


class Observer:
    """Follows all groups under one root. Override what is needed; the methods do nothing here.

    An observer watches: it may raise, tell and measure, and changes nothing of the engine. `root` is a Root, `state`
    the FSDPState of one sharded module, `group` an FSDPParamGroup. An error of a method propagates to the caller of
    the event. A method must do the same on all ranks if it communicates. Observers are called in the order in which
    `extend` got them. One that is needed at times only follows at those times only: `root.add(observer)`,
    `root.remove(observer)`.
    """

    # ---- the observer itself

    def attached(self, root: Root) -> None:
        """It follows `root` from now on, which knows its groups and their names. It must not communicate: one rank
        alone may have asked for the root. After `fully_shard` of an outer module there is another root, with other
        observers.
        """

    def detached(self, root: Root) -> None:
        """It follows `root` no more: it was removed. It must undo its changes of modules."""

    # ---- passes

    def pass_began(self, root: Root) -> None:
        """A forward pass begins: a sharded module is called outside of others, or the root itself is."""

    def pass_ended(self, root: Root) -> None:
        """The outermost module's own forward has returned."""

    def backward_began(self, root: Root) -> None:
        """A backward pass begins, or `reduce_unsynchronized` does: then `root.backward` is None."""

    def backward_ended(self, root: Root) -> None:
        """All work of a backward pass is done; `root.backward` is still set."""

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        """The outermost forward has raised. `in_backward`: a backward or a finalize has failed, or `reset` was called.
        Then gradients in flight are dropped, and unsynchronized ones that the pass had included; what `.grad` has
        received stays. Groups are resharded next.
        """

    def out_of_step(self, root: Root) -> None:
        """Ranks have run different sequences; from the next pass on, no observer may rely on what it recorded."""

    # ---- forwards of modules; those that checkpointing runs again send `forward_failed` only

    def inputs_given(self, state: FSDPState, args: Any, kwargs: Any) -> None:
        """A forward is about to begin, on inputs that it has moved to the device. It has cast and gathered nothing."""

    def forward_began(self, group: FSDPParamGroup) -> None:
        """A module's forward begins; its unsharded parameters are registered."""

    def forward_ended(self, group: FSDPParamGroup, inputs: Sequence[HandedInputs]) -> None:
        """The module's call, hooks included, has returned; the unsharded parameters are still there. `inputs`: those
        that were cast or moved for it, taken back already.
        """

    def forward_failed(self, group: FSDPParamGroup) -> None:
        """A forward has raised. The group reshards next, unless backward or another forward of it runs."""

    # ---- unsharded parameters

    def before_gather(self, group: FSDPParamGroup) -> None:
        """The group's all-gather is about to begin. One rank, or a group without parameters, communicates nothing."""

    def unsharded(self, group: FSDPParamGroup) -> None:
        """The unsharded parameters hold data, gathered now or before. Perhaps only other ranks use them."""

    def before_reshard(self, group: FSDPParamGroup) -> None:
        """A user calls `reshard`. An exception skips the groups that follow; it propagates when all are resharded."""

    def before_free(self, group: FSDPParamGroup) -> None:
        """The group reshards, and is about to free the unsharded parameters. Perhaps there are none, or `keep_storage`
        keeps them.
        """

    # ---- gradients

    def before_reduce(self, group: FSDPParamGroup) -> None:
        """Gradients of the group, perhaps not all of them, are about to be reduced."""

    # ---- what users change

    def changed(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        """Settings, parameters or their values may be others. `replaced`, with Change.PARAMETERS: param -> what a user
        had registered in its place, or given another local tensor.
        """


OneObserver = TypeVar("OneObserver", bound=Observer)
EVENTS = tuple(
    name
    for name, method in vars(Observer).items()
    if callable(method) and not name.startswith("_") and name not in ("attached", "detached")
)


@cache
def _events_of(cls: type) -> frozenset[str]:
    """Returns the names of the events that observers of class `cls` follow.

    Raises:
        TypeError: a method does not take what its event gives. Events of failures are rare: when one comes, such an
            error would hide the failure.
    """
    events = frozenset(name for name in EVENTS if getattr(cls, name) is not getattr(Observer, name))
    for name in sorted(events):
        method, expected = getattr_static(cls, name), signature(getattr(Observer, name))
        if not isfunction(method):
            continue
        try:
            signature(method).bind(*expected.parameters)
        except TypeError:
            parameters = ", ".join(expected.parameters)
            raise TypeError(
                f"{cls.__qualname__}.{name}: expected a method that takes ({parameters}), because the event gives it "
                f"these, got one that takes ({', '.join(signature(method).parameters)}). "
                f"Write `def {name}({parameters})`."
            ) from None
    return events


class Events:
    """Lists, in one attribute for each event, the observers' methods to call."""

    observers: tuple[Observer, ...]

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.set_observers((*observers,))

    def __getattr__(self, name: str) -> list[Any]:
        raise AttributeError(f"{name} is no event of fsdp2; there are {', '.join(EVENTS)}")

    def set_observers(self, observers: tuple[Observer, ...]) -> None:
        """Calls these observers from the next event on. An event that is happening goes on with those before."""
        followed = [(each, _events_of(type(each))) for each in observers]  # type: ignore[arg-type]
        self.observers = observers
        for name in EVENTS:
            vars(self)[name] = [getattr(each, name) for each, events in followed if name in events]

    def add(self, observer: Observer, behind: Observer | None = None) -> None:
        """Calls `observer`, too, behind another one or behind all. `Root.add` tells it that it follows."""
        place = len(self.observers) if behind is None else self.observers.index(behind) + 1
        self.set_observers((*self.observers[:place], observer, *self.observers[place:]))

    def remove(self, observer: Observer) -> None:
        """Calls `observer` no more. `Root.remove` tells it."""
        self.set_observers(tuple(each for each in self.observers if each is not observer))

    def of(self, cls: type[OneObserver]) -> OneObserver | None:
        """Returns the observer of that class, or None."""
        return next((each for each in reversed(self.observers) if type(each) is cls), None)


NO_EVENTS = Events()


# ---- features, which change what the engine does, and are called by name


class RankConsensus(Protocol):
    """Has ranks agree what they communicate next, where some leave modules out (features/conditional.py)."""

    def is_conditional(self, group: FSDPParamGroup) -> bool:
        """Returns True if ranks may leave the modules of `group` out."""

    def before_pass(self) -> None:
        """Called when a forward pass begins. It may refuse the root."""

    def before_gather(self, group: FSDPParamGroup) -> None:
        """Called before each all-gather. It may communicate for other groups first."""

    def before_reduce(self, group: FSDPParamGroup, indices: set[int]) -> set[int]:
        """Called before all gradients of a group are reduced, together (ReduceWhen). It may reduce them itself.

        `indices`: those of the parameters that have gradients on this rank. Returns those that all ranks reduce.
        """

    def after_forward(self, state: FSDPState, inputs: Any, output: Any) -> Any:
        """Returns what the forward is to return in place of `output`. `inputs`: (args, kwargs)."""

    def before_backward(self) -> None:
        """Called when a backward, or `reduce_unsynchronized`, begins, before it takes placeholders from `.grad`."""

    def after_backward(self) -> None:
        """Called when a backward, or `reduce_unsynchronized`, has begun its reductions, before the all-reduces
        between replicas that may follow.
        """

    def pass_failed(self, in_backward: bool) -> None:
        """Called when the outermost forward, or a backward, has raised, before anything of it is dropped. Other
        ranks may still communicate for it.
        """


class BackwardStepper(Protocol):
    """Steps on parameters as soon as their gradients are delivered (features/optimizer_in_backward.py)."""

    def before_backward(self) -> None:
        """Called when a backward pass begins."""

    def wait_for_steps(self, group: FSDPParamGroup) -> None:
        """Waits until no step that has begun writes to shards of `group`: they are read next."""

    def deliver(self, gradients: GroupGradients, pending: Pending, of_pass: object) -> Future[None] | None:
        """Delivers offloaded gradients on another thread. None: the caller delivers them."""

    def step(self, group: FSDPParamGroup, params: Sequence[FSDPParam], of_pass: object) -> None:
        """Called when `.grad` of `params` includes what the pass `of_pass` has computed."""

    def after_delivery(self) -> None:
        """Called when all reductions have finished."""


@dataclass(frozen=True)
class Extensions:
    """The additions of other folders, and of users, to the engine, for the whole process.

    Args:
        after_sharding: called with the state of each `fully_shard` call when its modules are sharded. They may
            communicate: all ranks are there.
        features: called with each root when it is built, before observers are made; each joins it, if it needs it.
        observers: called with each root when it is built; each returns an observer, or None. Neither may communicate.
        in_profiler: called with a root when a profiler of torch has started; each returns an observer that follows
            until a pass finds that the profiler has stopped.
        plan: called with the plan of each `fully_shard` call before anything is changed; may refuse it, or regroup.
        class_attributes: called with a module's class; what they return is added to its sharded class.
        tensor_class: class of sharded parameters and of their gradients.
        comm_watcher: watches what ranks are about to communicate. None: nothing does.
    """

    after_sharding: tuple[Callable[[FSDPState], None], ...] = ()
    features: tuple[Callable[[Root], None], ...] = ()
    observers: tuple[Callable[[Root], Observer | None], ...] = ()
    in_profiler: tuple[Callable[[Root], Observer], ...] = ()
    plan: tuple[Callable[[Plan], None], ...] = ()
    class_attributes: tuple[Callable[[type], dict[str, Any]], ...] = ()
    tensor_class: type[DTensor] = DTensor
    comm_watcher: CommWatcher | None = None


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
    """Adds observers, and what features need, for what is sharded from then on: `extend(observers=(make,))`, where
    `make(root)` returns an Observer or None.

    The root of a model is built at its first use, and gets the `features` and `observers` of that moment. A root that
    is built already gets an observer by `root_of(model).add(observer)`. The other fields are read at each use, or once
    for a class of modules: give these before the first `fully_shard`.

    Args:
        changes: fields of `fsdp2.engine.Extensions`, which describes them. A tuple is added to the present one; another
            value replaces the present one.
    """
    now = _Current.extensions
    joined: dict[str, Any] = {
        n: (*getattr(now, n), *each) if isinstance(each, tuple) else each for n, each in changes.items()
    }
    _Current.extensions = replace(now, **joined)
