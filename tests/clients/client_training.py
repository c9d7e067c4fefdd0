"""Trains a client with fsdp2 and, as a control, with torch's own FSDP2; both must train like the plain model.

The control shows whether fsdp2 or the client causes a failure, and that a client's code runs on CPU at all.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from helpers import assert_same, full, shard_batch
from models import TinyGPT, mean_loss

IMPLEMENTATIONS = ("fsdp2", "torch")
ROWS, BATCHES, MAX_NORM = 4, 4, 0.05


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    """Torch's names mean fsdp2, or what they meant before."""
    with fsdp2.patch_torch() if implementation == "fsdp2" else contextlib.nullcontext():
        yield


def assert_sharded(model: nn.Module, implementation: str, at_least: int) -> None:
    """So many modules are sharded, by this implementation and not by the other: a test must know what it tested."""
    sharded = [module for module in model.modules() if type(module).__name__.startswith("FSDP")]
    ours = [module for module in sharded if isinstance(module, fsdp2.FSDPModule)]
    assert len(sharded) >= at_least, f"expected at least {at_least} sharded modules, got {len(sharded)}"
    assert len(ours) == (len(sharded) if implementation == "fsdp2" else 0), f"{len(ours)} of {len(sharded)} are fsdp2's"


class Record:
    """What a training has shown, by name: losses over the whole batch, norms, parameters."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        self.values[name] = full(torch.as_tensor(value)).clone()

    def add_params(self, params: Iterable[tuple[str, Tensor]], name: Callable[[str], str] = str) -> None:
        """Every rank must call it. `name` undoes what wrappers have put into the names."""
        for fqn, param in params:
            self.add(name(fqn), param)

    def assert_like(self, expected: dict[str, Tensor], rtol: float = 1e-10, atol: float = 1e-12) -> None:
        assert sorted(self.values) == sorted(expected)
        for name, value in expected.items():
            assert_same(self.values[name], value, rtol, atol, name)


def mean_of_ranks(value: Tensor) -> Tensor:
    """Of a mean over each rank's equal part of a batch: the mean over the batch."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def pretend_torchrun() -> None:
    """In a rank: the environment variables that launchers set, which many clients want to see."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}


def pretend_accelerator() -> None:
    """In a rank: accelerate offers FSDP on accelerators only, so it is told that CPUs with gloo are such."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerate.state.PartialState._prepare_backend = lambda *_: ("gloo", accelerate.utils.DistributedType.MULTI_GPU)
    pretend_torchrun()
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)  # what an earlier plugin has set


# ---- the same training, plain ----------------------------------------------------------------------------------------


def fresh() -> tuple[TinyGPT, torch.optim.Optimizer]:
    """The same initial model on every side."""
    torch.manual_seed(1)
    model = TinyGPT().double()
    return model, sgd(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam, whose first steps turn rounding errors of tiny gradients into whole steps."""
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def batches(first: int = 0, last: int = BATCHES) -> list[Tensor]:
    return [TinyGPT().example(rows=ROWS, seed=seed) for seed in range(first, last)]


def own_part(batch: Tensor) -> Tensor:
    return shard_batch(batch, dist.get_rank(), dist.get_world_size())


def trained_plainly(*, clip: bool = False, per_step: int = 1) -> dict[str, Tensor]:
    """The oracle: losses, gradient norms and parameters; `per_step` batches are accumulated."""
    model, optimizer = fresh()
    record = Record()
    for i, batch in enumerate(batches()):
        loss = mean_loss(model(batch))
        record.add(f"loss {i}", loss)
        (loss / per_step).backward()
        if (i + 1) % per_step == 0:
            if clip:
                record.add(f"norm {i}", torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            optimizer.zero_grad()
    record.add_params(model.named_parameters())
    return record.values


def oracle_of(options: dict[str, object]) -> dict[str, object]:
    """Those of a client's options that the plain training has too."""
    return {name: options[name] for name in ("clip", "per_step") if name in options}


def second_half(record: dict[str, Tensor]) -> dict[str, Tensor]:
    """The losses of batches 2 and 3, counted from 0, and the parameters at the end."""
    losses = {"loss 0": record["loss 2"], "loss 1": record["loss 3"]}
    return losses | {name: value for name, value in record.items() if not name.startswith("loss")}
