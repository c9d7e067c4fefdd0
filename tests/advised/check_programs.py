"""Follows the advice of checks that compare ranks: structure, buffers, frozen parameters, and what `check` finds."""

import copy
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler

import fsdp2
from advised.registry import (
    backward,
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
from fsdp2 import MixedPrecisionPolicy, fully_shard, sync_module_states
from fsdp2.compression import Compression

# ---- structure


@follows(
    "Build and set up the model by the same code on all ranks",
    "{}, and call fully_shard on the same modules, with the same ignored_params",
)
def other_layers_and_ignored_ones() -> None:
    def self_gathering() -> Any:
        model = build()
        model.extra = nn.Linear(2, 2)
        return model

    def ignoring(ignores: bool) -> Any:
        model = build()
        model.head.requires_grad_(False)
        return shard(model, ignored_params={*model.head.parameters()} if ignores else None)

    is_first = dist.get_rank() == 0
    refused(lambda: backward(shard(self_gathering() if is_first else build())))
    codec = MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16 if is_first else None))
    text = refused(lambda: backward(shard(build(), mp_policy=codec)))
    assert "got gradients that travel in torch.bfloat16 on rank 0, and gradients that travel in the dtype of" in text
    refused(lambda: backward(ignoring(is_first)))
    model, plain = shard(self_gathering()), self_gathering()
    train(model, plain)
    for ignores in (False, True):
        plain = build()
        plain.head.requires_grad_(False)
        train(ignoring(ignores), plain)


@follows("{}; if a size depends on data that a rank reads (a vocabulary), take one rank's on all of them")
def vocabularies() -> None:
    class Words(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.size, self.embed, self.head = size, nn.Embedding(size, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed((x[:, 0].abs() * 7).long() % self.size))

    rank = dist.get_rank()
    tokens = ["a", "b", "c", "d"] if rank == 0 else ["a", "c", "e", "f", "g"]
    refused(lambda: backward(fully_shard(Words(len(tokens)))))
    taken = [tokens]
    torch.distributed.broadcast_object_list(taken)
    train(fully_shard(Words(len(taken[0]))), Words(4))


@follows("Call fully_shard on the same modules on all ranks")
def other_groups() -> None:
    def sharded(with_block: bool) -> Any:
        model = build()
        return shard(model) if with_block else fully_shard(model)

    refused(lambda: backward(sharded(dist.get_rank() == 0)))
    for with_block in (False, True):
        train(sharded(with_block), build())


class Heads(nn.Module):
    """Layers by name, registered in any order."""

    def __init__(self, names: Any) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(5, 5) for name in names})
        for name, head in self.heads.items():
            torch.manual_seed(zlib.crc32(name.encode()))
            head.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        for name in "abc":
            x = self.heads[name](x).tanh()
        return x


@follows("Register modules in the same order on all ranks (of names in a set: in that of sorted(names)), and call")
def another_order() -> None:
    unordered = [*("abc" if dist.get_rank() == 0 else "cab")]  # as a set may yield them
    refused(lambda: backward(fully_shard(Heads(unordered))))
    model, plain = Heads(sorted({*unordered})), Heads("abc")
    train(fully_shard(model), plain)
    model = Heads(unordered)
    model.heads = nn.ModuleDict({name: model.heads[name] for name in "abc"})
    train(fully_shard(model), Heads("abc"))


@follows(
    "so they would reduce different gradients. Set requires_grad alike on all ranks, before the forward",
    "parameters are trainable on rank {}, and {} on rank {}. Set requires_grad alike on all ranks, before the forward",
)
def trained_on_one_rank() -> None:
    """Before the 4th step, at which ranks compare, and before the 5th, in which they get out of step."""
    for steps, says in ((3, "they would reduce different gradients"), (4, "parameters are trainable on rank")):
        model, plain = pair()
        for each in (model, plain):
            each.block.requires_grad_(False)
        train(model, plain, steps)
        model.block.requires_grad_(dist.get_rank() == 0)
        text = refused(lambda model=model: backward(model))
        assert says in text, text
        found(fsdp2.check(model))
        model.zero_grad()
        for each in (model, plain):
            each.block.requires_grad_(True)
        none_found(model)
        train(model, plain)


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


