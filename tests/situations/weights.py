"""Weights that are read, written, replaced or computed with outside of their module's forward."""

import functools
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from outcomes import EXACT, LOUD, Side
from situations.common import Block, Net, ends, full_params, hsdp, local, loss_of, sgd, shard, train, whole

# ---- weights used, or written, outside their module's forward


@ends(EXACT, follows="weight_gathered_in_the_loss")
def full_tensor_in_the_loss(side: Side) -> None:
    """A loss that uses `weight.full_tensor()`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0)) @ whole(model.head.weight)).backward()
    side.grads("gradients", model)


SUMMED: dict[str, Any] = {
    "advises": "Call full_tensor() on the parameter, or on what is computed from it, in place of to_local() and the "
    "collective, on every rank; or call the collective in torch.no_grad()"
}


def whole_by_redistribute(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local()


@ends(EXACT)
def weight_redistributed_in_the_loss(side: Side) -> None:
    """The same by `redistribute(placements=[Replicate()])` and `to_local()`"""
    model = shard(side, Net())
    for step in range(2):
        weight = whole_by_redistribute(model.head.weight)
        loss_of(model(side.batch(step)) @ weight).backward()
    side.grads("gradients", model)


@ends(LOUD, **SUMMED)
def weight_gathered_in_the_loss(side: Side) -> None:
    """The same by a functional all-gather of the shards"""
    model = shard(side, Net())
    weight = model.head.weight
    if isinstance(weight, DTensor):
        mesh, local = weight.device_mesh, weight.to_local()
        rows = -(-len(weight) // mesh.size(mesh.ndim - 1))
        padded = nn.functional.pad(local, (0, 0, 0, rows - len(local)))
        weight = functional_collectives.all_gather_tensor_autograd(padded, 0, shard_group(weight))[: len(weight)]
    loss_of(model(side.batch(0)) @ weight).backward()
    side.grads("gradients", model)


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


torch.library.define("situations::summed", "(Tensor tensor) -> Tensor")
torch.library.impl("situations::summed", "CPU", _summed)


def train_with_a_penalty(side: Side, model: Any, way: str, summed: Callable[[Tensor], Tensor]) -> None:
    """Trains with the norm of all weights as a penalty, or, without a gradient, as the scale of another."""
    optimizer = sgd(model)
    for step in range(2):
        params = [whole(p) if way == "full_tensor" else local(p) for p in model.parameters()]
        with torch.no_grad() if way == "no_grad" else nullcontext():
            square = torch.stack([each.square().sum() for each in params]).sum()
            if side.is_sharded and way != "full_tensor":
                square = summed(square)
        scale = whole(model.stem.bias).square().sum() if way == "no_grad" else 0.1
        (loss_of(model(side.batch(step))) + scale * square.sqrt()).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


def shard_group(tensor: DTensor) -> Any:
    return tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)


@ends(LOUD, **SUMMED, ways=("full_tensor", "no_grad"))
def penalty_summed_over_shards(side: Side, way: str = "") -> None:
    """The norm of all weights, of squares of local tensors that a functional all-reduce sums"""
    model = shard(side, Net())
    group = shard_group(model.head.weight) if side.is_sharded else None
    train_with_a_penalty(side, model, way, lambda square: functional_collectives.all_reduce(square, "sum", group))


@ends(LOUD, **SUMMED, ways="full_tensor", only_ours=True)
def penalty_summed_without_a_gradient(side: Side, way: str = "") -> None:
    """The same by an operation of one's own, which has no gradient"""
    model = shard(side, Net(), **({"mesh": init_device_mesh("cpu", (2,))} if side.is_sharded else {}))
    train_with_a_penalty(side, model, way, torch.ops.situations.summed)


@ends(EXACT)
def parameters_found_by_address(side: Side) -> None:
    """A client finds an optimizer's parameters by the address of what they hold"""

    def address(param: Any) -> int:
        return (param._local_tensor if type(param) is DTensor else param).data_ptr()

    model = shard(side, Net())
    names = {address(param): name for name, param in model.named_parameters() if name.endswith("weight")}
    params = [param for param in sgd(model).param_groups[0]["params"] if address(param) in names]
    for param in params:
        with torch.no_grad():
            param.mul_(1 + len(names[address(param)]))
    side.weights("by the length of their names", model)


