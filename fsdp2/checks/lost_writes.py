"""Refuses writes that would be lost, and uses of what was a parameter before fully_shard.

What a forward writes to unsharded parameters is lost when they are freed. Version counters show most writes. They show
none through a plain tensor's `.data`, nor those of kernels: for these, content is compared, when checks are due. If
`.data` is assigned, gathers and optimizers would not reach the parameter any more: its address shows that each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..calls.inputs import HandedInputs
from ..engine.events import Change
from ..engine.gather import as_sent, view_bytes
from ..engine.group import FSDPParamGroup
from ..engine.owners import SHARDED_AS
from ..engine.parameter import FSDPParam
from ..engine.policy import KeepUntil
from ..engine.root import Root
from ..engine.state import FSDPState
from ..engine.unsharded import refuse_written
from ..parameters.checksum import bits_of
from ..parameters.ties import original_of
from ..torch_private.checks import replace_hooks
from ..torch_private.internals import PLAIN, local_if_any, version_of
from .due import NO_NUMBERS, Check, ForwardCheck, judge_at_end

# ---- writes that version counters show


class WrittenParameters(Check):
    """Refuses in-place writes to unsharded parameters that a version counter shows: resharding would undo them."""

    def forward_ended(self, group: FSDPParamGroup, inputs: Sequence[HandedInputs]) -> None:
        # Each forward comes here, so this calls no function.
        unsharded = group.unsharded
        if tuple(map(version_of, unsharded.counted)) != unsharded.expected:
            refuse_written(unsharded.written())

    def before_reshard(self, group: FSDPParamGroup) -> None:
        groups = _resharded_with(group)
        written = [name for each in groups for name in each.unsharded.written()]
        _refuse_lost([*written, *(name for each in groups for name in take_moved(each))])

    def forward_failed(self, group: FSDPParamGroup) -> None:
        if group.root.backward is None:
            group.unsharded.written()  # which is lost, as all that the forward did


def _resharded_with(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """Returns the groups that a user's call of `reshard` reaches with `group`: nothing of any may be left for later."""
    return [each for state in (group.state, *group.state.parts) for each in state.groups]


def _refuse_lost(names: Sequence[str]) -> None:
    """Raises RuntimeError if there are any unsharded parameters that a user has changed before `reshard`."""
    if names:
        raise RuntimeError(
            f"{', '.join(dict.fromkeys(names))}: modified, or `.data` assigned, between unshard() and reshard(), which "
            "is lost. Write inside `with fsdp2.full_params(module, writeback=True):`, or to the sharded parameter; "
            "change a shape (resize an embedding) before fully_shard."
        )


# ---- assignments to `.data`


