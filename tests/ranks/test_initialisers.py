"""Tests every function of `torch.nn.init`, on sharded parameters and on plain ones, from the same seed."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from helpers import assert_same, full, run_ranks, world_sizes

INIT = nn.init
# The calls of each function, of a weight; those of any other function that torch has, or will have, are `init(weight)`.
CALLS: dict[str, list[Callable[[Any], Any]]] = {
    "uniform_": [lambda w: INIT.uniform_(w, -1, 2), lambda w: INIT.uniform_(w, generator=seeded())],
    "normal_": [lambda w: INIT.normal_(w, 1, 2)],
    "trunc_normal_": [lambda w: INIT.trunc_normal_(w, 0, 1, -0.5, 0.5)],
    "constant_": [lambda w: INIT.constant_(w, 0.3)],
    "dirac_": [INIT.dirac_, lambda w: INIT.dirac_(w, 2)],
    "xavier_uniform_": [lambda w: INIT.xavier_uniform_(w, 2.0)],
    "xavier_normal_": [lambda w: INIT.xavier_normal_(w, 2.0)],
    "kaiming_uniform_": [lambda w: INIT.kaiming_uniform_(w, 0.1, "fan_out")],
    "kaiming_normal_": [lambda w: INIT.kaiming_normal_(w, nonlinearity="relu")],
    "orthogonal_": [
        INIT.orthogonal_,
        lambda w: INIT.orthogonal_(w, gain=1.7),
        lambda w: INIT.orthogonal_(w, generator=seeded()),
    ],
}
FUNCTIONS = [
    name
    for name, function in inspect.getmembers(INIT, inspect.isfunction)
    if name.endswith("_")
    and not name.startswith("_")
    and "tensor" in inspect.signature(function).parameters
    and name != "sparse_"
]
# Fewer rows than columns, as many, more, fewer than ranks; weights of convolutions.
SHAPES = [(6, 9), (5, 5), (9, 6), (1, 7), (7, 1), (5,), (4, 2, 3), (6, 2, 3, 3), (4, 2, 1, 2, 3)]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Weighted(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


def test_the_walk_covers_them_all() -> None:
    assert set(CALLS) <= set(FUNCTIONS)
    assert {"ones_", "zeros_", "eye_"} < set(FUNCTIONS)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3, 4)))
def test_shards_get_the_values_of_a_plain_tensor(world_size: int) -> None:
    """The kind: an initialiser whose operations DTensor has no rule for, on the shapes that need them: `t_()` of
    `orthogonal_`, an identity cut in parts in `eye_`, single elements in `dirac_`.
    """

    def body(rank: int, _: int) -> int:
        compared = 0
        for name in FUNCTIONS:
            for i, call in enumerate(CALLS.get(name, [getattr(INIT, name)])):
                for shape in SHAPES:
                    plain = torch.full(shape, 7.0)
                    torch.manual_seed(1)
                    try:
                        call(plain)
                    except ValueError:
                        continue  # not for this shape
                    drawn_next = torch.rand(1)
                    model = fully_shard(Weighted(shape))
                    torch.manual_seed(1)
                    assert call(model.weight) is model.weight
                    assert_same(full(model.weight), plain, 0, 0, f"{name} {i} of {shape}")
                    assert_same(torch.rand(1), drawn_next, 0, 0, f"what is drawn behind {name}")
                    compared += 1
        return compared

    assert min(run_ranks(world_size, body)) > 100


def test_writes_to_indices_are_refused() -> None:
    """Of a user's own along any dim, and those of `sparse_`; the parameter is as before."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(Weighted((4, 3)))
        says = r"^weight: .*index_(put|fill)_.* inside `with fsdp2\.full_params\(module, writeback=True\)"
        for dim in range(2):
            with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError), match=says):
                model.weight[(slice(None),) * dim + (torch.tensor([0, 2]),)] = 0.0
        assert_same(full(model.weight), torch.full((4, 3), 7.0), 0, 0, "unchanged")
        with pytest.raises((RuntimeError, NotImplementedError), match=says):
            INIT.sparse_(model.weight, 0.5)

    run_ranks(2, body)


def test_a_sharded_parameter_is_not_transposed_in_place() -> None:
    def body(rank: int, _: int) -> None:
        model = fully_shard(Weighted((4, 3)))
        for turn in (lambda w: w.t_(), lambda w: w.transpose_(0, 1), lambda w: w.detach().swapaxes_(0, 1)):
            with (
                torch.no_grad(),
                pytest.raises((RuntimeError, NotImplementedError), match=r"^weight: .*(t|transpose|swapaxes)_"),
            ):
                turn(model.weight)
        assert full(model.weight).shape == (4, 3)

    run_ranks(2, body)
