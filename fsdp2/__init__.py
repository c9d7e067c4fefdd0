"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from .api import fully_shard, replicate
from .bridge.patch import patch_torch
from .checks.table import set_checks
from .core.module import UnshardHandle
from .core.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .dtensor.fixes import dtensor_fixes
from .ext.forward_method import register_fsdp_forward_method
from .ext.meshes import DataParallelMeshDims, ShardPlacementResult
from .ext.root_methods import GradientReductionHandle
from .install import install as _install
from .module import FSDPModule, share_comm_ctx
from .optim.averages import AveragedModel
from .optim.flat import flatten_optimizer
from .tools.audit import check
from .tools.clip import clip_grad_norm_
from .tools.compare import compare
from .tools.difference import Comparison, Difference
from .tools.finding import Finding
from .tools.full_params import full_params
from .tools.padding import GroupPadding, ParameterPadding, cheapest_placement, padding_report
from .tools.sync import sync_module_states

__version__ = "0.1.0"

__all__ = [
    "AveragedModel",
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
    "flatten_optimizer",
    "full_params",
    "fully_shard",
    "padding_report",
    "patch_torch",
    "register_fsdp_forward_method",
    "replicate",
    "set_checks",
    "share_comm_ctx",
    "sync_module_states",
]

_install()
