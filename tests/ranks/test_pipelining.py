"""Tests pipelines of torch.distributed.pipelining with sharded stages: two or more times two data-parallel ranks.

The oracle is the whole model on the whole batch, in one process. A schedule runs each micro-batch forward and backward
by itself, keeps gradients unsynchronized, and asks for their reduction outside any backward pass; zero-bubble schedules
compute the gradients of inputs and those of weights in two passes, neither of which is `backward`.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import FSDPModule, MixedPrecisionPolicy, ShardPlacementResult, fully_shard, patch_torch, replicate
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.state import groups_below
from helpers import NIGHTLY, Differences, assert_same, full, run_checks, shard_batch
from models import NormedBlock
from scenarios import ROWS as SCENARIO_ROWS
from scenarios import Net, Run, blocks, check, sgd
from scenarios import loss_of as scenario_loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

PIPELINE, DATA = 2, 2
ROWS, WIDTH, STEPS, MICRO_BATCHES = 16, 5, 2, 4
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
LOOSE = {"rtol": 2e-5, "atol": 1e-6}
COMPUTE_FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
"""Casts as any mixed precision does, but computes what can be compared closely."""
# On torch 2.11, V schedules have gloo send to the rank itself, which it can't, with or without sharding.
V_SCHEDULES = () if torch.__version__ < "2.13" else ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SCHEDULES)


class Stack(nn.Module):
    """Four blocks, a stem before the first and a head behind the last; a stage keeps some of them, under their names.

    The root of a stage in the middle has no parameters of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module | None = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleDict({str(i): NormedBlock(WIDTH, 7) for i in range(4)})
        self.head: nn.Module | None = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.stem is None else self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def stage(self, index: int, stages: int) -> "Stack":
        part, each = copy.deepcopy(self), 4 // stages
        part.blocks = nn.ModuleDict({str(i): part.blocks[str(i)] for i in range(index * each, (index + 1) * each)})
        part.stem = part.stem if index == 0 else None
        part.head = part.head if index == stages - 1 else None
        return part


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str
    reshard_after_forward: bool | None = None
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    replicates: bool = False
    shards_root: bool = True
    budget: int | None = None

    def __str__(self) -> str:
        ways = f"{self.replicates=} {self.shards_root=} {self.budget=}"
        return f"{self.schedule} {self.reshard_after_forward=} {self.policy.param_dtype} {ways}"

    @property
    def stage_indices(self) -> list[int]:
        rank = dist.get_rank() // DATA
        if self.schedule in ("GPipe", "1F1B"):
            return [rank]
        last = 2 * PIPELINE - 1
        return [rank, last - rank if self.schedule in ("ZBVZeroBubble", "DualPipeV") else rank + PIPELINE]

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (PIPELINE, DATA), mesh_dim_names=("pp", "dp"))

    @property
    def tolerance(self) -> dict[str, float]:
        return LOOSE if self.policy.param_dtype else ROUNDING

    def plain(self) -> Stack:
        torch.manual_seed(1)
        return Stack() if self.policy.param_dtype else Stack().double()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, 3))
        return (inputs, targets) if self.policy.param_dtype else (inputs.double(), targets.double())

    def own(self, whole: Tensor) -> Tensor:
        return shard_batch(whole, self.mesh["dp"].get_local_rank(), DATA)

    def stages(self, plain: Stack) -> list[Any]:
        count = PIPELINE * len(self.stage_indices)
        parts = [plain.stage(index, count) for index in self.stage_indices]
        for part in parts:
            ends = [part] if self.shards_root else [each for each in (part.stem, part.head) if each is not None]
            for module in (*part.blocks.values(), *ends):
                self.shard(module)
            if self.budget is not None:
                part.set_unsharded_budget(self.budget)
        return [
            pipelining.PipelineStage(part, index, count, torch.device("cpu"), group=self.mesh["pp"].get_group())
            for part, index in zip(parts, self.stage_indices, strict=True)
        ]

    def shard(self, module: nn.Module) -> None:
        if self.replicates:
            replicate(module, mesh=self.mesh["dp"], mp_policy=self.policy)
        else:
            reshard = self.reshard_after_forward
            fully_shard(module, mesh=self.mesh["dp"], mp_policy=self.policy, reshard_after_forward=reshard)

    def make_schedule(self, stages: list[Any]) -> Any:
        make = getattr(pipelining.schedules, f"Schedule{self.schedule}")
        return make(stages[0] if len(self.stage_indices) == 1 else stages, MICRO_BATCHES, loss_of)


