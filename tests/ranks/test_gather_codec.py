"""Tests weights that travel in fewer bits than they rest and compute in (`Compression(all_gather=...)`).

The oracle is plain: a model whose weights were rounded by hand, each rank's rows by themselves. Forwards, gradients and
steps are equal to it bit for bit: gloo adds the gradients of ranks in their order. What rests stays exact.
test_training.py draws such weights in training.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy, describe, fully_shard, replicate
from fsdp2.compression import Compression, Float8, Int8, Rows
from fsdp2.engine import codec as codecs
from fsdp2.engine.state import groups_below
from helpers import assert_same, run_checks, world_sizes
from models import OddMLP, TinyGPT, TinyModel, mean_loss

F32, BF16 = torch.float32, torch.bfloat16
FLOAT8 = Float8()


def policy_of(codec: Any = FLOAT8, **dtypes: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(compression=Compression(all_gather=codec), **dtypes)


def model_of(build: Callable[[], TinyModel], policy: MixedPrecisionPolicy | None = None, **options: Any) -> Any:
    torch.manual_seed(1)
    model = build()
    if policy is not None:
        for block in getattr(model, "blocks", ()) or (model.wide, model.narrow):  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy, **options)
        fully_shard(model, mp_policy=policy, **options)
    return model


# ---- the oracle


def rounded(weight: Tensor, codec: Any, ranks: int, computed: torch.dtype, dim: int = 0) -> Tensor:
    """A weight as all ranks have it after a gather: each rank's rows, padded with zeros, have been encoded."""
    moved = weight.detach().movedim(dim, 0)
    rows = -(-len(moved) // ranks)
    found = []
    for rank in range(ranks):
        own = moved[rank * rows : (rank + 1) * rows].movedim(0, dim).contiguous()
        padded = torch.zeros(1, rows * moved[0].numel(), dtype=codec.packed_dtype(weight.dtype))
        padded[0, : own.numel()] = own.view(-1)
        numbers = torch.empty(1, padded.numel(), dtype=computed)
        codec.decode(codec.encode(padded, 0), numbers)
        found.append(numbers[0, : own.numel()].view(own.shape))
    return torch.cat(found, dim)


class Oracle:
    """A plain model, and for each rank a copy with rounded weights that computes its gradients."""

    def __init__(self, build: Callable[[], TinyModel], policy: MixedPrecisionPolicy, dim: int = 0) -> None:
        self.model, self._policy, self._dim = model_of(build), policy, dim
        self.ranks = dist.get_world_size()

    def computing(self) -> Any:
        model, codec = copy.deepcopy(self.model), self._policy.compression.all_gather
        for p in model.parameters():
            computed, dim = self._policy.param_dtype or p.dtype, min(self._dim, p.dim() - 1)
            p.data = (
                rounded(p, codec, self.ranks, computed, dim)
                if codecs.is_compressed(codec, p.shape, F32)
                else p.data.to(computed)
            )
            p.grad = None
        return model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.computing()(self.cast(x))
        return out

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self._policy.param_dtype) if self._policy.param_dtype and x.is_floating_point() else x

    def backward(self, batches: list[Tensor]) -> None:
        gradients = []
        for x in batches:
            model = self.computing()
            mean_loss(model(self.cast(x))).backward()
            gradients.append([p.grad.to(F32) for p in model.parameters()])
        for p, *own in zip(self.model.parameters(), *gradients, strict=True):
            p.grad = sum(own) / len(own)


def batches(model: TinyModel, seed: int) -> list[Tensor]:
    return [model.example(rows=2, seed=10 * seed + rank) for rank in range(dist.get_world_size())]


