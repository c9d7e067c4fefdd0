"""Records the events of a model's groups as lines of text: event, group, bytes.

    gather  a gather begins             bytes of the gathered group, of all ranks
    run     a module's forward begins
    back    the first gradient inside a module's backward is computed
    reduce  a reduction begins          bytes that this rank contributes
    sum     a sum between replicas      bytes of this rank's shards
    free    the unsharded parameters are freed

It wraps the few functions through which all of them pass (a group's Comm, `reshard`), and changes nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2.engine.comm import Comm, Rows, Work
from fsdp2.engine.group import SHARDED, FSDPParamGroup
from fsdp2.engine.state import groups_below


class RecordingComm:
    """A Comm that writes down what it is asked for, and passes it on."""

    def __init__(self, inner: Comm, group: FSDPParamGroup, lines: list[str]) -> None:
        self._inner, self._owner, self._lines = inner, group, lines
        self.group, self.rank, self.size = inner.group, inner.rank, inner.size
        self.direct_min_bytes, self.force_sum = inner.direct_min_bytes, inner.force_sum
        self.receiver_sums, self.is_stream_ordered = inner.receiver_sums, inner.is_stream_ordered
        self.comm_label, self.memory = inner.comm_label, inner.memory

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        self._write("gather", outputs)
        return self._inner.all_gather(outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        self._write("reduce", inputs)
        return self._inner.reduce_scatter(outputs, inputs, divisor, what)

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        self._write("reduce", sent)
        return self._inner.exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        self._write("sum", [tensor])
        return self._inner.all_reduce(tensor, divisor, what)

    def _write(self, event: str, tensors: Sequence[Tensor]) -> None:
        self._lines.append(f"{event:6} {self._owner.name:5} {sum(t.numel() * t.element_size() for t in tensors)}")


class _Mark(torch.autograd.Function):
    """Identity that calls back when backward passes through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Any) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return gradient, None


class Marked(nn.Module):
    """A module that says when its forward begins, and when backward enters it."""

    lines: list[str]
    label: str

    def begin(self) -> None:
        self.lines.append(f"run    {self.label}")

    def end(self, output: Tensor) -> Tensor:
        return _Mark.apply(output, lambda: self.lines.append(f"back   {self.label}"))


class Block(Marked):
    def __init__(self, label: str) -> None:
        super().__init__()
        self.label, self.linear = label, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        return self.end(torch.relu(self.linear(x)))


class Root(Marked):
    """Has blocks b0, b1, ... and a head of its own. `runs`: the indices of the blocks that run, in order. `reentrant`:
    whether blocks are checkpointed, and if so, use_reentrant.
    """

    def __init__(self, depth: int = 3, reentrant: bool | None = None) -> None:
        super().__init__()
        self.label, self.reentrant, self.runs = "root", reentrant, tuple(range(depth))
        for i in self.runs:
            self.add_module(f"b{i}", Block(f"b{i}"))
        self.head = nn.Linear(4, 2)

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.children() if isinstance(module, Block)]

    def forward(self, x: Tensor) -> Tensor:
        self.begin()
        for i in self.runs:
            block = self.get_submodule(f"b{i}")
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.end(self.head(x))


def record(model: nn.Module) -> list[str]:
    """Start to record `model`; the list returned grows as it runs."""
    lines: list[str] = []
    for group in groups_below(model):
        gathers, reduces, replicas, _ = group.comms
        recorded = {
            each: RecordingComm(each, group, lines) for each in (gathers, reduces, replicas) if each is not None
        }
        group.use_comms(
            group.comms._replace(gathers=recorded[gathers], reduces=recorded[reduces], replicas=recorded.get(replicas))
        )
        group.reshard = _recorded_reshard(group, lines)
    for module in model.modules():
        if isinstance(module, Marked):
            module.lines = lines
    return lines


def in_text(lines: list[str]) -> str:
    """Returns the events as text, in which each line begins with a module's forward or backward."""
    text = ""
    for line in lines:
        event = " ".join(line.split())
        text += ("\n" if event.startswith(("run", "back")) else ", ") * bool(text) + event
    return text


def _recorded_reshard(group: FSDPParamGroup, lines: list[str]) -> Any:
    reshard = group.reshard

    def recorded(free: bool = True, keeps_secondary: bool = False) -> None:
        if group.phase is not SHARDED:
            lines.append(f"free   {group.name}")
        reshard(free, keeps_secondary)

    return recorded
