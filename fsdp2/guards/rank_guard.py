"""What ranks must have in common though no gather shows it: the weights they start from, memory that somebody has
initialised, and trainable parameters that no group manages. And what each sees by itself, of which all must be told:
whole numbers among its inputs that a policy rounds. Besides, optimizers that would never step.

Ranks look when one of the groups is gathered for the first time; later, at the times of looks.py, where there are such
parameters, or casts. A number that all have in common is its own maximum and minimum over them: an all-reduce of some
integers.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import group_compat, torch_compat
from ..comm import moves_data
from ..headers import Label
from ..mesh import DataMesh
from ..owners import sharded_owner
from ..param import FSDPParam, fqn, names_of_full
from ..param_group import FSDPParamGroup
from ..small_collectives import all_reduce_over
from ..state import FSDPState, data_mesh_of, some_of
from .checksum import checksum
from .empty_memory import is_marked
from .looks import is_time_to_look
from .rounding import rounded_whole_numbers, tells_of_numbers
from .running_stats import RunningStats
from .starting_weights import BUILT, LOADED, UNKNOWN, digest
from .step_history import StepHistory, refuse_different_steps


class RankGuard:
    """What the ranks of one root, and of all states below it, have found in common so far."""

    def __init__(self, root: FSDPState, states: Sequence[FSDPState]) -> None:
        self._root, self._states = root, states
        self._times = 0
        self.stats = RunningStats(root.modules)
        self.steps = StepHistory()
        # How often the inputs of each were cast, and what whole numbers were rounded then.
        self._casts: dict[FSDPState, int] = {}
        self._rounded: dict[FSDPState, set[float]] = {}
        # Whether ranks look at the next time, whichever that is: all have loaded weights.
        self._looks_again = False
        # Unmanaged parameters that were there when ranks last looked, and those of them that were the same on all.
        self._known: set[str] = set()
        self._common: set[str] = set()
        # Plain parameters that an optimizer steps on beside sharded ones, and what they were before.
        self._beside: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        # Over which they look, if it connects them; known at the first time.
        self._mesh: DataMesh | None = None

    def attach(self) -> None:
        """Look when a group that all ranks use communicates: they need not all begin a pass, with what is unsharded."""
        for state in self._states:
            state.group.guard = state.group.gradients.guard = None
        mesh = data_mesh_of(self._states)
        for state in self._states:
            group = state.group
            if group.params and group.mesh == mesh and state.gate is None:
                group.guard = self._gathers
                group.gradients.guard = partial(self._reduces, group)
                return

    def begin_anew(self) -> None:
        """Ranks were out of step: they may have looked different numbers of times."""
        self._times, self._looks_again = 0, False
        self.steps = StepHistory()
        self.stats.begin_anew()

    def casts(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """A forward of `state` is about to cast its inputs to `dtype`: look at them, at times 1, 2, 4, ..."""
        number = self._casts[state] = self._casts.get(state, 0) + 1
        if is_time_to_look(number) and _connects(state.group.mesh):
            self._rounded.setdefault(state, set()).update(rounded_whole_numbers(inputs, dtype))

    def _gathers(self) -> None:
        self._communicates()
        self.stats.before_gather(self._mesh)

    def _reduces(self, group: FSDPParamGroup) -> None:
        if group.mesh.size == 1:
            self._communicates()
        self.stats.before_reduction(self._mesh, group.gradients.backward_pass)

    def _communicates(self) -> None:
        """
        Raises:
            RuntimeError: ranks differ in what they must have in common; on every rank.
        """
        number = self._times + 1
        if self._looks_again or is_time_to_look(number):
            self._look(number)
        self._times, self._looks_again = number, False  # unless that raises: then it is looked at again

    def note_beside(self, params: Mapping[str, Tensor]) -> None:
        """An optimizer is about to step on these for the first time. All ranks must call it alike."""
        self._beside.update((name, (weakref.ref(param), checksum(param))) for name, param in params.items())

    def look_again(self) -> None:
        """Look when ranks communicate next. All must call it."""
        self._looks_again = True

    def _look(self, number: int) -> None:
        _refuse_own_optimizers(self._states)
        if number == 1 or self._looks_again:
            compare_starts(self._states)
            widest = data_mesh_of(self._states)
            self._mesh = widest if _connects(widest) else None
        if self._mesh is None:
            return
        if number > 1 and self._mesh.num_ranks > 1:
            self._compare_steps(self._mesh)
        unmanaged = dict(_find_unmanaged(self._root, self._states)) if self._mesh.num_ranks > 1 else {}
        if unmanaged:
            _refuse_replaced_modules(unmanaged, self._states)
            self._compare_unmanaged(self._mesh, unmanaged, is_first=number == 1)
        self._known = set(unmanaged)
        if self._beside and self._mesh.num_ranks > 1:
            self._compare_beside(self._mesh)
        if any(state.input_dtype is not None for state in self._states):
            self._tell_of_rounding(self._mesh)

    def _compare_steps(self, mesh: DataMesh) -> None:
        divisors = [state.group.gradients.reduction.divisor for state in self._states]
        steps, self.steps = self.steps, StepHistory()
        numbers = (zlib.crc32(repr(divisors).encode()), steps.count, steps.settings)
        (least, most), *bounds = _bounds(mesh, [*map(_number, numbers)], f"optimizer steps of {self._root}")
        if least != most:
            raise RuntimeError(
                f"{self._root}: gradients are divided by other numbers on some rank than on others. Call "
                "set_gradient_divide_factor on all ranks, with the same factor."
            )
        names = [param.name for state in self._states for param in state.group.params]
        refuse_different_steps(some_of(names), *bounds)

    def _compare_unmanaged(self, mesh: DataMesh, unmanaged: dict[str, nn.Parameter], is_first: bool) -> None:
        sums = [checksum(parameter) for parameter in unmanaged.values()]
        bounds = _bounds(mesh, sums, f"checksums of {some_of([*unmanaged])}, which no fully_shard call manages")
        common = {name for name, (least, most) in zip(unmanaged, bounds, strict=True) if least == most}
        late = set() if is_first else set(unmanaged) - self._known
        apart = [name for name in unmanaged if name in (self._common | late) - common]
        if apart:
            raise RuntimeError(
                f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, or has come since, "
                "and is not the same: each rank trains it with its own gradient. Have it there before fully_shard, and "
                "out of ignored_params; or freeze it, or average its gradient before each step."
            )
        self._common = common

    def _compare_beside(self, mesh: DataMesh) -> None:
        numbers = []
        for there, before in self._beside.values():
            param = there()
            numbers += [before, before if param is None else checksum(param)]
        bounds = _bounds(mesh, numbers, f"checksums of {some_of([*self._beside])}, which no fully_shard call manages")
        pairs = zip(self._beside, bounds[::2], bounds[1::2], strict=True)
        apart = [name for name, before, now in pairs if before[0] == before[1] and now[0] != now[1]]
        if apart:
            raise RuntimeError(
                f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, and is not any more: "
                "each rank has trained it with its own gradient. Apply fully_shard to the module around it; or freeze "
                "it, or average its gradient before each step."
            )

    def _tell_of_rounding(self, mesh: DataMesh) -> None:
        places = (
            self._states.index(state) + 1 for state, rounded in self._rounded.items() if tells_of_numbers(rounded)
        )
        ((_, found),) = _bounds(mesh, [_number(max(places, default=0))], "whether inputs were rounded")
        if found:
            self._rounded.clear()
            state = self._states[found - 1]
            raise RuntimeError(
                f"{state}: its inputs hold, on some rank, floating-point whole numbers (positions, time steps?) that "
                f"{state.input_dtype}, to which its MixedPrecisionPolicy casts them, makes others of. Pass "
                "cast_forward_inputs=False there, and cast in the module what may be rounded; or pass integers; or, if "
                "it is meant, cast them before the call."
            )


def _refuse_own_optimizers(states: Sequence[FSDPState]) -> None:
    """Raise NotImplementedError if a parameter would be stepped on where autograd accumulates its gradient."""
    stepped = torch_compat.stepped_on_accumulation()
    for param in (param for state in states if stepped for param in state.group.params):
        if param.sharded in stepped:
            raise NotImplementedError(
                f"{param.name}: _apply_optimizer_in_backward would never step, for gradients of sharded parameters "
                "come from reductions, not from autograd. Call model.set_optimizer_in_backward(optimizer), or step in "
                "register_post_accumulate_grad_hook of each parameter."
            )


def _refuse_replaced_modules(unmanaged: Mapping[str, nn.Parameter], states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if an unmanaged parameter has the name of one that is managed, in a module that was there."""
    managed = {name: param for state in states for param in state.group.params for name in param.names}
    for name, parameter in unmanaged.items():
        if name in managed:
            raise RuntimeError(
                f"{name}: the module around it was replaced after fully_shard, which manages the parameter of shape "
                f"{managed[name].shape} that was there; each rank would train the new one, of shape "
                f"{tuple(parameter.shape)}, with its own gradient. Replace or resize modules before fully_shard; or "
                "build the model anew with the new one, apply fully_shard, and load the rest."
            )


