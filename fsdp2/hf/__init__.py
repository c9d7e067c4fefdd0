"""Hugging Face files: loads and saves sharded models as safetensors, without a gather and without a whole model.

`import fsdp2.hf`, or `from fsdp2 import hf`. It needs nothing but torch; the extra `hf` brings the package safetensors,
by which others read the files.
"""

from .load import load_model
from .merge import merge_checkpoint
from .save import save_adapter, save_model
from .views import cat, part, select, stack, transpose

__all__ = [
    "cat",
    "load_model",
    "merge_checkpoint",
    "part",
    "save_adapter",
    "save_model",
    "select",
    "stack",
    "transpose",
]
