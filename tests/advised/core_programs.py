"""Follows the advice of errors of `fully_shard` and of the engine."""

import contextlib
import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    follows,
    loss_of,
    own,
    pair,
    quoted,
    refused,
    same,
    same_gradients,
    same_parameters,
    sgd,
    shard,
    train,
)
from fsdp2 import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    full_params,
    fully_shard,
    sync_module_states,
)
from fsdp2.engine import Observer, root_of
from own_collectives import Gather

FULL = StateDictOptions(full_state_dict=True)


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp", "pp")[: len(sizes)])


# ---- arguments


@follows("Write `def {}({})`")
def an_observer_whose_method_takes_less_than_its_event_gives() -> None:
    """It is refused when it joins. It would have raised, in place of a loss's own error, when a pass fails."""

    class Short(Observer):
        def pass_failed(self, root: Any) -> None: ...  # type: ignore[override]

    model, plain = pair()
    (header,) = [each for each in quoted(refused(lambda: root_of(model).add(Short()), TypeError)) if "def" in each]
    names: dict[str, Any] = {"Observer": Observer, "failures": []}
    exec(f"class Long(Observer):\n  {header}: failures.append(in_backward)", names)
    root_of(model).add(names["Long"]())
    with contextlib.suppress(TypeError):
        model("no tensor")
    assert names["failures"] == [False]
    train(model, plain)


@follows("pass the mesh, too")
def names_of_axes_without_a_mesh() -> None:
    dims = DataParallelMeshDims(shard="dp")
    refused(lambda: fully_shard(build(), dp_mesh_dims=dims))
    model = build()
    fully_shard(model, mesh=mesh(2), dp_mesh_dims=dims)
    train(model, build())


