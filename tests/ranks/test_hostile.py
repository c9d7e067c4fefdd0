"""Tests the hostile scheduler. test_training.py trains under it; all tests of this folder can, see hostile.py."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.comm import CommLabel, Work
from helpers import run_checks
from hostile import hostile

BYTES = 24


def gathering() -> tuple[Work, Tensor, Tensor]:
    comm = NamedPairwiseComm(dist.group.WORLD, CommLabel())
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
