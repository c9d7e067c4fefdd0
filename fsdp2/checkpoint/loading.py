"""Loads a checkpoint on any number of ranks: each reads the bytes of its own shards, straight into their memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards import codec_state
from ..shards.find import before_write
from ..shards.tensors import NUMBERS, check_bool, local_if_any, some_of
from .content import CODECS, state_of
from .folders import check_path
from .ranks import Team, attempt, require_same
from .session import session_of
from .state import (
    GROUPS,
    MODEL,
    OPTIMIZER,
    PER_RANK,
    STATES,
    Optimizers,
    State,
    box_of_rank,
    check_arguments,
    load_states,
    load_weights,
    make_state,
    nest,
    options_of,
    params_of,
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
    values. For that, on another number of ranks, one rank reads all of each part. A load waits for a save that runs,
    and raises what that has met. It makes no step: states that an optimizer does not have yet are made as the
    checkpoint has them, and keep their dtypes, where torch's `load_state_dict` gives all but "step" that of the
    parameter.

    Example:
        ```python
        if (last := fsdp2.checkpoint.latest("runs")) is not None:
            step = fsdp2.checkpoint.load(last, model, optimizer, extra={"schedule": schedule})["step"]
        ```

    Args:
        folder: the folder of the checkpoint; see `latest`.
        model: the model, sharded in any way.
        optimizer: its optimizers, in any number; [] on a rank that has none, where others have some. A param group gets
            the options that were saved for its first parameter. The states of a parameter are then those of the
            checkpoint. None: nothing of them is loaded.
        extra: name -> an object with `load_state_dict`, which gets what was saved under this name.
        per_rank: name -> an object with `load_state_dict`, which gets what this rank has saved. On another number of
            ranks it is left alone, with a warning; so are the codecs.
        weights: load the model. False: only the rest; the weights come from elsewhere.
        strict: the checkpoint must have all tensors of the model, and all options of the optimizer, and the ranks
            together must load all of its tensors of them. False: what one side lacks is left as it is.
        trainable_only: load only parameters that require a gradient, and buffers.
        process_group: the ranks that load together. None: all.

    Returns:
        Name -> value, of all in the checkpoint besides the model, the optimizer and what `extra` got: the step, for
        example.

    Raises:
        FileNotFoundError: `folder` has no checkpoint, or lacks a file.
        ValueError: a file is damaged, truncated, of another save or release, or could run code; ranks load
            different checkpoints, or pass other choices; a shape differs; with `strict`, a tensor is missing or left
            over, or the model does not take a key of its own state dict; a name in `extra` was not saved.
        TypeError: an argument.
        NotImplementedError: the model is one of torch's FullyShardedDataParallel.
        OSError: a file can't be read.
        RuntimeError: a tensor of the model is on meta.
        All errors are raised on all ranks, and name the file. Those of the indices and of missing files leave all as it
        was. After one that a read meets, the model has some of the new weights: load another checkpoint.
    """

    def check() -> tuple[Optimizer, ...]:
        check_path("folder", folder)
        for name, values in (("extra", extra), ("per_rank", per_rank)):
            _require_loadable(name, values)
        for name, value in (("weights", weights), ("strict", strict), ("trainable_only", trainable_only)):
            check_bool(name, value)
        return check_arguments("load", model, optimizer, process_group)

    checked, failed = attempt(check)
    session = session_of("load", process_group, failed)
    session.end_previous()
    team = session.team
    stored = team.run(lambda: open_checkpoint(Path(folder).absolute()), failed)
    optimizers = checked or ()
    try:
        choices: dict[str, Any] = {"weights": weights, "strict": strict, "trainable_only": trainable_only}
        choices |= {"folder": f"{stored.folder} {stored.save_id}", "optimizer": None if optimizer is None else "some"}
        require_same("load", team.gather(choices))
        loading = team.run(
            lambda: _Loading(stored, model, optimizers, extra or {}, weights=weights, trainable_only=trainable_only)
        )
        loading.check(team, strict)
        before_write()
        team.run(loading.read)
        own = team.run(lambda: _of_rank(stored, team))
    finally:
        stored.close()
    values = loading.extra()

    def finish() -> None:
        loading.install(model, optimizers, strict)
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
        nested = states_of(model, optimizers, trainable_only=trainable_only, flat_keys=False)
        if not weights:
            del nested[MODEL]
        self._stored_keys = _group_keys(stored) if optimizers else {}
        self._group_keys: list[str] = []
        if optimizers:
            own, groups = nested[OPTIMIZER], nested[OPTIMIZER][GROUPS]
            for index, group in enumerate(groups):
                keys = (self._stored_keys[fqn] for fqn in group["params"] if fqn in self._stored_keys)
                self._group_keys.append(next(keys, f"new {index}"))
            keyed = zip(self._group_keys, groups, strict=True)
            own[GROUPS] = {key: options_of(group) for key, group in keyed if group["params"]}
        is_flat = not any(path[0] == MODEL for path in stored.paths.values())
        self._stored = stored
        self._state = State(nested | {name: state_of(value) for name, value in extra.items()}, is_flat)
        self._tensors: dict[str, Tensor] = {}
        """Keys of the tensors to read -> where to."""
        self._values: dict[str, Any] = {}
        """The values that were read, of those that are no tensors."""
        if optimizers:
            self._take_what_is_stored(params_of(model, optimizers), is_one=len(optimizers) == 1)

    def _take_what_is_stored(self, params: Mapping[str, tuple[Tensor, Optimizer]], is_one: bool) -> None:
        """Has the states of each parameter, each option, and each other value of optimizers be what the checkpoint has.

        As a whole, as an optimizer's load_state_dict does: with the names, lists, shapes and dtypes of the checkpoint.
        Own tensors of the same name and shape are the memory.

        Args:
            params: FQN -> a parameter, and its optimizer.
            is_one: there is one optimizer, which gets what is of no parameter.
        """
        stored, state, keys = self._stored, self._state, self._stored_keys

        def is_taken(path: tuple[Any, ...]) -> bool:
            if path[0] != OPTIMIZER or len(path) < 2:
                return False
            kind, key = path[1], path[2] if len(path) > 2 else None
            if kind == GROUPS:
                return key in self._group_keys and bool(options_of(dict.fromkeys(path[3:4])))
            return (kind == STATES and key in params) or (is_one and bool(keys) and key not in keys)

        taken = {name: path for name, path in stored.paths.items() if is_taken(path)}
        whole = {_whole(path) for path in taken.values()}
        own = {name: path for name, path in state.paths.items() if path[0] == OPTIMIZER}
        tensors = dict(state.tensors)
        for name, path in own.items():
            has_ended = keys and path[1] == STATES and (path[2] in keys or (is_one and path[2] not in params))
            if has_ended or _whole(path) in whole:
                state.remove(name)
        for name, path in taken.items():
            is_tensor = name in stored.tensors
            state.add(name, path, self._memory(name, path, tensors.get(name), params) if is_tensor else None)

    def _memory(
        self,
        name: str,
        path: tuple[Any, ...],
        own: Tensor | None,
        params: Mapping[str, tuple[Tensor, Optimizer]],
    ) -> Tensor:
        """Returns memory for a stored tensor of an optimizer. `own`: what the optimizer has under this name."""
        stored, (dtype, shape, starts, *_) = self._stored, self._stored.tensors[name]
        param, optimizer = params.get(path[2], (None, None)) if path[1] == STATES else (None, None)
        if own is not None and (own.shape == shape or (param is not None and own.shape == param.shape)):
            return own  # `_plan` compares shapes
        if param is None:
            return torch.zeros(shape, dtype=dtype)
        weight = path[2] if self._state.flat_keys else f"{MODEL}.{path[2]}"
        saved = stored.tensors.get(weight)
        if saved is not None and saved.shape != param.shape:
            raise ValueError(
                f"{stored.folder}: {name}: expected a state of a parameter of shape {[*param.shape]}, got one of a "
                f"parameter of shape {[*saved.shape]}"
            )
        if shape and dtype.is_floating_point and (saved is None or saved.dtype == dtype):
            dtype = param.dtype  # as where the parameter has another dtype than the saved one
        is_number = not shape and (param.dim() > 0 or path[-1] in NUMBERS)
        is_plain = name not in stored.sharded and (is_number or weight in stored.sharded)
        rests = getattr(optimizer, "offload_states", False)
        return make_state(name, param, dtype, shape, None if is_plain else len(starts) > 1, rests)

    def check(self, team: Team, strict: bool) -> None:
        """Finds out what to read, and checks that the ranks together read all, and that all of it is there.

        Every rank must call it. Ranks share the checks of files.
        """
        left_over = team.run(lambda: self._plan(strict))
        bits = {name: 1 << index for index, name in enumerate(self._stored.tensors)}
        sent = [sum(bits[name] for name in chosen) for chosen in (self._tensors, left_over)]
        asked, left = zip(*team.gather(sent), strict=True)
        if strict and (left_by_all := sorted(name for name, bit in bits.items() if bit & reduce(and_, left))):
            raise ValueError(
                f"{self._stored.folder}: expected a model and an optimizer that take all of their tensors, got none "
                f"for {some_of(left_by_all)}. Pass strict=False to leave these out."
            )
        names = [name for name, bit in bits.items() if bit & reduce(or_, asked)]
        team.run(lambda: self._stored.check(names, team.index, team.size))

    def _plan(self, strict: bool) -> list[str]:
        """Finds the tensors to read. Returns the others of the model and the optimizer that the checkpoint has."""
        stored, state = self._stored, self._state
        there = {*stored.tensors, *stored.objects}
        missing = [
            name
            for name, path in state.paths.items()
            if name not in there and path[0] in (MODEL, OPTIMIZER) and path[:2] != (OPTIMIZER, STATES)
        ]
        if missing and strict:
            raise ValueError(
                f"{stored.folder}: expected {some_of(missing)}, which the model or the optimizer has, got "
                f"{some_of([*stored.tensors])}. Pass strict=False to leave these as they are."
            )
        extras = {self._root(name) for name in there}
        for name in (path[0] for path in state.paths.values()):
            if name not in (MODEL, OPTIMIZER, *extras):
                raise ValueError(
                    f"{stored.folder}: extra: expected a name that was saved, got {name!r}; there are "
                    f"{some_of(sorted(extras - {MODEL, OPTIMIZER, PER_RANK}))}"
                )
        for name, (dtype, shape, *_) in stored.tensors.items():
            if name in state.tensors:
                self._tensors[name] = tensor = state.tensors[name]
                if tuple(tensor.shape) != shape:
                    raise ValueError(
                        f"{stored.folder}: {name}: expected the shape {[*tensor.shape]} of the model, got {[*shape]}"
                    )
            elif name in state.objects or self._is_extra(name):  # perhaps a number of this run, such as lr
                self._tensors[name] = torch.empty(shape, dtype=dtype)
        for name, tensor in self._tensors.items():
            if local_if_any(tensor).is_meta:
                raise RuntimeError(
                    f"load: {name}: expected memory, got a tensor on meta. Call model.to_empty(device=...) before."
                )
        roots = {path[0] for path in state.paths.values()} & {MODEL, OPTIMIZER}
        left = (name for name in stored.tensors if self._root(name) in roots and name not in state.paths)
        return [name for name in left if stored.paths[name][:2] != (OPTIMIZER, GROUPS)]

    def _root(self, name: str) -> Any:
        """Returns the first key on the way to a stored value. With flat keys, tensors outside dicts are the model's."""
        path = self._stored.paths[name]
        is_model = self._state.flat_keys and len(path) == 1 and name in self._stored.tensors
        return MODEL if is_model else self._state.paths.get(name, path)[0]

    def _is_extra(self, name: str) -> bool:
        return self._root(name) not in (MODEL, OPTIMIZER, PER_RANK)

    def read(self) -> None:
        """Reads this rank's shards into their memory, and values that are no tensors."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                local, starts = local_if_any(tensor).detach(), [0] * tensor.dim()
                if isinstance(tensor, DTensor):
                    starts = [each.start for each in box_of_rank(name, tensor)]
                self._stored.read(name, local, starts)
                torch.autograd.graph.increment_version(local)
        for name in self._stored.objects:
            if name in self._state.paths or self._is_extra(name):
                self._values[name] = self._stored.object(name)

    def install(self, model: nn.Module, optimizers: Sequence[Optimizer], strict: bool) -> None:
        """Has the model and the optimizers take what `read` has read. `strict`: the model must take all that it has."""
        state, values = self._state, self._tensors | self._values
        weights = {path[1:]: values[name] for name, path in state.paths.items() if path[0] == MODEL and name in values}
        if weights:
            load_weights(model, nest(weights), strict)
        if not optimizers:
            return
        every = state.tensors | state.objects | values
        own = nest({path[1:]: every[name] for name, path in state.paths.items() if path[0] == OPTIMIZER})
        options = [deepcopy(own.get(GROUPS, {}).get(key, {})) for key in self._group_keys]
        load_states(model, optimizers, {**own, STATES: own.get(STATES, {}), GROUPS: options})

    def extra(self) -> dict[str, Any]:
        """Returns name -> value of all besides the model, the optimizer and what is of one rank."""
        found = dict[str, dict[tuple[Any, ...], Any]]()
        for name, value in (self._tensors | self._values).items():
            if self._is_extra(name):
                root, *path = self._stored.paths[name]
                found.setdefault(str(root), {})[tuple(path)] = value
        return {name: nest(values) for name, values in found.items()}


def _of_rank(stored: Checkpoint, team: Team) -> dict[str, Any] | None:
    """Returns what this rank has saved for itself; None if another number of ranks has saved."""
    saved, own = {name for name, path in stored.paths.items() if path[0] == PER_RANK}, f"{PER_RANK}.{team.rank}"
    if saved and [*stored.members] != team.members:
        warnings.warn(
            f"{stored.folder}: {len(stored.members)} ranks have saved states of their own, such as random states, and "
            f"{team.size} load. These begin anew.",
            stacklevel=6,
        )
        return None
    found: dict[str, Any] = stored.object(own) if own in saved else {}
    return found


def _group_keys(stored: Checkpoint) -> dict[str, str]:
    """Returns the FQN of a parameter -> the key of its options in the checkpoint: the index of a group, or the FQN."""
    options = {name: path for name, path in stored.paths.items() if path[:2] == (OPTIMIZER, GROUPS) and len(path) > 3}
    lists = {name: path[2] for name, path in options.items() if path[3:] == ("params",)}
    if not lists:  # options lie under FQNs
        return {path[2]: path[2] for path in options.values()}
    return {fqn: key for name, key in lists.items() for fqn in stored.object(name)}


def _whole(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path to what is loaded as a whole: the states of a parameter, an option, another value."""
    return path[: {STATES: 3, GROUPS: 4}.get(path[1], 2)]


def _require_loadable(argument: str, values: Any) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{argument}: expected a dict or None, got {type(values).__name__}")
    for name, value in (values or {}).items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"{argument}: {name}: expected an object with load_state_dict, got {type(value).__name__}. Numbers and "
                "other values are in what load returns."
            )
