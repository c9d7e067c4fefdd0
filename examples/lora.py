"""Fine-tunes by adapters: a model that knows English documentation learns Python code, with its own weights frozen.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/lora.py

Frozen and trainable weights are sharded in the same groups. Only the adapters have gradients, reductions and optimizer
state, and only they are saved at the end: besides the base model, nothing else is needed.
"""

import argparse  # its source is the text to learn
import copy
import inspect
import tempfile

import torch
import torch.distributed as dist
from tiny_text import DOCUMENTATION, GPT, LEARNING_RATE, STEPS, Text, join_ranks, make_gpt, report, say
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard

TUNING_STEPS = 30


class Adapted(nn.Module):
    """Is a frozen linear layer, plus the product of two thin matrices that starts as zero."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def add_adapters(model: GPT) -> None:
    for parent in (model, *model.blocks):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(parent, name, Adapted(layer))


def pretrain(device: torch.device) -> GPT:
    """Trains the base model, in place of a download. Each rank does all of it by itself, with the same result."""
    model = make_gpt(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = Text(DOCUMENTATION, device)
    for step in range(1, STEPS + 1):
        model(*text.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size,))

    model = pretrain(device).requires_grad_(False)
    add_adapters(model)
    plain_model = copy.deepcopy(model.to(device))  # to load the saved adapters into
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=LEARNING_RATE)
    text = Text(inspect.getsource(argparse), device)
    for step in range(1, TUNING_STEPS + 1):
        optimizer.zero_grad()
        loss = model(*text.batch(step, rank, world_size))
        loss.backward()
        optimizer.step()
        report(step, loss)
    with_gradient = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.grad is not None}
    say(f"parameters with gradients are all named {' or '.join(sorted(with_gradient))}")

    with torch.no_grad():
        report(TUNING_STEPS + 1, model(*text.batch(TUNING_STEPS + 1, rank, world_size)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)  # every rank must call it, the first gets all
    # Of frozen parameters that are tied, such as embedding and head, torch leaves one in the state dict.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = {name: value for name, value in state.items() if name in trained}
    if rank == 0:
        saved, whole = (sum(map(Tensor.numel, tensors)) for tensors in (state.values(), plain_model.parameters()))
        say(f"saved are {saved:,} numbers of {whole:,}")
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            torch.save(state, f"{folder}/adapters.pt")
            plain_model.load_state_dict(torch.load(f"{folder}/adapters.pt"), strict=False)
            say(f"base model with saved adapters: loss {plain_model(*text.batch(TUNING_STEPS + 1)).item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
