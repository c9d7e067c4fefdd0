"""Tests that the benchmarks compare the same training: every library's gradients are those of the plain model."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.guards import GUARDS
from benchmarks.libraries import PEERS, load_library
from benchmarks.models import PRECISIONS, Shape, able, build_plain, build_sharded, compute_loss, make_batch
from benchmarks.peers import full_gradients
from benchmarks.recipe import ROWS
from helpers import assert_same, assert_same_names, run_checks, world_sizes

SHAPES = {"9 parameters": Shape(blocks=2, dim=6, hidden=10, tokens=3), "1 parameter": Shape(2, 6, hidden=0, tokens=3)}
# Two gradients are averaged in fp32, by the oracle too; bf16 ones are computed in another order under autograd's casts.
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 1e-7}, "bf16/fp32": {"rtol": 2e-2, "atol": 1e-4}}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_gradients_are_the_mean_of_what_each_rank_alone_computes(world_size: int) -> None:
    cases = itertools.product((*ROWS, *PEERS, *GUARDS), SHAPES, PRECISIONS)
    run_checks(world_size, [(" ".join(case), functools.partial(check_library, *case)) for case in cases])


def check_library(name: str, label: str, precision: str) -> None:
    shape, library, world_size = SHAPES[label], load_library(name), dist.get_world_size()
    if not able([library], precision):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about FSDP1 and about its own collectives
        model = build_sharded(shape, precision, library, dist.init_device_mesh("cpu", (world_size,)))
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            backward(model, shape, precision, dist.get_rank())
        actual = full_gradients(model)
    each = [gradients_alone(shape, precision, rank) for rank in range(world_size)]
    assert_same_names(actual, each[0])
    for key, gradient in actual.items():
        expected = torch.stack([of_rank[key].float() for of_rank in each]).mean(0)
        assert_same(gradient, expected, **TOLERANCE[precision], name=key)


def gradients_alone(shape: Shape, precision: str, rank: int) -> dict[str, Tensor]:
    model = build_plain(shape, precision)
    backward(model, shape, precision, rank)
    return full_gradients(model)


def backward(model: nn.Module, shape: Shape, precision: str, rank: int) -> None:
    compute_loss(model, make_batch(shape, precision, seed=1 + rank)).backward()
