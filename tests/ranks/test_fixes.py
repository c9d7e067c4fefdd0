"""Tests the table of fixes for sharded parameters: each is needed with this torch, helps, and changes nothing else.

A program of each fix gives a wrong result while the fix is off. If a test fails because the result is right, the fix
can be removed.
"""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import dtensor_fixes, fully_shard
from fsdp2.dtensor.fixes import describe_fixes
from fsdp2.dtensor.table import FIXES, NAMES
from helpers import fake_world, run_checks, run_ranks, sharded

WHOLE = torch.arange(20.0).reshape(5, 4) / 10 - 1


def linear() -> Any:
    model = nn.Linear(4, 5)
    with torch.no_grad():
        model.weight.copy_(WHOLE)
        model.bias.zero_()
    return fully_shard(model)


def weight() -> Any:
    """Of a model that lives as long."""
    model = linear()
    model.weight.model = [model]
    return model.weight


def ours(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(ours(found.detach()).double(), expected.double())


def raises(program: Callable[[], object], says: str = "") -> bool:
    """Returns True if `program` raises an error that says that."""
    try:
        program()
    except Exception as error:
        return says in str(error)
    return False


def gradient_of_a_full_tensor() -> bool:
    p = weight()
    (p.full_tensor().sum() * (1 + dist.get_rank())).backward()
    return same(p.grad, torch.full((5, 4), 1.5))


def number_beside_a_norm() -> bool:
    p = weight()
    number = torch.tensor(1.0 + dist.get_rank(), requires_grad=True)
    (number * p.norm()).backward()
    return same(p.grad, 1.5 * WHOLE / WHOLE.norm())


def assigned_data() -> bool:
    p = weight()
    p.data = 2 * WHOLE
    return same(p, 2 * WHOLE)


def counted_local_write() -> bool:
    p = weight()
    p.detach().to_local().mul_(1)
    return bool(p._version)


def detached_in_inference() -> bool:
    p = weight()
    with torch.inference_mode():
        return same(p.detach(), WHOLE)


def copied_gradient() -> bool:
    model = linear()
    model(torch.ones(2, 4)).sum().backward()
    copies = [copy.deepcopy(each.grad) for each in model.parameters()]
    return same(copies[0], torch.full((5, 4), 2.0)) and same(copies[1], torch.full((5,), 2.0))


def gradient_of_an_input() -> bool:
    model = linear()
    model(torch.ones(2, 4)).sum().backward(inputs=[model.bias])
    return model.bias.grad is not None


def written_row() -> bool:
    p = weight()
    with torch.no_grad():
        p[1].zero_()
    expected = WHOLE.clone()
    expected[1] = 0
    return same(p, expected)


def list_with_a_plain_tensor() -> bool:
    p = weight()
    with torch.no_grad():
        torch._foreach_add_([p, torch.ones(1)], 1.0)
    return same(p, WHOLE + 1) and p._version == 1


def infinity_on_another_mesh() -> bool:
    """The first gradient is on a mesh of this rank alone."""
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))["b"] for shape in ((2, 1), (1, 2))]
    gradients = [sharded(torch.ones(4), mesh, [Shard(0)]) for mesh in meshes]
    if dist.get_rank() == 1:
        gradients[1].to_local()[0] = float("inf")
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return found.item() == 1


def whole_truth() -> bool:
    found = (weight() > -5).any()
    return same(found.int(), torch.tensor(1))


def sum_of_norms() -> bool:
    return same(weight().norm(dim=0).sum(), WHOLE.norm(dim=0).sum())


def norm_beside_a_number() -> bool:
    p = weight()
    other = distribute_tensor(torch.tensor(-1.0), p.device_mesh, [Replicate()])
    return same(torch.stack([p.norm(), other]), torch.stack([WHOLE.norm(), torch.tensor(-1.0)]))


def written_sum() -> bool:
    total = weight().detach().sum()
    return same(total.fill_(3.0), torch.tensor(3.0))


def written_by_a_mask() -> bool:
    p = weight().detach()
    p[p > 0] = 0.0
    for value in (1.0, -1.0):
        scalar = sharded(torch.tensor(value), p.device_mesh, [Replicate()])
        scalar[scalar > 0] = 0.0
        if not same(scalar, torch.tensor(min(value, 0.0))):
            return False
    return same(p, WHOLE.clamp(max=0))


