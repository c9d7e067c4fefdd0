"""Tests training over any process group that torch.distributed's functions work on.

It may have ranks that are threads of one process, be written in Python, have a backend for one device only, or be
wrapped or simulated. The fault in question: the library relies on something that a group need not have (a backend for
each device, a function for one tensor, a mean, a constant size, one process for each rank).
"""

import copy
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch.utils.checkpoint import checkpoint

from fsdp2 import (
    MixedPrecisionPolicy,
    check,
    clip_grad_norm_,
    compare,
    full_params,
    fully_shard,
    replicate,
    set_checks,
)
from fsdp2.collectives.choose import make_comm
from fsdp2.collectives.meshes import default_mesh
from fsdp2.compression import Compression
from fsdp2.engine import layout as layouts
from fsdp2.engine.comm import CommLabel
from fsdp2.engine.owners import sharded_owner
from fsdp2.engine.state import require_state
from fsdp2.module import sharded_class
from helpers import assert_same, full, own_rows, run_ranks, sharded, world_sizes
from python_groups import OnlySums, PythonGroup, WithBackend, WithTensors, python_group

ROWS, WIDTH = 12, 6
ADAM = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recomputes = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH), recomputes

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._inner, x, use_reentrant=False) if self.recomputes else self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Rows that 2, 3 and 4 ranks share unevenly, a scalar, and a weight that is registered twice."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)
    return fully_shard(model, **options)


