"""Tests what `fully_shard` and the methods that it adds refuse, before anything has changed, and what they accept."""

import copy
import dataclasses
import functools
import gc
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from fsdp2.compression import Compression
from fsdp2.engine.codec import Cast
from helpers import fake_world

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Picky(Cast):
    """Encodes no gradients of this dtype."""

    dtype: torch.dtype = torch.bfloat16

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        raise NotImplementedError(f"gradients of {summed} are not encoded by Picky")


class Block(nn.Module):
    """A model with a nested parameter, `inner.weight`, that a case may replace by something odd; and a buffer."""

    def __init__(self, weight: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if weight is not None:
            del self.inner.weight
            self.inner.weight = weight
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Unshard(Block):
    def unshard(self) -> None:
        """A user's own method."""


class UnshardModule(Block):
    """A submodule of that name: nn.Module finds those only after all class attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.reshard = nn.Linear(4, 4)


class Scale(nn.Parameter):
    """A user's subclass of Parameter."""

    scale = 1.0


def aliased() -> nn.Parameter:
    weight: Any = Scale(torch.ones(4, 4))
    weight.beside, weight.alias = torch.ones(4), weight.data[2:]
    return weight  # type: ignore[no-any-return]


class HalfExtended(TwoTensor):
    """Says what to gather, but not what to make of it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None


class Extended(HalfExtended):
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return outputs[0], outputs


class OddlyExtended(Extended):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
        return (self.a, self.b), None


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, dtype=dtype))


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4, sparse=True, **options))


def sparse_embedding_tied_to_a_head() -> nn.Module:
    """The sparse module is not the first that holds the parameter."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Embedding(8, 4, sparse=True))
    model[1].weight = model[0].weight
    return model


def with_gradient() -> nn.Module:
    model = Block()
    model.inner.weight.grad = torch.ones(4, 4)
    return model


def tied_across_groups(**options: Any) -> tuple[nn.Module, nn.Module]:
    """Returns two modules with a weight in common, of which the first is sharded."""
    first, second = Block(), Block()
    second.inner.weight = first.inner.weight
    fully_shard(first, **options)
    KEPT[:] = [first]
    return first, second


# The owners of tied parameters, which would be gone otherwise.
KEPT: list[nn.Module] = []


def tied_to_one_in_bfloat16() -> nn.Module:
    return tied_across_groups(mp_policy=MixedPrecisionPolicy(torch.bfloat16))[1]


def tied_and_written_to() -> nn.Module:
    second = tied_across_groups()[1]
    with torch.no_grad():
        second.inner.weight.mul_(2)
    return second


def tied_and_moved() -> nn.Module:
    second = tied_across_groups()[1]
    second.inner.weight.data = second.inner.weight.data.clone()
    return second


def tied_and_frozen() -> nn.Module:
    second = tied_across_groups()[1]
    second.inner.weight.requires_grad_(False)
    return second


def tied_with_gradient() -> nn.Module:
    second = tied_across_groups()[1]
    second.inner.weight.grad = torch.ones(4, 4)
    return second


def tied_to_one_that_is_gone() -> nn.Module:
    second = tied_across_groups()[1]
    KEPT.clear()
    gc.collect()
    return second


def sparse_embedding_tied_to_a_sharded_head() -> nn.Module:
    model = sparse_embedding_tied_to_a_head()
    fully_shard(model[0])
    KEPT[:] = [model]
    return model[1]


def mesh_3d() -> Any:
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))


@dataclasses.dataclass
class Case:
    """One refused call. `build` makes the module (or list); `options` are callables, as some need the process group."""

    error: type[Exception]
    match: str
    build: Callable[[], Any] = Block
    options: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)


def option(name: str, value: Callable[[], Any], error: type[Exception], match: str | None = None) -> Case:
    return Case(error, match or name, options={name: value})


def weight(value: Callable[[], Any], error: type[Exception], match: str) -> Case:
    return Case(error, rf"^inner\.weight.*{match}", lambda: Block(value()))


