"""Tests formulas for the memory of a step on every allocation, all of which are counted.

G is the bytes of one unsharded group, S = G / ranks those of its shard. All blocks are equal; activations are far below
a percent.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.meters import AllocationMeter, CopyMeter, num_bytes
from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.checks import conversation, named_comm
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.collectives.gloo import PairwiseComm
from fsdp2.compression import Compression
from fsdp2.engine import buckets
from fsdp2.engine import group as groups
from fsdp2.engine.comm import Comm, CommLabel, SoloComm
from fsdp2.engine.state import groups_below
from fsdp2.features import large_submodules
from helpers import fake_world
from python_groups import OnlySums, PythonGroup, WithTensors, python_group

RANKS, BLOCKS, DIM = 8, 6, 512
GROUP = DIM * DIM * 4 * 4  # four fp32 matrices
SLACK = 0.02 * GROUP
BF16_REDUCE_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_WIRE = dataclasses.replace(BF16_REDUCE_FP32, compression=Compression(reduce_scatter=torch.bfloat16))


class Block(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Stack(nn.Sequential):
    def __init__(self, layers: int = 4) -> None:
        super().__init__(*[Block(layers) for _ in range(BLOCKS)])

    def example(self) -> Tensor:
        return torch.ones(1, DIM, requires_grad=True)


def eight_layers() -> Stack:
    return Stack(8)


VOCAB = 9 * GROUP // (4 * 4 * DIM)  # an embedding, and a head, of 2.25 groups each


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = Stack()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def example(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def build(model: nn.Module, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    for block in [each for each in model.modules() if isinstance(each, Block)]:
        shard(block, **options)
    return shard(model, **options)


def measure(kind: Callable[[], nn.Module] = Stack, in_backward: bool = False, **options: Any) -> dict[str, float]:
    """Resting bytes, peaks of forward and of the whole step above resting, bytes that outlive the model.

    `in_backward`: clear each gradient as soon as it is there, as an optimizer that steps then does.
    """
    gc.collect()  # what earlier tests have left, if it went meanwhile, would count as released
    with AllocationMeter() as meter:
        model = build(kind(), **options)
        for param in model.parameters() if in_backward else ():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        batch = model.example()
        for _ in range(2):  # in the second step the order is known: gathers run ahead
            gc.collect()
            with meter.region("step"):
                with meter.region("forward"):
                    loss = model(batch).float().sum()
                loss.backward()
                model.zero_grad()
                batch.grad = None
        del model, batch, loss
        gc.collect()
    resting = meter.allocated_before("step")
    return {
        "resting": resting,
        "forward": meter.peak_during("forward") - resting,
        "step": meter.peak_during("step") - resting,
        "left": meter.allocated_at_end(),
    }


def frozen_in_part(model: Stack, x: Tensor) -> None:
    for block in model:
        block.layers[1].requires_grad_(False)
    model(x).sum().backward()
    model.requires_grad_(True)


def through_blocks_twice(model: Stack, x: Tensor) -> None:
    for block in reversed(model):
        x = block(x)
    model(x).sum().backward()


def two_checkpointed(model: Stack, x: Tensor) -> None:
    losses = []
    for _ in range(2):
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        losses.append(y.sum())
    sum(losses).backward()  # type: ignore[union-attr]


# How a backward may go in which groups do not get their last gradient before the next one is needed, and how many of
# them it holds at most: the one in use, the one that is gathered ahead, and one that comes again.
BACKWARDS: dict[str, tuple[int, Callable[[Stack, Tensor], object]]] = {
    "of two forwards": (2, lambda model, x: (model(x).sum() + model(x).sum()).backward()),
    "of blocks that run twice": (3, through_blocks_twice),
    "for the input alone": (2, lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x)),
    "of some parameters": (2, frozen_in_part),
    "of two forwards that are checkpointed": (3, two_checkpointed),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_holds_few_groups_whatever_ran_before(backward: str) -> None:
    """After training, in which the last gradient of a group tells that backward is done with it."""
    model = build(Stack())
    held = []

    def count(_: Tensor) -> None:
        held.append(sum(group.unsharded.is_allocated for group in groups_below(model) if group.params))

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(count)

    for block in model:
        block.layers[0].register_forward_hook(watch)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(1, DIM)).sum().backward()
        num_groups, run = BACKWARDS[backward]
        run(model, torch.ones(1, DIM))
        model.zero_grad()
    assert max(held) == num_groups


def test_a_backward_for_an_intermediate_alone_leaves_all_groups_once() -> None:
    """Nothing tells of it before it runs. After it inputs are hooked, whatever trains in between."""
    model = build(Stack())
    held, intermediates = [], list[Tensor]()
    model[0].register_forward_hook(lambda _, __, output: intermediates.append(output))

    def count(_: Tensor) -> None:
        held.append(sum(group.unsharded.is_allocated for group in groups_below(model) if group.params))

    for is_first in (True, False):
        for _ in range(2):
            model(torch.ones(1, DIM)).sum().backward()
        held.clear()
        loss = model(torch.ones(1, DIM)).sum()
        intermediates[-1].register_hook(count)
        torch.autograd.grad(loss, intermediates[-1])
        assert max(held) == (BLOCKS if is_first else 1)


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_wrapping_leaves_the_shards_and_holds_no_block_twice(options: dict[str, object]) -> None:
    """A block is free when its full storage is allocated. Its shards are there twice: alone, and in one buffer."""
    with AllocationMeter() as meter:
        plain = Stack()
        with meter.region("wrapping"):
            model = build(plain, **options)
        del plain
        gc.collect()
    assert meter.peak_during("wrapping") <= (BLOCKS + 2 / RANKS) * GROUP + SLACK
    assert meter.allocated_at_end() <= BLOCKS * GROUP / RANKS + SLACK
    del model


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_at_rest_there_are_the_shards_and_nothing_else(options: dict[str, object]) -> None:
    """A full copy, a gather buffer or a gradient that survives the step would show."""
    memory = measure(**options)
    shards = BLOCKS * GROUP / RANKS
    assert shards <= memory["resting"] <= shards + SLACK
    assert memory["left"] <= 1024, "deleting the model must free everything"


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_forward_holds_two_groups(options: dict[str, object]) -> None:
    """The one that computes and the one gathered ahead: no gather buffer beside them, no temporary for the cast."""
    full = GROUP // 2 if options else GROUP
    memory = measure(**options)
    assert 2 * full <= memory["forward"] <= 2.05 * full


def uneven_rows() -> nn.Module:
    """No number of rows divides evenly, and one weight is large enough to be gathered on its own by any group."""
    stack = Stack(2)
    for block in stack:
        block.layers = nn.ModuleList([nn.Linear(DIM, 4099), nn.Linear(4099, 77, bias=False), nn.Linear(77, DIM)])
    return stack


def many_small() -> nn.Module:
    stack = Stack(1)
    for block in stack:
        block.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 40), nn.Linear(40, DIM)) for _ in range(12))
    return stack


@pytest.mark.parametrize(
    ("cls", "kind", "casts"),
    [
        *((WithTensors, Stack, True), (WithTensors, uneven_rows, False), (WithTensors, many_small, True)),
        *((PythonGroup, many_small, True), (OnlySums, Stack, True)),
    ],
)
def test_forward_over_a_group_written_in_python_holds_two_groups_and_packed_segments(
    cls: type[PythonGroup], kind: Callable[[], nn.Module], casts: bool
) -> None:
    """Such a group launches each tensor on its own, so that many travel packed: the packed bytes must be gone once they
    are copied. On the group of lists a cast shard is copied to be sent. Rows are padded: three percent.

    The peak of torch's FSDP2 is the same in 2.13, and a group less in 2.15: it gathers nothing ahead.
    """
    full = num_bytes([*next(kind().children()).parameters()]) / (2 if casts else 1)
    ours = measure(
        kind,
        mp_policy=BF16_REDUCE_FP32 if casts else MixedPrecisionPolicy(),
        mesh=mesh_of(python_group(cls, [*range(RANKS)])),
    )
    copied = full / RANKS if casts and cls is PythonGroup else 0
    assert 2 * full <= ours["forward"] <= 1.03 * 3 * full + copied
    assert ours["left"] <= 1024


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shards",))


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_packed_segments_are_freed_when_they_are_copied(options: dict[str, Any]) -> None:
    """Forward: the kept group, the last one, and its segments. They are no part of what stays from forward to backward,
    nor, with `reshard_after_forward=2`, of what backward gathers.
    """
    full = GROUP // 2 if options else GROUP
    meshes = [mesh_of(python_group(WithTensors, [*range(RANKS)])) for _ in range(3)]
    memory = measure(**options, mesh=meshes[0])
    assert 3 * full <= memory["forward"] <= 3.05 * full
    kept = measure(**options, mesh=meshes[1], reshard_after_forward=False)
    assert BLOCKS * full <= kept["forward"] <= (BLOCKS + 1.05) * full
    few = measure(**options, mesh=meshes[2], reshard_after_forward=2)
    assert few["forward"] <= (2.05 + BLOCKS / 2) * full


def test_forward_without_resharding_holds_all_groups() -> None:
    assert BLOCKS * GROUP <= measure(reshard_after_forward=False)["forward"] <= BLOCKS * GROUP + SLACK


def test_fp32_step_holds_two_groups_and_the_gradients_in_flight() -> None:
    """One matrix each is a bucket, and its gradient is sent from where autograd put it.

    The peak comes when the second block has three gradients, two of them on their way and one just computed, while the
    first is gathered ahead: 2 G + 3 G/4, and the shards of the gradients so far: S of each block behind, 3 S/4 here.
    """
    expected = 2 * GROUP + 3 * GROUP / 4 + (BLOCKS - 2 + 3 / 4) * GROUP / RANKS
    assert 0.98 * expected <= measure()["step"] <= expected + SLACK


def test_optimizer_in_backward_holds_no_gradients_but_those_on_their_way() -> None:
    """As above without the shards of complete gradients; those that are being reduced are two, of S/4 each."""
    expected = 2 * GROUP + 3 * GROUP / 4 + 2 * GROUP / RANKS / 4
    assert 0.98 * expected <= measure(in_backward=True)["step"] <= expected + SLACK


def test_mixed_precision_step_holds_two_groups_and_the_gradients_in_flight() -> None:
    """As above, but a bucket is packed into fp32, twice its size, before it is sent.

    The peak comes when the second block's last gradient is packed, while the one before it is on its way.
    """
    full = GROUP / 2
    gradients = full / 4 + 2 * (GROUP / 4)
    expected = 2 * full + gradients + (BLOCKS - 1) * GROUP / RANKS
    assert 0.98 * expected <= measure(mp_policy=BF16_REDUCE_FP32)["step"] <= expected + SLACK


def test_many_small_matrices_have_as_many_bytes_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of eight buckets: three of the eighths in which a group is sent are there at once."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 1)
    full = 8 * DIM * DIM * 2
    gradients = full / 8 + 3 * (2 * full / 8)
    expected = 2 * full + gradients + (BLOCKS - 1) * 2 * full / RANKS
    assert 0.98 * expected <= measure(eight_layers, mp_policy=BF16_REDUCE_FP32)["step"] <= expected + SLACK


@pytest.mark.parametrize("pairwise", [False, True])
def test_bf16_wire_step_holds_each_gradient_twice_while_it_is_sent(
    pairwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is sent from where autograd put it; what arrives is as large (gloo: without this rank's own slice).

    The peak comes when the second block's last gradient is computed, two others travel, and what arrived of the older
    one is summed, for which the CPU casts one slice at a time. As much as for fp32 reductions by a reduce-scatter. On
    gloo all gradients travel so; and there is what first messages of three reductions arrived in, and two that carry a
    slice (simulated ranks take them at once).
    """
    received, first_messages = 1.0, 0.0
    if pairwise:
        monkeypatch.setattr(PairwiseComm, "direct_min_bytes", 16 * 1024)
        for module in (named_comm, conversation):
            monkeypatch.setattr(module, "differ", lambda *_: False)  # headers of simulated ranks never come
        longest_first = NamedPairwiseComm(dist.group.WORLD, CommLabel()).longest_first
        slice_nbytes = GROUP / 4 / 2 / RANKS
        received, first_messages = (RANKS - 1) / RANKS, 3 * (RANKS - 1) * longest_first + 2 * slice_nbytes
    unsharded = GROUP / 2
    gradients = (1 + 2 * (1 + received)) * unsharded / 4
    expected = 2 * unsharded + gradients + (BLOCKS - 2 + 3 / 4) * GROUP / RANKS + first_messages
    widened = 2 * unsharded + unsharded / 4 + 2 * GROUP / 4 + (BLOCKS - 1) * GROUP / RANKS
    ordinary = expected if pairwise else widened
    with mock.patch.object(groups, "make_comm", pairwise_comm) if pairwise else nullcontext():
        assert 0.98 * expected <= measure(mp_policy=BF16_WIRE)["step"] <= expected + SLACK
        assert 0.98 * ordinary <= measure(mp_policy=BF16_REDUCE_FP32)["step"] <= ordinary + SLACK


