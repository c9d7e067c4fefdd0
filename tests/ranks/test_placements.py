"""Tests what placements, parts that stay after forward, and shards on the CPU do beside training (test_training.py)."""

import contextlib
import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.engine.mesh import DataMesh
from fsdp2.engine.state import groups_below
from helpers import assert_same, run_checks, world_sizes
from models import ConvStack, OddMLP, TinyModel, mean_loss
from scenarios import Net, Run, check, loss_of, sgd
from simulated_device import simulated_device

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

ROWS = 12  # divides by 1, 2, 3, 4 and 6 ranks
EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {"rtol": 1e-11, "atol": 1e-13}
"""fp64, for another order of summation."""


Place = Callable[[nn.Parameter], Shard | None]


def various(p: nn.Parameter) -> Shard:
    """Parameters of one group along different dims."""
    return Shard(sum(p.shape) % p.dim())


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is sharded."""

    build: Callable[[], TinyModel] = ConvStack
    place: Place | None = None
    whole: bool = False
    reshard: bool | int | None = True
    offload: OffloadPolicy = OffloadPolicy()

    def device_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def plain(self) -> TinyModel:
        torch.manual_seed(1)
        return self.build().double()

    def shard(self, model: TinyModel, mesh: DeviceMesh) -> TinyModel:
        """One group, or one per module with parameters and the root for the rest."""
        for module in [] if self.whole else reversed([m for m in model.modules() if m is not model and m._parameters]):
            self.shard_one(module, mesh)
        return self.shard_one(model, mesh)

    def shard_one(self, module: Any, mesh: DeviceMesh) -> Any:
        return fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.reshard,
            shard_placement_fn=self.place,
            offload_policy=self.offload,
        )

    def batch(self, model: TinyModel, step: int) -> Tensor:
        return model.example(rows=ROWS, seed=step).double()


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step that no backward has led to."""
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


# ---- along which dim -------------------------------------------------------------------------------------------------


def full_parameters_are_contiguous_in_forward() -> None:
    """As the user's own kernels may ask of a weight, whatever dim it is sharded along."""

    class Looks(ConvStack):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend((name, type(p), p.detach().clone(), p.is_contiguous()) for name, p in self.named_parameters())
            return super().forward(x)

    seen: list[tuple[str, type, Tensor, bool]] = []
    gradients: dict[str, bool] = {}
    case = Case(Looks, place=various, whole=True)
    plain, model = case.plain(), case.shard(case.plain(), case.device_mesh())
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.update({name: p.grad.is_contiguous() and p.grad.to_local().is_contiguous()})
        )
    mean_loss(model(case.batch(model, 0))).backward()
    for (name, kind, value, is_contiguous), (_, q) in zip(seen, plain.named_parameters(), strict=True):
        assert is_contiguous, name
        assert kind is nn.Parameter, name
        assert_same(value, q.detach(), **EXACT, name=name)
    assert gradients == dict.fromkeys(dict(plain.named_parameters()), True)


