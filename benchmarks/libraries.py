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
from .recipe import MODULES, shard
from .simple_fsdp import Dtypes, shard_by_dtensors

# Measure this checkout, not an fsdp2 that happens to be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Library:
    """Is one way to train a model on all ranks of a mesh.

    Args:
        shard: takes a model that has `blocks`, a mesh of one axis, and the dtypes in which to compute and to reduce (or
            none, for no casts); returns the model to call. fsdp2 and torch's FSDP2 follow recipe.py.
        can_cast: True if it takes dtypes.
        has_more: True if it has two options that torch's FSDP2 lacks, which `shard` then takes, too: a dtype in which
            gradients are sent (`wire_dtype=`) and a planner against padding (`planned=True`).
        is_lossy: True if its gradients are not those of the others, because what travels is compressed.
    """

    name: str
    shard: Callable[..., nn.Module]
    can_cast: bool = True
    has_more: bool = False
    is_lossy: bool = False


PEERS = {
    "fsdp1": Library("fsdp1", shard_by_fsdp1),
    "ddp": Library("ddp", shard_by_ddp, can_cast=False),
    "simple": Library("simple", shard_by_dtensors),
}
NAMES = (*MODULES, *GUARDS, *CODECS, *PEERS)


def processes_of(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the libraries of each process: one, but variants of fsdp2, which are compared with it, share its own."""
    shared = tuple(name for name in names if name == "fsdp2" or name in GUARDS or name in CODECS)
    return [shared] * bool(shared) + [(name,) for name in names if name not in shared]


def load_library(name: str) -> Library:
    """Imports one library, or exits with a sentence that says what to do if it cannot be imported."""
    if name in PEERS:
        return PEERS[name]
    if name in CODECS:
        load_library("fsdp2")
        return Library(name, partial(shard_by_codec, name), is_lossy=name != "replicate")
    if name in GUARDS:
        guarded = load_library("fsdp2")
        return replace(guarded, name=name, shard=partial(_shard_without, guarded, GUARDS[name]))
    if name not in MODULES:
        raise SystemExit(f"unknown library {name!r}: choose from {', '.join(NAMES)}")
    return Library(name, partial(_shard_by_recipe, name), has_more=name.startswith("fsdp2"))


def _shard_by_recipe(
    name: str,
    model: nn.Module,
    mesh: DeviceMesh,
    mixed: Dtypes | None = None,
    wire_dtype: torch.dtype | None = None,
    planned: bool = False,
) -> nn.Module:
    library: Any = importlib.import_module(MODULES[name])
    compute, reduce = mixed or (None, None)
    more = {}
    if wire_dtype:
        more["compression"] = importlib.import_module("fsdp2.compression").Compression(reduce_scatter=wire_dtype)
    options = {"mesh": mesh, "mp_policy": library.MixedPrecisionPolicy(compute, reduce, **more)}
    if planned:
        options["shard_placement_fn"] = library.cheapest_placement(mesh)
    sharded: nn.Module = shard(name, model, **options)
    return sharded


def _shard_without(
    guarded: Library, guards: Sequence[Callable[[nn.Module], None]], *args: Any, **kwargs: Any
) -> nn.Module:
    model = guarded.shard(*args, **kwargs)
    for drop in guards:
        drop(model)
    return model
