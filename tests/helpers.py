"""Helpers of the tests: forked gloo ranks, a fake world, and comparisons that say what differs.

`run_ranks` forks, so that a rank starts in milliseconds with torch already imported, and `fn` may be a closure over
any objects of the test. The parent must therefore never own a process group or a CUDA context at that moment.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import io
import os
import re
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

import fake_gpu
from fsdp2 import fully_shard, set_checks  # imported before the fork, so that no rank pays for it
from fsdp2.engine import events
from fsdp2.features import even_batches
from fsdp2.module import sharded_class
from hostile import hostile

NIGHTLY = bool(os.environ.get("FSDP2_NIGHTLY"))
"""Run many more of what is drawn at random, for longer, and on numbers of ranks that say little more than others."""
GRACE_S = 1.0
"""After one rank failed, how long the others may take to report their own errors before they are killed."""

_FRAMES_OF_PYTEST = re.compile(r"\n.* in _run_in_group\n(  File .*\n)*")
WHERE_ARE_YOU = signal.SIGUSR1


def world_sizes(*sizes: int, nightly: Sequence[int] = ()) -> list[int]:
    """Returns the numbers of ranks that a test runs on: `sizes`, and in the nightly run `nightly`, too."""
    return sorted({*sizes, *nightly}) if NIGHTLY else list(sizes)


class RankError(RuntimeError):
    """Is raised if ranks failed, died or did not return; the message carries their tracebacks."""


@dataclasses.dataclass
class _Rank:
    """Holds one forked process, seen from the parent."""

    rank: int
    pid: int
    report_fd: int
    log: Path
    report: bytearray = dataclasses.field(default_factory=bytearray)
    done: bool = False

    def outcome(self) -> tuple[bool, Any]:
        """Returns (True, the result), or (False, what went wrong)."""
        if not self.done:
            return False, "did not return; it stood at"
        if not self.report:
            return False, "died without a report"
        return torch.load(io.BytesIO(self.report), weights_only=False)

    def problem(self) -> str:
        """Returns the section about this rank in an error message: its traceback, or where its threads were."""
        _, text = self.outcome()
        log = "" if self.done and self.report else _FRAMES_OF_PYTEST.sub("\n", self.log.read_text())
        return f"--- rank {self.rank} ---\n{text}\n{log}"


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, device: str = "cpu"
) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on `world_size` forked gloo ranks; returns the results in rank order.

    `device`: "cpu", or `fake_gpu.KIND`, which the ranks then have; the test is skipped where that can't be compiled.

    `fn` may be a local function. A result must be picklable, its tensors plain (not DTensors); they come back detached.
    Every rank starts with the parent's random state. Raises RankError with the full traceback of each rank that
    failed, or, after `timeout` seconds, with the names of the ranks that did not return and where they were.
    """
    if device != "cpu":
        fake_gpu.built()
    if dist.is_initialized():
        raise RuntimeError("run_ranks: the parent owns a process group, which a forked rank would inherit")
    # The parent's objects stay out of the ranks' garbage collections, each of which would copy all of its memory.
    gc.freeze()
    ranks: list[_Rank] = []
    release_read, release_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="fsdp2_ranks_") as name:
        folder = Path(name)
        try:
            for rank in range(world_size):
                body = functools.partial(_run_in_group, rank, world_size, fn, args, folder, device)
                ranks.append(_fork(rank, body, folder, (release_read, release_write), timeout))
            _collect(ranks, time.monotonic() + timeout)
            _raise_problems(ranks, timeout)
            return [r.outcome()[1] for r in ranks]
        finally:
            gc.unfreeze()
            os.close(release_write)  # the ranks wait for this before they leave: nobody hangs up on a slower one
            os.close(release_read)
            _reap(ranks)


