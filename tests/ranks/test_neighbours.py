"""Tests that tensors of others, on the mesh of sharded parameters, run torch's code: a model of torch's FSDP2, one
under tensor parallelism, a plain one, DTensors that a program makes. Collectives, Python calls and results are those
from before fsdp2 has sharded. And torch's `clip_grad_norm_` makes one all-reduce for a sharded model.
"""

import gc
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

from documents import ROOT
from fsdp2 import fully_shard
from helpers import run_ranks

WHOLE = torch.arange(20.0).reshape(5, 4) - 7
DIM, LAYERS = 8, 4
# The most Python calls in addition: the entry of autograd's engine; in a step the hooks around it, too, and one for
# each plain parameter that has a gradient.
OF_OPERATIONS, OF_A_STEP = 3, 20
# Not counted: their number depends on hashes of the keys in torch's caches, which are addresses.
COMPARISONS = {"__eq__", "_check_equals", "__hash__"}

Program = Callable[[], object]


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))


def steps_of(model: nn.Module) -> Program:
    """A step with clipping, which always begins with the same weights and states."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    weights = [param.detach().clone() for param in model.parameters()]

    def step() -> object:
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)
        optimizer.state.clear()
        optimizer.zero_grad()
        loss = model(torch.ones(2, DIM) * (1 + dist.get_rank())).square().sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss, norm, [param.grad for param in model.parameters()], [*model.parameters()]

    return step


def of_fsdp2_of_torch(mesh: DeviceMesh) -> Program:
    model = linears()
    for module in (*model, model):
        fully_shard_of_torch(module, mesh=mesh)
    return steps_of(model)


def of_tensor_parallelism(mesh: DeviceMesh) -> Program:
    plan = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(LAYERS)}
    return steps_of(parallelize_module(linears(), mesh, plan))


def of_plain_tensors(mesh: DeviceMesh) -> Program:
    return steps_of(linears())


def penalty(p: Any) -> object:
    """Norms, sums and extremes, with gradients"""
    p.requires_grad_()
    value = p.norm() + p.norm(dim=0).sum() + p.abs().max() * p.mean() + nn.functional.mse_loss(p, p.detach() + 1)
    value.full_tensor().backward()
    return value, p.grad


OF_DTENSORS: dict[str, Callable[[Any], object]] = {
    "norm": lambda p: p.norm(),
    "any": lambda p: (p > 0).any(),
    "sum": lambda p: p.sum(),
    "max": lambda p: p.max(),
    "numbers": lambda p: torch.stack([p.norm(), p.square().norm()]).norm().full_tensor(),
    "penalty": penalty,
    "row": lambda p: p[1].zero_(),
    "data": lambda p: setattr(p, "data", WHOLE),
    "mask": lambda p: p.__setitem__(p > 0, 0.0),
    "item": lambda p: p.sum().item(),
    "mixed": lambda p: p.mul(torch.ones(5, 4)),
    "lists": lambda p: torch._foreach_add_([p], 1.0),
    "address": lambda p: p.data_ptr(),
    "drawn": lambda p: p.normal_(),
    "mean": lambda p: nn.functional.mse_loss(p, p + 1).full_tensor(),
    "full": lambda p: p.full_tensor(),
    "number": lambda p: torch.tensor(2.0) * p,
}


def of_dtensor(mesh: DeviceMesh, compute: Callable[[Any], object]) -> Program:
    def run() -> object:
        torch.manual_seed(dist.get_rank())
        p = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)], src_data_rank=None)
        try:
            found = compute(p)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        return found, p._version, p

    return run


def programs(mesh: DeviceMesh) -> dict[str, Program]:
    made = {make.__name__: make(mesh) for make in (of_fsdp2_of_torch, of_tensor_parallelism, of_plain_tensors)}
    return {**made, **{name: of_dtensor(mesh, compute) for name, compute in OF_DTENSORS.items()}}


def seen(value: Any) -> Any:
    """What can be compared of a tensor."""
    if isinstance(value, DTensor):
        local = value.to_local()
        return type(value).__name__, str(value.placements), str(local.dtype), local.tolist()
    return (str(value.dtype), value.tolist()) if isinstance(value, Tensor) else value


def observed(program: Program) -> tuple[int, Counter[str], Any]:
    """Returns the number of Python calls of `program`, its collectives, and its results."""
    for _ in range(3):  # what is cached, and what an optimizer's first step with fsdp2 looks at
        found = program()
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name not in COMPARISONS

    sys.setprofile(count)
    try:
        program()
    finally:
        sys.setprofile(None)
    with CommDebugMode() as mode:
        program()
    return calls, Counter({str(op): number for op, number in mode.get_comm_counts().items()}), tree_map(seen, found)


def check_clipping(model: Any) -> None:
    expected = torch.stack([param.grad.full_tensor().norm() for param in model.parameters()]).norm()
    with CommDebugMode() as mode:
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert mode.get_total_counts() == 1
    torch.testing.assert_close(norm.full_tensor(), expected)


def body(rank: int, world_size: int) -> None:
    warnings.simplefilter("ignore")
    gc.disable()  # it calls what waits for objects that die
    mesh = init_device_mesh("cpu", (world_size,))
    others = programs(mesh)
    before = {name: observed(program) for name, program in others.items()}
    model: Any = linears()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    weight = model[0].weight
    (model(torch.ones(2, DIM)).sum() + (weight.norm() + weight.sum()).full_tensor()).backward()
    different = []
    for name, program in others.items():
        (calls_before, *rest_before), (calls, *rest) = before[name], observed(program)
        if str(rest) != str(rest_before):
            different.append(f"{name}: before {rest_before}, then {rest}")
        if calls > calls_before + (OF_OPERATIONS if name in OF_DTENSORS else OF_A_STEP):
            different.append(f"{name}: {calls_before} Python calls before, then {calls}")
    assert not different, "\n".join(different)
    check_clipping(model)


def test_others_run_the_code_of_torch() -> None:
    """In a process of its own: nothing of torch is changed there when it begins."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    run_ranks(2, body)
