"""Runs a step: what surrounds a call of a sharded module in forward, and what backward calls.

**One block in forward.** `run_forward` surrounds the call of block b, with all its hooks. The all-gather of b began
while block b - 1 computed. `run_forward` waits for it, registers the unsharded parameters in the modules, and begins
the all-gather of b + 1, which runs while b computes. While the user's code runs, what autograd saves of weights is
noted as descriptions (SavedTensors), so that no graph keeps their memory. When the call returns, hooks are left on the
graph nodes of its outputs, and b is resharded: its memory goes back to the allocator. At most two blocks are unsharded,
and what stays for backward: the root, the last block and the one before it, unless the user has chosen otherwise.

    compute     | b - 1          | b              | b + 1
    all-gathers |   [   b   ]    |   [ b + 1 ]    |   [ b + 2 ]

**The same block in backward.** Autograd reaches a node of the output of b, or unpacks a weight, whichever comes first:
`FSDPParamGroup.pre_backward` makes b unsharded again, and begins the all-gather of b - 1, which runs while the
gradients of b are computed. Each gradient is counted as autograd accumulates it (`Bucket.arrive`). When the last one of
a bucket has come, its reduce-scatter begins. The last one of the block reshards it first, since packing gradients takes
memory. ReductionQueue bounds how many are in flight: before a bucket is packed, it waits for the
oldest if there are more.

    compute     | b              | b - 1          | b - 2
    all-gathers |   [ b - 1 ]    |   [ b - 2 ]    |
    reductions  |                |   [ grads b ]  |   [ grads b - 1 ]

**The end.** Autograd calls `Root.end_backward` when it has computed all gradients: it reduces what is left (unused and
frozen parameters leave buckets incomplete), reshards what is still unsharded, waits for the reductions in flight, and
writes their results into `.grad`. Where backward reaches no output of a block, it comes to the block later: when a
saved weight is unpacked (the block is unsharded then), when all inputs have their gradients (`post_backward` reduces
and reshards), or when backward ends.

What calls what:

- run_forward surrounds a call of the module
- before_forward: casts inputs, unshards (unless that was done ahead), begins the next gather
- after_forward: leaves hooks on the outputs for backward, reshards
- FSDPParamGroup.pre_backward: backward has reached the module, or reads a weight: unshards, begins the gather of
  what ran before
- FSDPParamGroup.last_gradient: all gradients are complete: reshards (then the last bucket is reduced)
- post_backward: the gradients of all inputs are computed: reduces and reshards the rest of this forward
- Root.end_backward: reduces and reshards what none of these has noticed
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..calls.inputs import HandedInputs, cast, cast_to, move_to
from ..calls.nested import map_tensors, tensors_in
from ..calls.user_code import are_in_force, hidden, outside, run_shown
from ..torch_private import internals
from ..torch_private.internals import (
    graph_task,
    has_storage,
    num_dispatch_modes,
    num_function_modes,
    runs_transform,
    storage_address,
)
from .autograd import after_leaf, after_tensors
from .policy import AfterForward, Ending
from .state import FSDPState

_ONLY_TENSORS = {Tensor}


@internals.untraced
def run_forward(state: FSDPState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns `forward(*args, **kwargs)`, run with the unsharded parameters of `state`.

    The class of `module` calls it around its own call, so that it surrounds all hooks of the module: what they do to
    parameters, they do to the unsharded ones.
    """
    if (num_dispatch_modes() or num_function_modes()) and are_in_force():
        with hidden():
            return run_forward(state, module, partial(run_shown, forward), args, kwargs)
    root, in_backward = state.root, graph_task() != -1
    if not in_backward and (not root.running or state is root.state):
        root.begin_pass()
    handed: list[HandedInputs] = []
    num_running, depth = len(root.running), root.depth
    try:
        try:
            root.enter(state)
            args, kwargs = before_forward(state, args, kwargs, in_backward, handed)
            output = forward(*args, **kwargs)
            for inputs in reversed(handed):
                output = inputs.take_back(module, output)
            if not in_backward:
                for group in state.used:
                    group.parameters.adopt_requires_grad()
                for notify in root.events.forward_ended:
                    for group in state.used:
                        notify(group, handed)
                if root.consensus is not None:
                    output = root.consensus.after_forward(state, (args, kwargs), output)
                if depth == 0:
                    root.notify(root.events.pass_ended)
            output = after_forward(state, module, output, in_backward)
        except BaseException:
            for inputs in reversed(handed):
                with suppress(RuntimeError):
                    inputs.take_back(module)
            _fail(state, module, in_backward, depth == 0)
            raise
        finally:
            root.leave(num_running, depth)
    except BaseException:  # Ctrl-C may have ended the lines above. To leave again changes nothing.
        root.leave(num_running, depth)
        raise
    output_dtype = state.policy.output_dtype
    return output if output_dtype is None else cast_floating(output, output_dtype)


