"""Tests the Python of the guides in examples/guides that needs other libraries: see tests/ranks/test_guides.py.

Each snippet runs on two ranks in a folder that has tiny random models under the names that snippets load, and a
tokenizer whose tokens are numbers. The oracle is plain training, or the same trainer in one process without FSDP.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tiny_llama
from client_training import pretend_accelerator, pretend_torchrun, using
from documents import ROOT, Code, clients_of, code_blocks, shared_lines, snippets
from fsdp2 import FSDPModule, fully_shard
from helpers import alone, assert_same, full, run_checks


def optional(name: str) -> Any:
    """Each test skips itself where a library is missing that it needs."""
    return import_module(name) if find_spec(name) is not None else None


transformers, peft, bitsandbytes = optional("transformers"), optional("peft"), optional("bitsandbytes")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

GROUND, SNIPPETS = shared_lines(), snippets()
Names = dict[str, Any]
Oracle = Callable[[Code], Any]
# Heading -> for each of its snippets a check of what it has made, and what runs it in one process to compare with.
CHECKS: dict[str, list[tuple[Callable[..., None], Oracle | None]]] = {}
HUGGING_FACE, TRL = {"transformers", "accelerate", "peft"}, {"transformers", "accelerate", "peft", "trl"}
FAMILIES = [HUGGING_FACE, TRL, HUGGING_FACE | {"bitsandbytes"}, {"lightning"}, {"timm"}, {"open_clip"}]
PROGRAM = "accelerate launch"


def guide(heading: str, oracle: Oracle | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The check is called with the names that a snippet has defined, on each rank, and with what `oracle` returns."""

    def add(check: Callable[..., None]) -> Callable[..., None]:
        CHECKS.setdefault(heading, []).append((check, oracle))
        return check

    return add


BLOCKS = [block for block in SNIPPETS if clients_of(block) and block.heading != PROGRAM]


def in_one_process(block: Code) -> Names:
    """Returns what a trainer has trained without FSDP, on batches as large as those of both ranks together."""
    source = re.sub(r"^fsdp2\..*$", "", block.source, flags=re.M)
    source = re.sub(r"^ +fsdp_config=\{[^}]*\},$", "", source, flags=re.M).replace("fsdp=True,", "use_cpu=True,")
    source = re.sub(r"(per_device_\w+_batch_size)=(\d+)", lambda match: f"{match[1]}={2 * int(match[2])}", source)
    names: Names = {"__name__": block.heading}
    exec(GROUND.compiled(), names)
    exec(source, names)
    trainer = names.get("again", names["trainer"])
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"values": values(trainer.model), "losses": losses}


def whole(step: int) -> Tensor:
    """The rows of all ranks, as `batch` of the shared lines gives each its own."""
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in range(dist.get_world_size())]
    return torch.cat([torch.randint(32, (4, 8), generator=generator) for generator in generators])