class _UnshardedPlaces:
    """The addresses and shapes that the unsharded parameters of one group must have.

    `tensors`: those with elements, but for those that say themselves how they are gathered. `base`: the address of
    `storage` when `pointers`, the addresses of the tensors, were computed.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        buffers = group.parameters.buffers
        assert buffers is not None, "the group is unsharded"
        rows = zip(group.parameters.plain, buffers.layout.unsharded_offsets, strict=True)
        placed = [(param, offset) for param, offset in rows if param.unsharded.numel()]
        self.params, self.offsets = [param for param, _ in placed], [offset for _, offset in placed]
        self.tensors: list[Tensor] = [param.unsharded for param in self.params]
        self.are_distributed = DTensor in map(type, self.tensors)
        self.shapes = [tensor.shape for tensor in self.find_tensors()]
        self.numels = [*map(torch.Size.numel, self.shapes)]
        self.storage = group.unsharded.storage
        self.base, self.pointers = 0, self.offsets

    def find_tensors(self) -> list[Tensor]:
        """Returns the local tensors of those that are DTensors, and the others themselves."""
        return [*map(local_if_any, self.tensors)] if self.are_distributed else self.tensors

    def find_moved(self) -> list[str]:
        """Returns the names of the parameters that lie elsewhere, and shapes that are wrong."""
        moved, base = [], self.storage.data_ptr()
        for param, tensor, offset, shape in zip(
            self.params, self.find_tensors(), self.offsets, self.shapes, strict=True
        ):
            if tensor.shape != shape:
                moved.append(f"{param.name} (expected shape {param.gathered_shape}, got {tuple(tensor.shape)})")
            elif tensor.data_ptr() != base + offset or not tensor.is_contiguous():
                moved.append(param.name)
        return moved


class MovedData(ForwardCheck):
    """Refuses unsharded parameters that do not lie in their group's memory any more: a user has assigned `.data`."""

    def __init__(self) -> None:
        self._places: dict[FSDPParamGroup, _UnshardedPlaces] = {}

    def unsharded(self, group: FSDPParamGroup) -> None:
        places = self._places.get(group)
        if places is None:
            places = self._places[group] = _UnshardedPlaces(group)
        # It takes 0.2 us for each parameter, or 0.07 us in backward. The storage has another address after each gather.
        base = places.storage.data_ptr()
        if base != places.base:
            places.base, places.pointers = base, [*map(base.__add__, places.offsets)]
        tensors = places.find_tensors() if places.are_distributed else places.tensors
        if [*map(Tensor.data_ptr, tensors)] == places.pointers:
            if group.root.backward is not None:
                return
            # Another shape over the same elements shows by that of its gradient.
            if [*map(Tensor.numel, tensors)] == places.numels and all(map(Tensor.is_contiguous, tensors)):
                return
        raise RuntimeError(
            f"{', '.join(self.take_moved(group))}: the unsharded parameter does not lie in its group's memory any "
            "more, because `.data` was assigned, or it was resized or transposed in place, while it was unsharded. The "
            "next gather would not reach it, and no optimizer would train it. What was assigned is dropped. Write "
            "inside `with fsdp2.full_params(module, writeback=True):`; change a shape (resize an embedding) before "
            "fully_shard."
        )

    def changed(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        if change is Change.PARAMETERS:
            self._places.pop(group, None)

    def before_reshard(self, group: FSDPParamGroup) -> None:
        _refuse_lost([name for each in _resharded_with(group) for name in self.take_moved(each)])

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        for group in root.groups if in_backward else ():
            self.take_moved(group)

    def after_forward(self, group: FSDPParamGroup) -> None:
        refuse_written(self.take_moved(group))

    def after_failure(self, group: FSDPParamGroup) -> None:
        self.take_moved(group)

    def take_moved(self, group: FSDPParamGroup) -> list[str]:
        """Puts unsharded parameters that lie elsewhere back into the group's memory; returns their names, and shapes
        that were wrong.
        """
        places = self._places.get(group)
        moved = places.find_moved() if places is not None and group.is_unsharded else []
        if moved:
            group.parameters.move_unsharded()
        return moved


def take_moved(group: FSDPParamGroup) -> list[str]:
    """Returns what `MovedData.take_moved` does; nothing if checks are off."""
    observer = group.root.events.of(MovedData)
    return [] if observer is None else observer.take_moved(group)


# ---- writes that nothing counts


class UnshardedContent:
    """A sum, on the device, of what each unsharded parameter of a group holds now.

    Those that say themselves how they are gathered are left out. Nothing here waits for the device.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        buffers = group.parameters.buffers
        assert buffers is not None, "the group is unsharded"
        self._params, self._buffers = group.parameters.plain, buffers
        # Parameter indices in the order of all numbers here.
        self._order = [i for run in buffers.layout.runs for i in run.indices]
        self._unsharded = group.unsharded
        self._held = self._read()

    def _read(self) -> Tensor:
        """Returns sums modulo 2 ** 64: another value at one index shows, an exchange of values does not."""
        # No view is kept: the memory could not be freed.
        memory, layout = self._unsharded.memory, self._buffers.layout
        words, offsets, sums = view_bytes(memory, 0, memory.numel() // _WORD, torch.int64), layout.unsharded_offsets, []
        for (first, *others), (distance,) in layout.runs:
            shape = 1 + len(others), -(-layout.specs[first].nbytes // _WORD)
            sums.append(words.as_strided(shape, (distance // _WORD, 1), offsets[first] // _WORD).sum(1))
        return torch.cat(sums) if sums else NO_NUMBERS

    def changes(self) -> Tensor:
        """Returns, as int64, which unsharded parameters hold something else now; for `named`."""
        return (self._held != self._read()).to(torch.int64)

    def differences(self) -> Tensor:
        """Returns, as int64, which unsharded parameters differ from their shards, as far as this rank knows; for
        `named`.
        """
        memory = self._buffers.unsharded_parameters()
        differ = [_differs(self._params[i].own_rows(memory[i]), self._expected(i, memory[i])) for i in self._order]
        return torch.stack(differ).to(torch.int64) if differ else NO_NUMBERS

    def _expected(self, i: int, unsharded: Tensor) -> Tensor:
        """Returns what this rank's rows of an unsharded parameter are made of its shard, on the same device."""
        local, spec = self._params[i].local, self._buffers.layout.specs[i]
        if spec.gather_codec is None:
            return local.to(unsharded.device, unsharded.dtype, non_blocking=True)
        start = self._buffers.layout.shard_offsets[i]
        shard = view_bytes(self._buffers.shards, start, spec.shard_numel, spec.storage_dtype)
        return as_sent(spec, shard.to(unsharded.device), i)[: local.numel()].view(local.shape)

    def named(self, flags: Sequence[int]) -> list[str]:
        """Returns the names of the parameters whose flag is set."""
        return [self._params[i].name for i in sorted(i for i, flag in zip(self._order, flags, strict=True) if flag)]


# Each parameter begins at a multiple of so many bytes.
_WORD = 8


def _differs(own: Tensor, expected: Tensor) -> Tensor:
    # Another NaN is none: to which one NaN is cast depends on the instruction.
    return ((bits_of(own) != bits_of(expected)) & ~expected.reshape(-1).isnan()).any()


class UnseenWrites(ForwardCheck):
    """Compares what unsharded parameters, and inputs that were cast, hold at the end of a forward with what they held
    when it began. Where unsharded parameters stay between passes, it compares them with their shards, too.
    """

    def __init__(self) -> None:
        # For each group whose forward is being checked, what it held when that began.
        self._content: dict[FSDPParamGroup, UnshardedContent] = {}

    def before_forward(self, group: FSDPParamGroup) -> None:
        content = self._content[group] = UnshardedContent(group)
        if group.keep_until is not KeepUntil.END_OF_USE:
            judge_at_end(group.root, content.differences(), partial(_judge, group, content, _refuse_differing))

    def after_cast(self, state: FSDPState, inputs: HandedInputs) -> None:
        # What was moved to the device is left out: others may fill the caller's buffer with the next batch already.
        pairs = [
            each for each in inputs.not_written() if all(map(_is_plain, each)) and each[0].device == each[1].device
        ]
        if pairs:
            differ = [_differs_from_cast(tensor.detach(), copy.detach()) for tensor, copy in pairs]
            numbers = torch.stack([each.to(differ[0].device) for each in differ]).to(torch.int64)
            names = [inputs.name_of(tensor, state.modules[0]) for tensor, _ in pairs]  # the tensors may be freed
            judge_at_end(state.root, numbers, partial(_judge_inputs, state, names))

    def after_forward(self, group: FSDPParamGroup) -> None:
        content = self._content.pop(group)
        judge_at_end(group.root, content.changes(), partial(_judge, group, content, refuse_written))

    def after_failure(self, group: FSDPParamGroup) -> None:
        self._content.pop(group, None)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_meta


def _differs_from_cast(tensor: Tensor, copy: Tensor) -> Tensor:
    """Returns if `copy` is not what a cast makes of `tensor`. It casts chunk by chunk, to take little memory."""
    numel = max(1024, copy.numel() // 64)
    pairs = zip(tensor.reshape(-1).split(numel), copy.reshape(-1).split(numel), strict=True)
    return torch.stack([_differs_from(own.to(part.dtype), part) for own, part in pairs]).any()


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
    group: FSDPParamGroup, content: UnshardedContent, refuse: Callable[[Sequence[str]], None], flags: Sequence[int]
) -> None:
    """Raises what `refuse` does to the parameters whose flag is set, and reshards."""
    names = content.named(flags)
    if names:
        group.reshard_if_idle()
        refuse(names)


def _refuse_differing(names: Sequence[str]) -> None:
    raise RuntimeError(
        f"{', '.join(names)}: what was gathered before this forward, and has stayed, is not what the sharded "
        "parameter holds. Either was written to where nothing counts it, as through a plain tensor's `.data`. "
        "Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()."
    )


# ---- what was a parameter before


def refuse_originals(state: FSDPState) -> None:
    """Marks original parameters of a call's modules once they have been cut, and refuses to compute gradients for them.

    If one turns up in another fully_shard call it was tied across groups; in an optimizer, that was built too early; if
    it gets a gradient, something computes with it.
    """
    for group in [group for each in (state, *state.parts) for group in each.groups]:
        for original in [reference() for reference in group.originals]:
            mark = None if original is None else original_of(original)
            if original is not None and mark is not None:
                setattr(original, SHARDED_AS, mark.name)
                if original.requires_grad:
                    replace_hooks(original, partial(_refuse_gradient, mark.name))


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise RuntimeError(
        f"something has computed with what {name} was before fully_shard (a list or view of parameters, another module "
        "that shares it, a loss from before?), which is no parameter of the model any more. Use what modules have now."
    )
