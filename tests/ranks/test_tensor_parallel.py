"""Tests sharding of parameters that tensor parallelism has made DTensors.

The oracle is a plain model on the whole batch: the ranks of one tensor-parallel group see the same rows. Models are in
fp64, so that another order of summation is far below the tolerance.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.state import groups_below
from helpers import (
    NIGHTLY,
    Differences,
    assert_same,
    assert_same_names,
    chunk_of,
    full,
    one_mesh,
    run_checks,
    run_ranks,
    shard_batch,
)
from models import NormedBlock, Scaled, TinyModel, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

STEPS = 2
ROWS = 12  # divides by 1, 2, 3 and 4
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
COMPUTE_FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
"""Casts as any mixed precision does, but computes what can be compared closely."""
STORED_FP32 = {"rtol": 2e-5, "atol": 1e-6}


# ---- models ----------------------------------------------------------------------------------------------------------


class Stack(TinyModel):
    """A plain stem and head around blocks that are parallel. The blocks' norms are used by all, as plain parameters."""

    row_shape = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(NormedBlock(10, inner) for inner in (14, 8))
        self.head = nn.Linear(10, 3)
        self.recomputes = False

    def parallelize(self, tp: DeviceMesh) -> None:
        for block in self.blocks:
            parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Sequence(TinyModel):
    """Between the layers each rank holds a part of the sequence: norms are replicated, their gradients partial sums."""

    row_shape = (4, 7)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(NormedBlock(10, inner) for inner in (14, 8))
        self.head = nn.Linear(10, 6)

    def parallelize(self, tp: DeviceMesh) -> None:
        along, whole = Shard(1), Replicate()
        plan: dict[str, Any] = {
            "stem": RowwiseParallel(input_layouts=whole, output_layouts=along),
            "head": ColwiseParallel(input_layouts=along, output_layouts=whole),
        }
        for i in range(len(self.blocks)):
            plan[f"blocks.{i}.norm"] = SequenceParallel()
            plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=along)
            plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=along)
        parallelize_module(self, tp, plan)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- training, plain and sharded -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one mesh, whose last axis is tensor-parallel and whose others are data-parallel."""

    shape: tuple[int, ...]
    build: Callable[[], Any] = Stack
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    optimizer: str = "sgd"
    recomputes: bool = False
    along: int | None = None  # shard_placement_fn: this dim, of all that have it

    def __str__(self) -> str:
        names = (self.build.__name__, self.optimizer, self.policy.param_dtype, f"{self.recomputes=}", self.along)
        return " ".join(map(str, (self.shape, *names)))

    @property
    def mesh(self) -> DeviceMesh:
        return one_mesh(self.shape, ("replicate", "shard", "tp")[-len(self.shape) :])

    @property
    def dp(self) -> DeviceMesh:
        return self.mesh["replicate", "shard"] if len(self.shape) == 3 else self.mesh["shard"]

    @property
    def dp_rank(self) -> int:
        return dist.get_rank() // self.shape[-1]

    @property
    def dp_size(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def tolerance(self) -> dict[str, float]:
        return STORED_FP32 if self.policy.param_dtype else ROUNDING

    def plain(self, seed: int = 1) -> Any:
        torch.manual_seed(seed)
        model = self.build()
        model.recomputes = self.recomputes
        return model if self.policy.param_dtype else model.double()

    def make(self, seed: int = 1) -> Any:
        """Everything is freed after forward: backward reads nothing that it has not gathered again."""
        model = self.plain(seed)
        model.parallelize(self.mesh["tp"])
        place = None if self.along is None else lambda p: Shard(min(self.along, p.dim() - 1))
        for module in (*model.blocks, model):
            fully_shard(
                module, mesh=self.dp, mp_policy=self.policy, reshard_after_forward=True, shard_placement_fn=place
            )
        return model

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.25, foreach=False)
        # DTensors on two meshes can't be in one foreach operation.
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)

    def batch(self, model: TinyModel, seed: int) -> Tensor:
        batch = model.example(rows=ROWS, seed=seed)
        return batch if self.policy.param_dtype else batch.double()

    def own(self, batch: Tensor) -> Tensor:
        return shard_batch(batch, self.dp_rank, self.dp_size)


BLOCK = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "down.bias": Replicate()}
AROUND = {"stem.weight": Shard(1), "stem.bias": Replicate(), "head.weight": Shard(0), "head.bias": Shard(0)}
NORM = {"norm.weight": Replicate(), "norm.bias": Replicate()}


def on_tp(case: Case, name: str) -> Shard | Replicate | None:
    """How tensor parallelism has a parameter lie; None: it does not know it."""
    plan = BLOCK if case.build is Stack else {**BLOCK, **AROUND, **NORM}
    return plan.get(".".join(name.split(": ")[-1].split(".")[-2:]))  # type: ignore[return-value]


def assert_own_part(actual: Any, whole: Tensor | None, case: Case, name: str) -> None:
    """First tensor parallelism cuts, then the data-parallel ranks cut what each has. Communicates nothing."""
    assert isinstance(actual, DTensor), name
    assert whole is not None, name
    tp, shards, inner = case.mesh["tp"], case.mesh["shard"], on_tp(case, name)
    dim = 0 if case.along is None else min(case.along, whole.dim() - 1)
    own = chunk_of(whole, inner.dim, tp.get_local_rank(), tp.size()) if isinstance(inner, Shard) else whole
    own = chunk_of(own, dim, shards.get_local_rank(), shards.size())
    assert actual.device_mesh == (case.dp if inner is None else case.mesh), f"{name}: {actual.device_mesh}"
    placements = list(actual.placements)
    if inner is not None:
        assert placements.pop() == inner, f"{name}: {actual.placements}"
    twice = isinstance(inner, Shard) and inner.dim == dim and tp.size() > 1
    outer = placements.pop()
    assert twice == (type(outer) is not Shard), f"{name}: {actual.placements}"
    assert twice or outer == Shard(dim), f"{name}: {actual.placements}"
    assert placements == [Replicate()] * (len(case.shape) - 2), f"{name}: {actual.placements}"
    assert actual.shape == whole.shape, name
    assert_same(actual.to_local(), own, **case.tolerance, name=name)


def compare(case: Case, model: Any, plain: Any, different: Differences, what: str, gradients: bool = False) -> None:
    """This rank's parts, and what `full_tensor` makes of all parts of weights (gradients lie as these do)."""
    assert_same_names(dict(model.named_parameters()), dict(plain.named_parameters()))
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        actual, expected = (p.grad, q.grad) if gradients else (p, q.detach())
        with different.noted():
            assert_own_part(actual, expected, case, f"{what}: {name}")
        if gradients:
            continue
        whole = full(actual)
        with different.noted():
            assert_same(whole, expected, **case.tolerance, name=f"{what}: whole {name}")


