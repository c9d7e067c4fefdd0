"""Runs forwards inside transforms of torch.func: `grad(lambda x: model(x).sum())(x)`, `vmap(jacrev(model))(x)`, `jvp`.

The engine runs outside the transforms, which would wrap its tensors; the user's forward runs inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.forward_ad import unpack_dual

from ..engine import step as steps
from ..engine.autograd import SavedTensors
from ..engine.state import FSDPState
from ..engine.step import cast_floating
from ..torch_private import rare_internals as internals
from ..torch_private.internals import runs_transform, top_saved_tensor_hooks, untraced
from ..torch_private.once import once
from .inputs import HandedInputs, cast_to
from .nested import tensors_in
from .user_code import hidden, outside_transforms


def run_forward(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns what `step.run_forward` returns, also inside transforms of torch.func."""
    run = run_transformed if runs_transform() else steps.run_forward
    return run(state, module, forward, args, kwargs)


@untraced
def run_transformed(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a forward inside transforms: inputs and outputs are converted, and the user's forward runs, inside them.

    The engine must not compute on the inputs and outputs: an operation, outside, on a tensor that a transform has
    wrapped would silently have no gradient.
    """
    handed: list[HandedInputs] = []
    with hidden():
        if state.root.input_device is not None:
            args, kwargs = steps.inputs_on_device(state, args, kwargs, handed)
        if state.input_dtype is not None:
            handed.append(HandedInputs(cast_to(state.input_dtype), args, kwargs))
            args, kwargs = handed[-1].args, handed[-1].kwargs
    _, restore = internals.transform_stacks()

    def inside(*args: Any, **kwargs: Any) -> Any:
        with restore(stack):
            output = forward(*args, **kwargs)
            with hidden():
                for inputs in reversed(handed):
                    output = inputs.take_back(module, output)
                output_dtype = state.policy.output_dtype
                output = output if output_dtype is None else cast_floating(output, output_dtype)
                outputs = tensors_in(output)
                tangents = [unpack_dual(tensor).tangent for tensor in outputs]  # of jvp; None elsewhere
        outputs += [tangent for tangent in tangents if tangent is not None]
        steps.hook_outputs(state, [each for tensor in outputs for each in _levels(tensor)])
        return output

    with outside_transforms() as stack:
        return steps.run_forward(state, module, inside, args, kwargs)


def _levels(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that the transforms have wrapped to make `tensor`, from the innermost transform outwards."""
    found = []
    while internals.is_wrapped(tensor):
        tensor = internals.unwrapped(tensor)
        found.append(tensor)
    return found


_DISABLE = graph.disable_saved_tensors_hooks


@once
def withdraw_where_disabled() -> None:
    """Has the engine's saved-tensor hooks withdraw where all such hooks are disabled, as `torch.func.grad` does: torch
    would raise.
    """
    graph.disable_saved_tensors_hooks = _disable


@contextmanager
def _disable(error_message: str) -> Iterator[None]:
    active = top_saved_tensor_hooks(False)
    hooks_of_ours = getattr(active[0], "__self__", None) if active else None
    if isinstance(hooks_of_ours, SavedTensors):
        hooks_of_ours.before_absence()
        depth = hooks_of_ours.depth
        hooks_of_ours.deactivate(depth - 1)
        try:
            with _disable(error_message):
                yield
        finally:
            hooks_of_ours.activate(depth)
    else:
        with _DISABLE(error_message):
            yield
