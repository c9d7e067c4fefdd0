"""Follows the advice of errors of tools, and of what `check`, `compare` and logs say."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    compared,
    follows,
    found,
    heard,
    none_found,
    own,
    pair,
    refused,
    same,
    same_gradients,
    same_parameters,
    sgd,
    shard,
    train,
)
from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard, stream_full_params, sync_module_states
from situations.steps import PlainStates

FULL = StateDictOptions(full_state_dict=True)


# ---- full_params


@follows("Pass offload_to_cpu=True for copies, which stay valid")
def state_dicts_inside() -> None:
    model, plain = pair()
    with full_params(model):
        refused(model.state_dict)
    with full_params(model, offload_to_cpu=True):
        state = model.state_dict()
    for name, value in plain.state_dict().items():
        same(state[name], value, name)


@follows("Leave rank0_only out, and change the parameters on every rank alike: broadcast values that only one rank has")
def written_on_the_first_rank() -> None:
    model, plain = pair()
    refused(lambda: full_params(model, writeback=True, rank0_only=True).__enter__())
    value = torch.randn(3, 5) if dist.get_rank() == 0 else torch.empty(3, 5)
    with full_params(model, writeback=True):
        dist.broadcast(value, 0)
        model.head.weight.data.copy_(value)
    plain.head.weight.data = value
    train(model, plain)


@follows("Change it on every rank alike", "Give both names the same values", "Step before the block, or after it")
def written_back() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(5, 5)
            self.again.weight = self.stem.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.again(x))

    def write(model: Any, change: Any) -> None:
        with full_params(model, writeback=True):
            change(model)

    def assign(model: Any, *values: float) -> None:
        for name, value in zip(("stem", "again"), values, strict=False):
            getattr(model, name).weight = nn.Parameter(torch.full((5, 5), value))

    model, plain = pair(Tied)
    refused(lambda: write(model, lambda m: m.head.weight.data.fill_(float(dist.get_rank()))))
    refused(lambda: write(model, lambda m: assign(m, 0.1, 0.2)))
    model, _ = pair(Tied)
    write(model, lambda m: [assign(m, 0.1, 0.1), m.head.weight.data.fill_(0.3)])
    assign(plain, 0.1)
    plain.again.weight = plain.stem.weight
    plain.head.weight.data.fill_(0.3)
    train(model, copy.deepcopy(plain))
    for way in ("inside", "before", "after"):
        model, plain = pair()
        optimizer = sgd(model)
        backward(model)
        if way == "inside":
            sharded = [*model.parameters()]
            refused(lambda m=model, o=optimizer: write(m, lambda _: [o.step(), m.head.weight.data.mul_(2)]))
            del sharded
            continue
        if way == "before":
            optimizer.step()
        write(model, lambda m: m.head.weight.data.mul_(2))
        if way == "after":
            optimizer.step()
        stepper = sgd(plain)
        backward(plain, x=batch())
        for each in ("step", "write") if way == "before" else ("write", "step"):
            stepper.step() if each == "step" else plain.head.weight.data.mul_(2)
        same_parameters(model, plain)


# ---- streams of parameters


@follows("Build the same model on all ranks, and pass the same arguments")
def streams_that_differ() -> None:
    model, plain = pair()
    refused(lambda: [*stream_full_params(model, bucket_bytes=100 * (1 + dist.get_rank()))])
    streamed = {
        name: value.clone()
        for bucket in stream_full_params(model, bucket_bytes=100)
        for name, value in bucket.tensors.items()
    }
    for name, value in plain.named_parameters():
        same(streamed[name], value.detach(), name)


@follows("Call stream_full_params between passes", "Call model.to_empty(device=...), and initialise")
def streams_between_passes() -> None:
    model, plain = pair()
    with full_params(model, offload_to_cpu=True):
        refused(lambda: [*stream_full_params(model)])
    with torch.device("meta"):
        empty = shard(Net())
    refused(lambda: [*stream_full_params(empty)])
    empty.to_empty(device="cpu")
    set_model_state_dict(empty, plain.state_dict(), options=FULL)
    for each in (model, empty):
        for bucket in stream_full_params(each):
            for name, value in bucket.tensors.items():
                same(value, plain.get_parameter(name).detach(), name)


@follows("Take {}.full_tensor() for this parameter", ranks=4)
def streams_of_sums() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model, plain = build(), build()
    fully_shard(model.block, mesh=init_device_mesh("cpu", (4,)))
    part = torch.arange(64.0).view(8, 8) / 4
    weight = nn.Parameter(DTensor.from_local(part, mesh, [Partial(), Partial()]))
    model.extra = nn.Module()
    model.extra.register_parameter("weight", weight)
    refused(lambda: [*stream_full_params(model)])
    same(model.extra.weight.full_tensor().detach(), torch.arange(64.0).view(8, 8), "extra")
    for bucket in stream_full_params(model.block):
        for name, value in bucket.tensors.items():
            same(value, plain.block.get_parameter(name).detach(), name)


# ---- sync_module_states


@follows(
    "Build the same modules on all ranks; where they differ on purpose (stages of a pipeline), pass the axes",
    ranks=4,
)
def stages_that_differ() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, rank = mesh.get_local_rank("pp"), dist.get_rank()
    make = (lambda: nn.Linear(5, 5)) if stage == 0 else (lambda: nn.Linear(5, 3))
    refused(lambda: sync_module_states(build(make, seed=rank)))
    model = build(lambda: nn.Linear(5, 5), seed=rank)
    sync_module_states(model)
    same(model.weight.detach(), build(lambda: nn.Linear(5, 5)).weight.detach(), "the same modules")
    model = build(make, seed=rank)
    sync_module_states(model, mesh["dp"])
    expected = build(make, seed=0 if stage == 0 else 2)
    for param, value in zip(model.parameters(), expected.parameters(), strict=True):
        same(param.detach(), value.detach(), "stage")


@follows("Pass the axes of data parallelism, for example sync_module_states(model, mesh['dp'])", ranks=4)
def shards_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(lambda: nn.Linear(5, 4), seed=mesh.get_local_rank("dp"))
    whole = build(lambda: nn.Linear(5, 4))
    weight = model.weight.data.chunk(2)[mesh.get_local_rank("tp")].clone()
    model.weight = nn.Parameter(DTensor.from_local(weight, mesh["tp"], [Shard(0)]))
    refused(lambda: sync_module_states(model))
    sync_module_states(model, mesh["dp"])
    same(model.weight.full_tensor().detach(), whole.weight.detach(), "weight")


@follows(
    "On each rank but the first, call model.to_empty(device=...) before; on the first, initialise or load it",
    "or full_params has registered copies of its parameters. Call it between steps",
    "Take it out of the module during the call, and broadcast it yourself",
)
def weights_of_the_first_rank() -> None:
    rank, plain = dist.get_rank(), build()
    with torch.device("meta"):
        model = Net()
    refused(lambda: sync_module_states(model))
    if rank == 0:
        model = build()
    else:
        model.to_empty(device="cpu")
    sync_module_states(model)
    train(shard(model), copy.deepcopy(plain))
    model = shard(build())
    with full_params(model, offload_to_cpu=True):
        refused(lambda: sync_module_states(model))
    sync_module_states(model)
    train(model, copy.deepcopy(plain))
    model = build(seed=rank)
    table = torch.eye(3).mul(1.0 + rank).to_sparse()
    model.register_buffer("table", table)
    refused(lambda: sync_module_states(model))
    taken = model.table.to_dense()
    del model.table
    sync_module_states(model)
    dist.broadcast(taken, 0)
    model.register_buffer("table", taken.to_sparse())
    same(model.table.to_dense(), torch.eye(3), "table")
    same_parameters(model, plain)


@follows("Pass the mesh that it is part of")
def other_ranks_to_sync() -> None:
    meshes = [torch.distributed.device_mesh.DeviceMesh("cpu", [rank]) for rank in range(2)]
    rank = dist.get_rank()
    model = build()
    refused(lambda: sync_module_states(model, meshes[1 - rank]))
    sync_module_states(model, meshes[rank])
    same_parameters(model, build())


# ---- compare


@follows(
    "Build the reference from one seed, and pass the whole batch everywhere",
    "End the accumulation, or call zero_g",
    "Build it again from the same seed, or copy it before fully_shard",
)
def compared_with_a_reference() -> None:
    model, plain = pair()
    refused(lambda: fsdp2.compare(build(seed=dist.get_rank()), model, batch()))
    refused(lambda: fsdp2.compare(plain, model, own(batch())))
    refused(lambda: fsdp2.compare(shard(build()), model, batch()))
    assert fsdp2.compare(plain, model, batch())
    assert fsdp2.compare(build(), model, batch())
    for way in ("end", "clear"):
        model, plain = pair()
        model.set_requires_gradient_sync(False)
        backward(model)
        refused(lambda model=model, plain=plain: fsdp2.compare(plain, model, batch()))
        model.set_requires_gradient_sync(True)
        if way == "end":
            backward(model, 1)
        else:
            model.zero_grad()
        assert fsdp2.compare(plain, model, batch())
    compared.append("compare")


@follows(
    "Call reshard() after such changes", "The reference does the same when inputs are rounded to param_dtype{}or cast"
)
def causes_of_differences() -> None:
    model, plain = pair(reshard_after_forward=False)
    model.block.set_reshard_after_backward(False)
    for _ in range(2):
        assert fsdp2.compare(plain, model, batch())
    with torch.no_grad():
        plain.block.up.bias.mul_(2)
        model.block.up.bias.to_local().data.mul_(2)
    heard.append(str(fsdp2.compare(plain, model, batch())))
    model.block.reshard()
    assert fsdp2.compare(plain, model, batch())

    class Waves(nn.Module):
        def __init__(self, casts: bool) -> None:
            super().__init__()
            self.amplitude, self.casts = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])), casts

        def forward(self, position: Tensor) -> Tensor:
            wave = torch.sin(position)
            return self.amplitude * (wave.to(self.amplitude.dtype) if self.casts else wave)

    def sharded(casts: bool, **options: Any) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)
        return fully_shard(Waves(casts), mp_policy=policy)

    x = 100 * batch()
    heard.append(str(fsdp2.compare(Waves(False), sharded(False), x)))
    assert fsdp2.compare(Waves(True), sharded(True, cast_forward_inputs=False), x)
    compared.append("compare")


@follows("compare all else in eval mode")
def compared_across_rows() -> None:
    """SyncBatchNorm takes GPUs only."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = fully_shard(copy.deepcopy(plain))
    heard.append(str(fsdp2.compare(plain, model, batch())))
    assert fsdp2.compare(plain.eval(), model.eval(), batch())
    compared.append("compare")


