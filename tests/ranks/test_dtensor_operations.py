"""Tests operations on DTensors against the same operations on plain tensors."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp2.dtensor.fixes import correct_torch
from helpers import assert_same, full, run_ranks, sharded, world_sizes

SHAPES = [(5, 3), (1,), (4, 2, 2), (2, 6)]
PLAIN = torch.arange(15, dtype=torch.float64).reshape(5, 3) / 15


def values(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in SHAPES]


def distributed(tensors: list[Tensor], *placements: Any) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [sharded(each, mesh, placements, src_data_rank=None) for each in tensors]


Lists = Callable[[int], list[Any]]
NUMBERS = [1.0, 2.0, 3.0, 4.0]
# In place on a first list; `of(seed)` are other lists of the same tensors.
OPERATIONS: dict[str, Callable[[list[Any], Lists], object]] = {
    "a number": lambda own, of: torch._foreach_mul_(own, 0.5),
    "numbers": lambda own, of: torch._foreach_mul_(own, NUMBERS),
    "a list": lambda own, of: torch._foreach_add_(own, of(2)),
    "a list, scaled": lambda own, of: torch._foreach_add_(own, of(2), alpha=3),
    "itself": lambda own, of: torch._foreach_mul_(own, own),
    "two lists": lambda own, of: torch._foreach_addcdiv_(own, of(2), of(3), value=0.1),
    "two lists and numbers": lambda own, of: torch._foreach_addcmul_(own, of(2), of(3), NUMBERS),
    "lerp": lambda own, of: torch._foreach_lerp_(own, of(2), 0.25),
    "none": lambda own, of: torch._foreach_sqrt_(own),
}
# Lists of their results.
OUT_OF_PLACE: dict[str, Callable[[list[Any], Lists], Any]] = {
    "none": lambda own, of: torch._foreach_sqrt(own),
    "a number": lambda own, of: torch._foreach_add(own, 0.5),
    "a number in a tensor": lambda own, of: torch._foreach_mul(own, torch.tensor(0.5)),
    "a list, scaled": lambda own, of: torch._foreach_add(own, of(2), alpha=3),
    "two lists": lambda own, of: torch._foreach_addcmul(own, of(2), of(3), value=-1),
    "of another dtype": lambda own, of: torch._foreach_sqrt([each.long() for each in own]),
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_foreach_operations_are_those_on_plain_tensors_and_count(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        for name, operate in OPERATIONS.items():
            for kind, other in ((Shard(0), Shard(0)), (Replicate(), Replicate()), (Replicate(), Shard(0))):
                plain, own = values(1), distributed(values(1), kind)
                before = [each._version for each in own]
                operate(plain, values)
                operate(own, lambda seed, other=other: distributed(values(seed), other))
                for each, expected, count in zip(own, plain, before, strict=True):
                    assert_same(each.full_tensor(), expected, 1e-12, 1e-12, f"{name}, {kind}, {other}")
                    assert each._version == count + 1, f"{name}, {kind}, {other}"

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[1]))
def test_foreach_operations_where_plain_tensors_are_among_dtensors(world_size: int) -> None:
    """Such as buffers, and ignored parameters."""
    operations = {**OPERATIONS, "copy": lambda own, of: torch._foreach_copy_(own, of(2))}

    def mixed(seed: int) -> list[Any]:
        return [each if i % 2 else distributed([each], Shard(0))[0] for i, each in enumerate(values(seed))]

    def body(rank: int, _: int) -> None:
        correct_torch()
        for name, operate in operations.items():
            plain, own = values(1), mixed(1)
            before = [each._version for each in own]
            operate(plain, values)
            operate(own, mixed)
            for each, expected, count in zip(own, plain, before, strict=True):
                assert_same(each, expected, 1e-12, 1e-12, name)
                assert each._version == count + 1, name
        for name, operate in OUT_OF_PLACE.items():
            for each, expected in zip(operate(mixed(1), mixed), operate(values(1), values), strict=True):
                assert_same(each, expected, 1e-12, 1e-12, name)
        for order in (1, 2, float("inf")):
            norms = zip(torch._foreach_norm(mixed(1), order), torch._foreach_norm(values(1), order), strict=True)
            for each, expected in norms:
                assert_same(full(each), expected, 0, 1e-12, f"norm {order}")
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch._foreach_add_(mixed(1)[::3], values(2)[::3])

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_numbers_are_put_where_a_mask_says(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        for plain in values(1):
            for kind in (Shard(0), Replicate()):
                (own,) = distributed([plain], kind)
                before = own._version
                own[own > 1] = -2.0
                expected = plain.clone()
                expected[expected > 1] = -2.0
                assert_same(own.full_tensor(), expected, 0, 0, f"{tuple(plain.shape)}, {kind}")
                assert own._version == before + 1
        own, mask = (distributed([plain], kind)[0] for plain, kind in ((plain, Shard(0)), (plain > 1, Replicate())))
        own[mask] = -2.0
        assert_same(own.full_tensor(), expected, 0, 0, "the mask lies otherwise")
        assert own.placements == (Shard(0),)

    run_ranks(world_size, body)


def test_foreach_operations_on_other_tensors_are_left_alone() -> None:
    """Parts of sums are not what they stand for: torch says so, or adds first."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        parts = DTensor.from_local(torch.full((1,), 2.0), mesh, [Partial()])
        target = sharded(torch.ones(1), mesh, [Replicate()])
        torch._foreach_add_([target], [parts])
        assert_same(target.full_tensor(), torch.full((1,), 5.0), 0, 0, "sum")
        plain = torch.ones(2)
        torch._foreach_add_([plain], 1.0)
        assert_same(plain, torch.full((2,), 2.0), 0, 0, "plain")

    run_ranks(2, body)


