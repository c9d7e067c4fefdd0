"""Tests that no operation of fsdp2 itself reaches a mode that a user has put in force.

Otherwise the mode would record, count or replace operations that are not those of the model. Selective activation
checkpointing numbers the operations that it sees: one that runs in forward and not in recomputation would shift the
numbers of the others, and gradients would be computed from wrong values.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fsdp2
from helpers import assert_same, full, run_checks
from models import TanhBlock

WIDTH, ROWS = 6, 8


class Net(nn.Module):
    """`around`: how a block is called."""

    def __init__(self, around: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(TanhBlock(WIDTH, 9) for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.head(x)


def make_pair(around: Callable[..., Tensor] | None = None) -> tuple[Any, Net]:
    torch.manual_seed(0)
    model = Net(around)
    return model, copy.deepcopy(model)


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fsdp2.fully_shard(block, **options)
    return fsdp2.fully_shard(model, **options)


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[resolve_name(func) or str(func)] += 1
        return func(*args, **(kwargs or {}))


def record_step(model: nn.Module, x: Tensor, is_hooked: bool) -> tuple[Counter[str], Counter[str]]:
    """What modes see in one step. `is_hooked`: under saved-tensor hooks that do nothing: autograd itself detaches what
    such hooks return, and fsdp2 has some in each forward.
    """
    model.zero_grad()
    hooks = saved_tensors_hooks(lambda t: t, lambda t: t) if is_hooked else contextlib.nullcontext()
    with Operations() as operations, Functions() as functions:
        with hooks:
            output = model(x)
        output.square().mean().backward()
    return operations.seen, functions.seen


DETACH = "aten.detach.default"
BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.parametrize("around", [None, recomputed, reentrant])
def test_modes_see_the_plain_models_operations_only(around: Callable[..., Tensor] | None) -> None:
    """In each step: at most of them checks look at more than in others."""

    def check(configure: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> None:
        model, plain = make_pair(around)
        model, plain = configure(model), plain.to(dtype)
        for step in range(5):
            x = batch(step).requires_grad_()
            mine = record_step(model, x, is_hooked=False)
            theirs = record_step(plain, x.detach().to(dtype).requires_grad_(), is_hooked=True)
            for own, expected in zip(mine, theirs, strict=True):
                if around is not None:  # recomputations detach other numbers of tensors, fsdp2 or not
                    own.pop(DETACH, None), expected.pop(DETACH, None)
                assert own == expected, f"step {step}: more {own - expected}, less {expected - own}"
        fsdp2.set_checks("default")

    def cast(model: Any) -> Any:
        for block in model.blocks:
            fsdp2.fully_shard(block, mp_policy=BF16)
        return fsdp2.fully_shard(model, mp_policy=replace(BF16, output_dtype=torch.float32))

    def debugging(model: Any) -> Any:
        fsdp2.set_checks("debug")
        return shard(model)

    def conditional(model: Any) -> Any:
        for block in model.blocks:
            fsdp2.fully_shard(block, conditional=True)
        return fsdp2.fully_shard(model)

    def replicated(model: Any) -> Any:
        fsdp2.replicate(model)
        return model

    checks = [
        ("fp32", partial(check, shard)),
        ("bf16", partial(check, cast, torch.bfloat16)),
        ("replicated", partial(check, replicated)),
        ("debug level", partial(check, debugging)),
        ("conditional", partial(check, conditional)),
    ]
    run_checks(2, checks)


# ---- selective activation checkpointing


def by_name(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves the outputs of some operations, by their names."""
    return CheckpointPolicy.PREFER_SAVE if len(str(op)) % 2 else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


POLICIES: dict[str, Any] = {
    "sums": [torch.ops.aten.sum.default],
    "products": [torch.ops.aten.addmm.default, torch.ops.aten.mm.default],
    "copies and views": [torch.ops.aten.copy_.default, torch.ops.aten.view.default, torch.ops.aten.slice.Tensor],
    "all": save_all,
    "some": by_name,
}


def selective(policy: Any, block: nn.Module, x: Tensor) -> Tensor:
    def run(h: Tensor) -> Tensor:
        return block(h) * torch.sigmoid(0.1 * h.sum())

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def train_both(model: Any, plain: nn.Module, steps: int, options: Any = None) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(steps):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(mine), theirs.detach(), 1e-5, 1e-6, f"{options}: {name}")


