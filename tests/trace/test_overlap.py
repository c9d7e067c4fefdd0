"""Tests how much communication a step exposes, on a simulated link beside simulated compute.

The numbers are exact, whatever the load of the machine. All else takes no time in the simulation: its cost is counted
in test_host_calls.py.
"""

import pytest

from benchmarks.libraries import load_library
from benchmarks.overlap import BLOCKS, FORWARD_SECONDS, LATENCY_SECONDS, exposed_by_order, floor_of

SLACK = 3 * BLOCKS * LATENCY_SECONDS  # four reductions per block rather than one


@pytest.mark.parametrize("per_compute", [0.1, 0.3, 1.0])
def test_only_the_first_gather_and_the_last_bucket_are_exposed(per_compute: float) -> None:
    """A gather or reduction that is awaited where it is issued would show with its whole length.

    The last reduction is a quarter of a block's.
    """
    transfer = per_compute * FORWARD_SECONDS
    exposed = exposed_by_order(load_library("fsdp2-best"), 8, transfer)
    assert 1.25 * transfer <= exposed <= 1.25 * transfer + SLACK
    assert exposed < floor_of(transfer)


@pytest.mark.parametrize(("layers", "per_compute"), [(8, 0.3), (8, 0.66), (16, 0.66)])
def test_compute_does_not_wait_in_a_block_that_hides_a_gather_and_a_reduction(layers: int, per_compute: float) -> None:
    """Reductions in fp32 take twice as long as gathers in bf16, so that both take 3/2 of `per_compute` backwards of a
    block. Many buckets must not mean that few bytes are on their way: the last eighth alone is exposed.
    """
    transfer = per_compute * FORWARD_SECONDS
    exposed = exposed_by_order(load_library("fsdp2-best"), 8, transfer, layers=layers, mixed=True)
    assert transfer * (1 + 2 / 8) <= exposed <= transfer * (1 + 2 / 8) + 3 * SLACK


@pytest.mark.parametrize("per_compute", [1.5, 3.0])
def test_a_slow_link_is_never_idle_for_long(per_compute: float) -> None:
    """What does not fit beside compute is exposed, and hardly more than that."""
    transfer = per_compute * FORWARD_SECONDS
    exposed = exposed_by_order(load_library("fsdp2-best"), 8, transfer)
    assert exposed <= floor_of(transfer) + SLACK
