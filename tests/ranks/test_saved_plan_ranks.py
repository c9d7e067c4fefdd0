"""Tests that ranks train by a plan in a file as by the plan itself. (trace/test_saved_plan.py has what files hold.)"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from helpers import full, run_ranks


def test_ranks_train_by_a_file(tmp_path: Path) -> None:
    """As by Plan.apply, to the bit."""

    def body(rank: int, world_size: int) -> list[Any]:
        found = []
        for way in ("apply", "file"):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
            plan = fsdp2.plan(model, ranks=2, batch=lambda: torch.ones(2, 6), policy=nn.Linear, device="cpu")
            mesh = init_device_mesh("cpu", (2,))
            if way == "apply":
                plan.apply(mesh)
            else:
                if rank == 0:
                    plan.save(tmp_path / "plan.json")
                dist.barrier()
                fsdp2.apply_plan(model, tmp_path / "plan.json", mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(2, 6) * (rank + 1)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([full(param).detach().clone() for param in model.parameters()])
        return found

    for one, other in run_ranks(2, body):
        assert all(map(torch.equal, one, other))
