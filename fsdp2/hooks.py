"""The callbacks of nn.Module and autograd, turned into events on a state: this file decides what happens when.

    before_forward   gather (unless it was done ahead), register the full parameters, begin the next gather
    after_forward    free, register the sharded ones; leave hints on the outputs for backward
    before_backward  gather again, begin the gather of what ran before
    on_gradient      a full gradient is complete: reduce its bucket when the others of it are; free after the last
    after_backward   the gradients of all inputs are computed: reduce and free what is left of this forward
    (end_backward)   in context.py: whatever none of these noticed
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_compat
from .context import FSDPState, make_context
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
    """Attach `state` and the hooks to its modules."""
    for module in state.modules:
        module.__dict__[_STATE] = state
        # Before other pre-hooks and after other hooks: what they do to the parameters, they do to the full ones.
        module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
        # Also when forward raises: what before_forward entered must be left.
        module.register_forward_hook(_after_forward, always_call=True)
    if state.group is not None:
        reference = weakref.ref(state)

        def gradient_is_complete(i: int) -> None:
            alive = reference()
            if alive is not None:
                on_gradient(alive, i)

        state.group.on_gradient = gradient_is_complete


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = state_of(module)
    assert state is not None
    return before_forward(state, module, args, kwargs)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    state = state_of(module)
    assert state is not None
    return after_forward(state, module, output)


def before_forward(state: FSDPState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = state.context or make_root(state)
    in_backward = torch_compat.graph_task() != -1
    context.enter(state, module, in_backward)
    if in_backward:
        # Activation checkpointing runs the forward once more; gradients follow at once.
        before_backward(state)
    elif state.group is not None:
        if state.kept_in_pass and state.kept_in_pass != context.pass_number and state.running == 1:
            state.group.reshard()
        unshard(state)
        context.prefetch_forward(state)
    if state.policy.cast_forward_inputs and state.policy.param_dtype is not None:
        args = cast_floating(args, state.policy.param_dtype)
        kwargs = cast_floating(kwargs, state.policy.param_dtype)
    if torch.is_grad_enabled() and state.group is not None:
        _call_when_all_have_gradients(state, [t for t in tensors_in((args, kwargs)) if t.requires_grad])
    return args, kwargs


def after_forward(state: FSDPState, module: nn.Module, output: Any) -> Any:
    context = state.context
    if context is None or not context.running or context.running[-1][1] is not module:
        return None  # another pre-hook raised before ours ran
    in_backward = torch_compat.graph_task() != -1
    if state.group is not None and not in_backward:
        differentiable, escapes = _look_at_outputs(state, output)
        # Reentrant checkpointing runs the forward without grad, and once more in backward.
        if differentiable or (context.pass_has_grad and not torch.is_grad_enabled()):
            context.ran(state)
        _settle(state, module, keep=escapes or (differentiable and state.keeps_after_forward()))
    context.leave()
    if state.policy.output_dtype is not None:
        return cast_floating(output, state.policy.output_dtype)
    return None


def _look_at_outputs(state: FSDPState, output: Any) -> tuple[bool, bool]:
    """Leave a hint for backward on each output; say whether backward will come, and whether a weight is returned."""
    assert state.group is not None
    differentiable = escapes = False
    for tensor in tensors_in(output):
        if tensor.layout is torch.strided and torch_compat.storage_id(tensor) == state.group.storage_id:
            escapes = True
        if tensor.requires_grad and torch.is_grad_enabled():
            differentiable = True
            tensor.register_hook(_hint(state))
    return differentiable, escapes


def _settle(state: FSDPState, module: nn.Module, keep: bool) -> None:
    """Free the full parameters after forward, or keep them for backward; users see the sharded ones either way."""
    context, group = state.context, state.group
    assert context is not None and group is not None
    state.finished.add(module)
    if state.running > 1 or (len(context.running) > 1 and not state.finished.issuperset(state.modules)):
        return  # the same parameters are still in use, or will be: a list of modules shares one group
    state.finished.clear()
    if keep:
        group.uninstall()
        state.kept_in_pass = context.pass_number
    else:
        group.reshard()


def unshard(state: FSDPState) -> None:
    """Have the full parameters in the modules."""
    if state.group is None:
        return
    state.group.unshard()
    state.group.install()
    if state.context is not None:
        state.context.used(state)


def before_backward(state: FSDPState) -> None:
    """Backward has reached `state`, or a weight of it is needed."""
    context = state.context
    assert context is not None
    context.enter_backward()
    if state.group is None or state.backward_ready:
        return
    state.backward_ready = True
    unshard(state)
    context.prefetch_backward(state)


def on_gradient(state: FSDPState, i: int) -> None:
    """The full gradient of parameter i is complete."""
    context = state.context
    assert context is not None and state.group is not None
    context.enter_backward()
    # Frozen weights may be needed after the last gradient of the others; after_backward frees those.
    if state.group.gradients.arrive(i) and not state.group.has_frozen:
        context.release(state)


def after_backward(state: FSDPState) -> None:
    """The gradients of all inputs of one forward are computed."""
    assert state.context is not None and state.group is not None
    state.context.enter_backward()
    state.group.gradients.flush()
    state.context.release(state)


def _hint(state: FSDPState) -> Callable[[Tensor], None]:
    def gradient_of_output(_: Tensor) -> None:
        before_backward(state)

    return gradient_of_output


def _call_when_all_have_gradients(state: FSDPState, inputs: list[Tensor]) -> None:
    """Call after_backward when each of `inputs` has its gradient; if some never gets one, end_backward does the work."""
    total = missing = len(inputs)

    def gradient_of_input(_: Tensor) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = total
            after_backward(state)

    for tensor in inputs:
        tensor.register_hook(gradient_of_input)


def make_root(state: FSDPState) -> Any:
    """`state` runs outside any other: it becomes the root of all states below it."""
    context = make_context(state, states_below)
    context.on_use = before_backward
    return context
