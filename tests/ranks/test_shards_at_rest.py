"""Tests replicas that share one set of shards (`DataParallelMeshDims(outer_shard=...)`), on 2 x 2 ranks.

Oracles: HSDP on the same ranks, which sums in the same order, bit for bit; and a plain model on the whole batch.
`tests/matrix.py` draws the scenarios of other files over this topology, too.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    compression,
    describe,
    fully_shard,
)
from fsdp2.compression import Compression
from fsdp2.engine import codec as engine_codec
from fsdp2.engine.mesh import Gathered, Reduced, Use
from fsdp2.engine.state import groups_below, state_of
from helpers import assert_same, run_checks, run_ranks, shard_batch
from models import OddMLP, TinyGPT, TinyModel, mean_loss

ROWS = 8
AT_REST = DataParallelMeshDims(shard="shards", outer_shard="replicas")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def at_rest(module: Any, **options: Any) -> Any:
    return fully_shard(module, mesh=mesh(), dp_mesh_dims=AT_REST, **options)


def hsdp(module: Any, **options: Any) -> Any:
    return fully_shard(module, mesh=mesh(), **options)


def model_of(build: Callable[[], TinyModel], shard: Callable[..., Any] | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = build()
    if shard is not None:
        blocks = getattr(model, "blocks", None) or (each for each in model.children() if isinstance(each, nn.Linear))
        for block in [*blocks][:3]:
            shard(block, **options)
        shard(model, **options)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)


def batch(model: TinyModel, seed: int, own: bool = True) -> Tensor:
    whole = model.example(rows=ROWS, seed=seed)
    return shard_batch(whole, dist.get_rank(), dist.get_world_size()) if own else whole


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int, own: bool = True) -> None:
    mean_loss(model(batch(model, seed, own))).backward()
    optimizer.step()
    optimizer.zero_grad()


def wholes(model: nn.Module) -> dict[str, Tensor]:
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in tensors.items()}


def assert_equal(model: nn.Module, other: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    expected = wholes(other)
    for name, whole in wholes(model).items():
        assert_same(whole, expected[name], rtol, atol, name)


def assert_trains_as_hsdp(build: Callable[[], TinyModel], steps: int = 3, **options: Any) -> Any:
    pairs = []
    for shard in (at_rest, hsdp):
        model = model_of(build, shard, **options)
        pairs.append((model, adamw(model)))
    for seed in range(steps):
        for model, optimizer in pairs:
            step(model, optimizer, seed)
    assert_equal(pairs[0][0], pairs[1][0])
    return pairs[0]


# ---- numbers


def gradients_travel_by_a_codec() -> None:
    """Inside a replica, between replicas, or both; test_training.py draws codecs whose sums are known to the bit."""
    plain = model_of(OddMLP)
    mean_loss(plain(batch(plain, 0, own=False))).backward()
    expected = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    for policy in (
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=compression.Int8())),
        MixedPrecisionPolicy(compression=Compression(all_reduce=torch.bfloat16)),
        MixedPrecisionPolicy(compression=Compression(all_reduce=compression.Int8(feedback=True))),
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=compression.Int8(), all_reduce=compression.Int8())),
    ):
        with mock.patch.object(engine_codec, "SMALL_NUMEL", 1):  # it has no larger ones
            model = model_of(OddMLP, at_rest, mp_policy=policy)
            mean_loss(model(batch(model, 0))).backward()
        found = torch.cat([p.grad.full_tensor().view(-1) for p in model.parameters()])
        error = ((found - expected).norm() / expected.norm()).item()
        assert 1e-5 < error < 0.03, f"{policy}: {error}"  # rounded, and not more


# ---- what is stored, what is gathered


def sums_that_replicas_have_not_summed_are_halves() -> None:
    """Each rank keeps them for both quarters that it and its replica have."""
    model = model_of(OddMLP, at_rest)
    model.set_requires_all_reduce(False)
    mean_loss(model(batch(model, 0))).backward()
    sums = [each for group in groups_below(model) for each in group.gradients.unsynchronized.reduced_in_shard.values()]
    total = sum(p.numel() for p in model.parameters())
    assert total // 2 <= sum(each.numel for each in sums) < total


def optimizer_states_are_quarters() -> None:
    model, optimizer = assert_trains_as_hsdp(functools.partial(TinyGPT, depth=2), steps=1)
    rests = {
        name: sum(s[name].to_local().numel() for s in optimizer.state.values()) for name in ("exp_avg", "exp_avg_sq")
    }
    held, total = rests["exp_avg"], sum(p.numel() for p in model.parameters())
    assert rests["exp_avg_sq"] == held
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, held)
    assert sum(of_ranks) == total, "each element on one rank"
    assert max(of_ranks) < 0.3 * total, "about a quarter on each"
    for p, state in optimizer.state.items():
        assert state["exp_avg"].placements == p.placements == (Shard(0),)
        assert state["exp_avg"].device_mesh.size() == 4


class Counted:
    """A Comm that notes its calls."""

    def __init__(self, inner: Any, name: str, calls: Counter) -> None:
        self._inner, self._name, self._calls = inner, name, calls

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("all_gather", "reduce_scatter", "all_reduce", "exchange"):
            self._calls[f"{attribute} of {self._name}"] += 1
        return getattr(self._inner, attribute)


def counted(model: nn.Module) -> Counter:
    calls: Counter = Counter()
    for group in groups_below(model):
        now, made = group.comms, {}
        for name, comm in (("all", now.gathers), ("inner", now.reduces), ("outer", now.replicas)):
            made[id(comm)] = Counted(comm, name, calls)
        group.use_comms(type(now)(*(made[id(comm)] for comm in now)))
    return calls


def ranks_gather_over_all_once_after_each_write() -> None:
    model = model_of(functools.partial(TinyGPT, depth=2), at_rest, reshard_after_forward=True)
    optimizer, calls = adamw(model), counted(model)
    groups, buckets_of_all = len(groups_below(model)), sum(len(g.gradients.buckets) for g in groups_below(model))

    def expect(what: str, **expected: int) -> None:
        found = {name.replace(" of ", "_"): times for name, times in calls.items()}
        assert found == expected, f"{what}: {found}"
        calls.clear()

    def forward(grad: bool = True) -> Any:
        with torch.set_grad_enabled(grad):
            return mean_loss(model(batch(model, 0)))

    loss = forward()
    expect("first forward", all_gather_all=groups)
    loss.backward()
    reduced = {"reduce_scatter_inner": buckets_of_all, "reduce_scatter_outer": buckets_of_all}
    expect("backward", all_gather_inner=groups, **reduced)
    assert all(not group.unsharded.is_allocated for group in groups_below(model)), "unsharded ones are freed"
    forward().backward()
    expect("another pass before the step", all_gather_inner=2 * groups, **reduced)
    for _ in range(2):
        forward(grad=False)
        expect("evaluation", all_gather_inner=groups)
    optimizer.step()
    forward(grad=False)
    expect("evaluation after a step", all_gather_all=groups)
    forward().backward()
    expect("training after evaluation", all_gather_inner=2 * groups, **reduced)
    with torch.no_grad():
        model.blocks[0].get_parameter(next(iter(dict(model.blocks[0].named_parameters())))).mul_(1.5)
    forward(grad=False)
    expect("one written weight", all_gather_all=1, all_gather_inner=groups - 1)
    model.set_requires_all_reduce(False)
    forward().backward()
    expect("inside the replica", all_gather_inner=2 * groups, reduce_scatter_inner=buckets_of_all)


class Lone(TinyModel):
    """Has one large parameter, whose rows do not divide by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1023, 40))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def example(self, rows: int = 8, seed: int = 0) -> Tensor:
        return torch.randn(rows, 40, generator=torch.Generator().manual_seed(seed))