def assert_trains_as_rounded(
    build: Callable[[], TinyModel], policy: MixedPrecisionPolicy, dim: int = 0, **options: Any
) -> Any:
    if dim:
        options["shard_placement_fn"] = lambda p: Shard(min(dim, p.dim() - 1))
    model, oracle = model_of(build, policy, **options), Oracle(build, policy, dim)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (model, oracle.model)]
    for seed in range(2):
        own = batches(model, seed)[dist.get_rank()]
        out = model(own)
        assert_same(out, oracle.forward(own), 0, 0, f"output {seed}")
        mean_loss(out).backward()
        oracle.backward(batches(model, seed))
        for (name, p), q in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
            assert_same(p.grad.full_tensor(), q.grad, 0, 0, f"{name}.grad {seed}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), oracle.model.named_parameters(), strict=True):
            assert_same(p.full_tensor(), q[1], 0, 0, f"{name} {seed}")
        with torch.no_grad():
            assert_same(model(own), oracle.forward(own), 0, 0, f"evaluated {seed}")
    return model


def deep() -> TinyGPT:
    return TinyGPT(depth=2)


@pytest.fixture(autouse=True)
def small_parameters_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SMALL_NUMEL", 1)


# ---- checks


def weights_are_rounded_when_they_are_gathered() -> None:
    plain = model_of(OddMLP)
    x = plain.example(rows=2, seed=0)
    assert not torch.equal(Oracle(OddMLP, policy_of()).forward(x), plain(x)), "rounding shows"
    assert_trains_as_rounded(OddMLP, policy_of())
    assert_trains_as_rounded(OddMLP, policy_of(Float8(torch.float8_e5m2)), dim=1)


def three_dtypes() -> None:
    """fp32 at rest, float8 as weights travel, bf16 in compute."""
    model = assert_trains_as_rounded(OddMLP, policy_of(param_dtype=BF16, reduce_dtype=F32))
    spec = groups_below(model)[1].parameters.specs[0]
    assert (spec.storage_dtype, spec.gather_codec, spec.compute_dtype) == (F32, FLOAT8, BF16)
    assert spec.gathered_nbytes < spec.compute_nbytes * 4  # 16 bytes of scale, in a model this small


def a_codec_that_rounds_at_random_rounds_alike_in_backward() -> None:
    """Checkpointing computes the forward again from another gather, and compares what it saves."""
    policy = policy_of(Int8())
    model = model_of(deep, policy, reshard_after_forward=True)
    x = model.example(rows=2, seed=0)
    first = model(x)
    assert_same(model(x), first, 0, 0, "the same each time")
    assert not torch.equal(first, model_of(deep)(x))
    mean_loss(first).backward()
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    again = model_of(deep, policy, reshard_after_forward=True)
    for block in again.blocks:
        block.forward = lambda *args, inner=block.forward: checkpoint(inner, *args, use_reentrant=False)
    mean_loss(again(x)).backward()
    for (name, p), expected in zip(again.named_parameters(), gradients, strict=True):
        assert_same(p.grad.full_tensor(), expected, 0, 0, name)


def secondary_shards_are_decoded_ones() -> None:
    """Backward gathers them as they are, in the dtype of compute: encoded again, they would be rounded once more."""
    if dist.get_world_size() == 4:
        assert_trains_as_rounded(OddMLP, policy_of(), reshard_after_forward=2)


class Sent:
    """A Comm that counts the bytes that all ranks together give to an all-gather."""

    def __init__(self, inner: Any, sizes: list[int]) -> None:
        self._inner, self._sizes = inner, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, outputs: Any, inputs: Any) -> Any:
        self._sizes.append(sum(each.nbytes for each in outputs))
        return self._inner.all_gather(outputs, inputs)


