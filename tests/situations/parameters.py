"""Parameters that are more than tensors, and copies, checkpoints and memory of parameters."""

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2 import hf
from models import Wrapper
from outcomes import EXACT, LOUD, Side
from situations.common import (
    Block,
    Net,
    distributed,
    ends,
    follow,
    loaded,
    loss_of,
    sgd,
    shard,
    train,
    weights_of,
    whole,
)

# ---- parameters that are more than tensors


@ends(EXACT)
def hooks_on_parameters(side: Side) -> None:
    """`register_hook` and `register_post_accumulate_grad_hook` on parameters"""
    model, called = Net(), []
    model.head.weight.register_hook(lambda gradient: gradient * 3)
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(tuple(parameter.shape)))
    shard(side, model)
    train(side, model)
    side.value("called", called)


@ends(EXACT)
def attributes_of_parameters(side: Side) -> None:
    """Attributes of parameters, read in the forward and by the optimizer"""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self.weight, "scale", 1.0)

    model = Scaled(5, 3)
    model.weight.scale = 3.0
    model.weight.lr = 0.125
    side.fully_shard(model)
    optimizer = torch.optim.SGD([{"params": [p], "lr": getattr(p, "lr", 0.5)} for p in model.parameters()])
    train(side, model, optimizer)


class Gated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1  # type: ignore[assignment, operator]
        return nn.functional.linear(x, self.weight * getattr(self.weight, "gate", 1.0), self.bias)


@ends(EXACT)
def attributes_set_after_sharding(side: Side) -> None:
    """Attributes of parameters that are set, or changed, after `fully_shard`, and inside a forward"""
    model = side.fully_shard(Gated(5, 3))
    for gate in (None, 2.0, 3.0):
        if gate is not None:
            model.weight.gate = gate
        side.rows(f"gate {gate}", model(side.batch(0)))
    side.value("calls", model.weight.calls)


class Quantised(nn.Parameter):
    """Holds multiples of a scale, which it carries beside its values."""

    scale = 1.0


@ends(EXACT)
def subclasses_of_parameters(side: Side) -> None:
    """A subclass of Parameter, whose class matters in the forward"""

    class Dequantises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Quantised(torch.randn(6, 5))
            self.weight.scale = 3.0

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.scale if isinstance(self.weight, Quantised) else 1.0
            return x @ self.weight.T * scale

    model = side.fully_shard(Dequantises())
    train(side, model)


class Packed(nn.Parameter):
    """Holds int8 values in the bytes of a float64 number, which mean nothing as such."""

    @classmethod
    def of(cls, values: Tensor) -> Any:
        packed: Any = cls((values * 10).round().to(torch.int8).view(torch.float64), requires_grad=False)
        packed.scale = 0.1
        return packed

    def values(self) -> Tensor:
        return self.data.view(torch.int8).double() * self.scale  # type: ignore[attr-defined]


