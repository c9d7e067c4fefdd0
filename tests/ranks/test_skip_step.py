"""Tests `skip_step_on_error`: one rank raises, at any point of a step, all ranks skip it, and the next step is
exact.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fake_gpu
import fsdp2
from fsdp2 import fully_shard, replicate
from helpers import NIGHTLY, assert_same, run_checks, run_ranks, shard_batch, world_sizes
from hostile import hostile

WIDTH, ROWS = 5, 12


class BadSample(Exception):
    pass


class Block(nn.Module):
    """Calls `at` wherever the code of a program runs: `at(name of the place)` may raise."""

    at: Any = staticmethod(lambda place: None)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Block.at("forward")
        x = x + self.down(torch.tanh(self.up(x)))
        if x.requires_grad:
            x.register_hook(lambda _: Block.at("gradient"))
        return x


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        Block.at("root's forward")
        self.calls += 1
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        Block.at("behind the blocks")
        self.norm(x.detach())  # its statistics alone: its normalisation is each rank's own
        return self.head(x)


def build(shard: Callable[[Any], Any] | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Returns a sharded model, a plain one, and their optimizers."""
    torch.manual_seed(0)
    plain = Net(**options).double()
    model: Any = copy.deepcopy(plain)
    (shard or shard_all)(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: Block.at("accumulated"))
    return model, plain, *(torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))


def shard_all(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def own(step: int, device: str = "cpu") -> Tensor:
    return shard_batch(batch(step), dist.get_rank(), dist.get_world_size()).to(device)


class Fault:
    """Raises `error` at the place number `number` of a step, on one rank."""

    def __init__(self, rank: int, number: int, error: BaseException) -> None:
        self.is_armed, self.number, self.error, self.count = dist.get_rank() == rank, number, error, 0

    def __call__(self, place: str) -> None:
        self.count += 1
        if self.is_armed and self.count - 1 == self.number:
            raise self.error

    @contextmanager
    def armed(self) -> Iterator[None]:
        Block.at = self
        try:
            yield
        finally:
            Block.at = staticmethod(lambda place: None)


def step(model: Any, optimizer: Any, x: Tensor, skippable: bool = True, **options: Any) -> Any:
    """Returns the block of the step, which was taken unless it was skipped."""
    with fsdp2.skip_step_on_error(model, **options) if skippable else nullcontext() as attempt:
        Block.at("before forward")
        loss = model(x).square().mean()
        Block.at("loss")
        loss.backward()
        Block.at("behind backward")
    if attempt is None or not attempt.skipped:
        optimizer.step()
        optimizer.zero_grad()
    return attempt


def assert_alike(model: Any, plain: Any) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_same(param, other[1], 1e-12, 1e-12, name)
        assert param.grad is None
    assert model.calls.item() == plain.calls.item()
    assert_same(model.norm.running_mean, plain.norm.running_mean, 1e-12, 1e-12, "running_mean")
    assert model.norm.num_batches_tracked.item() == plain.norm.num_batches_tracked.item()


def at_each_place(
    shard: Callable[[Any], Any] | None = None, device: str = "cpu", third: int | None = None, **options: Any
) -> int:
    """Fails at each place, on the first and on the last rank in turn; a step that is taken follows each.

    `third`: by day only at each third place, beginning with this one: all are tried on two ranks.
    """
    model, plain, optimizer, of_plain = build(shard, **options)
    seeds = itertools.count()
    for number in itertools.count() if third is None or NIGHTLY else itertools.count(third, 3):
        rank = 0 if number % 2 else dist.get_world_size() - 1
        fault = Fault(rank, number, BadSample(f"number {number}"))
        with fault.armed():
            attempt = step(model, optimizer, own(seed := next(seeds), device), catch=BadSample)
        if not attempt.skipped:
            assert attempt.reasons == {}
            step(plain, of_plain, batch(seed), skippable=False)
            assert_alike(model, plain)
            return number
        assert attempt.reasons == {rank: f"BadSample: number {number}"}
        assert_alike(model, plain)
        taken = step(model, optimizer, own(seed := next(seeds), device), catch=BadSample)
        assert not taken.skipped
        step(plain, of_plain, batch(seed), skippable=False)
        assert_alike(model, plain)
    raise AssertionError


WAYS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "blocks": (shard_all, {}),
    "kept": (lambda model: shard_all(model, reshard_after_forward=False), {}),
    "checkpointed": (shard_all, {"checkpoints": True}),
    "replicas": (replicate, {}),
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3, 4)))
def test_a_rank_fails_at_each_place(world_size: int) -> None:
    def body(rank: int, _: int) -> list[int]:
        chosen = [*WAYS.values()][: None if world_size == 2 or NIGHTLY else 1]
        thirds = [None if world_size == 2 else 2, 0, 1, 2]
        return [
            at_each_place(shard, third=third, **options)
            for third, (shard, options) in zip(thirds, chosen, strict=False)
        ]

    for counts in run_ranks(world_size, body, timeout=150):
        assert all(count > 20 for count in counts), counts