def pairwise_comm(group: dist.ProcessGroup | None, device: torch.device, comm_label: CommLabel) -> Comm:
    """Returns what gloo gets."""
    return SoloComm() if group is None else NamedPairwiseComm(group, comm_label)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_hsdp_step_holds_one_bucket_less_than_sharding_alone(shape: tuple[int, int], options: dict[str, Any]) -> None:
    """A bucket is freed once scattered, before the next is sent: what is summed between replicas is its shard, which
    becomes the gradient where it lies. So one of the two buckets on their way is gone, in the formulas above.
    """
    shard = GROUP / shape[1]
    expected = 2 * GROUP + 2 * GROUP / 4 + (BLOCKS - 2 + 3 / 4) * shard
    if options:
        expected = 2 * GROUP / 2 + GROUP / 2 / 4 + GROUP / 4 + (BLOCKS - 1 - 1 / 4) * shard
    memory = measure(mesh=init_device_mesh("cpu", shape), **options)
    assert 0.98 * expected <= memory["step"] <= expected + SLACK
    assert memory["left"] <= 1024


def alone() -> dict[str, Any]:
    return {"mesh": DeviceMesh("cpu", [0])}


def replicas() -> dict[str, Any]:
    return {"shard": replicate}


def replicas_that_could_shard() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (RANKS, 1))}