def _fail(state: FSDPState, module: nn.Module, in_backward: bool, is_outermost: bool) -> None:
    root = state.root
    if root.consensus is not None and is_outermost and root.running and not in_backward:
        root.consensus.pass_failed(False)
    for group in state.used:
        group.parameters.adopt_requires_grad()
    for notify in root.events.forward_failed:
        for group in state.used:
            notify(group)
    if is_outermost and not in_backward:  # checkpointing ends a forward that runs again by an exception of its own
        root.forward.read_outside.clear()
        for notify in root.events.pass_failed:
            notify(root, False)
    if not in_backward:
        state.post_forward(Ending.FAILED, module)


def before_forward(
    state: FSDPState, args: tuple[Any, ...], kwargs: dict[str, Any], in_backward: bool, handed: list[HandedInputs]
) -> Any:
    """Casts and moves the inputs, unshards the groups, and returns the inputs.

    `in_backward`: activation checkpointing runs the forward again. `handed`: receives the copies of inputs that the
    forward gets in their place.
    """
    root, dtype, inputs = state.root, state.input_dtype, None
    if not in_backward:
        if root.input_device is not None:
            args, kwargs = inputs_on_device(state, args, kwargs, handed)
        for notify in root.events.inputs_given:
            notify(state, args, kwargs)
    is_outermost = not in_backward and len(root.running) == 1
    if dtype is not None or is_outermost:
        inputs = args if not kwargs and {*map(type, args)} == _ONLY_TENSORS else tensors_in(args, kwargs)
        if is_outermost:
            root.forward.note_inputs(inputs)
        if dtype is not None and [1 for each in inputs if each.dtype != dtype and each.is_floating_point()]:
            handed.append(HandedInputs(cast_to(dtype), args, kwargs))
            args, kwargs, inputs = handed[-1].args, handed[-1].kwargs, None
    need_no_hooks = True
    for group in state.used:
        group.pre_forward(in_backward)
        if not in_backward:
            for notify in root.events.forward_began:
                notify(group)
            for ahead in root.prefetcher.in_forward(group):
                ahead.start_unshard()
        need_no_hooks = need_no_hooks and group.last_gradient_reshards
        # A backward may compute no gradients of parameters, or those of several forwards: the last one comes late.
        if need_no_hooks and (root.forward.inputs_require_grad or group.awaits_backward):
            need_no_hooks = not group.is_freed_in_backward()
    # In a module that calls itself, the outermost call is the last to be done with the parameters.
    if not need_no_hooks and torch.is_grad_enabled() and state.running == 1:
        inputs = tensors_in(args, kwargs) if inputs is None else inputs
        _call_post_backward(state, [tensor for tensor in inputs if tensor.requires_grad], in_backward)
    return args, kwargs


def inputs_on_device(state: FSDPState, args: Any, kwargs: Any, handed: list[HandedInputs]) -> Any:
    """Returns the inputs of the outermost module on the device where it computes; those of others unchanged.
    `handed`: receives the copies.
    """
    root = state.root
    is_outermost = state is root.state or not root.running or root.running == [state]
    if not is_outermost or root.input_device is None:
        return args, kwargs
    handed.append(HandedInputs(move_to(root.input_device), args, kwargs))
    return handed[-1].args, handed[-1].kwargs


