"""Optimizers, gradients, accumulation and steps."""

import copy
import dataclasses
import tempfile
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.compression import Compression, sum_decoded
from outcomes import EXACT, LOUD, Side
from situations.common import (
    Net,
    again_from_a_checkpoint,
    distributed,
    ends,
    follow,
    hsdp,
    loaded,
    local,
    loss_of,
    sgd,
    shard,
    train,
    weights_of,
    whole,
)

# ---- full copies that are stale, or seen where shards should be


@ends(EXACT)
def teacher_that_follows(side: Side) -> None:
    """EMA teacher, evaluated in every step"""
    student, teacher = shard(side, Net()), shard(side, Net())
    optimizer = sgd(student)
    pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))
    for step in range(3):
        with torch.no_grad():
            side.rows(f"target {step}", teacher(side.batch(step)))
        loss_of(student(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        follow(pairs)
    side.weights("teacher", teacher)


@ends(EXACT)
def evaluation_between_backward_and_step(side: Side) -> None:
    """Evaluation between backward and step"""
    model = shard(side, Net())
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        side.rows("before", model(side.batch(1)))
    optimizer.step()
    side.rows("after", model(side.batch(1)))


@ends(EXACT)
def optimizer_built_after_evaluation(side: Side) -> None:
    """Optimizer built after an evaluation"""
    model = shard(side, Net())
    with torch.no_grad():
        model(side.batch(1))
    train(side, model)


@ends(EXACT)
def state_dict_after_evaluation(side: Side) -> None:
    """State dict taken after an evaluation"""
    model = shard(side, Net())
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        model(side.batch(1))
    optimizer.step()
    for name, value in model.state_dict().items():
        side.value(name, value)


@ends(EXACT)
def zero_1_without_a_last_reshard(side: Side) -> None:
    """ZeRO-1 recipe: nothing resharded, gradients synchronised with the last micro-batch"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    optimizer = sgd(model)
    for step in range(3):
        for last in (False, True):
            side.set_sync(model, last)
            loss_of(model(side.batch(2 * step + last))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, advises="Build it afterwards, from model.parameters()", ways="afterwards")
def optimizer_built_before_sharding(side: Side, way: str = "") -> None:
    """Optimizer built before fully_shard"""
    model = Net()
    optimizer = None if way else sgd(model)
    train(side, shard(side, model), optimizer)


# ---- accumulation


@ends(EXACT)
def zero_grad_without_sync(side: Side) -> None:
    """`zero_grad` while gradients are not synchronised"""
    model = shard(side, Net())
    optimizer = sgd(model)
    side.set_sync(model, False)
    loss_of(model(side.batch(0))).backward()
    optimizer.zero_grad()
    side.set_sync(model, True)
    loss_of(model(side.batch(1))).backward()
    side.grads("gradients", model)


@ends(EXACT, ranks=4)
def zero_grad_without_all_reduce(side: Side) -> None:
    """HSDP: `zero_grad` while gradients are not summed between replicas"""
    model = shard(side, Net(), **hsdp(side, 2))
    optimizer = sgd(model)
    if side.is_sharded:
        model.set_requires_all_reduce(False)
    loss_of(model(side.batch(0))).backward()
    optimizer.zero_grad()
    if side.is_sharded:
        model.set_requires_all_reduce(True)
    loss_of(model(side.batch(1))).backward()
    side.grads("gradients", model)


@ends(LOUD, "set_requires_gradient_sync(True)")
def sync_never_switched_on_again(side: Side) -> None:
    """`set_requires_gradient_sync(False)`, never switched on again"""
    model = shard(side, Net())
    side.set_sync(model, False)
    train(side, model)


@ends(
    LOUD,
    advises="Call set_requires_gradient_sync(True) before the last backward of an accumulation, and use .grad",
    ways="switched on",
)
def clipping_before_sync(side: Side, way: str = "") -> None:
    """Gradients clipped before they are synchronised"""
    model = shard(side, Net())
    side.set_sync(model, False)
    loss_of(model(side.batch(0))).backward()
    if way:
        side.set_sync(model, True)
        loss_of(model(side.batch(1))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    side.grads("clipped", model)


@ends(EXACT, tolerance=1e-6)
def accumulation_of_other_parameters(side: Side) -> None:
    """Accumulation in which a parameter is used for the first time in the last micro-batch, in mixed precision"""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

        def forward(self, x: Tensor, used: int) -> Tensor:
            return sum(branch(x) for branch in self.branches[:used])

    policy = side.policy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
    model = side.fully_shard(Sum(), mp_policy=policy)
    for step in range(2):
        side.set_sync(model, step == 1)
        loss_of(model(side.batch(step), used=step + 1)).backward()
    side.grads("gradients", model)


# ---- scale of gradients


@ends(EXACT)
def sum_over_tokens(side: Side) -> None:
    """Ranks with different numbers of tokens, a divisor for all of them"""
    model = shard(side, Net())
    counts = torch.arange(1.0, 9.0)
    if side.is_sharded:
        for module in model.modules():
            if isinstance(module, side.library.FSDPModule):
                module.set_gradient_divide_factor(36.0)
    own = counts.chunk(side.num_ranks)[side.rank]
    loss = (model(side.batch(0)).square().mean(1) * own).sum()
    (loss if side.is_sharded else loss / 36).backward()
    side.grads("gradients", model)


@ends(EXACT)
def gradient_norm(side: Side) -> None:
    """`clip_grad_norm_`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    side.value("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    side.grads("clipped", model)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A codec that sends all bytes of float64, those of each element reversed."""

    exchanges: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return numel * summed.itemsize

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        return numbers.view(torch.uint8).view(*numbers.shape, -1).flip(2).flatten(1)

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire.view(*numbers.shape, -1).flip(2).flatten(1).view(numbers.dtype))

    def sum(self, rows: Any, total: Tensor) -> None:
        sum_decoded(self, rows, total)


@ends(EXACT, only_ours=True)
def gradients_by_a_codec(side: Side) -> None:
    """Gradients that a user's codec encodes, after two passes"""
    options = (
        {"mp_policy": fsdp2.MixedPrecisionPolicy(compression=Compression(reduce_scatter=Bytes()))}
        if side.is_sharded
        else {}
    )
    model = shard(side, Net(), **options)
    optimizer = sgd(model)
    for step in range(3):
        for number in range(2):
            if side.is_sharded:
                model.set_requires_gradient_sync(number == 1)
            loss_of(model(side.batch(2 * step + number))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- gradients that are kept


@ends(EXACT)
def gradients_copied(side: Side) -> None:
    """`copy.deepcopy(p.grad)`, and gradients in a file"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    copied = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    with tempfile.NamedTemporaryFile() as file:
        torch.save([parameter.grad for parameter in model.parameters()], file.name)
        for i, gradient in enumerate(torch.load(file.name, weights_only=False)):
            side.value(f"copied {i}", copied[i])
            side.value(f"read {i}", gradient)


@ends(EXACT)
def state_dict_in_inference_mode(side: Side) -> None:
    """A state dict taken in `torch.inference_mode()`"""
    model = side.fully_shard(nn.Linear(5, 3))
    with torch.inference_mode():
        side.rows("output", model(side.batch(0)))
        kept = model.state_dict()
    with torch.no_grad():
        kept["weight"].mul_(0.5)
    train(side, model)


# ---- losses that are scaled


@ends(EXACT, ranks=4)
def infinity_on_another_mesh(side: Side) -> None:
    """`GradScaler` meets an infinity in one rank's shard, where the first layer is HSDP and the others are not"""
    model = Net()
    side.fully_shard(model.stem, **hsdp(side, 2))
    shard(side, model)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(loss_of(model(side.batch(step)))).backward()
        if step == 1:
            model.head.weight.grad[2, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- steps that ranks do not take together


class RaisingSGD(torch.optim.SGD):
    """Runs out of memory in its step number `at`: before it writes anything, or midway, behind the first parameter."""

    def __init__(self, params: Any, at: int, midway: bool = False) -> None:
        super().__init__(params, lr=0.5)
        self.at, self.midway, self.number = at, midway, 0

    def step(self, closure: Any = None) -> None:
        self.number += 1
        if self.number == self.at:
            if self.midway:
                with torch.no_grad():
                    first = self.param_groups[0]["params"][0]
                    first.sub_(0.5 * first.grad)
            raise torch.OutOfMemoryError("in the step")
        super().step(closure)


def train_on(
    side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: bool = False, stops: bool = False
) -> None:
    """Trains for twelve steps, and goes on where memory runs out in a step, repeats the step, or stops on all ranks."""
    for number in range(12):
        loss_of(model(side.batch(number))).backward()
        raised = torch.zeros(1)
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            raised.fill_(1)
            if repeats:
                optimizer.step()
        optimizer.zero_grad()
        if stops:
            dist.all_reduce(raised)
            if raised:
                return
    side.weights("trained", model)


@ends(
    LOUD,
    "a step of this optimizer has raised an error 0 times on rank 0 and 1 time on rank 1",
    advises=("Have all ranks", "stop when one of them raises there, and load a checkpoint of before"),
    ways="stop",
)
def a_step_that_raises_on_one_rank(side: Side, way: str = "") -> None:
    """Memory runs out in one rank's optimizer, and the program goes on"""
    model = shard(side, Net())
    optimizer = RaisingSGD(model.parameters(), at=(2 if way else 3) if side.rank == 1 else 0)
    if way and side.is_sharded:
        before, states = weights_of(model), optimizer.state_dict()
        train_on(side, model, optimizer, stops=True)
        assert not side.shown, "it has not stopped"
        loaded(side, model, before)
        optimizer.load_state_dict(states)
    train_on(side, model, optimizer)


@ends(LOUD, "a step of this optimizer has raised an error 0 times on rank 0 and 1 time on rank 1")
def a_step_repeated_on_one_rank(side: Side) -> None:
    """The same, midway, and the rank repeats the step"""
    model = shard(side, Net())
    optimizer = RaisingSGD(model.parameters(), at=3 if side.rank == 1 else 0, midway=True)
    train_on(side, model, optimizer, repeats=True)


@ends(LOUD, "a step of this optimizer has raised an error")
def a_step_hook_that_raises_on_one_rank(side: Side) -> None:
    """The same, by a hook of the user's before the step"""
    model = shard(side, Net())
    optimizer, numbers = sgd(model), iter(range(12))

    def raise_once(*_: Any) -> None:
        if next(numbers) == 2 and side.rank == 1:
            raise torch.OutOfMemoryError("in a hook")

    optimizer.register_step_pre_hook(raise_once)
    train_on(side, model, optimizer)


@ends(EXACT)
def a_step_repeated_on_all_ranks(side: Side) -> None:
    """Memory runs out in the optimizer of each rank, before it writes anything, and all repeat the step"""
    model = shard(side, Net())
    train_on(side, model, RaisingSGD(model.parameters(), at=3), repeats=True)


@ends(
    LOUD,
    advises="Call zero_grad() on all ranks, at the same place of each step, and load a checkpoint of before",
    ways="all ranks",
)
def zero_grad_left_out_on_one_rank(side: Side, way: str = "") -> None:
    """One rank's gradients are not cleared behind a step"""
    model = shard(side, Net())

    def training(alike: bool) -> None:
        optimizer = sgd(model)
        for step in range(12):
            loss_of(model(side.batch(step))).backward()
            optimizer.step()
            if alike or step != 3 or side.rank == 0:
                optimizer.zero_grad()
        side.weights("trained", model)

    again_from_a_checkpoint(side, model, training) if way else training(False)


# ---- gradients that ranks do not clip alike


def clip_and_train(
    side: Side, model: nn.Module, params: Any = None, max_norm: float = 0.1, norm_type: float = 2
) -> None:
    """Trains for six steps with gradients clipped by fsdp2's own function, or by torch's on the plain side."""
    clip = fsdp2.clip_grad_norm_ if side.is_sharded else torch.nn.utils.clip_grad_norm_
    optimizer = sgd(model)
    for step in range(6):
        loss_of(model(side.batch(step))).backward()
        clip(list(model.parameters()) if params is None else params(), max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(
    LOUD,
    "not on all ranks",
    only_ours=True,
    advises=(
        "Pass the same parameters, max_norm and norm_type on all ranks",
        "parameters without gradients may be among them. Load a checkpoint of before",
    ),
    ways="the same",
)
def some_parameters_clipped_on_a_rank(side: Side, way: str = "") -> None:
    """One rank clips half of the parameters, another all"""
    model = shard(side, Net())

    def training(alike: bool) -> None:
        clip_and_train(side, model, lambda: list(model.parameters())[:: 1 if alike else 1 + side.rank])

    again_from_a_checkpoint(side, model, training) if way else training(False)


@ends(LOUD, "max_norm=0.1, norm_type=2 on rank 0 and", only_ours=True)
def clipped_to_another_norm_on_a_rank(side: Side) -> None:
    """Ranks clip to different norms"""
    clip_and_train(side, shard(side, Net()), max_norm=0.1 * (1 + side.rank))


@ends(LOUD, "norm_type=1 on rank 1", only_ours=True)
def clipped_by_a_norm_of_another_order_on_a_rank(side: Side) -> None:
    """Ranks clip by norms of different orders"""
    clip_and_train(side, shard(side, Net()), norm_type=2 - side.rank)


@ends(
    LOUD,
    "head.weight",
    only_ours=True,
    advises="parameters without gradients may be among them",
    ways="without gradients",
)
def only_parameters_with_gradients_clipped(side: Side, way: str = "") -> None:
    """Ranks list the parameters that have gradients, and one rank has dropped a gradient"""
    model = shard(side, Net())

    def listed() -> list[Tensor]:
        if side.rank == 1 or way:
            model.head.weight.grad = None
        return [p for p in model.parameters() if way or p.grad is not None]

    clip_and_train(side, model, listed)


@ends(LOUD, "on ranks 0, 1 and", only_ours=True, ranks=4)
def other_parameters_clipped_in_a_replica(side: Side) -> None:
    """HSDP, and the ranks of one replica clip half of the parameters"""
    model = shard(side, Net(), **hsdp(side, 2))
    clip_and_train(side, model, lambda: list(model.parameters())[:: 1 + side.rank // 2])


@ends(EXACT)
def parameters_clipped_in_another_order_on_each_rank(side: Side) -> None:
    """Ranks clip the same parameters, each in an order of its own (a set's, for example)"""
    model = shard(side, Net())
    clip_and_train(side, model, lambda: list(model.parameters())[:: 1 - 2 * side.rank])


# ---- gradients that are plain tensors


class ScaledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def hook_and_train(side: Side, model: ScaledNet) -> None:
    """Hooks return whole gradients, and one of them its part; gradients are accumulated and clipped."""
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]).unsqueeze(1)
    model.stem.weight.register_hook(lambda g: whole(g) * mask)
    model.head.bias.register_hook(lambda g: whole(g).cumsum(0))
    model.blocks[0].up.weight.register_hook(lambda g: local(g) * 2)
    model.scale.register_hook(lambda g: whole(g) / 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for number in range(2):
            loss_of(model(side.batch(2 * step + number))).backward()
        side.grads(f"step {step}", model)
        (fsdp2 if side.is_sharded else nn.utils).clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT, only_ours=True)
def hooks_that_return_plain_gradients(side: Side) -> None:
    """Hooks of parameters return plain gradients (only new rows are trained, for example)"""
    hook_and_train(side, shard(side, ScaledNet()))


@ends(EXACT, only_ours=True, ranks=4)
def hooks_that_return_plain_gradients_in_replicas(side: Side) -> None:
    """The same, with HSDP and more ranks than rows"""
    hook_and_train(side, shard(side, ScaledNet(), **hsdp(side, 2)))


@ends(
    LOUD,
    "stem.weight: expected a hook of this parameter to return",
    only_ours=True,
    advises="Have it return the whole gradient, or distribute_tensor(whole, p.device_mesh, p.placements)",
    ways=("whole", "distributed"),
)
def a_hook_that_returns_some_rows(side: Side, way: str = "") -> None:
    """A hook returns the gradient of some rows only"""
    model = shard(side, Net())
    weight = model.stem.weight
    if way == "whole":
        weight.register_hook(lambda g: whole(g) * 2)
    elif way:
        weight.register_hook(lambda g: distributed(whole(g) * 2, weight))
    elif side.is_sharded:
        weight.register_hook(lambda g: whole(g)[:1])
    train(side, model)


@ends(
    LOUD,
    "The gradient of stem.weight is a plain tensor",
    advises="Assign distribute_tensor(gradient, p.device_mesh, p.placements) of the whole gradient, on every rank",
    ways="distributed",
)
def a_plain_gradient_assigned(side: Side, way: str = "") -> None:
    """A plain gradient is assigned to `.grad` before the step"""
    model = shard(side, Net())
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    gradient = whole(model.stem.weight.grad).clone()
    model.stem.weight.grad = distributed(gradient, model.stem.weight) if way else gradient
    optimizer.step()
    side.weights("trained", model)


class FactoredSGD(torch.optim.Optimizer):
    """Divides by a running mean of each row, which is a plain tensor (Adafactor of transformers)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            rows = self.state[param].setdefault("rows", torch.zeros(len(param)))
            rows.mul_(0.9).add_(param.grad.square().flatten(1).mean(1) if param.dim() > 1 else param.grad.square())
            param.sub_((param.grad.T / (1 + rows)).T * 0.1)


@ends(
    LOUD,
    "This operation of FactoredSGD takes no DTensors",
    only_ours=True,
    advises="if that refuses it, use an optimizer that takes",
    ways="another",
)
def an_optimizer_with_plain_factors(side: Side, way: str = "") -> None:
    """An optimizer of a library keeps plain factors of its states"""
    model = shard(side, Net())
    optimizer: Any = FactoredSGD(model.parameters())
    if way:
        with pytest.raises(TypeError):
            fsdp2.flatten_optimizer(optimizer)
        optimizer = sgd(model)
    train(side, model, optimizer)


# ---- states of optimizers that are plain tensors, or belong to others


class PlainStates(torch.optim.Optimizer):
    """Keeps momenta of this rank's rows in plain tensors, or four numbers of whole gradients by which it divides."""

    def __init__(self, params: Any, of_rows: bool, distributes: bool = False) -> None:
        super().__init__(params, {"lr": 0.3})
        self.of_rows, self.distributes = of_rows, distributes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            gradient, state = local(param.grad), self.state[param]
            state["number"] = state.get("number", torch.zeros(1)) + 1
            if self.of_rows:
                rows = torch.zeros_like(gradient)
                if self.distributes and isinstance(param, DTensor):
                    options = {"shape": param.shape, "stride": param.stride()}
                    rows = DTensor.from_local(rows, param.device_mesh, param.placements, **options)
                kept = local(state.setdefault("kept", rows))
                gradient = kept.mul_(0.5).add_(gradient)
            else:
                full = whole(param.grad)
                kept = state.setdefault("kept", torch.ones(4))
                kept.add_(torch.stack([full.norm(), full.amax(), full.amin(), full.abs().mean()]))
            local(param).sub_(gradient / (1 if self.of_rows else kept.norm()), alpha=0.3)
        torch.autograd.graph.increment_version(self.param_groups[0]["params"])


def save_and_train_on(side: Side, of_rows: bool, in_files: bool = False, distributes: bool = False) -> None:
    """Trains, saves states, spoils them, loads them, and trains on."""
    model = shard(side, Net())
    optimizer = PlainStates(model.parameters(), of_rows, distributes)
    train(side, model, optimizer, name="before")
    if in_files or not side.is_sharded:
        states = copy.deepcopy(optimizer.state_dict())
    else:
        folder = [tempfile.mkdtemp() if side.rank == 0 else None]
        dist.broadcast_object_list(folder)
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=folder[0])
    for state in optimizer.state.values():
        local(state["kept"]).fill_(7)
    if in_files or not side.is_sharded:
        optimizer.load_state_dict(states)
    else:
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(states, checkpoint_id=folder[0])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    train(side, model, optimizer)


@ends(
    LOUD,
    "kept of stem.weight",
    only_ours=True,
    advises=(
        "Have the optimizer make each one a DTensor, DTensor.from_local(local, p.device_mesh, p.placements",
        "or save optimizer.state_dict() in a file of each rank",
    ),
    ways="from_local",
)
def states_of_own_rows_in_a_distributed_checkpoint(side: Side, way: str = "") -> None:
    """An optimizer keeps states of each rank's rows in plain tensors, and a distributed checkpoint saves them"""
    save_and_train_on(side, of_rows=True, distributes=bool(way))


@ends(EXACT, only_ours=True, follows="states_of_own_rows_in_a_distributed_checkpoint")
def states_of_own_rows_in_a_file_of_each_rank(side: Side) -> None:
    """The same, and each rank saves its own state dict"""
    save_and_train_on(side, of_rows=True, in_files=True)


def carry_on(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, states: Any, way: str) -> None:
    """Gives an optimizer of before the sharded parameters, and begins anew, or with its states, as `way` says."""
    give_sharded_parameters(optimizer, model)
    if way == "loaded":
        optimizer.load_state_dict(states)
    elif way:
        optimizer.state.clear()
    train(side, model, optimizer)


BEGINS_ANEW: dict[str, Any] = {
    "says": "would begin anew",
    "advises": "optimizer.load_state_dict(states) when the groups have the sharded parameters; or call "
    "optimizer.state.clear()",
    "ways": ("loaded", "cleared"),
}


@ends(EXACT, only_ours=True)
def plain_states_that_ranks_have_in_common(side: Side) -> None:
    """An optimizer keeps states of whole gradients in plain tensors, and a distributed checkpoint saves them"""
    save_and_train_on(side, of_rows=False)


def give_sharded_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Puts the model's parameters into the groups of an optimizer built before, as accelerate's prepare does."""
    params = iter(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [next(params) for _ in group["params"]]


def step_plainly(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Takes two steps on the whole batch, before fully_shard."""
    for step in range(2):
        loss_of(model(Side().batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


@ends(LOUD, **BEGINS_ANEW)
def an_optimizer_that_has_stepped_before_sharding(side: Side, way: str = "") -> None:
    """An optimizer has stepped, then the model is sharded, and the groups get the sharded parameters"""
    model = Net()
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": params[:5]}, {"params": params[5:], "lr": 0.05}], lr=0.1)
    step_plainly(side, model, optimizer)
    states = optimizer.state_dict()
    del params
    shard(side, model)
    carry_on(side, model, optimizer, states, way)


@ends(LOUD, **BEGINS_ANEW)
def an_optimizer_loaded_before_sharding(side: Side, way: str = "") -> None:
    """The same, of an optimizer that has loaded a state dict"""
    model = Net()
    optimizer = sgd(model)
    step_plainly(side, model, optimizer)
    states, optimizer = optimizer.state_dict(), sgd(model)
    optimizer.load_state_dict(states)
    shard(side, model)
    carry_on(side, model, optimizer, states, way)


@ends(LOUD, **BEGINS_ANEW)
def an_optimizer_of_another_copy_that_has_stepped(side: Side, way: str = "") -> None:
    """The same, where the model that is sharded is another one, made on meta and loaded"""
    model = Net()
    optimizer = sgd(model)
    step_plainly(side, model, optimizer)
    states, weights, other = optimizer.state_dict(), model.state_dict(), model
    if side.is_sharded:
        with torch.device("meta"):
            other = shard(side, Net())
        other.to_empty(device="cpu")
        loaded(side, other, weights)
    carry_on(side, other, optimizer, states, way)


@ends(EXACT)
def states_of_a_group_that_was_removed(side: Side) -> None:
    """An optimizer keeps the states of a plain parameter that it steps no more, of the shape of a sharded one"""
    model, loss_scale = shard(side, Net()), nn.Parameter(torch.ones(5))
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [loss_scale]})
    loss_scale.grad = torch.ones(5)
    optimizer.step()
    del optimizer.param_groups[1]
    train(side, model, optimizer)
