"""Tests training where collectives complete as late as possible, and memory that must not be read is NaN: a few cases.

All tests of this folder can run so, see hostile.py.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.comm import Purpose, Work
from helpers import full, run_checks, world_sizes
from hostile import hostile
from scenarios import Net, Run, check, loss_of, sgd

BYTES = 24
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""For what is cast to fp32; NaN or a gradient too few is far beyond."""


# ---- the scheduler itself --------------------------------------------------------------------------------------------


def gathering() -> tuple[Work, Tensor, Tensor]:
    comm = NamedPairwiseComm(dist.group.WORLD, Purpose())
    output, own = torch.zeros(2 * BYTES, dtype=torch.uint8), torch.full((BYTES,), comm.rank, dtype=torch.uint8)
    return comm.all_gather([output], [own]), output, own


def fills_outputs_when_they_are_waited_for() -> None:
    with hostile(dist.get_rank()):
        work, output, own = gathering()
        assert output.view(torch.float32).isnan().all(), output
        work.wait()
        work.wait()
        assert output.tolist() == [0] * BYTES + [1] * BYTES
        assert own.eq(dist.get_rank()).all()


def poisons_what_is_freed_and_allocated() -> None:
    with hostile(dist.get_rank()):
        memory = torch.empty(8)
        assert memory.isnan().all()
        memory.zero_()
        memory.untyped_storage().resize_(16)
        assert memory[:4].eq(0).all()
        memory.untyped_storage().resize_(32)
        assert memory[4:].isnan().all()


def complains_of(harm: Callable[[Tensor, Tensor], None], text: str) -> None:
    """In `wait`, and again at the end."""

    def be_harmed() -> None:
        with hostile(dist.get_rank()):
            work, *memory = gathering()
            harm(*memory)
            with pytest.raises(AssertionError, match=text):
                work.wait()

    with pytest.raises(AssertionError, match=text):
        be_harmed()


def complains_of_an_input_that_changes() -> None:
    complains_of(lambda _, own: own[3:4].add_(1) and None, "input 0 was written to")


def complains_of_an_output_that_somebody_else_fills() -> None:
    complains_of(lambda output, _: output[-1:].zero_() and None, "output 0 was written to")


def complains_of_an_output_that_is_freed() -> None:
    complains_of(lambda output, _: output.untyped_storage().resize_(0), "output 0 was freed")


def complains_of_an_input_that_nobody_keeps() -> None:
    def drop_an_input() -> None:
        with hostile(dist.get_rank()):
            work, _, own = gathering()
            del own
            with pytest.raises(AssertionError, match="input 0 was dropped"):
                work.wait()

    with pytest.raises(AssertionError, match="input 0 was dropped"):
        drop_an_input()


def complains_of_what_is_freed_and_never_waited_for() -> None:
    def give_up() -> None:
        with hostile(dist.get_rank()):
            work, output, _ = gathering()
            output.untyped_storage().resize_(0)
            del work

    with pytest.raises(AssertionError, match="nobody has waited"):
        give_up()


def test_the_scheduler_is_hostile() -> None:
    checks = (
        fills_outputs_when_they_are_waited_for,
        poisons_what_is_freed_and_allocated,
        complains_of_an_input_that_changes,
        complains_of_an_output_that_somebody_else_fills,
        complains_of_an_output_that_is_freed,
        complains_of_an_input_that_nobody_keeps,
        complains_of_what_is_freed_and_never_waited_for,
    )
    run_checks(2, [(check.__name__, check) for check in checks])


# ---- training --------------------------------------------------------------------------------------------------------


def by_blocks() -> dict[str, Any]:
    return {}


def by_columns() -> dict[str, Any]:
    """Packed, and copied out of what was gathered."""
    return {"shard_placement_fn": lambda param: Shard(param.ndim - 1)}


def cast() -> dict[str, Any]:
    """A cast before the gather, and another dtype in the reduction."""
    return {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)}


def part_stays() -> dict[str, Any]:
    """After forward, what this rank can gather again from itself."""
    return {"reshard_after_forward": 1}


def replicas() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))}


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[2]))
def test_training_under_a_hostile_scheduler(world_size: int) -> None:
    def scenario(run: Run, options: Callable[[], dict[str, Any]]) -> None:
        model = run.build(Net)
        with hostile(run.rank) if run.sharded else nullcontext():
            if run.sharded:
                chosen = options()
                for module in (*model.blocks, model.head, model):
                    run.shard(module, **chosen)
            train(run, model)

    check(scenario, world_size, TOLERANCE, options=(by_blocks, by_columns, cast, part_stays, replicas))


def train(run: Run, model: nn.Module) -> None:
    optimizer = sgd(model)
    for step in range(2):
        run.set_sync(model, False)
        loss_of(model(run.batch(seed=10 + step))).backward()
        run.set_sync(model, True)
        with torch.no_grad():
            run.rows("evaluated", model(run.batch(seed=step)))
        loss_of(model(run.batch(seed=step))).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            run.value(f"step {step}: {name}.grad", full(param.grad))
        optimizer.step()
        optimizer.zero_grad()
