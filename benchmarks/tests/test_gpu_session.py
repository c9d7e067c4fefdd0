"""Tests what runs once a GPU can be had: a part which hangs or fails costs no other part, and no result is lost."""

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_ranks, gpu_session, limited
from benchmarks.gpu_session import DRY_ORDER, ORDER, PARTS, Facts, Part, Session, format_session, read_rows
from benchmarks.limited import Ended, run_limited
from benchmarks.report import Row
from helpers import NIGHTLY

ROW = json.dumps(asdict(Row("cuda", "step ms", "N=64", {"fsdp2": 1.0, "torch": 2.0})))
# It has written a row and a half, and has a child in a session of its own.
HANGS = f"""
import subprocess, sys, time
rows, files = sys.argv[1:]
with open(rows, "a") as file:
    file.write({ROW + chr(10) + ROW[:20]!r})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(files + "/child", "w").write(str(child.pid))
print("hangs now", flush=True)
def waits_for_ever():
    time.sleep(600)
waits_for_ever()
"""


def part(code: str, limit: float = 30.0) -> Part:
    return Part(limit, lambda facts: ("-c", code, str(facts.rows), str(facts.files)))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """Parts that tests define, in place of the real ones."""
    defined: dict[str, Part] = {}
    monkeypatch.setattr(gpu_session, "PARTS", defined)
    return defined


def has_ended(pid: int) -> bool:
    """Returns True if the process is gone; one that is killed takes a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, nobody tells what a process has inherited")
def test_a_part_that_hangs_is_killed_with_its_children_and_the_others_run(
    parts: dict[str, Part], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has written before is kept: rows, files, its output, and where it stood."""
    parts |= {"first": part("print('one')"), "hangs": part(HANGS, limit=1.0), "fails": part("1 / 0"), "last": part("")}
    start = time.monotonic()
    assert not Session(tmp_path, "cpu").run([*parts])
    assert time.monotonic() - start < 20
    report, log = (tmp_path / "report.md").read_text(), (tmp_path / "session.log").read_text()
    for text in ("**first**: done", "**hangs**: stopped after 1 s", "**fails**: failed (1)", "**last**: done"):
        assert text in report
    assert "0.50x" in report, "the row that was complete"
    assert "one" in log
    assert "in waits_for_ever" in log
    assert "ZeroDivisionError" in report
    assert "hangs: stopped" in capsys.readouterr().out, "it is said at once"
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        child = archive.extractfile("parts/child")
        assert child is not None
        assert has_ended(int(child.read()))
    assert len([*tmp_path.iterdir()]) <= 8, "more files may not come back from a machine that is had for minutes"


def test_what_has_no_time_left_is_left_out(parts: dict[str, Part], tmp_path: Path) -> None:
    """A part gets no more than what is left of the session."""
    parts |= {"long": part("import time; time.sleep(60)"), "next": part("")}
    session = Session(tmp_path, "cpu", seconds=gpu_session.LEAST_S + 0.5)
    session._deadline -= gpu_session.LEAST_S - 0.5
    assert session._deadline - time.monotonic() < gpu_session.LEAST_S
    session.run(["long"])
    assert "**long**: left out: no time left" in (tmp_path / "report.md").read_text()


def test_limits_are_scaled(parts: dict[str, Part], tmp_path: Path) -> None:
    parts["long"] = part("import time; time.sleep(60)", limit=5.0)
    Session(tmp_path, "cpu", scale=0.1).run(["long"])
    assert "stopped after 0 s" in (tmp_path / "report.md").read_text()


