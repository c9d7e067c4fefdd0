"""Draws the timeline of models that torch's FSDP2 has sharded, from hooks of their modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..shards.protocol import ShardGroup, Shards
from ..shards.tensors import on_backward_end, some_of, tensors_in
from .picture import MODULES, OPTIMIZER, Picture


@contextmanager
def record_hooks(model: nn.Module, shards: Shards, rank: int, path: Path) -> Iterator[None]:
    """Context: hooks the sharded modules in `model`, and writes the picture to `path` at the end."""
    timeline = _Timeline(shards, rank)
    with ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(timeline.before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(timeline.after_step).remove)
        hooks.callback(model.register_forward_pre_hook(timeline.before_pass, prepend=True).remove)
        hooks.callback(model.register_forward_hook(timeline.after_pass, always_call=True).remove)
        for group in shards.groups:
            for module in group.modules:
                before, after = partial(timeline.before_forward, group), partial(timeline.after_forward, group)
                hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        try:
            yield
        finally:
            timeline.write(path)


class _Timeline(Picture):
    """Is told by hooks of modules and optimizers."""

    def __init__(self, shards: Shards, rank: int) -> None:
        super().__init__(rank)
        self._shards = shards
        self._params = [param for group in shards.groups for param in group.params]
        self._device = shards.groups[0].ranks.device
        self._open: list[tuple[nn.Module, float]] = []  # forwards that run
        self._step_began: dict[int, float] = {}
        self.refresh()

    def refresh(self) -> None:
        gradients = [grad.nbytes for param in self._params if (grad := param.grad) is not None]
        resting = sum(param.local.nbytes for param in self._params)
        self.count({"resting": resting, "gradients": sum(gradients)}, self._device)

    def before_pass(self, *_: Any) -> None:
        """A forward of the model begins."""
        self.begin_pass("forward")

    def after_pass(self, module: nn.Module, _: Any, output: Any) -> None:
        """A forward of the model has ended. Backward begins where it reaches an output."""
        self.end_pass("forward")
        self._on_gradient(output, self._begin_backward)

    def before_forward(self, group: ShardGroup, module: nn.Module, *_: Any) -> None:
        """A forward of a sharded module begins."""
        self._open.append((module, self.now()))

    def after_forward(self, group: ShardGroup, module: nn.Module, _: Any, output: Any) -> None:
        """A forward of a sharded module has ended, or raised."""
        while any(each is module for each, _ in self._open):
            each, began = self._open.pop()
            if each is module:
                self.span(group.name, MODULES, began)
                break
        self._on_gradient(output, partial(self.note, "i", f"backward reaches {group.name}", MODULES, s="t"))

    def _on_gradient(self, output: Any, call: Any) -> None:
        tensors: list[Tensor] = [each for each in tensors_in(output) if each.grad_fn is not None]
        if tensors:
            register_multi_grad_hook(tensors, lambda _: call(), mode="any")

    def _begin_backward(self) -> None:
        self.begin_pass("backward")
        on_backward_end(partial(self.end_pass, "backward"))

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step begins."""
        self._step_began[id(optimizer)] = self.now()

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step has ended."""
        began = self._step_began.pop(id(optimizer), None)
        if began is not None:
            found = [self._shards.find(param) for group in optimizer.param_groups for param in group["params"]]
            params = [param for param in found if param is not None]
            names = some_of(dict.fromkeys(param.group.name for param in params))
            nbytes = sum(param.local.nbytes for param in params)
            self.span(f"step {type(optimizer).__name__}", OPTIMIZER, began, groups=names, bytes=nbytes)
            self.refresh()