# Name of what is over some of the memory of inner.weight -> how a module gets it.
OVER_A_WEIGHT: dict[str, Callable[[Block], Any]] = {
    "rows, a buffer": lambda block: block.register_buffer("rows", block.inner.weight.detach()[2:]),
    "column, a buffer": lambda block: block.register_buffer("column", block.inner.weight.detach()[:, 1]),
    "inner.column, a buffer": lambda block: block.inner.register_buffer("column", block.inner.weight.data[1:, 3]),
    "data, an attribute": lambda block: setattr(block, "data", block.inner.weight.data),
    "inner.seen, an attribute": lambda block: setattr(block.inner, "seen", block.inner.weight.detach()[1]),
    "pair[1], an attribute": lambda block: setattr(block, "pair", (1.0, block.inner.weight.t())),
    "kept['last'], an attribute": lambda block: setattr(block, "kept", {"last": block.inner.weight.data[3:]}),
    "bytes, an attribute": lambda block: setattr(block, "bytes", block.inner.weight.data.view(torch.uint8)[:, 9]),
    "head and": lambda block: setattr(block, "head", nn.Parameter(block.inner.weight.data[2:])),
    "blend and": lambda block: setattr(block, "blend", nn.Parameter(block.inner.weight.data[1:3, 1:3])),
}


def over_a_weight(name: str, in_two_calls: bool = False) -> Case:
    def build() -> Block:
        block = Block()
        OVER_A_WEIGHT[name](block)
        if in_two_calls:
            fully_shard(block.inner)
        return block

    return Case(ValueError, rf"^{re.escape(name)}.* inner\.weight share memory.*[Cc]opy", build)


