"""Defines the situations in which sharded training silently goes wrong, each a program that a user may write.

A program runs on a plain model and whole batches, which is the oracle, and on ranks that shard the model, where it must
end as its line says: EXACT, or LOUD with a message that contains the given text. See outcomes.py; a docstring is the
situation's name in the printed table.
"""

import copy
import dataclasses
import functools
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import DataParallelMeshDims, hf
from fsdp2.compression import Compression, sum_decoded
from models import TanhBlock, Wrapper
from outcomes import EXACT, LOUD, Program, Side, Situation

SITUATIONS: list[Situation] = []


def ends(how: str, says: str = "", **options: Any) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        SITUATIONS.append(Situation(program, how, says, **options))
        return program

    return add


# ---- what the programs have in common


class Block(TanhBlock):
    def __init__(self) -> None:
        super().__init__(5, 7)


class Net(nn.Module):
    """Layers of the root's own around blocks that are sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def shard(side: Side, model: Any, **options: Any) -> Any:
    for block in model.blocks:
        side.fully_shard(block, **options)
    return side.fully_shard(model, **options)


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.5, **options})


def train(side: Side, model: nn.Module, optimizer: Any = None, steps: int = 3, name: str = "trained") -> None:
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(name, model)


@torch.no_grad()
def follow(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        old.lerp_(new, 0.5)


def hsdp(side: Side, shards: int) -> dict[str, Any]:
    """Options for `fully_shard`: replicas of so many shards each."""
    if not side.is_sharded:
        return {}
    mesh = init_device_mesh("cpu", (side.num_ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh}


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


@ends(LOUD, "was built before fully_shard")
def optimizer_built_before_sharding(side: Side) -> None:
    """Optimizer built before fully_shard"""
    model = Net()
    optimizer = sgd(model)
    shard(side, model)
    train(side, model, optimizer)


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


@ends(LOUD, "set_requires_gradient_sync(True)")
def clipping_before_sync(side: Side) -> None:
    """Gradients clipped before they are synchronised"""
    model = shard(side, Net())
    side.set_sync(model, False)
    loss_of(model(side.batch(0))).backward()
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


# ---- weights used, or written, outside their module's forward


@ends(EXACT)
def full_tensor_in_the_loss(side: Side) -> None:
    """A loss that uses `weight.full_tensor()`"""
    model = shard(side, Net())
    weight = model.head.weight
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    loss_of(model(side.batch(0)) @ weight).backward()
    side.grads("gradients", model)


def whole_by_redistribute(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local()


@ends(EXACT)
def weight_redistributed_in_the_loss(side: Side) -> None:
    """The same by `redistribute(placements=[Replicate()])` and `to_local()`"""
    model = shard(side, Net())
    for step in range(2):
        weight = whole_by_redistribute(model.head.weight)
        loss_of(model(side.batch(step)) @ weight).backward()
    side.grads("gradients", model)


@ends(LOUD, "Call full_tensor() on the parameter, or on what is computed from it")
def weight_gathered_in_the_loss(side: Side) -> None:
    """The same by a functional all-gather of the shards"""
    model = shard(side, Net())
    weight = model.head.weight
    if isinstance(weight, DTensor):
        mesh, local = weight.device_mesh, weight.to_local()
        rows = -(-len(weight) // mesh.size(mesh.ndim - 1))
        padded = nn.functional.pad(local, (0, 0, 0, rows - len(local)))
        weight = functional_collectives.all_gather_tensor_autograd(padded, 0, shard_group(weight))[: len(weight)]
    loss_of(model(side.batch(0)) @ weight).backward()
    side.grads("gradients", model)


def shard_group(tensor: DTensor) -> Any:
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


@ends(LOUD, "Call full_tensor() on the parameter, or on what is computed from it")
def penalty_summed_over_shards(side: Side) -> None:
    """The norm of all weights, of squares of local tensors that a functional all-reduce sums"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        square = torch.stack([each.square().sum() for each in locals_]).sum()
        if side.is_sharded:
            square = functional_collectives.all_reduce(square, "sum", shard_group(model.head.weight))
        (loss_of(model(side.batch(step))) + 0.1 * square.sqrt()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def parameters_found_by_address(side: Side) -> None:
    """A client finds an optimizer's parameters by the address of what they hold"""

    def address(param: Any) -> int:
        return (param._local_tensor if type(param) is DTensor else param).data_ptr()

    model = shard(side, Net())
    names = {address(param): name for name, param in model.named_parameters() if name.endswith("weight")}
    params = [param for param in sgd(model).param_groups[0]["params"] if address(param) in names]
    for param in params:
        with torch.no_grad():
            param.mul_(1 + len(names[address(param)]))
    side.weights("by the length of their names", model)


@ends(EXACT)
def collectives_counted(side: Side) -> None:
    """`CommDebugMode` around `clip_grad_norm_`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    with CommDebugMode() as counted:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    weight = model.head.weight
    has_shards = isinstance(weight, DTensor) and weight.device_mesh.size(weight.device_mesh.ndim - 1) > 1
    side.value("all are seen", counted.get_total_counts() == has_shards)
    side.grads("clipped", model)


@ends(EXACT, only_ours=True)
def full_params_in_the_loss(side: Side) -> None:
    """The same with `full_params(weight)`"""
    model = shard(side, Net())
    output = model(side.batch(0))
    if side.is_sharded:
        with side.library.full_params(model.head.weight) as weight:
            loss = loss_of(output @ weight)
    else:
        loss = loss_of(output @ model.head.weight)
    loss.backward()
    side.grads("gradients", model)


@ends(LOUD, "between unshard() and reshard()")
def written_between_unshard_and_reshard(side: Side) -> None:
    """Weights written between `unshard()` and `reshard()`"""
    model = side.fully_shard(Block())
    if side.is_sharded:
        model.unshard()
    with torch.no_grad():
        model.up.weight.mul_(2)
    if side.is_sharded:
        model.reshard()
    side.rows("output", model(side.batch(0)))


def writes_data_in_full_params(side: Side, **options: Any) -> None:
    model = side.fully_shard(Block())
    with side.library.full_params(model, **options) if side.library is not None else nullcontext():
        model.up.weight.data.mul_(2)
    side.rows("output", model(side.batch(0)))


@ends(EXACT, only_ours=True)
def written_in_full_params(side: Side) -> None:
    """The same in `full_params(..., writeback=True)`"""
    writes_data_in_full_params(side, writeback=True)


@ends(LOUD, "full_params(module, writeback=True)", only_ours=True)
def data_written_in_full_params(side: Side) -> None:
    """The same through `.data`, in copies that `full_params(..., offload_to_cpu=True)` lends"""
    writes_data_in_full_params(side, offload_to_cpu=True)


@ends(LOUD, "full_params(module, writeback=True)", only_ours=True)
def data_written_in_a_block(side: Side) -> None:
    """The same in `full_params(...)`, where they are what forwards compute with"""
    writes_data_in_full_params(side)


@ends(LOUD, "copy what you keep", only_ours=True)
def list_of_streamed_weights(side: Side) -> None:
    """A list of all weights that `stream_full_params` delivers, read after the loop"""
    model = shard(side, Net())
    kept = list(model.parameters())
    if side.is_sharded:
        kept = [each for bucket in side.library.stream_full_params(model) for each in bucket.tensors.values()]
    side.rows("output", model(side.batch(0)) * sum(float(each.detach().norm()) for each in kept))


@ends(EXACT)
def rows_of_a_gradient_cleared(side: Side) -> None:
    """Only some rows of an embedding are trained: `weight.grad[:5].zero_()`"""
    model = side.fully_shard(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)))
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(side.batch(step)[:, 0].abs().mul(20).long() % 9)).backward()
        model[0].weight.grad[:5].zero_()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def rows_initialised(side: Side) -> None:
    """Built on meta, `reset_parameters` of an embedding with a padding row"""
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = nn.Sequential(nn.Embedding(9, 5, padding_idx=1), nn.Linear(5, 3))
    side.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model:
        module.reset_parameters()
    side.weights("initial", model)


@ends(LOUD, "full_params(module, writeback=True)")
def row_set_to_a_mean(side: Side) -> None:
    """A row of an embedding, of a new token, set to the mean of the others"""
    model = side.fully_shard(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)))
    with torch.no_grad():
        model[0].weight[-1].copy_(model[0].weight[:-1].mean(0))
    side.weights("initial", model)


@ends(EXACT)
def line_search(side: Side) -> None:
    """An optimizer that searches along a line, by the loss of each rank's rows: LBFGS"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(side.batch(0)))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    side.weights("trained", model)


@ends(EXACT)
def weights_kept_near_others(side: Side) -> None:
    """A regulariser: `mse_loss` of weights and what they were"""
    model = shard(side, Net())
    others = [param.detach() * 0.5 for param in model.parameters()]
    optimizer = sgd(model)
    for step in range(2):
        terms = [nn.functional.mse_loss(param, other) for param, other in zip(model.parameters(), others, strict=True)]
        loss_of(model(side.batch(step))).backward()
        sum(term.full_tensor() if isinstance(term, DTensor) else term for term in terms).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "modified in place during forward")
def written_in_forward(side: Side) -> None:
    """Weights written in a forward"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            return super().forward(x)

    model = side.fully_shard(Normalised(5, 3))
    train(side, model)


@ends(LOUD, "modified in place during forward")
def data_written_in_forward(side: Side) -> None:
    """The same through `.data`"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.div_(self.weight.data.norm())
            return super().forward(x)

    model = side.fully_shard(Normalised(5, 3))
    train(side, model)


