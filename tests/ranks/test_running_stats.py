"""Tests that running statistics of BatchNorm and similar layers are averaged over the ranks after each step."""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard, replicate, set_checks
from fsdp2.features import running_stats
from helpers import full, run_checks, world_sizes

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
    set_checks("off")  # or it would be an error
    model = build()
    on_one_mesh(model)
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    model[1].eval()
    for seed in range(3):
        model(batch(seed, rank)).sum().backward()
    assert (model[1].running_mean == rank).all()
    set_checks("default")


def one_rank_alone(trains: bool) -> None:
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
    if trains:
        model(batch(0, rank)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(batch(0, rank))
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


# ---- reads behind the last forward


def without_grad(model: Any, passes: int) -> None:
    """As `torch.optim.swa_utils.update_bn` does it."""
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for seed in range(passes):
            model(batch(seed, rank))


def in_inference_mode(model: Any, passes: int) -> None:
    rank = torch.distributed.get_rank()
    with torch.inference_mode():
        for seed in range(passes):
            model(batch(seed, rank))


def with_grad(model: Any, passes: int) -> None:
    rank = torch.distributed.get_rank()
    for seed in range(passes):
        model(batch(seed, rank))


def behind_steps(model: Any, passes: int) -> None:
    """The last forward has no backward. No parameter changes."""
    rank = torch.distributed.get_rank()
    for seed in range(passes):
        loss = model(batch(seed, rank)).sum()
        if seed < passes - 1:
            loss.backward()
            model.zero_grad()


def behind_steps_without_grad(model: Any, passes: int) -> None:
    rank = torch.distributed.get_rank()
    for seed in range(passes):
        with torch.set_grad_enabled(seed < passes - 1):
            loss = model(batch(seed, rank)).sum()
        if loss.requires_grad:
            loss.backward()
            model.zero_grad()


def of_state_dict(model: Any) -> list[Tensor]:
    return [value.clone() for name, value in model.state_dict().items() if name.endswith(STATS)]


def of_a_copy(model: Any) -> list[Tensor]:
    return stats_of(copy.deepcopy(model))


def of_a_plain_model(model: Any) -> list[Tensor]:
    plain = build()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    return stats_of(plain)


def of_a_checkpoint(model: Any) -> list[Tensor]:
    folder: list[Any] = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.endswith(STATS)}
    dcp.load({"model": state}, checkpoint_id=folder[0])
    return [*state.values()]


def read_behind(
    run: Callable[[Any, int], None],
    read: Callable[[Any], list[Tensor]] = stats_of,
    wrap: Callable[[Any], Any] = on_one_mesh,
    passes: int = 3,
) -> None:
    model = build()
    expected = expected_of(model, torch.distributed.get_world_size(), passes)
    wrap(model)
    run(model, passes)
    for found, each in zip(read(model), expected, strict=True):
        torch.testing.assert_close(found, each)


class Checkpointed(nn.Module):
    """Runs its normalisation again in backward, which changes the statistics once more, as in a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)  # type: ignore[no-any-return]


def run_again_in_backward() -> None:
    """Exact behind each step, the first as well as later ones."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, of_ranks = Checkpointed(), [Checkpointed() for _ in range(ranks)]
    fully_shard(model.layers[0])
    fully_shard(model)
    for seed in range(10):
        for each, plain in enumerate(of_ranks):
            plain(batch(seed, each)).sum().backward()
        model(batch(seed, rank)).sum().backward()
        expect(model, mean_of([stats_of(plain) for plain in of_ranks]))  # weights do not change


def number_of_averages(model: Any, run: Callable[[int], object], steps: int) -> list[int]:
    """Returns how often ranks average in each step."""
    found = []
    for seed in range(steps):
        with mock.patch.object(running_stats, "all_reduce_over", wraps=running_stats.all_reduce_over) as spy:
            run(seed)
        found.append(spy.call_count)
    return found


def once_in_a_step() -> None:
    """In the first step, nobody knows yet whether modules run again in backward."""
    rank = torch.distributed.get_rank()
    for wrap in (on_one_mesh, norms_apart, partial(on_one_mesh, reshard_after_forward=True), replicate):
        model: Any = build()
        wrap(model)
        counts = number_of_averages(model, lambda seed, model=model: model(batch(seed, rank)).sum().backward(), 6)
        assert counts == [2, 1, 1, 1, 1, 1], counts
    again: Any = fully_shard(Checkpointed())
    assert number_of_averages(again, lambda seed: again(batch(seed, rank)).sum().backward(), 6) == [2, 1, 1, 1, 1, 1]
    model = build()
    on_one_mesh(model)
    model.set_requires_gradient_sync(False)
    assert number_of_averages(model, lambda seed: model(batch(seed, rank)).sum().backward(), 4) == [1] * 4


READS = [
    *(
        (f"{run.__name__}, {read.__name__}", partial(read_behind, run, read))
        for run in (without_grad, with_grad, behind_steps, behind_steps_without_grad)
        for read in (stats_of, of_state_dict)
    ),
    *((f"{read.__name__}", partial(read_behind, without_grad, read)) for read in (of_a_copy, of_a_plain_model)),
    ("of a checkpoint", partial(read_behind, without_grad, of_a_checkpoint)),
    ("inference mode", partial(read_behind, in_inference_mode)),
    *((f"one pass, {run.__name__}", partial(read_behind, run, passes=1)) for run in (without_grad, with_grad)),
    *(
        (f"{run.__name__}, {name}", partial(read_behind, run, wrap=wrap))
        for name, wrap in WRAPS.items()
        for run in (without_grad, behind_steps)
    ),
    ("run again in backward", run_again_in_backward),
    ("once in a step", once_in_a_step),
]


@pytest.mark.parametrize("ranks", world_sizes(2, nightly=[3]))
def test_reads_behind_the_last_forward(ranks: int) -> None:
    run_checks(ranks, READS)


CHECKS = [
    *((f"each step, {name}", partial(each_step, wrap)) for name, wrap in WRAPS.items()),
    ("half precision, rounded once", partial(each_step, on_one_mesh, dtype=torch.bfloat16, rtol=0, atol=0)),
    ("instance norm", partial(each_step, on_one_mesh, partial(nn.InstanceNorm1d, track_running_stats=True))),
    ("no norm", partial(each_step, on_one_mesh, nn.Identity)),
    ("no statistics", partial(each_step, on_one_mesh, partial(nn.BatchNorm1d, track_running_stats=False))),
    *((each.__name__, each) for each in (in_an_accumulation, without_backward, frozen)),
    *((f"one rank alone, {trains=}", partial(one_rank_alone, trains)) for trains in (False, True)),
    *((each.__name__, each) for each in (not_averaged, copies_average)),
]


@pytest.mark.parametrize("ranks", world_sizes(2, nightly=[3]))
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