def put(total: Tensor, norm: Tensor) -> None:
    total[0] = norm


WRITES: list[Callable[[Tensor, Tensor], object]] = [
    *(Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.copy_, Tensor.fill_, put)
]


def test_a_dtensor_is_not_written_to_a_plain_tensor() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        correct_torch()
        (own,) = distributed([PLAIN], Shard(0))
        for write in WRITES:
            with pytest.raises(RuntimeError, match=r"_ of a plain tensor of shape \(.*\) with.*full_tensor"):
                write(torch.zeros(3 if write is put else ()), own.norm())

    run_ranks(2, body)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": nn.functional.mse_loss,
    "smooth_l1_loss": partial(nn.functional.smooth_l1_loss, beta=0.2),
    "huber_loss": partial(nn.functional.huber_loss, delta=0.2),
    "soft_margin_loss": nn.functional.soft_margin_loss,
    "binary_cross_entropy": nn.functional.binary_cross_entropy,
}
if torch.__version__ >= "2.13":  # before, DTensor has no rule for it
    LOSSES["binary_cross_entropy_with_logits"] = nn.functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_losses_are_means_over_elements(world_size: int) -> None:
    """As a term that keeps weights near others is."""

    def gradient(loss: Callable[..., Any], own: Any, target: Any, reduction: str) -> tuple[Any, Any]:
        own.requires_grad_()
        value = loss(own, target, reduction=reduction)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        (2 * value.sum()).backward()
        return value, own.grad

    def body(rank: int, _: int) -> None:
        correct_torch()
        for name, loss in LOSSES.items():
            for reduction in ("mean", "sum", "none"):
                expected = gradient(loss, PLAIN.clone(), PLAIN.flip(0), reduction)
                for kind in (Shard(0), Shard(1), Replicate()):
                    got = gradient(loss, *distributed([PLAIN.clone(), PLAIN.flip(0)], kind), reduction)
                    case = f"{name}, {reduction}, {kind}"
                    assert_same(got[0], expected[0], 1e-12, 1e-12, case)
                    assert_same(got[1].full_tensor(), expected[1], 1e-12, 1e-12, f"{case}: gradient")

    run_ranks(world_size, body)


