"""Tests `full_params`: unsharded parameters that are differentiable anywhere, or copies to export or to edit.

The oracle is a plain model, all of whose parameters are full anyway.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, full_params, fully_shard, replicate, set_checks
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.group import SHARDED
from fsdp2.engine.state import groups_below
from fsdp2.shards.ours import OurGroup
from helpers import assert_same, full, run_checks, shard_batch, world_sizes
from scenarios import WIDTH, Net, Run, Wrap, blocks, check, kept, leaves, loss_of, sgd, train_and_evaluate, whole

# ---- differentiable use, beside plain training -----------------------------------------------------------------------


def whole_params(run: Run, given: Any, **options: Any) -> Any:
    """What `full_params` yields, on the plain side too."""
    if run.sharded:
        return full_params(given, **options)
    return contextlib.nullcontext(dict(given.named_parameters()) if isinstance(given, nn.Module) else given)


class Probe(Net):
    """`use` computes with its head, and with whatever else, as it likes."""

    def __init__(self, run: Run, use: Callable[..., Tensor]) -> None:
        super().__init__(2)
        self.run, self.use = run, use

    def hidden(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.run, self, self.hidden(x))


def in_forward(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    with whole_params(run, model.head):
        return F.linear(hidden, model.head.weight, model.head.bias)


def by_parameter(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    with whole_params(run, [model.head.weight, model.blocks[0].up.weight]) as (weight, up):
        return F.linear(hidden, weight) * up.square().mean()


def around_a_call(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    with whole_params(run, model.head) as named:
        return model.head(hidden) + named["weight"].sin().sum() + model.head(hidden.sin())


def after_a_call(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    called = model.head(hidden)
    with whole_params(run, model.head), whole_params(run, model.head.weight) as weight:
        return called + weight.norm(dim=1)


def of_the_running(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    with whole_params(run, model):
        hidden = hidden * model.blocks[1].down.weight.cos().mean()
    return model.head(hidden)


def recomputed(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    return checkpoint(lambda h: in_forward(run, model, h).tanh(), hidden, use_reentrant=False)


def recomputed_reentrant(run: Run, model: Probe, hidden: Tensor) -> Tensor:
    reentrant = torch.is_grad_enabled()  # which warns without
    return checkpoint(lambda h: in_forward(run, model, h).tanh(), hidden, use_reentrant=reentrant)


USES = (in_forward, by_parameter, around_a_call, after_a_call, of_the_running, recomputed, recomputed_reentrant)


def test_in_forward() -> None:
    """An outer forward computes with another module's weight. The second step accumulates."""

    def scenario(run: Run, use: Callable[..., Tensor], wrap: Wrap) -> None:
        model = run.build(Probe, run, use)
        wrap(run, model)
        train_and_evaluate(run, model, steps=2)

    check(scenario, use=USES, wrap=(whole, kept, leaves, blocks))


def loss_after(run: Run, model: Any, x: Tensor) -> Tensor:
    """A fused loss: the model returns what its head would be called with."""
    hidden = model(x)
    with whole_params(run, model.head):
        return loss_of(F.linear(hidden, model.head.weight, model.head.bias))


def loss_around(run: Run, model: Any, x: Tensor) -> Tensor:
    with whole_params(run, model.head) as named:
        return loss_of(F.linear(model(x), named["weight"]))


def penalty_before(run: Run, model: Any, x: Tensor) -> Tensor:
    with whole_params(run, model.parameters()) as params:
        penalty = sum(param.square().sum() for param in params)
    return loss_of(model(x)) + 0.1 * penalty


def penalty_alone(run: Run, model: Any, x: Tensor) -> Tensor:
    with whole_params(run, model.blocks) as named:
        return sum(param.exp().mean() for param in named.values())  # type: ignore[return-value]


def merged_twice(run: Run, model: Any, x: Tensor) -> Tensor:
    """A merge of two weights, used in another block."""
    with whole_params(run, model.blocks[0].up.weight) as first:
        merged = first @ first.T
    with whole_params(run, model.blocks[1].up.weight) as second:
        return (merged @ second).norm() + loss_of(model(x))


def gradient_penalty(run: Run, model: Any, x: Tensor) -> Tensor:
    """A backward runs inside the block, and its graph is differentiated behind it."""
    x = x.clone().requires_grad_()
    with whole_params(run, model.head.weight) as weight:
        (gradient,) = torch.autograd.grad(F.linear(model(x).sin(), weight).sin().sum(), x, create_graph=True)
    return gradient.square().mean()


