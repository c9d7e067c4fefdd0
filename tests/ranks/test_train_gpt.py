"""Tests examples/train_gpt.py as its users run it: the losses do not depend on --impl or on the number of ranks.

Plain training on one process is the oracle. One run uses torchrun, because the launcher is part of the test:
test_torchrun_passes_sigterm_on.
"""

import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.checkpoint import folders
from helpers import NIGHTLY, world_sizes
from programs import ROOT, kill_at, run_forked, start_by_torchrun

pytest.importorskip("tqdm", reason="examples/train_gpt.py needs the extra fsdp2[examples]")

SCRIPT = ROOT / "examples" / "train_gpt.py"
IMPL = "fsdp2"
STEPS, SAVED_STEP = 12, 6  # STEPS is what --tiny trains

Curve = dict[int, float]
Run = Callable[..., str]


def train(
    folder: Path, impl: str, ranks: int, *options: str, run: Run = run_forked, says: str = "Sample: 'The "
) -> tuple[Curve, Curve]:
    """Training loss and validation bits per byte, each by step, of one run."""
    log = folder / "losses.jsonl"
    output = run(SCRIPT.name, ranks, "--tiny", "--impl", impl, "--save", str(folder), "--log-file", str(log), *options)
    assert says in output
    return read_log(log)


def read_log(log: Path) -> tuple[Curve, Curve]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    validations = {record["step"]: record["val_bits_per_byte"] for record in records if "val_bits_per_byte" in record}
    return losses, validations


@pytest.fixture(scope="module")
def plain_curves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Curve, Curve]:
    return train(tmp_path_factory.mktemp("plain"), "none", 1)


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Curve, Curve]]:
    """Folder and curves of an uninterrupted run on two ranks, with a checkpoint half way."""
    folder = tmp_path_factory.mktemp("sharded")
    return folder, train(folder, IMPL, 2, "--save-every", str(SAVED_STEP))


def assert_same(curves: tuple[Curve, Curve], expected: tuple[Curve, Curve]) -> None:
    for curve, expected_curve in zip(curves, expected, strict=True):
        assert curve == pytest.approx(expected_curve, abs=1e-4)


def test_sharded_run_learns_like_plain_training(
    sharded_run: tuple[Path, tuple[Curve, Curve]], plain_curves: tuple[Curve, Curve]
) -> None:
    """A wrong divisor of gradients or slice of the batch shows from the second step on."""
    _, curves = sharded_run
    losses, validations = curves
    assert list(losses) == list(range(1, STEPS + 1))
    log = (sharded_run[0] / "losses.jsonl").read_text().splitlines()
    peaks = [record["peak_memory_gb"] for record in map(json.loads, log) if "loss" in record]
    assert peaks == sorted(peaks)
    assert 0.05 < peaks[-1] < 4
    assert validations[STEPS] < validations[0] - 0.5
    assert_same(curves, plain_curves)


@pytest.mark.parametrize("impl", ["torch", "ddp"])
def test_other_implementations_learn_like_plain_training(
    impl: str, tmp_path: Path, plain_curves: tuple[Curve, Curve]
) -> None:
    """What benchmarks compare must be the same training."""
    assert_same(train(tmp_path, impl, 2), plain_curves)


@pytest.mark.parametrize("ranks", world_sizes(3, nightly=[1]))
def test_resumed_run_continues_as_if_uninterrupted(
    ranks: int, tmp_path: Path, sharded_run: tuple[Path, tuple[Curve, Curve]]
) -> None:
    """Weights, both moments of AdamW, its step count and the order of the data must cross to other shard sizes."""
    folder, (losses, validations) = sharded_run
    expected_losses = {step: loss for step, loss in losses.items() if step > SAVED_STEP}
    expected_validations = {step: bits for step, bits in validations.items() if step >= SAVED_STEP}
    checkpoint = folder / f"step-{SAVED_STEP:06}"
    says = f"Resumed from {checkpoint}: training continues with step {SAVED_STEP + 1}."
    resumed = train(tmp_path, IMPL, ranks, "--resume", str(checkpoint), says=says)
    assert_same(resumed, (expected_losses, expected_validations))


