"""Finds writes to unsharded parameters by their version counters, and has autograd refuse those that were freed.

Autograd notes the counter of what it saves, and refuses to use it for a gradient when the counter has moved on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..torch_private.beyond_step import set_versions
from ..torch_private.compat import local_of, no_torch_function, version_of

if TYPE_CHECKING:
    from .parameter import FSDPParam


class UnshardedVersions:
    """Holds the counters of the unsharded parameters of one group, until these are other objects.

    `guards`: autograd refuses weights that it saved and that were freed since, until they are gathered again: those of
    graphs that a backward builds (create_graph=True), or all of them if saved-tensor hooks are off. It needs no hooks:
    the counters are moved on while the memory is freed, and back if the sharded parameters have not changed.
    `is_expired`: they are moved on. `made_of`: the counters of the sharded parameters.
    """

    def __init__(self, params: Sequence[FSDPParam], made_of: tuple[int, ...], guards: bool = False) -> None:
        self._params = params
        self.guards, self.is_expired = guards, False
        tensors: list[Tensor] = [param.unsharded for param in params]
        locals_ = {i: local_of(each) for i, each in enumerate(tensors) if isinstance(each, DTensor)}
        self.tensors, self._indices = (*tensors, *locals_.values()), [*range(len(tensors)), *locals_]
        # The counters while the data is there, and while it isn't, where that is guarded.
        self.valid: tuple[int, ...] = ()
        self.expired: tuple[int, ...] = ()
        # The counters of the sharded parameters when the unsharded ones were last made of them.
        self._made_of = made_of
        self.accept()

    def guard(self, made_of: tuple[int, ...]) -> None:
        """Has autograd refuse them from now on. Those whose data is there were made of these versions."""
        self.guards, self._made_of = True, made_of
        self.accept()

    def accept(self) -> None:
        """Takes what the counters are now for valid."""
        self.is_expired = False
        self._set_valid(self._now())

    def _now(self) -> tuple[int, ...]:
        with no_torch_function():  # also of freed ones
            return tuple(map(version_of, self.tensors))

    def take_written(self) -> list[str]:
        """Returns the names of those that were written to since the last call: resharding would undo it."""
        expected, found = self.expired if self.is_expired else self.valid, self._now()
        if found == expected:
            return []
        changed = [i for i, old, new in zip(self._indices, expected, found, strict=True) if old != new]
        self.accept()
        return [self._params[i].name for i in dict.fromkeys(changed)]

    def expire(self) -> None:
        """Notes that the data is freed: what autograd has saved of it is not valid, until `renew`."""
        if not self.is_expired:
            self.is_expired = True
            increment_version(self.tensors)

    def renew(self, sharded: tuple[int, ...]) -> None:
        """Notes that the data is there, made of `sharded` versions: what autograd has saved of it is valid, if it is
        the same data.
        """
        before, self._made_of = self._made_of, sharded
        if before != self._made_of:
            changed = {i for i, (old, new) in enumerate(zip(before, sharded, strict=False)) if old != new}
            if len(self._params) in changed:  # some were replaced
                changed.update(self._indices)
            self._set_valid(
                tuple(valid + 2 * (i in changed) for i, valid in zip(self._indices, self.valid, strict=True))
            )
        elif not self.is_expired:
            return
        self.is_expired = False
        set_versions(self.tensors, self.valid)

    def _set_valid(self, counters: tuple[int, ...]) -> None:
        self.valid, self.expired = counters, tuple(each + 1 for each in counters)


def refuse_written(names: Sequence[str]) -> None:
    """Raises RuntimeError for parameters that were written to, if there are any."""
    if names:
        raise RuntimeError(
            f"{', '.join(names)} was modified in place during forward, or between unshard() and it. The change is lost "
            "when the parameter is sharded again: between steps, modify the sharded parameter or write inside `with "
            "fsdp2.full_params(module, writeback=True):`; or keep such a value in a buffer."
        )