def assert_mean(case: Case, loss: Tensor, expected: Tensor, different: Differences, name: str) -> None:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    with different.noted():
        assert_same(mean / dist.get_world_size(), expected.detach(), **STORED_FP32, name=name)


def plain_loss(case: Case, plain: Any, seed: int) -> Tensor:
    """In the compute dtype, with gradients in the dtype that is stored."""
    batch = case.batch(plain, seed)
    if case.policy.param_dtype is None:
        loss = mean_loss(plain(batch))
        loss.backward()
        return loss
    weights = {name: p.to(case.policy.param_dtype) for name, p in plain.named_parameters()}
    loss = mean_loss(torch.func.functional_call(plain, weights, (batch.to(case.policy.param_dtype),)))
    loss.backward()
    return loss


def trains(case: Case) -> None:
    """Losses, gradients and parameters are those of the plain model, in every step."""
    different, plain, model = Differences(), case.plain(), case.make()
    compare(case, model, plain, different, "initially")
    optimizer, plain_optimizer = case.optimizer_for(model), case.optimizer_for(plain)
    for step in range(STEPS):
        loss = mean_loss(model(case.own(case.batch(model, step))))
        loss.backward()
        assert_mean(case, loss, plain_loss(case, plain, step), different, f"step {step}: loss")
        compare(case, model, plain, different, f"step {step}, gradients", gradients=True)
        step_all(optimizer, plain_optimizer)
    compare(case, model, plain, different, "trained")
    different.raise_first()


