"""Tests normalisation layers in mixed precision: their weights are cast, their buffers are not.

The oracle computes with cast copies of the weights on one process. Every rank has the same rows, so that a batch norm
sees the same statistics as that process, and the mean over ranks is each rank's own gradient.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_checks
from models import mean_loss


class Normed(nn.Module):
    """A convolution, `norm` over its channels, and a head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(2, 6, 3), norm, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x))).mean(-1))


NORMS = {
    "batch": lambda: nn.BatchNorm1d(6),
    "layer": lambda: nn.LayerNorm((6, 5)),
    "group": lambda: nn.GroupNorm(3, 6),
    "instance": lambda: nn.InstanceNorm1d(6, affine=True),
}


def trains(kind: str, dtype: torch.dtype, alone: bool) -> None:
    """`alone`: the norm is a group of its own."""
    plain = Normed(NORMS[kind]())
    for buffer in plain.buffers():  # torch's kernels ask for statistics of the input's dtype on a CPU
        buffer.data = buffer.to(dtype) if buffer.is_floating_point() else buffer
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if alone:
        fully_shard(model.norm, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for step in range(2):
        x = torch.randn(4, 2, 7, generator=torch.Generator().manual_seed(step))
        loss = mean_loss(model(x))
        loss.backward()
        weights = {name: p.to(dtype) for name, p in plain.named_parameters()}
        expected = mean_loss(functional_call(plain, weights, (x.to(dtype),)))
        expected.backward()
        assert_same(loss, expected, 0.0, 0.0, f"{kind}, step {step}: loss")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(p.grad, q.grad, 1e-5, 1e-7, f"{kind}, step {step}: {name}.grad")
            with torch.no_grad():
                p -= 0.25 * p.grad
                q -= 0.25 * full(p.grad)  # the sum over ranks may round otherwise
        for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert_same(buffer, other, 0.0, 0.0, f"{kind}, step {step}: {name}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_normalisation_in_low_precision() -> None:
    cases = [
        (kind, dtype, alone) for kind in NORMS for dtype in (torch.bfloat16, torch.float16) for alone in (False, True)
    ]
    run_checks(2, [(str(case), lambda case=case: trains(*case)) for case in cases])  # type: ignore[misc]
