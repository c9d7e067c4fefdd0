"""Runs the micro-batches of one optimizer step, whose gradients are divided by the sum of all weights; and has
backward passes accumulate without communication (`no_sync`).

The weights of all ranks are known when the last micro-batch is. So gradients are reduced to sums, and what is complete
is divided by `Totals.divide`: in place of the division by the number of ranks, where that is done (reduce.py). Nothing
reaches `.grad` before: gradients wait unsharded (sync="last"), or as shards of sums (sync="each").

With `global_batches`, the micro-batches of all ranks are the leaves of one binary tree, whatever the number of ranks.
`PartialSums` adds up those of one rank, and `InPairs` what ranks send each other. Which leaves a rank runs
(`_leaves_of`) follows from the level that is summed first: a rank's own ("last"), or that between ranks ("each").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..calls.user_code import hides_modes
from ..collectives.choose import make_comm
from ..devices import streams
from ..devices.streams import Transfer
from ..engine.codec import Cast
from ..engine.comm import CommLabel, Work
from ..engine.group import FSDPParamGroup
from ..engine.placeholders import UnsynchronizedGrad
from ..engine.root import Root
from ..engine.state import require_root
from ..ranks.rank_facts import ranks_of
from ..torch_private.internals import no_torch_function
from .blocks import BlockWatch, watch_of
from .optimizer_in_backward import steps_of
from .passes import finalize, reduce_unsynchronized, reset
from .vocab_parallel import refuse_rows

_SYNC = ("last", "each")


@contextmanager
def unsynchronized(groups: Sequence[FSDPParamGroup]) -> Iterator[None]:
    """Context: backward passes inside accumulate the gradients of `groups` on each rank, and communicate none."""
    before = [(group.settings.reduce_gradients, group.settings.all_reduce) for group in groups]
    for group in groups:
        group.set(reduce_gradients=False, all_reduce=False)
    try:
        yield
    finally:
        for group, (reduce_gradients, all_reduce) in zip(groups, before, strict=True):
            group.set(reduce_gradients=reduce_gradients, all_reduce=all_reduce)


def accumulate(
    model: nn.Module,
    *,
    sync: str = "last",
    num_batches: int | None = None,
    global_batches: int | None = None,
) -> Accumulation:
    """Returns a context for the micro-batches of one optimizer step. Their gradients become the mean over all weights.

    Each micro-batch gives the *sum* of its losses, and its weight: how many tokens, or samples, that sum is over.
    Behind the block, `.grad` of each parameter is the gradient of (sum of all losses) / (sum of all weights), over all
    micro-batches of all ranks, as if one process had computed the mean over the whole batch. Ranks and micro-batches
    may have any weights, also 0. One small collective a step adds them up, while backward runs. Sums of
    gradients are divided by the total where they would be divided by the number of ranks otherwise: a factor of
    `set_gradient_divide_factor` does not count inside.

    Only ranks that share or replicate parameters are counted. Ranks along an axis of tensor parallelism compute the
    same loss, which counts once. With context parallelism on axes that shard, each rank gives the sum and the number of
    its own tokens. Clip, unscale and step behind the block.

    If the block ends by an exception, its gradients are dropped, all settings are as they were, and `.grad` is None.
    Every rank must enter it, with the same arguments, and run the same number of micro-batches. Where ranks communicate
    in each of these, ranks with different numbers are out of step, which is an error on gloo, and on any backend with
    `set_checks("debug")`. (With `replicate`, and where parameters stay unsharded, they may have different numbers.)

    Args:
        model: the outermost sharded module. It may replicate, also with HSDP, offload to the CPU, have frozen
            parameters and conditional modules.
        sync: "last": unsharded gradients accumulate, and are reduced with the last micro-batch. That communicates
            least. "each": each micro-batch is reduce-scattered, and the shards of sums accumulate in the reduce dtype;
            replicas sum them once a step. That needs no memory for unsharded gradients.
        num_batches: how many micro-batches follow. Then the last one is reduced while its backward runs. None: it is
            known when the block ends, and they are reduced there: "last" then communicates behind backward, "each"
            copies the shards once more.
        global_batches: how many micro-batches all ranks run together, a power of two. Then gradients, parameters and
            optimizer states have the same bits on 1, 2, 4, 8, ... ranks: gradients are added in the order of one tree.
            Ranks exchange them in the reduce dtype, and each sums what it receives, on NCCL, too. "last" keeps up to
            log2(micro-batches of a rank) + 1 unsharded gradients of each parameter, "each" as many shards. Run the
            micro-batches that `Accumulation.batches` lists, and clip by `clip_grad_norm_(exact=True)`. None: sums are
            in the order that is fastest.

    Returns:
        An `Accumulation`.

    Raises:
        TypeError: `num_batches` or `global_batches` is not an int.
        ValueError: another `sync`, `num_batches` less than 1, or `global_batches` that is no power of two, that the
            number of ranks does not divide, or of which `num_batches` is not one rank's part.
        NotImplementedError: with `global_batches`: something rounds sums by the number of ranks.
        RuntimeError: when the block begins: `model` is not the outermost sharded module; a forward, a backward or
            another block runs; a parameter has a gradient; `set_requires_gradient_sync(False)` or
            `set_optimizer_in_backward` is in force; gradients are reduced, or sent, in float16; groups are on
            different ranks (expert parallelism). When it ends, on all ranks: a weight was negative or not finite, the
            weights sum up to 0, or there were fewer than `num_batches`.

    Example:
        ```python
        with fsdp2.accumulate(model, num_batches=len(batches)) as acc:
            for tokens, targets in batches:
                losses = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
                acc.backward(losses, weight=(targets != -100).sum())
        optimizer.step()
        optimizer.zero_grad()
        print(acc.mean_loss, acc.total_weight)
        ```
    """
    if sync not in _SYNC:
        raise ValueError(f"sync: expected one of {', '.join(_SYNC)}, got {sync!r}")
    if num_batches is not None:
        if not isinstance(num_batches, int) or isinstance(num_batches, bool):
            raise TypeError(f"num_batches: expected an int or None, got {num_batches!r}")
        if num_batches < 1:
            raise ValueError(f"num_batches: expected at least 1, got {num_batches}")
    root, leaves = require_root(model, "accumulate"), None
    if global_batches is not None:
        leaves = _leaves_of(root, sync, global_batches)
        if num_batches not in (None, len(leaves)):
            raise ValueError(
                f"num_batches: expected {len(leaves)}, this rank's part of global_batches={global_batches}, got "
                f"{num_batches}"
            )
        num_batches = len(leaves)
    return Accumulation(root, sync, num_batches, leaves)


class Accumulation:
    """One optimizer step's block of micro-batches, which `accumulate` returns. Enter it once, by `with`."""

    def __init__(self, root: Root, sync: str, num_batches: int | None, leaves: range | None) -> None:
        self._root, self._is_each, self._num_batches, self._leaves = root, sync == "each", num_batches, leaves
        self._totals = Totals(root, num_batches, in_tree=leaves is not None)
        self._watch: AccumulationWatch | None = None
        self._is_over = False
        # The backward of the last micro-batch has begun, which is known only with `num_batches`.
        self.has_begun_last = False
        # `backward` runs one now, or the block reduces what is left.
        self.runs_backward = False

    @property
    def batches(self) -> range:
        """The numbers of this rank's micro-batches, of `range(global_batches)`, in the order in which to run them.

        Raises:
            RuntimeError: `accumulate` has got no `global_batches`.
        """
        if self._leaves is None:
            raise RuntimeError("batches: expected accumulate(model, global_batches=...), got a block without")
        return self._leaves

    @property
    def mean_loss(self) -> float:
        """The sum of all losses, divided by the sum of all weights; over all ranks, known when the block has ended.

        Raises:
            RuntimeError: the block has not ended, or has ended by an exception.
        """
        return self._found().loss / self._found().weight

    @property
    def total_weight(self) -> float:
        """The sum of the weights of all micro-batches of all ranks, known when the block has ended.

        Raises:
            RuntimeError: the block has not ended, or has ended by an exception.
        """
        return self._found().weight

    def _found(self) -> _Found:
        if self._totals.found is None:
            raise RuntimeError("mean_loss and total_weight are known when the block of accumulate has ended")
        return self._totals.found

    def backward(self, loss: Tensor, *, weight: float | Tensor) -> None:
        """Runs the backward of one micro-batch. Every rank must call it.

        It takes the place of `loss.backward()`. A weight on a device is not waited for. A loss with another denominator
        (of a router, for example) is added as `loss + weight * other`. With a `torch.amp.GradScaler`, give
        `scaler.scale(loss)`; then `mean_loss` is scaled, too.

        Args:
            loss: a tensor of one element with a graph: the sum of the micro-batch's losses.
            weight: how much that sum is over, tokens for example: a number, or a tensor of one element, of any real
                dtype, at least 0. A bad one raises on all ranks, when the block ends.

        Raises:
            TypeError: `loss` is not a tensor, or `weight` neither a number nor a tensor.
            ValueError: `loss` or `weight` has more than one element.
            RuntimeError: outside of the block; more than `num_batches`; the gradients of earlier micro-batches were
                cleared.
        """
        if self._watch is None:
            raise RuntimeError("acc.backward: expected a call inside of the block of accumulate, got one outside")
        if self._num_batches is not None and self._totals.count == self._num_batches:
            raise RuntimeError(f"acc.backward: expected num_batches={self._num_batches} calls, got one more")
        self._refuse_cleared()
        self._totals.add(loss, weight)
        is_last = self._totals.count == self._num_batches
        if self._leaves is not None:
            for group in self._root.groups:
                group.gradients.unsynchronized.begin_leaf(self._totals.count - 1)
        if is_last:
            self.has_begun_last = True
            self._totals.start()
            self._set(reduce_gradients=True, all_reduce=True)
        self.runs_backward = True
        try:
            loss.backward()
        finally:
            self.runs_backward = False
        if is_last:
            self._restore()

    # ---- the block

    def __enter__(self) -> Accumulation:
        if self._is_over or self._watch is not None:
            raise RuntimeError("accumulate: a block is entered once. Call fsdp2.accumulate(model) for each step.")
        watch = watch_of(self._root, AccumulationWatch)
        _refuse(self._root, watch)
        if self._leaves is not None:
            _refuse_rounding(self._root)
        self._watch, watch.active = watch, self
        for group in self._root.groups:
            group.gradients.unsynchronized.add_in_tree(self._leaves is not None)
        self._set(reduce_gradients=self._is_each, all_reduce=False, divide_late=self._totals.divide)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            kind = BaseException
            raise
        finally:
            watch, self._watch, self._is_over = self._watch, None, True
            assert watch is not None, "it was entered"
            self._restore()
            watch.active = None
            if kind is not None:
                self._drop()

    @hides_modes
    def _finish(self) -> None:
        """Reduces the gradients that are left, and checks all weights. It raises on all ranks, or on none."""
        self.runs_backward = True
        if not self.has_begun_last:
            self._refuse_cleared()
            self._totals.start()
            if self._num_batches is not None:
                self._totals.find()  # it raises: there were too few
            self._set(reduce_gradients=True, all_reduce=True)
            reduce_unsynchronized(self._root)
        finalize(self._root)
        self._totals.find()  # at last, so that on devices the host does not wait for backward first

    @hides_modes
    def _drop(self) -> None:
        """Drops all gradients of the block."""
        self._totals.drop()
        reset(self._root)
        for group in self._root.groups:
            for param in group.params:
                param.sharded.grad = None

    def _set(self, **changes: Any) -> None:
        """Changes settings of all groups; of those that have them already, nothing."""
        for group in self._root.groups:
            if any(getattr(group.settings, name) != value for name, value in changes.items()):
                group.set(**changes)

    def _restore(self) -> None:
        """Gives the groups the settings of before: the block begins only with these."""
        self._set(reduce_gradients=True, all_reduce=True, divide_late=None)
        for group in self._root.groups:
            group.gradients.unsynchronized.begin_leaf(None)

    @hides_modes
    def _refuse_cleared(self) -> None:
        """Raises RuntimeError if a user has cleared the gradient of an earlier micro-batch."""
        for group in self._root.groups:
            for i in group.placeholders:
                if not isinstance(group.params[i].sharded.grad, UnsynchronizedGrad):
                    raise RuntimeError(
                        f"{group.params[i].name}: its gradient was cleared inside of accumulate, whose earlier weights "
                        "would count nevertheless. Call zero_grad before the block, or behind it."
                    )


