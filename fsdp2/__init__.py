"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from importlib import import_module
from types import ModuleType

from .api import fully_shard, replicate
from .bridge.patch import patch_torch
from .checks.table import set_checks
from .dtensor.fixes import dtensor_fixes
from .engine.forward_method import register_fsdp_forward_method
from .engine.meshes import DataParallelMeshDims, ShardPlacementResult
from .engine.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .install import install as _install
from .module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from .optim.averages import AveragedModel
from .optim.flat import flatten_optimizer
from .optim.muon import muon
from .optim.split import MatrixSplit, split_matrices
from .optim.whole_matrix import WholeMatrixOptimizer
from .planning.check import CheckedValue, PlanCheck
from .planning.plan import Plan, PlanRow, plan
from .planning.policies import WrapGroup, wrap_groups
from .planning.prediction import Prediction
from .planning.settings import Setting
from .tools.audit import check
from .tools.clip import clip_grad_norm_
from .tools.compare import compare
from .tools.describe import GroupDescription, ModelDescription, describe
from .tools.difference import Comparison, Difference
from .tools.finding import Finding
from .tools.full_params import full_params
from .tools.padding import GroupPadding, ParameterPadding, cheapest_placement, padding_report
from .tools.stream import ParamBucket, ParamStream, StreamVersion, stream_full_params
from .tools.sync import sync_module_states
from .tools.timeline import trace

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Imports `fsdp2.hf` when a program first asks for it."""
    if name == "hf":
        return import_module(".hf", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AveragedModel",
    "CPUOffloadPolicy",
    "CheckedValue",
    "Comparison",
    "DataParallelMeshDims",
    "Difference",
    "FSDPModule",
    "Finding",
    "GradientReductionHandle",
    "GroupDescription",
    "GroupPadding",
    "MatrixSplit",
    "MixedPrecisionPolicy",
    "ModelDescription",
    "OffloadPolicy",
    "ParamBucket",
    "ParamStream",
    "ParameterPadding",
    "Plan",
    "PlanCheck",
    "PlanRow",
    "Prediction",
    "Setting",
    "ShardPlacementResult",
    "StreamVersion",
    "UnshardHandle",
    "WholeMatrixOptimizer",
    "WrapGroup",
    "cheapest_placement",
    "check",
    "clip_grad_norm_",
    "compare",
    "describe",
    "dtensor_fixes",
    "flatten_optimizer",
    "full_params",
    "fully_shard",
    "muon",
    "padding_report",
    "patch_torch",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "set_checks",
    "share_comm_ctx",
    "split_matrices",
    "stream_full_params",
    "sync_module_states",
    "trace",
    "wrap_groups",
]

_install()