@ends(EXACT)
def collectives_counted(side: Side) -> None:
    """`CommDebugMode` around `clip_grad_norm_`"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    with CommDebugMode() as counted:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    weight = model.head.weight
    has_shards = isinstance(weight, DTensor) and weight.device_mesh.size(weight.device_mesh.ndim - 1) > 1
    side.value("all are seen", counted.get_total_counts() == has_shards)
    side.grads("clipped", model)


@ends(EXACT, only_ours=True)
def full_params_in_the_loss(side: Side) -> None:
    """The same with `full_params(weight)`"""
    model = shard(side, Net())
    output = model(side.batch(0))
    if side.is_sharded:
        with side.library.full_params(model.head.weight) as weight:
            loss = loss_of(output @ weight)
    else:
        loss = loss_of(output @ model.head.weight)
    loss.backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    "between unshard() and reshard()",
    advises="Write inside `with fsdp2.full_params(module, writeback=True):`, or to the sharded parameter; change a "
    "shape (resize an embedding) before",
    ways=("inside", "sharded", "a shape before"),
)
def written_between_unshard_and_reshard(side: Side, way: str = "") -> None:
    """Weights written between `unshard()` and `reshard()`"""
    model: Any = Block()
    if way == "a shape before":
        model.up, model.down = nn.Linear(5, 9), nn.Linear(9, 5)
    side.fully_shard(model)
    if side.is_sharded and not way:
        model.unshard()
    with full_params(side, model, writeback=True) if way == "inside" else nullcontext(), torch.no_grad():
        model.up.weight.mul_(2)
    if side.is_sharded and not way:
        model.reshard()
    side.rows("output", model(side.batch(0)))


def writes_data_in_full_params(side: Side, **options: Any) -> None:
    model = side.fully_shard(Block())
    with side.library.full_params(model, **options) if side.library is not None else nullcontext():
        model.up.weight.data.mul_(2)
    side.rows("output", model(side.batch(0)))


@ends(EXACT, only_ours=True, follows="data_written_in_a_block")
def written_in_full_params(side: Side) -> None:
    """The same in `full_params(..., writeback=True)`"""
    writes_data_in_full_params(side, writeback=True)


@ends(LOUD, "full_params(module, writeback=True)", only_ours=True)
def data_written_in_full_params(side: Side) -> None:
    """The same through `.data`, in copies that `full_params(..., offload_to_cpu=True)` lends"""
    writes_data_in_full_params(side, offload_to_cpu=True)


@ends(
    LOUD,
    only_ours=True,
    advises="Write `with fsdp2.full_params(module, writeback=True):` to change the sharded parameters, too",
)
def data_written_in_a_block(side: Side) -> None:
    """The same in `full_params(...)`, where they are what forwards compute with"""
    writes_data_in_full_params(side)


@ends(LOUD, only_ours=True, advises="Use each bucket inside the loop, and copy what you keep", ways="copied")
def list_of_streamed_weights(side: Side, way: str = "") -> None:
    """A list of all weights that `stream_full_params` delivers, read after the loop"""
    model = shard(side, Net())
    kept = list(model.parameters())
    if side.is_sharded:
        buckets = side.library.stream_full_params(model)
        kept = [each.clone() if way else each for bucket in buckets for each in bucket.tensors.values()]
    side.rows("output", model(side.batch(0)) * sum(float(each.detach().norm()) for each in kept))


@ends(LOUD, only_ours=True, advises="Finish the stream before optimizer.step()", ways="before")
def a_step_inside_a_stream(side: Side, way: str = "") -> None:
    """An optimizer steps in the loop over a stream of weights"""
    model = shard(side, Net())
    optimizer = sgd(model)
    loss_of(model(side.batch(0))).backward()
    for _ in side.library.stream_full_params(model, bucket_bytes=50) if side.library is not None else ():
        if not way:
            optimizer.step()
    optimizer.step()
    side.weights("stepped", model)


@ends(EXACT)
def rows_of_a_gradient_cleared(side: Side) -> None:
    """Only some rows of an embedding are trained: `weight.grad[:5].zero_()`"""
    model = side.fully_shard(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)))
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(side.batch(step)[:, 0].abs().mul(20).long() % 9)).backward()
        model[0].weight.grad[:5].zero_()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def rows_initialised(side: Side) -> None:
    """Built on meta, `reset_parameters` of an embedding with a padding row"""
    with torch.device("meta" if side.is_sharded else "cpu"):
        model = nn.Sequential(nn.Embedding(9, 5, padding_idx=1), nn.Linear(5, 3))
    side.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for module in model:
        module.reset_parameters()
    side.weights("initial", model)


@ends(LOUD, advises="On every rank, write inside `with fsdp2.full_params(module, writeback=True):`; {}", ways="inside")
def row_set_to_a_mean(side: Side, way: str = "") -> None:
    """A row of an embedding, of a new token, set to the mean of the others"""
    model = side.fully_shard(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3)))
    with full_params(side, model, writeback=True) if way else nullcontext(), torch.no_grad():
        model[0].weight[-1].copy_(model[0].weight[:-1].mean(0))
    side.weights("initial", model)


@ends(EXACT)
def line_search(side: Side) -> None:
    """An optimizer that searches along a line, by the loss of each rank's rows: LBFGS"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(side.batch(0)))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    side.weights("trained", model)


