"""Keeps optimizer states in the CPU's memory, and copies them to the device for a step, a bucket at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..shards.tensors import dtensor, dtensor_spec, local_if_any, local_of, spec_of

BUCKET_BYTES = 64 << 20
_ALIGNMENT = 512


def rests_apart(device: torch.device) -> bool:
    """Returns True if states of parameters on `device` can rest elsewhere: not so on the CPU, where they are already,
    nor on the meta device.
    """
    return device.type not in ("cpu", "meta")


def to_rest(value: Tensor) -> Tensor:
    """Returns a copy of a plain tensor in page-locked memory; `value` itself if it lies there already."""
    if value.device.type == "cpu" and value.is_pinned():
        return value
    resting = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return resting.copy_(value)


def to_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns the state of one parameter with all that has more than one element on `device`."""
    return {name: _moved(value, device) for name, value in state.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor) or not value.dim() or local_if_any(value).device == device:
        return value
    if isinstance(value, DTensor):
        return dtensor(local_of(value).to(device), spec_of(value))
    return value.to(device)


class _Kept:
    """Holds a tensor of a state dict, which torch would move to the device of the parameter when it is loaded."""

    def __init__(self, tensor: DTensor) -> None:
        self.tensor = tensor


def load_to_rest(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Has `load`, which is torch's, load a state dict; sharded states of parameters on a device come to the CPU."""
    kept = {
        number: {n: _Kept(v) if isinstance(v, DTensor) else v for n, v in state.items()}
        if isinstance(state, dict)
        else state
        for number, state in state_dict["state"].items()
    }
    load({**state_dict, "state": kept})
    for param, state in optimizer.state.items():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, _Kept):
                state[name] = _loaded(value.tensor, param)


def _loaded(value: DTensor, param: Tensor) -> DTensor:
    """Returns a tensor of a state dict in the dtype that torch gives it, on the CPU if it may rest there."""
    dtype = param.dtype if param.is_floating_point() else value.dtype
    device = local_if_any(param).device
    local = local_of(value).to("cpu" if rests_apart(device) else device, dtype)
    spec = spec_of(value)
    if value.dtype != dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, tuple(spec.shape), dtype)
    return dtensor(local, spec)


class StateStream:
    """Has buckets of states on the device, one after the other, during one step.

    There is memory for two buckets: while one is used, the one before goes back, and then the next one comes in its
    place. The memory is allocated and freed on the stream that computes. Copies run on a stream for each direction.
    The bucket in use is always written back, also after an error: what a step has done to it is not lost.

    Args:
        device: an accelerator.
        buckets: of each the tensors that rest in page-locked memory.
    """

    def __init__(self, device: torch.device, buckets: Sequence[Sequence[Tensor]]) -> None:
        self._device, self._buckets = device, buckets
        sizes = [sum(_aligned(tensor.nbytes) for tensor in bucket) for bucket in buckets]
        num_slots = min(2, sum(1 for size in sizes if size))
        self._inward, self._outward = torch.Stream(device), torch.Stream(device)
        self._slots = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(num_slots)]
        # Recorded behind what last used each slot; before that, its memory may still be in use by the stream that
        # computes, which had it before.
        start = torch.accelerator.current_stream(device).record_event()
        self._free: list[Any] = [start] * num_slots
        # Number of a bucket that is on the device, or on its way there -> its slot, tensors, and the copy's event.
        self._present: dict[int, tuple[int, list[Tensor], Any]] = {}
        self._used: int | None = None

    def use(self, number: int) -> list[Tensor]:
        """Returns the tensors of a bucket on the device, and begins to bring the next bucket.

        The bucket that was used before goes back: what it was given as must not be used any more.
        """
        if number == self._used:
            return self._present[number][1]
        self._send_back()
        if not self._buckets[number]:
            return []
        if number not in self._present:
            self._bring(number)
        _, tensors, arrived = self._present[number]
        torch.accelerator.current_stream(self._device).wait_event(arrived)
        self._used = number
        following = next((i for i in range(number + 1, len(self._buckets)) if self._buckets[i]), None)
        if following is not None and following not in self._present:
            self._bring(following)
        return tensors

    def close(self) -> None:
        """Sends the bucket in use back, and makes the host wait until all have returned: users may read them."""
        self._send_back()
        current = torch.accelerator.current_stream(self._device)
        for _, _, arrived in self._present.values():  # after an error
            current.wait_event(arrived)
        self._present.clear()
        for event in self._free:
            current.wait_event(event)
            event.synchronize()
        self._slots.clear()

    def _bring(self, number: int) -> None:
        taken = {slot for slot, _, _ in self._present.values()}
        if len(taken) == len(self._slots):  # asked for out of order: the one that nobody uses was brought in vain
            dropped = next(i for i in self._present if i != self._used)
            slot, _, self._free[slot] = self._present.pop(dropped)
            taken.discard(slot)
        slot = next(i for i in range(len(self._slots)) if i not in taken)
        tensors, offset = [], 0
        self._inward.wait_event(self._free[slot])
        with self._inward:
            for source in self._buckets[number]:
                memory = self._slots[slot].narrow(0, offset, source.nbytes)
                tensors.append(memory.view(source.dtype).view(source.shape))
                offset += _aligned(source.nbytes)
                tensors[-1].copy_(source, non_blocking=True)
        self._present[number] = slot, tensors, self._inward.record_event()

    def _send_back(self) -> None:
        if self._used is None:
            return
        (slot, tensors, _), resting = self._present.pop(self._used), self._buckets[self._used]
        self._used = None
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            for target, source in zip(resting, tensors, strict=True):
                target.copy_(source, non_blocking=True)
        self._free[slot] = self._outward.record_event()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def check_bucket_bytes(name: str, nbytes: Any) -> None:
    """Raises TypeError or ValueError if it is no positive number of bytes."""
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise TypeError(f"{name}: expected an int, got {nbytes!r}")
    if nbytes <= 0:
        raise ValueError(f"{name}: expected a number of bytes above 0, got {nbytes}")
