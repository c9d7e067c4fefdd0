"""Tests the benchmarks: their arithmetic, their table, and that they run."""

import dataclasses
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import one_of_many
from benchmarks import claims, instructions
from benchmarks.__main__ import format_report, main, measure, parse_arguments, plan_jobs
from benchmarks.allocator import allocator_rows
from benchmarks.cuda import Stage, kind_of_call, measure_calls, measure_protocol, tiny_setup
from benchmarks.cuda_group import start_wire_group
from benchmarks.cuda_models import Llama, run_lm_step
from benchmarks.gloo_group import largest_difference
from benchmarks.host import build_step
from benchmarks.libraries import PEERS, load_library, processes_of
from benchmarks.models import Shape, build_sharded
from benchmarks.overlap import floor_seconds
from benchmarks.places import UnavailableError, open_throttled_link
from benchmarks.recipe import ROWS, clip_function, make_optimizer, shard, shard_as_torchtitan
from benchmarks.report import Row, format_table, merge_rows, timed_row
from benchmarks.suites import SUITES
from benchmarks.timed_group import Clock, Link, SimulatedClock, start_timed_group
from benchmarks.timeline import timeline_rows
from benchmarks.timing import repeat
from benchmarks.traffic import count_step
from benchmarks.turns import run_in_turns
from helpers import fake_world

SHAPE = Shape(blocks=2, dim=8, hidden=16, tokens=3)
FOLDER = Path(claims.__file__).parent


def test_each_module_that_is_imported_by_its_name_exists() -> None:
    """A moved folder had left one behind, in an option that no test used."""
    sources = {path: path.read_text() for path in FOLDER.rglob("*.py")}
    names = {name for source in sources.values() for name in re.findall(r'import_module\("([\w.]+)"\)', source)}
    assert len(names) > 5
    assert not [name for name in names if find_spec(name) is None]


@pytest.fixture
def link() -> Iterator[Link]:
    """Of four ranks: 10 ms latency, and 100 ms for the three quarters that a rank lacks of 4,000 bytes."""
    link = Link(SimulatedClock(), latency=0.01, bandwidth=30_000)
    start_timed_group(4, link)
    yield link
    dist.destroy_process_group()


def lengths(link: Link) -> list[float]:
    return [end - begin for _, begin, end in link.transfers]


def test_a_collective_takes_latency_and_bytes_over_bandwidth(link: Link) -> None:
    group, full, shard = dist.group.WORLD, torch.zeros(1000), torch.zeros(250)
    group._allgather_base(full, shard)
    group._reduce_scatter_base(shard, full)
    group.allreduce([full])
    assert [kind for kind, _, _ in link.transfers] == ["gather", "reduce", "sum"]
    assert lengths(link) == pytest.approx([0.11, 0.11, 0.21])


def test_a_coalesced_call_has_one_latency(link: Link) -> None:
    full, shard = torch.zeros(500), torch.zeros(125)
    dist.group.WORLD.allgather([[*full.chunk(4), *full.chunk(4)]], [shard])
    dist.group.WORLD.allgather_into_tensor_coalesced([full, full], [shard, shard])
    dist.group.WORLD.reduce_scatter_tensor_coalesced([shard, shard], [full, full])
    assert lengths(link) == pytest.approx([0.11, 0.11, 0.11])


def test_collectives_pass_the_link_one_by_one(link: Link) -> None:
    full, shard = torch.zeros(4), torch.zeros(1)
    for _ in range(3):
        dist.group.WORLD._allgather_base(full, shard)
    (_, _, first), (_, second, then), (_, third, _) = link.transfers
    assert (first, then) == (second, third)


@pytest.mark.parametrize("clock", [Clock(), SimulatedClock()], ids=["real", "simulated"])
def test_a_wait_lasts_until_the_collective_has_ended_and_no_longer(clock: Clock) -> None:
    link, start = Link(clock, latency=0.05), clock.now()
    work = link.send("gather", 0)
    assert not work.is_completed()
    work.wait()
    assert work.is_completed()
    assert clock.now() - start >= 0.05
    before = clock.now()
    work.wait()
    assert clock.now() - before < 0.05, "it is through: nothing to wait for"


