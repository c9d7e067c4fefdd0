"""Tests reads of and writes to views of DTensors against plain tensors. (test_situations: sharded parameters.)"""

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import fully_shard
from fsdp2.dtensor.fixes import correct_torch
from fsdp2.dtensor.sharded_dtensor import ShardedDTensor
from fsdp2.dtensor.views import CopiedView
from helpers import assert_same, run_ranks, sharded, world_sizes

PLAIN = torch.arange(24, dtype=torch.float64).reshape(6, 4) - 9
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def of_plain(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def item_set(own: Any, index: Any, value: Any) -> None:
    own[index] = value


# Views that are filled with a number.
FILLS: dict[str, Callable[[Any], object]] = {
    "a row": lambda own: own[1].zero_(),
    "the last row": lambda own: own[-1].fill_(3),
    "rows": lambda own: own[1:5].fill_(2),
    "every second row": lambda own: own[::2].zero_(),
    "a column": lambda own: own[:, 1].zero_(),
    "columns": lambda own: own[:, 1:3].zero_(),
    "an element": lambda own: own[1, 2].fill_(3),
    "a block": lambda own: own[1:5, 1:3].fill_(3),
    "of .data": lambda own: own.data[1].zero_(),
    "of detach()": lambda own: own.detach()[1:3].zero_(),
    "of t()": lambda own: own.t()[1].fill_(2),
    "a view of a row": lambda own: own[1].unsqueeze(0)[0].zero_(),
    "narrow": lambda own: own.narrow(0, 1, 2).zero_(),
    "split": lambda own: own.split(4)[1].zero_(),
    "split_with_sizes": lambda own: own.split([1, 5])[1].zero_(),
    "chunks": lambda own: [chunk.fill_(i) for i, chunk in enumerate(own.chunk(3))],
    "diagonal": lambda own: own.diagonal().fill_(1),
    "init": lambda own: nn.init.constant_(own[1], 0.5),
    "item": lambda own: item_set(own, 1, 5),
    "item of a column": lambda own: item_set(own, (slice(None), 1), 5.0),
    "item of an element": lambda own: item_set(own, (1, 2), 5),
    "item of rows": lambda own: item_set(own, slice(1, 3), 0),
    "item of all": lambda own: item_set(own, ..., 7),
    "a number in a tensor": lambda own: item_set(own, slice(1, 3), torch.tensor(0.5)),
}
# Of copies: what is lost, and refused.
WRITES: dict[str, Callable[[Any], object]] = {
    "in place": lambda own: own[1:5].mul_(2),
    "some rows": lambda own: own[:2].add_(1),
    "of t()": lambda own: own.t()[:, 1].mul_(2),
    "split": lambda own: own.split(4)[1].neg_(),
    "copy_": lambda own: own[1:3].copy_(own[3:5]),
    "copy_ of a plain tensor": lambda own: own[1].copy_(torch.arange(4.0)),
    "normal_": lambda own: own[2:].normal_(),
    "out": lambda own: torch.mul(own[0], 2, out=own[1]),
    "item that is another": lambda own: item_set(own, 1, own[2]),
    "item of a sum": lambda own: item_set(own, 1, own.sum()),
    "in place by an operator": lambda own: own[1:3].__imul__(3),
    "lists": lambda own: torch._foreach_mul_(list(own.chunk(3)), 2.0),
}


@pytest.mark.parametrize("world_size", world_sizes(1, 4, nightly=[2]))
def test_a_view_that_is_filled_fills_the_dtensor(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (world_size,))
        for (name, fill), placement in itertools.product(FILLS.items(), PLACEMENTS):
            fill(plain := PLAIN.clone())
            own = nn.Parameter(sharded(PLAIN.clone(), mesh, [placement]))
            local, version = own.to_local().data_ptr(), own._version
            with torch.no_grad():
                fill(own)
            assert_same(own.full_tensor(), plain, 0, 0, f"{name}, {placement}")
            assert own.to_local().data_ptr() == local
            assert own._version > version or name == "of .data", name

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[1, 4]))
def test_other_writes_to_a_copy_are_refused_and_to_a_view_of_memory_are_exact(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (world_size,))
        for (name, write), placement in itertools.product(WRITES.items(), PLACEMENTS):
            own, plain = nn.Parameter(sharded(PLAIN.clone(), mesh, [placement])), PLAIN.clone()
            with torch.no_grad():
                if placement == Shard(0):
                    says = r"of a view of it, .* would be lost.*(whole = x\.|call )full_tensor\(\)"
                    with pytest.raises(NotImplementedError, match=says):
                        write(own)
                elif "plain" not in name:
                    for each in (own, plain):
                        torch.manual_seed(1)
                        write(each)
            assert_same(own.full_tensor(), plain, 0, 0, f"{name}, {placement}")

    run_ranks(world_size, body)