class Wide(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))

    def example(self, rows: int = 8, seed: int = 0) -> Tensor:
        return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def bytes_on_the_wire() -> None:
    """One for each element of a matrix, and 16 a rank and matrix; a dtype holds for vectors, too."""
    ranks, matrices, vectors = dist.get_world_size(), 2 * 64 * 96, 64 + 96
    if ranks == 3:
        return  # rows do not divide: padding travels, too
    found = {}
    for codec in (None, FLOAT8, BF16, F32):
        torch.manual_seed(1)
        model: Any = fully_shard(Wide(), mp_policy=policy_of(codec), reshard_after_forward=True)
        (group,), sizes = groups_below(model), []
        if ranks > 1:
            group.use_comms(group.comms._replace(gathers=Sent(group.comms.gathers, sizes)))
        mean_loss(model(model.example(rows=2, seed=0))).backward()
        found[codec] = sum(sizes)
        assert len(sizes) == (2 if ranks > 1 else 0)
    if ranks > 1:
        assert found[None] == found[F32] == 2 * 4 * (matrices + vectors)
        assert found[FLOAT8] == 2 * (matrices + 2 * 16 * ranks + 4 * vectors)
        assert found[BF16] == 2 * 2 * (matrices + vectors)


def memory_is_freed() -> None:
    """What has travelled is freed when it is decoded, and unsharded parameters when they are resharded."""
    model: Any = fully_shard(Wide(), mp_policy=policy_of(), reshard_after_forward=True)
    (group,) = groups_below(model)
    buffers = group.parameters.buffers
    (own,) = [storage for storage, _ in buffers._plan._own]
    seen = []
    model.one.register_forward_hook(lambda *_: seen.append((own.nbytes(), group.unsharded.is_allocated)))
    model(model.example(rows=2, seed=0)).sum().backward()
    assert seen == [(0, True)]
    assert not own.nbytes()
    assert not group.unsharded.is_allocated


def what_rests_is_exact(folder: Path) -> None:
    plain, model = model_of(OddMLP), model_of(OddMLP, policy_of())
    model(model.example(rows=2, seed=0))
    computing = Oracle(OddMLP, policy_of()).computing()

    def assert_has(expected: nn.Module, **options: Any) -> None:
        with fsdp2.full_params(model, **options):
            for name, p in model.named_parameters():
                assert_same(p, expected.get_parameter(name), 0, 0, f"{name} {options}")

    assert_has(computing)  # as a forward has it
    assert_has(plain, writeback=True)
    assert_has(plain, dtype=F32)
    for bucket in fsdp2.stream_full_params(model):
        for name, numbers in zip(bucket.names, bucket.flat.split(bucket.counts), strict=True):
            assert_same(numbers, plain.get_parameter(name).view(-1), 0, 0, f"streamed {name}")
    dcp.save(model.state_dict(), checkpoint_id=folder / str(dist.get_world_size()))
    loaded = {name: torch.zeros_like(p) for name, p in plain.state_dict().items()}
    dcp.load(loaded, checkpoint_id=folder / str(dist.get_world_size()))
    for name, p in plain.state_dict().items():
        assert_same(loaded[name], p, 0, 0, f"saved {name}")
    fsdp2.check(model)
    assert "all_gather by Float8(" in str(describe(model))
    fsdp2.describe(model)


def what_the_policy_leaves_alone() -> None:
    """Vectors, scalars, whole numbers, and what the user's function says."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(6, 3))
            self.vector, self.scalar = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(1.3))
            self.counts = nn.Parameter(torch.arange(12).view(4, 3), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return self.weight * 1, self.kept * 1, self.vector * 1, self.scalar * 1, self.counts * 1

    torch.manual_seed(1)
    plain = Mixed()
    model = copy.deepcopy(plain)
    policy = policy_of(param_dtype_override_fn=lambda p: p.dtype if tuple(p.shape) == (6, 3) else None)
    fully_shard(model, mp_policy=policy)
    weight, *others = model(torch.ones(1))
    expected = plain(torch.ones(1))
    assert_same(weight, rounded(plain.weight, FLOAT8, dist.get_world_size(), F32), 0, 0, "weight")
    assert not torch.equal(weight, expected[0])
    for i, (found, other) in enumerate(zip(others, expected[1:], strict=True)):
        assert_same(found, other, 0, 0, str(i))


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A codec with a fault."""

    fault: str
    exchanges: ClassVar[bool] = True

    @property
    def feedback(self) -> bool:
        return self.fault == "feedback"

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        if self.fault == "dtype":
            raise NotImplementedError("no weights of that dtype")
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return numel * summed.itemsize + 16 * (self.fault == "bytes")

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        return numbers.mul_(2).clone() if self.fault == "writes" else numbers.clone()

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire)

    def sum(self, rows: Rows, total: Tensor) -> None:
        raise AssertionError("weights are not summed")


