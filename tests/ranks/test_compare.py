"""Tests that `compare` finds no difference in equal models, and names each planted fault and its cause on all ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import MixedPrecisionPolicy, compare, fully_shard, replicate
from fsdp2.engine.state import groups_of
from fsdp2.tools.difference import Comparison
from helpers import run_checks, unchecked
from models import OddMLP, SharedModule, SkippedModule, TinyGPT, TinyLSTM, TinyModel, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def twins(build: Callable[[], nn.Module] = OddMLP, *inner: str, **options: Any) -> tuple[nn.Module, Any]:
    """A plain model, and one with the same weights that is sharded."""
    torch.manual_seed(0)
    reference = build()
    model = copy.deepcopy(reference)
    for name in inner:
        fully_shard(model.get_submodule(name), **options)
    return reference, fully_shard(model, **options)


def rows(model: TinyModel, num: int = 12) -> Tensor:
    return model.example(rows=num, seed=3)


def odd(**options: Any) -> tuple[nn.Module, Any, Tensor]:
    reference, model = twins(OddMLP, "wide", "narrow", **options)
    return reference, model, rows(reference)


def found(comparison: Comparison) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By phase, the name and the hints; the same words on every rank."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [str(each) for each in comparison.differences])
    assert all(text == texts[0] for text in texts)
    return {each.phase: (each.name, each.hints) for each in comparison.differences}


def expect_none(comparison: Comparison, **counts: int) -> None:
    assert comparison, str(comparison)
    assert found(comparison) == {}
    assert {phase: n for phase, n in comparison.num_compared.items() if phase in counts} == counts


# ---- no fault


def parity() -> None:
    """Of every kind of model and mesh; all that there is was compared."""
    expect_none(compare(*odd()), weights=8, outputs=3, loss=1, gradients=8)
    expect_none(compare(*odd(reshard_after_forward=False)), gradients=8)
    whole = len(list(TinyGPT().parameters()))
    reference, model = twins(TinyGPT, "blocks.0", "blocks.1")
    expect_none(compare(reference, model, rows(reference)), weights=whole, outputs=3, gradients=whole)
    reference, model = twins(lambda: TinyGPT(tied=True), "blocks.0")
    expect_none(compare(reference, model, (rows(reference),)), weights=whole - 1, gradients=whole - 1)
    for build in (TinyLSTM, SharedModule, SkippedModule):
        reference, model = twins(build)
        expect_none(compare(reference, model, rows(reference)))
    torch.manual_seed(0)
    reference = OddMLP()
    model = replicate(copy.deepcopy(reference))
    expect_none(compare(reference, model, rows(reference)))
    reference, model, batch = odd()
    expect_none(compare(reference.double(), model.double(), batch.double()), gradients=8)


def parity_in_mixed_precision() -> None:
    """Errors are of a few ulps of bf16; fp32 beside it would differ."""
    reference, model, batch = odd(mp_policy=BF16)
    comparison = compare(reference, model, batch)
    expect_none(comparison)
    assert comparison.dtype == torch.bfloat16
    strict = compare(reference, model, batch, rtol=1e-4)
    first = strict.differences[0]
    assert first.phase == "outputs"
    assert first.ulps == first.relative_error / torch.finfo(torch.bfloat16).eps
    assert 0.01 < first.ulps < 4


class Shifted(TinyModel):
    """What softmax takes away again: the gradient of `shift` is zero but for rounding errors of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (5 * self.first(x) + self.shift).softmax(-1) @ torch.linspace(-3, 4, 7)


def gradients_of_nothing() -> None:
    reference, model = twins(Shifted)
    batch = rows(reference)
    mean_loss(reference(batch)).backward()
    assert 0 < reference.shift.grad.abs().item() < 1e-6
    expect_none(compare(reference, model, batch), gradients=3)


def finished_by_hand() -> None:
    reference, model, batch = odd()
    model.set_manual_backward_finalization(True)
    expect_none(compare(reference, model, batch), gradients=8)


def a_loss_of_ones_own() -> None:
    reference, model, batch = odd()
    targets = torch.linspace(0, 1, 60).view(12, 5)
    expect_none(compare(reference, model, (batch, targets), lambda m, x, y: (m(x) - y).abs().mean()), loss=1)