@functools.cache
def one_mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Returns a mesh of this launch, always the same: each process group has a thread, which wakes a hundred times a
    second until the launch ends, and takes a connection between each two ranks.
    """
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def end_of_part() -> None:
    """Ends one of the parts of a launch: ranks wait for each other, so that one that fails disturbs no other part.

    Its models go: cycles hold them, and each optimizer's first step looks at all that are alive.
    """
    gc.collect(1)
    dist.barrier()


def alone(fn: Callable[[], Any]) -> Any:
    """Returns `fn()`, run in its own forked process.

    It is for plain training that ranks are compared with: once a backward has run in this process, autograd refuses to
    run in processes forked from it (in builds of torch that support CUDA).
    """
    return run_ranks(1, lambda rank, world_size: fn())[0]


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Decorator: runs a test that needs a backward under `fake_world` in a process of its own, see `alone`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        def body(rank: int, _: int) -> None:
            dist.destroy_process_group()
            test(*args, **kwargs)

        run_ranks(1, body)

    return run


def run_checks(
    world_size: int, checks: Sequence[tuple[str, Callable[[], None]]], timeout: float = 150, device: str = "cpu"
) -> None:
    """Runs named checks one after the other on forked ranks, in one launch; fails with the name of each that raises.

    The ranks wait for each other after each check, so that one that fails on some ranks only does not disturb the next.
    """

    def body(rank: int, _: int) -> list[str]:
        failed = []
        for name, check in checks:
            print(f"rank {rank}: {name}", file=sys.stderr, flush=True)  # for the report of a hang
            torch.manual_seed(0)
            try:
                check()
            except (Exception, pytest.fail.Exception) as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
                print(f"rank {rank}: {failed[-1]}", file=sys.stderr, flush=True)  # others may wait for this rank
            end_of_part()
        return failed

    failed = run_ranks(world_size, body, timeout=timeout, device=device)
    if any(failed):
        pytest.fail("\n".join(f"rank {r}: {text}" for r, texts in enumerate(failed) for text in texts), pytrace=False)


def _fork(rank: int, body: Callable[[], Any], folder: Path, release: tuple[int, int], timeout: float) -> _Rank:
    report_read, report_write = os.pipe()
    log = folder / f"rank{rank}.log"
    log.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(report_write)
        return _Rank(rank, pid, report_read, log)
    try:
        os.close(release[1])
        _arm_watchdogs(log, timeout)
        with os.fdopen(report_write, "wb") as report_file:
            report_file.write(_report(body))
        os.read(release[0], 1)
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        os._exit(0)  # never back into the parent's test session, whatever happened


def _arm_watchdogs(log: Path, timeout: float) -> None:
    """Makes a rank log its tracebacks at a crash or when the parent asks, and die if the parent died.

    The parent asks by a signal: `faulthandler.dump_traceback_later` deadlocks in a fork of a process that armed it too.
    """
    log_fd = os.open(log, os.O_WRONLY)  # open until the process ends
    faulthandler.enable(file=log_fd)
    faulthandler.register(WHERE_ARE_YOU, file=log_fd)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(timeout) + 10)


def _report(body: Callable[[], Any]) -> bytes:
    """Runs the body of a rank; returns the pickled (True, result) or (False, traceback)."""
    try:
        return _dumps((True, _portable(body())))
    except BaseException:  # pytest's skip and fail, and SystemExit, are failures of a rank like any other
        return _dumps((False, traceback.format_exc()))


def _run_in_group(rank: int, world_size: int, fn: Callable[..., Any], args: tuple, folder: Path, device: str) -> Any:
    torch.set_num_threads(1)
    one_mesh.cache_clear()
    gc.set_threshold(10_000)  # a rank is short-lived: collections at the usual rate take a tenth of its time
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    store = dist.FileStore(str(folder / "store"), world_size)
    if device == "cpu":
        backends = "gloo"
    else:
        fake_gpu.install(device=1)
        backends = f"cpu:gloo,{device}:{fake_gpu.BACKEND}"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size)
    with hostile(seed=rank) if os.environ.get("FSDP2_HOSTILE") else contextlib.nullcontext():
        return fn(rank, world_size, *args)


def _portable(result: Any) -> Any:
    def detach(t: Tensor) -> Tensor:
        if isinstance(t, DTensor):
            raise TypeError("a rank returned a DTensor: return full(tensor) or tensor.to_local()")
        return t.detach().cpu()

    return tree_map_only(Tensor, detach, result)


def _dumps(report: tuple[bool, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(report, buffer)
    return buffer.getvalue()


def _collect(ranks: Sequence[_Rank], deadline: float) -> None:
    """Reads the reports until all are in, or the deadline has passed; a failure shortens it to GRACE_S from then."""
    with selectors.DefaultSelector() as selector:
        for r in ranks:
            selector.register(r.report_fd, selectors.EVENT_READ, r)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 1 << 20)
                key.data.report += chunk
                if not chunk:
                    key.data.done = True
                    selector.unregister(key.fd)
                    if not key.data.outcome()[0]:
                        deadline = min(deadline, time.monotonic() + GRACE_S)


def _raise_problems(ranks: Sequence[_Rank], timeout: float) -> None:
    failed = [r for r in ranks if r.done and not r.outcome()[0]]
    missing = [r for r in ranks if not r.done]
    for r in missing:
        os.kill(r.pid, WHERE_ARE_YOU)
    time.sleep(0.2 if missing else 0.0)  # for their answers, in their logs
    if failed:
        names = ", ".join(str(r.rank) for r in failed)
        waiting = f" (still running then: rank {', '.join(str(r.rank) for r in missing)})" if missing else ""
        text = "\n".join(r.problem() for r in failed + missing)
        raise RankError(f"rank {names} of {len(ranks)} failed{waiting}\n{text}")
    if missing:
        names = ", ".join(str(r.rank) for r in missing)
        text = "\n".join(r.problem() for r in missing)
        raise RankError(f"timeout: rank {names} of {len(ranks)} did not return within {timeout:g} s\n{text}")


def _reap(ranks: Sequence[_Rank]) -> None:
    """Waits a moment for the ranks to end by themselves, then kills the rest. No process outlives the call."""
    deadline = time.monotonic() + (5.0 if all(r.done and r.outcome()[0] for r in ranks) else 0.0)
    for r in ranks:
        os.close(r.report_fd)
        while not (gone := os.waitpid(r.pid, os.WNOHANG)[0]) and time.monotonic() < deadline:
            time.sleep(0.002)
        if not gone:
            os.kill(r.pid, signal.SIGKILL)
            os.waitpid(r.pid, 0)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Switches checks off: what follows is refused by default."""
    set_checks("off")
    try:
        yield
    finally:
        set_checks("default")


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Context: a default process group of any size in this process; collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def extensions_restored() -> Iterator[None]:
    """Context: what is added to the engine inside (`extend`) is removed afterwards."""
    before = events._Current.extensions
    try:
        yield
    finally:
        events._Current.extensions = before