def test_public_functions_wait_where_they_are_called(link: Link) -> None:
    """`async_op=False`, as torch's FSDP2 has it on CPU, exposes all of it."""
    full, shard = torch.zeros(1000), torch.zeros(250)
    # The old name is deprecated, the new one younger than torch 2.11.
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(shard, full)
    assert link.clock.now() == pytest.approx(0.11)


def test_floor_of_exposed_communication() -> None:
    """Hidden where compute is longer; where nothing computes, all of it but second gathers of the last two blocks."""
    assert floor_seconds(transfer=2, forward=3, backward=6, blocks=5) == 4
    assert floor_seconds(transfer=1, forward=0, backward=0, blocks=5) == 5 + 4 + 4
    assert floor_seconds(transfer=3, forward=2, backward=4, blocks=4) == 6 + 3 * 1 + 2 * 2


def test_the_table_has_ratios_and_the_distance_to_the_limit() -> None:
    """Of the first library to each other one. DDP shards nothing, so it lacks a row."""
    times = {"fsdp2": [1.0, 2.0, 6.0], "torch": [4.0, 4.0, 4.0], "ddp": [2.0, 1.0, 3.0]}
    rows = [
        Row("memory", "peak", "N=8", {"fsdp2": 3.0, "torch": 4.0}, limit=2.0),
        Row("traffic", "copies", "N=8", {"fsdp2": 0.0, "torch": 24.0, "ddp": 16.0}, limit=0.0),
        timed_row("host", "us", "N=8", times, bare=0.5),
    ]
    header, _, memory, traffic, host = table_of(rows, ["fsdp2", "torch", "ddp"])
    assert header[2:9] == ["fsdp2", "torch", "ddp", "fsdp2 / torch", "fsdp2 / ddp", "bare", "limit"]
    assert header[9:] == ["fsdp2 / limit", "torch / limit"]
    assert memory[2:] == ["3.00", "4.00", "-", "0.75x", "-", "-", "2.00", "1.50", "2.00"]
    assert traffic[2:] == ["0", "24.00", "16.00", "0.00x", "0.00x", "-", "0", "1.00", "-"]
    ratios = ["0.50x (0.25 to 1.50)", "2.00x (0.50 to 2.00)"]
    medians = ["2.00 (1.00 to 6.00)", "4.00 (4.00 to 4.00)", "2.00 (1.00 to 3.00)"]
    assert host[2:] == [*medians, *ratios, "0.50", "-", "-", "-"]


def table_of(rows: list[Row], names: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in format_table(rows, names).splitlines()]


def test_worlds_of_jobs() -> None:
    """Each world has a process of its own, unless the suite compares worlds; some suites have fixed ones."""
    assert SUITES["memory"].choose_worlds(quick=False, asked=None) == [(8,), (64,), (512,)]
    assert SUITES["memory"].choose_worlds(quick=True, asked=[16, 4]) == [(4,), (16,)]
    assert SUITES["init"].choose_worlds(quick=False, asked=None) == [(8, 512, 4096)]
    assert SUITES["gloo"].choose_worlds(quick=False, asked=[16]) == [(2,)]


def test_libraries_of_jobs() -> None:
    """A suite measures the peers that it can; asked for others, it leaves them out."""
    assert SUITES["overlap"].choose_libraries(None) == (*ROWS, "fsdp1", "simple")
    assert SUITES["overlap"].choose_libraries(["ddp", "torch", "simple"]) == ("torch", "simple")
    assert set(SUITES["gloo"].peers) == set(PEERS)


