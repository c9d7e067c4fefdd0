"""Refuses to record a backward of sharded parameters by compiled autograd, before torch refuses it without their names.

Compiled autograd records the graph, its leaves included, among which freed parameters are. What runs without being
recorded, Root finds out when backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from .once import once
from .owners import all_groups
from .torch_names import before_backward_is_recorded

if TYPE_CHECKING:
    from .group import FSDPParamGroup


@once
def watch_compiled_backwards() -> None:
    """Watches compiled autograd from the first root on."""
    before_backward_is_recorded(_check)


def _check(leaves: Sequence[Any]) -> None:
    identities = {id(each) for each in leaves}
    for group in all_groups():
        for param in group.params:
            if id(param.unsharded) in identities:
                refuse_compiled_backward(group, param.name)


def refuse_compiled_backward(group: FSDPParamGroup, name: str) -> NoReturn:
    """Raises NotImplementedError: compiled autograd calls hooks, but not what is queued for the end of a backward.

    `group`: one that the backward reaches. `name`: the FQN of a parameter.
    """
    raise NotImplementedError(
        f"{group}: compiled autograd runs this backward, and would reduce no gradients ({name}, ...). Compile the "
        "model alone, torch.compile(model), and call backward outside of compiled functions, without "
        "torch._dynamo.config.compiled_autograd."
    )
