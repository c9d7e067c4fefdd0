"""Checks that ranks begin with parts of one model: no parameter is as `to_empty` left it; all cut the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .. import group_compat
from ..core.mesh import DataMesh
from ..core.parameter import FSDPParam
from ..core.state import FSDPState, some_of
from .empty_memory import is_marked
from .questions import Question, ask, bounds_over, connects
from .starting_weights import BUILT, LOADED, UNKNOWN, digest


def compare_starts(states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError, on all ranks, if groups have parameters that nobody has initialised, or not all alike. All
    ranks of their meshes must call it.
    """
    for mesh, question in ask_of_starts(states).items():
        ask(mesh, [question])


def ask_of_starts(states: Sequence[FSDPState]) -> dict[DataMesh, Question]:
    of_mesh: dict[DataMesh, list[FSDPState]] = {}
    for state in states:
        of_mesh.setdefault(state.group.mesh, []).append(state)
    return {mesh: _starts_on(mesh, on_mesh) for mesh, on_mesh in of_mesh.items() if connects(mesh)}


def _starts_on(mesh: DataMesh, states: Sequence[FSDPState]) -> Question:
    """Asks whether groups on `mesh` have parameters that nobody has initialised, or not all alike."""
    numbers: list[Tensor | int] = []
    for state in states:
        numbers += [digest([*state.group.adopted.starts.values()]), _first_unwritten(state)]

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        for state, (_, unwritten) in zip(states, bounds[1::2], strict=True):
            if unwritten:
                raise RuntimeError(
                    f"{_names_below(state)[unwritten - 1]}: to_empty gave it memory, and nobody has initialised it "
                    "since. Initialise or load it before the first forward; a buffer that no state dict holds, too."
                )
        differing = [state for state, (least, most) in zip(states, bounds[::2], strict=True) if least != most]
        if differing:
            _refuse_different_starts(mesh, [param for state in differing for param in state.group.params], differing)
        for state in states:
            state.group.adopted.starts.clear()

    return Question(f"starting weights of {some_of([*map(str, states)])}", numbers, judge)


def _refuse_different_starts(mesh: DataMesh, params: Sequence[FSDPParam], states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if one of `params` is made of parts of different tensors."""
    starts = {param: start for state in states for param, start in state.group.adopted.starts.items()}
    numbers: list[Tensor | int] = []
    for param in params:
        start = starts.get(param)
        numbers += [digest([start] if start else []), start.origin() if start else UNKNOWN]
    bounds = bounds_over(mesh, numbers, f"starting weights of parameters of {some_of([*map(str, states)])}")
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


def _first_unwritten(state: FSDPState) -> int:
    """One more than the place, in `_names_below`, of a tensor that is as `to_empty` left it, or 0."""
    params = [param.name for param in state.group.versions.unwritten() if is_marked(param.local)]
    empty = {id(buffer) for buffer in state.group.empty_buffers.unwritten()}
    buffers = [name for name, buffer in _buffers_below(state) if id(buffer) in empty] if empty else []
    places = [_names_below(state).index(name) + 1 for name in params + buffers]
    return max(places, default=0)


def _names_below(state: FSDPState) -> list[str]:
    """Of its parameters, and of all buffers below its modules: the same on all ranks."""
    return [*(param.name for param in state.group.params), *(name for name, _ in _buffers_below(state))]


def _buffers_below(state: FSDPState) -> Iterator[tuple[str, Tensor]]:
    prefix = "" if state.group.name == "root" else state.group.name
    for module in state.modules:
        yield from module.named_buffers(prefix)
