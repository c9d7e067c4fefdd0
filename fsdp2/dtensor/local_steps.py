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
from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer

from ..engine.compat import local_of, no_torch_function
from ..engine.events import extensions
from ..engine.write_notices import notices
from .compat import DTensorSpec, TensorMeta, dtensor

ELEMENTWISE = frozenset(
    {
        *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
        *(optim.SGD, optim.ASGD, optim.RMSprop, optim.Rprop, optim.Adagrad, optim.Adadelta),
    }
)
# Numbers in the state, as tensors of one element. What else is there has an element for each of the parameter.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
_ATTRIBUTE = "_fsdp2_local_steps"


def local_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """Returns the optimizer to step in place of `optimizer`, prepared for this step; None if that must step itself.

    So it must if it is of another class (a subclass, too), has hooks of its own around its steps, or if a gradient is
    not laid out like its parameter: DTensor then does, or refuses, what it does.
    """
    if type(optimizer) not in ELEMENTWISE or torch.compiler.is_compiling():
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    steps = vars(optimizer).get(_ATTRIBUTE)
    if steps is None:
        steps = vars(optimizer)[_ATTRIBUTE] = LocalSteps(type(optimizer))
    return steps.optimizer if steps.begin(optimizer) else None


def end_local_step(optimizer: Optimizer) -> None:
    """Shows in the state of `optimizer` what the step of its local optimizer, if it had one, has added."""
    steps = vars(optimizer).get(_ATTRIBUTE)
    if steps is not None and steps.is_running:
        steps.end(optimizer)


@final
class LocalSteps:
    """Holds the local optimizer of one optimizer.

    `optimizer`: the local one; `is_running`: it steps now.
    """

    def __init__(self, cls: type[Optimizer]) -> None:
        self.optimizer: Any = object.__new__(cls)
        self.is_running = False
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        # The user's parameters, their local tensors, and the plain parameters over these: where a local tensor is of a
        # user's own class, or the parameter is not sharded, that itself, which has no gradient in a local step.
        self._params: list[Any] = []
        self._locals: list[Any] = []
        self._leaves: list[Any] = []
        # What the user's state held behind the last step, and the local one: compared by identity, hence kept alive.
        self._shown: list[Any] = []
        self._own: list[Any] = []

    def begin(self, optimizer: Optimizer) -> bool:
        """Prepares a step. Returns False if `optimizer` must step itself."""
        params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
        with no_torch_function():
            if not self._has(params):
                self._take(params)
            cls, gradients = extensions().tensor_class, [param.grad for param in params]
            for param, leaf, gradient in zip(params, self._leaves, gradients, strict=True):
                if gradient is not None and (
                    leaf is param
                    or type(gradient) is not cls
                    or type(gradient._local_tensor) is not Tensor
                    or gradient._spec.placements != param._spec.placements
                    or gradient._local_tensor.shape != param._local_tensor.shape
                    or gradient._local_tensor.dtype != param._local_tensor.dtype
                ):
                    return False
            if any(group.get("differentiable") for group in optimizer.param_groups):
                return False
            for param, leaf, gradient in zip(params, self._leaves, gradients, strict=True):
                if leaf is not param:
                    leaf.grad = None if gradient is None else gradient._local_tensor
        self._take_state(optimizer.state)
        notices.notify()  # of the writes that follow
        leaves = iter(self._leaves)
        vars(self.optimizer).update(vars(optimizer))
        for name in (_ATTRIBUTE, "step"):  # which refer to both optimizers
            vars(self.optimizer).pop(name, None)
        self.optimizer.param_groups = [
            {**group, "params": [next(leaves) for _ in group["params"]]} for group in optimizer.param_groups
        ]
        self.optimizer.state, self.is_running = self._state, True
        return True

    def end(self, optimizer: Optimizer) -> None:
        """Ends a step: lets go of gradients, and has the user's state show what there is now."""
        self.is_running = False
        for param, leaf in zip(self._params, self._leaves, strict=True):
            if leaf is not param:
                leaf.grad = None
        if not _are_same(_all_of(self._state), self._own):
            for param, leaf in zip(self._params, self._leaves, strict=True):
                own = self._state.get(leaf)
                if own and leaf is not param:
                    optimizer.state[param] = {name: _shown(param, name, value) for name, value in own.items()}
            self._shown, self._own = _all_of(optimizer.state), _all_of(self._state)

    def _has(self, params: list[Any]) -> bool:
        locals_ = [getattr(param, "_local_tensor", param) for param in params]
        return _are_same(params, self._params) and _are_same(locals_, self._locals)

    def _take(self, params: list[Any]) -> None:
        self._params, self._locals = params, [getattr(param, "_local_tensor", param) for param in params]
        with torch.inference_mode(False):
            self._leaves = [
                nn.Parameter(local.detach(), local.is_floating_point()) if type(local) is Tensor else param
                for param, local in zip(params, self._locals, strict=True)
            ]
        self._shown, self._own = [self], []  # what no state holds: it is read anew

    def _take_state(self, state: Any) -> None:
        """Follows what the user has loaded, changed or cleared since the last step."""
        found = _all_of(state)
        if not _are_same(found, self._shown):
            self._state.clear()
            for param, leaf in zip(self._params, self._leaves, strict=True):
                if leaf is not param and param in state:
                    self._state[leaf] = {name: local_if_sharded(value) for name, value in state[param].items()}
            self._shown, self._own = found, _all_of(self._state)


def _all_of(state: Any) -> list[Any]:
    """Returns the entries of a state, and what these hold."""
    return [*state.values(), *[value for entry in state.values() for value in entry.values()]]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _shown(param: Any, name: str, value: Any) -> Any:
    """Returns an entry of the local state as the user's state shows it."""
    if name in _NUMBERS or not isinstance(value, Tensor) or value.shape != param._local_tensor.shape:
        return value
    spec = param._spec
    if value.dtype != param.dtype:
        meta = TensorMeta(param.shape, param.stride(), value.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return dtensor(value, spec)


def local_if_sharded(value: Any) -> Any:
    """Returns the local tensor of a DTensor, and anything else as it is."""
    return local_of(value) if hasattr(value, "_local_tensor") else value
