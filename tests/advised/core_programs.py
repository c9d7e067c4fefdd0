"""Follows the advice of errors of `fully_shard` and of the engine."""

import contextlib
import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
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


# ---- memory that nobody has filled


# ---- what ranks begin with


# ---- ranks that do different things


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


@follows("conditional=True needs a module around it that all ranks run, at which they agree. Apply fully_shard to that")
def conditional_root() -> None:
    model = build()
    fully_shard(model.block, conditional=True)
    refused(lambda: model.block(own(batch())))
    model = build()
    fully_shard(model.block, conditional=True)
    train(fully_shard(model), build())


# ---- writes


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


@follows("Change parameters before forward or after backward")
def other_data_between_forward_and_backward() -> None:
    """Of a checkpointed forward, and of another one; of one parameter, and of all."""

    def assign(model: Any, *_: Any) -> None:
        for param in model.block.parameters():
            param.data = param.data * 0.9

    def swap(model: Any, swapped: bool) -> None:
        new = [(name, param.detach().mul(0.9).requires_grad_()) for name, param in model.block.named_parameters()]
        for name, value in new[: 1 if swapped else None]:
            torch.utils.swap_tensors(model.block.get_parameter(name), nn.Parameter(value))

    for change in (assign, swap):
        for kept in (False, True):
            model, plain = pair()
            call = (lambda model, x: checkpoint(model, x, use_reentrant=False)) if kept else (lambda model, x: model(x))
            loss = loss_of(call(model, own(batch())))
            change(model, kept)
            refused(loss.backward)
            model, plain = pair()
            for each, x in ((model, own(batch())), (plain, batch())):
                change(each, kept)
                loss_of(call(each, x)).backward()
                change(each, kept)
            same_gradients(model, plain)
            same_parameters(model, plain)


# ---- gradients and their accumulation


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
