"""Refuses to prune or parametrize a parameter of a module that is sharded already, or to remove a parametrization.

Each of these replaces the parameter. Torch's error is that it can't flatten sharded tensors, or that a class has no
such attribute, or it raises none, and the next forward lacks the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from ..bridge.when_imported import when_imported
from ..engine.owners import owners_by_id, sharded_owner
from .switches import is_on


def refuse_reparametrization_after() -> None:
    """Makes torch.nn.utils' prune and parametrize raise errors that say what to do."""
    when_imported("torch.nn.utils.prune", _check_pruning)
    when_imported("torch.nn.utils.parametrize", _check_parametrizations)


def _check_pruning(prune: ModuleType) -> None:
    in_one, in_all = prune.BasePruningMethod.apply.__func__, prune.global_unstructured

    @wraps(in_one)
    def apply(cls: type, module: nn.Module, name: str, *args: Any, **options: Any) -> Any:
        _refuse_pruning([(module, name)])
        return in_one(cls, module, name, *args, **options)

    @wraps(in_all)
    def global_unstructured(parameters: Any, *args: Any, **options: Any) -> Any:
        parameters = list(parameters)
        _refuse_pruning(parameters)
        return in_all(parameters, *args, **options)

    prune.BasePruningMethod.apply = classmethod(apply)
    prune.global_unstructured = global_unstructured  # type: ignore[attr-defined]


def _refuse_pruning(slots: Iterable[tuple[nn.Module, str]]) -> None:
    """Refuses to prune sharded parameters. An unsharded parameter may be pruned, if that is made permanent.

    Raises:
        RuntimeError: a sharded parameter is registered in one of `slots`.
    """
    for module, name in slots if is_on("reparametrize-after") else ():
        param = module._parameters.get(name)
        owner = None if param is None else sharded_owner(param)
        if owner is not None:
            raise RuntimeError(
                f"{owner.param.name}: expected a plain parameter to prune, got a sharded one. Prune before "
                "fully_shard, or inside `with fsdp2.full_params(module, writeback=True):`, then prune.remove."
            )


def _check_parametrizations(parametrize: ModuleType) -> None:
    for name in ("register_parametrization", "remove_parametrizations"):
        setattr(parametrize, name, _checked(getattr(parametrize, name)))


def _checked(change: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(change)
    def checked(module: nn.Module, tensor_name: str, *args: Any, **options: Any) -> nn.Module:
        _refuse_change(change.__name__, module, tensor_name)
        return change(module, tensor_name, *args, **options)

    return checked


def _refuse_change(what: str, module: nn.Module, name: str) -> None:
    """Refuses to change a parameter that fully_shard manages.

    Raises:
        RuntimeError: the parameter is one, or is computed from one.
    """
    if not is_on("reparametrize-after"):
        return
    originals = getattr(module, "parametrizations", {})
    params = [module._parameters.get(name), *(originals[name].parameters(False) if name in originals else ())]
    owners = owners_by_id()
    owner = next((owners[id(param)] for param in params if param is not None and id(param) in owners), None)
    if owner is not None:
        raise RuntimeError(
            f"{owner.param.name}: {what} would replace a parameter that fully_shard manages. Call it before "
            "fully_shard. For a trained model, load its full state dict into one that is not sharded, and call it "
            "there."
        )
