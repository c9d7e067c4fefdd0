"""Tests behaviours that the tests of torch 2.15's FSDP2 check, and that no other file here does: see BEHAVIOURS.md."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from helpers import run_checks


class Experts(nn.Module):
    """Two weights that expert parallelism has cut, of which forward uses one."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = (nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        local: Any = self.used
        return local.to_local().sum() * x.sum()  # type: ignore[no-any-return]


def unused_parameters_of_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    model: Any = fully_shard(Experts(mesh["ep"]), mesh=mesh["dp"])
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1)).backward()
    for parameter, value in ((model.used, 1.0), (model.unused, 0.0)):
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.grad.to_local(), torch.full_like(parameter.to_local(), value))


def sums_of_reduced_and_unreduced_gradients() -> None:
    """What was reduced stays apart from what was not, and all of it is summed in fp32: 256 + 1 in bf16 is 256."""
    cases = ([(True, 256), (False, 1), (True, -256)], 1.0), ([(True, 3), (False, 256), (False, 1), (True, -256)], 4.0)
    for offload in (fsdp2.OffloadPolicy(), CPUOffloadPolicy()):
        policy = MixedPrecisionPolicy(torch.bfloat16)
        model: Any = fully_shard(nn.Linear(1, 3, bias=False), mp_policy=policy, offload_policy=offload)
        for contributions, expected in cases:
            model.zero_grad()
            for synchronises, value in contributions:
                model.set_requires_gradient_sync(synchronises)
                model(torch.full((1, 1), float(value))).sum().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 1), expected))


def unsynchronized_gradients_while_parameters_are_converted() -> None:
    """Nothing is changed: the gradients would have the dtype and device of before."""
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for part in (*model, model):
        fully_shard(part)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    for convert in (lambda: model.to(torch.float64), lambda: model.cpu(), lambda: model[1].half()):
        with pytest.raises(RuntimeError, match=r"weight, in Module\.to.*: this gradient is not synchronised"):
            convert()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 3)).sum().backward()
    plain = nn.Linear(3, 3)
    plain.load_state_dict({name: value.full_tensor() for name, value in model[1].state_dict().items()})
    x = model[0](torch.ones(2, 3)).detach()
    (2 * plain(x).sum()).backward()
    torch.testing.assert_close(model[1].weight.grad.full_tensor(), plain.weight.grad)
    model.zero_grad()
    model.to(torch.float64)
    assert model(torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64


def names_of_groups_and_parameters() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    for part in (model[0][0], model[0][1], model):
        fully_shard(part)
    found = [
        [param._param_fqn for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params]
        for module in (model[0][0], model[0][1], model)
    ]
    assert found == [["0.0.weight", "0.0.bias"], ["0.1.weight", "0.1.bias"], ["1.0.weight", "1.0.bias"]]


def weights_of_one_rank_are_read_where_they_rest() -> None:
    """A rank that holds a frozen model whole gathers nothing: loading writes to what modules compute with."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for reshards in (True, False):
        model: Any = nn.Linear(8, 4).requires_grad_(False)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        rests = model.weight.to_local().data_ptr()
        seen: list[int] = []
        model.register_forward_hook(lambda module, *_, seen=seen: seen.append(module.weight.data_ptr()))
        for version in range(1, 4):
            state = {name: torch.full_like(value, version) for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 4), 9.0 * version))
            model.reshard()
        assert seen == [rests] * 3


CHECKS = (
    *(unused_parameters_of_experts, sums_of_reduced_and_unreduced_gradients, names_of_groups_and_parameters),
    *(weights_of_one_rank_are_read_where_they_rest, unsynchronized_gradients_while_parameters_are_converted),
)


def test_torch_behaviours() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])
    assert not dist.is_initialized()