def compare_starts(states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError, on all ranks, if groups have parameters that nobody has initialised, or not all alike. All
    ranks of their meshes must call it.
    """
    of_mesh: dict[DataMesh, list[FSDPState]] = {}
    for state in states:
        of_mesh.setdefault(state.group.mesh, []).append(state)
    for mesh, on_mesh in of_mesh.items():
        if _connects(mesh):
            _compare_starts(mesh, on_mesh)


def _compare_starts(mesh: DataMesh, states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if groups on `mesh` have parameters that nobody has initialised, or not all alike."""
    numbers = []
    for state in states:
        numbers += [digest([*state.group.adopted.starts.values()]), _first_unwritten(state)]
    bounds = _bounds(mesh, numbers, f"starting weights of {some_of([*map(str, states)])}")
    for state, (_, unwritten) in zip(states, bounds[1::2], strict=True):
        if unwritten:
            raise RuntimeError(
                f"{_names_below(state)[unwritten - 1]}: to_empty gave it memory, and nobody has initialised it since. "
                "Initialise or load it before the first forward; a buffer that no state dict holds, too."
            )
    differing = [state for state, (least, most) in zip(states, bounds[::2], strict=True) if least != most]
    if differing:
        _refuse_different_starts(mesh, [param for state in differing for param in state.group.params], differing)
    for state in states:
        state.group.adopted.starts.clear()


def _refuse_different_starts(mesh: DataMesh, params: Sequence[FSDPParam], states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if one of `params` is made of parts of different tensors."""
    starts = {param: start for state in states for param, start in state.group.adopted.starts.items()}
    numbers = []
    for param in params:
        start = starts.get(param)
        numbers += [digest([start] if start else []), _number(start.origin() if start else UNKNOWN)]
    bounds = _bounds(mesh, numbers, f"starting weights of parameters of {some_of([*map(str, states)])}")
    for param, (least, most), (first, last) in zip(params, bounds[::2], bounds[1::2], strict=True):
        if first == last == BUILT and least != most:
            raise RuntimeError(
                f"{param.name}: ranks had different values of it when fully_shard was called, so the sharded model is "
                "made of parts of different models. Call fsdp2.sync_module_states(model) before fully_shard, which "
                "gives all ranks the first one's weights; or set the same seed on all ranks before the model is built; "
                f"or load the weights after fully_shard.{_hint(mesh)}"
            )
        if last == LOADED and (first != last or least != most):
            raise RuntimeError(
                f"{param.name}: load_state_dict(..., assign=True) was given whole tensors of different values on the "
                "ranks, or on some ranks only, so its shards are parts of different tensors. Load the same on all "
                "ranks, or set_model_state_dict(..., broadcast_from_rank0=True)."
            )


def _hint(mesh: DataMesh) -> str:
    """Says why a seed is not enough, where ranks are threads, or may be."""
    if not any(map(group_compat.is_python_group, mesh.axis_groups)):
        return ""
    return " Threads share one random generator: if ranks are threads, broadcast the weights before fully_shard."


def _first_unwritten(state: FSDPState) -> Tensor:
    """One more than the place, in `_names_below`, of a tensor that is as `to_empty` left it, or 0."""
    params = [param.name for param in state.group.versions.unwritten() if is_marked(param.local)]
    empty = {id(buffer) for buffer in state.group.empty_buffers.unwritten()}
    buffers = [name for name, buffer in _buffers_below(state) if id(buffer) in empty] if empty else []
    places = [_names_below(state).index(name) + 1 for name in params + buffers]
    return _number(max(places, default=0))


def _names_below(state: FSDPState) -> list[str]:
    """Of its parameters, and of all buffers below its modules: the same on all ranks."""
    return [*(param.name for param in state.group.params), *(name for name, _ in _buffers_below(state))]


def _buffers_below(state: FSDPState) -> Iterator[tuple[str, Tensor]]:
    prefix = "" if state.group.name == "root" else state.group.name
    for module in state.modules:
        yield from module.named_buffers(prefix)


def _number(value: int) -> Tensor:
    return torch.tensor(value, device="cpu")  # whatever the default is


def _connects(mesh: DataMesh) -> bool:
    """Whether its ranks, or its only one, can tell each other anything."""
    return mesh.num_ranks == 1 or moves_data(mesh.axis_groups, mesh.device)


def bounds_over(mesh: DataMesh, numbers: Sequence[int], name: str) -> list[tuple[int, int]]:
    """The least and the greatest of each over the ranks of `mesh`, all of which must call it. `name`: of what."""
    return _bounds(mesh, [*map(_number, numbers)], name)


def _bounds(mesh: DataMesh, numbers: Sequence[Tensor], name: str) -> list[tuple[int, int]]:
    """The same, of tensors without dims."""
    own = torch.stack([number.to(mesh.device, torch.int64) for number in numbers])
    both = torch.cat([~own, own])
    all_reduce_over(both, mesh.axis_groups, largest=True, label=Label(name))
    inverse, greatest = both.chunk(2)
    return list(zip((~inverse).tolist(), greatest.tolist(), strict=True))


def _find_unmanaged(root: FSDPState, states: Sequence[FSDPState]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters below `root` that no group has, with their names. A module that has come later, sharded by
    itself, is its own root.
    """
    managed = {(slot.module, slot.name) for s in states for param in s.group.params for slot in param.slots}
    for outer in root.modules:
        for prefix, module in outer.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad or (module, name) in managed:
                    continue
                if names_of_full(parameter):
                    continue
                if not isinstance(parameter, DTensor) or sharded_owner(parameter) is None:
                    yield fqn(prefix, name), parameter
