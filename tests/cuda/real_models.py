"""Trains models of transformers and timm, built from configurations, beside plain ones, on ranks that may share a GPU:

    python -m benchmarks.gpu_ranks 2 tests/cuda/real_models.py cuda

Their code is nobody's here: attention of several kinds, routers of experts, position biases, tied parameters. With
`cpu` in place of `cuda` the program itself is tried. What is not installed is left out, and said.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from fsdp2 import MixedPrecisionPolicy, fully_shard  # noqa: E402
from helpers import assert_same  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SIZES | {"num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64}
Batch = dict[str, Tensor]


def of_transformers() -> Iterator[tuple[str, Callable[[], Any], Callable[[int], Batch]]]:
    import transformers as hf

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    gpt2 = hf.GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    t5 = hf.T5Config(
        vocab_size=131,
        d_model=64,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        d_kv=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    vit = hf.ViTConfig(**SIZES, image_size=32, patch_size=8)
    for config, batch in (
        (hf.LlamaConfig(**DECODER), tokens),
        (hf.LlamaConfig(**DECODER, tie_word_embeddings=True), tokens),
        (hf.Qwen3MoeConfig(**DECODER, **experts, decoder_sparse_step=1), tokens),
        (hf.Gemma2Config(**DECODER, head_dim=16), tokens),
        (gpt2, tokens),
    ):
        yield type(config).__name__, lambda config=config: hf.AutoModelForCausalLM.from_config(config), batch
    yield "T5Config", lambda: hf.T5ForConditionalGeneration(t5), tokens
    yield "ViTConfig", lambda: hf.ViTForImageClassification(vit), images


def of_timm() -> Iterator[tuple[str, Callable[[], Any], Callable[[int], Batch]]]:
    import timm

    sizes = {"img_size": 32, "num_classes": 2}
    yield "vit_tiny", lambda: timm.create_model("vit_tiny_patch16_224", depth=2, patch_size=8, **sizes), images
    yield "convnext_atto", lambda: timm.create_model("convnext_atto", num_classes=2), images


def tokens(seed: int) -> Batch:
    ids = torch.randint(131, (4, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 32, 32, generator=generator),
        "labels": torch.randint(2, (4,), generator=generator),
    }


def loss_of(model: Any, batch: Batch) -> Tensor:
    if type(model).__module__.startswith("timm") or "timm" in type(model).__mro__[1].__module__:
        return nn.functional.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])
    return model(**batch).loss


def train(kind: str, build: Callable[[], Any], batch_of: Callable[[int], Batch], policy: MixedPrecisionPolicy) -> None:
    """Takes three steps, and compares each rank's shards of the gradients with those of the whole batch."""
    torch.manual_seed(0)
    plain = build().train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(plain)
    plain = plain.to(kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{other}.") for other in lists):
            for block in model.get_submodule(name):
                fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    is_exact = policy.param_dtype is None
    for seed in range(3):
        batch = {name: value.to(kind) for name, value in batch_of(seed).items()}
        loss_of(plain, batch).backward()
        own = {name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in batch.items()}
        loss_of(model, own).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and is_exact:
                assert_same(q.grad, p.grad, rtol=1e-3, atol=2e-5, name=f"step {seed}: {name}.grad")
        norms = [
            sum(float(_whole(p.grad).double().square().sum()) for p in each.parameters() if p.grad is not None)
            for each in (plain, model)
        ]
        assert abs(norms[1] / norms[0] - 1) < (1e-3 if is_exact else 0.1), f"step {seed}: norms {norms}"
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
                    q.sub_(q.grad, alpha=0.1)
        plain.zero_grad()
        model.zero_grad()


def _whole(grad: Any) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def main() -> int:
    kind = sys.argv[1]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    failed = 0
    for models in (of_transformers, of_timm):
        try:
            found = [*models()]
        except ImportError as error:
            found = []
            print(f"left out: {error}", flush=True)
        for name, build, batch_of in found:
            for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
                what = f"{name}, {policy.param_dtype or torch.float32}"
                try:
                    train(kind, build, batch_of, policy)
                    outcome = "as the plain model"
                except Exception as error:  # on all ranks alike: they compare the same numbers
                    outcome, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
                if dist.get_rank() == 0:
                    print(f"{what}: {outcome}", flush=True)
    dist.barrier()  # a rank that leaves early has not answered those that still connect
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