CASES = {
    # the module
    "no module": Case(TypeError, "module: expected an nn.Module.*NoneType", lambda: None),
    "an empty list": Case(ValueError, "module: .*empty", list),
    "a list with something else": Case(TypeError, "module: expected .*str", lambda: [Block(), "block"]),
    "one twice in a list": Case(ValueError, "module: .*twice", lambda: [Block()] * 2),
    "a module twice": Case(ValueError, "Block.*already", lambda: sharded(Block())),
    "a sharded one in a list": Case(ValueError, "Block.*already", lambda: [Block(), sharded(Block())]),
    "ModuleList": Case(ValueError, "ModuleList has no forward", lambda: nn.ModuleList([Block()])),
    "a container in a list": Case(ValueError, "NoForward has no forward", lambda: [Block(), NoForward()]),
    "own unshard": Case(TypeError, "Unshard has unshard", Unshard),
    "submodule reshard": Case(TypeError, "UnshardModule.*reshard", UnshardModule),
    # parameters
    "complex": weight(lambda: parameter(4, 4, dtype=torch.complex64), NotImplementedError, "complex"),
    "sparse layout": weight(lambda: nn.Parameter(torch.eye(4).to_sparse()), NotImplementedError, "sparse"),
    "DTensor on a mesh of its own": weight(
        lambda: nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Shard(0)])),
        ValueError,
        "expected Replicate on the data-parallel axes",
    ),
    "an attribute over a parameter's memory": weight(
        aliased, ValueError, r"\.alias, an attribute of a Scale, .* Copy it"
    ),
    **{f"memory: {name}": over_a_weight(name) for name in OVER_A_WEIGHT},
    **{f"memory, two calls: {name}": over_a_weight(name, True) for name in OVER_A_WEIGHT if "inner" not in name},
    "half an extension": weight(
        lambda: nn.Parameter(HalfExtended(torch.ones(4, 4), torch.ones(4, 4))),
        NotImplementedError,
        "HalfExtended.*fsdp_post_all_gather",
    ),
    "an extension of other arguments": weight(
        lambda: nn.Parameter(OddlyExtended(torch.ones(4, 4), torch.ones(4, 4))), ValueError, r"got \(mesh.*, size.*\)"
    ),
    "an extension that keeps a part": Case(
        NotImplementedError,
        "inner.weight has fsdp_pre_all_gather.*reshard_after_forward",
        lambda: Block(nn.Parameter(Extended(torch.ones(4, 4), torch.ones(4, 4)))),
        {"reshard_after_forward": lambda: 2},
    ),
    "a frozen class that a policy would cast": Case(
        ValueError,
        r"inner\.weight: expected a frozen Scale .* param_dtype_override_fn",
        lambda: Block(Scale(torch.ones(4, 4), requires_grad=False)),
        {"mp_policy": lambda: MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ),
    "uninitialised": weight(nn.UninitializedParameter, ValueError, "uninitialised"),
    "lazy module": Case(ValueError, r"^0\.weight.*uninitialised", lambda: nn.Sequential(nn.LazyLinear(3))),
    "in a list": Case(ValueError, r"^\[1\]\.inner\.weight", lambda: [Block(), Block(nn.UninitializedParameter())]),
    "with a gradient": Case(ValueError, r"inner\.weight has a gradient.*zero_grad", with_gradient),
    "tied, other dtypes": Case(
        ValueError,
        r"inner\.weight is the same .*Block's inner\.weight.*mp_policy \(param_dtype\): torch.bfloat16, here "
        r"torch.float32.*fully_shard\(\[a, b\]\)",
        tied_to_one_in_bfloat16,
    ),
    "tied, another dim": Case(
        ValueError,
        r"inner\.weight is the same .*shard_placement_fn: .*Shard\(dim=0\).*Shard\(dim=1\)",
        lambda: tied_across_groups()[1],
        {"shard_placement_fn": lambda: lambda p: Shard(p.ndim - 1)},
    ),
    "tied, another mesh": Case(
        ValueError,
        r"inner\.weight is the same .*another mesh",
        lambda: tied_across_groups()[1],
        {"mesh": lambda: two_by_two()},
    ),
    "tied, written to since": Case(
        ValueError, r"inner\.weight is the same .*written to, moved or", tied_and_written_to
    ),
    "tied, moved since": Case(ValueError, r"inner\.weight is the same .*written to, moved or", tied_and_moved),
    "tied, frozen since": Case(ValueError, r"inner\.weight is the same .*moved or frozen", tied_and_frozen),
    "tied, with a gradient": Case(ValueError, r"inner\.weight has a gradient", tied_with_gradient),
    "tied to one that is gone": Case(ValueError, r"inner\.weight is the same .*in no model", tied_to_one_that_is_gone),
    "tied to a sharded head, sparse": Case(
        NotImplementedError, "weight: sparse gradients", sparse_embedding_tied_to_a_sharded_head
    ),
    "sparse embedding": Case(NotImplementedError, r"^0\.weight.*sparse", embedding),
    "sparse embedding bag": Case(
        NotImplementedError, r"^0\.weight.*sparse", lambda: nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True))
    ),
    "sparse embedding, tied": Case(NotImplementedError, "weight.*sparse", sparse_embedding_tied_to_a_head),
    "norms bounded": Case(
        NotImplementedError, r"^0\.weight.*max_norm", lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))
    ),
    "embedding by frequency": Case(
        NotImplementedError,
        r"^0\.weight: scale_grad_by_freq",
        lambda: nn.Sequential(nn.Embedding(8, 4, scale_grad_by_freq=True)),
    ),
    # mesh
    "mesh: a group": option("mesh", lambda: dist.group.WORLD, TypeError, "mesh: expected a DeviceMesh.*ProcessGroup"),
    "mesh: 3-D": option("mesh", mesh_3d, ValueError, r"mesh: expected one axis .* or two .*, got 3 .*\(2, 2, 1\)"),
    # reshard_after_forward
    "reshard: 0": option("reshard_after_forward", lambda: 0, ValueError, "reshard_after_forward=0.*divisor of 4"),
    "reshard: 3": option("reshard_after_forward", lambda: 3, ValueError, "reshard_after_forward=3.*divisor of 4"),
    "reshard: text": option("reshard_after_forward", lambda: "yes", TypeError, "reshard_after_forward.*'yes'"),
    # conditional
    "conditional: text": option("conditional", lambda: "yes", TypeError, "conditional: expected a bool, got 'yes'"),
    "conditional: keeps a part": Case(
        NotImplementedError,
        "conditional=True with an int for reshard_after_forward, of this module, .* Pass a bool",
        Block,
        {"conditional": lambda: True, "reshard_after_forward": lambda: 2},
    ),
    "conditional: another mesh for a parameter": Case(
        NotImplementedError,
        "inner.weight is conditional, .*the mesh of the module around it",
        Block,
        {
            "conditional": lambda: True,
            "shard_placement_fn": lambda: lambda _: ShardPlacementResult(None, two_by_two()["shard"]),
        },
    ),
    "conditional: inside, on another mesh": Case(
        NotImplementedError,
        "^0 is conditional, .*the mesh of the module around it",
        lambda: nn.Sequential(fully_shard(Block(), conditional=True)),
        {"mesh": lambda: two_by_two()},
    ),
    "conditional: around what keeps a part": Case(
        NotImplementedError,
        "conditional=True with an int for reshard_after_forward, of 0, .* Pass a bool",
        lambda: nn.Sequential(fully_shard(Block(), reshard_after_forward=2)),
        {"conditional": lambda: True},
    ),
    "a module inside one that is sharded": Case(
        ValueError,
        r"^weight: expected Replicate .* If fully_shard has sharded it already, .* apply it to inner modules first",
        lambda: fully_shard(Block()).inner,
    ),
    # policies
    "mp_policy: a class": option("mp_policy", lambda: MixedPrecisionPolicy, TypeError),
    "mp_policy: None": option("mp_policy", lambda: None, TypeError),
    "compression: nothing to shard": Case(
        ValueError,
        "inner.weight: expected no compression of reduce_scatter on a mesh that only replicates, got torch.bfloat16",
        Block,
        {
            "mesh": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("replicas",)),
            "dp_mesh_dims": lambda: DataParallelMeshDims(replicate="replicas"),
            "mp_policy": lambda: MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16)),
        },
    ),
    "compression: gradients that it can't encode": Case(
        NotImplementedError,
        "inner.weight: gradients of torch.float32 are not encoded by Picky",
        Block,
        {"mp_policy": lambda: MixedPrecisionPolicy(compression=Compression(reduce_scatter=Picky()))},
    ),
    "compression: a parameter that is not sharded": Case(
        ValueError,
        "inner.bias: expected no compression of reduce_scatter on a mesh that only replicates, got torch.bfloat16",
        Block,
        {
            "mesh": lambda: init_device_mesh("cpu", (4,)),
            "shard_placement_fn": lambda: lambda param: replicas_of(param) if param.dim() == 1 else None,
            "mp_policy": lambda: MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16)),
        },
    ),
    "offload_policy: the class": option("offload_policy", lambda: CPUOffloadPolicy, TypeError),
    "offload_policy: a flag": option("offload_policy", lambda: True, TypeError, "offload_policy.*True"),
    "offload_policy: names": option("offload_policy", lambda: {"weight": OffloadPolicy()}, TypeError),
    "offload_policy: a function": option("offload_policy", lambda: lambda name, parameter: None, TypeError),
    # declared, not there yet
    "ignored_params: a parameter": option("ignored_params", lambda: parameter(4), TypeError),
    "ignored_params: names": option("ignored_params", lambda: {"weight"}, TypeError),
    "dp_mesh_dims: a tuple": option("dp_mesh_dims", lambda: ("replicate", "shard"), TypeError),
    "dp_mesh_dims: an axis for both": Case(
        ValueError,
        r"mesh: expected each axis once, got \['replicate', 'shard'\] to shard and \['replicate'\] to replicate",
        Block,
        {
            "mesh": lambda: two_by_two(),
            "dp_mesh_dims": lambda: DataParallelMeshDims(shard=("shard", "replicate"), replicate="replicate"),
        },
    ),
    "dp_mesh_dims: an axis twice": Case(
        ValueError,
        r"mesh: expected each axis once, got \['shard', 'shard'\] to shard",
        Block,
        {"mesh": lambda: two_by_two(), "dp_mesh_dims": lambda: DataParallelMeshDims(shard=("shard", "shard"))},
    ),
    "shard_placement_fn: an axis for both": Case(
        ValueError,
        r"inner.weight: mesh: expected each axis once, got \['shard'\] to shard and \['shard'\] to replicate",
        Block,
        {"shard_placement_fn": lambda: lambda _: ShardPlacementResult(None, on_axes(two_by_two(), 1, -1))},
    ),
    "dp_mesh_dims: no mesh": option("dp_mesh_dims", lambda: DataParallelMeshDims(shard="dp"), ValueError, "mesh"),
}


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def on_axes(mesh: DeviceMesh, shard: int | None, replicate: int | None) -> Any:
    return SimpleNamespace(mesh=mesh, shard_mesh_dim=shard, replicate_mesh_dim=replicate)


