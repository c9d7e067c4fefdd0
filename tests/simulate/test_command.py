"""Tests `python -m fsdp2 simulate`: programs run unchanged, with torchrun's numbers, exit codes, and one error."""

import hashlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from documents import code_blocks
from fsdp2.simulate.command import main
from helpers import alone, world_sizes
from programs import run_forked

ROOT = Path(__file__).resolve().parents[2]


def note_digests(folder: Path) -> None:
    """Has optimizers of this process write a digest of a rank's parameters to its file, at each step."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for each in group["params"]:
                local = each.to_local() if isinstance(each, DTensor) else each
                digest.update(local.detach().numpy().tobytes())
        with (folder / os.environ["RANK"]).open("a") as file:
            print(digest.hexdigest(), file=file)

    register_optimizer_step_post_hook(note)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what the command changes of this process, which usually ends with it."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules, threads = {*sys.modules}, torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert not [name for name in {*sys.modules} - modules if name.startswith("of_user")], "each rank has its own"


def simulate(tmp_path: Path, text: str, *arguments: str, ranks: int = 3) -> int:
    script = tmp_path / "train.py"
    script.write_text(text)
    return main(["--ranks", str(ranks), str(script), *arguments])


STATE = """
import os, sys
import torch.distributed as dist
import of_user
from of_user_package import part

dist.init_process_group()
of_user.values.append(dist.get_rank())
part.values.append(dist.get_rank())
dist.barrier()
assert sys.modules["__main__"].__dict__ is globals()
print(os.environ["RANK"], of_user.values, part.values, sys.argv[1:], __name__)
print("a line", end=" ")
dist.barrier()
print("of rank", dist.get_rank())
sys.exit(0)
"""


def test_each_rank_has_its_own_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "of_user.py").write_text("values = []")
    (tmp_path / "of_user_package").mkdir()
    (tmp_path / "of_user_package/__init__.py").write_text("")
    (tmp_path / "of_user_package/part.py").write_text("values = []")
    assert simulate(tmp_path, STATE, "--option", "value") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    for rank in range(3):
        assert f"[{rank}] {rank} [{rank}] [{rank}] ['--option', 'value'] __main__" in lines
        assert f"[{rank}] a line " in lines or f"[{rank}] a line of rank {rank}" in lines
    table = err.splitlines()
    assert table[0].split() == ["rank", "collectives", "messages", "MB", "sent", "CPU", "seconds"]
    assert [row.split()[:3] for row in table[1:]] == [[str(rank), "2", "0"] for rank in range(3)]


@pytest.mark.parametrize(("options", "expected"), [((), [1, 2]), (("--own", "of_others"), [1, 1])])
def test_a_library_that_keeps_its_rank(
    options: tuple[str, ...],
    expected: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "library/of_others").mkdir(parents=True)
    (tmp_path / "library/of_others/__init__.py").write_text("from .state import ranks")
    (tmp_path / "library/of_others/state.py").write_text("ranks = []")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "library")])
    script = tmp_path / "program/train.py"
    script.write_text("import of_others\nof_others.ranks.append(0)\nprint(len(of_others.ranks))")
    try:
        assert main(["--ranks", "2", *options, str(script)]) == 0
    finally:
        for name in [name for name in sys.modules if name.startswith("of_others")]:
            del sys.modules[name]
    assert capsys.readouterr().out.splitlines() == [f"[{rank}] {number}" for rank, number in enumerate(expected)]


def test_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "of_user_program"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("number = 7")
    (package / "__main__.py").write_text("import os\nfrom .other import number\nprint(os.environ['RANK'], number)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--ranks", "2", "-m", "of_user_program"]) == 0
    assert capsys.readouterr().out.splitlines() == ["[0] 0 7", "[1] 1 7"]


FAILS = """
import sys
import torch, torch.distributed as dist

dist.init_process_group()


def step(rank):
    if rank == 1:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(4))


