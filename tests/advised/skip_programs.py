"""Follows the advice of `skip_step_on_error`, gradients in `full_params`, and of what one rank has saved."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from advised.registry import (
    ELSEWHERE,
    backward,
    batch,
    build,
    follows,
    heard,
    loss_of,
    own,
    pair,
    refused,
    same,
    same_gradients,
    same_parameters,
    sgd,
    shard,
    train,
    warned,
)

ELSEWHERE['Initialise it with both: init_process_group("cpu:gloo,{}:...")'] = (
    "tests/ranks/test_skip_step.py::test_on_a_device_without_gloo"
)


def skippable(model: Any, inside: Callable[[], object] = lambda: None) -> Any:
    with fsdp2.skip_step_on_error(model) as attempt:
        backward(model)
        inside()
    return attempt


@follows(
    "Leave that one first",
    "Call fsdp2.skip_step_on_error(model) for each step",
    "Step behind the block, if it was not skipped",
    "Call optimizer.zero_grad() before the block: all micro-batches of a step belong inside",
    "Call set_optimizer_in_backward(None), and step behind the block",
)
def amid_a_block() -> None:
    model, plain = pair()
    optimizer = sgd(model)
    refused(lambda: skippable(model, lambda: skippable(model)))
    refused(lambda: skippable(model, optimizer.step))
    attempt = fsdp2.skip_step_on_error(model)
    with attempt:
        pass

    def again() -> None:
        with attempt:
            pass

    refused(again)
    backward(model)
    refused(lambda: skippable(model))
    optimizer.zero_grad()
    model.set_optimizer_in_backward(optimizer)
    refused(lambda: skippable(model))
    model.set_optimizer_in_backward(None)
    assert not skippable(model).skipped
    optimizer.zero_grad()
    train(model, plain)


@follows(
    "Run that module on every rank, on inputs of zeros where a rank has none, and leave conditional=True out",
)
def beside_conditional_modules() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def forward(self, x: Any, extra: Any) -> Any:
            x = self.always(x)
            return x if extra is None else x + self.sometimes(extra)

    def sharded(**options: Any) -> Any:
        model: Any = build(Two)
        fsdp2.fully_shard(model.sometimes, **options)
        return fsdp2.fully_shard(model)

    def skips(model: Any, extra: Any) -> None:
        with fsdp2.skip_step_on_error(model) as attempt:
            model(x[rank], extra).square().mean().backward()
        assert not attempt.skipped

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(size, 2, 4, generator=torch.Generator().manual_seed(0))
    own = x[rank] if rank == 0 else None
    model = sharded(conditional=True)
    text = refused(lambda: skips(model, own), NotImplementedError)
    assert "sometimes is conditional" in text
    model, plain = sharded(), build(Two)
    zeros = torch.zeros(2, 4) if own is None else own
    skips(model, zeros)
    for other in range(size):
        (plain(x[other], x[other] if other == 0 else None).square().mean() / size).backward()
    same_gradients(model, plain)


@follows("another call has used it up. Make a list of it, for all calls", ranks=1)
def a_generator_for_two_calls() -> None:
    def ignored(model: Any, parameters: Any) -> Any:
        model.head.requires_grad_(False)
        fsdp2.fully_shard(model.block, ignored_params=parameters)
        return fsdp2.fully_shard(model, ignored_params=parameters)

    model: Any = build()
    refused(lambda: ignored(model, model.head.parameters()))
    model, plain = build(), build()
    ignored(model, list(model.head.parameters()))
    plain.head.requires_grad_(False)
    train(model, plain)
    assert type(model.head.weight) is nn.Parameter


_WHOLE = (
    "If the other ranks write no files of their own, call torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and save what the first "
    "one gets; for an optimizer, get_optimizer_state_dict"
)


@follows(
    _WHOLE,
    "Let each rank read its own file; or save a full state dict, of torch.distributed.checkpoint.state_dict."
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), or by torch.distributed.checkpoint."
    "save",
)
def shards_of_one_rank() -> None:
    model, plain = pair()

    def saved(state: Any) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return file

    own = warned(lambda: saved(model.state_dict())) if dist.get_rank() == 0 else saved(model.state_dict())
    data = [own.getvalue()]
    dist.broadcast_object_list(data)
    other = shard(build(seed=1))
    if dist.get_rank() == 0:
        other.load_state_dict(torch.load(io.BytesIO(data[0])))
    else:
        refused(lambda: other.load_state_dict(torch.load(io.BytesIO(data[0]))))
    other.load_state_dict(torch.load(own))
    same_parameters(other, plain)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        loaded = build(seed=1)
        loaded.load_state_dict(torch.load(saved(state)))
        same_parameters(loaded, plain)
    assert heard


@follows("Scale or clip p.grad of the sharded parameters")
def gradients_of_copies() -> None:
    model, plain = pair()

    def write() -> None:
        with fsdp2.full_params(model, writeback=True, with_grads=True):
            pass

    backward(model)
    refused(write)
    for param in model.parameters():
        param.grad.mul_(0.5)
    (loss_of(plain(batch())) / 2).backward()
    same_gradients(model, plain)


@follows("with_grads is not supported under tensor parallelism. Call p.grad.full_tensor() of the sharded", ranks=4)
def gradients_under_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = build(lambda: nn.Sequential(nn.Linear(5, 4)))
    model: Any = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fsdp2.fully_shard(model, mesh=mesh["dp"])
    loss_of(model(batch().chunk(2)[mesh.get_local_rank("dp")])).backward()
    loss_of(plain(batch())).backward()
    refused(lambda: fsdp2.full_params(model, with_grads=True).__enter__())
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(param.grad.full_tensor(), other.grad)


@follows(
    "Write `for batch, is_real in fsdp2.even_batches(loader):`, and multiply the loss by is_real",
    "Give each rank at least one batch",
)
def different_numbers_of_batches() -> None:
    model, plain = pair()
    rank, size = dist.get_rank(), dist.get_world_size()
    refused(lambda: Join([model]), NotImplementedError)
    refused(lambda: list(fsdp2.even_batches([1] * rank)), ValueError)
    for inputs, is_real in fsdp2.even_batches([own(batch())] * (1 + rank)):
        (loss_of(model(inputs)) * is_real).backward()
    for step in range(size):
        for other in range(step, size):
            (loss_of(plain(batch().chunk(size)[other])) / size).backward()
    same_gradients(model, plain)


ELSEWHERE["Call torch.distributed.init_process_group before"] = (
    "tests/ranks/test_even_batches.py::test_without_a_process_group"
)
