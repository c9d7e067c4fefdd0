"""Corrects what torch's DTensor computes otherwise than plain tensors, for sharded parameters.

`install` connects this folder to the engine. Nothing of torch is changed before the first module is sharded.
FSDP2_DTENSOR_FIXES=off leaves everything here out, so that sharded parameters are torch's DTensors: a report of a bug
can then say if it is one of a fix.
"""

from __future__ import annotations

import os

from torch import nn

from ..devices.write_notices import notices
from ..engine.events import extend
from ..engine.state import FSDPState
from ..torch_private.dtensor import allow_in_foreach, dispatch_to
from ..torch_private.once import once
from .autograd_inputs import accept_sharded_inputs
from .copies import copy_gradients
from .counted_collectives import count_collectives_of_shards
from .crossings import average_in_plain_tensors
from .data_attribute import follow_data
from .foreach_operations import operate_on_lists
from .optimizer_steps import follow_optimizer_steps, note_call
from .random_ops import randomize_like_plain_tensors
from .reductions import reduce_full_tensors
from .refusals import explain_refusals
from .sharded_dtensor import ShardedDTensor, UnreducedDTensor, look_up_in_user_classes
from .views import CopiedView, refuse_lost_writes
from .writes import write_to_shards

VARIABLE = "FSDP2_DTENSOR_FIXES"


def are_on() -> bool:
    """Returns True unless the environment switches the fixes off.

    Raises:
        ValueError: the environment variable has another value than `off`.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text not in ("", "off"):
        raise ValueError(f"{VARIABLE}: expected off, or no value; got {text!r}")
    return not text


def install() -> None:
    """Makes the engine use ShardedDTensor for sharded parameters, and adds what follows each call of it. It is called
    once, before any module is sharded.
    """
    if are_on():
        extend(tensor_class=ShardedDTensor, after_sharding=(join_fixes, note_call))
        notices.see_operations()


def join_fixes(state: FSDPState) -> None:
    """Puts the fixes in force once the first module is sharded, and those for users' classes once one has such."""
    correct_torch()
    groups = [group for each in (state, *state.parts) for group in each.groups]
    if any(param.leaf_class is not nn.Parameter for group in groups for param in group.params):
        look_up_in_user_classes()


@once
def correct_torch() -> None:
    """Puts the fixes in force. Functions that replace the same attribute stand in the order in which they wrap it."""
    dispatch_to((ShardedDTensor, UnreducedDTensor, CopiedView))
    allow_in_foreach(ShardedDTensor)
    average_in_plain_tensors()
    follow_data()
    copy_gradients()
    refuse_lost_writes()
    operate_on_lists()
    write_to_shards()
    reduce_full_tensors()
    randomize_like_plain_tensors()
    explain_refusals()
    accept_sharded_inputs()
    follow_optimizer_steps()
    count_collectives_of_shards()
