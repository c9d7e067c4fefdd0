"""Loads a checkpoint on any number of ranks: each reads the bytes of its own shards, straight into their memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards import codec_state
from ..shards.find import before_write
from ..shards.tensors import check_bool, some_of
from .content import CODECS, state_of
from .folders import check_path
from .ranks import Team, attempt
from .session import session_of
from .state import (
    MODEL,
    OPTIMIZER,
    PER_RANK,
    Optimizers,
    State,
    box_of_rank,
    check_arguments,
    load_states,
    make_states,
    nest,
    options_of,
    states_of,
)
from .stored import Checkpoint, open_checkpoint


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    per_rank: Mapping[str, Any] | None = None,
    weights: bool = True,
    strict: bool = True,
    trainable_only: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Loads what `save` or torch.distributed.checkpoint has saved, on any number of ranks and any mesh.

    Every rank must call it, behind `fully_shard`. Each reads the bytes of its own shards, converts their dtypes where
    they differ, and runs no code of the files. Ranks compare which checkpoint they load, and the checksums of its
    values. For that, on another number of ranks, one rank reads all of each part.

    Example:
        ```python
        if (last := fsdp2.checkpoint.latest("runs")) is not None:
            step = fsdp2.checkpoint.load(last, model, optimizer, extra={"schedule": schedule})["step"]
        ```

    Args:
        folder: the folder of the checkpoint; see `latest`.
        model: the model, sharded in any way.
        optimizer: its optimizers, in any number. A param group gets the options that were saved for its first
            parameter. None: nothing of them is loaded.
        extra: name -> an object with `load_state_dict`, which gets what was saved under this name.
        per_rank: name -> an object with `load_state_dict`, which gets what this rank has saved. On another number of
            ranks it is left alone, with a warning; so are the codecs.
        weights: load the model. False: only the rest; the weights come from elsewhere.
        strict: the checkpoint must have all tensors of the model and the optimizer, and the ranks together must load
            all of its tensors of them. False: what one side lacks is left as it is.
        trainable_only: load only parameters that require a gradient, and buffers.
        process_group: the ranks that load together. None: all.

    Returns:
        Name -> value, of all in the checkpoint besides the model, the optimizer and what `extra` got: the step, for
        example.

    Raises:
        FileNotFoundError: `folder` has no checkpoint, or lacks a file.
        ValueError: a file is damaged, truncated, of another save or release, or could run code; ranks load
            different checkpoints; a shape differs; with `strict`, a tensor is missing or left over; a name in `extra`
            was not saved.
        TypeError: an argument.
        NotImplementedError: the model is one of torch's FullyShardedDataParallel.
        OSError: a file can't be read.
        All errors are raised on all ranks, and name the file. Those of the indices and of missing files leave all as it
        was. After one that a read meets, the model has some of the new weights: load another checkpoint.
    """

    def check() -> tuple[Optimizer, ...]:
        check_path("folder", folder)
        for name, values in (("extra", extra), ("per_rank", per_rank)):
            _require_loadable(name, values)
        for name, value in (("weights", weights), ("strict", strict), ("trainable_only", trainable_only)):
            check_bool(name, value)
        return check_arguments("load", model, optimizer)

    checked, failed = attempt(check)
    team = session_of("load", process_group, failed).team
    stored = team.run(lambda: open_checkpoint(Path(folder).absolute()), failed)
    optimizers = checked or ()
    try:
        found = team.gather((str(stored.folder), stored.save_id))
        if len({*found}) > 1:
            raise ValueError(f"load: folder: expected one checkpoint on all ranks, got {some_of({*map(str, found)})}")
        loading = team.run(
            lambda: _Loading(stored, model, optimizers, extra or {}, weights=weights, trainable_only=trainable_only)
        )
        loading.check(team, strict)
        before_write()
        team.run(loading.read)
        values = team.run(loading.others)
        team.run(lambda: loading.install(model, optimizers, strict=strict, trainable_only=trainable_only))
        own = team.run(lambda: loading.of_rank(team.rank, team.size))
    finally:
        stored.close()

    def finish() -> None:
        for name, target in (extra or {}).items():
            target.load_state_dict(values.pop(name))
        if own is None:
            return
        for name, target in (per_rank or {}).items():
            if name not in own:
                raise ValueError(f"per_rank: expected a name that was saved, got {name!r}; there are {some_of([*own])}")
            target.load_state_dict(own[name])
        if CODECS in own:
            try:
                codec_state.load_state_dict(model, own[CODECS])
            except ValueError as error:  # other codecs, or another way to shard: a choice of the user
                warnings.warn(f"{stored.folder}: codecs begin anew: {error}", stacklevel=5)

    team.run(finish)
    return values