def test_muon_learns_more_than_adamw_and_alike_on_any_number_of_ranks(
    tmp_path: Path, sharded_run: tuple[Path, tuple[Curve, Curve]]
) -> None:
    """Plain training is the oracle, also behind a checkpoint. Muon rounds to bf16 what sums in another order are. The
    tiny model learns most in its embedding and head, which AdamW trains either way.
    """
    _, adamw = sharded_run
    options = ("--optimizer", "muon", "--muon-lr", "0.1")
    folders = [tmp_path / name for name in ("plain", "two", "resumed")]
    plain, _ = train(folders[0], "none", 1, *options)
    sharded, validations = train(folders[1], IMPL, 2, *options, "--save-every", str(SAVED_STEP))
    checkpoint = folders[1] / f"step-{SAVED_STEP:06}"
    resumed, _ = train(folders[2], IMPL, 3, *options, "--resume", str(checkpoint))
    assert list(resumed) == list(range(SAVED_STEP + 1, STEPS + 1))
    assert sharded == pytest.approx(plain, abs=2e-3)
    assert resumed == pytest.approx({step: plain[step] for step in resumed}, abs=2e-3)
    assert sharded[STEPS] < adamw[0][STEPS] - 0.01
    assert validations[STEPS] < adamw[1][STEPS] - 0.05


def test_what_it_says_to_a_newcomer(tmp_path: Path) -> None:
    """What sharding saves, how long it takes, the curve, and a command that continues, which is run as it stands."""
    options = ("--tiny", "--save", str(tmp_path), "--sample-bytes", "2")
    output = run_forked(SCRIPT.name, 2, *options)
    (held, times) = re.findall(r"holds ([\d.]+) MB of parameters, as much|would hold ([\d.]+)x as much", output)
    assert float(held[0]) == pytest.approx(0.25, abs=0.1)
    assert times[1] == "2.0"
    assert re.search(r"^All 12 steps take about \d+\.\d minutes\.$", output, re.MULTILINE)
    (first, bars, last) = re.findall(r"^Training, in bits per byte: (\S+) ([▁-█]{12}) (\S+)$", output, re.MULTILINE)[0]
    assert 7.5 < float(first) < 8.5
    assert float(last) < float(first)
    assert bars.startswith("█")
    (command,) = re.findall(r"^To go on to step 24: .* examples/train_gpt.py (.*)$", output, re.MULTILINE)
    assert command == f"{' '.join(options)} --steps 24 --resume {tmp_path / 'step-000012'}"
    resumed = run_forked(SCRIPT.name, 2, *command.split())
    assert "training continues with step 13" in resumed
    assert "To go on to step 48: OMP_NUM_THREADS=1 " in resumed
    assert "--steps 48 --resume" in resumed
    assert resumed.count("--steps 24") == 0


