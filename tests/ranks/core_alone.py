"""Trains with the core alone: `from fsdp2.core import ...`, in all ways that the core supports.

`test_core_alone.py` runs this program where the package fsdp2 has the folder core, an empty `__init__.py`, and nothing
else. It uses no helper of the tests. Four forked ranks run all ways in one launch; in most of them two pairs of ranks
train the same model separately.

Each way trains a model beside a plain one, which gets the whole batch, and compares losses, gradients and
parameters.
"""

import copy
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first DeviceMesh would import in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2.core import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, replicate

WORLD_SIZE = 4
STEPS = 3
WORDS, SIZE, HIDDEN, LENGTH = 13, 7, 11, 5  # none of them divides by the number of ranks
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    """Has uneven matrices, a scalar, a frozen layer, a buffer, and fewer rows than ranks in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, HIDDEN), nn.Linear(HIDDEN, SIZE)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.few = nn.Parameter(torch.randn(1, SIZE) / 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.relu(self.up(self.norm(x + self.few))))
        return x + self.gate * self.frozen(hidden) * self.scale.to(x.dtype)


class Model(nn.Module):
    """`checkpointing`: None, or whether it is reentrant."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(SIZE, WORDS)
        self.head.weight = self.embedding.weight
        self.checkpointing: bool | None = None

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) if self.checkpointing is None else checkpoint(block, x, use_reentrant=self.checkpointing)
        return self.head(x)


@dataclass
class Way:
    """How a model is trained.

    `mesh`: of which ranks. `options`: for each wrap. `prepare`: called with the sharded model. `batches`: how many
    accumulate in a step. `saves`: parameters and optimizer states go through a distributed checkpoint after each step.
    """

    mesh: str = "pair"
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = lambda model: None
    wrap: Callable[..., Any] = fully_shard
    batches: int = 1
    is_bf16: bool = False
    saves: bool = False


def checkpointing(reentrant: bool) -> Callable[[Any], None]:
    return lambda model: setattr(model, "checkpointing", reentrant)


WAYS = {
    "nested wraps": Way(),
    "on four ranks": Way("four"),
    "mixed precision": Way(options={"mp_policy": BF16}, is_bf16=True),
    "gradient accumulation": Way(batches=3),
    "gradient accumulation in mixed precision": Way(options={"mp_policy": BF16}, is_bf16=True, batches=2),
    "parameters kept after forward": Way(options={"reshard_after_forward": False}),
    "parameters kept after backward": Way(prepare=lambda model: model.set_reshard_after_backward(False)),
    "HSDP": Way("two by two"),
    "HSDP, gradient accumulation": Way("two by two", batches=2),
    "CPU offload": Way(options={"offload_policy": CPUOffloadPolicy()}),
    "activation checkpointing": Way(prepare=checkpointing(reentrant=False)),
    "reentrant activation checkpointing": Way(prepare=checkpointing(reentrant=True)),
    "activation checkpointing in mixed precision": Way(
        options={"mp_policy": BF16}, is_bf16=True, prepare=checkpointing(reentrant=False)
    ),
    "replicate": Way(wrap=replicate),
    "one rank": Way("one"),
    "distributed checkpoints": Way("four", saves=True),
}


def run_way(way: Way, mesh: DeviceMesh) -> None:
    ranks, rank = mesh.size(), mesh.mesh.flatten().tolist().index(dist.get_rank())
    torch.manual_seed(0)
    plain = Model()
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        way.wrap(block.up, mesh=mesh, **way.options)
        way.wrap(block, mesh=mesh, **way.options)
    way.wrap(model, mesh=mesh, **way.options)
    way.prepare(model)
    check_wrapped(model, plain)
    plain_optimizer, optimizer = (torch.optim.AdamW(each.parameters(), 1e-2) for each in (plain, model))
    for step in range(STEPS):
        batches = [torch.randint(0, WORDS, (2 * ranks, LENGTH)) for _ in range(way.batches)]
        expected = train_plain(plain, batches, ranks if way.is_bf16 else 1)
        loss = torch.zeros(())
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(i == way.batches - 1)
            loss += train(model, batch.chunk(ranks)[rank])
        compare(mean_of(loss, mesh), expected, f"loss at step {step}")
        for (name, own), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            compare(own.grad, other.grad, f"gradient of {name} at step {step}")
        for each in (plain_optimizer, optimizer):
            each.step()
            each.zero_grad()
        if way.saves:
            save_and_load(model, optimizer)
    for (name, own), (_, other) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        compare(own, other, name)
        compare(own.full_tensor() if isinstance(own, DTensor) else own, other, f"{name}, whole")


