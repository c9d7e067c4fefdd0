"""Fully sharded data parallel training for PyTorch, with the API of torch's FSDP2."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .api import fully_shard, replicate, vocab_parallel_embedding
from .calls.forward_method import register_fsdp_forward_method
from .checks.observers import set_checks
from .collectives.meshes import DataParallelMeshDims, ShardPlacementResult
from .engine.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadBudget, OffloadPolicy
from .install import install as _install
from .module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx

if TYPE_CHECKING:  # what `_MODULES` imports when it is asked for
    from . import checkpoint as checkpoint
    from . import hf as hf
    from .bridge.patch import patch_torch
    from .checks.digests import DigestLog
    from .features.accumulate import accumulate
    from .features.even_batches import even_batches
    from .features.skip import skip_step_on_error
    from .optim.averages import AveragedModel
    from .optim.flat import flatten_optimizer
    from .optim.muon import muon
    from .optim.split import split_matrices
    from .optim.whole_matrix import WholeMatrixOptimizer
    from .planning.plan import plan
    from .planning.policies import wrap_groups
    from .planning.times import Machine
    from .tools.audit import check
    from .tools.clip import clip_grad_norm_
    from .tools.compare import compare
    from .tools.describe import describe
    from .tools.full_params import full_params
    from .tools.padding import cheapest_placement
    from .tools.same_batch import check_same_batch
    from .tools.stream import StreamVersion, stream_full_params
    from .tools.sync import sync_module_states

__version__ = "0.1.0"

_FOLDERS = ("checkpoint", "hf")
# The module of each public name that is imported when a program first asks for it.
_MODULES = {
    "AveragedModel": "optim.averages",
    "DigestLog": "checks.digests",
    "Machine": "planning.times",
    "StreamVersion": "tools.stream",
    "WholeMatrixOptimizer": "optim.whole_matrix",
    "accumulate": "features.accumulate",
    "cheapest_placement": "tools.padding",
    "check": "tools.audit",
    "clip_grad_norm_": "tools.clip",
    "check_same_batch": "tools.same_batch",
    "compare": "tools.compare",
    "describe": "tools.describe",
    "flatten_optimizer": "optim.flat",
    "full_params": "tools.full_params",
    "even_batches": "features.even_batches",
    "muon": "optim.muon",
    "patch_torch": "bridge.patch",
    "plan": "planning.plan",
    "skip_step_on_error": "features.skip",
    "split_matrices": "optim.split",
    "stream_full_params": "tools.stream",
    "sync_module_states": "tools.sync",
    "wrap_groups": "planning.policies",
}


def __getattr__(name: str) -> Any:
    """Imports a tool when a program first asks for it: `fsdp2.plan`, `from fsdp2 import plan`, `fsdp2.hf`."""
    if name in _FOLDERS:
        return import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    """Returns all names, also those that were not asked for yet."""
    return sorted({*globals(), *__all__, *_FOLDERS})


__all__ = [
    "AveragedModel",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DigestLog",
    "FSDPModule",
    "GradientReductionHandle",
    "Machine",
    "MixedPrecisionPolicy",
    "OffloadBudget",
    "OffloadPolicy",
    "ShardPlacementResult",
    "StreamVersion",
    "UnshardHandle",
    "WholeMatrixOptimizer",
    "accumulate",
    "cheapest_placement",
    "check",
    "check_same_batch",
    "clip_grad_norm_",
    "compare",
    "describe",
    "even_batches",
    "flatten_optimizer",
    "full_params",
    "fully_shard",
    "muon",
    "patch_torch",
    "plan",
    "register_fsdp_forward_method",
    "replicate",
    "set_checks",
    "share_comm_ctx",
    "skip_step_on_error",
    "split_matrices",
    "stream_full_params",
    "sync_module_states",
    "vocab_parallel_embedding",
    "wrap_groups",
]

_install()
