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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tiny_llama
from fsdp2 import full_params, fully_shard, hf
from helpers import assert_same, full, run_checks
from tiny_llama import SIZES

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

TOKENS = torch.arange(10).view(2, 5)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GATED = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")} | {
    f"linear_{kind}_head_dim": 4 for kind in ("key", "value")
}
TOWER = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {"image_size": 8, "patch_size": 4}


def vision_and_text() -> Any:
    """Two towers, with buffers of both that no file has: positions, and the frequencies of rotations."""
    tower = transformers.CLIPVisionConfig(**TOWER, **IMAGES, projection_dim=8)
    text = transformers.LlamaConfig(**SIZES | {"vocab_size": 19})
    return transformers.LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=18, image_seq_length=4, vision_feature_layer=-1
    )


# What files and model call otherwise, of each kind: nothing; names; experts apart and in one parameter; fused rows;
# prefixes; other names by the class of a part of the model.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES | {"vocab_size": 19}, attention_bias=True),
    "tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "bf16": lambda: transformers.MixtralConfig(
        **SIZES | {"intermediate_size": 16}, num_local_experts=4, dtype=torch.bfloat16
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=20),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, head_dim=4),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 2}, **ROUTED, **LATENT, first_k_dense_replace=1
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SIZES,
        **MOE,
        **GATED,
        shared_expert_intermediate_size=12,
        head_dim=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=4),
    "llama4": lambda: transformers.Llama4TextConfig(**SIZES, num_local_experts=4, head_dim=4, intermediate_size_mlp=20),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=4),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "jamba": lambda: transformers.JambaConfig(
        **SIZES,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "vit": lambda: transformers.ViTConfig(**TOWER, **IMAGES),
    "dinov2": lambda: transformers.Dinov2Config(**TOWER, **IMAGES, use_swiglu_ffn=True),
    "llava": vision_and_text,
}
CLASSES = {
    "llava": "AutoModelForImageTextToText",
    "vit": "AutoModelForImageClassification",
    "dinov2": "AutoModelForImageClassification",
}


def class_of(name: str) -> Any:
    return getattr(transformers, CLASSES.get(name, "AutoModelForCausalLM"))


def inputs_of(name: str) -> dict[str, Tensor]:
    if name in ("vit", "dinov2"):
        return {"pixel_values": PIXELS}
    if name != "llava":
        return {"input_ids": TOKENS}
    images = torch.full((2, 4), 18)
    return {"input_ids": torch.cat([images, TOKENS], 1), "pixel_values": PIXELS}


def logits_of(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(**inputs_of(name)).logits
    return logits


def layers_of(model: Any) -> list[nn.Module]:
    ends = ("DecoderLayer", "EncoderLayer", "AttentionLayer", "MambaLayer", "ViTLayer", "Dinov2Layer")
    return [module for module in model.modules() if type(module).__name__.endswith(ends)]


def by_layer(model: Any, **options: Any) -> Any:
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sharded(name: str, shard: Callable[[Any], Any], **options: Any) -> Any:
    with torch.device("meta"):
        model = class_of(name).from_config(CONFIGS[name](), **options)
    return shard(model)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


def write_sources(name: str, folder: Path) -> None:
    """What Transformers saves of a new model; of that, loaded; and in several files."""
    torch.manual_seed(1)
    model = class_of(name).from_config(CONFIGS[name]())
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.3, 0.3)  # biases and gates that begin as zeros are told apart
    model.save_pretrained(folder / "new")
    again = class_of(name).from_pretrained(folder / "new")
    again.save_pretrained(folder / "again")
    again.save_pretrained(folder / "several", max_shard_size="2KB")


def same_files(ours: Path, theirs: Path) -> None:
    """The weights to the byte; the configuration is that of the model, which was not loaded."""
    assert files_in(ours) == files_in(theirs)
    for name in ("config.json", "generation_config.json"):
        made = theirs.parent / "new" / name
        assert made.exists() == (ours / name).exists()
        if made.exists():
            assert json.loads((ours / name).read_text()) == json.loads(made.read_text())


