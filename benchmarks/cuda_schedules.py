"""Measures schedules of fsdp2 that a user can choose, alone and together, and what kernels on two streams cost each
other. Schedules are compared with fsdp2's default: torch's FSDP2 is not in this process (PROTOCOL.md).

Steps are some in a row, so that what a step leaves for the next one is done beside it, and counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import fsdp2

from .cuda import NVLINK, WARM_UP, Setup, Stage, count_calls, fill_cache, free_memory, read_clock
from .cuda_group import Wire
from .cuda_models import run_lm_step
from .cuda_wrapping import step_with_overlap
from .report import Row, timed_row
from .timing import Call, interleave, repeat

RANKS, BLOCKS = 8, 8
IN_A_ROW, LATENCY_US = 3, 20
# GB/s -> rounds, of which a slow wire has few; None: collectives take no time.
WIRES = {NVLINK: 5, None: 5, 50: 2}


@dataclass(frozen=True)
class Parts:
    """Says which schedules a model has.

    Args:
        flat: the optimizer steps on whole groups.
        late: it does so during the next forward.
        rows: the embedding is vocabulary-parallel.
        offloaded: the states of the optimizer rest on the CPU.
    """

    flat: bool = False
    late: bool = False
    rows: bool = False
    offloaded: bool = False


SCHEDULES = {
    "fsdp2": Parts(),
    "flat": Parts(flat=True),
    "late": Parts(flat=True, late=True),
    "rows": Parts(rows=True),
    "late, rows": Parts(flat=True, late=True, rows=True),
    "states on the CPU": Parts(flat=True, offloaded=True),
}


def measure_schedules(setup: Setup) -> Iterator[Row]:
    """Measures whole steps, with fused AdamW, of eight blocks on 8 ranks, where an optimizer has much to do: on a wire
    as fast as NVLink, on one as fast as a card, and on one that takes no time.
    """
    label, shape = [*setup.llamas.items()][-1]
    shape = replace(shape, blocks=min(shape.blocks, BLOCKS))
    setup = replace(setup, world_size=min(setup.world_size, RANKS))
    stage = Stage(setup, shape)
    built = {name: _build(stage, parts) for name, parts in SCHEDULES.items()}
    steps = {name: step for name, (step, _) in built.items()}
    optimizers = {name: optimizer for name, (_, optimizer) in built.items()}
    for name, step in steps.items():
        repeat(WARM_UP, step)
        setup.synchronise()
        print(f"{name} has warmed up", flush=True)
    fill_cache(setup)
    late = [name for name, parts in SCHEDULES.items() if parts.late]
    for name in late if setup.is_cuda else ():
        taken = vars(optimizers[name])["_fsdp2_flat_steps"].late.taken
        print(f"{name}: {taken} steps were late")
        assert taken > 0, f"{name} has no late steps: this would measure others"
    setting = f"{label}, {shape.blocks} blocks, {shape.tokens} tokens, N={setup.world_size}"
    measure = partial(_time_of_a_row, setup)
    for speed, rounds in WIRES.items():
        bandwidth, latency = (None, 0.0) if speed is None else (speed * 1e9, LATENCY_US / 1e6)
        on_wire = {name: OnWire(step, stage.wire, bandwidth, latency) for name, step in steps.items()}
        times = interleave(on_wire, rounds=min(setup.rounds, rounds), warmup=1, measure=measure)
        where = setting if speed is None else f"{setting}, {speed} GB/s, {LATENCY_US} us"
        yield timed_row("cuda", "whole step ms", where, times)
    if setup.is_cuda:  # two steps each, to see where the second one waits for the first
        for name in ("fsdp2", "late"):
            step = OnWire(steps[name], stage.wire, NVLINK * 1e9, LATENCY_US / 1e6)
            repeat(2, step)
            count_calls(partial(repeat, 2, step), setup, f"schedule-{name}")
    del built, steps, optimizers, on_wire
    stage.close()


class OnWire:
    """Is a step on a wire of some bandwidth in bytes a second, and latency in seconds. None: it takes no time."""

    def __init__(self, step: Call, wire: Wire, bandwidth: float | None, latency: float) -> None:
        self._step, self._wire, self._speed = step, wire, (bandwidth, latency)

    def __call__(self) -> None:
        self._wire.bandwidth, self._wire.latency = self._speed
        self._step()
        self._wire.bandwidth = None


def _build(stage: Stage, parts: Parts) -> tuple[Call, Any]:
    """Returns a whole step of a new model, and its optimizer."""
    prepare: Callable[[Any], object] = partial(_shard_embedding, stage) if parts.rows else lambda model: None
    model = stage.build_model("fsdp2-best", prepare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if parts.late:
        step_with_overlap(optimizer)
    elif parts.flat:
        fsdp2.flatten_optimizer(optimizer, offload_states=parts.offloaded)

    def step() -> None:
        run_lm_step(model, stage.ids, keeps_gradients=True)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def _shard_embedding(stage: Stage, model: Any) -> None:
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fsdp2.vocab_parallel_embedding(model.embedding, mesh=stage.mesh, mp_policy=policy)


def _time_of_a_row(setup: Setup, step: Call) -> float:
    """Returns the ms of a step among some in a row: from the end of the first to that of the last."""
    setup.synchronise()
    step()
    stop = read_clock(setup)
    repeat(IN_A_ROW, step)
    return stop() / IN_A_ROW


# ---- beside


def measure_beside(setup: Setup) -> Iterator[Row]:
    """Measures what kernels on two streams cost each other.

    The price of B beside A is how much longer both take together than the longer one alone, in shares of the shorter
    one: 0 if it is done for nothing, 1 if they take turns.
    """
    if not setup.is_cuda:
        return
    work = _works(setup)
    alone = {name: _ms_of(setup, (call,)) for name, call in work.items()}
    for first in ("products", "attention"):
        prices = {}
        for second in ("packing", "AdamW", "casts", "spin"):
            # The second is repeated until it takes about half as long as the first.
            times = max(1, round(alone[first] / 2 / alone[second]))
            repeated = partial(repeat, times, work[second])
            shorter, longer = sorted((_ms_of(setup, (repeated,)), alone[first]))
            prices[second] = (_ms_of(setup, (work[first], repeated)) - longer) / shorter
        yield Row("cuda", "price of kernels beside", f"of {first}, {alone[first]:.2f} ms", prices)
    yield Row("cuda", "ms alone", "kernels beside", alone)
    del work
    free_memory(setup)
    yield Row("cuda", "GB/s of copies", "page-locked, 1 GiB each", _copies(setup))
    yield Row("cuda", "TFLOP/s of products", "8192, 8192, 8192", _products(setup))


def _copies(setup: Setup) -> dict[str, float]:
    """Returns the GB/s of copies from and to the host, one way, and of each where both go at once."""
    nbytes = 2**30
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=setup.device) for _ in range(2)]
    to_device = partial(devices[0].copy_, hosts[0], non_blocking=True)
    to_host = partial(hosts[1].copy_, devices[1], non_blocking=True)
    ways = {"to the device": (to_device,), "to the host": (to_host,), "each, both at once": (to_device, to_host)}
    return {name: nbytes / _ms_of(setup, calls) / 1e6 for name, calls in ways.items()}


def _products(setup: Setup) -> dict[str, float]:
    """Returns the TFLOP/s of a matrix product in each precision."""
    found = {}
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "highest"),
        ("fp32", torch.float32, "highest"),
        ("TF32", torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(precision)
        x = torch.randn(8192, 8192, device=setup.device, dtype=dtype)
        found[name] = 2 * 8192**3 / _ms_of(setup, (partial(torch.mm, x, x),)) / 1e9
    torch.set_float32_matmul_precision("highest")
    return found


def _works(setup: Setup) -> dict[str, Call]:
    """Returns kernels as a block of Llama 8B has them, in about the time that one takes."""
    device, bf16 = setup.device, torch.bfloat16
    x, w = (torch.randn(size, device=device, dtype=bf16) * 0.02 for size in ((4096, 4096), (4096, 14336)))
    y = torch.empty(4096, 14336, device=device, dtype=bf16)
    q, k, v = (torch.randn(1, 32, 4096, 128, device=device, dtype=bf16) for _ in range(3))
    gradients = [torch.randn(14336, 4096, device=device, dtype=bf16) for _ in range(3)]
    packed = torch.empty(RANKS, sum(each.numel() for each in gradients) // RANKS, device=device)
    shards = [torch.randn(27_000_000, device=device) for _ in range(4)]
    master = torch.nn.Parameter(shards[0])
    master.grad = shards[1]
    optimizer = torch.optim.AdamW([master], lr=1e-5, fused=True)
    small, large = torch.empty(27_000_000, device=device, dtype=bf16), shards[2]

    def products() -> None:
        for _ in range(12):
            torch.mm(x, w, out=y)

    def attention() -> None:
        for _ in range(6):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def packing() -> None:
        torch._chunk_cat(gradients, 0, RANKS, out=packed)

    def spin() -> None:
        torch.cuda._sleep(200_000)

    return {
        "products": products,
        "attention": attention,
        "packing": packing,
        "AdamW": optimizer.step,
        "casts": lambda: small.copy_(large),
        "spin": spin,
    }


def _ms_of(setup: Setup, calls: tuple[Call, ...]) -> float:
    """Returns the median time of calls that run at once, each on a stream of its own: all is issued beforehand."""
    streams = [torch.cuda.Stream() for _ in calls]
    found = []
    for _ in range(setup.rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
        stop = read_clock(setup)
        for stream, call in zip(streams, calls, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        found.append(stop())
    return median(found[2:] or found)