def test_the_curve_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import train_gpt

    assert train_gpt.curve({1: 8.0, 2: 4.0, 3: 0.0}) == "8.00 █▅▁ 0.00"
    assert train_gpt.curve({1: 2.0}) == "2.00 ▁ 2.00"
    assert len(train_gpt.curve(dict(enumerate(range(1, 131)))).split()[1]) == 44
    pytest.importorskip("matplotlib", reason="it is of the extra viz")
    train_gpt.plot({1: 8.0, 2: 4.0}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def terminates_in(steps: dict[int, int]) -> Callable[[int], None]:
    """Rank -> the step in the midst of which it gets SIGTERM."""

    def before(rank: int) -> None:
        optimizer_step, count = torch.optim.AdamW.step, itertools.count(1)

        def step(self: Any, closure: Any = None) -> Any:
            if next(count) == steps.get(rank):
                os.kill(os.getpid(), signal.SIGTERM)
            return optimizer_step(self, closure)

        torch.optim.AdamW.step = step  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize("steps", [{1: 4}, {0: 4, 1: 6}, *([{0: 4, 1: 4}] if NIGHTLY else [])], ids=str)
def test_a_run_that_gets_sigterm_saves_and_continues_as_if_uninterrupted(
    steps: dict[int, int], tmp_path: Path, sharded_run: tuple[Path, tuple[Curve, Curve]]
) -> None:
    """One rank, or all, in the same step or not: they agree on the first, save, and end without an error. All save what
    they trained to alike, so one of the checkpoints is trained on.
    """
    _, (losses, _) = sharded_run
    stopped, _ = train(
        tmp_path, IMPL, 2, run=partial(run_forked, before=terminates_in(steps)), says="Stopped by SIGTERM after step 4"
    )
    assert list(stopped) == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000004"]
    assert stopped == pytest.approx({step: losses[step] for step in stopped}, abs=1e-4)
    if steps == {0: 4, 1: 6}:
        resumed, _ = train(tmp_path, IMPL, 2, "--resume", str(tmp_path))
        assert stopped | resumed == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize("moment", ["last step", "sampling"])
def test_sigterm_when_no_step_follows(moment: str, tmp_path: Path) -> None:
    """All is saved: a rank ends at once, in place of waiting for a next step."""

    def before(rank: int) -> None:
        softmax = torch.nn.functional.softmax

        def ends(*args: Any, **kwargs: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return softmax(*args, **kwargs)

        if moment == "sampling":
            torch.nn.functional.softmax = ends
        else:
            terminates_in({1: 2})(rank)

    options, start = ("--tiny", "--steps", "2", "--save", str(tmp_path)), time.monotonic()
    output = run_forked(
        SCRIPT.name, 2, *options, before=before, killed_by=signal.SIGTERM if moment == "sampling" else None
    )
    assert time.monotonic() - start < 50
    assert ("Stopped by SIGTERM after step 2" in output) == (moment == "last step")
    assert [path.name for path in tmp_path.glob("step*")] == ["step-000002"]


def test_killed_while_a_checkpoint_replaces_another(tmp_path: Path) -> None:
    """One of an earlier run, of the same step: there is a whole one at any moment."""
    losses, _ = train(tmp_path, IMPL, 2, "--steps", "3", "--save-every", "2")
    shutil.rmtree(tmp_path / "step-000003")

    def before(rank: int) -> None:
        if rank == 0:
            kill_at(1, folders, "exchange", after=True)  # the old one has just changed places with the new one

    train(
        tmp_path,
        IMPL,
        2,
        "--steps",
        "2",
        run=partial(run_forked, before=before, killed_by=signal.SIGKILL),
        says="parameters",
    )
    resumed, _ = train(tmp_path, IMPL, 2, "--steps", "3", "--resume", str(tmp_path))
    assert resumed == pytest.approx({3: losses[3]}, abs=1e-4)


@pytest.mark.skipif(not NIGHTLY, reason="it takes 9 s; forked runs get SIGTERM above")
def test_torchrun_passes_sigterm_on(tmp_path: Path) -> None:
    """It says by its own exit code that it was stopped, but waits for the checkpoint."""
    log = tmp_path / "losses.jsonl"
    options = ("--tiny", "--steps", "100000", "--save", str(tmp_path), "--log-file", str(log), "--eval-every", "100000")
    with start_by_torchrun(SCRIPT.name, 2, *options) as process:
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 5):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert "Stopped by SIGTERM after step" in output, errors[-4000:]
    (checkpoint,) = tmp_path.glob("step-*")
    assert f"Saved {checkpoint} (" in output
    last = max(read_log(log)[0])
    assert checkpoint.name == f"step-{last:06}"
    resumed, _ = train(tmp_path, IMPL, 1, "--resume", str(checkpoint), "--steps", str(last + 1))
    assert list(resumed) == [last + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 12", "--batch 12 is not divisible by the number of ranks, 5"),
        ("--batch 10 --width 64 --heads 3", "--width 64 is not divisible by --heads 3"),
        ("--batch 10 --impl none", "--impl none is training on one process, but there are 5 ranks"),
        ("--batch 10 --impl ddp --bf16", "--impl ddp does not use"),
        ("--batch 10 --resume nowhere", "--resume nowhere: no checkpoint there"),
        ("--batch 10 --plot loss.png", "--plot draws with matplotlib: pip install 'fsdp2[viz]'"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank communicates, so no process group is needed to see it."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments.split()])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT))["parse_arguments"]()
    assert message in capsys.readouterr().err
