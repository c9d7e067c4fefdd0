"""Tests a mixture of experts: each rank of one mesh axis has different experts, which the other axis shards.

All-to-all sends tokens to their experts and back. The dense part is sharded over all ranks. The oracle is a plain model
with all experts, on the whole batch, in fp64.

Experts get gradients from the tokens of all ranks, while fully_shard averages over the axis that shards them: the
divisor is set to the number of all ranks, as usual.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from helpers import Differences, assert_same, assert_same_names, full, run_checks, shard_batch
from models import TinyModel, mean_loss
from scenarios import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

RANKS, STEPS, ROWS = 4, 3, 8
EXPERTS, WIDTH, INNER = 4, 6, 5


# ---- a model ---------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """All experts' weights in two parameters. `ep`: the axis over which they are distributed, if any."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.4)
        self.ep: DeviceMesh | None = None

    def distribute(self, ep: DeviceMesh) -> None:
        self.ep = ep
        for name, param in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(param, ep, [Shard(0)])))

    def forward(self, tokens: Tensor, choice: Tensor) -> Tensor:
        """tokens (N, WIDTH), choice (N,): each token through its expert."""
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS)
        outputs = self._travel(tokens[order], counts) if self.ep else self._compute(tokens[order], counts.tolist())
        return torch.empty_like(outputs).index_copy(0, order, outputs)

    def _compute(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """`tokens` lie expert by expert. Every expert computes, if only on no token: all ranks need its gradient."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = tokens.split(counts)
        return torch.cat([torch.tanh(part @ up[i]) @ down[i] for i, part in enumerate(parts)])

    def _travel(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """To the ranks that own the experts, and back."""
        assert self.ep is not None
        group, size = self.ep.get_group(), self.ep.size()
        arriving = torch.empty_like(counts)  # of each source rank, for each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (each.view(size, -1).sum(1).tolist() for each in (counts, arriving))
        tokens = all_to_all_single_autograd(tokens, received, sent, group)
        by_expert = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(arriving).argsort(stable=True)
        outputs = self._compute(tokens[by_expert], arriving.view(size, -1).sum(0).tolist())
        outputs = torch.empty_like(outputs).index_copy(0, by_expert, outputs)
        return all_to_all_single_autograd(outputs, sent, received, group)


class Layer(nn.Module):
    """A router that sends each token to its best expert, and weighs what comes back; a shared dense path beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        mixed = weight.unsqueeze(-1) * self.experts(tokens, choice)
        return x + self.shared(x) + mixed.unflatten(0, x.shape[:2])


class Mixture(TinyModel):
    row_shape = (3, WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


def plain(seed: int = 1) -> Mixture:
    torch.manual_seed(seed)
    return Mixture().double()


def make(seed: int = 1, along: int = 0, ep: int = 2, hsdp: bool = False, **options: Any) -> Mixture:
    """`ep` ranks share the experts, the others shard each expert's weights along dim `along`."""
    model, size = plain(seed), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("shard", "ep"))
    dense = init_device_mesh("cpu", (2, size // 2) if hsdp else (size,))
    for layer in model.layers:
        layer.experts.distribute(mesh["ep"])
        fully_shard(layer.experts, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(along), **options)
        layer.experts.set_gradient_divide_factor(size)
        fully_shard(layer, mesh=dense, **options)
    return fully_shard(model, mesh=dense, **options)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, foreach=False)


def compare(model: nn.Module, expected: nn.Module, different: Differences, what: str, gradients: bool = False) -> None:
    assert_same_names(dict(model.named_parameters()), dict(expected.named_parameters()))
    for (name, p), q in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        actual, whole = (p.grad, q[1].grad) if gradients else (p, q[1].detach())
        value = None if actual is None else full(actual)
        with different.noted():
            assert_same(value, whole, **TOLERANCE, name=f"{what}: {name}")


def own(batch: Tensor) -> Tensor:
    return shard_batch(batch, dist.get_rank(), dist.get_world_size())


# ---- checks ----------------------------------------------------------------------------------------------------------


def trains(recomputes: bool = False, micro_batches: int = 1, **options: Any) -> None:
    """Gradients in each step, clipped over both meshes at once, and what becomes of the parameters."""
    different, model, expected = Differences(), make(**options), plain()
    model.recomputes = recomputes
    optimizers = optimizer_for(model), optimizer_for(expected)
    for step in range(STEPS):
        for i in range(micro_batches):
            batch = model.example(rows=ROWS, seed=10 * step + i).double()
            model.set_requires_gradient_sync(i == micro_batches - 1)
            mean_loss(model(own(batch))).backward()
            mean_loss(expected(batch)).backward()
        compare(model, expected, different, f"step {step}, gradients", gradients=True)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        with different.noted():
            plain_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            assert_same(norm, plain_norm, **TOLERANCE, name=f"step {step}: norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(model, expected, different, "trained")
    different.raise_first()


def each_rank_holds_its_part() -> None:
    """A quarter of the experts' numbers; the others of its axis have other experts, not copies."""
    model = make()
    experts = model.layers[0].experts
    assert experts.up.to_local().shape == (EXPERTS // RANKS, WIDTH, INNER)
    assert model.layers[0].shared.weight.to_local().numel() <= WIDTH * WIDTH // 2
    experts.unshard()
    assert experts.up.to_local().shape == (EXPERTS // 2, WIDTH, INNER)
    experts.reshard()


def an_expert_without_tokens() -> None:
    """All tokens go to expert 0: what the others get is zero, on the rank that has none as well; nobody waits."""
    different, model, expected = Differences(), make(), plain()
    with torch.no_grad():
        for each in (model, expected):
            for layer in each.layers:
                layer.router.weight.zero_()  # a tie: the first wins
    batch = model.example(rows=ROWS, seed=1).double()
    mean_loss(model(own(batch))).backward()
    mean_loss(expected(batch)).backward()
    compare(model, expected, different, "gradients", gradients=True)
    assert full(model.layers[0].experts.up.grad)[1:].count_nonzero() == 0
    different.raise_first()


def computes_in_lower_precision() -> None:
    """The dense part, with the router, in the stored dtype and the experts in bf16: no NaN, the same to a percent."""
    different, model, expected = Differences(), plain().float(), plain().float()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in model.layers:
        layer.experts.distribute(mesh["ep"])
        fully_shard(layer.experts, mesh=mesh["shard"], mp_policy=low)
        layer.experts.set_gradient_divide_factor(RANKS)
    fully_shard(model)
    batch = model.example(rows=ROWS, seed=1)
    mean_loss(model(own(batch))).backward()
    mean_loss(expected(batch)).backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = full(p.grad)
        with different.noted():
            assert_same(gradient, q.grad, rtol=0.02, atol=0.02 * q.grad.abs().max().item(), name=name)
    different.raise_first()


def continued(expected: Mixture, steps: range) -> None:
    optimizer = optimizer_for(expected)
    for step in steps:
        mean_loss(expected(expected.example(rows=ROWS, seed=step).double())).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(model: Mixture, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        mean_loss(model(own(model.example(rows=ROWS, seed=step).double()))).backward()
        optimizer.step()
        optimizer.zero_grad()


def saves(path: Path) -> None:
    """In shards, and as one whole on rank 0 that a plain model loads."""
    model, expected = make(), plain()
    optimizer = optimizer_for(model)
    train(model, optimizer, range(2))
    continued(expected, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=path)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in state.items():
        assert_same(value, expected.state_dict()[name], **TOLERANCE, name=name)


def loads(path: Path, ep: int) -> None:
    """Onto another number of ranks, of which others share the experts."""
    different, model, expected = Differences(), make(seed=99, ep=ep), plain()
    optimizer = optimizer_for(model)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(model, optimizer, range(2, 4))
    continued(expected, range(4))
    compare(model, expected, different, "continued")
    different.raise_first()


def test_training() -> None:
    """Two ranks share the experts and two shard them; also all four share them, and none does."""
    cases: list[tuple[Callable[..., None], dict[str, Any]]] = [
        (trains, {}),
        (trains, {"along": 1, "recomputes": True}),
        (trains, {"along": 2, "micro_batches": 2, "reshard_after_forward": False}),
        (trains, {"ep": 4, "hsdp": True}),
        (trains, {"ep": 1}),
        (each_rank_holds_its_part, {}),
        (an_expert_without_tokens, {}),
        (computes_in_lower_precision, {}),
    ]
    run_checks(
        RANKS, [(f"{check.__name__} {options}", functools.partial(check, **options)) for check, options in cases]
    )


def test_checkpoints(tmp_path: Path) -> None:
    run_checks(RANKS, [("saves", functools.partial(saves, tmp_path))])
    run_checks(2, [(f"loads {ep}", functools.partial(loads, tmp_path, ep)) for ep in (1, 2)])
