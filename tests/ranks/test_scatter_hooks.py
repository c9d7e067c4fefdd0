"""Tests hooks in the shape of FSDP1's, `hook(state, gradient, shard)`, by which ranks that shard reduce.

The oracle is a plain model: all ranks' gradients in one process, and the mathematics of the hook by hand. (That such
hooks fit in with all else that a step may do is drawn in test_training.py.)
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as of_ddp
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, describe, fully_shard, replicate
from fsdp2.compression import Compression, Int8
from fsdp2.engine.state import groups_below
from helpers import assert_same, full, run_checks, world_sizes
from own_collectives import Scatter


class Net(nn.Module):
    """Matrices whose rows do not divide, and a vector."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(9, 13), nn.Linear(13, 5, bias=False)
        self.branch = nn.Linear(13, 13) if branch else None

    def forward(self, x: Tensor, uses_branch: bool = False) -> Tensor:
        x = torch.tanh(self.one(x))
        if uses_branch and self.branch is not None:
            x = x + self.branch(x)
        return self.two(x)


def plain(branch: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(branch).double()


def sharded(**options: Any) -> Any:
    model = plain()
    fully_shard(model.one, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank)).double()


def own(step: int = 0) -> Tensor:
    return batch(dist.get_rank(), step)


def gradients_of_ranks(step: int = 0) -> list[dict[str, Tensor]]:
    model, found = plain(), []
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return found


def backward(model: Any, step: int = 0) -> None:
    model(own(step)).square().mean().backward()