def check_wrapped(model: Any, plain: nn.Module) -> None:
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


def train(model: nn.Module, words: Tensor) -> Tensor:
    """Runs forward and backward to guess each word itself; returns the loss."""
    loss = nn.functional.cross_entropy(model(words).float().flatten(0, 1), words.flatten())
    loss.backward()
    return loss.detach()


def train_plain(plain: nn.Module, batches: list[Tensor], parts: int) -> Tensor:
    """Accumulates the mean gradient of each whole batch into `.grad`; returns the sum of the losses.

    With several `parts` (as many as ranks, each of which rounds for itself), a copy of the model in bf16 computes the
    gradients of each part, which are added up in fp32.
    """
    if parts == 1:
        return torch.stack([train(plain, batch) for batch in batches]).sum()
    total = torch.zeros(())
    for part in (part for batch in batches for part in batch.chunk(parts)):
        copied = copy.deepcopy(plain).to(torch.bfloat16)
        copied.zero_grad()
        total += train(copied, part) / parts
        for parameter, own in zip(plain.parameters(), copied.parameters(), strict=True):
            if own.grad is not None:
                gradient = own.grad.float() / parts
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return total


def mean_of(value: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis in range(mesh.ndim):
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value / mesh.size()


def compare(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    """Compares what this rank holds of `actual` with the same rows of `expected`, without communication."""
    if actual is None or expected is None:
        assert actual is expected is None, f"{name}: expected {expected}, got {actual}"
        return
    if isinstance(actual, DTensor):
        assert actual.shape == expected.shape, f"{name}: expected {expected.shape}, got {actual.shape}"
        actual, expected = actual.to_local(), own_rows(expected, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")


def own_rows(whole: Tensor, like: DTensor) -> Tensor:
    """Returns the part of `whole` that this rank holds if it lies like `like`."""
    coordinate = like.device_mesh.get_coordinate() or []
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            chunks = whole.chunk(like.device_mesh.size(axis), placement.dim)
            whole = chunks[coordinate[axis]] if coordinate[axis] < len(chunks) else whole[:0]
    return whole


def save_and_load(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Saves to disk, destroys everything in memory, and loads it again."""
    folder = str(Path(os.environ["FOLDER"]) / "checkpoint")
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
            for value in optimizer.state[parameter].values():
                value.zero_()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


# ---- ranks


def meshes() -> dict[str, DeviceMesh]:
    """Returns the meshes that ways name. Of "one" and "pair" there are several, each on other ranks."""
    ones = init_device_mesh("cpu", (4, 1), mesh_dim_names=("apart", "one"))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pair"))
    return {"one": ones["one"], "pair": pairs["pair"], "two by two": pairs, "four": init_device_mesh("cpu", (4,))}


def run_all() -> Iterator[str]:
    """Runs all ways; yields what went wrong on this rank."""
    by_name = meshes()
    for name, way in WAYS.items():
        try:
            run_way(way, by_name[way.mesh])
        except Exception:
            yield f"{name}: {traceback.format_exc()}"
        dist.barrier()


def run_rank(rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["FOLDER"] + "/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    failed = [*run_all()]
    loaded = [name for name in sys.modules if name.startswith("fsdp2.") and not name.startswith("fsdp2.core")]
    if loaded:
        failed.append(f"of the rest of the package there is {loaded}")
    dist.destroy_process_group()
    if failed:
        sys.exit(f"rank {rank}: " + "\n".join(failed))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FOLDER"] = folder
        mp.start_processes(run_rank, nprocs=WORLD_SIZE, start_method="fork")
    print(f"{len(WAYS)} ways train exactly")
