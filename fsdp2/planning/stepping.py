"""Predicts an optimizer's step on the shards of a copy: bytes of its states, where these rest, copies, and time.

It knows no optimizer but by the bytes of its states. A step reads gradients, and reads and writes parameters and
states; that is all that takes time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor

from ..engine.compat import peek_local
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from ..shards.runs import in_runs
from .clocks import Clocks
from .links import End
from .settings import Setting, read_optimizer

# Of `flatten_optimizer(offload_states=True)`, see fsdp2/optim: bytes of a bucket of states, and how many are on the
# device at once. A tensor of the step has parameters of at most a quarter of these bytes, or one parameter.
BUCKET_BYTES = 64 << 20
_NUM_SLOTS, _PARTS = 2, 4


class _Stepped(NamedTuple):
    """Holds bytes of one trainable parameter's shard, its gradient and its states. `group` has it; it may rest on the
    CPU (`on_host`).
    """

    group: FSDPParamGroup
    dtype: Any
    on_host: bool
    shard: int
    gradient: int
    states: int

    @property
    def traffic(self) -> int:
        """Bytes that a fused step reads and writes. AdamW in fp32: 28 for each element."""
        return 2 * self.shard + self.gradient + 2 * self.states


class OptimizerStep:
    """Predicts the steps of an optimizer on all trainable parameters below a root, under one setting.

    `states`, `states_on_host`: bytes of optimizer states that rest on the device, and on the CPU. `on_host`: bytes of
    shards and gradients that rest on the CPU. `peak`: bytes that a step whose states rest on the CPU has on the device:
    gradients, and two buckets of states; else 0.

    Args:
        root: of the sharded copy.
        setting: says where states rest, and whether steps run beside the next forward.
        optimizer: its name, or bytes for each element, as for `plan`.
        clocks: of the device.
        beside_price: what a second of a step beside costs the computation that runs meanwhile, in seconds, 0 to 1.
    """

    def __init__(
        self, root: Root, setting: Setting, optimizer: str | float | None, clocks: Clocks, beside_price: float
    ) -> None:
        self._root, self._setting, self._clocks, self._price = root, setting, clocks, beside_price
        is_device = clocks.machine.can_offload
        self._rests, self.is_beside = setting.offload_states and is_device, setting.beside_forward and is_device
        self._stepped = [*_stepped_of(root, optimizer)]
        own = [each for each in self._stepped if not each.on_host]
        self._buckets = _buckets_of(own) if self._rests else []
        self.states = 0 if self._rests else sum(each.states for each in own)
        self.states_on_host = sum(each.states for each in self._stepped) - self.states
        self.on_host = sum(each.gradient for each in self._stepped if each.on_host) + _host_nbytes(root)
        self.peak = 0
        if self._buckets:
            slots = max(self._buckets) * min(_NUM_SLOTS, len(self._buckets))
            self.peak = slots + sum(each.gradient for each in own)
        # Group -> when the step on it ends, and the gradients that it reads; and when all of them end.
        self._late: dict[FSDPParamGroup, End] = {}
        self._gradients: dict[FSDPParamGroup, list[Tensor]] = {}
        self._end = clocks.now()
        # Between which ends it may have made the step longer, and what else these would be apart.
        self._spans: list[tuple[End, End, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds by which it has made the step longer."""
        return sum(self._clocks.between(first, second) - usual for first, second, usual in self._spans)

    # ---- behind backward

    def run(self) -> None:
        """Steps behind backward."""
        clocks = self._clocks
        began = clocks.now()
        traffic = sum(each.traffic for each in self._stepped if not each.on_host)
        if self._buckets:
            self._run_in_buckets(traffic)
        else:
            clocks.touch(traffic)
        on_host = sum(each.traffic for each in self._stepped if each.on_host)
        if on_host:
            clocks.touch_host(on_host, self._setting.ranks)
        self._spans = [(began, clocks.now(), 0.0)]

    def _run_in_buckets(self, traffic: int) -> None:
        """Has states come and go by two slots. Each direction of the link takes one bucket at a time."""
        clocks, total = self._clocks, sum(self._buckets)
        left = [clocks.now()] * _NUM_SLOTS  # when copies that leave end; of so many buckets before the first
        for nbytes in self._buckets:
            clocks.wait(clocks.copy("states arrive", nbytes, left[-_NUM_SLOTS]))
            clocks.touch(traffic * nbytes / total)
            left.append(clocks.copy("states leave", nbytes, clocks.now()))
        clocks.wait(left[-1])

    # ---- beside the next forward

    @property
    def held_nbytes(self) -> int:
        """Bytes of the gradients that the step before still reads."""
        storages = {each.untyped_storage()._cdata: each for held in self._gradients.values() for each in held}
        return sum(each.untyped_storage().nbytes() for each in storages.values())

    def hold_gradients(self) -> None:
        """Keeps the gradients of the last backward, which are about to be cleared."""
        for group in self._root.groups:
            found = [param.sharded.grad for param in group.params]
            self._gradients[group] = [peek_local(each) for each in found if each is not None]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context: the step before runs beside what is computed inside, group by group in the order of forward."""
        stepped = dict.fromkeys(self._root.groups, 0)
        for each in self._stepped:
            stepped[each.group] += each.traffic
        with self._clocks.beside("optimizer"):
            for group in dict.fromkeys([*self._root.prefetcher.last_order, *stepped]):
                self._clocks.touch(stepped[group])
                self._late[group] = self._clocks.now()
            self._end, self._spans = self._clocks.now(), []
        self._root.writers.append(self._wait)
        try:
            yield
        finally:
            self._root.writers.remove(self._wait)
            self._late.clear()
            self._gradients.clear()

    def _wait(self, group: FSDPParamGroup) -> None:
        """Has the current stream wait for the step on a group, as the engine asks for before it reads shards."""
        step = self._late.pop(group, None)
        if step is not None:
            before = self._clocks.now()
            self._clocks.wait(step)
            self._spans.append((before, self._clocks.now(), 0.0))
        self._gradients.pop(group, None)

    def compute(self, flops: int) -> None:
        """Computes, slower while the step runs beside."""
        if self.is_beside:
            began = self._clocks.now()
            seconds = self._clocks.compute(flops, self._end, self._price)
            self._spans.append((began, self._clocks.now(), seconds))
        else:
            self._clocks.compute(flops)


def _stepped_of(root: Root, optimizer: str | float | None) -> Iterator[_Stepped]:
    for group in root.groups:
        for param in group.params:
            spec = param.spec(group.settings.policy)
            if param.sharded.requires_grad:
                item, numel = spec.storage_dtype.itemsize, spec.shard_numel
                yield _Stepped(
                    group,
                    spec.storage_dtype,
                    group.transfers is not None,
                    numel * item,
                    numel * param.delivered_dtype.itemsize,
                    int(numel * read_optimizer(optimizer, item)),
                )


def _host_nbytes(root: Root) -> int:
    """Returns the bytes of shards that rest on the CPU."""
    groups = [group for group in root.groups if group.transfers is not None]
    return sum(param.spec(group.settings.policy).storage_nbytes for group in groups for param in group.params)


def _buckets_of(stepped: Sequence[_Stepped]) -> list[int]:
    """Returns the bytes of the buckets in which states come: neighbours in memory, of one dtype, are one tensor."""
    spans = []
    for _, members in groupby([each for each in stepped if each.states], key=lambda each: (each.group, each.dtype)):
        sized = [(each, each.shard) for each in members]
        spans += [sum(each.states for each in run) for run in in_runs(sized, BUCKET_BYTES // _PARTS)]
    return [sum(run) for run in in_runs([(nbytes, nbytes) for nbytes in spans], BUCKET_BYTES)]
