"""The order of streams is right in every way of training: no race, and no memory that goes back while it is used."""

import torch
from simulated_world import count_host_waits, simulated_world

from fsdp2 import fully_shard
from models import TinyGPT, mean_loss


def test_plain() -> None:
    with simulated_world(4) as simulation:
        model = TinyGPT(dim=96, depth=4)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step() -> None:
            batch = model.example(rows=2, seed=0)
            mean_loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        waits = [count_host_waits(simulation, step) for _ in range(6)]
    assert not simulation.problems, "\n".join(simulation.problems)
    assert not waits[-1], waits