@pytest.mark.filterwarnings("ignore")  # torch's, about FSDP1 and about collectives of its own
@pytest.mark.parametrize("name", SUITES["overlap"].peers)
def test_waits_for_peers_take_time(link: Link, name: str) -> None:
    """A collective by another name than those which the timed group knows would be free."""
    step = build_step(PEERS[name], SHAPE, "fp32")
    repeat(2, step)
    link.transfers.clear()
    step()
    gathers = {"fsdp1": 3 + 2, "simple": 2 * 9 + 1}[name]  # groups, of which the root stays; parameters
    reduces = {"fsdp1": 3, "simple": 2 * 9 + 1}[name]
    assert [kind for kind, _, _ in link.transfers] == ["gather"] * gathers + ["reduce"] * reduces


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("ddp", 2 * 4), ("simple", 4 + 4), ("fsdp1", 3 * 4)])
def test_the_data_of_peers_is_known(name: str, bytes_per_parameter: int) -> None:
    """An all-reduce; a gather and a reduction; two gathers and a reduction, but one gather for the root's vector."""
    with fake_world(4):
        mesh = dist.init_device_mesh("cpu", (4,))
        _, wire = count_step(build_sharded(SHAPE, "fp32", PEERS[name], mesh), SHAPE, "fp32")
    kept = 4 * SHAPE.root_numel if name == "fsdp1" else 0
    assert wire.sent_bytes == (bytes_per_parameter * SHAPE.numel - kept) * 3 / 4


def test_gradients_that_differ_are_an_error() -> None:
    """Libraries that disagree must not be timed."""
    ours, theirs = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5])}
    assert largest_difference(ours, theirs, tolerance=0.3) == pytest.approx(0.2)
    for other in (theirs, {"w": torch.tensor([1.0, torch.nan])}, {"w": torch.zeros(2)}):
        with pytest.raises(RuntimeError, match="disagree"):
            largest_difference(ours, other, tolerance=0.1)


def test_a_throttled_link_is_slow_counts_its_bytes_and_goes_away() -> None:
    """Two megabytes over 10 Mbit/s, of which one is the burst that passes at once."""
    nbytes, megabits = 2_000_000, 10
    try:
        with open_throttled_link(megabits) as (receiver, sender):
            receiving, sending = (
                subprocess.Popen(
                    [*place.prefix, sys.executable, "-c", EXCHANGE, role, str(nbytes)], stdout=subprocess.PIPE
                )
                for place, role in ((receiver, "receive"), (sender, "send"))
            )
            seconds = float(receiving.communicate(timeout=60)[0])
            sent = int(sending.communicate(timeout=60)[0])
    except UnavailableError as reason:
        pytest.skip(str(reason))
    assert nbytes <= sent <= 1.1 * nbytes
    assert seconds >= 0.9 * (nbytes - 2**20) * 8 / (megabits * 1e6)
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not [place for place in (receiver, sender) if place.prefix[-1] in listed.split()]


EXCHANGE = """
import socket, sys, time
from benchmarks.places import sent_bytes
role, nbytes = sys.argv[1], int(sys.argv[2])
if role == "receive":
    with socket.create_server(("10.0.0.1", 7000)) as server:
        connection, _ = server.accept()
        start = time.monotonic()
        left = nbytes
        while left:
            left -= len(connection.recv(left))
        connection.sendall(b"!")
        print(time.monotonic() - start)
else:
    for attempt in range(200):
        try:
            connection = socket.create_connection(("10.0.0.1", 7000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.sendall(bytes(nbytes))
    connection.recv(1)
    print(sent_bytes("wire"))
"""


def test_suites_that_a_machine_cannot_run_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    rows, failed, left_out = measure(list(plan_jobs(parse_arguments(["gloo-1gbit", "--quick"]), None)))
    assert (rows, failed) == ([], [])
    assert left_out == ["gloo-1gbit 2 (needs root)"]


def test_the_timeline_is_left_out_where_no_phantom_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    rows, failed, left_out = measure(list(plan_jobs(parse_arguments(["timeline", "allocator", "--quick"]), None)))
    assert (rows, failed) == ([], [])
    reason = "no phantom GPU: needs Linux on x86-64, got Linux on riscv64"
    assert left_out == [f"timeline 64 ({reason})", f"allocator 64 ({reason})"]


