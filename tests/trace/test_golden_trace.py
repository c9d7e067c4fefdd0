"""Tests the events of one whole iteration, as text. Regenerate it with EXPECTTEST_ACCEPT=1, and read the difference.

These are the ways of training that show the schedule to a reader, and those that test_schedule_model.py leaves out.

The model has three blocks (4 x 4 weight and bias each: 80 bytes) and a weight and bias in the root, on 4 ranks, one of
which is simulated. The first iteration is not shown: it has no recorded order yet, so it gathers nothing ahead in
forward.
"""

from unittest import mock

import expecttest
import torch
from recorder import Root, in_text, record
from torch import Tensor

from fsdp2 import full_params, fully_shard
from fsdp2.features import large_submodules
from helpers import fake_world


class WithLoss(Root):
    """Its head is a group of its own, with whose weight a loss is computed: inside forward, or behind it."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        x = self.end(self.b2(self.b1(self.b0(x))) * self.scale)
        return self.loss(x) if self.inside else x

    def loss(self, x: Tensor) -> Tensor:
        with full_params(self.head) as named:
            self.lines.append("loss")
            return torch.nn.functional.linear(x, **named).sum()

    def trace_of_second_iteration(self) -> str:
        for module in (*self.blocks(), self.head, self):
            fully_shard(module)
        lines = record(self)
        for _ in range(2):
            lines.clear()
            output = self(torch.ones(2, 4))
            (output if self.inside else self.loss(output)).backward()
        return in_text(lines)


class WithChunks(Root):
    """A loss calls its head on two chunks of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        return self.b2(self.b1(self.b0(x * self.scale)))

    def trace_of_second_iteration(self) -> str:
        for module in (*self.blocks(), self):
            fully_shard(module)
        lines = record(self)
        for _ in range(2):
            lines.clear()
            chunks = self(torch.ones(2, 4)).chunk(2)
            sum(self.head(chunk).sum() for chunk in chunks).backward()
        return in_text(lines)


def trace_of_second_iteration(model: Root, **kwargs: object) -> str:
    for module in (*model.blocks(), model):
        fully_shard(module, **kwargs)
    return trace_of_the_second(model)


def trace_of_the_second(model: Root) -> str:
    lines = record(model)
    for _ in range(2):
        lines.clear()
        # Reentrant checkpointing works only on inputs that need a gradient.
        model(torch.ones(2, 4, requires_grad=bool(model.reentrant))).sum().backward()
        model.zero_grad()
    return in_text(lines)


class TestGoldenTrace(expecttest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        world = fake_world(4)
        world.__enter__()
        self.addCleanup(world.__exit__, None, None, None)

    def test_default(self) -> None:
        """Each gather begins one group ahead; backward in reverse; what it needs at once stays from forward on."""
        self.assertExpectedInline(
            trace_of_second_iteration(Root()),
            """\
gather root 128, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1
run b2
back root, free root, reduce root 128
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128""",
        )

    def test_lists(self) -> None:
        """Three modules as one group: gathered at the first one's forward and freed after the last one's; and back."""
        model = Root()
        fully_shard(model.blocks(), reshard_after_forward=True)
        fully_shard(model)
        self.assertExpectedInline(
            trace_of_the_second(model),
            """\
gather root 128, gather b0 256
run root
run b0
run b1
run b2, free b0, gather b0 256
back root, free root, reduce root 128
back b2
back b1
back b0, free b0, reduce b0 256""",
        )

    def test_a_list_that_stays(self) -> None:
        """Backward gathers the block before a list while it runs the list's last module, not only behind its first."""
        model = Root(4)
        *blocks, last, after_last = model.blocks()
        for block in blocks:
            fully_shard(block, reshard_after_forward=True)
        fully_shard([last, after_last], reshard_after_forward=False)
        fully_shard(model)
        self.assertExpectedInline(
            trace_of_the_second(model),
            """\
gather root 128, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 192
run b1, free b1
run b2
run b3
back root, free root, reduce root 128, gather b1 128
back b3
back b2, free b2, reduce b2 192, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128""",
        )

    def test_checkpoint_reentrant(self) -> None:
        """A block runs again in backward, and its gradients come in a backward inside backward."""
        self.assertExpectedInline(
            trace_of_second_iteration(Root(reentrant=True)),
            """\
gather root 128, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1, free b1
run b2, free b2, gather b2 128
back root, free root, reduce root 128, gather b1 128
run b2
back b2, reduce b2 128, free b2, gather b0 128
run b1
back b1, reduce b1 128, free b1
run b0
back b0, reduce b0 128, free b0""",
        )

    def test_large_submodules(self) -> None:
        """The root's head, were it large, runs by itself: last in forward, first in backward, free when reduced."""
        with mock.patch.object(large_submodules, "MIN_BYTES", 1):
            self.assertExpectedInline(
                trace_of_second_iteration(Root()),
                """\
gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1, free b1, gather head 128
run b2
back root, free head, reduce head 128, gather b1 128
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128, free root""",
            )

    def test_a_loss_calls_the_head(self) -> None:
        """Unsharded parameters that stay for backward serve the calls. A large head is gathered at the first one."""
        self.assertExpectedInline(
            WithChunks().trace_of_second_iteration(),
            """\
gather root 128, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1
run b2
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128, free root, reduce root 128""",
        )
        with mock.patch.object(large_submodules, "MIN_BYTES", 1):
            self.assertExpectedInline(
                WithChunks().trace_of_second_iteration(),
                """\
gather root 64, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1, free b1, gather head 128
run b2, free head, gather head 128, free head, reduce head 128, gather b1 128
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128, free root, reduce root 64""",
            )

    def test_full_params_in_forward(self) -> None:
        """Like a module that runs: gathered ahead, and as the last of the pass there for backward."""
        self.assertExpectedInline(
            WithLoss(inside=True).trace_of_second_iteration(),
            """\
gather root 64, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1, free b1, gather head 128
run b2, loss, free head, reduce head 128
back root, free root, reduce root 64, gather b1 128
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128""",
        )

    def test_full_params_after_forward(self) -> None:
        """The forward before it keeps its order; what the block gave up is gathered again when backward needs it."""
        self.assertExpectedInline(
            WithLoss(inside=False).trace_of_second_iteration(),
            """\
gather root 64, gather b0 128
run root, gather b1 128
run b0, free b0, gather b2 128
run b1
run b2, gather head 128, loss, free head, gather head 128, free head, reduce head 128
back root, free root, reduce root 64
back b2, free b2, reduce b2 128, gather b0 128
back b1, free b1, reduce b1 128
back b0, free b0, reduce b0 128""",
        )
