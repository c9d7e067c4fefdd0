"""Hugging Face files: loads and saves sharded models as safetensors, without a gather and without a whole model.

`import fsdp2.hf`, or `from fsdp2 import hf`. It needs nothing but torch; the extra `hf` brings tqdm, for bars, and the
package safetensors, by which others read the files.
"""

from .load import LoadReport, load_model
from .merge import MergeReport, merge_checkpoint
from .save import save_adapter, save_model
from .views import View, cat, part, select, stack, transpose

__all__ = [
    "LoadReport",
    "MergeReport",
    "View",
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