@follows("Pass the mesh that it is part of")
def mesh_of_other_ranks() -> None:
    """Each rank is given a mesh of the other rank only, then the one of its own."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [each]) for each in range(2)]
    refused(lambda: fully_shard(build(), mesh=meshes[1 - rank]))
    model = fully_shard(build(), mesh=meshes[rank])
    plain = build()
    for each in (model, plain):
        backward(each, x=batch())
    same_gradients(model, plain)


@follows("Leave it out of one")
def axis_named_twice() -> None:
    dims = {"shard": "dp", "replicate": "dp"}
    refused(lambda: fully_shard(build(), mesh=mesh(2), dp_mesh_dims=DataParallelMeshDims(**dims)))
    for name in dims:
        model = fully_shard(build(), mesh=mesh(2), dp_mesh_dims=DataParallelMeshDims(**{name: "dp"}))
        train(model, build())


@follows("Pass the data-parallel axes only", "or name them by dp_mesh_dims")
def mesh_of_three_axes() -> None:
    all_axes = mesh(2, 1, 1)
    refused(lambda: fully_shard(build(), mesh=all_axes))
    train(fully_shard(build(), mesh=all_axes["dp"]), build())
    # Names of axes are for parameters that are DTensors on the others.
    model = build()
    for module in model.modules():
        for name, param in [*module._parameters.items()]:
            placements = [torch.distributed.tensor.Replicate()] * 3
            setattr(module, name, nn.Parameter(distribute_tensor(param.data, all_axes, placements)))
    refused(lambda: fully_shard(model, mesh=all_axes))
    fully_shard(model, mesh=all_axes, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    same(model.stem.weight.full_tensor(), build().stem.weight, "named axes")


@follows("or pass them as a list to share one group", "Apply fully_shard to {}")
def containers() -> None:
    def layers() -> Any:
        return nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    plain = build(Around)
    for way in ("each", "list"):
        model = copy.deepcopy(plain)
        refused(lambda model=model: fully_shard(model.layers))
        for module in [*model.layers] if way == "each" else [[*model.layers]]:
            fully_shard(module)
        fully_shard(model)
        train(model, copy.deepcopy(plain))


@follows("the module that holds it, whose forward reads them")
def lists_of_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scales[0]).tanh() * self.scales[1]

    model = build(Scaled)
    refused(lambda: fully_shard(model.scales))
    train(fully_shard(model), build(Scaled))


@follows("Run the lazy module once before fully_shard", "Run the lazy module once before sync_module_states")
def lazy_modules() -> None:
    def lazy() -> Any:
        return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))

    model = build(lazy)
    refused(lambda: fully_shard(model))
    refused(lambda: sync_module_states(model))
    torch.manual_seed(1)
    model(batch())
    sync_module_states(model)
    torch.manual_seed(0)
    plain = lazy()
    torch.manual_seed(1)
    plain(batch())
    train(fully_shard(model), plain)


@follows("Store torch.view_as_real of it")
def complex_parameters() -> None:
    class Phases(nn.Module):
        def __init__(self, is_real: bool) -> None:
            super().__init__()
            value = torch.randn(5, dtype=torch.complex64)
            self.w, self.is_real = nn.Parameter(torch.view_as_real(value) if is_real else value), is_real

        def forward(self, x: Tensor) -> Tensor:
            w = torch.view_as_complex(self.w) if self.is_real else self.w
            return torch.view_as_real(x * w)

    refused(lambda: fully_shard(build(lambda: Phases(False))))
    model, plain = build(lambda: Phases(True)), build(lambda: Phases(False))
    fully_shard(model)
    for each, x in ((model, own(batch())), (plain, batch())):
        backward(each, x=x)
    same(model.w.grad.full_tensor(), torch.view_as_real(plain.w.grad), "gradient")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mid, self.b = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mid(self.a(x)).tanh())


@follows("Pass the same to both calls; or pass the modules that hold the parameter as one list, fully_shard([a, b])")
def tied_and_sharded_differently() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model = build(Tied)
    fully_shard(model.a, mp_policy=policy)
    refused(lambda: fully_shard(model.b))
    model = build(Tied)
    fully_shard(model.a, mp_policy=policy)
    fully_shard(model.b, mp_policy=policy)
    train(fully_shard(model), build(Tied))
    model = build(Tied)
    fully_shard([model.a, model.b])
    train(fully_shard(model), build(Tied))


@follows("Change a tied parameter before fully_shard, or after the last call of it")
def tied_and_changed_between() -> None:
    def change(module: Any, factor: float = 2.0) -> None:
        with torch.no_grad():
            module.b.weight.mul_(factor)

    model, plain = build(Tied), build(Tied)
    fully_shard(model.a)
    change(model)
    refused(lambda: fully_shard(model.b))
    change(plain)
    for is_before in (True, False):
        model = build(Tied)
        if is_before:
            change(model)
        fully_shard(model.a)
        fully_shard(model.b)
        if not is_before:
            change(model)
        train(fully_shard(model), copy.deepcopy(plain))


@follows("Leave the forward, or the block of full_params, first")
def tied_and_in_use() -> None:
    model = build(Tied)
    fully_shard(model.a)
    with full_params(model.a):
        refused(lambda: fully_shard(model.b))
    fully_shard(model.b)
    train(fully_shard(model), build(Tied))


@follows("{}, and which is in no model any more. Build the model again")
def tied_to_one_that_is_gone() -> None:
    model = build(Tied)
    fully_shard(model.a)
    model.a = nn.Linear(5, 5)
    gc.collect()
    refused(lambda: fully_shard(model.b))
    train(shard(build(Tied)), build(Tied))


@follows("Apply it to such a module, and call that one")
def tied_without_a_module_around() -> None:
    model = build(Tied)
    fully_shard(model.a)
    fully_shard(model.b)
    refused(lambda: model.b(torch.ones(2, 5)))
    train(fully_shard(model), build(Tied))


@follows("Call step() or zero_grad() before fully_shard")
def gradients_from_before() -> None:
    for way in ("step", "zero_grad"):
        model, plain = build(), build()
        for each in (model, plain):
            backward(each, x=batch())
        refused(lambda model=model: fully_shard(model))
        for each in (model, plain):
            if way == "step":
                torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
        train(shard(model), plain)


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 5, **options), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[:, 0].abs() * 7).long() % 6))


@follows(": sparse gradients are not supported. Use sparse=False", "max_norm writes to the weight{}Leave it out")
def options_of_embeddings() -> None:
    for options in ({"sparse": True}, {"max_norm": 1.0}):
        refused(lambda options=options: fully_shard(build(lambda: Words(**options))))
    train(fully_shard(build(Words)), build(Words))


@follows("scale_grad_by_freq would count{}Leave it out")
def frequencies() -> None:
    refused(lambda: fully_shard(build(lambda: Words(scale_grad_by_freq=True))))
    train(fully_shard(build(Words)), build(Words))


@follows("which are methods of FSDPModule. Rename them")
def methods_of_these_names() -> None:
    class Named(Net):
        def reshard(self) -> None:
            pass

    refused(lambda: fully_shard(build(Named)))
    del Named.reshard
    Named.my_reshard = lambda self: None  # type: ignore[attr-defined]
    model, plain = pair(Named)
    model.my_reshard()
    train(model, plain)


@follows("Pass a bool, or None")
def conditional_with_a_number() -> None:
    def sharded(choice: Any) -> Any:
        model = build()
        fully_shard(model.block, conditional=True, reshard_after_forward=choice)
        return fully_shard(model)

    refused(lambda: sharded(1))
    for choice in (True, None):
        train(sharded(choice), build())


@follows("Tie them as one nn.Parameter, in one group, or copy one of them")
def parameters_that_share_memory() -> None:
    class Shares(nn.Module):
        def __init__(self, way: str = "") -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
            if way == "tied":
                self.b.weight = self.a.weight
            else:
                self.b.weight.data = self.a.weight.data.clone() if way == "copied" else self.a.weight.data

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())

    refused(lambda: fully_shard(build(Shares)))
    for way in ("tied", "copied"):
        train(fully_shard(build(lambda way=way: Shares(way))), build(lambda way=way: Shares(way)))


@follows("Make one nn.Parameter of all of it, and slice that in forward; or copy one of them")
def parameters_that_share_a_part_of_their_memory() -> None:
    class Shares(nn.Module):
        def __init__(self, way: str = "") -> None:
            super().__init__()
            self.rows, self.way = nn.Parameter(torch.randn(5, 5)), way
            if way != "sliced":
                later = self.rows.data[2:]
                self.later = nn.Parameter(later.clone() if way == "copied" else later)

        def forward(self, x: Tensor) -> Tensor:
            later = self.rows[2:] if self.way == "sliced" else self.later
            return (x @ self.rows).tanh() @ later.t()

    refused(lambda: fully_shard(build(Shares)))
    for way in ("sliced", "copied"):
        train(fully_shard(build(lambda way=way: Shares(way))), build(lambda way=way: Shares(way)))


@follows("Copy it, or compute it in forward")
def buffers_over_parameters() -> None:
    class Keeps(nn.Module):
        def __init__(self, way: str = "") -> None:
            super().__init__()
            self.a, self.way = nn.Linear(5, 5), way
            if way != "computed":
                seen = self.a.weight.detach()
                self.register_buffer("seen", seen.clone() if way == "copied" else seen)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) @ (self.a.weight.detach() if self.way == "computed" else self.seen)

    refused(lambda: fully_shard(build(Keeps)))
    for way in ("copied", "computed"):
        train(fully_shard(build(lambda way=way: Keeps(way))), build(lambda way=way: Keeps(way)))


# ---- memory that nobody has filled


@follows("Materialise the model before its first forward: model.to_empty(device={}), then initialise or load.")
def parameters_on_meta() -> None:
    for way in ("initialise", "load"):
        with torch.device("meta"):
            model = shard(Net())
        refused(lambda model=model: backward(model))
        model.to_empty(device="cpu")
        plain = build()
        if way == "load":
            set_model_state_dict(model, plain.state_dict(), options=FULL)
        else:
            for each in (model, plain):
                for param in each.parameters():
                    nn.init.constant_(param, 0.1)
        train(model, plain)


@follows(
    "then initialise or load; or assign what the state dict that was loaded lacks", "Initialise or load it before the"
)
def buffers_on_meta() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)
            self.register_buffer("angles", torch.full((5,), 0.3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.angles

    plain = build(Rotated)
    whole = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.device("meta"):
        model = fully_shard(Rotated())
    model.load_state_dict(whole, assign=True)
    refused(lambda: backward(model))
    model.angles = torch.full((5,), 0.3)
    train(model, copy.deepcopy(plain))
    with torch.device("meta"):
        model = fully_shard(Rotated())
    model.to_empty(device="cpu")
    set_model_state_dict(model, whole, options=FULL)
    refused(lambda: backward(model))
    model.angles.fill_(0.3)
    train(model, plain)


# ---- what ranks begin with


@follows("Call fsdp2.sync_module_states(model) before fully_shard{}or set the same seed{}or load the weights after")
def different_weights() -> None:
    rank = dist.get_rank()
    refused(lambda: backward(shard(build(seed=rank))))
    plain = build()
    for way in ("sync", "seed", "load"):
        model = build(seed=0 if way == "seed" else rank)
        if way == "sync":
            sync_module_states(model)
        shard(model)
        if way == "load":
            set_model_state_dict(model, plain.state_dict(), options=FULL)
        train(model, copy.deepcopy(plain))


@follows("Load the same on all ranks, or set_model_state_dict(..., broadcast_from_rank0=True)")
def different_state_dicts() -> None:
    rank, plain = dist.get_rank(), build()
    model = shard(build())
    model.load_state_dict(build(seed=rank).state_dict(), assign=True)
    refused(lambda: backward(model))
    for way in ("same", "first"):
        model = shard(build(seed=3))
        if way == "same":
            model.load_state_dict(build().state_dict(), assign=True)
        else:
            state = build().state_dict() if rank == 0 else {}
            set_model_state_dict(
                model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
        train(model, copy.deepcopy(plain))


# ---- ranks that do different things


class Choice(nn.Module):
    """One of two layers, by rank, in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.choices = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])

    def forward(self, x: Tensor, i: int | None = None) -> Tensor:
        x = self.stem(x)
        i = dist.get_rank() if i is None else i
        return self.choices[i](x)


