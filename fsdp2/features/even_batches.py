"""Gives all ranks equally many batches: ranks that have run out repeat their last one (`even_batches`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..ranks.rank_facts import start_largest
from ..torch_private.rare_internals import has_backend

Batch = TypeVar("Batch")


def even_batches(loader: Iterable[Batch], group: dist.ProcessGroup | None = None) -> Iterator[tuple[Batch, bool]]:
    """Yields (batch, is_real) on all ranks of `group` until none of them has a batch of its own left.

    A rank that has run out gets its last batch again, with `is_real` False. Multiply the loss by `is_real`: then the
    repeated batch has gradients of zero, and every rank runs the same passes, collectives and optimizer steps.
    Gradients are means over all ranks, those with repeated batches included. In `fsdp2.accumulate`, give such a batch
    the weight 0 instead; gradients are then means over the real tokens. Running statistics of BatchNorm count repeated
    batches.

    Ranks tell each other by one all-reduce of three numbers for each batch. The iterator reads one batch ahead, so that
    the all-reduce runs during the step before. Every rank must iterate to the end, or leave the loop in the same step.

    Args:
        loader: the batches of this rank, one or more: a `DataLoader`, for example.
        group: the process group of the ranks that train together. None: the default process group, of all ranks.

    Returns:
        An iterator of pairs: a batch, and True if it is a new one.

    Raises:
        TypeError: `loader` can't be iterated, or `group` is no process group.
        RuntimeError: there is no process group; or, in the loop, the loader of another rank has raised. That rank
            raises its own error.
        ValueError: on all ranks: one of them has no batch at all, and others have some.

    Example:
        ```python
        for tokens, is_real in fsdp2.even_batches(loader):
            loss = loss_of(model, tokens) * is_real
            loss.backward()
            fsdp2.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    if not isinstance(loader, Iterable):
        raise TypeError(f"loader: expected an iterable of batches, got {type(loader).__name__}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group or None, got {type(group).__name__}")
    ranks = group or dist.group.WORLD
    if ranks is None:
        raise RuntimeError("even_batches: there is no process group. Call torch.distributed.init_process_group before.")
    return _even(loader, ranks)


def _even(loader: Iterable[Batch], ranks: dist.ProcessGroup) -> Iterator[tuple[Batch, bool]]:
    cpu = torch.device("cpu")
    device = cpu if has_backend(ranks, cpu) else torch.accelerator.current_accelerator()
    rank, batches = dist.get_rank() + 1, iter(loader)
    last: tuple[Batch, bool] | None = None
    while True:
        batch: Any = None
        error, has = None, True
        try:
            batch = next(batches)
        except StopIteration:
            has = False
        except Exception as raised:  # the other ranks wait for this one
            error, has = raised, False
        # The largest of each number: which rank's loader has raised; which rank has no batch; whether any has one.
        told = torch.tensor([rank * (error is not None), rank * (not has), has], dtype=torch.int64, device=device)
        work = start_largest(told, ranks)
        if last is not None:
            yield last
        work.wait()
        failed, without, some_have = told.tolist()
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(f"even_batches: the loader of rank {failed - 1} has raised. See the error of that rank.")
        if not some_have:
            return
        if last is None and without:
            raise ValueError(
                f"even_batches: rank {without - 1} has no batch at all, and so none to repeat. Give each rank at least "
                "one batch."
            )
        last = (batch, True) if has or last is None else (last[0], False)


def class_attributes(cls: type) -> dict[str, Any]:
    """Returns the method by which torch's `Join([model])` is refused, unless the module's own class has it."""
    return {} if hasattr(cls, "join_hook") else {"join_hook": _refuse_join}


def _refuse_join(model: Any, **_: Any) -> NoReturn:
    raise NotImplementedError(
        "torch.distributed.algorithms.Join: a rank that has run out of batches would have to gather and reduce with "
        "its shards. Write `for batch, is_real in fsdp2.even_batches(loader):`, and multiply the loss by is_real."
    )
