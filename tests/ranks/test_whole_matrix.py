"""Whole-matrix optimizers on ranks: with equal gradients, fp32 parameters get the bits of torch.optim.Muon alone.

The oracle has each block of rows and each matrix of a stack as a parameter of its own.
"""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fake_gpu
import fsdp2
from fsdp2 import DataParallelMeshDims, fully_shard
from fsdp2.torch_private.internals import local_of
from helpers import assert_same, full, own_part, run_checks, run_ranks, world_sizes

SHAPES = {
    "tall": (13, 5),
    "wide": (7, 12),
    "few": (3, 7),  # a rank of four has none of it
    "row": (1, 6),
    "alike": (13, 5),
    "fused": (12, 8),
    "stack": (5, 4, 6),
}
BLOCKS = {"fused": (6, 3, 3)}
OPTIONS = {"lr": 0.1, "weight_decay": 0.2}


class Bag(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, names: Sequence[str] = tuple(SHAPES)) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(SHAPES[name], dtype=dtype)))

    def forward(self) -> Tensor:
        return sum((param.sin().sum() for param in self.parameters()), torch.zeros(()))


def matrices_of(name: str, whole: Tensor) -> list[Tensor]:
    if whole.dim() == 3:
        return list(whole)
    return list(whole.split(BLOCKS.get(name, len(whole))))


class Oracle:
    """Plain training on one process."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.Muon, **bag: Any) -> None:
        self.bag = Bag(**bag)
        self.parts = {
            name: [nn.Parameter(each.clone()) for each in matrices_of(name, param.detach())]
            for name, param in self.bag.named_parameters()
        }
        self.optimizer = make([part for parts in self.parts.values() for part in parts], **OPTIONS)

    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, parts in self.parts.items():
            for i, part in enumerate(parts):
                part.grad = matrices_of(name, grads[name])[i].clone() if name in grads else None
        self.optimizer.step()

    def values(self, of: Callable[[Tensor], Tensor] = lambda part: part) -> dict[str, Tensor]:
        join = {name: torch.stack if SHAPES[name][2:] else torch.cat for name in self.parts}
        return {name: join[name]([of(part).detach() for part in parts]) for name, parts in self.parts.items()}

    def buffers(self) -> dict[str, Tensor]:
        return self.values(lambda part: self.optimizer.state[part]["momentum_buffer"])


def grads_of(step: int, dtype: torch.dtype = torch.float32, names: Sequence[str] = tuple(SHAPES)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}


def set_grad(param: Tensor, grad: Tensor | None) -> None:
    if grad is None or not isinstance(param, DTensor):
        param.grad = grad
        return
    param.grad = torch.zeros_like(param)
    local_of(param.grad).copy_(own_part(grad, param))


def param_groups(bag: Bag) -> list[dict[str, Any]]:
    plain = [param for name, param in bag.named_parameters() if name not in BLOCKS]
    return [{"params": plain}] + [{"params": [getattr(bag, name)], "blocks": each} for name, each in BLOCKS.items()]


def step(bag: Bag, optimizer: torch.optim.Optimizer, grads: Mapping[str, Tensor | None]) -> None:
    for name, param in bag.named_parameters():
        set_grad(param, grads.get(name))
    optimizer.step()
    optimizer.zero_grad()


def compare(bag: Bag, optimizer: torch.optim.Optimizer, oracle: Oracle, rtol: float = 0.0, atol: float = 0.0) -> None:
    values, buffers = oracle.values(), oracle.buffers()
    for name, param in bag.named_parameters():
        assert_same(param, values[name], rtol, atol, name)
        assert_same(optimizer.state[param]["momentum_buffer"], buffers[name], rtol, atol, f"momentum of {name}")


# ---- parity

Shard_ = Callable[[Bag], Any]


def along(dim: int) -> Callable[[nn.Parameter], Shard]:
    return lambda param: Shard(dim % param.dim())


def by_torch(bag: Bag) -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    torch_fully_shard(bag)


def two_by_two(bag: Bag) -> None:
    fully_shard(bag, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2)))


WAYS: dict[str, Shard_] = {
    "plain": lambda bag: None,
    "rows": fully_shard,
    "last dim": lambda bag: fully_shard(bag, shard_placement_fn=along(-1)),
    "last dim but one": lambda bag: fully_shard(bag, shard_placement_fn=along(-2)),
    "replicated": fsdp2.replicate,
    "offloaded": lambda bag: fully_shard(bag, offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False)),
    "torch": by_torch,
    "replicas of shards": two_by_two,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "many buckets": {"bucket_bytes": 1},
}


def check_parity(way: str, settings: dict[str, Any], steps: int) -> None:
    bag, oracle = Bag(), Oracle()
    WAYS[way](bag)
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS, **settings)
    for i in range(steps):
        step(bag, optimizer, grads_of(i))
        oracle.step(grads_of(i))
    compare(bag, optimizer, oracle)


@pytest.mark.parametrize("ranks", world_sizes(3, 4, nightly=(1, 2)))
def test_bits_of_one_process(ranks: int) -> None:
    """In every way to shard, on the way that most use over 10 steps."""
    ways = [way for way in WAYS if way != "replicas of shards" or ranks == 4]
    checks = [(f"rows, {name}", lambda s=s: check_parity("rows", s, 10)) for name, s in SETTINGS.items()]
    checks += [(way, lambda way=way: check_parity(way, {}, 3)) for way in ways]
    checks += [("last dim, many buckets", lambda: check_parity("last dim", {"bucket_bytes": 1}, 3))]
    run_checks(ranks, checks)


# ---- other cases, on three ranks


def check_options() -> None:
    options = {"nesterov": False, "momentum": 0.8, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw", "eps": 1e-3}
    oracle = Oracle(lambda params, **others: torch.optim.Muon(params, **options, **others))
    bag = fully_shard(Bag())
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, oracle.optimizer)]
    for i in range(3):
        step(bag, optimizer, grads_of(i))
        oracle.step(grads_of(i))
        for schedule in schedules:
            schedule.step()
    compare(bag, optimizer, oracle)


def check_bf16() -> None:
    """torch's kernel rounds elements at the end of a shard otherwise: by one place at most."""
    bag, oracle = fully_shard(Bag(torch.bfloat16)), Oracle(dtype=torch.bfloat16)
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS)
    step(bag, optimizer, grads_of(0, torch.bfloat16))
    oracle.step(grads_of(0, torch.bfloat16))
    compare(bag, optimizer, oracle, rtol=2**-7, atol=2**-9)


