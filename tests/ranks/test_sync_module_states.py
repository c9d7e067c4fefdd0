"""Tests `sync_module_states`: ranks that have built different weights train those of the first rank.

Every tensor of a model that may differ between ranks (parameters and buffers of any dtype and strides, replicas,
parameters that no fully_shard call manages) is equal to the first rank's afterwards, or all ranks raise an error that
names it and the reason.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2.tools.sync as sync
from fsdp2 import fully_shard, replicate, sync_module_states
from helpers import assert_same, full, run_checks, run_ranks, shard_batch
from models import mean_loss
from scenarios import Net

DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8)


class Odd(nn.Module):
    """Parameters and buffers of many kinds, other ones for each seed."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(7, 5, generator=g) * scale)
        # Which is transposed on odd ranks only.
        turned = torch.randn(5, 7, generator=g)
        self.turned = nn.Parameter(turned if seed % 2 == 0 else turned.T.contiguous().T, requires_grad=False)
        self.scalar = nn.Parameter(torch.randn((), generator=g))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.inner = nn.Linear(5, 5)
        self.inner.weight = nn.Parameter(torch.randn(5, 5, generator=g))
        nn.init.normal_(self.inner.bias, generator=g)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.inner.weight
        for dtype in DTYPES:
            self.register_buffer(f"of_{dtype}".replace("torch.", ""), (torch.randn(3, 3, generator=g) * 3).to(dtype))
        self.register_buffer("repeated", torch.randn(1, 4, generator=g).expand(6, 4), persistent=False)
        self.register_buffer("nothing", None)

    def all_of_it(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def mine() -> int:
    return dist.get_rank()


def assert_all_of(model: nn.Module, expected: nn.Module) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert tensors.keys() == whole.keys()
    for name, tensor in tensors.items():
        assert_same(tensor, whole[name], 0, 0, name)


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made by operations have held at once."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = [(reference, nbytes) for reference, nbytes in self.alive if not reference.expired()]
        counted = {reference.cdata for reference, _ in self.alive} | self.known
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in counted:
                self.alive.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        self.most = max(self.most, sum(nbytes for _, nbytes in self.alive))
        return result


# ---- before fully_shard


def all_kinds_of_tensors() -> None:
    for nbytes in (sync.BUCKET_NBYTES, 64):  # also in pieces, and many a bucket
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sync, "BUCKET_NBYTES", nbytes)
            model = Odd(seed=mine())
            objects, pointers = [*model.all_of_it().values()], [t.data_ptr() for t in model.all_of_it().values()]
            sync_module_states(model)
        assert all(new is old for new, old in zip(model.all_of_it().values(), objects, strict=True))
        assert [t.data_ptr() for t in model.all_of_it().values()] == pointers
        assert model.tied.weight is model.inner.weight
        assert not model.turned.requires_grad
        assert_all_of(model, Odd(seed=0))


def graphs_of_before_notice() -> None:
    """As after any write in place: backward would compute with other weights than forward."""
    model = Odd(seed=mine())
    loss = (model.weight * model.weight.sin()).sum()
    sync_module_states(model)
    if mine():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    model.weight.sin().sum().backward()
    assert model.weight.grad is not None


def memory_is_bounded() -> None:
    """Each element is sent once, in buckets; besides these, nothing of the model's size is held, also where strides
    differ between ranks.
    """
    sizes: list[int] = []
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))
    model[1].weight = model[0].weight
    if mine():
        model[2].weight = nn.Parameter(torch.randn(64, 64).T)
    model.append(nn.Embedding(2000, 16))
    distinct = [*model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync, "BUCKET_NBYTES", 8192)
        send = sync.broadcast_over
        patch.setattr(sync, "broadcast_over", lambda t, groups: [sizes.append(t.numel()), send(t, groups)])
        broadcast, allocations = sync._broadcast, Allocations(distinct)

        def measured(*args: Any) -> None:
            with allocations:
                broadcast(*args)

        patch.setattr(sync, "_broadcast", measured)
        sync_module_states(model)
    assert max(sizes) <= 8192
    assert sum(sizes) == sum(p.nbytes for p in distinct)
    assert allocations.most == 8192


def trains_like_the_first_ranks_model() -> None:
    for wrap in (fully_shard, replicate):
        torch.manual_seed(mine())
        model = Net()
        torch.manual_seed(0)
        expected = Net()
        sync_module_states(model)
        for block in model.blocks:
            wrap(block)
        wrap(model)
        for each in (model, expected):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(2):
                x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
                mean_loss(each(shard_batch(x, mine(), dist.get_world_size()) if each is model else x)).backward()
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            assert_same(p, q[1], 1e-5, 1e-6, name)