OUTSIDE = (loss_after, loss_around, penalty_before, penalty_alone, merged_twice, gradient_penalty)


def test_outside_of_forward() -> None:
    """Gradients of what a block computes come in the same backward as those of forwards, and are reduced once."""

    def scenario(run: Run, loss: Callable[..., Tensor], wrap: Wrap) -> None:
        model = run.build(Probe, run, lambda run, model, hidden: hidden)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            if step == 1:
                run.set_sync(model, False)
                loss(run, model, run.batch(seed=10)).backward()
                run.set_sync(model, True)
            run.step(f"step {step}", model, optimizer, loss(run, model, run.batch(seed=step)))

    check(scenario, loss=OUTSIDE, wrap=(whole, kept, leaves, blocks))


def test_other_settings() -> None:
    """Groups of a list, parts that stay after forward, weights that stay after backward, zeros for what is unused."""

    def merged(run: Run, model: Probe, hidden: Tensor) -> Tensor:
        with whole_params(run, [model.stem.weight, model.head.weight]) as (first, last):
            hidden = F.linear(hidden, first @ last)
        return model.head(hidden)

    def scenario(run: Run, setting: str) -> None:
        model = run.build(Probe, run, merged)
        keeps = {"reshard_after_forward": 2} if setting == "a part stays" else {}
        run.shard([model.stem, model.head], **keeps)
        run.shard(model, **keeps)
        if run.sharded:
            model.set_reshard_after_backward(setting != "they stay")
            model.set_reduce_scatter_unused_params(setting == "unused")
        optimizer = sgd(model)
        for step in range(2):
            run.step(f"step {step}", model, optimizer, loss_after(run, model, run.batch(seed=step)))

    check(scenario, setting=["lists", "a part stays", "they stay", "unused"])


def test_parameters_left_by_an_earlier_forward_are_not_used() -> None:
    """Blocks see the parameters as they are now, whatever was kept for a backward that never came."""

    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Probe, run, in_forward)
        wrap(run, model)
        optimizer = sgd(model)
        loss_of(model(run.batch(seed=1))).backward()
        model(run.batch(seed=2))
        run.step("step", model, optimizer)
        for options in ({}, {"dtype": torch.float64}):
            with whole_params(run, model, **options) as named:
                for name, param in named.items():
                    run.value(name, param)

    check(scenario, wrap=[whole, kept])


def raises_once(run: Run, model: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(KeyError), whole_params(run, model.head) as named:
        _ = loss_of(model(x)) + named["weight"].sum()
        raise KeyError("on purpose")
    return loss_after(run, model, x)


def test_after_an_exception() -> None:
    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Probe, run, lambda run, model, hidden: hidden)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            run.step(f"step {step}", model, optimizer, raises_once(run, model, run.batch(seed=step)))

    check(scenario, wrap=[blocks, whole])


# ---- writing back, beside plain training -----------------------------------------------------------------------------


def in_place(model: Net, copies: bool) -> None:
    model.head.weight.mul_(1.5)
    model.blocks[0].up.bias.fill_(0.25)
    model.scale[1:3] = 2.0


def by_assignment(model: Net, copies: bool) -> None:
    flipped = model.head.weight.flip(0)
    if copies:
        model.head.weight = nn.Parameter(flipped)
    else:
        model.head.weight.copy_(flipped)  # plain training goes on with the parameter that its optimizer holds
    model.scale.data = model.scale.data + 1e-9  # less than fp32 holds


def by_loading(model: Net, copies: bool) -> None:
    rolled = {name: value.roll(1, 0) for name, value in model.state_dict().items()}
    model.load_state_dict(rolled, assign=copies)


def by_initialising(model: Net, copies: bool) -> None:
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)


EDITS = (in_place, by_assignment, by_loading, by_initialising)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_writing_back(world_size: int) -> None:
    """Between steps whose optimizer has momentum, after an evaluation that leaves full parameters behind."""

    def scenario(run: Run, edit: Callable[[Net, bool], None], wrap: Wrap, to_cpu: bool) -> None:
        model = run.build(Net, 1)
        wrap(run, model)
        optimizer = sgd(model, momentum=0.5)
        run.step("before", model, optimizer, loss_of(model(run.batch(seed=1))))
        model(run.batch(seed=2))
        with whole_params(run, model, writeback=True, **({"offload_to_cpu": True} if to_cpu else {})), torch.no_grad():
            edit(model, run.sharded)
        run.params("written", model)
        run.step("after", model, optimizer, loss_of(model(run.batch(seed=3))))

    check(scenario, world_size, edit=EDITS, wrap=(whole, kept, blocks), to_cpu=(False, True))


