"""Who has written to the parameters of a group, told by autograd's version counters.

Every tensor counts the in-place operations on it, views together with what they are views of. Autograd notes the count
of what it saves, and refuses to use it for a gradient when the count is another by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from . import dtensor_compat, torch_compat
from ..core.parameter import FSDPParam

_version_of, requires_grad_of = attrgetter("_version"), attrgetter("requires_grad")
_uncounted = count()

# Identity of a storage -> the parameter whose shard lies there, or lay in another of the same identity.
_lying_in: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()


def sharded_in(local: Tensor) -> FSDPParam | None:
    """The parameter in whose shard's memory `local` lies, if it is watched."""
    storage = torch_compat.storage_id(local)
    param = _lying_in.get(storage)
    return param if param is not None and torch_compat.storage_id(param.local) == storage else None


def share_count(view: DTensor) -> None:
    """Operations on the local tensor of `view`, if it is one of a sharded parameter, count as those on the parameter:
    DTensor makes it below autograd, and so with a count that starts anew.
    """
    local = dtensor_compat.local_of(view)
    param = sharded_in(local) if type(local) is Tensor else None
    if param is not None and param.local is not local:
        dtensor_compat.count_together([(param.sharded, local)])


def refuse_written(names: Sequence[str]) -> None:
    """Raise RuntimeError if there are any."""
    if names:
        raise RuntimeError(
            f"{', '.join(names)} was modified in place during forward, or between unshard() and it. The change is lost "
            "when the parameter is sharded again: modify the sharded parameter between steps, write inside `with "
            "fsdp2.full_params(module, writeback=True):`, or keep such a value in a buffer."
        )


class GroupVersions:
    """The version counters of one group.

    `guards`: let autograd refuse weights that it saved and that were freed since, until they are gathered again. It
    needs no hooks: the counts of full parameters are moved on while they are freed, and back if the sharded ones have
    not changed.
    `is_expired`: they are moved on.
    """

    def __init__(self) -> None:
        self.guards = self.is_expired = False
        self._params: Sequence[FSDPParam] = ()
        self._sharded: list[Tensor] = []
        # What tells how many operations on each of them there were, and, as the last, replacements.
        self._counting: list[Tensor] = []
        # Counts how often parameters were replaced.
        self._replacements = torch.empty(0, device="cpu")
        self._full: tuple[Tensor, ...] = ()
        # Of each of the full ones: its parameter's place in the group.
        self._places: list[int] = []
        # The counts of the full ones: while their data is there, and while it isn't, where that is guarded.
        self._valid: tuple[int, ...] = ()
        self._expired: tuple[int, ...] = ()
        # The counts of the sharded ones when the full ones were last made of them.
        self._made_of: tuple[int, ...] = ()
        # Parameters that were given memory with nothing in it: their local tensors of then, and the counts.
        self._unwritten: list[tuple[FSDPParam, weakref.ref[Tensor], int]] = []

    def watch(self, params: Sequence[FSDPParam]) -> None:
        """Follow the faces that these have now."""
        self._params = params
        self._sharded, locals_ = [param.sharded for param in params], [param.local for param in params]
        _lying_in.update(zip(map(torch_compat.storage_id, locals_), params, strict=True))
        self._counting = dtensor_compat.count_together(zip(self._sharded, locals_, strict=True))
        self._counting.append(self._replacements)
        faces = [(face, i) for i, param in enumerate(params) for face in _with_local(param.full)]
        self._full, self._places = tuple(face for face, _ in faces), [i for _, i in faces]
        self._made_of = self.sharded()
        self.accept()

    def guard(self, made_of: tuple[int, ...]) -> None:
        """From now on let autograd refuse them. Those whose data is there were made of these versions."""
        self.guards, self._made_of = True, made_of
        self.accept()

    def note_replacement(self) -> None:
        """Others have taken the place of parameters, or of their local tensors."""
        increment_version(self._replacements)

    def accept(self) -> None:
        """Take what the counts of the full parameters are now for valid."""
        self.is_expired = False
        self._set_valid(tuple(map(_version_of, self._full)))

    def sharded(self) -> tuple[int, ...]:
        """One per sharded parameter, which grows with each in-place operation on it, or an optimizer's step; and then
        one that grows with replacements.
        """
        try:
            return tuple(map(_version_of, self._counting))
        except RuntimeError:  # some were made in inference mode
            return tuple(map(_count, self._counting))

    def trainable(self) -> list[bool]:
        """Which of the sharded parameters are."""
        with dtensor_compat.no_torch_function():
            return list(map(requires_grad_of, self._sharded))

    def note_unwritten(self, params: Sequence[FSDPParam]) -> None:
        """What was done to these, which were on the meta device, has left them without values."""
        self._unwritten += [(param, weakref.ref(param.local), count_of(param)) for param in params]

    def unwritten(self) -> list[FSDPParam]:
        """Those of them that no in-place operation has written to since, and nobody has replaced, as far as counts
        tell: collectives don't count.
        """
        with dtensor_compat.no_torch_function():
            left = [each for each in self._unwritten if each[1]() is each[0].local and count_of(each[0]) == each[2]]
        self._unwritten = left
        return [param for param, *_ in left]

    def take_written(self) -> list[str]:
        """Names of full parameters that were written to since the last call: sharding again would undo it."""
        expected, found = self._expired if self.is_expired else self._valid, tuple(map(_version_of, self._full))
        if found == expected:
            return []
        changed = [i for i, old, new in zip(self._places, expected, found, strict=True) if old != new]
        self.accept()
        return [self._params[i].name for i in dict.fromkeys(changed)]

    def expire(self) -> None:
        """The full parameters' data is given up: what autograd has saved of it is not valid, until `renew`."""
        if not self.is_expired:
            self.is_expired = True
            increment_version(self._full)

    def renew(self, sharded: tuple[int, ...]) -> None:
        """The full parameters' data is there, made of `sharded` versions: what autograd has saved of it is valid, if it
        is the same data.
        """
        before, self._made_of = self._made_of, sharded
        if before != self._made_of:
            changed = {i for i, (old, new) in enumerate(zip(before, sharded, strict=False)) if old != new}
            if len(self._params) in changed:  # some were replaced
                changed.update(self._places)
            self._set_valid(
                tuple(valid + 2 * (i in changed) for i, valid in zip(self._places, self._valid, strict=True))
            )
        elif not self.is_expired:
            return
        self.is_expired = False
        torch_compat.set_versions(self._full, self._valid)

    def _set_valid(self, counts: tuple[int, ...]) -> None:
        self._valid, self._expired = counts, tuple(each + 1 for each in counts)


def _count(tensor: Tensor) -> int:
    """Its version; one made in inference mode has none, and is taken for changed whenever anybody looks."""
    return next(_uncounted) if tensor.is_inference() else tensor._version


def count_of(param: FSDPParam) -> int:
    """Of its sharded face."""
    return _count(param.sharded)


def _with_local(full: Tensor) -> tuple[Tensor, ...]:
    return (full, dtensor_compat.local_of(full)) if isinstance(full, DTensor) else (full,)
