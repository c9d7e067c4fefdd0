"""Tests that `clip_grad_norm_` returns the plain model's norm and scales gradients alike, on every kind of mesh.

The oracle is `torch.nn.utils.clip_grad_norm_` on full, plain tensors. Most checks need no backward: a gradient equal to
the parameter's own value is distributed correctly on every mesh, and has the same norm on all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import clip_grad_norm_, fully_shard, replicate
from helpers import assert_same, full, one_mesh, run_checks, run_ranks, shard_batch
from models import OddMLP, TinyModel, mean_loss
from scenarios import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

RANKS = 4
INF = float("inf")
ORDERS = (1, 2.0, 3.0, INF)


# ---- a model, and meshes to put it on --------------------------------------------------------------------------------


class Experts(nn.Module):
    """Three of them in one parameter: two expert-parallel ranks hold two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Mixed(nn.Module):
    """Parts that go to different meshes; a bias of one row leaves most ranks without a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 10)
        self.block = nn.ModuleDict({"up": nn.Linear(10, 6), "down": nn.Linear(6, 10)})
        self.experts = Experts()
        self.head = nn.Linear(10, 1)


def all_ranks() -> DeviceMesh:
    return one_mesh((RANKS,))


def square(*names: str) -> DeviceMesh:
    return one_mesh((2, 2), names)


def shard_all(model: Mixed, mesh: DeviceMesh, **options: Any) -> None:
    for module in (model.stem, *model.block.values(), model.experts, model.head):
        fully_shard(module, mesh=mesh, **options)


def one_axis(model: Mixed) -> None:
    shard_all(model, all_ranks())


def along_another_dim(model: Mixed) -> None:
    shard_all(model, all_ranks(), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def hsdp(model: Mixed) -> None:
    shard_all(model, square("replicate", "shard"))


def replicated(model: Mixed) -> None:
    replicate([model.stem, *model.block.values(), model.experts, model.head], mesh=all_ranks())


def tensor_parallel(model: Mixed) -> None:
    """The block lies on both axes, the rest on one: torch's own function refuses the two together."""
    mesh = square("shard", "tp")
    parallelize_module(model.block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_all(model, mesh["shard"])


def replicas_of_tensor_parallel(model: Mixed) -> None:
    mesh = one_mesh((2, 1, 2), ("replicate", "shard", "tp"))
    parallelize_module(model.block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_all(model, mesh["replicate", "shard"])


def expert_parallel(model: Mixed) -> None:
    """Experts on two axes of their own, all else over all ranks."""
    mesh = square("shard", "ep")
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight, mesh["ep"], [Shard(0)]))
    fully_shard(model.experts, mesh=mesh["shard"])
    fully_shard([model.stem, *model.block.values(), model.head], mesh=all_ranks())


def every_kind(model: Mixed) -> None:
    """One axis, HSDP, tensor parallel alone, expert parallel, a half of the axes, plain."""
    mesh = square("a", "b")
    fully_shard(model.stem, mesh=all_ranks())
    fully_shard(model.block["up"], mesh=mesh)
    parallelize_module(model.block["down"], mesh["b"], RowwiseParallel())
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight, mesh["b"], [Shard(0)]))
    fully_shard(model.experts, mesh=mesh["a"])


# How to shard the model, and how many sets of ranks each rank shares shards with.
KINDS: dict[Callable[[Mixed], None], int] = {
    one_axis: 1,
    along_another_dim: 1,
    hsdp: 1,
    replicated: 0,
    tensor_parallel: 2,
    replicas_of_tensor_parallel: 1,
    expert_parallel: 3,
    every_kind: 3,
}


def plain(dtype: torch.dtype = torch.float64) -> Mixed:
    torch.manual_seed(1)
    return Mixed().to(dtype)


def gradient_of(parameter: Tensor) -> Tensor:
    return parameter.detach().clone()


def give_gradients(model: nn.Module) -> nn.Module:
    """Each parameter's own value, on the whole no multiple of another's."""
    for parameter in model.parameters():
        parameter.grad = gradient_of(parameter)
    return model