@ends(LOUD, "modified in place during forward")
def data_assigned_in_forward(side: Side) -> None:
    """Others assigned to `.data` in a forward"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.detach() / self.weight.detach().norm()
            return super().forward(x)

    model = side.fully_shard(Normalised(5, 3))
    train(side, model)


@ends(EXACT)
def later_weights_written_in_forward(side: Side) -> None:
    """Weights of a later block written in the model's forward"""

    class Normalises(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for block in self.blocks:
                    block.up.weight.div_(block.up.weight.norm())
            return super().forward(x)

    model = shard(side, Normalises())
    train(side, model)


@ends(EXACT)
def averages_in_place_of_weights(side: Side) -> None:
    """Averaged weights registered for an evaluation, then the trained ones again"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = [(m, name, param) for m in model.modules() for name, param in m._parameters.items()]
        for module, name, param in trained:
            setattr(module, name, nn.Parameter(param.detach() * 0.5))
        with torch.no_grad():
            side.rows(f"average {step}", model(side.batch(5)))
        for module, name, param in trained:
            setattr(module, name, param)
    side.weights("trained", model)


@ends(EXACT)
def replaced_before_backward(side: Side) -> None:
    """A parameter replaced between forward and backward"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    up = model.blocks[0].up
    up.weight = nn.Parameter(up.weight.detach() * 0.5)
    loss.backward()
    model.zero_grad()
    side.rows("output", model(side.batch(1)))


@ends(EXACT)
def functional_call(side: Side) -> None:
    """`functional_call` with other weights, and with the model's afterwards"""
    model = shard(side, Net())
    chosen = {name: param.detach().mul(0.5).requires_grad_() for name, param in model.named_parameters()}
    loss_of(torch.func.functional_call(model, chosen, (side.batch(0),))).backward()
    for name, value in chosen.items():
        side.value(name, value.grad)
    train(side, model)


@ends(LOUD, "to which gradients would not flow")
def functional_call_with_computed_weights(side: Side) -> None:
    """`functional_call` with weights that are computed from the model's"""
    model = shard(side, Net())
    computed = {name: param * 0.5 for name, param in model.named_parameters()}
    loss_of(torch.func.functional_call(model, computed, (side.batch(0),))).backward()
    side.grads("gradients", model)


@ends(EXACT)
def data_assigned(side: Side) -> None:
    """Averages by `p.data = ...`, kept, assigned for an evaluation, and taken back"""
    model = shard(side, Net())
    optimizer = sgd(model)
    average = {name: param.data.clone() for name, param in model.named_parameters()}
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            average[name] = 0.5 * average[name] + 0.5 * param.data
        trained = {name: param.data for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            param.data = average[name]
        with torch.no_grad():
            side.rows(f"average {step}", model(side.batch(5)))
        for name, param in model.named_parameters():
            param.data = trained[name]
    side.weights("trained", model)


@ends(EXACT)
def data_written(side: Side) -> None:
    """`p.data` written to, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        for param in model.parameters():
            param.data.sub_(0.1 * param.grad)
        model.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def data_read(side: Side) -> None:
    """`p.data` read between forward and backward"""
    model = shard(side, Net())
    average = [param.data.clone() for param in model.parameters()]
    for step in range(3):
        loss = loss_of(model(side.batch(step)))
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.lerp_(param.data, 0.1)
        loss.backward()
    side.grads("gradients", model)


@ends(EXACT)
def state_dict_written(side: Side) -> None:
    """A state dict that was taken before loaded into, as `dcp.load` does, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    state = model.state_dict()
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
    for value in state.values():
        (value.to_local() if side.is_sharded else value).mul_(0.5)
    with torch.no_grad():
        side.rows("outputs", model(side.batch(2)))


@ends(LOUD, "is not what the sharded parameter holds")
def data_of_shards_written(side: Side) -> None:
    """`p.to_local().data` written to, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    params = list(model.parameters())  # as an optimizer holds them
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        for param in params:
            local, gradient = (t.to_local() if side.is_sharded else t for t in (param, param.grad))
            local.data.sub_(0.1 * gradient)
            param.grad = None
    side.weights("trained", model)


@ends(EXACT)
def foreach_operations(side: Side) -> None:
    """foreach operations on weights, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.9)
        model.zero_grad()
        side.rows(f"output {step}", model(side.batch(step)))


@ends(EXACT)
def noise_like_weights(side: Side) -> None:
    """Noise drawn by `randn_like(p)`"""
    model = shard(side, Net())
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    side.weights("noisy", model)


@ends(EXACT)
def noise_of_each_ranks_seed(side: Side) -> None:
    """The same in replicas, where each rank has a seed of its own (for dropout): all draw what the first does"""
    model = shard(side, Net(), **hsdp(side, 1))
    torch.manual_seed(side.rank)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    side.weights("noisy", model)


@ends(LOUD, "full_tensor()")
def norms_added_to_a_plain_total(side: Side) -> None:
    """`total += param.grad.norm()` with a plain total"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    total = torch.zeros(())
    for param in model.parameters():
        total += param.grad.norm() ** 2
    side.value("norm", total.sqrt())


@ends(EXACT)
def backward_of_chosen_parameters(side: Side) -> None:
    """`backward(inputs=...)` with parameters of the model"""
    model = shard(side, Net())
    for step in range(2):
        loss_of(model(side.batch(step))).backward(inputs=list(model.blocks.parameters()))
    side.grads("gradients", model)


@ends(EXACT)
def penalty_added_to_the_loss(side: Side) -> None:
    """`loss + penalty` of all parameters (L2, EWC)"""
    model = shard(side, Net())
    for step in range(2):
        penalty = sum(param.square().sum() for param in model.parameters())
        (loss_of(model(side.batch(step))) + 0.1 * penalty).backward()
    side.grads("gradients", model)


@ends(LOUD, "penalty.full_tensor()")
def penalty_added_by_a_function(side: Side) -> None:
    """The same by `torch.add(loss, penalty)`"""
    model = shard(side, Net())
    torch.add(loss_of(model(side.batch(0))), model.head.weight.square().sum()).backward()
    side.grads("gradients", model)


class Weighted(Net):
    """With the logarithm of a loss's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(()))


@ends(EXACT)
def weight_of_this_ranks_number(side: Side) -> None:
    """A scalar parameter outside forward, times what each rank's rows come to (SAC's temperature)"""
    model = shard(side, Weighted())
    optimizer = sgd(model)
    for step in range(3):
        output = model(side.batch(step))
        own = output.detach().square().mean()
        (loss_of(output) - model.log_weight.exp() * (own - 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "call backward(inputs=...)")
def gradients_by_parameters(side: Side) -> None:
    """`torch.autograd.grad` by the model's parameters, unused ones allowed"""
    model = shard(side, Net())
    params = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss_of(model(side.batch(0))), list(params.values()), allow_unused=True)
    for name, slope in zip(params, slopes, strict=True):
        side.value(name, slope)


class Adjoint(torch.autograd.Function):
    """Keeps no graph, but runs the module once more in backward, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *params)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.module(x)
        return None, *torch.autograd.grad(output, (x, *params), gradient, allow_unused=True)


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(Adjoint.apply(self.inner, x, *self.inner.parameters()))


@ends(LOUD, "inner.weight: torch.autograd.grad has no gradients of sharded parameters")
def adjoint_of_a_sharded_module(side: Side) -> None:
    """A function asks for gradients by the parameters that it has saved, of a module sharded by itself"""
    model = Solver()
    side.fully_shard(model.inner)
    train(side, side.fully_shard(model))


@ends(EXACT)
def adjoint_in_one_group(side: Side) -> None:
    """The same, of a module that shares the group of the one around it"""
    train(side, side.fully_shard(Solver()))


class KeepsReferences(Net):
    """Holds weights where no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [block.up.weight for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight.T) @ weight
        return super().forward(x)


@ends(LOUD, "no parameter of the model any more")
def weights_in_a_list(side: Side) -> None:
    """Weights that a model keeps in a list of its own"""
    train(side, shard(side, KeepsReferences()))


@ends(LOUD, "no parameter of the model any more")
def tied_to_a_module_outside(side: Side) -> None:
    """Weights tied to a module that is not sharded"""
    model, head = Net(), nn.Linear(5, 5).double()
    head.weight = model.stem.weight
    shard(side, model)
    loss_of(model(side.batch(0)) @ head.weight[:3]).backward()
    side.grads("gradients", model)


@ends(LOUD, "has a gradient, of which nobody knows")
def gradients_from_before(side: Side) -> None:
    """Gradients from before `fully_shard`"""
    model = Net()
    loss_of(model(side.batch(0))).backward()
    shard(side, model)
    train(side, model)


@ends(LOUD, "this rank holds a value that is still to be reduced")
def items(side: Side) -> None:
    """`p.norm().item()`"""
    model = shard(side, Net())
    side.value("norms", [param.norm().item() for param in model.parameters()])


@ends(EXACT)
def not_a_number(side: Side) -> None:
    """`if p.grad.isnan().any():`, on two ranks one of which has some"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        last = torch.arange(5.0) == 4
        if side.is_sharded:
            last = distribute_tensor(last, model.stem.bias.device_mesh, model.stem.bias.placements)
        model.stem.bias.grad.masked_fill_(last, float("nan"))
    found = [name for name, param in model.named_parameters() if param.grad.isnan().any()]
    side.value("not a number", found)


@ends(EXACT)
def flags_counted(side: Side) -> None:
    """`p.grad.isnan().any().float()`, added up, or a factor of the gradient; and counts, as of zeros"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    flags = [(param.grad.abs() > 1e-9).any() for param in model.parameters()]
    side.value("sum", sum(flag.double() for flag in flags))
    side.value("stacked", torch.stack(flags).sum())
    counts = [(param > 0).sum() for param in model.parameters()]
    side.value("counted", sum(counts))
    side.value("share", sum(counts[1:], counts[0]) / 3)
    with torch.no_grad():
        for param, flag in zip(model.parameters(), flags, strict=True):
            param.grad.mul_(flag.double())
    side.grads("gradients", model)


@ends(EXACT)
def norms_of_columns_added(side: Side) -> None:
    """`p.norm(dim=0).sum()` (group lasso), as a value and as a penalty"""
    model = shard(side, Net())
    penalty = sum(block.up.weight.norm(dim=0).sum() for block in model.blocks)
    side.value("value", penalty.detach())
    (loss_of(model(side.batch(0))) + 0.1 * penalty).backward()
    side.grads("gradients", model)


@ends(EXACT)
def statistics_stacked(side: Side) -> None:
    """`torch.stack([p.mean(), p.norm(), p.max(), p.sum()])`"""
    model = shard(side, Net())
    for name, param in model.named_parameters():
        side.value(name, torch.stack([param.mean(), param.norm(), param.max(), param.sum()]).detach())


@ends(EXACT)
def norms_clamped_in_place(side: Side) -> None:
    """`p.norm().clamp_(min=...)` (adaptive clipping), and numbers filled"""
    model = shard(side, Net())
    for name, param in model.named_parameters():
        side.value(f"{name}: norm", param.detach().norm().clamp_(min=0.5))
        side.value(f"{name}: filled", param.detach().sum().fill_(2.0))


@ends(EXACT)
def item_of_one_element(side: Side) -> None:
    """`log_alpha.exp().item()` of a sharded parameter of one element (SAC)"""
    model = side.fully_shard(nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(2):
        temperature = model.bias.exp().item()
        (temperature * loss_of(model(side.batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.value(f"{step}", [temperature, bool(model.bias > 0)])
    side.weights("trained", model)


@ends(LOUD, "each rank holds another shard of it")
def broadcast_by_hand(side: Side) -> None:
    """`dist.broadcast` of parameters, as before DDP"""
    model = shard(side, Net())
    for param in model.parameters() if side.is_sharded else ():
        torch.distributed.broadcast(param.data, 0)
    train(side, model)


@ends(LOUD, "each rank holds another shard of it")
def gradients_averaged_by_hand(side: Side) -> None:
    """`dist.all_reduce` of gradients, as without DDP"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    for param in model.parameters() if side.is_sharded else ():
        torch.distributed.all_reduce(param.grad)
    side.grads("gradients", model)


@ends(LOUD, "Remove DistributedDataParallel")
def ddp_around(side: Side) -> None:
    """DDP around a sharded model"""
    model: Any = shard(side, Net())
    if side.is_sharded:
        model = nn.parallel.DistributedDataParallel(model)
    side.rows("output", model(side.batch(0)))


@ends(EXACT)
def transforms_around(side: Side) -> None:
    """Trained on a gradient by its inputs from `torch.func.grad`"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(3):
        loss_of(torch.func.grad(lambda x: model(x).square().sum())(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def parameters_as_a_vector(side: Side) -> None:
    """`parameters_to_vector`, of ranks that hold different numbers of rows: a penalty"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        penalty = nn.utils.parameters_to_vector(model.parameters()).square().sum()
        (loss_of(model(side.batch(step))) + (penalty.full_tensor() if side.is_sharded else penalty)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def penalties_apart(side: Side) -> None:
    """Two gradient penalties, each with a graph and a backward of its own"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        inputs = [side.batch(2 * step + i).requires_grad_() for i in range(2)]
        slopes = [torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0] for x in inputs]
        for slope in slopes:
            slope.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "set_optimizer_in_backward")
def optimizers_in_backward(side: Side) -> None:
    """`_apply_optimizer_in_backward`, which steps where autograd accumulates"""
    from torch.distributed.optim import _apply_optimizer_in_backward  # with a warning

    model = shard(side, Net())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
    side.weights("trained", model)


class InThree(nn.Linear):
    """Has a state dict in which its weight is in three parts."""

    def __init__(self) -> None:
        super().__init__(5, 9, bias=False)
        self.register_state_dict_post_hook(self.split)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state.update(zip("qkv", state.pop(f"{prefix}weight").chunk(3), strict=True))


@ends(LOUD, "Take the view again, or the state dict that has it, on every rank")
def checkpoints_of_parts(side: Side) -> None:
    """A checkpoint of parts of a weight, which a hook splits, taken once; saved after training, and loaded in place"""
    model, other = side.fully_shard(InThree()), side.fully_shard(InThree())
    state = model.state_dict()
    train(side, model)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if side.is_sharded:
            dist.broadcast_object_list(folders)
        dcp.save(state, checkpoint_id=folders[0], no_dist=not side.is_sharded)
        dcp.load(other.state_dict(), checkpoint_id=folders[0], no_dist=not side.is_sharded)
        side.weights("loaded", other)


class ExitsEarly(Net):
    def forward(self, x: Tensor, early: bool = False) -> Tensor:
        return self.stem(x) if early else super().forward(x)


@ends(EXACT)
def hook_on_several_gradients(side: Side) -> None:
    """`torch.autograd.graph.register_multi_grad_hook` on parameters, of which some get no gradient"""
    model, calls = shard(side, ExitsEarly()), []
    params = list(model.parameters())

    def note(grads: Any) -> None:
        calls.append([grad is not None for grad in grads])

    torch.autograd.graph.register_multi_grad_hook(params, note)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        loss_of(model(side.batch(step), early=True)).backward()
    side.value("calls", calls)


# ---- parts of the root, used between its forward and its backward


class Hidden(Net):
    """Returns hidden states: a loss calls what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def kept_for_backward(side: Side) -> Any:
    return shard(side, Hidden(), reshard_after_forward=None)


def chunked_loss(model: Any, x: Tensor, call: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__) -> Tensor:
    chunks = model(x).chunk(2)
    return sum(loss_of(call(model.head, model.norm(chunk))) for chunk in chunks) / 2


@ends(EXACT)
def head_called_on_chunks(side: Side) -> None:
    """The loss calls norm and head on chunks of what the model has returned, also while gradients accumulate"""
    model = kept_for_backward(side)
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2):
            side.set_sync(model, part == 1)
            chunked_loss(model, side.batch(2 * step + part)).backward()
        side.grads(f"gradients {step}", model)
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def head_checkpointed_on_chunks(side: Side) -> None:
    """The same, where activation checkpointing runs the head again in backward"""
    model = kept_for_backward(side)
    for use_reentrant in (False, True):
        run = functools.partial(checkpoint, use_reentrant=use_reentrant)
        chunked_loss(model, side.batch(int(use_reentrant)), run).backward()
        side.grads(f"gradients {use_reentrant}", model)


@ends(EXACT)
def hidden_states_projected(side: Side) -> None:
    """Distillation: the head and the stem also run on states that a hook has kept, with and without gradients"""
    model, kept = shard(side, Net(), reshard_after_forward=None), []
    model.blocks[0].register_forward_hook(lambda _, args, output: kept.append(output))
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(side.batch(step)))
        with torch.no_grad():
            target = model.head(kept[-1] * 0.5)
            side.rows(f"target {step}", target)
        loss = loss + (model.head(model.stem(kept[-1])) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def block_called_after_forward(side: Side) -> None:
    """Parts of a block are called after the forward, and after an evaluation, where `reshard_after_forward=False`"""
    model = shard(side, Net(), reshard_after_forward=False)
    optimizer = sgd(model)
    for step in range(2):
        with torch.no_grad():
            model(side.batch(step))
            side.rows(f"evaluated {step}", model.blocks[1].up(side.batch(step)))
        loss = loss_of(model(side.batch(step)))
        (loss + loss_of(model.blocks[1].up(model.stem(side.batch(9))))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "with fsdp2.full_params(model.head)")
def head_called_after_reshard(side: Side) -> None:
    """The head is called after `reshard`"""
    model = kept_for_backward(side)
    hidden = model(side.batch(0))
    if side.is_sharded:
        model.reshard()
    side.rows("output", model.head(hidden))


@ends(LOUD, "call full_tensor() on it")
def weights_read_after_forward(side: Side) -> None:
    """The loss reads the head's weight, which is sharded there"""
    model = kept_for_backward(side)
    loss_of(model(side.batch(0)) @ model.head.weight.t()).backward()
    side.grads("gradients", model)


@ends(EXACT)
def whole_weights_read_after_forward(side: Side) -> None:
    """The same by `full_tensor()`, as the error says"""
    model = kept_for_backward(side)
    hidden, weight = model(side.batch(0)), model.head.weight
    loss_of(hidden @ (weight.full_tensor() if isinstance(weight, DTensor) else weight).t()).backward()
    side.grads("gradients", model)


@ends(EXACT)
def interrupt_in_a_head(side: Side) -> None:
    """Ctrl-C while the loss calls the head, in a notebook that trains on"""
    model = kept_for_backward(side)
    optimizer = sgd(model)
    for error in (KeyboardInterrupt, ValueError):
        hidden = model(side.batch(0))

        def interrupt(*_: Any, error: type[BaseException] = error) -> None:
            raise error("stop")

        handle = model.head.register_forward_hook(interrupt)
        try:
            model.head(hidden)
        except error:
            handle.remove()
        for step in range(2):
            chunked_loss(model, side.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        side.weights(f"trained after {error.__name__}", model)


# ---- weights that modules compute from parameters


class LowRank(nn.Module):
    """Adds a product of two small matrices to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@ends(EXACT)
def parametrized_weights_logged(side: Side) -> None:
    """Norms of parametrized weights are logged between steps, and one is a penalty"""
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)], nn.Linear(5, 3))
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[1], dim=None)
    parametrize.register_parametrization(model[2], "weight", nn.Tanh())
    parametrize.register_parametrization(model[3], "weight", LowRank())
    side.fully_shard(model[1])
    side.fully_shard(model)
    optimizer = sgd(model)
    for step in range(2):
        for i in range(4):
            side.value(f"norm {i} at {step}", model[i].weight.norm().detach())
            side.value(f"weight {i} at {step}", model[i].weight.detach())
        (loss_of(model(side.batch(step))) + 0.1 * model[2].weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- classes that see their subclasses, or refuse changes


class Forked(nn.Module):
    """Layers of users' base classes do more to a subclass than sharding may cause."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def residual(cls: Any) -> None:
    own = cls.forward
    cls.forward = lambda self, x: x + own(self, x)


class ResidualOnce(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "forward" in vars(cls):
            residual(cls)


class ResidualAlways(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        residual(cls)


class MayNotOverride(Forked):
    def __init_subclass__(cls, **keywords: Any) -> None:
        if "forward" in vars(cls):
            raise TypeError(f"{cls.__name__} must not override forward")


class Registered(Forked):
    names: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str, **keywords: Any) -> None:
        if name in cls.names:
            raise ValueError(f"{name} is registered already")
        cls.names[name] = cls


class Final(Forked):
    def __init_subclass__(cls) -> None:
        raise TypeError(f"{cls.__name__}: Final can have no subclasses")


class Named(type):
    def __new__(cls, name: str, bases: Any, body: Any, *, prefix: str) -> Any:
        return super().__new__(cls, f"{prefix}{name}", bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, *, prefix: str) -> None:
        residual(cls)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name != "forward":
            raise AttributeError(f"{name}: a class that can't be changed")
        super().__setattr__(name, value)


class ByMetaclass(ResidualOnce, metaclass=Named, prefix="My"):
    pass


class Frozen(Forked):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["is_frozen"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "is_frozen" in vars(self):
            raise AttributeError(f"{name}: frozen after __init__")
        super().__setattr__(name, value)


class Adds(ResidualOnce):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class AddsOften(ResidualAlways):
    pass


class Overrides(MayNotOverride):
    pass


class HasName(Registered, name="has a name"):
    pass


@ends(EXACT)
def base_classes_that_see_subclasses(side: Side) -> None:
    """Base classes, and a metaclass, wrap the forward of each subclass, refuse subclasses or demand keywords"""
    layers = [cls() for cls in (Adds, AddsOften, Overrides, HasName, Final, ByMetaclass, Frozen)]
    model = nn.Sequential(*layers, nn.Linear(5, 3))
    for layer in layers:
        side.fully_shard(layer)
    train(side, side.fully_shard(model))
    later = type("Later", (Adds,), {"forward": Forked.forward})().requires_grad_(False)
    side.value("registered", Registered.names)
    side.value("a later subclass", later.forward(torch.ones(5)) - torch.tanh(later.linear(torch.ones(5))))
    side.value("instances", [isinstance(ResidualOnce(), type(layers[0])), isinstance(layers[0], Adds)])


class Generates(Net):
    def generate(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@ends(LOUD, "fsdp2.register_fsdp_forward_method(model, name)")
def another_method_than_forward(side: Side) -> None:
    """Another method than `forward` is called: `generate`"""
    model = shard(side, Generates())
    with torch.no_grad():
        side.rows("output", model.generate(side.batch(0)))


@ends(EXACT)
def a_registered_method(side: Side) -> None:
    """The same, registered by `register_fsdp_forward_method`"""
    model = shard(side, Generates())
    if side.is_sharded:
        side.library.register_fsdp_forward_method(model, "generate")
    loss_of(model.generate(side.batch(0))).backward()
    side.grads("gradients", model)


class Agent(nn.Module):
    """No forward, but methods of its own, and a parameter that none of the modules inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(5, 2), nn.Linear(5, 1)
        self.log_scale = nn.Parameter(torch.zeros(1, 2))

    def value(self, x: Tensor) -> Tensor:
        return self.critic(x)

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(self.actor(x)) * self.log_scale.exp()


def train_agent(side: Side, agent: Any) -> None:
    optimizer = sgd(agent)
    for step in range(3):
        with torch.no_grad():
            target = agent.value(side.batch(9))
        (loss_of(agent.act(side.batch(step))) + (agent.value(side.batch(step)) - target).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", agent)


@ends(EXACT)
def no_forward_but_registered_methods(side: Side) -> None:
    """A module without `forward`, whose methods are registered"""
    agent = side.fully_shard(Agent())
    for name in ("value", "act") if side.is_sharded else ():
        side.library.register_fsdp_forward_method(agent, name)
    train_agent(side, agent)


@ends(LOUD, "fsdp2.register_fsdp_forward_method(model, name)")
def no_forward_and_no_registered_methods(side: Side) -> None:
    """The same, not registered"""
    train_agent(side, side.fully_shard(Agent()))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.weight = Block(), nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Any:
        for row in x.split(1):
            yield self.block(row) @ self.weight


@ends(EXACT)
def a_forward_that_is_a_generator(side: Side) -> None:
    """`forward` is a generator, which computes with weights after it was called"""
    model = Rows()
    side.fully_shard(model.block)
    side.fully_shard(model)
    loss_of(torch.cat([*model(side.batch(0))])).backward()
    side.grads("gradients", model)


class Faster(nn.Module):
    """Takes over the parameters of a Linear, as `from_float` and convert_sync_batchnorm do."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@ends(LOUD, "Replace modules before fully_shard")
def a_layer_that_takes_over_parameters(side: Side) -> None:
    """A layer is replaced, after sharding, by one that takes over its parameters"""
    model: Any = shard(side, Net())
    model.stem = Faster(model.stem)
    train(side, model)


@ends(EXACT, only_ours=True)
def a_wrap_policy_that_matches_nothing(side: Side) -> None:
    """A wrap policy by size that no submodule of a small model meets"""
    model = Net()
    for group in side.library.wrap_groups(model, 10**9) if side.library is not None else ():
        side.fully_shard(group.module, **group.options)
    train(side, side.fully_shard(model))


@ends(LOUD, "scale_grad_by_freq")
def rows_by_frequency(side: Side) -> None:
    """An embedding whose gradient depends on how often indices occur"""
    model = side.fully_shard(nn.Embedding(6, 5, scale_grad_by_freq=True))
    indices = (side.batch(0)[:, :2] * 10).long() % 6
    model(indices).square().sum().backward()
    side.grads("gradients", model)


@ends(LOUD, "weight: expected .grad to be None or a DTensor")
def plain_gradient_by_hand(side: Side) -> None:
    """A plain, whole tensor put into `.grad` before a backward"""
    model = side.fully_shard(nn.Linear(5, 3))
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
    loss_of(model(side.batch(0))).backward()
    side.grads("all", model)


class KeepsOnCtx(torch.autograd.Function):
    """Computes x @ weight.T, and keeps the weight on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad @ ctx.weight, grad.T @ ctx.x


class Sided(nn.Module):
    """Its blocks' losses leave by attributes: backward comes to them before it comes to an output."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.multiply = nn.Linear(5, 5), multiply
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        for block in self.blocks:
            block.forward = functools.partial(self.run, block)  # type: ignore[assignment]

    def run(self, block: Any, x: Tensor) -> Tensor:
        passed_on = x * 2
        block.side = self.multiply(self.multiply(x, block.weight).tanh(), block.weight).square().mean()
        return passed_on

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, output: Tensor) -> Tensor:
        return loss_of(output) + sum(block.side for block in self.blocks)  # type: ignore[misc, operator]


@ends(EXACT)
def weights_kept_on_ctx(side: Side) -> None:
    """An autograd function that keeps its weight on `ctx`, and an auxiliary loss that comes to it first"""
    model = shard(side, Sided(KeepsOnCtx.apply))
    model.loss(model(side.batch(0))).backward()
    for name, param in model.named_parameters():
        side.value(name, param.grad)


@ends(EXACT)
def saved_tensor_hooks_of_ones_own(side: Side) -> None:
    """Saved-tensor hooks of one's own around a forward, and an auxiliary loss"""
    model = shard(side, Sided(nn.functional.linear))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        output = model(side.batch(0))
    model.loss(output).backward()
    for name, param in model.named_parameters():
        side.value(name, param.grad)


@ends(EXACT)
def views_kept_by_a_hook(side: Side) -> None:
    """A view of a weight that a forward hook keeps, read after an evaluation"""
    model = shard(side, Net())
    kept: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    with torch.no_grad():
        side.rows("output", model(side.batch(0)))
    side.value("kept", kept[0].clone())


# ---- parameters that nobody manages


@ends(LOUD, "stem.weight")
def trainable_ignored_parameters(side: Side) -> None:
    """Trainable `ignored_params`"""
    model = Net()
    shard(side, model, ignored_params={model.stem.weight})
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def ignored_parameters_that_the_user_reduces(side: Side) -> None:
    """Trainable `ignored_params` whose gradients the user averages"""
    model = Net()
    shard(side, model, ignored_params={model.stem.weight})
    optimizer = sgd(model, foreach=False)
    for step in range(4):
        loss_of(model(side.batch(step))).backward()
        if side.is_sharded:
            torch.distributed.all_reduce(model.stem.weight.grad)
            model.stem.weight.grad /= side.num_ranks
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "head.adapter.weight")
def adapters_added_after_sharding(side: Side) -> None:
    """Adapters added after fully_shard"""
    model = shard(side, Net())
    model(side.batch(9))
    model.head.adapter = nn.Linear(5, 3, bias=False)
    model.head.register_forward_hook(lambda head, args, output: output + head.adapter(args[0]))
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def a_head_that_comes_later_sharded(side: Side) -> None:
    """A module put in place of another, which `fully_shard` was applied to by itself"""
    model = shard(side, Net())
    train(side, model, steps=4, name="before")
    torch.manual_seed(4)
    model.head = nn.Linear(5, 3)
    side.fully_shard(model.head)
    train(side, model, sgd(model, foreach=False), steps=10)


@ends(LOUD, "head.weight")
def a_head_replaced_between_looks(side: Side) -> None:
    """A plain module put in place of another behind the fourth step, trained on each rank's gradient"""
    model = shard(side, Net())
    train(side, model, steps=4, name="before")
    torch.manual_seed(4)
    model.head = nn.Linear(5, 3)
    train(side, model, sgd(model, foreach=False), steps=70)


@ends(LOUD, "no fully_shard call manages it. It was the same on all ranks, and is not any more")
def blocks_sharded_and_no_more(side: Side) -> None:
    """`fully_shard` of the blocks, not of the model around them: its own layers are trained by each rank"""
    model = Net()
    for block in model.blocks:
        side.fully_shard(block)
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def blocks_sharded_and_the_rest_averaged(side: Side) -> None:
    """The same, where the user averages the gradients of the rest"""
    model = Net()
    for block in model.blocks:
        side.fully_shard(block)
    optimizer = sgd(model, foreach=False)
    for step in range(6):
        loss_of(model(side.batch(step))).backward()
        for parameter in [*model.stem.parameters(), *model.head.parameters()]:
            if side.is_sharded:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad.div_(side.num_ranks)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "no fully_shard call manages it. It was the same on all ranks, and is not any more")
def a_loss_with_an_optimizer_of_its_own(side: Side) -> None:
    """A loss that has weights is not sharded, and an optimizer of its own steps on it"""
    model, loss = shard(side, Net()), nn.Linear(3, 4)
    optimizers = [sgd(model), sgd(loss)]
    for step in range(6):
        loss_of(loss(model(side.batch(step)))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    side.weights("trained", model)
    side.weights("trained loss", loss)


@ends(EXACT)
def a_loss_with_an_optimizer_of_its_own_averaged(side: Side) -> None:
    """The same, where the user averages its gradients"""
    model, loss = shard(side, Net()), nn.Linear(3, 4)
    optimizers = [sgd(model), sgd(loss)]
    for step in range(6):
        loss_of(loss(model(side.batch(step)))).backward()
        for parameter in loss.parameters() if side.is_sharded else ():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(side.num_ranks)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    side.weights("trained", model)
    side.weights("trained loss", loss)


# ---- what ranks start from


@ends(LOUD, "seed")
def different_seeds(side: Side) -> None:
    """Every rank builds the model from a seed of its own"""
    torch.manual_seed(side.rank)
    model = shard(side, Net())
    train(side, model)


@ends(LOUD, "seed", ranks=4)
def different_replicas(side: Side) -> None:
    """HSDP: every replica builds the model from a seed of its own"""
    torch.manual_seed(side.rank // 2)
    model = shard(side, Net(), **hsdp(side, 2))
    train(side, model)


@ends(EXACT)
def different_seeds_then_loaded(side: Side) -> None:
    """Every rank builds the model from a seed of its own, then loads rank 0's weights"""
    weights = {name: value.clone() for name, value in Net().state_dict().items()}
    torch.manual_seed(side.rank)
    model = shard(side, Net())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=side.is_sharded)
    set_model_state_dict(model, weights if side.rank == 0 else {}, options=options)
    train(side, model)


@ends(LOUD, "head.bias: ranks had different values of it when fully_shard was called", ranks=4)
def a_new_head_by_rank(side: Side) -> None:
    """A backbone that all ranks have loaded, and a new head that each has seeded by its number"""
    backbone = {name: value.clone() for name, value in Net().state_dict().items() if "head" not in name}
    torch.manual_seed(side.rank)
    model = Net()
    model.load_state_dict(backbone, strict=False)
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    shard(side, model, **hsdp(side, 2))
    side.rows("output", model(side.batch(0)))


@ends(LOUD, "weight: load_state_dict(..., assign=True) was given whole tensors of different values")
def loaded_on_one_rank(side: Side) -> None:
    """`load_state_dict(assign=True)` of a checkpoint on rank 0, of what they have on the others"""
    checkpoint = {name: value * 0.5 for name, value in Net().state_dict().items()}
    model = shard(side, Net())
    side.rows("before", model(side.batch(0)))
    model.load_state_dict(checkpoint if side.rank == 0 else model.state_dict(), assign=True)
    side.rows("output", model(side.batch(0)))


def initialised_on_meta(side: Side, **options: Any) -> None:
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Net()
    shard(side, model, **options)
    if side.is_sharded:
        model.to_empty(device="cpu")
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter) if parameter.dim() > 1 else nn.init.uniform_(parameter, -1, 1)
    side.weights("initialised", model)
    train(side, model)


@ends(EXACT)
def random_initialisation_of_shards(side: Side) -> None:
    """Built on meta, random weights given to the shards on a CPU mesh"""
    initialised_on_meta(side)


@ends(EXACT, ranks=4)
def random_initialisation_of_replicas(side: Side) -> None:
    """The same on a mesh of replicas"""
    initialised_on_meta(side, **hsdp(side, 2))


@ends(LOUD, "head.weight")
def memory_that_nobody_initialised(side: Side) -> None:
    """Built on meta, with weights that nobody initialises"""
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Net()
    shard(side, model)
    if side.is_sharded:
        model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        if name != "head.weight":
            nn.init.constant_(parameter, 0.1)
    train(side, model)


class Unsaved(Net):
    """Its inputs are permuted and scaled by buffers that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.tensor([4, 3, 2, 1, 0]), persistent=False)
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x[:, self.places] * self.scale)  # type: ignore[index, operator]


@ends(LOUD, "places on meta")
def buffers_left_on_meta(side: Side) -> None:
    """Built on meta, all that the state dict has assigned: buffers are not in it"""
    weights = {name: value.clone() for name, value in Unsaved().state_dict().items()}
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Unsaved()
    shard(side, model).load_state_dict(weights, assign=True)
    train(side, model)


@ends(LOUD, "places: to_empty")
def buffers_that_nobody_initialised(side: Side) -> None:
    """The same given memory and loaded: what the state dict does not hold keeps what that memory held"""
    weights = {name: value.clone() for name, value in Unsaved().state_dict().items()}
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = Unsaved()
    shard(side, model)
    if side.is_sharded:
        model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    train(side, model)


@ends(LOUD, "ascending order")
def mesh_in_another_order(side: Side) -> None:
    """The mesh lists its ranks in another order; weights are initialised after sharding"""
    options = {"mesh": DeviceMesh("cpu", [1, 0])} if side.is_sharded else {}
    model = side.fully_shard(nn.Linear(5, 4).double(), **options)
    torch.manual_seed(1)
    nn.init.normal_(model.weight)
    train(side, model)


class Heads(nn.Module):
    """Heads by name, of which forward uses one."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.stem, made = nn.Linear(5, 5), {name: nn.Linear(5, 3) for name in "ab"}
        self.heads = nn.ModuleDict({name: made[name] for name in names})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.stem(x))


@ends(LOUD, "ranks register their modules in another order")
def heads_in_another_order(side: Side) -> None:
    """Ranks register modules in another order, and load weights by name; evaluation"""
    weights = Heads("ab").state_dict()
    model = side.fully_shard(Heads("ba" if side.rank == 1 else "ab"))
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=side.is_sharded))
    with torch.no_grad():
        side.rows("output", model(side.batch(0)))


@ends(LOUD, "expected the same on all ranks, got the shape (3, 5) on rank 0, and the shape (4, 5) on rank 1")
def another_number_of_classes(side: Side) -> None:
    """Ranks build a head for the number of classes that each has found in its own rows"""
    model = Net()
    model.head = nn.Linear(5, 3 + (side.rank if side.is_sharded else 0))
    shard(side, model)
    side.rows("output", model(side.batch(0))[:, :3])


@ends(LOUD, "FullyShardedDataParallel wraps the module that has it")
def fsdp1_inside(side: Side) -> None:
    """One layer is wrapped in FSDP1"""
    model = Net()
    if side.is_sharded:
        cpu = torch.device("cpu")
        model.head = FSDP1(model.head, device_id=cpu, use_orig_params=True)  # type: ignore[assignment]
    shard(side, model)
    side.rows("output", model(side.batch(0)))


# ---- parameters that are more than tensors


@ends(EXACT)
def hooks_on_parameters(side: Side) -> None:
    """`register_hook` and `register_post_accumulate_grad_hook` on parameters"""
    model, called = Net(), []
    model.head.weight.register_hook(lambda gradient: gradient * 3)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(tuple(parameter.shape)))
    shard(side, model)
    train(side, model)
    side.value("called", called)


@ends(EXACT)
def attributes_of_parameters(side: Side) -> None:
    """Attributes of parameters, read in the forward and by the optimizer"""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self.weight, "scale", 1.0)

    model = Scaled(5, 3)
    model.weight.scale = 3.0
    model.weight.lr = 0.125
    side.fully_shard(model)
    optimizer = torch.optim.SGD([{"params": [p], "lr": getattr(p, "lr", 0.5)} for p in model.parameters()])
    train(side, model, optimizer)


class Gated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1  # type: ignore[assignment, operator]
        return nn.functional.linear(x, self.weight * getattr(self.weight, "gate", 1.0), self.bias)


@ends(EXACT)
def attributes_set_after_sharding(side: Side) -> None:
    """Attributes of parameters that are set, or changed, after `fully_shard`, and inside a forward"""
    model = side.fully_shard(Gated(5, 3))
    for gate in (None, 2.0, 3.0):
        if gate is not None:
            model.weight.gate = gate
        side.rows(f"gate {gate}", model(side.batch(0)))
    side.value("calls", model.weight.calls)


class Quantised(nn.Parameter):
    """Holds multiples of a scale, which it carries beside its values."""

    scale = 1.0


@ends(EXACT)
def subclasses_of_parameters(side: Side) -> None:
    """A subclass of Parameter, whose class matters in the forward"""

    class Dequantises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Quantised(torch.randn(6, 5))
            self.weight.scale = 3.0

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.scale if isinstance(self.weight, Quantised) else 1.0
            return x @ self.weight.T * scale

    model = side.fully_shard(Dequantises())
    train(side, model)


class Packed(nn.Parameter):
    """Holds int8 values in the bytes of a float64 number, which mean nothing as such."""

    @classmethod
    def of(cls, values: Tensor) -> Any:
        packed: Any = cls((values * 10).round().to(torch.int8).view(torch.float64), requires_grad=False)
        packed.scale = 0.1
        return packed

    def values(self) -> Tensor:
        return self.data.view(torch.int8).double() * self.scale  # type: ignore[attr-defined]


class PackedLinear(nn.Linear):
    """A frozen packed weight, and a bias that is trained."""

    def __init__(self) -> None:
        super().__init__(8, 5)
        self.weight = Packed.of(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.values().T.to(x) + self.bias


@ends(EXACT)
def packed_parameters(side: Side) -> None:
    """A frozen subclass of Parameter whose bytes hold packed values (4-bit weights, QLoRA)"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 8), PackedLinear()))
    train(side, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))


@ends(LOUD, "param_dtype_override_fn=lambda p: p.dtype if isinstance(p, Packed) else None")
def packed_parameters_under_a_policy(side: Side) -> None:
    """The same, with a `param_dtype` that would cast the packed bytes"""
    policy = side.policy(param_dtype=torch.float32)
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 8), PackedLinear()), mp_policy=policy)
    train(side, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))


class WithWrapper(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 4)
        self.weight = nn.Parameter(Wrapper(self.weight.data), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ weight.inner.T + self.bias


@ends(EXACT)
def gather_set_after_sharding(side: Side) -> None:
    """A tensor subclass that learns how it is gathered (fsdp_pre_all_gather) after `fully_shard`"""

    class Late(Wrapper):
        pass

    model: Any = WithWrapper()
    model.weight = nn.Parameter(Late(model.weight.inner), requires_grad=False)
    side.fully_shard(model)
    Late.fsdp_pre_all_gather = lambda self, mesh: ((self.inner,), None)  # type: ignore[attr-defined]

    def post(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Late(outputs[0]), outputs)

    Late.fsdp_post_all_gather = post  # type: ignore[attr-defined]
    for seed in range(2):
        side.rows(f"output {seed}", model(side.batch(seed)))


@ends(LOUD, "Give the class fsdp_pre_all_gather and fsdp_post_all_gather")
def wrappers_that_no_gather_knows(side: Side) -> None:
    """A tensor subclass around other tensors that does not say how it is gathered"""
    model = side.fully_shard(WithWrapper())
    for seed in range(2):
        side.rows(f"output {seed}", model(side.batch(seed)))


@torch.library.custom_op("situations::step", mutates_args=("param", "moment"))
def _step(param: Tensor, gradient: Tensor, moment: Tensor) -> None:
    moment.mul_(0.5).add_(gradient)
    param.sub_(moment, alpha=0.5)


class KernelSGD(torch.optim.Optimizer):
    """Steps by an operation of its own, as optimizers of libraries do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            moment = self.state[param].setdefault("moment", torch.zeros_like(param))
            _step(param, param.grad, moment)


@ends(LOUD, "Call fsdp2.flatten_optimizer(optimizer)")
def optimizer_with_a_kernel_of_its_own(side: Side) -> None:
    """An optimizer whose step calls a kernel that knows plain tensors only (bitsandbytes)"""
    model = shard(side, Net())
    train(side, model, KernelSGD(model.parameters()))


@ends(EXACT, only_ours=True)
def flat_optimizer_with_a_kernel_of_its_own(side: Side) -> None:
    """The same, by `fsdp2.flatten_optimizer`, as the error says"""
    model = shard(side, Net())
    optimizer = KernelSGD(model.parameters())
    train(side, model, fsdp2.flatten_optimizer(optimizer) if side.is_sharded else optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x)))