class PackedLinear(nn.Linear):
    """A frozen packed weight, and a bias that is trained."""

    def __init__(self) -> None:
        super().__init__(8, 5)
        self.weight = Packed.of(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.values().T.to(x) + self.bias


@ends(EXACT)
def packed_parameters(side: Side) -> None:
    """A frozen subclass of Parameter whose bytes hold packed values (4-bit weights, QLoRA)"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 8), PackedLinear()))
    train(side, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))


@ends(
    LOUD,
    advises="Pass to MixedPrecisionPolicy param_dtype_override_fn=lambda p: p.dtype if isinstance(p, {}) else None, "
    "which leaves them as they are; with {} in place of p.dtype it casts them.",
    ways="left",
    tolerance=1e-5,
)
def packed_parameters_under_a_policy(side: Side, way: str = "") -> None:
    """The same, with a `param_dtype` that would cast the packed bytes"""
    options = {"param_dtype_override_fn": lambda p: p.dtype if isinstance(p, Packed) else None} if way else {}
    policy = side.policy(param_dtype=torch.float32, output_dtype=torch.float64, **options)
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 8), PackedLinear()), mp_policy=policy)
    train(side, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))


class Multiples(nn.Linear):
    """A frozen weight of multiples of a scale, which a cast leaves what they are."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.weight = Quantised((self.weight.data * 64).round(), requires_grad=False)
        self.weight.scale = 1 / 64  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ (weight * weight.scale).T.to(x) + self.bias


@ends(
    LOUD,
    advises="which leaves them as they are; with {} in place of p.dtype it casts them.",
    ways="cast",
    tolerance=1e-5,
)
def multiples_under_a_policy(side: Side, way: str = "") -> None:
    """The same, of values that a cast leaves what they are"""
    options = {"param_dtype_override_fn": lambda p: torch.float32 if isinstance(p, Quantised) else None} if way else {}
    policy = side.policy(param_dtype=torch.float32, output_dtype=torch.float64, **options)
    model = side.fully_shard(Multiples(), mp_policy=policy)
    train(side, model, torch.optim.SGD([model.bias], lr=0.5))


GATHERS = ("Give the class {}, before the first forward at the latest{}.", ", or put the parameter into ignored_params")


class WithWrapper(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 4)
        self.weight = nn.Parameter(Wrapper(self.weight.data), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x @ weight.inner.T + self.bias


@ends(EXACT, follows="wrappers_that_no_gather_knows")
def gather_set_after_sharding(side: Side) -> None:
    """A tensor subclass that learns how it is gathered (fsdp_pre_all_gather) after `fully_shard`"""

    class Late(Wrapper):
        pass

    model: Any = WithWrapper()
    model.weight = nn.Parameter(Late(model.weight.inner), requires_grad=False)
    side.fully_shard(model)
    Late.fsdp_pre_all_gather = lambda self, mesh: ((self.inner,), None)  # type: ignore[attr-defined]

    def post(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (Late(outputs[0]), outputs)

    Late.fsdp_post_all_gather = post  # type: ignore[attr-defined]
    for seed in range(2):
        side.rows(f"output {seed}", model(side.batch(seed)))


@ends(LOUD, "Give the class fsdp_pre_all_gather and fsdp_post_all_gather", advises=GATHERS, ways="ignored")
def wrappers_that_no_gather_knows(side: Side, way: str = "") -> None:
    """A tensor subclass around other tensors that does not say how it is gathered"""
    model: Any = WithWrapper()
    side.fully_shard(model, ignored_params={model.weight} if way else None)
    for seed in range(2):
        side.rows(f"output {seed}", model(side.batch(seed)))


@ends(LOUD, "Give the class fsdp_post_all_gather, before", only_ours=True)
def wrappers_of_which_a_gather_knows_half(side: Side) -> None:
    """The same, with one of both methods"""

    class Half(Wrapper):
        fsdp_pre_all_gather = None

    Half.fsdp_pre_all_gather = lambda self, mesh: ((self.inner,), None)  # type: ignore[assignment]
    model: Any = WithWrapper()
    model.weight = nn.Parameter(Half(model.weight.inner), requires_grad=False)
    side.rows("output", side.fully_shard(model)(side.batch(0)))


FLATTENED = "Call fsdp2.flatten_optimizer(optimizer) before the first step; if that refuses it"


@torch.library.custom_op("situations::step", mutates_args=("param", "moment"))
def _step(param: Tensor, gradient: Tensor, moment: Tensor) -> None:
    moment.mul_(0.5).add_(gradient)
    param.sub_(moment, alpha=0.5)


class KernelSGD(torch.optim.Optimizer):
    """Steps by an operation of its own, as optimizers of libraries do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            assert param.data_ptr(), "kernels are started with it"
            moment = self.state[param].setdefault("moment", torch.zeros_like(param))
            _step(param, param.grad, moment)


@ends(LOUD, advises=FLATTENED)
def optimizer_with_a_kernel_of_its_own(side: Side) -> None:
    """An optimizer whose step calls a kernel that knows plain tensors only (bitsandbytes)"""
    model = shard(side, Net())
    train(side, model, KernelSGD(model.parameters()))


@ends(EXACT, only_ours=True, follows="optimizer_with_a_kernel_of_its_own")
def flat_optimizer_with_a_kernel_of_its_own(side: Side) -> None:
    """The same, by `fsdp2.flatten_optimizer`, as the error says"""
    model = shard(side, Net())
    optimizer = KernelSGD(model.parameters())
    train(side, model, fsdp2.flatten_optimizer(optimizer) if side.is_sharded else optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x)))


@ends(EXACT)
def tied_in_two_groups(side: Side) -> None:
    """Tied weights in two groups"""
    model = Tied()
    side.fully_shard(model.stem)
    side.fully_shard(model.head)
    side.fully_shard(model)
    train(side, model)


@ends(EXACT)
def tied_in_one_group(side: Side) -> None:
    """Tied weights in one group"""
    train(side, side.fully_shard(Tied()))


@ends(
    LOUD,
    "head.weight was tied to stem.weight when fully_shard was applied",
    advises="Give both the same one, as in {}; or untie them before fully_shard",
    ways=("the same", "untied"),
)
def tied_and_given_two_values(side: Side, way: str = "") -> None:
    """`load_state_dict(assign=True)` of a checkpoint in which tied parameters are two"""
    model = Tied()
    checkpoint = {name: torch.full_like(value, 2.0) for name, value in Tied().state_dict().items()}
    checkpoint["head.weight"] = checkpoint["head.weight"] * 2
    if way == "untied":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    side.fully_shard(model)
    model.load_state_dict(checkpoint, assign=True)
    if way == "the same":
        model.head.weight = model.stem.weight
    train(side, model)


def tied_and_changed(side: Side, way: str, change: Callable[[Any], None], undo: Callable[[Any], None]) -> None:
    """Changes a tied parameter after `fully_shard`, before it, or after it and back again."""
    model = Tied()
    if way == "before":
        change(model)
    side.fully_shard(model)
    if way != "before":
        change(model)
    if way == "each name":
        undo(model)
    train(side, model)


@ends(LOUD, advises="Tie parameters before fully_shard", ways="before", only_ours=True)
def tied_after_sharding(side: Side, way: str = "") -> None:
    """Parameters are tied after `fully_shard`"""
    model = Net()
    for late in (False, True):
        if late:
            side.fully_shard(model)
        if late == (way != "before"):
            model.blocks[1].up.weight = model.blocks[0].up.weight
    train(side, model)


@ends(
    LOUD,
    advises="make such a change before fully_shard, or under each of its names: {}",
    ways=("before", "each name"),
    only_ours=True,
)
def tied_and_replaced_under_one_name(side: Side, way: str = "") -> None:
    """A tied parameter is replaced in one of its modules"""

    def change(model: Any) -> None:
        model.stem.weight = nn.Parameter(distributed(torch.full((5, 5), 0.2), model.stem.weight))

    def repeat(model: Any) -> None:
        model.head.weight = model.stem.weight

    tied_and_changed(side, way, change, repeat)


@ends(LOUD, advises="take it away before fully_shard, or put it back", ways="put back", only_ours=True)
def tied_and_taken_away(side: Side, way: str = "") -> None:
    """A tied parameter is taken out of one of its modules"""
    model = side.fully_shard(Tied())
    kept = model.stem._parameters["weight"]
    if side.is_sharded:
        del model.head.weight
        model.head.register_parameter("weight", None)
        if way:
            model.head.weight = kept
    train(side, model)


@ends(EXACT, tolerance=1e-6)
def mixed_dtypes(side: Side) -> None:
    """Parameters of several dtypes in one group"""
    model = Net()
    model.head.to(torch.float32)
    model.head.register_forward_pre_hook(lambda head, args: (args[0].float(),))
    side.fully_shard(model)
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def scalars(side: Side) -> None:
    """A parameter without dims"""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    model = side.fully_shard(Scale())
    train(side, model, sgd(model, foreach=False))


@ends(EXACT)
def empty_shards_and_fused_optimizer(side: Side) -> None:
    """Parameters with fewer rows than ranks, and a fused optimizer"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)))
    train(side, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


@ends(EXACT)
def ignored_and_foreach(side: Side) -> None:
    """Frozen `ignored_params` and sharded ones in one foreach optimizer, with weight decay"""
    model = Net()
    model.stem.weight.requires_grad_(False)
    shard(side, model, ignored_params={model.stem.weight})
    train(side, model, sgd(model, foreach=True, weight_decay=0.1))


# ---- copies, loading, freezing, errors


@ends(EXACT)
def deep_copies(side: Side) -> None:
    """`copy.deepcopy` of a sharded model, for an EMA"""
    model = shard(side, Net())
    teacher = copy.deepcopy(model)
    train(side, model)
    follow(list(zip(teacher.parameters(), model.parameters(), strict=True)))
    side.rows("evaluated", teacher(side.batch(1)))


@ends(
    LOUD,
    "stem.weight",
    advises=(
        "To load a full state dict, call",
        "To write to one parameter, copy distribute_tensor(plain, p.device_mesh, p.pl",
    ),
    ways=("loaded", "copied"),
)
def plain_state_dict_loaded(side: Side, way: str = "") -> None:
    """`load_state_dict` of whole tensors"""
    weights = {name: value * 2 for name, value in Net().state_dict().items()}
    model = shard(side, Net())
    if way == "loaded":
        loaded(side, model, weights)
    elif way:
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(distributed(weights[name], param))
    else:
        model.load_state_dict(weights)
    side.rows("output", model(side.batch(0)))


@ends(EXACT)
def freezing_and_unfreezing(side: Side) -> None:
    """Parameters frozen and unfrozen between steps"""
    model = shard(side, Net())
    optimizer = sgd(model)
    for trainable in (False, True):
        model.stem.requires_grad_(trainable)
        train(side, model, optimizer, steps=2, name=f"trainable={trainable}")


@ends(EXACT)
def frozen_for_a_forward_in_between(side: Side) -> None:
    """Parameters frozen for a reference forward between a forward and its backward (adapters disabled, as by DPO)"""
    model = shard(side, Net())
    loss = loss_of(model(side.batch(0)))
    model.requires_grad_(False)
    with torch.no_grad():
        side.rows("reference", model(side.batch(1)))
    model.requires_grad_(True)
    loss.backward()
    side.grads("policy", model)


class FreezesItself(Net):
    def forward(self, x: Tensor, trains_head: bool) -> Tensor:
        self.head.requires_grad_(trains_head)
        return super().forward(x)


@ends(EXACT)
def frozen_inside_a_forward(side: Side) -> None:
    """`requires_grad_` inside the forward of the module that holds the parameters"""
    model = shard(side, FreezesItself())
    for step, trains_head in enumerate([True, False, True]):
        loss_of(model(side.batch(step), trains_head)).backward()
        side.value(f"trainable {step}", [parameter.requires_grad for parameter in model.parameters()])
        side.grads(f"step {step}", model)
    model(side.batch(3), False)
    model.requires_grad_(True)
    side.value("trainable", [parameter.requires_grad for parameter in model.parameters()])


@ends(EXACT)
def converted_after_sharding(side: Side) -> None:
    """`model.to(dtype)` after fully_shard"""
    model = shard(side, Net()).to(torch.float32)
    loss_of(model(side.batch(0).float())).backward()
    side.weights("converted", model)


@ends(EXACT)
def aliases_over_a_conversion(side: Side) -> None:
    """A state dict, and detached parameters that somebody writes to, from before a `.to` that changes nothing"""
    model = shard(side, Net())
    kept, aliases = model.state_dict(), [parameter.detach() for parameter in model.parameters()]
    model.to("cpu")
    model.head.to(torch.float64)
    train(side, model)
    for name, value in kept.items():
        side.value(f"kept {name}", value)
    for alias in aliases:
        alias.mul_(0.5)
    side.weights("written", model)
    side.rows("output", model(side.batch(3)))


@ends(EXACT)
def state_dict_on_one_rank(side: Side) -> None:
    """`state_dict()` on one rank alone, to count what is in it, while full parameters stay"""
    model = shard(side, Net())
    if side.is_sharded:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    for step in range(2):
        loss = loss_of(model(side.batch(step)))
        if side.rank == 0:
            assert len(model.state_dict()) == len(list(model.parameters()))
        loss.backward()
        if side.rank == 0:
            assert len(model.state_dict()) == len(list(model.parameters()))
        side.rows(f"output {step}", model(side.batch(step)))
    side.grads("all", model)


@ends(LOUD, "get_model_state_dict")
def full_state_dict_of_fsdp1(side: Side) -> None:
    """`FSDP.state_dict_type(model, FULL_STATE_DICT)`, left over from FSDP1"""
    model = shard(side, Net())
    with FSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT) if side.is_sharded else nullcontext():
        for name, value in model.state_dict().items():
            side.shown[name] = value


@ends(EXACT)
def step_after_an_error(side: Side) -> None:
    """A step after an exception in forward"""
    model = shard(side, Net())
    try:
        model(side.batch(0, width=4))
    except RuntimeError:
        train(side, model)


class Float8Layer(nn.Module):
    """A layer whose weight is MXFP8: float8, with the exponents of scales beside it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(3, 5, dtype=torch.float8_e4m3fn)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(torch.ones(3))
        self.weight_scale_inv = nn.Parameter(torch.full((3, 1), 127, dtype=torch.uint8), requires_grad=False)


@ends(LOUD, "expected FP8 values with floating-point scales", only_ours=True)
def quantised_files(side: Side) -> None:
    """Files of float8 weights with scales, loaded into plain weights by `fsdp2.hf`, whatever else is in the files"""
    model = side.fully_shard(nn.Linear(5, 3))
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if side.is_sharded:
            dist.broadcast_object_list(folders)
            hf.save_model(Float8Layer(), f"{folders[0]}/files")
            hf.load_model(model, f"{folders[0]}/files", strict=False)
    side.rows("output", model(side.batch(0)))


# ---- memory that two share, and copies


@ends(
    LOUD,
    "share memory",
    advises="Tie them as one nn.Parameter, in one group, or copy one of them",
    ways=("tied", "copied"),
)
def tied_by_data(side: Side, way: str = "") -> None:
    """Weights of two groups tied by `nn.Parameter(other.data)`"""
    model = Net()
    data = model.blocks[0].up.weight.data
    model.blocks[1].up.weight = nn.Parameter(data.clone() if way == "copied" else data)
    if way == "tied":
        model.blocks[1].up.weight = model.blocks[0].up.weight
    train(side, side.fully_shard(model) if way == "tied" else shard(side, model))


class Overlapping(nn.Module):
    """Two parameters, of which one is rows of the other; or copies them, or takes them in forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.rows, self.way = nn.Parameter(torch.randn(5, 5)), way
        if way != "sliced":
            later = self.rows.data[2:]
            self.later = nn.Parameter(later.clone() if way == "copied" else later)

    def forward(self, x: Tensor) -> Tensor:
        later = self.rows[2:] if self.way == "sliced" else self.later
        return (x @ self.rows).tanh() @ later.t()


@ends(
    LOUD,
    advises="Make one nn.Parameter of all of it, and slice that in forward; or copy one of them",
    ways=("sliced", "copied"),
    only_ours=True,
)
def rows_of_another_parameter(side: Side, way: str = "") -> None:
    """A parameter of some rows of another one's memory"""
    train(side, side.fully_shard(Overlapping(way)))


class Scaled(Block):
    """By a buffer that is its weight, a copy of it, or computed in forward."""

    def __init__(self, way: str) -> None:
        super().__init__()
        data, self.way = self.up.weight.data, way
        self.register_buffer("scale", {"copied": data.clone(), "computed": None}.get(way, data))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.up.weight.detach() if self.way == "computed" else self.scale).norm()


@ends(LOUD, "a buffer", advises="Copy it, or compute it in forward", ways=("copied", "computed"))
def buffer_over_a_weight(side: Side, way: str = "") -> None:
    """A buffer over a weight's memory"""
    train(side, side.fully_shard(Scaled(way)))


@ends(
    LOUD,
    "built inside a forward",
    advises="Build it outside, from model.parameters(), which are sharded there",
    ways="outside",
)
def optimizer_built_in_forward(side: Side, way: str = "") -> None:
    """Optimizer built inside the first forward"""
    model, built = Net(), []

    def build(*_: Any) -> None:
        if not built:
            built.append(sgd(model))

    if not way:
        model.register_forward_pre_hook(build)
    shard(side, model)
    if way:
        build()
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        built[0].step()
        built[0].zero_grad()
    side.weights("trained", model)


# ---- shards with nothing in them, and what torch's own layers read


@ends(EXACT)
def clipped_by_the_largest(side: Side) -> None:
    """Gradients clipped by their largest element, where some ranks hold no row"""
    model = side.fully_shard(nn.Linear(5, 1))
    for step in range(2):
        optimizer = sgd(model)
        loss_of(model(side.batch(step))).backward()
        side.value(f"norm {step}", nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    side.value("largest", model.weight.abs().max())
    side.weights("trained", model)


@ends(EXACT)
def evaluated_encoder_layer(side: Side) -> None:
    """`nn.TransformerEncoderLayer` evaluated, a part of which is sharded by itself"""
    model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    for part in (model.self_attn, model.linear1):
        side.fully_shard(part)
    side.fully_shard(model).eval()
    with torch.no_grad():
        side.rows("output", model(side.batch(0, 12).view(-1, 2, 6)))


@ends(EXACT)
def copy_after_backward(side: Side) -> None:
    """`deepcopy` after a backward, which copies no gradients"""
    model = side.fully_shard(nn.Linear(5, 3))
    loss_of(model(side.batch(0))).backward()
    other = copy.deepcopy(model)
    loss_of(other(side.batch(1))).backward()
    side.grads("of the copy", other)


# ---- models that torch's own FSDP2 has sharded


def shard_by_torch(side: Side, model: Net) -> Net:
    for each in [*model.blocks, model] if side.is_sharded else ():
        torch_fully_shard(each)
    return model


@ends(EXACT)
def tools_around_torchs_own(side: Side) -> None:
    """Weights are scaled, gradients clipped, and steps flat, on a model that torch's FSDP2 has sharded"""
    model = shard_by_torch(side, Net())
    with torch.no_grad():
        model(side.batch(3))  # leaves the root's own weights unsharded
    with fsdp2.full_params(model, writeback=True) if side.is_sharded else torch.no_grad(), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    optimizer = sgd(model)
    clip = fsdp2.clip_grad_norm_ if side.is_sharded else torch.nn.utils.clip_grad_norm_
    if side.is_sharded:
        fsdp2.flatten_optimizer(optimizer)
    for step in range(3):
        loss_of(model(side.batch(step))).backward()
        side.value(f"norm {step}", clip(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    side.weights("trained", model)


@ends(LOUD, "Pass an option for copies without gradients")
def a_loss_on_torchs_unsharded_weights(side: Side) -> None:
    """A penalty on whole weights, of which torch's FSDP2 would not reduce the gradients"""
    model = shard_by_torch(side, Net())
    weights = fsdp2.full_params(model) if side.is_sharded else nullcontext(dict(model.named_parameters()))
    with weights as found:
        (loss_of(model(side.batch(0))) + found["head.weight"].square().mean()).backward()
    side.weights("untrained", model)


# ---- modules that have no forward of their own


@ends(
    LOUD,
    advises=("or pass them as a list to share one group", "Apply fully_shard to {}"),
    ways=("each", "list"),
    only_ours=True,
)
def layers_of_a_list(side: Side, way: str = "") -> None:
    """`fully_shard(model.blocks)`, which is a ModuleList"""
    model = Net()
    for modules in {"each": [*model.blocks], "list": [[*model.blocks]]}.get(way, [model.blocks]):
        side.fully_shard(modules)
    train(side, side.fully_shard(model))


class ScaledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scales[0]).tanh() * self.scales[1]


@ends(LOUD, advises="the module that holds it, whose forward reads them", ways="around", only_ours=True)
def parameters_of_a_list(side: Side, way: str = "") -> None:
    """The same of a ParameterList"""
    model = ScaledTwice()
    side.fully_shard(model if way else model.scales)
    train(side, model)


class Tokens(nn.Module):
    """An embedding that is tied to the head, or not; a block between them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 5), nn.ModuleList([Block()])
        self.head = nn.Linear(5, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embed((x.abs() * 5).long() % 10)))


def resized(side: Side, way: str, resize: Callable[[Any], None], tied: bool = False) -> None:
    """Resizes an embedding of a sharded model, before `fully_shard`, or builds another that loads what was there."""
    model: Any = Tokens(tied)
    if way == "before":
        resize(model)
    shard(side, model)
    if way == "anew":
        weights, model = weights_of(model), Tokens(tied)
        resize(model)
        shard(side, model)
        for name in ("embed.weight", "head.weight")[: 1 + tied]:
            weights[name] = torch.cat([weights[name], torch.zeros(2, 5)])
        loaded(side, model, weights)
    elif not way:
        resize(model)
    train(side, model)


def rows_added(model: Any) -> None:
    """As `resize_token_embeddings` of transformers does it: a new module is filled, and its memory put into the old."""
    new = nn.Embedding(12, 5)
    new.weight.data.zero_()
    new.weight.data[:10, :] = model.embed.weight.data[:10, :]
    model.embed.weight.data = new.weight.data
    model.embed.num_embeddings = 12


@ends(
    LOUD,
    advises="To resize a parameter (an embedding, for new tokens), do so before fully_shard",
    ways="before",
    only_ours=True,
)
def tokens_added_after_sharding(side: Side, way: str = "") -> None:
    """`resize_token_embeddings` after `fully_shard`"""
    resized(side, way, rows_added)


@ends(LOUD, advises="do so before fully_shard", ways=("before", "anew"), only_ours=True)
def tokens_added_to_a_tied_embedding(side: Side, way: str = "") -> None:
    """The same, where the head is tied to the embedding"""
    resized(side, way, rows_added, tied=True)


def more_rows(param: Tensor) -> Tensor:
    return torch.cat([whole(param).detach(), torch.zeros(2, 5)])


@ends(
    LOUD,
    advises="Only one of the same shape can replace it: resize it before fully_shard, or build the model anew with",
    ways=("before", "anew"),
    only_ours=True,
)
def a_parameter_of_another_shape(side: Side, way: str = "") -> None:
    """A parameter of another shape is assigned"""

    def resize(model: Any) -> None:
        model.embed.weight = nn.Parameter(more_rows(model.embed.weight))

    resized(side, way, resize)


@ends(LOUD, advises="before fully_shard", ways=("before", "anew"), only_ours=True)
def a_tied_module_of_another_shape(side: Side, way: str = "") -> None:
    """A tied embedding is replaced by another module, and tied again"""

    def resize(model: Any) -> None:
        weight = more_rows(model.embed.weight)
        model.embed = nn.Embedding(12, 5)
        model.embed.weight.data = weight
        model.head.weight = model.embed.weight

    resized(side, way, resize, tied=True)
