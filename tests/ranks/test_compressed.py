"""Tests training with gradients of one byte an element: errors are bounded, and alike where they must be alike.

The oracle is plain: every rank's gradients of the unsharded model. Each rank's error is at most a step for each
element, and a step is the largest gradient of a block divided by 127. (What codecs do in general is tested bit for bit
in test_wire_dtype.py.)
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from cut_gradients import small_pieces
from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, compare, describe, fully_shard
from fsdp2.compression import Compression, Int8, Rows, sum_decoded
from helpers import assert_same, full, run_checks, world_sizes

INT8, KEPT = Int8(), Int8(feedback=True)
F32, BF16 = torch.float32, torch.bfloat16


class Net(nn.Module):
    """Even and uneven rows, one row, and a lone large matrix in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 96, bias=False)
        self.left, self.right = nn.Linear(96, 24), nn.Linear(96, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 31))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.head(x))
        return torch.cat([self.left(x), self.right(x)], 1) * self.scale


def plain_model() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def shard(model: Net, codec: Any = INT8, **options: Any) -> Any:
    options.setdefault("mp_policy", MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec)))
    for module in (model.head, model):
        fully_shard(module, **options)
    return model


def gradients_of_ranks(model: nn.Module, ranks: int, number: int = 0) -> list[dict[str, Tensor]]:
    found = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model(batch(rank, number))).backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return found


def bound_of(gradients: list[dict[str, Tensor]], steps: float) -> float:
    """The largest error of a mean, if no rank's is more than so many of its largest steps."""
    largest = [max(float(each.abs().max()) for each in own.values()) for own in gradients]
    return steps * sum(largest) / 127 / len(gradients)


def assert_close(model: nn.Module, gradients: list[dict[str, Tensor]], steps: float = 1.0, passes: int = 1) -> None:
    """Asserts that `.grad` is the mean of the ranks', but for errors; and that there are some."""
    bound, differs = bound_of(gradients, steps) * passes, False
    for name, param in model.named_parameters():
        mean = sum(own[name] for own in gradients) / len(gradients)
        error = (full(param.grad) - mean * passes).abs().max()
        assert error <= bound * 1.001 + 1e-6, f"{name}: {error} > {bound}"
        differs |= bool(error > bound / 100)
    assert differs, "nothing was encoded"


# ---- gradients


def gradients_are_close(codec: Int8, cuts: Callable[[], AbstractContextManager[Any]], **options: Any) -> None:
    ranks = dist.get_world_size()
    with cuts():
        model = shard(plain_model(), codec, **options)
        loss_of(model(batch(dist.get_rank()))).backward()
    assert_close(model, gradients_of_ranks(plain_model(), ranks), 0.5 if codec.feedback else 1)


def a_reduction_in_less_bits() -> None:
    """Scales and sums in fp32, of gradients that are packed in bf16 and fp16."""
    for dtype in (BF16, torch.float16):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype, compression=Compression(reduce_scatter=INT8))
        model = shard(plain_model(), mp_policy=policy)
        loss_of(model(batch(dist.get_rank()))).backward()
        assert_close(model, gradients_of_ranks(plain_model(), dist.get_world_size()), 1.6)


def accumulated() -> None:
    """Unsynchronized gradients add up in the reduce dtype, and are encoded once."""
    ranks, model = dist.get_world_size(), shard(plain_model())
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        loss_of(model(batch(dist.get_rank(), number))).backward()
    parts = [gradients_of_ranks(plain_model(), ranks, number) for number in range(3)]
    whole = [{name: sum(part[rank][name] for part in parts) for name in parts[0][0]} for rank in range(ranks)]
    assert_close(model, whole)


