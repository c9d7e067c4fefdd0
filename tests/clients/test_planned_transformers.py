"""Tests plans of models of Transformers: their own classes of blocks, tied weights by size, the command line."""

from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsdp2
from fsdp2.planning.command import main
from helpers import alone, assert_same, run_ranks, shard_batch

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

BY_SIZE = partial(size_based_auto_wrap_policy, min_num_params=2000)
IDS = torch.arange(64).reshape(4, 16)


def gpt2() -> Any:
    """Its embedding and its head are tied."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ends))


def train(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("policy", [BY_SIZE, 2000, None], ids=["torch's by size", "by size", "its own classes"])
def test_gpt2_trains_as_planned(policy: Any) -> None:
    expected = alone(lambda: train(gpt2(), IDS))

    def body(rank: int, world_size: int) -> None:
        model, ids = gpt2(), shard_batch(IDS, rank, world_size)
        plan = fsdp2.plan(
            model, ranks=world_size, batch=lambda: {"input_ids": ids, "labels": ids}, policy=policy, settings=[{}]
        )
        assert plan.best.has_activations
        if policy is None:
            assert [group.name for group in plan.groups] == ["root", "transformer.h.0", "transformer.h.1"]
        else:
            (tied,) = (group for group in plan.groups if len(group.modules) > 1)
            assert tied.modules == (model.transformer.wte, model.lm_head)
        mesh = init_device_mesh("cpu", (world_size,))
        for group in fsdp2.wrap_groups(model, policy):
            fsdp2.fully_shard(group.module, mesh=mesh, **group.options)
        fsdp2.fully_shard(model, mesh=mesh)
        train(model, ids)
        for name, weight in model.named_parameters():
            assert_same(weight, expected[name], 1e-4, 1e-5, name)

    run_ranks(2, body)


def test_the_command_line_takes_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # tables fit the terminal
    gpt2().config.save_pretrained(tmp_path)
    arguments = [
        str(tmp_path),
        "--ranks",
        "8",
        "--memory",
        "1GB",
        "--sequence-length",
        "16",
        "--param-dtype",
        "bfloat16",
    ]

    def printed() -> str:
        with redirect_stdout(StringIO()) as text:
            assert main(arguments) == 0
        return text.getvalue()

    text = alone(printed)  # it runs a backward
    assert "transformer.h.0 ... transformer.h.1 (2)  GPT2Block" in text
    notes = [line for line in text.splitlines() if line.startswith("note")]
    assert all(line.startswith(("note: CPU offload: ", "note: Parameters have few rows")) for line in notes), notes
