"""What only a GPU can show: allocation on its caching allocator, kernels that run behind the host.

Skipped where there is none. One GPU is enough: NCCL over one rank, and a fake process group for the memory of many.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, comm, fully_shard
from helpers import assert_same, fake_world, full
from models import TinyGPT, mean_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_training_matches_the_plain_model(nccl: None, policy: MixedPrecisionPolicy | None) -> None:
    """Storage that is freed while a kernel still reads it would show as wrong gradients."""
    torch.manual_seed(0)
    plain = TinyGPT().cuda()
    torch.manual_seed(0)
    sharded = TinyGPT()
    for block in sharded.blocks:
        fully_shard(block, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(sharded, mp_policy=policy or MixedPrecisionPolicy())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if policy is None else {"rtol": 5e-2, "atol": 5e-3}
    for seed in range(3):
        batch = plain.example(rows=4, seed=seed)
        mean_loss(plain(batch.cuda())).backward()
        mean_loss(sharded(batch)).backward()  # the root moves its inputs
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert_same(full(q.grad), p.grad, **tolerance, name=f"{name}.grad")
        plain.zero_grad()
        sharded.zero_grad()


def test_what_travels_in_bf16_is_summed_in_fp32(nccl: None) -> None:
    """The exchange as NCCL has it, then a sum whose parts are not all cast first: that would be twice their memory."""
    sent, output = torch.randn(1024, device="cuda").bfloat16(), torch.empty(1024, device="cuda")
    comm.CoalescedComm(dist.group.WORLD).reduce_scatter([output], [sent], 2.0).wait()
    assert_same(output, sent.float() / 2, 0, 0, name="of one rank")
    parts, total = torch.randn(16, 1 << 20, device="cuda").bfloat16(), torch.empty(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    comm._sum(parts, total, 16)
    assert torch.cuda.max_memory_allocated() - before < parts.nbytes
    assert_same(total, parts.float().mean(0), rtol=1e-5, atol=1e-6, name="of many")


def test_forward_holds_two_groups() -> None:
    """As on the CPU, on the allocator that matters: 64 ranks, one of them real, its collectives fake."""
    dim, blocks = 1024, 6
    with fake_world(64):
        mesh = init_device_mesh("cuda", (64,))
        model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(blocks)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = torch.ones(1, dim, device="cuda", requires_grad=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
            loss = model(batch).sum()
            peak = torch.cuda.max_memory_allocated() - resting
            loss.backward()
            model.zero_grad()
        group = dim * dim * 4
        assert 2 * group <= peak <= 2.05 * group
