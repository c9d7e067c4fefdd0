"""`weight[mask] = 0` with a plain mask, `plain.lerp_(p.grad, 0.1)`, a hidden state made of a parameter outside forward.

Torch refuses to mix plain tensors with DTensors, and says neither which it has met nor what to do. No code of ours runs
in such an operation; but torch asks it for its name there. What the code that runs it speaks of tells the rest.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import dtensor_compat
from ..dtensor_compat import local_of
from ..owners import Owned, all_states, sharded_owner
from ..tree import tensors_in
from ..versions import sharded_in
from .full_tensor import owner_of

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST", "LOAD_SMALL_INT")  # the latter two: `blocks[0]`
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP")
_HOW = (
    "read the whole by full_tensor(), on every rank; or make the plain tensor a DTensor like it, on every rank: "
    "distribute_tensor(plain, p.device_mesh, p.placements)"
)


@cache
def explain_mixed_operands() -> None:
    """From now on torch's error begins with the parameter's name, if it can be told, and with what to do."""
    dtensor_compat.begin_mixed_errors(_advice)


def _advice(frame: FrameType) -> str:
    """`frame`: of the code that mixes them; or that asks for an operation's name inside one, and is told no more."""
    met = [_distributed_in(each) for each in _until_users(frame)]
    first = next((tensor for each in met for tensor in each), None)
    if first is None:
        return ""
    owners = next((found for each in met if (found := [*filter(None, map(_whose, each))])), [])
    names = ", ".join(dict.fromkeys(owner.param.name for owner in owners))
    if not owners:
        text = (
            f"a DTensor of global shape {tuple(first.shape)}, placements {first.placements}, meets a plain tensor. If "
            "it is an input or state of a module, made of a sharded parameter (`p.new_zeros(...)`) outside of forward, "
            "make it by torch.zeros(..., device=p.device, dtype=p.dtype); if it is a gradient, or computed of "
            f"parameters, {_HOW}"
        )
    elif owners[0].state.group.faces.installed:
        text = (
            f"{names}: an input or state of the module is a DTensor, made of this sharded parameter outside its "
            "forward. Make it by torch.zeros(..., device=..., dtype=...), or of full_tensor(), on every rank"
        )
    else:
        text = (
            f"{names}: each rank holds a part of a sharded parameter, and of its gradient, which meets a plain tensor "
            f"here. In a step, or around one, {_HOW}; or run this inside `with fsdp2.full_params(module, "
            "writeback=True):`"
        )
    return f"{text}. Torch says: "


def _until_users(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and those that have called it, as far as a user's: what torch or we have between says less. What handles
    operations may ask for their names without complaint.
    """
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        yield frame
        is_users = str(frame.f_globals.get("__name__")).partition(".")[0] not in ("torch", "fsdp2")
        frame = None if is_users else frame.f_back


def _whose(tensor: DTensor) -> Owned | None:
    """Whose parameter it is, or a view of, or the gradient of, or computed of."""
    viewed = sharded_in(local_of(tensor))
    if viewed is not None:
        return sharded_owner(viewed.sharded)
    with_gradients = (Owned(state, param) for state in all_states() for param in state.group.params)
    return next((each for each in with_gradients if each.param.sharded.grad is tensor), None) or owner_of(tensor)


def _distributed_in(frame: FrameType) -> list[DTensor]:
    return [each for each in _named_in(frame) if isinstance(each, DTensor)]


def _named_in(frame: FrameType) -> Iterator[Tensor]:
    """The tensors that the expression which runs in `frame` names: `model.stem.weight`, `args`. Nothing is run."""
    scope, value = {**frame.f_globals, **frame.f_locals}, None
    for each in _running(frame):
        if each.opname in _ATTRIBUTES:
            value = _attribute(value, str(each.argval))
        elif each.opname.startswith("LOAD_"):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            *before, value = map(scope.get, names)
            yield from _tensors_of(before)
        elif each.opname not in _SUBSCRIPTS:
            value = None
        yield from _tensors_of(value)


def _running(frame: FrameType) -> list[dis.Instruction]:
    """The instructions of the expression that runs. Before Python 3.11 nobody knows them."""
    instructions = [
        each for each in dis.get_instructions(frame.f_code) if None not in getattr(each, "positions", [None])
    ]
    spans = {each.offset: _span(each) for each in instructions}
    if frame.f_lasti not in spans:
        return []
    start, end = spans[frame.f_lasti]
    return [each for each in instructions if start <= spans[each.offset][0] and spans[each.offset][1] <= end]


def _span(instruction: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where it starts and ends in the source: lines and columns."""
    where = instruction.positions
    return (where.lineno, where.col_offset), (where.end_lineno, where.end_col_offset)


def _tensors_of(value: Any) -> list[Tensor]:
    return tensors_in(value) if isinstance(value, (Tensor, list, tuple, dict)) else []


def _attribute(value: Any, name: str) -> Any:
    """Without the code of properties."""
    own = getattr(value, "__dict__", {})
    registers = (own, *(own.get(each, {}) for each in ("_parameters", "_modules", "_buffers")))
    return next((each[name] for each in registers if name in each), None)