@ends(EXACT)
def weights_kept_near_others(side: Side) -> None:
    """A regulariser: `mse_loss` of weights and what they were"""
    model = shard(side, Net())
    others = [param.detach() * 0.5 for param in model.parameters()]
    optimizer = sgd(model)
    for step in range(2):
        terms = [nn.functional.mse_loss(param, other) for param, other in zip(model.parameters(), others, strict=True)]
        loss_of(model(side.batch(step))).backward()
        sum(term.full_tensor() if isinstance(term, DTensor) else term for term in terms).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(
    LOUD,
    "modified in place during forward",
    advises="between steps, modify the sharded parameter or write inside `with fsdp2.full_params(module, "
    "writeback=True):`; or keep such a value in a buffer",
    ways=("between steps", "inside", "a buffer"),
)
def written_in_forward(side: Side, way: str = "") -> None:
    """Weights written in a forward"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if way == "a buffer":
                self.norm.copy_(whole(self.weight).detach().norm())
                return super().forward(x) / self.norm
            if not way:
                with torch.no_grad():
                    self.weight.div_(self.weight.norm())
            return super().forward(x)

    model = Normalised(5, 3)
    model.register_buffer("norm", torch.ones(()))
    side.fully_shard(model)
    optimizer = sgd(model)
    for step in range(3):
        if way in ("between steps", "inside"):
            with full_params(side, model, writeback=True) if way == "inside" else nullcontext(), torch.no_grad():
                model.weight.div_(whole(model.weight).norm())
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "modified in place during forward")
def data_written_in_forward(side: Side) -> None:
    """The same through `.data`"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.div_(self.weight.data.norm())
            return super().forward(x)

    model = side.fully_shard(Normalised(5, 3))
    train(side, model)


@ends(LOUD, "modified in place during forward")
def data_assigned_in_forward(side: Side) -> None:
    """Others assigned to `.data` in a forward"""

    class Normalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.detach() / self.weight.detach().norm()
            return super().forward(x)

    model = side.fully_shard(Normalised(5, 3))
    train(side, model)