# ---- what is refused


@hides_modes
def _refuse(root: Root, watch: AccumulationWatch) -> None:
    """Raises RuntimeError if a block can't begin now. Ranks have the same settings, so all of them raise."""
    if watch.active is not None:
        raise RuntimeError("accumulate: the model is in another block of accumulate. Leave that one first.")
    if root.running or root.is_in_backward():
        raise RuntimeError("accumulate: expected a call between steps, got one during a forward or backward")
    refuse_rows(root, "accumulate", "each backward delivers the mean over ranks of its gradients.")
    finalize(root)  # of passes before, with set_manual_backward_finalization
    mesh = root.group.mesh
    for group in root.groups:
        settings = group.settings
        if group.mesh is not mesh and ranks_of(group.mesh) != ranks_of(mesh):
            ranks = [sorted(ranks_of(each)) for each in (group.mesh, mesh)]
            raise RuntimeError(
                f"accumulate: expected all groups on the same ranks, got {group} on {ranks[0]} and {root.state} on "
                f"{ranks[1]}: their gradients are sums over other ranks"
            )
        if not (settings.reduce_gradients and settings.all_reduce):
            raise RuntimeError(
                f"accumulate: gradients of {group} are not synchronised now. Leave no_sync, and call "
                "set_requires_gradient_sync(True), before it: the block chooses when they are."
            )
        if steps_of(group) is not None:
            raise RuntimeError(
                "accumulate: the optimizer steps in backward, before the sum of all weights is known. Call "
                "set_optimizer_in_backward(None), and step behind the block."
            )
        policy = settings.policy
        for dtype in {param.delivered_dtype for param in group.params}:
            if torch.float16 in (policy.gradient_dtype(dtype), policy.sent_dtype(dtype)):
                raise RuntimeError(
                    f"accumulate: gradients of {group} are reduced, or travel, in float16, and their sums may pass its "
                    "limit of 65504. Give MixedPrecisionPolicy a reduce_dtype, and a dtype for its compression of "
                    "reduce_scatter if any, of more range."
                )
        with no_torch_function():
            present = [param.name for param in group.params if param.sharded.grad is not None]
        if present:
            raise RuntimeError(
                f"{present[0]}: it has a gradient, to which the mean of this step would be added. Call "
                "optimizer.zero_grad() before accumulate."
            )