class _Loading:
    """The part of a checkpoint that one rank reads. Every rank must make it. See `load` for the arguments."""

    def __init__(
        self,
        stored: Checkpoint,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any],
        *,
        weights: bool,
        trainable_only: bool,
    ) -> None:
        for each in optimizers:
            make_states(each)
        nested = states_of(model, optimizers, trainable_only=trainable_only, flat_keys=False)
        if not weights:
            del nested[MODEL]
        if optimizers:
            own, stored_keys = nested[OPTIMIZER], _group_keys(stored)
            groups = own["param_groups"]
            self._group_keys = [
                next((stored_keys[fqn] for fqn in group["params"] if fqn in stored_keys), str(index))
                for index, group in enumerate(groups)
            ]
            keyed = zip(self._group_keys, groups, strict=True)
            own["param_groups"] = {key: options_of(group) for key, group in keyed if group["params"]}
        is_flat = not any(path[0] == MODEL for path in stored.paths.values())
        self._stored = stored
        self._state = State(nested | {name: state_of(value) for name, value in extra.items()}, is_flat)
        self._values: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}

    def check(self, team: Team, strict: bool) -> None:
        """Finds out what to read, and checks that the ranks together read all, and that all of it is there.

        Every rank must call it. Ranks share the checks of files.
        """
        left_over = team.run(lambda: self._plan(strict))
        names = [*self._stored.tensors]
        asked, left = zip(*team.gather((_mask(names, self._tensors), _mask(names, left_over))), strict=True)
        if strict and (left_by_all := _masked(names, reduce(and_, left))):
            raise ValueError(
                f"{self._stored.folder}: expected a model and an optimizer that take all of their tensors, got none "
                f"for {some_of(sorted(left_by_all))}. Pass strict=False to leave these out."
            )
        team.run(lambda: self._stored.check(_masked(names, reduce(or_, asked)), team.index, team.size))

    def _plan(self, strict: bool) -> set[str]:
        """Finds the tensors to read. Returns the others of the model and the optimizer that the checkpoint has."""
        stored, state = self._stored, self._state
        tensors = {name: each for name, each in state.tensors.items() if name in stored.tensors}
        has_state = {None, *map(_parameter_of, stored.tensors), *map(_parameter_of, stored.objects)}
        missing = []
        for name in (*state.tensors, *state.objects):
            is_there = name in stored.tensors or name in stored.objects
            is_fresh = _parameter_of(name) not in has_state  # the saved run had not stepped on the parameter
            if not is_there and not is_fresh and state.paths[name][0] in (MODEL, OPTIMIZER):
                missing.append(name)
        if missing and strict:
            raise ValueError(
                f"{stored.folder}: expected {some_of(missing)}, which the model or the optimizer has, got "
                f"{some_of([*stored.tensors])}. Pass strict=False to leave these as they are."
            )
        for name, tensor in tensors.items():
            shape = stored.tensors[name].shape
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{stored.folder}: {name}: expected the shape {[*tensor.shape]} of the model, got {[*shape]}"
                )
        self._tensors = tensors
        roots = {path[0] for path in state.paths.values()} & {MODEL, OPTIMIZER}
        asked = {*state.tensors, *state.objects}
        return {name for name in stored.tensors if self._root(name) in roots and name not in asked}

    def _root(self, name: str) -> Any:
        """Returns the first key on the way to a stored value. With flat keys, tensors outside dicts are the model's."""
        path = self._stored.paths[name]
        is_model = self._state.flat_keys and len(path) == 1 and name in self._stored.tensors
        return MODEL if is_model else self._state.paths.get(name, path)[0]

    def read(self) -> None:
        """Reads this rank's shards into their memory, and the other values of the model and the optimizer."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                local, starts = self._state.local(name), [0] * tensor.dim()
                if isinstance(tensor, DTensor):
                    starts = [each.start for each in box_of_rank(name, tensor)]
                self._stored.read(name, local, starts)
                torch.autograd.graph.increment_version(local)
        for name in self._state.objects:
            if name in self._stored.objects:
                self._values[name] = self._stored.object(name)

    def install(self, model: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, trainable_only: bool) -> None:
        """Has the model and the optimizers take what `read` has read."""
        state = self._state
        every = state.tensors | state.objects | self._values
        if weights := {path[1:]: every[name] for name, path in state.paths.items() if path[0] == MODEL}:
            options = StateDictOptions(strict=strict and not trainable_only, ignore_frozen_params=trainable_only)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=FutureWarning)
                set_model_state_dict(model, nest(weights), options=options)
        if optimizers:
            read = [name for name in (*self._tensors, *self._values) if state.paths[name][0] == OPTIMIZER]
            values = {name.removeprefix(f"{OPTIMIZER}."): every[name] for name in read}
            load_states(model, optimizers, values, self._group_keys)

    def others(self) -> dict[str, Any]:
        """Returns name -> value of all besides the model, the optimizer and what is of one rank."""
        stored, found = self._stored, dict[str, dict[tuple[Any, ...], Any]]()
        for name, path in stored.paths.items():
            if self._root(name) in (MODEL, OPTIMIZER, PER_RANK) or not (
                name in stored.tensors or name in stored.objects
            ):
                continue
            if name in self._tensors:
                value: Any = self._state.tensors[name]
            elif name in stored.tensors:
                at = stored.tensors[name]
                value = torch.empty(at.shape, dtype=at.dtype)
                stored.check([name])
                stored.read(name, value, [0] * len(at.shape))
            else:
                value = self._values[name] if name in self._values else stored.object(name)
            found.setdefault(str(path[0]), {})[path[1:]] = value
        for name in (path[0] for path in self._state.paths.values()):
            if name not in (MODEL, OPTIMIZER) and name not in found:
                raise ValueError(
                    f"{stored.folder}: extra: expected a name that was saved, got {name!r}; there are "
                    f"{some_of([*found])}"
                )
        return {name: nest(values) for name, values in found.items()}

    def of_rank(self, rank: int, size: int) -> dict[str, Any] | None:
        """Returns what this rank has saved for itself; None if nothing, or another number of ranks has saved."""
        saved = {name for name, path in self._stored.paths.items() if path[0] == PER_RANK}
        if not saved:
            return {}
        if len(saved) != size or f"{PER_RANK}.{rank}" not in saved:
            warnings.warn(
                f"{self._stored.folder}: {len(saved)} ranks have saved states of their own, such as random states, and "
                f"{size} load. These begin anew.",
                stacklevel=4,
            )
            return None
        found: dict[str, Any] = self._stored.object(f"{PER_RANK}.{rank}")
        return found


def _mask(names: Sequence[str], chosen: Container[str]) -> int:
    """Returns a number with a bit for each name, which is set if the name was chosen."""
    return sum(1 << index for index, name in enumerate(names) if name in chosen)


def _masked(names: Sequence[str], mask: int) -> list[str]:
    return [name for index, name in enumerate(names) if mask >> index & 1]


def _parameter_of(name: str) -> str | None:
    """Returns the FQN of the parameter whose state in an optimizer has this key; None for anything else."""
    prefix = f"{OPTIMIZER}.state."
    return name.removeprefix(prefix).rpartition(".")[0] if name.startswith(prefix) else None


def _group_keys(stored: Checkpoint) -> dict[str, str]:
    """Returns the FQN of a parameter -> the key of its options in the checkpoint: the index of a group, or the FQN."""
    found = dict[str, str]()
    for name, path in stored.paths.items():
        if path[:2] == (OPTIMIZER, "param_groups") and path[3:] == ("params",):
            found |= dict.fromkeys(stored.object(name), str(path[2]))
        elif path[0] == OPTIMIZER and str(path[1]).startswith("param_groups."):
            fqn = str(path[1]).removeprefix("param_groups.").rpartition(".")[0]
            found[fqn] = fqn
    return found


def _require_loadable(argument: str, values: Any) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{argument}: expected a dict or None, got {type(values).__name__}")
    for name, value in (values or {}).items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"{argument}: {name}: expected an object with load_state_dict, got {type(value).__name__}. Numbers and "
                "other values are in what load returns."
            )