# Views of results with Partial placements: norms of columns, sums of them.
VIEWS_OF_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda numbers: numbers.detach(),
    "the first": lambda numbers: numbers[..., 0],
    "the others": lambda numbers: numbers[..., 1:],
    "split": lambda numbers: numbers.split(2, -1)[1],
    "unbound": lambda numbers: numbers.unbind(-1)[2],
    "t": lambda numbers: numbers.t(),
    "a column": lambda numbers: numbers.unsqueeze(-1)[1:],
    "diagonal": lambda numbers: numbers.expand(1, -1).diagonal(),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "norms": lambda t: t.norm(dim=0),
    "sums": lambda t: t.sum(0),
    "largest": lambda t: t.amax(0),
}


@pytest.mark.parametrize("world_size", world_sizes(1, 4, nightly=[2]))
def test_writes_to_a_view_of_a_partial_result_write_to_the_result(world_size: int) -> None:
    """Torch writes so up to 2.13; then it has copies of Partial norms."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        correct_torch()
        meshes = [(init_device_mesh("cpu", (world_size,)), [Shard(0)])]
        if world_size == 4:
            meshes.append((init_device_mesh("cpu", (2, 2)), [Shard(0), Replicate()]))
        for mesh, placements in meshes:
            for (name, compute), (kind, view) in itertools.product(NUMBERS.items(), VIEWS_OF_NUMBERS.items()):
                own = compute(sharded(PLAIN, mesh, placements, src_data_rank=None))
                plain = compute(PLAIN)
                for numbers in (own, plain):
                    view(numbers).mul_(2)
                    view(numbers)[...] = view(numbers) + 7.0
                assert_same(own.full_tensor(), plain, 1e-12, 1e-12, f"{kind} of {name}, {placements}")

    run_ranks(world_size, body)


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda view: view.clone(),
    "arithmetic": lambda view: view * 2 + view,
    "reduced": lambda view: view.sum(),
    "a view": lambda view: view.flatten()[1:],
    "deepcopy": copy.deepcopy,
    "pickled": lambda view: pickle.loads(pickle.dumps(view)),
    "norms": lambda view: torch.stack(torch._foreach_norm([view, view])),
}


def test_flat_parameters_of_uneven_shards() -> None:
    """Read, written to, and with gradients, as optimizers and pruning do; of an activation torch's error stays."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (4,))
        tensors = [torch.arange(float(rows * 3)).reshape(rows, 3) for rows in (5, 8, 1)]
        own = [nn.Parameter(sharded(each, mesh, [Shard(0)])) for each in tensors]
        plain = [each.clone().requires_grad_() for each in tensors]
        for params in (own, plain):
            flat = nn.utils.parameters_to_vector(params)
            (flat.square().sum() + params[0].view(-1)[1:4].sum()).backward()
        for mine, other in zip(own, plain, strict=True):
            assert mine.grad is not None
            assert_same(of_plain(mine.grad), other.grad, 0, 0, "gradient")
        with torch.no_grad():
            for params in (own, plain):
                params[0].view(-1)[4:8] = 0
                params[0].add_(params[0].grad.view(-1).view_as(params[0]), alpha=-0.1)
        assert_same(of_plain(own[0]), plain[0], 0, 0, "written")
        with pytest.raises(RuntimeError, match="redistribut"):
            (own[0] * 2).view(-1)

    run_ranks(4, body)


