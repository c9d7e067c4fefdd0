"""Follows the advice of errors of operations on sharded parameters, and of what users put in their place."""

import copy
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import prune

import fsdp2
from advised.registry import (
    Net,
    backward,
    batch,
    build,
    compared,
    follows,
    loss_of,
    own,
    pair,
    refused,
    same,
    same_gradients,
    same_parameters,
    shard,
    train,
)
from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard
from helpers import full

FULL = StateDictOptions(full_state_dict=True)


# ---- plain tensors beside sharded parameters


@follows("Leave out what chooses {} for gradients", "or keep the weights in {}, and let them compute in {}")
def gradients_of_another_dtype() -> None:
    """Optimizers that take none, by torch's loops, on lists and fused, say so of the dtypes, and not of DTensors."""

    def one(dtype: torch.dtype, make: Any, flat: bool, **policy: Any) -> Any:
        model = shard(build().to(dtype), mp_policy=MixedPrecisionPolicy(**policy))
        optimizer = make(model.parameters())
        if flat:
            fsdp2.flatten_optimizer(optimizer)
        loss_of(model(own(batch()).to(dtype))).backward()
        optimizer.step()
        return model

    bf16, f32 = torch.bfloat16, torch.float32
    makes = (
        *(
            partial(torch.optim.AdamW, lr=0.1, eps=1.0, **options)
            for options in ({}, {"foreach": True}, {"fused": True})
        ),
        partial(torch.optim.SGD, lr=0.1, fused=True),
    )
    for make in makes:
        for flat in (False, True):
            text = refused(lambda make=make, flat=flat: one(bf16, make, flat, grad_dtype=f32))
            assert text.startswith("stem.weight: "), text
            assert "DTensor" not in text, text
        policy = text.split("compute in torch.bfloat16: ")[1].split(". Torch says")[0]
        chosen = eval(policy, {"MixedPrecisionPolicy": MixedPrecisionPolicy, "torch": torch})
        plain = build().float()
        with torch.autocast("cpu", enabled=False):
            loss_of(plain(batch().float())).backward()
        make(plain.parameters()).step()
        kept = one(f32, make, False, param_dtype=chosen.param_dtype, grad_dtype=chosen.grad_dtype)
        same_parameters(kept, plain, 0.02)
        plain = build().to(bf16)
        loss_of(plain(batch().to(bf16))).backward()
        make(plain.parameters()).step()
        same_parameters(one(bf16, make, True), plain, 0.02)


# ---- losses


