"""Joins the rest of the package to the core: by events that observers follow, and by strategies, which are values.

An *observer* follows the groups under one root: it overrides methods of `Observer`, and a root calls only those that
are overridden. A *strategy* is a value that replaces a decision of the core: how ranks communicate, which class sharded
parameters have. `extend` adds both for the whole process, before modules are sharded. fsdp2/README.md shows an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .comm import Comm, make_comm
from .mesh import distribute
from .user_code import map_tensors, tensors_in


class Observer:
    """Follows all groups under one root. Override what is needed; the methods do nothing here.

    `root` is a Root, `state` the FSDPState of one sharded module, `group` an FSDPParamGroup, `param` an FSDPParam. What
    a method raises ends the pass in which it is called. A method must do the same on all ranks if it communicates.

    `ignored`: names of events that the observer overrides and is not told of now. A class may name those that it needs
    at times only: `root.events.follow` and `root.events.ignore` change it, so that a steady step runs what it needs.
    """

    ignored: frozenset[str] = frozenset()

    def attached(self, root: Any) -> None:
        """The root, its groups and their names are known. It happens again when an outer module is sharded."""

    def pass_began(self, root: Any) -> None:
        """The outermost forward begins; nothing has been gathered for it."""

    def inputs_cast(self, state: Any, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """A forward is about to cast floating-point tensors among `inputs` to `dtype`."""

    def forward_began(self, group: Any) -> None:
        """A module's forward begins; its unsharded parameters are registered."""

    def forward_ended(self, group: Any) -> None:
        """The module's own forward has returned; the unsharded parameters are still there."""

    def forward_returns(self, state: Any, inputs: Any, output: Any) -> Any:
        """The module's own forward has returned `output`. `inputs`: (args, kwargs). Returns what the module returns."""
        return output

    def forward_finished(self, state: Any, backward_follows: bool, failed: bool) -> None:
        """After a forward, the groups of `state` were resharded, or left unsharded."""

    def forward_failed(self, group: Any) -> None:
        """A forward has raised. The group is resharded next."""

    def pass_ended(self, root: Any) -> None:
        """The outermost module's own forward has returned."""

    def pass_failed(self, root: Any) -> None:
        """The outermost forward has raised."""

    def before_gather(self, group: Any) -> None:
        """The group's all-gather is about to begin."""

    def gathered(self, group: Any) -> None:
        """The group's all-gather has ended."""

    def unsharded(self, group: Any) -> None:
        """The group's unsharded parameters are there, or were there already, and are about to be used."""

    def before_reshard(self, group: Any) -> None:
        """A user has called `reshard`; an exception raised here propagates once the group is resharded."""

    def before_free(self, group: Any) -> None:
        """The memory of the unsharded parameters is about to be freed."""

    def shards_needed(self, group: Any) -> None:
        """The group's shards are about to be read."""

    def backward_began(self, root: Any) -> None:
        """The first event of a backward pass."""

    def saved_unseen(self, root: Any) -> None:
        """Autograd may save unsharded parameters from now on where no hook of the engine sees them."""

    def graph_built(self, root: Any) -> None:
        """A backward pass runs with grad enabled (create_graph=True): it may save weights where no hook sees them."""

    def before_reduce(self, group: Any) -> None:
        """Gradients of the group, perhaps not all of them, are about to be reduced."""

    def gradients_due(self, group: Any) -> None:
        """All gradients of a group that reduces them together (ReduceWhen) are about to be reduced."""

    def gradients_delivered(self, group: Any, params: Sequence[Any], of_pass: object) -> None:
        """`.grad` of these sharded parameters holds what the backward pass `of_pass` has computed."""

    def gradients_computed(self, root: Any) -> None:
        """Autograd has computed all gradients of a backward pass, and the reductions of all that exist have begun."""

    def finalized(self, root: Any) -> None:
        """All reductions have finished; `.grad` holds every gradient except unsynchronized ones."""

    def backward_ended(self, root: Any) -> None:
        """A backward pass is about to end."""

    def backward_failed(self, root: Any) -> None:
        """A backward pass has raised; what it had computed is dropped, earlier gradients stay."""

    def reset(self, root: Any) -> None:
        """A user has dropped everything that was under way, unsynchronized gradients, too."""

    def out_of_step(self, root: Any) -> None:
        """Ranks have run different sequences; from the next pass on, no observer may rely on what it recorded."""

    def settings_changed(self, group: Any) -> None:
        """A setting of the group, or which of its parameters are trainable, has changed."""

    def rebuilt(self, group: Any) -> None:
        """Shards lie in other memory now, or the sharded or unsharded parameters are other objects."""

    def loaded(self, group: Any) -> None:
        """`load_state_dict` has replaced parameters of the group."""

    def before_replace(self, group: Any, found: Sequence[tuple[Any, nn.Parameter]]) -> None:
        """A user has replaced parameters of the group, or their local tensors, and the group is about to take `found`:
        (param, what is registered in its place).
        """