step(dist.get_rank())
"""


def test_the_first_error_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tmp_path, FAILS) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.startswith("[1] Traceback (most recent call last):\n[1]   File")
    assert "fsdp2/simulate" not in err, "the traceback begins with the program"
    assert "[1] ValueError: a bad batch\n[1] rank 1 has failed, and ends the program. Where the ranks are:\n" in err
    assert re.search(
        r"rank 0: in all_reduce\(SUM, 4 float32\), call 0 of the default group, at .*train.py:11 \(step\)", err
    )
    assert re.search(r"^ +1 .*  failed$", err, re.MULTILINE)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 1), ("sys.exit('no data')", 1), ("sys.exit(0)", 0)])
def test_exit_codes_are_those_of_torchrun(
    end: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(tmp_path, f"import sys\n{end}", ranks=2) == code
    assert "Traceback" not in capsys.readouterr().err


def test_a_mismatch_is_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch, torch.distributed as dist\ndist.init_process_group()\n"
    text += "dist.barrier() if dist.get_rank() == 2 else dist.all_reduce(torch.ones(4))\n"
    assert simulate(tmp_path, text) == 1
    err = capsys.readouterr().err
    assert err.count("rank 2: calls barrier()") == 1
    assert "train.py:3 (<module>)" in err
    assert "Where the ranks are" not in err


def test_a_breakpoint_on_any_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch, torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n"
    text += "if rank == 1:\n    import pdb\n    pdb.Pdb(readrc=False).set_trace()\nx = torch.ones(2) * rank\n"
    text += "dist.all_reduce(x)\nprint(x.tolist())\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("p rank + 40\nnext\nnext\np x.tolist()\ncontinue\n"))
    assert simulate(tmp_path, text) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\[1\] \(Pdb\) 41$", out, re.MULTILINE)
    assert re.search(r"^\[1\] \(Pdb\) \[3.0, 3.0\]$", out, re.MULTILINE), "the others have run meanwhile"
    assert out.count("[3.0, 3.0]") == 4


def test_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, torch\nx = torch.zeros(250_000 * (1 + int(os.environ['RANK'])))\n")
    assert main(["--ranks", "2", "--memory", str(script)]) == 0
    table = capsys.readouterr().err.splitlines()
    assert [row.split()[-1] for row in table] == ["MB", "1.000", "2.000"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0", "x.py"], "expected one rank or more, got --ranks 0"),
        (["--ranks", "2", "no_such_file.py"], "No such file"),
        (["--ranks", "2", "-m", "no_such_module"], "expected the name of a module, got 'no_such_module'"),
        (["x.py"], "--ranks"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("ranks", world_sizes(3, nightly=(2, 4, 8)))
@pytest.mark.parametrize("library", ["fsdp2", "torch", "ddp"])
def test_training_has_the_bits_of_processes(library: str, ranks: int, tmp_path: Path) -> None:
    options = ("--impl", library, "--tiny", "--steps", "4", "--batch", "24", "--save", str(tmp_path / "saved"))
    processes, simulated = tmp_path / "processes", tmp_path / "simulated"
    processes.mkdir()
    simulated.mkdir()
    run_forked("train_gpt.py", ranks, *options, before=lambda _: note_digests(processes))

    def simulate_alone() -> int:
        dist.destroy_process_group()
        note_digests(simulated)
        return main(["--ranks", str(ranks), str(ROOT / "examples/train_gpt.py"), *options])

    assert alone(simulate_alone) == 0
    digests = [[(each / str(rank)).read_text().split() for rank in range(ranks)] for each in (processes, simulated)]
    assert digests[0] == digests[1]
    assert [len(each) for each in digests[0]] == [4] * ranks


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """What the tests above do inside of pytest, with breakpoint() and a pipe."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\n"
        "if dist.get_rank() == 1:\n    breakpoint()\ndist.barrier()\nraise SystemExit(dist.get_rank())\n"
    )
    command = [sys.executable, "-m", "fsdp2", "simulate", "--ranks", "2", str(script)]
    ended = subprocess.run(command, input="p dist.get_rank() + 40\nc\n", capture_output=True, text=True, check=False)
    assert "(Pdb) 41" in ended.stdout
    assert "[1] SystemExit: 1" in ended.stderr
    assert ended.returncode == 1


def test_ctrl_c_says_where_ranks_are(tmp_path: Path) -> None:
    """Also of a rank that does not wait, and lets no other run."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group()\nif dist.get_rank() == 0:\n    dist.barrier()\n"
        "print('here', flush=True)\nwhile True:\n    pass\n"
    )
    command = [sys.executable, "-m", "fsdp2", "simulate", "--ranks", "3", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[1] here\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(r"rank 0: in barrier\(\), call 0 of the default group, at .*train.py:4 ", err)
    assert re.search(r"rank 1: runs at .*train.py:[567] ", err)
    assert "rank 2: has not begun" in err


GUIDE = ROOT / "examples/guides/one-process.md"


def test_the_guide_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of `examples/guides/one-process.md`."""
    (program,), (report,) = code_blocks(GUIDE, "py"), code_blocks(GUIDE, "text")
    assert simulate(tmp_path, program.source) == 1
    printed = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert f"OutOfStep: {report.source}" in re.sub(r"^\[\d\] ", "", printed, flags=re.MULTILINE)
