"""Follows the advice about what a forward writes into its inputs, where a policy has them cast."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from advised.registry import ELSEWHERE, batch, build, follows, own, refused, same, same_gradients
from fsdp2 import MixedPrecisionPolicy, fully_shard

CASTS = MixedPrecisionPolicy(param_dtype=torch.float32)
LEAVES = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
ELSEWHERE["Pass both on that device"] = "tests/fake_gpu/test_ways.py::writes_to_what_shares_memory"


class Writer(nn.Module):
    """Runs a layer, and `write`: (output of the layer, states) -> what is returned. Inputs may be float64."""

    def __init__(self, write: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(5, 5), write

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        return self.write(self.layer(x.to(self.layer.weight.dtype)), *states)


def compare(write: Callable[..., Tensor], policy: MixedPrecisionPolicy, make: Callable[[], list[Tensor]]) -> None:
    """Trains a sharded and a plain module in float64 states of their own, and compares all that they have changed."""
    model, plain = fully_shard(build(lambda: Writer(write)), mp_policy=policy), build(lambda: Writer(write))
    mine, theirs = make(), make()
    for step in range(2):
        for each, x, states in ((model, own(batch(step)), mine), (plain, batch(step), theirs)):
            rows = [own(state) if each is model and len(state) == len(batch()) else state for state in states]
            each(x.double(), *rows).square().mean().backward()
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        same(own(one.detach()), own(other.detach()), f"state {number}")
        assert (one.grad is None) == (other.grad is None)
    same_gradients(model, plain)


def doubled(y: Tensor, state: Tensor) -> Tensor:
    return y * state.mul_(2).to(y.dtype)


def doubled_clone(y: Tensor, state: Tensor) -> Tensor:
    return y * state.clone().mul_(2).to(y.dtype)


def ones() -> Tensor:
    return torch.full((4, 5), 0.5, dtype=torch.float64)


@follows("Write into a clone")
def written_leaves_and_expanded_tensors() -> None:
    for make in (
        lambda: [ones().requires_grad_()],
        lambda: [ones()[:1].expand(4, 5)],
        lambda: [torch.inference_mode()(ones)()],
    ):
        refused(lambda make=make: compare(doubled, CASTS, make))
        compare(doubled_clone, CASTS, make)


@follows(
    "Pass cast_forward_inputs=False in the policy, and cast in forward what it computes with", "{}; or write into a"
)
def written_views_of_one_tensor() -> None:
    def write(y: Tensor, state: Tensor, same_memory: Tensor) -> Tensor:
        state.mul_(2)
        return y * same_memory.to(y.dtype)

    def write_clone(y: Tensor, state: Tensor, same_memory: Tensor) -> Tensor:
        return y * state.clone().mul_(2).to(y.dtype) * same_memory.to(y.dtype)

    def views() -> list[Tensor]:
        whole = ones()
        return [whole, whole.view(4, 5)]

    refused(lambda: compare(write, CASTS, views))
    compare(write, LEAVES, views)
    compare(write_clone, CASTS, views)


@follows(
    "Write under torch.no_grad(), not through `.data`; call torch.autograd.graph.increment_version(tensor) behind a "
    "kernel; or pass cast_forward_inputs=False in the MixedPrecisionPolicy"
)
def written_where_no_counter_shows_it() -> None:
    def unseen(y: Tensor, state: Tensor) -> Tensor:
        state.data.add_(1)
        return y * state.to(y.dtype)

    def no_grad(y: Tensor, state: Tensor) -> Tensor:
        with torch.no_grad():
            state.add_(1)
        return y * state.to(y.dtype)

    def kernel(y: Tensor, state: Tensor) -> Tensor:
        state.detach().numpy()[...] += 1
        torch.autograd.graph.increment_version(state)
        return y * state.to(y.dtype)

    refused(lambda: compare(unseen, CASTS, lambda: [ones()]))
    for write, policy in ((no_grad, CASTS), (kernel, CASTS), (unseen, LEAVES)):
        compare(write, policy, lambda: [ones()])