def secondary_shards_are_what_the_inner_ranks_share() -> None:
    """A half in the compute dtype, which stays between passes; a quarter is stored, in fp32."""
    model = model_of(Lone)
    at_rest(model, mp_policy=BF16)
    mean_loss(model(batch(model, 0))).backward()
    (group,) = groups_below(model)
    buffers = group.parameters.buffers
    assert buffers.secondary.is_filled
    assert buffers.secondary._storage.nbytes() == 512 * 40 * 2
    assert buffers.shards.nbytes == 256 * 40 * 4
    model.reshard()
    assert not buffers.secondary.is_filled, "a user frees them by reshard"


def every_write_is_noticed() -> None:
    """By each way to write, forwards with and without grad have the new values; also in the middle of a pass."""

    def by_assignment(p: Any) -> None:
        p.data = p.data * 2

    writes: dict[str, Callable[[Any], object]] = {
        "in place": lambda p: p.mul_(2),
        "local": lambda p: p.to_local().mul_(2),
        "foreach": lambda p: torch._foreach_mul_([p], 2),
        "data": by_assignment,
    }
    for name, write in writes.items():
        plain, model = model_of(OddMLP), model_of(OddMLP, at_rest)
        x = batch(plain, 0)
        mean_loss(model(x)).backward()
        for _ in range(2):
            with torch.no_grad():
                plain.narrow.weight.mul_(2)
                write(model.narrow.weight)
                assert_same(model(x), plain(x), 1e-6, 1e-6, name)
            assert_same(model(x), plain(x), 1e-6, 1e-6, name)

    model, plain = model_of(OddMLP, at_rest), model_of(OddMLP)
    model(x)

    def write_later(module: Any, args: Any) -> None:
        with torch.no_grad():
            for each in (model, plain):
                each.narrow.weight.mul_(2)

    model.wide.register_forward_pre_hook(write_later)
    for _ in range(3):  # the group that is written to has been gathered ahead
        with torch.no_grad():
            out = model(x)
        assert_same(out, plain(x), 1e-6, 1e-6, "written in a pass")


