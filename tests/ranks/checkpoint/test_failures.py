"""Tests that a save or load that fails does so on all ranks, names the file, and leaves earlier checkpoints whole."""

import contextlib
import functools
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import parts, saving, session
from fsdp2.checkpoint.layout import LAYOUT, METADATA, file_of
from helpers import full, run_checks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [full(p).detach() for p in model.parameters()]


def same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


def same_after_a_step(*made: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for each in made:
        train(*each)
    same(*(weights(model) for model, _ in made))


def refused(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """Every rank must raise, within seconds: none waits for another until the timeout."""
    began = time.monotonic()
    with pytest.raises(kind, match=text):
        call()
    assert time.monotonic() - began < 20


def failing(name: str, rank: int, error: Exception) -> Any:
    """Context: writing the file of that name fails on one rank."""
    function = session.write_file

    def write(path: Path, chunks: Any) -> int:
        if dist.get_rank() == rank and path.name == name:
            raise error
        return function(path, chunks)

    return mock.patch.object(session, "write_file", write)


def one_rank_fails(folder: Path, wait: bool) -> None:
    model, optimizer = make()
    train(model, optimizer)
    checkpoint.save(folder / "a", model, optimizer)
    before = weights(model)
    train(model, optimizer)
    space = OSError(28, "No space left on device", "the file")
    for rank, name in ((0, file_of(0)), (1, file_of(1)), (0, LAYOUT), (0, METADATA)):
        with failing(name, rank, space):
            call = lambda: checkpoint.save(folder / "b", model, optimizer, wait=wait).wait()  # noqa: E731
            refused(call, OSError, "No space left on device")
    assert sorted(each.name for each in folder.iterdir()) == [".fsdp2-lock", "a"]
    assert checkpoint.latest(folder) == folder / "a"
    other, states = make(1)
    checkpoint.load(folder / "a", other, states)
    same(weights(other), before)
    checkpoint.save(folder / "b", model, optimizer)  # and the next one works


def an_error_is_raised_by_the_next_save(folder: Path) -> None:
    model, optimizer = make()
    with failing(file_of(1), 1, OSError(28, "No space left on device", "the file")):
        running = checkpoint.save(folder / "a", model, optimizer, wait=False)
        refused(lambda: checkpoint.save(folder / "b", model, optimizer), OSError, "No space left")
        running = checkpoint.save(folder / "a", model, optimizer, wait=False)
        if dist.get_rank():  # one rank alone has seen the error
            refused(running.wait, OSError, "No space left")
        refused(lambda: checkpoint.save(folder / "b", model, optimizer), OSError, "No space left")
    assert running.done()
    assert "failed" in repr(running)
    checkpoint.save(folder / "b", model, optimizer)
    assert checkpoint.latest(folder) == folder / "b"


def ranks_that_differ(folder: Path) -> None:
    model, _ = make()
    rank = dist.get_rank()
    refused(lambda: checkpoint.save(folder / f"step-{rank}", model), ValueError, "save: expected the same folder")
    refused(lambda: checkpoint.save(folder / "a", model, keep_last=rank + 1), ValueError, "save: expected the same")
    refused(lambda: checkpoint.save(folder / "a", model if rank else 3), TypeError, "model: expected an nn.Module")  # type: ignore[arg-type]
    for name in ("a", "b"):
        checkpoint.save(folder / name, model)
    refused(
        lambda: checkpoint.load(folder / "ab"[rank], model), ValueError, "load: folder: expected the same on all ranks"
    )
    refused(
        lambda: checkpoint.load(folder / ("c" if rank else "a"), model), FileNotFoundError, r"c: expected the folder"
    )
    for name, value in {"weights": False, "strict": False, "trainable_only": True, "optimizer": []}.items():
        chosen: Any = {name: value} if rank else {}
        refused(
            lambda chosen=chosen: checkpoint.load(folder / "a", model, **chosen), ValueError, f"load: {name}: expec"
        )
    assert sorted(each.name for each in folder.iterdir()) == [".fsdp2-lock", "a", "b"]


def one_rank_fails_in_load(folder: Path) -> None:
    """Before it reads, while it reads, and when it hands out what it has read."""
    model, optimizer = make()
    train(model, optimizer)
    checkpoint.save(folder / "a", model, optimizer, extra={"x": 1})
    other, states = make(1)
    before, rank = weights(other), dist.get_rank()
    load: Any = functools.partial(checkpoint.load, folder / "a")
    refused(lambda: load(other if rank else 3, states), TypeError, "load: model: expected an nn.Module")
    group: Any = 3 if rank else None
    refused(lambda: load(other, process_group=group), TypeError, "load: process_group: expected a process group or")
    refused(lambda: checkpoint.save(folder / "a", model, process_group=group), TypeError, "save: process_group: expec")
    refused(lambda: load(other, states if rank else optimizer), ValueError, "optimizer: expected parameters of the mod")
    kept: Any = mock.Mock(spec=["state_dict", "load_state_dict"], state_dict=dict)
    for method in ("state_dict", "load_state_dict"):
        raising = mock.Mock(spec=["state_dict", "load_state_dict"], state_dict=dict)
        setattr(raising, method, mock.Mock(side_effect=ArithmeticError("no such state")))
        broken = {"x": raising if rank else kept}
        refused(lambda: load(other, states, extra=broken), Exception, "no such state")  # noqa: B023
        if method == "state_dict":
            same(weights(other), before)
    name = f"{saving.__package__}.stored.Checkpoint.read"
    with mock.patch(name, side_effect=OSError(5, "broken disk")) if rank else contextlib.nullcontext():
        refused(lambda: load(other, states), OSError, "broken disk")
    load(other, states)
    same(weights(other), weights(model))


def files_of_stages(folder: Path) -> None:
    """Files that one rank alone reads are checked before any rank writes to its weights."""
    rank = dist.get_rank()
    stage = nn.ModuleDict({str(rank): nn.Linear(2, 2)})
    checkpoint.save(folder / "a", stage)
    if not rank:
        os.truncate(folder / "a" / file_of(1), 600)
    dist.barrier()
    nn.init.zeros_(stage[str(rank)].weight)
    refused(lambda: checkpoint.load(folder / "a", stage), ValueError, r"__1_0\.distcp: .*truncated")
    assert not stage[str(rank)].weight.any()


def arguments(folder: Path) -> None:
    model, optimizer = make()
    save: Any = functools.partial(checkpoint.save, folder / "a", model)
    refused(lambda: checkpoint.save(3, model), TypeError, "folder: expected a path")  # type: ignore[arg-type]
    refused(lambda: save(model), TypeError, "save: optimizer: expected")
    refused(lambda: save([model]), TypeError, "save: optimizer: expected a torch.optim.Optimizer, several, or None")
    refused(lambda: save(optimizer, keep_last=0), ValueError, "keep_last: expected a number from 1 on")
    refused(lambda: save(optimizer, extra={"model": 1}), ValueError, "extra: expected names other than model")
    refused(lambda: save(optimizer, extra=[1]), TypeError, "extra: expected a dict")
    refused(lambda: save(optimizer, extra={"x": lambda: 3}), TypeError, "x: expected numbers, texts, tensors")
    refused(lambda: save(optimizer, extra={"x": {3: next(model.parameters())}}), NotImplementedError, "x: expected")
    refused(
        lambda: checkpoint.load(folder, model, extra={"x": 3}),
        TypeError,
        "extra: x: expected an object with",
    )
    (folder / "b").mkdir(exist_ok=True)
    (folder / "b" / f"notes-{dist.get_rank()}").touch()
    dist.barrier()
    refused(lambda: checkpoint.save(folder / "b", model), FileExistsError, "b: expected a checkpoint, an empty folder")
    dist.barrier()
    assert sorted(path.name for path in (folder / "b").iterdir()) == ["notes-0", "notes-1"]


class Wrapped(torch.optim.Optimizer):
    """Passes all on to an optimizer, and has no hooks, as accelerate's."""

    state, param_groups, defaults = (  # type: ignore[assignment]
        property(attrgetter(f"optimizer.{name}")) for name in ("state", "param_groups", "defaults")
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def a_step_waits(folder: Path, is_wrapped: bool) -> None:
    model, plain = make()
    optimizer = Wrapped(plain) if is_wrapped else plain
    train(model, plain)
    function = saving.Snapshot.finish

    def slow(snapshot: Any) -> None:
        time.sleep(0.5)
        function(snapshot)

    before = weights(model)
    with mock.patch.object(saving.Snapshot, "finish", slow):
        running = checkpoint.save(folder / "a", model, optimizer, wait=False)
        plain.register_step_pre_hook(lambda *_: None)
        train(model, optimizer)
        running.wait()
    assert 0.2 < running.step_waited_s < 5
    train(model, optimizer)
    assert running.step_waited_s < 5
    other, states = make(1)
    checkpoint.load(folder / "a", other, Wrapped(states) if is_wrapped else states)
    same(weights(other), before)
    assert [state["step"] for state in states.state.values()] == [1] * 4


def buffers_are_copied_at_once(folder: Path) -> None:
    """The next forward changes them."""
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    mean = model[1].running_mean.clone()
    function = saving.Snapshot.finish

    def late(snapshot: Any) -> None:
        time.sleep(0.3)
        function(snapshot)

    with mock.patch.object(saving.Snapshot, "finish", late):
        running = checkpoint.save(folder / "a", model, wait=False)
        model(torch.randn(4, 5))
        running.wait()
    assert not torch.equal(model[1].running_mean, mean)
    checkpoint.load(folder / "a", model)
    assert torch.equal(model[1].running_mean, mean)


def fresh_optimizers_stay_fresh(folder: Path) -> None:
    """torch's functions step on zeros to make states, which would count as a step; a save makes none."""
    model, optimizer = make()
    steps = list[object]()
    handle = optimizer.register_step_pre_hook(lambda *args: steps.append(args))
    checkpoint.save(folder / "a", model, optimizer)
    handle.remove()
    assert not steps
    assert not optimizer.state
    other, states = make(1)
    checkpoint.load(folder / "a", other, states)
    same_after_a_step((model, optimizer), (other, states))


def keeps_the_last(folder: Path) -> None:
    model, optimizer = make()
    (folder / "own").mkdir(exist_ok=True)
    weights_alone, _ = get_state_dict(model, optimizer)
    dcp.save({"model": weights_alone}, checkpoint_id=folder / "of torch")
    for step in (9, 10, 11, 8):
        checkpoint.save(folder / f"step-{step}", model, optimizer, keep_last=2)
        dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    assert names == [".fsdp2-lock", "of torch", "own", "step-11", "step-8"]
    assert checkpoint.latest(folder) == folder / "step-8", "the last one saved"
    assert checkpoint.latest(folder / "none") is None
    with mock.patch.object(session.time, "time", return_value=1.0):  # a clock that was set back
        for _ in range(2):
            checkpoint.save(
                folder / "step-8", model, optimizer, extra={"again": 1}, keep_last=2
            )  # replaced in one step
        dist.barrier()
        assert checkpoint.latest(folder) == folder / "step-8"
    assert checkpoint.load(folder / "step-8", model, optimizer) == {"again": 1}
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == names


def ranks_alone(folder: Path) -> None:
    """Ranks of another group neither wait nor are waited for."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
    for number in range(1 + rank):
        checkpoint.save(folder / f"{rank}" / f"{number}", model, process_group=groups[rank])
    with torch.no_grad():
        model.weight.fill_(7)
    checkpoint.load(folder / f"{rank}" / f"{rank}", model, process_group=groups[rank])
    assert (model.weight == rank).all()


def parts_alone(folder: Path) -> None:
    """The model and the optimizer in folders of their own, as accelerate has torch save them."""
    model, optimizer = make()
    train(model, optimizer)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model}, checkpoint_id=folder / "model")
    dcp.save({"optimizer": of_optimizer}, checkpoint_id=folder / "optimizer")
    other, states = make(1)
    checkpoint.load(folder / "model", other)
    checkpoint.load(folder / "optimizer", other, states, weights=False)
    same_after_a_step((model, optimizer), (other, states))


def what_the_fresh_run_lacks(folder: Path) -> None:
    """Options and numbers in states are as torch's load_state_dict makes them: numbers or tensors, new ones, too."""
    model, optimizer = make()
    train(model, optimizer)
    optimizer.param_groups[0].update(lr=torch.tensor(0.03), initial_lr=0.2)
    for state in optimizer.state.values():
        state["best"] = 3
    checkpoint.save(folder / "a", model, optimizer)
    other, states = make(1)
    checkpoint.load(folder / "a", other, states)
    (group,) = states.param_groups
    assert (float(group["lr"]), group["initial_lr"]) == (pytest.approx(0.03), 0.2)
    assert all(state["best"] == 3 for state in states.state.values())
    group["lr"] = 0.03
    checkpoint.save(folder / "b", other, states)
    checkpoint.load(folder / "b", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.03


def loads_wait_for_saves(folder: Path) -> None:
    """Both talk over the same process group."""
    model, optimizer = make()
    train(model, optimizer)
    checkpoint.save(folder / "a", model, optimizer)
    before = weights(model)
    for number in range(3):
        train(model, optimizer)
        checkpoint.save(folder / f"{number}", model, optimizer, wait=False)
        checkpoint.load(folder / "a", model, optimizer)
        same(weights(model), before)


def names_that_only_a_save_changes(folder: Path) -> None:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [*state]:
            state[f"renamed_{key}"] = state.pop(key)

    model, _ = make()
    model.register_state_dict_post_hook(rename)
    checkpoint.save(folder / "a", model)
    refused(lambda: checkpoint.load(folder / "a", model), ValueError, "takes the keys of its own state_dict")


CHECKS = {
    "what the fresh run lacks": what_the_fresh_run_lacks,
    "loads wait for saves": loads_wait_for_saves,
    "names that only a save changes": names_that_only_a_save_changes,
    "parts alone": parts_alone,
    "ranks alone": ranks_alone,
    "one rank fails in a load": one_rank_fails_in_load,
    "files of stages": files_of_stages,
    "one rank fails": functools.partial(one_rank_fails, wait=True),
    "one rank fails, without waiting": functools.partial(one_rank_fails, wait=False),
    "an error is raised by the next save": an_error_is_raised_by_the_next_save,
    "ranks that differ": ranks_that_differ,
    "arguments": arguments,
    "a step waits": functools.partial(a_step_waits, is_wrapped=False),
    "a step of an optimizer in another waits": functools.partial(a_step_waits, is_wrapped=True),
    "buffers are copied at once": buffers_are_copied_at_once,
    "fresh optimizers stay fresh": fresh_optimizers_stay_fresh,
    "keeps the last": keeps_the_last,
}


def test_failures(tmp_path: Path) -> None:
    for name in CHECKS:
        (tmp_path / name).mkdir()
    run_checks(2, [(name, functools.partial(check, tmp_path / name)) for name, check in CHECKS.items()], timeout=240)


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


def change_layout(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".fsdp2_layout"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def swap(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder / "x")
    (folder / "__1_0.distcp").rename(folder / "__0_0.distcp")
    (folder / "x").rename(folder / "__1_0.distcp")


def flip(folder: Path, what: bytes) -> None:
    """Changes one bit of the first place in the files where these bytes are."""
    for path in sorted(folder.glob("*.distcp")):
        data = bytearray(path.read_bytes())
        if (at := data.find(what)) >= 0:
            data[at + len(what) // 2] ^= 4
            path.write_bytes(data)
            return
    raise AssertionError("not there")


def flip_option(folder: Path) -> None:
    content = json.loads((folder / ".fsdp2_layout").read_text())
    rank, offset, nbytes = content["objects"]["optimizer.param_groups.0.lr"]
    with (folder / f"__{rank}_0.distcp").open("r+b") as file:
        file.seek(offset)
        data = bytearray(file.read(nbytes))
        data[data.index(b"\x80\x02G") + 5] ^= 4  # the number
        file.seek(offset)
        file.write(data)


def flip_weight(folder: Path) -> None:
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["model.0.weight"]
    whole = torch.empty(saved.size)
    dcp.load({"model.0.weight": whole}, checkpoint_id=folder, no_dist=True)
    flip(folder, bytes(parts.bytes_in(whole[1].contiguous())))


class _Calls:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def evil_object(folder: Path) -> None:
    content = json.loads((folder / ".fsdp2_layout").read_text())
    rank, offset, nbytes = content["objects"]["step"]
    data = pickle.dumps(_Calls(), 2).ljust(nbytes, b"\0")
    with (folder / f"__{rank}_0.distcp").open("r+b") as file:
        file.seek(offset)
        file.write(data[:nbytes])


def evil_metadata(folder: Path) -> None:
    (folder / ".fsdp2_layout").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(_Calls()))


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a missing file": (lambda f: (f / "__1_0.distcp").unlink(), FileNotFoundError, r"__1_0\.distcp: .* not there"),
    "a truncated file": (lambda f: os.truncate(f / "__1_0.distcp", 2000), ValueError, r"__1_0\.distcp: .*truncated"),
    "an empty file": (lambda f: os.truncate(f / "__0_0.distcp", 0), ValueError, r"__0_0\.distcp: expected the file"),
    "swapped files": (swap, ValueError, r"__[01]_0\.distcp: expected the file that rank [01] has written"),
    "of another save": (
        lambda f: shutil.copy(f.parent / "other" / "__1_0.distcp", f / "__1_0.distcp"),
        ValueError,
        r"__1_0\.distcp: expected the file that rank 1 has written for save",
    ),
    "no index": (lambda f: (f / ".metadata").unlink(), FileNotFoundError, r"\.metadata"),
    "a newer release": (
        lambda f: change_layout(f, lambda content: content.update(format=9)),
        ValueError,
        r"\.fsdp2_layout: expected format 2, got 9",
    ),
    "a damaged layout": (lambda f: os.truncate(f / ".fsdp2_layout", 300), ValueError, r"\.fsdp2_layout: expected what"),
    "a layout of other kinds": (
        lambda f: change_layout(f, lambda content: content["kinds"].reverse()),
        ValueError,
        r"\.fsdp2_layout: expected what fsdp2 writes",
    ),
    "a flipped bit of a weight": (flip_weight, ValueError, r"__\d_0\.distcp: model\.0\.weight: .* the checksum"),
    "a flipped bit of an option": (
        flip_option,
        ValueError,
        r"__\d_0\.distcp: \S+: expected numbers.* other bytes",
    ),
    "code in an object": (evil_object, ValueError, r"__\d_0\.distcp: step: expected numbers.* nothing was run"),
    "code in the metadata": (evil_metadata, ValueError, r"\.metadata names \w+\.mkdir.* nothing was called"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int, _: int) -> None:
        for name in ("good", "other"):
            model, optimizer = make()
            train(model, optimizer)
            checkpoint.save(folder / name, model, optimizer, extra={"step": 1})

    run_ranks(2, body)
    return folder


def test_damaged_checkpoints(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each raises on all of three ranks, and names the file; nothing is run, and the good one loads behind it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved / "other", tmp_path / "other")
    for name, (damage, *_) in DAMAGE.items():
        shutil.copytree(saved / "good", tmp_path / name)
        damage(tmp_path / name)

    def check(name: str, kind: type[Exception], text: str) -> None:
        model, optimizer = make(1)
        refused(lambda: checkpoint.load(tmp_path / name, model, optimizer), kind, text)
        assert checkpoint.load(saved / "good", model, optimizer) == {"step": 1}

    run_checks(3, [(name, functools.partial(check, name, *rest)) for name, (_, *rest) in DAMAGE.items()])
    assert not (tmp_path / "ran").exists()


def test_other_models(saved: Path) -> None:
    def body(rank: int, _: int) -> None:
        load: Any = functools.partial(checkpoint.load, saved / "good")
        model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)))
        refused(lambda: load(model), ValueError, r"model\.1\.weight: expected the shape \[4, 7\] of the model, got")
        model = fully_shard(nn.Sequential(nn.Linear(5, 7)))
        refused(lambda: load(model), ValueError, r"that take all of their tensors, got none for model\.1\.bias, model")
        first = weights(model)
        load(model, strict=False)
        assert not torch.equal(weights(model)[0], first[0])
        model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)))
        refused(lambda: load(model), ValueError, r"expected model\.2\.weight, model\.2\.bias, which the model")
        load(model, strict=False)
        model, optimizer = make(1)
        refused(lambda: load(model, extra={"schedule": make(1)[1]}), ValueError, "extra: expected a name that was")
        before = weights(model)
        load(model, optimizer, weights=False)
        same(weights(model), before)
        assert len(optimizer.state) == 4

    run_ranks(2, body)


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    """The second is told, and may save there when the first has ended, however it ended."""

    def first(rank: int, _: int) -> None:
        checkpoint.save(tmp_path / "a", make()[0])
        pid = os.fork()
        if not pid:  # what a worker of a data loader is: it may outlive the job, and does not hold the folder
            time.sleep(30)
            os._exit(0)

        def second() -> None:
            with pytest.raises(RuntimeError, match=r"no other job saves, got one that belongs to host \S+, pr"):
                checkpoint.save(tmp_path / "b", nn.Linear(1, 1))

        dist.destroy_process_group()
        child = os.fork()
        if not child:
            try:
                second()
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    run_ranks(1, first)
    run_ranks(1, lambda rank, _: checkpoint.save(tmp_path / "b", make()[0]) and None)
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
