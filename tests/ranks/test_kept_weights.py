"""Tests that weights which something keeps from a forward are read right, or not at all.

The fault in question: a reader that the engine does not see (an autograd function with a weight on `ctx`, hooks for
saved tensors of a user's own, a list, a cache) reads the memory of an unsharded parameter before a gather has filled
it, or after it was freed.
"""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard
from fsdp2.engine.state import groups_below
from helpers import assert_same, run_checks, shard_batch, world_sizes
from scenarios import WIDTH, Run, blocks, check, leaves, loss_of, sgd, whole

Multiply = Callable[[Tensor, Tensor], Tensor]


class Keeps(torch.autograd.Function):
    """Computes x @ weight.T, and keeps on `ctx` what `keep` makes of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keep: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.kept = x, keep(weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        kept = ctx.kept if ctx.kept.shape == (WIDTH, WIDTH) else ctx.kept.view(WIDTH, WIDTH)
        return grad @ kept, grad.T @ ctx.x, None


def itself(weight: Tensor) -> Tensor:
    return weight


def view(weight: Tensor) -> Tensor:
    return weight.view(-1)


def detached(weight: Tensor) -> Tensor:
    return weight.detach()


def data(weight: Tensor) -> Tensor:
    return weight.data


def keeping(keep: Callable[[Tensor], Tensor]) -> Multiply:
    return lambda x, weight: Keeps.apply(x, weight, keep)


def under_own_hooks(multiply: Multiply) -> Multiply:
    """Hooks for saved tensors inside the forward, which get the weights themselves."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return multiply(x, weight)

    return run


def scale(x: Tensor, weight: Tensor) -> Tensor:
    """Saves the parameter itself: that of other products is a view."""
    return (x.unsqueeze(-2) * weight).sum(-1)


READERS: dict[str, Multiply] = {
    "the parameter on ctx": keeping(itself),
    "a view on ctx": keeping(view),
    "a detached one on ctx": keeping(detached),
    "its data on ctx": keeping(data),
    "hooks that get views": under_own_hooks(F.linear),
    "hooks that get the parameter": under_own_hooks(scale),
}


class Sided(nn.Module):
    """Blocks pass on their input. The loss of their weights goes another way, by `side`: backward comes to it first."""

    class Block(nn.Module):
        def __init__(self, multiply: Multiply) -> None:
            super().__init__()
            self.weight, self.multiply = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2), multiply

        def forward(self, x: Tensor) -> Tensor:
            passed_on = x * 2
            hidden = self.multiply(x, self.weight).tanh()
            self.side = self.multiply(hidden, self.weight).square().mean()
            return passed_on

    def __init__(self, multiply: Multiply, depth: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Sided.Block(multiply) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, output: Tensor) -> Tensor:
        return loss_of(output) + sum(block.side for block in self.blocks)  # type: ignore[operator, misc]


def train(run: Run, model: Any, steps: int = 2, rows: int = 6) -> None:
    optimizer = sgd(model, lr=0.01)
    for step in range(steps):
        run.step(f"step {step}", model, optimizer, model.loss(model(run.batch(seed=step, rows=rows))))


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_unnoticed_readers_in_backward_get_right_values(world_size: int) -> None:
    def scenario(run: Run, reader: str, wrap: Callable[..., None]) -> None:
        model = run.build(Sided, READERS[reader])
        wrap(run, model)
        train(run, model)

    check(scenario, world_size, reader=tuple(READERS), wrap=(blocks, leaves) if world_size == 2 else (blocks,))


def test_unnoticed_readers_where_groups_shrink_replicate_or_stay_in_one() -> None:
    """reshard_after_forward=2 of 4 ranks, HSDP, one group for all."""

    def scenario(run: Run, reader: str, way: str) -> None:
        model = run.build(Sided, READERS[reader])
        options: dict[str, Any] = {"reshard_after_forward": 2} if way == "2 of 4" else {}
        if way == "hsdp" and run.sharded:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks if way != "whole" else ():
            run.shard(block, **options)
        run.shard(model, **options)
        train(run, model, rows=8)

    readers = ("the parameter on ctx", "a view on ctx", "hooks that get the parameter")
    check(scenario, 4, reader=readers, way=("2 of 4", "hsdp", "whole"))


