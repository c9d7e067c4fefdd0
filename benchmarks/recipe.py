"""Builds what a comparison with torch's FSDP2 trains, as PROTOCOL.md says: groups, optimizer and clipping of each side.

"fsdp2" and "torch" run the same program, in which only the import differs. "fsdp2-best" and "torch-best" have the
settings that make each of them fastest.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

MODULES = {
    "fsdp2": "fsdp2",
    "torch": "torch.distributed.fsdp",
    # It checks a benchmark: compared with "torch", every ratio must be 1.
    "torch-again": "torch.distributed.fsdp",
    "fsdp2-best": "fsdp2",
    "torch-best": "torch.distributed.fsdp",
}
ROWS = ("fsdp2", "torch", "fsdp2-best", "torch-best")


def shard(name: str, model: Any, **options: Any) -> Any:
    """Shards `model` by the library `name`, and returns it.

    Args:
        options: arguments of each call of `fully_shard`.
    """
    library = importlib.import_module(MODULES[name])
    if name == "fsdp2-best":
        return shard_blocks(library, model, **options)
    shard_as_torchtitan(library, model, **options)
    if name == "torch-best" and not _is_tied(model) and getattr(model, "embedding", None) is not None:
        model.embedding.set_unshard_in_backward(False)
    return model


def shard_blocks(library: Any, model: Any, blocks: Iterable[Any] | None = None, **options: Any) -> Any:
    """Calls `fully_shard` on each block and on the root, whose large modules fsdp2 makes groups of their own."""
    for block in model.blocks if blocks is None else blocks:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def shard_as_torchtitan(library: Any, model: Any, **options: Any) -> Any:
    """Calls `fully_shard` as torchtitan's `apply_fsdp` does by default: on the embedding, on each block, on
    `[norm, head]`, which stay unsharded after forward, and on the root. If embedding and head are one parameter,
    embedding, norm and head are one group.

    Args:
        options: arguments of each call. `reshard_after_forward`, if it is given, is that of all groups but the root.
    """
    reshard = options.pop("reshard_after_forward", None)
    for modules, is_last in _groups(model):
        library.fully_shard(modules, reshard_after_forward=not is_last if reshard is None else reshard, **options)
    return library.fully_shard(model, **options)


def _groups(model: Any) -> Iterator[tuple[Any, bool]]:
    """Yields the modules of each call but the root's, and True for those that forward uses last. A stage of a pipeline
    may lack the embedding, or norm and head.
    """
    embedding, *last = [getattr(model, name, None) for name in ("embedding", "norm", "head")]
    is_tied = _is_tied(model)
    if is_tied:
        yield [embedding, *last], True
    elif embedding is not None:
        yield embedding, False
    for block in model.blocks:
        yield block, False
    if None not in last and not is_tied:
        yield last, True


def _is_tied(model: Any) -> bool:
    embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
    return embedding is not None and head is not None and embedding.weight is head.weight


def make_optimizer(name: str, model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Returns fused AdamW, which is flat in "fsdp2-best"."""
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-5, "fused": True, **options})
    if name == "fsdp2-best":
        importlib.import_module("fsdp2").flatten_optimizer(optimizer)
    return optimizer


def clip_function(name: str) -> Callable[..., Any]:
    """Returns torch's function, or fsdp2's own in "fsdp2-best"."""
    function: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
    return importlib.import_module("fsdp2").clip_grad_norm_ if name == "fsdp2-best" else function