def sum_beside_a_norm() -> bool:
    """Also one row, which some rank has not, is written to what all have: torch refuses from 2.13 on."""
    p = fully_shard(nn.Linear(4, 1)).weight.detach()
    p.mul_(distribute_tensor(torch.zeros(1, 4), p.device_mesh, [Replicate()]))
    return same(p, torch.zeros(1, 4)) and raises(lambda: torch.zeros(()).add_(weight().norm()), "of a plain tensor")


def mean_of_squares() -> bool:
    p = weight()
    return same(nn.functional.mse_loss(p, torch.zeros_like(p)), WHOLE.square().mean())


def sum_over_no_dims() -> bool:
    return same(weight().sum(dim=()), WHOLE.sum())


def gradient_of_a_last_column() -> bool:
    p = weight()
    p.select(-1, 0).square().sum().backward()
    expected = torch.zeros(5, 4)
    expected[:, 0] = 2 * WHOLE[:, 0]
    return same(p.grad, expected)


def number_of_a_sum() -> bool:
    return raises(lambda: weight().sum().item(), "full_tensor().item()")


def collective_on_a_weight() -> bool:
    return raises(lambda: dist.all_reduce(weight().detach()), "Call full_tensor(), on every rank, for the whole tensor")


def drawn() -> bool:
    p = weight().detach()
    torch.manual_seed(0)
    p.normal_()
    torch.manual_seed(0)
    return same(p, torch.empty(5, 4).normal_())


def identity() -> bool:
    return same(nn.init.eye_(weight()), torch.eye(5, 4))


def address() -> bool:
    return raises(weight().untyped_storage().data_ptr, "Call full_tensor() first")


def error_of_a_product() -> bool:
    return raises(lambda: torch.mv(weight(), torch.ones(4)), "weight: each rank holds a shard")


def loss_of_a_closure() -> bool:
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        loss.backward()
        return loss

    losses: list[Any] = [None] * 2
    dist.all_gather_object(losses, optimizer.step(closure).item())
    return losses[0] == losses[1]


def counted_collective() -> bool:
    p = weight()
    with CommDebugMode() as counted:
        torch.stack([p.norm(), (2 * p).norm()]).norm()
    at_once = torch.__version__ < "2.13"  # each norm is reduced
    return counted.get_total_counts() == (2 if at_once else 1)


# Each ends well with the fix only. Those below run on one rank alone, which holds no row: others would wait for it.
PROGRAMS: dict[str, list[Callable[[], bool]]] = {
    "partial-results": [whole_truth, sum_of_norms, norm_beside_a_number, written_sum, number_of_a_sum],
    "full-tensor": [gradient_of_a_full_tensor, number_beside_a_norm],
    "data": [assigned_data, counted_local_write, detached_in_inference],
    "copies": [copied_gradient],
    "inputs": [gradient_of_an_input],
    "views": [written_row],
    "foreach": [list_with_a_plain_tensor, infinity_on_another_mesh],
    "writes": [written_by_a_mask, sum_beside_a_norm, identity],
    "mean-losses": [mean_of_squares],
    "dims": [sum_over_no_dims, *([gradient_of_a_last_column] if torch.__version__ < "2.15" else [])],
    "random": [drawn],
    "addresses": [address],
    "errors": [error_of_a_product, collective_on_a_weight],
    "optimizer-steps": [loss_of_a_closure],
    "counted-collectives": [counted_collective],
}
ON_AN_EMPTY_RANK: dict[str, list[Callable[[Any], object]]] = {
    "empty-shards": [lambda p: p.max(), lambda p: p[:, 0].item()],
}
# Shown in test_pipelining.py: its programs take a schedule of two stages.
ELSEWHERE = {"pipelines"}
# Programs for which torch needs no fix any more, and since which release.
RIGHT_SINCE = {"whole_truth": "2.15", "sum_of_norms": "2.15"}


def ends_well(program: Callable[[], bool]) -> bool:
    try:
        return program()
    except Exception:
        return False


def check_fix(name: str, program: Callable[[], bool]) -> None:
    assert ends_well(program), "it does not help"
    if torch.__version__ >= RIGHT_SINCE.get(program.__name__, "3"):
        return
    dtensor_fixes(False, name)
    try:
        assert not ends_well(program), "this torch does without: the fix can go"
    finally:
        dtensor_fixes(True, name)


