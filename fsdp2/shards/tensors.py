"""What tools ask of tensors, sharded or not: local tensors, their bits, names for texts."""

from __future__ import annotations

from ..checks.checksum import are_alike, bits_of, checksum, read, values_of, word_sum
from ..dtensor.compat import dtensor, spec_of
from ..engine.compat import (
    PLAIN,
    copy_all,
    dtensor_spec,
    holds_values,
    inner_tensors,
    local_if_any,
    local_of,
    no_torch_function,
    untraced,
)
from ..engine.gather import group_copies, own_storage_view, view_bytes
from ..engine.layout import RANK_ALIGNMENT, align
from ..engine.nested import map_tensors, tensors_in
from ..engine.once import once
from ..engine.owners import some_of
from ..engine.parameter import fqn
from ..engine.user_code import hidden, hides_modes
from ..features.module_repr import dtype_text

__all__ = [
    "PLAIN",
    "RANK_ALIGNMENT",
    "align",
    "are_alike",
    "bits_of",
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
    "local_if_any",
    "local_of",
    "map_tensors",
    "no_torch_function",
    "once",
    "own_storage_view",
    "read",
    "some_of",
    "spec_of",
    "tensors_in",
    "untraced",
    "values_of",
    "view_bytes",
    "word_sum",
]
