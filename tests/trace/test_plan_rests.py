"""Tests what plans predict of embeddings by rows, of replicas that share what rests, and of offload by parameter.

Real steps on a fake world are counted, as in test_plan.py. What an optimizer's step takes is compared with a real one.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_plan import (
    BF16,
    RANKS,
    TOKENS,
    TOLERANCE,
    Block,
    Counted,
    Language,
    Stack,
    Uneven,
    _OtherMemory,
    large_root,
    loss_of,
    measure_step,
)
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.meters import AllocationMeter, WireMeter
from fsdp2 import MixedPrecisionPolicy, OffloadBudget, OffloadPolicy
from fsdp2.engine import buckets, build
from fsdp2.engine import group as groups
from fsdp2.engine.mesh import DataMesh
from fsdp2.engine.state import groups_below
from fsdp2.features import row_embedding
from fsdp2.optim import resting
from fsdp2.optim.steps import FlatSteps
from fsdp2.planning import apply, stepping
from helpers import fake_world
from simulated_device import DEVICE

FP32 = MixedPrecisionPolicy()


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 32 * 1024)
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 16 * 1024)


@pytest.fixture
def even_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets as many ids from each: fake process groups leave memory as it is."""
    exchange, exchange_counts = row_embedding._all_to_all, row_embedding.exchange_counts

    def exchanged(output: Tensor, source: Tensor, *sizes: Any) -> None:
        exchange(output, source, *sizes)
        output.zero_()

    def counts(own: Tensor, process_group: Any) -> Any:
        exchange_counts(own, process_group)
        return [TOKENS // len(own)] * len(own), [TOKENS // len(own)] * len(own)

    monkeypatch.setattr(row_embedding, "_all_to_all", exchanged)
    monkeypatch.setattr(row_embedding, "exchange_counts", counts)


def planned(model: Any, fields: dict[str, Any], precision: MixedPrecisionPolicy, **options: Any) -> fsdp2.Plan:
    given: dict[str, Any] = {"device": "cpu", "backend": "nccl", "loss": loss_of, **options}
    return fsdp2.plan(model, ranks=RANKS, batch=model.example, mp_policy=precision, settings=[fields], **given)


def counted(plan: fsdp2.Plan, mesh: Callable[[], Any], batch: Any) -> Counted:
    """Returns what steps take of the model that the plan shards, in which an optimizer writes to all parameters."""
    with fake_world(RANKS), AllocationMeter() as meter:
        gc.collect()
        # Without `Plan.apply`, which measures a step by the same profiler.
        calls, policy = plan._wrapping_of(plan.best).calls, plan.groups()[0].policy
        model = apply.shard(plan._model, calls, policy, plan.best.setting, mesh())
        for region in ("first", "second"):
            measure_step(model, batch, meter, region, f"forward of {region}")
            model.zero_grad()
            increment_version([*model.parameters()])
        with WireMeter() as wire:
            loss_of(model(batch)).backward()
    before = meter.allocated_before("second")
    forward, step = meter.peak_during("forward of second") - before, meter.peak_during("second") - before
    sent: Any = {"": sum(each.sent_bytes for each in wire.collectives)}
    for each in wire.collectives:
        sent[each.kind] = sent.get(each.kind, 0) + each.sent_bytes
    return Counted(0, forward, step, sent, wire.calls)


def assert_predicted(plan: fsdp2.Plan, found: Counted) -> None:
    taken = plan.best.prediction
    assert taken.forward_peak == pytest.approx(found.forward, rel=TOLERANCE)
    assert taken.step_peak == pytest.approx(found.step, rel=TOLERANCE)
    assert sum(taken.launched.values()) == found.launches
    assert taken.sent == pytest.approx(found.sent[""], rel=1e-12)


def two_axes() -> Any:
    return init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))


# ---- other dims than dim 0