@ends(EXACT)
def later_weights_written_in_forward(side: Side) -> None:
    """Weights of a later block written in the model's forward"""

    class Normalises(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for block in self.blocks:
                    block.up.weight.div_(block.up.weight.norm())
            return super().forward(x)

    model = shard(side, Normalises())
    train(side, model)


@ends(EXACT)
def averages_in_place_of_weights(side: Side) -> None:
    """Averaged weights registered for an evaluation, then the trained ones again"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = [(m, name, param) for m in model.modules() for name, param in m._parameters.items()]
        for module, name, param in trained:
            setattr(module, name, nn.Parameter(param.detach() * 0.5))
        with torch.no_grad():
            side.rows(f"average {step}", model(side.batch(5)))
        for module, name, param in trained:
            setattr(module, name, param)
    side.weights("trained", model)


@ends(EXACT)
def replaced_before_backward(side: Side) -> None:
    """A parameter replaced between forward and backward"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    up = model.blocks[0].up
    up.weight = nn.Parameter(up.weight.detach() * 0.5)
    loss.backward()
    model.zero_grad()
    side.rows("output", model(side.batch(1)))


@ends(EXACT)
def functional_call(side: Side) -> None:
    """`functional_call` with other weights, and with the model's afterwards"""
    model = shard(side, Net())
    chosen = {name: param.detach().mul(0.5).requires_grad_() for name, param in model.named_parameters()}
    loss_of(torch.func.functional_call(model, chosen, (side.batch(0),))).backward()
    for name, value in chosen.items():
        side.value(name, value.grad)
    train(side, model)


@ends(
    LOUD,
    "to which gradients would not flow",
    advises="Detach it, or call a copy of the module that is not sharded; for torch.func.grad by parameters call",
    ways=("detached", "a copy", "backward"),
)
def functional_call_with_computed_weights(side: Side, way: str = "") -> None:
    """`functional_call` with weights that are computed from the model's"""
    model = shard(side, Net())
    if way == "backward":
        if side.is_sharded:
            loss_of(model(side.batch(0))).backward()
            return side.grads("gradients", model)
        params = dict(model.named_parameters())
        call = functools.partial(torch.func.functional_call, model)
        slopes = torch.func.grad(lambda params: loss_of(call(params, (side.batch(0),))))(params)
        for name, param in params.items():
            param.grad = slopes[name]
        return side.grads("gradients", model)
    if way == "a copy":
        torch.manual_seed(0)
        model = Net()
    computed = {name: param * 0.5 for name, param in model.named_parameters()}
    if way == "detached":
        computed = {name: value.detach() for name, value in computed.items()}
    output = torch.func.functional_call(model, computed, (side.batch(0),))
    if way:
        return side.rows("output", output)
    loss_of(output).backward()
    return side.grads("gradients", model)


@ends(EXACT)
def data_assigned(side: Side) -> None:
    """Averages by `p.data = ...`, kept, assigned for an evaluation, and taken back"""
    model = shard(side, Net())
    optimizer = sgd(model)
    average = {name: param.data.clone() for name, param in model.named_parameters()}
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            average[name] = 0.5 * average[name] + 0.5 * param.data
        trained = {name: param.data for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            param.data = average[name]
        with torch.no_grad():
            side.rows(f"average {step}", model(side.batch(5)))
        for name, param in model.named_parameters():
            param.data = trained[name]
    side.weights("trained", model)


@ends(EXACT)
def data_written(side: Side) -> None:
    """`p.data` written to, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        for param in model.parameters():
            param.data.sub_(0.1 * param.grad)
        model.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def data_read(side: Side) -> None:
    """`p.data` read between forward and backward"""
    model = shard(side, Net())
    average = [param.data.clone() for param in model.parameters()]
    for step in range(3):
        loss = loss_of(model(side.batch(step)))
        for mean, param in zip(average, model.parameters(), strict=True):
            mean.lerp_(param.data, 0.1)
        loss.backward()
    side.grads("gradients", model)


@ends(EXACT)
def state_dict_written(side: Side) -> None:
    """A state dict that was taken before loaded into, as `dcp.load` does, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    state = model.state_dict()
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
    for value in state.values():
        (value.to_local() if side.is_sharded else value).mul_(0.5)
    with torch.no_grad():
        side.rows("outputs", model(side.batch(2)))


@ends(
    LOUD,
    "is not what the sharded parameter holds",
    advises="Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()",
    ways=("sharded", "local"),
)
def data_of_shards_written(side: Side, way: str = "") -> None:
    """`p.to_local().data` written to, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    params = list(model.parameters())  # as an optimizer holds them
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        with torch.no_grad():
            for param in params:
                if way == "sharded":
                    param.sub_(0.1 * param.grad)
                else:
                    shard_ = local(param)
                    (shard_ if way else shard_.data).sub_(0.1 * local(param.grad))
                param.grad = None
    side.weights("trained", model)


@ends(EXACT)
def foreach_operations(side: Side) -> None:
    """foreach operations on weights, where full parameters stay"""
    model = shard(side, Net(), reshard_after_forward=False)
    if side.is_sharded:
        model.set_reshard_after_backward(False)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.9)
        model.zero_grad()
        side.rows(f"output {step}", model(side.batch(step)))


@ends(EXACT)
def noise_like_weights(side: Side) -> None:
    """Noise drawn by `randn_like(p)`"""
    model = shard(side, Net())
    torch.manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    side.weights("noisy", model)


@ends(EXACT)
def noise_of_each_ranks_seed(side: Side) -> None:
    """The same in replicas, where each rank has a seed of its own (for dropout): all draw what the first does"""
    model = shard(side, Net(), **hsdp(side, 1))
    torch.manual_seed(side.rank)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    side.weights("noisy", model)


@ends(
    LOUD,
    advises="Call full_tensor() on the DTensor, on every rank (`total += p.grad.norm().full_tensor()`)",
    ways="full_tensor",
)
def norms_added_to_a_plain_total(side: Side, way: str = "") -> None:
    """`total += param.grad.norm()` with a plain total"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    total = torch.zeros(())
    for param in model.parameters():
        norm = param.grad.norm()
        total += (whole(norm) if way else norm) ** 2
    side.value("norm", total.sqrt())


@ends(EXACT)
def backward_of_chosen_parameters(side: Side) -> None:
    """`backward(inputs=...)` with parameters of the model"""
    model = shard(side, Net())
    for step in range(2):
        loss_of(model(side.batch(step))).backward(inputs=list(model.blocks.parameters()))
    side.grads("gradients", model)


@ends(EXACT)
def penalty_added_to_the_loss(side: Side) -> None:
    """`loss + penalty` of all parameters (L2, EWC)"""
    model = shard(side, Net())
    for step in range(2):
        penalty = sum(param.square().sum() for param in model.parameters())
        (loss_of(model(side.batch(step))) + 0.1 * penalty).backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    advises="Write full_tensor() behind the latter (`loss + penalty.full_tensor()`), or compute it inside",
    ways=("full_tensor", "inside"),
)
def penalty_added_by_a_function(side: Side, way: str = "") -> None:
    """The same by `torch.add(loss, penalty)`"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    with full_params(side, model) if way == "inside" else nullcontext():
        penalty = sum(param.square().sum() for param in model.parameters())
        torch.add(loss, whole(penalty) if way else penalty).backward()
    side.grads("gradients", model)


class Weighted(Net):
    """With the logarithm of a loss's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(()))


@ends(EXACT)
def weight_of_this_ranks_number(side: Side) -> None:
    """A scalar parameter outside forward, times what each rank's rows come to (SAC's temperature)"""
    model = shard(side, Weighted())
    optimizer = sgd(model)
    for step in range(3):
        output = model(side.batch(step))
        own = output.detach().square().mean()
        (loss_of(output) - model.log_weight.exp() * (own - 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(
    LOUD,
    advises="To have them in .grad, call backward(inputs=...); or call the model and torch.autograd.grad inside",
    ways=("backward", "inside"),
)
def gradients_by_parameters(side: Side, way: str = "") -> None:
    """`torch.autograd.grad` by the model's parameters, unused ones allowed"""
    model = shard(side, Net())
    params = dict(model.named_parameters())
    if way == "backward":
        loss_of(model(side.batch(0))).backward(inputs=list(params.values()))
        return side.grads("gradients", model)
    with full_params(side, model) if way else nullcontext(params) as params:
        loss = loss_of(model((Side() if way else side).batch(0)))
        slopes = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    for name, slope in zip(params, slopes, strict=True):
        side.value(name, slope)
    return None


class Adjoint(torch.autograd.Function):
    """Keeps no graph, but runs the module once more in backward, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *params)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.module(x)
        return None, *torch.autograd.grad(output, (x, *params), gradient, allow_unused=True)


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(Adjoint.apply(self.inner, x, *self.inner.parameters()))


@ends(LOUD, "inner.weight: torch.autograd.grad has no gradients of sharded parameters")
def adjoint_of_a_sharded_module(side: Side) -> None:
    """A function asks for gradients by the parameters that it has saved, of a module sharded by itself"""
    model = Solver()
    side.fully_shard(model.inner)
    train(side, side.fully_shard(model))


@ends(EXACT)
def adjoint_in_one_group(side: Side) -> None:
    """The same, of a module that shares the group of the one around it"""
    train(side, side.fully_shard(Solver()))


class KeepsReferences(Net):
    """Holds weights where no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [block.up.weight for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight.T) @ weight
        return super().forward(x)


@ends(LOUD, "no parameter of the model any more")
def weights_in_a_list(side: Side) -> None:
    """Weights that a model keeps in a list of its own"""
    train(side, shard(side, KeepsReferences()))


@ends(LOUD, "no parameter of the model any more", advises="Use what modules have now", ways="now")
def tied_to_a_module_outside(side: Side, way: str = "") -> None:
    """Weights tied to a module that is not sharded"""
    model, head = Net(), nn.Linear(5, 5).double()
    head.weight = model.stem.weight
    shard(side, model)
    loss_of(model(side.batch(0)) @ (whole(model.stem.weight) if way else head.weight)[:3]).backward()
    side.grads("gradients", model)


@ends(
    LOUD,
    "has a gradient, of which nobody knows",
    advises="Call step() or zero_grad() before fully_shard",
    ways=("step", "zero_grad"),
)
def gradients_from_before(side: Side, way: str = "") -> None:
    """Gradients from before `fully_shard`"""
    model = Net()
    loss_of(model((Side() if way else side).batch(0))).backward()
    if way == "step":
        sgd(model).step()
    if way:
        model.zero_grad()
    train(side, shard(side, model))


@ends(
    LOUD,
    "this rank holds a value that is still to be reduced",
    advises="Call full_tensor().item() instead, on every rank",
    ways="full_tensor",
)
def items(side: Side, way: str = "") -> None:
    """`p.norm().item()`"""
    model = shard(side, Net())
    norms = [param.norm() for param in model.parameters()]
    side.value("norms", torch.tensor([(whole(norm) if way else norm).item() for norm in norms]))


@ends(EXACT)
def not_a_number(side: Side) -> None:
    """`if p.grad.isnan().any():`, on two ranks one of which has some"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    with torch.no_grad():
        last = torch.arange(5.0) == 4
        if side.is_sharded:
            last = distribute_tensor(last, model.stem.bias.device_mesh, model.stem.bias.placements)
        model.stem.bias.grad.masked_fill_(last, float("nan"))
    found = [name for name, param in model.named_parameters() if param.grad.isnan().any()]
    side.value("not a number", found)


@ends(EXACT)
def flags_counted(side: Side) -> None:
    """`p.grad.isnan().any().float()`, added up, or a factor of the gradient; and counts, as of zeros"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    flags = [(param.grad.abs() > 1e-9).any() for param in model.parameters()]
    side.value("sum", sum(flag.double() for flag in flags))
    side.value("stacked", torch.stack(flags).sum())
    counts = [(param > 0).sum() for param in model.parameters()]
    side.value("counted", sum(counts))
    side.value("share", sum(counts[1:], counts[0]) / 3)
    with torch.no_grad():
        for param, flag in zip(model.parameters(), flags, strict=True):
            param.grad.mul_(flag.double())
    side.grads("gradients", model)


@ends(EXACT)
def norms_of_columns_added(side: Side) -> None:
    """`p.norm(dim=0).sum()` (group lasso), as a value and as a penalty"""
    model = shard(side, Net())
    penalty = sum(block.up.weight.norm(dim=0).sum() for block in model.blocks)
    side.value("value", penalty.detach())
    (loss_of(model(side.batch(0))) + 0.1 * penalty).backward()
    side.grads("gradients", model)


@ends(EXACT)
def statistics_stacked(side: Side) -> None:
    """`torch.stack([p.mean(), p.norm(), p.max(), p.sum()])`"""
    model = shard(side, Net())
    for name, param in model.named_parameters():
        side.value(name, torch.stack([param.mean(), param.norm(), param.max(), param.sum()]).detach())


@ends(EXACT)
def norms_clamped_in_place(side: Side) -> None:
    """`p.norm().clamp_(min=...)` (adaptive clipping), and numbers filled"""
    model = shard(side, Net())
    for name, param in model.named_parameters():
        side.value(f"{name}: norm", param.detach().norm().clamp_(min=0.5))
        side.value(f"{name}: filled", param.detach().sum().fill_(2.0))


@ends(EXACT)
def item_of_one_element(side: Side) -> None:
    """`log_alpha.exp().item()` of a sharded parameter of one element (SAC)"""
    model = side.fully_shard(nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(2):
        temperature = model.bias.exp().item()
        (temperature * loss_of(model(side.batch(step)))).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.value(f"{step}", [temperature, bool(model.bias > 0)])
    side.weights("trained", model)


@ends(
    LOUD, advises="To give all ranks the same weights, do so before fully_shard, or load them afterwards", ways="before"
)
def broadcast_by_hand(side: Side, way: str = "") -> None:
    """`dist.broadcast` of parameters, as before DDP"""
    torch.manual_seed(side.rank if way else 0)
    model = Net()
    if not way:
        shard(side, model)
    for param in model.parameters() if side.is_sharded else ():
        torch.distributed.broadcast(param.data, 0)
    train(side, shard(side, model) if way else model)


@ends(LOUD, advises="Call full_tensor(), on every rank, for the whole tensor", ways="full_tensor")
def gradients_averaged_by_hand(side: Side, way: str = "") -> None:
    """`dist.all_reduce` of gradients, as without DDP"""
    model = shard(side, Net())
    loss_of(model(side.batch(0))).backward()
    for name, param in model.named_parameters() if side.is_sharded or way else ():
        if way:
            side.value(name, whole(param.grad))
        else:
            torch.distributed.all_reduce(param.grad)
    side.grads("gradients", model)


@ends(
    LOUD,
    advises=(
        "Remove DistributedDataParallel: fully_shard averages",
        "Of a model that is sharded in part, apply fully_shard or fsdp2.replicate to the whole, too",
    ),
    ways=("removed", "fully_shard", "replicate"),
)
def ddp_around(side: Side, way: str = "") -> None:
    """DDP around a sharded model"""
    model: Any = Net()
    for block in model.blocks:
        side.fully_shard(block)
    if way == "replicate" and side.is_sharded:
        fsdp2.replicate(model)
    else:
        side.fully_shard(model)
    if side.is_sharded and not way:
        model = nn.parallel.DistributedDataParallel(model)
    train(side, model)


@ends(LOUD, "Of a model that is sharded in part", only_ours=True)
def ddp_around_a_model_sharded_in_part(side: Side) -> None:
    """DDP around a model whose blocks are sharded"""
    model: Any = Net()
    for block in model.blocks:
        side.fully_shard(block)
    train(side, nn.parallel.DistributedDataParallel(model) if side.is_sharded else model)


@ends(EXACT)
def transforms_around(side: Side) -> None:
    """Trained on a gradient by its inputs from `torch.func.grad`"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(3):
        loss_of(torch.func.grad(lambda x: model(x).square().sum())(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def parameters_as_a_vector(side: Side) -> None:
    """`parameters_to_vector`, of ranks that hold different numbers of rows: a penalty"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        penalty = nn.utils.parameters_to_vector(model.parameters()).square().sum()
        (loss_of(model(side.batch(step))) + (penalty.full_tensor() if side.is_sharded else penalty)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(EXACT)
def penalties_apart(side: Side) -> None:
    """Two gradient penalties, each with a graph and a backward of its own"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for step in range(2):
        inputs = [side.batch(2 * step + i).requires_grad_() for i in range(2)]
        slopes = [torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0] for x in inputs]
        for slope in slopes:
            slope.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(
    LOUD,
    advises="Call model.set_optimizer_in_backward(optimizer), or step in register_post_accumulate_grad_hook of each",
    ways=("method", "hooks"),
)
def optimizers_in_backward(side: Side, way: str = "") -> None:
    """`_apply_optimizer_in_backward`, which steps where autograd accumulates"""
    from torch.distributed.optim import _apply_optimizer_in_backward  # with a warning

    model = shard(side, Net())
    if way == "method" and side.is_sharded:
        model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.5))
    elif way == "hooks" and side.is_sharded:
        steppers = {param: torch.optim.SGD([param], lr=0.5) for param in model.parameters()}

        def step(param: Any) -> None:
            steppers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
    else:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    for seed in range(2):
        loss_of(model(side.batch(seed))).backward()
    side.weights("trained", model)


class InThree(nn.Linear):
    """Has a state dict in which its weight is in three parts."""

    def __init__(self) -> None:
        super().__init__(5, 9, bias=False)
        self.register_state_dict_post_hook(self.split)

    @staticmethod
    def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state.update(zip("qkv", state.pop(f"{prefix}weight").chunk(3), strict=True))


@ends(LOUD, advises="Take the view again, or the state dict that has it, on every rank", ways=("view", "state dict"))
def checkpoints_of_parts(side: Side, way: str = "") -> None:
    """A checkpoint of parts of a weight, which a hook splits, taken once; saved after training, and loaded in place"""
    model, other = side.fully_shard(InThree()), side.fully_shard(InThree())
    state = model.state_dict()
    train(side, model)
    if way:
        state = model.state_dict() if way == "state dict" else {"q": model.weight.detach()[1:3]}
        for name, value in state.items():
            side.value(name, value * 2)
        return
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        if side.is_sharded:
            dist.broadcast_object_list(folders)
        dcp.save(state, checkpoint_id=folders[0], no_dist=not side.is_sharded)
        dcp.load(other.state_dict(), checkpoint_id=folders[0], no_dist=not side.is_sharded)
        side.weights("loaded", other)


class ExitsEarly(Net):
    def forward(self, x: Tensor, early: bool = False) -> Tensor:
        return self.stem(x) if early else super().forward(x)


@ends(EXACT)
def hook_on_several_gradients(side: Side) -> None:
    """`torch.autograd.graph.register_multi_grad_hook` on parameters, of which some get no gradient"""
    model, calls = shard(side, ExitsEarly()), []
    params = list(model.parameters())

    def note(grads: Any) -> None:
        calls.append([grad is not None for grad in grads])

    torch.autograd.graph.register_multi_grad_hook(params, note)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        loss_of(model(side.batch(step), early=True)).backward()
    side.value("calls", calls)


# ---- functions of what each rank has of its own, and what is computed of shards


@ends(
    LOUD,
    advises="Call full_tensor() on the DTensor, on every rank (`torch.mul(number, penalty.full_tensor())`)",
    ways="full_tensor",
)
def own_number_in_a_function(side: Side, way: str = "") -> None:
    """`torch.mul(loss.detach(), penalty)` of a penalty that is computed of shards"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss, penalty = loss_of(model(side.batch(0))), model.weight.norm()
    torch.mul(loss.detach(), whole(penalty) if way else penalty).backward()
    side.grads("gradients", model)


@ends(EXACT)
def foreach_over_ignored_parameters(side: Side) -> None:
    """`AdamW(foreach=True)` over ignored parameters, which are plain, and sharded ones"""
    model = nn.Linear(5, 3)
    side.fully_shard(model, ignored_params={model.bias})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(2):
        loss_of(model(side.batch(step))).backward()
        if side.is_sharded:
            dist.all_reduce(model.bias.grad)
            model.bias.grad /= side.num_ranks
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


# ---- vectors of all parameters


@ends(EXACT)
def weights_of_a_vector(side: Side) -> None:
    """Task arithmetic by `parameters_to_vector` and `vector_to_parameters`"""
    model, other = shard(side, Net()), shard(side, Net())
    optimizer = sgd(model)
    vectors = [nn.utils.parameters_to_vector(each.parameters()).detach() for each in (model, other)]
    nn.utils.vector_to_parameters(vectors[0].lerp(vectors[1], 0.3), model.parameters())
    train(side, model, optimizer)
    plain = torch.linspace(-1, 1, sum(parameter.numel() for parameter in model.parameters()))
    nn.utils.vector_to_parameters(plain, model.parameters())
    train(side, model, optimizer, name="of a plain one")
