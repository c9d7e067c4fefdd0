"""Tests sums between replicas (HSDP, `replicate`) by a codec, by PowerSGD, and by hooks in the shape of DDP's.

The oracles are plain: all ranks' gradients of an unsharded model, in one process, and the mathematics by hand. (That
such sums fit in with all else that a step may do is drawn in test_training.py, by a codec that rounds to bf16.)
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, describe, fully_shard, replicate
from fsdp2.compression import Compression, GradBucket, Int8, PowerSGD
from fsdp2.engine.state import groups_below
from helpers import NIGHTLY, assert_same, full, one_mesh, own_rows, run_checks, world_sizes

KEPT, BF16 = Int8(feedback=True), torch.bfloat16
SMALL = ("scale", "few.weight")
VECTORS = ("one.bias", "two.bias")


class Net(nn.Module):
    """Odd sizes; matrices, vectors, a vector of two dims, and a matrix of few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.few = nn.Linear(33, 65), nn.Linear(65, 31), nn.Linear(31, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 65))

    def forward(self, x: Tensor) -> Tensor:
        return self.few(torch.tanh(self.two(torch.tanh(self.one(x)) * self.scale)))


def plain_model(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net().to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 33, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def gradients_of_ranks(step: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    model, found = plain_model(dtype), []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        backward(model, batch(rank, step, dtype))
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return found


def shard(codec: Any = None, replicas: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a sharded model. `replicas`: HSDP with so many; None: `replicate`."""
    policy, model = MixedPrecisionPolicy(compression=Compression(all_reduce=codec)), plain_model(dtype)
    if replicas is None:
        replicate(model.one, mp_policy=policy)
        return replicate(model, mp_policy=policy)
    mesh = one_mesh((replicas, dist.get_world_size() // replicas), ("replicas", "shards"))
    fully_shard(model.one, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def num_replicas(model: Any) -> int:
    return int(groups_below(model)[0].comms.replicas.size)


def assert_replicas_are_alike(model: Any) -> None:
    for group in groups_below(model):
        for param in group.params:
            own = param.sharded.grad.to_local().contiguous()
            parts = [torch.empty_like(own) for _ in range(group.comms.replicas.size)]
            dist.all_gather(parts, own, group=group.comms.replicas.group)
            assert all(torch.equal(part, own) for part in parts), param.name


# ---- the oracle of what replicas give to a sum, and how it lies


class Flats:
    """Holds, for each bucket of this rank that is not summed by an all-reduce, what each replica gives to its sum."""

    def __init__(self, model: Any) -> None:
        groups = groups_below(model)
        self.replicas, self.shards = num_replicas(model), groups[0].comms.reduces.size
        self.shard_rank = groups[0].comms.reduces.rank
        plans = [g.gradients._plan(bucket.indices, False) for g in groups for bucket in g.gradients.buckets]
        self.plans = [plan for plan in plans if plan.summing is not None]

    def of(self, step: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[int, Any, list[Tensor]]]:
        """Yields the number of each bucket, its parts, and the flat tensor of each replica."""
        gradients = gradients_of_ranks(step, dtype)
        for k, plan in enumerate(self.plans):
            yield k, plan.parts, [self._flat(plan, gradients, r) for r in range(self.replicas)]

    def _flat(self, plan: Any, gradients: list[dict[str, Tensor]], replica: int) -> Tensor:
        ranks = range(replica * self.shards, (replica + 1) * self.shards)
        flat = torch.zeros(plan.layout.shard_numel, dtype=next(iter(gradients[0].values())).dtype)
        for part in plan.parts:
            mean = functools.reduce(torch.add, [gradients[rank][part.name] for rank in ranks]) / self.shards
            own = own_rows(mean, self.shard_rank, self.shards)
            flat[part.offset : part.offset + own.numel()] = own.flatten()
        return flat


def assert_gives(model: Any, parts: Any, expected: Tensor, tolerance: float = 0.0) -> None:
    for part in parts:
        own = model.get_parameter(part.name).grad.to_local()
        wanted = expected[part.offset : part.offset + own.numel()].view_as(own)
        assert_same(own, wanted, tolerance, tolerance, part.name)


def are_equal(one: nn.Parameter, other: nn.Parameter, replicas: int) -> bool:
    """Returns True if gradients are equal bit by bit; beyond two replicas, but for the order in which gloo adds, which
    depends on what else is in a bucket.
    """
    own, others = (param.grad.to_local() for param in (one, other))  # type: ignore[union-attr]
    return bool(torch.equal(own, others) if replicas == 2 else torch.allclose(own, others, rtol=1e-5, atol=1e-7))


def assert_others_are_as_without(model: Any, step: int, replicas: int | None) -> None:
    plain = shard(None, replicas)
    backward(plain, batch(dist.get_rank(), step))
    for name in (*SMALL, *VECTORS):
        assert are_equal(model.get_parameter(name), plain.get_parameter(name), num_replicas(model)), name


# ---- codecs


def rounded(row: Tensor) -> Tensor:
    """Int8(feedback=True), written once more: blocks of 128, each scaled by its largest, to the nearest step."""
    found = []
    for block in row.split(128):
        step = block.abs().max() / 127
        found.append((block / torch.where(step > 0, step, 1)).round().clamp(-127, 127) * step)
    return torch.cat(found)


def sum_of_rounded(flats: list[Tensor], lost: list[Tensor]) -> Tensor:
    """Returns the mean as replicas get it; writes what was not sent to `lost`."""
    count, numel = len(flats), flats[0].numel()
    given = [flat + kept for flat, kept in zip(flats, lost, strict=True)]
    if count == 2:
        sent = [rounded(each) for each in given]
        for kept, whole, arrived in zip(lost, given, sent, strict=True):
            kept.copy_(whole - arrived)
        return (sent[0] + sent[1]) / 2
    size = (-(-numel // count) + 3) // 4 * 4  # a multiple of 16 bytes
    cuts = [(k * size, min((k + 1) * size, numel)) for k in range(count)]

    def slices(flat: Tensor) -> list[Tensor]:
        padded = torch.cat([flat, flat.new_zeros(size * count - numel)])
        return [rounded(each) for each in padded.split(size)]

    sent = [torch.cat(slices(each))[:numel] for each in given]
    for kept, whole, arrived in zip(lost, given, sent, strict=True):
        kept.copy_(whole - arrived)
    mean = functools.reduce(torch.add, sent) / count
    arrives = torch.cat(slices(mean))[:numel]
    for k, (first, last) in enumerate(cuts):  # rank k has rounded slice k of the sum
        lost[k][first:last] += (mean - arrives)[first:last] * count
    return arrives


def codecs_are_exact(replicas: int | None) -> None:
    """Bit by bit, for three steps: also what was not sent, and of which only a part is in each later step."""
    model = shard(KEPT, replicas)
    flats, lost = Flats(model), dict[tuple[int, int], Tensor]()
    assert len(flats.plans) == 2
    assert {part.name for plan in flats.plans for part in plan.parts} == {"one.weight", "two.weight"}
    for step in range(3):
        backward(model, batch(dist.get_rank(), step))
        for k, parts, of_replicas in flats.of(step):
            kept = [lost.setdefault((k, r), torch.zeros_like(flat)) for r, flat in enumerate(of_replicas)]
            expected = sum_of_rounded(of_replicas, kept)
            assert not torch.equal(expected, sum(of_replicas) / len(of_replicas)), "nothing was rounded"
            assert_gives(model, parts, expected)
        assert_replicas_are_alike(model)
        assert_others_are_as_without(model, step, replicas)
        model.zero_grad()


def rounding_at_random_is_bounded_and_alike(replicas: int | None) -> None:
    for codec in (Int8(), BF16, torch.float16):
        model = shard(codec, replicas)
        backward(model, batch(dist.get_rank(), 0))
        assert_replicas_are_alike(model)
        for _, parts, of_replicas in Flats(model).of(0):
            mean = sum(of_replicas) / len(of_replicas)
            bound = 2.1 * max(float(flat.abs().max()) for flat in of_replicas) / 127
            for part in parts:
                own = model.get_parameter(part.name).grad.to_local().flatten()
                if own.numel():
                    error = (own - mean[part.offset : part.offset + own.numel()]).abs().max()
                    assert 0 < error < bound, f"{codec}: {error}, {bound}"


def bytes_are_as_counted(replicas: int | None) -> None:
    """As the docstring of codecs/encoded_sum.py says, for P elements: n from two, 2 (R - 1) n(P / R) from more."""
    if replicas is not None:
        return
    size = dist.get_world_size()
    sent = {}
    for codec in (None, KEPT):
        model, found = shard(codec), list[int]()
        for group in groups_below(model):
            group.use_comms(group.comms._replace(replicas=Sent(group.comms.replicas, found)))
        backward(model, batch(dist.get_rank(), 0))
        sent[codec] = sum(found)
    vectors = 4 * sum(-(-p.numel() // 4) * 4 for n, p in plain_model().named_parameters() if n in (*VECTORS, *SMALL))
    expected, plain = 0.0, 0.0
    for plan in Flats(model).plans:
        numel = plan.layout.shard_numel
        per_slice = KEPT.sent_nbytes(numel if size == 2 else (-(-numel // size) + 3) // 4 * 4, torch.float32)
        expected += per_slice * (1 if size == 2 else 2 * (size - 1))
        plain += 4 * numel * 2 * (size - 1) / size
    assert abs(sent[KEPT] - expected - vectors * 2 * (size - 1) / size) <= 64
    assert sent[KEPT] < 0.36 * sent[None], "a quarter, scales, and vectors"


class Sent:
    """A Comm that counts the bytes that leave this rank, if an all-reduce is a ring."""

    def __init__(self, inner: Any, found: list[int]) -> None:
        self._inner, self._found = inner, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, outputs: Any, inputs: Any) -> Any:
        self._found.append(sum(each.nbytes for each in inputs) * (self._inner.size - 1))
        return self._inner.all_gather(outputs, inputs)

    def exchange(self, sent: Any, what: str = "") -> Any:
        self._found.append(sum(each.nbytes for each in sent) * (self._inner.size - 1) // self._inner.size)
        return self._inner.exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Any:
        self._found.append(tensor.nbytes * 2 * (self._inner.size - 1) // self._inner.size)
        return self._inner.all_reduce(tensor, divisor, what)


# ---- PowerSGD


def approximate(matrices: list[Tensor], q: Tensor, lost: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the mean of `matrices` as PowerSGD has it, and the next Q; writes what was not sent to `lost`."""
    given = [matrix + kept for matrix, kept in zip(matrices, lost, strict=True)]
    q = torch.linalg.qr(q).Q
    p = torch.linalg.qr(sum(each @ q for each in given)).Q
    q = sum(each.t() @ p for each in given) / len(given)
    mean = p @ q.t()
    for kept, whole in zip(lost, given, strict=True):
        kept.copy_(whole - mean)
    return mean, q


def power_sgd_is_the_mathematics(replicas: int | None) -> None:
    """In fp64, for four steps, of which the first is as without."""
    f64 = torch.float64
    model = shard(PowerSGD(rank=2, start=1), replicas, f64)
    flats, lost, qs = Flats(model), dict[str, list[Tensor]](), dict[str, Tensor]()
    for step in range(4):
        backward(model, batch(dist.get_rank(), step, f64))
        for _, parts, of_replicas in flats.of(step, f64):
            for part in parts:
                matrices = [part.of(flat).reshape(part.shape[0], -1) for flat in of_replicas]
                expected = sum(matrices) / len(matrices)
                if step > 0:
                    kept = lost.setdefault(part.name, [torch.zeros_like(each) for each in matrices])
                    q = qs.get(part.name)
                    if q is None:
                        sums = next(g.gradients.codecs.replica_sum for g in groups_below(model) if has(g, part.name))
                        q = sums._states[part.i].first
                    mean, qs[part.name] = approximate(matrices, q, kept)
                    assert (mean - expected).norm() > 1e-3 * expected.norm(), "nothing was compressed"
                    expected = mean
                own = model.get_parameter(part.name).grad.to_local()
                assert_same(own, expected.view_as(own), 1e-8, 1e-8, f"{part.name} {step}")
        assert_replicas_are_alike(model)
        model.zero_grad()


def has(group: Any, name: str) -> bool:
    return any(param.name == name for param in group.params)


def power_sgd_of_full_rank_is_exact(replicas: int | None) -> None:
    f64 = torch.float64
    model, plain = shard(PowerSGD(65, 0, 1e-3, feedback=False), replicas, f64), shard(None, replicas, f64)
    for step in range(2):
        for each in (model, plain):
            backward(each, batch(dist.get_rank(), step, f64))
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(param.grad), full(other.grad), 1e-9, 1e-11, name)


def power_sgd_leaves_others_alone(replicas: int | None) -> None:
    """Vectors, small ones, those that would not become smaller, and all of the first sums, to the bit."""
    model, plain = shard(PowerSGD(rank=4, start=2), replicas), shard(None, replicas)
    for step in range(3):
        for each in (model, plain):
            backward(each, batch(dist.get_rank(), step))
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            as_without = step < 2 or name in (*SMALL, *VECTORS)
            assert are_equal(param, other, num_replicas(model)) == as_without, f"{name} {step}"
            param.grad = other.grad = None
    never = shard(PowerSGD(rank=4, start=0, min_saving=1000), replicas)
    backward(never, batch(dist.get_rank(), 0))
    assert not Flats(never).plans


def a_backward_that_fails_on_one_replica(replicas: int | None) -> None:
    """What the others keep does not fit what it has any more: all sum as without, once, and go on."""
    model, plain = shard(PowerSGD(rank=2, start=0, feedback=False), replicas), shard(None, replicas)
    backward(model, batch(dist.get_rank(), 0))
    model.zero_grad()
    if groups_below(model)[0].comms.replicas.rank == 1:
        for group in groups_below(model):
            group.gradients.discard()
    for step in (1, 2):
        for each in (model, plain):
            backward(each, batch(dist.get_rank(), step))
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            as_without = step == 1 or name in (*SMALL, *VECTORS)
            assert are_equal(param, other, num_replicas(model)) == as_without, f"{name} {step}"
            param.grad = other.grad = None


def infinite_gradients_pass(replicas: int | None) -> None:
    """A loss scaler sees them, and the next step has finite ones."""
    for codec in (KEPT, Int8(), PowerSGD(rank=2, start=0)):
        model, rank = shard(codec, replicas), dist.get_rank()
        for step in range(3):
            x = batch(rank, step)
            factor = math.inf if step == 1 and rank == dist.get_world_size() - 1 else 1.0
            (model(x).square().sum() * factor).backward()
            finite = all(bool(full(param.grad).isfinite().all()) for param in model.parameters())
            assert finite == (step != 1), f"{codec} {step}"
            model.zero_grad()


# ---- what a step may do besides


def trained(make: Callable[[], Any], in_backward: bool) -> list[Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if in_backward:
        model.set_optimizer_in_backward(optimizer)
    for step in range(3):
        backward(model, batch(dist.get_rank(), step))
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return [full(param.detach()) for param in model.parameters()]


def optimizers_in_backward_see_the_same(replicas: int | None) -> None:
    for codec in (KEPT, PowerSGD(rank=2, start=1)):
        make = functools.partial(shard, codec, replicas)
        for one, other in zip(trained(make, False), trained(make, True), strict=True):
            assert torch.equal(one, other), codec


def what_was_not_sent_outlives_a_frozen_step(replicas: int | None) -> None:
    """A parameter that is frozen for a step goes on as if that step had not been; the other one as if it had been
    alone.
    """
    for codec in (KEPT, PowerSGD(rank=2, start=0)):
        model, expected = shard(codec, replicas), dict[int, Tensor]()
        for frozen in (False, True):
            for step in (0, 1, 2):
                if step == 1:
                    model.two.weight.requires_grad_(not frozen)
                    if not frozen:
                        continue  # the other run leaves that step out
                backward(model, batch(dist.get_rank(), step))
                model.two.weight.requires_grad_(True)
                own = model.two.weight.grad
                if own is not None:
                    found = own.to_local().clone()
                    if not frozen:
                        expected[step] = found
                    else:
                        assert torch.equal(found, expected[step]), f"{codec} {step}"
                model.zero_grad()
            model = shard(codec, replicas)
        assert len(expected) == 2


def accumulated_gradients_are_summed_once(replicas: int | None) -> None:
    """Sums that wait, as shards or unsharded, are encoded as one gradient is."""
    for codec in (KEPT, PowerSGD(rank=2, start=0)):
        for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            model = shard(codec, replicas)
            for step in range(3):
                getattr(model, method)(step == 2)
                backward(model, batch(dist.get_rank(), step))
            assert_replicas_are_alike(model)
            parts = [list(Flats(model).of(step)) for step in range(3)]
            for k, (_, layout, _) in enumerate(parts[0]):
                whole = [sum(part[k][2][r] for part in parts) for r in range(len(parts[0][k][2]))]
                mean = sum(whole) / len(whole)
                for part in layout:
                    own = model.get_parameter(part.name).grad.to_local().flatten()
                    wanted = mean[part.offset : part.offset + own.numel()]
                    error = (own - wanted).norm() / wanted.norm() if own.numel() else 0.0
                    assert error < (0.03 if codec is KEPT else 0.99), f"{codec} {part.name} {error}"
    model = shard(KEPT, replicas)
    with fsdp2.accumulate(model) as sums:
        for step in range(2):
            sums.backward(model(batch(dist.get_rank(), step)).square().sum(), weight=4)
    assert all(bool(param.grad.to_local().isfinite().all()) for param in model.parameters())


def what_tools_say(replicas: int | None) -> None:
    for codec in (KEPT, PowerSGD(rank=2, start=0)):
        model = shard(codec, replicas)
        assert f"all_reduce by {codec!r}" in str(describe(model))
        backward(model, batch(dist.get_rank(), 0))
        kept = sum(group.gradients.codecs.nbytes for group in groups_below(model))
        assert kept >= sum(plan.layout.shard_numel * 4 - 64 for plan in Flats(model).plans) > 0
        copied = copy.deepcopy(model)
        backward(copied, batch(dist.get_rank(), 1))
        fsdp2.check(model)


CHECKS = (
    codecs_are_exact,
    rounding_at_random_is_bounded_and_alike,
    bytes_are_as_counted,
    power_sgd_is_the_mathematics,
    power_sgd_of_full_rank_is_exact,
    power_sgd_leaves_others_alone,
    a_backward_that_fails_on_one_replica,
    infinite_gradients_pass,
    optimizers_in_backward_see_the_same,
    what_was_not_sent_outlives_a_frozen_step,
    accumulated_gradients_are_summed_once,
    what_tools_say,
)


def ways_on(ranks: int) -> list[int | None]:
    """Returns how many replicas: None for `replicate`, which fewer than four ranks have."""
    return [2] * (ranks == 4) + [None] * (ranks < 4 or NIGHTLY)


@pytest.mark.parametrize("ranks", world_sizes(3, 4, nightly=[2]))  # two encode no sum
def test_replicas_sum_by_codecs(ranks: int) -> None:
    ways = ways_on(ranks)
    run_checks(ranks, [(f"{each.__name__} {way}", functools.partial(each, way)) for way in ways for each in CHECKS])


def one_replica_is_as_without() -> None:
    for codec in (KEPT, PowerSGD(start=0)):
        for replicas in (None, 1):
            model, plain = shard(codec, replicas), shard(None, replicas)
            for each in (model, plain):
                backward(each, batch(0, 0))
            for param, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(full(param.grad), full(other.grad))


def test_one_replica() -> None:
    run_checks(1, [("one replica", one_replica_is_as_without)])


# ---- hooks


class Plain:
    """A bucket as DDP gives it to hooks."""

    def __init__(self, index: int, flat: Tensor, parts: Any, is_last: bool) -> None:
        self._index, self._flat, self._parts, self._is_last = index, flat, parts, is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [self._flat[o : o + math.prod(shape)].view(shape) for o, shape in self._parts]

    def is_last(self) -> bool:
        return self._is_last


def state_of(hook: Any, group: Any) -> Any:
    if hook is not powerSGD_hook:
        return group
    return PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)


def hooks_of_torch_work(replicas: int | None) -> None:
    """Unchanged, for four steps: bit by bit what they give for the same gradients outside of the engine."""
    for hook in (allreduce_hook, bf16_compress_hook, fp16_compress_hook, powerSGD_hook):
        model, calls = shard(None, replicas), list[tuple[int, bool, list[str]]]()
        group = groups_below(model)[0].comms.replicas.group
        own, by_hand = state_of(hook, group), state_of(hook, group)

        def watched(state: Any, bucket: Any, hook: Any = hook, calls: Any = calls) -> Any:
            calls.append((bucket.index(), bucket.is_last(), bucket.names))
            assert all(g.data_ptr() >= bucket.buffer().data_ptr() for g in bucket.gradients())
            assert [tuple(g.shape) for g in bucket.gradients()] == bucket.shapes
            return hook(state, bucket)

        model.register_comm_hook(own, watched)
        flats = Flats(model)
        for step in range(4):
            calls.clear()
            backward(model, batch(dist.get_rank(), step))
            assert [last for _, last, _ in calls] == [False] * (len(calls) - 1) + [True]
            assert sorted(index for index, _, _ in calls) == [*range(len(flats.plans))]
            found = {k: (parts, of_replicas) for k, parts, of_replicas in flats.of(step)}
            for index, last, names in calls:
                parts, of_replicas = next(v for v in found.values() if {p.name for p in v[0]} >= set(names))
                flat = of_replicas[groups_below(model)[0].comms.replicas.rank]
                held = [(part.offset, part.shape) for part in parts if 0 not in part.shape]
                mean = hook(by_hand, Plain(index, flat, held, last)).wait()
                assert_gives(model, parts, mean if isinstance(mean, Tensor) else mean[0])
            assert_replicas_are_alike(model)
            model.zero_grad()
        assert hook is not powerSGD_hook or own.iter == 4, "it counts backward passes, not buckets"


def users_hooks(replicas: int | None) -> None:
    """They get the state, may return a list, another tensor, or the answer of a future."""
    model, plain = shard(None, replicas), shard(None, replicas)
    group, seen = groups_below(model)[0].comms.replicas.group, list[str]()

    def doubled(state: list[str], bucket: GradBucket) -> Any:
        state += bucket.names
        assert [p.grad for p in bucket.parameters()] == [None] * len(bucket.names)
        bucket.set_buffer(bucket.buffer() * 2)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda done: [done.value()[0] / dist.get_world_size(group)])

    model.register_comm_hook(seen, doubled)
    assert "comm_hook=users_hooks.<locals>.doubled" in str(describe(model))
    for each in (model, plain):
        backward(each, batch(dist.get_rank(), 0))
    assert sorted(seen) == sorted(name for name, p in model.named_parameters() if p.to_local().numel())
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param.grad), 2 * full(other.grad), 1e-6, 1e-7, name)
    model.zero_grad()
    model.register_comm_hook(group, fp16_compress_wrapper(allreduce_hook))
    backward(model, batch(dist.get_rank(), 0))
    model.register_comm_hook(None, None)
    model.zero_grad()
    backward(model, batch(dist.get_rank(), 0))
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert are_equal(param, other, num_replicas(model))