def after_forward(state: FSDPState, module: nn.Module, output: Any, in_backward: bool) -> Any:
    """Leaves hooks for backward on the outputs, reshards the groups, and returns the output."""
    root = state.root
    if in_backward:
        return output
    outputs, has_run = [output] if type(output) is Tensor else tensors_in(output), True
    for group in state.used:
        weights = group.unsharded.storage_ids
        if not weights.isdisjoint(
            [storage_address(t) if type(t) is Tensor and has_storage(t) else internals.storage_id(t) for t in outputs]
        ):
            output = _without_weights(weights, output)
            outputs = tensors_in(output)
            has_run = False  # the caller's frames still have what the module has returned
    is_grad_enabled = torch.is_grad_enabled()
    differentiable = hook_outputs(state, outputs)
    if not differentiable and is_grad_enabled:
        # Perhaps the module keeps tensors on itself, which a loss reads.
        differentiable = hook_outputs(state, [value for value in vars(module).values() if isinstance(value, Tensor)])
    # Reentrant checkpointing runs the forward without grad, and once more in backward.
    if differentiable or (root.forward.has_grad and not is_grad_enabled):
        for group in state.used:
            root.prefetcher.ran.append(group)
    state.post_forward(Ending.TRAINING if differentiable else Ending.EVALUATION, module, has_run)
    return output


def _without_weights(weights: frozenset[int], output: Any) -> Any:
    """Returns `output` with copies, through which gradients flow, of weights in it: their memory will be refilled."""

    def copy_weight(tensor: Tensor) -> Tensor:
        return tensor.clone() if internals.storage_id(tensor) in weights else tensor

    return map_tensors(output, copy_weight, everywhere=True)


def hook_outputs(state: FSDPState, outputs: list[Tensor]) -> bool:
    """Has backward unshard the groups of `state` when it reaches an output. Returns True if backward may come."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    if not nodes:
        return False
    groups, are_noticed = state.used, True
    for group in groups:
        if not group.settings.unshard_in_backward:
            # Weights that checkpointing keeps from a recomputation are read without our notice.
            are_noticed = state.root.saved_tensors.are_on_top()

    def before_node(_: Any) -> None:
        for group in groups:
            if group.sharing_states:
                group.backwards_running.add(state)
            if group.settings.unshard_in_backward or not are_noticed:
                group.pre_backward()

    # On nodes, not on tensors: a tensor may be the next module's input, and that module's hooks on it must run first,
    # whichever were registered first.
    for node in nodes:
        node.register_prehook(before_node)
    for group in groups:
        if group.settings.after_forward is AfterForward.KEEP:
            group.await_backward(before_node)
    return True


def _call_post_backward(state: FSDPState, inputs: list[Tensor], in_backward: bool) -> None:
    """Calls `post_backward` when all `inputs` have their gradient; if one never gets it, Root.end_backward serves.

    Leaves are left out: users may pass the same ones again and again, and hooks would pile up on them. Only reentrant
    checkpointing makes leaves of its own, in backward.
    """
    inner = [tensor for tensor in inputs if tensor.grad_fn is not None]
    if inner:
        after_tensors(inner, partial(post_backward, state))
    elif inputs and in_backward:
        after_leaf(inputs[0], partial(post_backward, state))


def post_backward(state: FSDPState) -> None:
    """Reduces and reshards the rest of one forward, when the gradients of all its inputs are computed."""
    if state.root.backward is None:
        return
    if runs_transform() or ((num_dispatch_modes() or num_function_modes()) and are_in_force()):
        with outside():
            return post_backward(state)
    for group in state.used:
        group.post_backward(state)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors cast to `dtype`; see map_tensors."""
    if type(value) is Tensor:
        return cast(value, dtype) if value.dtype != dtype and value.is_floating_point() else value
    if type(value) is tuple and {*map(type, value)} == _ONLY_TENSORS:
        return tuple([cast_floating(each, dtype) for each in value])
    return map_tensors(value, cast_to(dtype))