def round_trip(name: str, shard: Callable[[Any], Any], source: Path, target: Path) -> None:
    """From the files of Transformers to shards and back, to the same bytes; logits are those of the plain model."""
    model = sharded(name, shard)
    report = hf.load_model(model, source / "several")
    assert (report.missing, report.unexpected, report.converted, report.uninitialised) == ([], [], {}, [])
    plain = class_of(name).from_pretrained(source / "new").eval()
    for fqn, param in plain.named_parameters():
        assert_same(full(model.get_parameter(fqn)), param, 0, 0, fqn)
    for fqn, buffer in plain.named_buffers():
        assert_same(model.get_buffer(fqn), buffer, 0, 0, fqn)
    if shard is by_layer:  # each byte is read by the rank that has it, but for buffers, which all have
        read = torch.tensor(report.bytes_read)
        dist.all_reduce(read)
        state, ranks = plain.state_dict(), dist.get_world_size()
        buffers = sum(buffer.nbytes for fqn, buffer in plain.named_buffers() if fqn in state)
        assert int(read) == sum(param.nbytes for param in plain.parameters()) + ranks * buffers
    logits = logits_of(plain, name)
    assert_same(logits_of(model, name), logits, *((1e-5, 1e-6) if name != "bf16" else (0, 0)), "logits of the shards")
    hf.save_model(model, target)
    same_files(target, source / "again")
    assert torch.equal(logits_of(class_of(name).from_pretrained(target), name), logits)
    dist.barrier()  # all have read it
    hf.save_model(model, target, max_shard_size="2KB")
    same_files(target, source / "several")
    dist.barrier()
    hf.save_model(model, target, convert=False)  # under the names of the model
    assert {*safetensors_torch.load_file(target / "model.safetensors")} == {*plain.state_dict()} - tied_to_others(plain)
    assert torch.equal(logits_of(class_of(name).from_pretrained(target), name), logits)
    report = hf.load_model(sharded(name, shard), target)
    assert not report.missing
    dist.barrier()


def tied_to_others(model: Any) -> set[str]:
    return set(model.all_tied_weights_keys)


def never_loaded(name: str, source: Path, target: Path) -> None:
    """A model that was made from a configuration is saved as Transformers saves such a model."""
    plain = class_of(name).from_pretrained(source / "new")
    model = class_of(name).from_config(CONFIGS[name]())
    model.load_state_dict(plain.state_dict())
    hf.save_model(by_layer(model), target)
    same_files(target, source / "new")


def other_dtypes(name: str, source: Path, target: Path) -> None:
    model = sharded(name, by_layer)
    hf.load_model(model, source / "new")
    hf.save_model(model, target, torch.bfloat16)
    again = class_of(name).from_pretrained(target)
    assert {param.dtype for param in again.parameters()} == {torch.bfloat16}
    for fqn, param in again.named_parameters():
        assert_same(full(model.get_parameter(fqn)).bfloat16(), param, 0, 0, fqn)
    report = hf.load_model(sharded(name, by_layer, dtype=torch.bfloat16), source / "new")
    assert {*report.converted.values()} == {(torch.float32, torch.bfloat16)}


def with_replicas(model: Any) -> Any:
    return by_layer(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2)))


def tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    styles = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in layers_of(model):
        parallelize_module(layer, mesh["tp"], styles)
    return by_layer(model, mesh=mesh["dp"])


def by_columns(model: Any) -> Any:
    return by_layer(model, shard_placement_fn=lambda param: Shard(param.dim() - 1))


def expert_parallel(source: Path, target: Path) -> None:
    """Experts are distributed over an axis of their own; each rank reads the files of its experts alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with torch.device("meta"):
        model = class_of("qwen3_moe").from_config(CONFIGS["qwen3_moe"]())
    for layer in model.model.layers:
        for name, param in [*layer.mlp.experts.named_parameters()]:
            made = distribute_tensor(param, mesh["ep"], [Shard(0)])
            setattr(layer.mlp.experts, name, nn.Parameter(made))
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    report = hf.load_model(model, source / "new")
    assert (report.missing, report.unexpected) == ([], [])
    plain = class_of("qwen3_moe").from_pretrained(source / "new")
    for fqn, param in plain.named_parameters():
        assert_same(full(model.get_parameter(fqn)), param, 0, 0, fqn)
    hf.save_model(model, target)
    same_files(target, source / "again")


def checkpointed(model: Any) -> Any:
    """Wrappers of torch around the layers; names in the files don't have them."""
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = fully_shard(checkpoint_wrapper(layer))
    return fully_shard(model)


