"""Follows the advice of errors of fsdp2.checkpoint."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Partial

from advised.file_programs import new_folder
from advised.registry import build, follows, refused, same, same_parameters, shard
from fsdp2 import checkpoint
from fsdp2.checkpoint import folders, memory, session, snapshot
from fsdp2.checkpoint.layout import Entry, Kind, Layout


@follows("Wait until that process has ended, or pass a folder of this job's own")
def two_jobs() -> None:
    model, folder = shard(build()), new_folder()
    taken = OSError(11, "taken")
    with mock.patch.object(folders.fcntl, "lockf", side_effect=taken):
        refused(lambda: checkpoint.save(folder / "runs" / "a", model))
    for each in ("own", "runs"):  # the other one has ended
        checkpoint.save(folder / each / "a", model)
        again = shard(build(seed=2))
        checkpoint.load(folder / each / "a", again)
        same_parameters(again, build())


@follows("Pass it inside a dict")
def tensors_among_flat_keys() -> None:
    model, folder = shard(build()), new_folder()
    refused(lambda: checkpoint.save(folder / "a", model, extra={"x": torch.ones(2)}, flat_keys=True), ValueError)
    checkpoint.save(folder / "a", model, extra={"mine": {"x": torch.ones(2)}}, flat_keys=True)
    again = shard(build(seed=2))
    same(checkpoint.load(folder / "a", again)["mine"]["x"], torch.ones(2))
    same_parameters(again, build())


@follows("have the same names for their options: save with flat_keys=True")
def options_of_stages() -> None:
    folder, rank = new_folder(), dist.get_rank()
    stage = nn.ModuleDict({str(rank): nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 * (1 + rank))
    refused(lambda: checkpoint.save(folder / "a", stage, optimizer), ValueError)
    checkpoint.save(folder / "a", stage, optimizer, flat_keys=True)
    optimizer.param_groups[0]["lr"] = 7.0
    checkpoint.load(folder / "a", stage, optimizer)
    same(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.1 * (1 + rank)))


@follows("Save with in_memory=False")
def ranks_without_common_memory() -> None:
    model, folder = shard(build()), new_folder()
    for root in ("/none", f"/dev/shm/machine-{dist.get_rank()}"):
        with mock.patch.object(memory, "ROOT", Path(root)):
            refused(lambda: checkpoint.save(folder / "a", model, in_memory=True))
    checkpoint.save(folder / "a", model, in_memory=False)
    again = shard(build(seed=2))
    checkpoint.load(checkpoint.latest(folder) or folder, again)
    same_parameters(again, build())


@follows("Give what differs between ranks another name")
def kinds_that_differ() -> None:
    one, other = (Kind((), (Entry("x", "float32", (n,), -1, ()),), ()) for n in (3, 4))
    refused(lambda: Layout([([0], one), ([1], other)]), ValueError)
    model, folder, rank = shard(build()), new_folder(), dist.get_rank()
    extra: Any = {"x": torch.ones(3 + rank)}
    refused(lambda: checkpoint.save(folder / "a", model, extra=extra), ValueError)
    checkpoint.save(folder / "a", model, extra={f"x{rank}": torch.ones(3 + rank)})
    again = shard(build(seed=2))
    found = checkpoint.load(folder / "a", again)
    same(found["x1"], torch.ones(4))
    same_parameters(again, build())


@follows("Before the save, step the optimizer on all of them, or on none")
def optimizers_that_some_ranks_have_stepped() -> None:
    folder, gradient = new_folder(), torch.ones(8)
    for steps_everywhere in (True, False):
        model = shard(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)

        def step() -> None:
            for p in model.parameters():  # noqa: B023
                p.grad = torch.ones_like(p)
            optimizer.step()  # noqa: B023

        if dist.get_rank() == 1:
            step()
        refused(lambda: checkpoint.save(folder / "a", model, optimizer), ValueError)  # noqa: B023
        optimizer.state.clear()
        if steps_everywhere:
            step()
        checkpoint.save(folder / "a", model, optimizer)
        again = shard(build(seed=2))
        loaded = torch.optim.SGD(again.parameters(), lr=0.0, momentum=0.5)
        checkpoint.load(folder / "a", again, loaded)
        same_parameters(again, build())
        found = [state["momentum_buffer"].to_local().unique() for state in loaded.state.values()]
        same(torch.cat([*found, gradient[:1]]).unique(), gradient[:1])
        assert bool(found) == steps_everywhere


@follows(
    "Save and load it by torch.distributed.checkpoint: fsdp2.checkpoint.load reads such a folder into a model that "
    "fully_shard has sharded"
)
def models_of_fsdp1() -> None:
    folder = new_folder()
    model = FSDP1(build(), device_id=torch.device("cpu"), use_orig_params=True)
    refused(lambda: checkpoint.save(folder / "a", model), NotImplementedError)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "a")
    refused(lambda: checkpoint.load(folder / "a", model), NotImplementedError)
    again = shard(build(seed=2))
    checkpoint.load(folder / "a", again)
    same_parameters(again, build())


@follows("Pass the model that has all of them")
def parameters_of_another_model() -> None:
    model, folder = shard(build()), new_folder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(lambda: checkpoint.save(folder / "a", shard(build()), optimizer), ValueError)
    checkpoint.save(folder / "a", model, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    checkpoint.load(folder / "a", model, optimizer)
    same(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(0.1))


class WithCount(torch.optim.SGD):
    """Has a state of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"]["steps"] = self.state["count"].get("steps", 0) + 1
        return super().step(closure)


