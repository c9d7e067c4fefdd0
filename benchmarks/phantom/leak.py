"""Shows whether a deleted model leaves the device:

    python -m benchmarks.phantom.run -m benchmarks.phantom.leak fsdp2

Builds, trains and deletes three small Llamas, and prints the bytes that stay after each: workspaces of cuBLAS, which
are freed, and whatever the library keeps.
"""

import gc
import importlib
import os
import sys
import time
import weakref

import torch
import torch.distributed as dist

from benchmarks.cuda_models import Llama, LlamaShape, make_ids, run_lm_step
from benchmarks.cuda_wrapping import materialise
from benchmarks.recipe import MODULES, shard

SHAPE = LlamaShape(blocks=4, dim=512, heads=8, kv_heads=8, hidden=2048, vocab=32000, tokens=256)
RANKS = 8


def train_and_delete(name: str, mesh: dist.DeviceMesh, is_offloaded: bool) -> tuple[int, bool]:
    """Returns the bytes that are allocated afterwards, and whether the model is alive."""
    with torch.device("meta"):
        model = Llama(SHAPE)
    library = importlib.import_module(MODULES[name])
    options = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if is_offloaded:
        options["offload_policy"] = library.CPUOffloadPolicy()
    model = materialise(shard(name, model, **options), torch.device("cpu" if is_offloaded else "cuda", 0))
    ids = make_ids(SHAPE.vocab, 1, SHAPE.tokens, torch.device("cuda", 0))
    for _ in range(3):
        run_lm_step(model, ids)
    reference = weakref.ref(model)
    del model, ids
    for _ in range(2):  # autograd's thread of the device holds the last graph for some milliseconds
        gc.collect()
        time.sleep(0.3)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), reference() is not None


def main(name: str, *options: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS, device_id=device)
    mesh = dist.init_device_mesh("cuda", (RANKS,))
    for turn in range(3):
        left, is_alive = train_and_delete(name, mesh, "offload" in options)
        print(f"{name} {turn}: {left} bytes stay, the model is {'alive' if is_alive else 'gone'}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
