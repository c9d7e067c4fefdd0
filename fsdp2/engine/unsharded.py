"""Owns the unsharded parameters of one group: their memory, which gathers fill and reshard frees, and who may read it.

An unsharded parameter is one object for as long as its module is sharded, while its data comes and goes. Until the next
gather has filled the memory, its class refuses reads (freed.py). Where autograd may have saved it unseen by the
engine's hooks, its version counter is moved on as well: autograd notes the counter of what it saves, and refuses to use
it for a gradient when the counter is another one. Memory that something outside the engine still uses is freed later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import gt, sub
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..parameters.freed import freed_class
from ..torch_private import internals
from ..torch_private.internals import local_of, no_torch_function, storage_uses, version_of
from ..torch_private.rare_internals import set_versions

if TYPE_CHECKING:
    from ..parameters.subclasses import SubclassGather
    from .layout import GatherLayout
    from .parameter import FSDPParam

# How many views of each parameter, on average, are kept for the next step.
_VIEWS_OF_PARAMETER = 4
# A view of unsharded parameters: its dtype, its shape, its stride, and its offset in elements.
Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


class UnshardedParameters:
    """Answers for the unsharded parameters of one group: whether the data is there, which were written to, and what
    else than the engine can read them. The group calls `allow_reads` when a gather has filled them, and `free`.

    The parameters of the group that say themselves how they are gathered lie elsewhere (`self_gather`, subclasses.py);
    they are the last ones.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        # Identity of an unsharded parameter -> its index.
        self.indices: dict[int, int] = {}
        # Bytes of the memory, with padding and with segments that are gathered packed; identities of the storages.
        self.nbytes = 0
        self.storage_ids: frozenset[int] = frozenset()
        self._params: Sequence[FSDPParam] = ()

        # ---- the memory
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.storage = self.memory.untyped_storage()
        self.storage_id: int | None = None
        self._resize: Callable[[torch.UntypedStorage], object] | None = None
        # True while the storage has its size.
        self.is_allocated = False
        # True if the user has chosen to keep the memory when the parameters are resharded.
        self.keeps_storage = False
        # True if neither the user keeps the memory, nor is it that of the shards.
        self.is_freed_at_times = False
        # How many tensors and Python objects of the engine use the storage: the parameters, and prepared views.
        self._num_uses = 0

        # ---- reads
        self.are_readable = True
        # (parameter, its class, its class while reads are refused), for those whose memory is freed at times.
        self._classes: list[tuple[Any, type, type]] = []
        # How many references there are to each parameter in a forward that has left it nowhere. None: count again.
        self.references: list[int] | None = None

        # ---- writes
        # True if autograd refuses parameters that it has saved, and that were freed since: those of graphs that a
        # backward builds (create_graph=True), or all of them where saved-tensor hooks are off.
        self.guards = False
        # The tensors whose version counters are compared, and the counters that they must have now.
        self.counted: tuple[Tensor, ...] = ()
        self.expected: tuple[int, ...] = ()
        self._valid: tuple[int, ...] = ()
        self._indices_of_counted: list[int] = []
        # The versions of the sharded parameters that the unsharded ones were last made of.
        self._made_of: tuple[int, ...] = ()

        # ---- views that autograd saves
        # Identity of the storage whose views are saved as descriptions. None: they are saved as they are.
        self.described_storage: int | None = None
        # Tensors over the memory, which share the parameters' version counters; and the bytes at which they begin.
        self._bases: list[Tensor] = []
        self._offsets: tuple[int, ...] = ()
        # True if some are complex numbers: their views may be conjugated.
        self._are_complex = False
        # The views that were made again: the next step saves the same ones.
        self.views: dict[Place, Tensor] = {}

    # ---- building

    def use_memory(self, memory: Tensor, resize: Callable[[torch.UntypedStorage], object] | None) -> None:
        """Puts the parameters into `memory`, allocated bytes, from now on. `resize`: allocates its storage again, which
        is freed between uses. None: the memory is that of the shards, and always there.
        """
        self.memory, self._resize = memory, resize
        self.storage, self.storage_id = memory.untyped_storage(), internals.storage_id(memory)
        self.is_allocated, self.is_freed_at_times, self.keeps_storage = True, resize is not None, False

    def drop_memory(self) -> None:
        """Lets all memory go: the parameters are elsewhere now."""
        self.use_memory(torch.empty(0, dtype=torch.uint8, device="cpu"), None)
        self.is_allocated, self.described_storage, self.nbytes = False, None, 0
        self._bases, self.views = [], {}

    def prepare(self, params: Sequence[FSDPParam], layout: GatherLayout, self_gather: SubclassGather | None) -> None:
        """Prepares for the unsharded parameters that `params` have now. Reads must be allowed."""
        self._params, self.parameters = params, [param.unsharded for param in params]
        self.indices = {id(unsharded): i for i, unsharded in enumerate(self.parameters)}
        self.references, self.views = None, {}
        self.storage_ids, self.nbytes = frozenset([internals.storage_id(self.memory)]), layout.unsharded_nbytes
        if self_gather is not None:
            self.storage_ids |= self_gather.storage_ids()
            self.nbytes += self_gather.nbytes
        inside = self.parameters[: len(layout.specs)] if self._resize is not None else []
        self._bases = [each.detach() if type(each) is nn.Parameter else _plain_base(each) for each in inside]
        self._offsets = layout.unsharded_offsets
        self._are_complex = any(spec.compute_dtype.is_complex for spec in layout.specs)
        self.note_uses()

    def note_uses(self) -> None:
        """Counts what uses the storage now as the engine's own: unsharded parameters, and prepared views."""
        self._num_uses = storage_uses(self.storage._cdata)

    def use_settings(self, keep_storage: bool) -> None:
        """Prepares to free the memory, unless the user wants to keep it (`keep_storage`), and to refuse reads then."""
        self.allow_reads()
        self.keeps_storage, self.is_freed_at_times = keep_storage, self._resize is not None and not keep_storage
        inside = self.parameters[: len(self._offsets)] if self.is_freed_at_times else []
        kinds = {kind: freed_class(kind) for kind in dict.fromkeys(map(type, inside))}
        rows = [(each, type(each), kinds[type(each)]) for each in inside]
        self._classes = [(each, kind, refusing) for each, kind, refusing in rows if refusing is not None]
        self.described_storage = self.storage_id if self.is_freed_at_times and not self._are_complex else None
        if not self.is_allocated:
            self.free()

    def watch_versions(self, params: Sequence[FSDPParam], made_of: tuple[int, ...]) -> None:
        """Compares the version counters of these unsharded parameters from now on. `made_of`: see `renew`."""
        tensors: list[Tensor] = [param.unsharded for param in params]
        locals_ = {i: local_of(each) for i, each in enumerate(tensors) if isinstance(each, DTensor)}
        self._params = params
        self.counted, self._indices_of_counted = (*tensors, *locals_.values()), [*range(len(tensors)), *locals_]
        self._made_of = made_of
        self.accept_versions()

    # ---- the memory

    @property
    def holds_memory(self) -> bool:
        """True if `free` would give memory back."""
        return self.is_allocated and self.is_freed_at_times

    def allocate(self) -> None:
        """Allocates the memory, unless it is there. Its content is undefined."""
        if not self.is_allocated and self._resize is not None:
            self._resize(self.storage)
            self.is_allocated = True

    def free(self, although_viewed: bool = False) -> bool:
        """Refuses reads, and frees the memory, unless it is that of the shards or the user keeps it. Returns False if
        it stays because something outside the engine uses it: a hook, a cache or a graph that has kept a view.

        What autograd saves through the engine's hooks is no such use, see SavedTensors. `although_viewed`: frees it
        also then. Reading such a view then reads freed memory.
        """
        if self.guards and not self.is_expired and not self.keeps_storage:
            self.expected = tuple(each + 1 for each in self._valid)
            increment_version(self.counted)
        if self.are_readable:
            self.are_readable = False
            for parameter, _, refusing in self._classes:
                parameter.__class__ = refusing
        if self.is_allocated and self.is_freed_at_times:
            if storage_uses(self.storage._cdata) > self._num_uses and not although_viewed:
                return False
            self.is_allocated = False
            self.storage.resize_(0)
        return True

    # ---- reads

    def allow_reads(self) -> None:
        """Lets the parameters be read until the next `free`: a gather has filled them, or they are to be built anew."""
        if not self.are_readable:
            self.are_readable = True
            for parameter, kind, _ in self._classes:
                parameter.__class__ = kind

    def are_kept(self) -> bool:
        """Returns True if the forward that has just run has left a parameter where something else than the engine can
        read it, and their memory is to be freed.
        """
        if not self.is_freed_at_times:
            return False
        in_cpp = map(
            internals.SHARED_IN_CPP.__le__, map(internals.cpp_references, self.parameters)
        )  # by autograd's graph
        references = list(map(sub, map(getrefcount, self.parameters), in_cpp))
        if references == self.references:
            return False
        self.references = least = list(map(min, references, self.references or references))
        return any(map(gt, references, least))

    def forget_references(self) -> None:
        """Counts references to the parameters anew in the next forward: users, or observers, may have got some."""
        self.references = None

    # ---- writes

    @property
    def is_expired(self) -> bool:
        """True if autograd refuses what it has saved of the parameters, because they were freed, until `renew`."""
        return self.expected is not self._valid

    def written(self) -> list[str]:
        """Returns the names of the parameters that were written to since the last call: resharding would undo it."""
        before, now = self.expected, self._versions()
        if now == before:
            return []
        self.accept_versions()
        changed = [i for i, old, new in zip(self._indices_of_counted, before, now, strict=True) if old != new]
        return [self._params[i].name for i in dict.fromkeys(changed)]

    def guard(self, made_of: tuple[int, ...]) -> None:
        """Has autograd refuse parameters that are freed, from now on. If the data is there, it was made of these
        versions of the sharded parameters.
        """
        self.guards, self._made_of = True, made_of
        self.accept_versions()

    def accept_versions(self) -> None:
        """Expects the counters to be as they are now."""
        self._valid = self.expected = self._versions()

    def renew(self, made_of: tuple[int, ...]) -> None:
        """Lets autograd use what it has saved, if the data is the same again. `made_of`: the versions of the sharded
        parameters that the data was made of.
        """
        before, self._made_of = self._made_of, made_of
        if before != made_of:
            changed = {i for i, (old, new) in enumerate(zip(before, made_of, strict=False)) if old != new}
            if len(self._params) in changed:  # some were replaced
                changed.update(self._indices_of_counted)
            rows = zip(self._indices_of_counted, self._valid, strict=True)
            self._valid = tuple(valid + 2 * (i in changed) for i, valid in rows)
        elif not self.is_expired:
            return
        self.expected = self._valid
        set_versions(self.counted, self._valid)

    def _versions(self) -> tuple[int, ...]:
        with no_torch_function():  # also of parameters that refuse reads
            return tuple(map(version_of, self.counted))

    # ---- views that autograd saves

    def make_view(self, place: Place) -> Tensor:
        """Makes the view that `place` describes. It shares the version counter of the parameter in which it begins, and
        is kept in `views`.
        """
        dtype, shape, stride, offset = place
        base = self._bases[bisect_right(self._offsets, offset * dtype.itemsize) - 1]
        view = (base if base.dtype is dtype else base.view(dtype)).as_strided(shape, stride, offset)
        if len(self.views) < _VIEWS_OF_PARAMETER * len(self._bases):
            self.views[place] = view
            self._num_uses += 1
        return view

    def changed_names(
        self, weight: Tensor | int | tuple[Any, ...], before: tuple[int, ...], now: tuple[int, ...]
    ) -> list[str]:
        """Returns the names of the parameters that `weight` may be a view of, if their versions differ between `before`
        and `now`; all names, if some parameters were replaced.
        """
        if before[-1:] != now[-1:]:  # or nothing is known of before
            return [param.name for param in self._params]
        return [self._params[i].name for i in self.indices_of(weight) if before[i] != now[i]]

    def indices_of(self, weight: Tensor | int | tuple[Any, ...]) -> range:
        """Returns the indices of the parameters among which is the one that `weight` is a view of."""
        if isinstance(weight, int):
            return range(weight, weight + 1)
        if isinstance(weight, tuple):
            return self._index_at(weight[3] * weight[0].itemsize)
        num_inside, num_params = len(self._offsets), len(self._params)
        if num_inside < num_params and internals.storage_id(weight) != self.storage_id:
            return range(num_inside, num_params)  # which of the self_gather's parameters is not known
        weight = internals.local_if_any(weight)
        return self._index_at(int(weight.storage_offset()) * weight.element_size())

    def _index_at(self, offset: int) -> range:
        i = bisect_right(self._offsets, offset) - 1
        return range(i, i + 1)


def _plain_base(unsharded: Tensor) -> Tensor:
    """Returns a plain tensor over the memory of an unsharded parameter, which shares its version counter."""
    if internals.has_no_dispatch(type(unsharded)):
        return internals.plain_values(unsharded)
    return internals.local_if_any(unsharded).detach()


def refuse_written(names: Sequence[str]) -> None:
    """Raises RuntimeError for parameters that were written to, if there are any."""
    if names:
        raise RuntimeError(
            f"{', '.join(names)} was modified in place during forward, or between unshard() and it. The change is lost "
            "when the parameter is sharded again: between steps, modify the sharded parameter or write inside `with "
            "fsdp2.full_params(module, writeback=True):`; or keep such a value in a buffer."
        )