def assert_gradients(model: Any, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, param in model.named_parameters():
        assert_same(param.grad, expected[name], tolerance, tolerance, name)


def mean(step: int = 0) -> dict[str, Tensor]:
    found = gradients_of_ranks(step)
    return {name: sum(each[name] for each in found) / len(found) for name in found[0]}  # type: ignore[misc]


class Own:
    """A hook with a state, which looks at what it gets, and rounds nothing."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, state: dist.ProcessGroup, gradient: Tensor, shard: Tensor) -> None:
        assert gradient.dim() == shard.dim() == 1
        assert gradient.numel() == shard.numel() * state.size()
        self.sizes.append((gradient.numel(), shard.numel()))
        gradient.div_(state.size())
        rows = torch.empty_like(gradient)
        dist.all_to_all_single(rows, gradient, group=state)
        shard.copy_(rows.view(state.size(), -1).sum(0))


# ---- torch's own hooks


def reduces_as_without() -> None:
    model = sharded()
    model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    backward(model)
    assert_gradients(model, mean())


def in_low_precision() -> None:
    """They cast, divide by a part of the number of ranks, sum, divide by the rest, and cast back."""
    ranks = dist.get_world_size()
    for hook, dtype in ((bf16_compress_hook, torch.bfloat16), (fp16_compress_hook, torch.float16)):
        state = LowPrecisionState(dist.group.WORLD, torch.float64)
        first, rest = state.gradient_predivide_factor, state.gradient_postdivide_factor
        assert first * rest == ranks
        expected = {}
        for name in (found := gradients_of_ranks())[0]:
            total = sum(each[name].to(dtype) / first for each in found)
            expected[name] = (total / rest).double()  # type: ignore[operator]
        for shard, exact in ((sharded, ranks == 2), (lambda: replicate(plain()), ranks == 2)):
            model: Any = shard()
            model.register_comm_hook(state, hook)
            backward(model)
            assert_gradients(model, expected, 0 if exact else float(torch.finfo(dtype).eps))
            for param in model.parameters():
                assert param.grad.dtype == torch.float64


def of_torch() -> None:
    reduces_as_without()
    model = replicate(plain())
    model.register_comm_hook(DefaultState(dist.group.WORLD), allreduce_hook)
    backward(model)
    assert_gradients(model, mean())
    with pytest.raises(NotImplementedError, match=r"bf16_compress_hook for FSDP1 calls Tensor.record_stream"):
        sharded().register_comm_hook(LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    with pytest.MonkeyPatch.context() as patch:  # as on a device
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        in_low_precision()


# ---- hooks of a user's


def steps_with_a_hook() -> None:
    """Two optimizer steps, accumulation, weights of `accumulate`, another divisor; and without it again."""
    model, expected, hook = sharded(), plain(), Own()
    model.register_comm_hook(dist.group.WORLD, hook)
    assert "comm_hook=" in str(describe(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    for step in range(2):
        backward(model, step)
        for rank in range(dist.get_world_size()):
            (expected(batch(rank, step)).square().mean() / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_same(param, other, 1e-12, 1e-12, name)
    assert len(hook.sizes) == 4, "each group once in each step"
    count, ranks = len(hook.sizes), dist.get_world_size()
    with model.no_sync():
        backward(model, 0)
    assert len(hook.sizes) == count
    model.set_gradient_divide_factor(1.0, recurse=True)
    backward(model, 0)
    twice = {name: 2 * ranks * found for name, found in mean_of(model).items()}
    assert_gradients(model, twice)
    model.set_gradient_divide_factor(float(ranks), recurse=True)
    model.zero_grad()
    with fsdp2.accumulate(model) as acc:
        for step in range(2):
            acc.backward(model(own(step)).square().mean(), weight=1.0)
    both = [mean_of(model, step) for step in range(2)]
    assert_gradients(model, {name: (both[0][name] + both[1][name]) / 2 for name in both[0]})
    model.zero_grad()
    model.register_comm_hook(None, None)
    count = len(hook.sizes)
    backward(model, 0)
    assert_gradients(model, mean_of(model))
    assert len(hook.sizes) == count


def mean_of(model: Any, step: int = 0) -> dict[str, Tensor]:
    """Returns the mean gradients of the weights that `model` has."""
    other = plain()
    other.load_state_dict({name: full(param) for name, param in model.named_parameters()})
    for rank in range(dist.get_world_size()):
        (other(batch(rank, step)).square().mean() / dist.get_world_size()).backward()
    return {name: param.grad.clone() for name, param in other.named_parameters()}


def padding_is_zeros() -> None:
    seen: list[Tensor] = []

    def remember(state: Any, gradient: Tensor, shard: Tensor) -> None:
        seen.append(gradient.clone())
        Own()(state, gradient, shard)

    model = sharded()
    model.register_comm_hook(dist.group.WORLD, remember)
    for filled in (torch.full((4096,), float("nan")) for _ in range(50)):  # so that fresh memory has NaN
        del filled
    backward(model)
    (gradients, own_rank) = gradients_of_ranks(), dist.get_rank()
    values = torch.cat([each.flatten() for each in gradients[own_rank].values()])
    bag = torch.cat(seen)
    assert len(bag) > len(values), "there is padding"
    assert bag.count_nonzero() == values.count_nonzero()
    torch.testing.assert_close(bag.abs().sum(), values.abs().sum())


def some_ranks_leave_a_module_out() -> None:
    """Its collectives are of a reduction on which ranks have agreed, and no collectives of the program's."""
    model, expected = plain(branch=True), plain(branch=True)
    fully_shard(model.branch, conditional=True)
    fully_shard(model)
    model.register_comm_hook(dist.group.WORLD, Own())
    ranks = range(dist.get_world_size())
    for uses in ([True, *[False] * (len(ranks) - 1)], [False] * len(ranks), [True] * len(ranks)):
        model(own(), uses[dist.get_rank()]).square().mean().backward()
        for rank in ranks:
            (expected(batch(rank), uses[rank]).square().mean() / len(ranks)).backward()
        for (name, param), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            if other[1].grad is not None:
                assert_same(param.grad, other[1].grad, 1e-12, 1e-12, name)
        model.zero_grad()
        expected.zero_grad()


def copies_have_it() -> None:
    """Also with a process group, which can't be copied, in the state."""
    for state, hook in ((dist.group.WORLD, Own()), (DefaultState(dist.group.WORLD), reduce_scatter_hook)):
        model = sharded()
        model.register_comm_hook(state, hook)
        copied = copy.deepcopy(model)
        backward(copied)
        assert_gradients(copied, mean())
        copies = [group.settings.comm_hook for group in groups_below(copied)]
        assert copies[0] is copies[1] is not groups_below(model)[0].settings.comm_hook
        if isinstance(hook, Own):
            assert len(copies[0].hook.sizes) == 2
            assert not hook.sizes


def means_are_divided_otherwise() -> None:
    """Sums, and means over weights, of hooks in either shape: these return means."""
    ranks = dist.get_world_size()
    hooks = (
        (sharded, DefaultState(dist.group.WORLD), reduce_scatter_hook),
        (lambda: replicate(plain()), None, of_ddp.allreduce_hook),
    )
    for make, state, hook in hooks:
        model: Any = make()
        model.register_comm_hook(state, hook)
        model.set_gradient_divide_factor(1.0, recurse=True)
        backward(model)
        assert_gradients(model, {name: found * ranks for name, found in mean().items()})
        model.set_gradient_divide_factor(float(ranks), recurse=True)
        model.zero_grad()
        with fsdp2.accumulate(model) as acc:
            acc.backward(model(own()).square().mean(), weight=2.0)
        assert_gradients(model, {name: found / 2 for name, found in mean().items()})


def refused() -> None:
    def silent(state: Any, gradient: Tensor, shard: Tensor) -> Any:
        return torch.futures.Future()

    def two(state: Any, bucket: Any) -> Any:
        return None

    ranks, world = dist.get_world_size(), dist.group.WORLD
    with pytest.raises(NotImplementedError, match=r"without replicas: .*as bf16_compress_hook\(.*shape of FSDP1's"):
        sharded().register_comm_hook(None, of_ddp.bf16_compress_hook)
    with pytest.raises(NotImplementedError, match=r"between replicas: .*hook\(state, bucket\).*got silent\(state"):
        replicate(plain()).register_comm_hook(None, silent)
    for codec in (torch.bfloat16, Int8()):
        policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec))
        with pytest.raises(ValueError, match=r"no compression of reduce_scatter where a hook reduces.*leave one out"):
            sharded(mp_policy=policy).register_comm_hook(world, Own())
    model = sharded()
    model.set_custom_reduce_scatter(Scatter(is_async=False))
    with pytest.raises(ValueError, match="expected no custom reduce-scatter"):
        model.register_comm_hook(world, Own())
    model = sharded()
    model.register_comm_hook(world, Own())
    with pytest.raises(ValueError, match="expected None where register_comm_hook has a hook reduce"):
        model.set_custom_reduce_scatter(Scatter(is_async=False))
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("inner", "outer"))
    with pytest.raises(ValueError, match=r"process group of the shards, ranks \[.*got one of ranks.*axis that shards"):
        sharded().register_comm_hook(DefaultState(mesh.get_group("outer")), reduce_scatter_hook)
    model = sharded()
    model.register_comm_hook(world, silent)
    with pytest.raises(TypeError, match=r"silent: expected hook.state, gradient, shard. to fill shard .* got Future"):
        backward(model)
    model = sharded()
    model.register_comm_hook(world, lambda state, gradient, shard: setattr(shard, "data", gradient))
    with pytest.raises(TypeError, match=r"expected a shard of .* elements, got"):
        backward(model)


def not_called() -> None:
    """With one replica of shards the hook is for replicas, of which there is one."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("replicas", "shards"))
    calls: list[Any] = []
    model = sharded(mesh=mesh)
    model.register_comm_hook(None, lambda state, bucket: calls.append(bucket))
    backward(model)
    assert_gradients(model, mean())
    assert not calls


@pytest.mark.parametrize("ranks", world_sizes(2, 3))
def test_hooks_in_the_shape_of_fsdp1s(ranks: int) -> None:
    programs = [of_torch, steps_with_a_hook, padding_is_zeros, some_ranks_leave_a_module_out]
    programs += [copies_have_it, means_are_divided_otherwise, refused, not_called]
    run_checks(ranks, [(program.__name__, program) for program in programs])


def test_one_rank_calls_no_hook() -> None:
    def check() -> None:
        model, hook = sharded(), Own()
        model.register_comm_hook(dist.group.WORLD, hook)
        backward(model)
        assert_gradients(model, mean())
        assert not hook.sizes

    run_checks(1, [("one", check)])
