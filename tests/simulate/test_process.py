"""Tests that each simulated rank has its own state of the process, and that the caller's is unchanged afterwards."""

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import checkpoint, fully_shard, testing
from fsdp2.simulate.memory import PeakMemory
from fsdp2.simulate.turns import this_rank


def others_run() -> None:
    """Has all ranks come here before one goes on."""
    dist.barrier()


def test_results_and_environment() -> None:
    def run(rank: int) -> tuple[str, ...]:
        others_run()
        assert dist.get_rank() == rank
        assert dist.get_backend() == "gloo"
        assert dist.is_torchelastic_launched()
        return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))

    assert testing.run(run, 3) == [(str(rank), str(rank), "3", "3") for rank in range(3)]
    assert "RANK" not in os.environ


def generators() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


def test_generators_of_random_numbers() -> None:
    """Seeded alike, ranks draw alike, whatever the others draw meanwhile. The caller's go on as without ranks."""

    def run(rank: int) -> list[float]:
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        for _ in range(rank):
            generators()
        others_run()
        return generators()

    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    first = testing.run(run, 3)
    assert [generators() for _ in range(3)] == first
    unseeded = testing.run(lambda _: generators(), 2)
    assert unseeded[0][0] == unseeded[1][0], "torch seeds each process alike"
    assert unseeded[0][1:] != unseeded[1][1:]


