"""Finds out whether an optimizer works element by element: steps on a tensor and on its parts must give equal bits."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..torch_private.optimizers import without_hooks

STEPS = 7  # RAdam changes its rule in the sixth
RATE = 0.01  # in place of the optimizer's own, which a warm-up may have set to 0
# Parts of a vector, then some that no kernel takes for one block; block-wise quantised states begin at 4096 elements.
_ODD: tuple[tuple[int, ...], ...] = (
    *((n,) for n in (1, 2, 3, 5, 7, 9, 11, 13, 15) * 6),
    (3, 5, 7),
    (1, 33),
    (61, 31),
    (4095,),
    (4099,),
)
# Multiples of the longest vector, and of no longer block.
_EVEN: tuple[tuple[int, ...], ...] = ((64,), (1, 64), (64, 3), (61, 64), (4160,), (2, 67, 64))
_ZEROS = 64


class Verdict(NamedTuple):
    """Says what the probe has found.

    Args:
        joins: several parameters give equal bits as one tensor. If not, each must be a tensor of its own.
        keeps_zeros: a step leaves zeros with gradients of zero as they are, so padding stays zero.
        writes_gradients: a step writes to the gradients.
    """

    joins: bool
    keeps_zeros: bool
    writes_gradients: bool


class NotElementwiseError(Exception):
    """An optimizer looks at more than one element at a time. `args[0]` says what was seen."""


def signature(options: dict[str, Any]) -> Any:
    """Returns what of an entry of `param_groups` may change the kind of step: flags, and which numbers are zero."""
    return tuple((name, _kind(value)) for name, value in sorted(options.items()) if name not in ("params", "lr"))


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, bool | None) or not isinstance(value, int | float):
        return type(value), value if isinstance(value, bool | str | None) else None
    return type(value), value == 0


def probe(optimizer: Optimizer, cls: type[Optimizer], options: dict[str, Any], like: Tensor) -> Verdict:
    """Steps on copies of some numbers, as one tensor and as several, by an optimizer like `optimizer`.

    Args:
        cls: the class whose step is meant.
        options: the entry of `param_groups` to take.
        like: a plain tensor that has the dtype and device.

    Raises:
        NotElementwiseError: the results differ, or it can't step on one of them.
    """
    example = next((_example(optimizer.state[p], p) for p in options["params"] if optimizer.state.get(p)), {})
    devices = [like.device] if like.device.type == "cuda" else []
    # What the optimizer warns of, it warns of in a step. The default device is that of training, where Adam's `step` is
    # on the CPU: on another device, another path would be probed, in which the host waits. Only meta can't be that of
    # training, because steps need values.
    default = torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
    with warnings.catch_warnings(), torch.random.fork_rng(devices), torch.inference_mode(False), default:
        warnings.simplefilter("ignore")
        odd = _compare(optimizer, cls, options, like, example, _ODD)
        if odd.differing is None:
            return Verdict(True, odd.keeps_zeros, odd.writes_gradients)
        even = _compare(optimizer, cls, options, like, example, _EVEN)
    if even.differing is not None:
        raise NotElementwiseError(f"{even.differing} of the parts of a tensor is another than that of the tensor")
    return Verdict(False, odd.keeps_zeros, odd.writes_gradients)


def _example(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Returns the state of a parameter with empty tensors in place of those that have its shape."""
    found = {}
    for name, value in state.items():
        has_shape = isinstance(value, DTensor) or (
            isinstance(value, Tensor) and value.dim() and value.shape == param.shape
        )
        found[name] = torch.empty(0, dtype=value.dtype) if has_shape else value
    return found


class _Comparison(NamedTuple):
    differing: str | None
    keeps_zeros: bool
    writes_gradients: bool


