"""Counts what a step of several micro-batches gathers under `set_unsharded_budget`, and the least that it could gather:

    PYTHONPATH=tests:. python -m benchmarks.unsharded_budget [--micro-batches 3] [--scale 65536]

The groups are those of eight models, cut to six layers, with an embedding and a head where the model has them. Their
parameters are `scale` times fewer, which changes no choice: the engine chooses by sizes relative to the budget. The
least is found by an exhaustive search over what may be unsharded while each group runs. It knows the order of groups,
that the next one must be there in time, and none of the engine's rules.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.engine.state import groups_of
from unsharded_meter import Meter

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH, LAYERS = 4, 6
SHARES = (0.25, 0.5, 0.75, 1.0)


def llama(vocabulary: int, dim: int, hidden: int, kv: int, experts: int = 1) -> list[int]:
    block = 2 * dim * dim + 2 * dim * kv + experts * 3 * dim * hidden
    return [vocabulary * dim, *[block] * LAYERS, vocabulary * dim]


def encoder(dim: int, first: int, last: int) -> list[int]:
    return [first, *[12 * dim * dim] * LAYERS, last]


MODELS = {
    "Llama 3.2 1B": llama(128256, 2048, 8192, 512),
    "Llama 3.1 8B": llama(128256, 4096, 14336, 1024),
    "Mixtral 8x7B": llama(32000, 4096, 14336, 1024, experts=8),
    "Gemma 2 2B (large vocabulary)": llama(256000, 2304, 9216, 1024)[:-1],
    "GPT-2 XL": encoder(1600, 50257 * 1600, 0)[:-1],
    "ViT-H": encoder(1280, 0, 0)[1:-1],
    "T5-3B (layers of two sizes)": [*[16 * 1024 * 4096] * 3, *[20 * 1024 * 4096] * 3],
    "a U-Net (layers of all sizes)": [320**2 * 18, 640**2 * 18, 1280**2 * 18, 1280**2 * 36, 640**2 * 36, 320**2 * 36],
}
"""Parameters of each group, by the published configurations; biases and norms are left out."""


def count(widths: Sequence[int], budget: int | None, micro_batches: int) -> tuple[Meter, list[int]]:
    """Returns the meter of a steady step, and the bytes of each group. A process group must exist."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, n), nn.Linear(n, WIDTH)) for n in widths))
    for block in model:
        fully_shard(block, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    model.set_unsharded_budget(budget)
    meter = Meter()
    groups_of(model)[0].root.add(meter)
    for _ in range(2):
        meter.clear()
        for _ in range(micro_batches):
            model(torch.ones(1, WIDTH)).float().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)  # a step
    return meter, [groups_of(block)[0].nbytes for block in model]


def least(sizes: Sequence[int], budget: int, micro_batches: int, cost: Callable[[int], int]) -> int | None:
    """Returns the least cost of the gathers of a step in which at most `budget` bytes are unsharded besides the group
    that runs, and each group is there in time. None: some group does not fit.

    `cost`: of a gather of so many bytes.
    """
    number = len(sizes)
    order = [*range(number), *reversed(range(number))] * micro_batches
    held = [sum(size for i, size in enumerate(sizes) if kept >> i & 1) for kept in range(1 << number)]
    costs = {0: cost(sizes[0])}  # what is unsharded besides the group that runs, as bits -> the least until then
    for last, now, following in zip(order, order[1:], [*order[2:], None], strict=False):
        cheapest: dict[int, int] = {}
        ahead = 0 if following is None or following == now else 1 << following
        for before, spent in costs.items():
            there = before | 1 << last
            total = spent + (0 if there >> now & 1 else cost(sizes[now]))
            kept = may_stay = there & ~(1 << now)
            while True:
                if held[kept | ahead] <= budget:
                    cheapest[kept] = min(total, cheapest.get(kept, total))
                if not kept:
                    break
                kept = (kept - 1) & may_stay
        costs = cheapest
    return min(costs.values(), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=3)
    parser.add_argument("--scale", type=int, default=65536, help="so many parameters become one")
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    print("| model | budget, of its bytes | gathered, models | least | all-gathers | least | peak, of the budget |")
    print("|---|---|---|---|---|---|---|")
    for name, numbers in MODELS.items():
        widths = [max(1, number // args.scale // (2 * WIDTH)) for number in numbers]
        usual, sizes = count(widths, None, args.micro_batches)
        total = sum(sizes)
        print(f"| {name} | default | {usual.nbytes / total:.2f} | | {len(usual.gathers)} | | |")
        for share in SHARES:
            budget = int(total * share)
            meter, _ = count(widths, budget, args.micro_batches)
            best = least(sizes, budget, args.micro_batches, lambda nbytes: nbytes)
            fewest = least(sizes, budget, args.micro_batches, lambda nbytes: 1)
            least_bytes = "does not fit" if best is None else f"{best / total:.2f}"
            shown = f"{meter.nbytes / total:.2f} | {least_bytes} | {len(meter.gathers)} | {fewest or ''}"
            print(f"| | {share:.2f} | {shown} | {meter.peak / budget:.2f} |")


if __name__ == "__main__":
    main()
