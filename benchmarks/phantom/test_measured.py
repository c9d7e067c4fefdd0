"""Tests the comparison of a GPU's results with the phantom, on made-up events of few launches."""

import gzip
import json
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.phantom import measured
from benchmarks.phantom.prices import Machine
from benchmarks.report import Row

CAST = "void at::native::multi_tensor_apply_kernel<at::native::CopyFunctor<c10::BFloat16, float, 2, 1, 1> >(int)"
MANGLED = "_ZN2at6native25multi_tensor_apply_kernelINS1_11CopyFunctorIN3c108BFloat16EfLi2E"
NVJET, FLASH = "nvjet_sm90_tst_256x128", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
OWN_FLASH = "_ZN13pytorch_flash16flash_fwd_kernelI23Flash"
ABOUT = {"model": "1B", "layers": 0, "tokens": 4096, "rows": 1, "fp32": False, "ranks": 64, "replicas": 1}

Works = Sequence[tuple[str, str, int, int]]  # call, work, and when it begins and for how long, in us


def events(works: Works) -> list[list[Any]]:
    """Calls follow each other every 10 us and take 8; all works are on stream 7."""
    found: list[list[Any]] = [["meter::step", "host", 1, 1, 0, 10**6], ["meter::step", "device", 7, 1, 0, 10**6]]
    for i, (call, work, begin, us) in enumerate(works):
        found.append([call, "host", 1, 100 + i, i * 10_000, 8_000])
        if work:
            found.append([work, "device", 7, 100 + i, begin * 1000, us * 1000])
    return found


def call(kind: str, *numbers: int, name: str = "", at_us: int = 0) -> list[Any]:
    return [at_us * 1000, 1, kind, 0, *(numbers + (0,) * 5)[:5], name]


