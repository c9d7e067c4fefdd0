"""Tests deepcopy and pickle of sharded models: a copy has its own shards and the same settings, and trains the same."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import FSDPModule, MixedPrecisionPolicy, ShardPlacementResult, fully_shard, register_fsdp_forward_method
from fsdp2.engine.state import groups_below, groups_of, require_state
from helpers import assert_same, full, run_checks, world_sizes
from models import TinyGPT, TinyModel, mean_loss
from scenarios import train_beside


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


def trains(way: Callable[[Any], Any], **options: Any) -> None:
    """Copied after a step; the copy trains on as plain training does, and the original does not notice."""
    plain = TinyGPT(tied=True)
    model: Any = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    train_beside(model, plain, lambda seed: plain.example(rows=12, seed=seed))
    before = {name: full(param).clone() for name, param in model.named_parameters()}
    twin = way(model)
    assert [type(each).__name__ for each in twin.modules()] == [type(each).__name__ for each in model.modules()]
    assert [name for name, _ in twin.named_parameters()] == list(before)
    train_beside(twin, plain, lambda seed: plain.example(rows=12, seed=10 + seed))
    for name, param in model.named_parameters():
        assert_same(param, before[name], 0, 0, f"{name} of the original")


def gradients_alone(way: Callable[[Any], Any]) -> None:
    """They are reduced together, into one memory, of which a copy has no more than its own."""
    model = fully_shard(TinyGPT())
    mean_loss(model(model.example(rows=2, seed=dist.get_rank()))).backward()
    for name, param in model.named_parameters():
        gradient, twin = param.grad, way(param.grad)
        assert (twin.placements, twin.requires_grad) == (gradient.placements, False)
        assert_same(twin, gradient, 0, 0, name)
        assert twin.to_local().untyped_storage().nbytes() == twin.to_local().nbytes, name
        twin.zero_()
        assert not twin.to_local().numel() or gradient.to_local().any(), name
    first, second = way([model.head.weight.grad] * 2)
    assert first is second
    assert_same(way(model.head.weight).grad, model.head.weight.grad if way is copy.deepcopy else None, 0, 0, "a leaf's")


class Pair(TinyModel):
    """Two layers that share one group, in two parents, and one with a parameter on a mesh of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.right(self.left(x)))

    def score(self, x: Tensor) -> Tensor:
        return self(x).sum(-1)

    def batch(self, seed: int) -> Tensor:
        return torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))


def sharded_pair(plain: Pair) -> Any:
    model: Any = copy.deepcopy(plain)
    own = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard([model.left[0], model.right[0]])
    fully_shard(model, shard_placement_fn=lambda p: ShardPlacementResult(Shard(1), own) if p.dim() == 2 else None)
    register_fsdp_forward_method(model, "score")
    return model


def shared_groups(way: Callable[[Any], Any]) -> None:
    plain = Pair()
    twin = way(sharded_pair(plain))
    assert twin.left[0]._get_fsdp_state() is twin.right[0]._get_fsdp_state()
    assert twin.score.args[0] is twin
    assert_same(twin.score(plain.batch(0)), plain.score(plain.batch(0)), 1e-6, 1e-6, "another entry point")
    train_beside(twin, plain, plain.batch)


def settings_stay(way: Callable[[Any], Any]) -> None:
    model: Any = TinyGPT()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=dist.get_world_size() // 2 or 1)
    fully_shard(model)
    first, second = model.blocks[0], model.blocks[1]
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    first.set_gradient_divide_factor(3.0)
    second.set_requires_gradient_sync(False)
    second.set_reshard_after_backward(False)
    second.set_keep_unsharded_storage(True)
    model.set_manual_backward_finalization(True)
    model.set_unsharded_budget(1000)
    twin = way(model)
    old, new = ([describe(group) for group in groups_below(each)] for each in (model, twin))
    assert new == old
    first, second = (groups_of(block)[0] for block in twin.blocks)
    assert first.settings.forward_prefetch == (second,)
    assert second.settings.backward_prefetch == (first,)
    root = require_state(twin).root
    assert not root.settings.finalize_backward
    assert root.prefetcher.settings.unsharded_budget == 1000