def test_views_are_read_like_any_dtensor_until_it_is_written_to() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        for name, read in READS.items():
            own = sharded(PLAIN.clone(), mesh, [Shard(0)])
            view = own[1:3]
            assert isinstance(view, CopiedView)
            result = read(view)
            kind = {"a view": CopiedView, "pickled": DTensor}.get(name, ShardedDTensor)
            assert type(result) is kind, name
            assert_same(of_plain(result), read(PLAIN[1:3]), 0, 0, name)
            if name == "clone":
                view.fill_(4)  # the copy is as before
            else:
                own.mul_(3)
            for late in (read, CopiedView.full_tensor):
                with pytest.raises(RuntimeError, match=r"written to since this view of it was taken.*Take the view"):
                    late(view)
        with pytest.raises(NotImplementedError, match=r"to_local\(\) of a view of it.*Call clone\(\) on the view"):
            own[1:3].to_local()

    run_ranks(2, body)


def test_gradients_flow_through_views() -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        own, plain = nn.Parameter(sharded(PLAIN, mesh, [Shard(0)])), PLAIN.clone().requires_grad_()
        for each in (own, plain):
            of_plain((each[1:4] * each[2]).sum() + each[0].square().sum()).backward()
        assert_same(own.grad.full_tensor(), plain.grad, 0, 0, "gradient")
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            own[1].zero_()
        assert_same(own.full_tensor(), PLAIN, 0, 0, "unchanged")

    run_ranks(2, body)


def test_on_two_axes() -> None:
    """Cut along one dim by each, and with a placement that torch has no way to cut by."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(0))):
            plain = PLAIN.clone()
            own = sharded(PLAIN.clone(), mesh, placements)
            for each in (own, plain):
                each[1].zero_()
                each[2:4, 1:3] = 5
                each[:, 0].fill_(2)
            assert_same(own.full_tensor(), plain, 0, 0, str(placements))

        linear = nn.Linear(4, 6, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(PLAIN.clone(), mesh["tp"], [Shard(0)]))
        fully_shard(linear, mesh=mesh["dp"])
        takes: list[Callable[[Any], Any]] = [lambda w: w[1], lambda w: w[1:3], lambda w: w.split(4)[1]]
        with torch.no_grad():
            for take in takes:
                if torch.__version__ < "2.13":
                    with pytest.raises(ValueError, match=r"^weight: DTensor can't do.*call full_tensor\(\)"):
                        take(linear.weight)
                    continue
                view = take(linear.weight)
                assert_same(view.full_tensor(), take(PLAIN), 0, 0, "read")
                with pytest.raises(
                    NotImplementedError, match=r"^weight: zero_ of a view.*full_params\(module, writeback"
                ):
                    view.zero_()
        assert_same(linear.weight.full_tensor(), PLAIN, 0, 0, "unchanged")

    run_ranks(4, body)


def test_sharded_parameters_and_their_gradients() -> None:
    """Rows of a weight set, and rows of its gradient cleared, as those who train a few new tokens do."""

    def body(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5, padding_idx=2), nn.Linear(5, 3)).double()
        plain = copy.deepcopy(model)
        fully_shard(model)
        tokens = torch.arange(7)
        for each in (model, plain):
            optimizer = torch.optim.Adam(each.parameters(), lr=0.1)
            with torch.no_grad():
                torch.manual_seed(4)
                each[0].reset_parameters()
                each[1].bias[1:] = 0.25
            for _ in range(2):
                each(tokens).square().mean().backward()
                each[0].weight.grad[:4] = 0
                each[1].weight.grad[1].fill_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(own.full_tensor(), expected, 1e-12, 1e-12, name)

    for world_size in (1, 2, 3):
        run_ranks(world_size, body)
    assert not dist.is_initialized()


def test_activations_are_left_alone() -> None:
    """Autograd follows writes to them."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        own: Tensor = sharded(PLAIN.clone(), mesh, [Shard(0)]).requires_grad_()
        assert not isinstance((own * 2)[1], CopiedView)
        assert not isinstance(own[:, 1], CopiedView)

    run_ranks(2, body)