def check_missing_gradients() -> None:
    """On all ranks: does not move. On some ranks: theirs are zeros. Owners are the same on all ranks all the while."""
    bag, oracle, rank = fully_shard(Bag()), Oracle(), dist.get_rank()
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS)
    for i in range(4):
        grads: dict[str, Any] = grads_of(i)
        own, expected = dict(grads), dict(grads)
        if i != 1:  # first, too: no state yet
            del own["tall"], expected["tall"]
        if i == 2:
            del own["fused"], own["few"], own["row"], own["wide"], own["alike"], own["stack"]
            expected.clear()
        if i == 3:
            for name in ("wide", "fused"):
                expected[name] = grads[name].clone()
                own_part(expected[name], getattr(bag, name)).zero_() if rank == 1 else None
                rows = -(-len(grads[name]) // 3)
                expected[name][rows : 2 * rows] = 0
                if rank == 1:
                    del own[name]
        step(bag, optimizer, own)
        oracle.step(expected)
        if i == 0:
            assert not local_of(optimizer.state[bag.tall]["momentum_buffer"]).any()
    compare(bag, optimizer, oracle)


def check_frozen() -> None:
    bag, oracle = fully_shard(Bag()), Oracle()
    bag.wide.requires_grad_(False)
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS)
    without = {name: grad for name, grad in grads_of(0).items() if name != "wide"}
    step(bag, optimizer, without)
    oracle.step(without)
    assert bag.wide not in optimizer.state
    bag.wide.requires_grad_(True)
    step(bag, optimizer, grads_of(1))
    oracle.step(grads_of(1))
    compare(bag, optimizer, oracle)