def same_bits_in_each_run() -> None:
    """Also users' random numbers stay."""
    state, found = torch.get_rng_state(), []
    for _ in range(2):
        torch.set_rng_state(state)
        model = shard(copy.deepcopy(plain_model()))
        before = torch.get_rng_state()
        for number in range(2):
            loss_of(model(batch(dist.get_rank(), number))).backward()
        assert torch.equal(torch.get_rng_state(), before)
        found.append([full(param.grad) for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def each_step_rounds_otherwise() -> None:
    """Else the errors of steps would add up."""
    model, found = shard(plain_model()), []
    for _ in range(2):
        loss_of(model(batch(dist.get_rank()))).backward()
        found.append(full(model.head.weight.grad))
        model.zero_grad()
    assert not torch.equal(*found)


WAYS: dict[str, Callable[[], None]] = {
    "as it is": functools.partial(gradients_are_close, INT8, nullcontext),
    "in pieces": functools.partial(gradients_are_close, INT8, small_pieces),
    "feedback": functools.partial(gradients_are_close, KEPT, nullcontext),
    "feedback, in pieces": functools.partial(gradients_are_close, KEPT, small_pieces),
    "blocks of 8": functools.partial(gradients_are_close, Int8(8), nullcontext),
    "fewer bits": a_reduction_in_less_bits,
    "accumulated": accumulated,
    "reproducible": same_bits_in_each_run,
    "otherwise in each step": each_step_rounds_otherwise,
}


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3, 4)))
def test_errors_are_bounded(world_size: int) -> None:
    run_checks(world_size, [*WAYS.items()])


# ---- replicas