def test_selective_checkpoints_save_what_the_model_computes() -> None:
    """Checks run in the 1st, 2nd, 4th ... forward, and never in recomputation."""

    def check(policy: Any, **options: Any) -> None:
        model, plain = make_pair(partial(selective, policy))
        train_both(shard(model, **options), plain, 5, options)

    checks = [(name, partial(check, policy)) for name, policy in POLICIES.items()]
    checks.append(("kept", partial(check, save_all, reshard_after_forward=False)))
    run_checks(2, checks)


def test_a_selective_checkpoint_around_all_blocks_and_full_params() -> None:
    class Around(Net):
        def run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            if isinstance(self, fsdp2.FSDPModule):
                with fsdp2.full_params(self.blocks[0]) as weights:
                    return x @ weights["up.weight"].t()
            return x @ self.blocks[0].up.weight.t()

        def forward(self, x: Tensor) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, save_all)
            y = checkpoint(self.run, self.stem(x), use_reentrant=False, context_fn=contexts)
            return self.head(y[:, :WIDTH])

    def check() -> None:
        torch.manual_seed(0)
        model = Around()
        plain = copy.deepcopy(model)
        train_both(shard(model), plain, 5)

    run_checks(2, [("all", check)])


# ---- what else a user may have put in force


def test_hooks_of_a_user_run_in_the_users_modes() -> None:
    """A hook on a parameter computes for the user, though it is fsdp2 that calls it."""

    def check() -> None:
        model, _ = make_pair()
        shard(model)
        model.stem.weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().erfinv())
        with Operations() as operations:
            model(batch(0)).square().mean().backward()
        assert operations.seen["aten.erfinv.default"] == 1

    run_checks(2, [("hook", check)])


def test_saved_tensor_hooks_of_a_user_see_the_tensors_of_the_plain_model_without_weights() -> None:
    def count(model: nn.Module) -> list[tuple[int, ...]]:
        saved: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                saved.append(tuple(tensor.shape))
            return tensor

        weights = {each.untyped_storage().data_ptr() for each in model.parameters() if type(each) is nn.Parameter}

        for step in range(4):
            with saved_tensors_hooks(pack, lambda t: t):
                model(batch(step)).square().mean().backward()
        return saved

    def check() -> None:
        model, plain = make_pair()
        assert count(shard(model)) == count(plain)

    def check_on_cpu() -> None:
        model, plain = make_pair()
        shard(model)
        with save_on_cpu():
            train_both(model, plain, 3)

    run_checks(2, [("counted", check), ("save_on_cpu", check_on_cpu)])


def test_a_transform_inside_a_mode_computes_like_the_plain_model() -> None:
    def check() -> None:
        model, plain = make_pair()
        found = []
        for each in (shard(model), plain):
            with Operations() as operations:
                torch.func.grad(lambda x, m=each: m(x).sum())(batch(0))
            operations.seen.pop(DETACH, None)
            found.append(operations.seen)
        assert found[0] == found[1]

    run_checks(2, [("grad", check)])


def test_modes_that_change_operations_change_none_of_fsdp2s() -> None:
    """A default device, one that counts flops, and one that a forward puts in force for a part of itself."""

    def default_device() -> None:
        model, plain = make_pair()
        shard(model)
        rank_batch = [batch(step) for step in range(3)]
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for x in rank_batch:
                with torch.device("meta"):
                    each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(full(mine), theirs.detach(), 1e-5, 1e-6, "default device")

    def flops() -> None:
        model, plain = make_pair()
        counts = []
        for each in (shard(model), plain):
            with FlopCounterMode(display=False) as counter:
                each(batch(0)).square().mean().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0

    def inside() -> None:
        seen = []

        def around(block: nn.Module, x: Tensor) -> Tensor:
            with Operations() as operations:
                y = block(x)
            operations.seen.pop(DETACH, None)
            seen.append(operations.seen)
            return y

        model, plain = make_pair(around)
        shard(model)(batch(0))
        plain(batch(0))
        assert seen[:2] == seen[2:]

    run_checks(2, [("default device", default_device), ("flops", flops), ("inside", inside)])


def test_modes_that_ask_for_it_see_fsdp2s_operations() -> None:
    class Seeing(Operations):
        sees_fsdp2 = True

    def check() -> None:
        model, _ = make_pair()
        shard(model)
        with Operations() as below, Seeing() as seeing, Operations() as above:
            model(batch(0)).square().mean().backward()
        assert seeing.seen["c10d.send.default"] > 0
        assert below.seen == above.seen
        assert not any(name.startswith("c10d.") for name in above.seen)

    run_checks(2, [("seeing", check)])
