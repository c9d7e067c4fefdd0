"""Tests peft: LoRA and DoRA adapters on a frozen model, sharded by hand, layer by layer."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdp2
import tiny_llama
from client_training import (
    IMPLEMENTATIONS,
    Record,
    assert_sharded,
    mean_of_ranks,
    own_part,
    pretend_accelerator,
    using,
)
from fsdp2 import fully_shard
from helpers import alone, assert_same, full, run_checks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
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


# ---- prompts, which peft computes from a module when it saves them


PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix projection": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
    "P-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}


def prompted(folder: Path, kind: str) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(tiny_llama.load(folder), PROMPTS[kind]())


def saved_plainly(folder: Path, kind: str) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in peft.get_peft_model_state_dict(prompted(folder, kind)).items()}


def saves_prompts(folder: Path, target: Path, kind: str, expected: dict[str, Tensor]) -> None:
    """The first rank saves alone, as trainers do: errors name full_params of what it calls, and then offload_to_cpu."""
    model = prompted(folder, kind)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    said = []
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="On every rank, ") as caught:
            model.save_pretrained(target)
        said = re.findall("`with (.*):`", str(caught.value))
    (block,) = of_first_rank(said)
    assert block == "fsdp2.full_params(model.prompt_encoder.default.embedding)"
    with eval(block, {"fsdp2": fsdp2, "model": model}):
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="Pass offload_to_cpu=True"):
                model.save_pretrained(target)
    with fsdp2.full_params(model, offload_to_cpu=True):
        if dist.get_rank() == 0:
            model.save_pretrained(target)
    dist.barrier()
    saved = load_file(target / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name


def trainer_saves_prompts(folder: Path, target: Path) -> None:
    """`Trainer.save_model`, in the block that every rank enters; then what is trained next is exact, too."""
    with using("fsdp2"):
        pretend_accelerator()
        arguments = transformers.TrainingArguments(
            output_dir=str(target / "out"),
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            max_steps=2,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        rows = torch.cat([tiny_llama.batch(step) for step in range(2)])
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = transformers.Trainer(prompted(folder, "prompt tuning"), arguments, train_dataset=data)
        trainer.train()
        with fsdp2.full_params(trainer.model, offload_to_cpu=True):
            trainer.save_model(str(target / "saved"))
        trained = full(trainer.model.prompt_encoder.default.embedding.weight.detach())
        dist.barrier()
        (saved,) = load_file(target / "saved" / "adapter_model.safetensors").values()
        assert torch.equal(saved, trained.to(saved.dtype))
        start = prompted(folder, "prompt tuning").prompt_encoder.default.embedding.weight
        assert not torch.equal(trained.to(start.dtype), start)
        loss = trainer.model(input_ids=rows[:2], labels=rows[:2]).loss
        again = peft.PeftModel.from_pretrained(tiny_llama.load(folder), target / "saved")
        expected = again(input_ids=rows[:2], labels=rows[:2]).loss
        assert_same(loss.detach(), expected.detach().to(loss.dtype), 1e-5, 1e-5, "loss")


def of_first_rank(value: Any) -> Any:
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def test_prompts_are_saved(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path / "model")
    checks: list[tuple[str, Callable[[], None]]] = []
    for kind in PROMPTS:
        expected = alone(partial(saved_plainly, folder, kind))
        checks.append((kind, partial(saves_prompts, folder, tmp_path / kind, kind, expected)))
    checks.append(("Trainer", partial(trainer_saves_prompts, folder, tmp_path / "trainer")))
    run_checks(2, checks, timeout=120)
