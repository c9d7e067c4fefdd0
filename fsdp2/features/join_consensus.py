"""Keeps the ranks of a root in one order while some have run out of batches: the consensus in a block of `join`.

**Messages.** Ranks that are present may leave the loop between two *phases*: a forward pass, a backward pass, a step.
A phase begins with a count of the ranks that are present; the same all-reduce is torch's, when a rank leaves. Inside of
a phase each event is a consensus, as under conditional modules (conditional.py), to which ranks that have joined add no
request. Where events do not say all, one more all-reduce of integers tells what is needed: modes of modules before a
forward, what has become of gradients and settings before a backward or a step, which gradients a reduction has.

**Gradients.** A rank that has joined can't do to its gradients what the program does to those of the others. So between
backward and step `.grad` of the ranks that are present are placeholders: whoever clips or scales them there gets an
error that names the way that is exact, a function that all ranks call for each step (`Joined.step`).
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from ..engine import compat
from ..engine.compat import no_torch_function
from ..engine.group import SECONDARY, FSDPParamGroup
from ..engine.parameter import FSDPParam
from ..engine.passes import reset
from ..engine.policy import Hold, ReduceWhen
from ..engine.rank_facts import all_reduce_now, ranks_of
from ..engine.root import Root
from ..engine.state import FSDPState, require_state
from ..engine.user_code import hides_modes, run_shown
from .accumulate import Totals, find_active
from .conditional import (
    _BACKWARD_END,
    _COLLECTIVE,
    _COMMON,
    _FAILED,
    _FORWARD_END,
    _KINDS,
    _OTHERS,
    GATHER,
    REDUCE,
    Consensus,
)
from .join_gradients import HOW, Fate, HeldGradients, has_more_than_zeros
from .join_others import NUM_NUMBERS, begin_to_watch, end_to_watch, forget, gather_for_others, group_of, number_of
from .optimizer_in_backward import steps_of
from .user_collectives import unwatch_collectives, watch_collectives

# Events of no group, besides those of conditional modules.
_OTHER_MODEL, _FORWARD, _BACKWARD, _UNSYNCHRONIZED, _WEIGHTS, _STEP, _END = range(-11, -4)
_OPTIMIZER, _LEFT = -1_000, -1_000_000  # less the index of an optimizer, or the rank
_RESTORE = 1 << 30  # and the index of the group that restores its parameters from secondary shards
_NOTHING = -(1 << 60)  # what adds nothing to a maximum
_NAMES = {
    **_OTHERS,
    _OTHER_MODEL: "gathering another model than that of the block of join",
    _FORWARD: "at the beginning of a forward",
    _BACKWARD: "at the beginning of a backward",
    _UNSYNCHRONIZED: "reducing unsynchronized gradients",
    _WEIGHTS: "gathering the weights of accumulate",
    _STEP: "at the step of the function that join got",
    _END: "at the end of the block of join",
}
JOIN_CONFIG = "_join_config"  # the attribute in which torch's Join keeps its arguments


def join_group(model: Any) -> dist.ProcessGroup:
    """Returns the process group of all ranks that share or replicate the parameters.

    Raises:
        NotImplementedError: they lie on several axes without names of a mesh that has others.
    """
    mesh = require_state(model).root.group.mesh
    axes = tuple(sorted((*mesh.shard_axes, *mesh.replicate_axes)))
    several = tuple(axis for axis in axes if mesh.mesh.size(axis) > 1)
    if len(several) < 2:
        return mesh.mesh.get_group((several or axes)[0])
    world = dist.group.WORLD
    if world is not None and ranks_of(mesh) == {*dist.get_process_group_ranks(world)}:
        return world
    if mesh.mesh.mesh_dim_names is None:
        raise NotImplementedError("join: expected a mesh of all ranks, or one whose axes have names (mesh_dim_names)")
    return compat.mesh_over(mesh.mesh, several).get_group()


class JoinConsensus(Consensus):
    """Keeps ranks in one order while some have run out of batches: the RankConsensus of a root in a block of `join`.

    `hook`: of the Join, weakly: torch's drops it when a block ends by an exception, and says nothing else.
    `num_joined`: how many ranks have run out, as this one knows. `has_joined`: this one has.
    """

    hook: weakref.ref[JoinHook]

    def __init__(
        self,
        model: Any,
        root: Root,
        step: Callable[[], Any] | None,
        optimizer: Optimizer | None,
        divides_by_all: bool,
    ) -> None:
        super().__init__(root)
        self._model, self._own_step = weakref.ref(model), step
        # That of conditional modules, which is the root's without this block.
        self._usual = cast("Consensus | None", root.consensus)
        self._group = join_group(model)
        self._process_groups = [self._group]
        self._warns = self._warns and bool(self.conditional)
        self._divides_by_all = divides_by_all
        # Optimizers that have stepped, in their order, which is that of all ranks.
        self._optimizers: list[weakref.ref[Optimizer]] = [] if optimizer is None else [weakref.ref(optimizer)]
        # How many phases have begun and not ended: one, or a backward inside a forward.
        self._depth = 0
        # All ranks run the function `step`.
        self._is_in_step = False
        # An optimizer steps, in which all ranks may communicate. If it raises, this ends with the next phase.
        self._is_optimizing = False
        self._is_serving = self._is_broken = self._is_closed = False
        self._gradients = HeldGradients(root)
        self._versions: dict[FSDPParamGroup, tuple[int, ...]] = {}
        # What settings of groups were when this rank began to serve, or to follow.
        self._settings: dict[FSDPParamGroup, Any] = {}
        # And those that it follows, when it had run out.
        self._followed: dict[FSDPParamGroup, dict[str, Any]] = {}
        # The block of accumulate that runs on the ranks that are present, and how many there were; here: its sums.
        self._active: object = None
        self._num_blocks = 0
        self._totals: tuple[int, Totals | None] = (0, None)
        # The pass of another root in which ranks were counted last; other roots that ranks have gathered for others.
        self._counted: object = None
        self._others: weakref.WeakSet[Root] = weakref.WeakSet()
        root.consensus = self
        watch_collectives(self, root, always=True)
        begin_to_watch(self, root)

    def is_alive(self) -> bool:
        """Returns True if the block may still run."""
        return not self._is_closed and self.hook() is not None

    def lasts(self) -> bool:
        """Returns True if ranks are counted in the block, and it has not ended."""
        config = vars(self._model()).get(JOIN_CONFIG)
        return self.is_alive() and (config is None or config.enable)

    # ---- counts

    def _count(self, is_present: bool) -> int:
        """Returns how many ranks are present. Every rank must call it."""
        count = torch.full((1,), float(is_present), device=self._device)
        all_reduce_now(count, self._group, largest=False)
        return int(count.item())

    def _begin_phase(self) -> None:
        """Counts the ranks that are present, of which this one is one.

        Raises:
            RuntimeError: the block has failed; or one has run out, and the block is to end then.
        """
        self._is_optimizing = False
        self.settle()
        config: Any = vars(self._model())[JOIN_CONFIG]
        if not config.is_first_joinable:
            raise NotImplementedError(f"Join: expected one sharded model, before all others in the list. {ONE_MODEL}")
        num_joined = self._group.size() - self._count(True)
        if config.throw_on_early_termination:
            throws = torch.zeros(1, device=self._device)
            all_reduce_now(throws, self._group, largest=False)
            if throws.item():
                raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        if num_joined != self.num_joined:
            self.num_joined = num_joined
            if not self._is_serving:
                self._is_serving = True
                self._prepare()
                self._gradients.hold_first([each for ref in self._optimizers if (each := ref()) is not None])
                self._note_versions()

    def settle(self) -> None:
        """Ends a phase that has raised, and was left out.

        Raises:
            RuntimeError: this block has failed on all ranks; or a phase is still running.
        """
        if self._is_broken:
            raise RuntimeError("join: this block has failed on all ranks, see the first error")
        if self._depth and not self.has_joined and not self._is_closed:
            if self._root.running or self._root.is_in_backward():
                raise RuntimeError("join: expected a step between passes, got one during a forward or backward")
            self._tell(_FAILED)
            self._depth = 0

    def _prepare(self) -> None:
        """Has all gradients of a group reduced together from now on."""
        self._settings = {group: group.settings for group in self._root.groups}
        for group in self._root.groups:
            if group.settings.reduce_when is ReduceWhen.BUCKET:
                group.set(reduce_when=ReduceWhen.GROUP)

    def _divide(self) -> None:
        """Divides by the number of ranks that are present, if the user wants that and has set no other number."""
        for group, before in self._settings.items():
            if not self._divides_by_all and before.divide_factor is None:
                factor = float(self._group.size() - self.num_joined)
                if group.settings.divide_factor != factor:
                    group.set(divide_factor=factor)

    def _is_off(self) -> bool:
        """Returns True if nothing is to be counted or told: this rank follows others, or the block is over."""
        if self.has_joined or self._is_closed:
            return True
        config = vars(self._model()).get(JOIN_CONFIG)
        if self.hook() is None or config is None or not config.enable:
            self.close()
            return True
        return False

    @property
    def _is_telling(self) -> bool:
        """True if this rank tells those that have joined what it does: some have, and this one is present. In the
        function `step` it tells nothing, because all ranks run that.
        """
        return not self._is_off() and self._is_serving and not self._is_in_step

    # ---- what the engine calls

    def before_pass(self) -> None:
        super().before_pass()
        if self._is_off() or self._is_in_step or self._root.running:
            return
        self._begin_phase()
        if self._is_serving:
            self._tell(_FORWARD)
            self._depth = 1
            self._share_modes()

    def before_gather(self, group: FSDPParamGroup) -> None:
        root, is_begun = self._root, False
        is_in_phase = self._depth or root.running or root.backward is not None
        if not (self._is_off() or self._is_in_step or is_in_phase):
            self._begin_phase()  # a user unshards
            is_begun = True
        if not self._is_telling:
            if self.conditional and not self.has_joined:
                super().before_gather(group)
            return
        if group.params:  # also where one rank has them whole: checks count gathers
            index, restores = self._indices[group], group.phase is SECONDARY
            self._reach(_RESTORE + index if restores else GATHER + _KINDS * index, group in self.conditional)
        elif is_begun:
            self._tell(_FAILED)  # there was nothing to gather

    def before_reduce(self, group: FSDPParamGroup, indices: set[int]) -> set[int]:
        if self.has_joined:
            return indices
        if not self._is_telling:
            return super().before_reduce(group, indices) if self.conditional else indices
        super().before_reduce(group, indices)
        return indices if group in self.conditional else indices | self._unite(group, indices)

    def after_forward(self, state: FSDPState, inputs: Any, output: Any) -> Any:
        is_telling = self._is_telling
        if self.conditional and not self.has_joined:
            output = super().after_forward(state, inputs, output)
        elif is_telling and len(self._root.running) == 1:
            self._tell(_FORWARD_END)
        if is_telling and len(self._root.running) == 1 and state.groups[0] not in self.conditional:
            self._share_counters()
            self._depth -= 1
        return output

    def before_backward(self) -> None:
        super().before_backward()
        if not self._is_telling:
            return
        if not self._depth:
            self._begin_phase()
        event = _UNSYNCHRONIZED if self._root.backward is None else _BACKWARD
        self._tell(event)
        self._depth += 1
        self._share_state(event)
        self._gradients.release()

    def after_backward(self) -> None:
        is_telling = self._is_telling
        if self.conditional and not self.has_joined:
            super().after_backward()
        elif is_telling:
            self._tell(_BACKWARD_END)
        if is_telling:
            self._reduce_left()
            self._depth -= 1

    def pass_failed(self, in_backward: bool) -> None:
        """Without conditional modules, all ranks are at the same place: they are told at the next phase (`settle`)."""
        if self.conditional and not (self._is_off() or self._is_in_step):
            super().pass_failed(in_backward)

    def _tell_failed(self) -> None:
        super()._tell_failed()
        self._depth = max(0, self._depth - 1)

    def after_delivery(self) -> None:
        if self.has_joined or self._is_in_step or self._is_closed:
            return
        if self._is_serving:
            self._gradients.hold()
            self._note_versions()  # optimizers may have stepped in backward

    def before_weights(self) -> None:
        if not self._is_telling:
            return
        self._begin_phase()
        self._tell(_WEIGHTS)
        self._share_state(_WEIGHTS)

    def before_collective(self) -> None:
        """Raises RuntimeError if a user is about to communicate, in which ranks that have joined can't take part."""
        if self._is_off() or self._is_in_step or self._is_optimizing:
            return
        root = self._root
        if not (self._depth or root.running or root.backward is not None):
            self._begin_phase()
        if self._is_serving:
            self._tell(_COLLECTIVE)
            self._fail(_COLLECTIVE_OF_OTHERS)
        if self.conditional and (root.running or root.backward is not None):
            super().before_collective()

    # ---- other models in the loop

    def before_other(self, group: FSDPParamGroup, follows: bool) -> None:
        """Is called before a group of another root gathers or reduces. `follows`: those that have joined can, too.

        Raises:
            RuntimeError: on all ranks: some have joined, and can't.
        """
        if self._is_off() or self._is_in_step or self._is_optimizing:
            return
        own, other = self._root, group.root
        if not (self._depth or own.running or own.backward is not None):
            running = other.backward or (other.forward if other.running else None)
            # Ranks leave between passes. Those that have left count once for each gather.
            if self._is_serving or running is None or running is not self._counted:
                self._begin_phase()
                self._counted = running
        if not self._is_serving:
            return
        if not follows:
            self._tell(_COLLECTIVE)
            self._fail(_COLLECTIVE_OF_OTHERS)
        self._tell(_OTHER_MODEL)
        self._share_other(number_of(self, group))

    def _share_other(self, own: Sequence[int]) -> tuple[FSDPParamGroup, list[int]]:
        """Returns the group of another root that ranks are about to gather, and the numbers that say so.

        Raises:
            RuntimeError: they gather different ones, or a rank does not know it; on all ranks.
        """
        told = self._told([*own, *(-number for number in own)])
        found = self._find_largest(told, _OTHER_MODEL)
        numbers, least = found[: len(own)], [-number for number in found[len(own) :]]
        are_alike = numbers == least
        group = group_of(self, numbers)
        if not are_alike or self._find_largest([int(group is None)], _OTHER_MODEL)[0]:
            self._fail(_UNKNOWN_MODEL if are_alike else f"ranks gather different models. {self._advice}")
        assert group is not None, "all ranks know it"
        self._others.add(group.root)
        waiting = [each.mesh.waiting for each in group.root.groups]
        self._waiting += [each for each in waiting if not any(each is known for known in self._waiting)]
        return group, numbers

    def _follow_other(self) -> None:
        gather_for_others(*self._share_other([_NOTHING] * NUM_NUMBERS))

    # ---- steps

    @hides_modes
    def step(self) -> Any:
        """Calls the function `step` on all ranks."""
        assert self._own_step is not None, "Joined.step looks"
        if self._is_telling:
            self._begin_phase()
            self._tell(_STEP)
            self._share_state(_STEP)
            return self._run_step()
        return run_shown(self._own_step)

    def _run_step(self) -> Any:
        assert self._own_step is not None, "all ranks have it"
        self._gradients.release()
        self._is_in_step = True
        try:
            return run_shown(self._own_step)
        except BaseException:
            self._is_broken = True  # others may be anywhere in it
            raise
        finally:
            self._is_in_step = False
            if not self.has_joined:
                self._gradients.hold()
                self._note_versions()

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self._is_closed or (not self.has_joined and self._is_off()):
            return
        index = next((i for i, each in enumerate(self._optimizers) if each() is optimizer), None)
        if index is None:
            index = len(self._optimizers)
            self._optimizers.append(weakref.ref(optimizer))
        if not self._is_serving:
            self._is_optimizing = True
            return
        if not self.has_joined and not self._is_in_step:
            if has_closure:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: ranks that have run out of batches have none for its closure, "
                    "in which backward runs. They follow a step behind backward."
                )
            self._begin_phase()
            self._tell(_OPTIMIZER - index)
            self._share_state(_OPTIMIZER - index)
            self._gradients.release()
            self._is_optimizing = True
        options = _checksum_of(optimizer)
        least, most = self._find_bounds([options])[0]
        if least != most:
            self._fail(f"{type(optimizer).__name__}: {_UNEQUAL}")

    def after_step(self, optimizer: Optimizer) -> None:
        self._is_optimizing = False
        if self._is_serving and not (self.has_joined or self._is_in_step or self._is_closed):
            self._gradients.hold()
            self._note_versions()

    # ---- messages of ranks that are present

    def _tell(self, event: int) -> None:
        self._reach(event, False)

    def _reach(self, event: int, is_conditional: bool) -> None:
        try:
            super()._reach(event, is_conditional)
        except RuntimeError:
            self._is_broken = True
            raise

    _advice = "All ranks that have a batch must do the same for it."

    def _describe(self, event: int) -> str:
        if event >= _RESTORE:
            return f"gathering {self._root.groups[event - _RESTORE]}, among neighbours"
        if event <= _LEFT:
            return f"rank {_LEFT - event}, which leaves the block of join by an exception"
        if event <= _OPTIMIZER:
            return "at the step of an optimizer"
        return _NAMES[event] if event < 0 else super()._describe(event)

    def _find_bounds(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the least and the largest of each number over all ranks, also those that have joined."""
        found = self._find_largest([*numbers, *(-number for number in numbers)], _STEP)
        return [(-least, most) for most, least in zip(found[: len(numbers)], found[len(numbers) :], strict=True)]

    def _fail(self, problem: str) -> None:
        """Raises a RuntimeError, as all ranks do."""
        self._is_broken = True
        raise RuntimeError(f"join: {problem}")

    # ---- what events do not say

    def _share_modes(self) -> tuple[bool, list[bool]]:
        """Returns whether the ranks that are present have grad enabled, and which modules train there."""
        modes = [module.training for module in _modules_of(self._root)]
        own = [self._is_written(), self.num_joined, int(torch.is_grad_enabled()), *map(int, modes)]
        is_written, self.num_joined, has_grad, *found = self._find_largest(self._told(own), _FORWARD)
        self._refuse_written(is_written)
        return bool(has_grad), [*map(bool, found)]

    def _told(self, numbers: Sequence[int]) -> list[int]:
        """Returns numbers of a rank that is present; of one that has joined, as many that add nothing."""
        return [_NOTHING] * len(numbers) if self.has_joined else [*numbers]

    def _share_counters(self) -> None:
        """Gives the counters among buffers, of batches for example, of the ranks that are present to the others."""
        buffers = [each for module in _modules_of(self._root) for each in module._buffers.values()]
        counters: list[Tensor] = [
            each
            for each in buffers
            if isinstance(each, Tensor) and not each.dim() and not each.is_floating_point() and not each.is_complex()
        ]
        if not counters:
            return
        found = self._find_largest(self._told([int(each.item()) for each in counters]), _FORWARD_END)
        for each, value in zip(counters, found, strict=True):
            if self.has_joined and each.item() != value:
                each.fill_(value)

    def _share_state(self, event: int) -> None:
        """Has ranks that have joined follow what the others' program has done to gradients and settings.

        Raises:
            RuntimeError: they can't; on all ranks.
        """
        root = self._root
        flags = [int(f) for g in root.groups for f in (g.settings.reduce_gradients, g.settings.all_reduce)]
        params = [param for group in root.groups for param in group.params]
        own_fates = [Fate.NONE for _ in params] if self.has_joined else self._gradients.find_fates()
        own = [self._is_written(), self.num_joined, self._find_block(), root.num_resets, *flags, *own_fates]
        common = self._find_common(event)
        found = self._find_largest([*self._told(own), *common, *(-each for each in common)], event)
        (is_written, self.num_joined, block, num_resets), found = found[:4], found[4:]
        flags, found = found[: len(flags)], found[len(flags) :]
        fates, found = found[: len(params)], found[len(params) :]
        self._refuse_written(is_written)
        self._refuse_differences(found[: len(common)], [-each for each in found[len(common) :]])
        self._gradients.unsure.clear()
        for param, fate in zip(params, fates, strict=True):
            if fate == Fate.CHANGED:
                self._fail(f"{param.name}: its gradient was changed since backward. {HOW}")
        self._refuse_unsure([param for param, fate in zip(params, fates, strict=True) if fate == Fate.UNSURE])
        if self.has_joined:
            self._follow(block, num_resets, flags)
            self._gradients.meet(fates)
        self._divide()

    def _find_block(self) -> int:
        """Returns the number of the block of accumulate that runs, or 0."""
        active = find_active(self._root)
        self._num_blocks += active is not None and active is not self._active
        self._active = active
        return 0 if active is None else self._num_blocks

    def _find_common(self, event: int) -> list[int]:
        """Returns what must be alike on all ranks: which parameters are trainable, the settings of optimizers that step
        in backward, and that this rank knows the optimizer that is about to step.
        """
        with no_torch_function():
            trainable = [param.sharded.requires_grad for group in self._root.groups for param in group.params]
        optimizers = [each.optimizer for each in map(steps_of, self._root.groups) if each is not None]
        options = [_checksum_of(each) for each in dict.fromkeys(optimizers)] if event == _BACKWARD else []
        index = _OPTIMIZER - event if _LEFT < event <= _OPTIMIZER else None
        knows = index is None or (index < len(self._optimizers) and self._optimizers[index]() is not None)
        return [zlib.crc32(bytes(trainable)), zlib.crc32(repr(options).encode()), int(knows)]

    def _refuse_differences(self, most: Sequence[int], least: Sequence[int]) -> None:
        """Raises RuntimeError if ranks differ in what `_find_common` returns."""
        if most[0] != least[0]:
            self._fail("requires_grad was changed while ranks have run out of batches. Change it behind the block.")
        if most[1] != least[1]:
            self._fail(f"the optimizer in backward: {_UNEQUAL}")
        if not least[2]:
            self._fail(
                "an optimizer steps that some rank without batches has not stepped in this block. Pass it: "
                "`fsdp2.join(model, optimizer=optimizer)`, or a function that steps, as `step`."
            )

    def _refuse_unsure(self, unsure: Sequence[FSDPParam]) -> None:
        """Raises RuntimeError if a rank that has joined has more than zeros where those that are present have zeros."""
        if not unsure:
            return
        with no_torch_function():
            differs = [self.has_joined and has_more_than_zeros(param) for param in unsure]
        found = self._find_largest([*map(int, differs)], _BACKWARD)
        names = [param.name for param, each in zip(unsure, found, strict=True) if each]
        if names:
            self._fail(
                f"{names[0]}: its gradient is zero on the ranks that are present, and not on one that has run out of "
                "batches, which can't know if it was set to zero. Call optimizer.zero_grad(), without "
                f"set_to_none=False, or clear gradients behind each step. {HOW}"
            )

    def _is_written(self) -> int:
        return int(not self.has_joined and any(g.shard_versions() != v for g, v in self._versions.items()))

    def _refuse_written(self, is_written: int) -> None:
        if is_written == 1:
            self._fail(f"parameters were written to outside of a step, while ranks have run out of batches. {HOW}")

    def _note_versions(self) -> None:
        self._versions = {group: group.shard_versions() for group in self._root.groups}

    def _unite(self, group: FSDPParamGroup, indices: Iterable[int]) -> set[int]:
        """Returns the indices of those parameters of `group` that have gradients on some rank, and gives this rank
        zeros for those that it has none of.
        """
        gradients, own = group.gradients, set(indices)
        with no_torch_function():
            own = {i for i in own if group.params[i].sharded.requires_grad} | {*gradients.unsynchronized}
        found = self._find_largest([int(i in own) for i in range(len(group.params))], _BACKWARD_END)
        united = {i for i, is_there in enumerate(found) if is_there}
        gradients.fill_with_zeros(united - own)
        return united

    def _reduce_left(self) -> None:
        """Reduces what ranks that have joined had accumulated, where the others have no gradient."""
        groups = self._root.groups[::-1]
        left = [int(each.settings.reduce_gradients and bool(each.gradients.unsynchronized)) for each in groups]
        for group, is_left in zip(groups, self._find_largest(left, _BACKWARD_END), strict=True):
            if is_left:
                group.gradients.reduce_some(self._unite(group, ()))

    # ---- a rank that has joined

    @hides_modes
    def follow_phase(self) -> None:
        """Does what the ranks that are present do, up to the end of the phase that they begin."""
        if not self.has_joined:
            self._begin_to_follow()
        event = self._next()
        if event == _FORWARD:
            self._follow_forward()
        elif event == _BACKWARD:
            self._share_state(event)
            self._follow_backward()
        elif event == _UNSYNCHRONIZED:
            self._share_state(event)
            self._follow_reductions()
        elif event == _WEIGHTS:
            self._share_state(event)
            totals = self._totals[1]
            assert totals is not None, "a block of accumulate runs"
            totals.start()
        elif event == _STEP:
            self._share_state(event)
            self._run_step()
        elif event <= _OPTIMIZER:
            self._share_state(event)
            optimizer = self._optimizers[_OPTIMIZER - event]()
            assert optimizer is not None, "ranks have compared that"
            run_shown(optimizer.step)
        elif event == _OTHER_MODEL:
            self._follow_other()
        elif event >= 0:
            self._do(event)

    def _begin_to_follow(self) -> None:
        self.has_joined = self._is_serving = True
        self._gradients.release()
        if not self._settings:
            self._prepare()
        for group in self._root.groups:
            self._followed[group] = {name: getattr(group.settings, name) for name in _FOLLOWED}
            if group.settings.reduce_unused:
                group.set(reduce_unused=False)  # this rank reduces what others ask for
            self._rest(group)

    def _next(self) -> int:
        """Returns the next event of all ranks that are present. Before, joins what only some of them ask for."""
        while True:
            numbers = [-_COMMON - 1, _NOTHING, _NOTHING]
            chosen, first, last = self._find_largest(numbers, _STEP)
            if -chosen != _COMMON:
                self._join(-chosen)
            elif -first != last:
                self._is_broken = True
                self._root.note_out_of_step()
                raise RuntimeError(
                    "ranks are out of step: this one has run out of batches, one is "
                    f"{self._describe(-first)}, one is {self._describe(last)}. {self._advice}"
                )
            elif last <= _LEFT:
                self._is_broken = True
                raise RuntimeError(f"rank {_LEFT - last} has left the block of join by an exception, see its error")
            elif last == _COLLECTIVE:
                self._fail(_COLLECTIVE_OF_OTHERS)
            else:
                return last

    def _do(self, event: int) -> None:
        """Gathers or reduces as the others do, with what this rank has."""
        if event >= _RESTORE:
            group = self._root.groups[event - _RESTORE]
            group.unshard(for_backward=True, registers=False)
            return self._rest(group)
        index, kind = divmod(event, _KINDS)
        group = self._root.groups[index]
        if kind == REDUCE:
            return group.gradients.reduce_some(self._unite(group, ()))
        if group.phase is SECONDARY:  # which others have dropped
            group.reshard()
        group.unshard(registers=False)
        self._rest(group)

    def _rest(self, group: FSDPParamGroup) -> None:
        """Reshards, and keeps the secondary shards that others may restore parameters from."""
        group.hold = Hold.NOTHING
        if group.phase is not SECONDARY:
            group.reshard(keeps_secondary=group.comms.post_forward is not None and group.is_unsharded)

    def _follow_until(self, end: int) -> bool:
        """Follows events up to `end`. Returns False if the others have given up."""
        while True:
            event = self._next()
            if event == _FAILED:
                return False
            if event == end:
                return True
            if event == _BACKWARD:  # inside a forward, or behind one that has raised
                self._share_state(event)
                self._follow_backward()
            elif event == _UNSYNCHRONIZED:
                self._share_state(event)
                self._follow_reductions()
            elif event == _OTHER_MODEL:
                self._follow_other()
            elif event >= 0:
                self._do(event)

    def _follow_forward(self) -> None:
        root = self._root
        has_grad, modes = self._share_modes()
        modules = _modules_of(root)
        before = [module.training for module in modules]
        try:
            _set_modes(modules, modes)
            with torch.set_grad_enabled(has_grad):
                root.begin_pass()
                num_running = len(root.running)
                try:
                    root.enter(root.state)
                    if self._follow_until(_FORWARD_END):
                        self._share_counters()
                        root.notify(root.events.pass_ended)
                    else:
                        for notify in root.events.pass_failed:
                            notify(root, False)
                finally:
                    root.leave(num_running)
        finally:
            _set_modes(modules, before)

    def _follow_backward(self) -> None:
        """Runs a backward pass of the engine in which this rank computes nothing."""
        has_ended = False

        def follow() -> None:
            nonlocal has_ended
            self._root.enter_backward()
            has_ended = self._follow_until(_BACKWARD_END)
            if not has_ended:
                raise _GivenUp
            self._reduce_left()

        anchor = torch.zeros((), requires_grad=True)
        try:
            with torch.enable_grad():
                loss = _Follow.apply(anchor, follow)
            loss.backward()
        except _GivenUp:
            self._root.recover()

    def _follow_reductions(self) -> None:
        """Does what `reduce_unsynchronized` does, where this rank computes nothing."""
        root = self._root
        root.queue.finish_partial()
        root.follow_changes()
        root.notify(root.events.backward_began)
        root.take_placeholders()
        for group in root.groups:
            group.gradients.begin_backward(object())
        if not self._follow_until(_BACKWARD_END):
            root.queue.abandon(None)
            return root.recover()
        self._reduce_left()
        for group in reversed(root.groups):
            group.gradients.end_backward()
        root.resume_reductions(reversed(root.groups))
        root.deliver()

    def _follow(self, block: int, num_resets: int, flags: Sequence[int]) -> None:
        """Takes the settings of the ranks that are present, which hold for the next pass."""
        root = self._root
        if num_resets > root.num_resets:
            reset(root)
            root.num_resets = num_resets
        if block != self._totals[0]:
            self._totals = block, Totals(root, None) if block else None
        totals = self._totals[1]
        late = None if totals is None else totals.divide
        for group, reduces, sums in zip(root.groups, flags[::2], flags[1::2], strict=True):
            wanted = {"reduce_gradients": bool(reduces), "all_reduce": bool(sums), "divide_late": late}
            if any(getattr(group.settings, name) != value for name, value in wanted.items()):
                group.set(**wanted)

    # ---- the end

    @hides_modes
    def end(self) -> None:
        """Ends the block, as all ranks do.

        Raises:
            RuntimeError: the settings of an optimizer differ between ranks; on all of them.
        """
        if self._is_serving and not self._is_closed:
            self._share_state(_END)  # also of a last zero_grad
            optimizers = [each() for each in self._optimizers]
            settings = [_checksum_of(each) for each in optimizers if each is not None]
            (fewest, most), (least, largest) = self._find_bounds([len(settings), zlib.crc32(repr(settings).encode())])
            if fewest == most and least != largest:
                self._fail(f"at the end of the block, an optimizer: {_UNEQUAL}")
        self.close()

    @hides_modes
    def leave(self) -> None:
        """Tells other ranks that this one leaves by an exception, if they listen: then some have joined."""
        if self._is_closed or self.has_joined or self._is_broken or not self._is_serving or self._is_in_step:
            return
        if self._root.is_out_of_step:  # so all ranks raise
            return
        event = _LEFT - dist.get_rank()
        with suppress(RuntimeError):
            if not self._depth:
                self._count(True)
            _, first, last = self._exchange(_COMMON, event)
            if first != last:
                self._root.note_out_of_step()

    @hides_modes
    def close(self) -> None:
        """Gives the model its settings of before. It does not communicate."""
        if self._is_closed:
            return
        self._is_closed, root = True, self._root
        root.consensus = self._usual
        unwatch_collectives(root)
        end_to_watch(self)
        if self._usual is not None:
            watch_collectives(self._usual, root)
        if not self._is_serving:
            return
        self._gradients.release()
        for group, before in self._settings.items():
            changes = {"reduce_when": before.reduce_when, **self._followed.get(group, {})}
            if not self._divides_by_all and before.divide_factor is None:
                changes["divide_factor"] = None
            group.set(**changes)
        forget([root, *self._others])


_COLLECTIVE_OF_OTHERS = (
    "a collective of your own in the loop, or one of a tool, of an operation on sharded parameters (full_tensor(), for "
    "example) or of another sharded model that trains, in which ranks that have run out of batches can't take part. "
    f"{HOW}"
)
ONE_MODEL = (
    "Write one module that has all of them, whose forward runs the one that it is told; apply fully_shard to it, and "
    "join that."
)
_UNKNOWN_MODEL = (
    "another sharded model runs in the loop, and a rank that has run out of batches can't tell which of its own it is. "
    "Apply fully_shard to the same models, in the same order, on all ranks."
)
_UNEQUAL = (
    "its settings (lr, ...) differ between ranks that have run out of batches and others; has a scheduler stepped on "
    "the latter only? Step it in the function that join gets as `step`, or behind the block."
)


# The settings of groups that a rank which has joined changes.
_FOLLOWED = ("reduce_gradients", "all_reduce", "divide_late", "reduce_unused")


class _GivenUp(Exception):
    """Ends a backward pass that the ranks that are present have given up."""


class _Follow(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, follow: Callable[[], None]) -> Tensor:
        ctx.follow = follow
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.follow()
        return None, None


def _modules_of(root: Root) -> list[nn.Module]:
    return [*dict.fromkeys(module for outer in root.state.modules for module in outer.modules())]


def _set_modes(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for module, is_training in zip(modules, modes, strict=True):
        if module.training != is_training:
            module.training = is_training


def _checksum_of(optimizer: Optimizer) -> int:
    """Returns a checksum of the numbers among an optimizer's settings."""
    options = [
        sorted((name, _as_text(value)) for name, value in group.items() if name != "params")
        for group in optimizer.param_groups
    ]
    return zlib.crc32(repr(options).encode())


def _as_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() == 1 else ""
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else ""
