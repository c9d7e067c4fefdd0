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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards import codec_state
from ..shards.find import before_write
from ..shards.tensors import check_bool, local_if_any, some_of
from .content import CODECS, state_of
from .folders import check_path
from .ranks import Team, attempt
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
            different checkpoints; a shape differs; with `strict`, a tensor is missing or left over, or the model does
            not take a key of its own state dict; a name in `extra` was not saved.
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
        return check_arguments("load", model, optimizer, process_group)

    checked, failed = attempt(check)
    session = session_of("load", process_group, failed)
    session.end_previous()
    team = session.team
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
        self._stored_keys = _group_keys(stored)
        self._group_keys: list[str] = []
        if optimizers:
            own, groups = nested[OPTIMIZER], nested[OPTIMIZER][GROUPS]
            self._group_keys = [
                next((self._stored_keys[fqn] for fqn in group["params"] if fqn in self._stored_keys), str(index))
                for index, group in enumerate(groups)
            ]
            keyed = zip(self._group_keys, groups, strict=True)
            own[GROUPS] = {key: options_of(group) for key, group in keyed if group["params"]}
        is_flat = not any(path[0] == MODEL for path in stored.paths.values())
        self._stored = stored
        self._state = State(nested | {name: state_of(value) for name, value in extra.items()}, is_flat)
        self._tensors: dict[str, Tensor] = {}
        """Keys of the tensors to read -> where to."""
        self._values: dict[str, Any] = {}
        """The values that were read, of those that are no tensors."""
        self._add_what_is_missing(params_of(model, optimizers), len(optimizers) == 1)

    def _add_what_is_missing(self, params: Mapping[str, tuple[Tensor, Optimizer]], is_one: bool) -> None:
        """Adds the states and options that the checkpoint has and the optimizers have not: a fresh one has no states.

        A state that has another shape than the stored one is made anew, unless it has the shape of its parameter.

        Args:
            params: FQN -> a parameter, and its optimizer.
            is_one: there is one optimizer, which gets the states that are of no parameter.
        """
        stored, state = self._stored, self._state
        for name, path in stored.paths.items():
            place = _place_in_optimizer(name, path, params, self._group_keys)
            if place is None or name in state.objects:
                continue
            kind, key, *_ = place
            if kind == STATES and key not in params and (not is_one or key in self._stored_keys):
                continue
            full, own = state.paths.get(name, (OPTIMIZER, *place)), state.tensors.get(name)
            if name not in stored.tensors:
                if own is None:
                    state.add(name, full, None)
                continue
            param, optimizer = params.get(key, (None, None)) if kind == STATES else (None, None)
            dtype, shape, starts, *_ = stored.tensors[name]
            if own is not None and (
                own.shape == shape or kind == GROUPS or (param is not None and own.shape == param.shape)
            ):
                continue
            weight = key if state.flat_keys else f"{MODEL}.{key}"
            saved = stored.tensors.get(weight)
            if param is not None and saved is not None and saved.shape != param.shape:
                raise ValueError(
                    f"{stored.folder}: {name}: expected a state of a parameter of shape {[*param.shape]}, got one of a "
                    f"parameter of shape {[*saved.shape]}"
                )
            if param is not None and shape and dtype.is_floating_point and (saved is None or saved.dtype == dtype):
                dtype = param.dtype  # as where the parameter has another dtype than the saved one
            is_plain = name not in stored.sharded and (not shape or weight in stored.sharded)
            rests = getattr(optimizer, "offload_states", False)
            made = make_state(name, param, dtype, shape, None if is_plain else len(starts) > 1, rests)
            state.add(name, full, made)

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
        has_state = {name.rpartition(".")[0] for name in there}
        missing = [
            name
            for name, path in state.paths.items()
            if name not in there
            and path[0] in (MODEL, OPTIMIZER)
            # Not of a parameter on which the saved run had not stepped.
            and (path[:2] != (OPTIMIZER, STATES) or name.rpartition(".")[0] in has_state)
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
        roots = {path[0] for path in state.paths.values()} & {MODEL, OPTIMIZER}
        return [name for name in stored.tensors if self._root(name) in roots and name not in state.paths]

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
        own = state.tensors | state.objects | values
        of_optimizers = nest({path[1:]: own[name] for name, path in state.paths.items() if path[0] == OPTIMIZER})
        there = {path[2] for name, path in state.paths.items() if path[:2] == (OPTIMIZER, STATES) and name in values}
        # A parameter of the saved run that had no states there has none then.
        states = {
            key: each
            for key, each in of_optimizers.get(STATES, {}).items()
            if key in there or key not in self._stored_keys
        }
        options = [of_optimizers[GROUPS].get(key, {}) for key in self._group_keys]
        load_states(model, optimizers, states, options)

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
    if saved and (len(saved) != team.size or own not in saved):
        warnings.warn(
            f"{stored.folder}: {len(saved)} ranks have saved states of their own, such as random states, and "
            f"{team.size} load. These begin anew.",
            stacklevel=6,
        )
        return None
    found: dict[str, Any] = stored.object(own) if saved else {}
    return found


def _group_keys(stored: Checkpoint) -> dict[str, str]:
    """Returns the FQN of a parameter -> the key of its options in the checkpoint: the index of a group, or the FQN."""
    found = dict[str, str]()
    for name, path in stored.paths.items():
        if path[:2] == (OPTIMIZER, GROUPS) and path[3:] == ("params",):
            found |= dict.fromkeys(stored.object(name), str(path[2]))
        elif len(path) < 3 and name.startswith(f"{OPTIMIZER}.{GROUPS}."):
            fqn = name.removeprefix(f"{OPTIMIZER}.{GROUPS}.").rpartition(".")[0]
            found[fqn] = fqn
    return found


def _place_in_optimizer(
    name: str, path: tuple[Any, ...], params: Container[str], groups: Container[str]
) -> tuple[Any, ...] | None:
    """Returns `STATES`, the FQN of a parameter, and more keys, for a stored state; `GROUPS`, the key of a group, and
    more keys for an option of one of the `groups`; None for anything else.
    """
    place: tuple[Any, ...] | None = None
    if path[0] == OPTIMIZER and len(path) > 2 and path[1] in (STATES, GROUPS):
        place = (path[1], str(path[2]), *path[3:])
    for kind, known in ((STATES, params), (GROUPS, groups)) if place is None else ():
        before, below = f"{OPTIMIZER}.{kind}.", name.removeprefix(f"{OPTIMIZER}.{kind}.")
        ends = (end for end, text in enumerate(below) if text == "." and below[:end] in known)
        if name.startswith(before) and (end := next(ends, None)):
            place = (kind, below[:end], below[end + 1 :])
    if (
        place is not None
        and place[0] == GROUPS
        and (place[1] not in groups or not options_of(dict.fromkeys(place[2:3])))
    ):
        return None
    return place


def _require_loadable(argument: str, values: Any) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{argument}: expected a dict or None, got {type(values).__name__}")
    for name, value in (values or {}).items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(
                f"{argument}: {name}: expected an object with load_state_dict, got {type(value).__name__}. Numbers and "
                "other values are in what load returns."
            )