def writeback_and_state_dicts_are_noticed() -> None:
    plain, model = model_of(OddMLP), model_of(OddMLP, at_rest)
    x = batch(plain, 0)
    mean_loss(model(x)).backward()
    with fsdp2.full_params(model, writeback=True), torch.no_grad():
        model.wide.weight.add_(1)
    with torch.no_grad():
        plain.wide.weight.add_(1)
        assert_same(model(x), plain(x), 1e-6, 1e-6, "written whole")
        other = {name: p + 1 for name, p in model.state_dict().items()}
        model.load_state_dict(other)
        for p in plain.parameters():
            p.add_(1)
        assert_same(model(x), plain(x), 1e-6, 1e-6, "loaded")


def passes_that_fail_leave_nothing_behind() -> None:
    for where in ("forward", "backward"):
        model, plain = model_of(OddMLP, at_rest), model_of(OddMLP)
        optimizers = adamw(model), adamw(plain)
        step(model, optimizers[0], 0)
        step(plain, optimizers[1], 0, own=False)

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        if where == "forward":
            handle = model.single.register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(batch(model, 1))
        else:
            handle = model.narrow.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                mean_loss(model(batch(model, 1))).backward()
        handle.remove()
        model.zero_grad()
        for seed in (1, 2):
            step(model, optimizers[0], seed)
            step(plain, optimizers[1], seed, own=False)
        assert_equal(model, plain, 1e-5, 1e-6)


def unsharded_by_the_user() -> None:
    model, plain = model_of(OddMLP, at_rest), model_of(OddMLP)
    x = batch(model, 0)
    for _ in range(2):
        model.wide.unshard()
        model.narrow.unshard(async_op=True).wait()
        assert_same(model.wide.weight, plain.wide.weight, 0, 0, "unsharded")
        assert_same(model(x), plain(x), 1e-6, 1e-6, "forward")
        model.wide.reshard()
        mean_loss(model(x)).backward()
        with torch.no_grad():
            for p in [*model.parameters(), *plain.parameters()]:
                p.mul_(1.5)
    assert_same(model(x), plain(x), 1e-5, 1e-6, "after a write")


def copies_and_descriptions() -> None:
    model = model_of(OddMLP, at_rest)
    assert "replicas: OUTER_SHARD, shards: SHARD" in str(describe(model))
    fsdp2.check(model)
    other = copy.deepcopy(model)
    x = batch(model, 0)
    assert_same(other(x), model(x), 0, 0, "a copy")
    assert groups_below(other)[0].mesh.has_outer_shard


# ---- the value


