"""Forwards inside transforms of torch.func: `grad(lambda x: model(x).sum())(x)`, `vmap(jacrev(model))(x)`, `jvp`, ...;
and what runs outside of all that a user has put in force around it: transforms and modes.

What gathers, frees and watches runs outside the transforms, which would wrap its tensors; the user's forward inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import torch_compat
from ..core.user_code import are_in_force, hidden
from ..core.user_code import tensors_in

Forward = Callable[..., Any]


def outside_transforms() -> AbstractContextManager[list[Any]]:
    """Inside it no transform runs; it gives the list of those that will again."""
    if not torch_compat.runs_transform():
        return nullcontext([])
    clear, _ = torch_compat.transform_stacks()
    context: AbstractContextManager[list[Any]] = clear()
    return context


def is_inside() -> bool:
    """Returns True if transforms of torch.func run, or modes of the user's are in force."""
    return torch_compat.runs_transform() or are_in_force()


@contextmanager
def outside() -> Iterator[None]:
    """Context: no transform of torch.func runs, and the user's modes are out of force."""
    with hidden(), outside_transforms():
        yield


def run_outside(
    run: Callable[[Forward], Any], forward: Forward, give: Callable[[Any], Any], hint: Callable[[list[Tensor]], Any]
) -> Any:
    """`run(forward)` outside the transforms, but `give(forward(...))` inside; and `hint` of tensors that have the nodes
    of the outputs' graphs, where the outputs themselves don't.

    What `run` does with the inputs and outputs of `forward` must leave them the objects that they are: an operation on
    what a transform has wrapped would have no gradient, without a word.
    """
    _, restore = torch_compat.transform_stacks()

    def inside(*args: Any, **kwargs: Any) -> Any:
        with restore(stack):
            output = forward(*args, **kwargs)
            with hidden():
                output = give(output)
                outputs = tensors_in(output)
                tangents = [unpack_dual(tensor).tangent for tensor in outputs]  # of jvp; None elsewhere
        outputs += [tangent for tangent in tangents if tangent is not None]
        hint([each for tensor in outputs for each in _levels(tensor)])
        return output

    with outside_transforms() as stack:
        return run(inside)


def _levels(tensor: Tensor) -> list[Tensor]:
    """What `tensor` is in one transform after the other, from the second to the outermost."""
    found = []
    while torch_compat.is_wrapped(tensor):
        tensor = torch_compat.unwrapped(tensor)
        found.append(tensor)
    return found
