"""Digests of what groups hold: they find where replicas, or two runs, part.

A digest is a sum of hashes of positions and bits (`parameters/checksum.py`). So those of all ranks that shard a group
add up to one number, which does not depend on how it is sharded. Replicas compare theirs when checks are due. A
`DigestLog` writes them to files, which `digest_files.py` compares.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..calls.user_code import hides_modes
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..engine.owners import by_ranks
from ..engine.parameter import FSDPParam
from ..engine.placeholders import UnsynchronizedGrad
from ..engine.root import Root
from ..engine.state import require_root
from ..parameters.checksum import PART, digest, read
from ..ranks.compare_ranks import ComparedNumbers, Comparison, groups_by_mesh
from ..torch_private.internals import PLAIN, local_if_any, local_of, no_torch_function
from .digest_files import GRADIENT, RECEIVED, WEIGHT, Header, path_of
from .due import RankCheck, alike, is_check_time
from .step_history import StepHistory

States = Sequence[Mapping[Tensor, Any]]
"""Parameter -> (name -> state), for each optimizer."""


def _tensors_of(param: FSDPParam, states: States) -> Iterator[tuple[str, Tensor]]:
    """Yields what this rank has of a parameter: its shard, gradient, and optimizer states of its shape."""
    yield WEIGHT, param.local
    gradient = param.sharded.grad
    if isinstance(gradient, DTensor) and not isinstance(gradient, UnsynchronizedGrad):
        yield GRADIENT, local_of(gradient)
    for of_optimizer in states:
        for name, value in (of_optimizer.get(param.sharded) or {}).items():
            if isinstance(value, DTensor) and local_of(value).shape == param.local.shape:
                yield name, local_of(value)


def _digest_of_part(i: int, param: FSDPParam, local: Tensor) -> Tensor:
    """Returns the digest of this rank's rows of parameter i of a group, or of something that is cut alike."""
    shape, dim, (first, last) = param.gathered_shape, param.dim, param.bounds
    inner = math.prod(shape[dim + 1 :])
    return digest(local, i * PART + first * inner, (last - first) * inner if dim else 0, shape[dim] * inner)


def digests_of(group: FSDPParamGroup, states: States) -> dict[str, list[Tensor]]:
    """Returns kind -> digests of this rank's parts, whose sum counts. Parameters of tensor subclasses are left out."""
    found: dict[str, list[Tensor]] = {}
    with torch.no_grad(), no_torch_function():
        for i, param in enumerate(group.params):
            if param.is_scalar and param.mesh.rank:
                continue  # all ranks have it
            for kind, local in _tensors_of(param, states):
                if type(local) in PLAIN and not local.is_meta:
                    found.setdefault(kind, []).append(_digest_of_part(i, param, local))
    return found


def _settle(group: FSDPParamGroup) -> None:
    """Waits until nothing writes to the shards of `group`: a step that overlaps with a forward, for example."""
    for wait in group.root.waits_before_read:
        wait(group)


def _total(sums: Sequence[int]) -> int:
    """Returns the sum modulo 2^64, as an int64 holds it."""
    return (sum(sums) + (1 << 63)) % (1 << 64) - (1 << 63)


def _read_each(digests: Sequence[Sequence[Tensor]]) -> list[int]:
    """Returns the sum of each list, waiting for the device once."""
    numbers = iter(read([each for several in digests for each in several]))
    return [_total([next(numbers) for _ in several]) for several in digests]


# ---- between replicas


class Replicas(RankCheck):
    """Compares shards and optimizer states between the ranks that hold the same shards; outside of backward also
    gradients, which arrive at any time there.
    """

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        root = comparison.root
        if comparison.is_anew or (root.backward is not None and root.stepper is not None):
            return  # weights may be loaded next; or change in backward
        history = root.events.of(StepHistory)
        optimizers = history.optimizers() if history is not None else []
        # Not those that flat optimizers make when they are asked: a step that overlaps with forward would end early.
        states: States = [vars(each).get("state", {}) for each in optimizers]
        has_gradients = root.backward is None and root.settings.finalize_backward
        for mesh, groups in groups_by_mesh(root.groups).items():
            replicas = DataMesh(mesh.mesh, (), mesh.replicate_axes)
            if comparison.mesh is not None and mesh.size == 1 and mesh.num_ranks == comparison.mesh.num_ranks:
                replicas = comparison.mesh  # over which ranks compare anyhow
            if replicas.num_ranks > 1 and not mesh.replicas_may_grow:
                yield alike("replicas", replicas, partial(_tell, groups, states, has_gradients), _explain_replicas)


def _tell(groups: Sequence[FSDPParamGroup], states: States, has_gradients: bool) -> dict[tuple[str, str], int]:
    """Returns (group, kind) -> digest, of this rank's parts."""
    found = {}
    for group in groups:
        _settle(group)
        digests = digests_of(group, states)
        found.update({(group.name, kind): each for kind, each in digests.items() if has_gradients or kind != GRADIENT})
    return dict(zip(found, _read_each([*found.values()]), strict=True))


