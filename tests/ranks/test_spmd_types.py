"""Tests plain parameters that the package spmd_types has annotated, as torchtitan's default backend makes them.

Modules compute with this rank's part of each parameter, and call collectives themselves. The oracles are a plain model
on the whole batch, and from torch 2.15 on torch's FSDP2, which takes such parameters, too. Models are in fp64.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_checks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
spmd: Any = pytest.importorskip("spmd_types", reason="the package spmd_types is not installed")
import spmd_types.checker  # noqa: E402

TORCH_TAKES_THEM = torch.__version__ >= "2.15"
WIDTH, ROWS, STEPS = 6, 8, 3
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
R, I, P, S, V = (getattr(spmd, name) for name in "RIPSV")  # noqa: E741
# What each parameter of a block is on the axis of the model. `scale` gets another part of its gradient on each rank.
TYPES = {"scale": "R", "up": "S0", "down": "S1", "bias": "I", "temperature": "I"}


class Block(nn.Module):
    """Computes with whole parameters, or, on an axis of the model, with this rank's parts."""

    tp: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.up = nn.Parameter(torch.randn(12, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, 12))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.temperature = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = spmd.convert(x, self.tp, src=I, dst=R)
        hidden = torch.tanh(F.linear(x * self.scale, self.up))
        out = F.linear(hidden, self.down)
        if self.tp is not None:
            out = spmd.all_reduce(out, self.tp, src=P, dst=I)
        return (out + self.bias) * self.temperature


def plain(has_scalars: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).double()
    for block in model if not has_scalars else ():  # torch refuses them
        block.temperature = nn.Parameter(torch.rand(1).double())
    return model


def annotate(model: nn.Module, mesh: DeviceMesh, compute: DeviceMesh | None = None, data: bool = True) -> nn.Module:
    """Replaces parameters by this rank's parts along the axis "tp", with annotations on the axes of `compute`; without
    `data`, on "tp" alone.
    """
    compute = compute or mesh
    tp, names = mesh["tp"], [name for name in compute.mesh_dim_names or () if name != "tp"]
    for block in model.modules():
        if not isinstance(block, Block):
            continue
        block.tp = tp.get_group()
        for name, kind in TYPES.items():
            whole = getattr(block, name).detach()
            if kind.startswith("S"):
                whole = whole.chunk(tp.size(), int(kind[1]))[tp.get_local_rank()].clone()
            parameter = nn.Parameter(whole.clone())
            of_tp = S(int(kind[1])) if kind.startswith("S") else getattr(spmd, kind)
            others = dict.fromkeys((compute.get_group(each) for each in names), R) if data else {}
            spmd.assert_type(parameter, {**others, block.tp: of_tp})
            parameter.note = name  # type: ignore[attr-defined]
            setattr(block, name, parameter)
    return model


def own(parameter: Any, expected: Tensor, kind: str, mesh: DeviceMesh) -> None:
    """Asserts that a sharded parameter, or its gradient, is the DTensor whose whole value is `expected`."""
    assert isinstance(parameter, DTensor)
    placement = parameter.placements[(mesh.mesh_dim_names or ()).index("tp")]
    is_cut = kind.startswith("S") and mesh["tp"].size() > 1
    assert placement == (Shard(int(kind[1])) if is_cut else Replicate()), (kind, placement)
    assert_same(full(parameter.detach()), expected.detach(), **ROUNDING, name=kind)