def test_on_replicas_of_shards() -> None:
    def body(rank: int, _: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return [at_each_place(lambda model: shard_all(model, mesh=mesh), third=1)]

    run_ranks(4, body, timeout=150)


def test_on_a_device() -> None:
    """Ranks compare by gloo on the CPU before each collective of the device."""

    def body(rank: int, _: int) -> int:
        def shard(model: Any) -> None:
            shard_all(model, mesh=init_device_mesh(fake_gpu.KIND, (2,)))

        return at_each_place(shard, fake_gpu.KIND, third=0)

    run_ranks(2, body, timeout=150, device=fake_gpu.KIND)


# ---- what else may happen in a block ---------------------------------------------------------------------------------


def another_error_reaches_all_ranks() -> None:
    """Not of the kinds: on its rank the error, on others one that names the rank. Then the next step is exact."""
    model, plain, optimizer, of_plain = build()
    for number in (0, 3, 9):
        expected = "KeyError: 'mine'" if dist.get_rank() else r"rank 1: KeyError: 'mine'"
        with Fault(1, number, KeyError("mine")).armed(), pytest.raises((KeyError, RuntimeError)) as caught:
            step(model, optimizer, own(0), catch=BadSample)
        text = f"{type(caught.value).__name__}: {caught.value}"
        assert expected in text
        assert isinstance(caught.value, KeyError) is (dist.get_rank() == 1)
    step(model, optimizer, own(1))
    step(plain, of_plain, batch(1), skippable=False)
    assert_alike(model, plain)


def all_ranks_fail() -> None:
    model, plain, optimizer, of_plain = build()
    for numbers in ((2, 2), (0, 7), (11, 4)):
        rank = dist.get_rank()
        with Fault(rank, numbers[rank], BadSample("here")).armed():
            attempt = step(model, optimizer, own(0), catch=(BadSample, ValueError))
        assert attempt.skipped
        assert attempt.reasons  # those who have raised before they knew of another
        assert {*attempt.reasons} <= {0, 1}
        step(model, optimizer, own(1))
        step(plain, of_plain, batch(1), skippable=False)
        assert_alike(model, plain)


def out_of_memory_is_the_default() -> None:
    model, _, optimizer, _ = build()
    with Fault(0, 5, torch.OutOfMemoryError("no memory")).armed():
        assert step(model, optimizer, own(0)).reasons == {0: "OutOfMemoryError: no memory"}
    with pytest.raises(TypeError, match="catch: expected a class of exceptions"):
        fsdp2.skip_step_on_error(model, catch="OutOfMemoryError")  # type: ignore[arg-type]


def out_of_step_is_no_reason() -> None:
    """Ranks that run different modules still raise: no rank has failed."""
    model, plain, optimizer, of_plain = build()

    def once_more_on_the_first() -> None:
        with fsdp2.skip_step_on_error(model):
            model(own(0)).sum().backward()
            if dist.get_rank() == 0:
                model(own(0))

    with pytest.raises(RuntimeError, match="ranks are out of step"):
        once_more_on_the_first()
    step(model, optimizer, own(1))
    step(plain, of_plain, batch(1), skippable=False)
    assert_alike(model, plain)


def micro_batches() -> None:
    """All of a step are in one block, also with accumulate; a failure in the second drops the first."""
    for accumulates in (False, True):
        model, plain, optimizer, of_plain = build()
        for number in (14, None):
            fault = Fault(1, -1 if number is None else number, BadSample("in the second"))
            with fault.armed(), fsdp2.skip_step_on_error(model, catch=BadSample) as attempt:
                if accumulates:
                    with fsdp2.accumulate(model) as acc:
                        for seed in (0, 1):
                            acc.backward(model(own(seed)).square().sum(), weight=3 * ROWS / 2)
                else:
                    for seed in (0, 1):
                        model.set_requires_gradient_sync(seed == 1)
                        (model(own(seed)).square().mean() / 2).backward()
            assert attempt.skipped is (number is not None)
            assert attempt.skipped is all(param.grad is None for param in model.parameters())
            model.set_requires_gradient_sync(True)
        optimizer.step()
        optimizer.zero_grad()
        for seed in (0, 1):
            (plain(batch(seed)).square().mean() / 2).backward()
        of_plain.step()
        of_plain.zero_grad()
        assert_alike(model, plain)


def what_is_refused() -> None:
    model, _, optimizer, _ = build()
    model(own(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"has a gradient\. Call optimizer\.zero_grad\(\) before the block"):
        step(model, optimizer, own(0))
    optimizer.zero_grad()

    def steps_inside() -> None:
        with fsdp2.skip_step_on_error(model):
            model(own(0)).sum().backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"AdamW\.step: it is inside of a block of skip_step_on_error"):
        steps_inside()
    attempt = step(model, optimizer, own(0))
    with pytest.raises(RuntimeError, match="a block is entered once"), attempt:
        pass
    with pytest.raises(RuntimeError, match="in another block of skip_step_on_error"), fsdp2.skip_step_on_error(model):
        step(model, optimizer, own(0))
    with pytest.raises(RuntimeError, match="known when the block"), fsdp2.skip_step_on_error(model) as attempt:
        assert not attempt.skipped
    with pytest.raises(RuntimeError, match="expected the root"):
        fsdp2.skip_step_on_error(model.blocks[0])
    model.set_optimizer_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="steps in backward"):
        step(model, optimizer, own(0))
    outer: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(outer[0], conditional=True)
    fully_shard(outer)
    with (
        pytest.raises(NotImplementedError, match=r'"0" is conditional.*leave conditional=True out'),
        fsdp2.skip_step_on_error(outer),
    ):
        pass