def describe(group: Any) -> dict[str, Any]:
    """Everything that a user has chosen for one group."""
    settings, reduction = dict(vars(group.settings)), group.gradients.reduction
    for name in ("forward_prefetch", "backward_prefetch"):
        settings[name] = settings[name] and [each.name for each in settings[name]]
    return {
        **settings,
        "input_dtype": group.state.input_dtype,
        "restored by": group.comms.secondary and group.comms.secondary.size,
        "storage": group.unsharded.keeps_storage,
        "reduction": (reduction.divisor, reduction.all_reduce, reduction.hook),
        "name": group.name,
    }


def part_of_a_model() -> None:
    """A block alone: its copy is a root of its own, the rest of the model is not copied."""
    model: Any = TinyGPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    twin = copy.deepcopy(model.blocks[0])
    assert isinstance(twin, FSDPModule)
    x = torch.randn(2, 3, 6)
    assert_same(twin(x), model.blocks[0](x), 0, 0, "output")
    assert require_state(twin).root.state is require_state(twin)


def unsharded_before() -> None:
    """Between unshard and reshard, sharded parameters are what is copied."""
    model: Any = fully_shard(nn.Linear(6, 4))
    model.unshard()
    twin = copy.deepcopy(model)
    assert [param.placements for param in twin.parameters()] == [(Shard(0),)] * 2
    x = torch.randn(3, 6)
    assert_same(twin(x), model(x), 0, 0, "output")


def not_inside_a_pass() -> None:
    class CopiesItself(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            copy.deepcopy(self)
            return super().forward(x)

    model = fully_shard(CopiesItself(4, 4))
    with pytest.raises(RuntimeError, match="can't be copied or pickled while a forward"):
        model(torch.randn(2, 4))


def not_with_gradients_that_wait() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_requires_gradient_sync(False)
    mean_loss(model(torch.randn(2, 4))).backward()
    with pytest.raises(RuntimeError, match="not synchronised between ranks yet"):
        copy.deepcopy(model)


def hidden_state_is_not_shared() -> None:
    """Writing to a copy's shards leaves the original's as they are; gradients are not copied, as plain ones aren't."""
    model: Any = fully_shard(nn.Linear(6, 4))
    mean_loss(model(torch.randn(3, 6))).backward()
    twin = copy.deepcopy(model)
    assert twin.weight.grad is None
    assert model.weight.grad is not None
    with torch.no_grad():
        twin.weight.zero_()
    assert full(model.weight).abs().sum() > 0
    assert full(twin.weight).abs().sum() == 0


def a_class_that_copies_itself() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            return Own(4, 4)

    with pytest.raises(NotImplementedError, match="Own has a __deepcopy__ of its own"):
        copy.deepcopy(fully_shard(Own(4, 4)))


CHECKS = [
    *((f"trains, {name}", partial(trains, way)) for name, way in WAYS.items()),
    ("trains, mixed precision", partial(trains, copy.deepcopy, mp_policy=MixedPrecisionPolicy(torch.float64))),
    *((f"shared groups, {name}", partial(shared_groups, way)) for name, way in WAYS.items()),
    *((f"settings, {name}", partial(settings_stay, way)) for name, way in WAYS.items()),
    *((f"gradients, {name}", partial(gradients_alone, way)) for name, way in WAYS.items()),
    ("a part", part_of_a_model),
    ("own way to copy", a_class_that_copies_itself),
    ("unsharded before", unsharded_before),
    ("inside a pass", not_inside_a_pass),
    ("gradients that wait", not_with_gradients_that_wait),
    ("not shared", hidden_state_is_not_shared),
]


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[1]))
def test_copies(world_size: int) -> None:
    run_checks(world_size, CHECKS)


def test_copies_of_replicas() -> None:
    def mesh() -> Any:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    run_checks(4, [("HSDP", lambda: trains(pickled, mesh=mesh())), ("settings", partial(settings_stay, copy.deepcopy))])
