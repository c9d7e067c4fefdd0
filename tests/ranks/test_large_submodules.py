"""Large submodules that are left for the model's own call, an embedding and a head: each is gathered when it runs.

How the model uses them must not matter, nor that the gradient of such a group of one parameter is reduced in parts.
Large submodules and parts are large; here the limits are lowered.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, full_params, fully_shard
from fsdp2.compression import Compression
from fsdp2.engine import buckets
from fsdp2.features import large_submodules
from helpers import NIGHTLY, full, run_ranks, world_sizes
from scenarios import WIDTH, Block, KeepsWeight, Run, check, loss_of, sgd, train_and_evaluate

VOCAB = 11


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_submodules, "MIN_BYTES", 1)
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 16)


def calls(model: "Language", x: Tensor) -> Tensor:
    return model.head(model.run_blocks(x))


def calls_twice(model: "Language", x: Tensor) -> Tensor:
    hidden = model.run_blocks(x)
    return model.head(hidden) + model.head(hidden.sin())


def reads(model: "Language", x: Tensor) -> Tensor:
    return F.linear(model.run_blocks(x), model.head.weight)


def reads_and_calls(model: "Language", x: Tensor) -> Tensor:
    hidden = model.run_blocks(x)
    return F.linear(hidden, model.head.weight) + model.head(hidden.sin()) + F.linear(hidden.cos(), model.head.weight)


def reads_first(model: "Language", x: Tensor) -> Tensor:
    scale = 1 + model.embed.weight.square().mean() + model.head.weight.square().mean()
    return model.head(model.run_blocks(x * scale))


def reads_in_checkpoint(model: "Language", x: Tensor) -> Tensor:
    return checkpoint(lambda h: F.linear(h, model.head.weight).tanh(), model.run_blocks(x), use_reentrant=False)


def calls_in_checkpoint(model: "Language", x: Tensor) -> Tensor:
    reentrant = torch.is_grad_enabled()  # which warns without
    return checkpoint(lambda h: model.head(h).tanh(), model.run_blocks(x), use_reentrant=reentrant)


def hides(model: "Language", x: Tensor) -> Tensor:
    return KeepsWeight.apply(model.run_blocks(x), model.head.weight)


def lends(model: "Language", x: Tensor) -> Tensor:
    """What the model read before the block is still there behind it."""
    hidden, weight = model.run_blocks(x), model.head.weight
    with full_params(model.head) if isinstance(model, FSDPModule) else nullcontext():
        hidden = hidden * model.head.weight.cos().mean()
    return F.linear(hidden, weight)


def skips(model: "Language", x: Tensor) -> Tensor:
    return model.run_blocks(x)


USES: tuple[Callable[..., Tensor], ...] = (
    calls,
    calls_twice,
    reads,
    reads_and_calls,
    reads_first,
    reads_in_checkpoint,
    calls_in_checkpoint,
    hides,
    lends,
    skips,
)


class Language(nn.Module):
    """An embedding, blocks, a norm, a head; all but the blocks are the model's own."""

    def __init__(self, use: Callable[..., Tensor] = calls) -> None:
        super().__init__()
        self.use = use
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def run_blocks(self, x: Tensor) -> Tensor:
        x = self.embed((x.abs().sum(1) * 7).long() % VOCAB) + x
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def recipe(run: Run, model: Language, **options: Any) -> None:
    for block in model.blocks:
        run.shard(block, **options)
    run.shard(model, **options)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_any_use(world_size: int) -> None:
    """Three steps, of which one accumulates, and evaluations between."""

    def scenario(run: Run, use: Callable[..., Tensor], reshard: bool | None) -> None:
        if use is hides and reshard:
            run.value("freed after forward", "as asked for")
            return
        model = run.build(Language, use)
        recipe(run, model, reshard_after_forward=reshard)
        train_and_evaluate(run, model, steps=3)

    check(scenario, world_size, use=USES, reshard=(True, False) if NIGHTLY else (None,))


def test_changes_between_steps() -> None:
    """Another use in each step; a frozen submodule; one called without the model; an error while one is gathered."""

    def scenario(run: Run, frozen: str) -> None:
        model = run.build(Language)
        recipe(run, model)
        getattr(model, frozen).requires_grad_(False)
        optimizer = sgd(model)
        for step, use in enumerate((*USES, *reversed(USES))):
            model.use = use
            run.step(f"{step} {use.__name__}", model, optimizer, loss_of(model(run.batch(seed=step))))
        model.use = skips
        run.step("outside", model, optimizer, loss_of(model.head(model(run.batch(seed=99)))))
        handle = model.head.register_forward_hook(fail)
        model.use = calls
        with pytest.raises(ValueError, match="on purpose"):
            model(run.batch(seed=98))
        handle.remove()
        run.step("after an error", model, optimizer, loss_of(model(run.batch(seed=97))))

    check(scenario, frozen=("embed", "head", "norm"))