def replicas_are_alike(mesh: tuple[int, int], codec: Int8) -> None:
    """Bit for bit, after steps, too; and their gradients are means of all ranks' but for one error of each."""
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards"))
    model = shard(plain_model(), codec, mesh=device_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = plain_model()
    for number in range(3):
        for mine, param in zip(model.parameters(), reference.parameters(), strict=True):
            param.data.copy_(full(mine.detach()))
        loss_of(model(batch(dist.get_rank(), number))).backward()
        # With feedback an error of earlier steps is in it.
        steps = 1.0 if not codec.feedback else 0.5 + 0.5 * (number > 0) * 2
        assert_close(model, gradients_of_ranks(reference, mesh[0] * mesh[1], number), steps)
        for param in model.parameters():
            for tensor in (param.grad.to_local(), param.to_local()):
                parts = [torch.empty_like(tensor) for _ in range(mesh[0])]
                dist.all_gather(parts, tensor.detach().contiguous(), group=device_mesh.get_group("replicas"))
                assert all(torch.equal(part, parts[0]) for part in parts)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mesh", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_replicas_have_the_same_bits(mesh: tuple[int, int]) -> None:
    checks = {str(codec): functools.partial(replicas_are_alike, mesh, codec) for codec in (INT8, KEPT)}
    run_checks(mesh[0] * mesh[1], [*checks.items()])


# ---- the published faults of quantised ZeRO++


class Awkward(nn.Module):
    """Sizes that no block divides, one of them published (2305), and weights that are frozen."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.base, self.odd = nn.Linear(461, 5, bias=False, dtype=narrow), nn.Linear(5, 77, dtype=wide)
        self.frozen = nn.Linear(461, 5, bias=False, dtype=narrow)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.base(x.to(self.base.weight.dtype)) + self.frozen(x.to(self.frozen.weight.dtype))
        return self.odd(torch.tanh(narrow).to(self.odd.weight.dtype))


DTYPES = [(BF16, BF16), (torch.float16, torch.float16), (F32, F32), (torch.float64,) * 2, (BF16, F32), (F32, BF16)]
"""Of a base and of what is trained on it. Published: bf16 read as fp16 (DeepSpeed #7775, #8215); buffers and scales of
the first parameter's dtype for all (#8072, #8073, #8128); frozen weights that come back as fp32 (#4885)."""


def values_and_dtypes_stay(narrow: torch.dtype, wide: torch.dtype) -> None:
    """Of weights and of gradients, each in its own dtype: values within a step of its own scale."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    plain = Awkward(narrow, wide)
    plain.base.weight.data *= 1e3 if narrow != torch.float16 else 1.0  # as fp16, bits of bf16 are other numbers
    policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8(), all_gather=Int8()))
    model: Any = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    x = torch.randn(6, 461, generator=torch.Generator().manual_seed(rank)) / 1e3
    for name, expected in plain.named_parameters():
        weight, largest = full_weight(model, name), expected.double().abs().max()
        assert weight.dtype == expected.dtype, name
        step = largest / 127 + largest * torch.finfo(expected.dtype).eps
        assert (weight.double() - expected.double()).abs().max() <= step * 1.01, name
    given = []
    for other in range(ranks):
        rounded = copy.deepcopy(plain)
        for name, weight in rounded.named_parameters():
            weight.data.copy_(full_weight(model, name))
        data = torch.randn(6, 461, generator=torch.Generator().manual_seed(other)) / 1e3
        rounded(data).double().square().sum().backward()
        given.append({name: p.grad for name, p in rounded.named_parameters() if p.grad is not None})
    model(x).double().square().sum().backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm > 0, "a norm of 0 for ever (DeepSpeed #6926)"
    for name, param in model.named_parameters():
        if name == "frozen.weight":
            assert param.grad is None
            continue
        parts = [own[name] for own in given]
        # A block may be of several parameters of one dtype.
        largest = [max(float(p.abs().max()) for p in own.values() if p.dtype == param.dtype) for own in given]
        bound = sum(largest) / ranks * (1 / 127 + 4 * torch.finfo(param.dtype).eps)
        assert param.grad.dtype == param.dtype
        mean = sum(part.double() for part in parts) / ranks
        assert (full(param.grad).double() - mean).abs().max() <= bound * 1.01 + 1e-12, name


def full_weight(model: Any, name: str) -> Tensor:
    """Returns a weight as modules compute with it."""
    model.unshard()
    weight = model.get_parameter(name).detach().clone()
    model.reshard()
    return weight


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(300, 1), nn.Linear(1, 1), nn.Linear(17, 19)
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self, rank: int) -> Tensor:
        small = self.b(self.a(torch.ones(1, 300) * (1 + rank))).sum() * self.factor
        return small + self.c(torch.ones(2, 17) * (1 + rank)).square().sum()


def one_and_few_elements() -> None:
    """Fewer elements than ranks, vectors of two dims and scalars, beside encoded ones (#3864, #5054: sizes had to be
    even).
    """
    torch.manual_seed(1)
    plain, ranks = Few(), dist.get_world_size()
    model: Any = fully_shard(
        copy.deepcopy(plain), mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8()))
    )
    model(dist.get_rank()).backward()
    for rank in range(ranks):
        (plain(rank) / ranks).backward()
    for name, param in model.named_parameters():
        grad, expected = full(param.grad), plain.get_parameter(name).grad
        if name == "c.weight":
            assert 0 < (grad - expected).norm() < 0.05 * expected.norm()
        else:
            assert_same(grad, expected, 1e-6, 0, name)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3, 4)))
def test_published_faults(world_size: int) -> None:
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{narrow}, {wide}", functools.partial(values_and_dtypes_stay, narrow, wide)) for narrow, wide in DTYPES
    ]
    run_checks(world_size, [*checks, ("one and few elements", one_and_few_elements)])


# ---- training


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Rounds to the nearest step, and forgets what it has rounded."""

    exchanges: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return KEPT.sent_nbytes(numel, summed)

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        return KEPT.encode(numbers, seed)

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        KEPT.decode(wire, numbers)

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_decoded(self, rows, total)


def distance_after_training(codec: Any, steps: int = 200) -> float:
    """A regression of which one weight of each block has large gradients that add up to nothing, and all others small
    ones. Returns how far the others are from their targets, which plain training reaches.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(32 * ranks, 8, bias=False)
    nn.init.zeros_(model.weight)
    targets = torch.linspace(-1, 1, 32 * ranks)[:, None].expand(-1, 8)
    noise = torch.zeros(32 * ranks, 8)
    noise[::32] = 300.0
    if codec is not None:
        policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec))
        fully_shard(model, mp_policy=policy, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    eye = torch.eye(32 * ranks)
    for step in range(steps):
        weights = model(eye)  # every rank has the whole loss, and noise of its own sign
        sign = 1 if (step + rank) % 2 else -1
        (0.5 * (weights - targets).square().sum() + sign * (noise * weights).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    others = torch.arange(32 * ranks) % 32 != 0
    return float((full(model.weight.detach()).t() - targets)[others].abs().max())


def feedback_reaches_what_plain_training_reaches() -> None:
    plain, kept, forgotten = (distance_after_training(codec) for codec in (None, KEPT, Nearest()))
    assert plain < 0.01
    assert kept < 0.15, "a step of 300 / 127 at the learning rate of 0.03 is 0.07"
    assert forgotten > 0.9, "otherwise feedback is not needed here"


def trained(codec: Any, in_backward: bool) -> list[Tensor]:
    model = plain_model()
    shard(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if in_backward:
        model.set_optimizer_in_backward(optimizer)  # type: ignore[operator]
    for number in range(3):
        loss_of(model(batch(dist.get_rank(), number))).backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return [full(param.detach()) for param in model.parameters()]


def optimizers_in_backward_see_the_same() -> None:
    for codec in (INT8, KEPT):
        for one, other in zip(trained(codec, False), trained(codec, True), strict=True):
            assert torch.equal(one, other)


def overflows_are_skipped() -> None:
    """On all ranks, of a loss that overflows on one; what was not sent then is no part of later gradients."""
    for codec in (INT8, KEPT):
        model = shard(plain_model(), codec)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", init_scale=2.0**10)
        for number in range(4):
            before = [full(param.detach()).clone() for param in model.parameters()]
            factor = torch.inf if number == 1 and dist.get_rank() == dist.get_world_size() - 1 else 1.0
            scaler.scale(loss_of(model(batch(dist.get_rank(), number))) * factor).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = [not torch.equal(full(p.detach()), old) for p, old in zip(model.parameters(), before, strict=True)]
            assert any(moved) == (number != 1), number
            assert all(full(param.detach()).isfinite().all() for param in model.parameters())


class OneOf(nn.Module):
    """Ranks run different branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 24, bias=False) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def conditional_modules_send_zeros() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    plain = OneOf()
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=KEPT))
    for branch in model.branches:
        fully_shard(branch, conditional=True, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # With feedback, what three passes have sent differs from the sum of their gradients by half a step of the last.
    total = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
    largest = 0.0
    for number in range(3):
        loss_of(model(batch(rank, number), (rank + number) % 2)).backward()
        for other in range(ranks):
            plain.zero_grad()
            loss_of(plain(batch(other, number), (other + number) % 2)).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    total[name] += param.grad / ranks
                    largest = max(largest, float(param.grad.abs().max()))
    for name, param in model.named_parameters():
        error = (full(param.grad) - total[name]).abs().max()
        assert 0 < error <= largest / 127, f"{name}: {error}"


def what_describe_says() -> None:
    description = describe(shard(plain_model()))
    assert "reduce_scatter by Int8(block=128, feedback=False)" in str(description)
    reduced = {each.name: each.reduced_nbytes for each in description.groups}
    assert reduced["head"] == INT8.sent_nbytes(96 * 12, F32) == 1200, (
        "1152 bytes, 9 scales, 12 bytes to a multiple of 16"
    )


def compared_with_a_reference() -> None:
    """What is rounded is no difference."""
    model, rows = shard(plain_model()), torch.cat([batch(rank) for rank in range(dist.get_world_size())])
    assert not compare(plain_model(), model, rows, lambda module, x: loss_of(module(x))).differences


def a_failed_pass_drops_what_was_not_sent() -> None:
    """The next pass is as the first of a new model but for random numbers: feedback rounds to the nearest."""
    model, fresh = shard(plain_model(), KEPT), shard(plain_model(), KEPT)
    loss_of(model(batch(dist.get_rank(), 1))).backward()
    model.zero_grad()

    def fail(_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.head.register_forward_hook(lambda *args: args[2].register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(batch(dist.get_rank(), 2))).backward()
    handle.remove()
    for each in (model, fresh):
        loss_of(each(batch(dist.get_rank(), 3))).backward()
    for (name, param), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert_same(full(param.grad), full(other.grad), 0, 0, name)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_training(world_size: int) -> None:
    checks: list[Callable[[], None]] = [
        optimizers_in_backward_see_the_same,
        overflows_are_skipped,
        conditional_modules_send_zeros,
        what_describe_says,
        compared_with_a_reference,
        a_failed_pass_drops_what_was_not_sent,
    ]
    checks += [feedback_reaches_what_plain_training_reaches] if world_size == 2 else []
    run_checks(world_size, [(check.__name__, check) for check in checks], timeout=60)
