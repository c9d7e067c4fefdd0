"""Collects what one rank brings to a save: its part of the tensors, and other values as bytes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards import codec_state
from ..shards.tensors import tensors_in
from .parts import bytes_in
from .state import MODEL, OPTIMIZER, PER_RANK, State, states_of

CODECS = "fsdp2.codecs"
"""The name in `per_rank` of what codecs keep between steps."""


class Content:
    """The tensors and other values that one rank brings to a save. See `save` for the arguments.

    Attributes:
        state: its tensors and objects.
        kind: describes these.
        plain: checksums of the optimizer's plain tensors and options, which must be alike on all ranks.
        objects: key -> the bytes of a value that is no tensor.
        per_rank: the bytes of what this rank has for itself.
        later: see `State.may_be_copied_later`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        trainable_only: bool,
        flat_keys: bool,
    ) -> None:
        nested = states_of(model, optimizers, trainable_only=trainable_only, flat_keys=flat_keys)
        self.state = State(nested | {name: state_of(value) for name, value in extra.items()}, flat_keys)
        self.later = self.state.may_be_copied_later(model)
        own = {name: state_of(value) for name, value in per_rank.items()}
        if codecs := codec_state.state_dict(model):
            own[CODECS] = codecs
        self.per_rank = _pickled("per_rank", own) if own else b""
        self.objects = {name: _pickled(name, value) for name, value in self.state.objects.items()}
        self.kind = self.state.kind()
        self.plain: dict[str, int] = {}
        for name in (name for name, path in self.state.paths.items() if path[0] == OPTIMIZER):
            value = self.state.tensors.get(name, self.state.objects.get(name))
            if isinstance(value, DTensor):
                continue
            checksum = zlib.crc32(repr(value).encode()) if _is_plain(value) else 0
            for each in tensors_in(value):  # a tensor, or those in a tuple, for example
                checksum = zlib.crc32(bytes_in(each.detach().cpu().contiguous()), checksum)
            self.plain[name] = checksum


def check_values(argument: str, values: Any) -> None:
    """Checks the names in `extra` or `per_rank`."""
    if values is not None and not (isinstance(values, Mapping) and all(isinstance(name, str) for name in values)):
        raise TypeError(f"{argument}: expected a dict with texts as keys, or None, got {values!r}")
    taken = {MODEL, OPTIMIZER, PER_RANK, CODECS} & {*(values or ())}
    if taken:
        raise ValueError(f"{argument}: expected names other than {', '.join(sorted(taken))}, which save gives itself")


def state_of(value: Any) -> Any:
    """Returns the state of a value: `value.state_dict()` if it has one."""
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _pickled(name: str, value: Any) -> bytes:
    """Returns what torch.save writes of a value that is no tensor.

    Raises:
        NotImplementedError: it has shards of a DTensor, which other ranks would lose.
        TypeError: it can be loaded only by running code.
    """
    if any(isinstance(each, DTensor) for each in tensors_in(value)):
        raise NotImplementedError(
            f"{name}: expected values that all ranks have whole, got a DTensor inside a dict whose keys are no texts, "
            "or in an object. Pass optimizers as optimizer=, and tensors under keys that are texts."
        )
    file = io.BytesIO()
    try:
        torch.save(value, file)
        if not _is_plain(value):
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{name}: expected numbers, texts, tensors, lists, tuples and dicts, which load without running code, got "
            f"{type(value).__name__}: {str(error).splitlines()[0]}"
        ) from error
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (int, float, str, bool)