@pytest.mark.parametrize("kind", ["count", "offload"])
def test_hooks_for_saved_tensors_around_a_forward_get_all_but_weights(kind: str) -> None:
    """The user's hooks do not hide the engine's, and weights are neither offloaded nor kept."""

    def scenario(run: Run, wrap: Callable[..., None]) -> None:
        model = run.build(Sided, F.linear)
        wrap(run, model)
        optimizer, seen = sgd(model, lr=0.01), []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.shape)
            return tensor

        for step in range(2):
            with save_on_cpu() if kind == "offload" else saved_tensors_hooks(pack, lambda tensor: tensor):
                output = model(run.batch(seed=step))
            run.step(f"step {step}", model, optimizer, model.loss(output))
        if run.sharded:
            assert kind == "offload" or (seen and torch.Size([WIDTH, WIDTH]) not in seen)

    check(scenario, wrap=(blocks, leaves, whole))


def test_weights_of_a_list_have_part_in_the_loss() -> None:
    """A hook keeps each block's weight, or a view of it, and the loss has a penalty over them."""

    def scenario(run: Run, keep: Callable[[Tensor], Tensor], wrap: Callable[..., None]) -> None:
        model = run.build(Sided, F.linear)
        wrap(run, model)
        kept: list[Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda module, *_: kept.append(keep(module.weight)))
        optimizer = sgd(model, lr=0.01)
        for step in range(2):
            kept.clear()
            loss = model.loss(model(run.batch(seed=step))) + sum(each.square().sum() for each in kept)
            run.step(f"step {step}", model, optimizer, loss)

    check(scenario, keep=(itself, view), wrap=(blocks, leaves))


def in_mixed_precision() -> None:
    """In bf16, with a tolerance that a weight of another step or of rubbish does not meet."""
    for multiply in READERS.values():
        torch.manual_seed(0)
        plain = Sided(multiply)
        model = copy.deepcopy(plain)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mp_policy=policy)
        plain.to(torch.bfloat16)
        batch = torch.randn(4, WIDTH)
        model.loss(model(shard_batch(batch, dist.get_rank(), 2))).backward()
        plain.loss(plain(batch.bfloat16())).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert_same(param.grad, expected.grad.float(), 0.1, 0.1, name)


# ---- reads outside of backward ---------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], object]] = {
    "norm": lambda weight: weight.norm(),
    "add": lambda weight: weight + 1,
    "matmul": lambda weight: torch.ones(1, 4) @ weight.T,
    "item": lambda weight: weight.sum().item(),
    "index": lambda weight: weight[0],
    "data": lambda weight: weight.data,
    "detach": lambda weight: weight.detach(),
    "view": lambda weight: weight.view(-1),
    "clone": lambda weight: weight.clone(),
    "to": lambda weight: weight.to(torch.float64),
    "stack": lambda weight: torch.stack([weight, weight]),
    "foreach": lambda weight: torch._foreach_norm([weight]),
    "linear": lambda weight: F.linear(torch.ones(1, 4), weight),
    "write": lambda weight: weight.mul_(2),
    "copy_": lambda weight: torch.ones_like(weight).copy_(weight),
    "numpy": lambda weight: weight.numpy(),
    "tolist": lambda weight: weight.tolist(),
    "deepcopy": copy.deepcopy,
    "save": lambda weight: torch.save(weight, io.BytesIO()),
    "data_ptr": lambda weight: weight.data_ptr(),
}


def build(**options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 3))
    model: Any = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options), plain


def is_freed(model: Any) -> list[bool]:
    return [group.unsharded.storage.nbytes() == 0 for group in groups_below(model) if group.params]