def sharded(kind: Callable[[Mixed], None], dtype: torch.dtype = torch.float64) -> Mixed:
    model = plain(dtype)
    kind(model)
    return model


def equal_on_all_ranks(value: Tensor) -> bool:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return all(torch.equal(each.nan_to_num(-1), value.nan_to_num(-1)) for each in values)


def compare_gradients(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    tolerance = tolerance or TOLERANCE
    for (name, actual), whole in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_same(actual.grad, whole.grad, **tolerance, name=name)


# ---- checks, each on four ranks --------------------------------------------------------------------------------------


def matches_the_plain_model(kind: Callable[[Mixed], None], order: float, foreach: bool | None, max_norm: float) -> None:
    """A shard counted twice or not at all, a replica counted, a coefficient of this rank's own norm."""
    model, expected = give_gradients(sharded(kind)), give_gradients(plain())
    norm = clip_grad_norm_(model.parameters(), max_norm, order, foreach=foreach)
    assert type(norm) is Tensor
    assert equal_on_all_ranks(norm)
    assert_same(norm, nn.utils.clip_grad_norm_(expected.parameters(), max_norm, order), **TOLERANCE, name="norm")
    compare_gradients(model, expected)


def takes_one_collective_per_axis(kind: Callable[[Mixed], None], count: int) -> None:
    model = give_gradients(sharded(kind))
    with CommDebugMode() as debug:
        clip_grad_norm_(model.parameters(), 1.0)
    assert debug.get_total_counts() == count, debug.get_comm_counts()


class Parallel(TinyModel):
    """Blocks that are tensor-parallel between layers that aren't."""

    row_shape = (7,)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = (nn.Linear(*n) for n in ((7, 10), (10, 6), (6, 10), (10, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def trains_with_tensor_parallelism() -> None:
    """Real gradients, accumulated, clipped to less in each step: the trajectory is the plain one."""
    mesh = square("shard", "tp")
    torch.manual_seed(1)
    expected = Parallel().double()
    torch.manual_seed(1)
    model = Parallel().double()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.25, momentum=0.5, foreach=False) for each in (model, expected)
    ]
    for step in range(3):
        for i in range(2):
            model.set_requires_gradient_sync(i == 1)
            batch = model.example(rows=4, seed=2 * step + i).double()
            mean_loss(model(shard_batch(batch, mesh.get_local_rank("shard"), 2))).backward()
            mean_loss(expected(batch)).backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        assert_same(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.1), **TOLERANCE, name=f"norm {step}")
        compare_gradients(model, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, actual), whole in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_same(actual, whole.detach(), **TOLERANCE, name=name)


def unsynchronised_gradients_are_refused() -> None:
    """Their value isn't known yet. Those that are there already stay as they are; afterwards, clipping works."""
    torch.manual_seed(1)
    model, expected = OddMLP().double(), OddMLP().double()
    expected.load_state_dict(model.state_dict())
    for child in (model.wide, model):
        fully_shard(child, mesh=all_ranks())
    batches = [model.example(rows=4, seed=seed).double() for seed in range(2)]
    model.wide.set_requires_gradient_sync(False)
    for i, batch in enumerate(batches):
        if i == 1:
            before = full(model.back.weight.grad)
            with pytest.raises(RuntimeError, match="not synchronised"):
                clip_grad_norm_(reversed(list(model.parameters())), 1e-3)
            assert_same(model.back.weight.grad, before, 0, 0, "unchanged")
            model.wide.set_requires_gradient_sync(True)
        mean_loss(model(shard_batch(batch, dist.get_rank(), RANKS))).backward()
        mean_loss(expected(batch)).backward()
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    assert_same(norm, nn.utils.clip_grad_norm_(expected.parameters(), 1e-3), **TOLERANCE, name="norm")
    compare_gradients(model, expected)


def gradients_of_one_row_are_refused_on_all_ranks() -> None:
    """Ranks that hold nothing of a gradient that is not synchronized raise, too: others would wait for them."""
    model = nn.Sequential(nn.Linear(3, RANKS), nn.Linear(RANKS, 1))
    for child in (model[1], model):
        fully_shard(child, mesh=all_ranks())
    model(torch.ones(2, 3)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)  # what it prepares is of these parameters and gradients
    model[1].set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="not synchronised"):
        clip_grad_norm_(model.parameters(), 1.0)