def inference_tensors_and_subclasses() -> None:
    """What consists of several tensors is sent as these; what was made in inference mode is written to there."""
    model = nn.Module()
    model.pair = nn.Parameter(TwoTensor(*(torch.full((3,), float(mine())) for _ in range(2))))
    with torch.inference_mode():
        model.register_buffer("made", torch.full((3,), float(mine())))
    sync_module_states(model)
    assert not model.pair.a.any()
    assert not model.pair.b.any()
    assert not model.made.any()


# ---- meshes


def only_ranks_of_the_mesh() -> None:
    """On four ranks: the axes given say who is first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for given, first in ((mesh, 0), (mesh["dp"], mine() % 2), (mesh["tp"], mine() // 2 * 2), (None, 0)):
        model = Odd(seed=mine())
        sync_module_states(model, given)
        assert_all_of(model, Odd(seed=first))


def parts_of_tensor_parallelism_stay() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 6)
    local = torch.full((3, 4), float(mine()))
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    for wrong in (None, mesh, mesh["tp"]):
        with pytest.raises(ValueError, match=r"parameter weight: ranks of .* hold different shards.*mesh\['dp'\]"):
            sync_module_states(model, wrong)
    assert torch.equal(model.weight.to_local(), local)
    model.bias.data.fill_(mine())
    sync_module_states(model, mesh["dp"])
    assert torch.equal(model.weight.to_local(), torch.full((3, 4), float(mine() % 2)))
    assert torch.equal(model.bias, torch.full((6,), float(mine() % 2)))
    model.weight = nn.Parameter(DTensor.from_local(torch.full((6, 4), float(mine())), mesh["tp"], [Replicate()]))
    sync_module_states(model)
    assert not model.weight.to_local().any()


def replicas_after_fully_shard() -> None:
    """Shards of the first replica go to the others, and so do what they were cut from, which the first gather compares.
    Within a replica ranks had the same weights.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replica = mine() // 2
    for late in (False, True):
        model = Odd(seed=10 * replica)
        plain = nn.Parameter(torch.full((3,), float(mine())))
        model.plain = plain
        for name, buffer in Odd(seed=10 * mine()).named_buffers():
            setattr(model, name, buffer)
        model.forward = lambda x, model=model: (x @ model.weight.T).sum() + model.inner(x).sum() + model.plain.sum()
        fully_shard(model, mesh=mesh, ignored_params={plain})
        if late:
            with pytest.raises(RuntimeError, match=r"sync_module_states\(model\)"):
                model(torch.ones(2, 5))
        sync_module_states(model)
        expected = Odd(seed=0)
        expected.plain = nn.Parameter(torch.zeros(3))
        assert_all_of(model, expected)
        model(torch.ones(2, 5)).backward()