def batches(mesh: DeviceMesh, step: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of all ranks, and those of this one: ranks of one model see the same."""
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    ranks = 1
    index = 0
    for name in names:
        ranks, index = ranks * mesh[name].size(), index * mesh[name].size() + mesh.get_local_rank(name)
    return rows, rows.chunk(ranks)[index]


def train(
    model: nn.Module, optimizer: Any, mesh: DeviceMesh, step: int, checked: bool = False, whole: bool = False
) -> Tensor:
    """Makes a step, also under the package's type checker, and returns the loss of this rank."""
    x, names = batches(mesh, step)[0 if whole else 1], [each for each in mesh.mesh_dim_names or () if each != "tp"]
    optimizer.zero_grad()
    with contextlib.ExitStack() as stack:
        if checked:
            stack.enter_context(spmd.set_current_mesh(mesh))
            x = x.clone()
            stack.enter_context(spmd_types.checker.typecheck())
            x = spmd.assert_type(x, {**{mesh.get_group(n): V for n in names}, mesh.get_group("tp"): I})
        out = model(x)
        if checked:
            assert spmd.get_axis_local_type(out, mesh.get_group("tp")) is I
        loss = out.square().mean()
        for name in names if checked else ():
            loss = spmd.reinterpret(loss, mesh.get_group(name), src=V, dst=P)
        loss.backward()
    optimizer.step()
    return loss.detach()


def compare(
    mesh: DeviceMesh,
    dims: DataParallelMeshDims,
    compute: DeviceMesh | None = None,
    shard: Callable[..., Any] = fully_shard,
    checked: bool = False,
    **options: Any,
) -> nn.Module:
    """Trains a model with annotations, and a plain one on the whole batch, and compares every value."""
    has_scalars = shard is fully_shard
    reference, model = plain(has_scalars), annotate(plain(has_scalars), mesh, compute)
    for block in model:
        shard(block, mesh=mesh, dp_mesh_dims=dims, **options)
    shard(model, mesh=mesh, dp_mesh_dims=dims, **options)
    one, other = (torch.optim.AdamW(each.parameters(), lr=0.05) for each in (reference, model))
    for step in range(STEPS):
        train(reference, one, mesh, step, whole=True)
        train(model, other, mesh, step, checked)
        for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
            kind = TYPES[name.split(".")[-1]]
            own(parameter.grad, expected.grad, kind, mesh)  # type: ignore[arg-type]
            own(parameter, expected, kind, mesh)
    return model


SHARD = DataParallelMeshDims(shard="dp")


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def fsdp_and_a_model_axis() -> None:
    compare(mesh_of(2, 2), SHARD)


def one_data_parallel_rank() -> None:
    compare(mesh_of(1, 4), SHARD)


def one_rank_of_the_model() -> None:
    compare(mesh_of(4, 1), SHARD)


def the_axis_of_the_model_on_the_left() -> None:
    compare(mesh_of(2, 2, names=("tp", "dp")), SHARD)


def under_the_type_checker() -> None:
    compare(mesh_of(2, 2), SHARD, checked=True)


def casts_under_the_type_checker() -> None:
    compare(mesh_of(2, 2), SHARD, checked=True, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    mesh = mesh_of(2, 2)
    model = annotate(plain(), mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64)
    fully_shard(model, mesh=mesh, dp_mesh_dims=SHARD, mp_policy=policy)
    loss = train(model, torch.optim.SGD(model.parameters(), 0.1), mesh, 0, checked=True)
    assert loss.dtype == torch.float64


def hsdp() -> None:
    compare(mesh_of(2, 1, 2, names=("replicas", "dp", "tp")), DataParallelMeshDims(shard="dp", replicate="replicas"))


def replicas_alone() -> None:
    compare(mesh_of(2, 2), DataParallelMeshDims(replicate="dp"))


def computed_on_finer_axes() -> None:
    """Modules compute on axes that are joined where parameters rest, as torchtitan has it."""
    compute = mesh_of(2, 1, 2, names=("batch", "sequence", "tp"))
    compare(mesh_of(2, 2), SHARD, compute)


def annotated_in_part() -> None:
    """What is left out is taken from the mesh that is current."""
    mesh = mesh_of(2, 2)
    model = annotate(plain(), mesh, data=False)
    with pytest.raises(ValueError, match=r"^scale: expected annotations on the axes of .*set_current_mesh"):
        fully_shard(model[0], mesh=mesh, dp_mesh_dims=SHARD)
    assert type(model[0].scale) is nn.Parameter
    with spmd.set_current_mesh(mesh):
        fully_shard(model, mesh=mesh, dp_mesh_dims=SHARD)
    reference = plain()
    for each in (reference, model):
        train(each, torch.optim.SGD(each.parameters(), 0.1), mesh, 0, whole=each is reference)
    for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
        own(parameter, expected, TYPES[name.split(".")[-1]], mesh)


def what_modules_see() -> None:
    """In a forward parameters are plain, with annotation and attributes; sharded ones have no annotation."""
    mesh = mesh_of(2, 2)
    model, seen = annotate(plain(), mesh)[0], {}
    before = {name: dict(spmd.get_local_type(p)) for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh, dp_mesh_dims=SHARD)

    def note(module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters():
            assert type(parameter) is nn.Parameter, name
            assert parameter.note == name, "an attribute of the user's"
            seen[name] = dict(spmd.get_local_type(parameter)), spmd.get_partition_spec(parameter)

    model.register_forward_pre_hook(note)
    model(batches(mesh, 0)[1])
    assert {name: types for name, (types, _) in seen.items()} == before
    assert spmd.get_partition_spec(model.up) is None
    assert not spmd.get_local_type(model.up)
    assert model.up.note == "up"
    assert seen["up"][1] is not None
    copied, other = copy.deepcopy(model, {id(model.tp): model.tp}), annotate(plain(), mesh)[0]
    for each in (copied, fully_shard(other, mesh=mesh, dp_mesh_dims=SHARD)):
        each.load_state_dict(model.state_dict())
        assert_same(each(batches(mesh, 1)[1]), model(batches(mesh, 1)[1]), 0, 0, "copied or loaded")
    with fsdp2.full_params(model):
        assert model.up.shape == (6, WIDTH), "the part with which the rank computes"
        assert spmd.get_local_type(model.up) == before["up"]


def clipped() -> None:
    mesh, norms = mesh_of(2, 2), []
    for model in (plain(), fully_shard(annotate(plain(), mesh), mesh=mesh, dp_mesh_dims=SHARD)):
        is_plain = not norms
        model(batches(mesh, 0)[0 if is_plain else 1]).square().mean().backward()
        clip = nn.utils.clip_grad_norm_ if is_plain else fsdp2.clip_grad_norm_
        norms.append(clip(model.parameters(), 0.1))
    assert_same(norms[1], norms[0], **ROUNDING, name="norm")


REFUSED: dict[str, tuple[Callable[[DeviceMesh], dict[Any, Any]], str]] = {
    "parts without a dim": (
        lambda mesh: {mesh.get_group("dp"): R, mesh.get_group("tp"): V},
        r"expected R, I or S\(",
    ),
    "terms of a sum": (lambda mesh: {mesh.get_group("dp"): R, mesh.get_group("tp"): P}, r"expected R, I or S\("),
    "I where it is cut": (lambda mesh: {mesh.get_group("dp"): I, mesh.get_group("tp"): R}, r"expected R on mesh_"),
    "cut already": (lambda mesh: {mesh.get_group("dp"): S(0), mesh.get_group("tp"): R}, r"expected R on mesh_"),
    "all axes as one": (lambda mesh: {dist.group.WORLD: R}, r"expected a type on each axis of the model"),
}


def refused() -> None:
    mesh = mesh_of(2, 2)
    for what, (types, message) in REFUSED.items():
        model = nn.Linear(4, 4, bias=False)
        spmd.assert_type(model.weight, types(mesh))
        with pytest.raises(ValueError, match=rf"^weight: {message}"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=SHARD)
        assert type(model.weight) is nn.Parameter, what
    # Without the mesh that has the axis of the model.
    model = nn.Linear(4, 4, bias=False)
    spmd.assert_type(model.weight, {mesh.get_group("dp"): R, mesh.get_group("tp"): S(0)})
    for options in ({}, {"mesh": mesh["dp"]}):
        with pytest.raises(ValueError, match=r"^weight: expected (annotations on the axes|R on mesh_)"):
            fully_shard(model, **options)
    # Two axes cut a dim, in another order than that of the mesh.
    mesh = mesh_of(1, 2, 2, names=("dp", "ep", "tp"))
    model = nn.Linear(4, 4, bias=False)
    groups = mesh.get_group("tp"), mesh.get_group("ep")
    spmd.assert_type(model.weight, {mesh.get_group("dp"): R}, partition_spec=spmd.PartitionSpec(groups, None))
    with pytest.raises(ValueError, match=r"^weight: expected the axes that cut dim 0 in the order of the mesh"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=SHARD)


CHECKS = [
    *(fsdp_and_a_model_axis, one_data_parallel_rank, one_rank_of_the_model, the_axis_of_the_model_on_the_left),
    *(under_the_type_checker, casts_under_the_type_checker, hsdp, replicas_alone, computed_on_finer_axes),
    *(annotated_in_part, what_modules_see, clipped, refused),
]


def test_annotated_parameters() -> None:
    run_checks(4, [(check.__name__, check) for check in CHECKS], timeout=120)


@pytest.mark.skipif(not TORCH_TAKES_THEM, reason="torch takes annotated parameters since 2.15")
def test_as_torch_takes_them() -> None:
    """torch's FSDP2 gets the numbers of the plain model, too: what is compared above is what torch means."""
    dims = torch_fsdp.DataParallelMeshDims

    def sharded(checked: bool, mesh: DeviceMesh, replicate: str | None = None) -> None:
        compare(mesh, dims(shard="dp", replicate=replicate), shard=torch_fsdp.fully_shard, checked=checked)

    def one_mesh() -> None:  # another one that is equal is taken for this one, and refused
        mesh = mesh_of(2, 2)
        for checked in (False, True):
            sharded(checked, mesh)

    def replicas() -> None:
        sharded(False, mesh_of(2, 1, 2, names=("replicas", "dp", "tp")), "replicas")

    run_checks(4, [(check.__name__, check) for check in (one_mesh, replicas)], timeout=120)