def replicas_of(param: nn.Parameter) -> ShardPlacementResult:
    mesh = init_device_mesh("cpu", (4,))
    return ShardPlacementResult(None, on_axes(mesh, None, 0))


def snapshot(root: Any) -> list[Any]:
    """Everything of the modules that a call might change, compared by identity."""
    modules = root if isinstance(root, list) else [root]
    found: list[Any] = []
    for module in [m for outer in modules if isinstance(outer, nn.Module) for m in outer.modules()]:
        found += [type(module), sorted(vars(module))]
        for kind in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            found.append({name: id(value) for name, value in getattr(module, kind).items()})
        for p in module._parameters.values():
            if p is not None and not isinstance(p, nn.UninitializedParameter):
                found.append((p.requires_grad, tuple(p.shape), p.dtype, sorted(vars(p))))
                found.append((p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refused_and_nothing_has_changed(case: Case) -> None:
    """A call that fails half-way leaves a model that trains wrongly, or that can't be sharded a second time."""
    with fake_world(4):
        module = case.build()
        options = {name: value() for name, value in case.options.items()}
        before = snapshot(module)
        with pytest.raises(case.error, match=case.match):
            fully_shard(module, **options)
        assert snapshot(module) == before


def test_what_shares_a_storage_and_no_element_is_accepted() -> None:
    """Neighbours in one flat tensor, columns of one matrix, and values that are computed anew before each use."""
    with fake_world(2):
        flat, matrix, model = torch.randn(24), torch.randn(4, 6), Block()
        model.first, model.second = nn.Parameter(flat[:8].view(2, 4)), nn.Parameter(flat[8:].view(4, 4))
        model.left, model.right = nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 4:])
        table = torch.randn(4, 2)
        model.even = nn.Parameter(table[:, 0])
        model.inner.register_buffer("odd", table[:, 1])
        model.copied = [model.inner.weight.detach().clone()]
        model.listed = [model.inner.weight, *model.parameters()]
        model.normed = nn.utils.spectral_norm(nn.Linear(4, 4))
        model.lstm = nn.LSTM(4, 4)
        fully_shard(model.lstm)
        fully_shard(model)
        assert isinstance(model, FSDPModule)