def public_methods() -> frozenset[str]:
    """Returns the names of the attributes that a sharded module has and a plain module lacks, but for those which
    torch's Join calls.
    """
    added = {
        name for name in dir(sharded_class(nn.Module)) if not name.startswith("_") and not hasattr(nn.Module, name)
    }
    return frozenset(added - {*even_batches.class_attributes(nn.Module)})


def full(tensor: Tensor) -> Tensor:
    """Returns the full value of a parameter or gradient, detached. Every rank must call it if `tensor` is a DTensor."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def shard_batch(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns this rank's equal slice of a batch along dim 0: the mean of the ranks' mean losses is the
    batch's mean.
    """
    if batch.shape[0] % world_size:
        raise ValueError(f"a batch of {batch.shape[0]} does not split evenly over {world_size} ranks")
    return batch.chunk(world_size)[rank]


@torch.no_grad()
def assert_same(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float, name: str) -> None:
    """Asserts equal None-ness, dtype, shape and values (NaN equals NaN); with rtol = atol = 0, every value is equal.

    For a DTensor that is sharded and replicated, each rank compares its local tensor with its shard of a plain tensor,
    and nothing is communicated.
    """
    if actual is None or expected is None:
        if (actual is None) != (expected is None):
            raise AssertionError(f"{name}: expected {_describe(expected)}, got {_describe(actual)}")
        return
    if not isinstance(expected, DTensor) and is_plainly_cut(actual) and actual.shape == expected.shape:
        expected, actual = own_part(expected, actual), actual.to_local()  # type: ignore[arg-type, union-attr]
    actual, expected = full(actual).cpu(), full(expected).cpu()
    # What assert_close finds out in ten times the time.
    if (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and (
            torch.equal(actual, expected)
            or (actual.is_floating_point() and torch.allclose(actual, expected, rtol, atol, equal_nan=True))
        )
    ):
        return
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{name} ({_describe(actual)}): {text}"
    )


