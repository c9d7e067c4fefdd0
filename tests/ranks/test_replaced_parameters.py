"""Tests parameters that users convert, move, replace and reload after sharding: the model trains like the plain one.

Every check does to the sharded model what it does to a plain one, and then trains both.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import assert_same, assert_same_names, assert_shard_of, leaves, run_checks, shard_batch, world_sizes
from models import ConvNet, OddMLP, TinyGPT, TinyModel, mean_loss

ROWS = 12
TOLERANCE = {
    torch.float64: (1e-11, 1e-13),
    torch.float32: (2e-5, 1e-6),
    torch.bfloat16: (5e-2, 5e-3),
    torch.float16: (1e-2, 1e-3),
}


class Twins:
    """A plain model and its sharded copy."""

    def __init__(self, model: TinyModel, wrap: Callable[[nn.Module], object] = fully_shard) -> None:
        self.plain, self.sharded = model, copy.deepcopy(model)
        wrap(self.sharded)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.step = 0
        # Of the least precise dtype that any value has passed through; None: the parameter's own.
        self.precision: torch.dtype | None = None
        self.rebuild_optimizers()

    def rebuild_optimizers(self) -> None:
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.25, foreach=True) for model in (self.plain, self.sharded)
        ]

    def both(self, change: Callable[[nn.Module], object]) -> None:
        change(self.plain)
        change(self.sharded)

    def distribute(self, whole: Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(whole, self.mesh, [Shard(0)]))

    def backward(self) -> None:
        dtype = next(self.plain.parameters()).dtype
        batch = self.plain.example(rows=ROWS, seed=self.step)
        batch = batch.to(dtype) if batch.is_floating_point() else batch
        mean_loss(self.plain(batch)).backward()
        mean_loss(self.sharded(shard_batch(batch, dist.get_rank(), dist.get_world_size()))).backward()

    def train(self, steps: int = 2) -> None:
        """Train both; compare every gradient and every parameter of every step."""
        for _ in range(steps):
            self.backward()
            self.compare(gradients=True)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.compare()
            self.step += 1

    def compare(self, gradients: bool = False) -> None:
        expected, actual = dict(self.plain.named_parameters()), dict(self.sharded.named_parameters())
        assert_same_names(actual, expected)
        for name, p in expected.items():
            rtol, atol = TOLERANCE[self.precision or p.dtype]
            ours = actual[name].grad if gradients else actual[name]
            theirs = p.grad if gradients else p
            assert_shard_of(ours, theirs, rtol, atol, f"step {self.step}, {name}{'.grad' * gradients}")
            if isinstance(ours, DTensor):
                assert ours.stride() == torch.empty(ours.shape, device="meta").stride(), f"{name}: {ours.stride()}"


def new_values(shape: torch.Size, seed: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaves_of_gpt(model: nn.Module) -> None:
    """A group per block, the tied embedding and head in the root."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


# ---- conversions


def converted_before_the_first_forward() -> None:
    for wrap in (fully_shard, leaves):
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            twins = Twins(OddMLP(), wrap)
            twins.both(lambda model, dtype=dtype: model.to(dtype))
            twins.compare()
            twins.train()