def step_all(*optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        each.step()
        each.zero_grad()


def accumulates(case: Case) -> None:
    """Two micro-batches without synchronisation, then one with it."""
    different, plain, model = Differences(), case.plain(), case.make()
    optimizer, plain_optimizer = case.optimizer_for(model), case.optimizer_for(plain)
    for step in range(2):
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            mean_loss(model(case.own(case.batch(model, 10 * step + i)))).backward()
            plain_loss(case, plain, 10 * step + i)
        compare(case, model, plain, different, f"step {step}, gradients", gradients=True)
        step_all(optimizer, plain_optimizer)
    compare(case, model, plain, different, "trained")
    different.raise_first()


def clips(case: Case) -> None:
    """The norm over both axes, of those parameters that lie on both; what is left is scaled by it."""
    different, plain, model = Differences(), case.plain(), case.make()
    for norm_type in (2.0, float("inf")):
        mean_loss(model(case.own(case.batch(model, 0)))).backward()
        plain_loss(case, plain, 0)
        chosen, expected = (
            [p for name, p in each.named_parameters() if on_tp(case, name) is not None] for each in (model, plain)
        )
        norm = nn.utils.clip_grad_norm_(chosen, 1e-3, norm_type=norm_type)
        plain_norm = nn.utils.clip_grad_norm_(expected, 1e-3, norm_type=norm_type)
        value = norm.full_tensor() if isinstance(norm, DTensor) else norm
        with different.noted():
            assert_same(value, plain_norm, **case.tolerance, name=f"norm {norm_type}")
        compare(case, model, plain, different, f"norm {norm_type}, clipped", gradients=True)
        for each in (model, plain):
            each.zero_grad()
    different.raise_first()


def gathers_again_in_backward(case: Case) -> None:
    """DTensor operations save local weights: those are freed after forward, too, and come back for backward."""
    model, all_gather, seen = case.make(), NamedPairwiseComm.all_gather, []

    def recorded(self: NamedPairwiseComm, *args: Any) -> Any:
        seen.append(self.size)
        return all_gather(self, *args)

    groups = groups_below(model)
    with mock.patch.object(NamedPairwiseComm, "all_gather", recorded):
        loss = mean_loss(model(case.own(case.batch(model, 0))))
        assert seen == [case.mesh["shard"].size()] * len(groups)
        for group in groups:
            assert group.unsharded.storage.nbytes() == 0, group.name  # type: ignore[union-attr]
        loss.backward()
    assert len(seen) == 2 * len(groups)


def whole_state_dicts_come_and_go(case: Case) -> None:
    """Out: on rank 0, as one process would save it. In: from rank 0, and by assignment of plain tensors."""
    different, plain, model = Differences(), case.plain(), case.make()
    optimizer, plain_optimizer = case.optimizer_for(model), case.optimizer_for(plain)
    mean_loss(model(case.own(case.batch(model, 0)))).backward()
    plain_loss(case, plain, 0)
    optimizer.step()
    plain_optimizer.step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with different.noted():
        assert set(state) == (set(expected) if dist.get_rank() == 0 else set())
        for name, value in state.items():
            assert type(value) is Tensor, name
            assert_same(value, expected[name], **case.tolerance, name=f"out: {name}")
    other = case.make(seed=99)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(state), options=options)  # torch fills the dict that it is given
    compare(case, other, plain, different, "in")
    assigned = case.make(seed=99)
    assigned.load_state_dict(expected, assign=True)
    compare(case, assigned, plain, different, "assigned")
    mean_loss(assigned(case.own(case.batch(model, 1)))).backward()
    plain.zero_grad()
    plain_loss(case, plain, 1)
    compare(case, assigned, plain, different, "assigned, gradients", gradients=True)
    different.raise_first()