def compare(model: nn.Module, plain: nn.Module) -> None:
    """Every parameter is the plain one's, to the last bit, and sharded."""
    params = dict(model.named_parameters())
    assert all(isinstance(param, DTensor) for param in params.values())
    for name, other in plain.named_parameters():
        assert_same(params.pop(name), other, 0, 0, name)
    assert not params


class Odd(nn.Module):
    """A matrix nothing divides, a scalar, one parameter under two names, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(7, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.first(x) + self.second(x)) @ self.matrix


def pair(**options: Any) -> tuple[Any, nn.Module]:
    """A sharded and a plain model, alike."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Odd())
    return fully_shard(models[0], **options), models[1]


def odd_ones() -> None:
    model, plain = pair(shard_placement_fn=lambda param: Shard(param.dim() - 1) if param.dim() else None)
    with full_params(model, writeback=True) as named, torch.no_grad():
        assert list(named) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
        assert model.second.weight is model.first.weight is named["second.weight"]
        for each in (model, plain):
            each.matrix.add_(1)
            each.scale.mul_(2)
            each.count.add_(2)
            each.second.weight.neg_()
    compare(model, plain)


def mixed_precision() -> None:
    """What is written is not rounded to the dtype of compute."""
    model, plain = pair(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
    with full_params(model) as named:
        assert named["matrix"].dtype == torch.bfloat16
    with full_params([model.matrix], writeback=True) as (matrix,), torch.no_grad():
        for each in (matrix, plain.matrix):
            each.add_(1e-6)
    compare(model, plain)


def offloaded() -> None:
    model, plain = pair(offload_policy=CPUOffloadPolicy())
    with full_params(model.matrix, writeback=True) as matrix:
        matrix.copy_(plain.matrix.detach().cos())
    plain.matrix.data.cos_()
    compare(model, plain)


def with_whole_gradients() -> None:
    """Copies have them, with any of the other options; what has none has None. They can't be written."""
    for options in ({}, {"dtype": torch.float64}, {"offload_to_cpu": True}, {"rank0_only": True}):
        for shard in (fully_shard, replicate):
            torch.manual_seed(1)
            plain = Net(2)
            model: Any = copy.deepcopy(plain)
            shard(model)
            model.head.requires_grad_(False)
            x = torch.randn(2 * dist.get_world_size(), WIDTH, generator=torch.Generator().manual_seed(3))
            model(shard_batch(x, dist.get_rank(), dist.get_world_size())).square().mean().backward()
            plain(x).square().mean().backward()
            with full_params(model, with_grads=True, **options) as named:
                for name, other in plain.named_parameters():
                    gradient, has_none = named[name].grad, name.startswith("head")
                    assert (gradient is None) is has_none, name
                    if not has_none and gradient.is_meta:
                        assert "rank0_only" in options
                        assert dist.get_rank() > 0
                    elif not has_none:
                        assert_same(gradient, other.grad.to(options.get("dtype")), 1e-5, 1e-6, name)  # type: ignore
            for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(param.grad, None if name.startswith("head") else other.grad, 1e-5, 1e-6, name)
    with pytest.raises(RuntimeError, match="modified inside full_params"), full_params(model, with_grads=True) as named:
        named["stem.weight"].grad.zero_()
    with pytest.raises(ValueError, match="gradients are not written back"):
        full_params(model, with_grads=True, writeback=True)
    with pytest.raises(TypeError, match="with_grads"):
        full_params(model, with_grads=1)  # type: ignore[call-overload]


def nan_and_zeros_of_either_sign() -> None:
    model, _plain = pair()
    for value in (float("nan"), 0.0, -0.0):
        with full_params(model.matrix, writeback=True) as matrix:
            matrix.fill_(value)
        assert torch.equal(full(model.matrix).view(torch.int32), torch.full((5, 7), value).view(torch.int32))


@contextlib.contextmanager
def refused(error: type[Exception], text: str, given: Any, **options: Any) -> Iterator[Any]:
    """A block that raises, inside or at its end."""
    with pytest.raises(error, match=text), full_params(given, **options) as yielded, torch.no_grad():
        yield yielded


def ranks_that_disagree() -> None:
    """An error on every rank; nothing is written, of no group."""
    model, plain = pair()
    before = full(model.matrix).clone()
    text = "nothing was written back. matrix: ranks have given it different values"
    with refused(ValueError, text, model, writeback=True) as named:
        named["first.bias"].zero_()
        named["matrix"][0, 0] += dist.get_rank()
    assert_same(full(model.matrix), before, 0, 0, "matrix")
    compare(model, plain)


def what_can_not_be_written() -> None:
    model, plain = pair()

    def replace(name: str, value: Tensor) -> Callable[[], None]:
        return lambda: setattr(model, name, nn.Parameter(value))

    def untie() -> None:
        model.second.weight = nn.Parameter(torch.ones(5, 7))

    def give_two() -> None:
        model.first.weight, model.second.weight = (nn.Parameter(torch.full((5, 7), x)) for x in (1.0, 2.0))

    def lose_one() -> None:
        model.first.weight = nn.Parameter(torch.ones(5, 7))
        model.second._parameters.pop("weight")

    def step() -> None:
        sharded.mul_(2)

    def revert() -> None:
        sharded.div_(2)

    sharded = model.matrix
    for act, text in {
        replace("matrix", torch.ones(3, 7)): "matrix: expected torch.float32 of shape",
        replace("matrix", torch.ones(5, 7).half()): "matrix: expected torch.float32 of shape .* got torch.float16",
        lambda: model._parameters.pop("scale"): "scale: it was removed",
        untie: r"first.weight: it was removed, or was replaced under some",
        give_two: "first.weight: second.weight is the same parameter, but has other values. Give both",
        lose_one: "first.weight: it was removed",
        step: "the sharded parameters were changed inside the block, by an optimizer, for example. Step before",
    }.items():
        with refused(ValueError, text, model, writeback=True):
            act()
        if act is step:
            with torch.no_grad():
                revert()
        compare(model, plain)


def an_older_graph() -> None:
    """Backward through weights that were written since raises, as in plain training; not for what stayed as it was."""
    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4)))
    for name in ("0.bias", "2.weight"):
        loss = model(torch.ones(2, 4)).sum()
        with full_params(model, writeback=True) as named, torch.no_grad():
            named[name].add_(1)
        if name == "2.weight":
            with pytest.raises(RuntimeError, match="modified by an in-place operation since forward"):
                loss.backward()
        else:
            loss.backward()