@follows("If ranks use different parameters of one group, call set_reduce_scatter_unused_params(True)")
def different_parameters_of_a_group() -> None:
    model, plain = build(Choice), build(Choice)
    fully_shard(model)
    refused(lambda: backward(model))
    model.zero_grad()
    model.set_reduce_scatter_unused_params(True)
    backward(model)
    rows = batch().chunk(2)
    (sum(loss_of(plain(rows[i], i)) for i in range(2)) / 2).backward()
    same_gradients(model, plain)


@follows("Call set_gradient_divide_factor on all of them, with the same factor")
def divided_on_one_rank() -> None:
    model, plain = pair()
    for step in range(4):
        backward(model, step)
    if dist.get_rank() == 0:
        model.set_gradient_divide_factor(4.0, recurse=True)
    refused(lambda: backward(model))  # in which no check is due
    model.zero_grad()
    model.set_gradient_divide_factor(4.0, recurse=True)
    for each, x in ((model, own(batch())), (plain, batch())):
        (loss_of(each(x)) * (2 if each is model else 1)).backward()
    same_gradients(model, plain)


@follows("Give whatever runs on some ranks only to fully_shard by itself, with conditional=True")
def conditional_modules() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, i: int | None = None) -> Tensor:
            x = x if (dist.get_rank() if i is None else i) else self.b(x)
            return self.head(self.a(x))

    def sharded(**options: Any) -> Any:
        model = build(Two)
        fully_shard(model.a, conditional=True)
        fully_shard(model.b, **options)
        return fully_shard(model)

    refused(lambda: backward(sharded()))
    model, plain = sharded(conditional=True), build(Two)
    backward(model)
    rows = batch().chunk(2)
    (sum(loss_of(plain(rows[i], i)) for i in range(2)) / 2).backward()
    same_gradients(model, plain)


