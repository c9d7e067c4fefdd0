"""Tests random operations on DTensors against the same on plain tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp2 import fully_shard
from fsdp2.dtensor.fixes import correct_torch
from helpers import assert_same, run_ranks, sharded, world_sizes


def distributed(whole: Tensor, placement: Any) -> Any:
    return sharded(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [placement], src_data_rank=None)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_random_tensors_like_a_weight_are_those_like_a_plain_tensor(world_size: int) -> None:
    draws: list[Callable[[Any], Any]] = [
        torch.rand_like,
        torch.randn_like,
        lambda like: torch.randn_like(like, dtype=torch.float32),
        lambda like: torch.randint_like(like, 7),
        lambda like: torch.randint_like(like, 3, 7),
    ]

    def body(rank: int, _: int) -> None:
        correct_torch()
        for i, draw in enumerate(draws):
            for placement in (Shard(0), Shard(1), Replicate()):
                like = distributed(torch.zeros(5, 3, dtype=torch.float64), placement)
                torch.manual_seed(i)
                drawn = draw(like)
                torch.manual_seed(i)
                expected = draw(torch.zeros(5, 3, dtype=torch.float64))
                assert drawn.placements == like.placements
                assert drawn.dtype == expected.dtype
                assert_same(drawn.full_tensor(), expected, 0, 0, f"{i}, {placement}")

    run_ranks(world_size, body)


PLAIN = torch.arange(15, dtype=torch.float64).reshape(5, 3) / 15
DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda own: own.normal_(1, 2),
    "uniform_": lambda own: own.uniform_(-1, 1),
    "bernoulli_": lambda own: own.bernoulli_(0.3),
    "exponential_": lambda own: own.exponential_(),
    "log_normal_": lambda own: own.log_normal_(),
    "cauchy_": lambda own: own.cauchy_(),
    "geometric_": lambda own: own.geometric_(0.4),
    "random_": lambda own: own.random_(),
    "random_ up to": lambda own: own.random_(9),
    "random_ from": lambda own: own.random_(3, 9),
    "bernoulli": torch.bernoulli,
    "poisson": lambda own: torch.poisson(own * 9),
    "multinomial": lambda own: torch.multinomial(own + 0.1, 2),
    "normal of means": lambda own: torch.normal(own, 2.0),
    "normal of deviations": lambda own: torch.normal(1.0, own),
    "normal of both": lambda own: torch.normal(own, own),
    "dropout": nn.functional.dropout,
    "gumbel_softmax": nn.functional.gumbel_softmax,
    "trunc_normal_": nn.init.trunc_normal_,
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_random_operations_give_the_values_of_a_plain_tensor(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        for name, draw in DRAWS.items():
            for placement in (Shard(0), Shard(1), Replicate()):
                own = distributed(PLAIN.clone(), placement)
                torch.manual_seed(1)
                drawn = draw(own)
                torch.manual_seed(1)
                assert_same(drawn.full_tensor(), draw(PLAIN.clone()), 0, 0, f"{name}, {placement}")

    run_ranks(world_size, body)


def test_replicas_get_equal_values_though_seeds_differ() -> None:
    """What one of them would draw for its replica; and each one's generator goes on as its own."""

    def body(rank: int, _: int) -> list[Tensor]:
        correct_torch()
        mesh, found = init_device_mesh("cpu", (2, 2)), []
        for name, draw in DRAWS.items():
            for placements in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())):
                own = sharded(PLAIN.clone(), mesh, placements, src_data_rank=None)
                torch.manual_seed(rank)
                found.append(draw(own).full_tensor())
                after = torch.get_rng_state()
                torch.manual_seed(rank)
                plain = draw(PLAIN.clone())
                draws_again = name == "trunc_normal_"  # until all that ranks have drawn fits
                assert draws_again or torch.equal(torch.get_rng_state(), after), (name, placements)
            assert rank > 0 or torch.equal(found[-1], plain), name
        return found

    first, *others = run_ranks(4, body)
    for each in others:
        assert all(map(torch.equal, each, first))


@pytest.mark.parametrize("rows", [7, 8, 11])
def test_random_values_of_a_weight_that_two_axes_cut_unevenly(rows: int) -> None:
    """The data-parallel axis stands left, and cuts last: torch's own cut is another one, of other sizes."""

    def body(rank: int, _: int) -> None:
        mesh, plain = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")), torch.zeros(rows, 5)
        model = nn.Linear(5, rows, bias=False)
        model.weight = nn.Parameter(distribute_tensor(plain, mesh["tp"], [Shard(0)]))
        fully_shard(model, mesh=mesh["dp"])
        for draw in (nn.init.normal_, nn.init.trunc_normal_):
            torch.manual_seed(1)
            draw(model.weight)
            torch.manual_seed(1)
            draw(plain)
            assert_same(model.weight.full_tensor(), plain, 0, 0, draw.__name__)

    run_ranks(6, body)


def test_rrelu_takes_plain_tensors_only() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        own = distributed(PLAIN.clone() - 0.5, Shard(0))
        with pytest.raises(NotImplementedError, match=r"rrelu of a DTensor.*full_tensor"):
            nn.functional.rrelu(own, training=True)

    run_ranks(2, body)
