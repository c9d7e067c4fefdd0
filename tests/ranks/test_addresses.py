"""Tests the error for libraries that read a sharded tensor's memory: it names the parameter and what to call."""

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp2 import fully_shard
from helpers import full, run_checks
from scenarios import WIDTH, Net

SAYS = r".* was asked of a DTensor.*full_tensor\(\).*get_model_state_dict\(model.*full_state_dict=True"
READERS = ("safetensors.torch", "bitsandbytes.functional", "triton", "transformers.modeling_utils")


def _address_for(module: str, tensor: Any) -> int:
    """Asks for the address in code of another module."""
    names = {"__name__": module, "tensor": tensor}
    exec("address = tensor.data_ptr()", names)
    return names["address"]


# How libraries come to the memory of a tensor: safetensors by the first, and, if that raises, the second.
WAYS: dict[str, Callable[[Any], Any]] = {
    "storage": lambda tensor: tensor.untyped_storage().data_ptr(),
    "typed storage": lambda tensor: tensor.storage().data_ptr(),
    # Kernels of triton and bitsandbytes, and what transformers saves.
    **{f"tensor, of {reader}": partial(_address_for, reader) for reader in READERS},
    "list": lambda tensor: tensor.tolist(),
    "array": lambda tensor: tensor.numpy(),
    "exchange": torch.from_dlpack,
}


def trained() -> Any:
    torch.manual_seed(0)
    model = fully_shard(Net())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    return model


def each_way_names_the_parameter() -> None:
    """The kind: an address of what has no memory, asked of any tensor that a sharded model hands out; by one rank."""
    model = trained()
    p = model.head.weight
    tensors = {
        "the parameter": p,
        "its data": p.data,
        "detached": p.detach(),
        "a state dict's": model.state_dict()["head.weight"],
        "a part": p.detach()[:, 1:],
    }
    if dist.get_rank() == 0:
        for where, tensor in tensors.items():
            for name, way in WAYS.items():
                if tensor.requires_grad and name == "exchange":
                    continue  # torch refuses it before
                with pytest.raises(RuntimeError, match=rf"^head\.weight: {SAYS}"):
                    way(tensor)
                assert tensor.untyped_storage().nbytes() >= 0, where
        with pytest.raises(RuntimeError, match=rf"^the gradient of head\.weight: {SAYS}"):
            p.grad.untyped_storage().data_ptr()
        with pytest.raises(RuntimeError, match=rf"^a DTensor of global shape \(5, 5\): {SAYS}"):
            (p.grad * 1).tolist()
        with pytest.raises(RuntimeError, match=rf"^head\.weight: {SAYS}"):
            p.detach().untyped_storage().data_ptr()  # of a tensor that is gone


def asking_changes_nothing() -> None:
    """Copies, files, checkpoints and whole states are as before; whole tensors have addresses."""
    model = trained()
    before = {name: full(p) for name, p in model.named_parameters()}
    for p in model.parameters():
        for each in (p, p.grad):
            with pytest.raises(RuntimeError):
                each.untyped_storage().data_ptr()
        copied = copy.deepcopy(p)
        file = io.BytesIO()
        torch.save(p, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(full(copied), full(p))
        assert torch.equal(full(loaded), full(p))
        assert full(p).untyped_storage().data_ptr()
        assert p.to_local().untyped_storage().data_ptr()
    again = copy.deepcopy(model)
    states = get_model_state_dict(again, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(states[name], value) for name, value in before.items())
    assert all(value.untyped_storage().data_ptr() for value in states.values())


def parameters_are_found_by_address() -> None:
    """The kind: a library maps parameters by their addresses, asked of the parameter or of its local tensor."""
    model = trained()
    names = {p.data_ptr(): name for name, p in model.named_parameters() if p.to_local().numel()}
    assert len(names) == sum(p.to_local().numel() > 0 for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_optimizer = [*optimizer.param_groups[0]["params"]]
    for (name, p), other in zip(model.named_parameters(), of_optimizer, strict=True):
        for same in (p, other, p.detach(), p.data, model.state_dict()[name]):
            assert same.data_ptr() == p.to_local().data_ptr(), name
            assert _address_for("transformers.trainer", same) == p.to_local().data_ptr(), name
        assert p.grad.data_ptr() == p.grad.to_local().data_ptr()
    before = [*names]
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    assert [p.data_ptr() for p in model.parameters() if p.to_local().numel()] == before


def checkpoints(folder: Path) -> None:
    model = trained()
    state = model.state_dict()
    for value in state.values():
        with pytest.raises(RuntimeError):
            value.untyped_storage().data_ptr()
    save(state, checkpoint_id=folder)
    before = full(model.head.weight)
    with torch.no_grad():
        model.head.weight.zero_()
    load(state, checkpoint_id=folder)
    assert torch.equal(full(model.head.weight), before)


def rows_are_not_walked_over() -> None:
    """`for row in p`, of which each rank has some; and what Python asks of a tensor besides."""
    p = trained().head.weight
    with pytest.raises(RuntimeError, match=r"^head\.weight: DTensor can't do unbind on it.*call full_tensor\(\)"):
        iter(p)
    assert len(p) == 5
    with pytest.raises(ValueError, match="only one element"):
        float(p)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")
def test_addresses(tmp_path: Path) -> None:
    checks = (
        each_way_names_the_parameter,
        asking_changes_nothing,
        parameters_are_found_by_address,
        rows_are_not_walked_over,
    )
    run_checks(3, [*((each.__name__, each) for each in checks), ("checkpoints", lambda: checkpoints(tmp_path))])
