"""Answers what tools ask of tensors, sharded or not: local tensors, their bits, names for texts.

It has no functions of its own: the engine, which can't import this folder, needs them, too. It says which of them
tools, optimizers and files may use. What is about sharded modules and their parameters is in protocol.py and find.py.
"""

from __future__ import annotations

from ..calls.nested import map_tensors, tensors_in
from ..calls.user_code import hidden, hides_modes
from ..checks.model_facts import written_by_some
from ..dtensor.making import dtensor
from ..dtensor.optimizer_states import NUMBERS, local_states, lost_states
from ..engine.gather import group_copies, own_storage_view, view_bytes
from ..engine.layout import RANK_ALIGNMENT, ParamSpec, align
from ..engine.owners import some_of
from ..engine.parameter import fqn
from ..engine.policy import check_bool
from ..engine.state import require_module
from ..features.module_repr import dtype_text
from ..parameters.checksum import are_alike, bits_of, checksum, read, values_of, word_sum
from ..parameters.empty_memory import is_marked, mark
from ..parameters.subclasses import is_packed
from ..torch_private.dtensor import spec_of
from ..torch_private.internals import (
    PLAIN,
    copy_all,
    dtensor_spec,
    holds_values,
    inner_tensors,
    local_if_any,
    local_of,
    no_torch_function,
    on_backward_end,
    peek_local,
    untraced,
)
from ..torch_private.once import once

__all__ = [
    "NUMBERS",
    "PLAIN",
    "RANK_ALIGNMENT",
    "ParamSpec",
    "align",
    "are_alike",
    "bits_of",
    "check_bool",
    "checksum",
    "copy_all",
    "dtensor",
    "dtensor_spec",
    "dtype_text",
    "fqn",
    "group_copies",
    "hidden",
    "hides_modes",
    "holds_values",
    "inner_tensors",
    "is_marked",
    "is_packed",
    "local_if_any",
    "local_of",
    "local_states",
    "lost_states",
    "map_tensors",
    "mark",
    "no_torch_function",
    "on_backward_end",
    "once",
    "own_storage_view",
    "peek_local",
    "read",
    "require_module",
    "some_of",
    "spec_of",
    "tensors_in",
    "untraced",
    "values_of",
    "view_bytes",
    "word_sum",
    "written_by_some",
]