def nothing_is_changed() -> None:
    """Neither gradients, nor buffers, nor random states, nor how training goes on."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    model = fully_shard(copy.deepcopy(reference))
    batch = torch.randn(12, 5)
    for side in (reference, model):
        mean_loss(side(batch)).backward()
    kept = [p.grad for side in (reference, model) for p in side.parameters()]
    values = [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in kept]
    buffers = [b.clone() for side in (reference, model) for b in side.buffers()]
    state = torch.get_rng_state()
    comparison = compare(reference, model, batch)
    assert found(comparison)["outputs"] == ("root, output 0", ("random",))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(buffers, [*reference.buffers(), *model.buffers()], strict=True))
    after = [p.grad for side in (reference, model) for p in side.parameters()]
    assert all(a is b for a, b in zip(kept, after, strict=True))
    assert all(
        torch.equal(a.to_local() if hasattr(a, "to_local") else a, b) for a, b in zip(after, values, strict=True)
    )
    expect_none(compare(reference.eval(), model.eval(), batch))


# ---- faults


def another_weight() -> None:
    """One element, of one rank's rows, in its last bit."""
    reference, model, batch = odd()
    with torch.no_grad():
        reference.narrow.weight[2, 3] = torch.nextafter(reference.narrow.weight[2, 3], torch.tensor(9.0))
    comparison = compare(reference, model, batch)
    assert found(comparison) == {"weights": ("narrow.weight", ())}
    first = comparison.differences[0]
    assert (first.group, first.rank) == ("narrow", 1)
    assert first.expected == reference.narrow.weight[2, 3].item()
    assert 0 < first.ulps <= 1
    with torch.no_grad():
        reference.narrow.weight[2, 3] += 1
    shown = found(compare(reference, model, batch))
    assert [shown[phase][0] for phase in ("weights", "outputs", "gradients")] == [
        "narrow.weight",
        "narrow, output 0",
        "back.bias",
    ]


def another_buffer() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval()
    model = fully_shard(copy.deepcopy(reference))
    model[1].running_var[2] = 4
    assert found(compare(reference, model, torch.randn(4, 5)))["weights"] == ("1.running_var", ())


def rounded_weights() -> None:
    reference, model, batch = odd()
    shown = found(compare(reference, model.bfloat16().float(), batch))
    assert shown["weights"] == ("wide.weight", ())
    reference, model, batch = odd()
    assert found(compare(reference, model.bfloat16(), batch, lambda m, x: mean_loss(m(x.to(m.back.bias.dtype)))))[
        "weights"
    ] == ("wide.weight", ("rounding",))


def stale_weights() -> None:
    """Kept full parameters, while the shards change unseen; in the third forward, which itself does not look."""
    reference, model, batch = odd()
    model.narrow.set_reshard_after_backward(False)
    model.narrow.set_reshard_after_forward(False)
    for _ in range(2):
        expect_none(compare(reference, model, batch))
    with torch.no_grad():
        reference.narrow.bias.mul_(2)
        model.narrow.bias.to_local().data.mul_(2)
    shown = found(compare(reference, model, batch))
    assert next(iter(shown.items())) == ("gathered weights", ("narrow.bias", ("stale",)))
    assert shown["outputs"][0] == "narrow, output 0"
    model.narrow.reshard()
    expect_none(compare(reference, model, batch))


@unchecked()
def divide_factors() -> None:
    for factor, hint in ((1, "sum"), (4, "mean"), (6, "scale")):
        reference, model, batch = odd()
        model.narrow.set_gradient_divide_factor(factor)
        assert found(compare(reference, model, batch)) == {"gradients": ("narrow.bias", (hint,))}


def summed_loss() -> None:
    reference, model, batch = odd()
    shown = found(compare(reference, model, batch, lambda m, x: m(x).square().sum()))
    assert shown == {"loss": ("loss", ("mean",)), "gradients": ("back.bias", ("mean",))}