def test_blocks() -> None:
    checks = (
        another_error_reaches_all_ranks,
        all_ranks_fail,
        out_of_memory_is_the_default,
        out_of_step_is_no_reason,
        micro_batches,
        what_is_refused,
    )
    run_checks(2, [(each.__name__, each) for each in checks])


# ---- what the library itself does ------------------------------------------------------------------------------------


def at_each_event(shard: Callable[[Any], Any]) -> dict[str, int]:
    """Returns how often each kind of event has failed: to allocate, to issue a collective, to wait for one."""
    model, plain, optimizer, of_plain = build(shard)
    seeds, failed = itertools.count(), Counter[str]()
    for number in itertools.count():
        count, is_armed = itertools.count(), dist.get_rank() == dist.get_world_size() - 1

        def event(name: str, number: int = number, count: Any = count) -> None:
            if name != "free" and next(count) == number:
                failed[name] += 1
                raise torch.OutOfMemoryError(f"at {name}")

        with hostile(0, event) if is_armed else nullcontext():
            attempt = step(model, optimizer, own(seed := next(seeds)))
        if attempt.skipped:
            assert [*attempt.reasons] == [dist.get_world_size() - 1]
            assert_alike(model, plain)
            seed = next(seeds)
            assert not step(model, optimizer, own(seed)).skipped
        step(plain, of_plain, batch(seed), skippable=False)
        assert_alike(model, plain)
        if not attempt.skipped:
            return failed
    raise AssertionError


def test_the_library_fails_at_each_event() -> None:
    def body(rank: int, _: int) -> list[dict[str, int]]:
        return [at_each_event(shard) for shard in (shard_all, replicate)]

    *_, (sharded, replicated) = run_ranks(2, body, timeout=150)
    assert {"allocate", "issue all_gather", "wait all_gather", "issue reduce_scatter"} <= sharded.keys()
    assert "issue all_reduce" in replicated


def test_on_a_device_without_gloo(tmp_path: Path) -> None:
    """Ranks could not tell each other."""

    def body(rank: int, _: int) -> None:
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group(f"{fake_gpu.KIND}:{fake_gpu.BACKEND}", store=store, rank=rank, world_size=2)
        model: Any = nn.Linear(WIDTH, WIDTH)
        fully_shard(model, mesh=init_device_mesh(fake_gpu.KIND, (2,)))
        with pytest.raises(RuntimeError, match=r'Initialise it with both: init_process_group\("cpu:gloo,'):
            fsdp2.skip_step_on_error(model).__enter__()

    run_ranks(2, body, device=fake_gpu.KIND)
