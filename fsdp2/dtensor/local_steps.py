"""Runs the steps of torch's elementwise optimizers on local tensors, for which no operation is dispatched in Python.

Such an optimizer computes each element of a parameter from that element's gradient and state alone. So a step on this
rank's rows is this rank's part of a step on whole parameters. The step gets another optimizer of the same class, with
plain parameters over the same memory. The user's optimizer keeps its parameters; its state has DTensors over the memory
in which the other one's lies.
"""

from __future__ import annotations

from collections import defaultdict
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, optim
from torch.optim.optimizer import Optimizer

from ..devices.write_notices import notices
from ..engine.events import extensions
from ..torch_private.dtensor import DTensorSpec, TensorMeta
from ..torch_private.internals import no_torch_function
from .making import dtensor
from .optimizer_states import NUMBERS

ELEMENTWISE = frozenset(
    {
        *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
    }
)
# The attribute of an optimizer that holds its local step, while it runs.
_ATTRIBUTE = "_fsdp2_local_step"


def local_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Returns the optimizer to step in place of `optimizer`, prepared for this step; None if that must step itself.

    So it must if it is of another class (a subclass, too), has hooks of its own around its steps, or if a gradient is
    not laid out like its parameter: DTensor then does, or refuses, what it does.
    """
    vars(optimizer).pop(_ATTRIBUTE, None)  # of a step that has failed
    if type(optimizer) not in ELEMENTWISE or torch.compiler.is_compiling():
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    notices.notify()  # of the writes that follow
    with no_torch_function(), torch.no_grad():
        params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
        gradients, cls = [param.grad for param in params], extensions().tensor_class
        are_plain = [type(param) is cls and type(param._local_tensor) is Tensor for param in params]
        if not _are_laid_out_alike(params, are_plain, gradients):
            return None
        step = LocalStep(optimizer, params, are_plain, gradients)
    vars(optimizer)[_ATTRIBUTE] = step
    return step.optimizer


def end_local_step(optimizer: Optimizer) -> None:
    """Shows in the state of `optimizer` what the step of its local optimizer, if it had one, has added."""
    step = vars(optimizer).pop(_ATTRIBUTE, None)
    if step is not None:
        step.end(optimizer)


@final
class LocalStep:
    """Holds what one step is run with. It ends with the step, so that memory which the user moves away goes.

    `optimizer`: the local one.
    """

    def __init__(self, optimizer: Optimizer, params: list[Any], are_plain: list[bool], gradients: list[Any]) -> None:
        # The user's parameters, and plain tensors over their local ones. A parameter that is not sharded, or whose
        # local tensor is of a user's own class, stands for itself: it has no gradient in this step.
        self._params = params
        self._leaves: list[Any] = [
            param._local_tensor.detach().requires_grad_(param.requires_grad) if is_plain else param
            for param, is_plain in zip(params, are_plain, strict=True)
        ]
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            if gradient is not None:
                leaf.grad = gradient._local_tensor
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        vars(self.optimizer).update(vars(optimizer))
        vars(self.optimizer).pop("step", None)  # which a scheduler has bound to the user's optimizer
        leaves, state = iter(self._leaves), optimizer.state
        self.optimizer.param_groups = [
            {**group, "params": [next(leaves) for _ in group["params"]]} for group in optimizer.param_groups
        ]
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for param, leaf in zip(params, self._leaves, strict=True):
            if leaf is not param and param in state:
                self._state[leaf] = {
                    name: getattr(value, "_local_tensor", value) for name, value in state[param].items()
                }
        self.optimizer.state, self._before = self._state, _all_of(self._state)

    def end(self, optimizer: Optimizer) -> None:
        """Has the state of `optimizer` show what the step has added."""
        now = _all_of(self._state)
        if len(now) != len(self._before) or not all(map(is_, now, self._before)):
            for param, leaf in zip(self._params, self._leaves, strict=True):
                own = self._state.get(leaf)
                if own and leaf is not param:
                    optimizer.state[param] = {name: _shown(param, name, value) for name, value in own.items()}


def _are_laid_out_alike(params: list[Any], are_plain: list[bool], gradients: list[Any]) -> bool:
    """Returns True if each gradient lies as its parameter does, in a plain local tensor each."""
    cls = extensions().tensor_class
    for param, is_plain, gradient in zip(params, are_plain, gradients, strict=True):
        if gradient is None:
            continue
        if not is_plain or type(gradient) is not cls or type(gradient._local_tensor) is not Tensor:
            return False
        own, local = gradient._local_tensor, param._local_tensor
        if gradient._spec.placements != param._spec.placements or own.shape != local.shape or own.dtype != local.dtype:
            return False
    return True


def _all_of(state: Any) -> list[Any]:
    """Returns the entries of a state, and what these hold."""
    return [*state.values(), *[value for entry in state.values() for value in entry.values()]]


def _shown(param: Any, name: str, value: Any) -> Any:
    """Returns an entry of the local state as the user's state shows it."""
    if name in NUMBERS or not isinstance(value, Tensor) or value.shape != param._local_tensor.shape:
        return value
    spec = param._spec
    if value.dtype != param.dtype:
        meta = TensorMeta(param.shape, param.stride(), value.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return dtensor(value, spec)
