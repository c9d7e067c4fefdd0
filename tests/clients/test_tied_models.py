"""Tests models of Transformers whose embeddings are tied to their heads, and which are sharded apart.

Each trains as the plain model does on the whole batch, in fp64; its files are those of the plain model.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiny_llama
from fsdp2 import fully_shard, hf
from helpers import assert_same, run_checks, shard_batch

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

VOCAB = 19
TOKENS = (torch.arange(24) * 7 % VOCAB).view(4, 6)
SMALL = {"d_model": 8, "d_ff": 12, "d_kv": 4, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}

Build = Callable[[], Any]
MODELS: dict[str, tuple[Build, Callable[[Any], list[Any]]]] = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_positions=8,
                n_embd=8,
                n_layer=2,
                n_head=2,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
            )
        ),
        lambda model: [model.transformer.wte, *model.transformer.h, model.lm_head],
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**tiny_llama.SIZES | {"vocab_size": VOCAB}, tie_word_embeddings=True)
        ),
        lambda model: [model.model.embed_tokens, *model.model.layers],
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0, **SMALL)
        ),
        lambda model: [*model.encoder.block, *model.decoder.block, model.encoder, model.decoder],
    ),
}


def loss_of(model: Any, tokens: torch.Tensor) -> Any:
    return model(input_ids=tokens, labels=tokens).loss


def trains_and_saves(name: str, folder: Path) -> None:
    build, parts = MODELS[name]
    torch.manual_seed(0)
    plain = build().double()
    names = dict(plain.named_parameters(remove_duplicate=False))
    assert len({*names.values()}) < len(names), "some are tied"
    model: Any = copy.deepcopy(plain)
    for part in parts(model):
        fully_shard(part)
    fully_shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, plain)]
    for step in range(3):
        tokens = (TOKENS + step) % VOCAB
        loss_of(plain, tokens).backward()
        loss_of(model, shard_batch(tokens, dist.get_rank(), dist.get_world_size())).backward()
        for n, param in plain.named_parameters():
            assert_same(model.get_parameter(n).grad, param.grad, 0, 1e-12, f"{step}: {n}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for n, param in names.items():
        assert_same(model.get_parameter(n), param.detach(), 0, 1e-10, n)
    target = folder / name
    hf.save_model(model, target)
    loaded = type(plain).from_pretrained(target, torch_dtype=torch.float64)
    for n, value in model.state_dict().items():
        assert_same(value, loaded.state_dict()[n], 0, 0, n)
    report = hf.load_model(model, target)
    assert (report.missing, report.unexpected) == ([], [])
    assert_same(
        model.eval()(input_ids=TOKENS, labels=TOKENS).logits,
        loaded.eval()(input_ids=TOKENS, labels=TOKENS).logits,
        0,
        1e-12,
        "logits",
    )


def test_tied_models(tmp_path: Path) -> None:
    run_checks(2, [(name, lambda name=name: trains_and_saves(name, tmp_path)) for name in MODELS])  # type: ignore[misc]
