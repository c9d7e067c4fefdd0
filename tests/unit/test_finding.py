"""Tests that findings are the same whichever rank computes them, and that they name the ranks that differ."""

from fsdp2.tools.finding import KINDS, Finding, compare_layouts, compare_sums, merge


def test_one_finding_for_each_kind() -> None:
    found = merge(
        {2: {"unsynchronized": ["a", "b"], "on meta": []}, 0: {"unsynchronized": ["b", "c"], "unmanaged": ["d"]}}
    )
    assert found == [Finding("unsynchronized", ("b", "c", "a"), "", (0, 2)), Finding("unmanaged", ("d",), "", (0,))]
    assert merge({0: {}, 1: {}}) == []


def test_equal_shards_are_compared() -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same rows of the first; all hold the second; each its own of the third."""
    names = [("rows", "parameter"), ("scale", "buffer"), ("own", "parameter"), ("left", "unmanaged")]
    sums, batches = (
        {rank: [(rank % 2, rank % 2), (0, 7), (rank, rank), (0, 1)] for rank in range(4)},
        dict.fromkeys(range(4), 0),
    )
    assert compare_sums(names, sums, batches) == []
    sums[3][0] = (1, 5)
    sums[2][1] = (0, 8)
    sums[1][3] = (0, 2)
    assert compare_sums(names, sums, batches) == [
        Finding("replicas differ", ("rows",), "", (1, 3)),
        Finding("unmanaged differ", ("left",), "", (0, 1)),
        Finding("buffers differ", ("scale",), "", (0, 2)),
    ]


def test_shards_of_ranks_that_get_the_same_rows_are_compared() -> None:
    """Ranks 0 and 1 hold the same rows, 2 and 3 the others; 0 and 2 train on one batch, 1 and 3 on the same."""
    names, batches = [("rows", "parameter"), ("scale", "buffer")], {0: 0, 1: 1, 2: 0, 3: 1}
    sums = {rank: [(rank // 2, rank // 2), (0, 7)] for rank in range(4)}
    assert compare_sums(names, sums, batches) == []
    sums[3] = [(1, 5), (0, 8)]
    note, buffers = compare_sums(names, sums, batches)
    assert note == Finding("model-parallel ranks differ", ("rows",), "", (2, 3))
    assert buffers == Finding("buffers differ", ("scale",), "", (1, 3))


def test_layouts() -> None:
    layouts = {0: {"a": "x", "b": "y"}, 1: {"b": "y", "a": "x"}, 2: {"a": "z"}, 3: {"a": "z"}}
    assert compare_layouts({0: layouts[0], 1: layouts[1]}) == []
    assert compare_layouts(layouts) == [
        Finding("layouts differ", ("a",), "rank 0 has x; rank 2 has z", (0, 2)),
        Finding("layouts differ", ("b",), "rank 0 has y; rank 2 has nothing", (0, 2)),
    ]


def test_text_is_bounded() -> None:
    finding = Finding("unsynchronized", tuple("abcdefg"), "why", tuple(range(9)))
    assert (
        str(finding) == f"unsynchronized: a, b, c, d and 3 more (rank 0, 1, 2, 3, ...); why. {KINDS['unsynchronized']}"
    )
    assert [Finding(kind, ("a",)).is_note for kind in KINDS].count(True) == 2
