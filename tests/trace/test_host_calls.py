"""What a step costs the host, as exact counts of Python calls and operations: times on a shared machine can't tell a
tenth apart.

On one of many ranks whose peers are simulated, above what the plain model needs.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.host import HOST_SHAPES, build_steady_step, count_calls, count_ops, count_step_calls
from benchmarks.libraries import Library, load_library
from benchmarks.models import PRECISIONS, Shape, make_vectors
from benchmarks.wrapping import LAYERS, Chain
from helpers import fake_world

# (parameters of a block, precision) -> most per group. Counted in November 2026 with torch 2.13 and 2.15, plus a
# twentieth.
CALLS_PER_GROUP = {
    ("9 parameters", "fp32"): 221,
    ("9 parameters", "bf16/fp32"): 222,
    ("1 parameter", "fp32"): 149,
    ("1 parameter", "bf16/fp32"): 150,
}
OPS_PER_GROUP = {
    ("9 parameters", "fp32"): 93,
    ("9 parameters", "bf16/fp32"): 95,
    ("1 parameter", "fp32"): 13,
    ("1 parameter", "bf16/fp32"): 17,
}
# The same, of each parameter until the first forward is over.
START_UP_CALLS = 132
Count = Callable[[Library | None, Shape, str], int]


def count_step_ops(library: Library | None, shape: Shape, precision: str) -> int:
    """Operations that one step in steady state dispatches."""
    return count_ops(build_steady_step(library, shape, precision))


def above_plain(count: Count, blocks: int, label: str, precision: str) -> int:
    shape = replace(HOST_SHAPES[label], blocks=blocks)
    return count(load_library("fsdp2-best"), shape, precision) - count(None, shape, precision)


@pytest.mark.parametrize(("label", "precision"), CALLS_PER_GROUP)
@pytest.mark.parametrize(
    ("count", "most"), [(count_step_calls, CALLS_PER_GROUP), (count_step_ops, OPS_PER_GROUP)], ids=["calls", "ops"]
)
def test_each_group_costs_a_bounded_number(
    count: Count, most: dict[tuple[str, str], int], label: str, precision: str
) -> None:
    """Work per step that is quadratic in the groups would show, and per-parameter work that creeps in."""
    with fake_world(8):
        few, more, many = (above_plain(count, blocks, label, precision) for blocks in (3, 4, 5))
    assert many - more == more - few, "each group costs the same"
    assert more - few <= most[label, precision]
    assert few <= 5 * most[label, precision], "three blocks, the root's norm, and what comes once a step"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_calls_do_not_depend_on_the_number_of_ranks(precision: str) -> None:
    """Nor on whether this rank holds a part of each parameter: among 512 it holds none of most. One way to pack a
    group's gradients takes one call more than another.
    """
    counts, blocks = [], 4
    for world_size in (8, 512):
        with fake_world(world_size):
            counts.append(above_plain(count_step_calls, blocks, "9 parameters", precision))
    assert abs(counts[0] - counts[1]) <= blocks


@pytest.mark.parametrize("world_size", [8, 512])
def test_start_up_costs_a_bounded_number_for_each_parameter(world_size: int) -> None:
    """Of `fully_shard` on blocks of 16 parameters and on what holds them, and of the first forward."""
    library, dim = load_library("fsdp2-best"), 16
    with fake_world(world_size):
        mesh, batch = init_device_mesh("cpu", (world_size,)), make_vectors(dim)

        def count(blocks: int) -> int:
            model = Chain(dim, blocks)
            return count_calls(lambda: library.shard(model, mesh)(batch))

        count(1)  # what is done once in a process
        few, more, many = count(2), count(3), count(4)
    assert many - more == more - few, "each block costs the same"
    assert (more - few) / (2 * LAYERS) <= START_UP_CALLS


def test_a_step_does_not_ask_for_the_innermost_transform() -> None:
    """The kind: a question whose answer stays with the thread. To ask functorch for its stack makes one, which autograd
    copies into each node of all later graphs, a plain model's too.
    """
    asked: list[str] = []

    def note(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in ("peek_interpreter_stack", "get_interpreter_stack"):
            asked.append(function.__name__)

    with fake_world(8):
        step = build_steady_step(load_library("fsdp2-best"), replace(HOST_SHAPES["9 parameters"], blocks=2), "fp32")
        sys.setprofile(note)
        try:
            step()
            torch._C._functorch.peek_interpreter_stack()  # is noticed
        finally:
            sys.setprofile(None)
    assert asked == ["peek_interpreter_stack"]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_elementwise_step_costs_what_it_costs_on_plain_parameters(options: dict[str, Any]) -> None:
    """Above that, a few calls for each parameter: on DTensors, Python would dispatch each operation."""
    library, dim = load_library("fsdp2-best"), 16

    def count(blocks: int, is_sharded: bool) -> int:
        model, batch = Chain(dim, blocks), make_vectors(dim)
        if is_sharded:
            library.shard(model, init_device_mesh("cpu", (8,)))
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
        return count_calls(optimizer.step)

    with fake_world(8):
        few, more, many = (count(blocks, True) - count(blocks, False) for blocks in (1, 2, 3))
    assert many - more == more - few, "each block costs the same"
    assert (more - few) / (2 * LAYERS) <= 10
    assert few <= 10 * 2 * LAYERS + 100
