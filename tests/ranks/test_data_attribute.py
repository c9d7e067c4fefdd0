"""`.data` of DTensors that fully_shard has no part in; of sharded parameters: test_settings, test_replaced_parameters,
test_changes_in_a_pass.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp2 import fully_shard
from fsdp2.corrections.data_attribute import follow_data
from helpers import assert_same, run_ranks


def test_data_of_any_dtensor() -> None:
    def body(rank: int, _: int) -> None:
        follow_data()
        mesh = init_device_mesh("cpu", (2,))
        first, second = torch.arange(5.0), torch.arange(5.0) * 2
        param = nn.Parameter(distribute_tensor(first, mesh, [Shard(0)]))
        kept = param.data
        kept.add_(1)
        assert_same(param.full_tensor(), first + 1, 0, 0, "written")
        assert not kept.requires_grad

        param.data = distribute_tensor(second, mesh, [Shard(0)])
        assert_same(param.full_tensor(), second, 0, 0, "assigned")
        assert_same(kept.full_tensor(), first + 1, 0, 0, "kept")
        (param * param).sum().backward()
        assert_same(param.grad.full_tensor(), 2 * second, 0, 0, "gradient")
        param.grad.data = param.grad.data * 0.5
        assert_same(param.grad.full_tensor(), second, 0, 0, "gradient assigned")

        param.data = distribute_tensor(second.double(), mesh, [Replicate()])
        assert (param.placements, param.dtype) == ((Replicate(),), torch.float64)
        assert_same(param.full_tensor(), second.double(), 0, 0, "of another dtype, distributed otherwise")
        with pytest.raises(TypeError, match=r"global shape \(5,\): expected a DTensor, got Tensor"):
            param.data = second
        assert_same(param.full_tensor(), second.double(), 0, 0, "unchanged")

    run_ranks(2, body)


def test_the_local_tensor_in_a_graph() -> None:
    """What counts for sharded parameters breaks none."""

    def body(_: int, __: int) -> None:
        fully_shard(nn.Linear(3, 3))(torch.ones(2, 3))  # from then on torch.compile traces little of ours
        param = nn.Parameter(distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)]))
        compiled = torch.compile(lambda tensor: (2 * tensor).to_local() + 1, fullgraph=True, backend="aot_eager")
        output = compiled(param)
        assert_same(output, 2 * param.to_local() + 1, 0, 0, "compiled")
        output.sum().backward()
        assert_same(param.grad.to_local(), torch.full_like(param.to_local(), 2.0), 0, 0, "gradient")

    run_ranks(2, body)
