"""Tests the Python of examples/README.md that needs Transformers, accelerate or peft: see tests/ranks/test_guides.py.

Each snippet runs on two ranks in a folder that has a tiny random Llama under the name that the snippet loads.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tiny_llama
from client_training import pretend_accelerator, using
from documents import ROOT, Code, code_blocks
from fsdp2 import FSDPModule
from helpers import assert_same, full, run_checks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")
bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

GROUND, *SNIPPETS = code_blocks(ROOT / "examples" / "README.md")
Names = dict[str, Any]
# Heading -> a check of what each of its snippets has made.
CHECKS: dict[str, list[Callable[[Names], None]]] = {}


def guide(heading: str) -> Callable[[Callable[[Names], None]], Callable[[Names], None]]:
    def add(check: Callable[[Names], None]) -> Callable[[Names], None]:
        CHECKS.setdefault(heading, []).append(check)
        return check

    return add


BLOCKS = [
    block
    for block in SNIPPETS
    if re.search(r"^(from|import) (transformers|accelerate|peft|bitsandbytes)\b", block.source, re.M)
]


def trained_plainly(model: Any = None, steps: int = 3) -> Any:
    """The Llama in "llama" on the rows of all ranks, as the snippets train it."""
    model = model if model is not None else tiny_llama.load(Path("llama"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in range(dist.get_world_size())]
        tokens = torch.cat([torch.randint(32, (4, 8), generator=generator) for generator in generators])
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


def assert_holds(names: Names, plain: nn.Module) -> None:
    """The model of a guide has the weights of `plain`, and the same output: its buffers, too."""
    tokens = names["batch"](0)
    assert_like(values(names["model"]), values(plain), 0)
    assert_same(names["model"](input_ids=tokens).logits, plain(input_ids=tokens).logits, 1e-5, 1e-6, "logits")


@guide("Transformers files")
def loaded_trained_and_saved(names: Names) -> None:
    expected = values(trained_plainly())
    assert_like(values(names["model"]), expected)
    assert_like(values(tiny_llama.load(Path("trained"))), expected)


@guide("Transformers files")
def loaded_experts(names: Names) -> None:
    plain = tiny_llama.load(Path("moe"))
    assert_holds(names, plain)
    for folder in ("apart", "fused"):
        assert_like(values(tiny_llama.load(Path(folder))), values(plain), 0)
    weights = "model.safetensors"
    assert Path("apart", weights).read_bytes() == Path("moe", weights).read_bytes()
    assert Path("fused", weights).read_bytes() != Path("moe", weights).read_bytes()


@guide("Other names")
def loaded_by_names(names: Names) -> None:
    assert_holds(names, tiny_llama.load(Path("moe")))


@guide("Other models of the same files")
def a_reward_model(names: Names) -> None:
    plain = transformers.AutoModelForSequenceClassification.from_pretrained("reward")
    assert plain.score.out_features == 1
    assert_like(values(names["model"]), values(plain), 0)
    base = tiny_llama.load(Path("llama"))
    assert_like(values(plain.model), values(base.model), 0)
    again = names["fsdp2"].hf.load_model(names["model"], "reward")
    assert (again.missing, again.unexpected) == ([], [])


@guide("A Transformers model by hand")
def trained_and_exported(names: Names) -> None:
    expected = values(trained_plainly())
    assert_like(values(names["model"]), expected)
    assert {path.suffix for path in Path("exported").iterdir()} >= {".safetensors"}
    assert_like(values(tiny_llama.load(Path("exported"))), expected)


@guide("A Transformers model by hand")
def loaded_by_one_rank(names: Names) -> None:
    assert_holds(names, tiny_llama.load(Path("llama")))


@guide("Trainer of Transformers")
def trained_by_a_trainer(names: Names) -> None:
    model = names["trainer"].model
    assert isinstance(model, FSDPModule)
    assert names["trainer"].state.global_step == 3
    before = values(tiny_llama.load(Path("llama")))
    assert all(not torch.equal(value, before[name]) for name, value in values(model).items())


@guide("accelerate")
def trained_by_accelerate(names: Names) -> None:
    assert isinstance(names["model"], FSDPModule)
    plain = tiny_llama.load(Path("llama"))
    start = plain(input_ids=names["batch"](3), labels=names["batch"](3)).loss
    expected = trained_plainly(plain)(input_ids=names["batch"](3), labels=names["batch"](3)).loss
    loss = names["model"](input_ids=names["batch"](3), labels=names["batch"](3)).loss
    assert abs(loss - expected) < 0.1 * abs(start - expected)  # clipping hardly matters to Adam


@guide("LoRA with peft")
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


@guide("LoRA with peft")
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


@guide("LoRA with peft")
def adapter_trained_on(names: Names) -> None:
    plain = tiny_llama.load(Path("llama"))
    plain = peft.PeftModel.from_pretrained(plain, "trained_adapter", is_trainable=True)
    expected = values(trained_plainly(plain))
    assert_like(values(names["model"]), expected)
    again = peft.PeftModel.from_pretrained(tiny_llama.load(Path("llama")), "adapter", is_trainable=True)
    assert_like(values(again), expected)


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


def run(block: Code, judge: Callable[[Names], None], folder: Path) -> None:
    os.chdir(folder)
    with using("fsdp2"):
        pretend_accelerator()
        names: Names = {"__name__": block.heading}
        exec(GROUND.compiled(), names)
        exec(block.compiled(), names)
        dist.barrier()
        judge(names)


def test_snippets_train_like_a_plain_model(tmp_path: Path) -> None:
    judges = [(heading, judge) for heading, of_one in CHECKS.items() for judge in of_one]
    assert [block.heading for block in BLOCKS] == [heading for heading, _ in judges]
    config = transformers.LlamaConfig(**tiny_llama.SIZES | {"vocab_size": 32})
    sizes = {"vocab_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    experts = transformers.Qwen3MoeConfig(**tiny_llama.SIZES | sizes, decoder_sparse_step=1)
    checks = []
    for i, (block, (heading, judge)) in enumerate(zip(BLOCKS, judges, strict=True)):
        folder = tmp_path / str(i)
        tiny_llama.save(config, folder / "llama")
        tiny_llama.save(experts, folder / "moe")
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        peft.get_peft_model(tiny_llama.load(folder / "llama"), adapter).save_pretrained(folder / "trained_adapter")
        checks.append((f"{heading}: {judge.__name__}", partial(run, block, judge, folder)))

        checks.append((f"{heading}: {i}", partial(run, block, judge, folder)))
    run_checks(2, checks, timeout=120)
