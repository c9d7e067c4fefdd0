"""Tests `stream_full_params`: whole parameters in buckets, equal to the bit, by few collectives in bounded memory.

The oracle is the plain model from which the sharded one was made, trained on the whole batch alike, or `full_tensor`.
"""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, StreamVersion, full_params, fully_shard, stream_full_params
from fsdp2.ranks import rank_facts
from fsdp2.tools import stream_buckets
from fsdp2.torch_private.internals import local_of
from helpers import full, run_checks, world_sizes


class Odd(nn.Module):
    """Has uneven, empty, scalar, tied, frozen, whole-number and wide parameters, and one that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.thin = nn.Parameter(torch.randn(2, 3, 5))
        self.short = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(5, 2, dtype=torch.float64))
        self.counts = nn.Parameter(torch.arange(7), requires_grad=False)
        self.outside = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return self.head(x).sum() + self.thin.square().sum() + self.short.sum() + self.wide.sum() + self.outside.sum()


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    ignored = {model.outside} if isinstance(model, Odd) else None
    return fully_shard(model, ignored_params=ignored, **options)


def made(cls: Callable[[], nn.Module] = Odd, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = cls()
    return plain, shard(copy.deepcopy(plain), **options)


def streamed(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for bucket in stream_full_params(model, **options):
        assert not found.keys() & bucket.tensors.keys()
        found |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    return found


def assert_whole(found: dict[str, Tensor], plain: nn.Module, dtype: torch.dtype | None = None) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, param in expected.items():
        wanted = param.detach()
        wanted = wanted.to(dtype) if dtype is not None and wanted.is_floating_point() else wanted
        assert found[name].dtype == wanted.dtype, name
        assert torch.equal(found[name], wanted), name


# ---- values


def every_kind_of_parameter() -> None:
    for options in ({}, {"shard_placement_fn": lambda p: Shard(p.dim() - 1) if p.dim() else None}):
        plain, model = made(**options)
        for nbytes in (1, 100, 1000, 1 << 20):
            assert_whole(streamed(model, bucket_bytes=nbytes), plain)
        assert_whole(streamed(model, dtype=torch.bfloat16), plain, torch.bfloat16)


def tied_parameters_come_once_with_all_names() -> None:
    _, model = made()
    (names,) = [names for bucket in stream_full_params(model) for names in bucket.all_names if len(names) > 1]
    assert names == ("embed.weight", "head.weight")


def offloaded_moved_and_unsharded_models() -> None:
    plain, model = made(offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_whole(streamed(model, bucket_bytes=300), plain)
    plain, model = made(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.arange(4))
    for block in model.blocks:
        block.unshard()
    assert_whole(streamed(model), plain)
    for block in model.blocks:
        block.reshard()
    state = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.outside = nn.Parameter(plain.outside.detach() * 2)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    assert_whole(streamed(model, bucket_bytes=64), plain)
    with torch.inference_mode():
        assert_whole(streamed(model), plain)


def a_part_of_a_model() -> None:
    plain, model = made()
    assert_whole(streamed(model.blocks[2]), plain.blocks[2])
    assert_whole(streamed(model.embed), plain.embed)


def buckets_describe_themselves() -> None:
    plain, model = made()
    stream = stream_full_params(model, bucket_bytes=400)
    count = 0
    for bucket in stream:
        count += 1
        sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
        assert list(bucket.counts) == sizes
        assert bucket.flat is not None
        assert bucket.flat.dtype == bucket.dtype
        values = torch.cat([plain.get_parameter(name).detach().reshape(-1) for name in bucket.names])
        assert torch.equal(bucket.flat, values)
    assert count == len(stream)
    assert next(stream, None) is None


def the_memory_of_the_last_bucket_is_freed() -> None:
    """Its tensors raise when they are read, however they were kept: they never hold the values of another bucket."""
    _, model = made()
    stream = stream_full_params(model, bucket_bytes=1)
    first = next(stream)
    flat, kept = first.flat, list(first.tensors.items())
    assert flat is not None
    assert flat.untyped_storage().nbytes() > 0
    next(stream)
    assert flat.untyped_storage().nbytes() == 0
    ((name, tensor), *_) = kept
    reads: list[Callable[[], object]] = [
        lambda: first.tensors,
        lambda: first.write_to({name: torch.zeros(tensor.shape)}),
        lambda: tensor.sum(),
        lambda: torch.zeros(tensor.shape).copy_(tensor),
        lambda: torch.cat([torch.zeros(1), flat]),
        lambda: tensor[0],
        lambda: tensor.tolist(),
        lambda: tensor.data,
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match=r"ParamBucket: whole .* its memory was freed when the next bucket"):
            read()
    assert "its memory was freed" in repr(kept)
    stream.close()
    stream.close()
    assert next(stream, None) is None


def a_plain_model_follows() -> None:
    plain, model = made()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for bucket in stream_full_params(model):
        bucket.write_to(dict(plain.named_parameters()))
    for name, param in model.named_parameters():
        assert torch.equal(full(param), plain.get_parameter(name))
    bucket = next(stream_full_params(model.embed))
    with pytest.raises(KeyError, match="weight: expected a tensor of that name"):
        bucket.write_to({})


VALUES = [
    every_kind_of_parameter,
    tied_parameters_come_once_with_all_names,
    offloaded_moved_and_unsharded_models,
    a_part_of_a_model,
    buckets_describe_themselves,
    the_memory_of_the_last_bucket_is_freed,
    a_plain_model_follows,
]


# ---- receivers


def some_ranks_receive() -> None:
    """One, by messages to it alone, or by a gather; or several, by an all-gather."""
    with mock.patch.object(rank_facts, "backend_name", return_value="nccl"):
        one_receives(dist.get_world_size() - 1)
    plain, model = made()
    rank, size = dist.get_rank(), dist.get_world_size()
    for ranks in ([0], [size - 1], [0, size - 1]):
        sent = []
        to_one = stream_buckets.gather_to_one
        with mock.patch.object(stream_buckets, "gather_to_one", lambda *a, to=to_one, s=sent: (s.append(a), to(*a))[1]):
            buckets = [
                ({name: tensor.clone() for name, tensor in bucket.tensors.items()}, bucket)
                for bucket in stream_full_params(model, bucket_bytes=300, ranks=ranks)
            ]
        assert bool(sent) == (len({*ranks}) == 1 and size > 1)
        for found, bucket in buckets:
            assert (bucket.flat is not None) == (rank in ranks)
            assert bool(found) == (rank in ranks)
            assert bucket.names
        if rank in ranks:
            assert_whole({name: t for found, _ in buckets for name, t in found.items()}, plain)


def one_receives(to: int) -> None:
    plain, model = made()
    found = streamed(model, bucket_bytes=300, ranks=[to])
    if dist.get_rank() == to:
        assert_whole(found, plain)
    else:
        assert not found


# ---- between micro-batches, consistency


def between_micro_batches() -> None:
    torch.manual_seed(0)
    results = []
    for streams in (False, True):
        _, model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(3):
            model.set_requires_gradient_sync(i == 2)
            model(torch.arange(4) + i).backward()
            if streams:
                for _ in stream_full_params(model, bucket_bytes=200):
                    pass
        optimizer.step()
        results.append(streamed(model))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def passes_between_buckets() -> None:
    plain, model = made()
    found = {}
    for bucket in stream_full_params(model, bucket_bytes=200):
        model(torch.arange(4)).backward()
        found |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}
    assert_whole(found, plain)


def a_write_in_between_raises_on_all_ranks() -> None:
    """Of an optimizer on all ranks at once; of one rank, on the others one bucket later."""
    _, model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(4)).backward()
    stream = stream_full_params(model, bucket_bytes=1)
    next(stream)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"\w+: it was written to or replaced, .* Finish the stream before"):
        next(stream)
    assert next(stream, None) is None
    if dist.get_world_size() > 1:
        for ranks in (None, [0]):
            stream = stream_full_params(model, bucket_bytes=1, ranks=ranks)
            next(stream)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model.blocks[2].weight.add_(0)
            else:
                next(stream)
            with pytest.raises(RuntimeError, match=r"blocks\.2\.weight: it was written to or replaced"):
                next(stream)
    stream = stream_full_params(model, bucket_bytes=1)
    next(stream)
    model.blocks[0].weight = nn.Parameter(model.blocks[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"blocks\.0\.weight: it was written to or replaced"):
        next(stream)


# ---- errors


def clear_errors_on_all_ranks() -> None:
    plain, model = made()
    for wrong, kind, text in (
        ({"bucket_bytes": 0}, ValueError, "expected 1 or more"),
        ({"bucket_bytes": 1.5}, TypeError, "expected an int"),
        ({"dtype": "bf16"}, TypeError, "expected a torch.dtype"),
        ({"dtype": torch.int8}, ValueError, "floating-point"),
        ({"ranks": 0}, TypeError, "expected global ranks"),
        ({"ranks": [99]}, ValueError, "expected some of 0 to"),
        ({"ranks": []}, ValueError, "expected some of 0 to"),
        ({"since": 3}, TypeError, "StreamVersion"),
    ):
        with pytest.raises(kind, match=text):
            stream_full_params(model, **wrong)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        stream_full_params(model.thin)
    with pytest.raises(ValueError, match="expected a module with sharded parameters, Odd has none"):
        stream_full_params(plain)
    with full_params(model), pytest.raises(RuntimeError, match="between passes"):
        stream_full_params(model)
    with torch.device("meta"):
        on_meta = shard(Odd())
    with pytest.raises(RuntimeError, match="thin is on meta: it has no values"):
        stream_full_params(on_meta)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="ranks stream different parameters, or pass different arguments"):
            stream_full_params(model, bucket_bytes=100 + dist.get_rank())
        local: Any = local_of(model.blocks[1].weight)
        if dist.get_rank() == 0:
            local.fsdp_pre_all_gather, local.fsdp_post_all_gather = lambda mesh: None, lambda *_, **__: None
        with pytest.raises(NotImplementedError, match=r"blocks\.1\.weight has fsdp_pre_all_gather"):
            stream_full_params(model)


# ---- changes


def changes_alone() -> None:
    """An engine that gets changes stays equal to the bit, over learning rates, and gets few bytes at low ones."""
    placements: tuple[Any, ...] = (None, lambda p: Shard(p.dim() - 1) if p.dim() else None)
    for placement in placements:
        _, model = made(shard_placement_fn=placement)
        engine = copy.deepcopy(made()[0])
        for param in engine.parameters():
            param.data = param.data.to(torch.bfloat16) if param.is_floating_point() else param.data
        targets, version, sizes = dict(engine.named_parameters()), StreamVersion(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        for step in range(5):
            nbytes = 0
            for bucket in stream_full_params(model, bucket_bytes=150, dtype=torch.bfloat16, since=version):
                bucket.write_to(targets)
                nbytes += sum(each.nbytes for each in (bucket.flat, bucket.indices) if each is not None)
            sizes.append(nbytes)
            for name, param in model.named_parameters():
                expected = full(param)
                expected = expected.to(torch.bfloat16) if expected.is_floating_point() else expected
                assert torch.equal(targets[name], expected), (step, name)
            if step < 3:
                model(torch.arange(4)).backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 50
        whole = sum(p.numel() * p.element_size() for p in engine.parameters())
        assert sizes[0] == whole
        assert 0 < sizes[1] < whole / 4
        assert sizes[3] > sizes[1]
        assert sizes[4] == 0, "nothing has changed since"
        assert version.nbytes <= whole


def an_unfinished_stream_forgets() -> None:
    """Also on one rank alone: then all ranks deliver everything again."""
    plain, model = made()
    version = StreamVersion()
    for _ in stream_full_params(model, since=version):
        pass
    stream = stream_full_params(model, since=version)
    assert len(stream) == 0
    if dist.get_rank() == 0:
        stream.close()
    else:
        assert list(stream) == []
    assert_whole(streamed(model, since=version), plain)
    version.clear()
    assert version.nbytes == 0
    assert_whole(streamed(model, since=version), plain)
    with torch.no_grad():
        model.thin.mul_(torch.tensor(-0.0))  # bits count: -0.0 is a change of 0.0
    (bucket,) = stream_full_params(model, since=version)
    assert bucket.names == ("thin",)


def changes_for_one_rank() -> None:
    _, model = made()
    version = StreamVersion()
    for _ in stream_full_params(model, since=version, ranks=[0]):
        pass
    with torch.no_grad():
        model.embed.weight[3, 2] = 7.0
    found = [(b.names, b.flat, b.indices) for b in stream_full_params(model, since=version, ranks=[0])]
    assert [names for names, *_ in found] == [("embed.weight",)]
    assert (found[0][1] is None) == (dist.get_rank() != 0)


# ---- meshes


def recording(sent: list[bool]) -> Any:
    """Returns what begins a collective, and notes whether it sends values."""
    start = stream_buckets.Segments.start

    def noted(segments: Any, number: int) -> None:
        sent.append(not segments._route.to_nobody)
        start(segments, number)

    return noted


def replicas_of_shards() -> None:
    plain, model = made(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    assert_whole(streamed(model, bucket_bytes=300), plain)
    for ranks in ([3], [0, 3], [0, 1]):
        sent: list[bool] = []
        with mock.patch.object(stream_buckets.Segments, "start", recording(sent)):
            found = streamed(model, bucket_bytes=300, ranks=ranks)
        if dist.get_rank() in ranks:
            assert_whole(found, plain)
        else:
            assert not found
        replicas = {rank // 2 for rank in ranks}
        assert {*sent} == {dist.get_rank() // 2 in replicas}, "a replica whose ranks get nothing sends nothing"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 5), nn.Linear(5, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def tensor_parallelism() -> None:
    """Whole values, by a second collective; uneven shards on both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = Pair()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    version = StreamVersion()
    for ranks in (None, [1]):
        found = streamed(model, bucket_bytes=200, ranks=ranks, since=version)
        if ranks is None or dist.get_rank() in ranks:
            expected = dict(plain.named_parameters())
            assert all(torch.equal(found[name], expected[name]) for name in found)
            parallel = {"up.weight", "up.bias", "down.weight"}
            assert found.keys() == (expected.keys() if ranks is None else parallel), "which come whole each time"
    stream = stream_full_params(model, bucket_bytes=1)
    next(stream)
    with torch.no_grad():
        model.norm.weight.to_local().add_(1 - dist.get_rank() // 2)
    raised = False
    try:
        for _ in stream:
            pass
    except RuntimeError as error:
        raised = "norm.weight: it was written to" in str(error)
    assert raised, "also where another rank has written"


def tensors_of_tensor_parallelism_alone() -> None:
    """DTensors that no fully_shard call manages, and a declared gap."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = Pair()
    model = copy.deepcopy(plain)
    parallelize_module(model.up, mesh["tensor"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"], ignored_params={*model.up.parameters()})
    assert_whole(streamed(model), plain)
    both, values = nn.Module(), torch.arange(35.0).view(5, 7)
    both.cut = nn.Parameter(torch.distributed.tensor.distribute_tensor(values, mesh, [Shard(0), Shard(1)]))
    both.twice = nn.Parameter(torch.distributed.tensor.distribute_tensor(values, mesh, [Shard(1), Shard(1)]))
    both.down = fully_shard(nn.Linear(4, 4), mesh=mesh["data"])
    delivered = streamed(both)
    assert torch.equal(delivered["cut"], values)
    assert torch.equal(delivered["twice"], values)
    both.sum = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()]))
    with pytest.raises(NotImplementedError, match=r"sum: .* sharded or replicated .*, got .*sum\.full_tensor\(\)"):
        stream_full_params(both)


def test_meshes() -> None:
    checks = (replicas_of_shards, tensor_parallelism, tensors_of_tensor_parallelism_alone)
    run_checks(4, [(check.__name__, check) for check in checks])


CHANGES = [changes_alone, an_unfinished_stream_forgets, changes_for_one_rank]
OTHERS = [
    some_ranks_receive,
    between_micro_batches,
    passes_between_buckets,
    a_write_in_between_raises_on_all_ranks,
    clear_errors_on_all_ranks,
]


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=(1, 2)))
def test_streams(world_size: int) -> None:
    checks = [*VALUES, *CHANGES, *OTHERS]
    run_checks(world_size, [(check.__name__, check) for check in checks])
