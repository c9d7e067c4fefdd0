"""Follows the advice of errors of tensor subclasses, of parts of weights, and of wrappers around a sharded model."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from advised.registry import (
    ELSEWHERE,
    Net,
    backward,
    batch,
    build,
    follows,
    loss_of,
    own,
    refused,
    same,
    same_gradients,
    same_parameters,
    sgd,
    train,
)
from fsdp2 import DataParallelMeshDims, fully_shard
from models import Wrapper

_DTYPES, _PRIVATE = "tests/ranks/test_grad_dtype.py", "tests/ranks/test_private_names.py"
ELSEWHERE.update(
    {
        "install one of these, or train without this ability; the others work": (
            "tests/processes/test_hidden_names.py::test_training_without_the_others_is_the_same"
        ),
        "Install one of these releases, or a newer fsdp2": "tests/unit/test_missing_names.py::test_one_error_lists_all",
        "Pass MixedPrecisionPolicy(reduce_dtype={}), or set grad_dtype to {}": f"{_DTYPES}::any_dtype",
        "Pass the mesh of all axes, and dp_mesh_dims; and annotate the parameter on each of them": (
            "tests/ranks/test_spmd_types.py::annotated_in_part"
        ),
        "Set it between steps": f"{_DTYPES}::set_after_sharding",
        "Set grad_dtype, to torch.float32 for example, before fully_shard": f"{_DTYPES}::stepped_by_muon",
        "Read parameter.device_mesh instead": f"{_PRIVATE}::refused_under_our_names",
    }
)

# ---- tensor subclasses


class WrappedWeight(nn.Linear):
    """A frozen wrapped weight, and a bias that is trained."""

    cls: Any = Wrapper

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.weight = nn.Parameter(self.cls(self.weight.data), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ weight.inner.T + self.bias


def with_stem(stem: Any) -> Any:
    def make() -> Any:
        model = Net()
        model.stem = stem()
        return model

    return make


def optimizers(*models: Any) -> Any:
    return [sgd(nn.ParameterList(p for p in each.parameters() if p.requires_grad)) for each in models]


def train_the_rest(model: Any, plain: Any) -> None:
    """Trains what is not frozen, and compares the gradients of three steps: those of the others are None."""
    steppers = optimizers(model, plain)
    for step in range(3):
        for each, stepper, x in zip((model, plain), steppers, (own(batch(step)), batch(step)), strict=True):
            stepper.zero_grad()
            backward(each, x=x)
        same_gradients(model, plain)
        for stepper in steppers:
            stepper.step()


# ---- plain tensors made of sharded parameters


@follows("Call full_tensor() on each of them first, on every rank", ranks=4)
def parameters_that_different_ranks_share() -> None:
    """One is sharded over all ranks, the other over those of one axis, because the other axis has its rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.expert = nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(x)

    def sharded() -> Any:
        model = build(Two)
        for part, placement in ((model.dense, Replicate()), (model.expert, Shard(0))):
            for name, param in [*part.named_parameters()]:
                part.register_parameter(
                    name, nn.Parameter(distribute_tensor(param.data, mesh, [Replicate(), placement]))
                )
        fully_shard(model.dense, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "ep")))
        fully_shard(model.expert, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        return model

    def penalty(model: Any, of: Any) -> Tensor:
        return of(model.dense.weight * model.expert.weight).square().mean()

    plain = build(Two)
    model = sharded()
    assert isinstance(model.dense.weight, DTensor)
    refused(lambda: penalty(model, lambda each: each.full_tensor()).backward(), NotImplementedError)
    (model.dense.weight.full_tensor() * model.expert.weight.full_tensor()).square().mean().backward()
    penalty(plain, lambda each: each).backward()
    same_gradients(model, plain)


# ---- what is around or in a sharded model


@follows(
    "Remove FullyShardedDataParallel, and apply fully_shard to the whole model, too; or pass what is sharded as "
    "ignored_states."
)
def fsdp1_around() -> None:
    cpu = torch.device("cpu")
    model, plain = build(), build()
    fully_shard(model.block)
    refused(lambda: FSDP1(model, device_id=cpu))
    model = build()
    fully_shard(model.block)
    train(fully_shard(model), copy.deepcopy(plain))
    model = build()
    fully_shard(model.block)
    wrapped = FSDP1(model, device_id=cpu, use_orig_params=True, ignored_states=[*model.block.parameters()])
    steppers = (sgd(wrapped), sgd(plain))
    for step in range(2):
        for each, stepper, x in zip((wrapped, plain), steppers, (own(batch(step)), batch(step)), strict=True):
            loss_of(each(x)).backward()
            stepper.step()
            stepper.zero_grad()
    for (name, p), q in zip(model.block.named_parameters(), plain.block.parameters(), strict=True):
        same(p.detach(), q.detach(), name)
    with FSDP1.summon_full_params(wrapped, recurse=False):
        for name in ("stem", "head"):
            same_parameters(getattr(wrapped.module, name), getattr(plain, name))
    with FSDP1.summon_full_params(wrapped):
        same_parameters(wrapped, plain)
