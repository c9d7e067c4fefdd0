"""Tests sequences that several ranks share: each computes some positions, and attends to the keys of all.

The oracle is the whole batch, with whole sequences, in one process.
"""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from helpers import assert_same, run_ranks
from programs import ROOT

sys.path.append(str(ROOT / "examples"))  # as a program of that folder has it
import tiny_text
from context_parallel import attend

ROWS, IGNORED = 4, -100


def batch() -> tuple[Tensor, Tensor]:
    """Returns bytes, and those that follow, of which some count nothing: ranks have different numbers of tokens."""
    inputs, targets = tiny_text.Text(tiny_text.DOCUMENTATION, torch.device("cpu")).batch(1)
    inputs, targets = inputs[:ROWS], targets[:ROWS].clone()
    targets[0, 10:50] = IGNORED
    targets[3, :5] = IGNORED
    return inputs, targets


def logits_of(model: tiny_text.GPT, inputs: Tensor) -> Tensor:
    stream = model.byte_embedding(inputs) + model.position_embedding.weight[model.positions]
    for block in model.blocks:
        stream = block(stream)
    return model.head(model.norm(stream))


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Logits(nn.Module):
    def __init__(self, gpt: tiny_text.GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, inputs: Tensor) -> Tensor:
        return logits_of(self.gpt, inputs)


def make_mesh(data: int, context: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, context), mesh_dim_names=("data", "context"))


def trains_like_whole_sequences(rank: int, data: int, context: int) -> None:
    mesh = make_mesh(data, context)
    plain = Logits(tiny_text.make_gpt(torch.device("cpu"))).double()
    model = copy.deepcopy(plain)
    inputs, targets = batch()
    (sum_of_losses(plain(inputs), targets) / (targets != IGNORED).sum()).backward()

    group, place = mesh["context"].get_group(), mesh["context"].get_local_rank()
    dims = fsdp2.DataParallelMeshDims(shard=("data", "context"))
    for block in model.gpt.blocks:
        fsdp2.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fsdp2.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.gpt.positions = torch.arange(tiny_text.CONTEXT).chunk(context)[place]
    rows = [each.chunk(data)[mesh["data"].get_local_rank()] for each in (inputs, targets)]
    fsdp2.check_same_batch(mesh, "context", *rows)
    own_inputs, own_targets = (each.chunk(context, dim=1)[place] for each in rows)
    whole, tiny_text.attend = tiny_text.attend, lambda query, key, value: attend(query, key, value, group)
    try:
        with fsdp2.accumulate(model, num_batches=1) as acc:
            acc.backward(sum_of_losses(model(own_inputs), own_targets), weight=(own_targets != IGNORED).sum())
    finally:
        tiny_text.attend = whole
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param.grad, expected.grad, rtol=1e-10, atol=1e-14, name=name)


@pytest.mark.parametrize(("data", "context"), [(1, 2), (2, 2), (1, 4)])
def test_gradients_are_those_of_whole_sequences(data: int, context: int) -> None:
    run_ranks(data * context, lambda rank, _: trains_like_whole_sequences(rank, data, context))


def test_ranks_of_one_sequence_with_different_batches() -> None:
    """All ranks raise, those of other sequences, too: they would wait in the next forward."""

    def body(rank: int, _: int) -> None:
        mesh = make_mesh(2, 2)
        values = torch.arange(6).reshape(2, 3)
        fsdp2.check_same_batch(mesh, "context", values + rank // 2, torch.ones(()))
        fsdp2.check_same_batch(mesh, "context")
        different: list[tuple[Tensor, ...]] = [
            (values + (rank == 1),),
            (values.reshape(3, 2) if rank == 1 else values,),
            (values, values)[: 1 + (rank == 1)],
            (values.float() if rank == 1 else values,),
        ]
        for tensors in different:
            whose = "got different" if rank < 2 else "which others"
            with pytest.raises(RuntimeError, match=f"expected the same batch on all 2 ranks along context, {whose}"):
                fsdp2.check_same_batch(mesh, "context", *tensors)
        with pytest.raises(RuntimeError, match="expected the same batch on all 4 ranks along data, context, got"):
            fsdp2.check_same_batch(mesh, ("data", "context"), values + rank // 2)
        with pytest.raises(TypeError, match="mesh: expected a DeviceMesh, got ProcessGroup"):
            fsdp2.check_same_batch(mesh.get_group(0), "context", values)  # type: ignore[arg-type]
        for wrong in ("model", ()):
            with pytest.raises(ValueError, match=r"along: expected axes of the mesh, of .'data', 'context'., got"):
                fsdp2.check_same_batch(mesh, wrong, values)

    run_ranks(4, body)
