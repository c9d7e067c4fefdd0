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
from fsdp2.dtensor.copied_views import CopiedView
from fsdp2.dtensor.fixes import correct_torch
from fsdp2.dtensor.sharded_dtensor import ShardedDTensor
from helpers import assert_same, run_ranks, sharded, world_sizes

PLAIN = torch.arange(24, dtype=torch.float64).reshape(6, 4) - 9
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def of_plain(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def item_set(own: Any, index: Any, value: Any) -> None:
    own[index] = value


def twice(own: Any) -> None:
    """A view is read after another, and the full tensor, were written to."""
    row, rows = own[1], own[1:3]
    rows.mul_(2)
    row.add_(1)
    own.neg_()
    rows[0].add_(row)
    own[0] = row * rows[0]


def of_lists(own: Any) -> None:
    torch._foreach_mul_(list(own.chunk(3)), 2.0)
    torch._foreach_add_([own[0], own[5]], [own[1], own[2]])


WRITES: dict[str, Callable[[Any], object]] = {
    "a row": lambda own: own[1].zero_(),
    "the last row": lambda own: own[-1].fill_(3),
    "rows": lambda own: own[1:5].mul_(2),
    "every second row": lambda own: own[::2].add_(1),
    "a column": lambda own: own[:, 1].zero_(),
    "columns": lambda own: own[:, 1:3].zero_(),
    "an element": lambda own: own[1, 2].fill_(3),
    "a block": lambda own: own[1:5, 1:3].fill_(3),
    "of .data": lambda own: own.data[1].zero_(),
    "of detach()": lambda own: own.detach()[1:3].zero_(),
    "of t()": lambda own: own.t()[1].mul_(2),
    "a view of a row": lambda own: own[1].unsqueeze(0)[0].zero_(),
    "narrow": lambda own: own.narrow(0, 1, 2).zero_(),
    "split": lambda own: own.split(4)[1].zero_(),
    "split_with_sizes": lambda own: own.split([1, 5])[1].zero_(),
    "chunks": lambda own: [chunk.mul_(i) for i, chunk in enumerate(own.chunk(3))],
    "diagonal": lambda own: own.diagonal().fill_(1),
    "copy_": lambda own: own[1:3].copy_(own[3:5]),
    "normal_": lambda own: own[2:].normal_(),
    "out": lambda own: torch.mul(own[0], 2, out=own[1]),
    "init": lambda own: nn.init.constant_(own[1], 0.5),
    "item": lambda own: item_set(own, 1, 5),
    "item of a column": lambda own: item_set(own, (slice(None), 1), 5.0),
    "item of an element": lambda own: item_set(own, (1, 2), 5),
    "item of rows": lambda own: item_set(own, slice(1, 3), 0),
    "item of all": lambda own: item_set(own, ..., 7),
    "item that is another": lambda own: item_set(own, 1, own[2]),
    "in place by an operator": lambda own: own[1:3].__imul__(3),
    "lists": of_lists,
    "one after the other": twice,
}
# Of copies only: torch refuses to mix tensors where it has views.
WRITES_OF_PLAIN_TENSORS: dict[str, Callable[[Any], object]] = {
    "copy_": lambda own: own[1].copy_(torch.arange(4.0)),
    "item": lambda own: item_set(own, slice(1, 3), torch.ones(4)),
    "add_": lambda own: own[1:3].add_(torch.ones(2, 4)),
    "flat": lambda own: item_set(own.view(-1), slice(3, 9), 2),
    "flat, in place": lambda own: own.flatten().mul_(2),
    "of another shape": lambda own: own.view(3, 2, 4)[1].neg_(),
    "a view of rows": lambda own: own[1:4].view(-1)[2:9].zero_(),
}


@pytest.mark.parametrize("world_size", world_sizes(1, 4, nightly=[2]))
def test_writes_to_a_view_write_to_the_dtensor(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (world_size,))
        cases = [(*item, placement) for item in WRITES.items() for placement in PLACEMENTS]
        for name, write, placement in cases + [(*item, Shard(0)) for item in WRITES_OF_PLAIN_TENSORS.items()]:
            torch.manual_seed(1)
            write(plain := PLAIN.clone())
            torch.manual_seed(1)
            own = nn.Parameter(sharded(PLAIN.clone(), mesh, [placement]))
            local, version = own.to_local().data_ptr(), own._version
            with torch.no_grad():
                write(own)
            assert_same(own.full_tensor(), plain, 0, 0, f"{name}, {placement}")
            assert own.to_local().data_ptr() == local
            counts = name != "of .data" and (name != "lists" or placement == Shard(0))
            assert own._version > version or not counts, name

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


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[2]))
def test_writes_to_a_view_of_few_rows_write_to_the_dtensor(world_size: int) -> None:
    """Torch gathers to transpose a tensor that some rank has nothing of (2.15), or to view one across rows."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (world_size,))
        for view in (torch.t, lambda t: t.view(t.shape[1], t.shape[0]), lambda t: t.view(-1)):
            for dim, shape in enumerate([(2, 3), (3, 2)]):
                plain = torch.arange(6.0).reshape(shape)
                own = sharded(plain.clone(), mesh, [Shard(dim)], src_data_rank=None)
                for tensor in (own, plain):
                    view(tensor).mul_(2).add_(1)
                assert_same(own.full_tensor(), plain, 0, 0, f"dim {dim}")

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


def test_views_are_read_like_any_dtensor() -> None:
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
            own.mul_(3)
            assert_same(view.full_tensor(), PLAIN[1:3] * 3, 0, 0, f"{name}: full_tensor after a write to the whole")
            assert_same(of_plain(read(view)), read(PLAIN[1:3] * 3), 0, 0, f"{name}: after a write to the whole")

    run_ranks(2, body)


def test_writes_to_a_local_copy_write_to_the_dtensor() -> None:
    """Checkpoints are loaded so. A second view shows it, too; one that can't know raises."""

    def body(rank: int, _: int) -> None:
        correct_torch()
        mesh = init_device_mesh("cpu", (2,))
        own, plain = sharded(PLAIN.clone(), mesh, [Shard(0)]), PLAIN.clone()
        rows, row = own[1:5], own[2]
        rows.to_local()[1:].mul_(2)
        rows.to_local()[0] = 7
        plain[2:5] *= 2
        plain[1] = 7
        assert_same(own.full_tensor(), plain, 0, 0, "the whole")
        assert_same(row.to_local() + 0, plain[2], 0, 0, "a second view")
        assert_same(row.full_tensor(), plain[2], 0, 0, "a second view, full")
        assert type(row.to_local() + 0) is type(pickle.loads(pickle.dumps(row.to_local()))) is Tensor
        copied = row.to_local()
        own.add_(1)
        for read in (row.to_local, lambda: copied + 1, copied.zero_):
            with pytest.raises(RuntimeError, match=r"written to since\. Take the view again, or call full_tensor\(\)"):
                read()
        assert_same(own.full_tensor(), plain + 1, 0, 0, "unchanged")

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
                each[:, 0].mul_(2)
            assert_same(own.full_tensor(), plain, 0, 0, str(placements))

        linear = nn.Linear(4, 6, bias=False)
        linear.weight = nn.Parameter(distribute_tensor(PLAIN.clone(), mesh["tp"], [Shard(0)]))
        fully_shard(linear, mesh=mesh["dp"])
        says = r"shape \(6, 4\).*full_params\(module, writeback"
        with torch.no_grad():
            for take in (lambda w: w[1], lambda w: w[1:3], lambda w: w.split(4)[1]):
                view = take(linear.weight)
                assert_same(view.full_tensor(), take(PLAIN), 0, 0, "read")
                with pytest.raises(NotImplementedError, match=says):
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
                each[1].weight.grad[1].mul_(0.5)
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
