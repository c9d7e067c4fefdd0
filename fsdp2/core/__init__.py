"""The engine: shards, gathers and reduces. It imports nothing of fsdp2 outside this folder."""

from .api import fully_shard, replicate
from .events import Observer, Strategies, extend, strategies
from .mesh import DataParallelMeshDims, ShardPlacementResult
from .module import FSDPModule, UnshardHandle
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Observer",
    "OffloadPolicy",
    "ShardPlacementResult",
    "Strategies",
    "UnshardHandle",
    "extend",
    "fully_shard",
    "replicate",
    "strategies",
]
