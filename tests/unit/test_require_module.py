"""Tests that public functions which take a module say alike that something else is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import checkpoint, hf
from fsdp2.shards.find import shards_of

CASES: dict[str, Callable[[Any], object]] = {
    "split_matrices: model": fsdp2.split_matrices,
    "wrap_groups: model": fsdp2.wrap_groups,
    "save_model: model": lambda model: hf.save_model(model, "folder"),
    "load_model: model": lambda model: hf.load_model(model, "folder"),
    "sync_module_states: module": fsdp2.sync_module_states,
    "describe: model": fsdp2.describe,
    "shards_of: module": shards_of,
    "check: model": fsdp2.check,
    "compare: model": lambda model: fsdp2.compare(nn.Linear(1, 1), model, torch.ones(1, 1)),
    "register_fsdp_forward_method: module": lambda module: fsdp2.register_fsdp_forward_method(module, "generate"),
    "save: model": lambda model: checkpoint.save("folder", model),
    "load: model": lambda model: checkpoint.load("folder", model),
}


@pytest.mark.parametrize("where", CASES)
def test_what_is_no_module_is_refused(where: str) -> None:
    with pytest.raises(TypeError, match=f"^{where}: expected an nn.Module, got str$"):
        CASES[where]("a path")
