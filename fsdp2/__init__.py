"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from .fully_shard import fully_shard
from .module import FSDPModule, UnshardHandle
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
]
