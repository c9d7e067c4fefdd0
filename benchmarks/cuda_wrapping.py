"""Gives models memory and optimizers a schedule on a GPU, real or simulated."""

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

BF16, FP32 = torch.bfloat16, torch.float32


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Gives a model that was built on meta, sharded or not, small random weights on `device`."""
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.normal_(std=0.02)
    return model


def step_with_overlap(optimizer: Any) -> Any:
    """Returns an optimizer of fsdp2's parameters that steps during the next forward. Before torch 2.13 nothing tells of
    writes to gradients, for which it asks. So it is for programs that do not write to them.
    """
    importlib.import_module("fsdp2.devices.write_notices").notices.sees_operations = True
    return importlib.import_module("fsdp2").flatten_optimizer(optimizer, overlap_with_forward=True)