def trained_plainly(model: Any = None, steps: int = 3) -> Any:
    """The Llama in "llama" on the rows of all ranks, as the snippets train it."""
    model = model if model is not None else tiny_llama.load(Path("llama"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        tokens = whole(step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}


def assert_like(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_same(actual[name], value, tolerance, tolerance, name)


class StandIn:
    """Loads weights as engines do: pair by pair, from whatever yields them."""

    def __init__(self, shapes: dict[str, Tensor]) -> None:
        self.weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in shapes.items()}
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            assert type(tensor) is Tensor
            assert tensor.shape == self.weights[name].shape, name
            self.weights[name].copy_(tensor)
            self.loaded.append(name)

    def assert_has(self, expected: dict[str, Tensor]) -> None:
        assert sorted(self.loaded) == sorted(expected), "each once"
        assert_like(self.weights, expected, 0)


def assert_holds(names: Names, plain: nn.Module) -> None:
    """The model of a guide has the weights of `plain`, and the same output: its buffers, too."""
    tokens = names["batch"](0)
    assert_like(values(names["model"]), values(plain), 0)
    assert_same(names["model"](input_ids=tokens).logits, plain(input_ids=tokens).logits, 1e-5, 1e-6, "logits")


@guide("Train a Transformers model")
def loaded_trained_and_saved(names: Names) -> None:
    expected = values(trained_plainly())
    assert_like(values(names["model"]), expected)
    assert_like(values(tiny_llama.load(Path("trained"))), expected)


@guide("Load mixtures of experts")
def loaded_experts(names: Names) -> None:
    plain = tiny_llama.load(Path("moe"))
    assert_holds(names, plain)
    for folder in ("apart", "fused"):
        assert_like(values(tiny_llama.load(Path(folder))), values(plain), 0)
    weights = "model.safetensors"
    assert Path("apart", weights).read_bytes() == Path("moe", weights).read_bytes()
    assert Path("fused", weights).read_bytes() != Path("moe", weights).read_bytes()


@guide("Choose names in the files")
def loaded_by_names(names: Names) -> None:
    assert_holds(names, tiny_llama.load(Path("moe")))


@guide("Load another head from the same files")
def a_reward_model(names: Names) -> None:
    plain = transformers.AutoModelForSequenceClassification.from_pretrained("reward")
    assert plain.score.out_features == 1
    assert_like(values(names["model"]), values(plain), 0)
    base = tiny_llama.load(Path("llama"))
    assert_like(values(plain.model), values(base.model), 0)
    again = names["fsdp2"].hf.load_model(names["model"], "reward")
    assert (again.missing, again.unexpected) == ([], [])


@guide("Load on every rank")
def trained_and_exported(names: Names) -> None:
    expected = values(trained_plainly())
    assert_like(values(names["model"]), expected)
    assert {path.suffix for path in Path("exported").iterdir()} >= {".safetensors"}
    assert_like(values(tiny_llama.load(Path("exported"))), expected)


@guide("Use Trainer and trl")
def trained_by_a_trainer(names: Names) -> None:
    model = names["trainer"].model
    assert isinstance(model, FSDPModule)
    assert names["trainer"].state.global_step == 3
    before = values(tiny_llama.load(Path("llama")))
    assert all(not torch.equal(value, before[name]) for name, value in values(model).items())


@guide("Use accelerate")
def trained_by_accelerate(names: Names) -> None:
    assert isinstance(names["model"], FSDPModule)
    plain = tiny_llama.load(Path("llama"))
    start = plain(input_ids=names["batch"](3), labels=names["batch"](3)).loss
    expected = trained_plainly(plain)(input_ids=names["batch"](3), labels=names["batch"](3)).loss
    loss = names["model"](input_ids=names["batch"](3), labels=names["batch"](3)).loss
    assert abs(loss - expected) < 0.1 * abs(start - expected)  # clipping hardly matters to Adam


@guide("Train adapters: LoRA and QLoRA")
def adapters(names: Names) -> None:
    torch.manual_seed(0)
    plain = peft.get_peft_model(tiny_llama.load(Path("llama")), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    expected = values(trained_plainly(plain))
    assert_like(values(names["model"]), expected)
    frozen = [name for name, param in names["model"].named_parameters() if not param.requires_grad]
    assert frozen
    assert all(isinstance(param, DTensor) for param in names["model"].parameters())
    again = peft.PeftModel.from_pretrained(tiny_llama.load(Path("llama")), "adapter", is_trainable=True)
    assert_like(values(again), expected)


@guide("Train adapters: LoRA and QLoRA")
def adapters_on_meta(names: Names) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    plain = peft.get_peft_model(tiny_llama.load(Path("llama")), config)
    found, expected = values(names["model"]), values(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if "lora_A" in name:
            assert float(found[name].std()) > 0
        else:
            assert_same(found[name], value, 0, 0, name)
    tokens = names["batch"](0)
    assert_same(names["model"](input_ids=tokens).logits, plain(input_ids=tokens).logits, 1e-5, 1e-6, "logits")


@guide("Resuming, and the best model", in_one_process)
def resumed(names: Names, expected: Names) -> None:
    """The best model is not the last one; `again` repeats what `trainer` has trained after its second step."""
    best = assert_best(names, expected)
    assert_like(values(tiny_llama.load(Path("best"))), expected["values"])
    (block,) = (block for block in BLOCKS if block.heading == "Resuming, and the best model")
    whole = other_trainer(block, ("SHARDED_STATE_DICT", "FULL_STATE_DICT"), ('"runs', '"whole'), ('"resumed', '"later'))
    assert_best(whole, expected)
    # The first rank has written whole tensors, in files that `from_pretrained` reads.
    assert_like(values(tiny_llama.load(Path("whole") / best)), expected["values"])
    # Where the last checkpoint is the best, Trainer asks for its folder before a rank writes into it.
    folders = ('"runs', '"last'), ('"resumed', '"last again')
    last = other_trainer(block, *folders, ("/checkpoint-2", "/checkpoint-4"), ("data[8:]", "data[:8]"))
    for each in last["trainer"], last["again"]:
        losses = [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        assert losses == sorted(losses, reverse=True), "the last is not the best: choose other data"
        assert each.state.best_model_checkpoint == str(Path(each.args.output_dir, "checkpoint-6"))


def other_trainer(block: Code, *replaced: tuple[str, str]) -> Names:
    """Returns the names of a snippet that runs with other words."""
    source = block.source
    for old, new in replaced:
        assert old in source
        source = source.replace(old, new)
    names: Names = {"__name__": block.heading}
    exec(GROUND.compiled(), names)
    exec(source, names)
    return names


def assert_best(names: Names, expected: Names) -> str:
    """Returns the name of the best checkpoint."""
    for each in names["trainer"], names["again"]:
        losses = [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        assert losses == pytest.approx(expected["losses"], rel=1e-4)
        assert min(losses) < losses[-1], "the last is the best: choose other data"
        assert_like(values(each.model), expected["values"])
    best = f"checkpoint-{2 + 2 * losses.index(min(losses))}"
    folder, later = (Path(names[each].args.output_dir) for each in ("trainer", "again"))
    assert best == "checkpoint-2", "`again` starts from the best: choose other data"
    for each in names["trainer"], names["again"]:
        assert each.state.best_model_checkpoint == str(folder / best)
    assert {path.name for path in folder.iterdir()} == {best, "checkpoint-6"}
    assert {path.name for path in later.iterdir()} == {"checkpoint-4", "checkpoint-6"}
    return best


@guide("Fine-tune with trl", in_one_process)
def sft(names: Names, expected: Names) -> None:
    model = names["trainer"].model
    assert_like(values(model), expected["values"])
    assert {"lora_A", "modules_to_save"} <= {part for name in expected["values"] for part in name.split(".")}
    again = peft.PeftModel.from_pretrained(tiny_llama.load(Path("llama")), "adapter", is_trainable=True)
    assert_like(values(again), expected["values"])


@guide("Fine-tune with trl")
def grpo(names: Names) -> None:
    """Plain training on the texts that all ranks have generated. Some rank was ready before the other."""
    ranks, tokenizer = dist.get_world_size(), names["AutoTokenizer"].from_pretrained("llama")
    by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(by_rank, names["rollouts"])
    model = tiny_llama.load(Path("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 1e-2 * (2 - step) / 2
        texts = [(prompt, ids) for of_rank in by_rank for prompt, ids in zip(*of_rank[step], strict=True)]
        rewards = torch.tensor([float(len({*ids})) for _, ids in texts]).view(-1, 4)
        scores = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        total = torch.zeros(())
        for (prompt, ids), score in zip(texts, scores.flatten(), strict=True):
            before = tokenizer(prompt)["input_ids"]
            logits = model(input_ids=torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
            total = total - score * logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum()
        (total / sum(len(ids) for _, ids in texts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    longest = [[max(map(len, ids)) for _, ids in of_rank] for of_rank in by_rank]
    assert longest[0] != longest[1], "choose another seed: texts of all ranks end together"
    assert_like(values(names["trainer"].model), values(model))


@guide("Send weights to vLLM and SGLang")
def weights_of_experts(names: Names) -> None:
    """Under the names of the files, where each expert is apart."""
    from safetensors.torch import load_file

    expected = load_file("moe/model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in expected
    engine = StandIn(expected)
    for weights in names["named_weights"](names["model"], torch.float32):
        engine.load_weights(weights)
    engine.assert_has(expected)
    assert_like(names["engine"], {name: tensor.bfloat16() for name, tensor in expected.items()}, 0)
    tied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_llama.SIZES, tie_word_embeddings=True))
    sent = [name for weights in names["named_weights"](fully_shard(tied)) for name, _ in weights]
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent


@guide("Merge adapters")
def merged_adapters(names: Names) -> None:
    """As peft merges them, to the bit; the model keeps its base and its adapters."""
    plain = adapted(names["lora"])
    merged = {
        name: tensor.bfloat16() for name, tensor in adapted(names["lora"]).merge_and_unload().state_dict().items()
    }
    assert_like(names["engine"], merged, 0)
    assert_like(values(names["model"]), values(plain), 0)
    options = {"use_dora": True, "modules_to_save": ["lm_head"], "init_lora_weights": False}
    dora = peft.LoraConfig(r=2, target_modules=["v_proj", "up_proj"], **options)
    embedding = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    for config in dora, embedding:
        for shard in shard_root, shard_groups:
            expected = adapted(config).merge_and_unload().state_dict()
            model = adapted(config)
            shard(model)
            engine = StandIn(expected)
            engine.load_weights(names["merged_weights"](model, torch.float32))
            engine.assert_has(expected)


def adapted(config: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_llama.load(Path("llama")), config)


def shard_root(model: Any) -> None:
    fully_shard(model)


def shard_groups(model: Any) -> None:
    """As accelerate does: a list of modules shares a group, and the root has no parameters left."""
    llama = model.base_model.model
    for layer in llama.model.layers:
        fully_shard(layer)
    fully_shard([llama.model.norm, llama.lm_head])
    fully_shard(model)


@guide("Train mixtures of experts")
def experts_and_their_balance(names: Names) -> None:
    """With the auxiliary loss of Transformers on the whole batch."""
    plain = tiny_llama.load(Path("moe"), output_router_logits=True, router_aux_loss_coef=0.01)
    assert plain(input_ids=names["batch"](0), labels=names["batch"](0)).aux_loss > 0
    assert_like(values(names["model"]), values(trained_plainly(plain)))


@guide("Use Lightning")
def fabric(names: Names) -> None:
    expected = trained_model(names, steps=2, accumulated=2, clip=0.1)
    assert_like(values(names["model"].module), values(expected), 1e-5)
    assert isinstance(names["model"].module, FSDPModule)
    assert {path.suffix for path in Path("fabric").iterdir()} >= {".distcp"}


@guide("Use Lightning")
def lightning_trainer(names: Names) -> None:
    assert names["trainer"].global_step == 3
    assert_like(values(names["lit"].model), values(trained_model(names, steps=3, clip=0.1)), 1e-5)
    assert {path.suffix for path in Path("lit").iterdir()} >= {".distcp"}


def trained_model(names: Names, steps: int, accumulated: int = 1, clip: float | None = None) -> nn.Module:
    """The model of the shared lines, trained plainly on the batches of all ranks."""
    torch.manual_seed(0)
    model: nn.Module = names["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for i in range(accumulated):
            (names["loss_of"](model, whole(accumulated * step + i)) / accumulated).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model


def images_of_all(steps: int = 3, labels: int = 0) -> list[tuple[Tensor, Tensor]]:
    """What generators with the seed of each rank yield, side by side."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(dist.get_world_size())]
    batches = []
    for _ in range(steps):
        rows = [(torch.rand(4, 3, 32, 32, generator=each), each) for each in generators]
        classes = [torch.randint(labels, (4,), generator=each) if labels else torch.zeros(4) for _, each in rows]
        batches.append((torch.cat([images for images, _ in rows]), torch.cat(classes)))
    return batches


@guide("Train vision models: timm and open_clip")
def timm_vit(names: Names) -> None:
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 4}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for images, labels in images_of_all(labels=4):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(values(names["model"]), values(model))
    with torch.no_grad():
        assert_same(names["features"], model.forward_features(names["images"]), 1e-4, 1e-4, "features")


@guide("Train vision models: timm and open_clip")
def clip(names: Names) -> None:
    import open_clip

    torch.manual_seed(0)
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": 32, "width": 16, "heads": 2, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = open_clip.ClipLoss()
    for step, (images, _) in enumerate(images_of_all()):
        loss(*model(images, whole(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_like(without_biases_of_keys(values(names["clip"])), without_biases_of_keys(values(model)))


def without_biases_of_keys(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Softmax cancels them: their gradients are rounding errors, of which AdamW makes whole steps."""
    biases = [name for name in weights if name.endswith("in_proj_bias")]
    return weights | {name: torch.cat([weights[name].chunk(3)[0], weights[name].chunk(3)[2]]) for name in biases}


@guide("QLoRA and 8-bit optimizers")
def quantised(names: Names) -> None:
    torch.manual_seed(0)
    config = {"quantization_config": names["quantization"], "dtype": torch.float32}
    base = tiny_llama.load(Path("llama"), **config)
    plain = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
    expected = values(trained_plainly(plain))
    assert_like(values(names["model"]), expected)
    packed = [param for param in names["model"].parameters() if hasattr(param, "quant_state")]
    assert len(packed) == 14
    assert all(isinstance(param, DTensor) for param in packed)
    again = peft.PeftModel.from_pretrained(tiny_llama.load(Path("llama"), **config), "adapter", is_trainable=True)
    assert_like(values(again), expected)


def stepped_by_bitsandbytes(names: Names, cls: str, clip: float | None = None) -> None:
    torch.manual_seed(0)
    model = names["Model"]()
    optimizer = getattr(bitsandbytes.optim, cls)(model.parameters(), lr=1e-2)
    for step in range(3):
        generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in range(dist.get_world_size())]
        tokens = torch.cat([torch.randint(32, (4, 8), generator=generator) for generator in generators])
        names["loss_of"](model, tokens).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    assert_like(values(names["model"]), values(model), 2e-3)


guide("QLoRA and 8-bit optimizers")(partial(stepped_by_bitsandbytes, cls="PagedAdamW32bit"))
guide("QLoRA and 8-bit optimizers")(partial(stepped_by_bitsandbytes, cls="PagedAdamW8bit", clip=1.0))


# ---- every snippet -------------------------------------------------------------------------------------------------


def run(block: Code, judge: Callable[..., None], folder: Path, expected: Any) -> None:
    os.chdir(folder)
    with using("fsdp2"):
        if "accelerate" in family_of(block):
            pretend_accelerator()
        else:
            pretend_torchrun()
        names: Names = {"__name__": block.heading}
        exec(GROUND.compiled(), names)
        torch.manual_seed(dist.get_rank())  # what a snippet doesn't seed differs between ranks
        exec(block.compiled(), names)
        dist.barrier()
        judge(*([names] if expected is None else [names, expected]))


def make_folder(folder: Path) -> Path:
    """With a tiny Llama, a tiny model with experts, and a tokenizer."""
    config = transformers.LlamaConfig(**tiny_llama.SIZES | {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1})
    tiny_llama.save(config, folder / "llama")
    sizes = {"vocab_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    experts = transformers.Qwen3MoeConfig(**tiny_llama.SIZES | sizes, decoder_sparse_step=1)
    tiny_llama.save(experts, folder / "moe")
    tiny_llama.save_tokenizer(folder / "llama", vocab=32)
    return folder


def test_every_snippet_has_a_check() -> None:
    assert Counter(block.heading for block in BLOCKS) == {heading: len(checks) for heading, checks in CHECKS.items()}


def family_of(block: Code) -> set[str]:
    return next(family for family in FAMILIES if clients_of(block) <= family)


NEEDED = [family for family in FAMILIES if any(family_of(block) == family for block in BLOCKS)]


@pytest.mark.parametrize("family", NEEDED, ids=lambda family: "-".join(sorted(family)))
def test_snippets_train_like_a_plain_model(family: set[str], tmp_path: Path) -> None:
    for library in sorted(family):
        pytest.importorskip(library)
    left = {heading: iter(of_heading) for heading, of_heading in CHECKS.items()}
    checks = []
    for i, block in enumerate(BLOCKS):
        judge, oracle = next(left[block.heading])
        if family_of(block) != family:
            continue
        folder = make_folder(tmp_path / str(i)) if "transformers" in family else tmp_path
        expected = oracle and alone(partial(_in, make_folder(tmp_path / f"{i} alone"), oracle, block))
        name = getattr(judge, "__name__", f"{judge}")
        checks.append((f"{block.heading}: {name}", partial(run, block, judge, folder, expected)))
    run_checks(2, checks, timeout=120)


def _in(folder: Path, oracle: Oracle, block: Code) -> Any:
    os.chdir(folder)
    return oracle(block)


# ---- a program that accelerate launches ----------------------------------------------------------------------------

# accelerate offers FSDP on accelerators only: in processes that it launches, CPUs with gloo are such. Each says at its
# end whose FSDPModule its program has used.
PRETEND = """
import atexit, os
if "LOCAL_RANK" in os.environ:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    def say():
        from torch.distributed.fsdp import FSDPModule
        print("rank", os.environ["RANK"], FSDPModule.__module__, flush=True)
    atexit.register(say)
"""


def plainly_launched() -> dict[str, Tensor]:
    """The batches of both ranks are one."""
    model = tiny_llama.load(Path("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in torch.randint(32, (24, 8), generator=torch.Generator().manual_seed(0)).split(8):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("named", [True, False])
def test_verl_imports_the_module_of_the_guide(named: bool, tmp_path: Path) -> None:
    """Its helpers then are fsdp2's."""
    pytest.importorskip("verl")
    (module,) = code_blocks(ROOT / "examples" / "guides" / "verl.md")
    (tmp_path / "use_fsdp2.py").write_text(module.source)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"VERL_USE_EXTERNAL_MODULES": "use_fsdp2"} if named else {}
    program = "from verl.utils.fsdp_utils import FSDPModule, fully_shard; print(fully_shard.__module__)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("fsdp2.") is named


LAUNCHED = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file", "fsdp.yaml", "train.py"]


@pytest.mark.parametrize("way", ["python -m fsdp2", "patch_torch"])
def test_accelerate_launch(way: str, tmp_path: Path) -> None:
    """Two processes, which the YAML of the guide and its program start."""
    for library in sorted(HUGGING_FACE):
        pytest.importorskip(library)
    make_folder(tmp_path)
    (program,) = (block.source for block in SNIPPETS if block.heading == PROGRAM)
    (settings,) = snippets("yaml")
    (tmp_path / "sitecustomize.py").write_text(PRETEND)
    (tmp_path / "fsdp.yaml").write_text(settings.source)
    edited = "import fsdp2\n\nfsdp2.patch_torch()\n" if way == "patch_torch" else ""
    (tmp_path / "train.py").write_text(edited + program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    start = [sys.executable, *([] if edited else ["-m", "fsdp2"]), *LAUNCHED]
    done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout.splitlines()
    assert sorted(line for line in printed if line.startswith("rank ")) == [f"rank {r} fsdp2.module" for r in (0, 1)]
    assert done.stdout.count("fsdp2: group of 9 parameters, shard 1/2") == 1, "a line stands for both layers"
    os.chdir(tmp_path)
    assert_like(values(tiny_llama.load(Path("trained"))), alone(plainly_launched))