def copied(**options: Any) -> float:
    """Bytes per parameter that a step copies."""
    model = build(Stack(), **options)
    batch = model.example()
    for _ in range(2):
        model(batch).float().sum().backward()
        model.zero_grad()
    with CopyMeter() as copies:
        model(batch).float().sum().backward()
    return copies.copy_bytes / (BLOCKS * GROUP / 4)


@pytest.mark.parametrize("whole", [alone, replicas, replicas_that_could_shard])
def test_where_nothing_is_sharded_nothing_is_copied(whole: Callable[[], dict[str, Any]]) -> None:
    """The modules compute with the shards, and each gradient of autograd becomes `.grad`, summed in place."""
    memory = measure(**whole())
    assert BLOCKS * GROUP <= memory["resting"] <= BLOCKS * GROUP + SLACK
    assert memory["forward"] <= SLACK
    assert BLOCKS * GROUP <= memory["step"] <= BLOCKS * GROUP + SLACK
    assert memory["left"] <= 1024
    assert copied(**whole()) <= 0.01


@pytest.mark.parametrize("whole", [alone, replicas, replicas_that_could_shard])
def test_where_nothing_is_sharded_a_cast_is_the_only_copy(whole: Callable[[], dict[str, Any]]) -> None:
    """Two groups are cast in forward; the last gradient is, when all others are there, and its group is freed.

    Each cast reads and writes: fp32 to bf16 in forward, again in backward but for the last two, and a gradient back.
    """
    full = GROUP / 2
    memory = measure(mp_policy=BF16_REDUCE_FP32, **whole())
    assert 2 * full <= memory["forward"] <= 2.05 * full
    expected = full + full / 4 + (BLOCKS - 1 / 4) * GROUP
    assert 0.98 * expected <= memory["step"] <= expected + SLACK
    expected = (4 + 2) * (2 - 2 / BLOCKS) + (2 + 4)
    assert expected <= copied(mp_policy=BF16_REDUCE_FP32, **whole()) <= expected + 0.01


