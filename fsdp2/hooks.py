"""The callbacks of nn.Module and autograd, turned into events on a state: this file decides what happens when.

- before_forward: gather (unless that was done ahead), register the full parameters, begin the next gather
- after_forward: free, register the sharded ones; leave hints on the outputs for backward
- before_backward: gather again, begin the gather of what ran before
- on_gradient: a full gradient is complete: reduce its bucket with the last of it, free with the last of the group
- after_backward: the gradients of all inputs are computed: reduce and free what is left of this forward
- end_backward, in context.py: whatever none of these noticed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_compat
from .context import Context, FSDPState
from .tree import cast_floating, tensors_in

_STATE = "_fsdp2_state"


def state_of(module: nn.Module) -> FSDPState | None:
    """The state that a `fully_shard` call left on `module`."""
    return module.__dict__.get(_STATE)


def states_below(module: nn.Module) -> Iterator[FSDPState]:
    """The state of every sharded module in `module`, itself included, outermost first."""
    for submodule in module.modules():
        state = state_of(submodule)
        if state is not None:
            yield state


def install(state: FSDPState) -> None:
    """Attach `state` and the hooks to its modules; it becomes the root of all states below it."""
    for module in state.modules:
        module.__dict__[_STATE] = state
        # Before other pre-hooks and after other hooks: what they do to the parameters, they do to the full ones.
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        # Also when forward raises: what before_forward entered must be left.
        module.register_forward_hook(_after_forward, always_call=True)
    state.group.on_gradient = partial(on_gradient, state)
    Context(state, (inner for module in state.modules for inner in states_below(module)), use_in_backward)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return before_forward(module.__dict__[_STATE], module, args, kwargs)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return after_forward(module.__dict__[_STATE], module, output)


def before_forward(state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = state.context
    in_backward = torch_compat.graph_task() != -1
    context.enter(state, module, in_backward)
    if in_backward:
        # Activation checkpointing runs the forward once more; gradients follow at once.
        use_in_backward(state)
        unshard(state)
    else:
        unshard(state)
        context.prefetch_forward(state)
    if state.policy.cast_forward_inputs and state.policy.param_dtype is not None:
        args = cast_floating(args, state.policy.param_dtype)
        kwargs = cast_floating(kwargs, state.policy.param_dtype)
    if torch.is_grad_enabled():
        _call_after_backward(state, [tensor for tensor in tensors_in(args, kwargs) if tensor.requires_grad])
    return args, kwargs


def after_forward(state: FSDPState, module: nn.Module, output: Any) -> Any:
    context = state.context
    if not context.is_innermost(module):
        return None  # somebody's pre-hook raised before ours ran
    if torch_compat.graph_task() == -1:
        differentiable, escapes = _look_at_outputs(state, output)
        # Reentrant checkpointing runs the forward without grad, and once more in backward.
        if differentiable or (context.pass_has_grad and not torch.is_grad_enabled()):
            context.ran(state)
        _settle(state, module, keep=escapes or (differentiable and state.keeps_after_forward()))
    context.leave()
    return output if state.policy.output_dtype is None else cast_floating(output, state.policy.output_dtype)


def _look_at_outputs(state: FSDPState, output: Any) -> tuple[bool, bool]:
    """Leave a hint for backward on each output; say whether backward may come, and whether a weight is returned."""
    differentiable = escapes = False
    for tensor in tensors_in(output):
        if tensor.layout is torch.strided and torch_compat.storage_id(tensor) == state.group.storage_id:
            escapes = True
        if tensor.requires_grad and torch.is_grad_enabled():
            differentiable = True
            tensor.register_hook(_output_hook(state))
    return differentiable, escapes


def _settle(state: FSDPState, module: nn.Module, keep: bool) -> None:
    """Free the full parameters after forward, or keep them for backward; users see the sharded ones either way."""
    state.finished.add(module)
    if state.running > 1 or (len(state.context.running) > 1 and not state.finished.issuperset(state.modules)):
        return  # the same parameters are still in use, or will be: a list of modules shares one group
    state.finished.clear()
    if keep:
        state.group.uninstall()
        state.kept = True
    else:
        state.group.reshard()


def unshard(state: FSDPState) -> None:
    """Have the full parameters in the modules."""
    state.group.unshard(notice_replacements=not state.context.in_backward)
    state.group.install()
    state.context.used(state)


def use_in_backward(state: FSDPState) -> None:
    """Backward is about to read a weight of `state`."""
    if not (state.backward_ready and state.context.end_is_queued()):
        before_backward(state)


def before_backward(state: FSDPState) -> None:
    """Backward has reached `state`, or a weight of it is needed."""
    state.context.enter_backward()
    if not state.backward_ready:
        state.backward_ready = True
        unshard(state)
        state.context.prefetch_backward(state)


def on_gradient(state: FSDPState, i: int) -> None:
    """The full gradient of parameter i is complete."""
    state.context.enter_backward()
    # Frozen weights may be needed after the last gradient of the others; after_backward frees those.
    if state.group.gradients.arrive(i) and not state.group.has_frozen:
        state.context.release(state)


def after_backward(state: FSDPState) -> None:
    """The gradients of all inputs of one forward are computed."""
    if state.context.in_backward:
        state.group.gradients.flush()
        state.context.release(state)


def _output_hook(state: FSDPState) -> Callable[[Tensor], None]:
    def gradient_of_output(_: Tensor) -> None:
        before_backward(state)

    return gradient_of_output


def _call_after_backward(state: FSDPState, inputs: list[Tensor]) -> None:
    """Have after_backward called when all `inputs` have their gradient; if one never gets it, end_backward serves."""
    if not inputs:
        return
    total = missing = len(inputs)
    # Autograd accumulates into leaves before it computes anything else, so a leaf has its gradient too early. Reentrant
    # checkpointing makes leaves of its inputs, and runs a backward of its own over them, whose end is the right moment.
    any_leaf = any(tensor.is_leaf for tensor in inputs)

    def gradient_of_input(_: Tensor) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = total
            if any_leaf:
                torch_compat.on_backward_end(lambda: after_backward(state))
            else:
                after_backward(state)

    for tensor in inputs:
        tensor.register_hook(gradient_of_input)