def hooks_with_conditional_modules(replicas: int | None) -> None:
    """Ranks reach consensus before a reduction, not before the collective of its hook."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, model = plain_model(torch.float64), plain_model(torch.float64)
    apply: Any = replicate if replicas is None else fully_shard
    mesh = None if replicas is None else one_mesh((replicas, size // replicas), ("replicas", "shards"))
    apply(model.two, mesh=mesh, conditional=True)
    sharded: Any = apply(model, mesh=mesh)
    sharded.register_comm_hook(None if replicas is None else mesh.get_group(0), allreduce_hook)  # type: ignore[union-attr]

    def loss(net: Any, of: int, step: int) -> Tensor:
        hidden = torch.tanh(net.one(batch(of, step, torch.float64))) * net.scale
        return (net.two(hidden) if of % 2 == step % 2 else hidden[:, :31]).square().sum()

    sharded.forward = functools.partial(loss, sharded)
    for step in range(3):
        sum(loss(plain, of, step) for of in range(size)).div(size).backward()  # type: ignore[union-attr]
        sharded(rank, step).backward()
        for (name, param), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                assert_same(full(param.grad), other.grad, 1e-12, 1e-12, f"step {step}: {name}")
        plain.zero_grad()
        sharded.zero_grad()


def ranks_that_hand_hooks_others_raise(replicas: int | None) -> None:
    """Ranks use different parameters. A hook's own messages have no names, and gloo would end the process."""
    model = shard(None, replicas)
    model.register_comm_hook(groups_below(model)[0].comms.replicas.group, allreduce_hook)
    whole = model.forward
    model.forward = lambda x: model.one(x) if dist.get_rank() == 0 else whole(x)
    with pytest.raises(RuntimeError, match="out of step"):
        backward(model, batch(dist.get_rank(), 0))


