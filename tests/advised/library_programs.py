"""Follows the advice of errors of tensor subclasses, of parts of weights, and of wrappers around a sharded model."""

import contextlib
import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
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
    pair,
    refused,
    same,
    same_gradients,
    same_parameters,
    sgd,
    shard,
    train,
)
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from models import Wrapper

_DTYPES, _PRIVATE = "tests/ranks/test_grad_dtype.py", "tests/ranks/test_private_names.py"
ELSEWHERE.update(
    {
        "install one of these, or train without this ability; the others work": (
            "tests/unit/test_missing_names.py::test_training_without_the_others_is_the_same"
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


@follows("Give the class {}, before the first forward at the latest{}.", ", or put the parameter into ignored_params")
def wrappers_without_methods() -> None:
    class Late(Wrapper):
        pass

    class Halved(Wrapper):
        """Lacks one of both methods."""

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            rows = self.inner.new_zeros(-(-5 // mesh.size()), 5)
            rows[: len(self.inner)] = self.inner
            return (rows,), None

    def post(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (type(self)(outputs[0][:5]), outputs)

    for cls in (Late, Halved):
        stem = type("Stem", (WrappedWeight,), {"cls": cls})
        make = with_stem(stem)
        plain = build(make)
        text = refused(lambda make=make: backward(shard(build(make))), NotImplementedError)
        model = build(make)
        train_the_rest(shard(model, ignored_params={model.stem.weight}), copy.deepcopy(plain))
        model = build(make)
        if cls is Late:
            refused(partial(backward, shard(model)))
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            assert (name in text.split("Give the class ")[1]) == (not hasattr(cls, name))
        cls.fsdp_pre_all_gather = Halved.fsdp_pre_all_gather  # type: ignore[attr-defined]
        cls.fsdp_post_all_gather = post  # type: ignore[attr-defined]
        train_the_rest(model if cls is Late else shard(model), plain)


class Packed(nn.Parameter):
    """Holds int8 values in the bytes of fp32 numbers, which mean nothing as such."""

    @classmethod
    def of(cls, values: Tensor) -> Any:
        packed: Any = cls((values * 100).round().to(torch.int8).contiguous().view(torch.float32), requires_grad=False)
        packed.scale = 0.01
        return packed


class PackedWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 5)
        self.weight = Packed.of(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x.repeat(1, 2)[:, :8] @ (weight.data.view(torch.int8) * weight.scale).T.to(x) + self.bias


class Multiples(nn.Parameter):
    """Holds multiples of a scale, which a cast leaves what they are."""

    @classmethod
    def of(cls, values: Tensor) -> Any:
        made: Any = cls((values * 64).round(), requires_grad=False)
        made.scale = 1 / 64
        return made


class ScaledWeight(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)
        self.weight = Multiples.of(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ (weight * weight.scale).T.to(x) + self.bias


@follows(
    "Pass to MixedPrecisionPolicy param_dtype_override_fn=lambda p: p.dtype if isinstance(p, {}) else None, which "
    "leaves them as they are; with {} in place of p.dtype it casts them."
)
def casts_of_packed_values() -> None:
    """Both choices: packed values are left as they are, multiples are cast."""
    bf16 = torch.bfloat16
    for stem, cls, place in ((PackedWeight, Packed, "p.dtype"), (ScaledWeight, Multiples, "torch.bfloat16")):
        make = with_stem(stem)
        text = refused(lambda make=make: shard(build(make), mp_policy=MixedPrecisionPolicy(bf16)), ValueError)
        code = text.split("param_dtype_override_fn=")[1].split(", which leaves")[0]
        assert f"with {place} in place" in text or place == "p.dtype"
        code = code.replace("p.dtype", place)
        override = eval(code, {cls.__name__: cls, "torch": torch})
        policy = MixedPrecisionPolicy(bf16, torch.float32, param_dtype_override_fn=override)
        model, plain = shard(build(make), mp_policy=policy), build(make)
        for each, x in ((model, own(batch())), (plain, batch())):
            backward(each, x=x)
        same_gradients(model, plain, tolerance=0.03)
        model.unshard()
        seen = {name: param.dtype for name, param in model.named_parameters() if "stem" in name}
        assert seen == {"stem.weight": torch.float32 if place == "p.dtype" else bf16, "stem.bias": bf16}


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


def copied_without_gradient(tensor: Tensor) -> Tensor:
    """Stands for collectives of torch.distributed: gloo's own fail at random if their output requires a gradient."""
    with contextlib.suppress(RuntimeError):  # it has been defined before
        torch.library.define("fsdp2_advised::summed", "(Tensor tensor) -> Tensor")

        def summed(tensor: Tensor) -> Tensor:
            total = tensor.detach().clone()
            dist.all_reduce(total)
            return total

        torch.library.impl("fsdp2_advised::summed", "CPU", summed)
    total: Tensor = torch.ops.fsdp2_advised.summed(tensor)
    return total


@follows(
    "Call full_tensor() on the parameter, or on what is computed from it, in place of to_local() and the collective, "
    "on every rank; or call the collective in torch.no_grad()"
)
def collectives_of_parts() -> None:
    def squares(weight: Tensor) -> Tensor:
        return copied_without_gradient(weight.square().sum())

    def loss(model: Any, scale: Tensor, x: Tensor) -> Tensor:
        return loss_of(model(x)) + 0.1 * scale.sqrt() * model.head.bias.square().sum()

    model, plain = pair()
    refused(lambda: squares(model.head.weight.to_local()).backward())
    model, plain = pair()
    part = model.head.weight.to_local().square().sum()
    refused(lambda: functional.all_reduce(part, "sum", dist.group.WORLD).sqrt().backward())
    loss_of(plain(batch())).backward()
    model, _ = pair()
    (loss_of(model(own(batch()))) + 0.1 * model.head.weight.full_tensor().square().sum().sqrt()).backward()
    (0.1 * plain.head.weight.square().sum().sqrt()).backward()
    same_gradients(model, plain)
    model, plain = pair()
    with torch.no_grad():
        scale = squares(model.head.weight.to_local())
    same(scale, plain.head.weight.detach().square().sum(), "sum of squares")
    (loss_of(model(own(batch()))) + scale * model.stem.bias.full_tensor().square().sum()).backward()
    whole = plain.head.weight.detach().square().sum()
    (loss_of(plain(batch())) + whole * plain.stem.bias.square().sum()).backward()
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