@follows(
    "pass conditional=True to its fully_shard call, or call its set_conditional() before the first forward",
    "Call it before the first forward, on all ranks",
    "and can't be conditional: ranks that leave it out have no part to keep. Pass a bool, or None",
    ranks=4,
)
def conditional_after_wrapping() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.block, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor, rank: int | None = None) -> Tensor:
            x = x + self.tower(x) if (dist.get_rank() if rank is None else rank) else x
            return self.head(self.block(x))

    def sharded(**options: Any) -> Any:
        model = build(Tower)
        fully_shard(model.tower, **options)
        fully_shard(model.block)
        return fully_shard(model)

    model = sharded()
    refused(lambda: backward(model))
    refused(model.tower.set_conditional)
    refused(sharded(reshard_after_forward=2).tower.set_conditional)
    model, plain = sharded(reshard_after_forward=True), build(Tower)
    model.tower.set_conditional()
    backward(model)
    (sum(loss_of(plain(row, i)) for i, row in enumerate(batch().chunk(4))) / 4).backward()
    same_gradients(model, plain)


@follows("conditional=True needs a module around it that all ranks run, at which they agree. Apply fully_shard to that")
def conditional_root() -> None:
    model = build()
    fully_shard(model.block, conditional=True)
    refused(lambda: model.block(own(batch())))
    model = build()
    fully_shard(model.block, conditional=True)
    train(fully_shard(model), build())


# ---- writes


@follows("Write inside `with fsdp2.full_params(module, writeback=True):`, or to the sharded parameter; change a shape")
def written_between_unshard_and_reshard() -> None:
    def write(model: Any) -> None:
        with torch.no_grad():
            model.head.weight.mul_(2)

    model, plain = pair()
    write(plain)
    model.unshard()
    write(model)
    refused(model.reshard)
    for way in ("block", "shard"):
        model, _ = pair()
        if way == "block":
            with full_params(model, writeback=True):
                write(model)
        else:
            write(model)
        same_parameters(model, plain)
    plain = build()
    plain.head = nn.Linear(5, 4)
    model = copy.deepcopy(plain)
    train(shard(model), plain)


@follows("Write inside `with fsdp2.full_params(module, writeback=True):`; change a shape (resize an embedding) before")
def data_assigned_while_unsharded() -> None:
    model, _ = pair(reshard_after_forward=False)
    output = model(own(batch()))
    model.unshard()
    model.head.weight.data = torch.ones(4, 5)
    refused(lambda: loss_of(output).backward())
    model, plain = pair()
    with full_params(model, writeback=True):
        model.head.weight.data = torch.ones(3, 5)
    plain.head.weight.data = torch.ones(3, 5)
    train(model, plain)
    plain = build()
    plain.head = nn.Linear(5, 4)
    train(shard(copy.deepcopy(plain)), plain)


