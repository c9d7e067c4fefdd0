"""Tests what `torch.save` on one rank has written: others refuse it, and the program was warned."""

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from helpers import assert_same, run_checks, run_ranks


def build(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def saved(value: Any) -> tuple[bytes, list[str]]:
    """Returns what torch.save writes, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = io.BytesIO()
        torch.save(value, file)
    return file.getvalue(), [str(each.message) for each in caught]


def from_first(data: bytes) -> io.BytesIO:
    given = [data]
    dist.broadcast_object_list(given)
    return io.BytesIO(given[0])


def of_the_first_rank() -> None:
    """The documents' own line, `if rank == 0: torch.save(model.state_dict())`, and the rank that loads it."""
    for make in (lambda model: model.state_dict(), lambda model: model):
        data, messages = saved(make(build()))
        is_first = dist.get_rank() == 0
        assert any("the shards of this rank alone" in each for each in messages) is is_first
        if is_first:
            assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True" in messages[0]

        file = from_first(data)

        def load(make: Any = make, file: Any = file) -> Any:
            loaded = torch.load(file, weights_only=False)
            if isinstance(loaded, dict):
                model = build(seed=1)
                model.load_state_dict(loaded)
                return model
            return loaded

        if is_first:
            load()
        else:
            with pytest.raises(RuntimeError, match=r"expected the shard of this rank, which is at \(1,\)"):
                load()


def of_each_rank() -> None:
    """Each rank reads its own file; also a safe file (weights_only)."""
    model, other = build(), build(seed=1)
    data, _ = saved(model.state_dict())
    other.load_state_dict(torch.load(io.BytesIO(data)))
    twin = torch.load(io.BytesIO(saved(model)[0]), weights_only=False)
    for name, param in model.named_parameters():
        assert torch.equal(other.get_parameter(name).to_local(), param.to_local()), name
        assert torch.equal(twin.get_parameter(name).to_local(), param.to_local()), name
    copy.deepcopy(model).load_state_dict(model.state_dict())  # what was not in a file has no mark


def of_an_optimizer() -> None:
    model, other = build(), build()
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, other)]
    model(torch.ones(2, 4)).sum().backward()
    optimizers[0].step()
    data, messages = saved(optimizers[0].state_dict())
    assert bool(messages) is (dist.get_rank() == 0)
    optimizers[1].load_state_dict(torch.load(io.BytesIO(data)))  # its own
    optimizers[1].step()
    other(torch.ones(2, 4)).sum().backward()
    optimizers[1].load_state_dict(torch.load(from_first(data)))
    if dist.get_rank() == 0:
        optimizers[1].step()
    else:
        with pytest.raises(RuntimeError, match=r"AdamW: exp_avg: expected the shard of this rank, which is at \(1,\)"):
            optimizers[1].step()


def of_all_ranks() -> None:
    """What the warning advises."""
    model = build()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    data, messages = saved(state)
    assert not messages
    other = build(seed=1)
    whole = torch.load(from_first(data))
    with pytest.raises(RuntimeError, match="distribute"):
        other.load_state_dict(whole)
    torch.distributed.checkpoint.state_dict.set_model_state_dict(
        other, whole, options=StateDictOptions(full_state_dict=True)
    )
    for name, param in model.named_parameters():
        assert_same(other.get_parameter(name), param.full_tensor(), 0, 0, name)


def test_saved_behind_the_process_group() -> None:
    def body(rank: int, _: int) -> None:
        model = build()
        dist.destroy_process_group()
        saved(model.state_dict())

    run_ranks(2, body)


def test_saved_shards() -> None:
    run_checks(2, [(each.__name__, each) for each in (of_the_first_rank, of_each_rank, of_an_optimizer, of_all_ranks)])


def replicas_may_read_it() -> None:
    """With HSDP, a rank of another replica has the same shard."""
    mesh = init_device_mesh("cpu", (2, 2))
    model, other = build(mesh=mesh), build(seed=1, mesh=mesh)
    file = from_first(saved(model.state_dict())[0])
    loaded = torch.load(file)
    if dist.get_rank() % 2 == 0:
        other.load_state_dict(loaded)
        for name, param in model.named_parameters():
            assert torch.equal(other.get_parameter(name).to_local(), param.to_local()), name
    else:
        with pytest.raises(RuntimeError, match=r"got that of the rank at \(0,\)"):
            other.load_state_dict(loaded)


def test_on_replicas(tmp_path: Path) -> None:
    run_checks(4, [("replicas", replicas_may_read_it)])