@ends(EXACT)
def tied_in_two_groups(side: Side) -> None:
    """Tied weights in two groups"""
    model = Tied()
    side.fully_shard(model.stem)
    side.fully_shard(model.head)
    side.fully_shard(model)
    train(side, model)


@ends(EXACT)
def tied_in_one_group(side: Side) -> None:
    """Tied weights in one group"""
    train(side, side.fully_shard(Tied()))


@ends(LOUD, "head.weight was tied to stem.weight when fully_shard was applied")
def tied_and_given_two_values(side: Side) -> None:
    """`load_state_dict(assign=True)` of a checkpoint in which tied parameters are two"""
    model = side.fully_shard(Tied())
    checkpoint = {name: torch.full_like(value, 2.0) for name, value in Tied().state_dict().items()}
    checkpoint["head.weight"] = checkpoint["head.weight"] * 2
    model.load_state_dict(checkpoint, assign=True)
    side.rows("output", model(side.batch(0)))


@ends(EXACT, tolerance=1e-6)
def mixed_dtypes(side: Side) -> None:
    """Parameters of several dtypes in one group"""
    model = Net()
    model.head.to(torch.float32)
    model.head.register_forward_pre_hook(lambda head, args: (args[0].float(),))
    side.fully_shard(model)
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def scalars(side: Side) -> None:
    """A parameter without dims"""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = side.fully_shard(Scale())
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def empty_shards_and_fused_optimizer(side: Side) -> None:
    """Parameters with fewer rows than ranks, and a fused optimizer"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)))
    train(side, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


@ends(EXACT)
def ignored_and_foreach(side: Side) -> None:
    """Frozen `ignored_params` and sharded ones in one foreach optimizer, with weight decay"""
    model = Net()
    model.stem.weight.requires_grad_(False)
    shard(side, model, ignored_params={model.stem.weight})
    train(side, model, sgd(model, foreach=True, weight_decay=0.1))


# ---- inputs and buffers


@ends(EXACT, only_ours=True)
def the_same_batch_on_all_ranks(side: Side) -> None:
    """All ranks train on the same rows, which is a warning"""
    whole = Side()
    model = shard(side, Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(whole, model)
    said = [str(each.message) for each in caught]
    side.value("warned", any("got the same inputs" in each for each in said) or not side.is_sharded)
    side.weights("of the whole batch", model)


@ends(EXACT)
def rows_that_are_alike_once(side: Side) -> None:
    """A first batch that is the same on all ranks, and later ones that are not: no warning"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Net())
        train(Side(), model, steps=1)
        train(side, model, steps=5)


