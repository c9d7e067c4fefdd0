"""Follows the advice about outer_shard, and about codecs of gathers and of replicas."""

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from advised.library_programs import WrappedWeight, Wrapper, train_the_rest, with_stem
from advised.registry import backward, build, follows, refused, shard, train
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from fsdp2.compression import Compression, Int8, PowerSGD
from fsdp2.features.codec_state import load_state_dict, state_dict


def axes(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner", "tp")[: len(sizes)])


def named(mesh: Any, **dims: Any) -> Any:
    return shard(build(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))


@follows(
    "If no ranks compute as replicas, all ranks shard: pass these names as `shard`",
    "Pass the axes of data parallelism only: mesh[{}]",
    "Build the mesh in that order",
)
def axes_that_share_what_rests() -> None:
    mesh = axes(1, 2)
    refused(lambda: named(mesh, outer_shard="inner"), ValueError)
    train(named(mesh, shard="inner", replicate="outer"), build())

    mesh = axes(1, 2, 1)
    text = refused(lambda: named(mesh, shard="inner", outer_shard="outer"), NotImplementedError)
    part = eval(text.split("data parallelism only: ")[1].rstrip("."), {"mesh": mesh})
    train(named(part, shard="inner", outer_shard="outer"), build())

    mesh = axes(2, 1)
    refused(lambda: named(mesh, shard="outer", outer_shard="inner"), ValueError)
    train(named(axes(2, 1), shard="inner", outer_shard="outer"), build())


@follows("Call torch.distributed.init_process_group(backend, rank=..., world_size=..., init_method=...) first", ranks=1)
def without_a_process_group() -> None:
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [
        lambda: shard(build()),
        lambda: fsdp2.replicate(build()),
        lambda: fsdp2.vocab_parallel_embedding(torch.nn.Embedding(4, 4)),
        lambda: fsdp2.sync_module_states(build()),
    ]
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        for call in calls:
            refused(call, RuntimeError)
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{folder}/store")
    train(shard(build()), build())


@follows("Leave outer_shard out to keep another part", ranks=4)
def another_part_after_forward() -> None:
    mesh, options = axes(2, 2), {"reshard_after_forward": 2}

    def sharded(**dims: Any) -> Any:
        return shard(build(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims), **options)

    refused(lambda: sharded(shard="inner", outer_shard="outer"), ValueError)
    model = shard(build(), mesh=init_device_mesh("cpu", (4,)), **options)
    train(model, build())


@follows("Call fully_shard on its module without it")
def gathers_of_its_own() -> None:
    class Gathered(Wrapper):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            rows = self.inner.new_zeros(-(-5 // mesh.size()), 5)
            rows[: len(self.inner)] = self.inner
            return (rows,), None

        def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            return None if out is not None else (type(self)(outputs[0][:5]), outputs)

    make = with_stem(type("Stem", (WrappedWeight,), {"cls": Gathered}))
    plain, policy = build(make), MixedPrecisionPolicy(compression=Compression(all_gather=torch.float32))
    refused(lambda: shard(build(make), mp_policy=policy), NotImplementedError)
    model = copy.deepcopy(plain)
    fully_shard(model.stem)
    train_the_rest(shard(model, mp_policy=policy), plain)


def averaged(group: Any, gradient: Any, shard: Any) -> None:
    """A hook in the shape of FSDP1's."""
    rows = torch.empty_like(gradient)
    dist.all_to_all_single(rows, gradient, group=group)
    shard.copy_(rows.view(group.size(), -1).mean(0))


@follows(
    "Pass one in the shape of FSDP1's, hook(state, gradient, shard), which fills shard; or use "
    "fsdp2.compression.Compression(reduce_scatter=...), with torch.bfloat16 or Int8() for example; or a mesh of "
    "replicas (HSDP, replicate)",
    "Both say how they are reduced: leave one out",
    "Use Compression(reduce_scatter=torch.bfloat16), or reduce_dtype",
)
def hooks_of_ranks_that_shard() -> None:
    sharded: Any = shard(build())
    refused(lambda: sharded.register_comm_hook(None, allreduce_hook), NotImplementedError)
    sharded.register_comm_hook(dist.group.WORLD, averaged)
    train(sharded, build())
    for codec in (torch.bfloat16, Int8()):
        train(
            shard(build(), mp_policy=MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec))),
            build(),
            tolerance=0.05,
        )
    replicas: Any = shard(build(), mesh=axes(2, 1))
    replicas.register_comm_hook(None, allreduce_hook)
    train(replicas, build())

    narrow = MixedPrecisionPolicy(compression=Compression(reduce_scatter=torch.bfloat16))
    exchanging: Any = shard(build(), mp_policy=narrow)
    refused(lambda: exchanging.register_comm_hook(dist.group.WORLD, averaged), ValueError)
    train(exchanging, build(), tolerance=0.05)

    of_fsdp1: Any = shard(build())
    state = LowPrecisionState(dist.group.WORLD)
    refused(lambda: of_fsdp1.register_comm_hook(state, bf16_compress_hook), NotImplementedError)
    for policy in (narrow, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)):
        train(shard(build(), mp_policy=policy), build(), tolerance=0.05)