@follows("Use `with fsdp2.full_params(...)` in place of full_tensor()")
def second_derivatives_of_full_tensors() -> None:
    def curvature(weight: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((weight.sin() * weight).sum(), [weight], create_graph=True)
        return slope.square().sum()

    def provoke() -> None:
        (slope,) = torch.autograd.grad(
            model.head.weight.full_tensor().sin().square().sum(), [model.head.weight], create_graph=True
        )
        slope.full_tensor().square().sum().backward()

    model, plain = pair()
    refused(provoke)
    model, _ = pair()
    with full_params(model.head):
        curvature(model.head.weight).backward()
    curvature(plain.head.weight).backward()
    same(full(model.head.weight.grad), plain.head.weight.grad, "gradient")


@follows("Call backward through it before that forward, or model.set_keep_unsharded_storage(True) before all")
def graphs_of_gradients_that_are_kept() -> None:
    """tests/ranks/test_autograd.py has the graphs that need weights of other modules."""

    def slope(model: Any, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return found

    def training(model: Any, x: Tensor, y: Tensor, way: str) -> None:
        if way == "keep" and model is not plain:
            model.set_keep_unsharded_storage(True)
        found = slope(model, x)
        if way == "first":
            found.square().sum().backward()
        model(y).square().sum().backward()
        with torch.no_grad():
            model(y)
        if way != "first":
            found.square().sum().backward()

    x, y = batch(0).requires_grad_(), batch(1)
    for way in ("first", "keep"):
        model, plain = pair()
        training(model, x, y, way)
        training(plain, x, y, way)
        same_gradients(model, plain)
    try:
        training(pair()[0], x, y, "")
    except RuntimeError as error:
        from advised.registry import heard

        heard.append(str(error))


# ---- views, data


@follows("Call clone() on the view first, which is a tensor of its own, or full_tensor(), on every rank")
def local_tensors_of_views() -> None:
    model, plain = pair()
    rows, expected = model.head.weight.detach()[1:3], plain.head.weight.detach()[1:3]
    refused(rows.to_local)
    whole = rows.clone()
    whole.to_local().mul_(2)
    same(whole, expected * 2, "clone")
    same(rows.full_tensor(), expected, "full")


class InTwo(Net):
    """Has a state dict in which the head's weight is in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(f"{prefix}head.weight")
        state.update(zip(("head.upper", "head.lower"), whole.split([1, 2]), strict=True))

    @staticmethod
    def join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state["head.weight"] = torch.cat([state.pop("head.upper"), state.pop("head.lower")])


@follows("Load into clones of the views, call clone() on each, and pass the state dict to model.load_state_dict")
def checkpoints_loaded_into_views() -> None:
    model, plain = pair(InTwo)
    other = shard(build(InTwo, seed=1))
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    dcp.save(model.state_dict(), checkpoint_id=folders[0])
    refused(lambda: dcp.load(other.state_dict(), checkpoint_id=folders[0]), CheckpointException)
    state = {name: value.clone() for name, value in other.state_dict().items()}
    dcp.load(state, checkpoint_id=folders[0])
    other.load_state_dict(state)
    same_parameters(other, plain)


@follows("Assign one that is distributed like it, or write to the present one: p.data.copy_(...)")
def data_of_gradients() -> None:
    value = torch.ones(3, 5)
    for way in ("assign", "write"):
        model, plain = pair()
        backward(model)
        backward(plain, x=batch())
        p = model.head.weight
        refused(lambda p=p: setattr(p.grad, "data", value))
        whole = distribute_tensor(value, p.device_mesh, p.placements)
        if way == "assign":
            p.grad.data = whole
        else:
            p.grad.data.copy_(whole)
        plain.head.weight.grad.data = value.clone()
        same_gradients(model, plain)


@follows(
    "Call full_tensor() first, on every rank", "and save the result on the first (`model.save_pretrained(folder, s"
)
def addresses() -> None:
    """What it says about files is followed in tests/clients/test_peft.py and test_transformers.py."""
    model, plain = pair()
    refused(model.head.weight.detach().numpy)
    same(torch.from_numpy(model.head.weight.detach().full_tensor().numpy()), plain.head.weight.detach(), "numpy")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        for name, value in plain.state_dict().items():
            same(state[name], value, name)


# ---- functions of torch


@follows("Transpose it before fully_shard, or write p.t(), which is a new tensor")
def transposed_in_place() -> None:
    model, plain = pair()
    refused(lambda: model.stem.weight.detach().t_())
    same(model.stem.weight.detach().t(), plain.stem.weight.detach().t(), "new")
    for each in (model := build(), plain):
        each.stem.weight.data.t_()
    train(shard(model), plain)


@follows("Call fsdp2.clip_grad_norm_(parameters, max_norm): it returns the norm, too")
def norms_over_meshes() -> None:
    model, plain = pair()
    beside, expected = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    backward(model)
    backward(plain, x=batch())
    for each in (beside, expected):
        each.grad = torch.full((2,), 0.3)
    refused(lambda: nn.utils.clip_grad_norm_([*model.parameters(), beside], 0.1))
    norm = fsdp2.clip_grad_norm_([*model.parameters(), beside], 0.1)
    same(norm, nn.utils.clip_grad_norm_([*plain.parameters(), expected], 0.1), "norm")
    same(beside.grad, expected.grad, "beside")
    same_gradients(model, plain)


@follows("Use another optimizer; the state of Adam, for example, is sharded, too")
def adafactor() -> None:
    model, plain = pair()
    backward(model)
    refused(torch.optim.Adafactor(model.parameters()).step)
    model, plain = pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, plain, optimizer=optimizer, tolerance=1e-4)
    assert isinstance(optimizer.state[model.head.weight]["exp_avg"], DTensor)


@follows("Call these before fully_shard")
def parallelized_afterwards() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(build(lambda: nn.Sequential(nn.Linear(5, 4))), mesh=mesh["dp"])
    refused(lambda: parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}))
    model, plain = (build(lambda: nn.Sequential(nn.Linear(5, 4))) for _ in range(2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())})
    fully_shard(model, mesh=mesh["dp"])
    for each in (model, plain):
        backward(each, x=batch())
    same_gradients(model, plain)


@follows("Use full_tensor(), on every rank, after the same torch.manual_seed")
def random_slopes() -> None:
    model, plain = pair()
    refused(lambda: nn.functional.rrelu(model.head.weight.detach(), training=True))
    torch.manual_seed(5)
    got = nn.functional.rrelu(model.head.weight.detach().full_tensor(), training=True)
    torch.manual_seed(5)
    same(got, nn.functional.rrelu(plain.head.weight.detach(), training=True), "rrelu")


@follows("Prune before fully_shard, or inside `with fsdp2.full_params(module, writeback=True):`, then prune.remove")
def pruned() -> None:
    model, plain = pair()
    refused(lambda: prune.l1_unstructured(model.head, "weight", 0.5))
    before, masked, inside = build(), build(), shard(build())
    for each in (before, masked):
        prune.l1_unstructured(each.head, "weight", 0.5)
    train(shard(before), masked)
    with full_params(inside, writeback=True):
        prune.l1_unstructured(inside.head, "weight", 0.5)
        prune.remove(inside.head, "weight")
    prune.l1_unstructured(plain.head, "weight", 0.5)
    prune.remove(plain.head, "weight")
    same_parameters(inside, plain)


@follows("Leave replicate out: fully_shard averages the gradients")
def replicated_by_torch() -> None:
    model, plain = build(), build()
    replicate(model.block)
    refused(lambda: fully_shard(model), NotImplementedError)
    train(fully_shard(build()), plain)


# ---- what is put in a parameter's place


@follows(
    "Distribute it like the parameter it replaces",
    "Make the DTensor by distribute_tensor(whole, p.device_mesh, p.placements), or give DTensor.from_local those rows",
    "Replace parameters (by quantized ones, for example) before fully_shard; or load whole tensors with",
)
def parameters_assigned() -> None:
    whole = torch.arange(15.0).view(3, 5) / 15

    def assign(value: Any, model: Any) -> None:
        model.head.weight = nn.Parameter(value)

    model, plain = pair()
    plain.head.weight.data = whole.clone()
    p = model.head.weight
    replicated = distribute_tensor(whole, p.device_mesh, [torch.distributed.tensor.Replicate()])
    rows = whole[:2] if dist.get_rank() == 0 else whole[2:]
    wrong = DTensor.from_local(whole, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    for value in (replicated, wrong, whole):
        model, _ = pair()
        refused(lambda model=model, value=value: [assign(value, model), backward(model)])
    local = DTensor.from_local(rows, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    for value in (distribute_tensor(whole, p.device_mesh, p.placements), local, None):
        model, _ = pair()
        if value is None:
            model.load_state_dict({**build().state_dict(), "head.weight": whole}, assign=True)
        else:
            assign(value, model)
        train(model, copy.deepcopy(plain))
    model = build()
    model.head.weight = nn.Parameter(whole.clone())
    train(shard(model), plain)


@follows("apply it to inner modules first, and to a module that both have in common before them, by itself")
def outer_before_inner() -> None:
    model, plain = pair()
    outer = fully_shard(build())
    refused(lambda: fully_shard(outer.block))
    train(model, copy.deepcopy(plain))

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            common = nn.Linear(5, 5)
            self.a, self.b = nn.Sequential(common, nn.Linear(5, 5)), nn.Sequential(common, nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    def sharded(common_first: bool) -> Any:
        shares = build(Shares)
        if common_first:
            fully_shard(shares.a[0])
        fully_shard(shares.a)
        fully_shard(shares.b)
        return fully_shard(shares)

    refused(lambda: sharded(False))
    train(sharded(True), build(Shares))


@follows("unsynchronized gradients are reduced by the backward pass that runs: ask afterwards")
def asked_in_backward() -> None:
    model, plain = pair()
    x = own(batch()).requires_grad_()
    state = model._get_fsdp_state()
    x.register_hook(lambda _: state._root_post_backward_final_callback())
    refused(lambda: backward(model, x=x))
    model, _ = pair()
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    model._get_fsdp_state()._root_post_backward_final_callback()
    backward(plain, x=batch())
    same_gradients(model, plain)


@follows("{} is asynchronous: it would run when the parameters are sharded again. Run it inside")
def asynchronous_methods() -> None:
    import asyncio

    class Later(Net):
        async def later(self, x: Tensor) -> Tensor:
            return self.head(x)

    model, plain = pair(Later)
    refused(lambda: fsdp2.register_fsdp_forward_method(model, "later"))
    with full_params(model):
        got = asyncio.run(model.later(batch()))
    same(got.detach(), plain.head(batch()).detach(), "later")
    compared.append("later")


@follows("A sharded parameter keeps its shape: resize it before fully_shard, or build a new model with the other shape")
def data_of_another_shape() -> None:
    def resize(model: Any) -> None:
        model.head.weight.data = torch.cat([model.head.weight.data, torch.ones(1, 5)])
        model.head.bias.data = torch.cat([model.head.bias.data, torch.ones(1)])

    old, plain, model = shard(build()), build(), build(seed=3)
    refused(lambda: setattr(old.head.weight, "data", torch.ones(4, 5)))
    resize(plain)
    train(shard(copy.deepcopy(plain)), copy.deepcopy(plain))
    resize(model)
    shard(model)
    state = get_model_state_dict(old, options=FULL)
    for name in ("head.weight", "head.bias"):
        state[name] = torch.cat([state[name], torch.ones_like(state[name][:1])])
    set_model_state_dict(model, state, options=FULL)
    train(model, plain)