class OnTwoRanks(nn.Module):
    """Computes for both halves of a batch what two ranks do that have buffers of their own."""

    def __init__(self, module: Shifted, shifts: list[Tensor]) -> None:
        super().__init__()
        self.module, self.shifts = module, shifts

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for rows, shift in zip(x.chunk(2), self.shifts, strict=True):
            self.module.shift = shift
            outputs.append(self.module(rows))
        return torch.cat(outputs)


def drawn(rank: int | None = None) -> Tensor:
    number = dist.get_rank() if rank is None else rank
    return torch.randn(5, generator=torch.Generator().manual_seed(number))


@follows(
    "Call fsdp2.sync_module_states({}), {} fully_shard, which gives all ranks the first one's; or set the same seed on",
    "or, if each rank is to have its own, register it with persistent=False",
    "call fsdp2.sync_module_states(model), or set the same seed on all ranks before the model is built",
)
def buffers_drawn_on_each_rank() -> None:
    text = refused(lambda: backward(fully_shard(Shifted(drawn()))))
    assert "sync_module_states(model), before or after fully_shard" in text
    for way in ("before", "after", "seed"):
        model = Shifted(drawn(0 if way == "seed" else None))
        if way == "before":
            sync_module_states(model)
        fully_shard(model)
        if way == "after":
            sync_module_states(model)
        train(model, Shifted(drawn(0)), steps=4)
    plain = OnTwoRanks(Shifted(drawn(0), write="own"), [drawn(0), drawn(1)])
    model = fully_shard(Shifted(drawn(), persistent=False, write="own"))
    warned(lambda: train(model, plain, steps=9))


@follows(
    "All-reduce what the module writes to it (torch.distributed.all_reduce)",
    "If each rank is to have its own, register it with persistent=False",
)
def buffers_of_own_rows() -> None:
    refused(lambda: training(fully_shard(Shifted(torch.zeros(5), write="own")), 9))
    model, plain = Shifted(torch.zeros(5), write="all-reduced"), Shifted(torch.zeros(5), write="whole")
    train(fully_shard(model), plain, steps=9)


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


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@follows("Call its train() or eval() alike on all ranks")
def norm_in_training_mode_on_one_rank() -> None:
    model, _ = pair(Normed)
    model[1].train(dist.get_rank() == 0)
    refused(lambda: training(model, 2))
    model, plain = pair(Normed)
    model[1].eval()
    plain[1].eval()
    train(model, plain)


@follows("Expected the same in other buffers: call sync_module_states(model)")
def buffers_found() -> None:
    model = fully_shard(Shifted(drawn()))
    found(fsdp2.check(model))
    sync_module_states(model)
    assert fsdp2.check(model) == []
    train(model, Shifted(drawn(0)))


# ---- frozen parameters


@follows(
    "so each rank's part is of another model now. Load a checkpoint of before, and write to the parameter on all",
    "it is made of parts of different models. Load a checkpoint of before, and write to it on all ranks alike",
)
def frozen_and_written_on_one_rank() -> None:
    whole = StateDictOptions(full_state_dict=True)
    writes: list[Callable[[Any], object]] = [
        lambda weight: weight.mul_(0.9),
        lambda weight: getattr(weight, "to_local", lambda: weight)().mul_(0.9),
        lambda weight: weight.data.add_(1),
    ]
    for write in writes:
        plain = build()
        plain.stem.requires_grad_(False)
        model = shard(copy.deepcopy(plain))
        train(model, plain)
        before = {name: value.clone() for name, value in get_model_state_dict(model, options=whole).items()}

        def decay(each: Any, write: Any = write) -> None:
            with torch.no_grad():
                write(each.stem.weight)

        if dist.get_rank() == 0:
            decay(model)
        found(fsdp2.check(model))
        refused(lambda model=model: training(model, 4))
        model.zero_grad()
        set_model_state_dict(model, before, options=whole)
        decay(model)
        decay(plain)
        none_found(model)
        train(model, plain, steps=9)


def training(model: Any, steps: int) -> None:
    optimizer = sgd(model)
    for step in range(steps):
        loss_of(model(own(batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()
