"""Checkpoints at the speed of the disk: saved by any number of ranks, and loaded on any other.

`import fsdp2.checkpoint`, or `from fsdp2 import checkpoint`. torch.distributed.checkpoint loads them, too, and what it
has saved is loaded here.
"""

from .listing import latest
from .loading import load
from .random_states import RandomStates
from .saving import save

__all__ = ["RandomStates", "latest", "load", "save"]
