"""What ranks must have in common though no gather shows it: the weights they start from, memory that somebody has
initialised, and trainable parameters that no group manages. And what each sees by itself, of which all must be told:
whole numbers among its inputs that a policy rounds. Besides, optimizers that would never step.

Ranks look when one of the groups is gathered for the first time; later, at the times of looks.py, where there are such
parameters, or casts. A number that all have in common is its own maximum and minimum over them: an all-reduce of some
integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .. import comm, torch_compat
from ..mesh import DataMesh
from ..param import FSDPParam, fqn
from ..param_group import FSDPParamGroup
from ..state import FSDPState, data_mesh_of, some_of
from .checksum import bits_of, checksum
from .looks import is_time_to_look
from .rounding import rounded_whole_numbers, tells_of_numbers
from .running_stats import RunningStats

_NUM_SAMPLES = 16


class StartingWeights:
    """Some values of one parameter, as fully_shard found it: ranks that were seeded alike have them in common."""

    def __init__(self, param: FSDPParam, gathered: Tensor) -> None:
        self.param, self._shape = param, gathered.shape
        step = max(1, gathered.numel() // _NUM_SAMPLES)
        self._places = range(0, gathered.numel(), step)
        self.values = gathered.contiguous().as_strided((len(self._places),), (step,)).clone()

    @classmethod
    def of(cls, param: FSDPParam, whole: Tensor) -> StartingWeights | None:
        """`whole`: the parameter before it was sharded. None: it has no values yet, or is no plain tensor."""
        gathered = param.gathered(whole.detach())
        is_plain = type(gathered) is Tensor and gathered.dim() > 0 and not gathered.is_meta
        return cls(param, gathered) if is_plain else None

    def is_replaced(self) -> Tensor:
        """Whether this rank's shard has other values there now: loaded ones, say. Without dims."""
        local = self.param.local
        if local.dtype != self.values.dtype:
            return _number(True)
        first, last = self.param.bounds
        places = torch.unravel_index(torch.tensor(self._places, dtype=torch.int64, device=local.device), self._shape)
        own = (places[self.param.dim] >= first) & (places[self.param.dim] < last)
        index = [place[own] - (first if dim == self.param.dim else 0) for dim, place in enumerate(places)]
        return (bits_of(local[tuple(index)]) != bits_of(self.values.to(local.device)[own])).any()


class RankGuard:
    """What the ranks of one root, and of all states below it, have found in common so far."""

    def __init__(self, root: FSDPState, states: Sequence[FSDPState]) -> None:
        self._root, self._states = root, states
        self._times = 0
        self.stats = RunningStats(root.modules)
        # How often the inputs of each were cast, and what whole numbers were rounded then.
        self._casts: dict[FSDPState, int] = {}
        self._rounded: dict[FSDPState, set[float]] = {}
        # Unmanaged parameters that were the same on all ranks when they were last looked at.
        self._common: set[str] = set()
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
        if is_time_to_look(number):
            self._look(is_first=number == 1)
        self._times = number  # unless that raises: then it is looked at again

    def _look(self, is_first: bool) -> None:
        _refuse_own_optimizers(self._states)
        if is_first:
            of_mesh: dict[DataMesh, list[FSDPState]] = {}
            for state in self._states:
                of_mesh.setdefault(state.group.mesh, []).append(state)
            for mesh, states in of_mesh.items():
                if _connects(mesh):
                    _compare_starts(mesh, states)
            widest = data_mesh_of(self._states)
            self._mesh = widest if _connects(widest) else None
        if self._mesh is None:
            return
        unmanaged = dict(_find_unmanaged(self._root, self._states)) if self._mesh.num_ranks > 1 else {}
        if unmanaged:
            self._compare_unmanaged(self._mesh, unmanaged)
        if any(state.input_dtype is not None for state in self._states):
            self._tell_of_rounding(self._mesh)

    def _compare_unmanaged(self, mesh: DataMesh, unmanaged: dict[str, nn.Parameter]) -> None:
        bounds = _bounds(mesh, [checksum(parameter) for parameter in unmanaged.values()])
        common = {name for name, (least, most) in zip(unmanaged, bounds, strict=True) if least == most}
        apart = [name for name in unmanaged if name in self._common - common]
        if apart:
            raise RuntimeError(
                f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, and is not any more: "
                "each rank has trained it with its own gradient. Have it there before fully_shard, and out of "
                "ignored_params; or freeze it, or average its gradient before each step."
            )
        self._common = common

    def _tell_of_rounding(self, mesh: DataMesh) -> None:
        places = (
            self._states.index(state) + 1 for state, rounded in self._rounded.items() if tells_of_numbers(rounded)
        )
        ((_, found),) = _bounds(mesh, [_number(max(places, default=0))])
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


def _compare_starts(mesh: DataMesh, states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if groups on `mesh` have parameters that nobody has initialised, or not all alike."""
    numbers = []
    for state in states:
        start = state.group.start
        nothing, something = _number(0), _number(1)
        numbers += [checksum(start.values), start.is_replaced()] if start else [nothing, something]
        numbers += [_first_unwritten(state)]
    bounds = _bounds(mesh, numbers)
    for state, (least, most), (_, is_replaced), (_, unwritten) in zip(
        states, bounds[::3], bounds[1::3], bounds[2::3], strict=True
    ):
        if unwritten:
            raise RuntimeError(
                f"{state.group.params[unwritten - 1].name}: to_empty gave it memory, and nobody has initialised it "
                "since. Initialise or load it before the first forward."
            )
        if least != most and not is_replaced:
            raise RuntimeError(
                f"{state.group.start.param.name}: ranks had different values of it when fully_shard was called, so the "
                "sharded model is made of parts of different models. Set the same seed on all ranks before the model "
                "is built, or load the weights after fully_shard."
            )
    for state in states:
        state.group.start = None


def _first_unwritten(state: FSDPState) -> Tensor:
    """One more than the place of a parameter that is as `to_empty` left it, or 0."""
    found = _number(0)
    for param in state.group.versions.unwritten():
        if param.local.numel() and param.local.is_floating_point() and param.local.detach().isnan().all():
            found.fill_(state.group.params.index(param) + 1)
    return found


def _number(value: int) -> Tensor:
    return torch.tensor(value, device="cpu")  # whatever the default is


def _connects(mesh: DataMesh) -> bool:
    """Whether its ranks, or its only one, can tell each other anything."""
    return mesh.num_ranks == 1 or comm.moves_data(mesh.axis_groups, mesh.device)


def _bounds(mesh: DataMesh, numbers: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The least and the greatest of each over the ranks of `mesh`, all of which must call it."""
    own = torch.stack([number.to(mesh.device, torch.int64) for number in numbers])
    both = torch.cat([~own, own])
    comm.all_reduce_over(both, mesh.axis_groups, largest=True)
    inverse, greatest = both.chunk(2)
    return list(zip((~inverse).tolist(), greatest.tolist(), strict=True))


def _find_unmanaged(root: FSDPState, states: Sequence[FSDPState]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters below `root` that no group has, with their names."""
    managed = {(slot.module, slot.name) for s in states for param in s.group.params for slot in param.slots}
    for outer in root.modules:
        for prefix, module in outer.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and (module, name) not in managed:
                    yield fqn(prefix, name), parameter
