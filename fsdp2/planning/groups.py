"""Defines groups that hold numbers instead of tensors: the engine's groups, as a replay needs them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from ..engine.layout import GatherLayout, gather_layout
from ..engine.policy import GATHERED, GATHERING, SHARDED, UNSHARDED, GroupSettings, Hold, MixedPrecisionPolicy
from ..engine.schedule import MAX_RETURNING, Prefetcher, ReductionQueue
from .gradients import ReplayedGradients
from .ledger import Ledger
from .settings import Setting
from .structure import PlannedGroup


class ReplayedRoot:
    """Holds what the groups of a replay share: a ledger, the order, the reductions in flight."""

    def __init__(self, planned: list[PlannedGroup], setting: Setting, ledger: Ledger) -> None:
        self.setting, self.ledger = setting, ledger
        self.groups = [ReplayedGroup(each, self) for each in planned]
        self.group = self.groups[0]
        self.prefetcher = Prefetcher(self.groups)
        self.queue = ReductionQueue()
        self.in_backward = False
        # Bytes of reduced gradients on the device that are being copied to the CPU, and when that ends.
        self.returning: deque[tuple[int, float]] = deque()
        # Groups of several modules, of which some have not run in this pass.
        self.unfinished: dict[ReplayedGroup, bool] = {}

    def begin_pass(self) -> None:
        """Begins a forward pass: no gradient of the step before is there any more."""
        self.prefetcher.begin_pass()
        sent = [group.gradients.sent_nbytes for group in self.groups]
        self.queue.set_limits(max(group.settings.max_reductions for group in self.groups), sent)
        for group in self.groups:
            group.reached = False
            group.gradients.clear()
            if group.hold is not Hold.NOTHING:
                group.reshard_if_idle()

    def end_forward(self) -> None:
        for group, backward_follows in self.unfinished.items():
            group.post_forward(backward_follows)
        self.unfinished.clear()
        self.prefetcher.drop()

    def enter_backward(self) -> None:
        if not self.in_backward:
            self.in_backward = True
            self.prefetcher.begin_backward()
            for group in self.groups:
                group.gradients.begin_backward()

    def end_backward(self) -> None:
        for group in reversed(self.groups):
            group.gradients.end_backward()
        for group in self.groups:
            group.end_backward()
        self.prefetcher.drop()
        self.queue.finish_all()
        while self.returning:
            self.finish_return()
        self.prefetcher.ran.clear()
        self.in_backward = False

    def start_return(self, nbytes: int) -> None:
        """Begins to copy reduced gradients to the CPU."""
        self.returning.append((nbytes, self.ledger.transfer(nbytes)))
        while len(self.returning) > MAX_RETURNING:
            self.finish_return()

    def finish_return(self) -> None:
        nbytes, end = self.returning.popleft()
        self.ledger.wait(end)
        self.ledger.drop(nbytes)


class ReplayedGroup:
    """Represents one group in a replay. Its steps are those of FSDPParamGroup (engine/group.py), which acts on tensors.

    It has the attributes that Prefetcher reads: `phase`, `hold`, `settings`, `root`, `parameters`.
    """

    def __init__(self, planned: PlannedGroup, root: ReplayedRoot) -> None:
        self.planned, self.root, self.ledger = planned, root, root.ledger
        machine, setting = root.ledger.machine, root.setting
        self.num_shards = setting.num_shards
        # None: nothing is copied between the CPU and the device.
        chosen = planned.options.get("offload_policy")
        offloads = setting.offload if chosen is None else hasattr(chosen, "pin_memory")
        self.offloads = offloads and machine.can_offload
        kept = planned.options.get("reshard_after_forward", setting.reshard_after_forward)
        # Among how many ranks backward gathers; 0: among all that shard.
        self.num_restoring = kept if type(kept) is int and 1 < kept < self.num_shards else 0
        self.settings = GroupSettings(
            policy=_on_wire(planned.policy, setting),
            reshard_after_forward=kept if kept is None or isinstance(kept, bool) else kept != 1,
            unshard_in_backward=not planned.needs_no_weight_in_backward,
        )
        specs, direct = planned.specs(self.num_shards), machine.direct_min_bytes(self.num_shards)
        self.layout = gather_layout(specs, self.num_shards, direct)
        if self.offloads:
            self.layout = replace(self.layout, aliased=False)
        self.nbytes = self.layout.unsharded_nbytes
        self._storage_nbytes = 0 if self.layout.aliased else self.nbytes
        self._secondary_nbytes = self._gathered_again = 0
        own = None
        if self.num_restoring:
            few = self.num_restoring
            fewer = tuple(replace(s, storage_dtype=s.compute_dtype, world_size=few) for s in specs)
            own = gather_layout(fewer, few, machine.direct_min_bytes(few))
            self._secondary_nbytes = own.shard_nbytes
            self._gathered_again = _gathered_nbytes(own)
            end = self.layout.packed_start + (0 if own.packs_apart else own.segments_nbytes)
            self._storage_nbytes = max(self._storage_nbytes, end)
        self._gathered = _gathered_nbytes(self.layout)
        self._tensors, self._tensors_again = _num_tensors(self.layout), _num_tensors(own) if own else 0
        # Packed segments that lie apart, and whether the storage is allocated when a gather begins, not when it ends.
        self._segments, self._in_place = _segments(self.layout)
        self._segments_again, self._in_place_again = _segments(own) if own else (0, True)
        self._messages = machine.messages_nbytes(self.num_shards, _last_nbytes(self.layout))
        self._messages_again = machine.messages_nbytes(self.num_restoring, _last_nbytes(own)) if own else 0
        self.phase, self.hold, self.reached = SHARDED, Hold.NOTHING, False
        # The last backward has resharded the group as soon as all gradients were there; so for the forward that runs.
        self._needs_no_input_hooks = self._is_without_input_hooks = not planned.parameters
        self._has_secondary = False
        self._gather_ends = 0.0
        self._has_run: set[int] = set()
        self.gradients = ReplayedGradients(self, specs)

    @property
    def parameters(self) -> Any:
        return self

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_nbytes

    @property
    def is_unsharded(self) -> bool:
        return self.phase in (GATHERED, UNSHARDED)

    # ---- memory

    def start_unshard(self) -> None:
        if self.phase is not SHARDED:
            return
        self.phase = GATHERING
        segments, in_place = self._arrival()
        self.ledger.add(segments + self._storage_nbytes * in_place)
        if self._has_secondary:
            self.ledger.add(self._messages_again)
            self._gather_ends = self.ledger.communicate(
                "all_gather", self._gathered_again, self.num_restoring, num_tensors=self._tensors_again
            )
            return
        self.ledger.add(self._messages)
        staged = 0.0
        if self.offloads:  # until it is gathered
            self.ledger.add(self.shard_nbytes)
            staged = self.ledger.transfer(self.shard_nbytes)
        self._gather_ends = self.ledger.communicate(
            "all_gather", self._gathered, self.num_shards, after=staged, num_tensors=self._tensors
        )
        self._gather_ends = max(self._gather_ends, staged)

    def unshard(self) -> None:
        self.start_unshard()
        if self.phase is GATHERING:
            self._finish_gather()
        self.phase = UNSHARDED

    def _finish_gather(self) -> None:
        self.ledger.wait(self._gather_ends)
        self.ledger.drop(self._messages_again if self._has_secondary else self._messages)
        if self.offloads and not self._has_secondary:
            self.ledger.drop(self.shard_nbytes)
        segments, in_place = self._arrival()
        self.ledger.add(self._storage_nbytes * (not in_place))
        self.ledger.drop(segments)
        self.phase = GATHERED

    def _arrival(self) -> tuple[int, bool]:
        """Returns bytes of packed segments that lie apart, and whether anything arrives in the unsharded parameters."""
        if self._has_secondary:
            return self._segments_again, self._in_place_again
        return self._segments, self._in_place

    def reshard(self) -> None:
        self.hold = Hold.NOTHING
        if self.phase is GATHERING:
            self._finish_gather()
        if self.phase is not SHARDED:
            self.ledger.drop(self._storage_nbytes)
        if self._has_secondary:
            self.ledger.drop(self._secondary_nbytes)
        self._has_secondary, self.phase = False, SHARDED

    def _shrink(self) -> None:
        self.ledger.add(self._secondary_nbytes)
        if self._has_secondary:  # a second forward: torch resizes a storage into other memory
            self.ledger.drop(self._secondary_nbytes)
        self._has_secondary, self.phase = True, SHARDED
        self.ledger.drop(self._storage_nbytes)

    # ---- steps of forward and backward

    def pre_forward(self, in_backward: bool) -> None:
        if in_backward:
            self.pre_backward()
        self.unshard()
        self.root.prefetcher.prefetched.discard(self)
        if not in_backward:
            self._is_without_input_hooks = self._needs_no_input_hooks
            for ahead in self.root.prefetcher.in_forward(self):
                ahead.start_unshard()

    def after_forward(self, module: int, differentiable: bool, is_nested: bool) -> None:
        """A module of the group has run. It may have to wait for the others: they share the parameters."""
        if differentiable:
            self.root.prefetcher.ran.append(self)
        if len(self.planned.modules) > 1:
            self._has_run.add(module)
            if is_nested and len(self._has_run) < len(self.planned.modules):
                self.root.unfinished[self] = differentiable
                return
            self._has_run.clear()
            self.root.unfinished.pop(self, None)
        self.post_forward(differentiable)

    def post_forward(self, backward_follows: bool) -> None:
        choice, keeps = self.settings.reshard_after_forward, False
        if not backward_follows and choice is False:
            self.hold = Hold.NEXT_PASS
            return
        if choice is None:
            keeps = self is self.root.group or self in self.root.prefetcher.first_in_backward
        else:
            keeps = choice is False
        if backward_follows and keeps:
            self.hold = Hold.BACKWARD
            self.phase = GATHERED
        elif backward_follows and self.num_restoring and self.is_unsharded:
            self.hold = Hold.BACKWARD
            self._shrink()
        else:
            self.reshard()

    def pre_backward(self) -> None:
        self.root.enter_backward()
        if not self.reached:
            self.reached = True
            self.unshard()
            self.root.prefetcher.prefetched.discard(self)
            for ahead in self.root.prefetcher.in_backward(self):
                ahead.start_unshard()

    def last_gradient(self) -> None:
        if self.gradients.are_all_trainable:
            self._needs_no_input_hooks = True
            self.finish_backward()

    def post_backward(self) -> None:
        """The gradients of all inputs are computed: reduces and reshards what is left."""
        if self.root.in_backward and not self._is_without_input_hooks:
            self.gradients.end_backward()
            self.finish_backward()

    def finish_backward(self) -> None:
        self.reshard_if_idle()

    def end_backward(self) -> None:
        if self.reached and self.planned.parameters:
            self._needs_no_input_hooks = False
        self.finish_backward()

    def reshard_if_idle(self) -> None:
        self.reached = False
        self.reshard()


def _gathered_nbytes(layout: GatherLayout) -> int:
    """Returns the bytes that an all-gather fills, of all ranks."""
    direct = sum(layout.specs[i].compute_nbytes for i in layout.direct)
    return (direct + layout.packed_nbytes) * layout.world_size


def _num_tensors(layout: GatherLayout) -> int:
    """Returns how many tensors an all-gather fills: those that are gathered on their own, and the packed ones."""
    return len(layout.direct) + (layout.packed_nbytes > 0)


def _segments(layout: GatherLayout) -> tuple[int, bool]:
    """Returns the bytes of packed segments that lie apart, and False if all that is gathered arrives there."""
    return (layout.segments_nbytes, bool(layout.direct)) if layout.packs_apart else (0, True)


def _last_nbytes(layout: GatherLayout) -> int:
    """Returns the bytes of this rank's part of the last tensor that is gathered."""
    return layout.packed_nbytes or sum(layout.specs[i].compute_nbytes for i in layout.direct[-1:])


def _on_wire(policy: MixedPrecisionPolicy, setting: Setting) -> MixedPrecisionPolicy:
    return policy if setting.wire_dtype is None else replace(policy, wire_dtype=setting.wire_dtype)