@follows("Save each of these optimizers in a folder of its own, with the model, and load them so")
def states_of_one_in_two_optimizers() -> None:
    model, folder = shard(build()), new_folder()
    biases, weights = ([p for p in model.parameters() if p.dim() == d] for d in (1, 2))
    ways = [([*biases, weights[0]], [*biases, *weights]), (biases, weights)]
    for number, both in enumerate(ways):  # a parameter in two optimizers; states of none
        optimizers = [WithCount(params, lr=0.1, momentum=0.5) for params in both]
        for index, each in enumerate(optimizers):
            for param in model.parameters():
                param.grad = torch.full_like(param, 1.0 + index)
            each.step()
        refused(lambda: checkpoint.save(folder / "a", model, optimizers), ValueError)  # noqa: B023
        for index, each in enumerate(optimizers):
            checkpoint.save(folder / f"{number}-{index}", model, each)
        for index, (params, each) in enumerate(zip(both, optimizers, strict=True)):
            fresh = WithCount(params, lr=0.7, momentum=0.5)
            checkpoint.load(folder / f"{number}-{index}", model, fresh)
            assert fresh.state["count"] == {"steps": 1}
            for param in params:
                same(fresh.state[param]["momentum_buffer"], each.state[param]["momentum_buffer"])


@follows("Call model.to_empty(device=...) before")
def weights_on_meta() -> None:
    model, folder = shard(build()), new_folder()
    checkpoint.save(folder / "a", model)
    with torch.device("meta"):
        empty = shard(build())
    refused(lambda: checkpoint.load(folder / "a", empty), RuntimeError)
    empty.to_empty(device="cpu")
    checkpoint.load(folder / "a", empty)
    same_parameters(empty, build())


@follows("Pass strict=False to leave these out", "Pass strict=False to leave these as they are")
def other_models() -> None:
    folder, small = new_folder(), nn.Sequential(nn.Linear(3, 3))
    large = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for name, saved, loaded in (("small", small, large), ("large", large, small)):
        checkpoint.save(folder / name, saved)
        refused(lambda: checkpoint.load(folder / name, loaded), ValueError)  # noqa: B023
        with torch.no_grad():
            loaded[0].weight.zero_()
        checkpoint.load(folder / name, loaded, strict=False)
        same(loaded[0].weight, saved[0].weight)


@follows("Pass optimizers as optimizer=, and tensors under keys that are texts")
def shards_inside_objects() -> None:
    model, folder = shard(build()), new_folder()
    parameter = next(model.parameters())
    refused(lambda: checkpoint.save(folder / "a", model, extra={"mine": {3: parameter}}), NotImplementedError)
    checkpoint.save(folder / "a", model, extra={"mine": {"3": parameter}})
    found = checkpoint.load(folder / "a", model)["mine"]["3"]
    same(found, next(build().parameters()).detach())