def laid_out(whole: Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))


def partial_sums_count_as_their_sum(kind: str, order: float) -> None:
    """Tensor parallelism may leave partial sums as gradients of replicated parameters; their norms do not add up."""
    mesh, whole = square("a", "b"), torch.arange(1.0, 7).reshape(3, 2).double()
    parameter = laid_out(whole, mesh, Shard(0), Replicate())
    part = distribute_tensor(whole, mesh, (Shard(0), Replicate())).to_local()
    weights = {"sum": (0.75, 0.25), "avg": (3.0, -1.0)}[kind]
    own = part * weights[mesh.get_local_rank("b")]
    parameter.grad = DTensor.from_local(own, mesh, (Shard(0), Partial(kind)), shape=whole.shape, stride=whole.stride())
    other = nn.Parameter(torch.zeros(2).double())
    other.grad = torch.full((2,), 3.0).double()
    expected = [nn.Parameter(torch.zeros_like(each)) for each in (whole, other)]
    expected[0].grad, expected[1].grad = whole.clone(), other.grad.clone()
    norm = clip_grad_norm_([parameter, other], 2.0, order)
    assert_same(norm, nn.utils.clip_grad_norm_(expected, 2.0, order), **TOLERANCE, name="norm")
    assert parameter.grad.placements == (Shard(0), Partial(kind))
    assert_same(parameter.grad, expected[0].grad, **TOLERANCE, name="partial")
    assert_same(other.grad, expected[1].grad, **TOLERANCE, name="plain")


def missing_gradients_are_skipped(order: float) -> None:
    """Also where a rank alone has none: it takes part in the same collectives, and adds nothing."""
    model, expected = give_gradients(sharded(every_kind)), give_gradients(plain())
    for each in (model, expected):
        each.stem.weight.grad = each.experts.weight.grad = None
    whole = expected.stem.bias.grad
    if dist.get_rank() == 1:
        model.stem.bias.grad = None  # rows 3 to 5 of 10
    whole[3:6] = 0
    norm = clip_grad_norm_(model.parameters(), 0.5, order)
    assert_same(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.5, order), **TOLERANCE, name="norm")
    assert model.experts.weight.grad is None
    assert_same(model.head.weight.grad, expected.head.weight.grad, **TOLERANCE, name="head")


def no_gradient_at_all() -> None:
    for order in (2.0, INF):
        norm = clip_grad_norm_(sharded(every_kind).parameters(), 1.0, order, error_if_nonfinite=True)
        assert norm.item() == 0
    assert clip_grad_norm_([], 1.0).item() == 0


def every_dtype_is_computed_in_fp32(order: float) -> None:
    """A norm of bf16 gradients that is rounded to bf16 is wrong by half a percent; powers of fp16 overflow at 256."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    torch.manual_seed(1)
    wholes = [torch.randn(37, 3).mul(30).to(dtype) for dtype in kinds]
    mesh = all_ranks()
    parameters = [laid_out(whole, mesh, Shard(0)) for whole in wholes]
    expected = [nn.Parameter(torch.zeros(37, 3)) for _ in wholes]
    for parameter, reference, whole in zip(parameters, expected, wholes, strict=True):
        parameter.grad = distribute_tensor(whole, mesh, (Shard(0),))
        reference.grad = whole.float()
    norm = clip_grad_norm_(parameters, 5.0, order)
    assert norm.dtype == torch.float32
    assert_same(norm, nn.utils.clip_grad_norm_(expected, 5.0, order), rtol=1e-6, atol=0, name="norm")
    for parameter, reference in zip(parameters, expected, strict=True):
        assert parameter.grad.dtype == parameter.dtype
        assert_same(full(parameter.grad).float(), reference.grad, rtol=8e-3, atol=1e-6, name=str(parameter.dtype))


def what_is_not_finite_on_one_rank(bad: float, order: float) -> None:
    """All ranks raise, or all go on with what plain clipping leaves. gloo's maximum loses a NaN."""
    model, expected = give_gradients(sharded(tensor_parallel)), give_gradients(plain())
    before = give_gradients(plain())
    expected.block["up"].weight.grad[5, 9] = bad  # tensor-parallel rank 1 and, of its rows, the last rank's
    if dist.get_rank() == 3:
        model.block["up"].weight.grad.to_local()[-1, 9] = bad
    with pytest.raises(RuntimeError, match=rf"norm of order {order}.* is (inf|nan)"):
        clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
    assert_same(model.stem.weight.grad, before.stem.weight.grad, 0, 0, "not scaled")
    norm = clip_grad_norm_(model.parameters(), 1.0, order)
    assert equal_on_all_ranks(norm)
    assert_same(norm, nn.utils.clip_grad_norm_(expected.parameters(), 1.0, order), 0, 0, name="norm")
    compare_gradients(model, expected)


