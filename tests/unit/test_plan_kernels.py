"""Tests that a plan counts what an accelerator keeps, on the CPU: whole steps as measured, and single operations.

GPU: an H200 (1B: also an H100, equal to the byte) on 26 November 2026, torch 2.11.0, one of 64 simulated ranks, in
benchmarks/results/2026-11-26-gpu.md: peak allocated by torch's allocator in a step of `run_lm_step`. Operations: what
torch's CUDA build keeps, by the same allocator on the phantom (benchmarks/phantom), without cuDNN and workspaces.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from benchmarks.cuda_models import LLAMAS, Llama, LlamaBlock
from fsdp2.planning.kernels import of_device
from fsdp2.planning.meter import StorageMeter
from fsdp2.torch_private.plans import fake_mode
from helpers import NIGHTLY

GIB, MIB = 2**30, 2**20
BF16, FP32 = torch.bfloat16, torch.float32
# Name, tokens, are blocks recomputed -> GiB.
MEASURED = {
    ("Llama 1B", 512, False): 2.579,
    ("Llama 1B", 4096, False): 13.268,
    ("Llama 1B", 4096, True): 7.885,
}
if NIGHTLY:  # twice as many blocks, which are wider
    MEASURED |= {
        ("Llama 8B", 512, False): 6.630,
        ("Llama 8B", 4096, False): 28.970,
        ("Llama 8B", 4096, True): 9.450,
    }
# Less is the dangerous side: the plan then says that it fits.
MOST_TOO_LITTLE, MOST_TOO_MUCH = 0.01, 0.01


@pytest.mark.parametrize(("name", "tokens", "recomputes"), MEASURED)
def test_peaks_are_those_of_a_gpu(name: str, tokens: int, recomputes: bool) -> None:
    with torch.device("meta"):
        model = Llama(replace(LLAMAS[name], tokens=tokens))
    model.recomputes = recomputes
    targets = torch.zeros(tokens, dtype=torch.long)
    plan = fsdp2.plan(
        model,
        ranks=64,
        batch=lambda: torch.zeros(1, tokens, dtype=torch.long),
        loss=lambda logits: F.cross_entropy(logits.float().flatten(0, 1), targets),
        policy=LlamaBlock,
        mp_policy=fsdp2.MixedPrecisionPolicy(BF16, FP32),
        optimizer=None,
        settings=[{}],
    )
    assert not plan.notes
    error = plan.best.total / GIB / MEASURED[name, tokens, recomputes] - 1
    assert -MOST_TOO_LITTLE < error < MOST_TOO_MUCH, f"{error:+.1%}"


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=True)


def attention(dtype: torch.dtype, shares: bool, dropout: float, masked: bool, head: int) -> Callable[[], Tensor]:
    query, key = leaf(1, 8, 1024, head, dtype=dtype), leaf(1, 2 if shares else 8, 1024, head, dtype=dtype)
    value = torch.empty_like(key).requires_grad_()
    mask = torch.zeros(1024, 1024, dtype=dtype, device="cpu") if masked else None
    options: dict[str, Any] = {"is_causal": not masked, "enable_gqa": shares, "dropout_p": dropout}
    return lambda: F.scaled_dot_product_attention(query, key, value, mask, **options)


def module_on(module: nn.Module, *shape: int) -> Callable[[], Tensor]:
    x = leaf(*shape)
    return lambda: module(x)


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(512, 8, dropout=0.1, batch_first=True, device="cpu", dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("make", "mebibytes"),
    [
        (lambda: attention(BF16, False, 0.0, False, 64), 1.03),
        (lambda: attention(BF16, True, 0.1, False, 64), 1.03),
        (lambda: attention(FP32, False, 0.1, False, 64), 2.03),
        (lambda: attention(BF16, False, 0.0, True, 64), 1.03),
        (lambda: attention(FP32, True, 0.0, False, 64), 40.0),
        (lambda: attention(BF16, True, 0.0, True, 64), 39.0),
        (lambda: attention(BF16, True, 0.0, False, 320), 67.0),
        (lambda: module_on(nn.Dropout(0.1), 1024, 1024), 3.0),
        (lambda: module_on(nn.RMSNorm(1024, device="cpu", dtype=BF16), 1024, 1024), 2.004),
        (lambda: module_on(nn.RMSNorm(1024, elementwise_affine=False), 1024, 1024), 2.004),
        (lambda: module_on(nn.LayerNorm(1024, device="cpu", dtype=BF16), 1024, 1024), 2.008),
        (lambda: module_on(OwnAttention(), 1, 1024, 512), 5.03),
    ],
)
def test_an_operation_keeps_what_it_keeps_on_cuda(make: Callable[[], Callable[[], Tensor]], mebibytes: float) -> None:
    """It runs without values, as in a plan: what is alive behind it, beside its inputs."""
    meter = StorageMeter()
    mode = fake_mode(lambda func, args, kwargs, out: meter.see(out))
    with mode, of_device("cuda"):
        run = make()
        before = meter.live
        output = run()
        assert (meter.live - before) / MIB == pytest.approx(mebibytes, rel=0.03), output.shape