def assert_same_names(actual: Iterable[str], expected: Iterable[str]) -> None:
    """Asserts the same parameter names in the same order, on which optimizers' state and checkpoints depend."""
    actual, expected = list(actual), list(expected)
    if actual != expected:
        raise AssertionError(f"parameter names: expected {expected}, got {actual}")


def _describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def is_plainly_cut(tensor: Tensor) -> bool:
    """Returns True for a DTensor on a mesh with this rank, without partial sums, and cut as `Tensor.chunk` cuts."""
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.get_coordinate() is not None
        and all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
    )


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's shard of `whole` if it is sharded like `like`."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            whole = chunk_of(whole, placement.dim, coordinate[axis], like.device_mesh.size(axis))
    return whole


def chunk_of(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Returns the shard of `whole` that `rank` of `size` holds, as torch.chunk cuts it; the last shards may
    be empty.
    """
    chunks = whole.chunk(size, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def own_rows(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Returns the rows of `whole` that `rank` holds under Shard(0), as torch.chunk cuts them; the last shards may be
    empty.
    """
    return chunk_of(whole, 0, rank, world_size)


@torch.no_grad()
def assert_shard_of(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float, name: str) -> None:
    """Asserts that `actual` is a DTensor, Shard(0) over the last axis of its mesh and replicated over others, and this
    rank's shard of `expected`. It does not communicate.
    """
    if actual is None or expected is None:
        return assert_same(actual, expected, rtol, atol, name)
    placements = actual.placements if isinstance(actual, DTensor) else ()
    kinds = [*map(type, placements)]
    is_cut = kinds == [Replicate] * (len(kinds) - 1) + [Shard] and placements[-1].dim == 0
    if not is_cut or actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: expected (Shard(0),) of {_describe(expected)}, got {placements} of {_describe(actual)}"
        )
    assert_same(actual, expected, rtol, atol, f"{name} on rank {dist.get_rank()}")


class Differences:
    """Collects differences: a rank that raised early would leave the others waiting."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self.found.append(str(error))

    def raise_first(self) -> None:
        assert not self.found, self.found[0]


def sharded(whole: Tensor, mesh: Any, placements: Any = None, **options: Any) -> Any:
    """Returns `whole` distributed like a sharded parameter: of the class that has the fixes."""
    from fsdp2.dtensor.sharded_dtensor import as_sharded

    return as_sharded(distribute_tensor(whole, mesh, placements, **options))


def leaves(model: nn.Module, **options: Any) -> None:
    """Makes a group of every module with parameters of its own, and of the root."""
    for module in reversed(list(model.modules())):
        if module is model or module._parameters:
            fully_shard(module, **options)


def shard_blocks(model: Any, apply: Any = fully_shard, **options: Any) -> Any:
    """Applies `apply` to the blocks of a model of models.py, or to its first two children, and to the model."""
    for block in getattr(model, "blocks", [*model.children()][:2]):
        apply(block, **options)
    return apply(model, **options)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def raises_in_backward(x: Tensor, error: BaseException) -> Tensor:
    """Returns a copy of `x`; a backward that reaches it raises `error`."""
    copied: Tensor = _Raises.apply(x, error)  # type: ignore[no-untyped-call]
    return copied