def test_a_part_that_writes_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log would be larger than what comes back."""
    monkeypatch.setattr(limited, "MAX_OUTPUT_BYTES", 100_000)
    ended = run_limited([sys.executable, "-c", "while True: print('x' * 1000)"], 30, tmp_path / "log")
    assert ended.outcome == "stopped after 0.1 MB of output"


@pytest.mark.parametrize(
    ("two", "reason"),
    [
        (Ended("done", 12.0), ""),
        (Ended("done", 31.0), "two ranks: done, 31 s"),
        (Ended("stopped after 75 s", 78.0), "two ranks: stopped after 75 s, 78 s"),
    ],
)
def test_four_ranks_run_if_two_were_fast(two: Ended, reason: str) -> None:
    assert PARTS["nccl-4"].why_not({"nccl-2": two}) == reason


def test_the_schedule_says_what_runs() -> None:
    """In the order of what parts decide: what is wrong makes numbers needless."""
    documented = re.findall(r"^    ([a-z]+(?:-\d)?) +(\d+) s  ", gpu_session.__doc__ or "", re.M)
    assert documented == [(name, str(int(PARTS[name].limit))) for name in ORDER]
    assert set(DRY_ORDER) == {*ORDER, "hang"}
    for name in ORDER:
        command = PARTS[name].command(Facts("cuda", False, False, Path("rows"), Path("files")))
        for argument in command:
            assert not argument.endswith(".py") or (limited.ROOT / argument).is_file()


def test_rows_with_other_libraries_are_tables_of_their_own() -> None:
    rows = [
        Row("cuda", "whole step ms", "N=64", {"fsdp2": 1.0, "torch": 4.0}),
        Row("cuda", "price of kernels beside", "of products", {"packing": 3.0, "AdamW": 1.0}),
        Row("cuda", "resting GiB", "N=64", {"torch": 4.0, "fsdp2": 1.0}),
    ]
    report = format_session({}, rows)
    assert [line.split("|")[3].strip() for line in report.splitlines() if line.startswith("| what")] == [
        "fsdp2",
        "packing",
    ]


def test_half_a_row_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(f"{ROW}\n{ROW[:20]}")
    assert [row.quantity for row in read_rows(tmp_path / "rows")] == ["step ms"]
    assert read_rows(tmp_path / "none") == []


def test_a_session_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert gpu_session.main(["--out", str(tmp_path)]) == 0
        assert "no CUDA device" in capsys.readouterr().out


# ---- ranks that share a GPU


def test_each_rank_names_another_host() -> None:
    """So NCCL takes two ranks on one GPU."""
    first, second = (gpu_ranks.rank_environment(rank, 2, 1234) for rank in range(2))
    assert {name for name in first if first[name] != second[name]} == {"RANK", "LOCAL_RANK", "NCCL_HOSTID"}


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they would wait for it until the limit."""
    monkeypatch.setattr(gpu_ranks, "GRACE_S", 0.1)
    code = "import os, sys, time; rank = int(os.environ['RANK']); sys.exit(3) if rank == 1 else time.sleep(600)"
    start = time.monotonic()
    assert gpu_ranks.run_on_ranks(3, ["-c", code]) == 3
    assert time.monotonic() - start < 20
    assert gpu_ranks.run_on_ranks(2, ["-c", "pass"]) == 0


# ---- all of it


@pytest.mark.timeout(900)
@pytest.mark.skipif(not NIGHTLY, reason="it takes a minute or more: run with FSDP2_NIGHTLY=1")
def test_a_dry_session_on_a_cpu(tmp_path: Path) -> None:
    """All parts run, with the numbers of a plain model; the one that hangs is killed."""
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--dry", "--scale", "6", "--seconds", "800"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=limited.ROOT, capture_output=True, text=True, timeout=880
    )
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    assert "**Dry run**" in report
    for name in DRY_ORDER:
        expected = "stopped after" if name == "hang" else "left out: two ranks" if name == "nccl-4" else "done"
        assert f"**{name}**: {expected}" in report or (name == "nccl-4" and f"**{name}**: done" in report), report
    assert len([*tmp_path.iterdir()]) <= 8
    log = (tmp_path / "session.log").read_text()
    assert log.count("as the plain model") > 38 + 9
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        child = archive.extractfile("parts/child.pid")
        assert child is not None
        assert has_ended(int(child.read()))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not NIGHTLY, reason="it takes some seconds: run with FSDP2_NIGHTLY=1")
def test_a_session_that_is_ended_writes_what_it_knows(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--dry", "--scale", "60", "--out", str(tmp_path), "hang"]
    session = subprocess.Popen(command, cwd=limited.ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 120
    while "hangs now" not in _text(tmp_path / "session.log") and time.monotonic() < deadline:
        time.sleep(0.2)
    session.terminate()
    assert session.wait(60) == 128 + 15
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        child = archive.extractfile("parts/child.pid")
        assert child is not None
        assert has_ended(int(child.read()))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