class OfLocalRows(torch.optim.Optimizer):
    def __init__(self, params: Any, in_tuples: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.in_tuples = in_tuples

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            rank = torch.tensor([float(dist.get_rank())])
            self.state[p]["rank"] = (rank, rank) if self.in_tuples else rank


@follows(
    "An optimizer that computes on local rows must make its states DTensors; or save its state_dict() in per_rank="
)
def states_of_local_rows() -> None:
    model, folder, rank = shard(build()), new_folder(), dist.get_rank()
    for in_tuples in (True, False):
        optimizer = OfLocalRows(model.parameters(), in_tuples)
        optimizer.step()
        refused(lambda: checkpoint.save(folder / "a", model, optimizer), ValueError)  # noqa: B023
    kept = {"states": [state["rank"] for state in optimizer.state.values()]}
    holder = mock.Mock(spec=["state_dict", "load_state_dict"], state_dict=lambda: kept)
    checkpoint.save(folder / "a", model, per_rank={"optimizer of rows": holder})
    checkpoint.load(folder / "a", model, per_rank={"optimizer of rows": holder})
    (found,) = holder.load_state_dict.call_args.args
    same(found["states"][0], torch.tensor([float(rank)]))
    for p in optimizer.state:
        mesh = p.device_mesh
        optimizer.state[p]["rank"] = DTensor.from_local(torch.ones(1), mesh, p.placements, run_check=False)
    checkpoint.save(folder / "b", model, optimizer)


@follows("Save into a folder that all ranks share")
def disks_that_ranks_do_not_share() -> None:
    model, folder = shard(build()), new_folder()
    own = folder / f"rank-{dist.get_rank()}"
    function = session.Session.write

    def on_own_disk(made: Any, save: Any, values: Any) -> Any:
        own.mkdir(exist_ok=True)
        return function(made, save._replace(new=own / "x") if dist.get_rank() else save, values)

    with mock.patch.object(session.Session, "write", on_own_disk):
        refused(lambda: checkpoint.save(folder / "a", model), OSError)
    checkpoint.save(folder / "a", model)
    again = shard(build(seed=2))
    checkpoint.load(folder / "a", again)
    same_parameters(again, build())


@follows("Save with wait=True before you write to it")
def a_write_between() -> None:
    model, folder = shard(build()), new_folder()
    finish = snapshot.Snapshot.finish

    def write_first(copy: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).add_(1)
        finish(copy)

    with mock.patch.object(snapshot.Snapshot, "finish", write_first):
        running = checkpoint.save(folder / "a", model, wait=False)
        refused(running.wait)
    assert checkpoint.latest(folder) is None
    expected = shard(build())
    checkpoint.save(folder / "b", expected)
    with torch.no_grad():
        next(expected.parameters()).add_(1)
    checkpoint.load(folder / "b", model)
    same_parameters(model, build())


@follows("Take it out of the state dict, or save its full_tensor() in extra=")
def partial_tensors() -> None:
    model, folder = shard(build()), new_folder()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    refused(lambda: checkpoint.save(folder / "a", model, extra={"x": tensor}), NotImplementedError)
    checkpoint.save(folder / "a", model, extra={"x": tensor.full_tensor()})
    same(checkpoint.load(folder / "a", model)["x"], torch.ones(2) * dist.get_world_size())


@follows("Save it with torch.distributed.checkpoint, or take it out of the state dict")
def sparse_tensors() -> None:
    model, folder = shard(build()), new_folder()
    sparse = torch.eye(3).to_sparse()
    refused(lambda: checkpoint.save(folder / "a", model, extra={"x": sparse}), NotImplementedError)
    checkpoint.save(folder / "a", model, extra={"x": sparse.to_dense()})
    same(checkpoint.load(folder / "a", model)["x"], torch.eye(3))


@follows("Load or initialise the weights first")
def tensors_on_meta() -> None:
    folder = new_folder()
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    refused(lambda: checkpoint.save(folder / "a", model))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    checkpoint.save(folder / "a", model)
    again = nn.Linear(3, 3)
    checkpoint.load(folder / "a", again)
    same(again.weight, torch.ones(3, 3))