@pytest.mark.filterwarnings("ignore")
def test_each_is_needed_and_helps() -> None:
    assert {*PROGRAMS, *ON_AN_EMPTY_RANK, *ELSEWHERE} == {*NAMES}
    programs = [(name, program) for name, programs in PROGRAMS.items() for program in programs]
    run_checks(2, [(f"{name}, {program.__name__}", partial(check_fix, name, program)) for name, program in programs])


@pytest.mark.parametrize(("name", "index"), [("empty-shards", 0), ("empty-shards", 1)])
def test_each_is_needed_where_a_rank_holds_nothing(name: str, index: int) -> None:
    program = ON_AN_EMPTY_RANK[name][index]
    with fake_world(4, rank=3), torch.no_grad():
        p = fully_shard(nn.Linear(4, 1), mesh=init_device_mesh("cpu", (2, 2))).weight
        program(p)
        dtensor_fixes(False, name)
        try:
            with pytest.raises((RuntimeError, IndexError)):
                program(p)
        finally:
            dtensor_fixes(True, name)


def results_of_others() -> list[Any]:
    """What torch's own DTensors and plain tensors do, in what the fixes are about; on a mesh of sharded parameters."""
    mesh = init_device_mesh("cpu", (2,))
    results: list[Any] = []
    for name in ("norm", "any", "sum", "max"):
        p = distribute_tensor(WHOLE, mesh, [Shard(0)])
        found = getattr(p > 0 if name == "any" else p, name)()
        results.append((type(found), str(found.placements), found.to_local()))
    programs: dict[str, Callable[[Any], Any]] = {
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
    for name, program in programs.items():
        torch.manual_seed(dist.get_rank())
        p = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
        outcome: Any = "no error"
        try:
            outcome = program(p)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        results.append((name, outcome, type(p), p._version, p.to_local()))
    with suppress(RuntimeError):
        plain = nn.Linear(4, 5)
        plain(torch.ones(2, 4)).sum().backward(inputs=[plain.weight])
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        results.append((plain.weight.grad, plain.bias.grad, copy.deepcopy(plain.weight.grad)))
    return results


@pytest.mark.filterwarnings("ignore")
def test_other_tensors_behave_as_without_fsdp2() -> None:
    """Also beside sharded parameters on an equal mesh. From torch 2.13 on."""
    if torch.__version__ < "2.13":
        pytest.skip("old torch knows sharded parameters by their mesh only")

    def body(rank: int, size: int) -> None:
        before = results_of_others()
        model = linear()
        model(torch.ones(2, 4)).sum().backward()
        after = results_of_others()
        assert str(before) == str(after)

    run_ranks(2, body)


def test_switches() -> None:
    with pytest.raises(ValueError, match=r"names: expected some of partial-results, .*; got veiws"):
        dtensor_fixes(False, "veiws")
    with pytest.raises(TypeError, match="enabled: expected a bool"):
        dtensor_fixes("views")  # type: ignore[arg-type]
    for name in NAMES:
        assert f"| {name} |" in describe_fixes()


def test_the_table_has_the_numbers_of_the_newest_report() -> None:
    """Of tests/run_fixes.py: how many situations end wrong without each."""
    report = max((Path(__file__).parents[2] / "benchmarks" / "results").glob("*-fixes.md")).read_text()
    counted = {name: int(number) for name, number in re.findall(r"^\| ([a-z0-9-]+) \| (\d+) \|", report, re.M)}
    assert counted == {fix.name: fix.situations for fix in FIXES if fix.name in counted}
    assert {*counted} == {*NAMES}


def test_all_off_means_plain_dtensors() -> None:
    with fake_world(2):
        dtensor_fixes(False)
        try:
            assert type(fully_shard(nn.Linear(4, 5)).weight) is DTensor
        finally:
            dtensor_fixes(True)
        assert type(fully_shard(nn.Linear(4, 5)).weight) is not DTensor


@pytest.mark.parametrize(("value", "says"), [("-views", "| views | off |"), ("off", "| data | off |"), ("vies", "")])
def test_the_environment_leaves_some_out(value: str, says: str) -> None:
    command = [sys.executable, "-m", "fsdp2", "fixes", "--markdown"]
    environment = {**os.environ, "FSDP2_DTENSOR_FIXES": value}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if says:
        assert says in result.stdout
        assert ("| data | yes |" in result.stdout) == (value != "off")
    else:
        assert "FSDP2_DTENSOR_FIXES: expected on, off, or names to leave out, as in -views" in result.stderr
