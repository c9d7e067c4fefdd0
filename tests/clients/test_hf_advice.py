"""Follows to the letter what errors of fsdp2.hf advise about models of Transformers and adapters of peft.

Programs for errors that need neither are in tests/advised.
"""

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
import tiny_llama
from fsdp2 import fully_shard, hf
from helpers import alone, assert_same, full, run_checks, shard_batch
from tiny_llama import SIZES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.arange(10).view(2, 5)
QKV = [f"self_attn.{name}_proj.weight" for name in "qkv"]


def refused(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds) as caught:
        call()
    return str(caught.value)


def config(**options: Any) -> Any:
    return transformers.LlamaConfig(**SIZES | options)


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return by_layer(transformers.AutoModelForCausalLM.from_config(config(**options)))


def by_layer(model: Any) -> Any:
    for layer in [each for each in model.modules() if type(each).__name__ == "LlamaDecoderLayer"]:
        fully_shard(layer)
    return fully_shard(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


def same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param), expected, 0, 0, name)


def trains(model: Any, plain: Any) -> None:
    """Two steps, and the parameters afterwards."""
    for each in (model, plain):
        each.train()
        optimizer = torch.optim.SGD([param for param in each.parameters() if param.requires_grad], lr=0.25)
        for step in range(2):
            rows = tiny_llama.batch(step)
            own = rows if each is plain else shard_batch(rows, dist.get_rank(), dist.get_world_size())
            each(input_ids=own, labels=own).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param), expected, 1e-4, 1e-6, name)


# ---- conversions that a program has registered


def doubled() -> Any:
    """Returns a step of a conversion that computes values, which fsdp2 does not."""
    from transformers.core_model_loading import ConversionOps

    class Times(ConversionOps):
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def convert(self, given: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            (value,) = given.values()
            value = value[0] if isinstance(value, list) else value
            return {target_patterns[0]: value * self.factor}

        @property
        def reverse_op(self) -> Any:
            return Times(1 / self.factor)

    return Times(2.0)


def registered(*mapping: Any) -> None:
    """It stays for the rest of the process, in which nothing but the check runs that it is registered for."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping

    register_checkpoint_conversion_mapping("llama", [*mapping], overwrite=True)


def saved(folder: Path, **options: Any) -> Any:
    """Saves a model by Transformers, on the first rank, and returns it."""
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_config(config(**options))
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    return plain


def files_of_another_configuration(folder: Path) -> None:
    """Rows of three weights in one: of other numbers of heads they can't be cut."""
    from transformers.core_model_loading import Split, WeightConverter

    registered(WeightConverter("self_attn.qkv.weight", QKV, [Split(dim=0)]))
    plain = saved(folder)
    text = refused(lambda: hf.load_model(on_meta(num_key_value_heads=2), folder), ValueError)
    assert "Build the model from the configuration of the files. Pass convert=False, and names= where" in text
    with torch.device("meta"):
        model = by_layer(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)))
    hf.load_model(model, folder)
    same_parameters(model, plain)
    model, names = on_meta(), {}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, first, last in zip(QKV, (0, 8, 12), (8, 12, 16), strict=True):
            names[prefix + name] = hf.part(f"{prefix}self_attn.qkv.weight", 0, first, last)
    hf.load_model(model, folder, convert=False, names=names)
    same_parameters(model, plain)
    trains(model, plain)