WRITING = (
    odd_ones,
    mixed_precision,
    offloaded,
    with_whole_gradients,
    nan_and_zeros_of_either_sign,
    ranks_that_disagree,
    what_can_not_be_written,
    an_older_graph,
)


def test_writes() -> None:
    run_checks(2, [(check.__name__, check) for check in WRITING])


def test_replicas_and_tensor_parallel_parameters() -> None:
    """Four ranks: two replicas; and two ranks that share each matrix of tensor parallelism."""

    def replicas() -> None:
        model, plain = pair(mesh=init_device_mesh("cpu", (2, 2)))
        with full_params(model, writeback=True), torch.no_grad():
            for each in (model, plain):
                each.matrix.add_(1)
                each.scale.mul_(2)
        compare(model, plain)
        with refused(ValueError, "scale: ranks have given it different values", model, writeback=True):
            model.scale.add_(dist.get_rank() // 2)  # each replica by itself is of one mind
        compare(model, plain)
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(2))
        with full_params(model.matrix) as matrix:
            loss = (shard_batch(x, dist.get_rank(), 4) @ matrix.T).square().mean()
        loss.backward()
        (x @ plain.matrix.T).square().mean().backward()  # type: ignore[operator]
        assert_same(full(model.matrix.grad), plain.matrix.grad, 1e-5, 1e-6, "grad")  # type: ignore[arg-type]

    def tensor_parallel() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        model, plain = (nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        with full_params(model, writeback=True) as named, torch.no_grad():
            for name, other in plain.named_parameters():
                assert isinstance(named[name], DTensor)
                assert named[name].device_mesh == mesh["tp"]
                assert_same(named[name], other, 0, 0, name)
                for each in (named[name], other):
                    each.mul_(3)
        compare(model, plain)
        with full_params(model) as named:
            loss = sum(each.full_tensor().square().sum() for each in named.values())
        loss.backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(param.grad), 2 * other, 1e-5, 1e-6, name)

    run_checks(4, [(check.__name__, check) for check in (replicas, tensor_parallel)])


# ---- exporting -------------------------------------------------------------------------------------------------------