def converted_while_training() -> None:
    """The optimizer holds the parameters' objects: those must stay, with new contents."""
    twins = Twins(OddMLP(), leaves)
    objects = list(twins.sharded.parameters())
    for convert in (nn.Module.double, nn.Module.float, nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        twins.both(convert)
        assert all(new is old for new, old in zip(twins.sharded.parameters(), objects, strict=True))
        with torch.no_grad():  # what a low precision has left of the differences of rounding
            for p, ours in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
                p.copy_(ours.full_tensor())
        twins.rebuild_optimizers()
        twins.train()


def converted_between_backward_and_step() -> None:
    """The gradients are converted too, and the next ones are added to them."""
    twins = Twins(OddMLP())
    twins.precision = torch.float32
    twins.backward()
    twins.both(nn.Module.double)
    twins.compare(gradients=True)
    twins.backward()
    twins.compare(gradients=True)


def one_submodule_converted() -> None:
    """The group then holds two dtypes. A plain child module does not know that it belongs to a group."""
    twins = Twins(TinyGPT())
    twins.precision = torch.float32
    for model in (twins.plain, twins.sharded):
        model.blocks[0].norm1.double()
        model.blocks[0].norm1.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.blocks[0].norm1.register_forward_hook(lambda _, args, output: output.float())
    twins.train()


def one_module_of_a_list_converted() -> None:
    twins = Twins(OddMLP(), lambda model: [fully_shard([model.wide, model.narrow]), fully_shard(model)])
    twins.both(lambda model: model.double())
    twins.train()


def converted_under_a_policy() -> None:
    """fp32 computed in bf16, then stored in bf16: no cast is left."""
    model = fully_shard(OddMLP(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for _ in range(2):
        mean_loss(model(model.example(rows=2, seed=0))).backward()
        assert all(p.grad.dtype == p.dtype for p in model.parameters())
        model.zero_grad()
        model.bfloat16()


def moved_to_the_same_device() -> None:
    twins = Twins(OddMLP())
    twins.train(1)
    twins.both(nn.Module.cpu)
    twins.both(lambda model: model.to("cpu"))
    twins.train(1)


def converted_to_channels_last() -> None:
    """Local tensors are dense in another order of dims then; gradients must not be read in it."""
    for before in (0, 1):
        twins = Twins(ConvNet())
        twins.train(before)
        twins.sharded.to(memory_format=torch.channels_last)
        twins.train()


# ---- replaced by assignment


def replaced_by_a_dtensor() -> None:
    for before in (0, 2):
        twins = Twins(OddMLP())
        twins.train(before)
        new = new_values(twins.plain.wide.weight.shape)
        twins.plain.wide.weight = nn.Parameter(new.clone())
        replacement = twins.sharded.wide.weight = twins.distribute(new)
        twins.rebuild_optimizers()
        twins.train()
        assert twins.sharded.wide.weight is replacement


def replaced_by_a_dtensor_of_another_dtype() -> None:
    twins = Twins(OddMLP())
    twins.train(1)
    for name, p in list(twins.plain.named_parameters()):
        module, _, attribute = name.rpartition(".")
        new = new_values(p.shape, dtype=torch.float64)
        setattr(twins.plain.get_submodule(module), attribute, nn.Parameter(new.clone()))
        setattr(twins.sharded.get_submodule(module), attribute, twins.distribute(new))
    twins.rebuild_optimizers()
    twins.train()


def replaced_by_a_dtensor_that_is_not_contiguous() -> None:
    twins = Twins(OddMLP())
    p = twins.plain.wide.weight
    new = new_values(p.shape)
    twins.plain.wide.weight = nn.Parameter(new.clone())
    local = twins.distribute(new).to_local().detach()
    local = local.T.contiguous().T
    replacement = DTensor.from_local(local, twins.mesh, [Shard(0)], shape=p.shape, stride=p.stride())
    twins.sharded.wide.weight = nn.Parameter(replacement)
    twins.rebuild_optimizers()
    twins.train()


def loaded_by_assignment_of_whole_tensors() -> None:
    """A full state dict; the optimizer is built before the next forward: the parameters must be the final ones."""
    for before in (0, 2):
        twins = Twins(TinyGPT(tied=True), leaves_of_gpt)
        twins.train(before)
        state = {name: new_values(value.shape) for name, value in twins.plain.state_dict().items()}
        state["head.weight"] = state["embed.weight"]
        twins.plain.load_state_dict(state)
        twins.sharded.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        assert all(isinstance(p, DTensor) for p in twins.sharded.parameters())
        twins.rebuild_optimizers()
        twins.train()
        assert twins.sharded.embed.weight is twins.sharded.head.weight


def replaced_and_frozen() -> None:
    twins = Twins(OddMLP())
    twins.train(1)
    new = new_values(twins.plain.wide.weight.shape)
    twins.plain.wide.weight = nn.Parameter(new.clone(), requires_grad=False)
    twins.sharded.wide.weight = twins.distribute(new).requires_grad_(False)
    twins.train()


def two_parameters_exchanged() -> None:
    """Each one's values lie where the other's belong: copying one first would lose the other."""
    twins = Twins(TinyGPT())
    twins.train(1)

    def exchange(model: nn.Module) -> None:
        first, second = model.blocks[0].out, model.blocks[1].out
        first.weight, second.weight = second.weight, first.weight

    twins.both(exchange)
    twins.compare()
    twins.train()


def lstm_weights_replaced() -> None:
    """nn.LSTM keeps a second list of its weights."""
    from models import TinyLSTM

    twins = Twins(TinyLSTM())
    twins.train(1)
    new = new_values(twins.plain.lstm.weight_ih_l0.shape)
    twins.plain.lstm.weight_ih_l0 = nn.Parameter(new.clone())
    twins.sharded.lstm.weight_ih_l0 = twins.distribute(new)
    twins.rebuild_optimizers()
    twins.train()


# ---- local tensors


def local_tensor_written_in_place() -> None:
    twins = Twins(OddMLP())
    twins.train(1)
    with torch.no_grad():
        for p, ours in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            p.mul_(2)
            ours.to_local().mul_(2)
    twins.train()


def local_tensor_replaced() -> None:
    """As custom loaders do, which know DTensor's field."""
    twins = Twins(OddMLP())
    twins.train(1)
    with torch.no_grad():
        for p, ours in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            new = new_values(p.shape)
            p.copy_(new)
            ours._local_tensor = twins.distribute(new).to_local().detach()
    twins.train()


def data_assigned() -> None:
    """`p.data = ...` of a DTensor: users see the values, and modules compute with them; what was there before keeps its
    own. Of a whole tensor each rank keeps its part; a plain one of another shape is refused.
    """
    twins = Twins(OddMLP())
    twins.train(1)
    with torch.no_grad():
        for p, ours in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            before, new = ours.data, new_values(p.shape)
            ours.data = twins.distribute(new).data
            assert_same(ours.full_tensor(), new, 0, 0, "assigned")
            assert_same(before.full_tensor(), p, 1e-5, 1e-6, "before")
            with pytest.raises(TypeError, match=r"expected a DTensor, got Tensor of shape \(\d+,\)"):
                ours.data = ours.to_local().new_zeros(ours.numel() + 1)
            p.copy_(new)
    twins.train()


def set_by_a_vector() -> None:
    """A plain one, or the DTensor that `parameters_to_vector` makes; weight decay and averages are done so."""
    twins = Twins(OddMLP())
    twins.train(1)
    before = [p.data for p in twins.sharded.parameters()]
    values = nn.utils.parameters_to_vector(twins.plain.parameters())
    for make in (lambda ours: values * 0.5, lambda ours: nn.utils.parameters_to_vector(ours) * 0.5):
        nn.utils.vector_to_parameters(make(twins.sharded.parameters()), twins.sharded.parameters())
        twins.sharded(twins.plain.example(rows=2, seed=0))
        for p, ours in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
            assert_same(ours, p * 0.5, 1e-5, 1e-6, "set")
        nn.utils.vector_to_parameters(values, twins.sharded.parameters())
    for p, kept in zip(twins.plain.parameters(), before, strict=True):
        assert_same(kept, p, 1e-5, 1e-6, "before")
    twins.train()


# ---- refused, by name, on every rank; situations/parameters.py has other shapes and ties, advised/ placements


def refused(twins: Twins, match: str, change: Callable[[], object], undo: Callable[[], object]) -> None:
    """The next forward fails and names the parameter; when that is put right, training goes on."""
    twins.train(1)
    change()
    for _ in range(2):
        with pytest.raises((ValueError, NotImplementedError), match=match):
            twins.sharded(twins.plain.example(rows=2, seed=0))
    undo()
    twins.train()


def a_parameter_set_to_none_is_refused() -> None:
    twins = Twins(OddMLP())
    original = twins.sharded.wide.bias
    refused(
        twins,
        r"wide\.bias",
        lambda: setattr(twins.sharded.wide, "bias", None),
        lambda: setattr(twins.sharded.wide, "bias", original),
    )


def a_deleted_parameter_is_refused() -> None:
    """Pruning, weight normalisation and parametrisations delete the parameter that they replace."""
    twins = Twins(OddMLP())
    narrow = twins.sharded.narrow
    original, bias = narrow.weight, narrow.bias

    def register_again() -> None:
        del narrow.bias
        narrow.weight, narrow.bias = original, bias

    refused(twins, r"narrow\.weight", lambda: delattr(narrow, "weight"), register_again)


def tie_replaced_in_both_places() -> None:
    twins = Twins(TinyGPT(tied=True))
    twins.train(1)
    new = new_values(twins.plain.head.weight.shape)
    for model, weight in ((twins.plain, nn.Parameter(new.clone())), (twins.sharded, twins.distribute(new))):
        model.embed.weight = model.head.weight = weight
    twins.rebuild_optimizers()
    twins.train()
    assert twins.sharded.embed.weight is twins.sharded.head.weight


def whole_or_cut(twins: Twins, is_whole: bool, values: Tensor) -> Tensor:
    return values.clone() if is_whole else twins.distribute(values)


def tie_loaded_under_one_name_and_tied_again() -> None:
    """Loaders give tied names their values one after the other, and renew the tie: accelerate loads one of two names by
    assignment, transformers calls `tie_weights` at the end. Of the kind: both names loaded, at first with different
    values; a conversion between; whole tensors, which must be sharded before an optimizer is built.
    """
    for is_whole in (False, True):
        for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
            twins = Twins(TinyGPT(tied=True), leaves_of_gpt)
            twins.train(1)
            twins.precision = torch.float32
            values = {name: new_values(twins.plain.embed.weight.shape) + i for i, name in enumerate(names)}
            last = values[names[-1]].double()
            loaded = {name: whole_or_cut(twins, is_whole, value) for name, value in values.items()}
            twins.sharded.load_state_dict(loaded, assign=True, strict=False)
            twins.both(nn.Module.double)
            source, target = (twins.sharded.embed, twins.sharded.head)[:: -1 if names[-1] == "head.weight" else 1]
            target.weight = source.weight
            assert isinstance(source.weight, DTensor)
            assert_same(source.weight, last, 0, 0, "loaded")
            with torch.no_grad():
                twins.plain.embed.weight.copy_(last)
            held = source.weight
            twins.rebuild_optimizers()
            twins.train()
            assert twins.sharded.embed.weight is twins.sharded.head.weight is held


def tie_loaded_under_one_name_is_refused_at_the_next_forward() -> None:
    """If nobody ties it again: on every rank, before anything is gathered. So is one that was given two values."""
    for is_whole in (False, True):
        for names in (["head.weight"], ["embed.weight", "head.weight"]):
            twins = Twins(TinyGPT(tied=True))
            original = twins.sharded.head.weight
            shape = original.shape
            loaded = {name: whole_or_cut(twins, is_whole, new_values(shape) + i) for i, name in enumerate(names)}
            refused(
                twins,
                r"head\.weight.*tied",
                lambda twins=twins, loaded=loaded: twins.sharded.load_state_dict(loaded, assign=True, strict=False),
                lambda twins=twins, original=original: [
                    setattr(module, "weight", original) for module in (twins.sharded.head, twins.sharded.embed)
                ],
            )


CHECKS = [
    converted_before_the_first_forward,
    converted_between_backward_and_step,
    one_submodule_converted,
    one_module_of_a_list_converted,
    converted_under_a_policy,
    moved_to_the_same_device,
    converted_to_channels_last,
    replaced_by_a_dtensor,
    replaced_by_a_dtensor_of_another_dtype,
    replaced_by_a_dtensor_that_is_not_contiguous,
    loaded_by_assignment_of_whole_tensors,
    replaced_and_frozen,
    two_parameters_exchanged,
    lstm_weights_replaced,
    local_tensor_written_in_place,
    local_tensor_replaced,
    data_assigned,
    set_by_a_vector,
    a_parameter_set_to_none_is_refused,
    a_deleted_parameter_is_refused,
    tie_replaced_in_both_places,
    tie_loaded_under_one_name_and_tied_again,
    tie_loaded_under_one_name_is_refused_at_the_next_forward,
    converted_while_training,
]


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_replaced_parameters(world_size: int) -> None:
    """Bit by bit what a user may do to parameters after sharding; each check names itself when it fails."""
    run_checks(world_size, [(check.__name__, check) for check in CHECKS])
