"""What a step costs the host, as an exact count of Python calls: times on a shared machine can't tell a tenth apart.

On one of many ranks whose peers are simulated, above what the plain model calls.
"""

from dataclasses import replace

import pytest

from benchmarks.host import HOST_SHAPE, count_step_calls
from benchmarks.libraries import load_library
from helpers import fake_world

# Of nine parameters. Counted on 21 November 2026, with every release of torch, plus a twentieth.
CALLS_PER_GROUP = {"fp32": 363, "bf16/fp32": 370}


def calls_above_plain(blocks: int, precision: str) -> int:
    shape = replace(HOST_SHAPE, blocks=blocks)
    ours, plain = (count_step_calls(library, shape, precision) for library in (load_library("fsdp2"), None))
    return ours - plain


@pytest.mark.parametrize("precision", CALLS_PER_GROUP)
def test_calls_grow_by_a_bounded_number_per_group(precision: str) -> None:
    """Work per step that is quadratic in the groups would show, and per-parameter work that creeps in."""
    with fake_world(8):
        few, more, many = (calls_above_plain(blocks, precision) for blocks in (4, 6, 8))
    assert many - more == more - few, "each group costs the same"
    assert (more - few) / 2 <= CALLS_PER_GROUP[precision]
    assert few <= 5 * CALLS_PER_GROUP[precision], "four blocks, the root's norm, and what comes once a step"


@pytest.mark.parametrize("precision", CALLS_PER_GROUP)
def test_calls_do_not_depend_on_the_number_of_ranks(precision: str) -> None:
    """Nor on whether this rank holds a part of each parameter: among 512 it holds none of most."""
    counts = []
    for world_size in (8, 512):
        with fake_world(world_size):
            counts.append(calls_above_plain(4, precision))
    assert counts[0] == counts[1]
