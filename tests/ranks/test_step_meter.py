"""Tests `fsdp2.StepMeter`: means over ranks, speeds, flops, and that steps between records neither wait nor send."""

import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from fsdp2.tools import step_meter
from fsdp2.tools.step_meter import StepRecord
from helpers import fake_world, in_a_fork, run_ranks
from models import TinyGPT


@pytest.fixture
def clock() -> Iterator[list[float]]:
    """A clock that a test sets."""
    now = [0.0]
    with mock.patch.object(step_meter.time, "perf_counter", side_effect=lambda: now[0]):
        yield now


def test_numbers_of_one_process(clock: list[float]) -> None:
    lines: list[str] = []
    meter = fsdp2.StepMeter(nn.Linear(10, 10, bias=False), every=2, write=lines.append, device_flops=1e6)
    assert meter.flops_per_token == 600
    clock[0] = 100.0  # what precedes the end of the first step is not timed
    assert meter.step(torch.tensor(1.0), 0.5, tokens=7) is None
    clock[0] += 4
    first = meter.step(torch.tensor(2.0), torch.tensor(0.25), tokens=1000)
    assert first == {
        "step": 2,
        "loss": 1.5,
        "loss_max": 1.5,
        "grad_norm": 0.25,
        "seconds": 4,
        "tokens_per_second": 250,
        "flops_per_second": 150_000,
        "mfu": 0.15,
    }
    assert lines == ["step 2  loss 1.5000  grad norm 0.250  250 tokens/s  mfu 15.0%"]
    for _ in range(2):
        clock[0] += 1
        second = meter.step(3.0, tokens=10)
    assert second is not None
    assert (second["loss"], second["seconds"], second["tokens_per_second"]) == (3.0, 1, 10)
    assert "grad_norm" not in second


def test_a_first_record_has_no_speed_and_empty_ones_no_loss() -> None:
    record = fsdp2.StepMeter(nn.Linear(2, 2)).step(tokens=5)
    assert record == {"step": 1}
    assert str(record) == "step 1"


def test_memory_is_in_the_line() -> None:
    record = StepRecord(step=3, memory_peak=2**31, memory_share=0.25)
    assert str(record) == "step 3  memory 2.00 GiB (25%)"


def test_flops_follow_palm() -> None:
    model = TinyGPT(dim=6, depth=2)
    lookups = sum(param.numel() for param in model.embed.parameters())
    matrices = sum(param.numel() for param in model.parameters()) - lookups
    assert fsdp2.StepMeter(model).flops_per_token == 6 * matrices
    assert fsdp2.StepMeter(model, attention=(2, 6, 16)).flops_per_token == 6 * matrices + 12 * 2 * 6 * 16
    tied = TinyGPT(dim=6, depth=2, tied=True)
    assert fsdp2.StepMeter(tied).flops_per_token == 6 * matrices, "the head multiplies by it"
    assert fsdp2.StepMeter(model, flops_per_token=5.0).flops_per_token == 5
    with fake_world(4):
        assert fsdp2.StepMeter(fully_shard(TinyGPT(dim=6, depth=2))).flops_per_token == 6 * matrices


def test_devices_of_the_table() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "GeForce": None}
    names |= {"NVIDIA L40": 181e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA GB200": 2500e12}
    for name, flops in names.items():
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "get_device_name", return_value=name),
        ):
            assert step_meter._flops_of(torch.device("cuda")) == flops
    assert step_meter._flops_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every: expected 1 or more, got 0"),
        ({"every": 1.5}, TypeError, "every: expected an int"),
        ({"attention": (1, 2)}, ValueError, "attention: expected"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fsdp2.StepMeter(nn.Linear(2, 2), **arguments)
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got str"):
        fsdp2.StepMeter("model")  # type: ignore[arg-type]


def test_means_over_ranks_in_one_exchange() -> None:
    """The slowest rank's time counts, and each rank's tokens; clipping's DTensor becomes the norm of all."""

    def body(rank: int, world_size: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model)
        lines: list[str] = []
        meter = fsdp2.StepMeter(model, every=3, write=lines.append)
        exchanges = 0
        gather = step_meter.gather_bytes

        def counted(*arguments: Any) -> Any:
            nonlocal exchanges
            exchanges += 1
            return gather(*arguments)

        found = []
        with mock.patch.object(step_meter, "gather_bytes", counted):
            for step in range(6):
                model(torch.ones(2, 8)).sum().backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                with mock.patch.object(torch.Tensor, "item", _refused if (step + 1) % 3 else torch.Tensor.item):
                    found.append(meter.step(torch.tensor(float(rank + step)), norm, tokens=10 * (rank + 1)))
                time.sleep(0.02 * (rank + 1))
                model.zero_grad()
        whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        torch.manual_seed(0)
        for layer in whole:
            layer.reset_parameters()
        whole(torch.ones(2, 8)).sum().backward()
        dist.barrier()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
        return [None if each is None else dict(each) for each in found], exchanges, lines, float(expected)

    results = run_ranks(2, body)
    for found, exchanges, _, norm in results:
        assert [each is None for each in found] == [True, True, False] * 2
        assert exchanges == 2
        assert (found[2]["loss"], found[2]["loss_max"]) == (1.5, 2.0)
        assert (found[5]["loss"], found[5]["loss_max"]) == (4.5, 5.0)
        assert found[5]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert found[5]["seconds"] >= 0.04
        assert found[5]["tokens_per_second"] == pytest.approx(90 / (3 * found[5]["seconds"]))
        assert found[5]["flops_per_second"] == pytest.approx(6 * 144 * 45 / (3 * found[5]["seconds"]))
    assert results[0][0] == results[1][0]
    assert (len(results[0][2]), results[1][2]) == (2, [])


def _refused(self: torch.Tensor) -> float:
    raise AssertionError("the host reads a tensor in a step without a record")


@in_a_fork
def test_train_gpt_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model, loss and batches of the example."""
    pytest.importorskip("tqdm")
    from documents import ROOT

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--tiny"])
    with fake_world(1):
        import train_gpt

        args = train_gpt.parse_arguments()
        torch.manual_seed(0)
        model = train_gpt.GPT(args.width, args.layers, args.heads, args.context)
        text = train_gpt.Text(args, torch.device("cpu"))
        peaks = train_gpt.make_optimizers(model, args)
        meter = fsdp2.StepMeter(model, every=2, attention=(args.layers, args.width, args.context), device_flops=1e12)
        tokens = args.batch * args.context
        losses, records = [], []
        for step in (1, 2):
            losses.append(train_gpt.train_step(model, peaks, text, 1.0, step))
            records.append(meter.step(losses[-1], tokens=tokens))
    assert records[0] is None
    record = records[1]
    assert record is not None
    assert record["loss"] == pytest.approx(sum(losses) / 2)
    assert 0 < record["mfu"] < 1