@ends(EXACT)
def the_same_ids_and_other_masks(side: Side) -> None:
    """Inputs of which one tensor only differs between ranks, and inputs of one value each: no warning"""

    class Masked(Net):
        def forward(self, x: Tensor, *, mask: dict[str, Tensor]) -> Tensor:
            return super().forward(x) * mask["rows"]

    def run(model: Any, x: Tensor, rows: Tensor) -> None:
        for _ in range(4):
            loss_of(model(x, mask={"rows": rows})).backward()

    rows = torch.arange(8.0)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Masked())
        run(model, torch.ones(8 // side.num_ranks, 5), rows.chunk(side.num_ranks)[side.rank])
        side.grads("of masks", model)
        model = shard(side, Masked())
        run(model, torch.zeros(4, 5), torch.ones(4, 1))
        side.grads("of zeros", model)


@ends(EXACT)
def the_same_rows_in_evaluation(side: Side) -> None:
    """The whole validation set on each rank: no warning"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Net())
        for step in range(4):
            with torch.no_grad():
                side.value(f"evaluated {step}", model.eval()(Side().batch(9)))
            train(side, model.train(), steps=1, name=f"step {step}")


class Waves(nn.Module):
    """Features of positions, or time steps, which must be exact; then weights, in the policy's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, positions: Tensor) -> Tensor:
        waves = torch.sin(positions.float() * 0.37)
        return self.linear(waves.to(self.linear.weight.dtype))


def positions_in_low_precision(side: Side, **options: Any) -> None:
    model = Waves().float()
    policy = side.policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)
    side.fully_shard(model if side.is_sharded else model.bfloat16(), mp_policy=policy)
    positions = (side.batch(0) * 1000).round().float()
    side.rows("output", model(positions).float())


@ends(LOUD, "cast_forward_inputs", tolerance=0.05)
def inputs_cast(side: Side) -> None:
    """fp32 positions or time steps go into a module whose `param_dtype` is bf16"""
    positions_in_low_precision(side)


@ends(EXACT, tolerance=0.05)
def inputs_not_cast(side: Side) -> None:
    """The same with `cast_forward_inputs=False`"""
    positions_in_low_precision(side, cast_forward_inputs=False)


@ends(EXACT)
def batch_norm(side: Side) -> None:
    """BatchNorm, on the rows of each rank: evaluation by the mean of the ranks' statistics"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    optimizer, stats = sgd(model), (model[1].running_mean, model[1].running_var)
    for step in range(3):
        before = [each.clone() for each in stats]
        seen = []
        for _, rows in side.parts(2, step):
            for each, old in zip(stats, before, strict=True):
                each.copy_(old)
            loss_of(model(rows)).backward()
            seen.append([each.clone() for each in stats])
        if not side.is_sharded:
            for each, of_ranks in zip(stats, zip(*seen, strict=True), strict=True):
                each.copy_(torch.stack(of_ranks).mean(0))
            for parameter in model.parameters():
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    side.rows("evaluated", model(side.batch(9)))


@ends(EXACT)
def frozen_batch_norm(side: Side) -> None:
    """BatchNorm that uses the statistics it was given"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 3)))
    train(side, model)


class Remembering(nn.Module):
    """Writes what it computes into its arguments, in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
        hidden = self.linear(x.to(self.linear.weight.dtype))
        cache[:, len(states)] = hidden.detach()
        states.append(hidden)
        return hidden


def written_by_forward(side: Side) -> tuple[nn.Module, Tensor, list[Tensor]]:
    model = Remembering().float()
    side.fully_shard(model, mp_policy=side.policy(param_dtype=torch.float32))
    cache, states = torch.zeros(len(side.batch(0)), 4, 5, dtype=torch.float64), [side.batch(9)]
    for step in range(3):
        model(side.batch(step), cache, states)
    return model, cache, states


@ends(EXACT, tolerance=1e-5)
def cache_that_forward_writes(side: Side) -> None:
    """A policy casts a cache to which forward writes"""
    _, cache, _ = written_by_forward(side)
    side.rows("cache", cache)


@ends(EXACT, tolerance=1e-5)
def states_that_forward_appends(side: Side) -> None:
    """A policy casts a tensor in a list to which forward appends; a loss of all in the list"""
    model, _, states = written_by_forward(side)
    side.value("length", len(states))
    torch.stack([loss_of(each.double()) for each in states[1:]]).sum().backward()
    side.grads("gradients", model)


@ends(LOUD, "cast_forward_inputs")
def leaf_that_forward_writes(side: Side) -> None:
    """A policy casts a leaf that requires a gradient; forward writes to it"""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2) if side.is_sharded else x)

    model = side.fully_shard(Scaling(), mp_policy=side.policy(param_dtype=torch.float32, output_dtype=torch.float64))
    x = side.batch(0).requires_grad_()
    loss_of(model(x)).backward()
    side.rows("gradient", x.grad)


@ends(EXACT)
def statistics_read_behind_the_last_forward(side: Side) -> None:
    """`update_bn` after training, then the running statistics are read"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)))
    batches = [side.batch(seed) for seed in range(3)]
    torch.optim.swa_utils.update_bn(batches, model)
    side.value("mean", model[1].running_mean)
    side.value("counted", model[1].num_batches_tracked)


class WithBuffer(nn.Module):
    """Adds a buffer to its input; in training, it averages inputs into it before."""

    def __init__(self, buffer: Tensor, averages: bool = False) -> None:
        super().__init__()
        self.linear, self.averages = nn.Linear(5, 3), averages
        self.register_buffer("centre", buffer)

    def forward(self, x: Tensor) -> Tensor:
        if self.averages and self.training:
            self.centre.lerp_(x.detach().mean(0), 0.5)
        return self.linear(x + self.centre)


@ends(LOUD, "centre holds other values on rank 1 than on rank 0: a buffer that ranks have built")
def a_buffer_of_each_ranks_seed(side: Side) -> None:
    """A random buffer, drawn from each rank's seed"""
    torch.manual_seed(side.rank)
    buffer = torch.randn(5)
    torch.manual_seed(0)
    train(side, side.fully_shard(WithBuffer(buffer)))


@ends(EXACT, only_ours=True)
def a_buffer_of_each_ranks_seed_synchronised(side: Side) -> None:
    """The same with `sync_module_states` after `fully_shard`"""
    torch.manual_seed(side.rank)
    buffer = torch.randn(5)
    torch.manual_seed(0)
    model = side.fully_shard(WithBuffer(buffer))
    if side.is_sharded:
        fsdp2.sync_module_states(model)
    train(side, model)


@ends(LOUD, "centre holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks")
def a_buffer_of_each_ranks_rows(side: Side) -> None:
    """A buffer that each rank averages of its own rows, and evaluation with it"""
    model = side.fully_shard(WithBuffer(torch.zeros(5), averages=True))
    train(side, model)
    with torch.no_grad():
        side.rows("evaluated", model.eval()(side.batch(9)))


class Observed(nn.Module):
    """Keeps the range of its inputs, as an observer of quantization; computes with it if `reads`."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(5, 3), reads
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.least = torch.minimum(self.least, x.detach().min())
            self.most = torch.maximum(self.most, x.detach().max())
        return self.linear(x / (self.most - self.least) if self.reads else x)


def train_observed(side: Side, model: nn.Module, steps: int = 5) -> None:
    train(side, model, steps=steps)
    with torch.no_grad():
        side.rows("evaluated", model.eval()(side.batch(9)))


@ends(EXACT)
def ranges_that_are_only_observed(side: Side) -> None:
    """Observers of quantization, of each rank's own rows, which nothing reads yet"""
    train_observed(side, side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed())))


