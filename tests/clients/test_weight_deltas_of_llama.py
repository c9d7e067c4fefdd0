"""Tests the sender of weight deltas with a Llama of Transformers that generates, and with weights fused as in vLLM."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tiny_llama
from examples.adapters.weight_deltas import LLAMA_IN_VLLM, DeltaReceiver, DeltaSender
from fsdp2 import fully_shard
from helpers import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Engine:
    """Takes pairs of a name and a whole tensor, as engines do, and generates."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny_llama.load(folder, dtype=torch.bfloat16).eval()
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        found = dict(self.model.named_parameters())
        for name, tensor in weights:
            found[name].data.copy_(tensor)
            self.loaded.append(name)

    def generate(self) -> list[list[int]]:
        tokens = torch.arange(1, 5)[None]
        generated = self.model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return generated.tolist()


def follows(folder: Path) -> None:
    model = tiny_llama.load(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, messages, fused_messages = Engine(folder), [], []
    receiver, fused = DeltaReceiver(load_weights=engine.load_weights), DeltaReceiver()
    senders = [
        DeltaSender(model, messages.append, bucket_bytes=2**9),
        DeltaSender(model, fused_messages.append, renames=LLAMA_IN_VLLM),
    ]
    texts = []
    for step in range(4):
        tokens = tiny_llama.batch(step)[dist.get_rank() :: dist.get_world_size()]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for sender, receives, sent in zip(senders, (receiver, fused), (messages, fused_messages), strict=True):
            sender.send()
            for data in sent:
                receives.receive(data)
            sent.clear()
        whole = {name: each.detach().full_tensor().bfloat16() for name, each in model.named_parameters()}
        if dist.get_rank() > 0:
            continue
        for name, each in engine.model.named_parameters():
            assert torch.equal(each.view(torch.int16), whole[name].view(torch.int16)), name
        plain = Engine(folder)
        plain.load_weights(whole.items())
        texts.append(engine.generate())
        assert texts[-1] == plain.generate()
        for i in range(tiny_llama.SIZES["num_hidden_layers"]):
            at = f"model.layers.{i}."
            for target, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
                path = target.split(".")[0]
                rows = torch.cat([whole[f"{at}{path}.{part}_proj.weight"] for part in parts])
                assert torch.equal(fused.weights[f"{at}{target}.weight"].view(torch.int16), rows.view(torch.int16))
        assert len(fused.weights) < len(whole)
    if dist.get_rank() == 0:
        assert receiver.version == fused.version == 3
        assert len(engine.loaded) > len(whole), "later versions changed weights, too"


def test_an_engine_follows(tmp_path: Path) -> None:
    folder = tiny_llama.save(transformers.LlamaConfig(**tiny_llama.SIZES), tmp_path)
    run_ranks(2, lambda rank, _: follows(folder))
