"""Tests Lightning: `ModelParallelStrategy` of Fabric, whose `parallelize_fn` calls `fully_shard`, and of Trainer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from client_training import (
    IMPLEMENTATIONS,
    MAX_NORM,
    Record,
    assert_sharded,
    batches,
    fresh,
    mean_of_ranks,
    oracle_of,
    own_part,
    pretend_torchrun,
    second_half,
    sgd,
    trained_plainly,
    using,
)
from helpers import alone, run_checks
from models import TinyGPT, mean_loss

lightning = pytest.importorskip("lightning")
fabric = pytest.importorskip("lightning.fabric")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As a user of Lightning writes it."""
    from torch.distributed._composable.fsdp.fully_shard import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def launched(save_distributed_checkpoint: bool = True) -> Any:
    from lightning.fabric.strategies import ModelParallelStrategy

    pretend_torchrun()
    strategy = ModelParallelStrategy(
        parallelize,
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=save_distributed_checkpoint,
    )
    launched = fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    launched.launch()
    return launched


def set_up(fabric: Any, implementation: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = fresh()
    model = fabric.setup_module(model)
    assert_sharded(model, implementation, at_least=3)
    return model, fabric.setup_optimizers(sgd(model))


def train(
    fabric: Any, model: Any, optimizer: Any, batches: list[Tensor], clip: bool = False, per_step: int = 1
) -> Record:
    record = Record()
    for i, batch in enumerate(batches):
        last = (i + 1) % per_step == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = mean_loss(model(own_part(batch)))
            record.add(f"loss {i}", mean_of_ranks(loss))
            fabric.backward(loss / per_step)
        if last:
            if clip:
                record.add(f"norm {i}", fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    record.add_params(model.module.named_parameters())
    return record


def trains(implementation: str, expected: dict[str, Tensor], **options: Any) -> None:
    with using(implementation):
        fabric = launched()
        train(fabric, *set_up(fabric, implementation), batches(), **options).assert_like(expected)


def resumes(implementation: str, expected: dict[str, Tensor], path: Path, distributed: bool) -> None:
    """`load` undoes what was trained after `save`, optimizer state included."""
    with using(implementation):
        fabric = launched(save_distributed_checkpoint=distributed)
        model, optimizer = set_up(fabric, implementation)
        train(fabric, model, optimizer, batches(0, 2))
        fabric.save(path, {"model": model, "optimizer": optimizer})
        train(fabric, model, optimizer, batches(2, 4))
        fabric.load(path, {"model": model, "optimizer": optimizer})
        train(fabric, model, optimizer, batches(2, 4)).assert_like(second_half(expected))


def materializes(implementation: str, weights: Path) -> None:
    """Built on the meta device by `init_module`, sharded there, then filled: by hand, and by a checkpoint."""
    with using(implementation):
        fabric = launched()
        with fabric.init_module(empty_init=True):
            model = TinyGPT().double()
        model = fabric.setup_module(model)
        assert_sharded(model, implementation, at_least=3)
        assert not any(param.is_meta for param in model.parameters())
        fabric.load_raw(weights, model)
        record = Record()
        record.add_params(model.module.named_parameters())
        record.assert_like(torch.load(weights))


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def lightning_module() -> Any:
    """Made in a function, for the class to be defined where Lightning is."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = fresh()
            self.record = Record()

        def configure_model(self) -> None:
            parallelize(self.model, self.device_mesh)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = mean_loss(self.model(batch))
            self.record.add(f"loss {index}", mean_of_ranks(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([own_part(batch) for batch in batches()], batch_size=None)

    return Module()


def fits(implementation: str, expected: dict[str, Tensor], folder: Path, per_step: int = 1, **options: Any) -> None:
    with using(implementation):
        pretend_torchrun()
        strategy = lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False, "default_root_dir": folder}
        options |= {"max_epochs": 1, "accumulate_grad_batches": per_step}
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options, **quiet)
        module = lightning_module()
        trainer.fit(module)
        assert_sharded(module, implementation, at_least=3)
        module.record.add_params(module.model.named_parameters())
        module.record.assert_like(expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trainer(implementation: str, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for options in {}, {"per_step": 2}:
        expected = alone(partial(trained_plainly, **options))
        checks.append((f"{options}", partial(fits, implementation, expected, tmp_path, **options)))
    run_checks(2, checks)


# ---- Fabric ----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {"plain": {}, "clips": {"clip": True}, "accumulates": {"per_step": 2, "clip": True}}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_trains_as_plain(implementation: str, tmp_path: Path) -> None:
    checks: list[tuple[str, Callable[[], None]]] = []
    for name, options in CASES.items():
        expected = alone(partial(trained_plainly, **oracle_of(options)))
        checks.append((name, partial(trains, implementation, expected, **options)))
    expected = alone(trained_plainly)
    for distributed in (True, False):
        path = tmp_path / f"distributed={distributed}"
        checks.append((f"resumes {path.name}", partial(resumes, implementation, expected, path, distributed)))
    weights = tmp_path / "weights.pt"
    torch.save(fresh()[0].state_dict(), weights)
    checks.append(("materializes", partial(materializes, implementation, weights)))
    run_checks(2, checks)