def own_names(source: Path, target: Path) -> None:
    """`names` go before the mapping, which does the rest."""
    prefix = "model.layers.0.mlp.experts"
    files = [f"{prefix}.{e}.{kind}_proj.weight" for e in range(4) for kind in ("gate", "up")]
    both = hf.stack([hf.cat(files[2 * e : 2 * e + 2]) for e in range(4)])
    model = sharded("qwen3_moe", by_layer)
    report = hf.load_model(model, source / "new", names={f"{prefix}.gate_up_proj": both})
    assert (report.missing, report.unexpected) == ([], [])
    plain = class_of("qwen3_moe").from_pretrained(source / "new")
    for fqn, param in plain.named_parameters():
        assert_same(full(model.get_parameter(fqn)), param, 0, 0, fqn)
    apart: dict[str, Any] = {}
    for i, name in enumerate(files):
        apart[name] = hf.part(hf.select(f"{prefix}.gate_up_proj", 0, i // 2), 0, 12 * (i % 2), 12 * (i % 2) + 12)
    hf.save_model(model, target, names=apart)
    same_files(target, source / "again")
    with pytest.raises(
        ValueError, match=r"names: expected names that no other parameter has, got 'model\.norm\.weight'"
    ):
        hf.save_model(model, target, names={"model.norm.weight": "lm_head.weight"})


def registered_mapping(folder: Path) -> None:
    """A mapping that a program has registered: split rows, rotations in pairs, interleaved rows, a convolution.

    Rows that the files have in another order are read one by one. The mapping stays for the rest of the process.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping

    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    rotate = loading.PermuteForRope(permute_layer_names=["q_proj"])
    halves = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    flat = loading.Conv3dToLinear(in_channels=3, kernel_size=(1, 2, 2))
    mapping = [
        loading.WeightRenaming(r"^model\.blocks\.", "model.layers."),
        loading.WeightConverter("self_attn.qkv.weight", parts, [loading.Split(dim=0), rotate]),
        loading.WeightConverter("mlp.both.weight", halves, [loading.Interleave(dim=0), loading.Chunk(dim=0)]),
        loading.WeightConverter("mlp.kernel.weight", "mlp.down_proj.weight", [flat]),
    ]
    register_checkpoint_conversion_mapping("llama", mapping, overwrite=True)
    plain = class_of("llama").from_config(transformers.LlamaConfig(**SIZES)).eval()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "theirs")
    dist.barrier()
    stored = safetensors_torch.load_file(folder / "theirs" / "model.safetensors")
    assert stored["model.blocks.1.mlp.kernel.weight"].shape == (8, 3, 1, 2, 2)
    assert stored["model.blocks.1.self_attn.qkv.weight"].shape == (16, 8)
    with torch.device("meta"):
        model = class_of("llama").from_config(transformers.LlamaConfig(**SIZES))
    report = hf.load_model(by_layer(model), folder / "theirs")
    assert (report.missing, report.unexpected) == ([], [])
    for fqn, param in plain.named_parameters():
        assert_same(full(model.get_parameter(fqn)), param, 0, 0, fqn)
    assert report.bytes_read < 2 * sum(param.nbytes for param in plain.parameters()) / dist.get_world_size()
    hf.save_model(model, folder / "ours")
    assert files_in(folder / "ours") == files_in(folder / "theirs")


SHARDED: dict[int, list[tuple[str, Callable[[Any], Any]]]] = {
    1: [(name, by_layer) for name in ("llama", "mixtral", "deepseek_v3")],
    2: [(name, by_layer) for name in CONFIGS],
    3: [(name, by_layer) for name in CONFIGS],
    4: [("qwen3_moe", with_replicas), ("tied", with_replicas), ("llama", tensor_parallel), ("mixtral", by_columns)],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    for name in CONFIGS:
        write_sources(name, folder / name)
    return folder


@pytest.mark.parametrize("world_size", SHARDED)
def test_models_of_transformers(world_size: int, sources: Path, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for name, shard in SHARDED[world_size]:
        check = f"{name} {shard.__name__}"
        checks.append((check, partial(round_trip, name, shard, sources / name, tmp_path / check)))
    if world_size == 3:
        for name in CONFIGS:
            checks.append((f"{name} new", partial(never_loaded, name, sources / name, tmp_path / f"new {name}")))
        for name in ("tied", "mixtral"):
            checks.append((f"{name} in bf16", partial(other_dtypes, name, sources / name, tmp_path / f"bf16 {name}")))
    if world_size == 2:
        check = partial(round_trip, "mixtral", checkpointed, sources / "mixtral", tmp_path / "checkpointed")
        checks.append(("checkpointed", check))
        checks.append(("own names", partial(own_names, sources / "qwen3_moe", tmp_path / "own names")))
    if world_size == 4:
        checks.append(("experts", partial(expert_parallel, sources / "qwen3_moe", tmp_path / "experts")))
    if world_size in (2, 3):
        checks.append(("registered", partial(registered_mapping, tmp_path / "registered")))  # the last one
    run_checks(world_size, checks, timeout=240)


# ---- other models of the same files

BERT = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
LM, HEADS = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
# Class that saved the files, configuration, class that loads them; what is new in it, and what it lacks.
OTHERS: dict[str, tuple[str, Callable[[], Any], str, list[str], list[str]]] = {
    "classes of sequences": (LM, CONFIGS["llama"], HEADS, ["score.{rest*}"], ["lm_head.{rest*}"]),
    "classes of sequences, experts": (LM, CONFIGS["mixtral"], HEADS, ["score.{rest*}"], ["lm_head.{rest*}"]),
    "classes of tokens": (
        LM,
        CONFIGS["llama"],
        "AutoModelForTokenClassification",
        ["score.{rest*}"],
        ["lm_head.{rest*}"],
    ),
    "without a head": (LM, CONFIGS["qwen3_moe"], "AutoModel", [], ["lm_head.weight"]),
    "without a head, tied": (LM, CONFIGS["tied"], "AutoModel", [], []),
    "a language model from the model without a head": ("AutoModel", CONFIGS["mixtral"], LM, ["lm_head.weight"], []),
    "tied, from the model without a head": ("AutoModel", CONFIGS["tied"], LM, [], []),
    "an encoder": (
        "AutoModelForMaskedLM",
        lambda: transformers.BertConfig(**BERT),
        HEADS,
        ["classifier.{rest*}", "bert.pooler.{rest*}"],
        ["cls.{rest*}"],
    ),
    "images": (
        "AutoModelForMaskedImageModeling",
        CONFIGS["vit"],
        "AutoModelForImageClassification",
        ["classifier.{rest*}"],
        ["decoder.{rest*}", "vit.embeddings.mask_token"],
    ),
}


def outputs_of(model: Any, kind: str) -> Tensor:
    with torch.no_grad():
        inputs: Any = {"pixel_values": PIXELS} if kind == "images" else {"input_ids": TOKENS}
        found = model.eval()(**inputs)
    outputs: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return outputs


def other_model(kind: str, source: Path, target: Path) -> None:
    """From files of another class, and back: as Transformers loads them, and what is new is the same on all ranks."""
    _, config, cls, new, lacking = OTHERS[kind]
    with torch.device("meta"):
        model = getattr(transformers, cls).from_config(config(), dtype=torch.float32)
    model.config.pad_token_id = 0
    by_layer(model)
    if new or lacking:
        with pytest.raises(ValueError, match=r"model lacks|model has"):
            hf.load_model(model, source)
    names: Any = dict.fromkeys(new)
    report = hf.load_model(model, source, names=names, unexpected=lacking)
    assert (report.missing, report.unexpected) == ([], [])
    assert bool(report.ignored) == bool(lacking)
    plain = getattr(transformers, cls).from_pretrained(source)
    plain.config.pad_token_id = 0
    fresh = {name: full(param) for name, param in model.named_parameters() if name in report.initialised}
    assert bool(fresh) == bool(new)
    for name, value in fresh.items():
        values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(values, value.contiguous())
        assert all(torch.equal(value, each) for each in values), name
        assert value.dim() < 2 or 0 < float(value.std()) < 0.1, name
    plain.load_state_dict(fresh, strict=False)
    for name, param in plain.named_parameters():
        assert_same(full(model.get_parameter(name)), param, 0, 0, name)
    assert_same(outputs_of(model, kind), outputs_of(plain, kind), 1e-5, 1e-6, kind)
    hf.save_model(model, target)
    again = getattr(transformers, cls).from_pretrained(target)
    again.config.pad_token_id = 0
    assert torch.equal(outputs_of(again, kind), outputs_of(plain, kind))
    if dist.get_rank() == 0:
        plain.save_pretrained(target.with_name(f"{target.name} theirs"))
        assert files_in(target) == files_in(target.with_name(f"{target.name} theirs"))


class Valued(nn.Module):
    """A model of one's own around one of Transformers."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.value = body, nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.value(self.body(input_ids=tokens).last_hidden_state)
        return values


def part_of_ones_own_model(source: Path) -> None:
    with torch.device("meta"):
        body = transformers.AutoModel.from_config(CONFIGS["mixtral"]())
    torch.manual_seed(0)
    model = Valued(body)
    plain = Valued(transformers.AutoModel.from_pretrained(source))
    plain.value.load_state_dict(model.value.state_dict())
    by_layer(model.body)
    fully_shard(model)
    hf.load_model(model.body, source, unexpected=["lm_head.weight"])
    with torch.no_grad():
        assert_same(model(TOKENS), plain(TOKENS), 1e-5, 1e-6, "values")


def errors_of_contents(source: Path) -> None:
    """Each is raised on all ranks, with both shapes and what to write; which then works."""

    def build(**options: Any) -> Any:
        config = CONFIGS["mixtral"]()
        for name, value in options.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return by_layer(transformers.AutoModelForCausalLM.from_config(config))

    expected = (
        r"mlp\.gate\.weight: expected shape \[3, 8\], got \[4, 8\] in model\.layers\.0\.block_sparse_moe\.gate\.weight"
    )
    with pytest.raises(ValueError, match=expected + ".* and 5 more have other shapes: .*experts.gate_up_proj"):
        hf.load_model(build(num_local_experts=3), source)
    expected = r"experts\.gate_up_proj: expected shape \[4, 40, 8\], got \[4, 24, 8\] in .*experts\.0\.w1\.weight"
    with pytest.raises(ValueError, match=f"{expected}.*strict=False"):
        hf.load_model(build(intermediate_size=20), source)
    with pytest.raises(ValueError, match=r"expected shape \[19, 8\], got \[17, 8\]") as error:
        hf.load_model(build(vocab_size=19), source)
    assert "and 1 more have other shapes: lm_head.weight" in str(error.value)
    assert 'names={"model.embed_tokens.weight": None}, unexpected=["model.embed_tokens.weight"]' in str(error.value)
    both = ["model.embed_tokens.weight", "lm_head.weight"]
    report = hf.load_model(build(vocab_size=19), source, names=dict.fromkeys(both), unexpected=both)
    assert (report.missing, report.unexpected, report.ignored) == ([], [], sorted(both))
    assert sorted(report.initialised)[:2] == sorted(both)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.self_attn.*names: \{\"model\.layers\.2"):
        hf.load_model(build(num_hidden_layers=3), source)
    with pytest.raises(ValueError, match=r"has model\.layers\.1.*unexpected: \[\"model\.layers\.1"):
        hf.load_model(build(num_hidden_layers=1), source)
    report = hf.load_model(build(num_hidden_layers=1), source, unexpected=["model.layers.1.{rest*}"])
    assert report.unexpected == []
    assert len(report.ignored) == 19


def test_other_models_of_the_same_files(sources: Path, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for kind, (cls, config, *_) in OTHERS.items():
        torch.manual_seed(1)
        getattr(transformers, cls).from_config(config()).save_pretrained(tmp_path / kind)
        checks.append((kind, partial(other_model, kind, tmp_path / kind, tmp_path / f"saved {kind}")))
    checks.append(("part of a model", partial(part_of_ones_own_model, sources / "mixtral" / "new")))
    checks.append(("errors", partial(errors_of_contents, sources / "mixtral" / "new")))
    run_checks(2, checks, timeout=240)


# ---- adapters

MODULES: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
# Of each kind: what peft saves as it is, under other names, and parts of it.
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(**MODULES),
    "DoRA": lambda: peft.LoraConfig(**MODULES, use_dora=True, task_type="CAUSAL_LM"),
    "rsLoRA with a head": lambda: peft.LoraConfig(**MODULES, use_rslora=True, modules_to_save=["lm_head"]),
    "LoRA with biases": lambda: peft.LoraConfig(**MODULES, bias="all"),
    "LoRA of an embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "LoRA and tokens": lambda: peft.LoraConfig(**MODULES, trainable_token_indices=[1, 5]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "VeRA": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "VeRA without projections": lambda: peft.VeraConfig(r=2, target_modules=["q_proj"], save_projection=False),
    "VBLoRA": lambda: peft.VBLoRAConfig(r=2, target_modules=["q_proj"], vector_length=4, num_vectors=8, topk=2),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "multitask prompts": lambda: peft.MultitaskPromptTuningConfig(**PROMPT, num_tasks=2, num_ranks=1),
}
TASK = {"multitask prompts": {"task_ids": torch.tensor([0, 1])}}
# What peft computes when it saves it.
COMPUTED: dict[str, Callable[[], Any]] = {
    "VBLoRA, the largest": lambda: peft.VBLoRAConfig(
        r=2, target_modules=["q_proj"], vector_length=4, num_vectors=8, topk=2, save_only_topk_weights=True
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(**PROMPT),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**PROMPT),
    "prefix tuning, projected": lambda: peft.PrefixTuningConfig(
        **PROMPT, prefix_projection=True, encoder_hidden_size=6
    ),
    "P-tuning": lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=6),
    "P-tuning with an LSTM": lambda: peft.PromptEncoderConfig(
        **PROMPT, encoder_hidden_size=6, encoder_reparameterization_type="LSTM", encoder_dropout=0.0
    ),
}


def adapted(folder: Path, kind: str) -> Any:
    torch.manual_seed(2)
    model = peft.get_peft_model(tiny_llama.load(folder), (ADAPTERS | COMPUTED)[kind]())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.eval()


def logits_with(model: Any, kind: str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS, **TASK.get(kind, {})).logits
    return logits


def adapter(folder: Path, target: Path, theirs: Path, kind: str) -> None:
    """The files of peft, to the byte; the frozen model is not in them. Then a model with it, again, is the same."""
    plain = adapted(folder, kind)
    model = adapted(folder, kind)
    for layer in [] if "VBLoRA" in kind else model.get_base_model().model.layers:  # its layers share a bank of vectors
        fully_shard(layer)
    fully_shard(model)
    assert_same(logits_with(model, kind), logits_with(plain, kind), 1e-5, 1e-6, "logits of the shards")
    before = {name: full(param) for name, param in model.named_parameters()}
    hf.save_adapter(model, target)
    assert sorted(os.listdir(target)) == ["adapter_config.json", "adapter_model.safetensors"]
    name = "adapter_model.safetensors"
    assert (target / name).read_bytes() == (theirs / name).read_bytes()
    name = "adapter_config.json"
    assert json.loads((target / name).read_text()) == json.loads((theirs / name).read_text())
    again = peft.PeftModel.from_pretrained(tiny_llama.load(folder), target)
    stored = peft.PeftModel.from_pretrained(tiny_llama.load(folder), theirs)
    assert torch.equal(logits_with(again, kind), logits_with(stored, kind))
    for fqn, param in model.named_parameters():
        assert torch.equal(full(param), before[fqn]), fqn
    with pytest.raises(ValueError, match=r"adapters of peft. Save them by fsdp2\.hf\.save_adapter"):
        hf.save_model(model, target)
    with pytest.raises(ValueError, match="adapter_name: expected one of default, got 'other'"):
        hf.save_adapter(model, target, adapter_name="other")
    dist.barrier()


def computed_adapter(folder: Path, target: Path, kind: str) -> None:
    """It is refused, and what the error says to write saves it."""
    plain, model = adapted(folder, kind), fully_shard(adapted(folder, kind))
    with pytest.raises(NotImplementedError, match=r"peft computes .* fsdp2\.full_params\(model, offload_to_cpu=True"):
        hf.save_adapter(model, target)
    with full_params(model, offload_to_cpu=True):
        if dist.get_rank() == 0:
            model.save_pretrained(target)
    dist.barrier()
    found = safetensors_torch.load_file(target / "adapter_model.safetensors")
    for name, value in peft.get_peft_model_state_dict(plain).items():
        assert torch.equal(found[name], value), name


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


def trained_on(folder: Path, target: Path) -> None:
    """Training that stops, saves the adapter, loads it, and goes on (SGD) is training that does not stop."""

    def sharded_model(model: Any) -> tuple[Any, Any]:
        for layer in model.get_base_model().model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)

    def steps(model: Any, optimizer: Any, of: range) -> None:
        for step in of:
            rows = tiny_llama.batch(step).chunk(dist.get_world_size())[dist.get_rank()]
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    through, optimizer = sharded_model(adapted(folder, "LoRA").train())
    steps(through, optimizer, range(4))
    first, optimizer = sharded_model(adapted(folder, "LoRA").train())
    steps(first, optimizer, range(2))
    hf.save_adapter(first, target)
    second = peft.PeftModel.from_pretrained(tiny_llama.load(folder), target, is_trainable=True).train()
    second, optimizer = sharded_model(second)
    steps(second, optimizer, range(2, 4))
    for name, param in through.named_parameters():
        assert_same(full(second.get_parameter(name)), full(param), 1e-6, 1e-7, name)


