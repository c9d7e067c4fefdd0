"""Tests the short examples as their users run them: their output is true, and they learn like plain training.

Their model and batches are the same in all but one, so plain training on one process is the oracle of their losses.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from examples.tiny_text import DOCUMENTATION, LEARNING_RATE, STEPS, Text, make_gpt
from helpers import NIGHTLY, alone
from programs import kill_at, run_forked

Curve = dict[int, float]


def losses(output: str) -> Curve:
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+): loss (.*)$", output, re.MULTILINE)}


def numbers(pattern: str, output: str) -> tuple[int, ...]:
    """The groups of the one match of `pattern`."""
    (match,) = re.finditer(pattern, output)
    return tuple(int(group.replace(",", "")) for group in match.groups())


@pytest.fixture(scope="module")
def plain_losses() -> Curve:
    def train() -> Curve:
        model = make_gpt(torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        text = Text(DOCUMENTATION, torch.device("cpu"))
        curve = {}
        for step in range(1, STEPS + 1):
            loss = model(*text.batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve[step] = loss.item()
        return curve

    curve = alone(train)
    assert curve[STEPS] < 3.5 < curve[1]
    return curve


def assert_same(curve: Curve, expected: Curve) -> None:
    assert curve == pytest.approx(expected, abs=1e-3)


def test_hsdp(plain_losses: Curve) -> None:
    """Replicas that forget to exchange gradients drift apart, and away from plain training."""
    output = run_forked("hsdp.py", 4)
    assert_same(losses(output), plain_losses)
    assert "head.weight is (256, 64), on this rank (128, 64)" in output
    assert "replicas hold equal weights: True" in output


def test_tensor_parallel(plain_losses: Curve) -> None:
    output = run_forked("tensor_parallel.py", 4)
    assert_same(losses(output), plain_losses)
    assert "mlp_norm.weight is (64,), on this rank (32,)" in output
    assert "mlp_in.weight is (256, 64), on this rank (64, 64)" in output
    assert "mlp_out.weight is (64, 256), on this rank (32, 128)" in output


@pytest.mark.parametrize("schedule", ["1F1B", *(["InterleavedZeroBubble"] if NIGHTLY else [])])
def test_pipeline(schedule: str, plain_losses: Curve) -> None:
    """A stage whose gradients are not reduced, or not all there, goes another way from the second step on."""
    assert_same(losses(run_forked("pipeline.py", 4, "--schedule", schedule)), plain_losses)


def test_lora() -> None:
    output = run_forked("lora.py", 2)
    curve = losses(output)
    last = max(curve)  # not trained on: to compare with the reloaded adapters
    assert sum(curve[last - i] for i in range(5)) / 5 < curve[1] - 0.3
    assert "parameters with gradients are all named down or up" in output
    saved, numel = numbers(r"saved are ([\d,]+) numbers of ([\d,]+)", output)
    assert 0 < saved < numel / 5
    (reloaded,) = re.findall(r"base model with saved adapters: loss (.*)", output)
    assert float(reloaded) == pytest.approx(curve[last], abs=1e-3)


def test_checkpoint_compile(plain_losses: Curve) -> None:
    output = run_forked("checkpoint_compile.py", 2)
    assert_same(losses(output), plain_losses)
    (graphs,) = numbers(r"graphs compiled by aot_eager for 2 blocks: (\d+)", output)
    assert 1 <= graphs <= 2  # equal blocks share one


def test_cpu_offload(plain_losses: Curve) -> None:
    output = run_forked("cpu_offload.py", 2)
    assert_same(losses(output), plain_losses)
    model = make_gpt(torch.device("cpu"))
    half, block = (
        sum(4 * parameter.numel() for parameter in module.parameters()) // parts
        for module, parts in ((model, 2), (model.blocks[0], 1))
    )
    assert numbers("full parameters while a block computes: (.*) bytes on cpu", output) == (block,)
    assert numbers("shards of all parameters: (.*) bytes on cpu", output) == (half,)
    assert numbers("shards of all gradients: (.*) bytes on cpu", output) == (half,)
    assert numbers("shards of AdamW's moments: (.*) bytes on cpu", output) == (2 * half,)


def test_rollout() -> None:
    """The engine follows the policy to the bit, the reward rises, and small steps send few bytes."""
    output = run_forked("rollout.py", 2)
    steps = re.findall(r"^step (\d+): reward (.*), ([\d,]+) bytes sent, equal to the bit: (\w+)$", output, re.MULTILINE)
    assert [int(step) for step, *_ in steps] == [*range(1, 9)]
    assert {equal for *_, equal in steps} == {"True"}
    rewards = [float(reward) for _, reward, *_ in steps]
    assert rewards[0] < 0.3
    assert min(rewards[4:]) > 0.5
    sent = [int(nbytes.replace(",", "")) for _, _, nbytes, _ in steps]
    assert sent[0] == 2 * sum(parameter.numel() for parameter in make_gpt(torch.device("cpu")).parameters())
    assert sent[-1] < sent[0] / 10
    assert re.search(r"^blocks\.1 +Block +10 ", output, re.MULTILINE), "the table of groups"


def test_resume_elsewhere(tmp_path: Path, plain_losses: Curve) -> None:
    """On one rank, after a save on two that was interrupted: from the last one that was not."""
    stopped = losses(run_forked("resume_elsewhere.py", 2, "--steps", "10", "--folder", str(tmp_path)))
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "__0_0.distcp").write_bytes(b"half of a")
    resumed = losses(run_forked("resume_elsewhere.py", 1, "--steps", "15", "--folder", str(tmp_path)))
    assert list(resumed) == [11, 12, 13, 14, 15]
    assert_same(stopped | resumed, {step: plain_losses[step] for step in range(1, 16)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000010", "step-000015"]


def without_torchrun(rank: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def test_without_torchrun(plain_losses: Curve) -> None:
    """One rank, where that is enough; else the program says how to start it."""
    assert_same(losses(run_forked("cpu_offload.py", 1, before=without_torchrun)), plain_losses)
    for name in ("hsdp.py", "tensor_parallel.py", "pipeline.py"):
        with pytest.raises(AssertionError, match=rf"expected 4 ranks .* got 1. .*torchrun .* examples/{name}"):
            run_forked(name, 1, before=without_torchrun)


def dies_writing(rank: int) -> None:
    """Rank 1, of its second checkpoint: after its own files, before the others' are known to be there."""
    if rank == 1:
        kill_at(2, FileSystemWriter, "write_data", after=True)


def dies_with_all_data_written(rank: int) -> None:
    if rank == 0:
        kill_at(2, FileSystemWriter, "finish")


def dies_before_the_name(rank: int) -> None:
    if rank == 0:
        kill_at(4, Path, "rename")  # of two for each checkpoint: DCP renames its metadata


@pytest.mark.parametrize("dies", [dies_writing, dies_with_all_data_written, dies_before_the_name])
def test_killed_while_saving(dies: Callable[[int], None], tmp_path: Path, plain_losses: Curve) -> None:
    """kill -9: the checkpoint before is as it was, and a run goes on from it as if uninterrupted."""
    options = ("--steps", "15", "--folder", str(tmp_path))
    stopped = losses(run_forked("resume_elsewhere.py", 2, *options, before=dies, is_killed=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["partial", "step-000005"]
    assert set(stopped) >= set(range(1, 11)) - {10}
    resumed = losses(run_forked("resume_elsewhere.py", 2, *options))
    assert list(resumed) == list(range(6, 16))
    assert_same(stopped | resumed, {step: plain_losses[step] for step in range(1, 16)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000010", "step-000015"]
