"""fsdp2 without what watches its users, or with ranks that meet: to measure what that costs. A step's numbers stay the
same.

    python -m benchmarks host --libraries fsdp2 unguarded
    python -m benchmarks gloo --libraries fsdp2 no-headers interrupted meeting
    python -m benchmarks.instructions --libraries fsdp2 unguarded no-written no-replaced no-saved no-calls
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .gloo_threads import DEFAULT, read_policies, set_policies


def drop_written(model: nn.Module) -> None:
    """After a forward: was a full parameter written to?"""
    for state in _states(model):
        state.group.versions.check_written = state.note_content = _nothing


def drop_replaced(model: nn.Module) -> None:
    """Before a gather: was a parameter or its local tensor replaced, frozen or thawed?"""
    for state in _states(model):
        state.group._notice_changes = _nothing


def drop_saved(model: nn.Module) -> None:
    """When backward uses a saved tensor: was it, or the parameter that it is of, changed since?"""
    for state in _states(model):
        state.note_versions = _nothing
        saved_tensors = state.context.saved_tensors
        saved_tensors._pack = _Unchecked(saved_tensors).pack
        saved_tensors._unpack = _Unchecked(saved_tensors).unpack


def drop_versions(model: nn.Module) -> None:
    """What `drop_replaced` and `drop_saved` compare: how often has each parameter been written to?"""
    for state in _states(model):
        state.group.versions.sharded = tuple


def drop_calls(model: nn.Module) -> None:
    """When a module inside is called: are its parameters gathered?"""
    for state in _states(model):
        state.group.watch_calls(None)


def drop_headers(model: nn.Module) -> None:
    """On gloo, with each message: is it what this rank expects?"""
    for state in _states(model):
        group, reduction = state.group, state.group.gradients.reduction
        group._comm = reduction.shards = group._plain_comm = _headerless(group._plain_comm)


def interrupt_senders(model: nn.Module) -> None:
    """On gloo: its threads take the core of whoever sends, as they do by default."""
    set_policies(dict.fromkeys(read_policies(), DEFAULT))


def add_meetings(model: nn.Module) -> None:
    """The last block may be left out: before each gather and reduction of any, ranks meet."""
    (state,) = _states(model.blocks[-1])
    state.conditional = True
    state.context._take_over({module: name for name, module in model.named_modules()})


GUARDS: dict[str, tuple[Callable[[nn.Module], None], ...]] = {
    "unguarded": (drop_written, drop_replaced, drop_saved, drop_versions, drop_calls),
    "no-written": (drop_written,),
    "no-replaced": (drop_replaced,),
    "no-saved": (drop_saved,),
    "no-calls": (drop_calls,),
    "no-headers": (drop_headers,),
    "interrupted": (interrupt_senders,),
    "meeting": (add_meetings,),
}


class _Unchecked:
    """`SavedTensors._pack` and `_unpack`, but for the comparison: weights are noticed, and gathered again."""

    def __init__(self, saved_tensors: Any) -> None:
        from fsdp2.ext.compat import storage_id

        self._of, self._storage_id = saved_tensors, storage_id

    def pack(self, tensor: Tensor) -> Any:
        kept = tensor if tensor.is_leaf else tensor.detach()
        storage = self._storage_id(kept)
        return kept, self._of.owners.get(storage) or (self._of._outer and self._of._owner_in_outer(storage))

    def unpack(self, saved: Any) -> Tensor:
        tensor, owner = saved
        if owner is not None:
            self._of._before_use(owner)
        return tensor


def _headerless(comm: Any) -> Any:
    from fsdp2.core.comm import AllWork

    def exchange(_kind: str, _tensors: Any, outgoing: Any, incoming: Any) -> AllWork:
        works = []
        for to, source in comm._peers:
            for out, into in zip(outgoing, incoming, strict=True):
                works += [comm.group.send([out[to]], to, 0), comm.group.recv([into[source]], source, 0)]
        return AllWork(works, [])

    comm._exchange = exchange
    return comm


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _states(model: nn.Module) -> Any:
    from fsdp2.core.state import states_below

    return states_below(model)
