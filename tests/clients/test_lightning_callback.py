"""Tests the callback of examples/adapters, with Lightning's Trainer, against plain training on the whole batch."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from client_training import (
    BATCHES,
    MAX_NORM,
    Record,
    assert_sharded,
    batches,
    fresh,
    mean_of_ranks,
    own_part,
    pretend_torchrun,
    second_half,
    sgd,
    trained_plainly,
)
from documents import ROOT
from helpers import alone, run_checks
from models import CausalBlock, mean_loss

lightning = pytest.importorskip("lightning")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def module_of(record: Record, seed: int = 1) -> Any:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = fresh()
            if torch.distributed.get_rank() > 0:  # the callback gives all ranks the first one's weights
                torch.nn.init.zeros_(self.model.head.weight)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = mean_loss(self.model(batch))
            record.add(f"loss {index}", mean_of_ranks(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            logged = self.trainer.callback_metrics
            if (index + 1) % self.trainer.accumulate_grad_batches == 0:
                record.add(f"norm {index}", logged["grad_norm"].double())
                record.add(f"mean {index}", logged["loss"].double())

    return Module()


def trainer_of(folder: Path, callback: Any, **options: Any) -> Any:
    strategy = lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False, "default_root_dir": folder}
    options = {"max_epochs": 1, "log_every_n_steps": 1, "strategy": strategy} | options
    return lightning.Trainer(accelerator="cpu", devices=2, callbacks=[callback], **options, **quiet)


def callback_of(**options: Any) -> Any:
    from examples.adapters.lightning_callback import ShardedByFsdp2

    return ShardedByFsdp2([CausalBlock], **options)


def loader(first: int = 0, last: int = BATCHES) -> Any:
    return torch.utils.data.DataLoader([own_part(batch) for batch in batches(first, last)], batch_size=None)


def fits(expected: dict[str, Tensor], folder: Path, per_step: int) -> None:
    """Clipped by the norm over all ranks, of micro-batches that are accumulated."""
    pretend_torchrun()
    record = Record()
    module = module_of(record)
    trainer_of(folder, callback_of(max_norm=MAX_NORM), accumulate_grad_batches=per_step).fit(module, loader())
    assert_sharded(module, "fsdp2", at_least=3)
    assert "configure_model" not in vars(module)
    record.add_params(module.model.named_parameters())
    for i in range(per_step - 1, BATCHES, per_step):
        losses = [record.values[f"loss {j}"] for j in range(i + 1 - per_step, i + 1)]
        torch.testing.assert_close(record.values.pop(f"mean {i}"), sum(losses) / per_step, rtol=1e-6, atol=0)
        torch.testing.assert_close(record.values.pop(f"norm {i}"), expected.pop(f"norm {i}"), rtol=1e-6, atol=0)
    record.assert_like(expected)


def resumes(expected: dict[str, Tensor], folder: Path) -> None:
    pretend_torchrun()
    before, after = Record(), Record()
    first = trainer_of(folder, callback_of(max_norm=MAX_NORM))
    first.fit(module_of(before), loader(0, 2))
    first.save_checkpoint(folder / "half")
    module = module_of(after)
    trainer_of(folder, callback_of(max_norm=MAX_NORM), max_epochs=2).fit(
        module, loader(2, 4), ckpt_path=folder / "half"
    )
    after.add_params(module.model.named_parameters())
    logged = ("norm ", "mean ")
    after.values = {name: value for name, value in after.values.items() if not name.startswith(logged)}
    expected = {name: value for name, value in expected.items() if not name.startswith("norm ")}
    after.assert_like(second_half(expected))


def refuses(folder: Path) -> None:
    pretend_torchrun()
    trainer = trainer_of(folder, callback_of(max_norm=1.0), gradient_clip_val=1.0)
    with pytest.raises(ValueError, match="gradient_clip_val, too"):
        trainer.fit(module_of(Record()), loader())
    trainer = trainer_of(folder, callback_of(), strategy="ddp")
    with pytest.raises(TypeError, match="expected a ModelParallelStrategy, got a DDPStrategy"):
        trainer.fit(module_of(Record()), loader())


def checks_first(folder: Path) -> None:
    """An optimizer that lacks a parameter is found before the first step."""
    pretend_torchrun()
    record = Record()
    module = module_of(record)
    module.configure_optimizers = lambda: sgd(module.model.blocks)
    with pytest.raises(RuntimeError, match=r"fsdp2\.check has found"):
        trainer_of(folder, callback_of()).fit(module, loader())
    assert not record.values
    assert isinstance(module.model, fsdp2.FSDPModule)


def test_callback(tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for per_step in (1, 2):
        expected = alone(partial(trained_plainly, clip=True, per_step=per_step))
        checks.append((f"fits, {per_step} batches a step", partial(fits, expected, tmp_path, per_step)))
    expected = alone(partial(trained_plainly, clip=True))
    checks.append(("resumes", partial(resumes, expected, tmp_path)))
    checks += [("refuses", partial(refuses, tmp_path)), ("checks first", partial(checks_first, tmp_path))]
    run_checks(2, checks)


def test_program() -> None:
    """Lightning starts it a second time, as the second rank."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "adapters" / "lightning_callback.py")]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+), norm \S+$", done.stdout, re.M)]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True), "the second Trainer goes on where the first has ended"