def optimizer_for(*models: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, fused=True)


def trains(case: Case) -> None:
    """Losses, gradients and parameters of each stage are those of the whole model."""
    different, plain = Differences(), case.plain()
    stages = case.stages(plain)
    parts = [stage.submod for stage in stages]
    assert_covers(parts, plain)
    schedule = case.make_schedule(stages)
    optimizer, plain_optimizer = optimizer_for(*parts), optimizer_for(plain)
    for step in range(STEPS):
        inputs, targets = case.batch(step)
        losses = run(schedule, stages, case.own(inputs), case.own(targets))
        loss = loss_of(plain(inputs), targets)
        loss.backward()
        if losses:
            mean = torch.stack([each.detach() for each in losses]).mean()
            dist.all_reduce(mean, group=case.mesh["dp"].get_group())
            with different.noted():
                assert_same((mean / DATA).to(loss.dtype), loss, **case.tolerance, name=f"step {step}: loss")
        compare(case, parts, plain, different, f"step {step}: gradient of", gradients=True)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    compare(case, parts, plain, different, "trained")
    different.raise_first()


def run(schedule: Any, stages: list[Any], inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """One step; the losses of the micro-batches, where the last stage is."""
    losses: list[Tensor] = []
    arguments = [inputs] if any(stage.is_first for stage in stages) else []
    if any(stage.is_last for stage in stages):
        schedule.step(*arguments, target=targets, losses=losses)
    else:
        schedule.step(*arguments)
    return losses


def compare(
    case: Case, parts: list[Any], plain: Stack, different: Differences, what: str, gradients: bool = False
) -> None:
    whole = dict(plain.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            actual, expected = (parameter.grad, whole[name].grad) if gradients else (parameter, whole[name])
            with different.noted():
                assert_same(actual, expected, **case.tolerance, name=f"{what} {name}")


def assert_covers(parts: list[nn.Module], plain: Stack) -> None:
    """The stages' state dicts make up the whole model's, without a name twice."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [name for part in parts for name in part.state_dict()])
    names = [name for i, of_rank in enumerate(found) if i % DATA == 0 for name in of_rank]
    assert sorted(names) == sorted(plain.state_dict())


def patched(body: Callable[[Case], None], case: Case) -> None:
    with patch_torch():
        body(case)


def test_schedules_train_like_the_whole_model() -> None:
    """Torch's FSDP2 loses gradients of weights in zero-bubble schedules, unless parameters stay after forward."""
    cases = [Case(schedule) for schedule in SCHEDULES]
    cases += [Case(schedule, False) for schedule in ("InterleavedZeroBubble", *V_SCHEDULES[:1])]
    cases += [Case("1F1B", replicates=True), Case("InterleavedZeroBubble", True, COMPUTE_FP64)]
    run_checks(PIPELINE * DATA, [(str(case), functools.partial(patched, trains, case)) for case in cases], timeout=100)


def test_schedules_that_do_not_know_our_modules() -> None:
    """Without patch_torch, or where the root of a stage is not sharded: each micro-batch is reduced by itself."""
    schedules = ("1F1B", "InterleavedZeroBubble", *V_SCHEDULES)
    apart = [name for name in schedules if NIGHTLY or name != "1F1B"]
    checks: list[Any] = [
        (name, functools.partial(trains, Case(name))) for name in schedules if NIGHTLY or name == "1F1B"
    ]
    partly = [Case(name, shards_root=False) for name in apart]
    checks += [(str(case), functools.partial(patched, trains, case)) for case in partly]
    run_checks(PIPELINE * DATA, checks, timeout=100)


# ---- how often a stage communicates ----------------------------------------------------------------------------------


@contextlib.contextmanager
def count(name: str) -> Iterator[list[Any]]:
    """The calls of one collective."""
    original, calls = getattr(NamedPairwiseComm, name), []

    def called(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    with mock.patch.object(NamedPairwiseComm, name, called):
        yield calls


def communicates_once(case: Case) -> None:
    """All micro-batches share one gather, which the schedule or a budget asks for, and one reduction."""
    stages = case.stages(case.plain())
    schedule = case.make_schedule(stages)
    for step in range(2):  # the first one finds out what the stages exchange by running them
        with count("all_gather") as gathers, count("reduce_scatter") as reductions:
            run(schedule, stages, *map(case.own, case.batch(step)))
        if case.budget is not None:
            optimizer_for(*(stage.submod for stage in stages)).step()
    groups = [group for stage in stages for group in groups_below(stage.submod) if group.params]
    counts = len(gathers), len(reductions)  # a failure would print freed tensors
    assert counts == (len(groups), len(groups))
    assert not any(group.unsharded.is_allocated for group in groups), "they would take memory in the optimizer's step"


def test_micro_batches_share_one_gather_and_one_reduction() -> None:
    cases = [Case(schedule, False) for schedule in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")]
    cases += [Case(schedule, budget=2**20) for schedule in SCHEDULES]
    run_checks(PIPELINE * DATA, [(str(case), functools.partial(patched, communicates_once, case)) for case in cases])


# ---- the reduction that pipelining asks for, outside any backward pass -----------------------------------------------


def finish_by_groups(model: Any) -> None:
    """As pipelining does up to torch 2.13, through private names of torch's state."""
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    assert state is model._get_fsdp_state()
    for each in state._state_ctx.all_states:
        assert (each._fsdp_param_group is None) == (not each._fsdp_param_groups)
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def finish_at_root(model: Any) -> None:
    model.set_requires_gradient_sync(True)
    model._get_fsdp_state()._root_post_backward_final_callback()


def finish_by_handle(model: Any) -> None:
    """As pipelining does from torch 2.15 on."""
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()


def accumulates(run: Run, finish: Callable[[Any], None]) -> None:
    """Twice in each step, without a backward pass that synchronises; in the second step `zero_grad` comes between."""
    model = run.build(Net)
    blocks(run, model)
    if finish is finish_by_handle and isinstance(model, FSDPModule):
        model.set_manual_backward_finalization(True)
    optimizer = sgd(model)
    for step in range(3):
        run.set_sync(model, False)
        for i in range(2):
            # Until they are finalized, a user can't clear them.
            if step == 1 and i == 1 and finish is not finish_by_handle:
                optimizer.zero_grad()
            scenario_loss(model(run.batch(seed=10 * step + i))).backward()
        for _ in range(2 if step == 2 else 1):  # once more changes nothing
            if run.sharded:
                finish(model)
        run.step(f"step {step}", model, optimizer)


def test_unsynchronized_gradients_are_reduced_outside_backward() -> None:
    check(accumulates, finish=(finish_by_groups, finish_at_root, finish_by_handle))


class Branch(nn.Module):
    """The first rows take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, first: int) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.branch(x[:first]), x[first:]]) if first else x


def goes_two_ways(run: Run) -> None:
    model = run.shard(run.build(Branch))
    if isinstance(model, FSDPModule):
        model.set_reduce_scatter_unused_params(True)
    for step in range(2):
        run.set_sync(model, False)
        for i in range(2):
            first = SCENARIO_ROWS // 2 if run.rank == 0 else 0  # of all rows; of two ranks' the first one's
            scenario_loss(model(run.batch(seed=10 * step + i), first)).backward()
        if run.sharded:
            finish_by_groups(model)
        run.grads(f"step {step}", model)
        model.zero_grad()


def test_ranks_that_did_not_use_parameters_take_part_in_their_reduction() -> None:
    """Or the others would wait for them."""
    check(goes_two_ways)


def sums_between_replicas(run: Run) -> None:
    """What each replica has reduced for itself is summed up when it is asked for."""
    model = run.build(Net)
    if run.sharded:
        mesh = init_device_mesh("cpu", (2, 2))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        model.set_requires_all_reduce(False)
    for i in range(2):
        scenario_loss(model(run.batch(seed=i, rows=8))).backward()
    if run.sharded:
        finish_by_groups(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        run.value(name, full(parameter.grad))


def test_partial_sums_of_replicas_are_reduced_outside_backward() -> None:
    check(sums_between_replicas, world_size=4)


def raises_in_backward() -> None:
    model = fully_shard(nn.Linear(5, 5))
    inputs = torch.ones(2, 5, requires_grad=True)
    inputs.register_hook(lambda _: finish_at_root(model))
    with pytest.raises(RuntimeError, match="ask afterwards"):
        model(inputs).sum().backward()


# ---- explicit gathers ------------------------------------------------------------------------------------------------


def held_until_freed() -> None:
    """`unshard` serves all forwards up to the backward that frees it; a parameter that changed is gathered anew."""
    model = fully_shard(nn.Linear(5, 5), reshard_after_forward=False)
    x = torch.ones(2, 5)
    with count("all_gather") as gathers:
        model.unshard()
        before, _ = model(x), model(x)
        assert len(gathers) == 1
        with torch.no_grad():
            model.weight.add_(1)
        after = model(x)
        assert len(gathers) == 2
        torch.testing.assert_close(after - before, torch.full_like(after, 5))
        after.sum().backward()
        model(x)
        assert len(gathers) == 3
        model.reshard()
        model(x)
        assert len(gathers) == 4


def post_backward_of_all_groups_delivers() -> None:
    """As OLMo-core's stages do it: nothing else is called before the optimizer steps. Modules with parameters on
    several meshes have several groups: a client that asks for one gets all.
    """
    replicas = init_device_mesh("cpu", (2, 1))

    def on_another_mesh(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, replicas) if parameter.dim() == 1 else None

    for place in (None, on_another_mesh):
        _post_backward_delivers(place)


def _post_backward_delivers(place: Any) -> None:
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    model: Any = copy.deepcopy(plain)
    for module in (model[0], model[2], model):
        fully_shard(module, shard_placement_fn=place)
    assert len(model[0]._get_fsdp_state()._fsdp_param_groups) == (1 if place is None else 2)
    for step in range(2):
        whole = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        for settle in (model.set_is_last_backward, model.set_reshard_after_backward, model.set_requires_gradient_sync):
            settle(False)
        for part in whole.chunk(2):
            model(part.chunk(2)[dist.get_rank()]).square().mean().backward()
            plain(part).square().mean().backward()
        for settle in (model.set_is_last_backward, model.set_reshard_after_backward, model.set_requires_gradient_sync):
            settle(True)
        for state in fully_shard.state(model)._state_ctx.all_states:  # type: ignore[attr-defined]
            if state._fsdp_param_group:
                state._fsdp_param_group.post_backward()
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad, twin.grad, 1e-5, 1e-6, f"step {step}, {name}")
        model.zero_grad()
        plain.zero_grad()


def test_state_between_passes() -> None:
    checks = (raises_in_backward, held_until_freed, post_backward_of_all_groups_delivers)
    run_checks(2, [(check.__name__, check) for check in checks])
