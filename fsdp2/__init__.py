"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from .bridge.patch import patch_torch
from .corrections.table import dtensor_fixes
from .forward_method import register_fsdp_forward_method
from .fully_shard import fully_shard, replicate
from .handles import GradientReductionHandle, UnshardHandle
from .mesh import DataParallelMeshDims, ShardPlacementResult
from .module import FSDPModule, share_comm_ctx
from .padding import GroupPadding, ParameterPadding, cheapest_placement, padding_report
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .tools.audit import check
from .tools.clip import clip_grad_norm_
from .tools.compare import compare
from .tools.difference import Comparison, Difference
from .tools.finding import Finding
from .tools.full_params import full_params
from .tools.sync import sync_module_states

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
    "dtensor_fixes",
    "full_params",
    "fully_shard",
    "padding_report",
    "patch_torch",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "sync_module_states",
]
