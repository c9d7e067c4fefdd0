"""Finds the parameters that a user has passed to `full_params`: those of a module, one, or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..shards.find import find_params, is_sharded, shards_of
from ..shards.protocol import ShardGroup, ShardParam


class GivenParams(NamedTuple):
    """Holds the parameters that a user has passed, with their owners.

    `names`: FQNs of a module's parameters. None: parameters were passed. `is_one`: a single parameter was passed.
    """

    tensors: list[Tensor]
    owned: list[ShardParam | None]
    names: list[str] | None
    is_one: bool

    @classmethod
    def of(cls, module_or_params: Any, recurse: bool) -> GivenParams:
        """Returns the parameters that `full_params` was called with.

        Raises:
            TypeError, ValueError: see `full_params`.
        """
        if isinstance(module_or_params, nn.Module):
            shards = shards_of(module_or_params)
            named = list(_named_parameters(module_or_params, recurse))
            tensors = [tensor for _, tensor in named]
            given = cls(tensors, [*map(shards.find, tensors)], [name for name, _ in named], False)
            if not any(given.owned):
                kind = type(module_or_params).__name__
                raise ValueError(f"module_or_params: expected a module with sharded parameters, {kind} has none")
            return given
        if not recurse:
            raise ValueError("recurse: expected True with parameters, got False")
        is_one = isinstance(module_or_params, Tensor)
        tensors = _as_list(module_or_params)
        given = cls(tensors, [*find_params(tensors)], None, is_one)
        for tensor, owned in zip(given.tensors, given.owned, strict=True):
            if owned is None:
                raise ValueError(
                    f"module_or_params: expected parameters that fully_shard manages, got a {type(tensor).__name__} of "
                    f"shape {tuple(tensor.shape)} that isn't one. Of torch's FSDP2, pass the module that has it"
                )
        return given

    def by_group(self) -> dict[ShardGroup, list[ShardParam]]:
        """Returns each group with those of its parameters that were passed, in the order in which they were passed."""
        found: dict[ShardGroup, dict[ShardParam, None]] = {}
        for param in self.owned:
            if param is not None:
                found.setdefault(param.group, {})[param] = None
        return {group: list(params) for group, params in found.items()}

    def yielded(self, unsharded_of: Callable[[ShardParam], Tensor]) -> Any:
        """Returns the value that a block yields. `unsharded_of` returns the tensor in place of a sharded parameter."""
        tensors = [
            tensor if owned is None else unsharded_of(owned)
            for tensor, owned in zip(self.tensors, self.owned, strict=True)
        ]
        if self.names is not None:
            return dict(zip(self.names, tensors, strict=True))
        return tensors[0] if self.is_one else tensors


def _as_list(params: Any) -> list[Tensor]:
    tensors = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else [params]
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(f"module_or_params: expected a module or parameters, got {type(each).__name__}")
    if not tensors:
        raise ValueError("module_or_params: expected at least one parameter, got none")
    return tensors


def _named_parameters(module: nn.Module, recurse: bool, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields all parameters, under each of their names. Without `recurse`, it skips other sharded modules inside."""
    for name, param in module._parameters.items():
        if param is not None:
            yield prefix + name, param
    for name, child in module._modules.items():
        if child is not None and (recurse or not is_sharded(child)):
            yield from _named_parameters(child, recurse, f"{prefix}{name}.")