def _compare(
    optimizer: Optimizer,
    cls: type[Optimizer],
    options: dict[str, Any],
    like: Tensor,
    example: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
) -> _Comparison:
    sizes = [*map(prod, shapes), _ZEROS]
    numel, draw = sum(sizes), torch.Generator("cpu").manual_seed(0)

    def random() -> Tensor:
        values = torch.randn(numel, generator=draw, device="cpu", dtype=torch.float32).to(like.device, like.dtype)
        values[numel - _ZEROS :] = 0
        return values

    def cut(values: Tensor) -> list[Tensor]:
        parts = values.split(sizes)
        return [part.clone().view(shape) for part, shape in zip(parts, (*shapes, (_ZEROS,)), strict=True)]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    values, seeds = random(), {name: random().abs() for name in example}
    whole, parts = [nn.Parameter(values.clone())], [*map(nn.Parameter, cut(values))]
    sides = [_Side(optimizer, cls, options, params) for params in (whole, parts)]
    for side, make in zip(sides, (lambda seed: [seed.clone()], cut), strict=True):
        side.seed(example, {name: make(seed) for name, seed in seeds.items()})
    writes = False
    for _ in range(STEPS):
        gradient = random()
        sides[0].step([gradient.clone()])
        sides[1].step(cut(gradient))
        left = whole[0].grad
        writes |= left is not None and not _same(left, gradient)
    differing = None
    if not _same(whole[0].detach(), join(parts)):
        differing = "the step"
    keeps_zeros = not bool(whole[0].detach()[numel - _ZEROS :].count_nonzero())
    for name, value in sides[0].state_of(whole[0]).items():
        others = [sides[1].state_of(part).get(name) for part in parts]
        if isinstance(value, Tensor) and value.shape == whole[0].shape and type(value) is Tensor:
            found = [each for each in others if isinstance(each, Tensor)]
            is_alike = [each.shape for each in found] == [part.shape for part in parts]
            if differing is None and not (is_alike and _same(value, join(found))):
                differing = f"the state {name!r}"
        elif (isinstance(value, Tensor) and value.dim()) or isinstance(value, list | tuple | dict | set):
            raise NotElementwiseError(
                f"its state {name!r} is neither a number nor a tensor of the parameter's shape, but a "
                f"{type(value).__name__}"
            )
        elif differing is None and not all(_same_number(value, each) for each in others):
            differing = f"the state {name!r}"
    return _Comparison(differing, keeps_zeros, writes)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same(one, other)
    return bool(one == other)


class _Side:
    """An optimizer like another one, on parameters of its own."""

    def __init__(
        self, optimizer: Optimizer, cls: type[Optimizer], options: dict[str, Any], params: list[nn.Parameter]
    ) -> None:
        self._params, self._step = params, without_hooks(cls)
        self._optimizer: Any = object.__new__(cls)
        own = {name: _copied(value) for name, value in vars(optimizer).items() if name != "step"}
        hooks: dict[str, Any] = {name: OrderedDict() for name in own if name.endswith("_hooks")}
        kept = {name: value for name, value in own.items() if name not in ("grad_scale", "found_inf")}
        group: dict[str, Any] = {**options, "params": [*params]}
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = torch.full_like(rate, RATE) if isinstance(rate, Tensor) else RATE
        state: Any = defaultdict(dict)
        vars(self._optimizer).update({**kept, **hooks, "param_groups": [group], "state": state})

    def seed(self, example: dict[str, Any], elements: dict[str, list[Tensor]]) -> None:
        """Gives each parameter a state like `example`, if the optimizer can't begin without."""
        self._example, self._elements = example, elements

    def _begin(self) -> None:
        for i, param in enumerate(self._params):
            state = {}
            for name, value in self._example.items():
                if isinstance(value, Tensor) and not value.numel():
                    state[name] = self._elements[name][i].to(value.dtype)
                else:
                    state[name] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
            self._optimizer.state[param] = state

    def step(self, gradients: list[Tensor]) -> None:
        for param, gradient in zip(self._params, gradients, strict=True):
            param.grad = gradient
        try:
            try:
                self._call()
            except KeyError:
                if any(map(self._optimizer.state.get, self._params)) or not self._example:
                    raise
                self._begin()
                self._call()
        except Exception as error:
            raise NotElementwiseError(f"its step raises {type(error).__name__}: {error}") from error

    def _call(self) -> None:
        self._step(self._optimizer)

    def state_of(self, param: Tensor) -> dict[str, Any]:
        found = self._optimizer.state.get(param)
        return found if isinstance(found, dict) else {}


def _copied(value: Any) -> Any:
    """Returns an attribute that a step on the copy may change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if type(value) in (list, dict, set) else value
