"""Finds the group that manages a parameter, which has no reference to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..devices.simulation import simulated
from ..torch_private.internals import storage_id
from ..torch_private.rare_internals import share_versions

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .parameter import FSDPParam
    from .state import FSDPState

# Left on an original parameter, with its name: if it turns up again, it was tied across groups, or is in an optimizer.
SHARDED_AS = "_fsdp2_sharded_as"

# The states of all sharded modules that are alive, by their identities. Other threads may be ranks of their own: it is
# only changed, and copied, by operations that no other thread interrupts.
_states: dict[int, weakref.ref[FSDPState]] = {}


class Owned(NamedTuple):
    """Names a parameter, and the group that manages it."""

    group: FSDPParamGroup
    param: FSDPParam


def note_state(state: FSDPState) -> None:
    """Remembers a state for as long as it is alive. States of plans are left out: only the plan has them."""
    if simulated.get() is None:
        key = id(state)
        _states[key] = weakref.ref(state, lambda _: _states.pop(key, None))


def forget_state(state: FSDPState) -> None:
    """Forgets a state: the call that has made it has failed."""
    _states.pop(id(state), None)


def _all_states() -> list[FSDPState]:
    return [state for state in [reference() for reference in [*_states.values()]] if state is not None]


def all_groups() -> Iterator[FSDPParamGroup]:
    """Yields the groups of all sharded modules that are alive."""
    for state in _all_states():
        yield from state.groups


def outermost_of_thread() -> list[FSDPState]:
    """Returns the states of outermost sharded modules that this thread runs: their last forward pass, or else their
    fully_shard call, was on it. Another thread may be another rank, which must leave this one's roots alone. Models
    whose process groups were destroyed are left out.
    """
    outermost = dict.fromkeys(state.outermost for state in _all_states())
    return [state for state in outermost if state.thread == get_ident() and _can_communicate(state)]


def _can_communicate(state: FSDPState) -> bool:
    try:
        return state.groups[0].mesh.axis_groups is not None
    except RuntimeError:
        return False


def owners_by_id() -> dict[int, Owned]:
    """Returns the owners of all sharded and unsharded parameters, by the identities of these."""
    found = {}
    for group in all_groups():
        for param in group.params:
            registered = (slot.module._parameters.get(slot.name) for slot in param.slots)
            for each in (param.sharded, param.unsharded, *registered):
                found[id(each)] = Owned(group, param)
    return found


def names_of_unsharded(tensor: Tensor) -> list[str]:
    """Returns the FQNs of the parameter that `tensor` is the unsharded one of; an empty list if there is none."""
    return next((param.names for group in all_groups() for param in group.params if param.unsharded is tensor), [])


def by_ranks(texts: Mapping[int, str]) -> str:
    """Returns each of the texts once, with the ranks that have it. `texts`: rank -> text."""
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return " and ".join(f"{text} on rank{'s' * (len(own) > 1)} {some_of(own)}" for text, own in ranks.items())


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Returns the first names, `most` of them, and how many more there are, for errors and reports."""
    names = [*names]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# Identity of a sharded parameter, which has no reference to its group -> that group, as `sharded_owner` has found it.
# It may be out of date. The dict is replaced, never changed.
_known: dict[int, weakref.ref[FSDPParamGroup]] = {}


def sharded_owner(leaf: Tensor) -> Owned | None:
    """Returns the owner of a sharded parameter, or None. It walks over all parameters if it does not know `leaf`."""
    global _known
    found = _find_in(leaf, _known)
    if found is None:
        known = {id(param.sharded): weakref.ref(group) for group in all_groups() for param in group.params}
        found, _known = _find_in(leaf, known), known
    return found


def _find_in(leaf: Tensor, known: dict[int, weakref.ref[FSDPParamGroup]]) -> Owned | None:
    reference = known.get(id(leaf))
    group = None if reference is None else reference()
    if group is not None:
        for param in group.params:
            if param.sharded is leaf:
                return Owned(group, param)
    return None


# Identity of a storage -> the parameter whose shard is there, or was in an earlier storage of the same identity.
_shard_in: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()


def note_shards(params: Sequence[FSDPParam], locals_: Sequence[Tensor]) -> None:
    """Remembers the storages of shards, and has a sharded parameter and its local tensor, one of `locals_`, share one
    version counter.
    """
    _shard_in.update(zip(map(storage_id, locals_), params, strict=True))
    share_versions(zip([param.sharded for param in params], locals_, strict=True))


def sharded_in(local: Tensor) -> FSDPParam | None:
    """Returns the parameter whose shard is in the storage of `local`, or None."""
    storage = storage_id(local)
    param = _shard_in.get(storage)
    return param if param is not None and storage_id(param.local) == storage else None
