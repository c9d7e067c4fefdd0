"""Tests that training without all private names of torch that it does not need has the same bits.

They are hidden at once from processes that train.

    python tests/processes/test_hidden_names.py RANK STORE NAME ...    # one of the two ranks of that training
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Checkpoints each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


def train(rank: int) -> str:
    """Trains in bf16, with checkpointing, two micro-batches, clipping, AdamW, and a state dict that is loaded. Returns
    a digest of all losses and full parameters.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )

    from fsdp2 import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model: Any = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for step in range(4):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            torch.manual_seed(100 * step + 10 * rank + is_last)
            loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            digest.update(loss.detach().numpy().tobytes())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            set_model_state_dict(model, get_model_state_dict(model))
    options = StateDictOptions(full_state_dict=True)
    states = get_model_state_dict(model, options=options)
    assert get_optimizer_state_dict(model, optimizer, options=options) or rank
    for name, value in sorted(states.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Trains as one of two ranks, and prints the digest."""
    rank, store, *hidden = sys.argv[1:]
    assert "fsdp2" not in sys.modules, "it is imported before the names are hidden"
    hide_from_import(hidden)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    print("digest", train(int(rank)))
    refuse_a_mode()
    dist.destroy_process_group()


def hide_from_import(paths: list[str]) -> None:
    """Hides `paths` from the package itself, which is imported next: its lookups are those that look."""
    usual_get, usual_import = builtins.getattr, importlib.import_module
    parents = {path: path.rpartition(".") for path in paths}

    def looks() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == "fsdp2.torch_private.lookup"

    def prefix() -> str:
        return str(sys._getframe(2).f_locals.get("prefix", ""))

    def get(owner: Any, name: str, *default: Any) -> Any:
        if looks() and prefix() in parents:
            raise AttributeError(name)
        return usual_get(owner, name, *default)

    def module(name: str, package: str | None = None) -> ModuleType:
        if looks() and name in parents:
            raise ModuleNotFoundError(name)
        return usual_import(name, package)

    builtins.getattr, importlib.import_module = get, module  # type: ignore[assignment]


def refuse_a_mode() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp2 import fully_shard

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match="TorchDispatchMode and TorchFunctionMode"), Mode():
        model(torch.ones(2, 4))
    print("refused")


def test_training_without_the_others_is_the_same(tmp_path: Path) -> None:
    from helpers import run_ranks
    from private_names import OTHERS

    expected = run_ranks(2, lambda rank, _: train(rank))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store"), *OTHERS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for (out, error), digest in zip(outputs, expected, strict=True):
        assert out.split("digest ")[1].split()[0] == digest
        assert "refused" in out
        assert "off, because torch" in error


if __name__ == "__main__":
    main()