def test_small_gradients_of_replicas_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the memory that is summed in one call for all of them, and becomes their `.grad`."""
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 2 * GROUP)
    assert 4 + 4 <= copied(**replicas()) <= 4 + 4 + 0.01


def peaks_of_language(**options: Any) -> tuple[float, float]:
    """Of forward and of the whole step, in groups of the compute dtype."""
    memory, group = measure(Language, **options), GROUP / (2 if options else 1)
    return memory["forward"] / group, memory["step"] / group


def test_an_embedding_and_a_head_left_in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward holds the larger of them and a block; backward a head, its gradient, a block, and what is on its way: in
    mixed precision two of 16 pieces of the gradient in fp32. All sharded gradients are an eighth, in fp32.
    """
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 1 << 16)
    large = 2.25
    forward, step = peaks_of_language()
    assert large < forward <= large + 1 + 0.05
    assert 2 * large < step <= 2 * large + 1 + large / RANKS + 0.05
    forward, step = peaks_of_language(mp_policy=BF16_REDUCE_FP32)
    assert large < forward <= large + 1 + 0.05
    assert 2 * large < step <= 2 * large + 1 + 2 * large * (2 / 16 + 1 / RANKS) + 0.05
    monkeypatch.setattr(large_submodules, "MIN_BYTES", 1 << 40)
    forward_of_one, step_of_one = peaks_of_language(mp_policy=BF16_REDUCE_FP32)
    assert forward_of_one > forward + 2, "the formula can be missed"
    assert step_of_one > step + 6, "so can this one"