def test_rows_of_the_timeline() -> None:
    """Of a step made by hand: 64 ranks gather 10 MB each (209 us of latency, 630 MB at 340 GB/s), and then compute."""
    about = {"model": "1B", "layers": 1, "tokens": 4096, "rows": 1, "fp32": False, "ranks": 64, "replicas": 1}

    def call(kind: str, *numbers: int, name: str = "") -> list[Any]:
        """`numbers`: the stream, and what the stub library logs."""
        return [0, 1, kind, *(numbers + (0,) * 6)[:6], name]

    gather = [call("cudaEventRecord", 0, 1), call("cudaStreamWaitEvent", 7, 1)]
    gather += [call("ncclAllGather", 7, 5_000_000, 9, -1, 1, 64)]
    gather += [call("cudaEventRecord", 7, 2), call("cudaStreamWaitEvent", 0, 2)]
    compute = [call("gemm", 0, 4096, 4096, 4096, 1, 2), call("mark", name="optimizer")]
    gathers = {"plain": [], "fsdp2": gather, "torch": gather * 2}
    records = {
        name: {"about": about, "calls": [call("mark", name="forward"), *before, *compute], "cpu_ms": [1.0, 2.0]}
        for name, before in gathers.items()
    }
    rows = [*timeline_rows(records, "1B", 4096, 64)]
    where = "Llama 1B, N=64, 4,096 tokens"
    steps = {row.setting.removeprefix(where): row for row in rows if row.quantity == "step, ms"}
    one = (11 + 56 * 2.6 + 7 * 7.5 + 63 * 10e6 / 340e3) / 1e3
    step = steps[""]
    assert step.values["torch"] - step.values["fsdp2"] == pytest.approx(one, abs=0.02)
    assert step.values["fsdp2"] - step.bare == pytest.approx(one, abs=0.02)
    assert f"fsdp2: {one:.2f} ms at 0.0 ms, in forward, for gather 1 (10.0 MB of a rank)" in step.note
    slow = steps[", twice the latency"].values["fsdp2"] - step.values["fsdp2"]
    assert slow == pytest.approx(0.209, abs=0.01)
    assert steps[", one card a machine"].values["fsdp2"] > 5 * one
    (exposed,) = (row for row in rows if row.quantity == "exposed gathers, ms")
    assert exposed.values["torch"] == pytest.approx(2 * one, abs=0.02)
    (line,) = (
        line
        for line in format_report(rows, (), {"timeline": ("fsdp2", "torch")}, ()).splitlines()
        if "gather 1" in line
    )
    assert line.startswith("- Llama 1B, N=64")


def test_rows_of_the_allocator() -> None:
    found = {name: {"512 tokens": [1.0, 3.0, 4.0]} for name in ("fsdp2", "torch")}
    assert [(row.quantity, row.setting, row.values) for row in allocator_rows(found, "1B", ", expandable")] == [
        (what, "1B, 512 tokens, expandable", {"fsdp2": number, "torch": number})
        for what, number in (("resting, GiB", 1), ("peak allocated, GiB", 3), ("peak reserved, GiB", 4))
    ]


def test_callgrind_counts_the_measured_function(tmp_path: Path) -> None:
    """As it writes them; a row is above the plain model."""
    (tmp_path / "counts.1").write_text("events: Ir\nfn=(1) main\n1 700\ntotals: 123456\n")
    assert instructions.total(tmp_path / "counts.1") == 123456
    watched, calls = instructions.Watched(), []
    watched @= lambda: calls.append(1)
    assert isinstance(watched, instructions.Watched)
    assert calls == [1]
    row = instructions.make_row("N=8", {"fsdp2": 5.0, "torch": 9.0, "plain": 1.0, "floor": 2.0})
    assert (row.values, row.bare, row.limit) == ({"fsdp2": 4.0, "torch": 8.0}, 1.0, 2.0)


def test_the_start_is_counted_with_each_library_and_without() -> None:
    with fake_world(8):
        starts = instructions.build_starts([load_library("fsdp2")])
        assert [*starts] == ["fsdp2", "plain"]
        sharded, plain = (start()() for start in starts.values())
    assert sharded.shape == plain.shape


