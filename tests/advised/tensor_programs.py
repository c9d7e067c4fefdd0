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
    sgd,
    shard,
    train,
)
from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard
from helpers import full

FULL = StateDictOptions(full_state_dict=True)


# ---- plain tensors beside sharded parameters


@follows("call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`")
def without_a_rule_or_with_a_plain_tensor() -> None:
    x = torch.ones(2, 5)
    plain = build()
    for use in (lambda w: x @ w.T, lambda w: torch.cdist(w, w)):
        model = shard(build())
        refused(lambda model=model, use=use: use(model.head.weight))
        expected = use(plain.head.weight).detach()
        same(use(model.head.weight.full_tensor()).detach(), expected, "full_tensor")
        with full_params(model.head):
            same(use(model.head.weight).detach(), expected, "full_params")


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


@follows("and {} can't combine that with a plain tensor.", "call full_tensor() on it, or compute inside")
def beside_a_plain_tensor_in_a_loss() -> None:
    def penalty(weight: Tensor, x: Tensor) -> Tensor:
        return (x @ weight.T).square().mean()

    model, plain = pair()
    refused(lambda: penalty(model.head.weight, own(batch())))
    penalty(plain.head.weight, batch()).backward()
    for way in ("full_tensor", "full_params"):
        model, _ = pair()
        if way == "full_tensor":
            penalty(model.head.weight.full_tensor(), own(batch())).backward()
        else:
            with full_params(model.head):
                penalty(model.head.weight, own(batch())).backward()
        same(full(model.head.weight.grad), plain.head.weight.grad, way)


@follows(
    "Have it return the whole gradient, or distribute_tensor(whole, p.device_mesh, p.placements)",
    "Assign distribute_tensor(gradient, p.device_mesh, p.placements) of the whole gradient, on every rank; a hook",
    "Assign distribute_tensor(gradient, p.device_mesh, p.placements) to its .grad",
)
def plain_gradients_of_hooks_and_code() -> None:
    def gradient_of(model: Any, hook: Any = None, assigned: Any = None, clips: bool = False) -> None:
        p = model.head.weight
        if hook is not None:
            p.register_hook(hook)
        backward(model, x=batch() if model is plain else None)
        if assigned is not None:
            p.grad = assigned(p)
        if clips:
            (torch.nn.utils if model is plain else fsdp2).clip_grad_norm_(model.parameters(), 0.1)
        sgd(model).step()

    mask = torch.ones(3, 5).triu()
    plain = build()
    gradient_of(plain, lambda g: g * mask, clips=True)
    refused(lambda: gradient_of(pair()[0], lambda g: (g.full_tensor() * mask)[0]))
    refused(lambda: gradient_of(pair()[0], assigned=lambda p: p.grad.full_tensor() * mask))
    refused(lambda: gradient_of(pair()[0], assigned=lambda p: p.grad.full_tensor() * mask, clips=True))

    def distributed(p: Any, gradient: Any) -> Any:
        return distribute_tensor(gradient.full_tensor() * mask, p.device_mesh, p.placements)

    for way in ("hook", "hook of the whole", "assigned"):
        model = pair()[0]
        p = model.head.weight
        hooks = {"hook": lambda g, p=p: distributed(p, g), "hook of the whole": lambda g: g.full_tensor() * mask}
        assigned = (lambda p: distributed(p, p.grad)) if way == "assigned" else None
        gradient_of(model, hooks.get(way), assigned, clips=True)
        same_parameters(model, plain)


@follows(
    "On every rank, call full_tensor() on it; {}",
    "On every rank, write to a whole one, `whole = x.full_tensor()` of the gradient or result x, and copy it back, "
    "`x.copy_(distribute_tensor(whole, x.device_mesh, x.placements))`",
    "On every rank, write inside `with fsdp2.full_params(module, writeback=True):`; {}",
    "or make a constant of its shape, which is the same on every rank, a DTensor: distribute_tensor(constant",
)
def masks() -> None:
    mask = torch.ones(3, 5).triu()
    model, plain = pair()
    backward(model)
    backward(plain, x=batch())
    refused(lambda: model.head.weight.grad * mask)
    refused(lambda: torch.no_grad()(model.head.weight.mul_)(mask))
    p = model.head.weight
    same(p.grad.full_tensor() * mask, plain.head.weight.grad * mask, "full_tensor")
    p.grad = p.grad * distribute_tensor(mask, p.device_mesh, p.placements)
    same(full(p.grad), plain.head.weight.grad * mask, "gradient")
    refused(lambda: torch.no_grad()(p.grad[1].mul_)(2))
    whole = p.grad.full_tensor()
    whole[1].mul_(2)
    p.grad.copy_(distribute_tensor(whole, p.grad.device_mesh, p.grad.placements))
    expected = plain.head.weight.grad * mask
    expected[1].mul_(2)
    same(full(p.grad), expected, "rows of a gradient")
    with torch.no_grad():
        p.mul_(distribute_tensor(mask, p.device_mesh, p.placements))
        with full_params(model, writeback=True):
            model.stem.weight.mul_(mask[0])
        plain.head.weight.mul_(mask)
        plain.stem.weight.mul_(mask[0])
    same_parameters(model, plain)


