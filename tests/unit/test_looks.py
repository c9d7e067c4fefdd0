from fsdp2.checks.looks import is_time_to_look


def test_times() -> None:
    assert [n for n in range(1, 600) if is_time_to_look(n)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