EXTREMES: dict[str, Callable[[Any], Any]] = {
    "max": torch.max,
    "max of rows": lambda t: t.max(0),
    "amax of columns": lambda t: t.amax(-1),
    "argmin": torch.argmin,
    "argmax of rows": lambda t: t.argmax(0),
    "aminmax": torch.aminmax,
    "largest norm": lambda t: torch.linalg.vector_norm(t, float("inf")),
    "least norm": lambda t: torch.linalg.vector_norm(t, -float("inf")),
    "norm": torch.linalg.vector_norm,
    "largest norms": lambda t: torch._foreach_norm([t, t], float("inf"))[1],
    "maxima": lambda t: torch._foreach_max([t])[0],
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_extremes_where_some_ranks_have_empty_shards(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        for plain in values(1):
            for kind in (Shard(0), Shard(plain.dim() - 1), Replicate()):
                for name, find in EXTREMES.items():
                    (own,) = distributed([plain], kind)
                    expected, found = find(plain), find(own)
                    pairs = zip(expected, found, strict=True) if isinstance(found, tuple) else [(expected, found)]
                    for one, other in pairs:
                        assert_same(other.full_tensor(), one, 1e-12, 1e-12, f"{name}, {tuple(plain.shape)}, {kind}")
        weight = distributed([torch.tensor([[3.0, -7.0]])], Shard(0))[0].requires_grad_()
        weight.abs().max().backward()
        assert_same(weight.grad.full_tensor(), torch.tensor([[0.0, -1.0]]), 0, 0, "gradient of a maximum")

    run_ranks(world_size, body)


def test_an_operand_on_another_mesh_is_brought_to_the_targets() -> None:
    """Though its placements are the same: ranks 1 and 2 have changed places, and hold other rows of it."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh, other = (DeviceMesh("cpu", ranks) for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        plain = torch.tensor([[2.0, 3.0, 5.0]])
        own, replicated = (
            sharded(plain, mesh, [kind, Replicate()], src_data_rank=None) for kind in (Shard(0), Replicate())
        )
        elsewhere = sharded(plain * 7, other, [Shard(0), Replicate()], src_data_rank=None)
        own.addcmul_(elsewhere, replicated)
        assert_same(own.full_tensor(), plain + plain * 7 * plain, 0, 0, "what was written")

    run_ranks(4, body)


def like(plain: Tensor, tensor: Any) -> Any:
    mesh = getattr(tensor, "device_mesh", None)
    return plain if mesh is None else sharded(plain, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)


def put_where(numbers: Any, mask: Callable[[Any], Any]) -> Any:
    numbers[mask(numbers)] = 2.0
    return numbers


SIGNED = torch.tensor([[3.0, -4.0], [0.5, 2.0], [-6.0, 1.0]], dtype=torch.float64)
# Where torch takes what each rank has a part of for the whole.
OF_PARTS: dict[str, Callable[[Any], Tensor]] = {
    "ranks that have one are counted": lambda t: (t.abs() > 0.1).any().double(),
    "in columns": lambda t: (t.abs() > 0.1).any(0).int().sum(),
    "over dims": lambda t: (t.abs() > 0.1).any((0, 1)) * 3,
    "flags, stacked": lambda t: torch.stack([(t > 0).any(), t.isfinite().all()]).sum(),
    "any of sums": lambda t: (t / t * torch.tensor([[1.0]])).sub(t.sign()).sum(0).any(),
    "all, stacked with numbers": lambda t: torch.stack([(t > -9).all().double(), t.prod()]),
    "sum of norms": lambda t: t.norm(dim=0).sum(),
    "and of some": lambda t: t.norm(dim=0, keepdim=True)[:, :1].sum(),
    "sum of stacked norms": lambda t: torch.stack([t.norm(), t.square().norm()]).sum(),
    "largest of maxima, without signs": lambda t: torch.linalg.vector_norm(t.amax(0), float("inf")),
    "and in lists": lambda t: torch._foreach_norm([t.amax(0), t.amin(0)], float("inf"))[0],
    "stacked with norms": lambda t: torch.stack([t.mean(), t.norm(), t.max(), t.sum()]),
    "joined with norms": lambda t: torch.cat([t.mean().view(1), t.norm(dim=1), t.norm(3, dim=0)]),
    "sum filled": lambda t: t.sum().fill_(2.0),
    "norm filled": lambda t: t.norm().fill_(2.0),
    "sums filled by their mask": lambda t: put_where(t.sum(0), lambda sums: sums < -2),
    "norms filled by their mask": lambda t: put_where(t.norm(dim=0), lambda norms: norms > 5),
    "norms, masked": lambda t: (norms := t.norm(dim=0)).masked_fill_(norms > 5, 2.0),
    "filled through a view": lambda t: (sums := t.sum(0, keepdim=True))[0].fill_(2.0) + sums,
    "clamped": lambda t: t.norm().clamp_(min=1e-3),
    "sum, more added": lambda t: t.sum().add_(1.0).sub_(t.max()),
    "largest, negated": lambda t: t.max().neg_(),
    "norm, negated": lambda t: t.norm().neg_(),
    "norm, made negative": lambda t: t.norm().sub_(100.0).add_(t.norm().fill_(-1.0)),
    "truths, multiplied": lambda t: (t > 0).any() * 2 + (t > 9).any(),
    "sums of sums": lambda t: 3 * t.sum() - t.mean() + 1 + torch.add(t.sum(), t.sum(), alpha=-2) / -2,
    "sums, multiplied": lambda t: t.sum() * t.sum() + t.sum() / t.mean() + 2 / t.sum(),
    "others, multiplied": lambda t: -t.norm() - t.amax() * -2 + torch.add(t.amin(), t.prod(), alpha=-3),
    "sums beside rows": lambda t: (t.sum(0) - t) * t.norm() + t.sum(0),
    "counts, added by sum": lambda t: sum((each > 0).sum() for each in (t, t, -t)),  # type: ignore[return-value]
    "counts of 32 bits": lambda t: (t > 0).sum(dtype=torch.int32) - (t < 0).sum(dtype=torch.int32) * 2,
    "counts beside rows": lambda t: (t > 0).sum(0) + (t > 0).long() - (t < 0).sum(),
    "whole numbers that floats can't hold": lambda t: sum(each.long().mul(2**53 + 1).sum() for each in (t, -2 * t)),  # type: ignore[return-value]
    "mean of whole numbers": lambda t: (t > 0).long().mul(2**24 + 1).sum() / 3 + (t > 0).sum() * 0.1,
    "largest of whole numbers": lambda t: 0 + t.long().max() + t.long().amin() - (t > 0).any().long(),
    "product of columns": lambda t: t.t() @ t,
    "rows looked up": lambda t: nn.functional.embedding(like(torch.tensor([2, 0, 2]), t), t),
}


@pytest.mark.parametrize("world_size", world_sizes(4, nightly=(1, 2)))
def test_unreduced_numbers(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        meshes = [(init_device_mesh("cpu", (world_size,)), [Shard(0)])]
        if world_size == 4:
            grid = init_device_mesh("cpu", (2, 2))
            meshes += [(grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(1)])]
        for mesh, placements in meshes:
            for name, compute in OF_PARTS.items():
                own = sharded(SIGNED, mesh, placements, src_data_rank=None)
                case, found = f"{name}, {placements}", compute(own)
                assert_same(found.full_tensor(), compute(SIGNED.clone()), 1e-12, 1e-12, case)

    run_ranks(world_size, body)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch reduces what is added to a number that all ranks have")
def test_a_penalty_is_one_reduction() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        own = distributed(values(1), Shard(0))
        with torch.profiler.profile() as profile:
            total = (0.1 * torch.add(own[0].square().sum(), sum(2 * each.square().sum() for each in own[1:]))).sqrt()
        assert sum(event.name == "c10d::allreduce_" for event in profile.events() or ()) <= 2
        expected = [each.square().sum() for each in values(1)]
        assert_same(total.full_tensor(), (0.1 * (2 * sum(expected) - expected[0])).sqrt(), 1e-12, 1e-12, "penalty")

    run_ranks(2, body)


OF_ONE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(),
    "norms": lambda t: t.norm(dim=0),
    "count": lambda t: (t > 0).sum(),
    "truth": lambda t: (t > 0).any(),
}
USES: dict[str, Callable[[Any, Any], Any]] = {
    "full_tensor": lambda number, _: number.full_tensor().zero_(),
    "redistribute": lambda number, _: number.redistribute(placements=[Replicate()]),
    "computed with": lambda number, other: (number * 2 + other.square()).full_tensor(),
    "stacked": lambda number, other: torch.stack([number, other]).full_tensor(),
    "copied": lambda number, _: copy.deepcopy(number),
}


def test_only_writes_change_a_number_that_ranks_have_parts_of() -> None:
    """Tensors detached from it have its memory, so they see what is written to it."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        (own,) = distributed([SIGNED], Shard(0))
        for kind, compute in OF_ONE.items():
            number, other, plain = compute(own), compute(2 * own), compute(SIGNED)
            if not any(each.is_partial() for each in number.placements):
                continue  # torch 2.15 has reduced truths
            before, part = (type(number), number.placements), number.to_local().clone()
            for name, use in USES.items():
                use(number, other)
                assert (type(number), number.placements) == before, f"{kind}, {name}"
                assert_same(number.to_local(), part, 0, 0, f"{kind}, {name}: this rank's part")
                assert_same((number + number).full_tensor(), plain + plain, 1e-12, 1e-12, f"{kind}, {name}: added")
            detached = number.detach()
            number.fill_(1)
            assert_same(detached.full_tensor(), torch.ones_like(plain), 0, 0, f"{kind}, detached")

    run_ranks(2, body)


def test_gradients_through_unreduced_numbers() -> None:
    def gradient(weight: Any) -> Any:
        weight.requires_grad_()
        penalty = weight.norm(dim=0).sum() + torch.stack([weight.mean(), weight.norm()]).square().sum()
        penalty.backward()
        return weight.grad

    def body(rank: int, _: int) -> None:
        correct_torch()
        got = gradient(distributed([SIGNED], Shard(0))[0])
        assert_same(got.full_tensor(), gradient(SIGNED.clone()), 1e-12, 1e-12, "gradient")

    run_ranks(2, body)


def test_operands_distributed_alike_are_not_planned() -> None:
    """As a step of Adam that takes parameters one by one."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        own, other = distributed([SIGNED, SIGNED], Shard(0))
        with mock.patch("fsdp2.dtensor.writes.call_unhandled", side_effect=AssertionError):
            own.mul_(0.5).lerp_(other, 0.1).addcmul_(other, other, value=0.2).addcdiv_(other, other).add_(other).div_(2)
        expected = SIGNED.mul(0.5).lerp(SIGNED, 0.1).addcmul(SIGNED, SIGNED, value=0.2).addcdiv(SIGNED, SIGNED)
        assert_same(own.full_tensor(), (expected + SIGNED) / 2, 0, 1e-6, "written")

    run_ranks(2, body)


@pytest.mark.parametrize("order", [2.0, 3.0, float("inf")])
def test_norms_of_tensors_that_are_distributed_in_several_ways_are_joined(order: float) -> None:
    """As torch's `clip_grad_norm_` stacks them, where a mesh axis shards some parameters only."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2, 2))
        kinds = [[Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(0), Replicate()]]
        norms = [sharded(torch.ones(4, 4), mesh, kind, src_data_rank=None).norm(order) for kind in kinds]
        total = torch.stack(norms).norm(order).full_tensor()
        assert_same(total, torch.ones(12, 4).norm(order), 0, 1e-6, f"order {order}")

    run_ranks(4, body)


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[2]))
def test_a_replicated_operand_is_added_where_some_ranks_have_empty_shards(world_size: int) -> None:
    """As Muon does; and Adam, of a gradient that is the same in all places."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        for plain in values(1):
            own, other = (distributed([plain], kind)[0] for kind in (Shard(0), Replicate()))
            own.add_(other, alpha=2)
            assert_same(own.full_tensor(), 3 * plain, 1e-12, 1e-12, f"{tuple(plain.shape)}")
            own.lerp_(other, 0.5).addcmul_(other, other, value=-1)
            expected = 2 * plain - plain.square()
            assert_same(own.full_tensor(), expected, 1e-12, 1e-12, f"{tuple(plain.shape)}, averaged")

    run_ranks(world_size, body)


def test_items() -> None:
    """What all ranks hold is read, and what one does; parts of a number are refused; of a truth, taken together."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        (tensor,) = distributed([torch.tensor([1.0, 2.0, 3.0, float("nan")])], Shard(0))
        assert isinstance(tensor, DTensor)
        assert tensor.isnan().any()
        assert not (tensor > 5).any()
        assert not (tensor > 0).all()
        (numbers,) = distributed([torch.tensor([1.0, 2.0, 3.0, 0.0])], Shard(0))
        assert numbers.sum().full_tensor().item() == 6
        assert float(distributed([torch.tensor(2.0)], Replicate())[0]) == 2
        (one,) = distributed([torch.tensor([2.0])], Shard(0))
        assert one.square().item() == 4
        assert bool(one > 1)
        for number in (numbers.sum(), tensor.isnan().sum(), numbers.max(), numbers.norm()):
            with pytest.raises(RuntimeError, match=r"still to be reduced\. Call full_tensor\(\)\.item\(\)"):
                number.item()

    run_ranks(2, body)


COLLECTIVES: dict[str, Callable[[DTensor], object]] = {
    "broadcast": lambda own: dist.broadcast(own, 0),
    "allreduce": dist.all_reduce,
    "reduce": lambda own: dist.reduce(own, 0),
    "allgather": lambda own: dist.all_gather([torch.empty(6), torch.empty(6)], own),
    "allgather_base": lambda own: dist.all_gather_into_tensor(torch.empty(12), own),
    "reduce_scatter_base": lambda own: dist.reduce_scatter_tensor(torch.empty(3), own),
    "send": lambda own: dist.send(own, 1 - dist.get_rank()),
    "recv": lambda own: dist.recv(own, 1 - dist.get_rank()),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_collectives_are_refused() -> None:
    """On every rank, before anything is sent."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        (own,) = distributed([torch.arange(6.0)], Shard(0))
        for name, collective in COLLECTIVES.items():
            with pytest.raises(NotImplementedError, match=rf"{name} of a DTensor of .*shape \(6,\): .*full_tensor"):
                collective(own)
        dist.barrier()

    run_ranks(2, body)
