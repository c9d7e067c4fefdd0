"""Finds writes that no version counter shows, through a plain tensor's `.data` or by a kernel: to parameters, and to
inputs that a policy casts.

What a forward so writes to its unsharded parameters is lost when they are freed; an assignment would have the module
compute with it for ever after. What is so written to a shard whose unsharded parameter stays takes no part in forwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..engine.checksum import bits_of
from ..engine.compat import PLAIN
from ..engine.gather import view_bytes
from ..engine.group import FSDPParamGroup, Hold
from ..engine.inputs import HandedInputs
from ..engine.memory import Memory
from ..engine.parameter import FSDPParam
from ..engine.state import FSDPState
from ..engine.unsharded_versions import refuse_written
from .due import NO_NUMBERS, ForwardCheck, judge_at_end

_EVERY_AT_FIRST = 64


class UnshardedContent:
    """Holds a sum, on the device, of what each unsharded parameter of a group holds now.

    Those that say themselves how they are gathered are left out. Nothing here waits for the device, but `named` if it
    has a name to return.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        buffers = group.parameters.buffers
        assert buffers is not None, "the group is unsharded"
        self._params, self._buffers = [*group.parameters.plain], buffers
        self._held = self._read()

    def _read(self) -> Tensor:
        """Returns sums modulo 2 ** 64: another value at one index shows, an exchange of values does not."""
        # No view is kept: the memory could not be freed.
        sums = [words.sum() for words in _words_of(self._buffers)]
        return torch.stack(sums) if sums else NO_NUMBERS

    def changes(self) -> Tensor:
        """Returns, as int64, which unsharded parameters hold something else now; for `named`."""
        return (self._held != self._read()).to(torch.int64)

    def differences(self) -> Tensor:
        """Returns, as int64, which unsharded parameters differ from their shards, as far as this rank knows; for
        `flagged`.
        """
        differ = [*map(_differs, self._params, self._buffers.unsharded_parameters())]
        return torch.stack(differ).to(torch.int64) if differ else NO_NUMBERS

    def named(self, flags: Sequence[int]) -> list[str]:
        """Returns the names of the parameters that have changed, by the numbers of `changes`, on the host."""
        return self.flagged(flags)

    def flagged(self, flags: Sequence[int]) -> list[str]:
        """Returns the names of the parameters whose flag is set."""
        return [param.name for param, flag in zip(self._params, flags, strict=True) if flag]


