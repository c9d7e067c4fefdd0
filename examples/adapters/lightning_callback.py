"""Trains with fsdp2 under Lightning's Trainer by a callback. The LightningModule says nothing of sharding.

    OMP_NUM_THREADS=1 python examples/adapters/lightning_callback.py

Lightning's `ModelParallelStrategy` starts the processes, makes the mesh, and saves and loads shards as checkpoints.
`ShardedByFsdp2`, a callback, does the rest:

- Behind `configure_model`, and before the optimizer is built, it gives all ranks the first one's weights, and shards
  the model block by block.
- Before the first step it looks for mistakes by `fsdp2.check`.
- It clips by `fsdp2.clip_grad_norm_`, by the norm of the gradients of all ranks.
- While micro-batches are accumulated, gradients are reduced once, in the last of them.
- It logs the loss of each step and the norm of its gradients.

The program trains a small model on two processes, saves it, goes on from there in a second Trainer, and prints losses.
"""

import os
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fsdp2


class ShardedByFsdp2(lightning.Callback):
    """Shards a part of a LightningModule, under `ModelParallelStrategy`.

    Args:
        blocks: classes of modules that become groups of their own: transformer blocks.
        path: the submodule to shard. `training_step` must call its forward, and no module inside of it directly.
        max_norm: clips the gradients to this norm, in place of Lightning's `gradient_clip_val`. None: not.
        options: further arguments of `fsdp2.fully_shard`: `mp_policy`, `reshard_after_forward`.
    """

    def __init__(
        self,
        blocks: Iterable[type[nn.Module]],
        path: str = "model",
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        self._blocks, self._path, self._max_norm = tuple(blocks), path, max_norm
        self._options = options
        self._forget()

    def _forget(self) -> None:
        self._loss, self._norm = 0.0, None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Has the module sharded as soon as Lightning has called `configure_model`."""
        if not isinstance(trainer.strategy, ModelParallelStrategy):
            raise TypeError(
                f"strategy: expected a ModelParallelStrategy, got a {type(trainer.strategy).__name__}. Pass "
                "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1) to the Trainer."
            )
        if self._max_norm is not None and trainer.gradient_clip_val is not None:
            raise ValueError(
                "max_norm: the Trainer has gradient_clip_val, too, and would clip again. Pass one of them."
            )
        configure = pl_module.configure_model

        def configure_model() -> None:
            configure()
            self._shard(pl_module.get_submodule(self._path), trainer.strategy.device_mesh["data_parallel"])

        pl_module.configure_model = configure_model

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del pl_module.configure_model  # the instance's, that `setup` has made

    def _shard(self, model: nn.Module, mesh: Any) -> None:
        if isinstance(model, fsdp2.FSDPModule):
            return  # it has been trained before
        if not any(each.is_meta for each in model.parameters()):
            fsdp2.sync_module_states(model)
        for module in list(model.modules()):
            if isinstance(module, self._blocks) and module is not model:
                fsdp2.fully_shard(module, mesh=mesh, **self._options)
        fsdp2.fully_shard(model, mesh=mesh, **self._options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = pl_module.get_submodule(self._path)
        found = [finding for finding in fsdp2.check(model, trainer.optimizers) if not finding.is_note]
        if found:
            raise RuntimeError("fsdp2.check has found:\n" + "\n".join(map(str, found)))
        self._forget()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        pl_module.get_submodule(self._path).set_requires_gradient_sync(ends_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        max_norm = float("inf") if self._max_norm is None else self._max_norm
        self._norm = fsdp2.clip_grad_norm_(pl_module.get_submodule(self._path).parameters(), max_norm)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loss = self._loss + outputs["loss"].detach()  # Lightning has divided it by the micro-batches
        if self._norm is None:
            return  # no step yet
        pl_module.log_dict({"loss": self._loss, "grad_norm": self._norm}, sync_dist=True)
        self._forget()


# ---- the program ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Successor(lightning.LightningModule):
    """Learns which number follows another."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(32, 16), Block(16), Block(16), nn.Linear(16, 32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), (batch.flatten() + 1) % 32)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = self.trainer.callback_metrics
        if self.global_rank == 0 and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            loss, norm = (numbers[name] for name in ("loss", "grad_norm"))
            print(f"step {self.global_step}: loss {loss:.4f}, norm {norm:.3f}")


def main() -> None:
    folder = os.environ.setdefault("CHECKPOINTS", tempfile.mkdtemp())  # Lightning starts this program once more
    torch.manual_seed(0)
    data = torch.randint(32, (12, 8, 8))
    path = None
    for epochs, rows in ((1, data[:6]), (2, data[6:])):
        module = Successor()
        trainer = lightning.Trainer(
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            callbacks=[ShardedByFsdp2([Block], max_norm=1.0)],
            max_epochs=epochs,
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        loader = DataLoader(list(rows.flatten(0, 1)), batch_size=4)
        trainer.fit(module, loader, ckpt_path=path)
        path = os.path.join(folder, f"epoch-{epochs}")
        trainer.save_checkpoint(path)


if __name__ == "__main__":
    sys.exit(main())