def sync_left_off() -> None:
    reference, model, batch = odd()
    model.wide.set_requires_gradient_sync(False)
    assert found(compare(reference, model, batch)) == {"gradients": ("wide.bias", ("unsynchronized",))}
    assert not groups_of(model.wide)[0].gradients.unsynchronized
    model.wide.set_requires_gradient_sync(True)
    expect_none(compare(reference, model, batch))
    mean_loss(model(batch)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def unmanaged() -> None:
    torch.manual_seed(0)
    reference = OddMLP()
    model = copy.deepcopy(reference)
    fully_shard(model, ignored_params={model.single.weight})
    assert found(compare(reference, model, rows(reference))) == {"gradients": ("single.weight", ("unsynchronized",))}


class Waves(TinyModel):
    """Positions in the thousands, whose fractions matter; bf16 keeps 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.wave = Wave()

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x) + self.wave(1000 + x)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))

    def forward(self, position: Tensor) -> Tensor:
        return self.amplitude * torch.sin(position)


def cast_inputs() -> None:
    reference, model = twins(Waves, "wave", mp_policy=BF16)
    shown = found(compare(reference, model, rows(reference)))
    assert shown["outputs"] == ("wave, output 0", ("cast input",))
    assert "cast input" in shown["gradients"][1]
    kept = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    reference, model = twins(Waves, "wave", mp_policy=kept)
    model.stem.register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    model.stem.register_forward_hook(lambda m, args, out: out.float())
    expect_none(compare(reference, model, rows(reference)))


def batch_norm() -> None:
    """The first output behind a BatchNorm is that of this rank's rows. What was compared until then is counted: the
    gradient of the last bias is equal, because normalised rows add up to zero in both models.
    """
    reference, model = twins(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "0", "2")
    batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(3))
    comparison = compare(reference, model, batch)
    assert found(comparison)["outputs"] == ("2, output 0", ("across rows",))
    assert comparison.num_compared == {"weights": 9, "gathered weights": 6, "outputs": 2, "loss": 1, "gradients": 2}
    expect_none(compare(reference.eval(), model.eval(), batch), outputs=3, gradients=6)


def ties_lost() -> None:
    torch.manual_seed(0)
    reference = TinyGPT(tied=True)
    model = copy.deepcopy(reference)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    fully_shard(model)
    shown = found(compare(reference, model, rows(reference)))
    assert list(shown) == ["gradients"]
    assert shown["gradients"] == ("embed.weight", ("tied",))


def other_paths() -> None:
    reference, model = twins(SkippedModule, "branch")
    model.use_branch = False
    shown = found(compare(reference, model, rows(reference)))
    assert shown["outputs"] == ("", ("order",))
    reference, model, batch = odd()
    model.single.weight.requires_grad_(False)
    assert found(compare(reference, model, batch)) == {"gradients": ("single.weight", ("missing",))}


def failures_leave_no_trace() -> None:
    reference, model, batch = odd()

    def failing(module: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("loss") if module(x) is not None else ValueError

    def hooks() -> list[tuple[int, int]]:
        modules = [*reference.modules(), *model.modules()]
        return [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in modules]

    before = hooks()
    with pytest.raises(KeyError):
        compare(reference, model, batch, failing)
    assert hooks() == before
    expect_none(compare(reference, model, batch))


class Wider(OddMLP):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 8)


def wrong_arguments() -> None:
    """On every rank, also where one alone is wrong."""
    reference, model, batch = odd()
    for wrong, text in (
        ((nn.Linear(5, 7), model, batch), "expected the names of the model"),
        ((Wider(), model, batch), r"expected wide\.weight of the model's shape, \(7, 5\), got \(8, 5\)"),
        ((reference, model, batch[:7]), "a multiple of 2 ranks"),
        ((reference, model, (batch, batch[:6])), "of equally many rows"),
        ((reference, model, batch + dist.get_rank()), "expected the same on every rank, but ranks 0 and 1"),
        ((copy.deepcopy(reference).eval(), model, batch), "expected the mode"),
    ):
        with pytest.raises(ValueError, match=text):
            compare(*wrong)
    with pytest.raises(TypeError, match=r"reference: expected an nn\.Module"):
        compare(3, model, batch)
    if dist.get_rank() == 1:
        reference.wide.bias.data[0] += 1
    with pytest.raises(ValueError, match="Build the reference from one seed"):
        compare(reference, model, batch)
    reference, model, batch = odd()
    model.set_requires_gradient_sync(False)
    mean_loss(model(batch)).backward()
    with pytest.raises(RuntimeError, match=r"wide\.weight: its gradient is unsynchronized"):
        compare(reference, model, batch)


TWO_RANKS: list[Callable[[], None]] = [
    parity,
    parity_in_mixed_precision,
    gradients_of_nothing,
    finished_by_hand,
    a_loss_of_ones_own,
    nothing_is_changed,
    another_weight,
    another_buffer,
    rounded_weights,
    stale_weights,
    divide_factors,
    summed_loss,
    sync_left_off,
    unmanaged,
    cast_inputs,
    batch_norm,
    ties_lost,
    other_paths,
    failures_leave_no_trace,
    wrong_arguments,
]


def test_on_two_ranks() -> None:
    run_checks(2, [(each.__name__, each) for each in TWO_RANKS])


def replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    reference, model, batch = odd(mesh=mesh)
    expect_none(compare(reference, model, batch), gradients=8)
    with torch.no_grad():
        if dist.get_rank() == 2:
            model.narrow.bias.to_local()[0] += 1
    with pytest.raises(RuntimeError, match="narrow: expected the same bits on ranks that replicate it"):
        compare(reference, model, batch)
    with unchecked():
        comparison = compare(reference, model, batch)
    assert found(comparison)["weights"] == ("narrow.bias", ())
    assert comparison.differences[0].rank == 2
    reference, model, batch = odd(mesh=mesh)
    model.set_requires_all_reduce(False)
    assert found(compare(reference, model, batch)) == {"gradients": ("back.bias", ("unsynchronized",))}


def tensor_parallel() -> None:
    """Two ranks see the same rows, and hold other columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    batch = torch.randn(8, 5)
    expect_none(compare(reference, model, batch), weights=4, outputs=1, gradients=4)
    with torch.no_grad():
        reference[0].weight[0, 0] += 1  # the first row of the first column-parallel rank
    assert compare(reference, model, batch).differences[0].name == "0.weight" or dist.get_rank() % 2


def test_on_four_ranks() -> None:
    """HSDP and tensor parallelism."""
    run_checks(4, [("replicas", replicas), ("tensor_parallel", tensor_parallel)])
