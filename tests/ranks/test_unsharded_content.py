"""Tests writes through `.data`, which no version counter shows.

Writes to unsharded parameters inside the forward that computes with them would be lost; writes to shards whose
parameters stay unsharded would not be used.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, full_params, fully_shard, set_checks
from fsdp2.checks.due import ForwardChecks
from fsdp2.compression import Compression, Int8
from fsdp2.engine import codec as codec_module
from fsdp2.engine.state import require_state
from helpers import assert_same, run_ranks
from scenarios import WIDTH, Run, blocks, check, kept, loss_of, sgd, whole

Write = Callable[[nn.Parameter], object]


class Writes(nn.Module):
    """Writes to a weight of its own when told to: before it computes with it, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4)
        self.down = nn.Linear(4, WIDTH)
        self.write: Write | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self.up.weight)
        x = x + self.down(torch.tanh(self.up(x)))
        if self.write is not None:
            self.write(self.down.weight)
        return x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def scaled(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def one_changed(weight: nn.Parameter) -> None:
    weight.data[0, 0] = 7


def assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def scaled_and_assigned(weight: nn.Parameter) -> None:
    scaled(weight)
    assigned(weight)


def same_assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


WRITES: tuple[Write, ...] = (scaled, one_changed, assigned, same_assigned, scaled_and_assigned)


def attempt(model: Any, write: Write, x: Tensor) -> None:
    block = model.blocks[1]
    block.write = write
    try:
        model(x)
    finally:
        block.write = None


def test_a_write_raises_and_leaves_the_model_as_it_was() -> None:
    """In the 1st, 2nd and 4th forward; an attempt is one. Each rank names parameters of which it holds rows that were
    written to. In the 1st, a write to a single place is not seen.
    """

    def scenario(run: Run, write: Write, number: int, wrap: Callable[..., None]) -> None:
        model = run.build(Tower)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(number - 1):
            run.step(f"before {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
        if run.sharded:
            with pytest.raises(
                RuntimeError, match=r"(1\.(up|down)\.weight|one of .*) was modified in place during"
            ) as e:
                attempt(model, write, run.batch(seed=9))
            named = re.findall(r"1\.\w+\.weight", str(e.value))
            assert len(named) == len(set(named)), e.value
        for step in range(2):
            with torch.no_grad():
                run.rows(f"evaluated {step}", model(run.batch(seed=20 + step)))
            run.step(f"after {step}", model, optimizer, loss_of(model(run.batch(seed=30 + step))))

    wraps = (whole, blocks, kept)
    check(scenario, write=WRITES, number=(2, 4), wrap=wraps)
    check(scenario, write=[write for write in WRITES if write is not one_changed], number=(1,), wrap=wraps)


def test_at_the_debug_level_each_forward_is_checked() -> None:
    """And every word, in the first, too."""

    def body(_: int, __: int) -> None:
        model = Tower()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        set_checks("debug")
        x = torch.randn(4, WIDTH)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"1\.(up|down)\.weight was modified in place|one of "):
                attempt(model, one_changed, x)
        model(x)

    run_ranks(2, body)


def cast(model: Tower) -> None:
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))


def offloaded(model: Tower) -> None:
    for block in model.blocks:
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))


def encoded(codec: Any, dim: int, model: Tower) -> None:
    policy = MixedPrecisionPolicy(compression=Compression(all_gather=codec))
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy, shard_placement_fn=lambda param: Shard(min(dim, param.dim() - 1)))


def parallel(model: Tower) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])


def test_other_kinds_of_full_parameters() -> None:
    def body(_: int, __: int) -> None:
        for shard in (cast, offloaded, parallel):
            # To assign the `.data` of what tensor parallelism has made does nothing, here as without fsdp2.
            for write in (scaled, assigned) if shard is not parallel else (scaled,):
                torch.manual_seed(1)
                model = Tower()
                shard(model)
                x = torch.randn(4, WIDTH)
                before = model(x)
                with (
                    torch.no_grad(),
                    pytest.raises(RuntimeError, match=r"(up|down)\.weight was modified in place"),
                ):
                    attempt(model, write, x)
                assert_same(model(x), before, 0, 0, f"{shard.__name__}, {write.__name__}")

    run_ranks(4, body)


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fails:
            self.fails = False
            raise ValueError("on purpose")
        return x


def test_no_error_without_a_write() -> None:
    """After a forward that failed half-way, of which nothing was compared; where forwards nest; with NaN in weights."""

    def scenario(run: Run) -> None:
        model = run.build(FailsOnce)
        run.shard(model)
        optimizer = sgd(model)
        for step in range(5):
            model.fails = True
            with pytest.raises(ValueError, match="on purpose"):
                model(run.batch(seed=step))
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
        with torch.no_grad():
            model.linear.weight.fill_(float("nan"))
        for _ in range(4):
            assert model(run.batch(seed=7)).isnan().all()
        run.value("reached", True)

    check(scenario)