GEMM, ATTENTION = call("gemm", 8192, 4096, 2048, 1, 14), call("kernel", 32, 1, 32, 128, name=OWN_FLASH)
PLAIN: Works = (
    ("cudaMemsetAsync", "Memset (Device)", 10, 1),
    ("cuLaunchKernelEx", NVJET, 20, 170),
    ("cuLaunchKernelEx", FLASH, 192, 190),  # launched long before the stream was free: a gap of 2 us
)
SHARDED: Works = (
    ("cudaStreamWaitEvent", "", 0, 0),
    ("cudaLaunchKernel", CAST, 14, 4),
    ("cudaMemcpyAsync", "Memcpy HtoD (Pinned -> Device)", 34, 1),  # launched at 20, and the stream was free since 18
    ("cudaMemsetAsync", "Memset (Device)", 50, 1),
    ("cuLaunchKernelEx", NVJET, 60, 150),
    ("cuLaunchKernelEx", FLASH, 211, 170),
    ("cudaEventRecord", "", 0, 0),
)
OF_PLAIN = [GEMM, ATTENTION]
OF_SHARDED = [
    call("cudaStreamWaitEvent"),
    call("kernel", 17, 1, 1, 512, 950_000, name=MANGLED),
    call("cudaMemcpyAsync", 64, 1, 0, at_us=20),
    GEMM,
    ATTENTION,
    call("cudaEventRecord", at_us=40),
]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The results of a session, and what the phantom counts."""
    gpu, phantom = tmp_path / "gpu", tmp_path / "phantom"
    (gpu / "parts").mkdir(parents=True)
    phantom.mkdir()
    for name, works, calls in (("plain", PLAIN, OF_PLAIN), ("fsdp2", SHARDED, OF_SHARDED)):
        lines = "".join(json.dumps(event) + "\n" for event in events(works))
        (gpu / "parts" / f"events-Llama-1B-{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        kinds = {"waits between streams": sum(each[2] == "cudaStreamWaitEvent" for each in calls)}
        record = {"about": ABOUT, "names": {MANGLED: CAST}, "kinds": kinds, "calls": calls}
        (phantom / f"Llama-1B-{name}.json").write_text(json.dumps(record))
    where = "Llama 1B, 4096 tokens, N=64"
    short = Row("cuda", "step ms", "Llama 1B, 512 tokens, N=64", {"fsdp2": 9.0}, {"fsdp2": [9.0]}, limit=9.0)
    step = Row("cuda", "step ms", where, {"fsdp2": 0.6}, {"fsdp2": [0.7, 0.5]}, limit=0.4)
    issued = Row("cuda", "ms until all is issued", where, {"fsdp2": 0.3}, {"fsdp2": [0.3, 0.2]})
    for folder, peak in ((gpu, 13.268), (phantom, 13.27)):
        rows = [
            Row("cuda", "peak allocated GiB", where, {"fsdp2": peak}),
            *([step, issued, short] if folder == gpu else []),
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return gpu, phantom


def cells(text: str, what: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {what} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_report_lays_both_side_by_side(folders: tuple[Path, Path]) -> None:
    text = measured.report(*folders, Machine())
    assert cells(text, "peak allocated GiB, Llama 1B, 4096 tokens, N=64") == ["13.268", "13.270"]
    # Columns: plain and fsdp2, on the GPU and on the phantom.
    assert cells(text, "kernels") == ["2", "2", "3", "3"]
    assert cells(text, "kernels: foreach casts") == ["0", "0", "1", "1"]
    assert cells(text, "copies HtoD") == ["0", "0", "1", "1"]
    assert cells(text, "fills") == ["1", "0", "1", "0"]
    assert cells(text, "waits between streams") == ["0", "0", "1", "1"]
    assert cells(text, "events recorded") == ["0", "0", "1", "1"]
    assert "- fsdp2: 3 kernels, of the same kinds in the same order" in text
    assert "- fsdp2, beyond the plain model: as on the phantom" in text
    assert "- plain, fills on the GPU: 1 before matrix products" in text
    assert cells(text, "matrix products") == ["0.17", "0.18", "0.15", "0.18"]
    assert cells(text, "all") == ["0.36", "0.37", "0.33", "0.38"]
    assert cells(text, f"between two works of a stream (prices: {Machine().gap_us})")[0] == "2.0 (2.0 to 2.0), 1"
    assert cells(text, "from a launch to its work on a free stream")[1] == "17.0 (14.0 to 20.0), 2"
    assert cells(text, "cudaStreamWaitEvent") == ["", "8.0 (8.0 to 8.0), 1"]


def test_a_step_is_predicted_with_hosts_of_several_speeds(folders: tuple[Path, Path]) -> None:
    text = measured.report(*folders, Machine())
    assert cells(text, "measured, least") == ["", "0.5"]
    assert cells(text, "measured, median") == ["0.4", "0.6"]
    assert cells(text, "timeline: a host without cost") == ["0.4", "0.4"]
    machine = Machine()
    record = json.loads((folders[1] / "Llama-1B-fsdp2.json").read_text())
    found = measured.read_events(folders[0])["Llama-1B"]["fsdp2"]
    own = measured.with_host_of(found, machine)
    assert (own.launch_us, own.event_us) == (8.0, 8.0)
    rows = measured.read_rows(folders[0] / "rows.jsonl")
    (issued,) = (row for row in rows if row.quantity == "ms until all is issued")
    issued.rounds["fsdp2"] = [2.0]  # ms: four launches, two events, and 40 us between calls that are stretched
    told = "\n".join(measured.compare_steps(rows[:-1], {"fsdp2": found}, {"fsdp2": record}, machine))
    assert cells(told, "timeline: the same, until all is issued") == ["0.1"]
    (step,) = cells(told, "timeline: this host, as slow as it")
    assert float(step) > 1.9, "the host is what it waits for"


def test_the_first_other_kernel_is_named(folders: tuple[Path, Path]) -> None:
    gpu, _ = folders
    found = measured.read_events(gpu)["Llama-1B"]["fsdp2"]
    record = {"names": {MANGLED: CAST}, "calls": OF_SHARDED}
    assert not measured.first_difference(found, record)
    assert measured.first_difference(found, {**record, "names": {}}).startswith("kernel 0 differs"), (
        "names are compared"
    )
    swapped = {**record, "calls": [*OF_SHARDED[:3], ATTENTION, GEMM]}
    assert measured.first_difference(found, swapped).startswith(f"kernel 1 differs: {NVJET}")
    less = {**record, "calls": OF_SHARDED[:4]}
    assert measured.first_difference(found, less) == "3 kernels on the GPU, 2 on the phantom"


def test_packed_events_are_read(folders: tuple[Path, Path]) -> None:
    gpu, _ = folders
    before = measured.read_events(gpu)
    with tarfile.open(gpu / "parts.tar.gz", "w:gz") as archive:
        archive.add(gpu / "parts", "parts")
    for path in (gpu / "parts").iterdir():
        path.unlink()
    assert measured.read_events(gpu) == before
    assert before["Llama-1B"]["plain"].busy_ms == pytest.approx(0.361)


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    assert "No memory was measured." in measured.report(tmp_path, tmp_path, Machine())