@ends(LOUD, "1.least, 1.most holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks")
def ranges_that_quantise(side: Side) -> None:
    """The same ranges, by which inputs are scaled"""
    train_observed(side, side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed(reads=True))))


@ends(LOUD, "1.least, 1.most holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks")
def ranges_that_quantise_later(side: Side) -> None:
    """The same ranges, only observed at first, by which inputs are scaled from step 5 on"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed()))
    train(side, model, steps=4, name="observed")
    model[1].reads = True
    train_observed(side, model, steps=12)


class Monitored(Net):
    """Its root keeps a running mean of features for a log, and counts inputs above zero, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean_feature", torch.zeros(5))
        for block in self.blocks:
            block.register_buffer("num_above", torch.zeros(5, dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            block.num_above += (x > 0).sum(0)
            x = block(x)
        self.mean_feature.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


@ends(EXACT)
def buffers_of_a_log(side: Side) -> None:
    """A running mean and counts of each rank's own rows, which nothing reads but a log"""
    model = shard(side, Monitored())
    train(side, model, steps=5)
    assert model.mean_feature.abs().sum() > 0


@ends(LOUD, "mean_feature holds other values on rank 1")
def buffer_of_own_rows_that_a_loss_reads(side: Side) -> None:
    """A running mean of each rank's own rows, of an inner module, which the root's forward subtracts"""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Monitored(), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            output = self.inner(x)
            return (output - self.inner.mean_feature.sum()) * self.scale

    model = Centred()
    shard(side, model.inner)
    train(side, side.fully_shard(model), steps=5)


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


# ---- graphs that leave the usual way


@ends(EXACT)
def loss_of_a_tensor_that_was_not_returned(side: Side) -> None:
    """A loss of a tensor that was kept, not returned"""

    class Keeps(Block):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.up(x))
            return super().forward(x).detach()

    kept: list[Tensor] = []
    model = side.fully_shard(nn.Sequential(side.fully_shard(Keeps()), side.fully_shard(nn.Linear(5, 5))))
    model(side.batch(0))
    loss_of(kept[0]).backward()
    side.grads("gradients", model)


@ends(EXACT)
def outputs_of_a_class_of_ones_own(side: Side) -> None:
    """A module that returns an object of the user's own class"""

    class Output:
        def __init__(self, hidden: Tensor) -> None:
            self.hidden = hidden

    class Returns(Block):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = side.fully_shard(Returns()), side.fully_shard(nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Any:
            return Output(self.last(self.inner(x).hidden))

    model = side.fully_shard(Outer())
    loss_of(model(side.batch(0)).hidden).backward()
    side.grads("gradients", model)


@ends(EXACT)
def views_modified_in_place(side: Side) -> None:
    """An output that is a view, and is modified in place"""

    class View(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).view(-1, 5)

    model = side.fully_shard(nn.Sequential(side.fully_shard(View(5, 5)), nn.ReLU(True), side.fully_shard(View(5, 5))))
    loss_of(model(side.batch(0)).mul_(2)).backward()
    side.grads("gradients", model)


@ends(EXACT)
def gradient_penalty(side: Side) -> None:
    """Double backward: a gradient penalty"""
    model = shard(side, Net())
    x = side.batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum(1).mean().backward()
    side.grads("gradients", model)


@ends(LOUD, "create_graph=True")
def penalty_on_gradients_of_parameters(side: Side) -> None:
    """A penalty on `.grad` after `backward(create_graph=True)`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward(create_graph=True)
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    penalty = sum((g.full_tensor() if isinstance(g, DTensor) else g).square().sum() for g in grads)
    (loss_of(model(side.batch(1))) + penalty).backward()
    side.grads("gradients", model)


@ends(EXACT)
def inference_mode_then_training(side: Side) -> None:
    """A first forward in inference mode, then training"""
    model = shard(side, Net())
    with torch.inference_mode():
        model(side.batch(1))
    train(side, model)


@ends(EXACT)
def built_in_inference_mode(side: Side) -> None:
    """A model built and run in inference mode"""
    with torch.inference_mode():
        model = shard(side, Net())
        side.rows("outputs", model(side.batch(0)).clone())


@ends(EXACT)
def several_forwards(side: Side) -> None:
    """Two forwards, two backwards, a graph that is retained"""
    model = shard(side, Net())
    first, second = (loss_of(model(side.batch(seed))) for seed in range(2))
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    side.grads("gradients", model)


@ends(EXACT)
def reentrant_checkpointing(side: Side) -> None:
    """Reentrant activation checkpointing"""

    class Checkpointed(Net):
        def features(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    train(side, shard(side, Checkpointed()))


@ends(EXACT)
def child_before_root(side: Side) -> None:
    """A sharded child is called before the root"""
    model = shard(side, Net())
    with torch.no_grad():
        model.blocks[0](side.batch(1))
    train(side, model)


@ends(LOUD, "TorchScript")
def layer_of_torchscript(side: Side) -> None:
    """A layer inside is compiled by TorchScript"""
    model = Net().double()
    if side.is_sharded:
        model.head = torch.jit.script(model.head)
    shard(side, model)
    train(side, model)


@ends(EXACT)
def hook_set_in_forward(side: Side) -> None:
    """A post-accumulate hook that forward sets steps an optimizer"""

    class Stepping(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_set"):
                self.is_set = True
                self.stem.weight.register_post_accumulate_grad_hook(step)
            return super().forward(x)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.5 * parameter.grad
        parameter.grad = None

    model = shard(side, Stepping().double())
    for seed in range(3):
        loss_of(model(side.batch(seed))).backward()
    side.weights("stepped", model)


@ends(LOUD, "compiled autograd")
def compiled_autograd_holds_the_backward(side: Side) -> None:
    """Backward under compiled autograd"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    with compiled_autograd._enable(lambda graph: graph) if side.is_sharded else nullcontext():
        loss.backward()
    side.grads("gradients", model)


# ---- copies, loading, freezing, errors


@ends(EXACT)
def deep_copies(side: Side) -> None:
    """`copy.deepcopy` of a sharded model, for an EMA"""
    model = shard(side, Net())
    teacher = copy.deepcopy(model)
    train(side, model)
    follow(list(zip(teacher.parameters(), model.parameters(), strict=True)))
    side.rows("evaluated", teacher(side.batch(1)))


@ends(LOUD, "stem.weight")
def plain_state_dict_loaded(side: Side) -> None:
    """`load_state_dict` of whole tensors"""
    weights = {name: value * 2 for name, value in Net().state_dict().items()}
    model = shard(side, Net())
    model.load_state_dict(weights)
    side.rows("output", model(side.batch(0)))


@ends(EXACT)
def freezing_and_unfreezing(side: Side) -> None:
    """Parameters frozen and unfrozen between steps"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for trainable in (False, True):
        model.stem.requires_grad_(trainable)
        train(side, model, optimizer, steps=2, name=f"trainable={trainable}")


@ends(EXACT)
def frozen_for_a_forward_in_between(side: Side) -> None:
    """Parameters frozen for a reference forward between a forward and its backward (adapters disabled, as by DPO)"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    model.requires_grad_(False)
    with torch.no_grad():
        side.rows("reference", model(side.batch(1)))
    model.requires_grad_(True)
    loss.backward()
    side.grads("policy", model)


class FreezesItself(Net):
    def forward(self, x: Tensor, trains_head: bool) -> Tensor:
        self.head.requires_grad_(trains_head)
        return super().forward(x)


@ends(EXACT)
def frozen_inside_a_forward(side: Side) -> None:
    """`requires_grad_` inside the forward of the module that holds the parameters"""
    model = shard(side, FreezesItself())
    for step, trains_head in enumerate([True, False, True]):
        loss_of(model(side.batch(step), trains_head)).backward()
        side.value(f"trainable {step}", [parameter.requires_grad for parameter in model.parameters()])
        side.grads(f"step {step}", model)
    model(side.batch(3), False)
    model.requires_grad_(True)
    side.value("trainable", [parameter.requires_grad for parameter in model.parameters()])


@ends(EXACT)
def converted_after_sharding(side: Side) -> None:
    """`model.to(dtype)` after fully_shard"""
    model = shard(side, Net()).to(torch.float32)
    loss_of(model(side.batch(0).float())).backward()
    side.weights("converted", model)


@ends(EXACT)
def aliases_over_a_conversion(side: Side) -> None:
    """A state dict, and detached parameters that somebody writes to, from before a `.to` that changes nothing"""
    model = shard(side, Net())
    kept, aliases = model.state_dict(), [parameter.detach() for parameter in model.parameters()]
    model.to("cpu")
    model.head.to(torch.float64)
    train(side, model)
    for name, value in kept.items():
        side.value(f"kept {name}", value)
    for alias in aliases:
        alias.mul_(0.5)
    side.weights("written", model)
    side.rows("output", model(side.batch(3)))


@ends(EXACT)
def state_dict_on_one_rank(side: Side) -> None:
    """`state_dict()` on one rank alone, to count what is in it, while full parameters stay"""
    model = shard(side, Net())
    if side.is_sharded:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    for step in range(2):
        loss = loss_of(model(side.batch(step)))
        if side.rank == 0:
            assert len(model.state_dict()) == len(list(model.parameters()))
        loss.backward()
        if side.rank == 0:
            assert len(model.state_dict()) == len(list(model.parameters()))
        side.rows(f"output {step}", model(side.batch(step)))
    side.grads("all", model)


@ends(LOUD, "get_model_state_dict")
def full_state_dict_of_fsdp1(side: Side) -> None:
    """`FSDP.state_dict_type(model, FULL_STATE_DICT)`, left over from FSDP1"""
    model = shard(side, Net())
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT) if side.is_sharded else nullcontext():
        for name, value in model.state_dict().items():
            side.shown[name] = value


@ends(EXACT)
def step_after_an_error(side: Side) -> None:
    """A step after an exception in forward"""
    model = shard(side, Net())
    try:
        model(side.batch(0, width=4))
    except RuntimeError:
        train(side, model)


class Float8Layer(nn.Module):
    """A layer whose weight is float8, with a scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(3, 5, dtype=torch.float8_e4m3fn)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(torch.ones(3))
        self.weight_scale_inv = nn.Parameter(torch.full((1, 1), 0.5))


@ends(LOUD, "and fsdp2.hf moves values only", only_ours=True)
def quantised_files(side: Side) -> None:
    """Files of float8 weights with scales, loaded into plain weights by `fsdp2.hf`, whatever else is in the files"""
    model = side.fully_shard(nn.Linear(5, 3))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if side.is_sharded:
            dist.broadcast_object_list(folders)
            hf.save_model(Float8Layer(), f"{folders[0]}/files")
            hf.load_model(model, f"{folders[0]}/files", strict=False)
    side.rows("output", model(side.batch(0)))


# ---- ranks that are not in the same place


class Towers(nn.Module):
    """Rows go through a tower of their rank's choice, or through none, then through a head."""

    def __init__(self, side: Side, widths: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, 5)) for w in widths)
        self.head = nn.Linear(5, 3)
        for tower in self.towers:
            side.fully_shard(tower, **options)
        side.fully_shard(self)

    def forward(self, x: Tensor, tower: int | None) -> Tensor:
        return self.head(x if tower is None else self.towers[tower](x))


