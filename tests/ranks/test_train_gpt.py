"""examples/train_gpt.py as its users run it: the loss curve does not depend on who shards, over how many ranks.

Plain training on one process is the oracle. One run is by torchrun, since the launcher is part of what is tested.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from programs import ROOT, run_by_torchrun, run_forked

pytest.importorskip("tqdm", reason="examples/train_gpt.py needs the extra fsdp2[examples]")

SCRIPT = ROOT / "examples" / "train_gpt.py"
IMPL = "fsdp2"
STEPS, SAVED_STEP = 12, 6  # STEPS is what --tiny trains

Curve = dict[int, float]
Run = Callable[..., str]


def train(folder: Path, impl: str, ranks: int, *options: str, run: Run = run_forked) -> tuple[Curve, Curve]:
    """Training loss and validation bits per byte, each by step, of one run."""
    log = folder / "losses.jsonl"
    output = run(SCRIPT.name, ranks, "--tiny", "--impl", impl, "--save", str(folder), "--log-file", str(log), *options)
    assert "Sample: 'The " in output
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
    return folder, train(folder, IMPL, 2, "--save-every", str(SAVED_STEP), run=run_by_torchrun)


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
    assert validations[STEPS] < validations[0] - 0.5
    assert_same(curves, plain_curves)


@pytest.mark.parametrize("impl", ["torch", "ddp"])
def test_other_implementations_learn_like_plain_training(
    impl: str, tmp_path: Path, plain_curves: tuple[Curve, Curve]
) -> None:
    """What benchmarks compare must be the same training."""
    assert_same(train(tmp_path, impl, 2), plain_curves)


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_run_goes_on_as_if_uninterrupted(
    ranks: int, tmp_path: Path, sharded_run: tuple[Path, tuple[Curve, Curve]]
) -> None:
    """Weights, both moments of AdamW, its step count and the order of the data must cross to other shard sizes."""
    folder, (losses, validations) = sharded_run
    expected_losses = {step: loss for step, loss in losses.items() if step > SAVED_STEP}
    expected_validations = {step: bits for step, bits in validations.items() if step >= SAVED_STEP}
    resumed = train(tmp_path, IMPL, ranks, "--resume", str(folder / f"step-{SAVED_STEP:06}"))
    assert_same(resumed, (expected_losses, expected_validations))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 12", "--batch 12 is not divisible by the number of ranks, 5"),
        ("--batch 10 --width 64 --heads 3", "--width 64 is not divisible by --heads 3"),
        ("--batch 10 --impl none", "--impl none is training on one process, but there are 5 ranks"),
        ("--batch 10 --impl ddp --bf16", "--impl ddp does not use"),
        ("--batch 10 --resume nowhere", "--resume nowhere: no checkpoint there"),
    ],
)
def test_wrong_arguments_end_in_a_sentence(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank communicates, so no process group is needed to see it."""
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT))["parse_arguments"]()
    assert message in capsys.readouterr().err
