"""Tests the calls that copies make to streams and events, on stubs. Only a GPU shows if they are sufficient."""

from collections.abc import Iterator

import pytest
import torch

from fsdp2.devices.streams import Transfers
from simulated_device import Stream


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    seen: list[str] = []
    streams = iter([Stream("in", seen), Stream("out", seen)])
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", lambda device: next(streams))
        patch.setattr(torch.accelerator, "current_stream", lambda device=None: Stream("current", seen))
        yield seen


def test_a_copy_to_the_device_and_later_kernels(lines: list[str]) -> None:
    transfers = Transfers(torch.device("cpu"), pin=False)
    target, source = torch.zeros(3), torch.arange(3.0)
    copy = transfers.start_in(target, source, lambda: lines.append("launch") or "launched")  # type: ignore[func-returns-value]
    assert lines == ["in waits for current", "enter in", "launch", "leave in", "event on in"]
    lines.clear()
    assert copy.wait() == "launched"
    transfers.settle()
    assert lines == ["current waits for the event on in", "host waits for in"]
    assert torch.equal(target, source)


def test_the_host_waits_once_and_not_for_finished_copies(lines: list[str]) -> None:
    """A wait for a stream, or for an event that has passed, costs a call into the driver, and orders nothing."""
    transfers = Transfers(torch.device("cpu"), pin=False)
    transfers.settle()
    assert lines == []
    for is_through in (False, True):
        transfers.start_in(torch.zeros(3), torch.arange(3.0), lambda: None)
        transfers._inward.is_through = is_through  # type: ignore[attr-defined]
        lines.clear()
        for _ in range(2):
            transfers.settle()
        assert lines == ["host waits for in"] * (not is_through)


def test_a_copy_to_the_cpu(lines: list[str]) -> None:
    """To new memory, for which the host waits."""
    source = torch.arange(3.0)
    copy = Transfers(torch.device("cpu"), pin=False).start_out(source)
    assert lines == ["out waits for current", "enter out", "leave out", "event on out"]
    lines.clear()
    result = copy.finish()
    assert lines == ["host waits for out"]
    assert torch.equal(result, source)
    assert result.data_ptr() != source.data_ptr()


def test_memory_is_the_cpus_whatever_the_default_device() -> None:
    transfers = Transfers.__new__(Transfers)
    transfers._pin = False
    with torch.device("meta"):
        assert transfers.allocate(4, torch.bfloat16).device.type == "cpu"
