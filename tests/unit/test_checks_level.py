"""The one setting of checks, and the times at which they are due."""

from collections.abc import Iterator

import pytest

from fsdp2.checks import level, observers
from fsdp2.checks.due import is_check_time, next_check_time


def test_checks_are_due_at_the_times_that_are_said_beforehand(fresh_level: pytest.MonkeyPatch) -> None:
    times = [n for n in range(1, 600) if is_check_time(n)]
    assert times == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
    assert [next_check_time(n) for n in (0, *times[:-1])] == times
    observers.set_checks("debug")
    assert all(is_check_time(n) and next_check_time(n) == n + 1 for n in range(1, 600))


@pytest.fixture
def fresh_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(level.VARIABLE, raising=False)
    level._chosen.cache_clear()
    yield monkeypatch
    level._chosen.cache_clear()


def test_the_environment_has_the_first_word_and_a_call_the_last(fresh_level: pytest.MonkeyPatch) -> None:
    assert level.level() == "default"
    level._chosen.cache_clear()
    fresh_level.setenv(level.VARIABLE, "debug")
    assert level.is_debug()
    observers.set_checks("off")
    assert not level.is_on()


@pytest.mark.parametrize("text", ["on", "1", "off,debug", "buffers=off"])
def test_the_environment_may_name_nothing_else(fresh_level: pytest.MonkeyPatch, text: str) -> None:
    fresh_level.setenv(level.VARIABLE, text)
    with pytest.raises(ValueError, match=r"variable FSDP2_CHECKS: expected one of off, default, debug, got "):
        level.level()


@pytest.mark.parametrize("wrong", ["sometimes", "", True, 1, None, {"buffers": "off"}])
def test_other_levels_change_nothing(fresh_level: pytest.MonkeyPatch, wrong: object) -> None:
    with pytest.raises(ValueError, match="level: expected one of off, default, debug, got"):
        observers.set_checks(wrong)  # type: ignore[arg-type]
    assert level.level() == "default"