def test_a_loss_calls_the_head() -> None:
    """On chunks of what the model has returned, with a value without gradients and a checkpoint between."""

    def scenario(run: Run, reshard: bool | None) -> None:
        model = run.build(Language, skips)
        recipe(run, model, reshard_after_forward=reshard)
        optimizer = sgd(model)
        for step in range(3):
            hidden = model(run.batch(seed=step))
            with torch.no_grad():
                target = model.head(hidden.sin())
            loss = loss_of(model.head(hidden) - target) + loss_of(model.head(hidden.cos()))
            loss = loss + loss_of(checkpoint(model.head, hidden.tanh(), use_reentrant=False))
            run.step(f"step {step}", model, optimizer, loss)

    check(scenario, reshard=(None, False, True))


def fail(*_: Any) -> None:
    raise ValueError("on purpose")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled() -> None:
    def scenario(run: Run, use: Callable[..., Tensor]) -> None:
        model = run.build(Language, use)
        recipe(run, model)
        optimizer = sgd(model)
        if run.sharded:
            torch._dynamo.reset()
            model.compile(backend="eager")
        for step in range(2):
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario, use=(calls, reads))


def sharded(**options: Any) -> Language:
    torch.manual_seed(0)
    model = Language()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def test_what_users_see() -> None:
    """Names and classes are those of any model. A copied head has a group, unless it was copied alone."""

    def body(rank: int, world_size: int) -> None:
        model, plain = sharded(), Language()
        assert list(model.state_dict()) == list(plain.state_dict())
        assert type(model.head).__name__ == "Linear"
        assert isinstance(model.head, nn.Linear)
        assert not isinstance(model.head, FSDPModule)
        assert repr(model.head) == repr(plain.head)
        alone = copy.deepcopy(model.head)
        assert type(alone) is nn.Linear
        assert torch.equal(full(alone.weight), full(model.head.weight))
        x = torch.randn(4, WIDTH)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.head) is type(model.head)
            loss, expected = loss_of(other(x)), loss_of(model(x))
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
            for param, reference in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(full(param.grad), full(reference.grad))
            model.zero_grad()

    run_ranks(2, body)


def test_dtypes_change_at_the_model_only() -> None:
    """A large submodule casts nothing: inputs and the output are cast where `fully_shard` was called."""

    def body(rank: int, world_size: int) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = Language()
        seen: list[torch.dtype] = []
        for module in (model.embed, model.head):
            module.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=policy)
        assert model(torch.randn(2, WIDTH)).dtype == torch.float64
        assert seen == [torch.bfloat16, torch.bfloat16]
        model.use = lambda model, x: model.head(model.run_blocks(x).float())
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(2, WIDTH))

    run_ranks(2, body)


class Tied(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_chunks_of_low_precision_gradients() -> None:
    """Sent in one or in many, in the dtype they come in or cast: on two ranks the same to the last bit."""

    def gradients(policy: MixedPrecisionPolicy, min_bytes: int) -> list[Tensor]:
        large_submodules.MIN_BYTES, buckets.MIN_PIECE_BYTES = min_bytes, min_bytes
        model = sharded(mp_policy=policy)
        torch.manual_seed(torch.distributed.get_rank())
        loss_of(model(torch.randn(4, WIDTH))).backward()
        return [full(param.grad) for param in model.parameters()]

    def body(rank: int, world_size: int) -> None:
        for wire_dtype in (None, torch.bfloat16):
            policy = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=wire_dtype)
            )
            for many, one in zip(gradients(policy, 16), gradients(policy, 1 << 40), strict=True):
                assert torch.equal(many, one)
                assert one.any()

    run_ranks(2, body)


def test_what_gets_no_group_of_its_own() -> None:
    """Tied modules, those that are small (beside the groups inside, too), what is inside a single group, modules that
    are not called as usual, and layers around adapters that are groups of their own.
    """

    def names_of_large(model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if "_fsdp2_submodule_state" in vars(module)]

    class Unusual(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    def body(rank: int, world_size: int) -> None:
        assert names_of_large(sharded()) == ["embed", "head"]
        assert names_of_large(fully_shard(Language())) == []
        tied = Tied()
        fully_shard(list(tied.blocks))
        assert names_of_large(fully_shard(tied)) == []
        unusual = Language()
        unusual.head = Unusual(WIDTH, VOCAB)
        fully_shard(list(unusual.blocks))
        assert names_of_large(fully_shard(unusual)) == ["embed"]
        beside = Language()
        beside.blocks.append(fully_shard(nn.Linear(20, 20)))
        assert names_of_large(fully_shard(beside)) == []
        adapted = Language()
        adapted.adapter = fully_shard(nn.Linear(1, 2))  # no block: 64 times smaller than what is left
        adapted.wide = nn.Linear(16, 16)
        assert names_of_large(fully_shard(adapted)) == []
        large_submodules.MIN_BYTES = VOCAB * WIDTH * 4 + 1
        assert names_of_large(sharded()) == []

    run_ranks(1, body)