def ranks_outside_a_mesh() -> None:
    """Two pipeline stages: each has its own norm, and passes the other's parameters by."""
    stages = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    wholes = [torch.arange(5.0), torch.arange(7.0)]
    parameters = [laid_out(whole, mesh, Shard(0)) for whole, mesh in zip(wholes, stages, strict=True)]
    for parameter, whole, mesh in zip(parameters, wholes, stages, strict=True):
        parameter.grad = distribute_tensor(whole, mesh, (Shard(0),))
    stage = dist.get_rank() // 2
    norm = clip_grad_norm_(parameters, 1.0)
    assert_same(norm, wholes[stage].norm(), rtol=1e-6, atol=0, name="norm")
    clipped = wholes[stage] / wholes[stage].norm()
    assert_same(full(parameters[stage].grad), clipped, rtol=1e-5, atol=0, name="clipped")


def models_move_after_clipping() -> None:
    """`Module.to` swaps tensors, and refuses those that something refers to weakly. Other memory is found again."""
    model = sharded(one_axis)
    for dtype in (torch.float64, torch.float64, torch.float32):
        model.to("cpu").to(dtype)
        give_gradients(model)
        norm = clip_grad_norm_(model.parameters(), 0.5)
        expected = nn.utils.clip_grad_norm_(give_gradients(plain(dtype)).parameters(), 0.5)
        assert_same(norm, expected, 1e-6, 0, f"{dtype}")


def what_may_be_given() -> None:
    """One tensor, a generator, the same one twice; a limit of 0, of infinity, or as a tensor."""
    model = give_gradients(sharded(one_axis))
    weight, whole = model.stem.weight, plain().stem.weight.detach()
    assert_same(clip_grad_norm_(weight, 1e9), whole.norm(), **TOLERANCE, name="one")
    assert_same(clip_grad_norm_([weight, weight], INF), whole.norm(), **TOLERANCE, name="twice")
    assert_same(weight.grad, whole, 0, 0, name="less than the limit")
    norm = clip_grad_norm_((each for each in (weight, weight)), torch.tensor(0.125), "inf")
    assert_same(norm, whole.abs().max(), **TOLERANCE, name="inf by name")
    assert_same(weight.grad, whole * (0.125 / (norm + 1e-6)), **TOLERANCE, name="scaled once")
    clip_grad_norm_(weight, 0)
    assert_same(weight.grad, torch.zeros_like(whole), 0, 0, name="limit of 0")


CHECKS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((matches_the_plain_model, (kind, order, None, 0.5)) for kind in KINDS for order in ORDERS),
    *((matches_the_plain_model, (every_kind, order, False, 0.5)) for order in ORDERS),
    (matches_the_plain_model, (every_kind, 2.0, True, 1e6)),
    *((takes_one_collective_per_axis, each) for each in KINDS.items()),
    (trains_with_tensor_parallelism, ()),
    (unsynchronised_gradients_are_refused, ()),
    (gradients_of_one_row_are_refused_on_all_ranks, ()),
    *((partial_sums_count_as_their_sum, (kind, order)) for kind in ("sum", "avg") for order in (2.0, INF)),
    *((missing_gradients_are_skipped, (order,)) for order in (2.0, INF)),
    (no_gradient_at_all, ()),
    *((every_dtype_is_computed_in_fp32, (order,)) for order in ORDERS),
    *((what_is_not_finite_on_one_rank, (bad, order)) for bad in (INF, float("nan")) for order in (2.0, INF)),
    (ranks_outside_a_mesh, ()),
    (what_may_be_given, ()),
    (models_move_after_clipping, ()),
]


