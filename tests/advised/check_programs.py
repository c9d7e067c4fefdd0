"""Follows the advice of checks that compare ranks: structure, buffers, frozen parameters, and what `check` finds."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import fsdp2
from advised.registry import (
    batch,
    build,
    follows,
    found,
    loss_of,
    none_found,
    own,
    pair,
    refused,
    same_parameters,
    sgd,
    shard,
    train,
    warned,
)
from fsdp2 import fully_shard, replicate, sync_module_states

# ---- structure


# ---- buffers


class Shifted(nn.Module):
    """Subtracts a buffer from its inputs. `write`: forward moves the buffer to the mean of its rows."""

    def __init__(self, shift: Tensor, persistent: bool = True, write: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write = nn.Linear(5, 3), write
        self.register_buffer("shift", shift, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x - self.shift)
        if self.write:
            mean = x.mean(0)
            if self.write == "all-reduced":
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.shift.lerp_(mean, 0.5)
        return y


@follows("Give torch.utils.data.DistributedSampler to the DataLoader as its sampler")
def same_rows_on_all_ranks() -> None:
    rows = batch(rows=24)

    def run(model: Any, size: int, sampler: Any = None) -> None:
        optimizer = sgd(model)
        for x in DataLoader(rows, batch_size=size, sampler=sampler):  # type: ignore[arg-type, var-annotated]
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    warned(lambda: run(shard(build()), 4))
    model, plain = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, 4, DistributedSampler(rows, shuffle=False))  # type: ignore[arg-type]
    run(plain, 8)
    same_parameters(model, plain)


@follows("Choose the rows by the rank along the axes of data alone")
def other_rows_on_ranks_of_one_sequence() -> None:
    sequences = batch(rows=24).unflatten(0, (12, 2))  # of two positions
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    data, context = mesh["data"], mesh["context"]

    def run(model: Any, sampler: Any) -> None:
        optimizer = sgd(model)
        for x in DataLoader(sequences, batch_size=4, sampler=sampler):  # type: ignore[arg-type, var-annotated]
            if sampler is not None:
                fsdp2.check_same_batch(mesh, "context", x)
                x = x[:, context.get_local_rank()]
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    by_rank = DistributedSampler(sequences, shuffle=False)  # type: ignore[arg-type, var-annotated]
    refused(lambda: run(shard(build()), by_rank), RuntimeError)
    model, plain = pair()
    run(
        model,
        DistributedSampler(  # type: ignore[arg-type]
            sequences, num_replicas=data.size(), rank=data.get_local_rank(), shuffle=False
        ),
    )
    run(plain, None)
    same_parameters(model, plain)


# ---- frozen parameters


def training(model: Any, steps: int) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        loss_of(model(own(batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()


@follows(
    "call fsdp2.sync_module_states(model), or set the same seed on all ranks before the model is built",
    "Expected the same in other buffers: call sync_module_states(model)",
)
def buffers_drawn_on_each_rank() -> None:
    def shifted(**options: Any) -> Any:
        drawn = torch.randn(5, generator=torch.Generator().manual_seed(dist.get_rank()))
        return fully_shard(Shifted(drawn, **options))

    warned(lambda: training(shifted(persistent=False), 9))
    model = shifted()
    found(fsdp2.check(model))
    sync_module_states(model)
    none_found(model)
    plain = Shifted(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    train(model, plain)


@follows("it is made of parts of different models. Load a checkpoint of before, and write to it on all ranks alike")
def found_frozen_and_written_on_one_rank() -> None:
    plain = build()
    plain.stem.requires_grad_(False)
    model = shard(copy.deepcopy(plain))
    train(model, plain)
    weights = copy.deepcopy(plain.state_dict())
    with torch.no_grad():
        if dist.get_rank() == 0:
            model.stem.weight.mul_(0.9)
        found(fsdp2.check(model))
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        for each in (model, plain):
            each.stem.weight.mul_(0.9)
    none_found(model)
    train(model, plain)


@follows("or memory has failed. Load a checkpoint of before")
def replicas_that_have_parted() -> None:
    plain = build()
    model: Any = replicate(copy.deepcopy(plain))
    train(model, plain)
    with torch.no_grad():
        if dist.get_rank() == 0:
            model.stem.weight.to_local().mul_(0.9)
    refused(lambda: training(model, 9), RuntimeError)
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    train(model, plain)