def train_by_rank(side: Side, model: nn.Module, choices: tuple[Any, Any]) -> None:
    """Each rank's rows with its own choice: on the plain side, both, one after the other."""
    optimizer = sgd(model)
    for step in range(2):
        parts = side.parts(2, step)
        for rank, rows in parts:
            (loss_of(model(rows, choices[rank])) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "towers")
def ranks_in_different_modules(side: Side) -> None:
    """Two ranks call different sharded modules of equal shapes"""
    train_by_rank(side, Towers(side, (7, 7)), (0, 1))


@ends(LOUD, "gradients that travel in", only_ours=True)
def codecs_that_differ(side: Side) -> None:
    """One rank encodes its gradients, and another sends them as they are"""
    codec = torch.bfloat16 if side.rank == 0 else None
    options = (
        {"mp_policy": fsdp2.MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec))}
        if side.is_sharded
        else {}
    )
    train(side, shard(side, Net(), **options))


@ends(LOUD, "set_conditional()")
def a_module_skipped_on_one_rank(side: Side) -> None:
    """A sharded module is skipped on one rank"""
    train_by_rank(side, Towers(side, (7, 9)), (0, None))


@ends(EXACT, only_ours=True)
def conditional_modules(side: Side) -> None:
    """Both, with `fully_shard(..., conditional=True)`"""
    for choices in ((0, 1), (0, None)):
        model = Towers(side, (7, 9), **({"conditional": True} if side.is_sharded else {}))
        train_by_rank(side, model, choices)