def wrong_hooks_are_named(replicas: int | None) -> None:
    model: Any = shard(None, replicas)

    def nothing(state: Any, bucket: Any) -> Any:
        return None

    def shorter(state: Any, bucket: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(bucket.buffer()[:3])
        return future

    def fails(state: Any, bucket: Any) -> Any:
        raise ValueError("on purpose")

    for hook, error, text in (
        (nothing, TypeError, "expected a torch.futures.Future of a tensor, got NoneType"),
        (shorter, TypeError, "as the buffer, got 3 elements"),
        (fails, ValueError, "on purpose"),
    ):
        model.register_comm_hook(None, hook)
        with pytest.raises(error, match=text):
            backward(model, batch(dist.get_rank(), 0))
        model.zero_grad()
    with pytest.raises(TypeError, match="hook: expected a function"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, None)
    backward(model, batch(dist.get_rank(), 0))
    if replicas is not None:
        with pytest.raises(ValueError, match="expected a state with the process group of the replicas"):
            model.register_comm_hook(None, bf16_compress_hook)
        with pytest.raises(ValueError, match="expected a state with the process group of the replicas"):
            model.register_comm_hook(PowerSGDState(None), powerSGD_hook)


def where_they_cannot_work_they_are_refused(replicas: int | None) -> None:
    sharded: Any = fully_shard(plain_model())
    with pytest.raises(NotImplementedError, match=r"on a mesh without replicas.*bf16_compress_hook"):
        sharded.register_comm_hook(None, bf16_compress_hook)
    with pytest.raises(ValueError, match="expected no compression of all_reduce on a mesh without replicas"):
        fully_shard(plain_model(), mp_policy=MixedPrecisionPolicy(compression=Compression(all_reduce=KEPT)))
    if dist.get_world_size() == 4:
        mesh = one_mesh((2, 2), ("replicas", "shards"))
        dims = DataParallelMeshDims(shard="shards", outer_shard="replicas")
        at_rest: Any = fully_shard(plain_model(), mesh=mesh, dp_mesh_dims=dims)
        with pytest.raises(NotImplementedError, match="replicas that share one set of shards"):
            at_rest.register_comm_hook(None, allreduce_hook)
        policy = MixedPrecisionPolicy(compression=Compression(all_reduce=PowerSGD()))
        with pytest.raises(NotImplementedError, match="needs sums of whole shards on each replica"):
            fully_shard(plain_model(), mesh=mesh, dp_mesh_dims=dims, mp_policy=policy)


HOOKS = (
    hooks_of_torch_work,
    users_hooks,
    hooks_with_conditional_modules,
    wrong_hooks_are_named,
    where_they_cannot_work_they_are_refused,
    ranks_that_hand_hooks_others_raise,
)


@pytest.mark.parametrize("ranks", world_sizes(2, 4, nightly=[3]))
def test_replicas_sum_by_hooks(ranks: int) -> None:
    ways = ways_on(ranks)
    run_checks(ranks, [(f"{each.__name__} {way}", functools.partial(each, way)) for way in ways for each in HOOKS])


# ---- values


def test_bad_values_are_refused() -> None:
    for wrong, error, text in (
        ({"rank": 0}, ValueError, "PowerSGD.rank: expected 1 or more, got 0"),
        ({"rank": 1.5}, TypeError, "PowerSGD.rank: expected a number"),
        ({"start": -1}, ValueError, "PowerSGD.start: expected 0 or more"),
        ({"min_saving": 0}, ValueError, "PowerSGD.min_saving: expected a positive number"),
        ({"feedback": 1}, TypeError, "PowerSGD.feedback: expected a bool"),
    ):
        with pytest.raises(error, match=text):
            PowerSGD(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reduce_scatter: expected a codec, got PowerSGD.*it is for all_reduce"):
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=PowerSGD()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="all_reduce: expected a torch"):
        MixedPrecisionPolicy(compression=Compression(all_reduce=3))  # type: ignore[arg-type]