# ---- check


@follows(
    "Expected memory and values before training: model.to_empty(device=...), then initialise or load",
    "Initialise or load it",
)
def found_on_meta_and_unwritten() -> None:
    with torch.device("meta"):
        model = shard(Net())
    found(fsdp2.check(model))
    model.to_empty(device="cpu")
    found(fsdp2.check(model))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    none_found(model, sgd(model))


@follows(
    "Look for an overflow, a bad batch, or memory that was never initialised",
    "Clear them (zero_grad), or leave this step out",
)
def found_not_finite() -> None:
    model, plain = pair()
    backward(model, x=torch.full((2, 5), float("inf")))
    found(fsdp2.check(model))
    model.zero_grad()
    none_found(model)
    train(model, plain)
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    found(fsdp2.check(model))
    set_model_state_dict(model, plain.state_dict(), options=FULL)
    none_found(model)


@follows("Call set_requires_gradient_sync(True) (HSDP: set_requires_all_reduce(True), too) before the last backward")
def found_unsynchronized() -> None:
    model, plain = pair()
    model.set_requires_gradient_sync(False)
    backward(model)
    found(fsdp2.check(model))
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    none_found(model)
    for step in range(2):
        backward(plain, x=batch(step))
    same_gradients(model, plain)


@follows(
    "Create it before fully_shard, and leave it out of ignored_params; or freeze it, or reduce its gradient yourself",
    "Broadcast it; if it is trained, see 'unmanaged'",
)
def found_unmanaged() -> None:
    def sharded(**options: Any) -> Any:
        model = build()
        model.head = build(lambda: nn.Linear(5, 3), seed=1 + options.pop("seed", 0))
        ignored = {model.head.weight, model.head.bias} if options.pop("ignore", False) else None
        return fully_shard(model, ignored_params=ignored)

    found(fsdp2.check(sharded(ignore=True)))
    none_found(sharded())
    frozen = sharded(ignore=True)
    frozen.head.requires_grad_(False)
    none_found(frozen)
    apart = sharded(ignore=True, seed=dist.get_rank())
    apart.head.requires_grad_(False)
    found(fsdp2.check(apart))
    for param in apart.head.parameters():
        dist.broadcast(param.data, 0)
    none_found(apart)
    model, plain = sharded(ignore=True), build()
    plain.head = build(lambda: nn.Linear(5, 3), seed=1)
    optimizers = sgd(model), sgd(plain)
    for step in range(2):
        backward(model, step)
        backward(plain, x=batch(step))
        for param in model.head.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, plain)