def _leaves_of(root: Root, sync: str, count: Any) -> range:
    """Returns which of `count` micro-batches this rank runs, in order: leaves of a tree whose lowest levels are summed
    first. Gradients of a rank's micro-batches are ("last"), or those of the ranks that shard ("each").
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"global_batches: expected an int or None, got {count!r}")
    reduction = root.group.gradients.reduction
    shards, replicas = reduction.shards, reduction.replicas
    size, number, rank = (1, 1, 0) if replicas is None else (replicas.size, replicas.size, replicas.rank)
    num_ranks = size * shards.size
    if count < 1 or count & (count - 1) or count % num_ranks:
        raise ValueError(
            f"global_batches: expected a power of two that the number of ranks, {num_ranks}, divides, got {count}"
        )
    own = count // num_ranks
    if sync == "last":
        first = (rank * shards.size + shards.rank) * own
        return range(first, first + own)
    of_replica = count // number
    return range(rank * of_replica + shards.rank, (rank + 1) * of_replica, shards.size)


def _refuse_rounding(root: Root) -> None:
    """Raises NotImplementedError if what groups compute depends on the number of ranks. It is alike on all ranks."""
    problem = next(filter(None, (_rounding_in(group, root) for group in root.groups)), "")
    if not root.settings.finalize_backward:
        problem = "reductions are in flight after backward (set_manual_backward_finalization)"
    if problem:
        raise NotImplementedError(
            f"accumulate(global_batches=): {problem}, so that bits depend on the number of ranks. Change that, or "
            "leave global_batches out."
        )


def _rounding_in(group: FSDPParamGroup, root: Root) -> str:
    """Returns what makes the numbers of a group depend on the number of ranks. "": nothing does."""
    settings, mesh, of_root = group.settings, group.mesh, root.group.mesh
    compression, collectives = settings.policy.compression, settings.collectives
    dtypes = {settings.policy.gradient_dtype(param.delivered_dtype) for param in group.params}
    narrow = [dtype for dtype in dtypes if dtype.itemsize < 4]
    if (mesh.mesh, mesh.shard_axes, mesh.replicate_axes) != (of_root.mesh, of_root.shard_axes, of_root.replicate_axes):
        return f"{group} is on another mesh than {root.state}"
    if narrow:
        return f"sums of gradients of {group} are rounded to {narrow[0]} (reduce_dtype)"
    if compression.reduce_scatter is not None or compression.all_reduce is not None:
        return f"gradients of {group} are compressed ({compression})"
    if compression.all_gather is not None and type(compression.all_gather) is not Cast:
        return f"weights of {group} are compressed shard by shard ({compression.all_gather!r})"
    if settings.comm_hook is not None or group.scatter_hook is not None:
        return f"a hook reduces the gradients of {group} (register_comm_hook)"
    if collectives is not None and collectives.reduce_scatter is not None:
        return f"{group} has a reduce-scatter of its own (set_custom_reduce_scatter)"
    return f"ranks may leave {group} out of a step (conditional=True)" if settings.conditional else ""


class AccumulationWatch(BlockWatch):
    """Refuses backward passes and optimizer steps that come amid a block of accumulate.

    `active`: the block that has been entered.
    """

    refusal = "it is inside of a block of accumulate, whose gradients are complete when it ends. Step behind the block."
    active: Accumulation | None

    def __init__(self) -> None:
        super().__init__()
        self._stored_before = 0

    def backward_began(self, root: Root) -> None:
        """
        Raises:
            RuntimeError: the last micro-batch's backward has run.
        """
        if self._is_foreign():
            assert self.active is not None
            if self.active.has_begun_last:
                raise RuntimeError(f"{root.state}: {_UNWEIGHTED}")
            self._stored_before = _count_stored(root)

    def backward_ended(self, root: Root) -> None:
        """
        Raises:
            RuntimeError: a backward that has no weight has computed gradients of parameters. (torch.autograd.grad of
                inputs computes none.)
        """
        if self._is_foreign():
            has_arrived = any(group.gradients.unsynchronized.included for group in root.groups)
            if has_arrived or _count_stored(root) != self._stored_before:
                raise RuntimeError(f"{root.state}: {_UNWEIGHTED}")

    def _is_foreign(self) -> bool:
        """Returns True if the backward pass that runs is none of `Accumulation.backward`."""
        return self.active is not None and not self.active.runs_backward


_UNWEIGHTED = (
    "a backward pass inside of accumulate has no weight. Call acc.backward(loss, weight=...) in place of "
    "loss.backward(), as often as num_batches says."
)


def _count_stored(root: Root) -> int:
    """Returns how many gradients wait for a later pass, or are in flight."""
    left = [group.gradients.unsynchronized for group in root.groups]
    return sum(len(each.unreduced) + len(each.reduced_in_shard) for each in left) + len(root.queue.running)


# ---- sums over ranks


@dataclass(frozen=True)
class _Found:
    """The sums over all micro-batches of all ranks."""

    loss: float
    weight: float


# What each rank tells, in float64: its number; the sums of its losses and of its good weights; the number of its first
# bad weight (from 1 on; 0: all are good), and that weight; how many micro-batches it has run, and is to run (0: any).
_COLUMNS = _RANK, _LOSS, _WEIGHT, _BAD, _BAD_WEIGHT, _COUNT, _EXPECTED = range(7)


class Totals:
    """Sums losses and weights of one rank's micro-batches, and those of all ranks, and divides gradients by the latter.

    `add` is called for each micro-batch; `start` behind the last one. From then on `divide`, which groups have as their
    setting `divide_late`, may be called by reductions; and `find` at the end of the block, for the host.

    Ranks gather a row of numbers of each rank, and not only sums, so that errors name ranks. `count`: how many
    micro-batches this rank has run. `found`: the sums of all ranks, once the host knows them.
    """

    def __init__(self, root: Root, num_batches: int | None, in_tree: bool) -> None:
        self._mesh, self._num_batches = root.group.mesh, num_batches
        # True if the sums must not depend on the number of ranks: rows then have each loss and each weight, too.
        self._in_tree = in_tree
        self._comm_label = CommLabel("the weights of accumulate", root)
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._rows: Tensor | None = None
        self._work: Work | None = None
        # This rank's row, which may be read on another stream.
        self._row: Tensor | None = None
        # Of each dtype in which gradients may be divided: one element, the sum of all weights.
        self._divisors: dict[torch.dtype, Tensor] = {}
        # On devices: when these are there; and the copy of the rows to the host.
        self._event: Any = None
        self._copy: Transfer[Tensor] | None = None
        self.found: _Found | None = None

    @property
    def count(self) -> int:
        return len(self._weights)

    @hides_modes
    def add(self, loss: Tensor, weight: float | Tensor) -> None:
        """Adds a micro-batch. The host does not wait for the device."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss: expected a tensor, got {loss!r}")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number and not (isinstance(weight, Tensor) and not weight.is_complex()):
            raise TypeError(f"weight: expected a number, or a tensor of one, got {weight!r}")
        for name, value in (("loss", loss), ("weight", weight)):
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{name}: expected one element, got shape {tuple(value.shape)}")
        self._losses.append(self._as_number(loss))
        self._weights.append(self._as_number(weight))

    def _as_number(self, value: float | Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full((), value, dtype=torch.float64, device=self._mesh.device)
        value = value.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value  # of tensor parallelism
        return whole.to(self._mesh.device, torch.float64).view(())

    def _make_row(self) -> Tensor:
        """Returns what this rank tells: see `_RANK` and those behind it."""
        device, expected = self._mesh.device, self._num_batches or 0
        nothing = torch.zeros(1, dtype=torch.float64, device=device)
        losses, weights = torch.stack([*self._losses, nothing[0]]), torch.stack([*self._weights, nothing[0]])
        is_bad = ~((weights >= 0) & (weights < math.inf))
        first = is_bad.to(torch.uint8).argmax(0, keepdim=True)
        facts = [nothing + dist.get_rank(), losses.sum(), weights.where(~is_bad, nothing).sum()]
        facts += [(first + 1) * is_bad.any(), weights.gather(0, first), nothing + self.count, nothing + expected]
        row = torch.cat([fact.to(torch.float64).view(1) for fact in facts])
        if not self._in_tree:
            return row
        each = [
            values.new_zeros(expected).index_copy_(0, torch.arange(self.count, device=device), values[:-1])
            for values in (losses, weights.where(~is_bad, nothing))
        ]
        return torch.cat([row, *each])

    @hides_modes
    def start(self) -> None:
        """Begins to gather the rows of all ranks. All of them must call it."""
        self._row = self._make_row()
        rows, width, device = self._row.view(1, -1), self._row.numel(), self._mesh.device
        with streams.side_stream(device):
            for group in self._mesh.axis_groups:
                if self._work is not None:  # along another axis
                    self._wait()
                comm = make_comm(group, device, self._comm_label)
                of_all = rows.new_zeros(comm.size, rows.numel())
                of_all[comm.rank] = rows.view(-1)
                self._work = comm.all_gather([of_all.view(-1)], [of_all[comm.rank]])
                rows = of_all.view(-1, width)
            self._rows = rows
            if streams.exist_on(device):
                self._wait()
                self._sum(rows)
                self._event = torch.accelerator.current_stream(device).record_event()
                self._copy = streams.make_transfers(device, pin=True).start_out(rows.view(-1))

    def _wait(self) -> None:
        """Waits for the rows along one axis: on the CPU the host does, elsewhere the current stream."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:  # a peer is gone, for example
            self._comm_label.locate(error, f"gathering {self._comm_label.label}")
            raise

    def _sum(self, rows: Tensor) -> None:
        """Makes the divisors of what all ranks have told. If a weight is bad, they are infinite."""
        # Numbers that are sorted first have one sum, whoever has told them.
        weights = rows[:, len(_COLUMNS) :].chunk(2, 1)[1].flatten().sort().values if self._in_tree else rows[:, _WEIGHT]
        total = weights.sum(0, keepdim=True)
        is_good = (total > 0) & (rows[:, _BAD] == 0).all()
        total = total.where(is_good, math.inf)  # hooks of parameters get zeros before the error, and not NaN
        self._divisors = {torch.float64: total, torch.float32: total.float()}

    @hides_modes
    def divide(self, sums: Tensor) -> None:
        """Divides sums of gradients in place; in float32 if their dtype is narrower. They may be of any stream. A sum
        that has added the zeros of a leaf without a gradient is never -0.0, so with a tree no sum is.
        """
        assert self._rows is not None, "gradients are complete behind the last micro-batch"
        if self._event is not None:
            torch.accelerator.current_stream(sums.device).wait_event(self._event)
        elif not self._divisors:
            self._wait()
            self._sum(self._rows)
        if self._in_tree:
            sums.add_(0.0)
        sums.div_(self._divisors[torch.promote_types(sums.dtype, torch.float32)])

    @hides_modes
    def drop(self) -> None:
        """Forgets the sums, after an error. What is on its way arrives first, since its memory is freed next."""
        self.found = None
        if self._copy is not None:
            self._copy.finish()
        with suppress(RuntimeError):  # a peer is gone
            self._wait()

    def find(self) -> None:
        """Waits until the host knows what all ranks have told, and judges it.

        Raises:
            RuntimeError: a rank has a bad weight, or too few micro-batches, or there is no weight; on all ranks.
        """
        assert self._rows is not None, "ranks have begun to gather them"
        if self._copy is None:
            self._wait()
        told = (self._rows if self._copy is None else self._copy.finish().view(self._rows.shape)).tolist()
        for row in told:
            if row[_BAD]:
                raise RuntimeError(
                    f"accumulate: weights must be finite, and not negative; rank {row[_RANK]:.0f} gave "
                    f"weight={row[_BAD_WEIGHT]:g} to its micro-batch number {row[_BAD]:.0f}. {_DROPPED}"
                )
            if row[_EXPECTED] and row[_COUNT] != row[_EXPECTED]:
                raise RuntimeError(
                    f"accumulate: rank {row[_RANK]:.0f} has run {row[_COUNT]:.0f} of num_batches={row[_EXPECTED]:.0f} "
                    f"micro-batches. {_DROPPED}"
                )
        numbers = [([row[_LOSS]], [row[_WEIGHT]]) for row in told]
        if self._in_tree:  # exact sums of them have one rounding, whatever their order
            each = [row[len(_COLUMNS) :] for row in told]
            numbers = [(row[: len(row) // 2], row[len(row) // 2 :]) for row in each]
        loss, weight = (math.fsum(chain.from_iterable(column)) for column in zip(*numbers, strict=True))
        if weight == 0:
            raise RuntimeError(
                f"accumulate: the weights of all ranks and micro-batches sum up to 0, so there is no mean. {_DROPPED} "
                "Leave such a step out, on all ranks."
            )
        self.found = _Found(loss, weight)


_DROPPED = "The gradients of the block were dropped."