def the_value_says_it() -> None:
    group = groups_below(model_of(OddMLP, at_rest))[0]
    topology = group.mesh.topology
    assert topology.mesh is mesh()
    assert topology.uses == (Use.OUTER_SHARD, Use.SHARD)
    found = [(use.rests_cut, use.gathered, use.reduced) for use in topology.uses]
    after_write, at_use = Gathered.AFTER_WRITE, Gathered.AT_USE
    assert found == [(True, after_write, Reduced.SCATTER), (True, at_use, Reduced.SCATTER)]
    ranks = [
        dist.get_process_group_ranks(g)
        for g in (group.mesh.shard_group, group.mesh.inner_group, group.mesh.outer_group)
    ]
    rank = dist.get_rank()
    assert ranks == [[0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
    assert group.mesh.replicate_group is None
    for shard, uses in ((hsdp, (Use.REPLICATE, Use.SHARD)), (fully_shard, (Use.SHARD,))):
        assert groups_below(model_of(OddMLP, shard))[0].mesh.topology.uses == uses
    sizes = groups_below(model_of(OddMLP, at_rest))[0].mesh
    assert sizes is group.mesh, "groups of one mesh share the value"


class Gathers(nn.Module):
    """Has a parameter that says itself how it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(SelfGathered(torch.ones(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class SelfGathered(Tensor):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return outputs[0], ()


def what_is_not_supported_is_refused() -> None:
    line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "replicas"))
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicas", "shards"))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "left of those that shard", {"mesh": line, "dp_mesh_dims": AT_REST}),
        (NotImplementedError, "further axes", {"mesh": three, "dp_mesh_dims": AT_REST}),
        (ValueError, "as well as outer_shard", {"dp_mesh_dims": DataParallelMeshDims(outer_shard="replicas")}),
        (
            NotImplementedError,
            "together with replicate",
            {"mesh": three, "dp_mesh_dims": DataParallelMeshDims("shards", "pp", outer_shard="replicas")},
        ),
        (ValueError, "each axis once", {"dp_mesh_dims": DataParallelMeshDims("shards", outer_shard="shards")}),
        (ValueError, "names among", {"dp_mesh_dims": DataParallelMeshDims("shards", outer_shard="nodes")}),
        (ValueError, "bool or None", {"reshard_after_forward": 2}),
        (NotImplementedError, "conditional", {"conditional": True}),
    ]
    for error, text, options in cases:
        model = model_of(OddMLP)
        with pytest.raises(error, match=text):
            fully_shard(model, **{"mesh": mesh(), "dp_mesh_dims": AT_REST, **options})
        assert state_of(model) is None
    with pytest.raises(ValueError, match="neither"):
        DataParallelMeshDims()
    with pytest.raises(NotImplementedError, match="no outer_shard"):
        at_rest(Gathers())
    with pytest.raises(NotImplementedError, match="two steps"):
        model_of(OddMLP, at_rest).set_custom_reduce_scatter(CustomScatter())
    inner = model_of(functools.partial(TinyGPT, depth=1))
    fully_shard(inner.blocks[0], mesh=mesh()[("replicas", "shards")]._flatten(), conditional=True)
    with pytest.raises(NotImplementedError, match="conditional"):
        at_rest(inner)


class CustomScatter:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **options: Any) -> None:
        raise AssertionError("never called")


CHECKS = (
    gradients_travel_by_a_codec,
    sums_that_replicas_have_not_summed_are_halves,
    optimizer_states_are_quarters,
    ranks_gather_over_all_once_after_each_write,
    secondary_shards_are_what_the_inner_ranks_share,
    every_write_is_noticed,
    writeback_and_state_dicts_are_noticed,
    passes_that_fail_leave_nothing_behind,
    unsharded_by_the_user,
    copies_and_descriptions,
    the_value_says_it,
    what_is_not_supported_is_refused,
)


def test_replicas_share_what_rests() -> None:
    run_checks(4, [(check.__name__, check) for check in CHECKS], timeout=150)


def test_checkpoints_load_on_other_ranks(tmp_path: Path) -> None:
    """Saved by four ranks that share one set of shards, with uneven rows; loaded by them, HSDP, and a plain model."""

    def body(rank: int, _: int) -> None:
        model = model_of(OddMLP, at_rest)
        optimizer = adamw(model)
        for seed in range(2):
            step(model, optimizer, seed)
        states, optimizers = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": optimizers}, checkpoint_id=tmp_path)
        step(model, optimizer, 2)
        for shard in (at_rest, hsdp, None):
            other = model_of(OddMLP, shard)
            its = adamw(other)
            step(other, its, 7, own=shard is not None)  # other values, and secondary shards that are stale then
            states, optimizers = get_state_dict(other, its)
            saved = {"model": states, "optimizer": optimizers}
            dcp.load(saved, checkpoint_id=tmp_path)
            set_state_dict(other, its, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            step(other, its, 2, own=shard is not None)
            tolerance = (1e-5, 1e-6) if shard is None else (0, 0)
            assert_equal(other, model, *tolerance)

    run_ranks(4, body)


def test_axes_of_one_rank_shard_as_fsdp() -> None:
    def body(rank: int, world_size: int) -> None:
        for shape in ((1, 2), (2, 1)):
            small = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
            models = [model_of(OddMLP) for _ in range(2)]
            fully_shard(models[0], mesh=small, dp_mesh_dims=AT_REST)
            fully_shard(models[1])
            assert not groups_below(models[0])[0].mesh.has_outer_shard
            for model in models:
                optimizer = adamw(model)
                step(model, optimizer, 0)
            assert_equal(*models)

    run_ranks(2, body)


def test_beside_tensor_parallelism() -> None:
    """Rows that do not divide, cut over both kinds of axes."""

    def body(rank: int, _: int) -> None:
        whole = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "tp"))
        data = whole["replicas", "shards"]
        models = []
        for options in ({"dp_mesh_dims": AT_REST}, {}):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 5))
            parallelize_module(model, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            models.append(fully_shard(model, mesh=data, **options))
        for model in models:
            optimizer = adamw(model)
            for seed in range(2):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
                mean_loss(model(shard_batch(x, rank // 2, 4))).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_equal(*models)

    run_ranks(8, body)
