"""Tests forward, backward and steps on different threads, one after the other.

Programs call `backward` on a worker thread, and autograd has threads of its own. The fault in question: a fact that is
stored for one thread only.
"""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from helpers import NIGHTLY, assert_same, full, run_checks
from models import TinyGPT, mean_loss

same = partial(assert_same, rtol=1e-9, atol=1e-11)
Run = Callable[[Callable[[], Any]], Any]
STEPS = 3


def own_part(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def here(work: Callable[[], Any]) -> Any:
    return work()


def on_a_fresh_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


_workers = threading.local()


def on_the_worker(work: Callable[[], Any]) -> Any:
    """The same thread each time."""
    if not hasattr(_workers, "pool"):
        _workers.pool = ThreadPoolExecutor(1)
    return _workers.pool.submit(work).result()


THREADS: dict[str, tuple[Run, Run, Run]] = {
    "backward": (here, on_the_worker, here),
    "forward": (on_the_worker, here, here),
    "both": (on_the_worker, on_the_worker, here),
    "all": (on_the_worker, on_the_worker, on_the_worker),
    "fresh ones": (on_a_fresh_thread, on_a_fresh_thread, on_a_fresh_thread),
}
"""Where forward, backward and the optimizer run."""


def checkpointed(use_reentrant: bool, model: Any) -> None:
    def call(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return checkpoint(forward, x, use_reentrant=use_reentrant) if torch.is_grad_enabled() else forward(x)

    for block in model.blocks:
        block.forward = partial(call, block.forward)


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return fsdp2.fully_shard(model, **options)


def hsdp(model: Any) -> Any:
    return shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))


MODELS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "plain": (lambda model: None, shard),
    "kept": (lambda model: None, partial(shard, reshard_after_forward=False)),
    "checkpoint": (partial(checkpointed, False), shard),
    "reentrant checkpoint": (partial(checkpointed, True), shard),
    "hsdp": (lambda model: None, hsdp),
}


def check(name: str, threads: tuple[Run, Run, Run]) -> None:
    """Trains beside the plain model: a step, one in two parts, one after a backward that failed; and evaluates."""
    prepare, wrap = MODELS[name]
    forward, backward, update = threads
    torch.manual_seed(0)
    plain = TinyGPT(dim=6, depth=2).double()
    model = copy.deepcopy(plain)
    prepare(model)
    wrap(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(STEPS):
        for part in range(2 if step == 1 else 1):
            batch = plain.example(rows=4, seed=2 * step + part)
            model.set_requires_gradient_sync(step != 1 or part == 1)
            mean_loss(plain(batch)).backward()
            loss = forward(lambda batch=batch: mean_loss(model(own_part(batch))))
            backward(loss.backward)
        if step == 2:
            fail(model, own_part(batch), forward, backward)
            loss = forward(lambda batch=batch: mean_loss(model(own_part(batch))))
            model.zero_grad()
            backward(loss.backward)
        for (key, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
            same(full(parameter.grad), expected.grad, name=f"gradient of {key} in step {step}")
        optimizers[0].step()
        update(optimizers[1].step)
        for optimizer in optimizers:
            optimizer.zero_grad()
    same(forward(torch.no_grad()(lambda: model(batch))), plain(batch).detach(), name="evaluated")


def fail(model: Any, batch: Any, forward: Run, backward: Run) -> None:
    def with_an_error() -> Any:
        output = model(batch)
        output.register_hook(lambda _: 1 / 0)
        return mean_loss(output)

    loss = forward(with_an_error)
    with pytest.raises(ZeroDivisionError):
        backward(loss.backward)


def test_any_thread_may_run_any_part() -> None:
    """All models with fresh threads, and each other kind of threads with one of them; at night all with all."""
    pairs = [(name, where) for name in MODELS for where in THREADS]
    dealt = {*zip(MODELS, THREADS, strict=True)}
    pairs = [pair for pair in pairs if NIGHTLY or pair[1] == "fresh ones" or pair in dealt]
    run_checks(2, [(f"{name}, {where} elsewhere", partial(check, name, THREADS[where])) for name, where in pairs])


def test_the_step_of_an_optimizer_in_backward() -> None:
    """It runs on the thread that backward runs on; what is left of it is there for the next forward on another."""

    def body(threads: tuple[Run, Run, Run]) -> None:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model: Any = copy.deepcopy(plain)
        for layer in (model[0], model[2]):
            fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
        model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(STEPS):
            batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
            plain(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = threads[0](lambda batch=batch: model(own_part(batch)).square().mean())
            threads[1](loss.backward)
        for (key, expected), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
            same(full(parameter), expected, name=key)

    run_checks(2, [(where, partial(body, threads)) for where, threads in THREADS.items()])