def around_adapters(source: Path, experts: Path) -> None:
    """The files of a model are loaded into it below adapters, which begin as peft begins them."""
    for name, folder in (("llama", source), ("mixtral", experts), ("tied", source.parent.parent / "tied" / "new")):
        options: Any = {} if name == "tied" else {"modules_to_save": ["lm_head"]}
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
        with torch.device("meta"):
            model = peft.get_peft_model(class_of(name).from_config(CONFIGS[name]()), config)
        by_layer(model)
        report = hf.load_model(model, folder)
        assert (report.missing, report.unexpected) == ([], [])
        assert sum("lora_" in fqn for fqn in report.initialised) == 8
        plain = class_of(name).from_pretrained(folder)
        assert_same(logits_of(model, name), logits_of(plain, name), 1e-5, 1e-6, "adapters that do nothing yet")
        around = peft.get_peft_model(plain, config)
        for fqn, param in around.named_parameters():
            found = full(model.get_parameter(fqn))
            if "lora_A" in fqn:
                assert 0.1 < float(found.std() / param.std()) < 10, fqn
            else:
                assert_same(found, param, 0, 0, fqn)
        trained = [fqn for fqn, param in model.named_parameters() if param.requires_grad]
        assert trained == [fqn for fqn, param in around.named_parameters() if param.requires_grad]
    dora = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    with torch.device("meta"):
        model = by_layer(peft.get_peft_model(class_of("llama").from_config(CONFIGS["llama"]()), dora))
    with pytest.raises(
        NotImplementedError, match=r"q_proj: expected LoRA, without DoRA, .* Build the model with memory"
    ):
        hf.load_model(model, source)
    plain = adapted(source, "rsLoRA with a head")  # not on meta: adapters stay as they are
    before = {fqn: param.detach().clone() for fqn, param in plain.named_parameters()}
    with torch.no_grad():
        for param in plain.parameters():
            if not param.requires_grad:
                param.zero_()
    hf.load_model(by_layer(plain), source)
    for fqn, value in before.items():
        assert_same(full(plain.get_parameter(fqn)), value, 0, 0, fqn)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_of_peft(world_size: int, sources: Path, tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**SIZES), tmp_path / "llama")
    checks: list[tuple[str, Callable[[], None]]] = []
    for kind in ADAPTERS:
        theirs = tmp_path / f"theirs {kind}"
        adapted(folder, kind).save_pretrained(theirs)
        checks.append((kind, partial(adapter, folder, tmp_path / f"ours {kind}", theirs, kind)))
    for kind in COMPUTED:
        checks.append((kind, partial(computed_adapter, folder, tmp_path / f"ours {kind}", kind)))
    checks.append(("injected", partial(injected_adapter, folder, tmp_path / "injected")))
    if world_size in (1, 3):
        check = partial(around_adapters, sources / "llama" / "new", sources / "mixtral" / "new")
        checks.append(("around adapters", check))
    if world_size == 2:
        checks.append(("trained on", partial(trained_on, folder, tmp_path / "trained")))
    run_checks(world_size, checks, timeout=240)
