"""Models of which each rank leaves out modules of its own choice: `plan` names the optional modules that it runs."""

import random
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import TinyModel
from scenarios import WIDTH, Block

Plan = frozenset[str]


class Conditional(TinyModel):
    """Draws the plan of a rank and a step."""

    optional: ClassVar[tuple[str, ...]] = ()
    plan: Plan = frozenset()

    def before_step(self, step: int) -> None:
        drawn = random.Random(step)
        chosen = [name for name in self.optional if step % 5 == 1 or drawn.random() < 0.5]
        self.plan = frozenset(chosen if step % 5 else ())

    def groups(self) -> list[tuple[nn.Module, bool]]:
        """Returns the modules to shard, and whether ranks may leave them out."""
        raise NotImplementedError


class Tower(nn.Module):
    """Has blocks inside a module with parameters of its own: an image tower."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner=i + 2) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Multimodal(Conditional):
    """Has towers that a batch may lack, and a language model that always runs."""

    optional = ("image", "audio")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.image = Tower()  # registered in another order than they run in
        self.audio = Tower(1)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        inner = [*self.image.blocks, *self.audio.blocks, *self.layers]
        return [*((block, False) for block in inner), (self.image, True), (self.audio, True), (self, False)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for name in ("audio", "image"):
            if name in self.plan:
                hidden = hidden + getattr(self, name)(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Dropped(Conditional):
    """Has layers, each of which may be left out, between a stem and a head; `recompute` checkpoints them."""

    optional = ("0", "1", "2")

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(inner=i + 2) for i in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def groups(self) -> list[tuple[nn.Module, bool]]:
        return [*((layer, True) for layer in self.layers), (self, False)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.optional:
            if name in self.plan:
                x = self._run(self.layers[int(name)], x)
        return self.head(x)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.recompute)


class ExpertLayer(nn.Module):
    """Always runs, with experts inside, all of which hand their output to the layer's last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block(inner=i + 1) for i in range(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        hidden = torch.tanh(self.up(x))
        outputs = [expert(hidden) for i, expert in enumerate(self.experts) if str(i) in plan]
        return x + self.down(sum(outputs, hidden))


class Mixture(Conditional):
    """Has two layers of experts."""

    optional = ("0", "1", "2")

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(2))

    def groups(self) -> list[tuple[nn.Module, bool]]:
        experts = [(expert, True) for layer in self.layers for expert in layer.experts]
        return [*experts, *((layer, False) for layer in self.layers), (self, False)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, self.plan)
        return x


class Nested(Conditional):
    """Has an optional module inside an optional one, and one that runs last, whose output only adds to the loss."""

    optional = ("outer", "inner", "last")

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.outer = nn.ModuleDict({"first": Block(inner=2), "inner": Block(inner=4)})
        self.last = Block(inner=2)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        first, inner = self.outer["first"], self.outer["inner"]
        return [(inner, True), (first, True), (self.stem, False), (self.last, True), (self, False)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if "outer" in self.plan:
            x = self.outer["first"](x)
            if "inner" in self.plan:
                x = self.outer["inner"](x)
        return self.last(x) if "last" in self.plan else x


class Passing(nn.Module):
    """Always runs. Without its optional part it returns what it got; what it computes besides is for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 2)
        self.inner = Block(inner=2)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        self.aside = self.side(torch.tanh(x)).square().mean()
        return self.inner(x) if "inner" in plan else x


class Passed(Conditional):
    """Has such a layer between others."""

    optional = ("inner",)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layer = Passing()
        self.last = Block(inner=3)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        return [(self.layer.inner, True), (self.layer, False), (self.last, False), (self, False)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(torch.tanh(x + self.layer(x, self.plan))) + self.layer.aside


class Counts(torch.autograd.Function):
    """Adds nothing to `x`, but communicates in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0 * _sum_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0 * _sum_over_ranks(gradient)


def _sum_over_ranks(x: Tensor) -> Tensor:
    total = x.sum().reshape(1).repeat(3)
    if dist.is_initialized():
        dist.all_reduce(total)
        dist.all_gather([torch.empty_like(total) for _ in range(dist.get_world_size())], tensor=total)
    return total[0]


class Counting(Dropped):
    """Has the same layers, with a user's own collectives between them."""

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = Counts.apply(self.stem(x))
        for name in self.optional:
            x = Counts.apply(self._run(self.layers[int(name)], x) if name in self.plan else x)
        return self.head(x)
