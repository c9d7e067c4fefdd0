"""Tests when collectives of a plan end that share links, on cases whose times are worked out by hand.

Machines of two ranks: among four ranks a ring is slowed by the cards; two ranks of one machine use no card. Each case
chooses bytes so that a link is busy for whole seconds.
"""

import random

import pytest

from fsdp2.planning.clocks import Clocks, Machine
from fsdp2.planning.links import End, Links
from fsdp2.planning.network import Latency


def ends(*added: tuple[float, tuple[float, float]]) -> list[float]:
    """Returns when collectives end that begin at these seconds, and need the links for so long."""
    links, start = Links(), End(0.0)
    found = [links.add([(start, begin)], demand) for begin, demand in added]
    links.run()
    return [end.time for end in found if end.time is not None]


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([(1.0, (2.0, 0.0))], [3.0]),
        ([(0.0, (2.0, 0.0)), (0.0, (0.0, 3.0))], [2.0, 3.0]),  # two links work at once
        ([(0.0, (2.0, 0.0)), (0.0, (2.0, 0.0))], [4.0, 4.0]),  # and one is shared
        ([(0.0, (2.0, 0.0)), (0.0, (1.0, 0.0))], [3.0, 2.0]),
        ([(0.0, (2.0, 0.0)), (1.0, (2.0, 0.0))], [3.0, 4.0]),  # alone, both, alone
        ([(5.0, (2.0, 0.0)), (0.0, (2.0, 0.0))], [7.0, 2.0]),  # what can't begin yet holds no link
        ([(0.0, (1.0, 4.0)), (0.0, (3.0, 0.0))], [4.0, 4.0]),  # a ring ends when both links are through
        ([(0.0, (1.0, 4.0)), (0.0, (0.0, 4.0)), (0.0, (7.0, 0.0))], [8.0, 8.0, 8.0]),
        ([(0.0, (0.0, 0.0)), (2.0, (0.0, 0.0))], [0.0, 2.0]),
    ],
)
def test_links_are_shared_from_when_a_collective_can_begin(
    added: list[tuple[float, tuple[float, float]]], expected: list[float]
) -> None:
    assert ends(*added) == pytest.approx(expected)


def test_a_link_is_never_idle_while_bytes_wait() -> None:
    """Of any collectives, and of one after the other: a link has passed all at the same time, whatever their order."""
    draw = random.Random(0)
    for _ in range(200):
        needed = [draw.random() for _ in range(draw.randint(1, 6))]
        begun = [draw.choice([0.0, draw.random()]) for _ in needed]
        busy = 0.0
        for begin, seconds in sorted(zip(begun, needed, strict=True)):
            busy = max(busy, begin) + seconds
        assert max(ends(*((begin, (seconds, 0.0)) for begin, seconds in zip(begun, needed, strict=True)))) == (
            pytest.approx(busy)
        )


# ---- clocks

SECOND = 1000  # bytes that a rank sends in a second inside its machine, and by its card between machines


def clocks(latency: float = 0.0) -> Clocks:
    # A card reaches 95 % between two machines.
    machine = Machine(
        "cuda", "nccl", SECOND / 0.95, 1.0, machine_link=SECOND, ranks_per_machine=2, latency=Latency(latency)
    )
    return Clocks(machine)


def hop(on: Clocks, seconds: float, is_between: bool, communicator: str) -> End:
    """Begins a gather of two ranks, on two machines or on one, each of which sends half."""
    span = 4 if is_between else 2
    return on.communicate("all_gather", int(2 * SECOND * seconds), 2, span, communicator)


def two_hops(on: Clocks, rail: float) -> End:
    """Begins a gather whose first hop takes `rail` seconds, and whose second takes one. Returns its end."""
    first = hop(on, rail, True, "rail")
    with on.beside():
        on.wait(first)
        return hop(on, 1, False, "machine")


def test_a_second_hop_that_waits_holds_no_link() -> None:
    """It is issued before what another communicator sends, and begins 3 s later, when that has long passed."""
    on = clocks()
    second = two_hops(on, 3)
    other = hop(on, 2, False, "another")
    on.wait(other)
    assert on.seconds == pytest.approx(2)
    on.wait(second)
    assert on.seconds == pytest.approx(4)


def test_hops_of_two_gathers_overlap() -> None:
    """The cards gather the second one while the links of the machine gather the first: 3 seconds, instead of 4."""
    on = clocks()
    for _ in range(2):
        last = two_hops(on, 1)
    on.wait(last)
    assert on.seconds == pytest.approx(3)


def test_a_gather_that_is_issued_late_begins_late() -> None:
    """One ahead: the gather of b + 2 begins when b + 1 is there, after both hops. So none overlap."""
    on = clocks()
    for _ in range(3):
        on.wait(two_hops(on, 1))
    assert on.seconds == pytest.approx(6)


def test_collectives_of_one_communicator_follow_one_another() -> None:
    on = clocks(latency=1.0)
    last = [hop(on, 2, False, "machine") for _ in range(2)][-1]
    on.compute(1)
    assert on.seconds == pytest.approx(1), "computing waits for nothing yet"
    on.wait(last)
    assert on.seconds == pytest.approx(6)


def test_latencies_pass_beside_bytes_of_others() -> None:
    on = clocks(latency=1.0)
    for each in [hop(on, 2, False, name) for name in ("one", "two")]:
        on.wait(each)
    assert on.seconds == pytest.approx(1 + 4)


def test_a_collective_begins_when_its_stream_has_come_there() -> None:
    on = clocks()
    on.compute(2)
    gathered = hop(on, 3, False, "machine")
    on.compute(1)
    on.wait(gathered)
    on.compute(1)
    assert on.seconds == pytest.approx(2 + 3 + 1)
    assert on.computed == 4


def test_copies_follow_one_another_beside_collectives() -> None:
    on = clocks()
    size = int(on.machine.host_link)
    first, second = on.transfer(size), on.transfer(2 * size)
    with on.behind(first):
        gathered = hop(on, 1, False, "machine")
    on.wait(gathered)
    assert on.seconds == pytest.approx(2)
    on.wait(second)
    assert on.seconds == pytest.approx(3)


def test_a_step_counts_from_where_the_last_one_has_ended() -> None:
    """What it has left to send shares the links with the next step."""
    on = clocks()
    left = hop(on, 4, False, "machine")
    on.compute(1)
    on.begin_step()
    gathered = hop(on, 1, False, "another")
    on.wait(gathered)
    assert on.seconds == pytest.approx(2)
    on.wait(left)
    assert on.seconds == pytest.approx(4)


def test_long_chains_are_followed() -> None:
    """Of ends that wait for one collective, however many."""
    on = clocks()
    on.wait(hop(on, 1, False, "machine"))
    for _ in range(20000):
        on.wait(on.transfer(0))
        on.compute(1)
    assert on.seconds == pytest.approx(20001)
