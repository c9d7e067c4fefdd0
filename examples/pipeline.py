"""Trains a pipeline of two stages, each sharded over half of the ranks, with micro-batches by torch's own schedules.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/pipeline.py
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 examples/pipeline.py --schedule InterleavedZeroBubble

torch.distributed.pipelining checks if a stage is sharded by torch's FSDP2: `patch_torch` makes it check for fsdp2, and
is called before its import. Each stage then accumulates the gradients of its micro-batches, and reduces them once.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_text import DOCUMENTATION, LAYERS, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, say
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import fully_shard, patch_torch

patch_torch()
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import get_schedule_class  # noqa: E402

PIPELINE, MICRO_BATCHES = 2, 4


class Part(nn.Module):
    """Holds some layers of the GPT under their own names, so that the stages' checkpoints are the whole model's."""

    def __init__(self, gpt: nn.Module, index: int, count: int) -> None:
        super().__init__()
        # Cut between the layers that carry the stream: embeddings, blocks, head.
        names = ["embeddings", *(str(i) for i in range(LAYERS)), "head"]
        own = names[index * len(names) // count : (index + 1) * len(names) // count]
        self.layers = ", ".join(f"block {name}" if name.isdigit() else name for name in own)
        self.blocks = nn.ModuleDict({name: gpt.blocks[int(name)] for name in own if name.isdigit()})
        if "embeddings" in own:
            self.byte_embedding, self.position_embedding = gpt.byte_embedding, gpt.position_embedding
        if "head" in own:
            self.norm, self.head = gpt.norm, gpt.head

    def forward(self, stream: Tensor) -> Tensor:
        if hasattr(self, "byte_embedding"):
            stream = self.byte_embedding(stream) + self.position_embedding.weight
        for block in self.blocks.values():
            stream = block(stream)
        return self.head(self.norm(stream)) if hasattr(self, "head") else stream


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def note_order(stage: PipelineStage, order: list[str]) -> None:
    """Notes what a stage does to which micro-batch: F forward, B backward, W the part of backward for weights."""
    which = f"{stage.stage_index}:" if stage.num_stages > PIPELINE else ""

    def noted(letter: str, run: Callable[..., Any], index: int, *args: Any, **kwargs: Any) -> Any:
        order.append(f"{which}{letter}{index}")
        return run(index, *args, **kwargs)

    for name, letter in (("forward_one_chunk", "F"), ("backward_one_chunk", "B"), ("backward_weight_one_chunk", "W")):
        setattr(stage, name, partial(noted, letter, getattr(stage, name)))


def say_order(order: list[str], layers: str, data: DeviceMesh) -> None:
    """Prints what each rank did in the first step. Every rank must call it."""
    line = f"rank {dist.get_rank()}, {layers}, 1/{data.size()} of each parameter: {' '.join(order)}"
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line if data.get_local_rank() == 0 else None)
    say("the first step on each rank: F forward, B backward, W for the weights, with the number of the micro-batch")
    for each in filter(None, lines):
        say(f"  {each}")
    order.clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1F1B")
    schedule_class = get_schedule_class(parser.parse_args().schedule)
    device = join_ranks(multiple_of=2 * PIPELINE)
    mesh_shape = (PIPELINE, dist.get_world_size() // PIPELINE)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("pipeline", "data"))
    pipeline, data = mesh["pipeline"], mesh["data"]

    gpt, place = make_gpt(device), pipeline.get_local_rank()
    looped = schedule_class.__name__.startswith(("ScheduleInterleaved", "ScheduleLooped"))
    count = 2 * PIPELINE if looped else PIPELINE
    stages, layers, order = [], list[str](), list[str]()
    for index in range(place, count, PIPELINE):
        part = Part(gpt, index, count)
        for block in part.blocks.values():
            fully_shard(block, mesh=data)
        fully_shard(part, mesh=data)
        stages.append(PipelineStage(part, index, count, device, group=pipeline.get_group()))
        layers.append(f"stage {index} ({part.layers})")
        note_order(stages[-1], order)
    schedule = schedule_class(stages if looped else stages[0], MICRO_BATCHES, loss_fn=cross_entropy)

    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        inputs, targets = text.batch(step, data.get_local_rank(), data.size())
        losses: list[Tensor] = []
        if place == PIPELINE - 1:  # has the last stage
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(inputs.contiguous())  # torch 2.11 insists
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            say_order(order, " and ".join(layers), data)
        if losses:
            mean = torch.stack([loss.detach() for loss in losses]).mean() / data.size()
            dist.all_reduce(mean, group=data.get_group())
            if data.get_local_rank() == 0:
                print(f"step {step:2}: loss {mean.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
