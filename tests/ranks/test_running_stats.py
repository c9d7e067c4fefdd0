"""Tests that running statistics of BatchNorm and similar layers are averaged over the ranks after each step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from fsdp2 import fully_shard, replicate
from helpers import run_checks, world_sizes

WIDTH = 6
STATS = ("running_mean", "running_var")


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, 5, generator=torch.Generator().manual_seed(10 * seed + rank))


def build(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), norm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1), norm(WIDTH))


def expected_of(model: nn.Module, ranks: int, passes: int) -> list[Tensor]:
    """After so many forwards of each rank, each from its own statistics. Weights do not change."""
    of_ranks = []
    for rank in range(ranks):
        own = copy.deepcopy(model)
        for seed in range(passes):
            own(batch(seed, rank))
        of_ranks.append(stats_of(own))
    return mean_of(of_ranks)


def mean_of(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*of_ranks, strict=True)]


def stats_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith(STATS)]


def expect(model: nn.Module, expected: list[Tensor], **tolerance: float) -> None:
    for found, each in zip(stats_of(model), expected, strict=True):
        torch.testing.assert_close(found, each, **tolerance)


def on_one_mesh(model: Any, **options: Any) -> None:
    fully_shard(model[0], **options)
    fully_shard(model, **options)


def norms_apart(model: Any) -> None:
    """The root has nothing of its own to gather or reduce."""
    for module in (*model, model):
        fully_shard(module)


def pairs(model: Any) -> None:
    on_one_mesh(model, mesh=init_device_mesh("cpu", (2, 2)))


WRAPS = {
    "sharded": on_one_mesh,
    "kept": partial(on_one_mesh, reshard_after_forward=False),
    "norms apart": norms_apart,
    "replicated": replicate,
}


def each_step(
    wrap: Callable[[Any], Any],
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
    dtype: torch.dtype = torch.float32,
    **tolerance: float,
) -> None:
    """They are what a step from the last mean makes of them, on average."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, plain = build(norm).to(dtype), build(norm).to(dtype)
    wrap(model)
    for seed in range(3):
        of_ranks = []
        before = copy.deepcopy(plain.state_dict())
        for each in range(ranks):
            plain.load_state_dict(before)
            plain(batch(seed, each).to(dtype))
            of_ranks.append(stats_of(plain))
        mean = mean_of(of_ranks)
        for buffer, each in zip((b for n, b in plain.named_buffers() if n.endswith(STATS)), mean, strict=True):
            buffer.copy_(each)
        model(batch(seed, rank).to(dtype)).sum().backward()
        expect(model, mean, **tolerance)


def in_an_accumulation() -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build()
    expected = expected_of(model, ranks, passes=2)
    on_one_mesh(model)
    model.set_requires_gradient_sync(False)
    model(batch(0, rank)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(batch(1, rank)).sum().backward()
    expect(model, expected)  # linear in what each batch brings, wherever the means are taken


def without_backward() -> None:
    """As `torch.optim.swa_utils.update_bn` does it, then evaluation."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build()
    expected = expected_of(model, ranks, passes=2)
    on_one_mesh(model)
    with torch.no_grad():
        for seed in range(2):
            model(batch(seed, rank))
        model.eval()
        model(batch(2, rank))
        expect(model, expected)
        model(batch(2, rank))
    expect(model, expected)


def frozen() -> None:
    """Statistics that are only used stay as they are, where ranks have others, too; so backward may read them."""
    rank = torch.distributed.get_rank()
    model = build()
    on_one_mesh(model)
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    model[1].eval()
    for seed in range(3):
        model(batch(seed, rank)).sum().backward()
    assert (model[1].running_mean == rank).all()


def one_rank_alone() -> None:
    """What one does with full parameters waits for nobody; the next step averages what it left."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build()
    on_one_mesh(model)
    for module in (model, model[0]):
        module.unshard()
    if rank == 0:
        with torch.no_grad():
            model(batch(7, rank))
    for module in (model, model[0]):
        module.reshard()
    model(batch(0, rank)).sum().backward()
    model.eval()
    mean = model[1].running_mean.clone()
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(mean / ranks, model[1].running_mean)


def not_averaged() -> None:
    rank = torch.distributed.get_rank()
    plain, model = build(), build()
    on_one_mesh(model)
    model.set_running_stats_averaging(False)
    for seed in range(2):
        plain(batch(seed, rank))
        model(batch(seed, rank)).sum().backward()
    expect(model, stats_of(plain))
    expect(copy.deepcopy(model), stats_of(plain))


def copies_average() -> None:
    """And keep the choice."""
    rank = torch.distributed.get_rank()
    model = build()
    on_one_mesh(model)
    for enabled in (True, False):
        model.set_running_stats_averaging(enabled)
        other = copy.deepcopy(model)
        other(batch(rank, rank)).sum().backward()
        mean = other[1].running_mean.clone()
        torch.distributed.all_reduce(mean)
        assert torch.allclose(mean / torch.distributed.get_world_size(), other[1].running_mean) == enabled


CHECKS = [
    *((f"each step, {name}", partial(each_step, wrap)) for name, wrap in WRAPS.items()),
    ("half precision, rounded once", partial(each_step, on_one_mesh, dtype=torch.bfloat16, rtol=0, atol=0)),
    ("instance norm", partial(each_step, on_one_mesh, partial(nn.InstanceNorm1d, track_running_stats=True))),
    ("no norm", partial(each_step, on_one_mesh, nn.Identity)),
    ("no statistics", partial(each_step, on_one_mesh, partial(nn.BatchNorm1d, track_running_stats=False))),
    *((each.__name__, each) for each in (in_an_accumulation, without_backward, frozen, one_rank_alone)),
    *((each.__name__, each) for each in (not_averaged, copies_average)),
]


@pytest.mark.parametrize("ranks", world_sizes(3, nightly=[2]))
def test_they_are_averaged(ranks: int) -> None:
    run_checks(ranks, CHECKS)


def beside_tensor_parallelism() -> None:
    """Buffers that distribute_module has made DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_local_rank("dp")
    plain, model = (nn.BatchNorm1d(WIDTH) for _ in range(2))
    distribute_module(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    x = DTensor.from_local(batch(0, rank), mesh["tp"], [Replicate()])
    model(x).sum().backward()
    for name, expected in zip(STATS, expected_of(plain, 2, passes=1), strict=True):
        torch.testing.assert_close(model.get_buffer(name).full_tensor(), expected)


# Torch 2.11 has no batch norm of DTensors.
ON_FOUR = [partial(each_step, pairs), *([] if torch.__version__ < "2.13" else [beside_tensor_parallelism])]


def test_on_four_ranks() -> None:
    run_checks(4, [(str(check), check) for check in ON_FOUR])
