"""Tests that LoRA and DoRA adapters of frozen weights are saved and merged as on the plain model.

`trace/test_frozen.py` counts what frozen weights cost, `test_training` trains them,
`examples/lora.py` is a whole program.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers import alone, assert_same, run_checks
from models import LoRALinear
from scenarios import TOLERANCE, WIDTH, Run, blocks, loss_of

INNER, RANK = 7, 2


class LoRA(LoRALinear):
    """y = (W + B A) x, W frozen. B starts away from zero, so that both get gradients at once."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, RANK)

    def merged(self) -> Tensor:
        return self.base.weight + self.up @ self.down


class DoRA(LoRA):
    """y = m * (W + B A) / |W + B A| x, row by row: a norm over frozen and trained weights, the magnitude learnt."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1, keepdim=True).detach())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.merged(), self.base.bias)

    def merged(self) -> Tensor:
        direction = super().merged()
        return self.magnitude * direction / direction.norm(dim=1, keepdim=True).detach()


class Adapted(nn.Module):
    """Adapted layers around one that is frozen altogether."""

    def __init__(self, kind: type[LoRA]) -> None:
        super().__init__()
        self.first = kind(WIDTH, INNER)
        self.frozen = nn.Linear(INNER, INNER).requires_grad_(False)
        self.tied = nn.Linear(INNER, INNER, bias=False).requires_grad_(False)
        self.tied.weight = self.frozen.weight
        self.last = kind(INNER, WIDTH)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.frozen, self.last):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return x


def adapters_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# ---- numbers ---------------------------------------------------------------------------------------------------------


def trained(run: Run, kind: type[LoRA]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = run.build(Adapted, kind)
    blocks(run, model)
    optimizer = torch.optim.AdamW(adapters_of(model), lr=0.05, eps=1e-3, fused=True)
    for step in range(2):
        loss_of(model(run.batch(seed=step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def merge_into(plain: nn.Module, model: Adapted) -> None:
    """What serving wants: one weight per layer."""
    for source, target in ((model.first, plain[0]), (model.frozen, plain[2]), (model.last, plain[4])):
        target.weight.copy_(source.merged() if isinstance(source, LoRA) else source.weight)
        target.bias.copy_(source.base.bias if isinstance(source, LoRA) else source.bias)


def test_adapters_go_out_and_are_merged() -> None:
    """The saved ones are the trained ones alone; with the base they make the same function as the sharded model."""
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    plain = {kind: alone(lambda kind=kind: dict(trained(Run(), kind)[0].state_dict())) for kind in (LoRA, DoRA)}

    def saves_and_merges(kind: type[LoRA]) -> None:
        run = Run(dist.get_rank(), 2, [])
        model, optimizer = trained(run, kind)
        output = model(batch).detach()
        adapters = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        )
        moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert set(moments["state"]) == trainable
        if run.rank:
            return
        assert set(adapters) - trainable <= {"tied.weight"}, "torch leaves one name of a tied parameter that is frozen"
        adapters = {name: value for name, value in adapters.items() if name in trainable}  # as the guide says
        assert set(adapters) == trainable
        for name, value in adapters.items():
            assert_same(value, plain[kind][name], **TOLERANCE, name=name)
        with torch.no_grad():
            loaded = Run().build(Adapted, kind)
            loaded.load_state_dict(adapters, strict=False)
            merged = nn.Sequential(
                *(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)),
                nn.Tanh(),
            ).double()
            merge_into(merged, loaded)
            assert_same(merged(batch), output, **TOLERANCE, name="merged")

    run_checks(2, [(kind.__name__, functools.partial(saves_and_merges, kind)) for kind in (LoRA, DoRA)])


def test_merged_in_place() -> None:
    """W := W + B A on the shards themselves, the adapters then zero: DTensors multiply, and forward sees the result."""

    def merges() -> None:
        run = Run(dist.get_rank(), 2, [])
        model, _ = trained(run, LoRA)
        batch = run.batch(seed=9)
        before = model(batch).detach()
        with torch.no_grad():
            for layer in (model.first, model.last):
                layer.base.weight.add_(layer.up @ layer.down)
                layer.up.zero_()
        assert isinstance(model.first.base.weight, DTensor)
        assert_same(model(batch).detach(), before, **TOLERANCE, name="output")

    run_checks(2, [("merges", merges)])
