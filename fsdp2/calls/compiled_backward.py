"""Refuses a backward of sharded parameters that compiled autograd records or runs, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ..engine.group import FSDPParamGroup


def refuse_compiled_backward(group: FSDPParamGroup, name: str) -> NoReturn:
    """Raises NotImplementedError: compiled autograd calls hooks, but not what is queued for the end of a backward.

    `group`: one that the backward reaches. `name`: the FQN of a parameter.
    """
    raise NotImplementedError(
        f"{group}: compiled autograd runs this backward, and would reduce no gradients ({name}, ...). Compile the "
        "model alone, torch.compile(model), and call backward outside of compiled functions, without "
        "torch._dynamo.config.compiled_autograd."
    )