def check_no_rate() -> None:
    """As while torch.distributed.checkpoint makes states: nothing travels, whatever the function makes of zeros."""
    bag = fully_shard(Bag())
    optimizer = fsdp2.WholeMatrixOptimizer(param_groups(bag), lambda m, group: m / 0, lr=0.0)
    step(bag, optimizer, grads_of(0))
    for name, value in Bag().named_parameters():
        assert_same(getattr(bag, name), value, 0, 0, name)
    assert local_of(optimizer.state[bag.wide]["momentum_buffer"]).any() or not local_of(bag.wide).numel()


def check_batches() -> None:
    """Products of batches may add up in another order. In fp32, in which that is little."""

    def update(matrices: Tensor, group: dict[str, Any]) -> Tensor:
        seen.append(len(matrices))
        x = matrices / matrices.flatten(1).norm(dim=1)[:, None, None]
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return x

    bags, seen = [Bag(), Bag()], []
    for bag, batched in zip(bags, (True, False), strict=True):
        fully_shard(bag)
        optimizer = fsdp2.WholeMatrixOptimizer(param_groups(bag), update, batched=batched, **OPTIONS)
        for i in range(5):
            step(bag, optimizer, grads_of(i))
        assert (max(seen, default=1) == 1) == (not batched) or dist.get_rank() != 0
        seen.clear()
    for name, param in bags[0].named_parameters():
        torch.testing.assert_close(local_of(param), local_of(bags[1].get_parameter(name)), rtol=1e-6, atol=1e-6)


def check_batches_of_muon() -> None:
    bag, oracle = fully_shard(Bag()), Oracle()
    optimizer = fsdp2.muon(param_groups(bag), **OPTIONS, batched=True)
    step(bag, optimizer, grads_of(0))
    oracle.step(grads_of(0))
    compare(bag, optimizer, oracle, atol=2 * OPTIONS["lr"] * 2**-6)  # values near 1 in bf16, and sqrt(rows / columns)


def check_own_function() -> None:
    """In the dtype of the parameter; batches of whatever matrices are alike."""
    scaled: Any = lambda m, group: m / m.flatten(1).norm(dim=1)[:, None, None] * group["scale"]  # noqa: E731
    bag, seen = fully_shard(Bag()), []

    def update(matrices: Tensor, group: dict[str, Any]) -> Tensor:
        seen.append(tuple(matrices.shape))
        return scaled(matrices, group)

    rate: Any = lambda group, rows, cols: group["lr"] * rows  # noqa: E731
    optimizer = fsdp2.WholeMatrixOptimizer(
        param_groups(bag), update, lr=0.1, weight_decay=0.0, momentum=0.0, learning_rate=rate, scale=2.0
    )
    step(bag, optimizer, grads_of(0))
    for name, param in Bag().named_parameters():
        for part, grad in zip(matrices_of(name, param.detach()), matrices_of(name, grads_of(0)[name]), strict=True):
            part.add_(scaled(grad[None], {"scale": 2.0})[0], alpha=-0.1 * len(part))
        assert_same(getattr(bag, name), param.detach(), 1e-6, 1e-6, name)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, seen)
    shapes = [shape for shapes in of_all for shape in shapes]
    assert sum(number for number, *_ in shapes) == sum(len(matrices_of(n, p)) for n, p in Bag().named_parameters())