def the_function_is_called_once_per_parameter() -> None:
    """With the whole parameter, tied ones and those of inner calls included."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    called: list[nn.Parameter] = []

    def place(p: nn.Parameter) -> Shard:
        called.append(p)
        return Shard(p.dim() - 1)

    expected = list(model[3].parameters()) + [p for m in model[:3] for p in m.parameters()]
    fully_shard(model[3], shard_placement_fn=place)
    fully_shard(model, shard_placement_fn=place)
    counts = Counter(map(id, called))
    assert counts == Counter({id(p): 1 for p in expected}), list(counts.values())
    x = torch.randn(2, 3)
    mean_loss(model(x)).backward()
    assert len(called) == len(set(expected)), "called again after fully_shard"


def bad_results_are_refused_by_name() -> None:
    """Before anything is changed."""
    for result in (Shard(2), Shard(-3), Replicate(), 0, "Shard(0)"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        before = list(model.parameters())

        def place(p: nn.Parameter, result: Any = result, odd: Any = before[2]) -> Any:
            return result if p is odd else None

        with pytest.raises(ValueError, match=r"^1\.weight: "):
            fully_shard(model, shard_placement_fn=place)
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        assert not isinstance(model, FSDPModule)
    with pytest.raises(TypeError, match="shard_placement_fn"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=Shard(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_the_function(world_size: int) -> None:
    run_checks(
        world_size,
        [
            (check.__name__, check)
            for check in (
                full_parameters_are_contiguous_in_forward,
                the_function_is_called_once_per_parameter,
                bad_results_are_refused_by_name,
            )
        ],
    )


# ---- a part that stays after forward ---------------------------------------------------------------------------------

Gather = tuple[int, ...]
"""The ranks of a gather."""


@contextlib.contextmanager
def gathers_recorded() -> Iterator[list[Gather]]:
    """The ranks of each gather that this rank begins."""
    seen: list[Gather] = []
    all_gather = NamedPairwiseComm.all_gather

    def recorded(self: NamedPairwiseComm, *args: Any) -> Any:
        seen.append(tuple(dist.get_process_group_ranks(self.group)))
        return all_gather(self, *args)

    with mock.patch.object(NamedPairwiseComm, "all_gather", recorded):
        yield seen


def neighbours(k: int) -> Gather:
    first = dist.get_rank() // k * k
    return tuple(range(first, first + k))


def backward_gathers_among_few(k: int) -> None:
    """Forward among all; backward among k neighbours, each group once. k=1 keeps everything, k=N nothing."""
    size = dist.get_world_size()
    case = Case(reshard=k)
    model = case.shard(case.plain(), case.device_mesh())
    groups = sum(1 for group in groups_below(model) if group.params)
    optimizer = sgd(model)
    for _ in range(3):
        with gathers_recorded() as seen:
            loss = mean_loss(model(case.batch(model, 0)))
            forward = list(seen)
            seen.clear()
            loss.backward()
            backward = list(seen)
        assert forward == [tuple(range(size))] * groups
        assert backward == ([neighbours(k)] * groups if k > 1 else [])
        optimizer.step()
        optimizer.zero_grad()


def a_bool_replaces_the_int() -> None:
    size, case = dist.get_world_size(), Case(reshard=2)
    model = case.shard(case.plain(), case.device_mesh())
    groups = sum(1 for group in groups_below(model) if group.params)
    for choice, expected in ((True, [tuple(range(size))] * groups), (False, [])):
        model.set_reshard_after_forward(choice)  # type: ignore[operator]
        loss = mean_loss(model(case.batch(model, 0)))
        with gathers_recorded() as seen:
            loss.backward()
        assert seen == expected, choice


def a_group_without_parameters() -> None:
    """The root of a model whose modules are all sharded by themselves: the usual recipe."""
    case, (model, plain) = Case(OddMLP, reshard=2), (Case(OddMLP).plain() for _ in range(2))
    case.shard(model, case.device_mesh())
    loss = mean_loss(model(case.batch(model, 0)))
    loss.backward()
    mean_loss(plain(case.batch(model, 0))).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(p.grad, q.grad, **ROUNDING, name=name)


def calls_share_a_process_group() -> None:
    """Each costs memory and connections; a model has hundreds of calls."""
    case, mesh = Case(reshard=2), init_device_mesh("cpu", (dist.get_world_size(),))
    made: list[Any] = []
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", counted):
        models = [case.shard(case.plain(), mesh) for _ in range(2)]
    assert len(made) <= 1, made
    few = {group.comms.secondary.group for model in models for group in groups_below(model)}  # type: ignore[union-attr]
    assert len(few) == 1
    assert tuple(dist.get_process_group_ranks(few.pop())) == neighbours(2)


def bytes_alive() -> int:
    """Of all tensors that Python knows."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and type(each) is not DTensor]
    with torch._C.DisableTorchFunctionSubclass():  # freed parameters refuse
        plain = [each.data for each in tensors if type(each.data) is Tensor and each.layout is torch.strided]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in plain}
    return sum(storages.values())


def a_kth_stays_after_forward(k: int) -> None:
    """Beside the shards, which are always there; and nothing after backward."""
    torch.manual_seed(0)
    width = 32  # activations of 2 rows are small beside the weights
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    with mock.patch.object(NamedPairwiseComm, "direct_min_bytes", 256):  # what is packed is there twice
        for module in model:
            fully_shard(module, reshard_after_forward=k)
        fully_shard(model)
    x = torch.randn(2, width)
    mean_loss(model(x)).backward()  # a first pass has learned the order
    model.zero_grad()
    before = bytes_alive()
    loss = mean_loss(model(x))
    after_forward = bytes_alive() - before
    loss.backward()
    model.zero_grad()
    del loss
    after_backward = bytes_alive() - before
    kept = nbytes // k
    activations = 4 * 4 * x.numel() * 4
    assert kept <= after_forward <= kept + activations, (after_forward, kept)
    assert after_backward <= activations, after_backward