def _explain_replicas(of_ranks: Mapping[int, Mapping[tuple[str, str], int]]) -> str:
    names = dict.fromkeys(name for told in of_ranks.values() for name in told)
    apart = [name for name in names if len({told.get(name) for told in of_ranks.values()}) > 1]
    if not apart:
        return ""
    (group, kind), number = apart[0], len({each for each, _ in apart})
    values = {rank: f"{told.get(apart[0], 0) & (1 << 64) - 1:016x}" for rank, told in of_ranks.items()}
    return (
        f"{group}: expected the same bits on ranks that replicate it, got of its {kind} the digest {by_ranks(values)}, "
        f"and others in {number} groups, so each replica is another model now. A rank has written to its shards, or "
        "stepped otherwise, or memory has failed. Load a checkpoint of before."
    )


# ---- files


class _Received(Observer):
    """Takes digests of what a rank has gathered of each group, once. It follows until a `DigestLog` takes them."""

    def __init__(self) -> None:
        self.digests: dict[FSDPParamGroup, list[Tensor]] = {}

    def unsharded(self, group: FSDPParamGroup) -> None:
        if group not in self.digests:
            with torch.no_grad(), no_torch_function():
                locals_ = [(i, local_if_any(param.unsharded.detach())) for i, param in enumerate(group.params)]
                plain = [(i, local) for i, local in locals_ if type(local) in PLAIN and not local.is_meta]
                self.digests[group] = [digest(local, i * PART) for i, local in plain]


class DigestLog:
    """Writes a digest of each group's weights, gradients and optimizer states, step by step: `python -m fsdp2 diff`
    says where two runs part, or the ranks of one.

    A digest is one number for each group and kind, whatever ranks there are. At a recorded step it also covers the
    weights that a rank has received by the group's first all-gather. A rank writes one line a step to a file of its
    own, and does not communicate. Every rank makes the log, after `fully_shard`.

    Args:
        model: the outermost sharded module.
        optimizer: a torch optimizer, or several.
        folder: of this run's files; it is made. A run that goes on adds to them, also on another number of ranks.
        every: records each so-many-th step. None: the steps 1, 2, 4, ..., 64, and each 128th, as checks are due; with
            `set_checks("debug")` each.

    Raises:
        TypeError: `optimizer` is none, `folder` no path, or `every` no int.
        ValueError: `every` is less than 1.
        RuntimeError: `model` is not the outermost sharded module.

    Example:
        ```python
        log = fsdp2.DigestLog(model, optimizer, "run1")
        for step, batch in enumerate(batches, 1):
            loss_of(model, batch).backward()
            optimizer.step()
            log.record(step)
            optimizer.zero_grad()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
    ) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool)):
            raise TypeError(f"every: expected an int or None, got {every!r}")
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder: expected a path, got {folder!r}")
        self._root = require_root(model, "DigestLog")
        self._optimizers = [*optimizer] if isinstance(optimizer, Iterable) else [optimizer]
        if not all(hasattr(each, "param_groups") for each in self._optimizers):
            raise TypeError(f"optimizer: expected an optimizer or several, with param_groups, got {optimizer!r}")
        self._every = every
        rank, self._header = dist.get_rank(), _header_of(self._root)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = path_of(folder, rank, dist.get_world_size())
        self._received = _Received()
        self._write({"groups": self._header})
        self._root.add(self._received)

    def _is_due(self, step: int) -> bool:
        return is_check_time(step) if self._every is None else step % self._every == 0

    @hides_modes
    def record(self, step: int) -> bool:
        """Writes the digests, if the step is due. Call it between the optimizer's step and `zero_grad`.

        The host then waits for the device.

        Args:
            step: the number of the step, from 1 on; the same in all runs, also in one that goes on.

        Returns:
            True if it has written.

        Raises:
            TypeError: `step` is no int.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"step: expected an int, got {step!r}")
        root, received = self._root, self._received
        is_due = self._is_due(step)
        if is_due:
            found: dict[str, list[list[Tensor]]] = {}
            groups = [group for group in root.groups if group.params]
            states: States = [each.state for each in self._optimizers]
            for i, group in enumerate(groups):
                _settle(group)
                digests = {RECEIVED: received.digests.get(group, []), **digests_of(group, states)}
                for kind, each in digests.items():
                    found.setdefault(kind, [[] for _ in groups])[i] = each
            sums = iter(_read_each([each for of_kind in found.values() for each in of_kind if each]))
            numbers = {kind: [next(sums) if each else None for each in of_kind] for kind, of_kind in found.items()}
            self._write({"step": step, **numbers})
        self._follow(self._is_due(step + 1))
        return is_due

    def _follow(self, is_next: bool) -> None:
        """Takes digests of what is received before the next `record`, or not."""
        self._received.digests.clear()
        is_there = self._received in self._root.events.observers
        if is_next and not is_there:
            self._root.add(self._received)
        elif is_there and not is_next:
            self._root.remove(self._received)

    def _write(self, line: dict[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _header_of(root: Root) -> Header:
    """Returns for each group its name, and which of the shards and of the replicas this rank holds."""
    return [(group.name, group.mesh.rank, _replica_of(group.mesh)) for group in root.groups if group.params]


def _replica_of(mesh: DataMesh) -> int:
    replica = 0
    for axis in mesh.replicate_axes:
        replica = replica * mesh.mesh.size(axis) + mesh.mesh.get_local_rank(axis)
    return replica