def made_on_meta(case: Case) -> None:
    """Parallelised and sharded before it has any memory; then loaded, in place and by assignment."""
    for assign in (False, True):
        different, plain = Differences(), case.plain()
        with torch.device("meta"):
            model = case.make()
        assert all(p.is_meta for p in model.parameters())
        if not assign:
            model.to_empty(device="cpu")
        source = case.make() if not assign else plain
        model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=assign)
        compare(case, model, plain, different, f"loaded, {assign=}")
        mean_loss(model(case.own(case.batch(plain, 0)))).backward()
        plain_loss(case, plain, 0)
        compare(case, model, plain, different, f"{assign=}, gradients", gradients=True)
        different.raise_first()


def one_rank_gathers_nothing(case: Case) -> None:
    """Tensor parallelism alone, with shards at rest on the CPU: only its own collectives run."""
    different, plain, model = Differences(), case.plain(), case.plain()
    model.parallelize(case.mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=case.dp, offload_policy=CPUOffloadPolicy())
    refused = mock.Mock(side_effect=AssertionError("nobody to talk to"))
    with mock.patch.multiple(NamedPairwiseComm, all_gather=refused, reduce_scatter=refused, all_reduce=refused):
        mean_loss(model(case.own(case.batch(plain, 0)))).backward()
    plain_loss(case, plain, 0)
    compare(case, model, plain, different, "gradients", gradients=True)
    different.raise_first()


def another_mesh_is_refused_by_name(case: Case) -> None:
    """Two meshes made apart: nobody knows how their axes lie to each other. Nothing has been changed."""
    model = case.plain()
    size = dist.get_world_size()
    tp = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    dp = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    model.parallelize(tp)
    before = dict(model.blocks[0].named_parameters())
    with pytest.raises(ValueError, match=r"^up\.weight: .*device mesh"):
        fully_shard(model.blocks[0], mesh=dp)
    assert type(model.blocks[0]) is NormedBlock
    assert dict(model.blocks[0].named_parameters()) == before


Check = Callable[[Case], None]


def run_cases(world_size: int, *checks: tuple[Check, list[Case]]) -> None:
    named = [
        (f"{check.__name__} [{case}]", functools.partial(check, case)) for check, cases in checks for case in cases
    ]
    run_checks(world_size, named)


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (3, 2), *([(2, 1)] if NIGHTLY else [])], ids=str)
def test_training(shape: tuple[int, int]) -> None:
    """A gradient not summed over the tensor-parallel ranks, or summed twice, or rows in another order."""
    plain = Case(shape)
    others = [Case(shape, optimizer="adamw", policy=COMPUTE_FP64), Case(shape, Sequence, optimizer="adamw")]
    small = [Case(shape, recomputes=True), Case(shape, along=1)]
    cases = {(1, 2): [plain, others[0]], (2, 2): [plain, *small], (3, 2): others[1:]}.get(shape, [plain, *others])
    run_cases(math.prod(shape), (trains, [plain, *others, *small] if NIGHTLY else cases))


def test_hsdp_and_tensor_parallelism() -> None:
    """Three axes: replicated, sharded, tensor-parallel."""
    run_cases(8, (trains, [Case((2, 2, 2))]))