@ends(EXACT, only_ours=True)
def conditional_by_a_setting(side: Side) -> None:
    """Both, with `set_conditional` after `fully_shard`"""
    for choices in ((0, 1), (0, None), (None, None)):
        model = Towers(side, (7, 9))
        for tower in model.towers if side.is_sharded else ():
            tower.set_conditional()
        train_by_rank(side, model, choices)


@ends(LOUD, "set_conditional()", only_ours=True)
def conditional_no_more(side: Side) -> None:
    """The same, taken back"""
    model = Towers(side, (7, 9))
    if side.is_sharded:
        for tower in model.towers:
            tower.set_conditional()
        for tower in model.towers:
            tower.set_conditional(False)
    train_by_rank(side, model, (0, None))


@ends(LOUD, "set_conditional comes too late", only_ours=True)
def conditional_too_late(side: Side) -> None:
    """`set_conditional` after a step"""
    model = Towers(side, (7, 9))
    train_by_rank(side, model, (0, 0))
    if side.is_sharded:
        model.towers[0].set_conditional()


@ends(LOUD, "set_conditional(True) of towers.0", only_ours=True)
def conditional_on_one_rank(side: Side) -> None:
    """`set_conditional` on one rank only"""
    model = Towers(side, (7, 9))
    if side.is_sharded and side.rank == 1:
        model.towers[0].set_conditional()
    train_by_rank(side, model, (0, 0))


class WithImages(nn.Module):
    """A tower of layers that are sharded one by one, as accelerate does, and its projection in the root's group."""

    def __init__(self, side: Side, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.projection, self.text = nn.Linear(5, 5), Net()
        self.layers.requires_grad_(not is_frozen)
        if side.is_sharded:
            for each in (*self.layers, *self.text.blocks):
                side.fully_shard(each)
            side.fully_shard(self)
            for layer in self.layers:
                layer.set_conditional()
            self.set_reduce_scatter_unused_params(True)

    def forward(self, x: Tensor, has_image: bool) -> Tensor:
        image = x
        for layer in self.layers if has_image else ():
            image = layer(image)
        return self.text(x + self.projection(image) if has_image else x)


@ends(EXACT, only_ours=True)
def a_rank_without_images(side: Side) -> None:
    """A tower, trained and frozen, that one rank leaves out; accelerate has sharded its layers only"""
    for is_frozen in (False, True):
        train_by_rank(side, WithImages(side, is_frozen), (True, False))


class Branches(nn.Module):
    """Two of equal shapes in one group, of which each rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


@ends(LOUD, "set_reduce_scatter_unused_params")
def ranks_use_different_parameters(side: Side) -> None:
    """Ranks use different parameters, of equal shapes, of one group"""
    train_by_rank(side, side.fully_shard(Branches()), (0, 1))


@ends(EXACT)
def unused_parameters_reduced(side: Side) -> None:
    """The same with `set_reduce_scatter_unused_params(True)`"""
    model = side.fully_shard(Branches())
    if side.is_sharded:
        model.set_reduce_scatter_unused_params(True)
    train_by_rank(side, model, (0, 1))


@ends(LOUD, "set_reduce_scatter_unused_params")
def replicas_use_different_parameters(side: Side) -> None:
    """Replicas use different parameters, of equal shapes, of one group"""
    train_by_rank(side, side.fully_shard(Branches(), **hsdp(side, 1)), (0, 1))


@ends(LOUD, "ranks are out of step", ranks=4)
def rank_of_one_replica_out_of_step(side: Side) -> None:
    """HSDP: one rank evaluates once more than the others"""
    model = shard(side, Net(), **hsdp(side, 2))
    with torch.no_grad():
        for _ in range(2 if side.is_sharded and side.rank == 0 else 1):
            model(side.batch(1))
    train(side, model)


@ends(LOUD, "requires_grad differs between ranks: it is True on rank 0")
def a_layer_frozen_on_one_rank(side: Side) -> None:
    """One rank freezes a layer"""
    model = shard(side, Net())
    model.stem.requires_grad_(side.rank == 0)
    train(side, model)


@ends(LOUD, "has written to this frozen parameter since ranks last compared it")
def a_frozen_layer_written_on_one_rank(side: Side) -> None:
    """One rank writes to a frozen layer"""
    model = Net()
    model.stem.requires_grad_(False)
    shard(side, model)
    train(side, model, steps=1, name="before")
    if side.rank == 0 and side.is_sharded:
        with torch.no_grad():
            model.stem.weight.mul_(0.5)
    train(side, model)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(super().features(x))


@ends(LOUD, "Is norm in training mode on some ranks only")
def norm_frozen_on_one_rank(side: Side) -> None:
    """BatchNorm frozen on one rank"""
    model = shard(side, Normed())
    model.norm.train(side.rank == 0)
    train(side, model)


@ends(LOUD, "each axis once", only_ours=True)
def one_axis_shards_and_replicates(side: Side) -> None:
    """`DataParallelMeshDims` with one axis for both"""
    dims, options = DataParallelMeshDims(shard="data", replicate="data"), {}
    if side.is_sharded:
        options = {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), "dp_mesh_dims": dims}
    train(side, shard(side, Net(), **options))


@ends(LOUD, "Call finalize_backward() on the root first", only_ours=True)
def step_before_finalization(side: Side) -> None:
    """After `set_manual_backward_finalization(True)`, a step before `finalize_backward`"""
    model = shard(side, Net())
    if side.is_sharded:
        model.set_manual_backward_finalization(True)
    train(side, model)


@ends(LOUD, "Have all ranks decide alike whether to step")
def step_left_out_on_one_rank(side: Side) -> None:
    """A step left out on one rank"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(5):
        loss_of(model(side.batch(step))).backward()
        if not side.is_sharded or side.rank == 0 or step != 1:
            optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "Have all ranks choose alike")