@follows(
    "between steps, modify the sharded parameter or write inside `with fsdp2.full_params(module, writeback=True):`; or"
)
def written_in_forward() -> None:
    class Decays(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def decay(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.9)

    model, plain = pair(Decays)
    model.stem.register_forward_pre_hook(decay)
    refused(lambda: backward(model))
    for way in ("between", "block", "buffer"):
        model, plain = pair(Decays)
        for each in (model, plain):
            if way == "buffer":
                each.register_forward_pre_hook(lambda module, args: module.scale.mul_(0.9) and None)
            elif way == "between" or each is plain:
                with torch.no_grad():
                    each.stem.weight.mul_(0.9)
            else:
                with full_params(each.stem, writeback=True):
                    each.stem.weight.data.mul_(0.9)
        train(model, plain)


@follows("Change parameters before forward or after backward")
def changed_before_backward() -> None:
    def halve(model: Any) -> None:
        with torch.no_grad():
            model.head.weight.mul_(0.5)

    model, plain = pair()
    loss = loss_of(model(own(batch())))
    halve(model)
    refused(loss.backward)
    model, plain = pair()
    for each, x in ((model, own(batch())), (plain, batch())):
        halve(each)
        backward(each, x=x)
        halve(each)
    same_gradients(model, plain)
    same_parameters(model, plain)


@follows("Use what modules have now")
def computed_with_what_was() -> None:
    model, plain = build(), build()
    kept = [*model.parameters()]
    shard(model)
    penalty = sum(param.square().sum() for param in kept)
    refused(lambda: penalty.backward())  # type: ignore[union-attr]
    with full_params(model):
        sum(param.square().sum() for param in model.parameters()).backward()  # type: ignore[union-attr]
    sum(param.square().sum() for param in plain.parameters()).backward()  # type: ignore[union-attr]
    same_gradients(model, plain)


@follows("Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()")
def data_of_kept_weights() -> None:
    for way in ("shard", "local"):
        model, plain = pair(reshard_after_forward=False)
        fsdp2.set_checks("debug")
        try:
            model.set_reshard_after_backward(False)
            backward(model)
            model.stem.weight.to_local().data.mul_(2)
            refused(lambda model=model: backward(model))
        finally:
            fsdp2.set_checks("default")
        model, plain = pair(reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        backward(model)
        with torch.no_grad():
            (model.stem.weight if way == "shard" else model.stem.weight.to_local()).mul_(2)
            plain.stem.weight.mul_(2)
        model.zero_grad()
        train(model, plain)


# ---- gradients and their accumulation


@follows("Call set_requires_gradient_sync(True) before the last backward of an accumulation, and use .grad")
def unsynchronized() -> None:
    model, plain = pair()
    model.set_requires_gradient_sync(False)
    backward(model)
    refused(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    for step in range(2):
        backward(plain, x=batch(step))
    for each in (model, plain):
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
    same_gradients(model, plain)


@follows("Call zero_grad, and repeat the accumulation")
def lost_in_a_failed_backward() -> None:
    model, plain = pair()
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    output = model(own(batch(1)))

    def fail(gradient: Tensor) -> None:
        raise ValueError("planned")

    output.register_hook(fail)
    hidden = model.block.register_full_backward_hook(lambda *_: fail(torch.ones(())))
    with contextlib.suppress(ValueError, RuntimeError):
        loss_of(model(own(batch(1)))).backward()
    hidden.remove()
    refused(lambda: backward(model, 1))
    model.zero_grad()
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        backward(model, step)
        backward(plain, x=batch(step))
    same_gradients(model, plain)


@follows(
    "Call model.set_gradient_divide_factor(factor, recurse=True) on the root, or give each sharded module the same"
)
def divided_in_part() -> None:
    for way in ("root", "each"):
        model, plain = pair()
        model.block.set_gradient_divide_factor(1.0)
        refused(lambda model=model: backward(model))
        model, plain = pair()
        if way == "root":
            model.set_gradient_divide_factor(1.0, recurse=True)
        else:
            model.block.set_gradient_divide_factor(1.0)
            model.set_gradient_divide_factor(1.0)
        for each, x in ((model, own(batch())), (plain, batch())):
            (loss_of(each(x)) / (2 if each is model else 1)).backward()
        optimizers = sgd(model), sgd(plain)
        for each in optimizers:
            each.step()
        same_parameters(model, plain)


@follows(
    "Call the model and torch.autograd.grad(loss, list(full.values()), create_graph=True) inside `with "
    "fsdp2.full_params(model) as full:` instead, with the same batch on every rank"
)
def graph_of_gradients() -> None:
    model, plain = pair()
    loss_of(model(own(batch()))).backward(create_graph=True)
    refused(lambda: model.stem.weight.grad.full_tensor().square().sum().backward())
    model, _ = pair()
    with full_params(model) as full:
        loss = loss_of(model(batch()))
        gradients = torch.autograd.grad(loss, list(full.values()), create_graph=True)
        sum(each.square().sum() for each in gradients).backward()  # type: ignore[union-attr]
    gradients = torch.autograd.grad(loss_of(plain(batch())), [*plain.parameters()], create_graph=True)
    sum(each.square().sum() for each in gradients).backward()  # type: ignore[union-attr]
    same_gradients(model, plain)


@follows("Use distribute_tensor(gradient, p.device_mesh, p.placements)")
def plain_gradients() -> None:
    model, plain = pair()
    gradient = torch.ones(3, 5)
    refused(lambda: [setattr(model.head.weight, "grad", gradient), backward(model)])
    model, plain = pair()
    p = model.head.weight
    p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
    plain.head.weight.grad = gradient.clone()
    for each, x in ((model, own(batch())), (plain, batch())):
        backward(each, x=x)
    same_gradients(model, plain)


@follows("Write inside `with fsdp2.full_params(module, writeback=True):`; change a shape before fully_shard")
def data_assigned_in_forward() -> None:
    fsdp2.set_checks("off")
    try:
        model, _ = pair(reshard_after_forward=False)
        model.unshard()
        model.head.weight.data = torch.ones(4, 5)
        refused(lambda: model.head.weight.sum().backward())
    finally:
        fsdp2.set_checks("default")
    model, plain = pair()
    with full_params(model, writeback=True):
        model.head.weight.data = torch.ones(3, 5)
    plain.head.weight.data = torch.ones(3, 5)
    train(model, plain)


# ---- full_params, and other ways out


@follows("with which no sharded module runs. Leave that block first")
def forward_inside_copies() -> None:
    model, plain = pair()
    with full_params(model, offload_to_cpu=True):
        refused(lambda: model(own(batch())))
    train(model, plain)


@follows("To export or trace a sharded model, load its full state dict")
def exported() -> None:
    model, plain = pair()
    refused(lambda: torch.export.export(model, (batch(),)))
    state = get_model_state_dict(model, options=FULL)
    fresh = build(seed=4)
    fresh.load_state_dict(state)
    program = torch.export.export(fresh, (batch(),))
    same(program.module()(batch()).detach(), plain(batch()).detach(), "exported")


# ---- checks at due steps


@follows(
    "Have it there before fully_shard, and out of ignored_params; or freeze it, or average its gradient before each"
)
def parameters_that_nobody_manages() -> None:
    class Adapted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.adapter: Any = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if self.adapter is None else self.adapter(x)

    def add(model: Any) -> Any:
        torch.manual_seed(1)
        model.adapter = nn.Linear(3, 3)
        return model

    def training(model: Any, plain: Any, way: str) -> None:
        optimizers = [sgd(each) for each in (model, plain)]
        for step in range(4):
            for each, optimizer, x in zip((model, plain), optimizers, (own(batch(step)), batch(step)), strict=True):
                loss_of(each(x)).backward()
                if way == "average" and each is model:
                    for param in each.adapter.parameters():
                        dist.all_reduce(param.grad)
                        param.grad.div_(2)
                optimizer.step()
                optimizer.zero_grad()

    refused(lambda: training(add(shard(build(Adapted))), add(build(Adapted)), ""))
    for way in ("before", "freeze", "average"):
        plain = add(build(Adapted))
        model = shard(copy.deepcopy(plain)) if way == "before" else add(shard(build(Adapted)))
        for each in (model, plain):
            each.adapter.requires_grad_(way != "freeze")
        training(model, plain, way)
        same_parameters(model, plain)


@follows(
    "Replace or resize modules before fully_shard; or build the model anew with the new one, apply fully_shard, and"
)
def modules_replaced_afterwards() -> None:
    def replace(model: Any) -> Any:
        torch.manual_seed(1)
        model.head = nn.Linear(5, 3)
        return model

    model = replace(shard(build()))
    refused(lambda: backward(model))
    plain = replace(build())
    train(shard(copy.deepcopy(plain)), copy.deepcopy(plain))
    old, model = shard(build()), shard(replace(build(seed=2)))
    state = get_model_state_dict(old, options=FULL)
    state = {name: value for name, value in state.items() if not name.startswith("head")}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    train(model, plain)


@follows("Apply fully_shard to the module around it; or freeze it, or average its gradient before each step")
def blocks_sharded_alone() -> None:
    def training(model: Any, plain: Any, way: str = "") -> None:
        optimizers = [sgd(each) for each in (model, plain)]
        for step in range(5):
            for each, optimizer, x in zip((model, plain), optimizers, (own(batch(step)), batch(step)), strict=True):
                loss_of(each(x)).backward()
                if way == "average" and each is model:
                    for param in (*each.stem.parameters(), *each.head.parameters()):
                        dist.all_reduce(param.grad)
                        param.grad.div_(2)
                optimizer.step()
                optimizer.zero_grad()

    def block_only() -> Any:
        model = build()
        fully_shard(model.block)
        return model

    refused(lambda: training(block_only(), build()))
    for way in ("around", "freeze", "average"):
        model, plain = block_only(), build()
        if way == "around":
            fully_shard(model)
        for each in (model, plain):
            if way == "freeze":
                each.stem.requires_grad_(False)
                each.head.requires_grad_(False)
        training(model, plain, way)
        same_parameters(model, plain)


@follows(
    "decide alike whether to step (all-reduce what that depends on), and load a checkpoint of before",
    "so each rank's part is of another model now. Have all ranks",
)
def steps_left_out() -> None:
    model, plain = pair()
    before = {name: value.clone() for name, value in get_model_state_dict(model, options=FULL).items()}

    def training(model: Any, alike: bool) -> None:
        optimizer = sgd(model)
        for step in range(4):
            loss = loss_of(model(own(batch(step)) if model is not plain else batch(step)))
            loss.backward()
            limit = torch.tensor(float(step != 1 or dist.get_rank() == 0))
            if alike:
                dist.all_reduce(limit, op=dist.ReduceOp.MIN)
            if limit:
                optimizer.step()
            optimizer.zero_grad()

    refused(lambda: training(model, alike=False))
    model.zero_grad()
    set_model_state_dict(model, before, options=FULL)
    training(model, alike=True)
    training(plain, alike=True)
    same_parameters(model, plain)


class FailingSGD(torch.optim.SGD):
    """Raises in its second step, on the second rank."""

    numbers: Any = ()

    def step(self, closure: Any = None) -> None:
        if next(self.numbers, 0) == 1 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("in the step")
        super().step(closure)


@follows("Have all ranks", "stop when one of them raises there, and load a checkpoint of before")
def steps_that_raise() -> None:
    """Ranks load a checkpoint when one of them has raised: when the step is compared, nothing is wrong any more."""
    model, plain = pair()

    def training(model: Any, optimizer: Any, first: int, alike: bool = False) -> bool:
        for step in range(first, 5):
            loss_of(model(own(batch(step)) if model is not plain else batch(step))).backward()
            raised = torch.zeros(1)
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                raised.fill_(1)
            optimizer.zero_grad()
            if alike:
                dist.all_reduce(raised)
                if raised:
                    return False
        return True

    optimizer = FailingSGD(model.parameters(), 0.1, momentum=0.5)
    training(plain, sgd(plain), 0)
    for alike in (False, True):
        before = copy.deepcopy((get_model_state_dict(model, options=FULL), optimizer.state_dict()))
        optimizer.numbers = iter(range(5))
        if alike:
            assert not training(model, optimizer, 0, alike)
        else:
            refused(lambda: training(model, optimizer, 0))
        model.zero_grad()
        set_model_state_dict(model, before[0], options=FULL)
        optimizer.load_state_dict(before[1])
    assert training(model, optimizer, 0, alike=True)
    same_parameters(model, plain)


@follows("Call zero_grad() on all ranks, at the same place of each step, and load a checkpoint of before")
def gradients_not_cleared_on_a_rank() -> None:
    model, plain = pair()
    before = {name: value.clone() for name, value in get_model_state_dict(model, options=FULL).items()}

    def training(model: Any, alike: bool) -> None:
        optimizer = sgd(model)
        for step in range(10):
            loss_of(model(own(batch(step)) if model is not plain else batch(step))).backward()
            optimizer.step()
            if alike or step != 2 or dist.get_rank() == 0:
                optimizer.zero_grad()

    refused(lambda: training(model, alike=False))
    model.zero_grad()
    set_model_state_dict(model, before, options=FULL)
    training(model, alike=True)
    training(plain, alike=True)
    same_parameters(model, plain)


@follows("choose alike (all-reduce what that depends on), and load a checkpoint of before")
def rates_of_own_losses() -> None:
    model, plain = pair()
    before = {name: value.clone() for name, value in get_model_state_dict(model, options=FULL).items()}

    def training(model: Any, alike: bool) -> None:
        optimizer = sgd(model)
        for step in range(4):
            loss = loss_of(model(batch(step) if model is plain else own(batch(step))))
            loss.backward()
            mean = loss.detach().clone()
            if alike and model is not plain:
                dist.all_reduce(mean)
                mean /= 2
            optimizer.param_groups[0]["lr"] = 0.1 * mean.item()
            optimizer.step()
            optimizer.zero_grad()

    refused(lambda: training(model, alike=False))
    model.zero_grad()
    set_model_state_dict(model, before, options=FULL)
    training(model, alike=True)
    training(plain, alike=True)
    same_parameters(model, plain)


@follows("Pass cast_forward_inputs=False there, and cast in the module what may be rounded; or pass integers; or, if")
def positions_that_are_rounded() -> None:
    class Positions(nn.Module):
        def __init__(self, casts: bool = False) -> None:
            super().__init__()
            self.a, self.casts = nn.Linear(5, 5), casts

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            x = x.to(self.a.weight.dtype) if self.casts else x
            return self.a(x).float() * (at % 7)[:, None]

    x, at = batch(rows=24), torch.arange(1001.0, 1049.0, 2.0)

    def sharded(casts: bool = False, **options: Any) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
        return fully_shard(build(lambda: Positions(casts)), mp_policy=policy)

    def provoke() -> None:
        model = sharded()
        for _ in range(2):
            model(own(x), own(at)).sum().backward()

    refused(provoke)
    # The same model, all of whose parameters and inputs, but for positions, are bf16.
    expected = build(Positions).bfloat16()(x.bfloat16(), at)
    same(sharded(True, cast_forward_inputs=False)(own(x), own(at)).detach(), own(expected.detach()), "cast inside")
    same(sharded()(own(x), own(at.long())).detach(), own(expected.detach()), "integers")
    meant = build(Positions).bfloat16()(x.bfloat16(), at.bfloat16())
    same(sharded()(own(x), own(at).bfloat16()).detach(), own(meant.detach()), "meant")


@follows("Call model.set_optimizer_in_backward(optimizer), or step in register_post_accumulate_grad_hook of each")
def optimizers_on_accumulation() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, plain = pair()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    refused(lambda: backward(model))
    for way in ("method", "hooks"):
        model, plain = pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "method":
            model.set_optimizer_in_backward(optimizer)
        else:
            steppers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

            def step(param: Any, steppers: Any = steppers) -> None:
                steppers[param].step()
                param.grad = None

            for param in model.parameters():
                param.register_post_accumulate_grad_hook(step)
        stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
        for number in range(2):
            backward(model, number)
            backward(plain, x=batch(number))
            stepper.step()
            stepper.zero_grad()
        same_parameters(model, plain)


@follows("Checkpoint with use_reentrant=False, or step after backward")
def second_gradients_after_a_step() -> None:
    class Twice(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.a, self.reentrant = nn.Linear(5, 5), reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for _ in range(2):
                x = checkpoint(self.a, x, use_reentrant=self.reentrant).tanh()  # type: ignore[assignment]
            return x

    def sharded(reentrant: bool, in_backward: bool) -> Any:
        model = fully_shard(build(lambda: Twice(reentrant)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_backward:
            model.set_optimizer_in_backward(optimizer)
        return model, optimizer

    model, _ = sharded(True, True)
    refused(lambda: backward(model))
    for reentrant, in_backward in ((False, True), (True, False)):
        model, optimizer = sharded(reentrant, in_backward)
        plain = build(lambda: Twice(False))
        stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            backward(model, step)
            backward(plain, x=batch(step))
            for each in (stepper,) if in_backward else (optimizer, stepper):
                each.step()
                each.zero_grad()
        same_parameters(model, plain)


@follows(
    "step other parameters by one of their own, after backward", "expected one whose step needs no closure, got {}"
)
def optimizers_in_backward() -> None:
    model, plain = pair()
    other = nn.Parameter(torch.ones(3))
    refused(lambda: model.set_optimizer_in_backward(torch.optim.SGD([*model.parameters(), other], lr=0.1)))
    refused(lambda: model.set_optimizer_in_backward(torch.optim.LBFGS(model.parameters())))
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    beside = torch.optim.SGD([other], lr=0.1)
    expected = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*plain.parameters(), expected], lr=0.1)
    for step in range(2):
        (loss_of(model(own(batch(step))) * 1.0) + (other**2).sum()).backward()
        beside.step()
        beside.zero_grad()
        (loss_of(plain(batch(step))) + (expected**2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    same_parameters(model, plain)
    same(other.detach(), expected.detach(), "other")
    # one that needs a closure steps after backward
    model, plain = pair()
    for each, x in ((model, batch()), (plain, batch())):
        lbfgs = torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=2)

        def closure(each: Any = each, x: Tensor = x, lbfgs: Any = lbfgs) -> Tensor:
            lbfgs.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        lbfgs.step(closure)
    same_parameters(model, plain, 1e-4)


@follows(
    "call it between backward passes, not during one",
    "set_checks: call it between steps, not during a forward or backward",
    "set_gradient_buckets: call it between steps, not during a forward or backward",
)
def settings_between_passes() -> None:
    model, plain = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def inside(change: Any) -> None:
        x = own(batch()).requires_grad_()
        x.register_hook(lambda gradient: change())
        backward(model, x=x)

    refused(lambda: inside(lambda: model.set_optimizer_in_backward(optimizer)))
    refused(lambda: inside(lambda: model.set_manual_backward_finalization(True)))
    refused(lambda: inside(lambda: fsdp2.set_checks("debug")))
    refused(lambda: inside(lambda: model.set_gradient_buckets(1)))
    model.zero_grad()
    model.set_gradient_buckets(1)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        backward(model, step)
        model.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        backward(plain, x=batch(step))
        stepper.step()
        stepper.zero_grad()
    same_parameters(model, plain)


# ---- what is not supported yet


@follows(
    "for tensors on {}. Leave set_symm_mem_for_comm out there",
    "whose objects allocate what they send and fill. Leave one of both out",
    "a custom one allocates what it sends and fills. Leave one of both out",
    "which has no streams: leave it out",
    "it would never be called. {}. Leave set_custom_{} out",
)
def methods_to_leave_out() -> None:
    model, plain = pair()
    refused(lambda: model.set_symm_mem_for_comm())
    mine = Gather(is_async=True)
    model.set_custom_all_gather(mine)
    refused(lambda: model.set_allocate_memory_from_process_group_for_comm(True))
    model.set_custom_all_gather(None)
    model.set_allocate_memory_from_process_group_for_comm(True)
    refused(lambda: model.set_custom_all_gather(mine))
    seen: list[Any] = []
    refused(lambda: model.set_all_reduce_hook(seen.append, stream=object()))
    model.set_all_reduce_hook(seen.append)
    train(model, plain)
    assert seen

    class Custom:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, *_: Any, **__: Any) -> None: ...

    whole = fsdp2.replicate(build())
    refused(lambda: whole.set_custom_reduce_scatter(Custom()))
    train(whole, build())


# ---- copies


@follows("Use copy.deepcopy", "Copy the model before fully_shard, or build a second one and load this one's state dict")
def copies() -> None:
    class Own(Net):
        def __deepcopy__(self, memo: Any) -> Any:
            made = Own()
            made.load_state_dict(self.state_dict())
            return made

    model, plain = pair()
    refused(lambda: copy.copy(model))
    train(copy.deepcopy(model), copy.deepcopy(plain))
    refused(lambda: copy.deepcopy(shard(build(Own))))
    original = build(Own)
    second = copy.deepcopy(original)
    train(shard(second), copy.deepcopy(plain))
    model, second = shard(original), shard(build(Own, seed=5))
    second.load_state_dict(model.state_dict())
    train(second, plain)


@follows("Each rank is a process with shards of its own; share what full_params lends, or buffers")
def shared_memory() -> None:
    model, plain = pair()
    refused(model.share_memory)
    with full_params(model, offload_to_cpu=True) as whole:
        shared = {name: value.detach().clone().share_memory_() for name, value in whole.items()}
    for name, value in plain.named_parameters():
        assert shared[name].is_shared()
        same(shared[name], value.detach(), name)


@follows("Build one mesh of all axes by init_device_mesh, and slice it by name")
def meshes_that_are_apart() -> None:
    other = DeviceMesh("cpu", [[dist.get_rank()]], mesh_dim_names=("dp", "tp"))["tp"]
    model = build()
    weight = model.head.weight
    model.head.weight = nn.Parameter(distribute_tensor(weight.data, other, [Shard(0)]))
    refused(lambda: fully_shard(model, mesh=mesh(2)))
    both = mesh(2, 1)
    model = build()
    model.head.weight = nn.Parameter(distribute_tensor(weight.data, both["tp"], [Shard(0)]))
    fully_shard(model, mesh=both["dp"])
    same(model.head.weight.full_tensor().detach(), weight.detach(), "head")
    assert isinstance(model.head.weight, DTensor)


# ---- weights that something keeps


class Product(torch.autograd.Function):
    """x @ weight.T, which keeps the weight on `ctx`, a copy of it, or gives it to `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: str) -> Tensor:  # type: ignore[override]
        ctx.way = way
        if way == "saved":
            ctx.save_for_backward(x, weight)
        else:
            ctx.kept = x, weight.detach().clone() if way == "copied" else weight.view(-1)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors if ctx.way == "saved" else ctx.kept
        return gradient @ weight.view(gradient.shape[-1], -1), gradient.T @ x, None


class Layer(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(5, 5)), way

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.way)  # type: ignore[no-any-return]


def layers(way: str) -> Any:
    return nn.Sequential(*[Layer(way) for _ in range(3)])


def shard_layers(model: Any) -> Any:
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model)


@follows(
    "Keep a copy instead (`weight.detach().clone()`), give it to `ctx.save_for_backward` in an autograd function, or"
)
def weights_of_a_hook() -> None:
    def keep(model: Any, copies: bool) -> list[Tensor]:
        kept: list[Tensor] = []
        model.block.up.register_forward_hook(
            lambda module, *_: kept.append(module.weight.detach().clone() if copies else module.weight)
        )
        with torch.no_grad():
            model(own(batch()))
        return kept

    model, plain = pair(reshard_after_forward=True)
    refused(lambda: keep(model, copies=False)[0].norm())
    model, _ = pair(reshard_after_forward=True)
    same(keep(model, copies=True)[0].norm(), plain.block.up.weight.detach().norm(), "copy")
    with full_params(model.block):
        same(model.block.up.weight.detach().norm(), plain.block.up.weight.detach().norm(), "block")
    model, plain = (build(lambda: layers("saved")) for _ in range(2))
    train(shard_layers(model), plain)