def run_threads(world_size: int, fn: Callable[[int], Any], timeout: float = 40) -> list[Any]:
    """`fn(rank)` on threads of one forked process, each with torch's threaded process group; the results by rank."""

    def body(_: int, __: int) -> list[Any]:
        _install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        sys.setswitchinterval(1e-4)  # threads interrupt each other as often as they can
        store, results, errors = dist.HashStore(), {}, {}

        def run(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                results[rank] = fn(rank)
            except Exception as error:
                errors[rank] = error
                ProcessLocalGroup.exception_handle(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        _uninstall_threaded_pg()
        for error in errors.values():
            raise error
        assert sorted(results) == list(range(world_size)), f"ranks that returned: {sorted(results)}"
        return [results[rank] for rank in range(world_size)]

    return run_ranks(1, body, timeout=timeout + 10)[0]


# ---- training, beside a plain model on the whole batch


def plain_steps(model: nn.Module, step: int, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
    model(batch(step)).square().mean().backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()


def train(
    model: nn.Module,
    ref: nn.Module,
    rank: int,
    size: int,
    micro: int = 1,
    max_norm: float | None = None,
    make: Callable[..., torch.optim.Optimizer] = ADAM,
    steps: int = 3,
) -> None:
    mine, theirs = make(model.parameters()), make(ref.parameters())
    for step in range(steps):
        parts = batch(step).chunk(size)[rank].chunk(micro)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == micro - 1)  # type: ignore[operator]
            (model(part).square().mean() / micro).backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        mine.step()
        mine.zero_grad()
        plain_steps(ref, step, theirs, max_norm)
    same(model, ref)


def same(model: nn.Module, ref: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Without full_tensor(), with which torch asks more of a group than training does."""
    with full_params(model):
        for (name, got), want in zip(model.named_parameters(), ref.parameters(), strict=True):
            assert_same(got.to(want.dtype), want, rtol, atol, name)  # some compute in another dtype


def pairs(count: int, make: Callable[[], nn.Module] = Net) -> list[tuple[nn.Module, nn.Module]]:
    """Built before the threads begin: they share torch's generator of random numbers."""
    torch.manual_seed(0)
    model = make()
    return [(copy.deepcopy(model), copy.deepcopy(model)) for _ in range(count)]


def plainly(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    train(shard(model), ref, rank, size)


def with_sgd(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.5, foreach=False)
    train(shard(model, reshard_after_forward=False), ref, rank, size, make=make)


def clipped(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    train(shard(model), ref, rank, size, max_norm=0.1)


def accumulated(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    train(shard(model), ref, rank, size, micro=ROWS // size)


def recomputed(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.recomputes = True
    train(shard(model), ref, rank, size)


def on_replicas(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    train(shard(model, mesh=mesh), ref, rank, size, micro=ROWS // size)


def replicated(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        replicate(block)
    train(replicate(model), ref, rank, size)


def kept_among_few(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    train(shard(model, reshard_after_forward=2), ref, rank, size)


def at_the_debug_level(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    set_checks("debug")
    train(shard(model), ref, rank, size)
    dist.barrier()  # ranks may be threads, which share the level
    set_checks("default")


def in_two_dtypes(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """Forward and reduction in float64, of float32 parameters, so that the plain model can do just that."""
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ref)]
    for step in range(3):
        model(batch(step).chunk(size)[rank]).square().mean().backward()
        wide = {name: p.double() for name, p in ref.named_parameters()}
        torch.func.functional_call(ref, wide, (batch(step).double(),)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(model, ref, rtol=1e-6, atol=1e-7)


def in_fewer_bits(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """Gradients travel in bfloat16, and are summed in float32."""
    shard(
        model,
        mp_policy=MixedPrecisionPolicy(
            reduce_dtype=torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
        ),
    )
    compare_gradients(model, ref, rank, size)


def compare_gradients(model: nn.Module, ref: nn.Module, rank: int, size: int) -> None:
    model(batch(0).chunk(size)[rank]).square().mean().backward()
    ref(batch(0)).square().mean().backward()
    for (name, got), want in zip(model.named_parameters(), ref.parameters(), strict=True):
        own = want.grad if got.dim() == 0 else own_rows(want.grad, rank, size)
        assert_same(got.grad.to_local(), own, 2e-2, 1e-3, name)


def saved_and_loaded(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """A whole state dict, the model's own, and what full_params lends."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    shard(model)
    set_model_state_dict(model, ref.state_dict(), options=StateDictOptions(full_state_dict=True))
    same(model, ref)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert sorted(whole) == (sorted(ref.state_dict()) if rank == 0 else [])
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    with full_params(model):
        for got, want in zip(model.parameters(), ref.parameters(), strict=True):
            assert not isinstance(got, DTensor)
            assert torch.equal(got, want)
    train(model, ref, rank, size)


def drawn(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """Built without memory, and initialised when sharded. Threads share torch's own generator: each rank brings one."""
    model.to("meta")
    model.head.weight = model.stem.weight  # type: ignore[union-attr]
    shard(model).to_empty(device="cpu")
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    for each, generator in zip((model, ref), generators, strict=True):
        for p in each.parameters():
            nn.init.normal_(p, std=0.3, generator=generator)
    train(model, ref, rank, size)


class Chosen(Net):
    """Ranks run different blocks, and sum something of their own in the forward."""

    chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[self.chosen](self.stem(x))
        dist.all_reduce(torch.ones(1))
        return self.head(x) * self.scale


def conditionally(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    for each, chosen in ((model, rank % 2), (ref, 0)):
        each.__class__, each.chosen = Chosen, chosen  # type: ignore[assignment]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, conditional=True)
    fully_shard(model)
    for _ in range(2):
        (model(batch(0).chunk(size)[rank]).square().mean()).backward()
        for other in range(size):
            ref.chosen = other % 2  # type: ignore[assignment]
            (ref(batch(0).chunk(size)[other]).square().mean() / size).backward()
            dist.barrier()  # the reference's own sums: one for each rank, on all of them
    for (name, got), want in zip(model.named_parameters(), ref.parameters(), strict=True):
        assert_same(full(got.grad), want.grad, 1e-5, 1e-6, name)


def stepped_in_backward(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    shard(model)
    model.set_optimizer_in_backward(torch.optim.AdamW(model.parameters(), lr=1e-2))  # type: ignore[operator]
    theirs = torch.optim.AdamW(ref.parameters(), lr=1e-2)
    for step in range(3):
        model(batch(step).chunk(size)[rank]).square().mean().backward()
        plain_steps(ref, step, theirs, None)
    same(model, ref)


def looked_at(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """The tools that run a model beside a plain one, and that tell ranks what others have."""
    shard(model)
    assert compare(ref, model, batch(0)).differences == ()
    assert check(model) == []


def written_from_other_placements(rank: int, size: int, model: nn.Module, ref: nn.Module) -> None:
    """Operations for which the library has handlers, and which communicate inside what torch does without these."""
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, 7, generator=generator) for _ in range(2)]
    for _ in range(20):
        rows, columns = (sharded(each, mesh, [Shard(i)]) for i, each in enumerate(whole))
        rows.mul_(columns)
        rows.add_(columns, alpha=2.0)
        assert_same(rows, whole[0] * whole[1] + 2 * whole[1], 1e-6, 1e-6, "product and sum")
        loss = nn.functional.mse_loss(rows, columns)
        assert_same(loss, nn.functional.mse_loss(full(rows), whole[1]), 1e-5, 1e-6, "mean loss")


Check = Callable[[int, int, nn.Module, nn.Module], None]
CHECKS: list[Check] = [
    plainly,
    with_sgd,
    clipped,
    accumulated,
    recomputed,
    on_replicas,
    replicated,
    kept_among_few,
    at_the_debug_level,
    in_two_dtypes,
    in_fewer_bits,
    saved_and_loaded,
    drawn,
    conditionally,
    stepped_in_backward,
    looked_at,
    written_from_other_placements,
]


EVEN = (on_replicas, kept_among_few)


@pytest.mark.parametrize("size", world_sizes(3, nightly=[4]))
def test_threads_train_exactly(size: int) -> None:
    """Each setting in one launch, on models of its own."""
    settings = [each for each in CHECKS if each not in EVEN or size == 4]
    models = [pairs(size) for _ in settings]

    def body(rank: int) -> None:
        for setting, of_ranks in zip(settings, models, strict=True):
            print(f"rank {rank}: {setting.__name__}", file=sys.stderr, flush=True)  # for the report of a failure
            setting(rank, size, *of_ranks[rank])
            dist.barrier()

    run_threads(size, body)


# ---- process groups that are written in Python


FUNCTIONS = {
    PythonGroup: {"allgather", "allreduce"},
    WithTensors: {"_allgather_base", "_reduce_scatter_base", "allreduce"},
    WithBackend: {"_allgather_base", "_reduce_scatter_base", "allreduce"},
    OnlySums: {"broadcast", "allreduce"},
}


def over_a_python_group(cls: type[PythonGroup], rank: int, size: int) -> None:
    group = python_group(cls, [*range(size)])
    options = {"mesh": DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shards",))}
    (model, ref), *others = pairs(5)
    train(shard(model, **options), ref, rank, size, max_norm=0.1)
    model, ref = others[0]
    train(shard(model, **options, reshard_after_forward=False), ref, rank, size, micro=ROWS // size)
    model, ref = others[1]
    narrow = MixedPrecisionPolicy(reduce_dtype=torch.float32, compression=Compression(reduce_scatter=torch.bfloat16))
    shard(model, **options, mp_policy=narrow)
    compare_gradients(model, ref, rank, size)
    model, ref = others[2]
    set_checks("debug")
    train(shard(model, **options), ref, rank, size)
    set_checks("default")
    with mock.patch.object(layouts, "APART_BYTES", 1):  # packed segments as those of large groups
        layouts.gather_layout.cache_clear()
        model, ref = others[3]
        train(shard(model, **options), ref, rank, size)
    assert group.called >= FUNCTIONS[cls], group.called


@pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
def test_a_group_written_in_python(cls: type[PythonGroup]) -> None:
    """Whatever it lacks, nothing goes around it: to a backend, or to the default group."""
    run_ranks(3, lambda rank, size: over_a_python_group(cls, rank, size), timeout=40)


# ---- a group that ranks join and leave


class Resizable(PythonGroup):
    """The replica groups of a fault-tolerant library: while the others are away, this rank is alone in it."""

    together = False

    def size(self) -> int:
        return self.inner.size() if self.together else 1

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        return super().allreduce(tensors, options) if self.together else _Done()


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def over_replicas_that_come_and_go(rank: int, size: int) -> None:
    (model, ref), *_ = pairs(1)
    shards = [dist.new_group([first, first + 1]) for first in range(0, size, 2)][rank // 2]
    replicas = [python_group(Resizable, [first, first + 2]) for first in range(2)][rank % 2]
    first = rank // 2 * 2
    # As torchft does it: the mesh is told of one replica.
    of_ranks = torch.tensor([[first, first + 1]])
    mesh = DeviceMesh.from_group([replicas, shards], "cpu", mesh=of_ranks, mesh_dim_names=("replicas", "shards"))
    shard(model, mesh=mesh)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ref)]
    for step, together in enumerate((True, True, False)):
        replicas.together = together
        parts = batch(step).chunk(size)
        rows = batch(step) if together else torch.cat(parts[first : first + 2])
        model(parts[rank]).square().mean().backward()
        ref(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(model, ref)


def test_replicas_join_and_leave() -> None:
    """The mean is over those that take part in the step, though there was one when the model was sharded."""
    run_ranks(4, over_replicas_that_come_and_go, timeout=40)


def test_shards_are_for_ranks_that_stay() -> None:
    """A group that may shrink or grow, or that tells torch of one rank and is larger: refused on every rank at once."""

    class ToldOfOne(PythonGroup):
        def __init__(self, inner: dist.ProcessGroup) -> None:
            dist.ProcessGroup.__init__(self, 0, 1)  # as torchft's do
            self.inner, self.called = inner, set()

        def size(self) -> int:
            return self.inner.size()

    def body(rank: int, size: int) -> None:
        for cls in (Resizable, ToldOfOne):
            mesh = DeviceMesh.from_group(python_group(cls, [*range(size)]), "cpu", mesh_dim_names=("shards",))
            with pytest.raises(ValueError, match=f"2 ranks that stay, .* got a {cls.__name__}"):
                fully_shard(Net(), mesh=mesh)

    run_ranks(2, body)


# ---- groups that lack a backend, are wrapped, or move nothing


def made_by(make: Callable[[list[int]], dist.ProcessGroup], rank: int, size: int) -> None:
    group = make([*range(size)])
    (model, ref), *_ = pairs(1)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shards",))
    train(shard(model, mesh=mesh), ref, rank, size, max_norm=0.1)


def wrapped(ranks: list[int]) -> dist.ProcessGroup:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return dist.new_group(ranks)


MADE: dict[str, Callable[[list[int]], Any]] = {
    "of the CPU only": lambda ranks: dist.new_group(ranks, backend="cpu:gloo"),
    "wrapped by the debug level": wrapped,
}


@pytest.mark.parametrize("how", MADE)
def test_a_group_of_torchs_own(how: str) -> None:
    run_ranks(3, lambda rank, size: made_by(MADE[how], rank, size), timeout=40)


def test_a_group_without_a_backend_for_the_mesh_is_refused_before_anything_communicates() -> None:
    def body(rank: int, size: int) -> None:
        group = dist.new_group([*range(size)], backend="cuda:gloo")
        with pytest.raises(RuntimeError, match="a backend for cpu, got one for cuda"):
            make_comm(group, torch.device("cpu"), CommLabel())

    run_ranks(2, body)


def test_threads_share_no_default_mesh() -> None:
    """Each thread's mesh stays the same object for all calls, though other ranks ask for theirs in between."""

    def body(rank: int) -> int:
        mesh = default_mesh()
        for _ in range(3):
            dist.barrier()
            assert default_mesh() is mesh
        assert mesh.get_local_rank() == rank
        return id(mesh)

    assert len(set(run_threads(3, body))) == 3


def test_threads_with_different_starts_raise_an_error_with_the_reason() -> None:
    """They share torch's generator: the same seed on all of them gives each other weights. Said on every rank."""
    models = [Net() for _ in range(3)]

    def body(rank: int) -> None:
        shard(models[rank])
        with pytest.raises(RuntimeError, match=r"different values.*broadcast the weights before fully_shard"):
            models[rank](batch(0))

    run_threads(3, body)


def test_a_plain_models_optimizer_is_followed_by_models_of_its_own_thread_only() -> None:
    """Another thread is another rank, which may be looking through what it follows just then."""
    models = pairs(2)

    def body(rank: int) -> int:
        model, ref = models[rank]
        shard(model)(batch(0))
        root = require_state(model).root
        before = len(root.events.observers)
        dist.barrier()
        if rank == 0:
            plain_steps(ref, 0, ADAM(ref.parameters()), None)
        dist.barrier()
        return len(root.events.observers) - before

    assert run_threads(2, body) == [1, 0]


def test_a_class_of_modules_is_made_once() -> None:
    """Whichever thread is first: to `type(a) is type(b)` modules of one class stay that."""

    class Small(nn.Linear):
        pass

    barrier = threading.Barrier(4)

    def body(rank: int) -> int:
        barrier.wait()
        return id(sharded_class(Small))

    assert len(set(run_threads(4, body))) == 1


def test_modules_that_threads_shard_at_the_same_time_are_all_known() -> None:
    """The owner of each parameter is found, whichever thread was interrupted while it noted its own."""
    models = [[nn.Linear(1, 1, bias=False) for _ in range(60)] for _ in range(4)]

    def body(rank: int) -> list[bool]:
        sys.setswitchinterval(1e-6)
        dist.barrier()
        for model in models[rank]:
            fully_shard(model)
        dist.barrier()
        return [sharded_owner(model.weight) is not None for model in models[rank]]

    assert run_threads(4, body) == [[True] * 60] * 4
