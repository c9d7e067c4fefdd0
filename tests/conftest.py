"""Gives each test one thread and one seed, and ensures that no process group outlives its test."""

import gc
import importlib
import os
import shlex
from collections.abc import Callable, Generator, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard, set_checks

# Before anything runs: once OpenMP has started its threads in the parent, a forked rank hangs in its first kernel.
torch.set_num_threads(1)

# Where there is no such device, each would note its caller's stack for the day that there is: a millisecond of a seed.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        kind.manual_seed_all = lambda seed: None


_REPLACED: list[Callable[..., object]] = []
"""What runs backwards, while `_no_backward_before_forks` has something else in its place."""


def _restore() -> None:
    """Gives a forked rank back what it shall run, and what dynamo knows."""
    for run_backward in _REPLACED:
        torch.autograd._engine_run_backward = run_backward


os.register_at_fork(after_in_child=_restore)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    """Fails a test that leaves a process group behind, which would break the fork of every later `run_ranks`."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this test left its default process group initialised")


@pytest.fixture(autouse=True)
def _no_backward_before_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that runs a backward in the process from which later tests fork their ranks.

    A CUDA build of torch, and the fake device, start autograd's threads then. They do not survive a fork, and autograd
    refuses to run in each later rank. A CPU build has no such threads, and would let the test pass.
    """
    if not _forks(request.node):
        yield
        return
    _REPLACED[:] = [torch.autograd._engine_run_backward]
    with mock.patch.object(torch.autograd, "_engine_run_backward", side_effect=_REPLACED[0]) as run_backward:
        yield
    _REPLACED.clear()
    if run_backward.called:
        pytest.fail(
            "this test ran a backward in the process that forks the ranks of later tests, in which autograd then"
            " refuses to run on a device: run it by run_ranks, by alone, or under @in_a_fork (helpers.py)"
        )


_NUMERIC = (
    *("hsdp", "shards_at_rest", "offload", "replicate", "compressed", "gather_codec", "clip"),
    *("tied", "full_tensor"),
)
_WITHOUT_CHECKS = frozenset(f"test_{each}.py" for each in _NUMERIC)
"""Files whose models train a step or two, in which all checks are due, and are not what is tested. Each takes more."""


@pytest.fixture(autouse=True)
def _checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks that such a file forks run no checks; elsewhere they do, and tests/training.py draws them."""
    if request.path.name not in _WITHOUT_CHECKS:
        yield
        return
    set_checks("off")
    yield
    set_checks("default")


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    """Imports 300 modules by the first DeviceMesh, and as many by the first optimizer: once here, not in every forked
    rank. On the CPU, also where there is a GPU: a process forked from one that has used CUDA can't use it.
    """
    from helpers import fake_world

    with fake_world(1):
        model = fully_shard(torch.nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
        with torch.no_grad():
            model(torch.ones(1))
        if (
            torch.version.cuda is not None
        ):  # 2.11 built for CUDA: a forked process that had it crashes in its second thread
            return
        importlib.import_module("torch._dynamo")
        model.reshard()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            optimizer(model.parameters()).step()


@pytest.fixture(autouse=True, scope="module")
def _few_objects(request: pytest.FixtureRequest) -> None:
    """All that torch consists of stays out of the garbage collections, which take a fifth of a second with it."""
    if not _forks(request.node):  # `run_ranks` does it for its ranks
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests that fork first, before those that run a backward in this process."""
    items.sort(key=lambda item: not _forks(item))


def _forks(item: pytest.Item) -> bool:
    names = ("test_benchmark_libraries.py", "test_hidden_names.py", "test_command.py")
    return bool({"ranks", "clients", "fake_gpu"} & set(item.path.parts)) or item.path.name in names


_KINDS = {
    "test_situations.py": "a program of tests/situations/ or tests/advised/",
    "test_training.py": "a draw of tests/training.py",
    "test_random_models.py": "a random model of tests/random_models.py",
    "test_random_calls.py": "a random program of tests/random_calls.py",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Says behind a failure where its program is written, and by which command it runs alone."""
    report = yield
    if report.failed:
        kind = _KINDS.get(item.path.name, f"a test of {item.nodeid.partition('::')[0]}")
        report.sections.append(
            ("to run it alone", f"{kind}:\n    OMP_NUM_THREADS=1 python -m pytest -n0 {shlex.quote(item.nodeid)}")
        )
    return report


class _Progress:
    """Flushes what the reporter has written after each test: else Python keeps 8 KB of dots back from a pipe."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self) -> None:
        self._reporter.flush()


def pytest_sessionstart(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:  # none in a worker of xdist
        session.config.pluginmanager.register(_Progress(reporter))