def learning_rate_of_own_loss(side: Side) -> None:
    """A scheduler of learning rates that follows each rank's own loss"""
    model = shard(side, Net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    for step in range(9):
        loss = loss_of(model(side.batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss.item())
    side.weights("trained", model)


@ends(LOUD, "Call set_gradient_divide_factor on all")
def divisors_that_differ(side: Side) -> None:
    """`set_gradient_divide_factor` on one rank"""
    model = shard(side, Net())
    if side.is_sharded and side.rank == 1:
        model.set_gradient_divide_factor(3.0)
    train(side, model)


# ---- memory that two share, and copies


@ends(LOUD, "share memory")
def tied_by_data(side: Side) -> None:
    """Weights of two groups tied by `nn.Parameter(other.data)`"""
    model = Net()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    train(side, shard(side, model))


class Scaled(Block):
    """By a buffer that is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self.up.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.norm()


@ends(LOUD, "a buffer")
def buffer_over_a_weight(side: Side) -> None:
    """A buffer over a weight's memory"""
    train(side, side.fully_shard(Scaled()))


@ends(LOUD, "built inside a forward")
def optimizer_built_in_forward(side: Side) -> None:
    """Optimizer built inside the first forward"""
    model, built = Net(), []

    def build(*_: Any) -> None:
        if not built:
            built.append(sgd(model))

    model.register_forward_pre_hook(build)
    shard(side, model)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        built[0].step()
        built[0].zero_grad()
    side.weights("trained", model)


# ---- shards with nothing in them, and what torch's own layers read


@ends(EXACT)
def clipped_by_the_largest(side: Side) -> None:
    """Gradients clipped by their largest element, where some ranks hold no row"""
    model = side.fully_shard(nn.Linear(5, 1))
    for step in range(2):
        optimizer = sgd(model)
        loss_of(model(side.batch(step))).backward()
        side.value(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    side.value("largest", model.weight.abs().max())
    side.weights("trained", model)


@ends(EXACT)
def evaluated_encoder_layer(side: Side) -> None:
    """`nn.TransformerEncoderLayer` evaluated, a part of which is sharded by itself"""
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    for part in (model.self_attn, model.linear1):
        side.fully_shard(part)
    side.fully_shard(model).eval()
    with torch.no_grad():
        side.rows("output", model(side.batch(0, 12).view(-1, 2, 6)))


@ends(EXACT)
def copy_after_backward(side: Side) -> None:
    """`deepcopy` after a backward, which copies no gradients"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss_of(model(side.batch(0))).backward()
    other = copy.deepcopy(model)
    loss_of(other(side.batch(1))).backward()
    side.grads("of the copy", other)


# ---- calls in unusual orders, found by a fuzzer


@ends(EXACT, only_ours=True)
def a_handle_awaited_late(side: Side) -> None:
    """`unshard(async_op=True)` awaited behind the step that its gather was for"""
    model = side.fully_shard(nn.Linear(5, 3))
    optimizer = sgd(model)
    handle = model.unshard(async_op=True) if side.is_sharded else None
    loss_of(model(side.batch(0))).backward()
    if handle is not None:
        handle.wait()
    optimizer.step()
    with torch.no_grad():
        side.rows("output", model(side.batch(1)))


@ends(EXACT, only_ours=True)
def cleared_while_they_wait(side: Side) -> None:
    """Gradients that wait to be synchronised are cleared, and work under way is finished, before the next backward"""
    model = shard(side, Net())
    optimizer = sgd(model)
    if side.is_sharded:
        model.set_requires_gradient_sync(False)
    loss_of(model(side.batch(0))).backward()
    optimizer.zero_grad()
    if side.is_sharded:
        model.set_optimizer_in_backward(None)
        model.set_requires_gradient_sync(True)
    loss_of(model(side.batch(1))).backward()
    side.grads("of the second", model)


class GathersByItself:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        group.allgather_into_tensor_coalesced([output_tensor], [input_tensor]).wait()


@ends(EXACT, only_ours=True)
def another_collective_before_backward(side: Side) -> None:
    """`set_custom_all_gather` between a forward and its backward"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss = loss_of(model(side.batch(0)))
    if side.is_sharded:
        model.set_custom_all_gather(GathersByItself())
    loss.backward()
    side.grads("all", model)


@ends(EXACT, only_ours=True)
def settings_of_full_parameters(side: Side) -> None:
    """`requires_grad_` and `zero_grad` between `unshard()` and `reshard()`"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
    for step, trainable in enumerate([False, True]):
        if side.is_sharded:
            model.unshard()
        model.zero_grad()
        model[0].requires_grad_(trainable)
        if side.is_sharded:
            model.reshard()
        side.value(f"trainable {step}", [parameter.requires_grad for parameter in model.parameters()])
        loss_of(model(side.batch(step))).backward()
        side.grads(f"step {step}", model)


@ends(EXACT)
def written_then_unsharded(side: Side) -> None:
    """`torch._foreach_mul_` of parameters that a forward has left gathered, then `unshard()`"""
    model = side.fully_shard(nn.Linear(5, 3))
    for _ in range(2):
        model(side.batch(0))
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)
    if side.is_sharded:
        model.unshard()
    side.rows("output", model(side.batch(0)))


@ends(EXACT)
def replaced_then_copied(side: Side) -> None:
    """`deepcopy` behind `functional_call`, which has put each parameter back"""
    model = side.fully_shard(nn.Linear(5, 3))
    other = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        side.rows("other", torch.func.functional_call(model, other, (side.batch(1),)))
    train(side, copy.deepcopy(model))


@ends(EXACT)
def step_behind_unshard(side: Side) -> None:
    """A step between `unshard()` and what reads the full parameters"""
    model = side.fully_shard(nn.Linear(5, 3))
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    if side.is_sharded:
        model.unshard()
    optimizer.step()
    side.value("read", model.weight.detach().clone())
    if side.is_sharded:
        model.reshard()
    side.weights("stepped", model)


@ends(LOUD, "stem.weight: each rank holds a shard")
def rows_cleared_by_a_mask(side: Side) -> None:
    """`weight[mask] = 0` with a plain mask, between steps"""
    model = shard(side, Net())
    with torch.no_grad():
        model.stem.weight[torch.arange(5) == 2] = 0
    train(side, model)


@ends(LOUD, "a DTensor of global shape (5, 5)")
def gradients_masked_in_hooks(side: Side) -> None:
    """A hook on a parameter that masks its gradient"""
    model = shard(side, Net())
    mask = (torch.arange(5.0) > 2)[:, None].double()
    model.stem.weight.register_hook(lambda gradient: gradient * mask)
    loss_of(model(side.batch(0))).backward()
    side.grads("gradients", model)


# ---- functions of what each rank has of its own, and what is computed of shards


@ends(LOUD, "full_tensor()")
def own_number_in_a_function(side: Side) -> None:
    """`torch.mul(loss.detach(), penalty)` of a penalty that is computed of shards"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss = loss_of(model(side.batch(0)))
    torch.mul(loss.detach(), model.weight.norm()).backward()
    side.grads("gradients", model)


@ends(EXACT)
def foreach_over_ignored_parameters(side: Side) -> None:
    """`AdamW(foreach=True)` over ignored parameters, which are plain, and sharded ones"""
    model = nn.Linear(5, 3)
    side.fully_shard(model, ignored_params={model.bias})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        if side.is_sharded:
            dist.all_reduce(model.bias.grad)
            model.bias.grad /= side.num_ranks
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- vectors of all parameters


@ends(EXACT)
def weights_of_a_vector(side: Side) -> None:
    """Task arithmetic by `parameters_to_vector` and `vector_to_parameters`"""
    model, other = shard(side, Net()), shard(side, Net())
    optimizer = sgd(model)
    vectors = [nn.utils.parameters_to_vector(each.parameters()).detach() for each in (model, other)]
    nn.utils.vector_to_parameters(vectors[0].lerp(vectors[1], 0.3), model.parameters())
    train(side, model, optimizer)
    plain = torch.linspace(-1, 1, sum(parameter.numel() for parameter in model.parameters()))
    nn.utils.vector_to_parameters(plain, model.parameters())
    train(side, model, optimizer, name="of a plain one")


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


# ---- models that torch's own FSDP2 has sharded


def shard_by_torch(side: Side, model: Net) -> Net:
    for each in [*model.blocks, model] if side.is_sharded else ():
        torch_fully_shard(each)
    return model


@ends(EXACT)
def tools_around_torchs_own(side: Side) -> None:
    """Weights are scaled, gradients clipped, and steps flat, on a model that torch's FSDP2 has sharded"""
    model = shard_by_torch(side, Net())
    with torch.no_grad():
        model(side.batch(3))  # leaves the root's own weights unsharded
    with fsdp2.full_params(model, writeback=True) if side.is_sharded else torch.no_grad(), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    optimizer = sgd(model)
    clip = fsdp2.clip_grad_norm_ if side.is_sharded else torch.nn.utils.clip_grad_norm_
    if side.is_sharded:
        fsdp2.flatten_optimizer(optimizer)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        side.value(f"norm {step}", clip(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "Pass an option for copies without gradients")
def a_loss_on_torchs_unsharded_weights(side: Side) -> None:
    """A penalty on whole weights, of which torch's FSDP2 would not reduce the gradients"""
    model = shard_by_torch(side, Net())
    weights = fsdp2.full_params(model) if side.is_sharded else nullcontext(dict(model.named_parameters()))
    with weights as found:
        (loss_of(model(side.batch(0))) + found["head.weight"].square().mean()).backward()
    side.weights("untrained", model)


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


def train_on(side: Side, model: nn.Module, optimizer: torch.optim.Optimizer, repeats: bool = False) -> None:
    """Trains for twelve steps, and goes on where memory runs out in a step, or repeats the step."""
    for number in range(12):
        loss_of(model(side.batch(number))).backward()
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            if repeats:
                optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "a step of this optimizer has raised an error 0 times on rank 0 and 1 time on rank 1")
def a_step_that_raises_on_one_rank(side: Side) -> None:
    """Memory runs out in one rank's optimizer, and the program goes on"""
    model = shard(side, Net())
    train_on(side, model, RaisingSGD(model.parameters(), at=3 if side.rank == 1 else 0))


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


@ends(LOUD, "zero_grad()")
def zero_grad_left_out_on_one_rank(side: Side) -> None:
    """One rank's gradients are not cleared behind a step"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(12):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        if step != 3 or side.rank == 0:
            optimizer.zero_grad()
    side.weights("trained", model)


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


@ends(LOUD, "not on all ranks", only_ours=True)
def some_parameters_clipped_on_a_rank(side: Side) -> None:
    """One rank clips half of the parameters, another all"""
    model = shard(side, Net())
    clip_and_train(side, model, lambda: list(model.parameters())[:: 1 + side.rank])


@ends(LOUD, "max_norm=0.1, norm_type=2 on rank 0 and", only_ours=True)
def clipped_to_another_norm_on_a_rank(side: Side) -> None:
    """Ranks clip to different norms"""
    clip_and_train(side, shard(side, Net()), max_norm=0.1 * (1 + side.rank))


@ends(LOUD, "norm_type=1 on rank 1", only_ours=True)
def clipped_by_a_norm_of_another_order_on_a_rank(side: Side) -> None:
    """Ranks clip by norms of different orders"""
    clip_and_train(side, shard(side, Net()), norm_type=2 - side.rank)


@ends(LOUD, "head.weight", only_ours=True)
def only_parameters_with_gradients_clipped(side: Side) -> None:
    """Ranks list the parameters that have gradients, and one rank has dropped a gradient"""
    model = shard(side, Net())

    def listed() -> list[Tensor]:
        if side.rank == 1:
            model.head.weight.grad = None
        return [p for p in model.parameters() if p.grad is not None]

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


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


@ends(LOUD, "stem.weight: expected a hook of this parameter to return", only_ours=True)
def a_hook_that_returns_some_rows(side: Side) -> None:
    """A hook returns the gradient of some rows only"""
    model = shard(side, Net())
    if side.is_sharded:
        model.stem.weight.register_hook(lambda g: whole(g)[:1])
    train(side, model)


@ends(LOUD, "The gradient of stem.weight is a plain tensor")
def a_plain_gradient_assigned(side: Side) -> None:
    """A plain gradient is assigned to `.grad` before the step"""
    model = shard(side, Net())
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    model.stem.weight.grad = whole(model.stem.weight.grad).clone()
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


@ends(LOUD, "This operation of FactoredSGD takes no DTensors", only_ours=True)
def an_optimizer_with_plain_factors(side: Side) -> None:
    """An optimizer of a library keeps plain factors of its states"""
    model = shard(side, Net())
    train(side, model, FactoredSGD(model.parameters()))


# ---- states of optimizers that are plain tensors, or belong to others


class PlainStates(torch.optim.Optimizer):
    """Keeps momenta of this rank's rows in plain tensors, or four numbers of whole gradients by which it divides."""

    def __init__(self, params: Any, of_rows: bool) -> None:
        super().__init__(params, {"lr": 0.3})
        self.of_rows = of_rows

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            gradient, state = local(param.grad), self.state[param]
            state["number"] = state.get("number", torch.zeros(1)) + 1
            if self.of_rows:
                kept = local(state.setdefault("kept", torch.zeros_like(gradient)))
                gradient = kept.mul_(0.5).add_(gradient)
            else:
                full = whole(param.grad)
                kept = state.setdefault("kept", torch.ones(4))
                kept.add_(torch.stack([full.norm(), full.amax(), full.amin(), full.abs().mean()]))
            local(param).sub_(gradient / (1 if self.of_rows else kept.norm()), alpha=0.3)
        torch.autograd.graph.increment_version(self.param_groups[0]["params"])


def save_and_train_on(side: Side, of_rows: bool, in_files: bool = False) -> None:
    """Trains, saves states, spoils them, loads them, and trains on."""
    model = shard(side, Net())
    optimizer = PlainStates(model.parameters(), of_rows)
    train(side, model, optimizer, name="before")
    if in_files or not side.is_sharded:
        states = copy.deepcopy(optimizer.state_dict())
    else:
        folder = [tempfile.mkdtemp() if side.rank == 0 else None]
        dist.broadcast_object_list(folder)
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=folder[0])
    for state in optimizer.state.values():
        state["kept"].fill_(7)
    if in_files or not side.is_sharded:
        optimizer.load_state_dict(states)
    else:
        states = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(states, checkpoint_id=folder[0])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    train(side, model, optimizer)


@ends(LOUD, "kept of stem.weight", only_ours=True)
def states_of_own_rows_in_a_distributed_checkpoint(side: Side) -> None:
    """An optimizer keeps states of each rank's rows in plain tensors, and a distributed checkpoint saves them"""
    save_and_train_on(side, of_rows=True)


@ends(EXACT, only_ours=True)
def states_of_own_rows_in_a_file_of_each_rank(side: Side) -> None:
    """The same, and each rank saves its own state dict"""
    save_and_train_on(side, of_rows=True, in_files=True)


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


@ends(LOUD, "would begin anew")
def an_optimizer_that_has_stepped_before_sharding(side: Side) -> None:
    """An optimizer has stepped, then the model is sharded, and the groups get the sharded parameters"""
    model = Net()
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW([{"params": params[:5]}, {"params": params[5:], "lr": 0.05}], lr=0.1)
    step_plainly(side, model, optimizer)
    del params
    shard(side, model)
    give_sharded_parameters(optimizer, model)
    train(side, model, optimizer)


@ends(LOUD, "would begin anew")
def an_optimizer_loaded_before_sharding(side: Side) -> None:
    """The same, of an optimizer that has loaded a state dict"""
    model = Net()
    optimizer = sgd(model)
    step_plainly(side, model, optimizer)
    states, optimizer = optimizer.state_dict(), sgd(model)
    optimizer.load_state_dict(states)
    shard(side, model)
    give_sharded_parameters(optimizer, model)
    train(side, model, optimizer)


@ends(LOUD, "would begin anew")
def an_optimizer_of_another_copy_that_has_stepped(side: Side) -> None:
    """The same, where the model that is sharded is another one, made on meta and loaded"""
    model = Net()
    optimizer = sgd(model)
    step_plainly(side, model, optimizer)
    weights, other = model.state_dict(), model
    if side.is_sharded:
        with torch.device("meta"):
            other = shard(side, Net())
        other.to_empty(device="cpu")
        set_model_state_dict(other, weights, options=StateDictOptions(full_state_dict=True))
        give_sharded_parameters(optimizer, other)
    train(side, other, optimizer)


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