@follows(
    "Call fsdp2.flatten_optimizer(optimizer) before the first step; if that refuses it, use an optimizer that takes"
)
def optimizers_of_other_libraries() -> None:
    """One whose kernel takes plain tensors, and one that also needs whole tensors."""

    class Kernel(torch.optim.Optimizer):
        def __init__(self, params: Any, whole: bool = False, by_address: bool = False) -> None:
            super().__init__(params, {"lr": 0.1, "whole": whole, "by_address": by_address})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    if not state:
                        state["average"] = torch.zeros(param.shape)
                    if group["by_address"]:
                        assert param.data_ptr()
                    state["average"].mul_(0.5).add_(param.grad * torch.ones(param.shape))
                    norm = state["average"].norm() + 1 if group["whole"] else 1.0
                    param.add_(state["average"] / norm, alpha=-0.1)

    def training(model: Any, optimizer: Any) -> None:
        for step in range(2):
            backward(model, step, batch(step) if model is plain else None)
            optimizer.step()
            optimizer.zero_grad()

    for by_address in (False, True):
        model, plain = pair()
        optimizer = Kernel(model.parameters(), by_address=by_address)
        text = refused(partial(training, model, optimizer))
        assert "flatten_optimizer" in text
        model, plain = pair()
        training(model, fsdp2.flatten_optimizer(Kernel(model.parameters(), by_address=by_address)))
        training(plain, Kernel(plain.parameters()))
        same_parameters(model, plain)
    model, plain = pair()
    refused(lambda: fsdp2.flatten_optimizer(Kernel(model.parameters(), whole=True)), TypeError)
    train(model, plain)


@follows(
    "To load a full state dict, call", "To write to one parameter, copy distribute_tensor(plain, p.device_mesh, p.pl"
)
def full_state_dicts() -> None:
    model, plain = shard(build(seed=1)), build()
    refused(lambda: model.load_state_dict(plain.state_dict()))
    torch.distributed.checkpoint.state_dict.set_model_state_dict(model, plain.state_dict(), options=FULL)
    same_parameters(model, plain)
    p, value = model.head.weight, torch.ones(3, 5)
    with torch.no_grad():
        p.copy_(distribute_tensor(value, p.device_mesh, p.placements))
    plain.head.weight.data = value
    train(model, plain)


@follows("Call full_tensor() on the DTensor, on every rank (`total += p.grad.norm().full_tensor()`)")
def norms_in_a_plain_total() -> None:
    model, plain = pair()
    backward(model)
    backward(plain, x=batch())
    total, expected = torch.zeros(()), torch.zeros(())
    refused(lambda: total.add_(model.head.weight.grad.norm()))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        total += p.grad.norm().full_tensor()
        expected += q.grad.norm()
    same(total, expected, "total")


@follows(
    "Call full_tensor() on the DTensor, on every rank. To load the state dict of a sharded model into a plain one",
    "To resize a parameter (an embedding, for new tokens), do so before fully_shard",
)
def copied_into_plain_tensors() -> None:
    model, plain = pair()
    fresh = build(seed=3)
    refused(lambda: fresh.load_state_dict(model.state_dict()))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    fresh.load_state_dict(state)
    same_parameters(fresh, plain)
    target = torch.zeros(3, 5)
    refused(lambda: target.copy_(model.head.weight.detach()))
    target.copy_(model.head.weight.detach().full_tensor())
    same(target, plain.head.weight.detach(), "copied")


# ---- losses


@follows("Write full_tensor() behind the latter (`loss + penalty.full_tensor()`), or compute it inside")
def penalties() -> None:
    def penalty(model: Any) -> Any:
        return 0.1 * sum(param.square().sum() for param in model.parameters())

    model, plain = pair()
    refused(lambda: torch.add(loss_of(model(own(batch()))), penalty(model)).backward())
    (loss_of(plain(batch())) + penalty(plain)).backward()
    for way in ("full_tensor", "block"):
        model, _ = pair()
        loss = loss_of(model(own(batch())))
        if way == "block":
            with full_params(model):
                torch.add(loss, penalty(model)).backward()
        else:
            (loss + penalty(model).full_tensor()).backward()
        same_gradients(model, plain)