def test_what_a_rank_changes_of_the_process(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        folder = tmp_path / str(rank)
        folder.mkdir()
        os.chdir(folder)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        os.environ["OWN"] = str(rank)
        sys.argv.append(str(rank))
        logging.root.addHandler(logging.NullHandler())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            others_run()
            warnings.warn(f"rank {rank}", stacklevel=1)
            others_run()
        assert [str(each.message) for each in caught] == [f"rank {rank}"]
        assert Path.cwd() == folder
        assert torch.get_default_dtype() == (torch.float64 if rank else torch.float32)
        assert os.environ["OWN"] == str(rank)
        assert sys.argv[len(before) :] == [str(rank)]
        assert len(logging.root.handlers) == num_handlers + 1

    before, num_handlers, folder, dtype = [*sys.argv], len(logging.root.handlers), Path.cwd(), torch.get_default_dtype()
    testing.run(run, 3)
    assert (sys.argv, len(logging.root.handlers), Path.cwd()) == (before, num_handlers, folder)
    assert torch.get_default_dtype() == dtype
    assert "OWN" not in os.environ


def test_what_of_torch_is_replaced_meanwhile() -> None:
    names = [
        *((dist.distributed_c10d, name) for name in ("ProcessGroupGloo", "rendezvous", "_world")),
        *((dist, "TCPStore"), (time, "sleep"), (signal, "signal"), (sys, "stdout"), (sys, "stderr")),
    ]
    before = [getattr(*name) for name in names]
    other: list[Any] = []

    def run(_: int) -> None:
        other.append([getattr(*name) for name in names])
        raise KeyError("it ends early")

    with pytest.raises(KeyError):
        testing.run(run, 2)
    assert all(now is not then for now, then in zip(other[0], before, strict=True))
    assert all(getattr(*name) is then for name, then in zip(names, before, strict=True))
    assert not hasattr(DeviceMesh, "_thread_id")
    assert not dist.is_initialized()


def test_meshes_of_ranks_differ() -> None:
    """DTensor remembers its plans by mesh, with the coordinates of one rank."""
    meshes: list[DeviceMesh] = []

    def run(rank: int) -> None:
        meshes.append(mesh := init_device_mesh("cpu", (3,)))
        assert mesh == init_device_mesh("cpu", (3,))
        uneven = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        assert uneven.to_local().tolist() == [[0, 1, 2], [3, 4, 5], [6]][rank]
        assert isinstance(uneven, DTensor)
        assert (uneven + uneven).full_tensor().tolist() == [2.0 * each for each in range(7)]
        others_run()

    testing.run(run, 3)
    assert len({*meshes}) == 3


def test_sleep_lets_others_run(tmp_path: Path) -> None:
    """A rank polls for a file of another one, without a collective."""

    def run(rank: int) -> float:
        start = time.monotonic()
        if rank == 0:
            while not (tmp_path / "file").exists():
                time.sleep(0.01)
        else:
            time.sleep(0.05)
            (tmp_path / "file").touch()
        return time.monotonic() - start

    assert min(testing.run(run, 2)) >= 0.05


def test_a_loop_that_asks_for_the_end_lets_others_run() -> None:
    def run(rank: int) -> int:
        tensor = torch.full((2,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        count = 0
        while not work.is_completed():
            count += 1
        assert tensor.tolist() == [3.0, 3.0]
        return count

    assert max(testing.run(run, 3)) < 5


def test_a_signal_reaches_all_ranks() -> None:
    def run(rank: int) -> list[int]:
        got: list[int] = []
        before = signal.signal(signal.SIGUSR2, lambda number, _: got.append(number))
        assert before == usual
        while not dist.is_initialized() or not is_set():
            time.sleep(0.01)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        while not got:
            time.sleep(0.01)
        return got

    def is_set() -> bool:
        return signal.getsignal(signal.SIGUSR2) != usual

    usual = signal.getsignal(signal.SIGUSR2)
    assert testing.run(run, 2) == [[signal.SIGUSR2]] * 2
    assert signal.getsignal(signal.SIGUSR2) == usual


def test_a_thread_that_communicates_is_refused() -> None:
    def run(rank: int) -> str:
        errors: list[str] = []

        def reduce() -> None:
            try:
                dist.all_reduce(torch.ones(1), group=world)
            except NotImplementedError as error:
                errors.append(str(error))

        world = dist.group.WORLD
        thread = threading.Thread(target=reduce, name=f"saver of {rank}")
        thread.start()
        thread.join()
        return errors[0]

    for rank, text in enumerate(testing.run(run, 2)):
        assert f"all_reduce is called by the thread saver of {rank}, which is no rank" in text
        assert "torchrun" in text


def test_one_after_the_other_and_inside() -> None:
    assert testing.run(lambda rank: rank, 1) == [0]
    with pytest.raises(ValueError, match="expected one rank or more, got 0"):
        testing.run(lambda rank: rank, 0)
    with pytest.raises(RuntimeError, match="got one by a simulated rank"):
        testing.run(lambda _: testing.run(lambda rank: rank, 2), 2)
    with pytest.raises(ValueError, match="expected rank 0 of 2, as simulated, got rank 0 of 3") as raised:
        testing.run(lambda _: (dist.destroy_process_group(), dist.init_process_group(rank=0, world_size=3)), 2)
    assert "Rank 0 has raised it. Where the ranks were:" in raised.value.__notes__[0]


def test_groups_end_and_begin_again() -> None:
    def run(_: int) -> float:
        total = 0.0
        for _ in range(3):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            total += tensor.item()
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method="env://")
        return total

    assert testing.run(run, 2) == [6.0, 6.0]


def test_the_first_error_stops_the_others() -> None:
    ended: list[int] = []

    def run(rank: int) -> None:
        try:
            others_run()
            if rank == 1:
                raise KeyError("the first")
            others_run()
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match="the first") as raised:
        testing.run(run, 3)
    assert sorted(ended) == [0, 1, 2]
    assert "rank 1: failed with KeyError: 'the first'" in raised.value.__notes__[0]


def test_saves_of_ranks(tmp_path: Path) -> None:
    """Each rank keeps what its saves share, although it does not know the process groups of the others."""

    def run(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 5))
        for name in ("first", "second"):
            with torch.no_grad():
                model.weight.to_local().fill_(rank + len(name))  # type: ignore[union-attr,operator]
            checkpoint.save(tmp_path / name, model, None)
        checkpoint.load(tmp_path / "first", model, None)
        return model.weight.to_local().flatten().tolist()  # type: ignore[union-attr,operator,no-any-return]

    assert testing.run(run, 2) == [[5.0] * 9, [6.0] * 6]


def test_many_ranks_take_part() -> None:
    def run(rank: int) -> float:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(64, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 64), rank / 64)).sum().backward()
        optimizer.step()
        return model.weight.full_tensor().sum().item()  # type: ignore[no-any-return,operator]

    found = testing.run(run, 64)
    torch.manual_seed(0)
    plain = nn.Linear(64, 3)
    sum(plain(torch.full((1, 64), rank / 64)).sum() / 64 for rank in range(64)).backward()  # type: ignore[union-attr]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert found == pytest.approx([plain.weight.sum().item()] * 64, abs=1e-4)


def test_peaks_are_those_of_each_rank() -> None:
    def run(rank: int) -> int:
        with PeakMemory(this_rank("this test")) as memory:
            tensors = [torch.zeros(1000 * (rank + 1), dtype=torch.uint8) for _ in range(3)]
            tensors[0].untyped_storage().resize_(0)  # as FSDP frees unsharded parameters
            others_run()
            dist.all_reduce(tensors[1][:10])
            tensors.append(torch.zeros(500, dtype=torch.uint8))
            del tensors
            torch.ones(10)
        return memory.peak

    assert testing.run(run, 2) == [3000, 6000]
