"""Counts what CUDA's caching allocator holds in whole steps of one library, on the phantom:

    python -m benchmarks.phantom.run -m benchmarks.phantom.memory LIBRARY --model 1B --ranks 64 --wrapping protocol

It prints GiB as JSON, by case: 512 tokens, 4,096, and 4,096 with blocks that are computed again in backward. A step is
forward, backward, clipping and fused AdamW. `benchmarks/allocator.py` runs it for each library.
"""

import argparse
import gc
import json
import os
from functools import partial

import torch

from benchmarks import recipe

from . import models, record
from .without_numbers import try_optimizers_on_cpu

CASES = {"512 tokens": (512, False), "4,096 tokens": (4096, False), "4,096 tokens, blocks recomputed": (4096, True)}
WARM_UP, STEPS = 3, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    parser.add_argument("library", choices=list(recipe.MODULES))
    args = parser.parse_args()
    mesh = record.start(args)
    try_optimizers_on_cpu()
    model, shape = record.build(args.library, args, mesh)
    optimizer, clip = recipe.make_optimizer(args.library, model), recipe.clip_function(args.library)
    found = {}
    for case, (tokens, recomputes) in CASES.items():
        model.checkpoints = recomputes
        ids = models.make_ids(shape, args.rows, tokens)
        step = partial(record.run_step, model, ids, optimizer, clip, lambda name: None)
        for _ in range(WARM_UP):
            step()
        gc.collect()
        torch.cuda.empty_cache()
        resting = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            step()
        peaks = (resting, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        found[case] = [nbytes / 2**30 for nbytes in peaks]
    print(json.dumps(found), flush=True)
    os._exit(0)  # no other rank takes part in the end of the process group


if __name__ == "__main__":
    main()
