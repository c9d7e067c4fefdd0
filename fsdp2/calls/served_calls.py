"""Serves calls of modules inside a group from the unsharded parameters that stay between forward and backward.

Outside of forward modules have the sharded parameters. A loss may call the head on chunks of what the model returned,
or project hidden states. If the group keeps its unsharded parameters for backward, or over steps, such a call computes
with them, and its gradients join those of the group.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..engine.group import GATHERED, FSDPParamGroup
from ..engine.step import hook_outputs
from ..torch_private.internals import graph_task, runs_transform
from .nested import tensors_in
from .user_code import hides_modes, run_hidden


@hides_modes
def serve_call(module: nn.Module, group: FSDPParamGroup) -> bool:
    """Registers the unsharded parameters of `group` for the call of `module` that begins, if their data is there.

    A forward pre-hook of `module` calls it. It does not communicate. Returns False if nothing has changed: the data is
    freed, or older than the weights; or the group is conditional, so that other ranks may have freed theirs.
    """
    root, state, in_backward = group.root, group.state, graph_task() != -1
    if not in_backward and root.is_in_backward():  # one that has failed is over
        return False
    if group.phase is not GATHERED or group.settings.conditional or runs_transform():
        return False
    if not in_backward and not group.is_up_to_date():
        return False
    if in_backward:  # activation checkpointing runs it again; the group reshards when its gradients are complete
        group.pre_forward(in_backward)
        return True
    end = partial(_end, module, group, len(root.running), root.depth)
    root.enter(state)
    root.served.append(end)
    module._forward_hooks[id(group)] = partial(_after_call, end)
    module._forward_hooks_always_called[id(group)] = True
    group.pre_forward(in_backward)
    return True


def _after_call(end: partial[None], module: nn.Module, args: Any, output: Any) -> None:
    """Ends a served call, which may have raised."""
    run_hidden(end, output)


def _end(module: nn.Module, group: FSDPParamGroup, num_running: int, depth: int, output: Any = None) -> None:
    root = group.root
    root.served.pop()
    del module._forward_hooks[id(group)], module._forward_hooks_always_called[id(group)]
    hook_outputs(group.state, tensors_in(output))
    group.unregister()
    root.leave(num_running, depth)
