"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from .audit import check
from .clip import clip_grad_norm_
from .compare import compare
from .difference import Comparison, Difference
from .finding import Finding
from .forward_method import register_fsdp_forward_method
from .full_params import full_params
from .fully_shard import fully_shard, replicate
from .handles import GradientReductionHandle, UnshardHandle
from .mesh import DataParallelMeshDims, ShardPlacementResult
from .module import FSDPModule, share_comm_ctx
from .padding import GroupPadding, ParameterPadding, cheapest_placement, padding_report
from .patch import patch_torch
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "Comparison",
    "DataParallelMeshDims",
    "Difference",
    "FSDPModule",
    "Finding",
    "GradientReductionHandle",
    "GroupPadding",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParameterPadding",
    "ShardPlacementResult",
    "UnshardHandle",
    "cheapest_placement",
    "check",
    "clip_grad_norm_",
    "compare",
    "full_params",
    "fully_shard",
    "padding_report",
    "patch_torch",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