@follows(
    "Pass mesh.get_group(NAME) of the axis that {}",
    "{}: expected a codec, got {}, which sums between replicas: it is for all_reduce",
)
def hooks_and_sums_of_replicas() -> None:
    mesh = axes(2, 1)
    replicas: Any = shard(build(), mesh=mesh)

    others = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    refused(lambda: replicas.register_comm_hook(others, allreduce_hook), ValueError)
    replicas.register_comm_hook(mesh.get_group("outer"), allreduce_hook)
    train(replicas, build())

    refused(lambda: MixedPrecisionPolicy(compression=Compression(reduce_scatter=PowerSGD())), TypeError)  # type: ignore[arg-type]
    policy = MixedPrecisionPolicy(compression=Compression(all_reduce=PowerSGD()))
    train(shard(build(), mesh=mesh, mp_policy=policy), build())


@follows(
    "Use Compression(all_reduce=...)",
    ranks=4,
)
def hooks_where_replicas_share_what_rests() -> None:
    dims = DataParallelMeshDims(shard="inner", outer_shard="outer")
    at_rest: Any = shard(build(), mesh=axes(2, 2), dp_mesh_dims=dims)
    refused(lambda: at_rest.register_comm_hook(None, allreduce_hook), NotImplementedError)
    policy = MixedPrecisionPolicy(compression=Compression(all_reduce=Int8()))
    train(shard(build(), mesh=axes(2, 2), dp_mesh_dims=dims, mp_policy=policy), build(), tolerance=0.05)


@follows(
    "Load on each rank what it has saved, with the same policies on as many ranks",
    "Shard the model as it was when this was saved",
    "call save and load between steps, not during a backward",
)
def what_codecs_have_kept() -> None:
    """As it was; and left out, with codecs that begin anew."""
    kept, other = (
        MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8(block=block, feedback=True)))
        for block in (128, 64)
    )
    model = shard(build(), mp_policy=kept)
    saved, states = state_dict(model), [None] * dist.get_world_size()
    dist.all_gather_object(states, saved)
    text = refused(lambda: load_state_dict(model, states[1 - dist.get_rank()]), ValueError)
    assert "leave it out" in text
    refused(lambda: load_state_dict(fully_shard(build()), saved), ValueError)
    model.stem.register_forward_hook(lambda *_: _[2].register_hook(lambda _: state_dict(model) and None) and None)
    refused(lambda: backward(model))
    resumed = shard(build(), mp_policy=kept)
    load_state_dict(resumed, saved)
    for each in (resumed, shard(build(), mp_policy=other)):
        train(each, build())
