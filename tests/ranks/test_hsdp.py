"""Tests HSDP: the two stages of a reduction, which a user may switch, scale and hook, on meshes of replicas and shards.

It also tests ignored parameters. That training is that of the plain model, with divide factors and groups of their own
for reductions, too: test_training.py, test_accumulation.py.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.engine import buckets
from fsdp2.engine.state import groups_below
from helpers import assert_same, own_rows, run_checks, shard_batch, unchecked
from matrix import Towers, assert_lies_on, set_mode, transformer
from models import OddMLP, SkippedModule, TinyGPT, TinyModel, mean_loss
from scenarios import WIDTH, Net, Wrap, blocks, loss_of, sgd, whole

ROWS = 12  # divides by 1, 2, 3 and 4 ranks

MESHES: dict[str, Callable[[], DeviceMesh]] = {
    "2": lambda: init_device_mesh("cpu", (2,)),
    "1x1": lambda: init_device_mesh("cpu", (1, 1)),
    "2x1": lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")),
    "2x2": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")),
    # Rank 1 is another replica of what rank 0 holds: an axis taken for the other shows.
    "2x2 across": lambda: DeviceMesh("cpu", [[0, 2], [1, 3]]),
}


def ranks_of(mesh: str) -> int:
    return functools.reduce(int.__mul__, map(int, mesh.split()[0].split("x")))


tied_gpt = functools.partial(TinyGPT, depth=1, tied=True)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCE_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Sharded:
    """What the ways to wrap need of a run."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def shard(self, module: Any, **options: Any) -> Any:
        return fully_shard(module, **self.options, **options)


# ---- checks on one mesh after the other ------------------------------------------------------------------------------


Check = Callable[[DeviceMesh], None]


def check_each(plan: dict[str, Sequence[Check]]) -> None:
    """On meshes of as many ranks, in one launch."""
    made = functools.cache(lambda name: MESHES[name]())

    def bound(check: Check, name: str) -> Callable[[], None]:
        return lambda: check(made(name))

    checks = [(f"{name}: {check.__name__}", bound(check, name)) for name, checks in plan.items() for check in checks]
    run_checks(ranks_of(next(iter(plan))), checks)


def titled(title: str, check: Callable[..., None], *args: Any) -> Check:
    def on_mesh(mesh: DeviceMesh) -> None:
        check(mesh, *args)

    on_mesh.__name__ = title
    return on_mesh


def new_net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net(depth=1).double()


def sharded_net(mesh: DeviceMesh, wrap: Wrap = blocks, **options: Any) -> Any:
    model = new_net()
    wrap(Sharded(mesh=mesh, **options), model)  # type: ignore[arg-type]
    return model


def inputs(seed: int) -> list[Tensor]:
    """Each rank's batch; of different sizes of numbers, so that a rank too much or too few shows."""
    generator = torch.Generator().manual_seed(seed)
    batches = torch.randn(dist.get_world_size(), 3, WIDTH, generator=generator, dtype=torch.float64)
    return [batch * (rank + 1) for rank, batch in enumerate(batches)]


def own_backward(model: nn.Module, seed: int = 0) -> None:
    loss_of(model(inputs(seed)[dist.get_rank()])).backward()


