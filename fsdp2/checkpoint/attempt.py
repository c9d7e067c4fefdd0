"""Prepares what one rank brings to a save: its arguments, its part of the state, and the file that it writes."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards import codec_state
from ..shards.tensors import check_bool, tensors_in
from .folders import check_path
from .layout import Kind, Layout, file_of
from .parts import bytes_in, file_head, write_parts
from .ranks import digest_of
from .snapshot import Snapshot
from .state import MODEL, OPTIMIZER, PER_RANK, State, check_arguments, states_of

if TYPE_CHECKING:
    from .commit import Agreed

CODECS = "fsdp2.codecs"
"""The name in `per_rank` of what codecs keep between steps."""


class Attempt:
    """The part of one rank in a save. Whatever its methods raise, `failed`, is told to all ranks at the end."""

    def __init__(self) -> None:
        self.failed: Exception | None = None
        self.final, self.new, self.save_id = Path(), Path(), ""
        """The folder of the checkpoint, the hidden one that will take its place, and the name of the save."""
        self.home = Path()
        """The folder around the checkpoint, on the disk, also of one in memory."""
        self._choices = ""
        self.in_memory = False
        self.keep_last: int | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.state, self.kind = State({}), Kind((), (), ())
        self.plain: dict[str, int] = {}
        """Checksums of the optimizer's plain tensors and options, which must be alike on all ranks."""
        self.per_rank = b""
        self.objects: dict[str, bytes] = {}
        self.values: Callable[[str], Tensor] = self.state.local
        """Returns this rank's part of a tensor, or of its copy."""
        self.later: dict[str, Callable[[], int]] = {}
        """See `State.may_be_copied_later`."""

    def check(
        self,
        folder: Any,
        model: Any,
        optimizer: Any,
        extra: Any,
        per_rank: Any,
        wait: Any,
        keep_last: Any,
        trainable_only: Any,
        in_memory: Any,
        flat_keys: Any,
    ) -> None:
        """Checks the arguments of `save`. It does not communicate."""
        check_path("folder", folder)
        self.optimizers = check_arguments("save", model, optimizer)
        _check_values("extra", extra)
        _check_values("per_rank", per_rank)
        check_bool("wait", wait)
        check_bool("trainable_only", trainable_only)
        check_bool("in_memory", in_memory)
        check_bool("flat_keys", flat_keys)
        for name, value in (extra or {}).items():
            if flat_keys and isinstance(value, Tensor):
                raise ValueError(
                    f"extra: {name}: expected no tensor with flat_keys=True, where tensors without a dict are the "
                    f"model's. Pass it inside a dict."
                )
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last: expected a number from 1 on, or None, got {keep_last!r}")
        self.final, self.in_memory, self.keep_last = Path(folder).absolute(), in_memory, keep_last
        self.home = self.final.parent
        self._choices = f"{self.final}\n{keep_last}\n{in_memory}\n{flat_keys}\n{trainable_only}"

    def collect(
        self,
        model: nn.Module,
        extra: Mapping[str, Any] | None,
        per_rank: Mapping[str, Any] | None,
        trainable_only: bool,
        flat_keys: bool,
    ) -> None:
        """Finds out what this rank holds."""
        nested = states_of(model, self.optimizers, trainable_only=trainable_only, keep_empty=True, flat_keys=flat_keys)
        self.state = State(nested | {name: state_of(value) for name, value in (extra or {}).items()}, flat_keys)
        self.later = self.state.may_be_copied_later(model)
        own = {name: state_of(value) for name, value in (per_rank or {}).items()}
        if codecs := codec_state.state_dict(model):
            own[CODECS] = codecs
        self.per_rank = pickled("per_rank", own) if own else b""
        self.objects = {name: pickled(name, value) for name, value in self.state.objects.items()}
        self.kind = self.state.kind()
        for name in (name for name, path in self.state.paths.items() if path[0] == OPTIMIZER):
            tensor, value = self.state.tensors.get(name), self.state.objects.get(name)
            if tensor is not None and not isinstance(tensor, DTensor):
                self.plain[name] = zlib.crc32(bytes_in(tensor.detach().cpu().contiguous()))
            elif tensor is None and _is_plain(value):
                self.plain[name] = zlib.crc32(repr(value).encode())
        self.values = self.state.local

    def digest(self) -> int:
        """Returns a number that is equal on ranks that save the same."""
        return digest_of(f"{self._choices}\n{self.save_id}".encode())

    def take_snapshot(self, agreed: Agreed | None, buffer: Tensor | None) -> Snapshot:
        """Copies into host memory what the next forward may change, and prepares to copy the rest.

        Args:
            agreed: what ranks know; None at the first save.
            buffer: memory of an earlier snapshot.
        """
        # Where this rank does not know what it will write, it copies all that it has.
        names = [*self.state.tensors] if agreed is None else [place.name for place in agreed.places]
        snapshot = Snapshot(self.state, names, self.later, buffer)
        self.values = snapshot.value
        return snapshot

    @property
    def key(self) -> tuple[Kind, Path | None]:
        """Returns what ranks have to agree on: what this rank holds, and a place in memory for a folder."""
        return self.kind, self.home if self.in_memory else None

    def write(self, agreed: Agreed, rank: int) -> tuple[int, int]:
        """Writes the file of this rank. Returns its bytes, and those of the index of its objects."""
        self.new.mkdir(exist_ok=True)
        path = self.new / file_of(rank)
        path.unlink(missing_ok=True)
        end, index, written = Layout.end_of(agreed.places), {}, []
        for name, data in self.objects.items():
            if agreed.layout.objects[name] == rank:
                index[name] = [end, len(data)]
                written.append(data)
                end += len(data)
        listed = json.dumps(index).encode() if index else b""
        dtypes = {name: parts.dtype for name, parts in agreed.layout.tensors.items()}
        more, head = b"".join((*written, listed, self.per_rank)), file_head(self.save_id, rank)
        values = lambda place: self.values(place.name).cpu().contiguous()  # noqa: E731
        return write_parts(path, head, agreed.places, values, dtypes, more), len(listed)


def _check_values(argument: str, values: Any) -> None:
    """Checks the names in `extra` or `per_rank`."""
    if values is not None and not (isinstance(values, Mapping) and all(isinstance(name, str) for name in values)):
        raise TypeError(f"{argument}: expected a dict with texts as keys, or None, got {values!r}")
    taken = {MODEL, OPTIMIZER, PER_RANK, CODECS} & {*(values or ())}
    if taken:
        raise ValueError(f"{argument}: expected names other than {', '.join(sorted(taken))}, which save gives itself")


def state_of(value: Any) -> Any:
    """Returns the state of a value: `value.state_dict()` if it has one."""
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def pickled(name: str, value: Any) -> bytes:
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
