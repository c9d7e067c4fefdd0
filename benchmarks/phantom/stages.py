"""Runs the stages that one rank of a pipeline has, by torch's own schedules.

What stages send to each other takes no time and moves nothing, and no other rank takes part: bubbles of a pipeline are
left out. All else of a step is there.
"""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Model, Shape

# Of these schedules each rank has one stage, of others two.
OF_ONE_STAGE = ("GPipe", "1F1B")


class Stage(nn.Module):
    """A stage of a Llama: some of its blocks, and at the ends of the pipeline embedding or head."""

    def __init__(self, model: Model, index: int, count: int) -> None:
        super().__init__()
        size, rest = divmod(len(model.blocks), count)
        if rest:
            raise ValueError(f"expected a number of layers that {count} stages divide, got {len(model.blocks)}")
        self.index, self.is_last = index, index == count - 1
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.embedding = model.embedding if index == 0 else None
        self.norm, self.head = (model.norm, model.head) if self.is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def cut(model: Any, args: argparse.Namespace) -> list[Stage]:
    """Returns the stages of this rank."""
    number = 1 if args.schedule in OF_ONE_STAGE else 2
    count = number * args.pipeline
    return [Stage(model, args.place + i * args.pipeline, count) for i in range(number)]


def prepare(stages: list[Stage], shape: Shape, ids: Tensor, args: argparse.Namespace) -> Callable[[], object]:
    """Returns a function that runs all micro-batches of a step."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    pipelining = importlib.import_module("torch.distributed.pipelining")
    group = dist.new_group([*range(args.pipeline)], backend="fake")

    class AloneStage(pipelining.PipelineStage):  # type: ignore[name-defined, misc]
        def _exchanges_nothing(self, chunk: int) -> list[dist.P2POp]:
            return []

        get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _exchanges_nothing

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return []

    def make(stage: Stage) -> Any:
        stream = torch.empty(*ids.shape, shape.dim, dtype=torch.float32 if args.fp32 else torch.bfloat16, device="meta")
        given = ids.to("meta") if stage.embedding is not None else stream
        returned = stream.new_empty(*ids.shape, shape.vocab) if stage.is_last else stream
        count = args.pipeline * len(stages)
        made = AloneStage(stage, stage.index, count, ids.device, given, returned, group=group)
        made.group_rank = args.place
        return made

    make_schedule = getattr(pipelining.schedules, f"Schedule{args.schedule}")
    made = [make(stage) for stage in stages]
    schedule = make_schedule(made[0] if args.schedule in OF_ONE_STAGE else made, args.micro_batches, loss_of)
    whole = ids.repeat(args.micro_batches, 1)
    given = [whole] if stages[0].embedding is not None else []
    targets = {"target": whole} if stages[-1].is_last else {}
    return lambda: schedule.step(*given, **targets)


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), ids.flatten())
