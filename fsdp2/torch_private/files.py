"""Holds the private names of torch and of Transformers that `fsdp2.hf` uses, each with the reason."""

from __future__ import annotations

from torch import Tensor

from .rare_internals import TorchDispatchMode

__all__ = [
    "IGNORED_MISSING",
    "IGNORED_ON_SAVE",
    "IGNORED_UNEXPECTED",
    "TIED",
    "USED_CONVERSIONS",
    "TorchDispatchMode",
    "storage_key",
]

USED_CONVERSIONS = "_weight_conversions"
"""The attribute in which `from_pretrained` of Transformers notes the conversions that the files needed. Its
`save_pretrained` reverts these, and no others: files that have a prefix get it back."""
IGNORED_MISSING = "_keys_to_ignore_on_load_missing"
"""The patterns of tensors that files of a class of Transformers may lack. It has no public name for them."""
IGNORED_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
"""The patterns of tensors that files may have and the class lacks: heads that predict further tokens, for example."""
IGNORED_ON_SAVE = "_keys_to_ignore_on_save"
"""The names of tensors that the class does not save."""
TIED = "_tied_weights_keys"
"""The names of parameters that a class ties to others, under whose names they are saved."""


def storage_key(tensor: Tensor) -> int:
    """Returns a number that tensors with one storage share, on meta, too, where all have the same address."""
    return int(tensor.untyped_storage()._cdata)