@cache
def _events_of(cls: type) -> list[str]:
    """Returns the names of the events that observers of class `cls` follow."""
    return [name for name in EVENTS if getattr(cls, name) is not getattr(Observer, name)]


EVENTS = tuple(name for name, method in vars(Observer).items() if callable(method) and not name.startswith("_"))


class Events:
    """Holds, for each event, by its name, the methods of the observers that follow it."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self.observers = (*observers,)
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

    def of(self, cls: type) -> Any:
        """Returns the observer of that class, or None."""
        return next((each for each in self.observers if isinstance(each, cls)), None)


NO_EVENTS = Events()


@dataclass(frozen=True)
class Strategies:
    """Holds decisions of the core that the rest of the package replaces.

    Args:
        observers: called with each new root; each returns an observer, or None.
        make_comm: (process group or None, device, purpose) -> Comm.
        tensor_class: class of sharded parameters and of their gradients.
        class_attributes: called with a module's class; what they return is added to its sharded class.
        make_buffers: makes a group's buffers; None: GroupBuffers.
        restore_among: (group, k) has k neighbouring ranks restore a group after forward (reshard_after_forward=k).
        group_class: (device, FSDPParamGroup) -> class of groups on that device.
        distribute: (parameter, mesh, dim) -> Distribution of a tensor subclass, a DTensor for example.
        rows_of_subclass: (tensor, dim, DataMesh, device) -> this rank's rows of a tensor subclass; None: as of others.
        gathers_itself: whether a local tensor (a tensor subclass) says itself how it is gathered.
        gather_extension: (params, mesh, policy) -> what gathers these, see SubclassGather in ext/subclasses.py.
        plan: called with the plan of each `fully_shard` call before anything is changed; may refuse it, or regroup.
        module_class: class that sharded modules get besides their own; None: core.FSDPModule.
        make_prefetcher: (root) -> Prefetcher.
        before_next_write: has a function called before the next write to a shard; at once, if nothing would tell.
        deliver: (gradients, pending, of_pass) -> a future, if another thread delivers offloaded gradients.
        find_replacements: (group, accept_whole, may_be_untied) -> [(param, what a user has registered for it)].
        tensors_in, map_tensors: find, or change, all tensors in the inputs and outputs of modules.
    """

    observers: tuple[Callable[[Any], Observer | None], ...] = ()
    make_comm: Callable[..., Comm] = make_comm
    tensor_class: type[DTensor] = DTensor
    class_attributes: tuple[Callable[[type], dict[str, Any]], ...] = ()
    make_buffers: Callable[..., Any] | None = None
    restore_among: Callable[[Any, int], None] | None = None
    group_class: Callable[[torch.device, Any], Any] = lambda device, usual: usual
    distribute: Callable[..., Any] = distribute
    rows_of_subclass: Callable[..., Tensor] | None = None
    gathers_itself: Callable[[Tensor], bool] = lambda local: False
    gather_extension: Callable[..., Any] | None = None
    plan: tuple[Callable[[Any], None], ...] = ()
    module_class: type | None = None
    make_prefetcher: Callable[[Any], Any] | None = None
    before_next_write: Callable[[Callable[[], object]], object] = lambda action: action()
    deliver: Callable[..., Any] = lambda gradients, pending, of_pass: None
    find_replacements: Callable[..., Any] | None = None
    tensors_in: Callable[..., list[Tensor]] = tensors_in
    map_tensors: Callable[..., Any] = map_tensors


class _Current:
    strategies = Strategies()


def strategies() -> Strategies:
    """Returns the current strategies."""
    return _Current.strategies


def extend(**changes: Any) -> None:
    """Puts strategies in force for what is sharded from now on. Tuples are added to, other values are replaced."""
    now = _Current.strategies
    joined: dict[str, Any] = {
        n: (*getattr(now, n), *each) if isinstance(each, tuple) else each for n, each in changes.items()
    }
    _Current.strategies = replace(now, **joined)
