"""Tests `.data` of DTensors that fully_shard does not manage, and writes to the local tensor of a saved parameter.

test_settings, test_replaced_parameters and test_changes_in_a_pass have `.data` of sharded parameters.
"""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp2 import fully_shard
from fsdp2.dtensor.fixes import correct_torch
from helpers import assert_same, run_checks, run_ranks, sharded


def test_data_of_any_dtensor() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        first, second = torch.arange(5.0), torch.arange(5.0) * 2
        param = nn.Parameter(sharded(first, mesh, [Shard(0)]))
        kept = param.data
        kept.add_(1)
        assert_same(param.full_tensor(), first + 1, 0, 0, "written")
        assert not kept.requires_grad

        param.data = sharded(second, mesh, [Shard(0)])
        assert_same(param.full_tensor(), second, 0, 0, "assigned")
        assert_same(kept.full_tensor(), first + 1, 0, 0, "kept")
        (param * param).sum().backward()
        assert_same(param.grad.full_tensor(), 2 * second, 0, 0, "gradient")
        param.grad.data = param.grad.data * 0.5
        assert_same(param.grad.full_tensor(), second, 0, 0, "gradient assigned")

        param.data = sharded(second.double(), mesh, [Replicate()])
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
        param = nn.Parameter(sharded(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)]))
        compiled = torch.compile(lambda tensor: (2 * tensor).to_local() + 1, fullgraph=True, backend="aot_eager")
        output = compiled(param)
        assert_same(output, 2 * param.to_local() + 1, 0, 0, "compiled")
        output.sum().backward()
        assert_same(param.grad.to_local(), torch.full_like(param.to_local(), 2.0), 0, 0, "gradient")

    run_ranks(2, body)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "the parameter": lambda param: param.mul_(2),
    "its local tensor": lambda param: param.to_local().mul_(2),
    "that of its data": lambda param: param.data.to_local().mul_(2),
    "that of a view": lambda param: param[:, :1].to_local().mul_(2),
}
SAVES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "the parameter": lambda param: (param * param).sum(),
    "its local tensor": lambda param: (param.to_local() * param.to_local()).sum(),
}


@pytest.mark.parametrize("replaced", [False, True])
def test_saved_tensors_are_refused_after_a_write_in_any_way(replaced: bool) -> None:
    def check(write: Callable[[nn.Parameter], object], save: Callable[[nn.Parameter], Tensor]) -> None:
        model = fully_shard(nn.Linear(2, 3, bias=False))
        if replaced:
            model.load_state_dict({"weight": sharded(torch.ones(3, 2), init_device_mesh("cpu", (2,)))})
            model.weight.data = model.weight.data.clone()
            model(torch.ones(2))
        loss = save(model.weight)
        with torch.no_grad():
            write(model.weight)
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            loss.backward()

    cases = itertools.product(WRITES.items(), SAVES.items())
    run_checks(2, [(f"{w} written, {s} saved", partial(check, write, save)) for (w, write), (s, save) in cases])
