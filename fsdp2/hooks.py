"""What surrounds a forward, and the callbacks of autograd, turned into events on a state: this file decides what
happens when.

- before_forward: gather (unless that was done ahead), register the full parameters, begin the next gather
- after_forward: free, register the sharded ones; leave hints on the outputs for backward
- before_backward: gather again, begin the gather of what ran before
- on_first_gradient: backward has come to the group, whatever way
- on_last_gradient: all full gradients are complete (each bucket was reduced with its last): free
- after_backward: the gradients of all inputs are computed: reduce and free what is left of this forward
- end_backward, in context.py: whatever none of these noticed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_compat
from .context import Context
from .corrections.table import correct_torch
from .graph_hooks import after_leaf, after_tensors, before_nodes
from .modes import are_in_force, hidden, hides_modes, num_dispatch_modes, num_function_modes, run_shown
from .saved_tensors import make_way_where_disabled
from .state import STATE, FSDPState, hide_full, names_below, show_full, states_among, states_of
from .torch_compat import runs_transform
from .transforms import is_inside, outside, run_outside
from .tree import cast_floating, map_tensors, tensors_in, to_device
from .versions import refuse_written


def install(states: list[FSDPState], inside: list[FSDPState], names: dict[nn.Module, str]) -> None:
    """Attach the states of one call to its modules; the first becomes the root of all others, and of those `inside`.
    `names`: FQNs of all modules at and below its own.
    """
    outer = states[0]
    for module in outer.modules:
        module.__dict__[STATE] = outer
        # State dicts hold the sharded parameters, also between unshard() and reshard().
        module.register_state_dict_pre_hook(_before_state_dict)
        module.register_state_dict_post_hook(_after_state_dict)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_after_load)
    for state, inner in zip(states, [*states[1:], None], strict=True):
        state.inner = inner
    outer.units = [state for state in states if state.outer is not None]
    _start(states, [*states, *inside], names)


def _start(states: list[FSDPState], below: Iterable[FSDPState], names: dict[nn.Module, str]) -> Context:
    correct_torch()
    make_way_where_disabled()
    for state in states:
        state.group.gradients.on_first = partial(on_first_gradient, state)
        state.group.gradients.on_last = partial(on_last_gradient, state)
    for module in states[0].modules:
        torch_compat.register_composable(module, states[0], "fully_shard")
    return Context(states[0], below, names, use_in_backward)


@hides_modes
def before_copy(module: nn.Module) -> None:
    """Have the sharded parameters registered, which a copy starts from."""
    for state in states_of(module):
        state.release()
        state.group.adopt_replacements()


@hides_modes
def after_copy(module: nn.Module) -> FSDPState | None:
    """`module` is a copy, of which everything is there: once that is so of all of them, their (outer) state becomes
    usable, and is returned.
    """
    if not vars(module.__dict__[STATE]):
        return None  # a list of modules shares the state, which comes with the first of them
    states = list(states_of(module))
    settings, *_ = [state.wake() for state in states]
    names = names_below(states[0].modules)
    context = _start(states, states_among(names), names)
    if settings is not None:
        context.take_settings(**settings)
    return states[0]


@hides_modes
def _before_state_dict(module: nn.Module, *_: Any) -> None:
    """Have the sharded parameters registered. No more: this rank may be alone in asking."""
    module.__dict__[STATE].hidden = hide_full(each for each in states_of(module) if not each.running)


def _after_state_dict(module: nn.Module, *_: Any) -> None:
    show_full(module.__dict__[STATE].hidden)


@hides_modes
def _before_load(module: nn.Module, *_: Any) -> None:
    for state in states_of(module):
        state.release()


@hides_modes
def _after_load(module: nn.Module, _: Any) -> None:
    for state in states_of(module):
        if state.group.adopt_replacements(accept_whole=True, may_be_untied=True):
            state.context.rank_guard.look_again()


@torch_compat.untraced
def run_forward(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`forward(*args, **kwargs)` with the full parameters of `state`, which the class of `module` calls around its own.

    It surrounds all hooks of the module: what they do to parameters, they do to the full ones.
    """
    if runs_transform():
        return _run_transformed(state, module, forward, args, kwargs)
    if (num_dispatch_modes() or num_function_modes()) and are_in_force():
        with hidden():
            return run_forward(state, module, partial(run_shown, forward), args, kwargs)
    if state.inner is not None and state.inner.outer is None:
        forward = partial(_run_inner, state.inner, module, forward)
    in_backward = torch_compat.graph_task() != -1
    state.context.enter(state, in_backward)
    try:
        args, kwargs = before_forward(state, args, kwargs, in_backward)
        output = forward(*args, **kwargs)
        if state.content is not None and state.running == 1 and not in_backward:
            state.check_content()
        if not in_backward and (written := state.group.versions.take_written()):
            refuse_written(written)
        if state.context.forwards == 1 and state.context.reads.waiting:
            state.context.reads.judge()
        if state.context.agreement is not None and not in_backward:
            output = _apart_from_inputs(tensors_in(args, kwargs), output)
            state.context.meet_at_end(state)
        output = after_forward(state, module, output, in_backward)
    except BaseException:
        state.drop_content()
        if state.context.forwards == 1:
            state.context.reads.drop()
        if not in_backward:
            _settle(state, module, backward_follows=False, failed=True)
            state.group.versions.take_written()  # which is lost, as all that this forward did
        raise
    finally:
        state.context.forwards -= 1
        state.context.leave()
        if not in_backward:
            state.group.adopted.keep_requires_grad()
    return _convert_output(state, output)


