"""Lets modules of several fully_shard calls have one parameter (tied weights): one group owns it, all of them use it.

The first call cuts the parameter. It can't know which other modules have it, so it leaves a mark on the original. When
a later call meets the mark, it registers the first call's sharded parameter in its own module: the parameter gets one
more slot. So there is one sharded parameter and one unsharded leaf. Autograd completes the leaf's gradient when the
last module that uses it has had its backward, as in plain training. `connect_ties` has each of these modules unshard
the group that owns the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..engine.owners import Owned, all_groups
from ..torch_private.internals import local_if_any
from ..torch_private.rare_internals import Memory, memory_of

if TYPE_CHECKING:
    from ..engine.group import FSDPParamGroup
    from ..engine.parameter import FSDPParam
    from ..engine.state import FSDPState

# The attribute of a parameter that was sharded which says so.
MARK = "_fsdp2_original"


@dataclass(eq=False)
class Original:
    """The mark on a parameter that was sharded: what has become of it, and how it was then."""

    # The name of the parameter, with the class of the module that was sharded.
    name: str
    # The parameter that was cut from it.
    param: weakref.ref[FSDPParam]
    # Its version counter, and where it lay.
    content: tuple[int | None, Memory | None]
    requires_grad: bool

    def __reduce__(self) -> Any:
        return str, (self.name,)  # a copy of the parameter is another one, and no original


def mark_originals(
    originals: Iterable[weakref.ref[Any]], params: Iterable[FSDPParam], root: str
) -> list[weakref.ref[Any]]:
    """Marks the originals of `params` that something else still holds, perhaps another module. Returns weak references
    to them. `root`: the class of the call's module.
    """
    held = []
    for reference, param in zip(originals, params, strict=True):
        original = reference()
        if original is not None and original is not param.sharded:
            mark = Original(f"{root}'s {param.name}", weakref.ref(param), _content_of(original), original.requires_grad)
            setattr(original, MARK, mark)
            held.append(reference)
    return held


def original_of(parameter: Tensor) -> Original | None:
    """Returns the mark of a parameter that an earlier call has sharded, or None."""
    mark = getattr(parameter, MARK, None)
    return mark if isinstance(mark, Original) else None


def find_owner(mark: Original, inside: Iterable[FSDPState]) -> Owned | None:
    """Returns the parameter that an earlier call has cut from a marked one, with its group. None: its module is gone.

    It looks at the groups of `inside` first, then at all others.
    """
    param = mark.param()
    if param is None:
        return None
    groups = chain((group for state in inside for group in state.groups), all_groups())
    return next((Owned(group, param) for group in groups if any(each is param for each in group.params)), None)


def has_changed(parameter: Tensor, mark: Original, owner: FSDPParam) -> bool:
    """Returns True if a parameter was written to, moved or frozen since it was marked, and its owner's was not."""
    is_frozen = parameter.requires_grad not in (mark.requires_grad, owner.sharded.requires_grad)
    return is_frozen or mark.content != _content_of(parameter)


def _content_of(parameter: Tensor) -> tuple[int | None, Memory | None]:
    local = local_if_any(parameter)
    # Without memory there is nothing to write to; without a version counter nothing shows it.
    counts = not (local.is_meta or local.is_inference())
    return local._version if counts else None, memory_of(local)


def connect_ties(states: Sequence[FSDPState]) -> None:
    """Has forwards of each of `states`, which are of one root, unshard all groups that own parameters of its modules.

    It reads what slots parameters have, so that copies of a model are connected as the model is.
    """
    candidates = []
    for state in states:
        state.use_tied_groups(())
        for group in state.groups:
            group.share_with(())
            num_slots = len(group.registration.watched[0])
            if num_slots > len(group.params):
                candidates.append(group)
    if not candidates:
        return
    # Parts come behind the states around them: these have the same modules.
    state_of_module = {module: state for state in states for module in state.own_modules()}
    shared: dict[FSDPState, list[FSDPParamGroup]] = {}
    for group in candidates:
        slots = [slot for param in group.params for slot in param.slots]
        found = dict.fromkeys(state_of_module.get(slot.module) for slot in slots)
        group.share_with(state for state in found if state is not None and state is not group.state)
        for state in group.sharing_states:
            shared.setdefault(state, []).append(group)
    for state, groups in shared.items():
        state.use_tied_groups(groups)