def test_it_runs_and_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One library beside itself, in a process of its own, as for any job."""
    arguments = ["init", "--quick", "--worlds", "4", "8", "--libraries", "fsdp2", "--out", str(tmp_path), "--name", "x"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    (report,) = tmp_path.glob("*-x.md")
    rows = [line for line in report.read_text().splitlines() if line.startswith(("| ms to wrap", "| growth"))]
    assert len(rows) == 3, "two worlds, and the growth between them"


def test_both_libraries_are_wrapped_as_torchtitan_does() -> None:
    """The embedding, each block, norm and head together, which stay unsharded, and the root."""
    (shape,) = ON_CPU.llamas.values()
    tied = Llama(shape)
    tied.head.weight = tied.embedding.weight
    first, last = Llama(shape), Llama(shape)  # stages of a pipeline
    first.norm = first.head = last.embedding = None
    for model, ends in (
        (Llama(shape), [["embedding"], ["norm", "head"]]),
        (tied, [["embedding", "norm", "head"]]),
        (first, [["embedding"]]),
        (last, [["norm", "head"]]),
    ):
        names = {module: name for name, module in model.named_modules()}
        calls: list[tuple[list[str], Any]] = []

        def note(modules: Any, reshard_after_forward: Any = None, to: Any = calls, of: Any = names) -> None:
            together = modules if isinstance(modules, list) else [modules]
            to.append(([of[module] for module in together], reshard_after_forward))

        shard_as_torchtitan(SimpleNamespace(fully_shard=note), model)
        blocks = [(["blocks.0"], True), (["blocks.1"], True)]
        assert [call for call in calls if call in blocks] == blocks
        assert [modules for modules, reshard in calls if (modules, reshard) not in blocks] == [*ends, [""]]
        assert {modules[-1]: reshard for modules, reshard in calls}.get("head", False) is False
        assert calls[-1] == ([""], None)


def test_the_best_rows_have_the_settings_of_the_protocol() -> None:
    with fake_world(4):
        mesh = dist.init_device_mesh("cpu", (4,))
        models = {name: shard(name, Llama(next(iter(ON_CPU.llamas.values()))), mesh=mesh) for name in ROWS}
        flat = {name: hasattr(make_optimizer(name, model), "_fsdp2_flat_steps") for name, model in models.items()}
    assert flat == {"fsdp2": False, "torch": False, "fsdp2-best": True, "torch-best": False}
    assert [name for name in ROWS if clip_function(name) is not torch.nn.utils.clip_grad_norm_] == ["fsdp2-best"]


def test_libraries_have_processes_of_their_own() -> None:
    """Variants of fsdp2 are compared with it in one."""
    assert processes_of(["fsdp2", "torch", "unguarded", "ddp"]) == [("fsdp2", "unguarded"), ("torch",), ("ddp",)]


def test_rows_of_several_processes_become_one() -> None:
    rows = [timed_row("host", "us", "N=8", {name: [t]}, bare=t) for t in (1.0, 3.0) for name in ("fsdp2", "torch")]
    (row,) = merge_rows([*rows, Row("gloo", "difference", "N=2", {})])
    assert (row.values, row.rounds["torch"], row.bare) == ({"fsdp2": 2.0, "torch": 2.0}, [1.0, 3.0], 2.0)
    best = {"fsdp2-best": [1.0, 1.0], "torch-best": [2.0, 4.0]}
    table = format_table([timed_row("host", "us", "N=8", {**row.rounds, **best})], ROWS)
    assert "3.00 (2.00 to 4.00)" in table, "the least and the most beside the median"
    ratios = table.splitlines()[0].split("torch-best")[1:]
    assert "fsdp2 / torch " in ratios[0]
    assert "fsdp2-best /" in ratios[0], "best is compared with best"


def test_turns_go_round_until_all_have_ended() -> None:
    program = "from benchmarks.turns import take_turn\nfor _ in range({}): take_turn(); open({!r}, 'a').write('{} ')"
    with tempfile.NamedTemporaryFile() as file:
        commands = {name: program.format(count, file.name, name) for name, count in (("a", 2), ("b", 1))}
        run_in_turns({name: [sys.executable, "-c", code] for name, code in commands.items()})
        assert file.read() == b"a b a "
    with pytest.raises(RuntimeError, match="the process of a has ended with status 3"):
        run_in_turns({"a": [sys.executable, "-c", "raise SystemExit(3)"]})


def test_claims_are_found_in_reports() -> None:
    """What this test finds missing, `python -m benchmarks.claims` names with its paragraph."""
    found = [claim for page in claims.PAGES for claim in claims.find_claims(page)]
    assert len(found) > 50
    assert [(claim.page, claim.number, claim.text) for claim in found if claims.find_source(claim) is None] == []


def test_a_number_that_no_report_has_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "day.md").write_text("| peak | 13.294 | 0.781x |")
    (tmp_path / "page.md").write_text("# Page\n\nA peak of 13.3 GiB, 0.79x, 5 ranks ([day](results/day.md)).\n\n0.5x\n")
    told = {claim.number: claims.find_source(claim) for claim in claims.find_claims("page.md")}
    assert {number: line is not None for number, line in told.items()} == {"13.3": True, "0.79": False, "0.5": False}


ON_CPU = tiny_setup(torch.device("cpu"))


def test_programs_for_a_gpu_run_on_a_cpu() -> None:
    """Where there is nothing to count. The wire counts bytes: two gathers, one sum."""
    rows = merge_rows(row for name in ROWS for row in measure_protocol(ON_CPU, name))
    rows += merge_rows(row for name in ("plain", "fsdp2") for row in measure_calls(ON_CPU, name))
    assert {row.quantity for row in rows if "whole" in row.quantity or "tokens" in row.quantity} == {
        "whole step ms",
        "tokens/s of a rank",
        "CPU ms of a whole step, until all is issued",
    }
    assert [(*row.values,) for row in rows if row.quantity == "whole step ms"] == [ROWS] * 3
    (shape,) = ON_CPU.llamas.values()
    numel = shape.blocks * shape.block_numel + (2 * shape.vocab + 1) * shape.dim
    for name in ROWS:
        stage = Stage(ON_CPU, shape)
        step = functools.partial(run_lm_step, stage.build_model(name), stage.ids)
        step()
        before = stage.wire.sent_bytes
        step()
        sent = (stage.wire.sent_bytes - before) / (3 / 4)
        assert 6 * numel < sent < 1.3 * 8 * numel, "bf16 gathers, one of them spared for some; fp32 sums"
        stage.close()


def test_calls_of_the_runtime_are_distinguished_from_kernels() -> None:
    assert kind_of_call("cudaLaunchKernelExC") == kind_of_call("cuLaunchKernel") == "kernel launches"
    assert kind_of_call("cudaMemcpyAsync") == "copies and fills"
    assert kind_of_call("cudaMemcpy") == kind_of_call("cudaStreamSynchronize") == "device-wide and stream waits"
    assert kind_of_call("cutlass_80_tensorop_Memcpy") is kind_of_call("Memcpy DtoD") is None


def test_the_wire_moves_what_one_rank_has() -> None:
    wire = start_wire_group(4, torch.device("cpu"))
    wire.moves = True
    full, shard = torch.zeros(8), torch.tensor([1.0, 2.0])
    dist.group.WORLD.allgather_into_tensor_coalesced([full], [shard])
    assert full.tolist() == [1, 2] * 4
    dist.group.WORLD.reduce_scatter_tensor_coalesced([shard], [torch.arange(8.0)])
    assert shard.tolist() == [0, 1]
    assert wire.sent_bytes == 2 * 8 * 4 * 3 / 4
    dist.destroy_process_group()


@pytest.mark.parametrize("world", one_of_many.WORLDS)
def test_the_first_program_of_a_session_runs_on_a_cpu(world: str) -> None:
    """A way of training ends as the plain model, which one GPU is to show of kernels and streams. The dry session of
    test_gpu_session.py tries all at night.
    """
    for name in one_of_many.ways_in(world)[[*one_of_many.WORLDS].index(world) :: 5]:
        one_of_many.run("cpu", world, name)


def test_a_way_that_fails_costs_no_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each says how it has ended as soon as it has."""
    broken = dataclasses.replace(one_of_many.WAYS["fp32"], after=lambda model: model.set_gradient_divide_factor(3.0))
    ways = {"divided by 3": broken, "fp32": one_of_many.WAYS["fp32"]}
    monkeypatch.setattr(one_of_many, "WAYS", ways)
    assert one_of_many.main("cpu") == 1
    told, _ = capsys.readouterr()
    assert told.count("as the plain model") == 2 * (len(ways) - 1)
    assert "one of 8 simulated ranks, divided by 3: FAILED: step 0: " in told
