"""Steps of torch's fused optimizers on lists of plain tensors, prepared once.

The fused kernels of the CPU compute the last elements of each tensor, those that fill no vector, by other instructions
than the rest. So a flat tensor would not get the bits that its parameters get one by one. These steps give the kernel
each parameter by itself, as the ordinary step does, but without looking at each in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ..torch_private import optimizers as internals
from .spans import Span
from .states import State, is_elements


class Listed(NamedTuple):
    """Spans of one device and dtype, and of each parameter of theirs: its local tensor, and its part of the state.

    Args:
        elements: name of an entry of the state -> its part of each parameter, of the shape of the local tensor.
    """

    spans: list[Span]
    states: list[State]
    locals: list[Tensor]
    elements: dict[str, list[Tensor]]

    @staticmethod
    def of(spans: list[Span], live: Mapping[Any, State], names: Sequence[str]) -> Listed:
        """Lists the parameters of spans whose states have elements under `names`."""
        own = [live[span.flat] for span in spans]
        members = [(member, state) for span, state in zip(spans, own, strict=True) for member in span.members]
        elements = {name: [member.part_of(state[name]) for member, state in members] for name in names}
        return Listed(spans, own, [member.place.local for member, _ in members], elements)


def names_of_elements(state: State, span: Span) -> tuple[str, ...]:
    """Returns under which names a state has elements."""
    return tuple(name for name, value in state.items() if is_elements(value, span.flat))


class Kernel(NamedTuple):
    """How one class of optimizers steps by its fused kernel.

    Args:
        begin: (optimizer, options, span) -> the state before the first step.
        step: (options, what to step on, its gradients, the optimizer's scale and flag of gradients on that device).
    """

    begin: Callable[[Optimizer, dict[str, Any], Span], State]
    step: Callable[[dict[str, Any], Listed, Sequence[Tensor], dict[str, Tensor | None]], None]


def kernel_of(cls: type[Optimizer]) -> Kernel | None:
    """Returns how an optimizer of that very class steps by its fused kernel."""
    return _KERNELS.get(cls)


def run(
    kernel: Kernel, optimizer: Optimizer, options: dict[str, Any], listed: Listed, gradients: Sequence[Tensor]
) -> None:
    """Steps on `listed`, with the local tensors of its gradients. `options`: an entry of `param_groups`."""
    device = listed.locals[0].device
    scaling: dict[str, Tensor | None] = {}
    for name in ("grad_scale", "found_inf"):  # which a GradScaler sets
        value = getattr(optimizer, name, None)
        scaling[name] = None if value is None else value.to(device, non_blocking=True)
    with torch.no_grad():
        kernel.step(options, listed, gradients, scaling)


def _zeros(span: Span) -> Tensor:
    return torch.zeros_like(span.flat, requires_grad=False)


def _count(span: Span) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=span.device)


def _begin_adam(_: Optimizer, options: dict[str, Any], span: Span) -> State:
    state = {"step": _count(span), "exp_avg": _zeros(span), "exp_avg_sq": _zeros(span)}
    if options["amsgrad"]:
        state["max_exp_avg_sq"] = _zeros(span)
    return state


def _begin_sgd(_: Optimizer, options: dict[str, Any], span: Span) -> State:
    return {}


def _begin_adagrad(optimizer: Optimizer, options: dict[str, Any], span: Span) -> State:
    value = optimizer.defaults["initial_accumulator_value"]
    return {"step": _count(span), "sum": torch.full_like(span.flat, value, requires_grad=False)}


def _count_step(listed: Listed, scaling: dict[str, Tensor | None], kernel: Callable[[list[Tensor]], None]) -> None:
    """Counts the step once for each span, and runs the kernel with the counts of all parameters."""
    counts = [state["step"] for state in listed.states]
    internals.add_to_each(counts, 1)
    kernel([count for span, count in zip(listed.spans, counts, strict=True) for _ in span.members])
    if scaling["found_inf"] is not None:
        internals.subtract_from_each(counts, [scaling["found_inf"]] * len(counts))


def _rate(options: dict[str, Any], listed: Listed) -> Any:
    rate, device = options["lr"], listed.locals[0].device
    return rate.to(device, non_blocking=True) if isinstance(rate, Tensor) and rate.device.type != "cpu" else rate


def _step_adam(
    options: dict[str, Any], listed: Listed, gradients: Sequence[Tensor], scaling: dict[str, Tensor | None]
) -> None:
    (beta1, beta2), elements = options["betas"], listed.elements
    fused = internals.fused_adamw if options["decoupled_weight_decay"] else internals.fused_adam

    def kernel(counts: list[Tensor]) -> None:
        fused(
            listed.locals,
            gradients,
            elements["exp_avg"],
            elements["exp_avg_sq"],
            elements["max_exp_avg_sq"] if options["amsgrad"] else [],
            counts,
            amsgrad=options["amsgrad"],
            lr=_rate(options, listed),
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
            **scaling,
        )

    _count_step(listed, scaling, kernel)


def _step_sgd(
    options: dict[str, Any], listed: Listed, gradients: Sequence[Tensor], scaling: dict[str, Tensor | None]
) -> None:
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    chosen = {name: options[name] for name in names}
    buffers, is_first = listed.elements.get("momentum_buffer", []), False
    if options["momentum"] != 0 and not buffers:
        is_first = True
        for span, state in zip(listed.spans, listed.states, strict=True):
            state["momentum_buffer"] = _zeros(span)
            buffers = [*buffers, *(member.part_of(state["momentum_buffer"]) for member in span.members)]
    if options["momentum"] == 0:
        buffers = []
    internals.fused_sgd(listed.locals, gradients, buffers, **chosen, is_first_step=is_first, **scaling)


def _step_adagrad(
    options: dict[str, Any], listed: Listed, gradients: Sequence[Tensor], scaling: dict[str, Tensor | None]
) -> None:
    chosen = {name: options[name] for name in ("lr_decay", "weight_decay", "eps", "maximize")}

    def kernel(counts: list[Tensor]) -> None:
        sums = listed.elements["sum"]
        rate = _rate(options, listed)
        internals.fused_adagrad(listed.locals, gradients, sums, counts, lr=rate, **chosen, **scaling)

    _count_step(listed, scaling, kernel)


_KERNELS: dict[type[Optimizer], Kernel] = {
    Adam: Kernel(_begin_adam, _step_adam),
    AdamW: Kernel(_begin_adam, _step_adam),
    SGD: Kernel(_begin_sgd, _step_sgd),
    Adagrad: Kernel(_begin_adagrad, _step_adagrad),
}
