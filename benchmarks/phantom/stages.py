"""Runs the stages that one rank of a pipeline has, by torch's own schedules.

No other rank takes part, so that sends and receives move nothing. Each batch of them is a mark in the log, and so is
each wait for one. `pipeline` replays the logs of all ranks together by these marks. A replay of one rank alone has no
bubbles.
"""

import argparse
import ctypes
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

    def __init__(self, model: Model, index: int, sizes: list[int]) -> None:
        super().__init__()
        self.index, self.is_last = index, index == len(sizes) - 1
        first = sum(sizes[:index])
        self.blocks = model.blocks[first : first + sizes[index]]
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
    embedding, head = map(int, args.ends.split(","))
    sizes = count_blocks(len(model.blocks), number * args.pipeline, embedding, head)
    return [Stage(model, args.place + i * args.pipeline, sizes) for i in range(number)]


def count_blocks(layers: int, stages: int, embedding: int, head: int) -> list[int]:
    """Returns the number of blocks of each stage. As in torchtitan, embedding and head count as so many blocks, and the
    first stages have one more if they cannot be equal.

    Raises:
        ValueError: a stage would have no block.
    """
    size, rest = divmod(layers + embedding + head, stages)
    sizes = [size + (index < rest) for index in range(stages)]
    sizes[0] -= embedding
    sizes[-1] -= head
    if min(sizes) < 1:
        raise ValueError(f"expected fewer blocks for embedding and head, got stages of {sizes} blocks")
    return sizes


class MarkedBatch:
    """A batch of sends and receives of torch's schedules: a mark in the log where it begins, and one for each wait.

    ">F0.2" sends the output of stage 0 for micro-batch 2, and "<F0.2" receives it. ">B1.2" sends the gradient of the
    input of stage 1.
    """

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages

    @classmethod
    def begin(cls, messages: list[str], desc: str | None = None) -> "list[MarkedBatch]":
        """Begins a batch, in place of `torch.distributed.pipelining.schedules._batch_p2p`."""
        batch = cls(messages)
        batch._mark("begin")
        return [batch]

    def wait(self) -> None:
        self._mark("wait")

    def _mark(self, verb: str) -> None:
        if self.messages:
            ctypes.CDLL("libcudart.so.13").phantom_mark(" ".join(("p2p", verb, *self.messages)).encode())


def prepare(stages: list[Stage], shape: Shape, ids: Tensor, args: argparse.Namespace) -> Callable[[], object]:
    """Returns a function that runs all micro-batches of a step."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    pipelining = importlib.import_module("torch.distributed.pipelining")
    group = dist.new_group([*range(args.pipeline)], backend="fake")

    pipelining.schedules._batch_p2p = MarkedBatch.begin

    class AloneStage(pipelining.PipelineStage):  # type: ignore[name-defined, misc]
        def get_fwd_recv_ops(self, chunk: int) -> list[str]:
            return [] if self.is_first else [f"<F{self.stage_index - 1}.{chunk}"]

        def get_fwd_send_ops(self, chunk: int) -> list[str]:
            return [] if self.is_last else [f">F{self.stage_index}.{chunk}"]

        def get_bwd_recv_ops(self, chunk: int) -> list[str]:
            return [] if self.is_last else [f"<B{self.stage_index + 1}.{chunk}"]

        def get_bwd_send_ops(self, chunk: int) -> list[str]:
            return [] if self.is_first else [f">B{self.stage_index}.{chunk}"]

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