def test_a_failed_forward_leaves_nothing_assigned() -> None:
    class AssignsAndFails(FailsOnce):
        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                self.linear.weight.data = self.linear.weight.data * 0.5
            return super().forward(x)

    def body(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model: Any = AssignsAndFails()
        plain, batch = copy.deepcopy(model), torch.randn(2, WIDTH)
        fully_shard(model)
        model.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            model(batch)
        torch.testing.assert_close(model(batch), plain(batch))

    run_ranks(2, body)


def sharded_and_plain() -> tuple[Any, Tower]:
    torch.manual_seed(1)
    plain = Tower()
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, plain


def assert_is_refused_once(model: Any, plain: Tower, x: Tensor) -> None:
    """The model computes with what its shards hold from the next forward on."""
    with pytest.raises(RuntimeError, match=r"^blocks\.1\.up\.bias: what was gathered before this forward"):
        model(x)
    assert_same(model(x), plain(x), 0, 1e-6, "the next forward")


def test_a_shard_that_was_written_to_while_parameters_stay_unsharded() -> None:
    """Where no version shows it. The 2nd and the 4th forward are checked."""

    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        for number in (1, 2, 3):
            model, plain = sharded_and_plain()
            model.set_reshard_after_backward(False)
            for _ in range(number):
                loss_of(model(x)).backward()
            model.blocks[1].up.bias.to_local().data.add_(1)
            if number == 2:
                assert_same(model(x), plain(x), 0, 1e-6, "an old copy: the 3rd forward is not checked")
            plain.blocks[1].up.bias.data.add_(1)  # type: ignore[operator, union-attr]
            assert_is_refused_once(model, plain, x)

    run_ranks(2, body)


def test_a_write_while_the_graph_of_a_forward_is_alive() -> None:
    """Parameters that reshard_after_forward=False keeps for its backward are used by the next forward, too."""

    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        model, plain = sharded_and_plain()
        model.set_reshard_after_forward(False)
        output = model(x)
        for each in (model.blocks[1].up.bias.to_local(), plain.blocks[1].up.bias):  # type: ignore[union-attr]
            each.data.add_(1)
        assert_is_refused_once(model, plain, x)
        assert output.requires_grad

    run_ranks(2, body)


def test_writes_after_unshard() -> None:
    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        model, plain = sharded_and_plain()
        model.blocks[1].unshard()
        model.blocks[1].up.bias.data.add_(1)
        assert_is_refused_once(model, plain, x)

    run_ranks(2, body)


def test_no_error_where_parameters_stay_unsharded() -> None:
    """Cast ones, offloaded ones, NaN, changes that versions show, and parameters of which some ranks hold no row; what
    codecs round, where a write that nothing counts is found, too.
    """
    codecs = [partial(encoded, codec, dim) for codec, dim in ((torch.bfloat16, 0), (Int8(), 0), (Int8(), 1))]

    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH)
        for shard in (cast, offloaded, parallel, *codecs):
            model: Any = Tower()
            shard(model)
            for block in model.blocks:
                block.set_reshard_after_backward(False)
            if shard in codecs:
                for _ in range(3):
                    loss_of(model(x)).backward()
                each_has_a_part = "down.weight" if shard is codecs[-1] else "up.weight"
                model.blocks[1].get_parameter(each_has_a_part).to_local().data.add_(1)
                with pytest.raises(RuntimeError, match=rf"^blocks\.1\.{each_has_a_part}: what was gathered before"):
                    model(x)
            for step in range(9):
                loss_of(model(x)).backward()
                with torch.no_grad():
                    model.blocks[step % 3].up.weight.mul_(0.9 if step < 5 else float("nan"))

    with mock.patch.object(codec_module, "SMALL_NUMEL", 1):
        run_ranks(4, body)


# ---- what the host reads when a pass ends


def test_writes_in_several_groups_are_found_and_all_are_as_they_were() -> None:
    """The host reads what a pass has found when its outermost forward ends: the first group is named, none keeps what
    was written to it, and a forward inside the block of full_params, or of a module alone, ends by itself.
    """

    def whole_model(model: Any, x: Tensor) -> Tensor:
        return model(x)

    def inside_full_params(model: Any, x: Tensor) -> Tensor:
        with full_params(model.blocks[2]):
            return model(x)

    def without_grad(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    def one_block(model: Any, x: Tensor) -> Tensor:
        return model.blocks[0](x)

    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        for run in (whole_model, inside_full_params, without_grad, one_block):
            for keeps in (False, True):
                model, plain = sharded_and_plain()
                for block in model.blocks:
                    block.set_reshard_after_forward(not keeps)
                model.set_reshard_after_backward(not keeps)
                for block in model.blocks[:2]:
                    block.write = scaled
                with pytest.raises(RuntimeError, match=r"^blocks\.0\.\w+\.weight.* was modified in place") as caught:
                    run(model, x)
                assert "blocks.1" not in str(caught.value), "each error names a group's"
                for block in model.blocks:
                    block.write = None
                for _ in range(2):
                    assert_same(model(x), plain(x), 0, 1e-6, f"after {run.__name__}")

    run_ranks(2, body)


def test_a_pass_that_fails_for_another_reason_leaves_nothing_to_be_read() -> None:
    """Neither what it had found is told in the next pass, which is exact, nor what it had checked."""

    def body(_: int, __: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        model, plain = sharded_and_plain()
        handle = model.blocks[2].register_forward_pre_hook(raise_on_purpose)
        model.blocks[0].write = scaled
        with pytest.raises(ValueError, match="on purpose"):
            model(x)
        handle.remove()
        model.blocks[0].write = None
        assert not require_state(model).root.events.of(ForwardChecks).forwards.waiting
        for _ in range(3):
            assert_same(model(x), plain(x), 0, 1e-6, "the next forwards")

    run_ranks(2, body)


def raise_on_purpose(*_: Any) -> None:
    raise ValueError("on purpose")
