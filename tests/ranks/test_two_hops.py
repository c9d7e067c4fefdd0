"""Tests gathers and reductions in two hops (`DataParallelMeshDims(shard_across=...)`), on 2 machines of 2 ranks.

Oracles: a plain model on the whole batch, in fp64 to 1e-12; torch's own cut of plain tensors, bit for bit.
`tests/matrix.py` draws the scenarios of other files over this topology, too.
"""

import copy
import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, codecs, describe, full_params, fully_shard
from fsdp2.engine.hops import HopsComm
from fsdp2.engine.state import groups_below
from helpers import run_checks, run_ranks, shard_batch
from models import OddMLP, mean_loss

ACROSS = DataParallelMeshDims(shard="gpu", shard_across="machine")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NEAR: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
ROWS = 8


@functools.cache
def mesh() -> DeviceMesh:
    return fsdp2.two_hop_mesh("cpu", ranks_per_machine=2)


def in_two_hops(model: nn.Module, **options: Any) -> Any:
    for child in model.children():
        fully_shard(child, mesh=mesh(), dp_mesh_dims=ACROSS, **options)
    return fully_shard(model, mesh=mesh(), dp_mesh_dims=ACROSS, **options)


def plain_model() -> OddMLP:
    torch.manual_seed(0)
    return OddMLP().double()


def rows_of(model: OddMLP, seed: int) -> torch.Tensor:
    return shard_batch(model.example(rows=ROWS, seed=seed).double(), dist.get_rank(), 4)


def train_as_plain(**options: Any) -> None:
    plain = plain_model()
    model = in_two_hops(copy.deepcopy(plain), **options)
    assert all(isinstance(each.comms.gathers, HopsComm) for each in groups_below(model))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        for micro in range(2):
            seed = 2 * step + micro
            model.set_requires_gradient_sync(micro == 1)
            mean_loss(model(rows_of(plain, seed))).backward()
            mean_loss(plain(plain.example(rows=ROWS, seed=seed).double())).backward()
        for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), whole.grad, **NEAR, msg=name)
        norms = [fsdp2.clip_grad_norm_(model.parameters(), 0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
        torch.testing.assert_close(norms[0], norms[1], **NEAR)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), whole, rtol=1e-9, atol=1e-9, msg=name)


def gathered_bits_are_those_of_the_weights() -> None:
    plain = plain_model().float()
    model = in_two_hops(copy.deepcopy(plain), mp_policy=BF16, reshard_after_forward=2)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, *_, name=name: seen.update({name: m.weight.detach().clone()}))
    model(rows_of(plain, 0).float())
    assert seen
    for name, weight in seen.items():
        expected = plain.get_parameter(f"{name}.weight").to(torch.bfloat16)
        assert torch.equal(weight, expected), name
    with full_params(model):
        for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, whole.to(torch.bfloat16)), name


def backward_gathers_inside_the_machine() -> None:
    model = in_two_hops(plain_model(), reshard_after_forward=2)
    kinds = []
    gather = HopsComm.all_gather
    with mock.patch.object(HopsComm, "all_gather", lambda *args: kinds.append("hops") or gather(*args)):
        loss = mean_loss(model(rows_of(model, 0)))
        in_forward = len(kinds)
        loss.backward()
    assert in_forward > 0
    assert len(kinds) == in_forward
    for group in groups_below(model):
        assert group.comms.post_forward is not None
        ranks = dist.get_process_group_ranks(group.comms.post_forward.group)
        assert ranks == ([0, 1] if dist.get_rank() < 2 else [2, 3])


def casts_between_machines_only() -> None:
    model = in_two_hops(
        nn.Linear(6, 8, bias=False),
        mp_policy=MixedPrecisionPolicy(replica_codec=codecs.Cast(torch.bfloat16)),
    )
    torch.manual_seed(1)
    rows = torch.randn(4, 6)
    model(rows[dist.get_rank()][None]).sum().backward()
    machines = [((rows[a] + rows[b]) / 2).to(torch.bfloat16).float() for a, b in ((0, 1), (2, 3))]
    expected = ((machines[0] + machines[1]) / 2).expand(8, 6)
    assert torch.equal(model.weight.grad.full_tensor(), expected)


def flat_optimizer_steps_alike() -> None:
    models = [in_two_hops(plain_model()) for _ in range(2)]
    usual, flat = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in models)
    fsdp2.flatten_optimizer(flat)
    for seed in range(2):
        for model, optimizer in zip(models, (usual, flat), strict=True):
            mean_loss(model(rows_of(model, seed))).backward()
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(own.full_tensor(), other.full_tensor())