def faults_of_codecs_are_named() -> None:
    with pytest.raises(ValueError, match="without feedback"):
        policy_of(Wrong("feedback"))
    with pytest.raises(TypeError, match="all_gather: expected a floating-point dtype of 16 bits or more"):
        policy_of(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="weight: no weights of that dtype"):
        fully_shard(nn.Linear(4, 4), mp_policy=policy_of(Wrong("dtype")))
    for fault, error, text in (
        ("bytes", ValueError, "as its sent_nbytes says"),
        ("writes", RuntimeError, "written to"),
    ):
        model = fully_shard(nn.Linear(4, 4), mp_policy=policy_of(Wrong(fault)))
        with pytest.raises(error, match=text):
            model(torch.ones(1, 4))
    right = fully_shard(nn.Linear(4, 4), mp_policy=policy_of(Wrong("")))
    right(torch.ones(1, 4)).sum().backward()


def where_it_can_not_work_it_is_refused() -> None:
    with pytest.raises(ValueError, match="only replicates"):
        replicate(nn.Linear(4, 4), mp_policy=policy_of())

    class SelfGathered(Tensor):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self,), None

        def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            return outputs[0], ()

    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.ones(4, 4).as_subclass(SelfGathered))
    with pytest.raises(NotImplementedError, match="which says itself how it travels"):
        fully_shard(module, mp_policy=policy_of())
    with pytest.raises(ValueError, match=r"Float8\.dtype"):
        Float8(torch.bfloat16)


@pytest.mark.parametrize("ranks", world_sizes(1, 4, nightly=[2, 3]))
def test_weights_travel_encoded(ranks: int, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = [
        (check.__name__, check)
        for check in (
            weights_are_rounded_when_they_are_gathered,
            three_dtypes,
            a_codec_that_rounds_at_random_rounds_alike_in_backward,
            secondary_shards_are_decoded_ones,
            bytes_on_the_wire,
            memory_is_freed,
            what_the_policy_leaves_alone,
            faults_of_codecs_are_named,
            where_it_can_not_work_it_is_refused,
        )
    ]
    checks.append((what_rests_is_exact.__name__, lambda: what_rests_is_exact(tmp_path)))
    run_checks(ranks, checks, timeout=120)


def test_float8_keeps_what_it_can_represent() -> None:
    """And each row has the scale of its largest number; infinities, NaN and zeros."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codec = Float8(dtype)
        numbers = torch.randn(3, 37, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1.0], [1e6]])
        found = torch.empty_like(numbers)
        codec.decode(codec.encode(numbers, 0), found)
        largest = numbers.abs().amax(1, keepdim=True)
        assert torch.all(
            (found - numbers).abs()
            <= 2.0 ** -(4 if dtype is torch.float8_e4m3fn else 3) * numbers.abs() + largest * 2**-14
        )
        assert torch.allclose(found.abs().amax(1, keepdim=True), largest)
        again = torch.empty_like(numbers)
        codec.decode(codec.encode(found, 0), again)
        assert torch.allclose(again, found, rtol=1e-6)
        for value in (torch.inf, torch.nan):
            numbers[1, 3] = value
            codec.decode(codec.encode(numbers, 0), found)
            assert not found[1, 3].isfinite()
            assert found[2].isfinite().all()
        zeros = torch.zeros(2, 5)
        codec.decode(codec.encode(zeros, 0), found[:2, :5])
        assert not found[:2, :5].any()
        assert codec.encode(torch.zeros(2, 0), 0).shape == (2, 16)