@pytest.mark.parametrize("shape", [(2, 2)], ids=str)
def test_around_training(shape: tuple[int, int]) -> None:
    case, low = Case(shape), Case(shape, policy=COMPUTE_FP64)
    run_cases(
        math.prod(shape),
        (accumulates, [case, Case(shape, Sequence)]),
        (clips, [case]),
        (gathers_again_in_backward, [low, Case(shape, Sequence)]),
        (whole_state_dicts_come_and_go, [case]),
        (made_on_meta, [Case(shape, Sequence)]),
        (another_mesh_is_refused_by_name, [case]),
    )


def test_one_data_parallel_rank() -> None:
    run_cases(2, (one_rank_gathers_nothing, [Case((1, 2)), Case((1, 2), Sequence)]))


def test_after_fully_shard_it_is_refused() -> None:
    def body(rank: int, _: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh["dp"])
        with pytest.raises(ValueError, match=r"1\.weight: fully_shard has sharded it"):
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
        model(torch.ones(2, 4)).sum().backward()
        parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tp"], {"0": ColwiseParallel()})

    run_ranks(2, body)


def test_a_scalar() -> None:
    """A DTensor that both axes replicate."""

    def body(rank: int, _: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plain = Scaled()
        model: Any = copy.deepcopy(plain)
        for name, param in plain.named_parameters():
            target, _, leaf = name.rpartition(".")
            whole = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Replicate()]), param.requires_grad)
            setattr(model.get_submodule(target), leaf, whole)
        fully_shard(model, mesh=mesh["dp"])
        assert model.logit_scale.placements == (Replicate(), Replicate())
        whole = plain.example(rows=ROWS, seed=0)
        own = DTensor.from_local(whole.chunk(2)[mesh.get_local_rank("dp")], mesh["tp"], [Replicate()])
        mean_loss(model(own).to_local()).backward()
        mean_loss(plain(whole)).backward()
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad, twin.grad, 1e-5, 1e-6, name)

    run_ranks(4, body)


INITIALISERS = (nn.init.orthogonal_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.eye_)


def test_initialisers_where_two_axes_cut_the_same_rows() -> None:
    """Into uneven parts, of which some ranks may have none: torch takes other numbers of rows for new tensors."""

    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        for rows, initialise in itertools.product((7, 5), INITIALISERS):
            plain = nn.Linear(3, rows)
            model = parallelize_module(nn.Sequential(nn.Linear(3, rows)), mesh["tp"], {"0": ColwiseParallel()})
            weight = fully_shard(model, mesh=mesh["dp"])[0].weight
            for each in (weight, plain.weight):
                torch.manual_seed(0)
                initialise(each)
            assert_same(weight, plain.weight, 0, 0, f"{rows} rows: {initialise.__name__}")
            assert_same(weight.new_ones(rows, 3), torch.ones(rows, 3), 0, 0, f"{rows} rows: new_ones")

    run_ranks(6, body)


def test_checkpoints_between_meshes(tmp_path: Path) -> None:
    """Saved on 2 x 2 ranks, loaded with half of the data-parallel ranks, and with half of the tensor-parallel ones."""

    def states(case: Case, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def train(case: Case, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            mean_loss(model(case.own(case.batch(model, step)))).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(case: Case) -> None:
        model = case.make()
        optimizer = case.optimizer_for(model)
        train(case, model, optimizer, range(2))
        dcp.save(states(case, model, optimizer), checkpoint_id=tmp_path / case.build.__name__)

    def load(case: Case) -> None:
        different, model, plain = Differences(), case.make(seed=99), case.plain()
        optimizer, plain_optimizer = case.optimizer_for(model), case.optimizer_for(plain)
        state = states(case, model, optimizer)
        dcp.load(state, checkpoint_id=tmp_path / case.build.__name__)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(case, model, optimizer, range(2, 4))
        for step in range(4):
            plain_loss(case, plain, step)
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        compare(case, model, plain, different, "continued")
        different.raise_first()

    run_cases(4, (save, [Case((2, 2), optimizer="adamw")]))
    run_cases(2, (load, [Case((2, 1), optimizer="adamw"), Case((1, 2), optimizer="adamw")]))
