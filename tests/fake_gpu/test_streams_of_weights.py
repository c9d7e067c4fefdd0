"""Tests `stream_full_params` on a device that is not the CPU; the clocks judge the order of operations."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fake_gpu
from fake_gpu.training import OFFLOAD, build, judged, loss_of
from fsdp2 import StreamVersion, stream_full_params
from helpers import run_checks


def streams(options: dict[str, Any]) -> None:
    """Whole values, and only changes; beside steps, whose writes to shards wait for what is being sent."""
    with judged():
        plain, model = build(**options)
        rank, version = dist.get_rank(), StreamVersion()
        engine = {name: param.detach().clone() for name, param in plain.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            for i in range(dist.get_world_size()):
                (loss_of(plain, step, i, False) / dist.get_world_size()).backward()
            loss_of(model, step, rank, False).backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            for bucket in stream_full_params(model, bucket_bytes=700, since=version):
                assert bucket.flat is not None
                assert bucket.flat.device.type == fake_gpu.KIND
                bucket.write_to(engine)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(engine[name], param.detach(), rtol=1e-4, atol=1e-5)
        for bucket in stream_full_params(model, bucket_bytes=700, dtype=torch.bfloat16, ranks=[0]):
            assert (bucket.flat is None) == (rank != 0)


def test_on_a_device() -> None:
    ways: dict[str, dict[str, Any]] = {"fp32": {}, "offloaded": OFFLOAD, "replicas": {"mesh": (2, 1)}}
    checks = [(way, partial(streams, options)) for way, options in ways.items()]
    run_checks(2, checks, device=fake_gpu.KIND)