def test_clipping_on_every_kind_of_mesh() -> None:
    named = []
    for check, arguments in CHECKS:
        title = " ".join(getattr(each, "__name__", str(each)) for each in (check, *arguments))
        named.append((title, functools.partial(check, *arguments)))
    run_checks(RANKS, named)


def test_torchs_own_names_ours_where_it_fails() -> None:
    def body(rank: int, _: int) -> None:
        model, mesh = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)), square("shard", "other")
        for module, axis in zip(model, ("shard", "other"), strict=False):
            fully_shard(module, mesh=mesh[axis])
        weights = [module.weight for module in model]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError, match=r"Call fsdp2\.clip_grad_norm_"):
            nn.utils.get_total_norm(weight.grad for weight in weights[:2])
        norm: Any = nn.utils.get_total_norm(weight.grad for weight in weights[1:])  # of plain and sharded ones
        assert norm.full_tensor().item() == pytest.approx(32**0.5)
        for mixed in (weights[:2], weights[1:]):
            with pytest.raises(RuntimeError, match=r"Call fsdp2\.clip_grad_norm_"):
                nn.utils.clip_grad_norm_(mixed, 1.0)
            assert clip_grad_norm_(mixed, INF).item() == pytest.approx(32**0.5)
        weights[0].grad.mul_(INF)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(weights[0], 1.0, error_if_nonfinite=True)

    run_ranks(RANKS, body)


# ---- without ranks ---------------------------------------------------------------------------------------------------


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def test_plain_tensors_need_no_process_group() -> None:
    parameters = [with_gradient(torch.tensor([3.0])), with_gradient(torch.tensor([[4.0]])), nn.Parameter(torch.ones(2))]
    assert clip_grad_norm_(parameters, 2.5).item() == pytest.approx(5.0)
    assert parameters[1].grad.item() == pytest.approx(2.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            (nn.Linear(2, 2), 1.0),
            TypeError,
            r"expected tensors, e\.g\. model\.parameters\(\), got a Linear",
        ),
        ((nn.Sequential(nn.Tanh()), 1.0), TypeError, "parameters: expected tensors, got a Tanh at index 0"),
        ((nn.Linear(2, 2).named_parameters(), 1.0), TypeError, "parameters: expected tensors, got a tuple at index 0"),
        (([torch.ones(1), None], 1.0), TypeError, "parameters: expected tensors, got a NoneType at index 1"),
        (
            ([with_gradient(torch.ones(4, 3).to_sparse())], 1.0),
            TypeError,
            "expected dense gradients, got torch.sparse_coo",
        ),
        (([with_gradient(torch.ones(2).cfloat())], 1.0), TypeError, "floating dtypes, got torch.complex64 at index 0"),
        (([], -1.0), ValueError, "max_norm: expected a number of at least 0, got -1.0"),
        (([], float("nan")), ValueError, "max_norm: expected a number of at least 0, got nan"),
        (([], None), TypeError, "max_norm: expected a number, got None"),
        (([], 1.0, 0), ValueError, "norm_type: expected a number above 0, got 0"),
        (([], 1.0, -INF), ValueError, "norm_type: expected a number above 0, got -inf"),
        (([], 1.0, float("nan")), ValueError, "norm_type: expected a number above 0, got nan"),
        (([], 1.0, "two"), TypeError, "norm_type: expected a number, got 'two'"),
        (([], 1.0, 2.0, 1), TypeError, "error_if_nonfinite: expected a bool, got 1"),
        (([], 1.0, 2.0, False, "yes"), TypeError, "foreach: expected a bool or None, got 'yes'"),
    ],
    ids=lambda value: None if isinstance(value, tuple | type) else value,
)
def test_bad_input_is_refused(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        clip_grad_norm_(*arguments)
