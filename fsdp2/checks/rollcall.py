"""Has ranks tell each other what they are about to do before each collective, on any backend: the debug level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.delegating import DelegatingComm
from ..collectives.gather_bytes import all_gather_now
from ..collectives.gloo import GATHERING, REDUCING, SUMMING
from ..engine.comm import Comm, Rows, Work
from ..torch_private.rare_internals import has_backend
from .conversation import tell_out_of_step
from .headers import Header, Headers, digest_of, out_of_step, placed_header, text_of
from .named_comm import NamedPairwiseComm
from .watched_groups import watched


class CheckedComm(DelegatingComm):
    """A Comm whose ranks tell each other before each collective what they do next: if they differ, no data moves.

    Args:
        inner: what moves the data.
        make_comm: makes the Comm by which ranks tell each other.
        device: where the tensors are.
    """

    def __init__(self, inner: Comm, make_comm: Callable[..., Comm], device: torch.device) -> None:
        super().__init__(inner)
        group, cpu = inner.group, torch.device("cpu")
        assert group is not None, "there are other ranks"
        self._device = cpu if has_backend(group, cpu) else device
        self._aside, self._headers = make_comm(group, self._device, self.comm_label), Headers(self.comm_label)
        self._group, self._watched = group, watched(group)
        self._watched.comm_labels.add(self.comm_label)

    def compare(self, kind: str, tensor: Tensor, label: str = "") -> None:
        """Returns when all ranks are about to do that with a tensor of this size. `label`: names gradients in it."""
        self._tell(self._headers.of(kind, [tensor], label))

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return self._checked(GATHERING, inputs, lambda: self.inner_comm.all_gather(outputs, inputs))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        return self._checked(
            REDUCING, inputs, lambda: self.inner_comm.reduce_scatter(outputs, inputs, divisor, label), label
        )

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        self._tell(placed_header(self.comm_label, REDUCING, sent, label))
        return self.inner_comm.exchange(sent, label)

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        return self._checked(SUMMING, [tensor], lambda: self.inner_comm.all_reduce(tensor, divisor, label), label)

    def _checked(self, kind: str, tensors: Sequence[Tensor], start: Callable[[], Work], label: str = "") -> Work:
        self._tell(placed_header(self.comm_label, kind, tensors, label))
        return start()

    def _tell(self, header: Header) -> None:
        """Compares `header` between ranks. Every rank must call it.

        Raises:
            RuntimeError: on all ranks, if their headers differ; or a rank does not come in time.
        """
        if isinstance(self._aside, NamedPairwiseComm):
            self._aside.compare_header(header)
            return
        of_all = all_gather_now(bytes(header.data.tolist()), self._aside, self._device)
        if len({digest_of(each) for each in of_all}) > 1:
            tell_out_of_step(self._watched.comm_labels)
            ranks = dist.get_process_group_ranks(self._group)
            raise RuntimeError(out_of_step({rank: text_of(each) for rank, each in zip(ranks, of_all, strict=True)}))
