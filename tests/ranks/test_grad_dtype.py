"""Tests `parameter.grad_dtype` and `MixedPrecisionPolicy(grad_dtype=)`: fp32 gradients of bf16 weights, for example.

The oracle is a plain model with the same weights and the same `grad_dtype`, which runs the batches of all ranks one by
one and sums their gradients in that dtype.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, full_params, fully_shard
from fsdp2.compression import Compression
from helpers import run_checks, world_sizes

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
TELLS_CHOICES = hasattr(torch.empty(0), "_has_grad_dtype_override")  # since torch 2.15


class WideGradient(torch.autograd.Function):
    """A linear layer of bf16 numbers whose gradient of the weight is computed in fp32, as fused kernels do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.float().T @ x.float()


class Wide(nn.Module):
    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return WideGradient.apply(x, self.weight)


class Net(nn.Module):
    """Uneven rows on 2 and 3 ranks; one layer runs twice, so that autograd sums two gradients of one weight."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(6, 7), Wide(7, 7), nn.Linear(7, 5)
        self.unused = nn.Parameter(torch.ones(3))
        self.to(dtype)
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(torch.tanh(self.twice(self.first(x))))
        if self.checkpoints:
            return checkpoint(self.last, y, use_reentrant=False)  # type: ignore[no-any-return]
        return self.last(y)  # type: ignore[no-any-return]


def choose(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad_dtype = dtype  # type: ignore[attr-defined]
    return model


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank)).to(BF16)


def shard(model: nn.Module, **options: Any) -> Any:
    fully_shard(model.twice, **options)
    return fully_shard(model, **options)


def backward_on_all(plain: nn.Module, *numbers: int) -> None:
    """Gives `plain` the mean over ranks of the gradients of their batches, which it sums in `grad_dtype`."""
    for number in numbers or (0,):
        for rank in range(dist.get_world_size()):
            plain(batch(rank, number)).float().square().sum().backward()
    for parameter in plain.parameters():
        if parameter.grad is not None:  # not of the loss: bf16 rounds thirds
            parameter.grad /= dist.get_world_size()


def own_backward(model: Any, number: int = 0) -> None:
    model(batch(dist.get_rank(), number)).float().square().sum().backward()


def close(value: Tensor, expected: Tensor) -> None:
    assert value.dtype == expected.dtype == F32, (value.dtype, expected.dtype)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, sharded), own in zip(model.named_parameters(), plain.parameters(), strict=True):
        if own.grad is None:
            assert sharded.grad is None, name
            continue
        assert sharded.grad.dtype == sharded.grad.to_local().dtype == F32, name
        assert sharded.grad.placements == sharded.placements
        close(sharded.grad.full_tensor(), own.grad)
    wide: Any = plain.get_parameter("twice.weight").grad
    assert not torch.equal(wide, wide.to(BF16).to(wide))  # or rounding would not show


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    for sharded, own in zip(model.parameters(), plain.parameters(), strict=True):
        assert sharded.dtype == own.dtype
        assert torch.equal(sharded.full_tensor(), own)


def train(model: Any, plain: nn.Module, optimizer: Any = torch.optim.SGD) -> None:
    """Trains both for two steps of two batches. Weights of bf16 are compared bit by bit: their steps are rounded."""
    both = [optimizer(each.parameters(), lr=0.05) for each in (model, plain)]
    for step in range(2):
        for micro in range(2):
            own_backward(model, 2 * step + micro)
        backward_on_all(plain, 2 * step, 2 * step + 1)
        same_gradients(model, plain)
        for each in both:
            each.step()
            each.zero_grad()
    same_weights(model, plain)


# ---- who chooses the dtype


def of_a_parameter() -> None:
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    assert all(parameter.grad_dtype == F32 for parameter in model.parameters())
    train(model, plain)


def of_a_policy() -> None:
    model = shard(Net(), mp_policy=MixedPrecisionPolicy(grad_dtype=F32))
    train(model, choose(Net(), F32))


def of_fp32_weights_that_compute_in_bf16() -> None:
    """The fp32 gradient of a weight that computes in bf16 reaches `.grad` with all its bits."""
    model = shard(Net(F32), mp_policy=MixedPrecisionPolicy(BF16, grad_dtype=F32))
    rounded = shard(Net(F32), mp_policy=MixedPrecisionPolicy(BF16))
    plain = choose(Net(F32).to(BF16), F32)
    own_backward(model)
    own_backward(rounded)
    backward_on_all(plain)
    same_gradients(model, plain)
    assert not torch.equal(rounded.twice.weight.grad.full_tensor(), model.twice.weight.grad.full_tensor())


def of_fp32_weights_that_chose_it_themselves() -> None:
    if TELLS_CHOICES:
        model = shard(choose(Net(F32), F32), mp_policy=MixedPrecisionPolicy(BF16))
        plain = choose(Net(F32).to(BF16), F32)
        own_backward(model)
        backward_on_all(plain)
        same_gradients(model, plain)


def narrower_than_the_weight() -> None:
    model, plain = choose(Net(F32), BF16), choose(Net(F32), BF16)
    shard(model)
    for each in (model, plain):
        each.to(F32)
    own = [each(torch.ones(2, 6)).sum() for each in (model, plain)]
    for loss in own:
        loss.backward()
    for sharded, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert other.grad is None or sharded.grad.dtype == other.grad.dtype == BF16
        if other.grad is not None:  # thirds are rounded
            torch.testing.assert_close(sharded.grad.full_tensor(), other.grad, rtol=1e-2, atol=0)


def the_parameter_counts_not_the_policy() -> None:
    model = Net()
    model.last.weight.grad_dtype = F64  # type: ignore[assignment]
    shard(model, mp_policy=MixedPrecisionPolicy(grad_dtype=F32))
    own_backward(model)
    assert [model.last.weight.grad.dtype, model.last.bias.grad.dtype] == [F64, F32]


def any_dtype() -> None:
    """`grad_dtype` None takes gradients as they come, and `.grad` has the dtype of the reduction."""
    model, plain = choose(Net(), None), choose(Net(), F32)
    shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=F32))
    own_backward(model)
    backward_on_all(plain)
    close(model.twice.weight.grad.full_tensor(), plain.twice.weight.grad)
    assert model.last.weight.grad.dtype == F32
    model = shard(choose(Net(), None))
    with pytest.raises(RuntimeError, match=r"twice\.weight: its grad_dtype is None.*torch\.float32.*reduce_dtype"):
        own_backward(model)


def set_after_sharding() -> None:
    model = shard(Net())
    own_backward(model)
    assert model.last.weight.grad.dtype == BF16
    with pytest.raises(RuntimeError, match="grad_dtype"):  # torch's own words: there is a gradient
        model.last.weight.grad_dtype = F32
    model.zero_grad()
    choose(model, F32)
    train(model, choose(Net(), F32))
    loss = model(batch(0)).sum()
    model.set_requires_gradient_sync(False)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"last\.weight: its grad_dtype can't be set while gradients .*between"):
        model.last.weight.grad_dtype = BF16


# ---- what uses gradients


def across_reductions() -> None:
    """Gradients of some batches are not synchronised: they are summed in the same dtype."""
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        own_backward(model, number)
    backward_on_all(plain, 0, 1, 2)
    same_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()
    with fsdp2.accumulate(model) as block:
        for number in range(2):
            block.backward(model(batch(dist.get_rank(), number)).float().square().sum(), weight=2)
    backward_on_all(plain, 0, 1)
    for parameter in plain.parameters():
        if parameter.grad is not None:
            parameter.grad /= 4
    same_gradients(model, plain)


def in_other_reduce_dtypes() -> None:
    """The reduction rounds, `.grad` has the chosen dtype all the same."""
    for policy in (
        MixedPrecisionPolicy(reduce_dtype=BF16),
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=BF16)),
        MixedPrecisionPolicy(reduce_dtype=F64),
    ):
        model, plain = choose(Net(), F32), choose(Net(), F32)
        shard(model, mp_policy=policy)
        own_backward(model)
        backward_on_all(plain)
        for sharded, own in zip(model.parameters(), plain.parameters(), strict=True):
            if own.grad is not None:
                assert sharded.grad.dtype == F32
                torch.testing.assert_close(sharded.grad.full_tensor(), own.grad, rtol=2e-2, atol=2e-2)


def of_unused_parameters() -> None:
    model = choose(Net(), F32)
    shard(model)
    model.set_reduce_scatter_unused_params(True)
    own_backward(model)
    assert model.unused.grad.dtype == F32
    assert not model.unused.grad.full_tensor().any()


def offloaded() -> None:
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model, offload_policy=CPUOffloadPolicy())
    train(model, plain)


def with_checkpointing_and_kept_parameters() -> None:
    model, plain = choose(Net(), F32), choose(Net(), F32)
    model.checkpoints = True
    shard(model, reshard_after_forward=False)
    train(model, plain)


def stepped_in_backward() -> None:
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.05))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for number in range(2):
        own_backward(model, number)
        backward_on_all(plain, number)
        optimizer.step()
        optimizer.zero_grad()
    same_weights(model, plain)


def clipped() -> None:
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    own_backward(model)
    backward_on_all(plain)
    norms = [clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)]
    torch.testing.assert_close(norms[0], norms[1].float())
    same_gradients(model, plain)


def stepped_flat() -> None:
    """A flat step takes gradients of other dtypes than the weights one by one, as the optimizer does."""
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    train(model, plain, lambda params, lr: _flat(torch.optim.SGD(params, lr, momentum=0.9)))
    model, plain = Net(F32), choose(Net(F32).to(BF16), F32)
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, grad_dtype=F32))
    optimizer = fsdp2.flatten_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    own_backward(model)
    backward_on_all(plain)
    same_gradients(model, plain)
    optimizer.step()
    master = Net(F32)
    for own, other in zip(master.parameters(), plain.parameters(), strict=True):
        own.grad = other.grad
    torch.optim.AdamW(master.parameters(), lr=0.05).step()
    for sharded, own in zip(model.parameters(), master.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), own, rtol=1e-4, atol=1e-5)


def _flat(optimizer: Any) -> Any:
    is_sharded = hasattr(optimizer.param_groups[0]["params"][0], "to_local")
    return fsdp2.flatten_optimizer(optimizer) if is_sharded else optimizer


def stepped_by_muon() -> None:
    """Momentum is kept in the dtype of the gradients."""
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    own = fsdp2.muon([model.first.weight, model.twice.weight], lr=0.1)
    other = torch.optim.Muon([plain.first.weight, plain.twice.weight], lr=0.1)
    own_backward(model)
    backward_on_all(plain)
    for optimizer in (own, other):
        optimizer.step()
    buffers = [own.state[model.twice.weight], other.state[plain.twice.weight]]
    close(buffers[0]["momentum_buffer"].full_tensor(), buffers[1]["momentum_buffer"])
    for name in ("first.weight", "twice.weight"):  # torch's kernels may round the last bit otherwise
        values = model.get_parameter(name).full_tensor(), plain.get_parameter(name)  # type: ignore[attr-defined]
        torch.testing.assert_close(*values, rtol=1e-2, atol=1e-3)
    model.zero_grad()
    model.first.weight.grad_dtype = None
    with pytest.raises(NotImplementedError, match=r"grad_dtype is None.*before fully_shard"):
        fsdp2.muon([model.first.weight], lr=0.1).step()


def outside_of_a_forward() -> None:
    """Gradients that come to sharded parameters by other ways than a forward have the dtype, too."""
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    model.last.weight.full_tensor().float().square().sum().backward()
    plain.last.weight.float().square().sum().backward()
    # The gradient of what full_tensor returns has that dtype, as that of any tensor on the way; its mean is rounded.
    assert model.last.weight.grad.dtype == F32
    torch.testing.assert_close(model.last.weight.grad.full_tensor(), plain.last.weight.grad, rtol=1e-2, atol=0)
    with full_params(model):
        assert model.last.weight.grad_dtype == F32


# ---- parameters that change


def cast_and_moved() -> None:
    """The dtype of gradients stays, and so do gradients, whatever dtype the weights get."""
    model = choose(Net(), F32)
    shard(model)
    own_backward(model)
    before = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}
    for change in (lambda: model.to(F64), lambda: model.to("cpu"), lambda: model.to(BF16)):
        change()
        for name, parameter in model.named_parameters():
            assert parameter.grad_dtype == F32, name
            assert name not in before or torch.equal(parameter.grad.full_tensor(), before[name])

    def fails(tensor: Tensor) -> Tensor:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        model._apply(fails)
    assert torch.equal(model.last.weight.grad.full_tensor(), before["last.weight"])
    own_backward(model)
    close(model.last.weight.grad.full_tensor(), 2 * before["last.weight"])


def made_on_meta_and_loaded() -> None:
    with torch.device("meta"):
        model = choose(Net(), F32)
    shard(model)
    model.to_empty(device="cpu")
    whole = shard(Net())
    model.load_state_dict(whole.state_dict())
    model.load_state_dict(whole.state_dict(), assign=True)
    assert all(parameter.grad_dtype == F32 for parameter in model.parameters())
    train(model, choose(Net(), F32))


def copied_and_saved() -> None:
    """Checkpoints hold weights and states: nothing of them depends on the dtype of gradients."""
    model, plain = choose(Net(), F32), choose(Net(), F32)
    shard(model)
    own_backward(model)
    backward_on_all(plain)
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    assert copy.deepcopy(model.last.weight).grad_dtype == F32
    for each in (twin, again):
        own_backward(each)
        same_gradients(each, plain)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (model, shard(Net()))]
    optimizers[0].step()
    states = get_optimizer_state_dict(model, optimizers[0])["state"]
    assert states["last.weight"]["momentum_buffer"].dtype == F32  # as the optimizer has made it of the gradient
    kept = get_model_state_dict(model)
    assert {value.dtype for value in kept.values()} == {BF16}


def ranks_that_choose_differently() -> None:
    if dist.get_world_size() > 1:
        model = choose(Net(), F32 if dist.get_rank() else F64)
        shard(model)
        with pytest.raises(RuntimeError, match="gradients of the dtype"):
            own_backward(model)


def on_replicas() -> None:
    if dist.get_world_size() == 2:
        for shape in ((2, 1), (1, 2)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            model, plain = choose(Net(), F32), choose(Net(), F32)
            shard(model, mesh=mesh)
            model.set_requires_all_reduce(False)
            own_backward(model, 5)
            model.set_requires_all_reduce(True)
            own_backward(model, 6)
            backward_on_all(plain, 5, 6)
            same_gradients(model, plain)


def what_the_module_sees() -> None:
    """A fused kernel reads from the weight in which dtype it is to compute the gradient."""
    seen: list[Any] = []
    model = choose(Net(), F32)
    model.twice.register_forward_hook(lambda module, *_: seen.append((module.weight.dtype, module.weight.grad_dtype)))
    shard(model)
    own_backward(model)
    assert seen == [(BF16, F32)] * 2
    assert isinstance(model, FSDPModule)


CHECKS: tuple[Callable[[], None], ...] = (
    *(of_a_parameter, of_a_policy, of_fp32_weights_that_compute_in_bf16, of_fp32_weights_that_chose_it_themselves),
    *(narrower_than_the_weight, the_parameter_counts_not_the_policy, any_dtype, set_after_sharding),
    *(across_reductions, in_other_reduce_dtypes, of_unused_parameters, offloaded),
    *(with_checkpointing_and_kept_parameters, stepped_in_backward, clipped, stepped_flat, stepped_by_muon),
    outside_of_a_forward,
    *(cast_and_moved, made_on_meta_and_loaded, copied_and_saved, ranks_that_choose_differently, on_replicas),
    what_the_module_sees,
)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_grad_dtype(world_size: int) -> None:
    run_checks(world_size, [(each.__name__, each) for each in CHECKS])
