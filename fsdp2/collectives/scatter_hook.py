"""Reduces gradients by a user's hook in the shape of FSDP1's: `hook(state, gradient, shard)` fills the shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from ..devices import streams
from ..devices.streams import AllWork, Work
from ..engine.comm import TORCH_MEMORY, Comm
from .delegating import DelegatingComm
from .gloo import REDUCING
from .watching import compare_first

if TYPE_CHECKING:
    from ..codecs.comm_hook import CommHook


@final
class HookedComm(DelegatingComm):
    """Reduces by a hook, and issues the other collectives of another Comm.

    The hook gets a flat tensor of one bucket's gradients, a segment for each rank, with zeros for padding, to which it
    may write, and a flat tensor that it fills with the mean of this rank's segments. It may give either other memory
    and another dtype (`shard.data = ...`), as torch's own hooks do. Where there are streams, it runs on a
    side stream.
    """

    def __init__(self, inner: Comm, hook: CommHook) -> None:
        super().__init__(inner)
        self._hook = hook
        self.direct_min_bytes = 1 << 62  # a bucket is one tensor
        self.receiver_sums = self.is_stream_ordered = False
        self.memory = TORCH_MEMORY

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        device = outputs[0].device
        with streams.side_stream(device), torch.no_grad():
            for output, whole in zip(outputs, inputs, strict=True):
                compare_first(self.inner_comm, REDUCING, whole, label)
                self._fill(output, whole)
                if divisor != self.size:
                    output.mul_(self.size / divisor)
            done: list[Work] = [streams.StreamWork(device)] if streams.exist_on(device) else []
        return AllWork(done, [*outputs, *inputs])

    def _fill(self, output: Tensor, whole: Tensor) -> None:
        gradient, shard, hook = whole.detach(), output.detach(), self._hook
        with hook.runs():
            returned = hook.hook(hook.state, gradient, shard)
        if returned is not None:
            raise TypeError(
                f"{hook.name}: expected hook(state, gradient, shard) to fill shard and to return None, as a hook of "
                f"FSDP1 does, got {type(returned).__name__}"
            )
        if shard.numel() != output.numel():
            raise TypeError(f"{hook.name}: expected a shard of {output.numel()} elements, got {shard.numel()}")
        if shard.data_ptr() != output.data_ptr() or shard.dtype != output.dtype:
            output.copy_(shard.view(-1))