def test_replicas_have_no_reduce_scatter_to_compress() -> None:
    """Nothing would travel in it. On one rank, which shards with nobody, the same program must run; so must one that
    shards all parameters over other meshes than the call's.
    """
    policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16))
    with fake_world(4):
        model = Block()
        before = snapshot(model)
        with pytest.raises(ValueError, match="compression of reduce_scatter on a mesh that only"):
            replicate(model, mp_policy=policy)
        assert snapshot(model) == before
        fully_shard(model, mesh=init_device_mesh("cpu", (4, 1)), mp_policy=policy)
        replicas, shards = (init_device_mesh("cpu", (4,), mesh_dim_names=(name,)) for name in ("replicas", "shards"))
        fully_shard(
            Block(),
            mesh=replicas,
            dp_mesh_dims=DataParallelMeshDims(replicate="replicas"),
            shard_placement_fn=lambda param: ShardPlacementResult(None, shards),
            mp_policy=policy,
        )
    with fake_world(1):
        fully_shard(Block(), mp_policy=policy)


def test_a_removed_parameter_gets_no_gradient() -> None:
    """Whoever still holds it would compute with what nobody trains. The hooks of the parameter are not its own."""
    seen = []
    with fake_world(2):
        model = Block()
        before, view = model.inner.weight, model.inner.weight.t()
        before.register_hook(seen.append)
        fully_shard(model)
        x = torch.ones(2, 4)
        for stray in (before, view):
            with pytest.raises(RuntimeError, match=r"what Block's inner\.weight was before fully_shard"):
                (model(x) @ stray).sum().backward()
        assert not seen
        model(x).sum().backward()
        assert len(seen) == 1


def test_shallow_copies_are_refused() -> None:
    with fake_world(2):
        model = sharded(Block())
        with pytest.raises(NotImplementedError, match=r"copy\.copy\(Block\): .* Use copy\.deepcopy"):
            copy.copy(model)
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    "write_down",
    [
        torch.jit.trace,
        functools.partial(torch.export.export, strict=False),
        functools.partial(torch.export.export, strict=True),
    ],
    ids=["trace", "export", "strict export"],
)
def test_graphs_of_a_sharded_module_are_refused(write_down: Callable[..., Any]) -> None:
    """Their nodes would have the shards' sizes, or none of the gathers."""
    with fake_world(4):
        model = fully_shard(Block())
        with pytest.raises(RuntimeError, match=r"sharded model, load its full state dict .* into a\s+plain one"):
            write_down(model, (torch.ones(2, 4),))
        model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is not None for param in model.parameters()), "it is usable"


def test_a_refused_model_can_be_sharded_afterwards() -> None:
    with fake_world(4):
        model = Block(parameter(4, 4, dtype=torch.complex64))
        with pytest.raises(NotImplementedError, match=r"inner\.weight"):
            fully_shard(model)
        model.inner.weight = parameter(4, 4)
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        assert isinstance(model.inner.weight.grad, DTensor)


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with fake_world(4, rank=3):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", [0, 1])
        model = Block()
        before = snapshot(model)
        own = ShardPlacementResult(None, on_axes(mesh, 0, None))
        for apply in (
            lambda: fully_shard(model, mesh=mesh),
            lambda: replicate(model, mesh=mesh),
            lambda: fully_shard(model, shard_placement_fn=lambda param: own if param.dim() == 2 else None),
        ):
            with pytest.raises(ValueError, match="mesh: rank 3 is not part of"):
                apply()
            assert snapshot(model) == before


