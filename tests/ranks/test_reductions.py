"""Tests gradients of reductions of full sharded parameters, where one rank lacks the deciding element."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard
from helpers import assert_same, full, run_ranks, world_sizes

ORDERS = (0, 0.5, 1, 2, 3, math.inf, -math.inf)
norm = torch.linalg.vector_norm

# Penalties on a weight: numbers.
PENALTIES: dict[str, Callable[[Any], Any]] = {
    **{f"norm {order}": lambda w, order=order: w.norm(order) for order in ORDERS},
    **{f"vector_norm {order}": lambda w, order=order: norm(w, order) for order in ORDERS},
    **{
        f"vector_norm {order} over {dim}": lambda w, order=order, dim=dim: norm(w, order, dim, True).square().sum()
        for order in ORDERS
        for dim in (0, -1)
    },
    "norms of several": lambda w: torch._foreach_norm([w], math.inf)[0],
    **{name: lambda w, name=name: getattr(w, name)() for name in ("max", "min", "amax", "amin", "median", "prod")},
    "aminmax": lambda w: w.aminmax()[0] + 2 * w.aminmax()[1],
    **{
        f"{name} over {dim}": lambda w, name=name, dim=dim: getattr(w, name)(dim).square().sum()
        for name in ("amax", "amin", "logsumexp", "var", "std", "mean", "sum", "cumsum", "softmax", "log_softmax")
        for dim in (0, -1)
    },
    **{
        f"{name} over {dim}": lambda w, name=name, dim=dim: getattr(w, name)(dim)[0].square().sum()
        for name in ("max", "min", "median", "sort")
        for dim in (0, -1)
    },
    **{f"topk over {dim}": lambda w, dim=dim: w.topk(1, dim)[0].square().sum() for dim in (0, -1)},
    "logsumexp": lambda w: w.logsumexp((0, 1)),
    "var": lambda w: w.var(correction=0) + w.std(correction=0),
    "no dims": lambda w: w.sum(()) + w.mean(()) + norm(w, 3, ()) + w.amax((), keepdim=True).sum(),
    "distance": lambda w: torch.dist(w, w.detach() * 0.5, math.inf) + torch.dist(w, w.detach() * 0.5, 3),
    "scaled by the largest": lambda w: (w / w.abs().amax()).square().sum(),
    "largest norm": lambda w: w.norm(dim=-1).max() + w.max(dim=0)[0].norm(math.inf),
    "one column": lambda w: w.exp().select(-1, 0).square().sum() + w.select(-1, -1).square().sum(),
    "least of each row": lambda w: w.sort(-1)[0].select(-1, 0).square().sum(),
}


class Weighted(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum() + 0 * self.weight.sum()


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    odd, few = (torch.randn(rows, 3, generator=generator, dtype=torch.float64) for rows in (5, 2))
    last = odd.clone()
    last[-1] *= 10
    ties = odd.round().clamp(-1, 1)
    ties[0] = ties[-1]
    return {"odd": odd, "the last rank's": last, "ties": ties, "few rows": few}


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor:UserWarning")  # torch's, in the gradient of a product
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is:UserWarning")  # of what a rank holds
@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[4]))
def test_a_penalty_added_to_a_loss_has_the_plain_gradient(world_size: int) -> None:
    """The kind: an operation whose gradient reduces again, or counts, by what is no dim of the local shard: extremes
    (which divide by how many elements are the largest: `sum` over no dims), `dist`, views by negative dims.
    """

    def body(rank: int, size: int) -> None:
        shape, names = ((2, 2), ("replicas", "shards")) if size == 4 else ((size,), ("shards",))
        mesh, x = init_device_mesh("cpu", shape, mesh_dim_names=names), torch.ones(2, 3, dtype=torch.float64)
        differences: list[str] = []
        lacking: list[str] = []
        for kind, weight in [*weights().items()][1:] if size == 3 else [*weights().items()][:1]:
            model, plain = fully_shard(Weighted(weight), mesh=mesh), Weighted(weight)
            for i, (name, penalty) in enumerate(PENALTIES.items()):
                if kind != "ties" and size == 3 and i % 2 != (kind == "few rows"):
                    continue  # of the other two kinds, each operation has one in turn
                model.zero_grad()
                plain.zero_grad()
                try:
                    expected = penalty(plain.weight)
                    (plain(x) + expected).backward()
                except RuntimeError:
                    continue  # torch 2.11 has no derivative of it
                try:
                    value = penalty(model.weight)
                    (model(x) + value).backward()
                except (RuntimeError, AssertionError) as error:  # on every rank
                    lacking.append(f"{name}, {kind}: {error}")
                    continue
                try:
                    where = f"{name}, {kind}"
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    assert_same(whole, expected, 1e-9, 1e-12, f"value of {where}")
                    assert_same(full(model.weight.grad), plain.weight.grad, 1e-9, 1e-12, f"gradient of {where}")
                except AssertionError as error:
                    differences.append(str(error))
        # Torch 2.11 has no rule for some, and says so, or that it can't redistribute means.
        unclear = [text for text in lacking if "full_tensor()" not in text and "is unsupported" not in text]
        assert not unclear, unclear[0]
        assert not lacking or torch.__version__ < "2.13", lacking
        assert not differences, f"{len(differences)}: {differences[0]}"

    run_ranks(world_size, body)
