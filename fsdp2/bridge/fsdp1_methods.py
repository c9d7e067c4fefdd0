"""Has the static methods of FSDP1's class see modules that fully_shard was applied to.

FullyShardedDataParallel's methods take any module, look in torch's table of composable states for modules of their own
class, and do nothing if there are none. A program that came from FSDP1 would save shards as a full state dict. So the
entries of fsdp2 in that table raise an error when such a method looks them up. `summon_full_params` may be for writes
or forwards, which are right without a gather: it warns then. After `patch_torch` it gathers.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch import nn

from ..engine.group import FSDPParamGroup
from ..engine.state import groups_below, groups_of, state_of

_CLASS = "FullyShardedDataParallel"
_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
_STATE = "torch.distributed.checkpoint.state_dict."
_FULL = "options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
_GET, _SET = (f"{_STATE}{verb}_optimizer_state_dict(model, optimizer, " for verb in ("get", "set"))
# Method -> what to write in its place. `set_state_dict_type` is also what the context `state_dict_type` calls.
_INSTEAD = {
    "set_state_dict_type": f"{_STATE}get_model_state_dict(model, {_FULL})",
    "optim_state_dict": f"{_GET}{_FULL})",
    "full_optim_state_dict": f"{_GET}{_FULL})",
    "sharded_optim_state_dict": f"{_GET[:-2]})",
    "optim_state_dict_to_load": f"{_SET}state_dict, options=StateDictOptions(full_state_dict=True))",
    "shard_full_optim_state_dict": f"{_SET}state_dict, options=StateDictOptions(full_state_dict=True))",
    "scatter_full_optim_state_dict": f"{_SET}state_dict, options=StateDictOptions(full_state_dict=True))",
    "flatten_sharded_optim_state_dict": f"{_SET}state_dict)",
    "summon_full_params": "fsdp2.full_params(model)",
    "fsdp_modules": "[module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]",
}
# Arguments of `summon_full_params` that say that whole parameters are read, or gradients.
_ONLY_READ = ("rank0_only", "offload_to_cpu", "with_grads")
# How many functions of torch are at most between such a method and the look-up in the table.
_DEPTH = 24


class StateRef(weakref.ref[Any]):
    """Is a weak reference to a state in torch's table, which no method of FSDP1's class may use."""

    __slots__ = ()

    def __call__(self) -> Any:
        state = super().__call__()
        if state is not None and _MODULE in sys.modules:
            _refuse_methods(state)
        return state


def _refuse_methods(state: Any) -> None:
    """Refuses the look-up of `state`, a TorchState, by a method of FSDP1's class.

    Raises:
        RuntimeError: such a method was called with a module that is none of FSDP1.
    """
    calls = [*_calls()]
    groups = state.state.groups
    if not calls or not any(group.params for group in groups):
        return
    name, given = calls[-1]  # the one that the program has called, which may call others
    module = next((value for value in given.values() if isinstance(value, nn.Module)), None)
    if isinstance(module, getattr(sys.modules[_MODULE], _CLASS)):
        return  # some modules inside are FSDP1's, which are meant
    if name == "summon_full_params" and given.get("writeback") and not any(map(given.get, _ONLY_READ)):
        warnings.warn(
            f"{_CLASS}.{name} gathers nothing of {type(module).__name__}, which fully_shard was applied to. Inside, "
            "parameters stay sharded: forwards gather them, and writes to these DTensors are kept. On every rank, call "
            "fsdp2.full_params(model) to read or save whole ones.",
            stacklevel=2,
        )
        return
    wanted = getattr(given.get("state_dict_type"), "name", "")
    instead = "model.state_dict()" if wanted == "SHARDED_STATE_DICT" else _INSTEAD[name]
    managed = next(param.name for group in groups for param in group.params)
    raise RuntimeError(
        f"{_CLASS}.{f'state_dict_type({wanted})' if wanted else name}: expected a {_CLASS}, got "
        f"{type(module).__name__}, which fully_shard was applied to (it manages {managed}). On every rank, call "
        f"{instead} instead."
    )


def _calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the calls of these methods that are under way: name and arguments, the innermost first."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(_DEPTH):
        if frame is None:
            return
        name = frame.f_code.co_name
        is_asked = name == "fsdp_modules" and _is_of_torch(frame.f_back)  # by checkpoints: what is there?
        if name in _INSTEAD and frame.f_globals.get("__name__") == _MODULE and not is_asked:
            yield name, frame.f_locals
        frame = frame.f_back


def _is_of_torch(frame: FrameType | None) -> bool:
    name: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


def replace_summon() -> Callable[[], None]:
    """Has `FullyShardedDataParallel.summon_full_params` gather sharded modules. Returns a function that undoes it.

    A block with `writeback=True` written out is for writes: they are kept, and no module of it can compute inside. In
    other blocks modules can compute, and writes raise.
    """
    fsdp1 = getattr(sys.modules[_MODULE], _CLASS)
    written = vars(fsdp1)["summon_full_params"]
    summon = staticmethod(partial(_summon, fsdp1.summon_full_params, fsdp1))
    fsdp1.summon_full_params = summon

    def undo() -> None:
        if vars(fsdp1)["summon_full_params"] is summon:
            fsdp1.summon_full_params = written

    return undo


def _summon(
    original: Callable[..., AbstractContextManager[Any]],
    fsdp1: type,
    module: Any,
    recurse: bool = True,
    writeback: bool | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> AbstractContextManager[Any]:
    from .. import full_params

    is_for_writes = writeback is True
    writeback = writeback is not False  # FSDP1's default is True
    groups = _groups_in(module, recurse)
    if not groups:
        return original(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads)
    options: dict[str, Any] = {}
    if rank0_only or offload_to_cpu or is_for_writes:
        options = {"writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
    if with_grads:  # FSDP1's default of `writeback` says nothing of writes
        options |= {"with_grads": True, "writeback": is_for_writes}
    # Else not the copies that `writeback` needs: the default says nothing of writes, and forwards may run inside.
    ours = partial(full_params, module, recurse=recurse, **options)
    if not any(isinstance(each, fsdp1) for each in module.modules()):
        return ours()
    inner: list[Any] = [each for each in module.modules() if isinstance(each, fsdp1)]
    outer = [each for each in inner if not any(each is not other and each in {*other.modules()} for other in inner)]
    theirs = [partial(original, each, recurse, writeback, rank0_only, offload_to_cpu) for each in outer]
    return _all_of([*theirs, ours])


@contextmanager
def _all_of(calls: list[Callable[[], Any]]) -> Iterator[None]:
    """Enters what all calls return: some parameters are FSDP1's, and some of fully_shard."""
    if not calls:
        yield
        return
    with calls[0](), _all_of(calls[1:]):
        yield


def _groups_in(module: Any, recurse: bool) -> list[FSDPParamGroup]:
    """Returns the groups with parameters of `module`, and, with `recurse`, of the sharded modules inside it."""
    if not isinstance(module, nn.Module) or not (recurse or state_of(module) is not None):
        return []
    return [group for group in (groups_below(module) if recurse else groups_of(module)) if group.params]
