"""Tests programs of the kind that clients of torch's FSDP2 are, with its private names, under patch_torch().

Each runs twice: on torch's own FSDP2, as a control, and on fsdp2. No client is imported.
"""

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import patch_torch
from helpers import run_checks

_PACKAGE = "torch.distributed.fsdp._fully_shard."


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def names(module: str) -> Any:
    return import_module(f"{_PACKAGE}{module}")


def shard(**options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model[2], **options)
    return fully_shard(model, **options)


def train(model: Any) -> torch.Tensor:
    model(torch.ones(2, 5)).sum().backward()
    gradient: torch.Tensor = model[0].weight.grad.full_tensor()
    return gradient


def same_as_plain(model: Any) -> None:
    plain = build()
    plain(torch.ones(2, 5)).sum().backward()
    torch.testing.assert_close(train(model), plain[0].weight.grad)


def guarded_sharding() -> None:
    """Automodel shards each block unless `_get_module_fsdp_state` finds a state, once more after its plan has."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    model = build()
    for _ in range(2):
        for module in (model[0], model[2], model):
            if _get_module_fsdp_state(module) is None:
                fully_shard(module)
    assert _get_module_fsdp_state(model[1]) is None
    assert _get_module_fsdp_state(model) is fully_shard.state(model) is model._get_fsdp_state()
    same_as_plain(model)


def reset_before_offload() -> None:
    """verl and VeOmni set each group idle before they move a model away and back."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    model = shard()
    train(model)
    for module in model.modules():
        state = names("_fsdp_state")._get_module_fsdp_state(module)
        if state is not None and state._fsdp_param_group is not None:
            state._fsdp_param_group._training_state = TrainingState.IDLE
            assert state._fsdp_param_group._training_state is TrainingState.IDLE
    model.reshard()
    model.cpu()
    model.zero_grad()
    same_as_plain(model)


def reshard_by_mesh_info() -> None:
    """verl chooses `reshard_after_forward` by the mesh that forward leaves parameters on."""
    make = names("_fsdp_init")._get_post_forward_mesh_info
    model = shard()
    for chosen in (False, True):
        for module in (model[2], model):
            state = module._get_fsdp_state()
            state._auto_reshard_after_forward = False
            group = state._fsdp_param_group
            group.post_forward_mesh_info = make(chosen, group.mesh_info)
            assert (group.post_forward_mesh_info is None) == (not chosen)
        model.zero_grad()
        same_as_plain(model)


def meshes_of_groups() -> None:
    common = names("_fsdp_common")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for kind, options in ((common.FSDPMeshInfo, {}), (common.HSDPMeshInfo, {"mesh": mesh})):
        info = shard(**options)._get_fsdp_state()._fsdp_param_group.mesh_info
        assert type(info) is kind
        assert info.shard_mesh_size == (1 if options else 2)
        assert info.shard_process_group.size() == info.shard_mesh_size
        assert (info.replicate_mesh_dim is None) == (not options)


def parameters_of_groups() -> None:
    model = shard()
    groups = model._get_fsdp_state()._fsdp_param_groups
    params = [param for group in groups for param in group.fsdp_params]
    assert [param.sharded_param is each for param, each in zip(params, model[0].parameters(), strict=True)] == [
        True
    ] * 2
    assert [tuple(param.sharded_size) for param in params] == [tuple(p.to_local().shape) for p in model[0].parameters()]
    model.unshard()
    assert params[0].unsharded_param is model[0].weight
    assert params[0].unsharded_param.shape == (6, 5)
    model.reshard()
    assert params[0].fsdp_placement.dim == 0


def gathers_in_the_default_stream() -> None:
    model = shard()
    model._set_unshard_async_op(True)
    same_as_plain(model)


def looked_up_by_exact_type() -> None:
    """accelerate maps parameters by address, before and after they are sharded: of a DTensor it takes the local one."""
    attribute = {DTensor: "_local_tensor"}
    addresses = {}
    for name, parameter in shard().named_parameters():
        found = attribute.get(type(parameter))
        addresses[name] = (parameter if found is None else getattr(parameter, found)).data_ptr()
    assert len(set(addresses.values())) == len(addresses) == 4


PROGRAMS = (
    *(guarded_sharding, reset_before_offload, reshard_by_mesh_info, meshes_of_groups, parameters_of_groups),
    *(gathers_in_the_default_stream, looked_up_by_exact_type),
)


def refused_under_our_names() -> None:
    """What these names can't say, or what can't be set, is an error with a sentence."""
    with patch_torch():
        model = shard(mesh=init_device_mesh("cpu", (2,)))
        group = model._get_fsdp_state()._fsdp_param_group
        with pytest.raises(AttributeError):
            group.mesh_info = None
        with pytest.raises(RuntimeError, match=r"_training_state is IDLE.*can't be set to FORWARD"):
            group._training_state = names("_fsdp_common").TrainingState.FORWARD
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        own: Any = fsdp2.fully_shard(
            nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard=("a", "b"))
        )
        with pytest.raises(NotImplementedError, match=r"mesh_info: expected one axis.*Read parameter\.device_mesh"):
            own._get_fsdp_state()._fsdp_param_group.mesh_info  # noqa: B018
        assert own.weight.device_mesh.size() == 2  # as the error says


def under(patched: bool, program: Any) -> Any:
    def run() -> None:
        with patch_torch() if patched else nullcontext():
            program()

    return run


def test_private_names() -> None:
    checks = [
        (f"{program.__name__}, {library}", under(library == "fsdp2", program))
        for program in PROGRAMS
        for library in ("torch", "fsdp2")
    ]
    run_checks(2, [*checks, ("refused", refused_under_our_names)])