@follows(
    "Build it from model.parameters(), after fully_shard and after whatever replaces parameters",
    "Add it to the optimizer, or freeze it",
    "Give each parameter to one group",
)
def found_in_optimizers() -> None:
    model = build()
    optimizer = sgd(model)
    shard(model)
    found(fsdp2.check(model, optimizer))
    none_found(model, sgd(model))
    some = torch.optim.SGD([*model.block.parameters(), *model.head.parameters()], lr=0.1)
    found(fsdp2.check(model, some))
    some.add_param_group({"params": [*model.stem.parameters()]})
    none_found(model, some)
    fewer = torch.optim.SGD([*model.block.parameters(), *model.head.parameters()], lr=0.1)
    model.stem.requires_grad_(False)
    none_found(model, fewer)
    twice = [torch.optim.SGD(model.head.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]
    try:
        found(fsdp2.check(model, twice))
    except (AssertionError, TypeError):
        heard.append("Give each parameter to one group")
    none_found(model, fewer)


@follows("Build and set up the model by the same code on every rank")
def found_in_layouts() -> None:
    model, plain = pair()
    model.stem.requires_grad_(dist.get_rank() == 0)
    found(fsdp2.check(model))
    model.stem.requires_grad_(True)
    none_found(model)
    train(model, plain)


@follows(
    "Initialise from the same seed, or broadcast; then look for a rank that steps differently",
    "give the ranks of such an axis one seed, and the same batches",
    ranks=4,
)
def found_in_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fsdp2.set_checks("off")
    try:
        for way in ("", "seed", "broadcast"):
            model = build(seed=mesh.get_local_rank("dp") if way != "seed" else 0)
            if way == "broadcast":
                sync_module_states(model)
            shard(model, mesh=mesh)
            if way:
                none_found(model)
            else:
                found(fsdp2.check(model))
        for seed in (mesh.get_local_rank("tp"), 0):
            model = build(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 6), nn.Linear(6, 4)))
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
            torch.manual_seed(seed)
            model[0].reset_parameters()
            fully_shard(model, mesh=mesh["dp"])
            findings = fsdp2.check(model)
            heard.extend(map(str, findings))
        assert not findings
    finally:
        fsdp2.set_checks("default")
    compared.append("check")


