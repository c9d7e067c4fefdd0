"""Defines fsdp2 without some of its checks, or with ranks that reach a consensus, to measure what these cost.

The numbers of a step stay the same.

    python -m benchmarks host --libraries fsdp2 unguarded
    python -m benchmarks gloo --libraries fsdp2 no-headers interrupted consensus
    python -m benchmarks.instructions --libraries fsdp2 unguarded no-checks no-written no-replaced no-saved no-calls

`fsdp2.set_checks` acts on all models of a process; the functions here act on one.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .gloo_threads import DEFAULT, read_policies, set_policies


def drop_checks(model: nn.Module) -> None:
    """Drops all observers of checks/."""
    drop_calls(model)
    _drop_observers(model, lambda each: type(each).__module__.startswith("fsdp2.checks."))


def drop_written(model: nn.Module) -> None:
    """Drops the check, after a forward, of writes to unsharded parameters."""
    _drop_observers(model, lambda each: type(each).__name__ in ("WrittenParameters", "UnseenWrites"))


def drop_replaced(model: nn.Module) -> None:
    """Drops the check, before a gather, of parameters or local tensors that were replaced, frozen or unfrozen."""
    for group in _groups(model):
        group._notice_changes = _nothing


def drop_saved(model: nn.Module) -> None:
    """Drops the check, when backward uses a saved tensor, of changes to it or to the parameter that it is a view of."""
    saved_tensors = _root(model).saved_tensors
    saved_tensors._pack = _Unchecked(saved_tensors).pack
    saved_tensors._unpack = _Unchecked(saved_tensors).unpack


def drop_versions(model: nn.Module) -> None:
    """Drops the counts of writes to each parameter that `drop_replaced` and `drop_saved` compare."""
    for group in _groups(model):
        group.registration.versions = tuple


def drop_calls(model: nn.Module) -> None:
    """Drops the check, when an inner module is called, that its parameters are unsharded."""
    for group in _groups(model):
        for entries, key, _ in group.registration.while_sharded:
            entries.pop(key, None)
        group.registration.while_sharded.clear()


def drop_headers(model: nn.Module) -> None:
    """Drops the check, on gloo, that each message is the one that this rank expects."""
    from fsdp2.collectives.gloo import PairwiseComm
    from fsdp2.engine.group import Comms

    for group in _groups(model):
        comms = [
            each if each is None or each.group is None else PairwiseComm(each.group, group.comm_label)
            for each in group.comms
        ]
        group.use_comms(Comms(*comms))


def interrupt_senders(model: nn.Module) -> None:
    """Lets gloo's threads take the core of a sending thread, as they do by default."""
    set_policies(dict.fromkeys(read_policies(), DEFAULT))


def add_consensus(model: nn.Module) -> None:
    """Makes the last block conditional: ranks reach a consensus before each gather and reduction of any group."""
    from fsdp2.engine.state import groups_of

    for group in groups_of(model.blocks[-1]):
        group.set(conditional=True)
    _root(model).state.drop_root()


GUARDS: dict[str, tuple[Callable[[nn.Module], None], ...]] = {
    "unguarded": (drop_checks, drop_replaced, drop_saved, drop_versions),
    "no-checks": (drop_checks,),
    "no-written": (drop_written,),
    "no-replaced": (drop_replaced,),
    "no-saved": (drop_saved,),
    "no-calls": (drop_calls,),
    "no-headers": (drop_headers,),
    "interrupted": (interrupt_senders,),
    "consensus": (add_consensus,),
}


class _Unchecked:
    """Has `SavedTensors._pack` and `_unpack` without the comparison: weights are noted, and gathered again."""

    def __init__(self, saved_tensors: Any) -> None:
        from fsdp2.torch_private.internals import storage_id

        self._of, self._storage_id = saved_tensors, storage_id

    def pack(self, tensor: Tensor) -> Any:
        kept = tensor if tensor.is_leaf else tensor.detach()
        storage = self._storage_id(kept)
        return kept, self._of.owners.get(storage)

    def unpack(self, saved: Any) -> Tensor:
        tensor, owner = saved
        if owner is not None:
            owner.before_unpack()
        return tensor


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _drop_observers(model: nn.Module, drops: Callable[[Any], bool]) -> None:
    events = _root(model).events
    events.set_observers(tuple(each for each in events.observers if not drops(each)))


def _root(model: nn.Module) -> Any:
    from fsdp2.engine.state import require_state

    return require_state(model).root


def _groups(model: nn.Module) -> Any:
    return _root(model).groups