def test_positional_options_are_refused() -> None:
    with fake_world(2), pytest.raises(TypeError, match="positional"):
        fully_shard(Block(), init_device_mesh("cpu", (2,)))  # type: ignore[misc]


# ---- the methods


def test_methods_need_a_sharded_module() -> None:
    """A class of the user's that inherits from FSDPModule is not sharded by that."""

    class Mine(Block, FSDPModule):
        pass

    for call in (Mine.unshard, Mine.reshard):
        with pytest.raises(RuntimeError, match="Mine: expected a module that fully_shard was applied to"):
            call(Mine())


# ---- what is accepted


class GenericBlock(Block, Generic[T]):
    pass


class SlotsBlock(Block):
    __slots__ = ("cache",)

    def __init__(self) -> None:
        super().__init__()
        self.cache = 3


class Meta(type):
    """A metaclass that keeps a registry."""

    registry: list[str] = []  # noqa: RUF012

    def __init__(cls, name: str, bases: tuple, body: dict) -> None:
        super().__init__(name, bases, body)
        Meta.registry.append(name)


class MetaBlock(Block, metaclass=Meta):
    pass


class OwnSetattr(Block):
    """Refuses unknown attributes, as some configuration-checked modules do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("training", "inner", "scale") and not name.startswith("_"):
            raise AttributeError(name)
        super().__setattr__(name, value)


ACCEPTED = [
    Block,
    GenericBlock[int],
    SlotsBlock,
    MetaBlock,
    OwnSetattr,
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    lambda: nn.LSTM(4, 4),
    lambda: nn.MultiheadAttention(4, 2),
]


@pytest.mark.parametrize("build", ACCEPTED, ids=lambda build: getattr(build, "__name__", str(build)))
def test_class_swap(build: Callable[[], nn.Module]) -> None:
    """Whatever its class: afterwards it is of that class and of FSDPModule, with the same FQNs."""
    with fake_world(2):
        model = build()
        cls, names = type(model), list(model.state_dict())
        assert fully_shard(model) is model
        assert isinstance(model, cls)
        assert isinstance(model, FSDPModule)
        assert type(model).__name__ == f"FSDP{cls.__name__}"
        assert type(model).__module__ == cls.__module__
        assert list(model.state_dict()) == names
        assert all(isinstance(p, DTensor) for p in model.parameters())
        inputs = (torch.ones(2, 2, 4),) * (3 if cls is nn.MultiheadAttention else 1)
        output = model(*inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_one_class_for_all_modules_of_a_class_and_their_attributes_are_kept() -> None:
    with fake_world(2):
        first, second = SlotsBlock(), SlotsBlock()
        first.note = "kept"
        assert type(fully_shard(first)) is type(fully_shard(second)) is not SlotsBlock
        assert (first.cache, first.note) == (3, "kept")


def test_a_parent_and_its_child_in_one_list() -> None:
    """As with torch: the child's parameters belong to the parent's group."""
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([model, model[0]])
        model(torch.ones(2, 4)).sum().backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def test_a_module_without_parameters() -> None:
    with fake_world(2):
        model = sharded(nn.Sequential(nn.ReLU(), nn.Flatten()))
        x = torch.ones(2, 4, requires_grad=True)
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(2, 4))


def test_a_slice_of_a_sharded_sequence_is_not_sharded() -> None:
    """nn.Sequential builds one of its own class; the modules in it are the same, sharded or not."""
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        part = model[:2]
        assert type(part) is nn.Sequential
        assert isinstance(part[0], FSDPModule)
        assert part(torch.ones(2, 4)).shape == (2, 4)


class SparseLookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.table, sparse=True)


def test_a_sparse_gradient_of_a_parameter_that_no_embedding_has() -> None:
    with fake_world(2):
        model = fully_shard(SparseLookup())
        with pytest.raises(NotImplementedError, match=r"^table: sparse gradients"):
            model(torch.tensor([1, 2])).sum().backward()


def test_shared_memory_of_processes_is_refused() -> None:
    """It would end the process."""
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        with pytest.raises(NotImplementedError, match=r"share_memory: sharded parameters"):
            model.share_memory()
