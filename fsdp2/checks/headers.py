"""Defines headers, which say what a collective is about, so that those of two ranks are never mixed by mistake.

A header names a group of parameters, what is done with it, and the sizes of the tensors that cross. Ranks that find
different headers at the same place of their sequence of collectives are out of step: all of them raise.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives.gloo import GATHERING, REDUCING, SUMMING
from ..engine.comm import CommLabel
from ..features.running_stats import AVERAGED

HEADER_NBYTES = 192
_DIGEST_NBYTES = 8
_LONGEST_NAME = 100
DIVIDED, WEIGHTED = ", divided by ", ", weighted,"
TABLE = "\nWhere each rank was:"


class Header(NamedTuple):
    """Names one collective, for other ranks to compare.

    `data`: the bytes that are sent: `digest`, which is compared, and `text`. `code`: the digest, as bytes.
    """

    text: str
    data: Tensor
    digest: Tensor
    code: bytes

    @classmethod
    def of(
        cls, doing: str, where: str, sizes: Sequence[Any], part: str, compared: str = "", remark: str = ""
    ) -> Header:
        """Returns a header that ends with the sizes and the part, as far as there is room.

        `where` and `remark` are not compared, `compared` is.
        """
        digest = hashlib.blake2b(repr((doing, compared, sizes, part)).encode(), digest_size=_DIGEST_NBYTES).digest()
        shown = ", ".join(f"{numel} {str(dtype)[6:]}" for dtype, numel in sizes)
        text = "\t".join([doing + where, *filter(None, [remark]), shown + part])
        room = HEADER_NBYTES - _DIGEST_NBYTES
        if len(text.encode()) > room:
            text = text.encode()[: room - 3].decode(errors="ignore") + "..."
        data = (digest + text.encode()).ljust(HEADER_NBYTES, b"\0")
        return cls.holding(text, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @classmethod
    def holding(cls, text: str, data: Tensor) -> Header:
        """Returns a header of that data."""
        return cls(text, data, data[:_DIGEST_NBYTES], bytes(data[:_DIGEST_NBYTES].tolist()))


class Headers:
    """Builds the headers of a Comm's collectives, each once. `comm_label`: that of the Comm."""

    def __init__(self, comm_label: CommLabel) -> None:
        self._comm_label = comm_label
        self._built: dict[Any, Header] = {}

    def of(self, kind: str, tensors: Sequence[Tensor], part: str = "") -> Header:
        """Returns the header of a collective that takes `tensors` of this rank.

        `part`: names the gradients that it is about.
        """
        comm_label, built = self._comm_label, self._built
        remark = comm_label.remark
        key = (kind, comm_label.name, part, remark, *[(tensor.dtype, tensor.numel()) for tensor in tensors])
        if key not in built:
            built[key] = Header.of(_doing(comm_label, kind), "", key[4:], part, remark=remark)
        return built[key]


def placed_header(comm_label: CommLabel, kind: str, tensors: Sequence[Tensor], part: str = "") -> Header:
    """Returns a header that also says what runs, which is compared, and the step, which is not: ranks may accumulate
    different numbers of batches, and after an error their counts may differ for ever.
    """
    phase, step = comm_label.where()
    sizes = [(tensor.dtype, tensor.numel()) for tensor in tensors]
    return Header.of(_doing(comm_label, kind), f" ({phase}, step {step})", sizes, part, phase, comm_label.remark)


def _doing(comm_label: CommLabel, kind: str) -> str:
    name = comm_label.label
    return f"{kind} {name}" if len(name) <= _LONGEST_NAME else f"{kind} ...{name[-_LONGEST_NAME:]}"


RAISED, BLOCKED = "raised ", "blocked "
_NO_DIGEST = bytes(_DIGEST_NBYTES)


def goodbye(text: str = "out of step with others, see its error") -> Header:
    """Returns the header that a rank sends last when ranks are out of step, before all begin again."""
    data = (_NO_DIGEST + text.encode()[: HEADER_NBYTES - _DIGEST_NBYTES]).ljust(HEADER_NBYTES, b"\0")
    return Header.holding(text, torch.frombuffer(bytearray(data), dtype=torch.uint8))


GOODBYE = goodbye()


def differ(message: Tensor, own: Header) -> bool:
    """Returns True if the header with which `message` begins means something else than `own`."""
    return not torch.equal(message[:_DIGEST_NBYTES], own.digest)


def digest_of(header: bytes) -> bytes:
    """Returns the part of a header that is compared."""
    return header[:_DIGEST_NBYTES]


def text_of(header: Tensor | bytes) -> str:
    """Returns the part of a header that people read."""
    data = bytes(header.tolist()) if isinstance(header, Tensor) else header
    return data[_DIGEST_NBYTES:HEADER_NBYTES].rstrip(b"\0").decode(errors="replace")


