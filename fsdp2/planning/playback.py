"""Plays a recorded step with a sharded model's own hooks: bytes, order, collectives and time, without computing.

The model is a copy of an outline (outline.py), on a device whose tensors have no memory (device.py). Its modules are
called in the order of the recording. Its graph is a chain of nodes without elements: autograd reaches outputs and
inputs in the recorded order, and runs the engine's hooks there as in training. Gradients of parameters come in between,
as autograd would accumulate them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..engine.root import Root
from ..torch_private.internals import post_accumulate_hooks_of
from ..torch_private.plans import no_dispatch
from .device import DeviceOfSizes
from .outline import Outline
from .recording import BEGIN, END, GRADIENT, INPUTS, REACHED, Mark, Recording

# A call of a module: the index of the module, and which of its calls it is.
_Call = tuple[int, int]


class _EndOfMarks(Exception):
    """Leaves the modules of a forward that runs again: it ends when all is there that backward needs."""


class Playback:
    """Runs steps of a sharded copy, as a recording says.

    `order`: names of the groups in the order of the last forward. `forward_peak`: most bytes alive until it returned.

    Args:
        root: of the copy.
        outline: of which it is a copy. Marks number its modules and parameters.
        recording: of a step of the plain model.
        device: where the copy is.
    """

    def __init__(self, root: Root, outline: Outline, recording: Recording, device: DeviceOfSizes) -> None:
        self._meter, self._traffic, self._recording = device.meter, device.traffic, recording
        shells: Any = [(module, group) for group in reversed(root.groups) for module in group.modules]
        self._modules = {shell.index: shell for shell, _ in shells}
        self._groups = {shell.index: group for shell, group in shells}
        self._parameters = {outline.index_of(param): param for group in root.groups for param in group.params}
        self.order: list[str] = []
        self.forward_peak = 0
        self._forward, self._backward = _split(recording.marks)
        # What each call gets, and what it returns.
        self._inputs: dict[_Call, Tensor] = {}
        self._outputs: defaultdict[_Call, list[Tensor]] = defaultdict(list)
        # The marks of the forward that runs, and the index of the next one.
        self._marks: Sequence[Mark] = ()
        self._next = 0
        for module in self._modules.values():
            module.play = self._play

    def end_step(self) -> None:
        """Writes to the sharded parameters, as an optimizer does, and drops their gradients."""
        for param in self._parameters.values():
            if param.sharded.requires_grad:
                increment_version(param.sharded)
            param.sharded.grad = None

    def run(self) -> None:
        """Runs a forward and its backward."""
        self.order.clear()
        loss = self._build_chain()
        self._marks, self._next = self._forward, 0
        while self._next < len(self._marks):
            self._go_on()
        self.forward_peak = self._meter.peak
        self._inputs.clear()
        self._outputs.clear()
        self._traffic.in_backward = True
        loss.backward(torch.empty_like(loss))
        self._compute(self._recording.last_peak, self._recording.last_flops)

    # ---- the graph

    def _build_chain(self) -> Tensor:
        """Builds the graph from its leaf to the loss, before any module is called. Returns the loss."""
        x = torch.empty(0, device="meta", requires_grad=True)
        for marks in reversed(self._backward):
            kind, subject, call = marks[0].kind, marks[0].subject, marks[0].call
            dtype = (self._groups[subject].state.input_dtype or torch.float32) if kind == INPUTS else x.dtype
            x = _Node.apply(x, self, marks, dtype)
            if kind == GRADIENT:
                continue
            x.register_hook(_Arrival(self, marks[0]))
            if kind == INPUTS:
                self._inputs[subject, call] = x
            elif kind == REACHED:
                self._outputs[subject, call].append(x)
        return x

    def follow(self, mark: Mark) -> None:
        """Takes what the model has computed until this mark."""
        self._compute(mark.peak, mark.flops)
        self._meter.activations = mark.live

    def _compute(self, peak: int, flops: int) -> None:
        meter = self._meter
        meter.note(peak - meter.activations)
        self._traffic.compute(flops)

    def go_back(self, marks: Sequence[Mark]) -> None:
        """Does what a node of the chain stands for, when backward has come to it."""
        mark = marks[0]
        if mark.kind == REACHED:
            self._meter.doing = f"backward of {self._groups[mark.subject].name}"
        elif mark.kind == BEGIN:
            self._marks, self._next = marks, 1
            with torch.enable_grad(), suppress(_EndOfMarks):
                self._modules[mark.subject](torch.empty(0, device="meta"))
        elif mark.kind == GRADIENT:
            for each in marks:
                self.follow(each)
                self._accumulate(self._parameters[each.subject].unsharded)

    def _accumulate(self, unsharded: nn.Parameter) -> None:
        """Does what autograd does when it has computed the gradient of a parameter. Only `.grad` holds it then."""
        dtype: torch.dtype = unsharded.grad_dtype or unsharded.dtype
        if unsharded.grad is None:
            unsharded.grad = self._meter.empty(unsharded.shape, dtype)
        else:
            unsharded.grad.add_(self._meter.empty(unsharded.shape, dtype))
        for hook in tuple((post_accumulate_hooks_of(unsharded) or {}).values()):
            hook(unsharded)

    # ---- forward

    def _go_on(self) -> Mark:
        """Goes on to the next mark, and calls the module that begins there. Returns the mark."""
        if self._next == len(self._marks):
            raise _EndOfMarks
        mark = self._marks[self._next]
        self._next += 1
        self.follow(mark)
        if mark.kind == BEGIN:
            inputs = None
            if not mark.flag:
                name = self._groups[mark.subject].name
                self._meter.doing = f"forward of {name}"
                self.order.append(name)
                inputs = self._inputs.get((mark.subject, mark.call))
            with torch.set_grad_enabled(mark.has_grad):
                self._modules[mark.subject](torch.empty(0, device="meta") if inputs is None else inputs)
        return mark

    def _play(self) -> Any:
        """Plays the marks until the end of a module that has begun, in its forward. Returns its outputs."""
        mark = self._go_on()
        while mark.kind != END:
            mark = self._go_on()
        outputs = self._outputs.get((mark.subject, mark.call)) if mark.flag else None
        # A loss may use none of them.
        return tuple(outputs) if outputs else torch.empty(0, device="meta", requires_grad=mark.flag).view(-1)


def _split(marks: Sequence[Mark]) -> tuple[list[Mark], list[list[Mark]]]:
    """Returns the marks of the forward, and those of backward: a list for each node of the chain, which has one mark,
    those of a forward that runs again, or those of gradients that come one after the other.
    """
    kinds = (REACHED, INPUTS, GRADIENT)
    first = next(
        (i for i, mark in enumerate(marks) if mark.kind in kinds or (mark.flag and mark.kind == BEGIN)), len(marks)
    )
    nodes: list[list[Mark]] = []
    depth = 0
    for mark in marks[first:]:
        if depth and mark.kind in (BEGIN, END):
            nodes[-1].append(mark)
            depth += 1 if mark.kind == BEGIN else -1
        elif nodes and mark.kind == nodes[-1][0].kind == GRADIENT:
            nodes[-1].append(mark)
        else:
            nodes.append([mark])
            depth = int(mark.kind == BEGIN)
    return [*marks[:first]], nodes


class _Arrival:
    """A hook on a tensor of the chain, which is called before the engine's hooks there."""

    def __init__(self, playback: Playback, mark: Mark) -> None:
        self._playback, self._mark = playback, mark

    def __call__(self, gradient: Tensor) -> None:
        self._playback.follow(self._mark)


class _Node(torch.autograd.Function):
    """A node of the chain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, playback: Playback, marks: Sequence[Mark], dtype: torch.dtype) -> Tensor:
        ctx.playback, ctx.marks, ctx.dtype = playback, marks, x.dtype
        with no_dispatch():
            return torch.empty(0, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.playback.go_back(ctx.marks)
        if gradient.dtype != ctx.dtype:
            with no_dispatch():
                gradient = torch.empty(0, dtype=ctx.dtype, device="meta")
        return gradient, None, None, None
