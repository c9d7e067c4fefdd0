"""Trains in several ways beside a plain model, on the ranks of test_nccl.py, each of which has a GPU.

    torchrun --nproc-per-node 2 tests/cuda/ranks_program.py cuda
    python -m benchmarks.gpu_ranks 2 tests/cuda/ranks_program.py cuda      # ranks share a GPU if there is one only

With `cpu` in place of `cuda` it runs on gloo, which tries the program itself. With `registered` behind it the memory of
collectives comes from NCCL.
"""

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from cut_gradients import cut_gradients  # noqa: E402
from fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, vocab_parallel_embedding  # noqa: E402
from fsdp2.compression import Compression, Float8, Int8  # noqa: E402
from helpers import assert_same  # noqa: E402
from models import TinyGPT, mean_loss  # noqa: E402

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
EXACT, ROUNDED = {"rtol": 1e-4, "atol": 1e-5}, {"rtol": 5e-2, "atol": 1e-2}
COARSE = {"rtol": 0.2, "atol": 5e-2}
CYCLES = 20_000_000  # some milliseconds of a GPU's clock


def train(
    kind: str,
    size: int,
    *,
    tolerance: dict[str, float],
    prepare: Callable[[Any], None],
    after: Callable[[Any], None],
    vocab_parallel: bool = False,
    **options: Any,
) -> None:
    """Takes three steps, and compares each rank's shards of the gradients with those of the whole batch."""
    torch.manual_seed(0)
    plain = TinyGPT(dim=96, depth=3)
    model = copy.deepcopy(plain)
    plain, rows = plain.to(kind), 2 * size
    prepare(model)
    if vocab_parallel:
        names = ("mesh", "mp_policy", "dp_mesh_dims")
        vocab_parallel_embedding(model.embed, **{name: options[name] for name in names if name in options})
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    after(model)
    for seed in range(3):
        batch = plain.example(rows=rows, seed=seed)
        mean_loss(plain(batch.to(kind))).backward()
        own = batch.chunk(size)[dist.get_rank()].to(kind)
        if kind == "cuda":  # what is issued now runs when the host is far ahead
            torch.cuda._sleep(CYCLES)
        mean_loss(model(own)).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert_same(q.grad, p.grad, **tolerance, name=f"step {seed}: {name}.grad")
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.sub_(p.grad)
                q.sub_(q.grad)
        plain.zero_grad()
        model.zero_grad()


def as_it_is(model: Any) -> None:
    pass


def recomputed(model: Any) -> None:
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def registered(model: Any) -> None:
    """Gathers and reduces in memory that NCCL registers."""
    model.set_allocate_memory_from_process_group_for_comm(True)


def symmetric(model: Any) -> None:
    """Gathers and sums in torch's symmetric memory."""
    model.set_force_sum_reduction_for_comms(True)
    model.set_symm_mem_for_comm()


def small_pieces(_: Any) -> None:
    """From now on gradients travel one by one, in pieces, as large ones do."""
    cut_gradients(1, 1024)


def main() -> None:
    kind = sys.argv[1]
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    size = dist.get_world_size()
    offload = CPUOffloadPolicy(pin_memory=kind == "cuda")
    ways: dict[str, dict[str, Any]] = {
        "fp32": {"tolerance": EXACT},
        "bf16/fp32": {"tolerance": ROUNDED, "mp_policy": BF16},
        "sent in bf16": {
            "tolerance": ROUNDED,
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
            ),
        },
        "weights in fp8": {
            "tolerance": COARSE,
            "mp_policy": replace(BF16, compression=Compression(all_gather=Float8())),
        },
        "gradients in int8": {
            "tolerance": COARSE,
            "mp_policy": replace(BF16, compression=Compression(reduce_scatter=Int8())),
        },
        "kept": {"tolerance": EXACT, "reshard_after_forward": False},
        "recomputed": {"tolerance": EXACT, "prepare": recomputed},
        "offloaded": {"tolerance": EXACT, "offload_policy": offload},
        "replicated": {"tolerance": EXACT, "mesh": init_device_mesh(kind, (size, 1), mesh_dim_names=("dp", "shard"))},
        "vocabulary-parallel embedding": {"tolerance": EXACT, "vocab_parallel": True},
        "vocabulary-parallel embedding, bf16/fp32": {"tolerance": ROUNDED, "mp_policy": BF16, "vocab_parallel": True},
        "in pieces": {"tolerance": ROUNDED, "mp_policy": BF16, "prepare": small_pieces},
        "offloaded in pieces": {"tolerance": ROUNDED, "mp_policy": BF16, "offload_policy": offload},
    }
    if size % 2 == 0 and size > 2:
        hsdp = init_device_mesh(kind, (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        ways["HSDP"] = {"tolerance": EXACT, "mesh": hsdp}
        at_rest = DataParallelMeshDims(shard="shard", outer_shard="replicate")
        ways["replicas share one set of shards"] = {"tolerance": EXACT, "mesh": hsdp, "dp_mesh_dims": at_rest}
        ways["HSDP, bf16/fp32"] = {"tolerance": ROUNDED, "mesh": hsdp, "mp_policy": BF16}
        ways["HSDP, vocabulary-parallel embedding"] = {"tolerance": EXACT, "mesh": hsdp, "vocab_parallel": True}
    if sys.argv[2:] == ["registered"]:
        ways = {
            each.__name__: {"tolerance": ROUNDED, "mp_policy": BF16, "after": each} for each in (registered, symmetric)
        }
    for way, options in ways.items():
        mesh = {} if "mesh" in options else {"mesh": init_device_mesh(kind, (size,))}
        train(kind, size, **{"prepare": as_it_is, "after": as_it_is, **mesh, **options})
        if dist.get_rank() == 0:
            print(way, "as the plain model", flush=True)
    # The first rank holds the store, by which a late one may still have to find others: on a phantom nobody waits.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {dist.get_rank()} has ended", "")
    if dist.get_rank() == 0:
        store.wait([f"rank {rank} has ended" for rank in range(size)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
