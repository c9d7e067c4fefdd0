"""Tests transformers: models that shard themselves while they load (`DistributedConfig`), and `Trainer(fsdp=True)`."""

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
    pretend_torchrun,
    using,
)
from fsdp2 import fully_shard
from helpers import alone, run_checks
from tiny_llama import SIZES, TOLERANCE

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

Config = Callable[[], Any]


def untied() -> Any:
    return transformers.LlamaConfig(**SIZES)


def tied() -> Any:
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)


def experts() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    return transformers.Qwen3MoeConfig(**SIZES, **sizes, decoder_sparse_step=1)


# ---- models that shard themselves ------------------------------------------------------------------------------------


def shards_itself(implementation: str, expected: dict[str, Tensor], folder: Path, options: dict[str, Any]) -> None:
    with using(implementation):
        pretend_torchrun()
        config = transformers.distributed.DistributedConfig(**options)
        model = tiny_llama.load(folder, distributed_config=config)
        assert_sharded(model, implementation, at_least=4)
        tiny_llama.train(model, own_part, mean_of_ranks).assert_like(expected, **TOLERANCE)


# With replicas; with pinned memory, which torch's FSDP2 can't do without without an accelerator; with all-to-all.
CASES: list[tuple[Config, dict[str, Any]]] = [
    (untied, {"fsdp_size": 4}),
    (untied, {"fsdp_size": 2, "dp_replicate_size": 2}),
    (untied, {"fsdp_size": 4, "fsdp_cpu_offload": True}),
    (tied, {"fsdp_size": 4}),
    (experts, {"fsdp_size": 4}),
    (experts, {"fsdp_size": 4, "ep_size": 2}),
]


def torch_fails(config: Config, options: dict[str, Any]) -> bool:
    """Pinned memory needs an accelerator; of a weight tied to one outside its group, part of the gradient is lost."""
    return config is tied or ("fsdp_cpu_offload" in options and not torch.accelerator.is_available())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_model_that_shards_itself(implementation: str, tmp_path: Path) -> None:
    folders = {config: tiny_llama.save(config(), tmp_path / config.__name__) for config in (untied, tied, experts)}
    plain = {
        config: alone(lambda at=at: tiny_llama.train(tiny_llama.load(at)).values) for config, at in folders.items()
    }
    checks: list[tuple[str, Callable[[], None]]] = []
    for config, options in CASES:
        if implementation == "fsdp2" or not torch_fails(config, options):
            check = partial(shards_itself, implementation, plain[config], folders[config], options)
            checks.append((f"{config.__name__} {options}", check))
    run_checks(4, checks, timeout=120)


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def trainer(folder: Path, output: Path, fsdp_config: dict[str, Any], **options: Any) -> Any:
    """One that goes through the batches in order, with plain SGD."""
    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} | fsdp_config,
        max_steps=tiny_llama.STEPS,
        max_grad_norm=tiny_llama.MAX_NORM,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        **{"report_to": "none", "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"} | options,
    )
    rows = torch.cat([tiny_llama.batch(step) for step in range(tiny_llama.STEPS)])
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(
        tiny_llama.load(folder),
        arguments,
        train_dataset=data,
        eval_dataset=data[:3],
        optimizer_cls_and_kwargs=tiny_llama.SGD,
    )


def record_of(trainer: Any) -> Record:
    """What it has logged, to six digits, and the model."""
    record = Record()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            record.add(f"loss {int(entry['step']) - 1}", float(entry["loss"]))
    record.add_params(trainer.model.named_parameters(), lambda fqn: fqn.replace("_checkpoint_wrapped_module.", ""))
    return record


def trains(
    implementation: str, expected: dict[str, Tensor], folder: Path, output: Path, per_step: int = 1, **config: Any
) -> None:
    with using(implementation):
        pretend_accelerator()
        rows = tiny_llama.ROWS // 2 // per_step
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": per_step}
        model = trainer(folder, output, config, **options)
        model.train()
        assert_sharded(model.model, implementation, at_least=3)
        record_of(model).assert_like(expected, **TOLERANCE)


def resumes(implementation: str, expected: dict[str, Tensor], folder: Path, output: Path, state_dict_type: str) -> None:
    """From the checkpoint after half of the steps, in a new trainer; then `generate`, a method of its own."""
    with using(implementation):
        pretend_accelerator()
        options = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
        trainer(folder, output, {"state_dict_type": state_dict_type}, **options).train()
        pretend_accelerator()
        resumed = trainer(folder, output, {"state_dict_type": state_dict_type}, **options)
        resumed.train(resume_from_checkpoint=str(output / "checkpoint-2"))
        assert_sharded(resumed.model, implementation, at_least=3)
        record = record_of(resumed)
        expected = dict(expected)
        generated = expected.pop("generated")
        record.assert_like(expected, **TOLERANCE)
        assert torch.equal(generate(resumed.model), generated)


