"""Tests trl: `SFTTrainer` on a whole model and on adapters, `DPOTrainer` with a frozen reference model, the weights
that trl sends to vLLM, and `GRPOTrainer`, which generates without vLLM.

The oracle of the first is plain training; that of the others is the trainer itself, in one process without sharding, or
with torch's FSDP2 where it draws samples.
"""

import contextlib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_llama
from client_training import IMPLEMENTATIONS, Record, assert_sharded, pretend_accelerator, using
from helpers import alone, run_checks

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def options(folder: Path, output: Path, fsdp: bool) -> dict[str, Any]:
    """Of every trainer: batches in order, plain SGD."""
    arguments = {
        "output_dir": str(output),
        "max_steps": tiny_llama.STEPS,
        "max_grad_norm": tiny_llama.MAX_NORM,
        "per_device_train_batch_size": tiny_llama.ROWS // (2 if fsdp else 1),
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
    }
    arguments |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    if fsdp:
        arguments |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    else:
        arguments["use_cpu"] = True
    return arguments


def sft(folder: Path, output: Path, fsdp: bool, adapters: bool = False) -> Any:
    rows = torch.cat([tiny_llama.batch(step) for step in range(tiny_llama.STEPS)])
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)  # for the adapters
    return trl.SFTTrainer(
        tiny_llama.load(folder),
        trl.SFTConfig(**options(folder, output, fsdp)),
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows.tolist()}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        optimizer_cls_and_kwargs=tiny_llama.SGD,
        peft_config=lora if adapters else None,
    )


def dpo(folder: Path, output: Path, fsdp: bool) -> Any:
    """The reference model is another random one: equal models would show nothing."""
    rows = torch.cat([tiny_llama.batch(step) for step in range(tiny_llama.STEPS)]).tolist()
    texts = [" ".join(map(str, row)) for row in rows]
    parts = {"prompt": texts, "chosen": texts[1:] + texts[:1], "rejected": texts[2:] + texts[:2]}
    reference = tiny_llama.load(folder)
    torch.manual_seed(2)
    with torch.no_grad():
        for param in reference.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return trl.DPOTrainer(
        tiny_llama.load(folder),
        ref_model=reference,
        args=trl.DPOConfig(**options(folder, output, fsdp), optim="sgd", learning_rate=tiny_llama.SGD[1]["lr"]),
        train_dataset=datasets.Dataset.from_dict(parts),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )


def trained(trainer: Any) -> Record:
    trainer.train()
    record = Record()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            record.add(f"loss {int(entry['step']) - 1}", float(entry["loss"]))
    record.add_params(trainer.model.named_parameters())
    return record


def trains(
    implementation: str, expected: dict[str, Tensor], make: Callable[..., Any], folder: Path, output: Path
) -> None:
    with using(implementation):
        pretend_accelerator()
        trainer = make(folder, output, True)
        record = trained(trainer)
        assert_sharded(trainer.model, implementation, at_least=3)
        if make is dpo:
            assert_sharded(trainer.ref_model, implementation, at_least=1)
        record.assert_like(expected, **tiny_llama.TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trainers(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path / "model")
    tiny_llama.save_tokenizer(folder)
    plain = alone(lambda: tiny_llama.train(tiny_llama.load(folder), clip=True).values)
    checks: list[tuple[str, Callable[[], None]]] = []
    checks.append(("sft", partial(trains, implementation, plain, sft, folder, tmp_path / "sft")))
    for make in partial(sft, adapters=True), dpo:
        unsharded = alone(lambda make=make: trained(make(folder, tmp_path / "unsharded", False)).values)
        checks.append((f"{make}", partial(trains, implementation, unsharded, make, folder, tmp_path / "sharded")))
    run_checks(2, checks, timeout=120)


# ---- the weights that trl sends to vLLM ------------------------------------------------------------------------------


def adapted(folder: Path, **options: Any) -> Any:
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(tiny_llama.load(folder), lora)


def sends(implementation: str, folder: Path, **options: Any) -> None:
    """Its own walk over a sharded model, whose adapters it merges and takes out again: rounding of the base is left."""
    from trl.generation.vllm_generation import VLLMGeneration

    with using(implementation):
        from torch.distributed.fsdp import fully_shard

        plain, model = adapted(folder, **options), adapted(folder, **options)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert_sharded(model, implementation, at_least=3)
        walk = VLLMGeneration.__new__(VLLMGeneration)
        walk.model, walk.accelerator = model, types.SimpleNamespace(device="cpu")
        gather = lambda params: contextlib.nullcontext()  # noqa: E731
        walk._dist = types.SimpleNamespace(is_fsdp=True, fsdp_version=2, gather_params=gather)
        with torch.no_grad():
            sent = {name: weight.clone() for name, weight in walk._iter_named_params()}
        record = Record()
        record.add_params(model.named_parameters())
        record.assert_like(dict(plain.named_parameters()), 1e-6, 1e-6)
        expected = plain.merge_and_unload().state_dict()
        assert sent.keys() == expected.keys()
        assert [name for name, weight in sent.items() if not torch.equal(weight, expected[name])] == []


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_that_are_sent(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path / "model")
    cases: list[dict[str, Any]] = [{}, {"modules_to_save": ["lm_head"]}]
    if implementation == "fsdp2":  # torch's FSDP2 sends other weights
        cases.append({"use_dora": True})
    run_checks(2, [(f"{options}", partial(sends, implementation, folder, **options)) for options in cases])


# ---- generation without vLLM -----------------------------------------------------------------------------------------


def grpo(folder: Path, output: Path) -> Any:
    """It generates inside FSDP1's `summon_full_params`, whatever has sharded the model."""
    arguments = options(folder, output, True) | {"per_device_train_batch_size": 4, "max_steps": 2}
    prompts = [" ".join(map(str, row)) for step in range(2) for row in tiny_llama.batch(step).tolist()]
    return trl.GRPOTrainer(
        str(folder),
        reward_funcs=lambda completions, **_: [float(len(each) % 3) for each in completions],
        args=trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=4),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )


def generates_as_with_torch(folder: Path, output: Path) -> None:
    """Its samples are random, so torch's FSDP2 is the oracle: the same seeds give the same samples."""
    shown = {}
    for implementation in IMPLEMENTATIONS:
        with using(implementation):
            pretend_accelerator()
            trainer = grpo(folder, output / implementation)
            trainer.train()
            assert_sharded(trainer.model, implementation, at_least=3)
            shown[implementation] = [
                [entry[name] for name in ("loss", "grad_norm", "reward")]
                for entry in trainer.state.log_history
                if "loss" in entry
            ]
    assert len(shown["fsdp2"]) == 2
    torch.testing.assert_close(torch.tensor(shown["fsdp2"]), torch.tensor(shown["torch"]), rtol=1e-4, atol=1e-5)


def test_generation_inside_summon_full_params(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path / "model")
    tiny_llama.save_tokenizer(folder)
    run_checks(2, [("grpo", partial(generates_as_with_torch, folder, tmp_path))], timeout=150)
