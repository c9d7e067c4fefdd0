"""Lists the libraries that are compared: how each shards a model, and nothing else about them."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .codecs import CODECS, shard_by_codec
from .guards import GUARDS
from .peers import shard_by_ddp, shard_by_fsdp1
from .simple_fsdp import Dtypes, shard_by_dtensors

# Measure this checkout, not an fsdp2 that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Library:
    """Is one way to train a model on all ranks of a mesh.

    Args:
        shard: takes a model that has `blocks`, a mesh of one axis, and the dtypes in which to compute and to reduce (or
            none, for no casts); returns the model to call. It follows the standard recipe, if the library has groups:
            one per block, the rest in the root.
        can_cast: True if it takes dtypes.
        has_more: True if it has two options that torch's FSDP2 lacks, which `shard` then takes, too: a dtype in which
            gradients are sent (`wire_dtype=`) and a planner against padding (`planned=True`).
        is_unflattened: True if its optimizers step on each parameter by itself, where they could be flattened.
        is_lossy: True if its gradients are not those of the others, because what travels is compressed.
    """

    name: str
    shard: Callable[..., nn.Module]
    can_cast: bool = True
    has_more: bool = False
    is_unflattened: bool = False
    is_lossy: bool = False

    @property
    def is_ours(self) -> bool:
        return self.has_more


# "torch-again" checks the benchmark itself: beside "torch", every ratio must come out as 1.
MODULES = {
    "fsdp2": "fsdp2",
    "torch": "torch.distributed.fsdp",
    "torch-again": "torch.distributed.fsdp",
}
PEERS = {
    "fsdp1": Library("fsdp1", shard_by_fsdp1),
    "ddp": Library("ddp", shard_by_ddp, can_cast=False),
    "simple": Library("simple", shard_by_dtensors),
}
UNFLATTENED = "unflattened"  # fsdp2, whose optimizers step on each parameter by itself
NAMES = (*MODULES, UNFLATTENED, *GUARDS, *CODECS, *PEERS)


def load_library(name: str) -> Library:
    """Imports one library, or exits with a sentence that says what to do if it cannot be imported."""
    if name in PEERS:
        return PEERS[name]
    if name in CODECS:
        load_library("fsdp2")
        return Library(name, partial(shard_by_codec, name), is_lossy=name != "replicate")
    if name == UNFLATTENED:
        return replace(load_library("fsdp2"), name=name, is_unflattened=True)
    if name in GUARDS:
        guarded = load_library("fsdp2")
        return replace(guarded, name=name, shard=partial(_shard_without, guarded, GUARDS[name]))
    if name not in MODULES:
        raise SystemExit(f"unknown library {name!r}: choose from {', '.join(NAMES)}")
    try:
        module = importlib.import_module(MODULES[name])
        return Library(name, partial(_shard_by_recipe, module), has_more=hasattr(module, "cheapest_placement"))
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"cannot import fully_shard and MixedPrecisionPolicy from {MODULES[name]!r}: {error}. "
            f"Run in an environment with torch and a working checkout of this repository, "
            f"or check the benchmark alone with --libraries torch-again torch."
        ) from error


def _shard_by_recipe(
    library: Any,
    model: nn.Module,
    mesh: DeviceMesh,
    mixed: Dtypes | None = None,
    wire_dtype: torch.dtype | None = None,
    planned: bool = False,
) -> nn.Module:
    compute, reduce = mixed or (None, None)
    more = {"wire_dtype": wire_dtype} if wire_dtype else {}
    options = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(compute, reduce, **more)}
    if planned:
        options["shard_placement_fn"] = library.cheapest_placement(mesh)
    for block in model.blocks:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def _shard_without(
    guarded: Library, guards: Sequence[Callable[[nn.Module], None]], *args: Any, **kwargs: Any
) -> nn.Module:
    model = guarded.shard(*args, **kwargs)
    for drop in guards:
        drop(model)
    return model