def resumes_on_other_ranks(
    implementation: str, expected: dict[str, Tensor], folder: Path, output: Path, state_dict_type: str, per_step: int
) -> None:
    """From a checkpoint of two ranks, with evaluations in between, on as many rows a step."""
    with using(implementation):
        pretend_accelerator()
        rows = tiny_llama.ROWS // dist.get_world_size() // per_step
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": per_step}
        options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
        resumed = trainer(folder, output / "resumed", {"state_dict_type": state_dict_type}, **options)
        resumed.train(resume_from_checkpoint=str(output / "checkpoint-2"))
        assert_sharded(resumed.model, implementation, at_least=3)
        record_of(resumed).assert_like(expected, **TOLERANCE)


def generate(model: Any) -> Tensor:
    return model.generate(tiny_llama.batch(0), max_new_tokens=4, do_sample=False)


def trained_plainly(folder: Path) -> dict[str, Tensor]:
    model = tiny_llama.load(folder)
    record = tiny_llama.train(model, clip=True)
    return record.values | {"generated": generate(model)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trainer(implementation: str, tmp_path: Path) -> None:
    folder = tiny_llama.save(untied(), tmp_path / "model")
    with_generated = alone(partial(trained_plainly, folder))
    expected = {name: value for name, value in with_generated.items() if name != "generated"}
    checks: list[tuple[str, Callable[[], None]]] = []
    for name, config in {
        "plain": {},
        "accumulates": {"per_step": 2},
        "checkpoints activations": {"activation_checkpointing": True},
        "loads from rank 0": {"cpu_ram_efficient_loading": True},
    }.items():
        checks.append((name, partial(trains, implementation, expected, folder, tmp_path / name, **config)))
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        checks.append((kind, partial(resumes, implementation, with_generated, folder, tmp_path / kind, kind)))
    run_checks(2, checks, timeout=120)
    for ranks, per_step in (4, 1), (1, 2):
        checks = []
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            given = (implementation, expected, folder, tmp_path / kind, kind, per_step)
            checks.append((kind, partial(resumes_on_other_ranks, *given)))
        run_checks(ranks, checks, timeout=120)


# ---- label smoothing -------------------------------------------------------------------------------------------------

SMOOTHING, PADDED = 0.2, -100


def rows_of_unequal_lengths() -> list[dict[str, Tensor]]:
    """Some labels are not to be learned: the ranks have different numbers of tokens."""
    rows = []
    for step in range(tiny_llama.STEPS):
        for i, row in enumerate(tiny_llama.batch(step)):
            labels = row.clone()
            labels[: i + 1 if step % 2 else 0] = PADDED
            rows.append({"input_ids": row, "labels": labels})
    return rows


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens that are to be learned: the label has most of the weight, all tokens share the rest."""
    log_probs, labels = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    own = -log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    each = (1 - SMOOTHING) * own - SMOOTHING * log_probs.mean(-1)
    return each[labels != PADDED].mean()


def trained_plainly_with_smoothing(folder: Path) -> dict[str, Tensor]:
    model, record = tiny_llama.load(folder), Record()
    optimizer = tiny_llama.SGD[0](model.parameters(), **tiny_llama.SGD[1])
    rows = rows_of_unequal_lengths()
    for step in range(tiny_llama.STEPS):
        batch = rows[step * tiny_llama.ROWS :][: tiny_llama.ROWS]
        tokens, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        loss = smoothed_loss(model(input_ids=tokens).logits, labels)
        record.add(f"loss {step}", loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_llama.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    record.add_params(model.named_parameters())
    return record.values


def smooths_labels(expected: dict[str, Tensor], folder: Path, output: Path, per_step: int) -> None:
    with using("fsdp2"):
        pretend_accelerator()
        rows = tiny_llama.ROWS // 2 // per_step
        options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": per_step}
        made = trainer(folder, output, {}, label_smoothing_factor=SMOOTHING, **options)
        made.train_dataset = rows_of_unequal_lengths()
        made.train()
        assert_sharded(made.model, "fsdp2", at_least=3)
        assert type(made.model).__name__ == "FSDPLlamaForCausalLM"
        record_of(made).assert_like(expected, **TOLERANCE)


def test_label_smoothing(tmp_path: Path) -> None:
    """Trainer looks up by the name of the model's class whether a loss shifts the labels. (With torch's FSDP2 it does
    not find the name, and trains the model to repeat its input.)
    """
    folder = tiny_llama.save(untied(), tmp_path / "model")
    expected = alone(partial(trained_plainly_with_smoothing, folder))
    checks = [(f"{n} a step", partial(smooths_labels, expected, folder, tmp_path / str(n), n)) for n in (1, 2)]
    run_checks(2, checks, timeout=120)


# ---- training again --------------------------------------------------------------------------------------------------


def trained_plainly_again(folder: Path) -> dict[str, Tensor]:
    """On the same batches, by the same optimizer, which Trainer keeps."""
    model = tiny_llama.load(folder)
    optimizer = tiny_llama.SGD[0](model.parameters(), **tiny_llama.SGD[1])
    tiny_llama.train(model, clip=True, optimizer=optimizer)
    return tiny_llama.train(model, clip=True, optimizer=optimizer).values


def trains_again(implementation: str, expected: dict[str, Tensor], folder: Path, output: Path) -> None:
    with using(implementation):
        pretend_accelerator()
        made = trainer(folder, output, {}, per_device_train_batch_size=2)
        made.train()
        made.train()
        assert_sharded(made.model, implementation, at_least=3)
        record_of(made).assert_like(expected, **TOLERANCE)


def shards_by_hand_before(implementation: str, expected: dict[str, Tensor], folder: Path, output: Path) -> None:
    """Trainer gets a model that is sharded already."""
    with using(implementation):
        pretend_accelerator()
        # accelerate looks for blocks by the names of their classes, which are others once they are sharded.
        config = {"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": None}
        made = trainer(folder, output, config, per_device_train_batch_size=2)
        for block in made.model.model.layers:
            torch.distributed.fsdp.fully_shard(block)
        torch.distributed.fsdp.fully_shard(made.model)
        made.train()
        assert_sharded(made.model, implementation, at_least=3)
        record_of(made).assert_like(expected, **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_models_that_are_sharded_already(implementation: str, tmp_path: Path) -> None:
    """accelerate finds the optimizer's parameters by the addresses of the model's."""
    folder = tiny_llama.save(untied(), tmp_path / "model")
    again = alone(partial(trained_plainly_again, folder))
    once = alone(lambda: tiny_llama.train(tiny_llama.load(folder), clip=True).values)
    checks = [
        ("train() twice", partial(trains_again, implementation, again, folder, tmp_path / "twice")),
        ("sharded by hand", partial(shards_by_hand_before, implementation, once, folder, tmp_path / "by hand")),
    ]
    run_checks(2, checks, timeout=120)


def refuses_to_save_shards(folder: Path, target: Path) -> None:
    """`save_pretrained` as users write it first, on the first rank alone, and what its error says to write."""
    model = fully_shard(tiny_llama.load(folder))
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=r"weight: .*data_ptr\(\) was asked.*hf\.save_model\(.*full_state_dict=True.*state_dict="
        ):
            model.save_pretrained(target)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(target, state_dict=state)
    dist.barrier()
    again = dict(tiny_llama.load(target).named_parameters())
    for name, param in tiny_llama.load(folder).named_parameters():
        assert torch.equal(again[name], param), name


def test_save_pretrained(tmp_path: Path) -> None:
    folder = tiny_llama.save(tied(), tmp_path / "model")
    run_checks(3, [("saves", partial(refuses_to_save_shards, folder, tmp_path / "saved"))])


def generates_texts_of_different_lengths(folder: Path) -> None:
    """Ranks whose texts have ended go on with the others. Where no forward gathers, a rank may generate alone."""
    plain, model = tiny_llama.load(folder), tiny_llama.load(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for count in (2 + 3 * dist.get_rank(), 9 - 4 * dist.get_rank()):
        options = {"max_new_tokens": count, "do_sample": False}
        assert torch.equal(
            model.generate(tiny_llama.batch(0), **options), plain.generate(tiny_llama.batch(0), **options)
        )
    with torch.no_grad(), fsdp2.full_params(model):
        if dist.get_rank() == 1:
            assert torch.equal(generate(model), generate(plain))


def test_generate(tmp_path: Path) -> None:
    folder = tiny_llama.save(tied(), tmp_path / "model")
    run_checks(2, [("generates", partial(generates_texts_of_different_lengths, folder))], timeout=30)