def export(rank0_only: bool, offload_to_cpu: bool, dtype: torch.dtype | None) -> None:
    """As they are stored, though forwards compute in another dtype; the tensors stay valid, each by itself."""
    torch.manual_seed(1)
    plain, model = Net(2), Net(2)
    model.load_state_dict(plain.state_dict())
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model)
    model(torch.ones(2, WIDTH))
    if (rank0_only, offload_to_cpu, dtype) == (False, False, None):
        dtype = torch.float32  # else it is no copy
    with full_params(model, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, dtype=dtype) as named:
        states = model.state_dict()
        assert all(param is named[name] for name, param in model.named_parameters())
    has_data = not rank0_only or dist.get_rank() == 0
    for name, other in plain.state_dict().items():
        for each in (named[name], states[name]):
            assert not each.requires_grad
            assert each.is_meta != has_data
            assert each.shape == other.shape
            if has_data:
                assert_same(each, other.to(dtype or torch.float32), 0, 0, name)
                assert each.untyped_storage().nbytes() == each.nbytes
    compare(model, plain)


def test_exporting() -> None:
    options = [(a, b, c) for a in (False, True) for b in (False, True) for c in (None, torch.bfloat16)]
    run_checks(2, [(str(each), lambda each=each: export(*each)) for each in options])  # type: ignore[misc]


