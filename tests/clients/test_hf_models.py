"""Tests fsdp2.hf with models of Transformers and adapters of peft: both directions, to the byte and with equal logits.

Each model is built from a configuration, and saved by Transformers itself; the sharded model begins on meta.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tiny_llama
from fsdp2 import fully_shard, hf
from helpers import assert_same, full, run_checks
from tiny_llama import SIZES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
huggingface_hub = pytest.importorskip("huggingface_hub")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.arange(10).view(2, 5)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


def dense() -> Any:
    return transformers.LlamaConfig(**SIZES | {"vocab_size": 19}, attention_bias=True)


def tied() -> Any:
    return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)


def experts() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    return transformers.Qwen3MoeConfig(**SIZES, **sizes, decoder_sparse_step=1)


def vision() -> Any:
    """Two towers, with buffers of both that no file has: positions, and the frequencies of rotations."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8)
    text = transformers.LlamaConfig(**SIZES | {"vocab_size": 19})
    return transformers.LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=18, image_seq_length=4, vision_feature_layer=-1
    )


# Of Qwen3-MoE, whose files have each expert apart, and whose models have them in one parameter.
EXPERTS: dict[str, Any] = {
    "{prefix*}.experts.gate_up_proj": lambda prefix: hf.stack(
        [hf.cat([f"{prefix}.experts.{e}.{kind}_proj.weight" for kind in ("gate", "up")]) for e in range(4)]
    ),
    "{prefix*}.experts.down_proj": lambda prefix: hf.stack(
        [f"{prefix}.experts.{e}.down_proj.weight" for e in range(4)]
    ),
}


def experts_apart(layers: int = 2) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for prefix in (f"model.layers.{i}.mlp.experts" for i in range(layers)):
        for e in range(4):
            both = hf.select(f"{prefix}.gate_up_proj", 0, e)
            names[f"{prefix}.{e}.gate_proj.weight"] = hf.part(both, 0, 0, 12)
            names[f"{prefix}.{e}.up_proj.weight"] = hf.part(both, 0, 12, 24)
            names[f"{prefix}.{e}.down_proj.weight"] = hf.select(f"{prefix}.down_proj", 0, e)
    return names


def llava_names(fqn: str) -> str:
    """As Transformers writes the files of this model: the parts of the model lie in another order of names."""
    for inner, outer in LLAVA.items():
        if fqn.startswith(inner):
            return outer + fqn.removeprefix(inner)
    return fqn


LLAVA = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
CLASSES = {vision: "AutoModelForImageTextToText"}


def class_of(config: Callable[[], Any]) -> Any:
    return getattr(transformers, CLASSES.get(config, "AutoModelForCausalLM"))


def inputs_of(config: Callable[[], Any]) -> dict[str, Tensor]:
    if config is not vision:
        return {"input_ids": TOKENS}
    images = torch.full((2, 4), 18)
    return {"input_ids": torch.cat([images, TOKENS], 1), "pixel_values": PIXELS}


def layers_of(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer"))]


def by_layer(model: Any, **options: Any) -> Any:
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded(config: Callable[[], Any], shard: Callable[[Any], Any], **options: Any) -> Any:
    with torch.device("meta"):
        model = class_of(config).from_config(config(), **options)
    model.eval()
    return shard(model)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


def round_trip(config: Callable[[], Any], shard: Callable[[Any], Any], source: Path, target: Path) -> None:
    """From the files of Transformers to shards and back, to the same bytes; logits are those of the plain model."""
    names: Any = {experts: EXPERTS, vision: llava_names}.get(config)
    model = sharded(config, shard)
    report = hf.load_model(model, source, names=names)
    assert (report.missing, report.unexpected, report.converted, report.uninitialised) == ([], [], {}, [])
    plain = class_of(config).from_pretrained(source).eval()
    for name, param in plain.named_parameters():
        assert_same(full(model.get_parameter(name)), param, 0, 0, name)
    for name, buffer in plain.named_buffers():
        assert_same(model.get_buffer(name), buffer, 0, 0, name)
    inputs = inputs_of(config)
    with torch.no_grad():
        logits = plain(**inputs).logits
        assert_same(model(**inputs).logits, logits, 1e-5, 1e-6, "logits of the shards")
    apart: Any = experts_apart() if config is experts else None
    if config is vision:
        apart = {llava_names(name): name for name in dict(plain.named_parameters())}
    for own_names in (None, apart) if apart else (None,):
        hf.save_model(model, target, names=own_names)
        if own_names or not apart:
            assert files_in(target) == files_in(source)
        again = class_of(config).from_pretrained(target).eval()
        with torch.no_grad():
            assert torch.equal(again(**inputs).logits, logits)
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            assert json.loads((target / name).read_text()) == json.loads((source / name).read_text())
    dist.barrier()


def in_several_files(config: Callable[[], Any], source: Path, target: Path) -> None:
    """Split as the hub's library splits a state dict, in its order (save_pretrained sorts it before); then in bf16."""
    model = sharded(config, by_layer)
    hf.load_model(model, source)
    hf.save_model(model, target, max_shard_size="2KB")
    plain = dict(class_of(config).from_pretrained(source).named_parameters())
    split = huggingface_hub.split_torch_state_dict_into_shards(plain, max_shard_size="2KB")
    expected = {
        file: safetensors_torch.save({name: plain[name].detach() for name in names}, metadata={"format": "pt"})
        for file, names in split.filename_to_tensors.items()
    }
    found = files_in(target)
    index = json.loads(found.pop("model.safetensors.index.json"))
    assert found == expected
    assert index["weight_map"] == split.tensor_to_filename
    assert index["metadata"]["total_size"] == split.metadata["total_size"]
    hf.save_model(model, target, torch.bfloat16)
    again = class_of(config).from_pretrained(target)
    assert {param.dtype for param in again.parameters()} == {torch.bfloat16}
    for name, param in again.named_parameters():
        assert_same(full(model.get_parameter(name)).bfloat16(), param, 0, 0, name)
    report = hf.load_model(sharded(config, by_layer, dtype=torch.bfloat16), source)
    assert {*report.converted.values()} == {(torch.float32, torch.bfloat16)}


def with_replicas(model: Any) -> Any:
    return by_layer(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2)))


def tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    styles = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in layers_of(model):
        parallelize_module(layer, mesh["tp"], styles)
    return by_layer(model, mesh=mesh["dp"])


CONFIGS = (dense, tied, experts, vision)
SHARDED: dict[int, list[tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    1: [(config, by_layer) for config in CONFIGS],
    3: [(config, by_layer) for config in CONFIGS],
    4: [(experts, with_replicas), (tied, with_replicas), (dense, tensor_parallel)],
}


@pytest.mark.parametrize("world_size", SHARDED)
def test_models_of_transformers(world_size: int, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for config, shard in SHARDED[world_size]:
        name = f"{config.__name__} {shard.__name__}"
        source = tmp_path / config.__name__
        torch.manual_seed(1)
        class_of(config).from_config(config()).save_pretrained(source)
        checks.append((name, partial(round_trip, config, shard, source, tmp_path / f"saved {name}")))
    if world_size == 3:
        for config in (dense, tied):
            check = partial(in_several_files, config, tmp_path / config.__name__, tmp_path / "several")
            checks.append((f"{config.__name__} in several files", check))
    run_checks(world_size, checks, timeout=120)


# ---- adapters

LORA: list[dict[str, Any]] = [{}, {"use_dora": True}, {"use_rslora": True, "modules_to_save": ["lm_head"]}]


def adapted(folder: Path, **options: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    torch.manual_seed(2)
    return peft.get_peft_model(tiny_llama.load(folder), config)


def adapter(folder: Path, target: Path, theirs: Path, options: dict[str, Any]) -> None:
    """The files of peft, to the byte; the frozen model is not in them."""
    model = adapted(folder, **options)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    hf.save_adapter(model, target)
    assert sorted(os.listdir(target)) == ["adapter_config.json", "adapter_model.safetensors"]
    name = "adapter_model.safetensors"
    assert (target / name).read_bytes() == (theirs / name).read_bytes()
    name = "adapter_config.json"
    assert json.loads((target / name).read_text()) == json.loads((theirs / name).read_text())
    again = peft.PeftModel.from_pretrained(tiny_llama.load(folder), target)
    plain = adapted(folder, **options)
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS).logits, plain.eval()(input_ids=TOKENS).logits)
    with pytest.raises(ValueError, match=r"adapters of peft. Save them by fsdp2\.hf\.save_adapter"):
        hf.save_model(model, target)
    with pytest.raises(ValueError, match="adapter_name: expected one of default, got 'other'"):
        hf.save_adapter(model, target, adapter_name="other")
    dist.barrier()


def injected_adapter(folder: Path, target: Path) -> None:
    """An adapter in a model that has no model of peft around it, as `add_adapter` of Transformers makes it."""
    models = []
    for _ in range(2):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        models.append(peft.inject_adapter_in_model(config, tiny_llama.load(folder)).eval())
    plain, model = models
    by_layer(model)
    hf.save_adapter(model, target)
    again = peft.PeftModel.from_pretrained(tiny_llama.load(folder), target)
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS).logits, plain(input_ids=TOKENS).logits)


def test_adapters_of_peft(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**SIZES), tmp_path / "llama")
    checks: list[tuple[str, Callable[[], None]]] = []
    for i, options in enumerate(LORA):
        theirs = tmp_path / f"theirs {i}"
        adapted(folder, **options).save_pretrained(theirs)
        (theirs / "README.md").unlink(missing_ok=True)
        checks.append((str(options), partial(adapter, folder, tmp_path / f"ours {i}", theirs, options)))
    checks.append(("injected", partial(injected_adapter, folder, tmp_path / "injected")))
    run_checks(2, checks, timeout=120)
