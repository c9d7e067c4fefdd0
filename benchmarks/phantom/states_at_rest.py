"""Counts the device's memory in steps whose optimizer states are on the device, or rest on the CPU.

    python -m benchmarks.phantom.run -m benchmarks.phantom.states_at_rest --model 1B --ranks 8

It prints GiB on the device between steps, at the peak of a step, and at the peak of `optimizer.step()`.
"""

import argparse
import gc
from typing import Any

import torch

import fsdp2
from fsdp2.optim import steps
from fsdp2.optim.probe import Verdict, probe

from . import models, record


def probe_on_the_cpu(optimizer: Any, cls: Any, options: Any, like: torch.Tensor) -> Verdict:
    """Whether a class computes element by element is tried with numbers, which the phantom has none of."""
    return probe(optimizer, cls, options, like.cpu())


def measure(way: str, args: argparse.Namespace, mesh: Any) -> tuple[float, ...]:
    """Returns GiB. `way`: torch's own steps, flat ones, or flat ones whose states rest on the CPU."""
    model, shape = record.build("fsdp2", args, mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=True)
    if way != "torch's":
        optimizer = fsdp2.flatten_optimizer(optimizer, offload_states=way == "states on the CPU")
    ids = models.make_ids(shape, args.rows, args.tokens)
    found: list[int] = []
    for _ in range(3):
        gc.collect()
        torch.cuda.synchronize()
        found[:] = [torch.cuda.memory_allocated()]
        torch.cuda.reset_peak_memory_stats()
        loss = torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        loss.backward()
        del loss
        of_passes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        of_step = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        found += [max(of_passes, of_step), of_step]
    return tuple(each / 2**30 for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    args = parser.parse_args()
    mesh = record.start(args)
    steps.probe = probe_on_the_cpu
    print(f"| {args.model}, {args.ranks} ranks | between steps | peak | peak of optimizer.step() |\n|---|---|---|---|")
    for way in ("torch's", "flat", "states on the CPU"):
        numbers = " | ".join(f"{each:.2f}" for each in measure(way, args, mesh))
        print(f"| {way} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