class SampledContent(UnshardedContent):
    """Holds some words of what the unsharded parameters of a group hold now, the first one of each among them.

    One operation reads all of them, where sums take three for each parameter.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        assert group.parameters.buffers is not None, "the group is unsharded"
        layout = group.parameters.buffers.layout
        # Each parameter begins at a multiple of so many words.
        self._every = math.gcd(_EVERY_AT_FIRST, *(offset // _WORD for offset in layout.unsharded_offsets))
        self._changed = NO_NUMBERS
        super().__init__(group)

    def _read(self) -> Tensor:
        return _as_words(self._buffers)[:: self._every].clone()

    def changes(self) -> Tensor:
        """Returns, as an int64, whether any of these words is another one now; for `named`."""
        self._changed, self._held = self._held != self._read(), NO_NUMBERS
        return self._changed.any().to(torch.int64).reshape(1)

    def named(self, flags: Sequence[int]) -> list[str]:
        """Returns the names of the parameters of which a word has changed. What lies between parameters may change."""
        if not any(flags):
            return []
        layout, step = self._buffers.layout, _WORD * self._every
        rows = zip(self._params, layout.specs, layout.unsharded_offsets, strict=True)
        return [
            param.name
            for param, spec, offset in rows
            if self._changed[offset // step : -(-(offset + spec.nbytes) // step)].any()
        ]


_WORD = 8


def _as_words(buffers: Memory) -> Tensor:
    """Returns the memory of unsharded parameters as int64."""
    return view_bytes(buffers.unsharded, 0, buffers.unsharded.numel() // _WORD, torch.int64)


def _words_of(buffers: Memory) -> list[Tensor]:
    """Returns the words in which each unsharded parameter lies, as int64."""
    whole = _as_words(buffers)
    return [
        whole.as_strided((-(-spec.nbytes // _WORD),), (1,), offset // _WORD)
        for spec, offset in zip(buffers.layout.specs, buffers.layout.unsharded_offsets, strict=True)
    ]


def _differs(param: FSDPParam, unsharded: Tensor) -> Tensor:
    own = param.own_rows(unsharded)
    expected = param.local.to(own.device, own.dtype, non_blocking=True)
    # Another NaN is none: to which one NaN is cast depends on the instruction.
    return ((bits_of(own) != bits_of(expected)) & ~expected.reshape(-1).isnan()).any()


class UnseenWrites(ForwardCheck):
    """Compares what unsharded parameters, and inputs that were cast, hold at the end of a forward with what they held
    when it began.
    """

    def __init__(self) -> None:
        # For each group whose forward is being checked, what it held when that began.
        self._content: dict[FSDPParamGroup, UnshardedContent] = {}

    def before_forward(self, group: FSDPParamGroup, is_first: bool, is_thorough: bool) -> None:
        # What writes in the first, to initialise, writes to all; and programs shall start quickly.
        kind = SampledContent if is_first and not is_thorough else UnshardedContent
        content = self._content[group] = kind(group)
        if group.hold >= Hold.NEXT_PASS:
            judge_at_end(group.root, content.differences(), partial(_judge, group, content.flagged, refuse_differing))

    def after_cast(self, state: FSDPState, inputs: HandedInputs) -> None:
        # What was moved to the device is left out: others may fill the caller's buffer with the next batch already.
        pairs = [
            each for each in inputs.not_written() if all(map(_is_plain, each)) and each[0].device == each[1].device
        ]
        if pairs:
            differ = [_differs_from_cast(tensor.detach(), copy.detach()) for tensor, copy in pairs]
            device = differ[0].device
            numbers = torch.stack([each.to(device) for each in differ]).to(torch.int64)
            names = [inputs.name_of(tensor, state.modules[0]) for tensor, _ in pairs]  # the tensors may be freed
            judge_at_end(state.root, numbers, partial(_judge_inputs, state, names))

    def after_forward(self, group: FSDPParamGroup) -> None:
        content = self._content.pop(group)
        judge_at_end(group.root, content.changes(), partial(_judge, group, content.named, refuse_written))

    def after_failure(self, group: FSDPParamGroup) -> None:
        self._content.pop(group, None)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _differs_from_cast(tensor: Tensor, copy: Tensor) -> Tensor:
    """Returns if `copy` is not what a cast makes of `tensor`. It casts chunk by chunk, to take little memory."""
    if not (tensor.is_contiguous() and copy.is_contiguous()):
        return _differs_from(tensor.to(copy.device, copy.dtype), copy)
    numel = max(1024, copy.numel() // 64)
    pairs = zip(tensor.view(-1).split(numel), copy.view(-1).split(numel), strict=True)
    return torch.stack([_differs_from(own.to(part.device, part.dtype), part) for own, part in pairs]).any()


def _differs_from(expected: Tensor, copy: Tensor) -> Tensor:
    return ((copy != expected) & ~(copy.isnan() & expected.isnan())).any()


def _judge_inputs(state: FSDPState, names: Sequence[str], flags: Sequence[int]) -> None:
    changed = [name for name, flag in zip(names, flags, strict=True) if flag]
    if changed:
        raise RuntimeError(
            f"{state}: a forward has changed {', '.join(changed)} where no version counter shows it (`.data`, a "
            "kernel). The policy had it cast, and what is written to the copy alone is lost. Write under "
            "torch.no_grad(), not through `.data`; call torch.autograd.graph.increment_version(tensor) behind a "
            "kernel; or pass cast_forward_inputs=False in the MixedPrecisionPolicy."
        )


def _judge(
    group: FSDPParamGroup,
    names_of: Callable[[Sequence[int]], list[str]],
    refuse: Callable[[Sequence[str]], None],
    flags: Sequence[int],
) -> None:
    """Raises what `refuse` does to the parameters that `names_of` names by `flags`, and reshards."""
    names = names_of(flags)
    if names:
        group.hold = min(group.hold, Hold.NEXT_PASS)
        group.reshard_if_idle()
        refuse(names)


def refuse_differing(names: Sequence[str]) -> None:
    """Raises RuntimeError if there are any whose unsharded parameter, gathered earlier, differs from its shard."""
    if names:
        raise RuntimeError(
            f"{', '.join(names)}: what was gathered before this forward, and has stayed, is not what the sharded "
            "parameter holds. Either was written to where nothing counts it, as through a plain tensor's `.data`. "
            "Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()."
        )