class Experts(nn.Module):
    """Has fewer experts than there are ranks."""

    def __init__(self, width: int = 24, hidden: int = 40) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, width, hidden) / 8)
        self.down = nn.Parameter(torch.randn(4, hidden, width) / 8)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.einsum("bd,ndh,nhe->be", self.norm(hidden), self.up, self.down)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[Experts() for _ in range(4)]), nn.Linear(24, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.blocks(hidden))

    def example(self) -> Tensor:
        return torch.ones(4, 24)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [({}, FP32), ({}, BF16), ({"reshard_after_forward": 2}, BF16), ({"reshard_after_forward": False}, BF16)],
    ids=["fp32", "bf16", "k=2", "kept"],
)
def test_experts_along_the_cheapest_dims(fields: dict[str, Any], policy: MixedPrecisionPolicy) -> None:
    """Peaks, bytes and launches are those of real steps, also of padded shards."""
    plans = [planned(Mixture(), {**fields, "cheapest_dims": each}, policy) for each in (True, False)]
    for plan in plans:
        assert_predicted(plan, counted(plan, lambda: init_device_mesh("cpu", (RANKS,)), Mixture().example()))
    cheapest, padded = (plan.best.prediction for plan in plans)
    assert cheapest.sent < 0.6 * padded.sent
    assert cheapest.shards < 0.6 * padded.shards
    shard = fsdp2.tools.describe.size_text(round((cheapest.shards - 4 * (64 // RANKS) * 25) / 4))
    assert f"  {shard}  " in next(line for line in str(plans[0]).splitlines() if line.startswith("blocks.0"))


# ---- embeddings by rows


class Calls(Language):
    """Looks its embedding up twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embed(tokens).mean()


@pytest.mark.parametrize(
    ("make", "fields", "policy"),
    [
        (large_root, {"checkpointing": True}, FP32),
        (large_root, {"replicas": 2}, BF16),
        (large_root, {"replicas": 2, "shard_at_rest": True}, BF16),
        (large_root, {"blocks_per_call": 2}, BF16),
        (lambda: Calls(9000, tied=False), {}, FP32),
    ],
    ids=["checkpointing", "HSDP", "replicas that share what rests", "blocks together", "two calls"],
)
def test_an_embedding_by_rows(make: Any, fields: dict[str, Any], policy: MixedPrecisionPolicy, even_ids: None) -> None:
    """Peaks, bytes by all-to-alls and launches are those of a real step. Nothing of the table is gathered."""
    model, gathered = make(), make()
    plan = planned(model, {"by_rows": ["embed"], **fields}, policy)
    batch = model.example()
    meshes: dict[str, Any] = {"replicas": two_axes}
    one_axis = lambda: init_device_mesh("cpu", (RANKS,))  # noqa: E731
    found = counted(plan, next((meshes[name] for name in fields if name in meshes), one_axis), batch)
    assert isinstance(model.embed, row_embedding.RowEmbedding)
    assert_predicted(plan, found)
    taken, without = plan.best.prediction, planned(gathered, fields, policy).best.prediction
    shards = plan.best.setting.num_at_rest
    assert taken.moved["all_to_all"] * (shards - 1) / shards == found.sent["all_to_all"]
    item = 2 if policy is BF16 else 4
    table = gathered.embed.weight.numel() * item
    assert without.moved["all_gather"] - taken.moved["all_gather"] > 0.99 * table
    lookups = 2 if make is not large_root else 1
    rows = 2 * TOKENS * gathered.embed.weight.shape[1] * item
    assert taken.moved["all_to_all"] == lookups * (rows + 8 * TOKENS + 8 * shards)


def test_embeddings_that_cannot_be_by_rows() -> None:
    with pytest.raises(ValueError, match=r"by_rows: embed: expected embeddings .* the model has none"):
        planned(Language(100, tied=True), {"by_rows": ["embed"]}, FP32)
    with pytest.raises(ValueError, match=r"by_rows: word: .* scale_grad_by_freq: embed$"):
        planned(large_root(), {"by_rows": ["word"]}, FP32)
    with pytest.raises(TypeError, match="by_rows: expected names of embeddings, got 'embed'"):
        fsdp2.Setting(8, by_rows="embed")  # type: ignore[arg-type]


# ---- replicas that share what rests


@pytest.mark.parametrize(
    ("make", "policy"),
    [(Stack, FP32), (large_root, BF16), (Uneven, FP32)],
    ids=["equal blocks", "large root", "uneven sizes"],
)
def test_replicas_that_share_what_rests(make: Any, policy: MixedPrecisionPolicy) -> None:
    """The first forward after a write gathers over all ranks. What a rank keeps until the next one rests, too."""
    model = make()
    plan = planned(model, {"replicas": 2, "shard_at_rest": True}, policy)
    found = counted(plan, two_axes, model.example())
    assert_predicted(plan, found)
    held = [group.parameters.buffers for group in groups_below(model) if group.params]
    rests = sum(each.shards.nbytes + each.secondary_nbytes for each in held if each is not None)
    assert any(each is not None and each.secondary_nbytes for each in held)
    assert plan.best.resting - plan.best.optimizer_nbytes == rests
    usual = planned(make(), {"replicas": 2}, policy).best
    assert plan.best.optimizer_nbytes == pytest.approx(usual.optimizer_nbytes / 2, rel=0.01)


def test_a_mesh_without_names_is_refused() -> None:
    plan = planned(Stack(), {"replicas": 2, "shard_at_rest": True}, FP32)
    with (
        fake_world(RANKS),
        pytest.raises(ValueError, match=r"Write init_device_mesh\('cpu', \(2, 4\), mesh_dim_names="),
    ):
        plan.apply(init_device_mesh("cpu", (2, 4)))
    for fields in ({}, {"replicas": 8}, {"replicas": 2, "reshard_after_forward": 2}):
        with pytest.raises(ValueError, match="shard_at_rest: expected several replicas of several ranks"):
            fsdp2.Setting(8, shard_at_rest=True, **fields)


# ---- offload up to a budget


def _stays(policy: OffloadPolicy) -> bool:
    return not hasattr(policy, "pin_memory")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"offload": True, "offload_budget": 150_000}, {}),
        ({}, {"offload_policy": OffloadBudget(60_000)}),
    ],
    ids=["budget", "budget of a user"],
)
def test_offload_budgets(fields: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is simulated in the CPU's memory."""
    model = Stack()
    plan = planned(model, fields, BF16, device=str(DEVICE), policy={Block: options})
    monkeypatch.setattr(DataMesh, "device", DEVICE)
    # Both places are the CPU's: what stays on the device is told apart as if it were page-locked.
    monkeypatch.setattr(build, "storage_place", lambda policy, _: (torch.device("cpu"), _stays(policy)))
    monkeypatch.setattr(groups, "make_transfers", lambda _, stays: None if stays else _OtherMemory())
    assert_predicted(plan, counted(plan, lambda: init_device_mesh("cpu", (RANKS,)), model.example()))
    at_rest = [group for group in groups_below(model) if group.transfers is not None]
    assert 0 < len(at_rest) < len([*groups_below(model)])
    on_host = sum(param.local.nbytes for group in at_rest for param in group.params)
    whole = sum(param.local.nbytes for group in groups_below(model) for param in group.params)
    row = plan.best
    assert row.host_nbytes == pytest.approx(4 * on_host, rel=0.01)  # shards, gradients, two states
    assert row.resting == pytest.approx(3 * (whole - on_host), rel=0.01)


# ---- the optimizer's step


def test_states_at_rest_leave_the_device() -> None:
    for device, on_host in (("cuda", True), ("cpu", False)):
        row = planned(Stack(), {"offload_states": True}, FP32, device=device).best
        usual = planned(Stack(), {}, FP32, device=device).best
        assert row.optimizer_nbytes == usual.optimizer_nbytes
        assert usual.resting - row.resting == (row.optimizer_nbytes if on_host else 0)
        assert row.host_nbytes == (row.optimizer_nbytes if on_host else 0)
        assert row.prediction.moved.get("transfer", 0) == (2 * row.optimizer_nbytes if on_host else 0)


@pytest.mark.parametrize("bucket", [20_000, 200_000, 64 << 20])
def test_buckets_of_states_are_those_of_a_step(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has two of them at most, beside gradients."""
    assert stepping.BUCKET_BYTES == resting.BUCKET_BYTES
    monkeypatch.setattr(stepping, "BUCKET_BYTES", bucket)
    model = Uneven()
    plan = planned(model, {"offload_states": True}, FP32, device="cuda")
    held: list[list[int]] = []

    class Stream:
        def __init__(self, device: Any, found: Any) -> None:
            held.append([sum(tensor.nbytes for tensor in some) for some in found])
            self._found = found

        def use(self, number: int) -> Any:
            return self._found[number]

        def close(self) -> None:
            pass

    with fake_world(RANKS):
        trained = plan.apply(init_device_mesh("cpu", (RANKS,)))
        plain = torch.optim.AdamW(trained.parameters(), foreach=True)
        monkeypatch.setattr(resting, "rests_apart", lambda device: True)
        monkeypatch.setattr(resting, "to_rest", lambda value: value)
        monkeypatch.setattr(resting, "StateStream", Stream)
        monkeypatch.setattr(FlatSteps, "_packs", lambda *_: False)  # as on devices
        optimizer = fsdp2.flatten_optimizer(plain, offload_states=True, bucket_bytes=bucket)
        for _ in range(2):
            loss_of(trained(model.example())).backward()
            gradients = sum(p.grad.to_local().nbytes for p in trained.parameters())
            optimizer.step()
            optimizer.zero_grad()
    *_, last = held
    predicted = plan.best.prediction.optimizer_peak
    assert predicted == pytest.approx(gradients + max(last) * min(2, len(last)), rel=0.02)


def test_apply_says_how_the_optimizer_steps(caplog: pytest.LogCaptureFixture) -> None:
    for field in ("offload_states", "beside_forward"):
        plan = planned(Stack(), {field: True}, FP32, device="cuda")
        line = f"Write optimizer = fsdp2.flatten_optimizer(optimizer, {field}=True)"
        assert line in str(plan)
        caplog.clear()
        with fake_world(RANKS):
            plan.apply(init_device_mesh("cpu", (RANKS,)))
        assert line in caplog.text
    caplog.clear()
    with fake_world(RANKS):
        planned(Stack(), {}, FP32).apply(init_device_mesh("cpu", (RANKS,)))
    assert not caplog.text
    with pytest.raises(ValueError, match="beside_forward: expected neither offload nor offload_states"):
        fsdp2.Setting(8, beside_forward=True, offload_states=True)


SPEEDS: dict[str, Any] = {
    "device": "cuda",
    "link": "50GB/s",
    "machine_link": "370GB/s",
    "flops": 1e11,
    "memory_link": "40GB/s",
}


def test_a_step_beside_forward_takes_time_by_its_price() -> None:
    """At most that of a step behind backward; at least what the longest way through forward is. Gradients stay."""
    usual = planned(large_root(), {}, FP32, **SPEEDS).best.prediction
    rows = {
        price: planned(large_root(), {"beside_forward": True}, FP32, beside_price=price, **SPEEDS).best.prediction
        for price in (0, 0.3, 1)
    }
    times = [taken.time for taken in rows.values()] + [usual.time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert times[0] < times[1] < times[2] < times[3]  # type: ignore[operator]
    assert usual.time - times[0] <= usual.optimizer_time  # type: ignore[operator]
    for taken in rows.values():
        assert (taken.moved, taken.launched, taken.resting) == (usual.moved, usual.launched, usual.resting)
        assert taken.step_peak == pytest.approx(usual.step_peak, rel=0.01)
        assert taken.forward_peak >= usual.forward_peak
    assert planned(Stack(), {"beside_forward": True}, FP32, **SPEEDS).best.prediction.time is not None
    for wrong, error in ((2, ValueError), (-0.1, ValueError), ("much", TypeError), (True, TypeError)):
        with pytest.raises(error, match="beside_price: expected a number from 0"):
            planned(Stack(), {}, FP32, beside_price=wrong)


def test_a_saved_plan_has_these_settings() -> None:
    with fake_world(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        plan = planned(large_root(), {"by_rows": ["embed"], "offload_states": True}, BF16)
        saved = plan.to_dict()
        assert saved["setting"]["by_rows"] == ["embed"]
        again = fsdp2.apply_plan(large_root(), saved, mesh)
        assert isinstance(again.embed, row_embedding.RowEmbedding)
        assert fsdp2.describe(again) == fsdp2.describe(plan.apply(mesh))
        model = fsdp2.apply_plan(Mixture(), planned(Mixture(), {"cheapest_dims": True}, FP32).to_dict(), mesh)
        assert [each.placements[0].dim for each in model.blocks[0].parameters()] == [1, 1, 0, 0]
        plan = planned(Stack(), {"replicas": 2, "shard_at_rest": True}, FP32)
        model = fsdp2.apply_plan(Stack(), plan.to_dict(), two_axes())
        assert all(group.mesh.shards_at_rest for group in groups_below(model))