@follows(
    "Have the optimizer make each one a DTensor: DTensor.from_local(local, p.device_mesh, p.placements",
    "optimizer.load_state_dict(states) when the groups have the sharded parameters.",
)
def found_in_states() -> None:
    """States of each rank's rows in plain tensors, and states of parameters from before fully_shard."""
    for distributes in (False, True):
        model, _ = pair()
        backward(model)
        optimizer: Any = PlainStates(model.parameters(), of_rows=True, distributes=distributes)
        optimizer.step()
        none_found(model, optimizer) if distributes else found(fsdp2.check(model, optimizer))
    plain = build()
    optimizer = sgd(plain)
    backward(plain, x=batch())
    optimizer.step()
    states, model = optimizer.state_dict(), shard(copy.deepcopy(plain))
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    found(fsdp2.check(model, optimizer))
    optimizer.load_state_dict(states)
    none_found(model, optimizer)


@follows("Assign distribute_tensor(gradient, p.device_mesh, p.placements) to its .grad")
def plain_gradients_clipped() -> None:
    model, plain = pair()
    backward(model)
    backward(plain, x=batch())
    p = model.head.weight
    gradient = p.grad.full_tensor()
    p.grad = gradient
    refused(lambda: fsdp2.clip_grad_norm_(model.parameters(), 0.1))
    p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
    fsdp2.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    same_gradients(model, plain)


@follows("Call full_tensor() on the DTensor, on every rank. To load the state dict of a sharded model into a plain one")
def copied_into_plain_tensors() -> None:
    model, plain = pair()
    fresh = build(seed=3)
    refused(lambda: fresh.load_state_dict(model.state_dict()))
    fresh.load_state_dict(get_model_state_dict(model, options=FULL))
    same_parameters(fresh, plain)
    target = torch.zeros(3, 5)
    refused(lambda: target.copy_(model.head.weight.detach()))
    target.copy_(model.head.weight.detach().full_tensor())
    same(target, plain.head.weight.detach(), "copied")