@torch_compat.untraced
def _run_transformed(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same inside transforms of torch.func, where inputs and outputs are converted, and the forward runs."""
    with hidden():
        args, kwargs = _to_device(state, args, kwargs)
        if state.input_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), state.input_dtype)

    def run(forward: Callable[..., Any]) -> Any:
        return run_forward(state, module, forward, args, kwargs)

    return run_outside(run, forward, partial(_convert_output, state), partial(_hook_outputs, state))


@torch_compat.untraced
def _run_inner(state: FSDPState, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run_forward(state, module, forward, args, kwargs)


@hides_modes
def read_parameters(unit: FSDPState) -> None:
    """Somebody reads a parameter of `unit` from its module: register the full ones, if the outer module runs."""
    assert unit.outer is not None, "every unit has one"
    in_backward = unit.context.in_backward
    if not unit.group.faces.installed and (in_backward or unit.outer.running):
        use_in_forward(unit, in_backward)
        unit.read_outside = not in_backward


def before_forward(state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any], in_backward: bool) -> Any:
    if not in_backward:
        args, kwargs = _to_device(state, args, kwargs)
    dtype, inputs = state.input_dtype, None
    if dtype is not None:
        inputs = tensors_in(args, kwargs)
        if any(tensor.dtype != dtype and tensor.is_floating_point() for tensor in inputs):
            if not in_backward:
                state.context.rank_guard.casts(state, inputs, dtype)
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
            inputs = None
    use_in_forward(state, in_backward)
    if not in_backward:
        state.note_content()
        state.context.prefetcher.in_forward(state)
    # In a module that calls itself, the outermost call is the last to be done with the parameters.
    if torch.is_grad_enabled() and not state.completes and state.running == 1:
        inputs = tensors_in(args, kwargs) if inputs is None else inputs
        _call_after_backward(state, [tensor for tensor in inputs if tensor.requires_grad], in_backward)
    return args, kwargs


def _to_device(state: FSDPState, args: Any, kwargs: Any) -> Any:
    """What the outermost module is called with, where it computes."""
    device, running = state.context.takes_inputs_to, state.context.running
    if device is not None and (state is state.context.root or not running or running == [state]):
        args, kwargs = to_device((args, kwargs), device)
    return args, kwargs


def after_forward(state: FSDPState, module: nn.Module, output: Any, in_backward: bool) -> Any:
    if not in_backward:
        output = _finish_forward(state, module, output)
    elif not state.context.notices_saved_tensors and torch.is_grad_enabled():
        # Checkpointing runs it again: another forward of the group may free it before backward comes to this one.
        _hook_outputs(state, tensors_in(output))
    return output


def _convert_output(state: FSDPState, output: Any) -> Any:
    return output if state.policy.output_dtype is None else cast_floating(output, state.policy.output_dtype)


def _finish_forward(state: FSDPState, module: nn.Module, output: Any) -> Any:
    outputs = tensors_in(output)
    weights = state.group.adopted.storage_ids
    if any(torch_compat.storage_id(tensor) in weights for tensor in outputs):
        output = _without_weights(weights, output)
        outputs = tensors_in(output)
    if torch.is_grad_enabled() and not any(tensor.grad_fn for tensor in outputs):
        outputs += [value for value in vars(module).values() if isinstance(value, Tensor)]  # perhaps kept there
    differentiable = _hook_outputs(state, outputs)
    # Reentrant checkpointing runs the forward without grad, and once more in backward.
    if differentiable or (state.context.pass_has_grad and not torch.is_grad_enabled()):
        state.context.prefetcher.ran(state)
    _settle(state, module, backward_follows=differentiable)
    return output


def _apart_from_inputs(inputs: list[Tensor], output: Any) -> Any:
    """`output` with views of inputs in it: their gradients tell when backward begins with the module, as on ranks where
    it has not left out what is conditional.
    """
    nodes = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}

    def view(tensor: Tensor) -> Tensor:
        return torch_compat.alias(tensor) if tensor.grad_fn in nodes else tensor

    return map_tensors(output, view, everywhere=True) if nodes else output


def _without_weights(weights: frozenset[int], output: Any) -> Any:
    """`output` with copies, through which gradients flow, of weights in it, whose memory will be freed or refilled."""

    def copy_weight(tensor: Tensor) -> Tensor:
        return tensor.clone() if torch_compat.storage_id(tensor) in weights else tensor

    return map_tensors(output, copy_weight, everywhere=True)


def _hook_outputs(state: FSDPState, outputs: list[Tensor]) -> bool:
    """Leave a hint for backward on each output; say whether backward may come."""

    # Weights that checkpointing keeps from a recomputation are read without our notice.
    must_unshard = not state.unshard_in_backward and not state.context.saved_tensors.is_on_top()

    def gradient_of_output() -> None:
        if must_unshard or state.unshard_in_backward:
            before_backward(state)

    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    # If all that follows a module is left out on this rank, its output is also that of the module around it, for which
    # other ranks gather first.
    before_nodes(nodes, gradient_of_output, last_first=state.context.agreement is not None)
    return bool(nodes)


def _settle(state: FSDPState, module: nn.Module, backward_follows: bool, failed: bool = False) -> None:
    """Settle the group, unless its parameters are still in use, or will be: a list of modules shares one group."""
    if state.running > 1:
        return
    state.finished.add(module)
    if len(state.context.running) > 1 and not state.finished.issuperset(state.modules):
        state.context.unfinished[state] = backward_follows
    else:
        state.context.unfinished.pop(state, None)
        state.settle(backward_follows, failed)
        for unit in state.units:
            if unit.read_outside:
                unit.settle(backward_follows, failed)
                unit.read_outside = False


def unshard(state: FSDPState) -> None:
    """Have the full parameters in the modules."""
    state.group.unshard(for_backward=state.context.in_backward)
    state.group.faces.install()
    state.context.used(state)


def use_in_forward(state: FSDPState, in_backward: bool) -> None:
    """A forward is about to read parameters of `state`."""
    if in_backward:
        # Activation checkpointing runs the forward once more; gradients follow at once.
        before_backward(state, recomputes=True)
    unshard(state)  # if it was ready before: for its weights to be known again in this forward
    if not in_backward:
        state.note_versions(state.group.gathered_at)


def use_in_backward(state: FSDPState) -> None:
    """Backward is about to read a weight of `state`."""
    if not state.backward_ready:
        before_backward(state)
    elif state.group.streams is not None:
        state.group.streams.use()


def before_backward(state: FSDPState, recomputes: bool = False) -> None:
    """Backward has reached `state`, or a weight of it is needed, or checkpointing runs its forward again."""
    if (runs_transform() or num_dispatch_modes() or num_function_modes()) and is_inside():
        with outside():
            return before_backward(state, recomputes)
    state.context.enter_backward(recomputes)
    if not state.backward_ready:
        state.backward_ready = True
        state.note_versions(state.group.shard_versions())
        unshard(state)
        state.context.prefetcher.in_backward(state)
    elif state.group.streams is not None:
        state.group.streams.use()


def on_first_gradient(state: FSDPState) -> None:
    """The first full gradient of a bucket is complete."""
    if not state.backward_ready:
        state.context.enter_backward()


def on_last_gradient(state: FSDPState) -> None:
    """The full gradients of all trainable parameters are complete."""
    # Frozen weights may be needed after the last gradient of the others, and parameters by other checkpointed regions.
    if not state.group.adopted.has_frozen and not state.context.in_inner_backward():
        # A full backward hook of a module comes later, with the gradients of the module's inputs.
        has_hooks = any(state.backward_hooks or state.find_backward_hooks())
        state.completes = not (has_hooks or state.group.gradients.reduces_unused)
        if not has_hooks:
            state.release_after_backward()


def after_backward(state: FSDPState) -> None:
    """The gradients of all inputs of one forward are computed."""
    if state.context.in_backward:
        if (num_dispatch_modes() or num_function_modes()) and are_in_force():
            with hidden():
                return after_backward(state)
        state.group.gradients.flush()
        state.release_after_backward()


def _call_after_backward(state: FSDPState, inputs: list[Tensor], in_backward: bool) -> None:
    """Have after_backward called when all `inputs` have their gradient; if one never gets it, end_backward serves.

    Leaves are left out: users may pass the same ones again and again, and hooks would pile up on them. Only reentrant
    checkpointing makes leaves of its own, in backward.
    """
    inner = [tensor for tensor in inputs if tensor.grad_fn is not None]
    if inner:
        after_tensors(inner, partial(after_backward, state))
    elif in_backward:
        for tensor in inputs[:1]:
            after_leaf(tensor, partial(after_backward, state))
