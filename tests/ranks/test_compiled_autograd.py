"""Tests that a backward under compiled autograd raises on all ranks, and that what follows trains exactly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from helpers import NIGHTLY, assert_same, run_checks

pytestmark = [
    pytest.mark.timeout(300),
    # dynamo looks for a gradient of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
WITH_CONFIG: Any = torch._dynamo.config.patch


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.checkpointed = nn.Linear(5, 7), nn.Linear(7, 3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        return self.second(torch.tanh(x))


def compiler() -> Any:
    return lambda graph: graph


def batch(seed: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def rows(seed: int) -> Tensor:
    return batch(seed).chunk(2)[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def whole_step_compiled(model: nn.Module) -> None:
    with WITH_CONFIG(compiled_autograd=True):
        torch.compile(lambda x: loss_of(model, x).backward(), backend="eager")(rows(0))


def around_backward(model: nn.Module) -> None:
    loss = loss_of(model, rows(0))
    with compiled_autograd._enable(compiler()):
        loss.backward()


def around_forward_too(model: nn.Module) -> None:
    with compiled_autograd._enable(compiler()):
        loss_of(model, rows(0)).backward()


def accumulating(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    try:
        around_backward(model)
    finally:
        model.set_requires_gradient_sync(True)


def blocks(model: Any) -> Any:
    fully_shard(model.first)
    return fully_shard(model)


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None], dict[str, Any]]] = {
    "a whole step": (fully_shard, whole_step_compiled, {}),
    "around backward": (blocks, around_backward, {}),
    "replicas": (replicate, around_backward, {}),
    "checkpointing": (blocks, around_backward, {"checkpointed": True}),
}
if NIGHTLY:
    policy = MixedPrecisionPolicy(torch.float32, output_dtype=torch.float32)
    WAYS["mixed precision"] = (lambda model: fully_shard(model, mp_policy=policy), around_backward, {})
    WAYS["around forward, too"] = (blocks, around_forward_too, {})
    WAYS["accumulation"] = (blocks, accumulating, {})


def refused(shard: Callable[[Any], Any], run: Callable[[Any], None], options: dict[str, Any]) -> None:
    plain = Net(**options)
    model = copy.deepcopy(plain)
    shard(model)
    with pytest.raises(NotImplementedError, match=r"compiled autograd runs this backward.*torch\.compile\(model\)"):
        run(model)
    # As the error advises: the model alone is compiled, and backward is called outside of it.
    compiled = torch.compile(model, backend="eager") if run is whole_step_compiled else model
    with WITH_CONFIG(compiled_autograd=True):
        for step in range(2):
            loss_of(compiled, rows(step)).backward()  # type: ignore[arg-type]
    for step in range(2):
        loss_of(plain, batch(step)).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(one.grad, other.grad, 1e-5, 1e-6, name)


def a_plain_model_beside() -> None:
    """It trains under compiled autograd while a sharded one is there."""
    sharded, plain, other = fully_shard(Net()), Net(), Net()
    loss_of(sharded, rows(0)).backward()
    loss = loss_of(plain, rows(0))
    with compiled_autograd._enable(compiler()):
        loss.backward()
    loss_of(other, rows(0)).backward()
    for (name, one), another in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert_same(one.grad, another.grad, 1e-5, 1e-6, name)


def test_compiled_autograd_is_refused_in_backward() -> None:
    checks = [(name, lambda way=way: refused(*way)) for name, way in WAYS.items()]
    run_checks(2, [*checks, ("a plain model beside", a_plain_model_beside)], timeout=200)
