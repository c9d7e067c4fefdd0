"""Tests peft: LoRA and DoRA adapters on a frozen model, sharded by hand, layer by layer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import tiny_llama
from client_training import IMPLEMENTATIONS, Record, assert_sharded, mean_of_ranks, own_part, using
from fsdp2 import fully_shard
from helpers import alone, run_checks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def adapted(folder: Path, **options: Any) -> Any:
    """Both factors of an adapter random: at peft's default, one is zero and the other has no gradient."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    torch.manual_seed(2)
    return peft.get_peft_model(tiny_llama.load(folder), config)


def with_adapter_state(record: Record, model: Any) -> Record:
    """What peft would save, and nothing else."""
    record.add_params((f"saved {name}", value) for name, value in peft.get_peft_model_state_dict(model).items())
    return record


def trained_plainly(folder: Path, **options: Any) -> dict[str, Tensor]:
    model = adapted(folder, **options)
    return with_adapter_state(tiny_llama.train(model), model).values


def trains(implementation: str, expected: dict[str, Tensor], folder: Path, **options: Any) -> None:
    with using(implementation):
        from torch.distributed.fsdp import fully_shard

        model = adapted(folder, **options)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert_sharded(model, implementation, at_least=3)
        record = tiny_llama.train(model, own_part, mean_of_ranks)
        with_adapter_state(record, model).assert_like(expected, **tiny_llama.TOLERANCE)
        frozen = [fqn for fqn, param in model.named_parameters() if not param.requires_grad and param.grad is not None]
        assert not frozen, f"gradients of frozen parameters: {frozen}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adapters_train_as_plain(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path)
    checks: list[tuple[str, Callable[[], None]]] = []
    for options in {}, {"use_dora": True}, {"use_rslora": True, "lora_dropout": 0.0, "modules_to_save": ["lm_head"]}:
        expected = alone(partial(trained_plainly, folder, **options))
        checks.append((f"{options}", partial(trains, implementation, expected, folder, **options)))
    run_checks(2, checks)


def refuses_to_save_shards(folder: Path, target: Path) -> None:
    """peft's `save_pretrained`, on the first rank alone, and what its error says to write."""
    model = fully_shard(adapted(folder))
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"weight: its storage's data_ptr.*hf\.save_adapter.*full_state_dict=True.*state_dict="
        ):
            model.save_pretrained(target)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(target, state_dict=state)
    dist.barrier()
    again = dict(peft.PeftModel.from_pretrained(tiny_llama.load(folder), target).named_parameters())
    for name, param in adapted(folder).named_parameters():
        assert torch.equal(again[name], param), name


def test_save_pretrained(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path / "model")
    run_checks(2, [("saves", partial(refuses_to_save_shards, folder, tmp_path / "saved"))])