def computed_values(folder: Path) -> None:
    """Files have half of what the model has, under another name."""
    from transformers.core_model_loading import WeightConverter

    registered(WeightConverter("mlp.halved.weight", "mlp.down_proj.weight", [doubled()]))
    plain = saved(folder / "theirs")
    read = safetensors_torch.load_file(folder / "theirs" / "model.safetensors")
    name = "model.layers.1.mlp.halved.weight"
    assert_same(read[name] * 2, plain.model.layers[1].mlp.down_proj.weight, 0, 0, "the files")
    text = refused(lambda: hf.load_model(on_meta(), folder / "theirs"), NotImplementedError)
    assert text.endswith("moves values only. Load the model by from_pretrained, and shard it then.")
    model = by_layer(transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs"))
    same_parameters(model, plain)
    trains(model, plain)
    text = refused(lambda: hf.save_model(model, folder / "ours"), NotImplementedError)
    assert "Pass convert=False to save it under the model's own names, which from_pretrained reads as well" in text
    hf.save_model(model, folder / "ours", convert=False)
    same_parameters(model, transformers.AutoModelForCausalLM.from_pretrained(folder / "ours"))


def computed_values_of_the_same_name(folder: Path) -> None:
    """Files call them as the model does: what is saved as it is would be doubled when it is loaded."""
    from transformers.core_model_loading import WeightConverter

    registered(WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [doubled()]))
    saved(folder / "theirs")
    model = by_layer(transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs"))
    text = refused(lambda: hf.save_model(model, folder / "ours"), NotImplementedError)
    assert "convert=False" not in text
    saves_in_full(model, text, folder / "ours", lambda: model.save_pretrained(folder / "ours"))
    same_parameters(model, transformers.AutoModelForCausalLM.from_pretrained(folder / "ours"))


def saves_in_full(model: Any, text: str, folder: Path, save: Callable[[], None]) -> None:
    """On every rank what the error says around `save`, which the first rank calls."""
    said = re.findall(r"On every rank, write `with (.*?):`, and in it call model\.save_pretrained\(folder\) on", text)
    with eval(said[0], {"fsdp2": fsdp2, "model": model}):
        if dist.get_rank() == 0:
            save()
    dist.barrier()


# ---- quantised files

BLOCK = 8


def quantise_files(folder: Path, scale_dtype: torch.dtype = torch.float32) -> None:
    """Makes float8 numbers with scales of blocks of what a folder has, as such checkpoints are distributed."""
    stored = safetensors_torch.load_file(folder / "model.safetensors")
    made = {}
    for name, value in stored.items():
        if "_proj" in name:
            rows, columns = value.shape
            blocks = value.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scales = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
            made[name] = (blocks / scales.float()[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = scales
        else:
            made[name] = value
    safetensors_torch.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(settings))


def dequantised(folder: Path) -> Any:
    settings = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings)


def files_in_fp8(folder: Path) -> None:
    """Parameters are those that Transformers makes of the files, and are saved as files of a plain model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    fully_shard(model)
    report = hf.load_model(model, folder)
    assert (report.missing, report.unexpected) == ([], [])
    assert all(old is torch.float8_e4m3fn for old, _ in report.converted.values())
    plain = dequantised(folder)
    same_parameters(model, plain)
    hf.save_model(model, folder.parent / "plain")
    assert "quantization_config" not in json.loads((folder.parent / "plain" / "config.json").read_text())
    same_parameters(model, transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "plain"))


def quantised_files(folder: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24}
    text = refused(lambda: hf.load_model(on_meta(**sizes), folder), NotImplementedError)
    assert "load them by from_pretrained with dequantize=True in the quantization_config, and save that" in text
    plain = dequantised(folder)
    target = folder.parent / "dequantised"
    if dist.get_rank() == 0:
        plain.save_pretrained(target)
    dist.barrier()
    model = on_meta(**sizes)
    report = hf.load_model(model, target)
    assert (report.missing, report.unexpected) == ([], [])
    same_parameters(model, plain)
    assert_same(logits(model), logits(plain), 1e-5, 1e-6, "logits")
    trains(model, copy.deepcopy(plain))


def test_files_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config  # noqa: F401  before the fork

    folder = tmp_path / "quantised"
    tiny_llama.save(config(hidden_size=16, intermediate_size=24), folder)
    quantise_files(folder, torch.float8_e8m0fnu)
    in_fp8 = tmp_path / "in FP8"
    tiny_llama.save(config(hidden_size=16, intermediate_size=24), in_fp8)
    quantise_files(in_fp8)
    checks: list[tuple[str, Callable[[], None]]] = [
        ("in FP8", partial(files_in_fp8, in_fp8)),
        ("quantised", partial(quantised_files, folder)),
        ("another configuration", partial(files_of_another_configuration, tmp_path / "another")),
        ("computed", partial(computed_values, tmp_path / "computed")),
        ("computed, of one name", partial(computed_values_of_the_same_name, tmp_path / "one name")),
    ]
    run_checks(2, checks, timeout=40)


# ---- adapters


class Gated(nn.Module):
    """Is a prompt encoder of a program's own, which looks at a number in its forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.tensor(3.0))
        self.embedding = inner.embedding

    def forward(self, indices: Tensor) -> Tensor:
        found: Tensor = self.inner(indices)
        return found * self.gate if self.gate.item() > 0 else found


def prompted(folder: Path) -> Any:
    torch.manual_seed(2)
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    model = peft.get_peft_model(tiny_llama.load(folder), settings)
    model.prompt_encoder["default"] = Gated(model.prompt_encoder["default"])
    return model


def prompt_of(folder: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in peft.get_peft_model_state_dict(prompted(folder)).items()}


def computed_prompts(folder: Path, target: Path, expected: dict[str, Tensor]) -> None:
    model = prompted(folder)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    text = refused(lambda: hf.save_adapter(model, target), NotImplementedError)
    saves_in_full(model, text, target, lambda: model.save_pretrained(target))
    found = safetensors_torch.load_file(target / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(found[name], value, 0, 0, name)
    trains(model, prompted(folder))


def adapters_on_meta(folder: Path) -> None:
    def settings() -> Any:
        return peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)

    def built() -> Any:
        torch.manual_seed(2)
        return peft.get_peft_model(tiny_llama.load(folder), settings())

    with torch.device("meta"):
        model = by_layer(peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config()), settings()))
    text = refused(lambda: hf.load_model(model, folder), NotImplementedError)
    assert "Build the model with memory, not on meta: from_pretrained, then get_peft_model, then fully_shard." in text
    model, plain = by_layer(built()), built()
    assert_same(logits(model), logits(plain), 1e-5, 1e-6, "logits")
    trains(model, plain)


def test_adapters_of_peft(tmp_path: Path) -> None:
    folder = tiny_llama.save(config(), tmp_path / "model")
    expected = alone(partial(prompt_of, folder))
    checks: list[tuple[str, Callable[[], None]]] = [
        ("computed prompts", partial(computed_prompts, folder, tmp_path / "prompts", expected)),
        ("on meta", partial(adapters_on_meta, folder)),
    ]
    run_checks(2, checks, timeout=40)