def check_closure_clipping_and_added_groups() -> None:
    bag, oracle = fully_shard(Bag()), Oracle()
    optimizer = fsdp2.muon([{"params": [bag.tall]}], **OPTIONS)
    for group in param_groups(bag):
        optimizer.add_param_group({**group, "params": [each for each in group["params"] if each is not bag.tall]})

    def closure() -> Tensor:
        for name, param in bag.named_parameters():
            set_grad(param, grads_of(0)[name])
        return torch.tensor(3.0)

    assert optimizer.step(closure).item() == 3.0
    oracle.step(grads_of(0))
    compare(bag, optimizer, oracle)
    with pytest.raises(ValueError, match="parameter 0 of param group 3: expected a matrix, or a stack"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def check_training() -> None:
    """Through autograd, beside another optimizer for the rest, and with each state dict loaded by the other."""
    bag, plain = fully_shard(Bag()), Bag()
    optimizer, oracle = fsdp2.muon(bag.parameters(), **OPTIONS), fsdp2.muon(plain.parameters(), **OPTIONS)
    for _ in range(3):
        for model, each in ((bag, optimizer), (plain, oracle)):
            model().backward()
            each.step()
            each.zero_grad()
    for name, param in bag.named_parameters():
        assert_same(param, plain.get_parameter(name), 1e-2, 1e-2, name)
    copied = copy.deepcopy(oracle)
    assert copied.update is oracle.update
    assert copied.bucket_bytes == oracle.bucket_bytes
    assert pickle.loads(pickle.dumps(oracle)).param_groups[0]["ns_steps"] == 5
    two = Bag(names=("tall", "wide"))
    muon = torch.optim.Muon(two.parameters(), **OPTIONS)
    step(two, muon, grads_of(0))
    again = fsdp2.muon(two.parameters())
    again.load_state_dict(muon.state_dict())
    assert again.param_groups[0]["lr"] == OPTIONS["lr"]
    assert again.state[two.tall]["momentum_buffer"].any()


def check_errors() -> None:
    rank = dist.get_rank()
    bag = fully_shard(Bag())
    optimizer = fsdp2.muon([bag.wide, bag.tall] if rank == 1 else [bag.wide, bag.few], **OPTIONS)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 have other parameters, .*few: .* and None; tall: None and"):
        step(bag, optimizer, grads_of(0))
    bag.zero_grad()
    in_backward = fsdp2.muon(bag.parameters(), **OPTIONS)
    bag.set_optimizer_in_backward(in_backward)
    with pytest.raises(RuntimeError, match=r"can't run in backward .* Call set_optimizer_in_backward\(None\)"):
        bag().backward()
    wrong = fsdp2.WholeMatrixOptimizer([Bag().tall], lambda m, group: m[0])
    wrong.param_groups[0]["params"][0].grad = torch.ones(13, 5)
    with pytest.raises(ValueError, match=r"update: expected a tensor of shape \(1, 13, 5\), got"):
        wrong.step()


def check_tied() -> None:
    """A tied matrix moves once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    fully_shard(model)
    optimizer = fsdp2.muon(model.parameters(), lr=0.1, weight_decay=0.0)
    grad = torch.eye(6)
    set_grad(model[0].weight, grad)
    optimizer.step()
    plain = nn.Parameter(before)
    plain.grad = grad
    torch.optim.Muon([plain], lr=0.1, weight_decay=0.0).step()
    assert_same(model[1].weight, plain.detach(), 0, 0, "tied")


CASES = [
    check_options,
    check_bf16,
    check_missing_gradients,
    check_frozen,
    check_no_rate,
    check_batches,
    check_batches_of_muon,
    check_own_function,
    check_closure_clipping_and_added_groups,
    check_training,
    check_tied,
    check_errors,
]


def test_cases() -> None:
    run_checks(3, [(case.__name__, case) for case in CASES])


def test_offloaded_matrices_are_updated_on_the_device() -> None:
    def check() -> None:
        bag, oracle, devices = Bag().to(fake_gpu.KIND), Oracle(), set()
        fully_shard(bag, offload_policy=fsdp2.CPUOffloadPolicy())
        optimizer = fsdp2.muon(param_groups(bag), **OPTIONS)
        update = optimizer.update
        optimizer.update = lambda m, group: (devices.add(m.device.type), update(m, group))[1]
        step(bag, optimizer, grads_of(0))
        oracle.step(grads_of(0))
        assert {param.device.type for param in bag.parameters()} == {"cpu"}
        assert devices == {fake_gpu.KIND}
        compare(bag, optimizer, oracle)

    run_checks(2, [("offload", check)], device=fake_gpu.KIND)


def test_parameters_on_several_meshes() -> None:
    """Experts of each two ranks, which they shard between them, inside a model that all four shard."""

    def body(rank: int, _: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
        mine = mesh.get_local_rank("expert")
        model, oracle = Bag(names=("tall", "wide")), Oracle()
        model.experts, experts = Bag(names=("stack", "few")), Oracle(names=("stack", "few"))
        fully_shard(model.experts, mesh=mesh["data"])
        fully_shard(model)
        optimizer = fsdp2.muon(model.parameters(), **OPTIONS, bucket_bytes=1)
        for i in range(3):
            grads, of_experts = grads_of(i), grads_of(10 * mine + i)
            for name, param in model.named_parameters():
                set_grad(param, of_experts[name[8:]] if name.startswith("experts.") else grads[name])
            optimizer.step()
            oracle.step(grads)
            experts.step(of_experts)
        for name, param in model.named_parameters():
            expected = experts.values()[name[8:]] if name.startswith("experts.") else oracle.values()[name]
            assert_same(param, expected, 0, 0, name)
        both, plain = Bag(names=("tall", "fused")), Oracle(names=("tall", "fused"))
        fully_shard(both, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("expert", "data")))
        optimizer = fsdp2.muon(param_groups(both), **OPTIONS)
        both().backward()
        optimizer.step()
        plain.bag().backward()
        plain.step({name: param.grad for name, param in plain.bag.named_parameters()})
        for name, param in both.named_parameters():
            assert_same(full(param), plain.values()[name], 0, 0, f"{name}, sharded by two axes")

    run_ranks(4, body)


def test_tensor_parallel_matrices_are_refused_and_others_beside_them_are_not() -> None:
    def body(rank: int, _: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        parallelize_module(model, mesh["model"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        with pytest.raises(NotImplementedError, match=r"0\.weight: expected a matrix that data-parallel ranks alone"):
            fsdp2.muon(model.parameters())
        plain = nn.Parameter(model[1].weight.detach().full_tensor())
        optimizer, oracle = fsdp2.muon([model[1].weight]), torch.optim.Muon([plain])
        plain.grad = torch.arange(24.0).view(4, 6)
        set_grad(model[1].weight, plain.grad)
        optimizer.step()
        oracle.step()
        assert_same(model[1].weight, plain.detach(), 0, 0, "beside it")

    run_ranks(4, body)


# ---- checkpoints


def test_states_are_saved_and_loaded_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    def sharded() -> tuple[Bag, fsdp2.WholeMatrixOptimizer]:
        bag = fully_shard(Bag())
        return bag, fsdp2.muon(param_groups(bag), **OPTIONS)

    def save(rank: int, world_size: int) -> None:
        bag, optimizer = sharded()
        for i in range(2):
            step(bag, optimizer, grads_of(i))
        model, states = get_state_dict(bag, optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=tmp_path / "saved")
        full = get_optimizer_state_dict(bag, optimizer, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(full, tmp_path / "full.pt")

    def load(rank: int, world_size: int) -> None:
        oracle = Oracle()
        for i in range(3):
            oracle.step(grads_of(i))
        for is_full in (False, True):
            bag, optimizer = sharded()
            model, states = get_state_dict(bag, optimizer)
            state = {"model": model, "optimizer": states}
            dcp.load(state, checkpoint_id=tmp_path / "saved")
            set_state_dict(bag, optimizer, model_state_dict=model, optim_state_dict=states)
            if is_full:
                optimizer = fsdp2.muon(param_groups(bag), lr=0.5)
                options = StateDictOptions(full_state_dict=True)
                set_optimizer_state_dict(bag, optimizer, torch.load(tmp_path / "full.pt"), options=options)
            assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
            assert [*optimizer.param_groups[1]["blocks"]] == [6, 3, 3]
            step(bag, optimizer, grads_of(2))
            compare(bag, optimizer, oracle)

    run_ranks(2, save)
    for ranks in (1, 3):
        run_ranks(ranks, load)
