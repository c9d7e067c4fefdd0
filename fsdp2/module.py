"""Defines FSDPModule, the methods that a user may call on a sharded module, and share_comm_ctx."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import engine
from .bridge.torch_interface import require_torch_state
from .engine.group_methods import GroupMethods, groups_of_all
from .engine.passes import share_reductions
from .engine.root_methods import RootMethods


class FSDPModule(engine.FSDPModule, GroupMethods, RootMethods):
    """The class that `fully_shard` and `replicate` add to the class of a module.

    The class of a sharded module is a subclass of its own class and of FSDPModule. So `isinstance(model, FSDPModule)`
    tells whether a module is sharded, and tells a type checker that it has the methods below.

    Call each method on every rank, with the same arguments, between steps: not while a forward or backward runs. A
    method acts on the groups of this module: the parameters that the `fully_shard` call on it manages. With
    `recurse=True` it also acts on the groups of all sharded modules inside this one. Methods that say "on the root
    only" act on all groups of the model. The root is the outermost sharded module.

    Example:
        ```python
        model = fully_shard(model)
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        ```
    """

    def _get_fsdp_state(self) -> Any:
        return require_torch_state(self)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Bounds the reductions in flight of several roots together, for example of the stages of a pipeline on one rank.

    Reductions that are in flight in any of them go on. An empty list, or one root, changes nothing.

    Args:
        modules: sharded modules, each of another root.

    Raises:
        ValueError: one is not a sharded module.
    """
    groups = groups_of_all("modules", modules)
    for group in groups[1:]:
        share_reductions(group.root, groups[0].root)


@cache
def public_methods() -> frozenset[str]:
    """Returns the names that fully_shard adds to a module."""
    classes = (FSDPModule, engine.FSDPModule, GroupMethods, RootMethods)
    return frozenset(name for cls in classes for name in vars(cls) if not name.startswith("_"))