def reads_of_a_freed_parameter_raise_by_name() -> None:
    """After backward, after an evaluation, and while it is gathered again; by any kind of read. What says nothing of
    its elements is allowed. After the next gather it may be read.
    """
    model, plain = build()
    kept: list[Tensor] = []
    handle = model[1][0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    handle.remove()
    assert kept[0] is kept[1] is not model[1][0].weight
    for when in ("freed", "in flight"):
        for name, read in READS.items():
            with pytest.raises(RuntimeError, match=r"^1\.0\.weight: the unsharded parameter was read after"):
                pytest.fail(f"{when}, {name}: {read(kept[0])}")
        assert (kept[0].shape, kept[0].dtype, kept[0].requires_grad, kept[0].grad) == ((4, 6), torch.float, True, None)
        assert torch.zeros_like(kept[0]).sum() == 0
        assert "1.0.weight" in repr(kept[0])
        assert isinstance(kept[0], nn.Parameter)
        if when == "freed":
            handle = model[1].unshard(async_op=True)
    handle.wait()
    assert_same(kept[0].detach(), plain[1][0].weight.detach(), 0, 0, "gathered")  # type: ignore[index, union-attr]
    model[1].reshard()
    with pytest.raises(RuntimeError, match=r"^1\.0\.weight: .* \(by Tensor\.norm\)"):
        kept[0].norm()
    with full_params(model):  # as the error says
        assert_same(model[1][0].weight.detach(), plain[1][0].weight.detach(), 0, 0, "full")  # type: ignore


def views_keep_their_memory_and_it_is_freed_with_them() -> None:
    """A view that a hook keeps has the values of the forward, after forwards with grad and without, and after backward.
    When it is gone, the memory is freed at the end of the next pass.
    """
    for options in ({}, {"reshard_after_forward": True}):
        model, plain = build(**options)
        expected = plain[1][0].weight.detach()  # type: ignore[index, union-attr]
        for look in (view, detached, data, lambda weight: weight.t(), lambda weight: weight[1:3]):
            for has_grad in (True, False):
                kept: list[Tensor] = []
                handle = model[1][0].register_forward_hook(lambda m, *_, k=kept, look=look: k.append(look(m.weight)))
                with torch.set_grad_enabled(has_grad):
                    output = model(torch.ones(2, 4))
                handle.remove()
                assert_same(kept[0].detach(), look(expected), 0, 0, "after forward")
                if has_grad:
                    output.sum().backward()
                    assert_same(kept[0].detach(), look(expected), 0, 0, "after backward")
                assert is_freed(model) == [True, False, True], "only the memory that is viewed stays"
                kept.clear()
                del output
                with torch.no_grad():
                    model(torch.ones(2, 4))
                assert all(is_freed(model))


def what_was_left_for_a_backward_is_freed_at_the_next_pass() -> None:
    """Before that comes to the layer: no backward has followed."""
    model, _ = build(reshard_after_forward=True)
    model(torch.ones(2, 4)).sum().backward()  # references are counted
    kept: list[Tensor] = []
    handle = model[2].register_forward_hook(lambda module, *_: kept.append(module.weight))
    model(torch.ones(2, 4))
    handle.remove()
    kept.clear()
    assert is_freed(model) == [True, True, False]
    seen: list[bool] = []
    model[0].register_forward_hook(lambda *_: seen.extend(is_freed(model)))
    model(torch.ones(2, 4))
    assert seen[2], "only the second layer is gathered ahead"


def test_memory_is_freed_although_something_keeps_a_weight_if_the_user_wants_that() -> None:
    """set_free_viewed_storage(True), for layers whose own backward alone reads what they keep on `ctx`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return Keeps.apply(x, self.weight, view)  # type: ignore[no-any-return]

    def scenario(run: Run, free: bool) -> None:
        model = run.build(lambda: nn.Sequential(Layer(), Layer(), Layer()))
        for layer in model:
            run.shard(layer, reshard_after_forward=True)
        run.shard(model)
        if run.sharded:
            model.set_free_viewed_storage(free)
        optimizer = sgd(model)
        for step in range(2):
            output = model(run.batch(seed=step))
            if run.sharded:
                assert is_freed(model) == [free] * 3, "in forward"
            loss_of(output).backward()
            run.step(f"step {step}", model, optimizer)
            if run.sharded:
                assert is_freed(model) == [free] * 3, "the graph of `output` has the functions"
                del output
                with torch.no_grad():
                    model(run.batch(seed=step))
                assert all(is_freed(model))

    check(scenario, free=(True, False))


def a_graph_keeps_no_memory_of_weights() -> None:
    """What autograd saves through the engine's hooks keeps none: attention, convolutions, embeddings, norms."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
            self.attend = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.mix, self.rnn = nn.Conv1d(4, 4, 3, padding=1), nn.GRU(8, 8, batch_first=True)
            self.last = nn.Bilinear(8, 8, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.mix(self.attend(self.norm(self.embed(tokens))))
            x = self.rnn(x)[0]
            return self.last(x, x.flip(0))  # type: ignore[no-any-return]

    model = Model()
    for child in model.children():
        fully_shard(child, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            output = model((torch.arange(8).view(2, 4) + dist.get_rank()) % 7)
            assert all(is_freed(model)), "while there is a graph"
            output.square().sum().backward()


CHECKS = [
    in_mixed_precision,
    a_graph_keeps_no_memory_of_weights,
    reads_of_a_freed_parameter_raise_by_name,
    views_keep_their_memory_and_it_is_freed_with_them,
    what_was_left_for_a_backward_is_freed_at_the_next_pass,
]


def test_on_two_ranks() -> None:
    run_checks(2, [(check.__name__, check) for check in CHECKS])
