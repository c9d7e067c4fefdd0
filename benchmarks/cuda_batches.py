"""Finds the largest batch of GPT-2 that trains in 24 GiB, on rank 0 of two, by each library, with and without
offload.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .cuda_models import GPT, GPTShape, make_ids
from .cuda_wrapping import Recipe, wrap
from .quiet_group import start_fake_group
from .report import Row

GPTs = Mapping[str, GPTShape]
RANKS, CAP_GIB = 2, 24
# What is sharded -> (recipe, libraries).
KINDS = {
    "DDP": (Recipe(), ("ddp",)),
    "SHARD_GRAD_OP": (Recipe(reshard_after_forward=False), ("fsdp2", "torch", "fsdp1")),
    "SHARD_GRAD_OP + offload": (Recipe(reshard_after_forward=False, offload=True), ("fsdp2", "torch", "fsdp1")),
    "FULL_SHARD": (Recipe(), ("fsdp2", "torch", "fsdp1")),
    "FULL_SHARD + offload": (Recipe(offload=True), ("fsdp2", "torch", "fsdp1")),
}


def batch_rows(gpts: GPTs, device: torch.device, largest_tried: int = 256) -> Iterator[Row]:
    """Returns rows: sequences of full length per rank, with AdamW. Under offload its state is on the CPU, and not made
    here.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * 2**30 / total))
    start_fake_group(RANKS)
    for label, shape in gpts.items():
        for kind, (recipe, names) in KINDS.items():
            values, setting = {}, f"{label}, {kind}, N={RANKS}, {CAP_GIB} GiB, {shape.tokens} tokens"
            for name in names:
                trial = Trial(name, shape, recipe, device)
                try:
                    values[name] = float(find_largest(trial.fits, largest_tried))
                except RuntimeError as error:  # what one library can't do must not cost the numbers of the others
                    print(f"{name}, {setting}: {error}", file=sys.stderr)
                trial.drop()
            yield Row("cuda", "largest batch", setting, values)
    dist.destroy_process_group()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


def find_largest(fits: Callable[[int], bool], largest_tried: int) -> int:
    """Returns the largest number up to a bound that `fits`, or 0 if none does. All smaller numbers fit, too."""
    low, high = 0, 1
    while high <= largest_tried and fits(high):
        low, high = high, 2 * high
    high = min(high, largest_tried + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Trial:
    """Holds one library's model, and builds it again after it ran out of memory: a failed step leaves an undefined
    state.
    """

    def __init__(self, name: str, shape: GPTShape, recipe: Recipe, device: torch.device) -> None:
        self._build = partial(_build, name, shape, recipe, device)
        self._shape, self._device = shape, device
        self._model: nn.Module | None = None

    def fits(self, rows: int) -> bool:
        """Returns True if two steps run. The optimizer makes its state in the first."""
        try:
            if self._model is None:
                self._model, self._optimizer = self._build()
            for _ in range(2):
                ids = make_ids(self._shape.vocab, rows, self._shape.tokens, self._device)
                _train(self._model, self._optimizer, ids)
            return True
        except torch.OutOfMemoryError:
            pass
        self.drop()  # outside the handler, whose traceback holds tensors
        return False

    def drop(self) -> None:
        self._model = self._optimizer = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _build(
    name: str, shape: GPTShape, recipe: Recipe, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    mesh = dist.init_device_mesh(device.type, (RANKS,))
    with device:
        plain = GPT(shape)
    model = wrap(name, plain, mesh, recipe)
    return model, None if recipe.offload else torch.optim.AdamW(model.parameters(), lr=1e-4)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer | None, ids: Tensor) -> None:
    logits = model(ids)
    F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    del logits
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