@follows("To have them in .grad, call backward(inputs=...); or call the model and torch.autograd.grad inside")
def gradients_by_parameters() -> None:
    model, plain = pair()
    refused(lambda: torch.autograd.grad(loss_of(model(own(batch()))), [*model.parameters()]))
    backward(plain, x=batch())
    model, _ = pair()
    loss_of(model(own(batch()))).backward(inputs=[*model.parameters()])
    same_gradients(model, plain)
    with full_params(model) as whole:
        gradients = torch.autograd.grad(loss_of(model(batch())), [*whole.values()])
    for gradient, param in zip(gradients, plain.parameters(), strict=True):
        same(gradient, param.grad, "gradient")


@follows("Call full_tensor() on the DTensor, on every rank (`torch.mul(number, penalty.full_tensor())`)")
def numbers_of_each_rank() -> None:
    def weighted(penalty: Tensor, x: Tensor) -> Tensor:
        return torch.mul(penalty, x.square().mean().item())

    model, plain = pair()
    refused(lambda: weighted(model.head.weight.norm(), own(batch())).full_tensor().backward())
    model, _ = pair()
    number = own(batch()).square().mean().item()
    torch.mul(torch.tensor(number), model.head.weight.norm().full_tensor()).backward()
    weighted(plain.head.weight.norm(), batch()).backward()
    same(full(model.head.weight.grad), plain.head.weight.grad, "gradient")


@follows("Call full_tensor().item() instead, on every rank")
def items() -> None:
    model, plain = pair()
    refused(lambda: model.head.weight.detach().sum().item())
    value = model.head.weight.detach().sum().full_tensor().item()
    same(torch.tensor(value), plain.head.weight.detach().sum(), "sum")


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


@follows("Take the view again, or the state dict that has it, on every rank")
def views_of_what_was_written() -> None:
    model, plain = pair()
    p, expected = model.head.weight.detach(), plain.head.weight.detach().clone()
    rows = p[1:3]
    p.add_(1)
    expected.add_(1)
    refused(lambda: rows * 2)
    same(p[1:3] * 2, expected[1:3] * 2, "taken again")


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


@follows("A sharded parameter keeps its shape: resize it before fully_shard, or build a new model with the other shape")
def data_of_another_shape() -> None:
    def resize(model: Any) -> None:
        model.head.weight.data = torch.cat([model.head.weight.data, torch.ones(1, 5)])
        model.head.bias.data = torch.cat([model.head.bias.data, torch.ones(1)])

    old = shard(build())
    refused(lambda: setattr(old.head.weight, "data", torch.ones(4, 5)))
    plain = build()
    resize(plain)
    train(shard(copy.deepcopy(plain)), copy.deepcopy(plain))
    model = build(seed=3)
    resize(model)
    shard(model)
    state = get_model_state_dict(old, options=FULL)
    state["head.weight"] = torch.cat([state["head.weight"], torch.ones(1, 5)])
    state["head.bias"] = torch.cat([state["head.bias"], torch.ones(1)])
    set_model_state_dict(model, state, options=FULL)
    train(model, plain)


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


@follows("Call full_tensor(), on every rank, for the whole tensor", "To give all ranks the same weights, do so before")
def collectives_by_hand() -> None:
    model, plain = pair()
    p = model.head.weight.detach()
    refused(lambda: dist.broadcast(p, 0))
    same(p.full_tensor(), plain.head.weight.detach(), "whole")
    for way in ("before", "afterwards"):
        model = build(seed=dist.get_rank())
        if way == "before":
            for param in model.parameters():
                dist.broadcast(param.data, 0)
        shard(model)
        if way == "afterwards":
            set_model_state_dict(model, build().state_dict(), options=FULL)
        train(model, copy.deepcopy(plain))


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


@follows("Call finalize_backward() on the root first, also before clipping")
def reductions_in_flight() -> None:
    model, plain = pair()
    model.set_manual_backward_finalization(True)
    optimizers = sgd(model), sgd(plain)
    backward(model)
    refused(optimizers[0].step)
    model.finalize_backward()
    backward(plain, x=batch())
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
    same_parameters(model, plain)


@follows("Build it afterwards, from model.parameters()")
def optimizers_from_before() -> None:
    model, plain = build(), build()
    optimizer = sgd(model)
    shard(model)
    refused(lambda: train(model, copy.deepcopy(plain), optimizer=optimizer))
    model = shard(build())
    train(model, plain, optimizer=sgd(model))