def shards_of_different_weights_are_refused() -> None:
    """As at the first gather, on all ranks, on any mesh; what was the same is not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"mesh": mesh}):
        model = fully_shard(Odd(seed=2 * mine()).requires_grad_(False), **options)
        with pytest.raises(
            RuntimeError, match=r"ranks had different values.*fsdp2\.sync_module_states\(model\) before"
        ):
            sync_module_states(model)
    model = fully_shard(Odd(seed=0), mesh=mesh)
    sync_module_states(model)
    sync_module_states(model.inner)
    assert_all_of(model, Odd(seed=0))
    model = replicate(Odd(seed=mine()))
    sync_module_states(model)
    assert_all_of(model, Odd(seed=0))


def what_is_not_sharded_yet() -> None:
    """Blocks are sharded, what holds them is not."""
    torch.manual_seed(0)
    expected = Net()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    for p in (*model.stem.parameters(), model.scale, *model.head.parameters()):
        p.data.add_(mine())
    sync_module_states(model)
    assert_all_of(model, expected)
    fully_shard(model)(torch.ones(2, 5)).sum().backward()


def memory_that_was_never_initialised() -> None:
    """Shards of it are refused on all ranks, if one rank has some; a replica of it gets the first one's values. What a
    collective has filled is initialised, though no version counter shows it.
    """
    is_last = mine() == dist.get_world_size() - 1
    for is_filled in (False, True):
        model: Any = fully_shard(nn.Linear(4, 8, device="meta")).to_empty(device="cpu")
        with torch.no_grad():
            model.bias.fill_(1)
            if not is_last:
                model.weight.to_local().fill_(1)
        if is_filled:
            dist.broadcast(model.weight.to_local().detach(), 0)
            sync_module_states(model)
        else:
            with pytest.raises(RuntimeError, match="weight: to_empty gave it memory, and nobody has initialised it"):
                sync_module_states(model)
    model = replicate(nn.Linear(4, 4, device="meta")).to_empty(device="cpu")
    if mine() == 0:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    sync_module_states(model)
    assert all(parameter.to_local().eq(1).all() for parameter in model.parameters())


# ---- refused, on every rank


def refused(error: type[Exception], match: str, module: nn.Module, mesh: Any = None) -> None:
    """Before anything is sent; a call with another model works after that."""
    before = [tensor.clone() for tensor in module.state_dict().values() if not tensor.is_meta]
    with pytest.raises(error, match=match):
        sync_module_states(module, mesh)
    after = [tensor for tensor in module.state_dict().values() if not tensor.is_meta]
    assert all(map(torch.equal, after, before))
    other = Odd(seed=mine())
    sync_module_states(other)
    assert_all_of(other, Odd(seed=0))


def models_that_differ() -> None:
    last = mine() == dist.get_world_size() - 1
    refused(
        ValueError, r"parameter bias of shape \(4,\).* and nothing more|nothing more", nn.Linear(3, 4, bias=not last)
    )
    refused(ValueError, r"parameter weight of shape \(4, 3\).*parameter weight of shape \(4, 5\)", shaped(last))
    refused(ValueError, r"weight.*torch\.float32.*weight.*torch\.float64", nn.Linear(3, 4).to(typed(last)))
    renamed = nn.ModuleDict({"b" if last else "a": nn.Linear(2, 2)})
    refused(ValueError, r"parameter a\.weight.*parameter b\.weight", renamed)


def shaped(last: bool) -> nn.Module:
    return nn.Linear(5 if last else 3, 4)


def typed(last: bool) -> torch.dtype:
    return torch.float64 if last else torch.float32


def tensors_that_cannot_be_sent() -> None:
    """On any rank: all raise."""
    last = mine() == dist.get_world_size() - 1
    model = nn.Linear(2, 2, device="meta" if last else "cpu")
    refused(RuntimeError, r"parameter weight is on meta.*to_empty", model)
    with pytest.raises(RuntimeError, match="parameter weight is uninitialised"):
        sync_module_states(nn.LazyLinear(2) if last else nn.Linear(2, 2))
    model = nn.Module()
    model.register_buffer("adjacency", torch.eye(3).to_sparse() if last else torch.eye(3))
    with pytest.raises(NotImplementedError, match=r"buffer adjacency: expected dense tensors.*sparse"):
        sync_module_states(model)


def calls_at_a_wrong_moment() -> None:
    model = fully_shard(nn.Linear(4, 4))
    model.register_forward_hook(lambda *_: sync_module_states(model))
    with pytest.raises(RuntimeError, match="Call it between steps"):
        model(torch.ones(2, 4))


def wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"module: expected an nn.Module, got list"):
        sync_module_states([nn.Linear(2, 2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh or None, got ProcessGroup"):
        sync_module_states(nn.Linear(2, 2), dist.group.WORLD)  # type: ignore[arg-type]
    other = DeviceMesh("cpu", [1 - mine()])
    with pytest.raises(ValueError, match=rf"mesh: rank {mine()} is not part of"):
        sync_module_states(nn.Linear(2, 2), other)


def values_are_those_of_distribute_tensor() -> None:
    """After loading: parameters of a sharded model that were replaced by DTensors are taken over first."""
    model = fully_shard(Odd(seed=0).requires_grad_(False))
    new = torch.arange(35.0).view(7, 5)
    mesh = model.weight.device_mesh
    model.weight = nn.Parameter(distribute_tensor(new, mesh, [Shard(0)]), requires_grad=False)
    sync_module_states(model)
    assert_same(full(model.weight), new, 0, 0, "weight")


ON_TWO: tuple[Callable[[], None], ...] = (
    all_kinds_of_tensors,
    graphs_of_before_notice,
    memory_is_bounded,
    memory_that_was_never_initialised,
    inference_tensors_and_subclasses,
    models_that_differ,
    tensors_that_cannot_be_sent,
    calls_at_a_wrong_moment,
    wrong_arguments,
    values_are_those_of_distribute_tensor,
)
ON_FOUR = (
    all_kinds_of_tensors,
    trains_like_the_first_ranks_model,
    only_ranks_of_the_mesh,
    parts_of_tensor_parallelism_stay,
    replicas_after_fully_shard,
    shards_of_different_weights_are_refused,
    what_is_not_sharded_yet,
    models_that_differ,
)


@pytest.mark.parametrize(("world_size", "checks"), [(2, ON_TWO), (4, ON_FOUR)], ids=["2", "4"])
def test_sync_module_states(world_size: int, checks: tuple[Callable[[], None], ...]) -> None:
    run_checks(world_size, [(each.__name__, each) for each in checks])


def test_one_rank_needs_nothing() -> None:
    def body(rank: int, world_size: int) -> None:
        model = Odd(seed=3)
        sync_module_states(model)
        assert_all_of(model, Odd(seed=3))

    run_ranks(1, body)
