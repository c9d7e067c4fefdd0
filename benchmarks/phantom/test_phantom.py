"""Tests what the real CUDA build of torch does with fsdp2 in it: launches, waits, memory on its caching allocator.

At night only: the first run fetches 0.5 GB.
"""

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_session import DRY_ORDER
from benchmarks.phantom import ceilings, install, timeline
from benchmarks.phantom.run import environment, run
from benchmarks.timeline import timeline_rows
from helpers import NIGHTLY

pytestmark = [
    pytest.mark.skipif(not NIGHTLY, reason="it fetches torch's CUDA build: run with FSDP2_NIGHTLY=1"),
    pytest.mark.timeout(1500),
]


# What is done while a graph is captured -> the error.
REFUSED = {
    "torch.cuda.current_stream().wait_event(before)": "cudaErrorStreamCaptureIsolation",
    "torch.cuda.synchronize()": "cudaErrorStreamCaptureUnsupported",
    "before.query()": "cudaErrorStreamCaptureUnsupported",
    "y.sum().item()": "cudaErrorStreamCaptureUnsupported",
    "s.wait_stream(torch.cuda.current_stream()); torch.add(y, 1, out=y)\n    with torch.cuda.stream(s): y + 1": (
        "cudaErrorStreamCaptureUnjoined"
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    if NIGHTLY:
        try:
            install.install()
        except install.UnavailableError as error:
            pytest.skip(f"there is no phantom GPU here: {error}")


def test_a_dry_session_runs_through(tmp_path: Path) -> None:
    """The command for a machine with a GPU, with tiny models: every part ends, tests/cuda on a pytest before 9."""
    options = ["--dry", "--unchecked", "--scale", "8", "--seconds", "1200", "--out", str(tmp_path)]
    command = [str(install.python()), "-m", "benchmarks.gpu_session", *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1400)
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report + done.stderr[-2000:]
    assert "**Unchecked**" in report
    for name in DRY_ORDER:
        outcome = report.partition(f"**{name}**: ")[2].partition("\n")[0]
        slow = name == "nccl-4" and outcome.startswith("left out: two ranks: done")
        assert outcome.startswith("stopped after" if name == "hang" else "done") or slow, f"{name}: {outcome}"
    log = (tmp_path / "session.log").read_text()
    assert log.count("as the plain model") >= 38 + 9
    assert " passed" in log, "tests/cuda"
    assert "GPU Phantom H100" in log
    assert len([*tmp_path.iterdir()]) <= 8
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        assert "parts/child.pid" in archive.getnames()


def test_whole_steps_are_captured_or_refused_with_a_reason() -> None:
    """As rank 0 of eight of torch's ProcessGroupNCCL, on a phantom that refuses what CUDA refuses in a capture.

    Where the host has to do something in each step, fsdp2 says what, before CUDA says something else.
    """
    lines = run(["-m", "benchmarks.phantom.captured"], 900).splitlines()
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert len(found) >= 30
    for way, outcome in found.items():
        reason = "offloaded shards" if "offloaded" in way else "kept over steps" if way == "kept over steps" else ""
        if reason:
            assert outcome.startswith("RuntimeError: root: its pass can't be part of a CUDA graph: "), (
                f"{way}: {outcome}"
            )
            assert reason in outcome
        else:
            assert outcome.startswith("captured, "), f"{way}: {outcome}"


def test_collectives_touch_memory_that_their_communicators_have_registered_and_no_other() -> None:
    """In memory of the process group, all of them. In symmetric memory all gathers; reductions where they only sum, but
    for fp16, and ranks meet for each storage before.
    """
    lines = [line for line in run(["-m", "benchmarks.phantom.registered"], 300).splitlines() if "ncclAllGather" in line]
    assert len(lines) == 6
    for line in lines:
        name, counts = line.split(": ", 1)
        found = dict(re.findall(r"(nccl\w+) (\d+ of \d+)", counts))
        registered = {kind: [*map(int, each.split(" of "))] for kind, each in found.items()}
        gathers, scatters, sums = (registered[f"nccl{kind}"] for kind in ("AllGather", "ReduceScatter", "AllReduce"))
        assert gathers[0] == gathers[1] > 0, line
        only_gathers = name.startswith("symmetric") and ("only sums" not in name or "fp16" in name)
        assert scatters == ([0, scatters[1]] if only_gathers else [scatters[1]] * 2), line
        assert scatters[1] > 0, line
        assert sums[0] == sums[1], line
        assert (sums[1] > 0) == ("HSDP" in name), line
        assert ("met 0 times" in counts) == name.startswith("registered"), line


@pytest.mark.parametrize("order", ["deleted", "late", "kept"])
def test_a_program_with_registered_memory_ends_in_any_order(order: str) -> None:
    """Whether the model or the communicator goes first. Only the deleted model's memory is given back then."""
    lines = run(["-m", "benchmarks.phantom.registered", "--end", order], 120).splitlines()
    assert lines[-1] == "ended"
    if order == "deleted":
        allocated, reserved = map(int, re.findall(r"(\d+) (?:bytes|reserved)", lines[-2]))
        assert (allocated, reserved) == (0, 0)


@pytest.mark.parametrize(("program", "refused"), [*REFUSED.items()], ids=[*REFUSED.values()])
def test_what_cuda_refuses_in_a_capture_the_phantom_refuses(program: str, refused: str) -> None:
    """Else the test above could not fail."""
    begin = "import torch\nx, s, g = torch.ones(9).cuda(), torch.cuda.Stream(), torch.cuda.CUDAGraph()\n"
    begin += "before = torch.cuda.Event(); before.record()\nwith torch.cuda.graph(g):\n    y = x + 1\n    "
    with pytest.raises(RuntimeError, match=refused):
        run(["-c", begin + program], 60)
    run(
        ["-c", begin + "s.wait_stream(torch.cuda.current_stream())\n    torch.cuda.current_stream().wait_stream(s)"], 60
    )


def test_every_way_over_nccl_takes_no_more_than_it_did() -> None:
    """As one rank of eight of torch's ProcessGroupNCCL, which refuses what it can't send; deleted models leave nothing.

    Less is written into the table by `python -m benchmarks.phantom.ceilings`.
    """
    found = ceilings.count_ways()
    assert len(found) >= 30
    assert not ceilings.exceeded(found, ceilings.read())


def test_numbers_over_nccl_are_those_of_a_plain_model() -> None:
    """Every way on linear layers, whose kernels the stub libraries compute."""
    told = run(["-W", "ignore", "-m", "benchmarks.phantom.numbers"], 600, PHANTOM_COMPUTE="1")
    assert told.count(": as the plain model") >= 34
    assert "0 failed" in told


@pytest.mark.parametrize("name", ceilings.STEPS)
def test_a_step_takes_no_more_than_it_did(name: str) -> None:
    """Beside torch's in the same run, which must be as it is in the table: else the phantom counts otherwise today."""
    found = ceilings.count_step(name)
    assert {case.library for case in found} == {"fsdp2", "torch"}
    assert not ceilings.exceeded(found, ceilings.read())


def test_calls_are_counted_as_on_a_gpu(tmp_path: Path) -> None:
    """By the program that counts them there, so that both tables can be laid side by side."""
    told = run(["-W", "ignore", "-m", "benchmarks.phantom.calls", "--dry", "--out", str(tmp_path)], 300)
    rows = [line.split("|")[1:] for line in told.splitlines() if line.startswith("|")]
    found = {row[0].strip(): (float(row[2]), float(row[3])) for row in rows[2:]}
    ours, theirs = found["kernel launches of a step"]
    assert ours > 0 < theirs
    assert found["device-wide and stream waits of a step"] == (0, 0)
    for library in ("plain", "fsdp2", "torch"):
        names = json.loads((tmp_path / f"tiny-{library}.json").read_text())["names"].values()
        assert any("at::native::" in name for name in names), "names are readable"


@pytest.mark.parametrize("options", [(), ("offload",)], ids=["on the device", "offloaded"])
def test_a_deleted_model_leaves_nothing_on_the_device(options: tuple[str, ...]) -> None:
    """Three models built on meta, trained and deleted in one process."""
    told = run(["-W", "ignore", "-m", "benchmarks.phantom.leak", "fsdp2", *options], 600)
    assert told.count(": 0 bytes stay, the model is gone") == 3, told


def test_the_timeline_replays_what_was_recorded(tmp_path: Path) -> None:
    """Cases whose answer is known, of a step of each library."""
    options = ["--model", "1B", "--layers", "2", "--steps", "3", "--optimizer", "--out", str(tmp_path)]
    run(["-W", "ignore", "-m", "benchmarks.phantom.record", *options], 600)
    records: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(records) == {"plain", "fsdp2", "torch"}
    for name, record in records.items():
        found = timeline.check(record, timeline.Machine())
        assert found["parts / step"] == pytest.approx(1, abs=1e-6)
        assert found["lost"] == 0
        assert found["waits, host free"] < 1
        assert found["exposed, wire free"] < 1
        if name != "plain":
            assert found["collectives"] > 5
            assert found["late step / free step"] > 1
    assert timeline.sweep(records, timeline.Machine(), "latency", [0.5, 2]).count("ratio") == 2
    rows = {(row.quantity, row.setting): row for row in timeline_rows(records, "1B", 4096, 8)}
    (step,) = (row for (what, _), row in rows.items() if what == "step, ms" and row.note)
    assert step.bare is not None
    assert step.bare < step.values["fsdp2"]
    assert "in forward, for gather 1 (" in step.note
    (host,) = (row for (what, _), row in rows.items() if what.startswith("CPU time"))
    assert {len(times) for times in host.rounds.values()} == {3}


def test_stages_of_a_pipeline_are_recorded(tmp_path: Path) -> None:
    """By torch's own schedule. With the budget each of two stages of two blocks, and embedding, is gathered once."""
    options = [
        "--model",
        "1B",
        "--layers",
        "8",
        "--tokens",
        "64",
        "--steps",
        "2",
        "--ranks",
        "64",
        "--wrapping",
        "protocol",
    ]
    options += ["--schedule", "Interleaved1F1B", "--pipeline", "2", "--micro-batches", "4", "--budget-mib", "16384"]
    run(["-W", "ignore", "-m", "benchmarks.phantom.record", *options, "--out", str(tmp_path), "fsdp2", "torch"], 600)
    counts = {}
    for library in ("fsdp2", "torch"):
        found = timeline.replay(json.loads((tmp_path / f"{library}.json").read_text()), timeline.Machine())
        counts[library] = found["counts"]["gather"], found["counts"]["reduce"]
    assert counts["fsdp2"] == (5, 5)
    assert counts["torch"][0] > 5
    assert counts["torch"][1] == 5