@follows("Build it outside, from model.parameters(), which are sharded there")
def optimizers_from_inside() -> None:
    model, plain = pair()
    model.unshard()
    optimizer = sgd(model)
    model.reshard()
    refused(lambda: train(model, copy.deepcopy(plain), optimizer=optimizer))
    model, _ = pair()
    train(model, plain, optimizer=sgd(model))


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


@follows(
    "Remove DistributedDataParallel: fully_shard averages",
    "Of a model that is sharded in part, apply fully_shard or fsdp2",
)
def ddp_around() -> None:
    model, plain = pair()
    refused(lambda: nn.parallel.DistributedDataParallel(model))
    train(model, copy.deepcopy(plain))
    for around in (fully_shard, fsdp2.replicate):
        model = build()
        fully_shard(model.block)
        refused(lambda model=model: nn.parallel.DistributedDataParallel(model))
        train(around(model), copy.deepcopy(plain))


@follows("Leave replicate out: fully_shard averages the gradients")
def replicated_by_torch() -> None:
    model, plain = build(), build()
    replicate(model.block)
    refused(lambda: fully_shard(model), NotImplementedError)
    train(fully_shard(build()), plain)


# ---- what is put in a parameter's place


@follows(
    "Detach it, or call a copy of the module that is not sharded; for torch.func.grad by parameters call backward()"
)
def computed_weights() -> None:
    model, plain = pair()

    def halves(each: Any) -> dict[str, Tensor]:
        return {name: param / 2 for name, param in each.named_parameters()}

    refused(lambda: torch.func.functional_call(model, halves(model), (own(batch()),)))
    expected = torch.func.functional_call(plain, halves(plain), (batch(),))
    detached = {name: value.detach() for name, value in halves(model).items()}
    same(torch.func.functional_call(model, detached, (batch(),)).detach(), expected.detach(), "detached")
    second = build()
    same(torch.func.functional_call(second, halves(second), (batch(),)).detach(), expected.detach(), "not sharded")
    backward(model)
    params = dict(plain.named_parameters())
    grads = torch.func.grad(lambda p: loss_of(torch.func.functional_call(plain, p, (batch(),))))(params)
    for name, param in model.named_parameters():
        same(full(param.grad), grads[name], name)


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


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


@follows(
    "Tie parameters before fully_shard",
    "make such a change before fully_shard, or under each of its names: {}",
    "Give both the same one, as in {}; or untie them before fully_shard",
    "take it away before fully_shard, or put it back",
)
def tied_parameters() -> None:
    untied = fully_shard(build(partial(Tied, False)))

    def tie(model: Any) -> None:
        model.b.weight = model.a.weight

    refused(lambda: [tie(untied), backward(untied)])
    model, plain = build(partial(Tied, False)), build(partial(Tied, False))
    tie(model)
    tie(plain)
    train(fully_shard(model), copy.deepcopy(plain))

    def replace(model: Any, *names: str) -> Any:
        for name in names:
            module = getattr(model, name)
            value = torch.full((5, 5), 0.2 if name == "a" else 0.3)
            if isinstance(module.weight, DTensor):
                value = distribute_tensor(value, module.weight.device_mesh, module.weight.placements)
            module.weight = nn.Parameter(value)
        return model

    for names in (("a",), ("a", "b")):
        model = fully_shard(build(Tied))
        refused(lambda model=model, names=names: backward(replace(model, *names)))
        model = fully_shard(build(Tied))
        replace(model, *names)
        model.b.weight = model.a.weight  # as the error says
        plain = replace(build(Tied), "a")
        plain.b.weight = plain.a.weight
        train(model, plain)
        plain = replace(build(Tied), "a", "b")
        train(fully_shard(copy.deepcopy(plain)), plain)
    model = fully_shard(build(Tied))
    kept = model.a._parameters["weight"]

    def take_away(model: Any) -> None:
        del model.b.weight
        model.b.register_parameter("weight", None)

    refused(lambda: [take_away(model), backward(model)])
    model.b.weight = kept
    train(model, build(Tied))


@follows(
    "Only one of the same shape can replace it: resize it before fully_shard, or build the model anew with the other"
)
def parameters_of_another_shape() -> None:
    def resize(model: Any) -> Any:
        torch.manual_seed(2)
        model.head = nn.Linear(5, 4)
        return model

    old = shard(build())
    refused(lambda: [setattr(old.head, "weight", nn.Parameter(torch.ones(4, 5))), backward(old)])
    old, plain = shard(build()), resize(build())
    train(shard(resize(build())), copy.deepcopy(plain))
    model = shard(resize(build(seed=3)))
    state = {name: value for name, value in get_model_state_dict(old, options=FULL).items() if "head" not in name}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    train(model, plain)


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
