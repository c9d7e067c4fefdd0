"""Has the static methods of FSDP1's class see modules that fully_shard was applied to.

FullyShardedDataParallel's methods take any module, look for modules of their own class in it, and do nothing if there
are none. A program that came from FSDP1 would save shards as a full state dict.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from ..dtensor.switches import switched
from ..engine.group import FSDPParamGroup
from ..engine.state import groups_below, groups_of, state_of
from .when_imported import when_imported

NAME = "fsdp1-methods"
_CLASS = "FullyShardedDataParallel"
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
    "clip_grad_norm_": "fsdp2.clip_grad_norm_(model.parameters(), max_norm)",
    "no_sync": "model.set_requires_gradient_sync(False)",
}


def follow_fsdp1_methods() -> None:
    """Makes `summon_full_params` of FSDP1's class gather sharded modules, and its other methods raise an error that
    says what to write instead.

    A block with `writeback=True` written out is for writes: they are kept, and no module of it can compute inside. In
    other blocks modules can compute, and writes raise.
    """
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _replace_methods)


def _replace_methods(imported: ModuleType) -> None:
    fsdp1: Any = imported.FullyShardedDataParallel
    for name in _INSTEAD:
        _replace(fsdp1, name, partial(_refusing, name, fsdp1, imported.StateDictSettings))
    _replace(fsdp1, "summon_full_params", partial(_summoning, fsdp1))


def _replace(fsdp1: Any, name: str, make: Callable[..., Callable[..., Any]]) -> None:
    """Replaces a method, which stays static if it is."""
    written = vars(fsdp1).get(name)
    if written is not None:
        original = getattr(fsdp1, name)
        fixed = switched(NAME, original, make(original))
        setattr(fsdp1, name, staticmethod(fixed) if isinstance(written, staticmethod) else fixed)


def _refusing(name: str, fsdp1: Any, settings_of: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        module = next((value for value in given.values() if isinstance(value, nn.Module)), None)
        groups = _groups_in(module, recurse=True)
        if not groups or isinstance(module, fsdp1):
            return original(*args, **kwargs)
        wanted = getattr(given.get("state_dict_type"), "name", "")
        if wanted == "SHARDED_STATE_DICT":  # which state_dict() gives anyway
            return settings_of(given["state_dict_type"], None, None)
        asked = f"state_dict_type({wanted})" if wanted else name
        raise RuntimeError(
            f"{_CLASS}.{asked}: expected a {_CLASS}, got {type(module).__name__}, which fully_shard was applied to (it "
            f"manages {groups[0].params[0].name}). On every rank, call {_INSTEAD[name]} instead."
        )

    return refuse


def _summoning(fsdp1: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def summon(
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
            found: AbstractContextManager[Any] = original(
                module, recurse, writeback, rank0_only, offload_to_cpu, with_grads
            )
            return found
        if with_grads:
            raise NotImplementedError(
                f"{_CLASS}.summon_full_params(with_grads=True) of {type(module).__name__}, which fully_shard was "
                f"applied to (it manages {groups[0].params[0].name}). Call p.grad.full_tensor() of each parameter, on "
                "every rank."
            )
        options: dict[str, Any] = {}
        if rank0_only or offload_to_cpu or is_for_writes:
            options = {"writeback": writeback, "rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu}
        # Else not the copies that `writeback` needs: the default says nothing of writes, and forwards may run inside.
        ours = partial(full_params, module, recurse=recurse, **options)
        if not any(isinstance(each, fsdp1) for each in module.modules()):
            return ours()
        return _both(partial(original, module, recurse, writeback, rank0_only, offload_to_cpu), ours)

    return summon


@contextmanager
def _both(one: Callable[[], Any], other: Callable[[], Any]) -> Iterator[None]:
    """Enters what both calls return: some parameters are FSDP1's, and some of fully_shard."""
    with one(), other():
        yield


def _groups_in(module: Any, recurse: bool) -> list[FSDPParamGroup]:
    """Returns the groups with parameters of `module`, and, with `recurse`, of the sharded modules inside it."""
    if not isinstance(module, nn.Module) or not (recurse or state_of(module) is not None):
        return []
    return [group for group in (groups_below(module) if recurse else groups_of(module)) if group.params]
