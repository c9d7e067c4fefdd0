"""Tests the exact number of bytes that a step copies, read and written, beyond those of the plain model.

It runs on one of many ranks whose peers are simulated.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist

from benchmarks.alignment import BLOCKS, is_misaligned
from benchmarks.libraries import load_library
from benchmarks.models import BYTES_SHAPE, PRECISIONS, build_plain, build_sharded
from benchmarks.traffic import copy_limit, count_step
from helpers import fake_world

SHAPE = replace(BYTES_SHAPE, blocks=2)
# Bytes per parameter beyond the limit: norms are packed, in every precision.
SLACK = {"fp32": 0.01, "bf16/fp32": 0.11}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_matrices_are_gathered_and_reduced_without_copies(precision: str) -> None:
    """One cast each way under mixed precision, nothing otherwise; a staging buffer would cost 4 bytes and more."""
    with fake_world(64):
        mesh = dist.init_device_mesh("cpu", (64,))
        sharded, _ = count_step(build_sharded(SHAPE, precision, load_library("fsdp2-best"), mesh), SHAPE, precision)
        plain, _ = count_step(build_plain(SHAPE, precision), SHAPE, precision)
        limit = copy_limit(*(dtype.itemsize for dtype in PRECISIONS[precision]), 64)
    per_parameter = (sharded.copy_bytes - plain.copy_bytes) / SHAPE.numel
    assert limit <= per_parameter <= limit + SLACK[precision]
    assert sharded.arithmetic_bytes == plain.arithmetic_bytes


@pytest.mark.parametrize("world_size", [3, 7, 32, 64])
def test_payloads_start_and_end_on_16_bytes(world_size: int) -> None:
    """Blocks of common models, at world sizes at which torch's FSDP2 is off for some."""
    library = load_library("fsdp2-best")
    with fake_world(world_size):
        assert [name for name in BLOCKS if is_misaligned(name, library)] == []
