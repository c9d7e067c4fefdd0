"""Measures training steps: loss, gradient norm, memory, tokens per second, and the share of the device's operations."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shards.ranks import gather_bytes
from ..shards.tensors import require_module

__all__ = ["StepMeter", "StepRecord"]

# Floating-point operations per second of matrix products in bf16 without sparsity, by what names of devices contain:
# from data sheets, as pages that quote them have it (looked up on 27 November 2026; those of the H100 and
# later print the number with sparsity, which is twice as much). More special names come first: "L4" is in "L40".
DEVICE_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,  # of one of its two GPUs: with 1,200 W, in place of 1,000
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "MI250X": 191.5e12,  # of one of its two dies, which torch takes for a device each
    "MI300X": 1307e12,
}


class StepRecord(dict[str, float]):
    """Holds the numbers of some steps, by name. It prints as one line.

    `step`: the last step. `loss`: the mean over ranks and steps; `loss_max`: the largest mean of a rank. `grad_norm`:
    of the last step. `seconds`: for each step, of the slowest rank. `tokens_per_second`: of all ranks together.
    `flops_per_second`: of a rank, `mfu`: its share of the device's. `memory_peak`: bytes, of the rank with most, since
    torch's statistics were reset last; `memory_share`: of that device's memory. What is not known is not there.
    """

    def __str__(self) -> str:
        parts = [f"step {self['step']:.0f}"]
        for name, text in (
            ("loss", "loss {:.4f}"),
            ("grad_norm", "grad norm {:.3f}"),
            ("tokens_per_second", "{:,.0f} tokens/s"),
            ("mfu", "mfu {:.1%}"),
        ):
            if name in self:
                parts.append(text.format(self[name]))
        if "memory_peak" in self:
            share = f" ({self['memory_share']:.0%})" if "memory_share" in self else ""
            parts.append(f"memory {self['memory_peak'] / 2**30:.2f} GiB{share}")
        return "  ".join(parts)


class StepMeter:
    """Measures steps, and tells of every n-th: loss, gradient norm, tokens per second, memory, model flops utilisation.

    In all steps but the n-th the host does not wait for the device, and ranks do not communicate: losses are added up
    where they are. In the n-th, the host reads them, and ranks exchange 48 bytes each. Time is counted from the end of
    the first step, which also builds buffers. It takes models that fsdp2, torch or nobody has sharded.

    Model flops utilisation (mfu) is the definition of PaLM (Chowdhery et al. 2022, appendix B): tokens per second of a
    rank, times the operations that the model's matrix products need for a token, by the device's operations per second.
    For a token these are 6 for each parameter (2 in forward, 4 in backward), without those of lookups (nn.Embedding),
    and 12 * layers * width * sequence length for attention. What is computed again in backward does not count.

    Args:
        model: whose parameters are counted, and on whose device it trains.
        every: n.
        write: is called with a record's line on the first rank: print, or `logger.info`.
        attention: (layers, width, sequence length), for the operations of attention. None: these are not counted.
        flops_per_token: operations for a token, in place of both: for models of which not all parameters are trained,
            or of which a token uses some (experts).
        device_flops: operations per second of a device. None: of a device in `DEVICE_FLOPS` the number there, for
            bf16; of others there is no mfu.
        group: the ranks whose tokens are counted: those that train on different batches. None: all.

    Raises:
        TypeError, ValueError: an argument.

    Example:
        ```python
        meter = fsdp2.StepMeter(model, every=10, write=print)
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            record = meter.step(loss, norm, tokens=batch.numel())  # None, but in every tenth step
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        write: Callable[[str], object] | None = None,
        attention: tuple[int, int, int] | None = None,
        flops_per_token: float | None = None,
        device_flops: float | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_module("model", model, "StepMeter")
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every: expected an int, got {every!r}")
        if every < 1:
            raise ValueError(f"every: expected 1 or more, got {every}")
        if write is not None and not callable(write):
            raise TypeError(f"write: expected a function of a line, or None, got {write!r}")
        if attention is not None and not isinstance(attention, tuple | list):
            raise TypeError(f"attention: expected (layers, width, sequence length), got {attention!r}")
        for name, value in (("flops_per_token", flops_per_token), ("device_flops", device_flops)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise TypeError(f"{name}: expected a number or None, got {value!r}")
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: expected a ProcessGroup or None, got {group!r}")
        if attention is not None and len(attention) != 3:
            raise ValueError(f"attention: expected (layers, width, sequence length), got {attention!r}")
        self.every, self._write = every, write
        self._device = _device_of(model)
        self.flops_per_token = _flops_per_token(model, attention) if flops_per_token is None else flops_per_token
        self.device_flops = _flops_of(self._device) if device_flops is None else device_flops
        self._group = group if group is not None else (dist.group.WORLD if dist.is_initialized() else None)
        self.num_steps = 0
        self._began: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._losses: Tensor | float = 0.0
        self._num_losses = self._tokens = self._timed = 0

    def step(
        self, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None, *, tokens: int = 0
    ) -> StepRecord | None:
        """Ends a step. Returns the record in every n-th, else None. Every rank of the group must call it.

        Args:
            loss: this rank's mean loss.
            grad_norm: what clipping has returned, a number or a (D)Tensor: of each n-th step alone it is read.
            tokens: how many tokens this rank has trained on.
        """
        self.num_steps += 1
        if loss is not None:
            self._losses = self._losses + (loss.detach().float() if isinstance(loss, Tensor) else loss)
            self._num_losses += 1
        if self._began is not None:  # the first step is not timed
            self._tokens += tokens
            self._timed += 1
        record = self._record(grad_norm) if self.num_steps % self.every == 0 else None
        if self._began is None or record is not None:
            self._began = time.perf_counter()
        return record

    def _record(self, grad_norm: Any) -> StepRecord:
        nan = float("nan")
        norm = nan if grad_norm is None else _number(grad_norm)
        loss = _number(self._losses) / self._num_losses if self._num_losses else nan  # waits for all work of the steps
        seconds = nan if self._began is None else time.perf_counter() - self._began
        memory, whole = _memory(self._device)
        own = struct.pack("<6d", loss, norm, self._tokens, seconds, memory, whole)
        of_all = [own]
        if self._group is not None and self._group.size() > 1:
            of_all = gather_bytes(own, self._group, self._device)
        losses, norms, tokens, times, peaks, wholes = zip(*(struct.unpack("<6d", each) for each in of_all), strict=True)
        record = StepRecord(step=self.num_steps)
        if self._num_losses:
            record |= {"loss": sum(losses) / len(losses), "loss_max": max(losses)}
        if grad_norm is not None:
            record["grad_norm"] = norms[0]
        if self._timed:
            slowest = max(times)
            record["seconds"] = slowest / self._timed
            if sum(tokens):
                record["tokens_per_second"] = sum(tokens) / slowest
                record["flops_per_second"] = self.flops_per_token * sum(tokens) / slowest / len(of_all)
                if self.device_flops is not None:
                    record["mfu"] = record["flops_per_second"] / self.device_flops
        if memory == memory:
            most = max(range(len(peaks)), key=peaks.__getitem__)
            record |= {"memory_peak": peaks[most], "memory_share": peaks[most] / wholes[most]}
        self._clear()
        if self._write is not None and (self._group is None or self._group.rank() == 0):
            self._write(str(record))
        return record


def _device_of(model: nn.Module) -> torch.device:
    """Returns the device on which a model trains, also if its shards rest on the CPU."""
    first = next(model.parameters(), None)
    if first is None:
        return torch.device("cpu")
    if not isinstance(first, DTensor) or first.device_mesh.device_type == first.device.type:
        return first.device
    kind = first.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(torch.device(kind)).current_device())


def _number(value: Any) -> float:
    """Returns the number in a tensor, which may be a DTensor that is no sum yet."""
    if isinstance(value, Tensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        return float(value.item())
    return float(value)


def _memory(device: torch.device) -> tuple[float, float]:
    """Returns the most bytes that tensors took on a device, and what it has; NaN where it has no statistics."""
    module: Any = torch.get_device_module(device)
    if device.type in ("cpu", "meta") or not hasattr(module, "max_memory_allocated"):
        return float("nan"), float("nan")
    return module.max_memory_allocated(device), module.get_device_properties(device).total_memory


def _flops_per_token(model: nn.Module, attention: tuple[int, int, int] | None) -> float:
    """Returns the operations of matrix products for a token, in forward and backward."""
    multiplied = {
        id(param): param
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    flops = 6.0 * sum(param.numel() for param in multiplied.values())
    if attention is not None:
        layers, width, length = attention
        flops += 12.0 * layers * width * length
    return flops


def _flops_of(device: torch.device) -> float | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in DEVICE_FLOPS.items() if part in name), None)