@pytest.mark.parametrize("world_size", world_sizes(4, nightly=[6]))
def test_a_secondary_partition_stays_after_forward(world_size: int) -> None:
    parts = {4: (1, 2, 4), 6: (2, 3)}[world_size]
    checks = [(f"gathers, {k=}", functools.partial(backward_gathers_among_few, k)) for k in parts]
    checks += [(f"memory, {k=}", functools.partial(a_kth_stays_after_forward, k)) for k in (1, 2) if world_size == 4]
    run_checks(world_size, [*checks, ("bool", a_bool_replaces_the_int), ("groups", calls_share_a_process_group)])


def blocks_of(run: Run, model: Net, k: int, **options: Any) -> None:
    for module in (model.stem, *model.blocks, model.head, model):
        run.shard(module, reshard_after_forward=k, **options)


def batch(run: Run, seed: int) -> Tensor:
    return run.batch(seed=seed, rows=ROWS)


def test_the_secondary_partition_is_used_only_in_backward() -> None:
    """Another forward, or an optimizer step, comes between a forward and its backward, or in place of that."""

    def scenario(run: Run, between: str) -> None:
        model = run.build(Net)
        blocks_of(run, model, 2)
        optimizer = sgd(model)
        run.step("first", model, optimizer, loss_of(model(batch(run, 1))))
        for step in range(2):
            x = batch(run, 2 + step).requires_grad_()
            loss = loss_of(model(x))
            if between == "evaluation":
                with torch.no_grad():
                    run.rows("evaluated", model(batch(run, 8)))
            elif between == "evaluation of a block":
                with torch.no_grad():
                    run.rows("evaluated", model.blocks[1](batch(run, 8)))
            elif between == "a change and evaluation":
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.25)
                    run.rows("evaluated", model(batch(run, 8)))
                loss = loss_of(model(x))
            elif between == "a step and evaluation":
                step_by_hand(model, optimizer)
                with torch.no_grad():
                    run.rows("evaluated", model(batch(run, 8)))
                loss = loss_of(model(x))
            elif between == "a step and a forward":
                step_by_hand(model, optimizer)
                loss = loss_of(model(x))
            elif between == "unshard":
                if isinstance(model, FSDPModule):
                    model.unshard()
                    model.reshard()
            elif between == "a step and backward":
                step_by_hand(model, optimizer)
                with pytest.raises(RuntimeError, match="modified by an in"):
                    loss.backward()
                optimizer.zero_grad()
                loss = loss_of(model(x))
            run.step(f"step {step}", model, optimizer, loss)
            run.rows("x.grad", x.grad * run.world_size**-1)

    between = (
        "evaluation",
        "evaluation of a block",
        "a change and evaluation",
        "a step and evaluation",
        "a step and a forward",
        "a step and backward",
        "unshard",
    )
    check(scenario, 4, between=between)


def reshard_must_divide() -> None:
    size = dist.get_world_size()
    for k in (0, -1, size + 1, 3):
        with pytest.raises(ValueError, match=f"reshard_after_forward={k}: expected a divisor of {size}"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=k)
    with pytest.raises(ValueError, match="expected a divisor of 2"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)), reshard_after_forward=4)


# ---- at rest on the CPU ----------------------------------------------------------------------------------------------


def copies_are_given_up() -> None:
    """What was copied to the mesh's device is there from the start of a gather to the end of forward or backward."""
    case = Case(offload=CPUOffloadPolicy())
    with simulated_device(), gathers_recorded() as seen:
        mesh = case.device_mesh()
        model = case.shard_one(case.plain(), mesh)
        group = groups_below(model)[0]
        assert group.parameters.storage_device != DataMesh(mesh, mesh.ndim - 1).device
        buffers = group.parameters.buffers
        assert buffers is not None
        for _ in range(2):
            loss = mean_loss(model(case.batch(model, 0)))
            assert buffers._stage.memory.untyped_storage().nbytes() == 0, "after forward"
            assert buffers.shards.untyped_storage().nbytes() == buffers.layout.shard_nbytes
            loss.backward()
            assert buffers._stage.memory.untyped_storage().nbytes() == 0, "after backward"
    assert len(seen) == (4 if dist.get_world_size() > 1 else 0)


@pytest.mark.parametrize("world_size", world_sizes(2, 4, nightly=[1]))
def test_copies_of_shards_are_given_up(world_size: int) -> None:
    run_checks(world_size, [("copies", copies_are_given_up)])


def test_a_part_of_nothing_and_bad_parts() -> None:
    run_checks(4, [("no parameters", a_group_without_parameters), ("divisor", reshard_must_divide)])