def summed(model: Net, *seeds: int) -> dict[str, Tensor]:
    """Gradients of the sum of all ranks' losses."""
    sum(loss_of(model(batch)) for seed in seeds or (0,) for batch in inputs(seed)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients(mesh: DeviceMesh, model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert_lies_on(mesh, p.grad, expected[name], 1e-10, 1e-12, f"{name}.grad")


@unchecked()
def divide_factor_of_one_group(mesh: DeviceMesh) -> None:
    """By default of the module's own group; the other groups go on to take the mean."""
    expected = summed(new_net())
    for setter in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"):
        model = sharded_net(mesh)
        getattr(model, setter)(0.25)
        own_backward(model)
        mean = dist.get_world_size()
        own = ("scale",)  # the children have groups of their own
        assert_gradients(mesh, model, {k: grad / (0.25 if k in own else mean) for k, grad in expected.items()})


def hook_sees_the_gradients_behind_the_all_reduce(mesh: DeviceMesh) -> None:
    """Flat, in the reduce dtype, once; what it makes of them is what users get."""
    ranks = dist.get_world_size()
    for policy in (MixedPrecisionPolicy(), BF16, BF16_REDUCE_BF16):
        weight = torch.arange(8.0 * ranks).view(4 * ranks, 2)
        model = nn.Linear(2, 4 * ranks, bias=False)
        model.weight.data.copy_(weight)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        seen: list[Tensor] = []

        def hook(reduced: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(reduced.clone())
            reduced.mul_(4)

        model.set_all_reduce_hook(hook)
        dtype = policy.reduce_dtype or torch.float32
        expected = torch.full_like(weight, sum(range(1, ranks + 1)) / ranks)  # exact in bf16
        for mode in ("scatter", "wait", "reduce"):
            set_mode(model, mode)
            model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        rows = own_rows(expected, mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)).flatten()
        replicates = mesh.ndim > 1 and mesh.size(0) > 1
        for each, times in zip(seen, (3,) if replicates else (1, 2), strict=True):
            assert_same(each, (rows * times).to(dtype), 0, 0, f"what the hook got under {policy}")
        assert_lies_on(mesh, model.weight.grad, expected * 12, 0, 0, "what it made of it")
        model.set_all_reduce_hook(None)
        model.zero_grad()
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        assert_lies_on(mesh, model.weight.grad, expected, 0, 0, "without the hook")


def buckets_of(model: nn.Module) -> int:
    return sum(len(group.gradients.buckets) for group in groups_below(model))


def hook_is_called_once_per_bucket(mesh: DeviceMesh) -> None:
    """Every element of every gradient passes through it once, also if a group is reduced in parts."""
    expected = {name: 2 * grad / dist.get_world_size() for name, grad in summed(new_net()).items()}
    for min_bytes in (1 << 20, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "MIN_BUCKET_BYTES", min_bytes)
            model = sharded_net(mesh, whole)
            blockwise = sharded_net(mesh)
        calls: list[int] = []

        def hook(reduced: Tensor, calls: list[int] = calls) -> None:
            assert reduced.dim() == 1
            calls.append(reduced.numel())
            reduced.mul_(2)

        model.set_all_reduce_hook(hook)
        own_backward(model)
        assert len(calls) == buckets_of(model)
        assert (len(calls) == 1) == (min_bytes > 1)
        assert_gradients(mesh, model, expected)
        calls.clear()
        blockwise.set_all_reduce_hook(hook, recurse=True)
        own_backward(blockwise)
        assert len(calls) == buckets_of(blockwise)
        assert_gradients(mesh, blockwise, expected)


def hook_sees_no_padding(mesh: DeviceMesh) -> None:
    """Memory that nobody has written to is NaN here; what pads uneven rows must be zero."""
    torch.use_deterministic_algorithms(True)
    try:
        model, finite = sharded_net(mesh, whole), []
        model.set_all_reduce_hook(lambda reduced: finite.append(bool(reduced.isfinite().all())))
        own_backward(model)
        assert finite
        assert all(finite)
    finally:
        torch.use_deterministic_algorithms(False)


@unchecked()
def hook_of_one_group(mesh: DeviceMesh) -> None:
    """By default of the module's own group; the divide factor applies before it."""
    model = sharded_net(mesh)
    model.set_all_reduce_hook(lambda reduced: reduced.add_(1))
    model.set_gradient_divide_factor(0.25)
    own_backward(model)
    expected = {name: grad / dist.get_world_size() for name, grad in summed(new_net()).items()}
    expected["scale"].mul_(dist.get_world_size() / 0.25).add_(1)
    assert_gradients(mesh, model, expected)


class Counted:
    """A Comm that counts its calls by kind and group."""

    def __init__(self, inner: Any, name: str, counts: Counter) -> None:
        self._inner, self._name, self._counts = inner, name, counts

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("all_gather", "reduce_scatter", "all_reduce"):
            self._counts[attribute, self._name] += 1
        return getattr(self._inner, attribute)


def count(model: nn.Module) -> Counter:
    counts: Counter = Counter()
    for group in groups_below(model):
        comms = [each and Counted(each, group.name, counts) for each in group.comms]
        group.use_comms(type(group.comms)(*comms))
    return counts


def all_reduces_of_what_only_waits(mesh: DeviceMesh) -> None:
    """A group that has run in no synchronised micro-batch since needs its all-reduce, and no further reduction."""
    torch.manual_seed(1)
    model = Towers().double()
    blocks(Sharded(mesh=mesh), model)  # type: ignore[arg-type]
    counts = count(model)
    set_mode(model, "scatter")
    loss_of(model(inputs(0)[dist.get_rank()], "lh")).backward()
    counts.clear()
    set_mode(model, "reduce")
    loss_of(model(inputs(1)[dist.get_rank()], "h")).backward()
    sums = {name: n for (kind, name), n in counts.items() if kind == "all_reduce"}
    scatters = {name: n for (kind, name), n in counts.items() if kind == "reduce_scatter"}
    assert set(sums) == {"left", "head"}
    assert sums["head"] == 1
    assert scatters == {"head": 1}


REDUCTIONS: list[Check] = [
    divide_factor_of_one_group,
    hook_sees_the_gradients_behind_the_all_reduce,
    hook_is_called_once_per_bucket,
    hook_sees_no_padding,
    hook_of_one_group,
]


# ---- ignored parameters ----------------------------------------------------------------------------------------------


def ignore(mesh: DeviceMesh, build: Callable[[], TinyModel], chosen: Callable[[str], bool], wrap: Wrap) -> None:
    """They stay what they were and get this rank's own gradients; the others are as without them.

    Training goes on with ignored gradients averaged by hand, as their owner would.
    """
    torch.manual_seed(1)
    plain = build().double()
    model, own = copy.deepcopy(plain), copy.deepcopy(plain)
    originals = {name: p for name, p in model.named_parameters(remove_duplicate=False) if chosen(name)}
    assert originals
    values = {name: p.detach().clone() for name, p in originals.items()}
    wrap(Sharded(mesh=mesh, ignored_params=set(originals.values())), model)  # type: ignore[arg-type]
    taken = {name for group in groups_below(model) for param in group.params for name in param.names}
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert taken == set(everything) - set(originals)
    optimizers = [sgd(each, foreach=False) for each in (plain, model)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        batch = plain.example(rows=2 * ROWS, seed=step)
        batch = batch.double() if batch.is_floating_point() else batch
        own.load_state_dict(plain.state_dict())
        own.zero_grad()
        for micro in range(2):
            rows = batch.chunk(2)[micro]
            mean_loss(plain(rows)).backward()
            mean_loss(own(shard_batch(rows, rank, ranks))).backward()
            set_mode(model, "scatter" if micro == 0 else "reduce")
            mean_loss(model(shard_batch(rows, rank, ranks))).backward()
        wholes = dict(plain.named_parameters(remove_duplicate=False))
        owns = dict(own.named_parameters(remove_duplicate=False))
        for name, p in model.named_parameters(remove_duplicate=False):
            if name not in originals:
                assert_lies_on(mesh, p.grad, wholes[name].grad, 1e-10, 1e-12, f"step {step}: {name}.grad")
                continue
            assert p is originals[name], name
            assert type(p) is nn.Parameter
            assert not isinstance(p.grad, DTensor)
            assert_same(p.grad, owns[name].grad, 1e-10, 1e-12, f"step {step}: {name}.grad")
            if step == 0:
                assert_same(p, values[name], 0, 0, name)
        for p in dict.fromkeys(originals.values()):
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters(remove_duplicate=False):
            if name in originals:
                assert_same(p, wholes[name].detach(), 1e-10, 1e-12, f"step {step}: {name}")
                assert_same(model.state_dict()[name], p.detach(), 0, 0, f"state dict: {name}")
            else:
                assert_lies_on(mesh, p, wholes[name].detach(), 1e-10, 1e-12, f"step {step}: {name}")


IGNORED: dict[str, tuple[Callable[[], TinyModel], Callable[[str], bool], Wrap]] = {
    "a whole block": (TinyGPT, lambda name: name.startswith("blocks.0."), transformer),
    "everything": (OddMLP, lambda name: True, blocks),
    "tied across groups": (tied_gpt, lambda name: name in ("embed.weight", "head.weight"), blocks),
    "of a block": (TinyGPT, lambda name: name.endswith("norm1.weight"), transformer),
    "unused": (SkippedModule, lambda name: name.startswith(("never", "unused", "branch")), blocks),
}


def ignored_under_an_inner_module(mesh: DeviceMesh) -> None:
    """The set of each call counts for what that call manages: what an inner call has sharded stays so."""
    model = new_net()
    names = {id(p): name for name, p in model.named_parameters()}
    everything = set(model.parameters())
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=everything - {model.scale})
    sharded = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {"scale", *(name for name in names.values() if name.startswith("blocks.0."))}
    own_backward(model)
    expected = summed(new_net())
    for name in sharded:
        p = model.get_parameter(name)
        assert_lies_on(mesh, p.grad, expected[name] / dist.get_world_size(), 1e-10, 1e-12, name)


IGNORING = [ignored_under_an_inner_module, *(titled(f"ignored: {name}", ignore, *IGNORED[name]) for name in IGNORED)]


def test_one_rank() -> None:
    """It divides, rounds and calls hooks as many do."""
    check_each({"1x1": [*REDUCTIONS, IGNORING[0]]})


def test_two_ranks() -> None:
    """Only shards, or only replicas."""
    hook = hook_sees_the_gradients_behind_the_all_reduce
    check_each({"2": [hook, IGNORING[0]], "2x1": [*REDUCTIONS, *IGNORING]})


def test_four_ranks() -> None:
    """Both stages of a reduction, over both axes."""
    check_each({"2x2 across": REDUCTIONS, "2x2": [*IGNORING[:2], all_reduces_of_what_only_waits]})