def one_group_at_a_time() -> None:
    """With `offload_to_cpu`, what was gathered of one group is gone before the next is, on every rank."""
    model = Net(3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    gather, seen = OurGroup.copy_whole, []

    def spy(*args: Any) -> list[Tensor]:
        assert all(reference() is None for reference in seen)
        gathered = gather(*args)
        seen.extend(weakref.ref(each) for each in gathered)
        return gathered

    with (
        mock.patch.object(OurGroup, "copy_whole", spy),
        full_params(model, offload_to_cpu=True, rank0_only=True),
    ):
        assert len(seen) == 17
        assert all(reference() is None for reference in seen)


def only_the_groups_needed() -> None:
    """Of parameters, one gather for each group that has any; full parameters are gone behind the block."""
    model = Net(3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    gathers: list[int] = []
    original = NamedPairwiseComm.all_gather

    def spy(*args: Any) -> Any:
        gathers.append(1)
        return original(*args)

    wanted = [model.blocks[0].up.weight, model.blocks[2].up.weight, model.blocks[0].down.bias]
    with mock.patch.object(NamedPairwiseComm, "all_gather", spy), torch.no_grad():
        for options in ({}, {"offload_to_cpu": True}):
            with full_params(iter(wanted), **options) as tensors:
                assert [tuple(each.shape) for each in tensors] == [tuple(each.shape) for each in wanted]
                assert all(type(each) is nn.Parameter for each in tensors)
            assert len(gathers) == 2
            gathers.clear()
            assert all(group.phase is SHARDED for group in groups_below(model))
        with full_params(model, recurse=False) as named:
            assert len(named) == 5
        assert len(gathers) == 1


# ---- what is refused -------------------------------------------------------------------------------------------------


def writing_without_writeback() -> None:
    """Loud at the end, with the parameter's name; the sharded ones stay as they were."""
    model, plain = pair()

    def set_data() -> None:
        model.matrix.data = torch.ones(5, 7)

    for options in ({}, {"dtype": torch.float32}, {"offload_to_cpu": True}):
        with refused(RuntimeError, r"^(first.bias, scale|scale, first.bias): modified inside", model, **options):
            model.first.bias.add_(1)
            model.scale.add_(1)
        if options:
            with refused(RuntimeError, r"^matrix: modified inside full_params", model, **options):
                set_data()
        compare(model, plain)
        with refused(KeyError, "not hidden by what was written", model, **options):
            model.scale.add_(1)
            raise KeyError("not hidden by what was written")
        compare(model, plain)


def writing_through_data() -> None:
    """It shows in no version. What was assigned so is not computed with behind the block."""
    model, plain = pair()
    set_checks("debug")  # to look at each block, not only at the first few

    def scale() -> None:
        model.scale.data.add_(1)

    def set_row() -> None:
        model.matrix.data[-1] = 3.0

    def assign() -> None:
        model.matrix.data = torch.ones(5, 7)

    for options in ({}, {"dtype": torch.bfloat16}, {"offload_to_cpu": True}):
        for write in (scale, set_row, assign):
            name = "scale" if write is scale else "matrix"
            with refused(RuntimeError, rf"^({name}|one of .*): modified inside", model, **options):
                write()
            compare(model, plain)
            with full_params(model, **options) as named:
                expected = plain.get_parameter(name)
                assert_same(named[name], expected.to(named[name].dtype), 0, 0, name)
    set_checks("default")


def steps_inside() -> None:
    """An optimizer's, while full parameters, or copies, are there: that writes to none of these."""
    for shard in (fully_shard, replicate):
        for options in ({}, {"offload_to_cpu": True}):
            model = shard(nn.Linear(3, 2))
            before = full(model.weight).clone()
            optimizer = sgd(model, lr=1.0)
            model(torch.ones(1, 3)).sum().backward()
            with full_params(model, **options):
                optimizer.step()
            assert_same(full(model.weight), before - 1, 0, 0, "stepped")


def wrong_moments() -> None:
    model = Net(2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(2, WIDTH)

    def copied(module: nn.Module, *_: Any) -> None:
        with full_params(module, offload_to_cpu=True):
            pass

    with pytest.raises(RuntimeError, match="while a forward, or another full_params, uses"), full_params(model):
        copied(model.blocks[1])
    with refused(RuntimeError, "while a forward, or another full_params, uses", model, writeback=True):
        copied(model)
    with refused(RuntimeError, "root: its parameters are copies that full_params has made", model, writeback=True):
        model(x)
    for options in ({}, {"writeback": True}):
        with full_params(model, **options), pytest.raises(RuntimeError, match="can't be copied or pickled"):
            copy.deepcopy(model)
    with full_params(model), pytest.raises(RuntimeError, match="a state dict taken here"):
        model.state_dict()
    handle = model.blocks[0].register_forward_pre_hook(copied)
    with pytest.raises(RuntimeError, match=r"blocks.0: full_params can't copy parameters while a forward"):
        model(x)
    handle.remove()
    loss = model(x).sum()
    model.blocks[1].up.weight  # noqa: B018
    hidden = model.blocks[0](x)
    hidden.register_hook(lambda grad: copied(model.blocks[1]))
    with pytest.raises(RuntimeError, match="during a backward pass"):
        (hidden.sum() + loss).backward()
    model(x).sum().backward()


def wrong_arguments() -> None:
    model, _ = pair()
    plain = nn.Linear(2, 2)
    for act, error, text in (
        (lambda: full_params(plain), ValueError, "expected a module with sharded parameters, Linear has none"),
        (
            lambda: full_params(plain.weight),
            ValueError,
            "parameters that fully_shard manages, got a Parameter of shape",
        ),
        (lambda: full_params([model.matrix, plain.weight]), ValueError, "parameters that fully_shard manages"),
        (lambda: full_params([]), ValueError, "at least one parameter"),
        (lambda: full_params({"a": model.matrix}), TypeError, "expected a module or parameters, got str"),
        (lambda: full_params(3), TypeError, "expected a module or parameters, got int"),
        (lambda: full_params(model, writeback=1), TypeError, "writeback: expected a bool, got 1"),
        (lambda: full_params(model, dtype=32), TypeError, "dtype: expected a torch.dtype"),
        (lambda: full_params(model, dtype=torch.int8), ValueError, "dtype: expected a floating-point dtype"),
        (lambda: full_params(model, dtype=torch.float32, writeback=True), ValueError, "expected None with writeback"),
        (lambda: full_params(model, rank0_only=True, writeback=True), NotImplementedError, "not supported"),
        (lambda: full_params(model.matrix, recurse=False), ValueError, "recurse: expected True with parameters"),
    ):
        with pytest.raises(error, match=text):
            act()


def extended_parameters() -> None:
    model, _ = pair()
    block = full_params(model.first.weight, offload_to_cpu=True)
    text = "^first.weight has fsdp_pre_all_gather"
    patch = mock.patch("fsdp2.shards.ours.gathers_itself", return_value=True)
    with patch, pytest.raises(NotImplementedError, match=text):
        block.__enter__()


def on_meta() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Linear(3, 3))
    for options in ({}, {"writeback": True}):
        with pytest.raises(RuntimeError, match="got weight on meta"), full_params(model, **options):
            pass
    model.to_empty(device="cpu")
    with full_params(model, writeback=True):
        nn.init.eye_(model.weight)
        nn.init.zeros_(model.bias)
    assert_same(model(torch.ones(2, 3)), torch.ones(2, 3), 0, 0, "initialised")


CHECKS = (
    one_group_at_a_time,
    only_the_groups_needed,
    writing_without_writeback,
    writing_through_data,
    steps_inside,
    wrong_moments,
    wrong_arguments,
    extended_parameters,
    on_meta,
)


def test_limits() -> None:
    run_checks(2, [(check.__name__, check) for check in CHECKS])