def without_sizes(text: str) -> str:
    """Returns the text of a header up to the sizes of its tensors."""
    return text.partition("\t")[0]


def _sizes_in(text: str) -> str:
    """Returns the sizes in the text of a header, and what follows them."""
    return text.rpartition("\t")[2]


def _remark_in(text: str) -> str:
    """Returns the remark in the text of a header, or an empty text: how many parameters are trainable."""
    parts = text.split("\t")
    return parts[1] if len(parts) == 3 else ""


_DTYPE = re.compile(r"\bb?float\d+\b")


_GUESS = (
    "All must run the same sharded modules in the same order; is a call under `if rank == 0:`, or has one gone on "
    "after an exception, left a module out, built another model, set something else (set_unsharded_budget), "
    "or written to weights that the others have not written to (an optimizer that skips empty shards)?"
)


_CONDITIONAL = (
    " If some ranks leave a module out (their batch has no images, for example), pass conditional=True to its "
    "fully_shard call, or call its set_conditional() before the first forward, on all ranks."
)


def trainable_remark(flags: Sequence[bool]) -> str:
    """Returns a remark for headers: how many parameters of a model are trainable, and a checksum of which."""
    return f"{sum(flags)} of {len(flags)} #{zlib.crc32(bytes(flags)):x}"


def _cause(texts: Mapping[int, str]) -> str:
    """Returns what is the reason, or may be. `texts`: rank -> the text of its header."""
    if any(text.startswith(RAISED) for text in texts.values()):
        return "See the log of the rank that has raised."
    blocked = [str(rank) for rank, text in texts.items() if text.startswith(BLOCKED)]
    if blocked:
        they = f"Ranks {', '.join(blocked)} wait" if len(blocked) > 1 else f"Rank {blocked[0]} waits"
        return (
            f"{they} there for ranks that wait here. Was an error caught before, or is that call made on some ranks "
            "only?"
        )
    remarks = {rank: remark for rank, text in texts.items() if (remark := _remark_in(text))}
    if len(set(remarks.values())) > 1:
        (first, expected), *_ = remarks.items()
        other = next(rank for rank, remark in remarks.items() if remark != expected)
        (one, _, _), (two, _, _) = expected.partition(" #"), remarks[other].partition(" #")
        return (
            f"requires_grad differs between ranks: {one} parameters are trainable on rank {first}, and {two} on rank "
            f"{other}{', other ones' * (one == two)}. Set requires_grad alike on all ranks, before the forward; "
            "fsdp2.check(model) lists where it differs."
        )
    averaging = [text for text in texts.values() if AVERAGED in text]
    if 0 < len(averaging) < len(texts):
        names = without_sizes(averaging[0]).partition(AVERAGED)[2]
        return (
            f"Is {names} in training mode on some ranks only, or set_running_stats_averaging not alike? Call its "
            f"train() or eval() alike on all ranks. {_GUESS}"
        )
    return _GUESS + _hint([*texts.values()])


def _hint(texts: Sequence[str]) -> str:
    """Returns what may be the reason if all ranks reduce, or if some use a group."""
    if not all(text.startswith((REDUCING, SUMMING)) for text in texts):
        return _CONDITIONAL if any(text.startswith((GATHERING, REDUCING, SUMMING)) for text in texts) else ""
    if len({WEIGHTED in text for text in texts}) == 2:
        return " They must be inside of fsdp2.accumulate on all ranks, or on none."
    if len({DIVIDED in text for text in texts}) == 2:
        return " Call set_gradient_divide_factor on all of them, with the same factor."
    if len({_DTYPE.sub("", text) for text in texts}) == 1:
        what = "give MixedPrecisionPolicy compression=Compression(reduce_scatter=reduce_dtype)"
        return f" If they accumulate different numbers of batches, {what}."
    return (
        " If ranks use different parameters of one group, call set_reduce_scatter_unused_params(True); if "
        "requires_grad differs between ranks, which fsdp2.check(model) finds, set it alike."
    )


def out_of_step(texts: Mapping[int, str]) -> str:
    """Returns the message of the error. `texts`: rank -> the text of its header."""
    doing = {rank: without_sizes(text) for rank, text in texts.items()}
    if len(set(doing.values())) == 1:
        doing = {rank: f"{doing[rank]}, tensors of {_sizes_in(text)}" for rank, text in texts.items()}
    ranks: dict[str, list[str]] = {}
    for rank, text in doing.items():
        ranks.setdefault(text, []).append(str(rank))
    parts = [f"rank{'s' * (len(own) > 1)} {', '.join(own)}: {text}" for text, own in ranks.items()]
    return (
        f"ranks are out of step. {'; '.join(parts)}. {_cause(texts)} Nothing was mixed. Where every rank catches this "
        "error, the next step is exact."
    )