def what_is_not_supported_is_refused_by_name() -> None:
    usual = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "gpu"))
    with pytest.raises(ValueError, match=r"counts ranks machine by machine.*Call fsdp2.two_hop_mesh\(\)"):
        fully_shard(plain_model(), mesh=usual, dp_mesh_dims=ACROSS)
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicas", "gpu", "machine"))
    dims = DataParallelMeshDims(shard="gpu", replicate="replicas", shard_across="machine")
    with pytest.raises(NotImplementedError, match=r"further axes, \['replicas'\], is not supported"):
        fully_shard(plain_model(), mesh=three, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="expected one axis in shard and one in shard_across"):
        fully_shard(plain_model(), mesh=mesh(), dp_mesh_dims=DataParallelMeshDims(shard_across="machine"))
    for policy in (
        MixedPrecisionPolicy(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16),
        MixedPrecisionPolicy(gradient_codec=codecs.Int8()),
        MixedPrecisionPolicy(replica_codec=codecs.Int8()),
    ):
        with pytest.raises(NotImplementedError, match="is not supported with shard_across"):
            in_two_hops(plain_model(), mp_policy=policy)
    with pytest.raises(ValueError, match="expected a divisor of 2, the ranks of a machine"):
        in_two_hops(plain_model(), reshard_after_forward=3)
    with pytest.raises(ValueError, match="expected a divisor of the 4 ranks, got 3"):
        fsdp2.two_hop_mesh("cpu", ranks_per_machine=3)
    with pytest.raises(TypeError, match="ranks_per_machine: expected an int or None"):
        fsdp2.two_hop_mesh("cpu", ranks_per_machine=True)
    model = in_two_hops(plain_model())
    collective: Any = mock.Mock()
    for choose in (
        lambda: model.set_custom_all_gather(collective),
        lambda: model.set_custom_reduce_scatter(collective),
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
    ):
        with pytest.raises(NotImplementedError, match="two hops"):
            choose()
    assert "gpu: SHARD, machine: SHARD_ACROSS" in str(describe(model))


def the_launcher_says_where_ranks_are() -> None:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(dist.get_rank() % 2)}):
        assert fsdp2.two_hop_mesh("cpu").mesh.tolist() == [[0, 2], [1, 3]]
    one = fsdp2.two_hop_mesh("cpu", ranks_per_machine=4)
    model = fully_shard(plain_model(), mesh=one, dp_mesh_dims=ACROSS)
    assert not any(isinstance(each.comms.gathers, HopsComm) for each in groups_below(model))
    mean_loss(model(rows_of(model, 0))).backward()


def waits_in_another_order() -> None:
    """Second hops begin in the order of the first ones on each rank, whichever it waits for first."""
    model = in_two_hops(nn.Linear(6, 8))
    comm = next(iter(groups_below(model))).comms.gathers
    rank = dist.get_rank()
    outputs = [torch.zeros(8) for _ in range(3)]
    works = [comm.all_gather([out], [torch.full((2,), 10.0 * i + comm.rank)]) for i, out in enumerate(outputs)]
    for i in range(3) if rank % 2 else reversed(range(3)):
        works[i].wait()
    for i, output in enumerate(outputs):
        assert output.tolist() == [10.0 * i + r for r in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_everything_on_four_ranks() -> None:
    ways = {"by default": None, "resharded": True, "kept": False, "inside the machine": 2, "all ranks": 4}
    checks = [
        (f"as plain, {name}", functools.partial(train_as_plain, reshard_after_forward=way))
        for name, way in ways.items()
    ]
    checks += [
        (each.__name__, each)
        for each in (
            *(gathered_bits_are_those_of_the_weights, backward_gathers_inside_the_machine, casts_between_machines_only),
            *(flat_optimizer_steps_alike, what_is_not_supported_is_refused_by_name, the_launcher_says_where_ranks_are),
            waits_in_another_order,
        )
    ]
    run_checks(4, checks, timeout=200)


def test_checkpoints_go_to_and_from_a_usual_mesh(tmp_path: Path) -> None:
    def body(rank: int, _: int) -> None:
        plain = plain_model()
        for name, first, second in (("to", in_two_hops, fully_shard), ("from", fully_shard, in_two_hops)):
            model = first(copy.deepcopy(plain))
            state = get_model_state_dict(model)
            dcp.save(state, checkpoint_id=str(tmp_path / name))
            other = plain_model()
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            loaded = second(other)
            state = get_model_state_dict(loaded)
            dcp.load(state, checkpoint_id=str(tmp_path / name))
            set_model_state_dict(loaded, state)
            for (key, param), whole in zip(loaded.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(param.full_tensor(), whole), (name, key)

    run_ranks(4, body)
